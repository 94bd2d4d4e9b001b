"""Proves that a large reorganisation of the code changes nothing that a user sees.

    python tools/replay.py record OUT.jsonl.gz [pytest arguments]
    python tools/replay.py compare BEFORE AGAIN [MORE ...] AFTER

`record` runs the tests and notes what passes the seams below: plans of the scheduler, logits and tokens, what streams
delivered, HTTP as it is answered, files that offline runs wrote, commands with what they printed, and messages of
errors. The pytest arguments choose tests as ever; without any, the whole suite runs (in two processes, or -n others).

`compare` takes two or more recordings of the same state, and as the last one that of the state in question. What the
former agree in is the corpus; AFTER is compared on it, difference by difference; the exit status is 1 if there is one.
Tests that only one side has are listed, and are no difference. What differs is also left in AFTER.differs as arguments
for pytest, to be recorded once more: `record OUT @AFTER.differs`.

What moves is named in one table, SEAMS: the places, old and new, at which a seam may be. A seam that is at none of its
places is an error. Tests are known by `stem of the file::name[params]`, so a file of tests may move to another folder.

PYTEST_DONT_REWRITE: it is a plugin that is there before pytest.
"""

from __future__ import annotations

import atexit
import dataclasses
import enum
import functools
import gzip
import hashlib
import importlib.machinery
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from collections import Counter, defaultdict, deque
from contextlib import suppress
from itertools import chain, count, zip_longest
from pathlib import Path
from weakref import WeakKeyDictionary

NAME = "hibachi_replay"  # of this module in the processes that record, where it lies in a folder that is on the path
PARTS, OF = "REPLAY_PARTS", "REPLAY_OF"  # variables of these: the folder for what they record, and the checkout
ROOT = Path(os.environ.get(OF) or Path(__file__).resolve().parents[1])
READ = 100_000  # characters of a text that are compared
KEPT = 1500  # of them, those that are kept to be shown
SHOWN = 8  # names that a list shows
FIRST, EVERY = 500, 16  # plans of a scheduler that are all noted; afterwards, each of so many

HERE = r"/(?:tmp|root|home|work|usr|opt|var|private|dev/shm)\b|" + re.escape(str(ROOT))
RATE = r"(?<![\d,])\d{1,9}(?:,\d{3}){0,3}(?:\.\d{1,20}|(?= ?[a-z ]{1,12}/s\b))(?:e-?\d+)?"
UNIT = r"s|ms|us|µs|ns|min|seconds|minutes|rows/s|new tokens/s|tokens/s|tok/s|req/s|a second"
TIMED = r"(?:\w+_)?(?:created|created_at|completed_at|expires_at|started|uptime)|\w*(?:time|seconds|duration|_ms|_s)"
NORMAL = [  # what may differ between two runs, and what stands in its place
    (re.compile(pattern, re.M), instead)
    for pattern, instead in (
        (r'File "[^"\n]*", line \d+, in .*', "File <place>"),
        (rf"(?:{HERE})[^\s'\"`,;:)\]}}<>\\]*", "<path>"),
        (r"\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", "<uuid>"),
        (r"\b([a-z]{2,12})[-_](?=\w{0,60}\d)[A-Za-z0-9_]{8,}\b", r"\1-<id>"),
        (r"\b0x[0-9a-f]+|(?<![.\da-f])(?=\d{0,40}[a-f])[0-9a-f]{12,}\b", "<hex>"),
        (r"(127\.0\.0\.1|localhost|\[::1?\]|0\.0\.0\.0):\d+|\b(?:3[2-9]|4\d|5\d|60)\d{3}\b", "<port>"),
        (r"\b(pid|process|PID)([ =:\"]+)\d+", r"\1\2<n>"),
        (r'"server": ?"[a-z]{8}"', '"server":"<id>"'),
        (r"\b(x-[a-z-]*time[a-z-]*): \S+", r"\1: <t>"),
        (r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d[.\d]*)?(?:Z|[+-]\d\d:?\d\d)?|\b\d\d:\d\d:\d\d[.,\d]*", "<time>"),
        (rf'"({TIMED})": ?-?[\d.e+-]+', r'"\1":<t>'),
        (RATE + rf" ?(?=(?:{UNIT})\b)", "<t> "),
        (r"\bhibachi \d+\.\d+\.\d+\S*", "hibachi <version>"),
    )
]
LETTERS = str.maketrans("0123456789abcdef", "ghijklmnopqrstuv")  # of digests, which are no ids to be replaced


