"""Kernels by name: backends that are put together from candidates."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from hibachi.backend import candidates as kernels
from hibachi.backend.array_backend import ArrayBackend
from hibachi.backend.candidates import (
    LADDERS,
    OPERATIONS,
    AllowedKernels,
    Candidate,
    candidates,
    compose,
    fitting,
    ladders,
    without_library,
)
from hibachi.backend.discover import load_backend
from hibachi.backend.kernels.library import NUMERICS, SWITCH, why_missing
from hibachi.backend.numpy_backend import NumpyBackend
from hibachi.common.shapes import CallShapes
from hibachi.errors import UnsupportedOperation


def plain():
    return NumpyBackend(native=False)


class Doubled(NumpyBackend):
    """Another member of the family."""

    def linear(self, x, w, b=None):
        return super().linear(x, w, b) * 2

    def silu(self, x):
        return super().silu(x) * 2


class Stranger:
    """A class of nobody's family."""

    def silu(self, x):
        return self.xp.zeros_like(x)


def test_each_operation_comes_from_its_candidate():
    x, w = np.ones((2, 3), np.float32), plain().put_weight(np.ones((4, 3), np.float32), "float32")
    mixed = compose(plain(), {"linear": Candidate("linear", "doubled", Doubled)})
    assert (mixed.linear(x, w) == 6).all() and isinstance(mixed, NumpyBackend)
    assert np.array_equal(mixed.silu(x), Doubled().silu(x))  # nothing was chosen, so the base's
    chosen = {
        "linear": Candidate("linear", "doubled", Doubled),
        "activations": Candidate("activations", "numpy", NumpyBackend),
    }
    mixed = compose(plain(), chosen)
    assert (mixed.linear(x, w) == 6).all() and np.array_equal(mixed.silu(x), plain().silu(x))
    assert mixed.kernels == "linear doubled, activations numpy" and not mixed.deterministic


def test_a_candidate_may_be_a_strangers_class():
    mixed = compose(NumpyBackend(), {"activations": Candidate("activations", "none", Stranger, invariant=True)})
    assert not mixed.silu(np.ones(3, np.float32)).any() and mixed.deterministic


@pytest.mark.skipif(why_missing() is not None, reason="there are no kernels")
def test_a_strangers_weights_are_not_packed_past_it():
    class Sparse:
        def put_weight(self, w, dtype):
            return "sparse", w.shape

    mixed = compose(NumpyBackend(native=True), {"linear": Candidate("linear", "sparse", Sparse)})
    assert mixed.put_rows([np.ones((2, 3)), np.ones((1, 3))], "float32") == ("sparse", (3, 3))


def test_a_candidate_of_the_family_computes_with_what_it_is_itself():
    class Times(NumpyBackend):
        factor = 3

        def linear(self, x, w, b=None):
            return x @ w.T * self.factor

    class Sibling(NumpyBackend):
        factor = 5

        def silu(self, x):
            return x * self.factor

    sources = {"linear": Times, "activations": Sibling}
    mixed = compose(plain(), {op: Candidate(op, "x", source) for op, source in sources.items()})
    x = np.ones((1, 1), np.float32)
    assert mixed.linear(x, x) == 3 and mixed.logits(x, x) == 3 and mixed.silu(x) == 5
    assert mixed.gated(np.ones((1, 2), np.float32), "silu") == 5


def test_what_is_mixed_is_not_replaced_by_kernels_of_ours():
    mixed = compose(plain(), {"activations": Candidate("activations", "none", Stranger)})
    assert type(mixed) is NumpyBackend and not mixed.is_plain(NumpyBackend) and not mixed.prefers_invariant
    with pytest.raises(UnsupportedOperation):
        mixed.invariant()


@pytest.mark.parametrize("native", [False, None])
@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
def test_a_copy_of_a_backend_is_as_native_as_it_is(name, native):
    """What is mixed begins with a copy."""
    pytest.importorskip(name)
    made = type(load_backend(name, device="cpu").plain())("cpu", native=native)
    copied = copy.copy(made)
    assert type(copied) is type(made) and copied.native == made.native
    w = copied.put_weight(np.ones((4, 3), np.float32), "float32")
    assert (copied.get(copied.linear(copied.put(np.ones((2, 3), np.float32)), w)) == 3).all()


def test_a_library_that_we_do_not_know_can_be_mixed():
    backend = ArrayBackend(pytest.importorskip("array_api_strict"))
    mixed = compose(backend, {"activations": Candidate("activations", "none", Stranger)})
    x = backend.put(np.ones(3, np.float32))
    assert not mixed.get(mixed.silu(x)).any() and backend.get(backend.silu(x)).all()


def test_a_whole_family_member_is_taken_as_it_is():
    own = plain()
    assert compose(own, {op: Candidate(op, "numpy", NumpyBackend) for op in OPERATIONS}) is own
    assert type(compose(own, {op: Candidate(op, "doubled", Doubled) for op in OPERATIONS})) is Doubled


