"""Wheels with compiled kernels, as HIBACHI_TARGET makes them."""

import re
import zipfile

from .venvs import ROOT, checkout, environment, run

TARGETS = {  # name: (how the tag of its wheel ends, its libraries)
    "linux-x86_64": ("manylinux_2_17_x86_64.manylinux2014_x86_64.musllinux_1_2_x86_64", "avx2.so avx512.so probe.so"),
    "linux-aarch64": ("manylinux_2_17_aarch64.manylinux2014_aarch64.musllinux_1_2_aarch64", "neon.so"),
    "macos-arm64": ("macosx_11_0_arm64", "neon.dylib"),
    "windows-x86_64": ("win_amd64", "avx2.dll avx512.dll probe.dll"),
}
FOLDER = "hibachi/backend/kernels/lib/"


class Builder:
    """Builds them in an environment of its own, each once."""

    def __init__(self, home):
        self.home, self.made = home, {}
        zig = re.search(r'"(ziglang==[\d.]+)"', (ROOT / "hatch_build.py").read_text())
        self.programs = environment(home, "build", "hatchling>=1.27", zig[1], "auditwheel", "pefile")
        self.checkout = self.copy("checkout")

    def copy(self, name):
        return checkout(self.home / name)

    def wheel(self, target):
        if target not in self.made:
            self.made[target] = self.build(target, self.checkout, "--no-isolation")
        return self.made[target]

    def build(self, target, checkout, *options):
        """The wheel of a target. Nothing of what an earlier one compiled is used."""
        out = self.home / f"dist of {checkout.name}" / target
        env = {"HIBACHI_TARGET": target, "ZIG_GLOBAL_CACHE_DIR": str(self.home / f"zig of {checkout.name}")}
        out.mkdir(parents=True)
        command = [self.programs / "python", "-m", "build", "--wheel", *options, "--outdir", out, checkout]
        run(*command, cwd=out, **env)
        (made,) = out.glob("*.whl")
        return made

    def zig(self, *arguments, cwd):
        return run(self.programs / "python", "-m", "ziglang", *arguments, cwd=cwd)


def members(wheel):
    """{name: bytes} of what is in it."""
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist() if not name.endswith("/")}
