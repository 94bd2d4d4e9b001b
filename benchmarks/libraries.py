"""The step of a language model on NumPy, JAX and PyTorch, side by side: decode rows, and a prompt. Medians, in turns.

A step as the engine makes it: index arrays padded and put on the device, the model, greedy tokens back on the host.
Rows differ in length, as they do in an engine: from half of --context to all of it. Each library has a burst of steps
and then waits for the others, so that all see the same machine; their threads rest in between.

Expected before the first run (135M parameters in float32, two cores with AVX-512; from the libraries' own matrix
products, TFLOP/s at 64 rows: NumPy 0.18, JAX 0.28, PyTorch 0.15, native about 0.4, and prototypes of the whole step),
in ms for 1, 16, 64 rows and a prompt of 512: NumPy 20, 60, 160, 550; JAX 20, 43, 115, 330; PyTorch 35, 75, 210, 650;
its native kernels 12, 35, 75, 280. The same kernels under JAX, expected later: 0.9 times as fast as under PyTorch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

import hibachi
from benchmarks.bench.randommodel import SHAPES
from hibachi.engine.build import cached_runner
from hibachi.engine.runners.sampler import RowSampler
from hibachi.engine.runners.tokentable import IDS, Tables, TokenHistory
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.step import Limits
from hibachi.llm.model.arch import Arch, Layer, shapes
from hibachi.llm.model.decoder import Decoder
from hibachi.llm.model.rope import Rope

BLOCK = 16


def arch(shape: str, longest: int) -> Arch:
    size = SHAPES[shape]
    return Arch(
        layers=(Layer(),) * size["num_hidden_layers"],
        hidden_size=size["hidden_size"],
        intermediate=size["intermediate_size"],
        heads=size["num_attention_heads"],
        kv_heads=size["num_key_value_heads"],
        head_dim=size["hidden_size"] // size["num_attention_heads"],
        vocab_size=size["vocab_size"],
        tied=size["tie_word_embeddings"],
        max_positions=longest,
        norm_eps=1e-5,
        ropes=(Rope(dims=size["hidden_size"] // size["num_attention_heads"], theta=1e4),),
    )


def backends(names: list[str]) -> dict[str, Any]:
    """By the names that --library takes."""
    made: dict[str, Callable[[], Any]] = {
        "numpy": lambda: hibachi.load_backend("numpy"),
        "jax": lambda: _jax(native=False),
        "jax-native": lambda: _jax(native=True),
        "torch": lambda: _torch(native=False),
        "native": lambda: _torch(native=True),
    }
    return {
        name: backend.invariant() if exact else backend
        for name, exact, backend in ((n, n.endswith("-exact"), made[n.removesuffix("-exact")]()) for n in names)
    }


def _torch(native: bool) -> Any:
    from hibachi_torch import TorchBackend

    return TorchBackend("cpu", native=native)


def _jax(native: bool) -> Any:
    from hibachi_jax import JaxBackend

    return JaxBackend("cpu", native=native)


class Steps:
    """A model on one library, and the steps that it can be asked to make."""

    def __init__(self, backend: Any, what: Arch, tensors: dict[str, Any], *, rows: int, longest: int) -> None:
        model = Decoder.build(what, tensors, backend)
        limits = Limits(rows, 2048, 2048, longest, rows * longest // BLOCK + 1, BLOCK)
        tables = Tables(rows, IDS)
        sampler = RowSampler(backend, rows, what.vocab_size, tables.of(IDS))
        self.backend, self.sampler = backend, sampler
        self.kept: list[TokenHistory] = []
        self.runner = cached_runner(model, backend, Scheduler(limits), tables, sampler, "float32")
        for row in range(rows):
            tokens = np.random.default_rng(row).integers(0, what.vocab_size, longest).astype(np.int32)
            self.kept.append(TokenHistory(tokens))
            tables.fill(row, IDS, self.kept[-1])
            each = longest // BLOCK
            self.runner.inputs.block_table[row] = np.arange(1 + row * each, 1 + (row + 1) * each)

    def step(self, starts: Any, each: Any) -> Any:
        """Greedy tokens of a step in which row i computes each[i] tokens from starts[i] on."""
        rows, runner = np.arange(len(starts)), self.runner
        with self.backend.guard():
            tokens = []
            calls = (
                runner.calls(rows, starts, each, runner.inputs.sizes) if runner.inputs.sizes else [(rows, starts, each)]
            )
            for mine, at, n in calls:
                x = runner.inputs.packed(rows[mine], at, n, at + n == (starts + each)[mine])
                out, runner.memory.cache = runner.main.step(runner.model.params, runner.memory.cache, x)
                tokens.append(self.sampler._greedy(out)[0])
            return [self.backend.get(t) for t in tokens]


def loads(context: int, rows: list[int], prompt: int) -> dict[str, tuple[Any, Any]]:
    """Starts and numbers of tokens of each step that is measured."""
    found = {}
    for n in rows:
        starts = np.random.default_rng(n).integers(context // 2, context, n).astype(np.int32)
        starts[0] = context - 1
        found[f"{n} rows"] = (starts, np.ones(n, np.int32))
    found[f"prompt of {prompt}"] = (np.zeros(1, np.int32), np.array([prompt], np.int32))
    return found


def measure(steps: dict[str, Steps], load: tuple[Any, Any], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Medians of each library's bursts, in seconds."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for s in steps.values():
        s.step(*load)  # compiles
    for _ in range(rounds):
        for name, s in steps.items():
            time.sleep(0.05)  # until the threads of the one before have stopped to look for work
            s.step(*load)
            times: list[float] = []
            while len(times) < 3 or sum(times) < seconds:
                began = time.perf_counter()
                s.step(*load)
                times.append(time.perf_counter() - began)
            found[name].append(median(times))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", nargs="+", default=["torch", "numpy", "native", "jax"], metavar="NAME",
                        help="torch, native (its kernels in C++), numpy, jax, jax-native; with -exact: "
                        "deterministic")  # fmt: skip
    parser.add_argument("--shape", choices=list(SHAPES), default="135m")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=192, help="of the longest row")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a burst")
    args = parser.parse_args()
    longest = 512 if max(args.context, args.prompt) <= 512 else 2048
    what = arch(args.shape, longest)
    random = np.random.default_rng(0)
    tensors = {
        name: random.standard_normal(s, dtype=np.float32) * 0.05 if len(s) > 1 else np.ones(s, np.float32)
        for name, s in shapes(what)[0].items()
    }
    found = backends(args.library)
    print("; ".join(b.fingerprint() for b in found.values()))
    made = {n: Steps(b, what, tensors, rows=max(args.rows), longest=longest) for n, b in found.items()}
    del tensors
    first = args.library[0]
    print(f"\n| step, {args.shape} float32, ms | {' | '.join(made)} | speed beside {first} |")
    print(f"|---{'|---' * (len(made) + 1)}|")
    for title, load in loads(args.context, args.rows, args.prompt).items():
        times = measure(made, load, args.rounds, args.seconds)
        cells = [f"{1e3 * median(t):.1f}" for t in times.values()]
        ratios = [
            f"{n} {median(a / b for a, b in zip(times[first], t, strict=True)):.2f}x"
            for n, t in times.items()
            if n != first
        ]
        print(f"| {title} | {' | '.join(cells)} | {', '.join(ratios)} |", flush=True)
