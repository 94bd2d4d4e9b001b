"""Hatchling, plus the one thing we decide ourselves: what `hibachi[torch]` asks for.

wheel from a checkout    hibachi-torch @ file:///.../hibachi_torch     the package beside us
editable                 what hibachi_torch needs                      its code is on the path already
sdist (and its wheel)    hibachi-torch==<our version>                  no path of this machine
"""

import os
import tomllib
from pathlib import Path

import hatchling.build
from hatchling.build import build_wheel as build_wheel
from hatchling.metadata.plugin.interface import MetadataHookInterface


def build_editable(*args, **kwargs):
    os.environ["HIBACHI_BUILDS"] = "editable"
    return hatchling.build.build_editable(*args, **kwargs)


def build_sdist(*args, **kwargs):
    os.environ["HIBACHI_BUILDS"] = "sdist"
    return hatchling.build.build_sdist(*args, **kwargs)


class Extras(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        backends = {name: self.backend(name, metadata["version"]) for name in self.config["backends"]}
        metadata["optional-dependencies"] = self.config["extras"] | backends

    def backend(self, name: str, version: str) -> list[str]:
        beside, builds = Path(self.root, f"hibachi_{name}"), os.environ.get("HIBACHI_BUILDS")
        if builds == "sdist" or not beside.is_dir():
            return [f"hibachi-{name}=={version}"]
        if builds == "editable":
            pyproject = tomllib.loads((beside / "pyproject.toml").read_text())
            return pyproject["tool"]["hatch"]["metadata"]["hooks"]["custom"]["needs"]
        return [f"hibachi-{name} @ {beside.as_uri()}"]