@functools.lru_cache(4096)
def normal(text: str) -> str:
    for pattern, instead in NORMAL:
        text = pattern.sub(instead, text)
    return text


def digest(data: str | bytes) -> str:
    data = data if isinstance(data, bytes) else data.encode("utf-8", "replace")
    return hashlib.blake2b(data, digest_size=8).hexdigest().translate(LETTERS)


def text_of(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"{len(data)} bytes {digest(data)}"


# ---- events ----------------------------------------------------------------------------------------------------------

test = ""  # the one that runs
worker = False  # a process of pytest, whose events wait for the end of the test
waiting: deque = deque()  # events of this process: (test, kind, text)
notes: WeakKeyDictionary = WeakKeyDictionary()  # of schedulers and samplers
plans: list = []  # schedulers' notes of this test
drawn: dict = {}  # (sampler, row, admission): {(position, token or None, digest of the logits)}
delivered: dict = {}  # id of a channel: what was pushed
serial = count()  # of what a test draws


def test_id(node: str) -> str:
    """Of pytest's node id, without the folder."""
    path, _, rest = node.partition("::")
    before, bracket, params = rest.partition("[")
    return f"{Path(path).stem}::{before.rpartition('::')[2]}{bracket}{params}"


def emit(kind: str, text: str) -> None:
    if sys.meta_path is None:
        return  # Python ends
    waiting.append((test, kind, text[:READ]))  # as it is: some tests take the time
    if not worker:
        write()


def write() -> None:
    found: Counter = Counter()
    while waiting:
        of, kind, text = waiting.popleft()
        found[of, kind, text if kind == "node" else normal(text)] += 1
    lines = "".join(json.dumps([*of, digest(text), text[:KEPT], n]) + "\n" for (*of, text), n in found.items())
    if lines:
        # It fails in tests of a full disk, of too few descriptors, or of an empty environment.
        with suppress(OSError, KeyError), open(f"{os.environ[PARTS]}/{os.getpid()}.jsonl", "ab", buffering=0) as file:
            file.write(lines.encode())


def flush() -> None:
    """At the end of a test: what was gathered becomes events."""
    noted, plans[:] = plans[:], []
    for note in noted:
        emit("plans", f"{note.n} plans {note.digest}; first {note.first}")
    while drawn:
        text = " ".join(sorted(map(str, drawn.popitem()[1])))
        emit("logits", f"{digest(text)} {text}")
    write()


def plain(value: object, name=lambda thing: "<object>") -> object:
    """Lists of numbers, without names of classes or fields. name: of what is none of these."""
    if isinstance(value, enum.Enum):
        return plain(value.value, name)
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, (list, tuple, deque)):
        return [plain(item, name) for item in value]
    if isinstance(value, dict):
        return [[plain(key, name), plain(item, name)] for key, item in value.items()]
    if hasattr(value, "tolist"):
        return value.tolist()
    if dataclasses.is_dataclass(value) and not hasattr(value, "prompt_len"):  # which a sequence has
        return [plain(getattr(value, field.name), name) for field in dataclasses.fields(value)]
    return name(value)


class Note:
    """What one scheduler planned in this test."""

    def __init__(self) -> None:
        self.test, self.n, self.digest, self.names = test, 0, "", {}

    def name(self, thing: object) -> str:
        # An address may be used again, but not with the same number.
        return self.names.setdefault((id(thing), getattr(thing, "number", None)), f"#{len(self.names)}")

    def add(self, plan: object) -> None:
        if self.test != test:
            return  # an engine that several tests use: what it plans depends on what it did before
        self.n += 1
        if self.n <= FIRST or self.n % EVERY == 0:
            text = repr(plain(plan, self.name))
            self.digest = digest(self.digest + text)
            if self.n == 1:
                self.first = text[:400]
                plans.append(self)


