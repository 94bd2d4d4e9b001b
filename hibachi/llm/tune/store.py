"""A choice of kernels in a file that travels: JSON, for people to read, and for another machine to do the same."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hibachi.common.cachefolder import keep
from hibachi.common.installed import version
from hibachi.errors import ConfigError
from hibachi.llm.tune.cases import ModelSizes
from hibachi.llm.tune.trial import KernelTrial

FORMAT = 1
_MOST = 1 << 20  # bytes; some thousand in fact


def read(path: Path) -> tuple[ModelSizes, bool, dict[str, str]]:
    """Of which model, whether it is deterministic, and what is taken for each operation. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST + 1)
        if len(data) > _MOST:
            raise ValueError(f"it has more than {_MOST} bytes")
        found = json.loads(data)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"expected an object with format {FORMAT}")
        sizes, taken = _sizes(found["model"]), found["taken"]
        if not isinstance(taken, dict) or not all(isinstance(name, str) for name in taken.values()):
            raise ValueError("`taken` must name a set of kernels for each operation")
        return sizes, found["deterministic"] is True, taken
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as e:
        raise ConfigError(f"{path} is no file of kernels: {type(e).__name__}: {e}. Write one with --autotune.") from e


def _sizes(found: dict[str, Any]) -> ModelSizes:
    sizes = ModelSizes(**found)
    return ModelSizes(**found | {"matrices": tuple(map(tuple, sizes.matrices)), "head": tuple(sizes.head)})


def write(path: Path, sizes: ModelSizes, deterministic: bool, trials: list[KernelTrial]) -> None:
    """Raises ConfigError."""
    taken = {t.operation: t.name for t in trials if t.why_not is None and t.operation != "dtype"}
    found = {
        "format": FORMAT,
        "hibachi": version(),
        "model": asdict(sizes),
        "deterministic": deterministic,
        "taken": taken,
        "trials": [asdict(t) for t in trials],
    }
    try:
        keep(path, json.dumps(found, indent=1))
    except OSError as e:
        raise ConfigError(f"The kernels cannot be written to {path}: {e}.") from e
