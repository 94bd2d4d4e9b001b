"""Products on each processor: those of bfloat16 are those of a model of the instruction VDPBF16PS, bit for bit, and
those of blocks are the same everywhere.

Each variant that runs here is compared; that for ARM's processors where g++ for them and qemu are installed (Debian's
packages g++-aarch64-linux-gnu and qemu-user). What is planted in copies of the sources shows that they would differ.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hibachi.backend.kernels import build

from ..tensor.native import skip_without
from .test_sanitizers import mutated

skip_without()
from hibachi.backend.kernels.library import library  # noqa: E402

HALVES, BLOCKS = (Path(__file__).with_name(f"{name}.cpp") for name in ("products", "blocks"))
FLAGS = ("-O3", "-std=c++20", "-ffp-contract=off", "-fno-math-errno", "-w")
HERE = [v.name for v in build.variants() if v.level <= library().variant.level]
PLAYED = "neon, which qemu plays"
AS_THE_MODEL = "7a740a51f23e790a"
SPARED = 6136  # sums that are rounded up to the smallest normal number: some processors flush them
OF_BLOCKS = "0169080ffbea5503"
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("products")]


def said(variant, tmp_path, sources=build.SOURCES, driver=HALVES):
    """What a driver says, compiled for a variant, and whether it is content."""
    program = tmp_path / "program"
    flags, command = next((v.flags for v in build.variants() if v.name == variant), ()), [str(program)]
    cxx = build.compiler if variant != PLAYED else lambda: "aarch64-linux-gnu-g++"
    if variant == PLAYED:
        for name in (cxx(), "qemu-aarch64"):
            if shutil.which(name) is None:
                pytest.skip(f"{name} is not installed")
        command = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", *command]
    subprocess.run([cxx(), *flags, *FLAGS, f"-I{sources}", str(driver), "-o", str(program)], check=True, timeout=600)
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    return done.stdout.strip(), done.returncode == 0


@pytest.mark.parametrize("variant", [*HERE, PLAYED])
def test_sums_are_those_of_the_instruction(variant, tmp_path):
    assert said(variant, tmp_path) == (f"{AS_THE_MODEL} {SPARED}", True)


@pytest.mark.parametrize("variant", [*HERE, PLAYED])
def test_blocks_have_the_same_bits(variant, tmp_path):
    assert said(variant, tmp_path, driver=BLOCKS) == (OF_BLOCKS, True)


@pytest.mark.parametrize(
    ("variant", "name", "old", "new"),
    [
        ("avx2", "registers.h", "FLUSHED = 0x8040", "FLUSHED = 0x8000"),
        ("avx2", "registers.h", "FLUSHED = 0x8040", "FLUSHED = 0x0040"),
        ("avx2", "lanes.h", "< 0x1p-62f", "<= 0x1p-62f"),
        (PLAYED, "registers.h", "FLUSHED = 1 << 24", "FLUSHED = 0"),
        (PLAYED, "lanes.h", "if (!again)", "if (true)"),
    ],
)
def test_other_sums_would_be_seen(variant, name, old, new, tmp_path):
    if variant not in (*HERE, PLAYED):
        pytest.skip("this processor has other instructions")
    told, content = said(variant, tmp_path, mutated(tmp_path, name, old, new))
    assert not content and " instead of " in told
