"""Settings as flags: of commands that settle them, and of those that take some and read them at once."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from hibachi.common.settings.kinds import SWITCH, Setting, ValueKind
from hibachi.common.settings.settle import Groups

T = TypeVar("T")


def settings_arguments(parser: argparse.ArgumentParser, groups: Groups) -> None:
    """Flags whose texts `hibachi.common.settings.settle` reads, with those of files and variables."""
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings")
    for title, settings in groups.items():
        group = parser.add_argument_group(title)
        for s in settings:
            _add(group, s, default=None)


def setting_argument(parser: Any, s: Setting, *, several: bool = False) -> None:
    """One flag, whose value argparse reads. several: it takes several values, and gives a list."""
    default = None if s.default is None else s.kind.read(s.default)
    more: dict[str, Any] = {"nargs": "+"} if several else {}
    _add(
        parser,
        s,
        default=[default] if several else default,
        **more | ({} if s.kind is SWITCH else {"type": _reader(s.kind)}),
    )


def _add(parser: Any, s: Setting, **more: Any) -> None:
    kind, text = s.kind, f"{s.help} (default: {s.default_text})".replace("%", "%%")
    if kind is SWITCH:
        more |= {"action": argparse.BooleanOptionalAction}
    else:
        more |= {"metavar": kind.metavar} | ({"nargs": "+", "action": "extend"} if kind.many else {})
    parser.add_argument(s.flag, help=text, **more)


def _reader(kind: ValueKind) -> Callable[[str], Any]:
    def read(given: str) -> Any:
        try:
            return kind.read(given)
        except (ValueError, LookupError):
            raise argparse.ArgumentTypeError(f"expected {kind.expected}; got {given!r}") from None

    return read


def record_of(record: Callable[..., T], args: argparse.Namespace, **more: Any) -> T:
    """A record whose fields are arguments by the same names, and more."""
    fields = inspect.signature(record).parameters
    return record(**{name: value for name, value in vars(args).items() if name in fields} | more)
