"""What `gpu.py` runs, stage by stage. Each returns what is written down; `Run` says where and how much."""

from __future__ import annotations

import gc
import inspect
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import hibachi
from hibachi import StepInputs
from hibachi.common.installed import version
from hibachi.engine.scheduler.lower import Packed, lower
from hibachi.llm.model.arch import Arch, Experts, Layer, shapes
from hibachi.llm.model.decoder import Decoder
from hibachi.llm.model.rope import Rope, tables
from hibachi_torch import TorchBackend
from hibachi_torch.cuda import CudaTorchBackend

ROOT = Path(__file__).resolve().parents[1]
CARRIED = ROOT / ".carried"  # packages that the machine lacks
SEED, SPREAD = 0, 0.02
Result = dict[str, Any]


@dataclass
class Run:
    """device: in torch's notation. dry: on the CPU, small. end: when time is over, on `time.perf_counter`."""

    device: torch.device
    dry: bool
    end: float
    bytes_per_s: float = 0.0

    @property
    def left(self) -> float:
        return self.end - time.perf_counter()


def llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool) -> Arch:
    return Arch(
        hidden_size=hidden,
        intermediate=inner,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        tied=tied,
        max_positions=4096,
        norm_eps=1e-5,
        ropes=(Rope(dims=hidden // heads, theta=1e5),),
        layers=(Layer(),) * layers,
    )


TINY = llama(64, 176, 2, 4, 2, 512, True)
MIXTURE = replace(TINY, layers=(Layer(experts=True),) * 2, experts=Experts(4, 2, 64, True))
ARCHS = {
    "135m": llama(576, 1536, 30, 9, 3, 49152, True),  # of SmolLM2-135M
    "8b": llama(4096, 14336, 32, 32, 8, 128256, False),  # of Llama 3 8B
}
ROWS = {"135m": (1, 16, 64, 256), "8b": (1, 64)}


def greedy(tokens: int, **more: Any) -> hibachi.SamplingParams:
    return hibachi.SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, **more)


# ---- models and steps ------------------------------------------------------------------------------------------------


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


def weight_bytes(decoder: Decoder) -> int:
    """What a decode step reads of the weights: all but an embedding that is not the head."""
    p = decoder.params
    return sum(t.nbytes for t in [p["head"], p["norm"], *(t for layer in p["layers"] for t in layer.values())])


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
        self.step = self.backend.compile(decoder.step, donate=(1,))

    def run(self, rows: Any, start: Any, tokens: list[list[int]]) -> Any:
        """Logits, on the device, after the last token of each row."""
        q = np.array([len(t) for t in tokens], np.int32)
        packed = lower(np.asarray(rows), np.asarray(start, np.int32), q, np.ones(len(q), bool), self.table, self.size)
        flat = np.concatenate([np.array(t, np.int32) for t in tokens])
        names = [f.name for f in fields(Packed)]
        tok, *rest = self.backend.put_all([flat, *(getattr(packed, name) for name in names)])
        x = StepInputs(tok=tok, **dict(zip(names, rest, strict=True)))
        with self.backend.guard():
            out, self.cache = self.step(self.decoder.params, self.cache, x)
        return out


def seconds(device: torch.device, call: Callable[[], Any]) -> float:
    wait(device)
    began = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - began


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def reported(into: Result, what: str) -> Iterator[None]:
    """A part that fails is part of the result, and does not end the run."""
    try:
        yield
    except Exception as e:
        into[what] = {"failed": f"{type(e).__name__}: {e}"}


# ---- stages ----------------------------------------------------------------------------------------------------------


def environment(run: Run) -> Result:
    """The device and the versions of what is used; packages that are missing have None."""
    found: Result = {"python": platform.python_version(), "torch": torch.__version__, "device": "cpu"}
    for name in ("numpy", "array_api_compat", "typing_extensions", "triton", "jax", "transformers", "pytest"):
        try:
            found[name] = getattr(__import__(name), "__version__", "there")
        except ImportError:
            found[name] = None
    if run.device.type == "cuda":
        about = torch.cuda.get_device_properties(run.device)
        found |= {"device": about.name, "gib": about.total_memory / 2**30, "capability": f"{about.major}.{about.minor}"}
        found |= {"cuda": torch.version.cuda, "driver": getattr(torch._C, "_cuda_getDriverVersion", int)()}
    backend = CudaTorchBackend(run.device)
    found |= {"varlen": backend.varlen is not None, "block_size": backend.block_size}
    return found


PROMPTS = ("Once upon a time", "The little dog", "She was", "One day, Tom and his mother went to the park. ")


def text(run: Run) -> Result:
    """The shipped model's greedy text and log-probabilities on the device and on the CPU."""

    def said(backend: TorchBackend, dtype: str) -> tuple[list[str], list[Any]]:
        with hibachi.LLM("tiny", backend=backend, dtype=dtype, deterministic=False) as llm:
            outs = llm.generate(list(PROMPTS), greedy(12 if run.dry else 48, logprobs=4))
        return [out.text for out in outs], [[max(step.values()) for step in out.logprobs] for out in outs]

    texts, scores = said(TorchBackend("cpu", native=False), "float32")
    found: Result = {}
    for dtype in ("float32", "bfloat16"):
        backend = CudaTorchBackend(run.device)
        own, theirs = said(backend, dtype)
        same = [
            abs(a - b)
            for mine, ours, left, right in zip(own, texts, theirs, scores, strict=True)
            if mine == ours
            for a, b in zip(left, right, strict=True)
        ]
        found[dtype] = {
            "texts": len(texts),
            "equal": sum(a == b for a, b in zip(own, texts, strict=True)),
            "largest_difference": max(same, default=None),
            "remarks": backend.remarks(),
        }
    return found


def announce(folder: Path) -> None:
    """What an installation writes of our names: a tree that was copied has no entry points."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / f"hibachi-{about['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hibachi\nVersion: {about['version']}\n")
    groups = about["entry-points"].items()
    lines = [line for group, names in groups for line in (f"[{group}]", *(f"{n} = {v}" for n, v in names.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines))


def conformance(run: Run, backend: str, limit: float) -> Result:
    """What of the kit a backend keeps: promises of paged attention and caches first, then the others while time is
    left."""
    found: Result = {}
    end = time.perf_counter() + limit
    paged = "attention or cache"
    for name, which in (("paged", paged), ("others", f"not ({paged})"))[: 1 if run.dry else 2]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "kit.json"
            command = [sys.executable, "-m", "hibachi", "conformance", "--backend", backend, "--json", str(file)]
            command += ["-q", "-k", f"({which}) and step" if run.dry else which]
            left = max(1.0, min(end - time.perf_counter(), run.left))
            if version() == "unknown":
                announce(Path(folder))
            paths = [str(ROOT), str(CARRIED), folder, os.environ.get("PYTHONPATH", "")]
            env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p)}
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=left, cwd=ROOT, env=env)
            except subprocess.TimeoutExpired:
                found[name] = {"stopped_after_s": left}
                continue
            found[name] = {"rc": done.returncode, "said": (done.stdout + done.stderr).strip()[-300:]}
            if not file.exists():
                found[name] = {"failed": found[name]["said"]}
            else:
                judged = json.loads(file.read_text())["backends"].values()
                promises = [p for one in judged for group in one["groups"].values() for p in group]
                found[name]["kept"] = sum(p["status"] == "kept" for p in promises)
                found[name]["broken"] = [p["promise"] for p in promises if p["status"] not in ("kept", "skipped")]
    return found


def conformance_torch(run: Run) -> Result:
    return conformance(run, "hibachi_torch.cuda:CudaTorchBackend", 60)


def conformance_jax(run: Run) -> Result:
    try:
        import jax
    except ImportError:
        return {"skipped": "JAX is not installed"}
    seen = jax.default_backend()
    if seen == "cpu" and not run.dry:
        return {"skipped": "JAX sees no device"}
    return {"platform": seen} | conformance(run, "hibachi_jax:JaxBackend", 40)


def company(run: Run) -> Result:
    """Which share of a row's logits others change: by how many they are, by the row's place, by their lengths, by
    doing the same again, and as a graph."""
    arch = TINY if run.dry else ARCHS["135m"]
    most, prompt = (4, 8) if run.dry else (256, 100)
    backend = CudaTorchBackend(run.device)
    steps = Steps(model_on_device(arch, backend, "bfloat16", 2 * prompt), most, 2 * prompt)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, arch.vocab_size, prompt).tolist() for _ in range(most)]
    tokens = [[int(n)] for n in rng.integers(0, arch.vocab_size, most)]
    for i in range(0, most, 16):
        rows = range(i, min(most, i + 16))
        steps.run(rows, [0] * len(rows), [prompts[r] for r in rows])

    def row_zero(rows: list[int], start: list[int]) -> Any:
        return steps.run(rows, start, [tokens[r] for r in rows])[rows.index(0)]

    alone = row_zero([0], [prompt])
    found = []

    def compare(what: str, rows: list[int], start: list[int]) -> None:
        other = row_zero(rows, start)
        found.append(
            {
                "what": what,
                "rows": len(rows),
                "differ": float((alone != other).float().mean()),
                "largest": float((alone - other).abs().max()),
            }
        )

    compare("again", [0], [prompt])
    compare("as a graph", [0], [prompt])  # the third of its shape
    for n in (2, 4) if run.dry else (2, 16, 64, 256):
        for place in (0, n - 1):
            compare(f"place {place}", [*range(1, place + 1), 0, *range(place + 1, n)], [prompt] * n)
        compare("shorter ones beside it", list(range(n)), [prompt, *[3] * (n - 1)])
    return {"of": found, "remarks": backend.remarks()}


def waits(run: Run) -> Result:
    """Decode steps where PyTorch raises what makes the host wait for the device."""
    steps = Steps(model_on_device(TINY, CudaTorchBackend(run.device), "bfloat16", 64), 4, 64)
    steps.run(range(4), [0] * 4, [[1, 2, 3]] * 4)
    for n in range(3):
        steps.run(range(4), [3 + n] * 4, [[1]] * 4)  # kernel by kernel, recorded, compared
    if run.device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        for n in range(3):
            steps.run(range(4), [6 + n] * 4, [[1]] * 4)
    finally:
        if run.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    return {"steps_without_a_wait": 3}


def mixture(run: Run) -> Result:
    """A mixture of experts, whose steps cannot be recorded: the engine's tokens on the device and on the CPU."""
    rng = np.random.default_rng(5)
    wanted, _ = shapes(MIXTURE)
    weights = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in wanted.items()}

    def tokens(backend: TorchBackend) -> list[list[int]]:
        model = Decoder.build(MIXTURE, weights, backend, max_model_len=64)
        with hibachi.AutoregressiveBatchInference(
            model, backend=backend, max_model_len=64, deterministic=False
        ) as engine:
            return [list(stream) for stream in [engine.run([3 + i, 4, 5], greedy(16)) for i in range(4)]]

    backend = CudaTorchBackend(run.device)
    return {"equal": tokens(backend) == tokens(TorchBackend("cpu", native=False)), "remarks": backend.remarks()}