def host(array: object):
    """As a NumPy array, or None; without the backend, whose calls tests count."""
    import numpy as np

    try:
        return np.asarray(array.detach().cpu().float() if hasattr(array, "detach") else array)
    except Exception:  # an array of a test that cannot be read
        return None


# ---- what is put around the seams: call is what was there, owner its class or module ---------------------------------


def schedule(owner, call, self, *args, **more):
    plan = call(self, *args, **more)
    if worker and plan is not None:  # how often an engine asks in vain is a matter of time
        notes.setdefault(self, Note()).add(plan)
    return plan


def admit(owner, call, self, job, *args, **more):
    notes.setdefault(self, (object(), Counter()))[1][job.seq.row] += 1
    return call(self, job, *args, **more)


def draw(owner, call, self, logits, *args):
    """Of `draw(logits, jobs, rows, positions, ...)` and `begin(logits, rows, positions, ...)`, whose tokens are under
    way.
    """
    out = call(self, logits, *args)
    if worker and self in notes and (values := host(logits)) is not None and values.ndim:
        number, admissions = notes[self]
        tokens = host(out.tokens) if hasattr(out, "tokens") else None
        at = int(call.__name__ == "draw")
        for i, (row, position) in enumerate(zip(args[at], args[at + 1], strict=False)):
            token = None if tokens is None else tokens[i].tolist()
            found = drawn.setdefault((number, int(row), admissions[int(row)]), set())
            found.add((int(position), str(token), digest(values[i].tobytes())))
    return out


def opened(owner, call, self, *args, **more):
    delivered[id(self)] = []
    return call(self, *args, **more)


def push(owner, call, self, item, *args, **more):
    of, *at = item if isinstance(item, tuple) else (None,)
    kept = plain(of[at[0]] if at and hasattr(of, "tolist") else item)  # a step's array, and a place in it
    delivered.setdefault(id(self), []).append(kept)
    return call(self, item, *args, **more)


def end(owner, call, self, reason, error=None, *args, **more):
    if self.finish is None:  # the event before the end, which may be the end of the test
        items = delivered.pop(id(self), [])
        left = plain(reason) == "cancelled"  # how far it was by then is a matter of time
        emit("channel", f"{plain(reason)} {error or ''} {'' if left else items}")
    return call(self, reason, error, *args, **more)


def raised(owner, call, self, *args, **more):
    super(owner, self).__init__(*args, **more)
    try:
        public = next(kind.__name__ for kind in type(self).__mro__ if kind.__module__ == owner.__module__)
        emit("error", f"{public}: {self}")
    except Exception:  # a message that its class makes later
        emit("error", repr(args))


def writer(owner, call, file, *args, **more):
    made = call(file, *args, **more)
    close = made.close

    def closed() -> None:
        close()
        with suppress(OSError, TypeError, AttributeError):  # it goes elsewhere
            emit("file", text_of(file.getvalue() if hasattr(file, "getvalue") else Path(file.name).read_bytes()))

    made.close = closed
    return made


def command(owner, call, argv=None):
    words, status = map(str, sys.argv[1:] if argv is None else argv), "raised"
    streams = [(name, stream, []) for name in ("stdout", "stderr") if hasattr(stream := getattr(sys, name), "__dict__")]
    for _, stream, printed in streams:
        stream.write = lambda text, note=printed.append, real=stream.write: (note(text), real(text))[1]
    try:
        status = call(argv)
        return status
    except SystemExit as e:
        status = e.code
        raise
    finally:
        for _, stream, _ in streams:
            vars(stream).pop("write", None)
        said = {name: "".join(printed) for name, _, printed in streams}
        said["stderr"] = sorted({*said.get("stderr", "").splitlines()})  # whose lines come in any order
        emit("command", f"{[*words]} -> {status}\n{said.get('stdout')}\n" + "\n".join(said["stderr"]))


