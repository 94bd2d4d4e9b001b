"""The storm: hostile clients against a `hibachi serve`, beside innocent ones that must notice nothing.

The server is a process, its engine another. Hostile clients of one tenant send random bodies, bytes that are no
request, floods, and leave as they like; now and then the engine is killed or stopped. Innocent requests of another
tenant run beside them: what they get must equal their answers from before. Every answer is well formed, none is a fault
of ours, /health answers at any time, and in the pauses nothing is held.

    python -m tests.adversary.serve.storm --seed 7 --seconds 60

The same seed gives each client the same requests in the same order; when they come is up to the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from hibachi.engine.guide.checks import WORKER
from hibachi.llm.dialects.messages.bodies import CountBody, MessagesBody
from hibachi.llm.dialects.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, TokenizeBody
from hibachi.llm.dialects.responses.bodies import ResponsesBody

from ...lib.wire import Wire, request
from ...serve.conftest import CHATML
from ...serve.test_run import Process
from ..watch import MALLOC

ROWS, QUEUED, ARRIVAL, DRAIN = 8, 24, 2.0, 3.0
BLAST = 60.0  # seconds of storm, at most, before a pause in which nothing may be held
AGAIN, SLOW, SLACK, HEALTH = 60.0, 30.0, 3.0, 3.0  # seconds: a new engine; an innocent answer; what is late; /health
KEPT, POOLED = 60 << 20, 7 + (os.cpu_count() or 1)  # bytes and threads more than in an early pause, at most
TENANTS = '[innocent]\nkey = "key-of-innocent"\n[hostile]\nkey = "key-of-hostile"\nmax_requests = 30\n'
INNOCENT, HOSTILE = (b"Authorization: Bearer key-of-%s" % name for name in (b"innocent", b"hostile"))
JSON = b"Content-Type: application/json"
KILLED = re.compile(r"The engine's process \(pid \d+\) ended by signal 9, and its requests are lost\..*")
LOST = ("internal_error", "model_fault", "out_of_memory", "engine_failed")


def post(path, body, *lines):
    return request("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), JSON, *lines)


# ---- what is sent ----------------------------------------------------------------------------------------------------

TURN, CHAT = {"role": "user", "content": "Who was Emma?"}, "/v1/chat/completions"
ROUTES = {  # what reads it, and a body that is right
    "/v1/completions": (CompletionBody, {"prompt": "She was", "max_tokens": 8}),
    CHAT: (ChatBody, {"messages": [TURN], "max_tokens": 8}),
    "/v1/responses": (ResponsesBody, {"input": "Who was Emma?", "max_output_tokens": 8}),
    "/v1/messages": (MessagesBody, {"model": "tiny", "messages": [TURN], "max_tokens": 8}),
    "/v1/messages/count_tokens": (CountBody, {"model": "tiny", "messages": [TURN]}),
    "/v1/embeddings": (EmbeddingBody, {"input": "She was"}),
    "/tokenize": (TokenizeBody, {"prompt": "She was"}),
    "/detokenize": (DetokenizeBody, {"tokens": [1, 2, 3]}),
}
FIELDS = {path: [f.encode_name for f in msgspec.structs.fields(kind)] for path, (kind, _) in ROUTES.items()}
SPELLED = ("NaN", "1e999", "9" * 5000, "01", "nul", "[" * 90_000 + "]" * 90_000, '{"a":' * 900 + "1" + "}" * 900)
ODD = (
    *(None, True, 0, -1, 1, 0.5, 2**31, -(2**63), 2**64, 1e308, 5e-324, "", "a", "\0", "\ud800", "a" * 5000, "</s>"),
    *([], [[]], [None], ["a", 1], [0] * 5000, [2**63], [[[[1]]]], {}, {"": {}}, {"type": "text"}, {"\ud800": None}),
)
AT = {"type": "object", "properties": {"at": {"type": "string", "maxLength": 8}}, "required": ["at"]}
SCHEMAS = (
    AT,
    {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"type": "object", "properties": {"a": {"enum": [f"value {i}" for i in range(3000)]}}},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"}}},
    {"type": "object", "required": [f"p{i}" for i in range(2000)]},
    {"type": "array"},
)
UNUSUAL = {  # right, or nearly so
    "prompt": ("It is a truth " * 40, [1, 2, 3], ["a", "b"], [[1], [2, 3]], ["a", [1]], [511] * 511, ["a"] * 40),
    "input": ([TURN], [TURN] * 5000, ["a"] * 33, [{"type": "item_reference", "id": "msg_abcdefgh_0_0"}]),
    "messages": ([TURN] * 20, [TURN] * 5000, [{"role": "x"}], [TURN | {"content": [{"type": "image_url"}]}]),
    "n": (2, 5, 30, 31, 33, 129),
    "best_of": (2, 8, 129),
    "logprobs": (0, 5, 20, 21, True),
    "prompt_logprobs": (0, 20, 21),
    "stop": (["a", "e"], [""], ["a"] * 17, [" "] * 16),
    "logit_bias": ({"5": 100}, {"100000": 1}, {str(i): 1 for i in range(300)}, {"a": 1}),
    "allowed_token_ids": ([5, 6, 7], [], [10**6], list(range(4097))),
    "bad_words": (["the", " of"], [""], ["a" * 2000]),
    "timeout": (0.05, 1, 1e308),
    "stream": (True,) * 3,
    "response_format": ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "a", "schema": AT}}),
    "structured_outputs": ({"regex": "[a-z]{1,5}"}, {"json": {}, "regex": "a"}, {"choice": ["a"] * 40_000}),
    "guided_json": ({"type": "integer"}, "{}", {"$ref": "#"}, {"anyOf": [{}] * 9999}),
    "guided_regex": ("[a-z]{3}", "(", "(?=a)", "(a*)*b" * 20, "a{100000}"),
    "guided_grammar": ("start: /a+/", 'root ::= "a" root', "start: start", "(" * 9999),
    "prediction": tuple({"type": "content", "content": text} for text in ("She was", "", "a" * 9000, None)),
}


def tools(path, schema):
    function = {"name": "look", "parameters": schema}
    kinds = {CHAT: {"type": "function", "function": function}, "/v1/responses": {"type": "function", **function}}
    return [kinds.get(path, {"name": "look", "input_schema": schema})]


def drawn(rng):
    """A random body, for a route: fields with values that are right, unusual, and wrong in any way; or none."""
    path = rng.choices(list(ROUTES), (6, 4, 4, 4, 1, 2, 1, 1))[0]
    fields = dict(ROUTES[path][1])
    for name in rng.sample(FIELDS[path], rng.randrange(5) % len(FIELDS[path])):
        some = UNUSUAL.get(name, (True, False, None, 1, 5, 0.1, -2, "a"))
        fields[name] = tools(path, rng.choice(SCHEMAS)) if name == "tools" else rng.choice(some)
    for name in rng.sample([*FIELDS[path], "unknown"], rng.randrange(2)):
        fields[name] = rng.choice(ODD)
    data = json.dumps(fields)
    if rng.random() < 0.1:
        data = f'{data[:-1]}, "{rng.choice(FIELDS[path])}": {rng.choice(SPELLED)}}}'
    data, luck = data.encode(), rng.random()
    if luck < 0.1:
        at = rng.randrange(len(data))
        data = rng.choice((data[:at], data + b"}", data[:at] + rng.randbytes(3) + data[at:], rng.randbytes(1000)))
    elif luck < 0.15:  # long
        text = rng.choice(("a ", "漢", "z9#")) * rng.choice((5_000, 300_000, 700_000))
        path, data = rng.choice(
            (
                ("/v1/completions", {"prompt": text}),
                ("/v1/embeddings", {"input": [text[:3000]] * 40}),
                ("/tokenize", {"prompt": text, "return_token_strs": True}),
                ("/detokenize", {"tokens": [5] * (len(text) // 4)}),
                (CHAT, {"messages": [TURN | {"content": text}], "metadata": [[]] * (len(text) // 2)}),
            )
        )
        data = json.dumps(data).encode()
    return path, data


PROMPT = b'{"prompt": "She was", "max_tokens": 2}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + HOSTILE + b"\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
# What is sent at once, and how it may be answered; 0: the connection is closed without a word.
AT_ONCE = {
    "garbage": (lambda r: r.randbytes(r.choice((1, 20, 200_000))), (0, 400, 431)),
    "a handshake of TLS": (lambda r: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + r.randbytes(400), (0, 400)),
    "a large header": (lambda r: HEAD + b"X: " + b"a" * 100_000 + b"\r\n\r\n", (431,)),
    "many headers": (lambda r: request("GET", "/health", None, *(b"X-%d: 1" % i for i in range(1000))), (431,)),
    "a long path": (lambda r: request("GET", "/" + "a" * r.choice((1000, 70_000))), (400, 404, 431)),
    "two hosts": (lambda r: HEAD + b"Host: y\r\nContent-Length: 2\r\n\r\n{}", (400,)),
    "no host": (lambda r: b"GET /health HTTP/1.1\r\n\r\n", (400,)),
    "two lengths": (lambda r: HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", (0, 400)),
    "a huge length": (lambda r: HEAD + b"Content-Length: %s\r\n\r\n" % (b"9" * r.choice((9, 18, 400))), (0, 400, 413)),
    "both lengths": (lambda r: CHUNKED[:-2] + b"Content-Length: 5\r\n\r\n0\r\n\r\n", (0, 400)),
    "bad chunks": (lambda r: CHUNKED + r.choice((b"zz", b"-1", b"2\r\n{}XX", b"f" * 40)) + b"\r\n", (0, 400, 413)),
    "another protocol": (lambda r: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (0, 400, 404, 405, 505)),
    "an upgrade": (lambda r: request("GET", "/health", None, b"Connection: Upgrade", b"Upgrade: x"), (200, 400, 426)),
    "two keys": (lambda r: HEAD + b"Authorization: Bearer x\r\nContent-Length: 2\r\n\r\n{}", (400,)),
    "no key": (lambda r: post("/v1/completions", PROMPT), (401,)),
    "a wrong one": (lambda r: post("/v1/messages", PROMPT, b"Authorization: Bearer x"), (401,)),
    "what is nowhere": (lambda r: request("GET", "/nowhere", None, HOSTILE), (404,)),
    "another method": (lambda r: request(r.choice(("DELETE", "FROB")), "/v1/models", None, HOSTILE), (0, 400, 405)),
}
# The beginning, and what comes on and on, or nothing.
ENDLESS = (
    (HEAD[:20], b""),
    (HEAD + b"Content-Length: 900\r\n\r\n" + PROMPT[:9], b""),
    (CHUNKED + b"40\r\n{", b""),
    (b"", b""),
    (HEAD, b"X-More: a\r\n"),
    (b"GET /", b"a"),
    (HEAD + b"Content-Length: 900000\r\n\r\n", b" "),
    (CHUNKED, b"1\r\n \r\n"),
)
LONG = {"prompt": "She was", "max_tokens": 400, "stream": True, "ignore_eos": True, "temperature": 1.5}


def innocents():
    """(path, body) of requests whose answers are always the same."""
    greedy, seeded = ({"temperature": t, "seed": 7, "ignore_eos": True, "max_tokens": 24} for t in (0, 1.0))
    calls = {"temperature": 0, "max_tokens": 60}
    whole = [
        ("/v1/completions", {"prompt": "It is a truth universally acknowledged", "logprobs": 2, "echo": True} | greedy),
        ("/v1/completions", {"prompt": "She was", "n": 2, "logprobs": 3} | seeded),
        ("/v1/completions", {"prompt": [[5, 6, 7], [8, 9]], "frequency_penalty": 0.5, "stop": ["."]} | seeded),
        (CHAT, {"messages": [TURN], "n": 2, "logprobs": True, "top_logprobs": 2} | seeded),
        (CHAT, {"messages": [TURN], "tools": tools(CHAT, AT), "tool_choice": "required"} | calls),
        ("/v1/responses", {"input": [TURN], "max_output_tokens": 16, "temperature": 0}),
        ("/v1/messages", {"model": "tiny", "messages": [TURN], "tools": tools("", AT), "tool_choice": {"type": "any"}}
         | calls),
    ]  # fmt: skip
    more = [("/v1/embeddings", {"input": ["She was", "Emma"]}), ("/tokenize", {"messages": [TURN]})]
    return [*whole, *more, *((path, body | {"stream": True}) for path, body in whole)]


def said(answer):
    """What must be equal: texts, tokens, numbers; no names, times, and what the cache knew. The pieces of a stream are
    joined, as they are cut by chance."""
    found, hidden = {}, ("id", "created", "created_at", "completed_at", "call_id", "usage", "system_fingerprint")

    def look(value, place=()):
        if isinstance(value, dict):
            for name, inner in value.items():
                if name not in hidden and not (name == "item_id" or name == "sequence_number"):
                    look(inner, (*place, value.get("index", value.get("output_index", "")), name))
        elif isinstance(value, list):
            for inner in value:
                look(inner, place)
        elif value not in (None, ""):
            found[place] = found.get(place, "") + str(value)

    parts = [event for event in events(answer) if "sequence_number" not in event or "response" in event]
    look(parts[-1:] if any("response" in part for part in parts) else parts)
    names = (
        "text",
        "content",
        "arguments",
        "tokens",
        "partial_json",
        "logprob",
        "token_logprobs",
        "embedding",
        "token",
    )
    return {place: value for place, value in found.items() if place[-1] in names}


def events(answer):
    """The objects of a body, or of a stream that is whole. Raises what speaks of a broken one."""
    if answer[b"content-type"] != b"text/event-stream; charset=utf-8":
        return [answer.json] if answer.body else []
    *whole, rest = answer.body.split(b"\n\n")
    assert not rest and whole
    data = [event.rpartition(b"\n")[2].removeprefix(b"data: ") for event in whole if not event.startswith(b":")]
    named = whole[-1].startswith(b"event: ")
    assert named or data[-1] == b"[DONE]", data[-1]
    return [json.loads(each) for each in (data if named else data[:-1])]


# ---- the storm -------------------------------------------------------------------------------------------------------


class Server(Process):
    def __init__(self, folder):
        (folder / "keys.toml").write_text(TENANTS)
        os.environ.update({name: str(value) for name, (_, value) in MALLOC.items()})
        words = [
            "tiny",
            "--port",
            "0",
            "--restart",
            "--deterministic",
            "--log-format",
            "json",
            "--chat-template",
            CHATML,
        ]
        words += ["--tool-call-parser", "hermes", "--api-keys", folder / "keys.toml", "--max-num-seqs", ROWS]
        words += ["--max-num-queued-reqs", QUEUED, "--arrival-timeout", ARRIVAL, "--drain-timeout", DRAIN]
        words += ["--pause-after", 32, "--max-body-size", "4M", "--backend", "numpy", "--autotune", "off"]
        super().__init__(*map(str, words))
        self.ready()
        self.port, self.pid = int(self.port), self.popen.pid

    def children(self, word):
        """Its processes whose command has a word in it."""
        tasks = [p.read_text().split() for p in Path(f"/proc/{self.pid}/task").glob("*/children")]
        return [int(p) for some in tasks for p in some if word in Path(f"/proc/{p}/cmdline").read_bytes()]

    @property
    def engine(self):
        with suppress(OSError):
            return next(iter(self.children(b"hibachi.llm.remote.child")), None)

    def holds(self):
        """Memory in bytes, descriptors, threads."""
        resident = {pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in (self.pid, self.engine)}
        memory = {f"memory {i}": pages * os.sysconf("SC_PAGE_SIZE") for i, pages in enumerate(resident.values())}
        threads = {f"threads {i}": len(os.listdir(f"/proc/{pid}/task")) for i, pid in enumerate(resident)}
        checking = 2 * len(self.children(str(WORKER).encode()))  # each at the other end of two pipes
        return memory | threads | {"descriptors": len(os.listdir(f"/proc/{self.pid}/fd")) - checking}


class Storm:
    def __init__(self, server, seed):
        self.server, self.port, self.seed = server, server.port, seed
        self.over, self.wrong, self.did, self.away = threading.Event(), [], Counter(), []
        self.held, self.solo, self.equal, self.wires, self.leaving = [], {}, 0, set(), False

    def run(self, seconds):
        for i, (path, body) in enumerate(innocents()):
            self.solo[i] = said(self.ask(post(path, body, INNOCENT), f"innocent {i}"))
        polling = threading.Event()
        with running((self.health, polling), over=polling):
            until, blast = time.monotonic() + seconds, 0
            while (left := until - time.monotonic()) > 1:
                # The first warms up: what is made once is made, and the pause after it is the measure of the others.
                self.blast(blast, min(left, BLAST) if blast else min(seconds / 4, 15.0))
                self.rest()
                blast += 1
        bounds = {"memory 0": KEPT, "memory 1": KEPT, "threads 0": POOLED, "threads 1": POOLED, "descriptors": 0}
        for name, more in bounds.items():
            n = self.held[min(1, len(self.held) - 1) if "memory" in name else 0][name]  # some is first used late
            if self.held[-1][name] - n > more:
                self.complain(f"{name}: {n} in an early pause, and {self.held[-1][name]} in the last")
        self.end()

    def blast(self, n, seconds):
        self.over.clear()
        moves = (*(self.bodies,) * 9, *(self.at_once,) * 3, *(self.endless,) * 3, *(self.leave,) * 6, self.flood)
        hostile = [(self.client, move, f"{move.__name__} {i} {n}") for i, move in enumerate(moves)]
        innocent = [(self.client, self.innocent, f"innocent {i} {n}") for i in range(6)]
        with running(*hostile, *innocent, over=self.over):
            until, rng, kills = time.monotonic() + seconds, random.Random(f"{self.seed} trouble {n}"), True
            while (wait := rng.uniform(0.15, 0.3) * min(seconds, 30.0)) < until - time.monotonic() - 2:
                time.sleep(wait)
                if n and (engine := self.server.engine) is not None:  # at first the engine is to become warm
                    self.kill(engine) if kills else self.stop(engine, rng.uniform(0.5, 2.0))
                    kills = not kills
            time.sleep(max(until - time.monotonic(), 0.0))
            self.over.set()
            self.leaving = True
            for wire in list(self.wires):
                with suppress(OSError):
                    wire.socket.shutdown(socket.SHUT_RDWR)
        self.leaving = False

    def complain(self, what):
        if not self.leaving:  # then what is under way breaks off
            self.wrong.append(what)

    @contextmanager
    def wire(self, **how):
        with Wire(self.port, **how) as found:
            self.wires.add(found)
            try:
                yield found
            finally:
                self.wires.discard(found)

    def client(self, move, name):
        rng = random.Random(f"{self.seed} {name}")
        while not self.over.is_set():
            self.did[move.__name__] += 1
            try:
                move(rng)
            except Exception:
                self.complain(f"{name} failed:\n{traceback.format_exc()[-1500:]}")

    # ---- answers -----------------------------------------------------------------------------------------------

    def excused(self, since):
        """Was the engine away at any time since?"""
        return any(end >= since for _, end in self.away)

    def ask(self, data, what):
        """The answer to a whole request, which is looked at. None: the connection was closed."""
        since = time.monotonic()
        with self.wire(seconds=60) as wire:
            try:
                return self.judged(wire.send(data).answer(), what, since)
            except (EOFError, ConnectionError):
                if len(data) < 1 << 20:  # of larger ones the beginning may have been refused
                    self.complain(f"{what}: the connection was closed")

    def judged(self, answer, what, since):
        try:
            assert answer.whole and not answer.all(b"x-none")
            last = (events(answer) or [{}])[-1]
            last = last.get("response") or last
            error = last.get("error") if isinstance(last, dict) else None
            code = _code(last, error) if error else None
        except Exception as e:
            code = self.complain(f"{what}: {answer.status} with a body that is wrong ({e!r}): {answer.body[:300]!r}")
        self.did[f"{answer.status} {code or ''}"] += 1
        if (answer.status >= 500 or code in LOST) and not (answer.status in (200, 503, 529) and self.excused(since)):
            self.complain(f"{what}: {answer.status}, though no engine was killed: {answer.body[-300:]!r}")
        if answer.status in (429, 503, 529) and not answer[b"retry-after"].isdigit():
            self.complain(f"{what}: {answer.status} without Retry-After")
        return answer

    # ---- what clients do ---------------------------------------------------------------------------------------

    def innocent(self, rng):
        i, (path, body) = rng.choice([*enumerate(innocents())])
        began = time.monotonic()
        while True:
            since = time.monotonic()
            answer = self.ask(post(path, body, INNOCENT), f"innocent {i}")
            if answer is not None and answer.status == 200 and said(answer) == self.solo[i]:
                self.equal += 1
                break
            if not self.excused(since):
                self.complain(f"the innocent request {i} got {answer and answer.body[:900]!r}; {self.solo[i]}")
                return
            time.sleep(0.1)
        if time.monotonic() - began > SLOW and not self.excused(began):
            self.complain(f"the innocent request {i} took {time.monotonic() - began:.1f} s")

    def bodies(self, rng):
        path, data = drawn(rng)
        self.ask(post(path, data, HOSTILE), f"{path} {data[:400]!r} ({len(data)} bytes)")
        time.sleep(rng.random() * 0.05)

    def flood(self, rng):
        body = {"prompt": "She was", "max_tokens": rng.choice((1, 30)), "n": rng.choice((1, 4)), "temperature": 1}
        with running(*[(self.ask, post("/v1/completions", body, HOSTILE), "a flood")] * rng.choice((10, 25))):
            pass
        time.sleep(rng.random())

    def at_once(self, rng):
        name = rng.choice(list(AT_ONCE))
        made, allowed = AT_ONCE[name]
        data, since, got = made(rng), time.monotonic(), 0
        with self.wire(seconds=ARRIVAL + SLACK) as wire, suppress(EOFError, ConnectionError):
            got = self.judged(wire.send(data).answer(), name, since).status
        if got not in allowed and not (got == 503 and self.excused(since)):
            self.complain(f"{name}: {data[:200]!r} was answered with {got}; expected of {allowed}")
        time.sleep(rng.random() * 0.2)

    def endless(self, rng):
        """The server must tire of it in time."""
        begin, more = rng.choice(ENDLESS)
        since, over = time.monotonic(), threading.Event()

        def go_on():
            with suppress(OSError):
                while more and not over.wait(0.05):
                    wire.send(more)

        with self.wire(seconds=ARRIVAL + SLACK) as wire, running((go_on,), over=over):
            wire.send(begin)
            with suppress(EOFError, ConnectionError):
                answer = self.judged(wire.answer(), f"{begin[-80:]!r}, then {more!r}", since)
                if answer.status != 408 or answer.error["code"] != "arrival_timeout":
                    self.complain(f"{begin[-80:]!r}, then {more!r} got {answer.body!r}; expected 408")

    def leave(self, rng):
        """While sending, before the answer, within it, or after reading slowly."""
        data = post("/v1/completions", LONG | {"n": rng.choice((1, 6)), "logprobs": rng.choice((0, 20))}, HOSTILE)
        with self.wire(small=True, seconds=rng.choice((0.2, 1, 3))) as wire, suppress(OSError, EOFError):
            wire.send(data[: rng.randrange(len(data))] if rng.random() < 0.3 else data)
            for _ in range(rng.randrange(6)):
                wire.more()
                time.sleep(rng.choice((0, 0.1)))

    # ---- what befalls the engine, and what is seen from outside ------------------------------------------------

    def kill(self, engine):
        away = [time.monotonic(), float("inf")]
        self.away.append(away)
        os.kill(engine, signal.SIGKILL)
        data = post("/v1/completions", PROMPT, INNOCENT)
        while (
            (found := self.ask(data, "after a kill")) is None
            or found.status != 200
            or self.server.engine in (None, engine)
        ):
            assert time.monotonic() - away[0] < AGAIN, f"no new engine serves {AGAIN:g} s after the kill"
            time.sleep(0.05)
        away[1] = time.monotonic()

    def stop(self, engine, seconds):
        away = [time.monotonic(), float("inf")]
        self.away.append(away)
        os.kill(engine, signal.SIGSTOP)
        time.sleep(seconds)
        with suppress(ProcessLookupError):
            os.kill(engine, signal.SIGCONT)
        away[1] = time.monotonic() + 0.5  # until its first words are here

    def health(self, over):
        while not over.wait(0.2):
            since = time.monotonic()
            with Wire(self.port) as wire:
                answer = wire.send(request("GET", "/health")).answer()
            if (answer.status != 200 and not self.excused(since)) or time.monotonic() - since > HEALTH:
                self.complain(f"/health: {answer.status} after {time.monotonic() - since:.1f} s")

    def rest(self):
        """Who left is forgotten, and nothing is held."""
        until, wrong = time.monotonic() + 5 + SLACK, ["no look"]
        while wrong and time.monotonic() < until:
            time.sleep(0.1)
            found = Counter()
            with Wire(self.port) as wire:
                page = wire.send(request("GET", "/metrics")).answer().body.decode()
            for name, value in re.findall(r"^(hibachi_\w+)(?:\{.*\})? (\S+)$", page, re.M):
                found[name.removeprefix("hibachi_")] += float(value)
            wanted = {f"requests_{what}": 0.0 for what in ("open", "running", "waiting", "paused")} | {"up": 1}
            wanted |= {"streams_open": 0, "cache_free_blocks": found["cache_blocks"]}
            wanted["requests_total"] = found["requests_finished_total"] + found["requests_rejected_total"]
            wrong = [f"{name} is {found[name]:g}; expected {n:g}" for name, n in wanted.items() if found[name] != n]
        self.wrong += [f"at rest: {what}" for what in wrong]
        body = {"prompt": "She was", "max_tokens": 1, "n": 30}
        if self.ask(post("/v1/completions", body, HOSTILE), "all that it may have").status != 200:
            self.complain("a tenant that has nothing may not have all it may")
        until, held = time.monotonic() + 5, self.server.holds()
        while self.held and held["descriptors"] > self.held[0]["descriptors"] and time.monotonic() < until:
            time.sleep(0.05)  # a look at /health has a connection, for a moment
            held = self.server.holds()
        self.held.append(held)

    def end(self):
        """SIGTERM, while one still does not read, and one still sends."""
        with Wire(self.port, small=True) as one, Wire(self.port) as other:
            one.send(post("/v1/completions", LONG | {"n": 8}, HOSTILE))
            other.send(HEAD + b"Content-Length: 100\r\n\r\n{")
            time.sleep(0.5)
            began = time.monotonic()
            status, took = self.server.end(), time.monotonic() - began
        if status or took > DRAIN + SLACK:
            self.complain(f"SIGTERM: status {status} after {took:.1f} s; expected 0 in {DRAIN + SLACK:g} s")
        for text in (text for text in self.server.log if not text.startswith("hibachi: ")):
            line = json.loads(text)
            ours = line["level"] in ("error", "critical") and not KILLED.fullmatch(line["message"])
            if ours or "traceback" in line or "key-of-" in text:
                self.complain(f"the log says: {text[:2000]}")


def _code(last, error):
    """Of OpenAI's shape, or of Anthropic's, or it raises."""
    if last.get("type") == "error":
        assert last.keys() - {"request_id"} == {"type", "error"} and error.keys() - {"details"} == {"type", "message"}
        return error.get("details", {}).get("error_code") or error["type"]
    assert "object" in last or (last.keys() == {"error"} and error.keys() == {"message", "type", "param", "code"})
    assert error["message"]
    return error["code"] or error["type"]


@contextmanager
def running(*calls, over=None):
    """Threads of these calls: (function, arguments), until the block ends."""
    threads = [threading.Thread(target=call, args=args) for call, *args in calls]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        if over is not None:
            over.set()
        for thread in threads:
            thread.join()


def storm(seed, seconds):
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder))
        found = Storm(server, seed)
        try:
            found.run(seconds)
        except Exception:
            found.wrong.append(f"the storm broke off:\n{traceback.format_exc()[-3000:]}")
        finally:
            server.clear()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="of storm (default: 600)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    found = storm(args.seed, args.seconds)
    for what in found.wrong:
        print(f"WRONG: {what}".encode(errors="backslashreplace").decode())
    print(f"{found.equal} innocent requests as alone; {dict(sorted(found.did.items()))}; in pauses: {found.held}")
    return bool(found.wrong) or not found.equal


if __name__ == "__main__":
    sys.exit(main())