def bandwidth(run: Run) -> Result:
    """Bytes a second of a copy, what it reads and what it writes."""
    size = 2**24 if run.dry else 2**31
    a, b = (torch.zeros(size, dtype=torch.uint8, device=run.device) for _ in range(2))
    times = [seconds(run.device, lambda: b.copy_(a)) for _ in range(8)]
    run.bytes_per_s = 2 * size / median(times[2:])
    return {"gb_per_s": run.bytes_per_s / 1e9}


def decoding(decoder: Decoder, rows: int, prompt: int, new: int, overlap: bool | None) -> dict[str, float]:
    """Tokens a second while all rows decode, of the second of two runs of an engine. overlap: as of the engine."""
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
        overlap=overlap,
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
            assert all(len(list(s)) == new for s in streams)
    begin = next(m for m in marks if m[1] >= rows * min(4, new // 2))  # all have started
    end = marks[-1]
    took, steps = end[0] - begin[0], end[2] - begin[2]
    return {"tokens_per_s": (end[1] - begin[1]) / took, "ms_per_step": took / max(1, steps) * 1e3}


def decode(run: Run, name: str) -> Result:
    """Rows that decode, kernel by kernel and as graphs, beside the time that reading weights, keys and values takes at
    the bandwidth of a copy."""
    prompt, new = (8, 12) if run.dry else (128, 64)
    arch = TINY if run.dry else ARCHS[name]
    if run.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(run.device)
        wanted = sum(2 * int(np.prod(s)) for s in shapes(arch)[0].values())
        if free < 1.1 * wanted:
            return {"skipped": f"its weights are {wanted / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"}
    if not run.bytes_per_s:
        bandwidth(run)
    decoder = model_on_device(arch, CudaTorchBackend(run.device, graphs=False), "bfloat16", prompt + new)
    weights = weight_bytes(decoder)
    position = 2 * 2 * arch.kv_heads * arch.head_dim * len(arch.layers)  # bytes of keys and values, bfloat16
    found: Result = {}
    for rows in (1, 3) if run.dry else ROWS[name]:
        bound = (weights + rows * (prompt + new / 2) * position) / run.bytes_per_s
        result: Result = {"bound_ms": bound * 1e3}
        for way in ("eager", "graphs", "in turn"):  # the last: graphs, each begun when the one before has ended
            if run.left < 15:
                result[way] = {"skipped": "no time left"}
                continue
            backend = CudaTorchBackend(run.device, graphs=way != "eager")
            own = Decoder(arch, decoder.params, backend, dtype="bfloat16", max_model_len=prompt + new)
            if run.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(run.device)
            with reported(result, way):
                result[way] = decoding(own, rows, prompt, new, False if way == "in turn" else None) | {
                    "remarks": backend.remarks()
                }
                result[way]["of_bound"] = result[way]["tokens_per_s"] * bound / rows
                if run.device.type == "cuda":
                    result[way]["peak_gib"] = torch.cuda.max_memory_allocated(run.device) / 2**30
            release(run.device)
        found[str(rows)] = result
    return found


def decode_135m(run: Run) -> Result:
    return decode(run, "135m")


def decode_8b(run: Run) -> Result:
    return decode(run, "8b")


def beside_transformers(run: Run) -> Result:
    """Continuous batching of transformers on the shape, rows and lengths of `decode_135m`, prompts included."""
    prompt, new = (8, 12) if run.dry else (128, 64)
    arch = TINY if run.dry else ARCHS["135m"]
    try:
        import transformers
        from transformers.generation import ContinuousBatchingConfig
    except ImportError as e:
        return {"skipped": f"transformers has no continuous batching here: {e}"}
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
    with run.device:
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    block = next(iter(inspect.signature(ContinuousBatchingConfig).parameters))  # page_size, before 5.20 block_size
    rng = np.random.default_rng(2)
    found: Result = {"version": transformers.__version__}
    for rows in (1, 3) if run.dry else ROWS["135m"]:
        if run.left < 15:
            found[str(rows)] = {"skipped": "no time left"}
            continue
        prompts = [rng.integers(0, arch.vocab_size, prompt).tolist() for _ in range(rows)]
        how = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=new)
        room = ContinuousBatchingConfig(
            **{block: 32},
            max_requests_per_batch=rows,
            num_blocks=-(-(prompt + new) // 32) * rows + 8,
            max_batch_tokens=rows * prompt,
        )

        def generate(prompts: Any = prompts, how: Any = how, room: Any = room) -> int:
            with torch.no_grad():  # inference_mode does not go with its thread
                out = model.generate_batch(
                    prompts, generation_config=how, continuous_batching_config=room, progress_bar=False
                )
            return sum(len(r.generated_tokens) for r in out.values())

        with reported(found, str(rows)):
            generate()
            began = time.perf_counter()
            tokens = generate()
            took = time.perf_counter() - began
            found[str(rows)] = {"tokens_per_s_with_prompts": tokens / took, "tokens": tokens, "seconds": took}
    return found


def memory(run: Run) -> Result:
    """A prompt for which no memory is left: what becomes of it and of one beside it, and of the engine afterwards."""
    backend = CudaTorchBackend(run.device)
    arch, longest = (TINY, 64) if run.dry else (ARCHS["135m"], 4096)
    model = model_on_device(arch, backend, "bfloat16", longest)
    with hibachi.AutoregressiveBatchInference(
        model, backend=backend, dtype="bfloat16", max_model_len=longest, max_num_seqs=8, deterministic=False
    ) as engine:
        before = list(engine.run([1, 2, 3], greedy(8)))
        taken = None
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(run.device)
            taken = torch.empty(max(0, free - 2**26), dtype=torch.uint8, device=run.device)
        long, short = engine.run([5] * (longest - 8), greedy(4)), engine.run([1, 2, 3], greedy(8))
        found: Result = {"short": list(short) == before, "long": "answered"}
        with reported(found, "long"):
            list(long)
        del taken
        release(run.device)
        found["afterwards"] = list(engine.run([1, 2, 3], greedy(8))) == before
    return found
