"""Native kernels of the torch backend beside plain PyTorch and oneDNN's packed products: minima and medians.

Everything is measured in turns, so that all see the same machine. With --threads 1 the clock is the CPU time of the
thread, which other work on the machine disturbs less than wall time.

Expected before the first run, on two quiet cores with AVX512_BF16 (from the memory's 70 GB/s, 0.85 TFLOP/s, and what
oneDNN reaches): linear bf16, K=576 N=3072: 0.06, 0.4, 0.65, 0.85 TFLOP/s at 1, 16, 64, 256 rows; attention of 64 rows
x 192 positions 150-250 us; a decode step of 135M parameters 8 ms for one row, 45 ms for 64.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from itertools import cycle
from statistics import median
from typing import Any

import numpy as np
import torch

import hibachi
from hibachi import Paged, StepInputs
from hibachi.engine.scheduler.lower import lower
from hibachi.llm.model.arch import Arch, Layer, shapes
from hibachi.llm.model.decoder import Decoder
from hibachi.llm.model.rope import Rope
from hibachi_torch import TorchBackend

BLOCK = 16
COLD = 150e6  # bytes of weights that are passed through in turn, so that none is in a cache
SMOLLM2 = dict(hidden_size=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab_size=49152)


def interleaved(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, tuple[float, float]]:
    """Minimum and median seconds of each call, made in turns."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 4:
        for name, call in calls.items():
            began = clock()
            call()
            times[name].append(clock() - began)
    return {name: (min(t), median(t)) for name, t in times.items()}


def row(what: str, times: dict[str, tuple[float, float]], show: Callable[[float], str]) -> None:
    first = next(iter(times.values()))
    cells = [f"{show(low)} / {show(mid)}" for low, mid in times.values()]
    ratios = [f"{first[0] / low:.1f}x" for low, _ in list(times.values())[1:]]
    print(f"| {what} | {' | '.join(cells)} | {', '.join(ratios)} |", flush=True)


def head(title: str, names: list[str]) -> None:
    print(f"\n| {title} | {' | '.join(names)} | faster than {names[0]} |\n|---{'|---' * (len(names) + 1)}|")


def linears(dtype: str, seconds: float) -> None:
    native = TorchBackend("cpu", native=True)
    kind = native.dtype(dtype)
    head(f"linear {dtype}, cold weights, TFLOP/s", ["torch", "oneDNN packed", "native"])
    for n, k in ((3072, 576), (576, 1536), (49152, 576)):
        copies = max(2, int(COLD / (n * k * kind.itemsize)))
        plain = [torch.randn(n, k).to(kind) for _ in range(copies)]
        packed = [torch.ops.mkldnn._reorder_linear_weight(w, 64) for w in plain]
        ours = [native.put_weight(native.get(w), dtype) for w in plain]
        for m in (1, 4, 16, 64, 256):
            times = interleaved(multiplications(torch.randn(m, k).to(kind), plain, packed, ours), seconds)
            row(f"{m} x {k} -> {n}", times, lambda s, work=2 * m * n * k: f"{work / s / 1e12:.3f}")


def multiplications(x: Any, plain: list[Any], packed: list[Any], ours: list[Any]) -> dict[str, Callable[[], Any]]:
    native, turns = TorchBackend("cpu", native=True), [cycle(ws) for ws in (plain, packed, ours)]
    return {
        "torch": lambda: torch.nn.functional.linear(x, next(turns[0])),
        "oneDNN": lambda: torch.ops.mkldnn._linear_pointwise(x, next(turns[1]), None, "none", [], ""),
        "native": lambda: native.linear(x, next(turns[2])),
    }


