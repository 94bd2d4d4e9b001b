"""The same answers on every library, with any threads, variant and kind of engine. They are written down here.

Who changes one changes the numerics: another name for them (NUMERICS in kernels/library.py), a line in CHANGELOG.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hibachi.backend.kernels.library import NUMERICS, SWITCH

from ..tensor.native import DTYPES, biased, computed, every_variant, far, other_variants, skip_without
from ..tensor.native import digest as digest_of

skip_without()
from hibachi.backend.numpy_backend import NativeNumpyBackend  # noqa: E402

ANSWERS = Path(__file__).with_name("answers.py")
GOLDEN = {"float32": "282c331360ec02fe", "bfloat16": "7a3f8537699b0f09"}

OPERATIONS = {
    "float32": "29ef078cbba830a6bac1b519ffd0f36d0a15e05ee61b25cf49ea4cab498d0132",
    "bfloat16": "27507d6f9c43a09f99704e93cdb60d249288cb0522d2fb98547266e16a48aafa",
}
BIASED = {
    "float32": "fb09c9bb5212834e58261c9ce5c07c90b67bd7c2a28d3b00254c09985ed49cb8",
    "bfloat16": "706fe25f808708aa69cc01c2ef1ba81ec105acac40df4dfe3fbf130a720345c9",
}
FAR = {
    "float32": "5259f6c0cd3e497e26350899a5b9be61e2a77339b2f094f506b2847c71dbcf6c",
    "bfloat16": "5d1d58824a982cdb2bc16ec83c6dcbb080af53c52937d4fcb00022603da01b42",
}


def digest(*arguments, **environment):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HIBACHI_", "OMP_"))} | environment
    command = [sys.executable, str(ANSWERS), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()[-1]


def test_the_numerics_have_their_name():
    assert NUMERICS == "cpu-2"


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_variant_gives_what_is_written_down(dtype, monkeypatch):
    for backend in every_variant(NativeNumpyBackend, monkeypatch):
        for what, found in ((computed, OPERATIONS), (biased, BIASED), (far, FAR)):
            assert digest_of(what(backend, dtype)) == found[dtype], (backend.library.variant.name, what.__name__)


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
