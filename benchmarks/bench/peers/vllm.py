"""vLLM, stepped by hand in this process, which is its fastest way on few cores.

options: those of `vllm.LLM`. Environment variables such as VLLM_CPU_KVCACHE_SPACE are the caller's; memory for keys and
values is 4 GiB unless they say otherwise. Preload its libraries by a script that takes the place of PYTHON.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a script of its own, by an interpreter that may have nothing of hibachi
    from benchmarks.bench.peers.drive import Request


class Engine:
    count: int

    def __init__(self, settings: dict[str, Any]) -> None:
        for name, value in (
            ("VLLM_CPU_KVCACHE_SPACE", "4"),
            ("VLLM_CPU_OMP_THREADS_BIND", f"0-{settings['threads'] - 1}"),
            ("VLLM_CPU_NUM_OF_RESERVED_CPU", "0"),
            ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
            ("VLLM_LOGGING_LEVEL", "WARNING"),
            ("VLLM_NO_USAGE_STATS", "1"),
        ):
            os.environ.setdefault(name, value)
        began = time.perf_counter()
        import vllm

        self.import_seconds: float = time.perf_counter() - began
        self.version: Any = vllm.__version__
        self.params: Any = vllm.SamplingParams
        self.engine: Any = vllm.LLM(
            model=settings["model"],
            dtype=settings["dtype"],
            max_num_seqs=settings["rows"],
            max_model_len=settings["max_model_len"],
            enable_prefix_caching=settings["enable_prefix_caching"],
            disable_log_stats=True,
            seed=0,
            **settings["options"],
        ).llm_engine
        self.count = 0

    def run(self, requests: list[Request]) -> None:
        waiting = sorted(requests, key=lambda r: r.due)
        live: dict[str, Request] = {}
        while waiting or live:
            while waiting and waiting[0].due <= time.perf_counter():
                r = waiting.pop(0)
                self.count += 1
                live[str(self.count)] = r
                params = self.params(temperature=0.0, max_tokens=r.max_tokens, ignore_eos=True, detokenize=False)
                self.engine.add_request(str(self.count), {"prompt_token_ids": r.prompt}, params)
            if not live:
                time.sleep(max(0.0, waiting[0].due - time.perf_counter()))
                continue
            for out in self.engine.step():
                r, ids, now = live[out.request_id], list(out.outputs[0].token_ids), time.perf_counter()
                r.times += [now] * (len(ids) - len(r.times))
                r.tokens = ids
                if out.finished:
                    del live[out.request_id]
