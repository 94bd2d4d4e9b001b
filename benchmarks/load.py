"""From a folder on disk to the first token: SmolLM2-135M-Instruct in safetensors, in a process of its own.

Expected: 3 s at most on torch (CPU), most of it imports and the first step; NumPy alike, JAX longer, as it compiles.
Needs `make .smollm2/fetched`. Writes the model as bfloat16 safetensors to a throw-away folder first.
"""

from __future__ import annotations

import argparse
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
imported = time.perf_counter()
with hibachi.LLM(sys.argv[1], backend=sys.argv[2], dtype=sys.argv[3]) as llm:
    loaded = time.perf_counter()
    stream = llm.stream("The capital of France is", hibachi.SamplingParams(temperature=0, max_tokens=4))
    piece = next(stream).text
    first = time.perf_counter()
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
print(imported - began, loaded - imported, first - loaded, first - began, peak, repr(piece))
"""


def write_safetensors(folder: Path, source: str | Path = ROOT / ".smollm2") -> int:
    """The model of the GGUF file as a folder; returns the bytes of its weights in bfloat16."""
    import torch
    from safetensors.torch import save_file

    from hibachi.model.families import FAMILIES
    from hibachi.model.files import open_files

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
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        size = write_safetensors(Path(folder))
        print(f"weights {size / 2**20:.0f} MiB in bfloat16; seconds, medians of {args.repeat}")
        print(f"{'backend':8} {'dtype':9} {'import':>7} {'load':>7} {'first':>7} {'total':>7} {'peak MiB':>9}")
        for backend, dtype in (("torch", "float32"), ("torch", "bfloat16"), ("numpy", "float32"), ("jax", "float32")):
            runs = []
            for _ in range(args.repeat):
                command = [sys.executable, "-c", CHILD, folder, backend, dtype]
                out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                runs.append([float(x) for x in out.split()[:5]])
            imported, loaded, first, total, peak = (median(column) for column in zip(*runs, strict=True))
            print(f"{backend:8} {dtype:9} {imported:7.2f} {loaded:7.2f} {first:7.2f} {total:7.2f} {peak:9.0f}")
