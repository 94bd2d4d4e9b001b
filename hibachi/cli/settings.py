"""The settings of a server as flags."""

from __future__ import annotations

import argparse

from hibachi.common.settings.kinds import SWITCH
from hibachi.common.settings.settle import Groups


def settings_arguments(parser: argparse.ArgumentParser, groups: Groups) -> None:
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings")
    for title, settings in groups.items():
        group = parser.add_argument_group(title)
        for s in settings:
            kind, text = s.kind, f"{s.help} (default: {s.default_text})".replace("%", "%%")
            if kind is SWITCH:
                group.add_argument(s.flag, action=argparse.BooleanOptionalAction, default=None, help=text)
            elif kind.many:
                group.add_argument(s.flag, nargs="+", action="extend", metavar=kind.metavar, help=text)
            else:
                group.add_argument(s.flag, metavar=kind.metavar, help=text)