PIECES = {"text", "content", "delta", "arguments", "partial_json", "thinking", "reasoning", "reasoning_content"}
PIECES |= {
    "token_ids",
    "tokens",
    "logprobs",
    "token_logprobs",
    "top_logprobs",
    "text_offset",
    "sequence_number",
    "token",
}


def folded(body: str, headers: str) -> str:
    """A stream without how its texts were cut into events, which is a matter of time; of metrics, what there is."""
    if "text/plain; version" in headers:
        return "\n".join(sorted({re.sub(r"^([a-z]\w*).*", r"\1", line) for line in body.splitlines()}))
    if "text/event-stream" not in headers:
        return body
    pieces, shapes = defaultdict(list), {}

    def shape(value, path):
        if isinstance(value, dict):
            path += (value.get("index"),)
            return {key: shape(item, (*path, key)) for key, item in value.items()}
        if path and path[-1] in PIECES and value is not None:
            pieces[path].append(value)
            return "..."
        return [shape(item, path) for item in value] if isinstance(value, list) else value

    for line in body.splitlines():
        with suppress(ValueError):
            line = json.dumps(shape(json.loads(line.removeprefix("data:")), ()))
        shapes[line] = True
    pieces = {path: of for path, of in pieces.items() if path[-1] != "sequence_number"}
    for path, of in pieces.items():
        text = [*chain(*of)] if all(isinstance(piece, list) for piece in of) else "".join(map(str, of))
        shapes[f"{path}: {text}"] = True
    return "\n".join(shapes)


def served(owner, call, self, app, *args, **more):
    async def application(scope, receive, send):
        await answer(app, scope, receive, send)

    call(self, app if isinstance(app, str) else application, *args, **more)


async def answer(app, scope, receive, send):
    """An application of ASGI: what it is asked and answers is an event."""
    if scope["type"] != "http":
        return await app(scope, receive, send)
    asked, answered, begun = bytearray(), bytearray(), {}

    def tell(how: str) -> None:
        kept = {k.lower(): v for k, v in begun.get("headers", ())}
        for name in (b"date", b"content-length", b"x-request-id"):
            kept.pop(name, None)
        headers = b" ".join(b"%s: %s" % item for item in sorted(kept.items())).decode("latin-1")
        question = f"{scope['method']} {scope['path']} {scope.get('query_string', b'').decode('latin-1')}"
        body = how or folded(text_of(bytes(answered)), headers)
        emit("http", f"{question} {text_of(bytes(asked))}\n{begun.get('status')} {headers}\n{body}")

    async def receiving():
        message = await receive()
        asked.extend(message.get("body", b"")[: READ - len(asked)])
        return message

    async def sending(message):
        if message["type"] == "http.response.start":
            begun.update(message)
        elif message["type"] == "http.response.body":
            answered.extend(message.get("body", b"")[: READ - len(answered)])
            if not message.get("more_body"):  # before the client has it, and perhaps ends the test
                tell("")
                begun["told"] = True
        await send(message)

    receiving.__self__ = getattr(receive, "__self__", None)  # uvicorn's cycle, which servers of ours look for
    try:
        await app(scope, receiving, sending)
    finally:
        if "told" not in begun:
            tell("(cut off)")


def number(owner, call, most):
    """Of `secrets`: seeds of requests that name none are the same in each run of a test, if one follows the other."""
    if not worker:
        return call(most)
    random = hashlib.blake2b(f"{test} {next(serial)}".encode()).digest()
    return int.from_bytes(random) % (most if call.__name__ == "randbelow" else 1 << most)


