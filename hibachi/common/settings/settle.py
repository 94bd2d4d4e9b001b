"""Values of settings: from flags, then the environment, then a TOML file, then defaults."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from keyword import iskeyword
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from hibachi.common.options import nearest
from hibachi.common.settings.kinds import PREFIX, SWITCH, Setting
from hibachi.errors import ConfigError

Known = Mapping[str, Setting]  # settings by their keys
Groups = Mapping[str, tuple[Setting, ...]]  # by the titles that --help shows


class Settings:
    """Base of a command's record of settings. command: its name. tables: names in its file that are no settings and are
    read elsewhere.
    """

    command: ClassVar[str]
    tables: ClassVar[tuple[str, ...]] = ()


Record = TypeVar("Record", bound=Settings)


def settings_of(record: type) -> dict[str, Setting]:
    """The settings among a dataclass's fields, by their keys. A field is called like its key, with "_" behind it where
    that is a word of Python.
    """
    found = {}
    for one in fields(record):
        if (known := one.metadata.get("setting")) is not None:
            made = replace(known, name=one.name.rstrip("_").replace("_", "-"))
            found[made.key] = made
    return found


def by_key(groups: Groups) -> dict[str, Setting]:
    return {s.key: s for group in groups.values() for s in group}


def groups_of(**records: type) -> Groups:
    """Settings by the titles that --help shows; each record is a group."""
    return {title: tuple(settings_of(record).values()) for title, record in records.items()}


def settle(
    record: type[Record],
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: str | None = None,
    *,
    defaults: Mapping[str, Any] | None = None,
    others: Iterable[tuple[str, Any, str]] = (),
) -> Record:
    """The value of each setting of a record. flags: those that were given; file: the configuration file.

    defaults: in place of the record's. others: (key, value, where it was given) of variables with names of their own;
    they only take precedence over the file. Raises ConfigError, which names where a wrong value came from.
    """
    settings, values = settings_of(record), {}
    for source in (
        ((key, given, "default") for key, given in (defaults or {}).items()),
        _from_file(settings, record, file),
        others,
        _from_environment(settings, environment),
        _from_flags(settings, flags),
    ):
        for key, given, where in source:
            values[f"{key}_" if iskeyword(key) else key] = _read(settings[key], given, where)
    return record(**values)


def read_toml(flag: str, file: str) -> dict[str, Any]:
    """Read a TOML file. Raises ConfigError."""
    try:
        return tomllib.loads(Path(file).read_text())
    except OSError as e:
        raise ConfigError(f"{flag} {file}: {e.strerror}.") from e
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise ConfigError(f"{flag} {file}: expected TOML; {e}.") from e


def _from_file(known: Known, record: type[Settings], file: str | None) -> Iterator[tuple[str, Any, str]]:
    if file is None:
        return
    for name, given in read_toml("--config", file).items():
        key = name.replace("-", "_")
        if key in record.tables:
            continue
        if key not in known:
            near = nearest(key, known)
            hint = f" Did you mean {known[near].name}?" if near else f" `hibachi {record.command} --help` lists them."
            raise ConfigError(f"{file}: there is no setting {name}.{hint}")
        yield key, given, f"{file}: {name}"


def _from_environment(settings: Known, environment: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    for key, setting in settings.items():
        if given := environment.get(setting.variable):  # as with many tools, empty is as if it were not there
            yield key, given, setting.variable


def _from_flags(settings: Known, flags: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    for key, given in flags.items():
        yield key, given, settings[key].flag


def _read(setting: Setting, given: Any, where: str) -> Any:
    try:
        return setting.kind.read(given)
    except (ValueError, TypeError, AttributeError, LookupError, OverflowError):
        secret = setting.name.endswith("-key")  # keys are not for logs
        shown = "something else" if secret else repr(given)[:80]
        raise ConfigError(f"{where}: expected {setting.kind.expected}; got {shown}.") from None


def misspelled(settings: Known, environment: Mapping[str, str]) -> list[str]:
    """Environment variables that look like settings and are none."""
    known = {s.variable for s in settings.values()}
    found = []
    for name in environment:
        if not name.startswith(PREFIX) or name in known:
            continue
        if near := difflib.get_close_matches(name, known, 1, 0.9):
            found.append(f"{name} is not a setting; {near[0]} is")
    return found


def table(settings: Known) -> str:
    """All settings, in Markdown."""
    lines = ["| flag | default | |", "|---|---|---|"]
    for setting in settings.values():
        metavar = setting.kind.metavar.replace("|", "\\|")
        flag = f"--[no-]{setting.name}" if setting.kind is SWITCH else f"{setting.flag} {metavar}"
        more = " ..." if setting.kind.many else ""
        lines.append(f"| `{flag}{more}` | {setting.default_text} | {setting.help} |")
    return "\n".join(lines)
