"""What makes a run and tells it from others: files by their contents, the engine by what it says of itself."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from hibachi.common.installed import version
from hibachi.common.named import source_of
from hibachi.llm.holding import about
from hibachi.llm.model import MEANING
from hibachi.llm.model.files import locate
from hibachi.llm.model.gguf import parts
from hibachi.llm.own import is_own
from hibachi.llm.texts import Texts
from hibachi.offline.tasks.task import Told

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
            "meaning": MEANING,
            "deterministic": facts.deterministic,
            "max_model_len": facts.limits.max_model_len,
        },
    )


def model_facts(model: str, *, weights: bool = False) -> dict[str, Any]:
    """The files of a model: digests of all but the weights, whose sizes and samples stand for them.

    weights: read all of them. For a model of one's own: the file that its class stands in. Raises InvalidModelFiles.
    """
    if is_own(model):
        file = source_of(model)
        return {"name": model} if file is None or not file.is_file() else {"name": model, "source": _digest(file)}
    place = locate(model)
    files = parts(place) if place.is_file() else sorted(f for f in place.rglob("*") if f.is_file() and _of_model(f))
    found: dict[str, Any] = {"name": model, "files": {}}
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


def advice(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What follows where the engine's bits or the meaning of files had another name or number; "" where both are as
    they were. Sentences.
    """
    was, will, changed = before.get("numerics"), now.get("numerics"), []
    if was not in (None, will):
        changed.append(f"The name of the bits changed from {was} to {will or 'none'}")
    was, will = before.get("meaning", 1), now.get("meaning")
    if will not in (None, was):
        changed.append(f"The meaning of a model's files changed from {was} to {will} (docs/offline.md)")
    if not changed:
        return ""
    return (
        f"{'. '.join(changed)}: what is left would be computed otherwise than what is done. To have all rows alike, "
        f"begin anew, or finish with the version of hibachi, the machine and the --dtype of before.\n"
    )


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _of_model(file: Path) -> bool:
    """A run's own output may lie beside the model."""
    return file.suffix in _WEIGHTS or any(fnmatch(file.name, pattern) for pattern in _OTHERS)


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
