"""hibachi itself. options: those of `hibachi.LLM`; profile: true to see where the time of a step goes."""

from __future__ import annotations

import asyncio
import importlib
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a script of its own, by an interpreter that may have nothing of hibachi
    from benchmarks.bench.peers.drive import Request


class Engine:
    def __init__(self, settings: dict[str, Any]) -> None:
        began = time.perf_counter()
        if settings["backend"] in ("torch", "jax"):  # their import is told apart
            importlib.import_module(settings["backend"])
        self.import_seconds: float = time.perf_counter() - began
        from hibachi import LLM

        options = dict(settings["options"])
        wants_profile = options.pop("profile", False)
        self.llm: LLM = LLM(
            settings["model"],
            backend=settings["backend"],
            dtype=settings["dtype"],
            max_model_len=settings["max_model_len"],
            max_num_seqs=settings["rows"],
            enable_prefix_caching=settings["enable_prefix_caching"],
            **options,
        )
        self.engine: Any = self.llm.engine
        self.version: str = version("hibachi")
        backend = self.llm.backend
        self.about: dict[str, str] = {
            **backend.versions(),
            "kernels": backend.kernels,
            "quantization": self.engine.facts.quantization,
        }
        self.profile: Any = None
        if wants_profile:
            from benchmarks.bench.profile import Profile

            self.profile = Profile(self.engine)

    def start(self, r: Request) -> Any:
        from hibachi import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=r.max_tokens, ignore_eos=True)
        return self.engine.run(r.prompt, params)

    def run(self, requests: list[Request]) -> None:
        if self.profile:
            self.profile.clear()
        if any(r.arrival for r in requests):
            asyncio.run(self.online(requests))
            return
        from hibachi.engine.streams.merge import merge

        for i, tokens in merge([self.start(r) for r in requests]):
            now = time.perf_counter()
            requests[i].times += [now] * len(tokens)
            requests[i].tokens += map(int, tokens)

    async def online(self, requests: list[Request]) -> None:
        async def one(r: Request) -> None:
            await asyncio.sleep(max(0.0, r.due - time.perf_counter()))
            async for token in self.start(r):
                r.times.append(time.perf_counter())
                r.tokens.append(int(token))

        await asyncio.gather(*map(one, requests))

    def more(self) -> dict[str, Any]:
        return {"profile": self.profile.as_json()} if self.profile else {}

    def close(self) -> None:
        self.llm.close()