def test_every_operation_names_methods_of_a_backend():
    for methods in OPERATIONS.values():
        assert all(callable(getattr(ArrayBackend, name)) for name in methods)


def test_what_may_be_chosen():
    found = [
        Candidate("linear", "plain", NumpyBackend),
        Candidate("linear", "steady", NumpyBackend, invariant=True),
        Candidate("linear", "bytes", NumpyBackend, invariant=True, rounds=True),
        Candidate("attention", "absent", NumpyBackend, invariant=True, why_not="not installed"),
    ]

    def names(**how):
        return {op: [c.name for c in some] for op, some in fitting(found, AllowedKernels(**how)).items()}

    assert names(deterministic=False, rounding=False) == {"linear": ["plain", "steady"]}
    assert names(deterministic=True, rounding=False) == {"linear": ["steady"]}
    assert names(deterministic=True, rounding=True) == {"linear": ["steady", "bytes"]}


class Entry:
    def __init__(self, name, found):
        self.name, self.found = name, found

    def load(self):
        return self.found


def test_packages_bring_candidates_and_one_that_is_broken_harms_nobody(monkeypatch):
    def broken(backend):
        raise ImportError("no such library")

    mine = Candidate("activations", "mine", Stranger)
    entries = [Entry("broken", broken), Entry("good", lambda backend: [mine])]
    monkeypatch.setattr(kernels, "entry_points", lambda group: entries if group == "hibachi.kernels" else [])
    found = candidates(NumpyBackend())
    assert mine in found
    assert {c.operation for c in found if c.why_not == "ImportError: no such library"} == set(OPERATIONS)


def test_pytorch_has_candidates_on_the_cpu_only_where_nothing_is_decided(monkeypatch):
    torch = pytest.importorskip("torch")
    from hibachi_torch import TorchBackend

    monkeypatch.setenv(SWITCH, "none")
    found = candidates(TorchBackend("cpu"))
    assert {c.operation for c in found} == set(OPERATIONS)
    native = [c for c in found if c.name == "native"]
    assert len(native) == len(OPERATIONS) and all("HIBACHI_VARIANT=none" in c.why_not for c in native)
    others = {c.name: c.why_not for c in found if c.name in ("flash-attn", "flashinfer", "FlexAttention")}
    assert len(others) == 3 and all(others.values()) and "for CUDA" in others["flash-attn"]
    assert not candidates(TorchBackend("cpu", native=False))
    assert not candidates(TorchBackend(torch.device("meta")))


@pytest.mark.skipif(why_missing() is not None, reason=str(why_missing()))
@pytest.mark.parametrize("package", ["hibachi_torch", "hibachi_jax"])
def test_where_there_are_kernels_they_are_timed_beside_the_librarys_own(package):
    """`plain` is what a choice of kernels starts from."""
    pytest.importorskip(package.removeprefix("hibachi_"))
    backend = load_backend(package.removeprefix("hibachi_"), device="cpu")
    assert backend.native and not backend.plain().native
    found = candidates(backend.plain())
    native = [c for c in found if c.name == "native"]
    assert {c.operation for c in native} == set(OPERATIONS)
    assert all(c.invariant and c.why_not is None and c.bits == NUMERICS for c in native)
    assert {c.operation for c in found if c.bits is None and c.why_not is None} >= set(OPERATIONS)
    assert compose(backend.plain(), {c.operation: c for c in native}).native


def test_a_candidate_without_its_library_says_so():
    def why(needs, why_not=None):
        return without_library(Candidate("linear", "theirs", Stranger, needs=needs, why_not=why_not)).why_not

    assert why("numpy") is None and why(None) is None
    assert why("no_such_library") == "no_such_library is not installed"
    assert why("no_such_library.part") == "no_such_library.part is not installed"
    assert why("no_such_library", "for CUDA") == "for CUDA"


def test_the_sizes_that_steps_are_padded_to_are_a_choice_too():
    class Static(NumpyBackend):
        shapes = CallShapes(few="all")

    class Fixed(Static):
        shapes = CallShapes(few="all", sizes=(8, 32), tiles=(1, 1))

    found = {c.name: c for c in ladders(Static())}
    backend = Static()
    fine = compose(backend, {"buckets": found["eighths"]})
    assert (
        fine.shapes.parts == LADDERS["eighths"] and type(fine) is Static and backend.shapes.parts == LADDERS["powers"]
    )
    assert compose(backend, {"buckets": found["powers"]}) is backend
    both = compose(backend, {"buckets": found["halves"], "linear": Candidate("linear", "doubled", Doubled)})
    assert both.shapes.parts == LADDERS["halves"] and "doubled" in both.kernels
    assert {c.why_not for c in ladders(NumpyBackend())} == {"shapes are not padded"}
    assert {c.why_not for c in ladders(Fixed())} == {"steps have fixed sizes: 8, 32 tokens"}
