"""From a folder on disk to the first token: SmolLM2-135M-Instruct in safetensors, in a process of its own.

Expected: 3 s at most on torch (CPU), most of it imports and the first step; NumPy alike, JAX longer, as it compiles.
Needs `make .smollm2/fetched`. Writes the model as bfloat16 safetensors to a throw-away folder first. `--model m1b`
takes a folder that is there (`benchmarks.bench model m1b --shape 1b`); expected: 4 s, 1.10 of the file in memory.

The last two columns are the most memory that the process had, and what of it is not the libraries' by the file's size;
the time of the processors says more than the clock where others have them too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
CHILD = """
import sys, time
began = time.perf_counter()
import hibachi
from hibachi import LLM, NumpyBackend
if sys.argv[2] != "numpy":
    __import__("hibachi_" + sys.argv[2])
imported = time.perf_counter()

def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) / 1024

before = status("VmRSS")
with hibachi.LLM(sys.argv[1], backend=sys.argv[2], dtype=sys.argv[3]) as llm:
    loaded = time.perf_counter()
    params = hibachi.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    stream = llm.stream("The capital of France is", params)
    piece = next(stream).text
    first, computed, peak = time.perf_counter(), time.process_time(), status("VmHWM")
print(imported - began, loaded - imported, first - loaded, first - began, computed, peak, peak - before, repr(piece))
"""


def write_safetensors(folder: Path, source: str | Path = ROOT / ".smollm2") -> int:
    """The model of the GGUF file as a folder; returns the bytes of its weights in bfloat16."""
    import torch
    from safetensors.torch import save_file

    from hibachi.llm.model.families import FAMILIES
    from hibachi.llm.model.files import open_files

    files = open_files(source)
    names = FAMILIES["LlamaForCausalLM"].names(files.config)
    tensors = {}
    for name in files.gguf:
        *front, base, suffix = name.split(".")
        place = f"layers.{front[1]}.{names[base]}" if front else names[base]
        tensors[f"model.{place}.{suffix}"] = torch.from_numpy(files.gguf[name]).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(dict(files.config)))
    files.gguf.tokenizer().raw.save(str(folder / "tokenizer.json"))
    return sum(2 * t.numel() for t in tensors.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--model", type=Path, help="a folder with model.safetensors")
    parser.add_argument("--backends", nargs="+", default=["torch", "numpy", "jax"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = args.model or Path(made)
        size = (folder / "model.safetensors").stat().st_size if args.model else write_safetensors(folder)
        print(f"weights {size / 2**20:.0f} MiB in bfloat16; seconds, medians of {args.repeat}")
        names = ("import", "load", "first", "total", "of CPUs", "peak MiB", "of file")
        print(f"{'backend':8} {'dtype':9} " + " ".join(f"{name:>8}" for name in names))
        for backend, dtype in itertools.product(args.backends, args.dtypes):
            runs = []
            for _ in range(args.repeat):
                command = [sys.executable, "-c", CHILD, str(folder), backend, dtype]
                out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                runs.append([float(x) for x in out.split()[:7]])
            *seconds, peak, own = (median(column) for column in zip(*runs, strict=True))
            shown = " ".join(f"{each:8.2f}" for each in seconds)
            print(f"{backend:8} {dtype:9} {shown} {peak:8.0f} {own * 2**20 / size:8.3f}")
