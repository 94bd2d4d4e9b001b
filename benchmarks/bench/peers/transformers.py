"""transformers: static batches of `generate` for work that is there at once, else its continuous batching.

options: way ("static" or "continuous", where the work should not decide), batch (of a static batch, 16), attention
("sdpa"), blocks and block_size of continuous batching (its own default takes most of the machine's memory).
A static batch runs until its longest answer is there; tokens that nobody asked for do not count.
"""

from __future__ import annotations

import importlib
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a script of its own, by an interpreter that may have nothing of hibachi
    from benchmarks.bench.peers.drive import Request


class Engine:
    turn: int
    version: str
    batch: int
    way: Any
    blocks: int
    rows: Any

    def __init__(self, settings: dict[str, Any]) -> None:
        began = time.perf_counter()
        import torch
        import transformers

        loader = transformers.AutoModelForCausalLM  # some of it is imported only now
        self.import_seconds: float = time.perf_counter() - began
        self.torch, self.transformers, self.version = torch, transformers, transformers.__version__
        torch.set_num_threads(settings["threads"])
        options = settings["options"]
        self.batch, self.way = int(options.get("batch", min(settings["rows"], 16))), options.get("way")
        self.block_size: int = int(options.get("block_size", 32))
        room = -(-settings["max_model_len"] // self.block_size) * settings["rows"]
        self.blocks, self.rows = int(options.get("blocks", room)), settings["rows"]
        dtype, attention = getattr(torch, settings["dtype"]), options.get("attention", "sdpa")
        self.model: Any = loader.from_pretrained(settings["model"], dtype=dtype, attn_implementation=attention).eval()
        self.manager: Any = None
        self.turn = 0

    def run(self, requests: list[Request]) -> None:
        way = self.way or ("continuous" if any(r.arrival for r in requests) else "static")
        with self.torch.no_grad():  # inference_mode does not go with the manager's thread
            if way == "continuous":
                self.continuous(requests)
                return
            for i in range(0, len(requests), self.batch):
                self.static(requests[i : i + self.batch])

    def static(self, requests: list[Request]) -> None:
        from transformers import StoppingCriteria

        torch, width = self.torch, max(len(r.prompt) for r in requests)
        ids = torch.tensor([[0] * (width - len(r.prompt)) + r.prompt for r in requests])
        mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in requests])
        steps = max(r.max_tokens for r in requests)
        stamps: list[float] = []

        class Tick(StoppingCriteria):
            def __call__(self, ids: Any, scores: Any, **options: Any) -> Any:
                stamps.append(time.perf_counter())
                return torch.zeros(ids.shape[0], dtype=torch.bool)

        # "No end token" must be said of the model's own settings: None among the arguments means those.
        self.model.generation_config.eos_token_id = None
        out = self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=steps,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[Tick()],
        )
        for r, row in zip(requests, out.tolist()):  # noqa: B905  (3.9 has no strict)
            r.tokens, r.times = row[width : width + r.max_tokens], stamps[: r.max_tokens]

    def continuous(self, requests: list[Request]) -> None:
        manager = self.manager or self.start_manager()
        self.turn += 1
        by_id = {f"{self.turn}-{r.id}": r for r in requests}

        def feed() -> None:
            for name, r in sorted(by_id.items(), key=lambda each: each[1].due):
                time.sleep(max(0.0, r.due - time.perf_counter()))
                manager.add_request(r.prompt, request_id=name, max_new_tokens=r.max_tokens, record_timestamps=True)

        feeder = threading.Thread(target=feed)
        feeder.start()
        left = len(requests)
        while left:
            out = manager.get_result(timeout=1)
            if out is None:
                if not manager.is_running():
                    raise RuntimeError("the manager of continuous batching stopped")
            elif out.is_finished():
                if out.error:
                    raise RuntimeError(out.error)
                r = by_id[out.request_id]
                r.tokens, r.times = list(out.generated_tokens), list(out.timestamps)
                left -= 1
        feeder.join()

    def start_manager(self) -> Any:
        how = self.transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=4096)
        room = importlib.import_module("transformers.generation").ContinuousBatchingConfig(
            max_requests_per_batch=self.rows, num_blocks=self.blocks, page_size=self.block_size
        )
        self.context: Any = self.model.continuous_batching_context_manager(
            generation_config=how, continuous_batching_config=room
        )
        self.manager = self.context.__enter__()
        return self.manager

    def close(self) -> None:
        if self.manager is not None:
            self.context.__exit__(None, None, None)
