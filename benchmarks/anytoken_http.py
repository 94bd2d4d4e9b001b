"""What POST /v1/generate costs: tokens of a model of one's own over HTTP, beside the same engine read in process.

32 streams of 64 tokens of 4 KiB (1,024 numbers, float32), in MB/s of the tokens' own bytes; rounds of them, the best of
which counts. The server (`hibachi serve`) and the client run on the same cores; the client reads by msgspec and NumPy.
Expected, with a model whose step costs nothing: 50 MB/s in msgpack and base64, 5 as lists. With one whose step takes
--step seconds: 0.6 of the engine read in process.

    python benchmarks/anytoken_http.py [--engine own child] [--tokens 64] [--step 0.02]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from hibachi.engine.streams.merge import amerge
from hibachi.llm.own import open_model
from hibachi.llm.remote.llm import open_remote
from hibachi.llm.tokens import Tokens
from hibachi.server.web.client import Client, Url

SIZE = 1024  # numbers of a token: 4 KiB
FORMS = {  # name -> Accept, more of the body
    "msgpack": ("application/msgpack", {}),
    "base64": ("text/event-stream", {"encoding": "base64"}),
    "lists": ("text/event-stream", {}),
}


class Free:
    """The next token is the last one."""

    token = np.zeros(SIZE, np.float32)
    padding_token = np.zeros((1, SIZE), np.float32)  # as requests come at different steps: all share calls
    max_model_len = 1 << 16

    def forward(self, x):
        time.sleep(float(os.environ.get("STEP", "0")))
        return x[:, -1]


class Event(msgspec.Struct):
    tokens: msgspec.Raw = msgspec.Raw(b"")


packed = msgspec.json.Decoder(bytes)
listed = msgspec.json.Decoder(list[list[float]])
events = msgspec.json.Decoder(Event)
MARK = b"\x81\xa6tokens"


def of_msgpack(data: bytes) -> int:
    """Numbers of all tokens of an answer."""
    count, at = 0, data.find(MARK)
    while data.startswith(MARK, at):
        at += len(MARK)
        wide = {0xC4: 1, 0xC5: 2, 0xC6: 4}[data[at]]
        size = int.from_bytes(data[at + 1 : at + 1 + wide], "big")
        at += 1 + wide
        count += np.frombuffer(data, "<f4", size // 4, at).size
        at += size
    return count


def of_sse(data: bytes, form: str) -> int:
    count = 0
    for event in data.split(b"\n\n"):
        if event.startswith(b"data: ") and (raw := bytes(events.decode(event[6:]).tokens)):
            found = packed.decode(raw) if form == "base64" else listed.decode(raw)
            count += (np.frombuffer(found, "<f4") if form == "base64" else np.asarray(found, np.float32)).size
    return count


async def load(url: str, form: str, streams: int, tokens: int, rounds: int) -> float:
    """MB/s of the best round."""
    accept, more = FORMS[form]
    body = msgspec.json.encode(
        {"prompt": np.zeros((1, SIZE), np.float32).tolist(), "max_tokens": tokens, "stream": True, **more}
    )
    client, best = Client(Url.of(url), {"Accept": accept}), 0.0

    async def one() -> None:
        parts: list[bytes] = []
        answer = await client.post("/v1/generate", body, lambda _a, part, _t: parts.append(part))
        data = b"".join(parts)
        assert answer.status == 200, data[:500]
        got = of_msgpack(data) if form == "msgpack" else of_sse(data, form)
        assert got == tokens * SIZE, (got, data[-300:])

    for _ in range(rounds):
        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(streams)))
        best = max(best, streams * tokens * SIZE * 4 / 1e6 / (time.perf_counter() - began))
    await client.close()
    return best


async def in_process(kind: str, streams: int, tokens: int, rounds: int) -> float:
    with (open_model if kind == "own" else open_remote)(f"{__file__}:Free", max_num_seqs=streams) as model:
        assert isinstance(model, Tokens)
        best = 0.0
        for _ in range(rounds):
            began, count = time.perf_counter(), 0
            found = [model.submit(np.zeros((1, SIZE), np.float32), max_tokens=tokens) for _ in range(streams)]

            def take(_: int, items: list[object]) -> None:
                nonlocal count
                count += sum(model.host(item).size for item in items)

            await amerge(found, take)
            assert count == streams * tokens * SIZE
            best = max(best, streams * tokens * SIZE * 4 / 1e6 / (time.perf_counter() - began))
    return best


@contextmanager
def server(kind: str, streams: int) -> Iterator[str]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "hibachi", "serve", f"{Path(__file__).resolve()}:Free", "--engine", kind]
    command += ["--port", str(port), "--max-num-seqs", str(streams), "--log-level", "warning"]
    with subprocess.Popen(command) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            for _ in range(300):
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    time.sleep(0.1)
            yield url
        finally:
            process.send_signal(signal.SIGINT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", default=["own", "child"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step", type=float, default=0.0, help="seconds of a step")
    parser.add_argument("--forms", nargs="+", default=list(FORMS))
    args = parser.parse_args()
    os.environ["STEP"] = str(args.step)
    for kind in args.engine:
        alone = asyncio.run(in_process(kind, args.streams, args.tokens, args.rounds))
        print(f"{kind:6} in process {alone:8.1f} MB/s", flush=True)
        with server(kind, args.streams) as url:
            for form in args.forms:
                found = asyncio.run(load(url, form, args.streams, args.tokens, args.rounds))
                print(f"{kind:6} {form:10} {found:8.1f} MB/s  {found / alone:.2f} of it", flush=True)


if __name__ == "__main__":
    main()
