"""What tiers save and cost: the first token of a long prompt, a block from each place, and steps that store only.

    python benchmarks/tiers.py [--model .smollm2] [--backend torch] [--redis redis://127.0.0.1:6379] [--tokens 2000]
        [--llama PYTHON]    # an interpreter that has llama-cpp-python: its saved sequences beside ours

One process after another opens the model, as after a restart. Times are medians; ratios are of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from hibachi import LLM, KVTiers, SamplingParams

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
HOST, DISK = 2 << 30, 4 << 30


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Seconds to it, and the tokens that were found."""
    began = time.perf_counter()
    out = llm.generate([prompt], ONE)[0]
    return time.perf_counter() - began, out.usage.cached if hasattr(out, "usage") else llm.stats().tier_hits


def opened(asked: argparse.Namespace, tiers: KVTiers | None, **options: Any) -> LLM:
    llm = LLM(asked.model, backend=asked.backend, kv_tiers=tiers, max_model_len=asked.tokens + 64, **options)
    llm.generate([[5, 6, 7]], ONE)
    return llm


def settled(llm: LLM) -> None:
    """Until all that was computed is kept."""
    host = llm.engine.core.tiering.host
    before = -1
    while before != host.counts.stored:
        before = host.counts.stored
        time.sleep(0.5)


def restarts(asked: argparse.Namespace, folder: Path) -> None:
    random = np.random.default_rng(0)
    prompts = [random.integers(5, 2000, asked.tokens).tolist() for _ in range(asked.rounds)]
    with opened(asked, None) as llm:
        computed = [first_token(llm, prompt)[0] for prompt in prompts]
    places = {"host": KVTiers(host_bytes=HOST), "disk": KVTiers(host_bytes=HOST, disk=folder, disk_bytes=DISK)}
    if asked.redis:
        places["redis"] = KVTiers(host_bytes=HOST, store=asked.redis)
    print(f"first token of {asked.tokens} tokens: computed {statistics.median(computed):.3f} s")
    for name, tiers in places.items():
        with opened(asked, tiers) as llm:
            for prompt in prompts:
                llm.generate([prompt], ONE)
            settled(llm)
            if name == "host":
                filler = [
                    random.integers(5, 2000, asked.tokens).tolist()
                    for _ in range(1 + llm.stats().blocks * 16 // asked.tokens)
                ]
                for prompt in filler:  # they take all blocks of the device
                    llm.generate([prompt], ONE)
                found = [first_token(llm, prompt)[0] for prompt in prompts]
                hits = llm.stats().tier_hits
        if name != "host":
            with opened(asked, tiers) as llm:
                found = [first_token(llm, prompt)[0] for prompt in prompts]
                hits = llm.stats().tier_hits
        ratio = statistics.median(found) / statistics.median(computed)
        print(f"  from {name:<6}{statistics.median(found):.4f} s, {ratio:.3f} of it; {hits} tokens loaded")


def slot_files(asked: argparse.Namespace, folder: Path) -> None:
    """What llama.cpp saves of a sequence, and reads in a new process."""
    random = np.random.default_rng(0)
    prompts = json.dumps([random.integers(5, 2000, asked.tokens).tolist() for _ in range(asked.rounds)])
    (model,) = Path(asked.model).glob("*.gguf")
    script = Path(__file__).with_name("slot_file.py")
    medians = []
    for what in ("save", "load"):
        command = [asked.llama, str(script), what, str(model), str(folder), str(os.cpu_count())]
        done = json.loads(subprocess.run(command, input=prompts, text=True, check=True, capture_output=True).stdout)
        medians.append(statistics.median(done["seconds"]))
    same = all((folder / f"{i}.save").read_text() == (folder / f"{i}.load").read_text() for i in range(asked.rounds))
    size = sum(file.stat().st_size for file in folder.glob("*.bin")) // asked.rounds
    print(f"llama.cpp: computed {medians[0]:.3f} s")
    print(
        f"  from a file of {size >> 10} KiB {medians[1]:.4f} s, {medians[1] / medians[0]:.3f} of it; same token: {same}"
    )


def overhead(asked: argparse.Namespace) -> None:
    """Prompts that nobody sends again, in a pool that evicts all the time."""
    random = np.random.default_rng(1)
    engines = {
        name: opened(asked, tiers, max_num_seqs=16, cache_tokens=16 * 600)
        for name, tiers in (("without", None), ("with", KVTiers(host_bytes=1 << 28)))
    }
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    ratios = []
    for turn in range(asked.rounds + 1):
        took = {}
        prompts = [random.integers(5, 2000, n).tolist() for n in random.integers(50, 250, 32)]
        for name, llm in engines.items():
            wall, spent = time.perf_counter(), time.process_time()
            llm.generate([list(p) for p in prompts], params)
            took[name] = time.perf_counter() - wall, time.process_time() - spent
        if turn:
            ratios.append([a / b for a, b in zip(took["with"], took["without"], strict=True)])
    wall, spent = (statistics.median(each) for each in zip(*ratios, strict=True))
    print(f"prompts without hits: {wall:.3f} of the time without tiers, {spent:.3f} of the processor time")
    for llm in engines.values():
        llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=".smollm2")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--redis", help="address of a server that may be written to")
    parser.add_argument("--llama", metavar="PYTHON", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        restarts(asked, Path(folder))
    if asked.llama:
        with tempfile.TemporaryDirectory() as folder:
            slot_files(asked, Path(folder))
    overhead(asked)


if __name__ == "__main__":
    main()
