"""The CUDA path of the torch backend on one GPU: is it right, how fast is it, and how near to the memory's limit?

    python benchmarks/gpu.py --out gpu.json                # on an H100 or the like, within ten minutes
    python benchmarks/gpu.py --device cpu --small          # the same script in a minute, to see that it runs

Agreement with the CPU in float32; decoding at 1, 16, 64 and 256 rows of two Llama shapes in bfloat16 with random
weights, launched kernel by kernel and as CUDA graphs, beside the time that reading weights and keys and values takes
at the bandwidth that was measured, and beside transformers' continuous batching where it is installed; whether a
request's logits depend on its company; peak memory.

Expected on an H100 before the first run (3.35 TB/s of memory on paper, 2.8 measured by a copy; 30 layers of about 20
kernels, 5 us of Python to launch one): 135M: 0.12 ms a step to read the weights, 3-4 ms kernel by kernel, 1 ms as a
graph; 8B: 5.7 ms to read 16 GB, 7 ms as a graph at 1 to 64 rows, 9 ms at 256.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from statistics import median
from typing import Any

import numpy as np
import torch

import hibachi
from hibachi import StepInputs
from hibachi.model.arch import Arch, Layer, shapes
from hibachi.model.decoder import Decoder
from hibachi.model.rope import Rope, tables
from hibachi.plan.lower import Packed, lower
from hibachi_torch import TorchBackend
from hibachi_torch.cuda import CudaTorchBackend

SEED, SPREAD = 0, 0.02


def llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool) -> Arch:
    return Arch(
        hidden_size=hidden,
        intermediate=inner,
        layers=(Layer(),) * layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        tied=tied,
        max_positions=4096,
        norm_eps=1e-5,
        ropes=(Rope(dims=hidden // heads, theta=1e5),),
    )


TINY = llama(64, 176, 2, 4, 2, 512, True)
ARCHS = {
    "135m": llama(576, 1536, 30, 9, 3, 49152, True),  # of SmolLM2-135M
    "8b": llama(4096, 14336, 32, 32, 8, 128256, False),  # of Llama 3 8B
}


def greedy(tokens: int) -> hibachi.SamplingParams:
    return hibachi.SamplingParams(max_tokens=tokens, temperature=0)


def answers(streams: list[Any]) -> list[list[int]]:
    return [list(stream) for stream in streams]


class Clock:
    """Parts that do not fit in the time are skipped, and say so."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        return self._end - time.perf_counter()


# ---- models --------------------------------------------------------------------------------------------------------


def model_on_device(arch: Arch, backend: TorchBackend, dtype: str, max_model_len: int) -> Decoder:
    """A decoder whose weights are drawn on the device: 16 GB by NumPy would take minutes."""
    device, kind = backend.device, backend.dtype(dtype)
    made = torch.Generator(device).manual_seed(SEED)

    def normal(*shape: int) -> Any:
        return torch.empty(shape, dtype=kind, device=device).normal_(0, SPREAD, generator=made)

    def ones() -> Any:
        return torch.ones(arch.hidden_size, dtype=kind, device=device)

    width, kv_width = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    embed = normal(arch.vocab_size, arch.hidden_size)
    params = {
        "embed": embed,
        "head": embed if arch.tied else normal(arch.vocab_size, arch.hidden_size),
        "norm": ones(),
        "ropes": [tuple(backend.put(t, dtype) for t in tables(rope, max_model_len)) for rope in arch.ropes],
        "layers": [
            {
                "attn_norm": ones(),
                "mlp_norm": ones(),
                "qkv": normal(width + 2 * kv_width, arch.hidden_size),
                "o": normal(arch.hidden_size, width),
                "gate_up": normal(2 * arch.intermediate, arch.hidden_size),
                "down": normal(arch.hidden_size, arch.intermediate),
            }
            for _ in arch.layers
        ],
    }
    return Decoder(arch, params, backend, dtype=dtype, max_model_len=max_model_len)


