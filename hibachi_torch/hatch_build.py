"""Hatchling, plus the one thing we decide ourselves: whether we ask for the core.

what an installer asks first    hibachi @ file:///...    the core above us, if it is there
wheel, sdist, editable          nothing                  the core asks for us, by `hibachi[torch]`

Never `hibachi==<version>`: installed without the core, pip would fetch that name from an index, where it belongs to
another project. hatch_build.py of the core says why the first answer may differ from the wheel.

Each of our backends has a copy of this file: pip builds a package from its own folder, and shows it no other.
"""

import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import hatchling.build
from hatchling.build import build_editable as build_editable
from hatchling.build import build_sdist as build_sdist
from hatchling.build import build_wheel as build_wheel
from hatchling.metadata.plugin.interface import MetadataHookInterface


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    """Write the METADATA of a wheel, with a path in it, below a folder; return the name of its .dist-info folder."""
    os.environ["HIBACHI_BUILDS"] = "metadata"
    try:
        with (
            tempfile.TemporaryDirectory() as made,
            zipfile.ZipFile(Path(made, hatchling.build.build_wheel(made))) as wheel,
        ):
            [name] = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
            return Path(wheel.extract(name, metadata_directory)).parent.name
    finally:  # a frontend may build in the same process
        del os.environ["HIBACHI_BUILDS"]


class Dependencies(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        core = Path(self.root).resolve().parent
        clone = any(part.startswith("pip-") for part in core.parts)  # of git: pip installs the core from there already
        asked = os.environ.get("HIBACHI_BUILDS") == "metadata" and not clone
        beside = asked and (core / "hibachi" / "__init__.py").is_file()
        metadata["dependencies"] = [*([f"hibachi @ {core.as_uri()}"] if beside else []), *self.config["needs"]]
