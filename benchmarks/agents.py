"""What a token of a stream costs with tools and over other APIs, beside plain chat: processor time of the server.

`hibachi serve` with the engine in its own process; streams of 64 tokens, some at a time; kinds take turns. Prompts are
about equally long and cached after the first turn, so that tokens are what is measured. "tools": a chat with a tool
that the model may call, so an answer is watched for the beginning of a call. "responses" and "messages": the same
answers over these routes, without tools and with one.

    python benchmarks/agents.py [--model tiny] [--backend numpy] [--streams 8] [--turns 9]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

TOKENS = 64
TICK = os.sysconf("SC_CLK_TCK")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
NAMES = ("weather",)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = "She was sure that the weather in Bath would be fine, and that the trains to it were many. "


def functions(flat: bool, schema: str) -> list[dict[str, Any]]:
    each = [{"name": n, "description": f"The {n} of a city", schema: SCHEMA} for n in NAMES]
    if schema == "input_schema":
        return each
    return [{"type": "function", **f} if flat else {"type": "function", "function": f} for f in each]


def bodies(pad: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Kind -> path and body. pad: text that is as long as the tools."""
    user, long = [{"role": "user", "content": WORDS}], [{"role": "user", "content": pad + WORDS}]
    more = {"stream": True, "temperature": 0.7, "seed": 1}
    chat = {**more, "max_tokens": TOKENS, "ignore_eos": True}
    of_responses = {**more, "max_output_tokens": TOKENS, "ignore_eos": True, "store": False}
    of_messages = {**more, "max_tokens": TOKENS, "model": "m"}
    return {
        "chat": ("/v1/chat/completions", {**chat, "messages": long}),
        "chat, tools": ("/v1/chat/completions", {**chat, "messages": user, "tools": functions(False, "parameters")}),
        "responses": ("/v1/responses", {**of_responses, "input": pad + WORDS}),
        "responses, tools": ("/v1/responses", {**of_responses, "input": WORDS, "tools": functions(True, "parameters")}),
        "messages": ("/v1/messages", {**of_messages, "messages": long}),
        "messages, tools": (
            "/v1/messages",
            {**of_messages, "messages": user, "tools": functions(True, "input_schema")},
        ),
    }


def stream(url: str, path: str, body: dict[str, Any]) -> int:
    """The tokens of an answer."""
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
    )
    try:
        with urllib.request.urlopen(request) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as e:
        raise SystemExit(f"{path}: {e.read().decode()}") from None
    found = re.findall(r'"(?:completion|output)_tokens":\s*(\d+)', text)
    return int(found[-1]) if found else text.count("data: ")


def spent(pid: int) -> float:
    """Processor seconds of a process and its children."""
    total = 0.0
    for one in [pid, *children(pid)]:
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / TICK
    return total


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--backend", default="numpy")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--port", type=int, default=8917)
    a = parser.parse_args()
    command = [sys.executable, "-m", "hibachi", "serve", "--model", a.model, "--backend", a.backend]
    command += ["--served-model-name", "m", "--port", str(a.port), "--tool-call-parser", "generic", "--engine", "child"]
    if a.model == "tiny":
        command += ["--chat-template", CHATML]
    server = subprocess.Popen([*command, "--log-level", "warning"], start_new_session=True)
    url = f"http://127.0.0.1:{a.port}"
    try:
        wait(url)
        kinds = bodies("The hotels of Bath, and the tickets to its rooms, are described in a book of many pages. " * 4)
        costs: dict[str, list[float]] = {kind: [] for kind in kinds}
        with concurrent.futures.ThreadPoolExecutor(a.streams) as pool:
            for turn in range(a.turns + 1):
                for kind, (path, body) in kinds.items():
                    if "chat" in path:
                        body = {**body, "stream_options": {"include_usage": True}}
                    before = spent(server.pid)
                    tokens = sum(pool.map(lambda _, p=path, b=body: stream(url, p, b), range(a.streams)))
                    if turn:  # the first fills the cache
                        costs[kind].append((spent(server.pid) - before) / tokens * 1e6)
        plain = costs["chat"]
        print(f"{a.model} on {a.backend}, {a.streams} streams of {TOKENS} tokens, {a.turns} turns")
        for kind, each in costs.items():
            ratios = sorted(x / y for x, y in zip(each, plain, strict=True))
            told = f"{statistics.median(ratios):.2f}x of chat ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            print(f"{kind:18} {statistics.median(each):7.0f} us a token, {told}")
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def wait(url: str) -> None:
    for _ in range(240):
        try:
            urllib.request.urlopen(url + "/health").close()
            return
        except OSError:
            time.sleep(0.5)
    raise SystemExit("The server did not start.")


if __name__ == "__main__":
    main()
