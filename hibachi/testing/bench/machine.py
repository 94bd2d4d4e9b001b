"""The machine that something was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

from hibachi.backend.kernels.threads import processors

_PROC = Path("/proc")


def machine() -> dict[str, Any]:
    """Where something was measured."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": processors(),
        "memory_gib": _memory(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _processor() -> str | None:
    try:
        lines = (_PROC / "cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name, flags = fields.get("model name"), fields.get("flags", "").split()
    special = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{name} ({', '.join(special)})" if name and special else name


def _memory() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None
