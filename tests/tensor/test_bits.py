"""hibachi's kernels give the same bits on every library, with every set of instructions, for weights of every kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hibachi import LLM, SamplingParams, load_backend
from hibachi.backend.kernels.library import SWITCH

from .native import DTYPES, biased, computed, digest, every_variant, other_variants, products, same_arrays, skip_without

skip_without()
ROOT = Path(__file__).parents[2]
KINDS = ("none", "int8", "int4")
ALL = (computed, biased, products)
"""What is compared, in one library and the other."""
PROMPTS = ["The", "A little", "Once upon a time there was"]
PARAMS = [SamplingParams(temperature=t, seed=5, max_tokens=12, logprobs=2) for t in (0, 0.9, 0)]


def made(library, kind):
    pytest.importorskip("numpy" if library == "numpy" else f"hibachi_{library}")
    backend = load_backend(library)
    return backend if kind == "none" else backend.quantized(kind)


QUICK = {("none", "bfloat16"), ("int8", "float32")}  # what XLA compiles for the others takes longest
CASES = [
    pytest.param(kind, dtype, marks=() if (kind, dtype) in QUICK else pytest.mark.slow)
    for kind in KINDS
    for dtype in DTYPES
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_pytorch_has_the_bits_of_numpy(kind, dtype):
    for what in ALL:
        same_arrays(what(made("torch", kind), dtype), what(made("numpy", kind), dtype))


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_jax_has_the_bits_of_numpy(kind, dtype):
    backend, ours = made("jax", kind), made("numpy", kind)
    with backend.guard():
        for what in ALL:
            same_arrays(what(backend, dtype), what(ours, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("library", ("numpy", "torch"))
def test_every_variant_has_the_same_bits(library, kind, dtype, monkeypatch):
    """Other instructions, the same order of sums, and no rounding that one of them leaves out."""
    if not other_variants():
        pytest.skip("this processor has one variant")
    first, *others = every_variant(lambda: made(library, kind), monkeypatch)
    for what in ALL:
        want = what(first, dtype)
        for other in others:
            same_arrays(what(other, dtype), want)


@pytest.mark.slow
def test_every_variant_has_the_same_bits_on_jax():
    """Each in a process of its own, as JAX knows one library."""
    if not (others := other_variants()):
        pytest.skip("this processor has one variant")
    want = {dtype: digest(computed(made("numpy", "none"), dtype)) for dtype in DTYPES}
    for name in others:
        command = [sys.executable, "-m", "tests.tensor.native", "jax"]
        env = os.environ | {SWITCH: name}
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == want


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_a_language_model_writes_the_same_on_every_library_alone_and_in_company(kind, dtype):
    """With all digits of log-probabilities."""

    def said(completions):
        return [(c.token_ids, repr(c.choices[0].logprobs)) for c in completions]

    answers = []
    for library in ("numpy", "torch", "jax"):
        with LLM("tiny", backend=made(library, "none"), dtype=dtype, quantization=kind, max_model_len=64) as llm:
            assert llm.deterministic and llm.backend.native and llm.engine.facts.quantization == kind
            assert llm.backend.quantization == kind
            answers.append(said(llm.generate(PROMPTS, PARAMS)))
            alone = [said(llm.generate([p], each))[0] for p, each in zip(PROMPTS, PARAMS, strict=True)]
            assert alone == answers[-1]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("library", ("torch", pytest.param("jax", marks=pytest.mark.slow)))
def test_in_float32_it_is_the_text_of_the_librarys_own_operations(library):
    package = pytest.importorskip(f"hibachi_{library}")
    plain = {"torch": "TorchBackend", "jax": "JaxBackend"}[library]
    said = []
    for native in (False, True):
        backend = getattr(package, plain)("cpu", native=native)
        with LLM("tiny", backend=backend, dtype="float32", max_model_len=64) as llm:
            said.append([c.token_ids for c in llm.generate(PROMPTS, PARAMS[0])])
    assert said[0] == said[1]


def test_numbers_of_the_products_are_there():
    """A comparison of nothing would say the same."""
    found = products(load_backend("numpy"), "float32")
    assert len(found) > 20 and all(np.isfinite(t).all() for name, t in found.items() if "spoiled" not in name)
