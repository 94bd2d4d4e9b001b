"""Reading config.json: one field at a time, each checked, each refusal with the field's name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from hibachi.errors import InvalidModelFiles, UnknownArchitecture

Config: TypeAlias = Mapping[str, Any]

MOST_SETTINGS, MOST_VOCABULARY = 1 << 24, 1 << 26
"""Bytes of a file that is read as a whole: fifty times what real ones have, and twice."""
_LARGEST = 3.4e38  # what models compute in


def read_text(path: Path, most: int = MOST_SETTINGS) -> str:
    """A text in UTF-8. Raises OSError, ValueError: also for more than `most` bytes, and for what is no file."""
    if path.exists() and not path.is_file():  # opening a named pipe would wait for ever
        raise OSError("it is no file")
    if (size := path.stat().st_size) > most:
        raise ValueError(f"it has {size} bytes, expected at most {most}")
    with path.open("rb") as file:
        text = file.read(size).decode()
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises InvalidModelFiles."""
    try:
        value = json.loads(read_text(path))
    except FileNotFoundError:
        raise InvalidModelFiles(
            f"{path} is missing. Expected a directory in Hugging Face layout: "
            f"config.json, model.safetensors and, for text, tokenizer.json."
        ) from None
    except (OSError, ValueError, RecursionError) as e:
        raise InvalidModelFiles(f"{path} cannot be read as JSON: {e}. Copy or download the file again.") from e
    if not isinstance(value, dict):
        raise InvalidModelFiles(f"{path}: expected a JSON object; got {type(value).__name__}. Download it again.")
    return value


class Fields:
    """A config, or an object inside it (`where`: its name and a dot).

    Each method takes the names that a field has had, and reads the first that is there; null counts as missing, as
    transformers writes it for a default. All raise InvalidModelFiles for a value of the wrong type or range.
    """

    config: Mapping[str, Any]
    where: str

    def __init__(self, config: Config, where: str = "") -> None:
        self.config, self.where = config, where

    def get(self, *names: str, default: Any = None) -> Any:
        """The value as it stands."""
        return next((v for n in names if (v := self.config.get(n)) is not None), default)

    def count(self, *names: str, default: int | None = None, most: int = 2**31 - 1) -> int:
        """An integer from 1 to `most`."""
        value = self.get(*names, default=default)
        if not is_int(value) or value < 1:
            raise self.wrong(names, "an integer >= 1", value)
        if value > most:
            raise self.wrong(names, f"an integer from 1 to {most}", value)
        return int(value)

    def number(self, *names: str, default: float | None = None) -> float:
        """A number > 0 that float32 has."""
        value = self.get(*names, default=default)
        if not is_number(value):
            raise self.wrong(names, "a number > 0", value)
        return float(value)

    def optional_number(self, *names: str) -> float | None:
        return None if self.get(*names) is None else self.number(*names)

    def optional_count(self, *names: str) -> int | None:
        return None if self.get(*names) is None else self.count(*names)

    def flag(self, *names: str, default: bool | None = None) -> bool | None:
        """True, false, or the default."""
        value = self.get(*names, default=default)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(names, "true or false", value)
        return value

    def ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Token ids, written as null, one integer or a list; without those that the vocabulary does not have."""
        value = self.get(name)
        ids = tuple(value) if isinstance(value, list) else () if value is None else (value,)
        if not all(map(is_int, ids)):
            raise self.wrong((name,), "an integer, a list of integers, or null", value)
        # Some files write -1 for "none", and configs of small vocabularies keep their class's ids.
        return tuple(i for i in dict.fromkeys(ids) if 0 <= i < vocab_size)

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of `length` numbers > 0."""
        value = self.get(name)
        good = isinstance(value, list) and len(value) == length
        if not good or not all(map(is_number, value)):
            raise self.wrong((name,), f"a list of {length} numbers > 0", value)
        return tuple(float(v) for v in value)

    def each(self, name: str, length: int, allowed: Sequence[Any]) -> list[Any] | None:
        """A list with an entry for each layer, or None."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length or any(v not in allowed for v in value):
            raise self.wrong((name,), f"a list of {length} out of {', '.join(map(repr, allowed))}", value)
        return value

    def inside(self, name: str) -> Fields:
        """The fields of an object in this one; none if it is missing."""
        value = self.get(name, default={})
        if not isinstance(value, Mapping):
            raise self.wrong((name,), "an object", value)
        return Fields(value, f"{self.where}{name}.")

    def wrong(self, names: Sequence[str], expected: str, got: Any) -> InvalidModelFiles:
        said = sorted((n for n in names if n in self.config), key=lambda n: self.config[n] is None)
        name = said[0] if said else names[0]
        got = "null" if got is None and said else "no such field" if got is None else f"{got!r:.200}"
        return InvalidModelFiles(
            f"config.json: {self.where}{name} must be {expected}; got {got}. "
            f"Take the config.json that came with these weights."
        )

    def unknown(self, name: str, found: Any, supported: Sequence[Any]) -> UnknownArchitecture:
        got = "is missing" if found is None else f"is {found!r:.200}"
        return UnknownArchitecture(
            f"config.json: {self.where}{name} {got}; supported: {', '.join(map(repr, supported))}. Use a model with "
            f"one of these, or write the model as a hibachi.CachedModel and pass the object to the engine."
        )


def contradiction(what: str) -> InvalidModelFiles:
    return InvalidModelFiles(f"config.json contradicts itself: {what}. Take the one that came with these weights.")


def is_number(x: Any) -> bool:
    """Above 0, and not beyond float32."""
    return (is_int(x) or isinstance(x, float)) and 0 < x <= _LARGEST


def is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)
