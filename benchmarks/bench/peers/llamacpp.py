"""llama.cpp's server, over streams on the loopback. model: a .gguf file; its numbers decide the dtype.

options: server (the binary; llama-server of PATH), slots (requests at once; at most 16 unless said otherwise, as more
are slower on a CPU), ubatch (512), flash (auto), unified (with the prefix cache: true), arguments (a list, for others).
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a script of its own, by an interpreter that may have nothing of hibachi
    from benchmarks.bench.peers.drive import Request


class Engine:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.import_seconds: float = 0.0
        options = settings["options"]
        server, slots = options.get("server", "llama-server"), int(options.get("slots", min(settings["rows"], 16)))
        said = subprocess.run([server, "--version"], capture_output=True, text=True)
        self.version: str = ((said.stdout + said.stderr).strip().splitlines() or ["?"])[0].replace("version: ", "")
        self.keep: Any = settings["enable_prefix_caching"]
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port: Any = s.getsockname()[1]
        command = [server, "-m", settings["model"], "-t", str(settings["threads"]), "-np", str(slots), "-cb"]
        command += [
            "-c",
            str((settings["max_model_len"] + 8) * slots),
            "-b",
            "2048",
            "-ub",
            str(options.get("ubatch", 512)),
        ]
        command += ["-fa", str(options.get("flash", "auto")), "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--no-webui", "--log-disable"]
        command += (["-kvu"] if options.get("unified", True) else []) if self.keep else ["--cache-ram", "0"]
        command += options.get("arguments", [])
        self.process: subprocess.Popen[bytes] = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            asyncio.run(self.healthy())
        except BaseException:
            self.close()
            raise

    async def healthy(self) -> None:
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"llama-server ended with status {self.process.returncode}")
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                status = await reader.readline()
                writer.close()
                if b" 200 " in status:
                    return
            except OSError:
                pass
            await asyncio.sleep(0.02)

    def run(self, requests: list[Request]) -> None:
        async def all_of_them() -> None:
            await asyncio.gather(*map(self.one, requests))

        asyncio.run(all_of_them())

    async def one(self, r: Request) -> None:
        await asyncio.sleep(max(0.0, r.due - time.perf_counter()))
        asked = dict(prompt=r.prompt, n_predict=r.max_tokens, temperature=0, top_k=1, samplers=["top_k"])
        asked.update(ignore_eos=True, stream=True, cache_prompt=self.keep, return_tokens=True)
        body = json.dumps(asked).encode()
        head = "POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22)
        writer.write(head.encode() + body)
        await writer.drain()
        async for line in reader:
            if not line.startswith((b"data: {", b"{")):
                continue
            came = json.loads(line[line.index(b"{") :])
            if "error" in came:
                raise RuntimeError(str(came["error"]))
            r.tokens += came.get("tokens") or []
            # Half of a character is held back until it is whole.
            n = came["tokens_predicted"] if came.get("stop") else len(r.tokens)
            r.times += [time.perf_counter()] * (n - len(r.times))
        writer.close()

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