def same_weights(arch: Arch) -> dict[str, Any]:
    rng = np.random.default_rng(SEED)
    return {
        name: rng.standard_normal(shape, dtype=np.float32) * 0.05 if len(shape) > 1 else np.ones(shape, np.float32)
        for name, shape in shapes(arch)[0].items()
    }


def weight_bytes(decoder: Decoder) -> int:
    """What a decode step reads of the weights: all but an embedding that is not the head."""
    p = decoder.params
    return sum(t.nbytes for t in [p["head"], p["norm"], *(t for layer in p["layers"] for t in layer.values())])


# ---- one step, by hand ---------------------------------------------------------------------------------------------


class Steps:
    """Steps of a decoder on rows with blocks of their own, without an engine."""

    def __init__(self, decoder: Decoder, rows: int, max_model_len: int) -> None:
        self.decoder, self.backend = decoder, decoder.backend
        self.size = self.backend.block_size
        width = -(-max_model_len // self.size)
        self.table = 1 + np.arange(rows * width, dtype=np.int32).reshape(rows, width)
        self.cache = [
            self.backend.make_cache(s, blocks=1 + rows * width, block_size=self.size, rows=rows, dtype=decoder.dtype)
            for s in decoder.cache_spec()
        ]

    def run(self, rows: Any, start: Any, tokens: list[list[int]], *, every: bool = False) -> Any:
        """Logits, on the device, after the last token of each row, or after all of them."""
        q = np.array([len(t) for t in tokens], np.int32)
        packed = lower(
            np.asarray(rows),
            np.asarray(start, np.int32),
            q,
            np.ones(len(q), bool),
            self.table,
            self.size,
            score=q - 1 if every else None,
        )
        flat = np.concatenate([np.array(t, np.int32) for t in tokens])
        names = [f.name for f in fields(Packed)]
        tok, *rest = self.backend.put_all([flat, *(getattr(packed, name) for name in names)])
        x = StepInputs(tok=tok, **dict(zip(names, rest, strict=True)))
        with self.backend.guard():
            out, self.cache = self.decoder.step(self.decoder.params, self.cache, x)
        return out


# ---- parts ---------------------------------------------------------------------------------------------------------


def agreement(device: str, small: bool) -> dict[str, Any]:
    """A small Llama on the device against the CPU in float32: logits of prompts, greedy tokens of an engine."""
    arch = TINY if small else llama(256, 704, 4, 8, 2, 2048, True)
    weights, max_model_len = same_weights(arch), 640
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, arch.vocab_size, n).tolist() for n in (3, 17, 300, 64)]

    def logits(backend: TorchBackend, dtype: str) -> Any:
        steps = Steps(
            Decoder.build(arch, weights, backend, dtype=dtype, max_model_len=max_model_len), len(prompts), max_model_len
        )
        at = [len(p) for p in prompts]
        first = steps.run(range(len(prompts)), [0] * len(prompts), prompts, every=True)
        parts = [first.float().cpu()]
        for n in range(4):  # and some steps that decode, over the same cache
            nexts = [[(7 * n + i) % arch.vocab_size] for i in range(len(prompts))]
            parts.append(steps.run(range(len(prompts)), [p + n for p in at], nexts).float().cpu())
        return torch.cat(parts)

    def tokens(backend: TorchBackend, dtype: str) -> list[list[int]]:
        decoder = Decoder.build(arch, weights, backend, dtype=dtype, max_model_len=max_model_len)
        with hibachi.AutoregressiveBatchInference(
            decoder, backend=backend, dtype=dtype, max_model_len=max_model_len, deterministic=False
        ) as engine:
            return answers([engine.run(p, greedy(48)) for p in prompts])

    reference = TorchBackend("cpu", native=False)
    want, expected = logits(reference, "float32"), tokens(reference, "float32")
    out: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        backend = CudaTorchBackend(device)
        got = logits(backend, dtype)
        own = tokens(backend, dtype)
        pairs = [(a, b) for mine, theirs in zip(own, expected, strict=True) for a, b in zip(mine, theirs, strict=True)]
        out[dtype] = {
            "largest_difference": float((got - want).abs().max()),
            "spread_of_logits": float(want.std()),
            "same_argmax": float((got.argmax(-1) == want.argmax(-1)).float().mean()),
            "same_tokens": sum(a == b for a, b in pairs) / len(pairs),
            "requests_equal": sum(a == b for a, b in zip(own, expected, strict=True)),
            "requests": len(expected),
            "backend": backend.remarks(),
        }
    return out


