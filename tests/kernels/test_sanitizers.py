"""Sanitizers look on while the kernels compute: at their memory and arithmetic, and at the threads of the team.

What is planted in copies of the sources shows that they would say something.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hibachi.backend.kernels import build
from hibachi.backend.kernels.library import SWITCH

ROOT = Path(__file__).parents[2]
SOURCES = build.SOURCES
FILES = [
    "tests/kernels",
    *(f"tests/tensor/test_{name}.py" for name in ("native", "native_step", "kernels", "int8", "packing", "blocks")),
    *(f"tests/tensor/test_{name}.py" for name in ("shapechecks", "jax_native")),
]
DRIVER = Path(__file__).with_name("team.cpp")
REPORTS = ("runtime error: ", "Sanitizer: ")
TSAN = ("-std=c++20", "-O1", "-g", "-fsanitize=thread", "-pthread")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sanitizers")]  # what is compiled once, serves all

# Less optimized, a variant compiles in some minutes, and what is reported is where it was written.
COMPILER = """#!/bin/sh
exec g++ "$@" -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
"""
# A product of 33 rows, as numbers and as bytes, by the kernels of a folder of sources.
PRODUCTS = """
import sys
from pathlib import Path
import numpy as np
from hibachi import NumpyBackend
from hibachi.backend.kernels import build
from hibachi.backend.numpy_backend import Int8NumpyBackend
build.SOURCES = Path(sys.argv[1])
for kind in (NumpyBackend, Int8NumpyBackend):
    backend = kind(native=True)
    w = backend.put_weight(np.ones((100, 64), np.float32), "float32")
    y = backend.get(backend.linear(backend.put(np.ones((33, 64), np.float32)), w))
    assert abs(y - 64).max() < 0.5, y
print(backend.library)
"""


def runtime(name):
    """The path of a sanitizer's library. Skips where there is none."""
    if sys.platform != "linux" or shutil.which("g++") is None:
        pytest.skip("g++ on Linux, whose sanitizers these are, is not installed")
    path = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, timeout=60).stdout
    if not Path(path.strip()).is_absolute():
        pytest.skip(f"{name} of g++ is not installed")
    return path.strip()


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """watched(*arguments): Python runs with kernels that AddressSanitizer and UndefinedBehaviorSanitizer watch."""
    if not build.variants():
        pytest.skip("there are no kernels for this processor")
    folder, libraries = tmp_path_factory.mktemp("watched"), [runtime("libasan.so"), runtime("libubsan.so")]
    compiler = folder / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    mine = {
        "CXX": str(compiler),
        "XDG_CACHE_HOME": str(folder),  # compiled once, apart from what others use
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python leaves much to the end of its process
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "HIBACHI_AUTOTUNE": "off",
    }
    env = {k: v for k, v in os.environ.items() if k != SWITCH and not k.startswith("PYTEST_")} | mine

    def run(*arguments):
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=3000)

    return run


@pytest.mark.parametrize("file", FILES)
def test_the_kernels_tests_pass_with_nothing_to_report(file, watched):
    # Who dies tells why on the process's stderr, which is not captured.
    done = watched("-m", "pytest", "-p", "no:cacheprovider", "-q", "--capture=sys", file)
    at = min((place for word in REPORTS if (place := done.stderr.find(word)) >= 0), default=0)
    said = f"{done.stdout[-2000:]}\n{done.stderr[max(0, at - 300) : at + 6000]}"
    assert done.returncode == 0 and " passed" in done.stdout, said
    assert not any(word in done.stderr for word in REPORTS), said


def mutated(tmp_path, name, old, new):
    """A copy of the sources of which one is changed."""
    copy = shutil.copytree(SOURCES, tmp_path / "sources")
    text = (copy / name).read_text()
    assert old in text, f"{name} no longer says {old!r}: plant something else"
    (copy / name).write_text(text.replace(old, new))
    return copy


def test_a_planted_overflow_is_reported(watched, tmp_path):
    """One lane too many is read of the weights, which are padded to panels and no more."""
    done = watched("-c", PRODUCTS, mutated(tmp_path, "linear.h", "d < depth; d++", "d <= depth; d++"))
    assert done.returncode != 0 and "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr[-3000:]
    assert "linear.h" in done.stderr


def test_planted_undefined_arithmetic_is_reported(watched, tmp_path):
    old = "inline int64_t up(int64_t n, int64_t of) { return"
    planted = f"{old[:-6]}volatile int most = 0x7fffffff; most = most + 1; return"
    done = watched("-c", PRODUCTS, mutated(tmp_path, "memory.h", old, planted))
    assert done.returncode != 0 and "runtime error: signed integer overflow" in done.stderr, done.stderr[-3000:]


def raced(tmp_path, sources):
    """What the driver says of the team with several callers at once."""
    runtime("libtsan.so")
    program = tmp_path / "program"
    command = ["g++", *TSAN, f"-I{sources}", str(DRIVER), str(sources / "team.cpp"), "-o", str(program)]
    subprocess.run(command, check=True, timeout=600)
    env = os.environ | {"TSAN_OPTIONS": "halt_on_error=0"}
    done = subprocess.run([str(program)], env=env, capture_output=True, text=True, timeout=600)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run on this kernel, which places memory at too many addresses")
    return done


def test_no_thread_of_the_team_races(tmp_path):
    done = raced(tmp_path, SOURCES)
    assert done.returncode == 0 and not done.stderr, done.stderr[:6000]
    words = done.stdout.split()
    assert done.stdout.startswith("as expected") and int(words[-2]) > 100, done.stdout  # the others came at all


@pytest.mark.parametrize(
    ("old", "order"),
    [
        ("ticket_of(turn, 0), std::memory_order_release", "release"),
        ("end - first, std::memory_order_acq_rel", "acq_rel"),
    ],
    ids=["an operation is opened too early", "a part counts as done too early"],
)
def test_a_planted_race_is_reported(old, order, tmp_path):
    done = raced(tmp_path, mutated(tmp_path, "team.cpp", old, old.replace(order, "relaxed")))
    assert done.returncode != 0 and "WARNING: ThreadSanitizer: data race" in done.stderr
