"""What makes a run and tells it from others: files by their contents, the engine by what it says of itself."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from hibachi.installed import version
from hibachi.lm.own import is_own
from hibachi.lm.texts import Texts
from hibachi.model import MEANING
from hibachi.model.files import locate
from hibachi.model.gguf import parts
from hibachi.offline.works.work import Told
from hibachi.remote.opening import about

_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".npz", ".h5", ".msgpack")
_OTHERS = ("*.jinja", "*.model", "*config.json", "tokenizer*", "vocab*", "merges.txt", "added_tokens.json",
           "special_tokens_map.json", "modules.json", "*.index.json")  # fmt: skip
SAMPLES = 64  # places of a file of weights that are looked at
SAMPLE = 1 << 16  # bytes at each


def told_of(texts: Texts) -> Told:
    """The engine: whatever of it may change bits."""
    facts = texts.engine.facts
    return Told(
        about(texts),
        {
            "backend": facts.fingerprint,
            "dtype": facts.dtype,
            "numerics": facts.numerics,
            "deterministic": facts.deterministic,
            "max_model_len": facts.limits.max_model_len,
        },
    )


def model_facts(model: str, *, weights: bool = False) -> dict[str, Any]:
    """The files of a model, and how they are understood: digests of all but the weights, whose sizes and samples stand
    for them.

    weights: read all of them. For a model of one's own: the file that its class stands in. Raises InvalidModelFiles.
    """
    if is_own(model):
        file = _source(model)
        return {"name": model} if file is None else {"name": model, "source": _digest(file)}
    place = locate(model)
    files = parts(place) if place.is_file() else sorted(f for f in place.rglob("*") if f.is_file() and _of_model(f))
    found: dict[str, Any] = {"name": model, "meaning": MEANING, "files": {}}
    for file in files:
        name = file.name if place.is_file() else file.relative_to(place).as_posix()
        found["files"][name] = _sampled(file) if file.suffix in _WEIGHTS and not weights else _digest(file)
    return found


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("hibachi", "numpy")}


def differences(before: Any, now: Any, place: str = "") -> Iterator[str]:
    """A line for each part that is not the same."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*before, *now]):
            yield from differences(before.get(key), now.get(key), f"{place}.{key}" if place else str(key))
    elif before != now:
        yield f"{place}: {_short(before)} before, now {_short(now)}"


def other_bits(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What follows where the engine's bits had a name and now have another; "" where they did not. A sentence."""
    was, will = before.get("numerics"), now.get("numerics")
    if was is None or was == will:
        return ""
    return (
        f"The name of the bits changed from {was} to {will or 'none'}: what is left would be computed in another "
        f"arithmetic than what is done. To have one in all rows, begin anew, or finish with the version of hibachi, "
        f"machine and --dtype that compute {was}.\n"
    )


def other_meaning(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What follows where a model's files are understood in another way than by the run that began; "" where they are
    not. A sentence. before, now: heads."""
    models = [head.get("model") or {} for head in (before, now)]
    was, will = (model.get("meaning", 1) if "files" in model else None for model in models)
    if None in (was, will) or was == will:
        return ""
    return (
        f"This version of hibachi understands a model's files in another way (meaning {was} before, now {will}; "
        f"CHANGELOG.md says what changed): what is left may be answered otherwise than what is done. To have one in "
        f"all rows, begin anew, or finish with the version of hibachi that began.\n"
    )


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _of_model(file: Path) -> bool:
    """A run's own output may lie beside the model."""
    return file.suffix in _WEIGHTS or any(fnmatch(file.name, pattern) for pattern in _OTHERS)


def _source(model: str) -> Path | None:
    """The Python file that a name leads to, which is not imported for that, though the package around it may be."""
    module = model.rpartition(":")[0] or model
    if module.endswith(".py"):
        return Path(module)
    with suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
            return Path(spec.origin)
    return None


def _digest(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()[:32]


def _sampled(file: Path) -> str:
    """Its size, and a digest of what lies at its beginning, at its end, and at places in between."""
    size, digest = file.stat().st_size, hashlib.sha256()
    with file.open("rb") as f:
        if size <= SAMPLES * SAMPLE:
            digest.update(f.read())
        else:
            for i in range(SAMPLES):
                f.seek(i * (size - SAMPLE) // (SAMPLES - 1))
                digest.update(f.read(SAMPLE))
    return f"{size} bytes, samples {digest.hexdigest()[:32]}"