def bandwidth(device: torch.device, small: bool) -> float:
    """Bytes a second of a copy, what it reads and what it writes."""
    size = 2**24 if small else 2**31
    a, b = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    times = []
    for _ in range(8):
        times.append(seconds(device, lambda: b.copy_(a)))
    return 2 * size / median(times[2:])


def seconds(device: torch.device, call: Callable[[], Any]) -> float:
    wait(device)
    began = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - began


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def decoding(decoder: Decoder, rows: int, prompt: int, new: int) -> dict[str, float]:
    """Tokens a second while all rows decode, of the second of two runs of an engine."""
    rng = np.random.default_rng(2)
    vocab = decoder.arch.vocab_size
    with hibachi.AutoregressiveBatchInference(
        decoder,
        backend=decoder.backend,
        dtype=decoder.dtype,
        max_num_seqs=rows,
        max_model_len=prompt + new,
        deterministic=False,
        enable_prefix_caching=False,
    ) as engine:
        for _ in range(2):  # the first records graphs and lets libraries choose their kernels
            before = engine.stats()
            streams = [engine.run(rng.integers(0, vocab, prompt).tolist(), greedy(new)) for _ in range(rows)]
            marks = []
            while True:
                stats = engine.stats()
                done = stats.new_tokens - before.new_tokens
                marks.append((time.perf_counter(), done, stats.steps))
                if done >= rows * new:
                    break
                time.sleep(0.002)
            assert all(len(a) == new for a in answers(streams))
    begin = next(m for m in marks if m[1] >= rows * min(4, new // 2))  # all have started
    end = marks[-1]
    took, steps = end[0] - begin[0], end[2] - begin[2]
    return {"tokens_per_s": (end[1] - begin[1]) / took, "ms_per_step": took / steps * 1e3}


def throughput(name: str, arch: Arch, args: argparse.Namespace, clock: Clock, bytes_per_s: float) -> Iterator[Any]:
    prompt, new = (8, 12) if args.small else (128, 96)
    device = torch.device(args.device)
    eager = CudaTorchBackend(args.device, graphs=False)
    decoder = model_on_device(arch, eager, "bfloat16", prompt + new)
    weights = weight_bytes(decoder)
    position = 2 * 2 * arch.kv_heads * arch.head_dim * len(arch.layers)  # bytes of keys and values, bfloat16
    context = prompt + new / 2
    for rows in args.rows:
        bound = (weights + rows * context * position) / bytes_per_s
        result: dict[str, Any] = {"model": name, "rows": rows, "bound_ms": bound * 1e3, "bound": rows / bound}
        for way, graphs in (("eager", False), ("graphs", True)):
            if clock.left < 60:
                result[way] = {"skipped": "no time left"}
                continue
            backend = CudaTorchBackend(args.device, graphs=graphs)
            own = Decoder(arch, decoder.params, backend, dtype="bfloat16", max_model_len=prompt + new)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            with reported(result, way):
                result[way] = decoding(own, rows, prompt, new)
                result[way]["of_bound"] = result[way]["tokens_per_s"] * bound / rows
                result[way]["backend"] = backend.remarks()
                if device.type == "cuda":
                    result[way]["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
            release(device)
        yield result
    del decoder, own
    release(device)


def transformers_throughput(name: str, arch: Arch, args: argparse.Namespace, clock: Clock) -> Iterator[Any]:
    """Continuous batching of transformers on the same shape, rows and lengths, prompts included in the time."""
    prompt, new = (8, 12) if args.small else (128, 96)
    try:
        import transformers
        from transformers.generation import ContinuousBatchingConfig
    except ImportError as e:
        yield {"model": name, "skipped": f"transformers has no continuous batching here: {e}"}
        return
    config = transformers.LlamaConfig(
        hidden_size=arch.hidden_size,
        intermediate_size=arch.intermediate,
        num_hidden_layers=len(arch.layers),
        num_attention_heads=arch.heads,
        num_key_value_heads=arch.kv_heads,
        vocab_size=arch.vocab_size,
        tie_word_embeddings=arch.tied,
        max_position_embeddings=4096,
    )
    with torch.device(args.device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    rng = np.random.default_rng(2)
    for rows in args.rows:
        result: dict[str, Any] = {"model": name, "rows": rows, "version": transformers.__version__}
        if clock.left < 90:
            yield result | {"skipped": "no time left"}
            continue
        prompts = [rng.integers(0, arch.vocab_size, prompt).tolist() for _ in range(rows)]
        how = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=new)
        room = ContinuousBatchingConfig(
            max_requests_per_batch=rows, num_blocks=-(-(prompt + new) // 32) * rows + 8, page_size=32
        )

        def generate(model: Any = model, prompts: Any = prompts, how: Any = how, room: Any = room) -> int:
            with torch.no_grad():  # inference_mode does not go with its thread
                out = model.generate_batch(
                    prompts, generation_config=how, continuous_batching_config=room, progress_bar=False
                )
            return sum(len(r.generated_tokens) for r in out.values())

        with reported(result, "continuous"):
            generate()
            began = time.perf_counter()
            tokens = generate()
            took = time.perf_counter() - began
            result["continuous"] = {"tokens_per_s_with_prompts": tokens / took, "tokens": tokens, "seconds": took}
        yield result
    del model
    release(torch.device(args.device))


def company(arch: Arch, args: argparse.Namespace) -> dict[str, Any]:
    """A request's logits in a step of its own and beside others; its tokens alone in an engine and in company."""
    backend = CudaTorchBackend(args.device)
    max_model_len, rows, prompt = (64, 4, 8) if args.small else (512, 64, 100)
    decoder = model_on_device(arch, backend, "bfloat16", max_model_len)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, arch.vocab_size, prompt).tolist() for _ in range(rows)]
    steps = Steps(decoder, rows, max_model_len)
    steps.run(range(rows), [0] * rows, prompts)
    nexts = [[int(n)] for n in rng.integers(0, arch.vocab_size, rows)]
    alone = steps.run([0], [prompt], nexts[:1])[0]
    among = steps.run(range(rows), [prompt] * rows, nexts)[0]
    again = steps.run(range(rows), [prompt] * rows, nexts)[0]

    def tokens(count: int) -> list[int]:
        with hibachi.AutoregressiveBatchInference(
            decoder,
            backend=backend,
            dtype="bfloat16",
            max_num_seqs=rows,
            max_model_len=max_model_len,
            deterministic=False,
        ) as engine:
            streams = [engine.run(p, greedy(max_model_len // 4)) for p in prompts[:count]]
            return answers(streams)[0]

    one, many = tokens(1), tokens(rows)
    return {
        "rows": rows,
        "logits_that_differ": float((alone != among).float().mean()),
        "largest_difference": float((alone - among).abs().max()),
        "bits_that_differ": bits(alone, among),
        "logits_that_differ_between_equal_steps": float((again != among).float().mean()),
        "tokens": len(one),
        "tokens_until_they_differ": next((i for i, (a, b) in enumerate(zip(one, many, strict=True)) if a != b), None),
    }


def bits(a: Any, b: Any) -> float:
    """Bits of float32 numbers that differ, on average."""
    mine, theirs = (t.float().cpu().numpy().view(np.uint32) for t in (a, b))
    return float(np.unpackbits((mine ^ theirs).view(np.uint8)).sum() / mine.size)


# ---- the whole -----------------------------------------------------------------------------------------------------


@contextmanager
def reported(into: dict[str, Any], what: str) -> Iterator[None]:
    """A part that fails is part of the result, and does not end the run."""
    try:
        yield
    except Exception as e:
        traceback.print_exc()
        into[what] = {"failed": f"{type(e).__name__}: {e}"}


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def show(result: dict[str, Any]) -> None:
    if "continuous" in result or "skipped" in result:
        found = result.get("continuous", {})
        rate = found.get("tokens_per_s_with_prompts")
        said = f"{rate:9.0f} tokens/s" if rate else result.get("skipped") or found.get("failed")
        print(f"  {result['model']:>5} {result.get('rows', ''):>4} rows, transformers: {said}", flush=True)
        return
    parts = []
    for way in ("eager", "graphs"):
        found = result[way]
        if "tokens_per_s" in found:
            parts.append(
                f"{way} {found['tokens_per_s']:9.0f} tokens/s {found['ms_per_step']:7.2f} ms {found['of_bound']:5.0%}"
            )
        else:
            parts.append(f"{way}: {found.get('skipped') or found.get('failed')}")
    print(f"  {result['model']:>5} {result['rows']:>4} rows, {'; '.join(parts)}; bound {result['bound_ms']:.2f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to see that the script runs")
    parser.add_argument("--out", help="write the results to this file, as JSON")
    parser.add_argument("--rows", type=int, nargs="+")
    parser.add_argument("--models", nargs="+", default=list(ARCHS), choices=list(ARCHS))
    parser.add_argument("--seconds", type=float, default=560, help="parts beyond are skipped")
    args = parser.parse_args()
    args.rows = args.rows or ([1, 3] if args.small else [1, 16, 64, 256])
    device, clock = torch.device(args.device), Clock(args.seconds)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device. Try --device cpu --small.", file=sys.stderr)
        return 2
    archs = {name: TINY if args.small else ARCHS[name] for name in args.models}
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "small": args.small,
        "decoding": [],
        "transformers": [],
    }
    print(f"{results['device']}, torch {results['torch']}", flush=True)

    def save() -> None:
        if args.out:
            with open(args.out, "w", encoding="utf-8") as file:
                json.dump(results, file, indent=1)

    with reported(results, "agreement"):
        results["agreement"] = agreement(args.device, args.small)
        for dtype, found in results["agreement"].items():
            print(
                f"  agreement with the CPU in float32, {dtype}: logits within {found['largest_difference']:.2g} (they "
                f"spread by {found['spread_of_logits']:.2g}), {found['same_tokens']:.1%} of greedy tokens; "
                f"{'; '.join(found['backend'])}",
                flush=True,
            )
    save()
    with reported(results, "company"):
        results["company"] = found = company(archs[args.models[0]], args)
        print(
            f"  in company of {found['rows'] - 1}: {found['logits_that_differ']:.1%} of logits differ, by up to "
            f"{found['largest_difference']:.2g}, {found['bits_that_differ']:.2f} bits each; tokens differ from "
            f"{found['tokens_until_they_differ']} on; between equal steps "
            f"{found['logits_that_differ_between_equal_steps']:.1%}",
            flush=True,
        )
    save()
    results["bytes_per_s"] = rate = bandwidth(device, args.small)
    print(f"  memory: {rate / 1e9:.0f} GB/s", flush=True)
    for name, arch in archs.items():
        for result in throughput(name, arch, args, clock, rate):
            results["decoding"].append(result)
            show(result)
            save()
    for name, arch in archs.items():
        with reported(results, f"transformers {name}"):
            for result in transformers_throughput(name, arch, args, clock):
                results["transformers"].append(result)
                show(result)
                save()
    results["seconds"] = args.seconds - clock.left
    save()
    print(f"  {results['seconds']:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
