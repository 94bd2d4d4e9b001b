"""OpenVINO GenAI's continuous batching, stepped by hand. model: a folder that optimum-intel has exported.

options: cache_gib (2), batched_tokens (512), and properties of the device in capitals, such as KV_CACHE_PRECISION.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a script of its own, by an interpreter that may have nothing of hibachi
    from benchmarks.bench.peers.drive import Request

_PRECISION = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}


class Engine:
    count: int
    openvino: Any
    genai: Any

    def __init__(self, settings: dict[str, Any]) -> None:
        began = time.perf_counter()
        import numpy
        import openvino
        import openvino_genai

        self.import_seconds: float = time.perf_counter() - began
        self.numpy, self.openvino, self.genai = numpy, openvino, openvino_genai
        self.version: Any = openvino_genai.__version__
        options = dict(settings["options"])
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = options.pop("cache_gib", 2)
        scheduler.max_num_batched_tokens = options.pop("batched_tokens", 512)
        scheduler.max_num_seqs = settings["rows"]
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = settings["enable_prefix_caching"]
        properties = {
            "INFERENCE_PRECISION_HINT": _PRECISION[settings["dtype"]],
            "INFERENCE_NUM_THREADS": settings["threads"],
            **options,
        }
        self.pipe: Any = openvino_genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", properties)
        self.count = 0

    def start(self, r: Request) -> Any:
        how = self.genai.GenerationConfig()
        how.max_new_tokens = how.min_new_tokens = r.max_tokens
        how.ignore_eos, how.do_sample = True, False
        self.count += 1
        return self.pipe.add_request(self.count, self.openvino.Tensor(self.numpy.array([r.prompt], "int64")), how)

    def run(self, requests: list[Request]) -> None:
        waiting = sorted(requests, key=lambda r: r.due)
        live: list[tuple[Request, Any]] = []
        while waiting or live:
            while waiting and waiting[0].due <= time.perf_counter():
                r = waiting.pop(0)
                live.append((r, self.start(r)))
            if not live:
                time.sleep(max(0.0, waiting[0].due - time.perf_counter()))
                continue
            self.pipe.step()
            now = time.perf_counter()
            for r, handle in live:
                while handle.can_read():
                    for out in handle.read().values():
                        r.tokens += list(out.generated_ids)
                        r.times += [now] * len(out.generated_ids)
            live = [(r, handle) for r, handle in live if len(r.tokens) < r.max_tokens]
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
