"""hibachi on a GPU, in five minutes: what of docs/backends.md is shown there, what is refuted, and how fast it is.

    python benchmarks/gpu.py --out gpu.json                            # all stages but those that the file has
    python benchmarks/gpu.py --out gpu.json --stages decode_8b memory  # these, again
    python benchmarks/gpu.py --dry                                     # all on the CPU, to see that they run

Stages run in the order of STAGES, and each writes its result at once. Packages that are missing on the machine may lie
in `.carried/` beside this folder: pip install --no-deps --target=.carried array-api-compat typing-extensions

Expected on an H100 before the first run (3.35 TB/s of memory on paper, 2.8 measured by a copy; 30 layers of about 20
kernels, 5 us of Python to launch one): 135M: 0.12 ms a step to read the weights, 3-4 ms kernel by kernel, 1 ms as a
graph; 8B: 5.7 ms to read 16 GB, 7 ms as a graph at 1 and 64 rows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[1:1] = [str(ROOT), str(ROOT / ".carried")]
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes most of the device's memory at once

try:
    import gpu_stages as stages
    import torch
except ImportError as e:
    sys.exit(f"{e.name} is missing. Install it, or: pip install --no-deps --target=.carried PACKAGE")

Results = dict[str, Any]
STAGES: dict[str, Callable[[stages.Run], Results]] = {
    "environment": stages.environment,
    "text": stages.text,
    "waits": stages.waits,
    "company": stages.company,
    "conformance_torch": stages.conformance_torch,
    "bandwidth": stages.bandwidth,
    "decode_135m": stages.decode_135m,
    "decode_8b": stages.decode_8b,
    "mixture": stages.mixture,
    "memory": stages.memory,
    "conformance_jax": stages.conformance_jax,
    "beside_transformers": stages.beside_transformers,
}
SHOWN, REFUTED, NOT_REACHED = "shown", "refuted", "not reached"


@dataclass(frozen=True)
class Claim:
    """What docs/backends.md says. holds: of the stage's result; None means that it does not tell."""

    text: str
    stage: str
    holds: Callable[[Results], bool | None]


def _kept(result: Results) -> bool | None:
    parts = [part for part in (result.get("paged"), result.get("others")) if part and "kept" in part]
    if any(part["broken"] for part in parts):
        return False
    return True if any(part["kept"] for part in parts) else None


def _graphs(remarks: list[str]) -> bool:
    return "CUDA graphs: for decode steps" in remarks


def _varlen(result: Results) -> bool | None:
    used = "attention: varlen, where it can" in result["bfloat16"]["remarks"]
    return used or (None if "no varlen_attn" in result["bfloat16"]["remarks"][0] else False)


def _faster(slow: str, fast: str) -> Callable[[Results], bool | None]:
    def holds(result: Results) -> bool | None:
        rates = [result.get("1", {}).get(way, {}).get("tokens_per_s") for way in (slow, fast)]
        return None if None in rates else rates[1] > rates[0]

    return holds


CLAIMS = (
    Claim(
        "greedy text and log-probabilities are the CPU's in float32",
        "text",
        lambda r: r["float32"]["equal"] == r["float32"]["texts"] and r["float32"]["largest_difference"] < 0.01,
    ),
    Claim("attention reads the block table by PyTorch's varlen kernel", "text", _varlen),
    Claim(
        "where that kernel is missing or does not fit, blocks are gathered, and the log says why",
        "text",
        lambda r: r["float32"]["equal"] == r["float32"]["texts"] if "gathers" in r["float32"]["remarks"][0] else None,
    ),
    Claim("all shapes of decode steps are recorded as CUDA graphs", "company", lambda r: _graphs(r["remarks"])),
    Claim("one row decodes faster as a graph than kernel by kernel", "decode_135m", _faster("eager", "graphs")),
    Claim("one row decodes faster where steps overlap", "decode_135m", _faster("in turn", "graphs")),
    Claim(
        "what cannot be recorded runs kernel by kernel, and no request fails",
        "mixture",
        lambda r: r["equal"] and not _graphs(r["remarks"]),
    ),
    Claim("no decode step waits for the device before its tokens", "waits", lambda r: r["steps_without_a_wait"] > 0),
    Claim(
        "bits depend on the company of a row, so deterministic=True is refused",
        "company",
        lambda r: any(one["differ"] > 0 for one in r["of"]),
    ),
    Claim("PyTorch's backend keeps the promises of the kit", "conformance_torch", _kept),
    Claim("JAX's backend keeps the promises of the kit", "conformance_jax", _kept),
    Claim(
        "where memory runs out, a request fails or waits alone, and the engine goes on",
        "memory",
        lambda r: None if r["long"] == "answered" else r["short"] and r["afterwards"],
    ),
)


