"""Kinds of values of settings, and how they are read from a flag, a variable or a TOML file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PREFIX = "HIBACHI_"
_SIZES = {"k": 10, "ki": 10, "m": 20, "mi": 20, "g": 30, "gi": 30}  # all of them powers of two, as memory is
_SWITCHES = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class ValueKind:
    """A kind of value. read: from a text or a value of TOML; raises ValueError. metavar: "" for a switch."""

    metavar: str
    expected: str
    read: Callable[[Any], Any]
    many: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. default: as it would be given; None means that `otherwise` says what holds."""

    name: str
    kind: ValueKind
    default: Any
    help: str
    otherwise: str = ""

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def key(self) -> str:
        """The name in Python, and in the TOML file."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        return PREFIX + self.key.upper()

    @property
    def default_text(self) -> str:
        if self.default is None:
            return self.otherwise or "none"
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)


def _text(given: Any) -> str:
    if not isinstance(given, str) or not given:
        raise ValueError
    return given


def text(metavar: str, expected: str = "a text") -> ValueKind:
    return ValueKind(metavar, expected, _text)


def texts(metavar: str) -> ValueKind:
    def read(given: Any) -> tuple[str, ...]:
        return tuple(map(_text, given.split() if isinstance(given, str) else given))

    return ValueKind(metavar, "texts (in a variable, separated by blanks)", read, many=True)


def integer(least: int, most: int | None = None) -> ValueKind:
    def read(given: Any) -> int:
        number = int(given) if isinstance(given, str) else given
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ValueError
        if most is not None and number > most:
            raise ValueError
        return number

    return ValueKind("N", f"an integer >= {least}" if most is None else f"an integer from {least} to {most}", read)


def seconds(least: float = 0.0) -> ValueKind:
    """Seconds, from `least` on. A setting that takes 0.0 says what that means."""

    def read(given: Any) -> float:
        number = float(given) if isinstance(given, str) else given
        if not isinstance(number, (int, float)) or isinstance(number, bool) or not least <= number < 1e9:
            raise ValueError
        return float(number)

    return ValueKind("S", f"seconds >= {least:g}", read)


def size(*, off: bool = False) -> ValueKind:
    """off: it may be 0, or "off", which is the same."""

    def read(given: Any) -> int:
        if off and (given == "off" or given is False):
            return 0
        if isinstance(given, str):
            word = given.strip().lower().removesuffix("b")
            unit = word.lstrip("0123456789.")
            given = int(float(word.removesuffix(unit)) * 2 ** (_SIZES[unit] if unit else 0))
        if not isinstance(given, int) or isinstance(given, bool) or given < (0 if off else 1):
            raise ValueError
        return given

    return ValueKind("BYTES", "bytes, such as 1048576, 512M or 4G" + (", or 0 or off" if off else ""), read)


def choice(*names: str) -> ValueKind:
    def read(given: Any) -> str:
        if given not in names:
            raise ValueError
        return str(given)

    return ValueKind("|".join(names), f"one of {', '.join(names)}", read)


def _switch(given: Any) -> bool:
    return given if isinstance(given, bool) else _SWITCHES[given.lower()]


SWITCH = ValueKind("", "true or false", _switch)


def setting(kind: ValueKind, default: Any, help: str, otherwise: str = "") -> Any:
    """A field of a record of settings, with its default as `kind` reads it. `Setting` says what the arguments mean."""
    value = None if default is None else kind.read(default)
    return field(default=value, metadata={"setting": Setting("", kind, default, help, otherwise)})
