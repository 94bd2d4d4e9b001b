"""Hatchling, plus the one thing we decide ourselves: which core we ask for.

wheel from a checkout               hibachi @ file:///...     the core above us
editable, sdist, pip's own clone    hibachi==<our version>    whichever core the same command installs

Each of our backends has a copy: pip builds a package from its own folder, and shows it no other.
"""

import os
from pathlib import Path
from typing import Any

import hatchling.build
from hatchling.build import build_wheel as build_wheel
from hatchling.metadata.plugin.interface import MetadataHookInterface


def build_editable(*args: Any, **kwargs: Any) -> str:
    os.environ["HIBACHI_BUILDS"] = "editable"
    return hatchling.build.build_editable(*args, **kwargs)


def build_sdist(*args: Any, **kwargs: Any) -> str:
    os.environ["HIBACHI_BUILDS"] = "sdist"
    return hatchling.build.build_sdist(*args, **kwargs)


class Dependencies(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        core = Path(self.root).resolve().parent
        clone = any(part.startswith("pip-") for part in core.parts)  # gone once pip is done
        plain = "HIBACHI_BUILDS" not in os.environ and not clone
        beside = plain and (core / "hibachi" / "__init__.py").is_file()
        where = f" @ {core.as_uri()}" if beside else f"=={metadata['version']}"
        metadata["dependencies"] = [f"hibachi{where}", *self.config["needs"]]