def verdicts(results: Results, dry: bool) -> dict[str, str]:
    found = {}
    for claim in CLAIMS:
        result = results.get(claim.stage, {})
        holds: bool | None = None
        if not dry and "failed" in result:
            holds = False
        elif not dry and result and "skipped" not in result:
            holds = claim.holds(result)
        found[claim.text] = NOT_REACHED if holds is None else SHOWN if holds else REFUTED
    return found


def device(asked: str | None) -> torch.device:
    """The device to run on. Raises SystemExit with what is missing."""
    if asked is not None and torch.device(asked).type != "cuda":
        raise SystemExit(f"--device must be a CUDA device, as cuda or cuda:1; got {asked}. --dry runs on the CPU.")
    others = [kind for kind in ("xpu", "mps") if getattr(torch, kind, None) and getattr(torch, kind).is_available()]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        there = torch.cuda.is_available()
    if there and others and asked is None:
        raise SystemExit(f"There are two kinds of devices, cuda and {others[0]}. Say which: --device cuda.")
    if there:
        found = torch.device(asked or "cuda")
        if (found.index or 0) >= torch.cuda.device_count():
            raise SystemExit(f"There is no {found}: PyTorch sees {torch.cuda.device_count()} CUDA devices.")
        return found
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        why = f"CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r}, which hides every device"
    elif torch.version.cuda is None:
        why = f"this PyTorch, {torch.__version__}, was built without CUDA"
    elif said:
        why = str(said[0].message).partition("\n")[0].rstrip(".")  # such as a driver that is too old
    else:
        why = "PyTorch sees none, and says no reason; nvidia-smi may know more"
    raise SystemExit(f"There is no CUDA device: {why}. --dry runs all stages on the CPU.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file of the results; stages that it has are not run again")
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--device", help="as torch names it (default: cuda)")
    parser.add_argument("--seconds", type=float, default=300, help="stages beyond are not begun (default: 300)")
    parser.add_argument("--dry", action="store_true", help="all stages on the CPU in small; no claim is reached")
    args = parser.parse_args()
    run = stages.Run(
        torch.device("cpu") if args.dry else device(args.device), args.dry, time.perf_counter() + args.seconds
    )
    results: Results = {}
    if args.out and args.out.exists() and not args.dry:
        results = json.loads(args.out.read_text(encoding="utf-8"))
    if run.device.type == "cuda" and "MIG" in torch.cuda.get_device_name(run.device):
        print("This is a part of a GPU (MIG): its figures are not the GPU's, and large shapes may be left out.")
    for name, stage in STAGES.items():
        if name not in (args.stages or [s for s in STAGES if results.get(s, {}).get("failed", s not in results)]):
            continue
        if run.left < 5:
            print(f"{name}: not begun, no time left", flush=True)
            continue
        began = time.perf_counter()
        try:
            results[name] = stage(run)
        except Exception as e:
            traceback.print_exc()
            results[name] = {"failed": f"{type(e).__name__}: {e}"}
        if args.out:
            args.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
        stages.release(run.device)
        print(f"{name} ({time.perf_counter() - began:.1f} s): {json.dumps(results[name])}", flush=True)
        results["verdicts"] = verdicts(results, args.dry)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1), encoding="utf-8")
    about = results.get("environment", {})
    print(f"\n{about.get('device')}, torch {about.get('torch')}, {time.strftime('%Y-%m-%d')}\n\n| claim | verdict |")
    print("|---|---|")
    for text, verdict in results.get("verdicts", {}).items():
        print(f"| {text} | {verdict} |")
    ours = [result for name, result in results.items() if name != "beside_transformers"]
    return int(args.dry and any("'failed'" in str(result) for result in ours))


if __name__ == "__main__":
    sys.exit(main())