SEAMS = (  # places, old and new, as module:class; and by the names of members there, what is put around them
    ("hibachi.plan.scheduler:Scheduler hibachi.engine.scheduler.scheduler:Scheduler", {"schedule": schedule}),
    (
        "hibachi.runners.sampler:RowSampler hibachi.engine.runners.sampler:RowSampler",
        {"admit": admit, "draw": draw, "begin": draw},
    ),
    ("hibachi.runners.frames:FrameSampler hibachi.engine.runners.frames:FrameSampler", {"admit": admit, "draw": draw}),
    (
        "hibachi.streams.channel:Channel hibachi.engine.streams.channel:Channel",
        {"__init__": opened, "push": push, "end": end},
    ),
    ("hibachi.errors:HibachiError", {"__init__": raised}),
    ("hibachi.offline.files.writers: hibachi.offline.files.table:", {"open_writer": writer}),
    ("hibachi.cli.main:", {"main": command}),
    ("secrets:", {"randbits": number, "randbelow": number}),
    ("uvicorn.config:Config", {"__init__": served}),
    ("httpx._transports.asgi:ASGITransport", {"__init__": served}),
)


def wrap(module, name: str, member: str, around) -> None:
    owner = getattr(module, name, None) if name else module
    call = getattr(owner, member, None)
    if call is not None and not hasattr(call, "_replayed"):
        wrapped = functools.wraps(call)(lambda *args, **more: around(owner, call, *args, **more))
        wrapped._replayed = True
        setattr(owner, member, wrapped)


def find_spec(name, path=None, target=None):
    """Of modules with seams, which are wrapped before anybody has their names."""
    seams = [(place, members) for places, members in SEAMS for place in places.split() if place.startswith(f"{name}:")]
    spec = importlib.machinery.PathFinder.find_spec(name, path, target) if seams else None
    if spec is not None and spec.loader is not None:
        run = spec.loader.exec_module

        def exec_module(module) -> None:
            run(module)
            for place, members in seams:
                for member, around in members.items():
                    wrap(module, place.partition(":")[2], member, around)

        spec.loader.exec_module = exec_module
    return spec


def check() -> None:
    """Exit with a message if a seam is nowhere."""
    for places, members in SEAMS:
        there = []
        for module, name in (place.split(":") for place in places.split()):
            with suppress(ModuleNotFoundError):
                there.append(importlib.import_module(module))
                there.append(getattr(there[-1], name, None))
        for member in members:
            if not any(hasattr(getattr(owner, member, None), "_replayed") for owner in there):
                sys.exit(f"replay: {member} is at none of its places: {places}. Add the new one to SEAMS.")


def start() -> None:
    """Called by Python itself, at the start of each process."""
    global test
    test = test_id(os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0])
    sys.meta_path.insert(0, types.SimpleNamespace(find_spec=find_spec))
    os.register_at_fork(after_in_child=waiting.clear)
    atexit.register(write)


def pytest_configure(config) -> None:
    global worker
    worker = hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None)


def pytest_runtest_logstart(nodeid) -> None:
    global test, serial
    test, serial = test_id(nodeid), count()


def pytest_runtest_logreport(report) -> None:
    if worker and (report.when == "call" or report.outcome != "passed"):
        emit("outcome", f"{report.when} {report.outcome}")
        emit("node", report.nodeid)


def pytest_runtest_logfinish() -> None:
    if worker:
        flush()


# ---- record and compare ----------------------------------------------------------------------------------------------


