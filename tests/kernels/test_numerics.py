"""The same answers on every library, with any threads, variant and kind of engine. They are written down here.

Who changes one changes the numerics: another name for them (`hibachi.kernels.library.NUMERICS`), a line in CHANGELOG.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hibachi.kernels.library import NUMERICS, SWITCH

from ..tensor.native import other_variants, skip_without

skip_without()
ANSWERS = Path(__file__).with_name("answers.py")
GOLDEN = {"float32": "282c331360ec02fe", "bfloat16": "e0e9fd27049413b8"}


def digest(*arguments, **environment):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HIBACHI_", "OMP_"))} | environment
    command = [sys.executable, str(ANSWERS), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()[-1]


def test_the_numerics_have_their_name():
    assert NUMERICS == "cpu-1"


@pytest.mark.parametrize("dtype", GOLDEN)
@pytest.mark.parametrize("library", ["numpy", "torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_answers_are_those_that_are_written_down(library, dtype):
    assert digest(library, dtype) == GOLDEN[dtype]


@pytest.mark.parametrize("how", ["chunked", "preempted"])
@pytest.mark.parametrize("threads", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_neither_threads_nor_chunks_nor_blocks_nor_preemption_change_them(how, threads):
    assert digest("numpy", "float32", how, OMP_NUM_THREADS=str(threads)) == GOLDEN["float32"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", GOLDEN)
def test_other_instructions_give_the_same(dtype):
    for variant in other_variants():
        assert digest("numpy", dtype, **{SWITCH: variant}) == GOLDEN[dtype], variant
