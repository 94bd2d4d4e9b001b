"""transformers or kvboost in a process of its own, for `offline.py composed`. Needs that library and torch only.

    PYTHON offline_peers.py SETTINGS

SETTINGS is JSON: peer (transformers, kvboost, or "kvboost sorted"), model (a folder), dtype, batch, threads. The first
line of the output is {"version"}. Each line of the input, {"run": FILE of JSON lines with prompt and max_tokens,
"solo"}, is answered by {"seconds", "tokens": a list for each request}. solo: one by one, by transformers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

PAD = 2


class Transformers:
    """Static batches of `generate`, left-padded, in the file's order; each runs until its longest answer is there."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        import transformers

        torch.set_num_threads(settings["threads"])
        self.torch, self.batch, self.version = torch, settings["batch"], transformers.__version__
        loader = transformers.AutoModelForCausalLM
        self.model: Any = loader.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"])).eval()
        self.model.generation_config.eos_token_id = None  # among the arguments, None would mean the model's own

    def run(self, requests: list[dict[str, Any]]) -> list[list[int]]:
        return self.generate(requests, self.batch)

    def generate(self, requests: list[dict[str, Any]], batch: int) -> list[list[int]]:
        torch, found = self.torch, []
        for at in range(0, len(requests), batch):
            some = requests[at : at + batch]
            width = max(len(r["prompt"]) for r in some)
            ids = torch.tensor([[PAD] * (width - len(r["prompt"])) + r["prompt"] for r in some])
            mask = torch.tensor([[0] * (width - len(r["prompt"])) + [1] * len(r["prompt"]) for r in some])
            most = max(r["max_tokens"] for r in some)
            with torch.inference_mode():
                out = self.model.generate(
                    ids, attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=PAD
                )
            found += [row[width : width + r["max_tokens"]] for r, row in zip(some, out.tolist())]  # noqa: B905
        return found


class Ids:
    """A tokenizer that reads numbers, so that the tokens are the work's. Its end token is one that never comes."""

    eos_token_id, pad_token_id, bos_token_id, eos_token, chat_template = -1, PAD, 1, None, None

    def encode(self, text: str, **options: Any) -> list[int]:
        return list(map(int, text.split()))

    def __call__(self, text: str, **options: Any) -> dict[str, Any]:
        import torch

        return {"input_ids": torch.tensor([self.encode(text)])}

    def decode(self, ids: Any, **options: Any) -> str:
        return " ".join(str(int(i)) for i in ids)


class KVBoost(Transformers):
    """`generate_batch` of batches in the order of the file, with an empty cache. sorted: rows that share most of their
    prompt with another one first, what they all share warmed before (`warm`), which is timed."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        import kvboost

        self.kvboost, self.sorted = kvboost, settings["peer"].endswith("sorted")
        try:
            from importlib.metadata import version

            self.version = version("kvboost")
        except ImportError:
            self.version = kvboost.__version__

    def run(self, requests: list[dict[str, Any]]) -> list[list[int]]:
        engine = self.kvboost.KVBoost(self.model, Ids(), max_cache_bytes=2 << 30, device="cpu")
        order = list(range(len(requests)))
        if self.sorted:
            starts: dict[tuple[int, ...], list[int]] = {}
            for i, r in enumerate(requests):
                starts.setdefault(tuple(r["prompt"][:128]), []).append(i)
            groups = sorted(starts.values(), key=lambda group: -len(group))
            order = [i for group in groups for i in group]
            if len(groups[0]) > 1:
                columns = zip(*(requests[i]["prompt"] for i in groups[0]))  # noqa: B905
                shared = next((n for n, column in enumerate(columns) if len(set(column)) > 1), 0)
                if shared:
                    engine.warm(Ids().decode(requests[groups[0][0]]["prompt"][:shared]))
        found: dict[int, list[int]] = {}
        for at in range(0, len(order), self.batch):
            some = order[at : at + self.batch]
            texts = [Ids().decode(requests[i]["prompt"]) for i in some]
            most = max(requests[i]["max_tokens"] for i in some)
            for i, done in zip(some, engine.generate_batch(texts, max_new_tokens=most)):  # noqa: B905
                found[i] = Ids().encode(done.output_text)[: requests[i]["max_tokens"]]
        return [found[i] for i in range(len(requests))]


def main() -> None:
    settings = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is for nobody to parse
    os.environ["HF_HUB_OFFLINE"] = "1"

    def tell(**what: Any) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    peer = (KVBoost if settings["peer"].startswith("kvboost") else Transformers)(settings)
    warm = [{"prompt": [3 + i] * 16, "max_tokens": 2} for i in range(2)]
    peer.generate(warm, 2)
    tell(version=peer.version)
    for line in sys.stdin:
        asked = json.loads(line)
        with open(asked["run"]) as file:
            requests = [json.loads(one) for one in file]
        began = time.perf_counter()
        tokens = peer.generate(requests, 1) if asked["solo"] else peer.run(requests)
        tell(seconds=time.perf_counter() - began, tokens=tokens)


if __name__ == "__main__":
    main()