def step_inputs(backend: Any, tokens: Any, starts: list[int], each: list[int]) -> StepInputs[Any]:
    n, per = len(starts), -(-max(s + q for s, q in zip(starts, each, strict=True)) // BLOCK)
    table = np.arange(1, 1 + n * per, dtype=np.int32).reshape(n, per)
    every = np.ones(n, bool)
    tiles = backend.shapes.tiles
    packed = lower(
        np.arange(n),
        np.array(starts, np.int32),
        np.array(each, np.int32),
        every,
        table,
        BLOCK,
        tiles=tiles,
    )
    fields = {f.name: backend.put(getattr(packed, f.name)) for f in dataclasses.fields(packed)}
    return StepInputs(tok=backend.put(tokens), **fields)


def attentions(dtype: str, seconds: float) -> None:
    backends = {"torch": TorchBackend("cpu", native=False), "native": TorchBackend("cpu", native=True)}
    head(f"attention {dtype}, 9 heads, 3 of keys, 64 wide, one layer, us", list(backends))
    cases = {
        "decode, 1 x 256 positions": ([255], [1]),
        "decode, 1 x 2048": ([2047], [1]),
        "decode, 64 x 192": ([191] * 64, [1] * 64),
        "prompt of 512": ([0], [512]),
        "32 x 192 decode beside 3 prompts of 128": ([191] * 32 + [0] * 3, [1] * 32 + [128] * 3),
    }
    for name, (starts, each) in cases.items():
        total, blocks = sum(each), 1 + len(starts) * (2048 // BLOCK)
        calls = {}
        for which, b in backends.items():
            x = step_inputs(b, np.zeros(total, np.int32), starts, each)
            q, k, v = (torch.randn(total, heads, 64).to(b.dtype(dtype)) for heads in (9, 3, 3))
            # Several layers in turn, as many as a step has, so that keys and values come from memory.
            layers = min(30, int(COLD / (blocks * BLOCK * 768)) + 2)
            spec, options = Paged(3, 64, 64), dict(blocks=blocks, block_size=BLOCK, rows=1, dtype=dtype)
            caches = [b.make_cache(spec, **options) for _ in range(layers)]
            for cache in caches:
                for half in cache if isinstance(cache, tuple) else (cache.keys, cache.values):
                    half.normal_()  # zeros need no memory until they are written to
            cache = cycle(caches)
            calls[which] = lambda b=b, q=q, k=k, v=v, x=x, cache=cache: b.attend(q, k, v, next(cache), x)
        row(name, interleaved(calls, seconds), lambda s: f"{s * 1e6:.0f}")


def model(backend: Any, dtype: str, layers: int = 30) -> Decoder:
    """The shape of SmolLM2-135M with random weights."""
    ropes = (Rope(dims=64, theta=1e4),)
    arch = Arch(layers=(Layer(),) * layers, max_positions=2048, norm_eps=1e-5, ropes=ropes, tied=True, **SMOLLM2)
    random = np.random.default_rng(0)
    tensors = {
        name: random.standard_normal(shape, dtype=np.float32) * 0.05 if len(shape) > 1 else np.ones(shape, np.float32)
        for name, shape in shapes(arch)[0].items()
    }
    return Decoder.build(arch, tensors, backend, dtype=dtype)


def kinds() -> dict[str, Any]:
    plain = TorchBackend("cpu", native=False)
    return {"torch": plain, "deterministic, oneDNN": plain.invariant(), "native": TorchBackend("cpu", native=True)}


def steps(dtype: str, seconds: float) -> None:
    models = {name: model(b, dtype) for name, b in kinds().items()}
    head(f"model.step, 135M {dtype}, ms", list(models))
    for rows, start, each in ((1, 191, 1), (4, 191, 1), (16, 191, 1), (64, 191, 1), (1, 0, 128), (6, 0, 79)):
        calls = {}
        for name, m in models.items():
            tokens = np.random.default_rng(1).integers(0, 49152, rows * each).astype(np.int32)
            x = step_inputs(m.backend, tokens, [start] * rows, [each] * rows)
            blocks = 1 + rows * x.block_table.shape[1]
            cache = [
                m.backend.make_cache(s, blocks=blocks, block_size=BLOCK, rows=rows, dtype=dtype) for s in m.cache_spec()
            ]
            calls[name] = lambda m=m, cache=cache, x=x: m.step(m.params, cache, x)
        with torch.inference_mode():
            what = f"{rows} rows at {start}" if each == 1 else f"{rows} prompts of {each}"
            row(what, interleaved(calls, seconds), lambda s: f"{s * 1e3:.1f}")


def whole(dtype: str, repeat: int) -> None:
    """Requests through the engine: one of 128 + 128 tokens, and 64 of 79 + 69 at once. Greedy; all the prompts too.

    With one thread the clock is the CPU time of the process.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    print(f"\n| through the engine, 135M {dtype}, tokens/s of output (best / median) | 1 x 128 + 128 | 64 x 79 + 69 |")
    print("|---|---|---|")
    random = np.random.default_rng(2)
    loads = [[random.integers(0, 49152, n).tolist() for _ in range(count)] for count, n in ((1, 128), (64, 79))]
    engines = {
        name: hibachi.AutoregressiveBatchInference(model(b, dtype), max_num_seqs=64, max_model_len=1024, backend=b)
        for name, b in kinds().items()
    }
    rates: dict[str, list[list[float]]] = {name: [[], []] for name in engines}
    for _ in range(repeat):
        for name, engine in engines.items():
            for kind, (prompts, new) in enumerate(zip(loads, (128, 69), strict=True)):
                began = clock()
                for stream in [engine.run(p, max_tokens=new) for p in prompts]:
                    assert len(list(stream)) == new
                rates[name][kind].append(len(prompts) * new / (clock() - began))
    for name, both in rates.items():
        print(f"| {name} | {' | '.join(f'{max(r):.0f} / {median(r):.0f}' for r in both)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", action="append", choices=("bfloat16", "float32"))
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row of a table")
    parser.add_argument("--part", action="append", choices=("linear", "attention", "step", "engine"))
    parser.add_argument("--repeat", type=int, default=3, help="how often requests go through the engine")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{TorchBackend('cpu', native=True).fingerprint()}; minima / medians")
    every = {
        "linear": lambda dtype: linears(dtype, args.seconds),
        "attention": lambda dtype: attentions(dtype, args.seconds),
        "step": lambda dtype: steps(dtype, 3 * args.seconds),
        "engine": lambda dtype: whole(dtype, args.repeat),
    }
    for dtype in args.dtype or ("bfloat16", "float32"):
        for part in args.part or every:
            every[part](dtype)
