"""Hatchling, plus the two things we decide ourselves: what `hibachi[torch]` asks for, and the kernels in a wheel.

what an installer asks first    hibachi-torch @ file:///.../hibachi_torch    the package beside us, if it is there
wheel, sdist                    hibachi-torch==<our version>                 no path of this machine
editable                        what hibachi_torch needs                     its code is on the path already

`pip install ".[torch]"` and `pip wheel ".[torch]"` make the same calls here, so a wheel cannot know whether it will
leave this machine. But before it builds, pip asks `prepare_metadata_for_build_wheel` what a project needs, and looks
for its requirements by that answer alone. So the path stands there, and never in a wheel. PEP 517 wants both to be
the same text: here both name the same package, one by its place, one by its version. pip (23.2 to 26.3) and uv compare
name and version only, and tests/install/test_stages.py runs the oldest and the newest pip.

HIBACHI_TARGET=linux-x86_64 (or another of TARGETS) makes a wheel with compiled kernels, on any machine, by clang from
the package ziglang. Without it a wheel is for every platform, and kernels are compiled when they are first asked for.
They are in this package, and not in one beside it, as nothing of ours is on an index: pip would look there for a name
that anybody may take.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import hatchling.build
from hatchling.build import build_sdist as build_sdist
from hatchling.build import build_wheel as build_wheel
from hatchling.build import get_requires_for_build_wheel as get_requires_for_build_wheel
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

ZIG = "ziglang==0.17.1"
TARGETS = {  # name: (wheel tag, zig's target, extension)
    "linux-x86_64": ("manylinux_2_17_x86_64.manylinux2014_x86_64.musllinux_1_2_x86_64", "x86_64-linux-gnu.2.17", "so"),
    "linux-aarch64": ("manylinux_2_17_aarch64.manylinux2014_aarch64.musllinux_1_2_aarch64", "aarch64-linux-gnu.2.17",
                      "so"),
    "macos-arm64": ("macosx_11_0_arm64", "aarch64-macos.11.0", "dylib"),
    "windows-x86_64": ("win_amd64", "x86_64-windows-gnu", "dll"),
}  # fmt: skip

LINK = {"so": ["-Wl,-z,now"], "dylib": ["-Wl,-install_name,@rpath/hibachi-kernels.dylib"], "dll": []}


@contextlib.contextmanager
def asked(what):
    """What the hooks below find out about: for the time of one call, as a frontend may make several in one process."""
    os.environ["HIBACHI_BUILDS"] = what
    try:
        yield
    finally:
        del os.environ["HIBACHI_BUILDS"]


def build_editable(*args, **kwargs):
    with asked("editable"):
        return hatchling.build.build_editable(*args, **kwargs)


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    """Write the METADATA of a wheel, with paths in it, below a folder; return the name of its .dist-info folder."""
    with (
        asked("metadata"),
        tempfile.TemporaryDirectory() as made,
        zipfile.ZipFile(Path(made, hatchling.build.build_wheel(made))) as wheel,
    ):
        [name] = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
        return Path(wheel.extract(name, metadata_directory)).parent.name


class Extras(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        backends = {name: self.backend(name, metadata["version"]) for name in self.config["backends"]}
        metadata["optional-dependencies"] = self.config["extras"] | backends

    def backend(self, name: str, version: str) -> list[str]:
        beside, asked = Path(self.root, f"hibachi_{name}"), os.environ.get("HIBACHI_BUILDS")
        if asked == "metadata" and beside.is_dir():
            return [f"hibachi-{name} @ {beside.as_uri()}"]
        if asked == "editable" and beside.is_dir():
            pyproject = tomllib.loads((beside / "pyproject.toml").read_text())
            return pyproject["tool"]["hatch"]["metadata"]["hooks"]["custom"]["needs"]
        return [f"hibachi-{name}=={version}"]


class Kernels(BuildHookInterface):
    """The same bytes each time: nothing of the folder, the time or the machine is in a library."""

    def target(self) -> str | None:
        found = os.environ.get("HIBACHI_TARGET")
        if found is not None and found not in TARGETS:
            raise ValueError(f"HIBACHI_TARGET must be one of {', '.join(TARGETS)}; got {found!r}.")
        return found

    def dependencies(self) -> list[str]:
        return [ZIG] if self.target() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        asked = os.environ.get("HIBACHI_BUILDS")
        if asked in ("editable", "metadata") or not (target := self.target()):
            return
        tag, machine, ending = TARGETS[target]
        kernels = self.builder()
        variants = kernels.M1 if target == "macos-arm64" else kernels.variants(machine.split("-")[0])
        made = Path(tempfile.mkdtemp())
        zig = [sys.executable, "-m", "ziglang"]
        names = [f"{v.name}.{ending}" for v in variants]
        for variant, name in zip(variants, names, strict=True):
            flags = ["-target", machine, f"-mcpu={variant.cpu}", "-mprefer-vector-width=512"]
            kernels.compile_to(
                made / name, [*zig, "c++", *flags], [*zig, "cc", "-target", machine, "-s", *LINK[ending]]
            )
        if variants[0].level:
            names.append(f"probe.{ending}")
            kernels.build_probe(made / names[-1], [*zig, "cc", "-target", machine, "-s"])
        manifest = {name: hashlib.sha256((made / name).read_bytes()).hexdigest() for name in names}
        (made / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True))
        for name in [*names, "manifest.json"]:
            build_data["force_include"][str(made / name)] = f"hibachi/backend/kernels/lib/{name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{tag}"

    def builder(self) -> Any:
        """`hibachi.backend.kernels.build`, without importing the package, which needs NumPy."""
        spec = importlib.util.spec_from_file_location(
            "build_kernels", Path(self.root, "hibachi/backend/kernels/build.py")
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