def record(out: str, arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        parts = Path(folder, "parts")
        parts.mkdir()
        Path(folder, f"{NAME}.py").write_text(Path(__file__).read_text())
        Path(folder, "sitecustomize.py").write_text(f"import {NAME}\n{NAME}.start()\n")
        path = os.pathsep.join(filter(None, [folder, str(ROOT), os.environ.get("PYTHONPATH")]))
        settled = {"OMP_WAIT_POLICY": "passive", "OPENBLAS_THREAD_TIMEOUT": "4", "PYTHONDONTWRITEBYTECODE": ""}
        env = os.environ | settled | {"PYTHONPATH": path, PARTS: str(parts), OF: str(ROOT), "PYTHONHASHSEED": "0"}
        checked = subprocess.run([sys.executable, "-c", f"import {NAME}; {NAME}.check()"], env=env, cwd=ROOT)
        if checked.returncode:
            return checked.returncode
        # A file in one process: what its tests share is then made and used in the same order.
        how = ["-q", "-p", NAME, "-n", "2", "--dist", "loadfile", "--hypothesis-seed=0", *arguments]
        status = subprocess.run([sys.executable, "-m", "pytest", *how], env=env, cwd=ROOT).returncode
        events: Counter = Counter()
        for line in (line for part in parts.iterdir() for line in part.read_text().splitlines()):
            try:
                *event, n = json.loads(line)
            except ValueError:
                continue  # of a process that was killed
            events[tuple(event)] += n
    with gzip.open(out, "wt") as file:
        file.writelines(json.dumps([*event, n]) + "\n" for event, n in sorted(events.items()))
    tests = len({event[0] for event in events})
    print(f"{sum(events.values())} events of {tests} tests, {os.path.getsize(out) >> 10} KiB: {out}")
    return status


class Recording:
    def __init__(self, path: str) -> None:
        self.events: dict = defaultdict(Counter)  # (test, kind): {digest: how often}
        self.texts: dict = {}
        self.nodes: dict = {}  # test: its node id
        with gzip.open(path, "rt") as file:
            for of, kind, code, text, n in map(json.loads, file):
                if kind == "node":
                    self.nodes[of] = text
                else:
                    self.events[of, kind][code] += n
                    self.texts[code] = text


def excerpts(old: str, new: str) -> str:
    """Both from shortly before the first difference on."""
    same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), 60)
    at = max(0, same - 60)
    return "".join(f"    {sign} {text[at : at + 300]!r}\n" for sign, text in (("-", old), ("+", new)) if text)


def listed(names: set) -> str:
    return ", ".join(sorted(names)[:SHOWN]) + (" ..." if len(names) > SHOWN else "")


def compare(paths: list[str]) -> int:
    *same, after = map(Recording, paths)
    texts = functools.reduce(lambda a, b: a | b.texts, (*same, after), {"": ""})
    tests = set.intersection(*(set(r.nodes) for r in same))
    total, agreed, shaky, differing = Counter(), Counter(), defaultdict(set), defaultdict(list)
    for of, kind in sorted({key for r in (*same, after) for key in r.events if key[0] in tests}):
        before, now = [r.events[of, kind] for r in same], after.events[of, kind]
        seen = set().union(*before)
        stable = {d for d in seen if all(d in b for b in before)}
        exact = all(b == before[0] for b in before)  # else, how often may be a matter of time
        total[kind] += len(seen)
        agreed[kind] += len(stable)
        if stable != seen:
            shaky[kind].add(of)
        if of in after.nodes:
            missing = [d for d in stable if d not in now or (exact and now[d] < before[0][d])]
            extra = [d for d in now if d not in seen or (exact and now[d] > before[0][d])] if stable == seen else []
            for old, new in zip_longest(sorted(missing), sorted(extra), fillvalue=""):
                times = f"{before[0][old] if old else 0} and {now[new] if new else 0} times"
                differing[of].append(f"  {kind}, {times}\n{excerpts(texts[old], texts[new])}")
    total["all"], agreed["all"] = sum(total.values()), sum(agreed.values())
    for kind in total:
        share = agreed[kind] / max(1, total[kind])
        print(f"{kind:8} {total[kind]:7} events, {share:7.2%} agree; not stable in {len(shaky[kind])} tests", end=": ")
        print(listed(shaky[kind]))
    for words, only in (("before", tests - set(after.nodes)), ("after", set(after.nodes) - tests)):
        print(f"{len(only)} tests only {words}: {listed(only)}")
    for of, what in sorted(differing.items()):
        print(f"DIFFERS {after.nodes[of]} ({len(what)})\n{''.join(what[:3])}", end="")
    print(f"{len(differing)} tests differ of {len(tests & set(after.nodes))}")
    Path(f"{paths[-1]}.differs").write_text("".join(f"{after.nodes[of]}\n" for of in sorted(differing)))
    return 1 if differing else 0


def main(words: list[str]) -> int:
    if words[:1] == ["record"] and len(words) > 1:
        return record(words[1], words[2:])
    if words[:1] == ["compare"] and len(words) > 3:
        return compare(words[1:])
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
