"""Kernels, sizes of steps and dtype: by a rule, by timing where somebody asks for it, by a file."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import time
from dataclasses import replace

import numpy as np
import pytest

import hibachi
from hibachi.backend.candidates import LADDERS, AllowedKernels, Candidate
from hibachi.backend.numpy_backend import NumpyBackend
from hibachi.common.shapes import CallShapes
from hibachi.errors import ConfigError, UnsupportedOperation
from hibachi.llm.model.describe import describe
from hibachi.llm.model.files import locate
from hibachi.llm.tune import autotune
from hibachi.llm.tune.autotune import choose, seconds_of, settle
from hibachi.llm.tune.cases import ModelSizes, sizes_of
from hibachi.llm.tune.stepcost import padded, rows_named
from hibachi.llm.tune.trial import KernelTrial, table

SIZES = ModelSizes("float32", ((96, 64, 2), (64, 64, 2), (256, 64, 2), (64, 128, 2)), (300, 64), 2, 4, 2, 16)


class Tunable(NumpyBackend):
    found: tuple = ()

    def candidates(self):
        return self.found


class Slow(Tunable):
    def linear(self, x, w, b=None):
        time.sleep(0.002)
        return super().linear(x, w, b)


class Wrong(Tunable):
    def linear(self, x, w, b=None):
        return super().linear(x, w, b) * 1.001


class Broken(Tunable):
    def linear(self, x, w, b=None):
        raise RuntimeError("no such instruction")


def tunable(*found):
    backend = Tunable()
    backend.found = found
    return backend


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hibachi"


def linears(**sources):
    return [Candidate("linear", name, source, invariant=True) for name, source in sources.items()]


def why(choice, operation="linear"):
    return {t.name: t.why_not for t in choice.trials if t.operation == operation}


def test_the_fastest_that_is_right_is_taken_and_the_others_say_why_not(caplog):
    """V-35: one is slower by sleeping, one is broken."""
    caplog.set_level("INFO", logger="hibachi")
    backend = tunable(*linears(slow=Slow, wrong=Wrong, broken=Broken, plain=NumpyBackend))
    choice = choose(backend, SIZES, AllowedKernels(True), budget=0.05)
    assert "by timing: linear plain" in caplog.text
    said = why(choice)
    assert said["plain"] is None and "times the fastest" in said["slow"]
    assert "off by 1.0e-03" in said["wrong"] and said["broken"] == "RuntimeError: no such instruction"
    assert "<- taken" in table(choice.trials)
    x = np.ones((1, 64), np.float32)
    assert (choice.backend.linear(x, choice.backend.put_weight(np.ones((8, 64), np.float32), "float32")) == 64).all()


def kept_by(backend, file, *, budget=0.0, dtype="float32", deterministic=True, arch=None):
    how = {"stored": "float32", "allowed": AllowedKernels(deterministic), "budget": budget, "file": file}
    return settle(backend, arch or ARCH, dtype, **how)


def test_a_file_travels(tmp_path):
    """It names what is taken, and another machine, given it, does the same without measuring."""
    file, backend = tmp_path / "kernels.json", tunable(*linears(slow=Slow, plain=NumpyBackend))
    with pytest.raises(ConfigError, match=r"There is no file .*--autotune full"):
        kept_by(backend, file)
    measured = kept_by(backend, file, budget=0.05)
    assert why(measured)["plain"] is None
    again = kept_by(backend, file, budget=5.0)
    assert again.trials == [] and type(again.backend) is type(measured.backend) and again.dtype == "float32"
    file.write_text(file.read_text().replace('"linear": "plain"', '"linear": "slow"'))
    assert type(kept_by(backend, file).backend) is Slow
    assert os.listdir(tmp_path) == ["kernels.json"]


def test_a_file_of_another_model_or_of_other_kernels_is_refused(tmp_path):
    file, backend = tmp_path / "kernels.json", tunable(*linears(slow=Slow, plain=NumpyBackend))
    kept_by(backend, file, budget=0.05, deterministic=False)
    with pytest.raises(ConfigError, match="measured for another model"):
        kept_by(backend, file, arch=replace(ARCH, vocab_size=99), deterministic=False)
    with pytest.raises(ConfigError, match="deterministic=False"):
        kept_by(backend, file)
    with pytest.raises(ConfigError, match="takes plain for linear: is not known here"):
        kept_by(tunable(*linears(slow=Slow)), file, deterministic=False)
    gone = replace(linears(plain=NumpyBackend)[0], why_not="it needs a processor of another kind")
    with pytest.raises(ConfigError, match="takes plain for linear: it needs a processor"):
        kept_by(tunable(gone), file, deterministic=False)
    with pytest.raises(ConfigError, match="cannot be written"):
        kept_by(backend, tmp_path / "none" / "kernels.json", budget=0.05)


def test_by_itself_only_what_has_the_same_bits_is_timed():
    """A stopwatch never changes an answer: what has no name for its bits, or another one, is no candidate."""
    same, other = Candidate("linear", "same", Slow, bits="n-1"), Candidate("linear", "other", NumpyBackend, bits="n-2")
    backend = tunable(same, other, *linears(nameless=NumpyBackend))
    backend.numerics = "n-1"
    choice = settle(backend, ARCH, "float32", stored=None, allowed=AllowedKernels(False), budget=0.05)
    assert set(why(choice)) <= {"same"} and type(choice.backend) in (Slow, Tunable)
    backend.numerics = None
    assert settle(backend, ARCH, "float32", stored=None, allowed=AllowedKernels(False), budget=0.05).backend is backend


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", None])
def test_the_rule_takes_the_dtype_of_the_checkpoint_where_kernels_compute_it(stored):
    def ruled(backend, dtype=None):
        return settle(backend, ARCH, dtype, stored=stored, allowed=AllowedKernels(False))

    assert ruled(NumpyBackend(native=False)).dtype == "float32"
    assert ruled(NumpyBackend(native=False), "float64").dtype == "float64"
    kernels = NumpyBackend()
    choice = ruled(kernels)
    assert choice.backend is kernels and choice.trials == []
    assert choice.dtype == ("bfloat16" if stored == "bfloat16" and kernels.native else "float32")


def test_deterministic_means_invariant_candidates_or_an_error():
    found = [Candidate("linear", "varies", NumpyBackend), *linears(steady=Slow)]
    choice = choose(tunable(*found), SIZES, AllowedKernels(True), budget=0.05)
    assert why(choice) == {"varies": "depends on the batch", "steady": None}
    assert set(why(choice, "attention").values()) == {"depends on the batch"}  # of which there is none that is steady
    with pytest.raises(UnsupportedOperation):
        choose(tunable(found[0]), SIZES, AllowedKernels(True))


def test_budgets(monkeypatch):
    assert [seconds_of(b) for b in ("off", "1s", "0.5s", "2", 3)] == [0, 1, 0.5, 2, 3] and seconds_of("full") > 5
    monkeypatch.setenv("HIBACHI_AUTOTUNE", "2s")
    assert seconds_of(None) == 2
    monkeypatch.delenv("HIBACHI_AUTOTUNE")
    assert seconds_of(None) == 0
    for bad in ("soon", "-1s", float("nan")):
        with pytest.raises(ConfigError, match="autotune must be"):
            seconds_of(bad)


def test_pytorch_is_tuned_for_the_shipped_model_and_gives_the_same_text():
    pytest.importorskip("torch")
    arch = describe(locate("tiny")).arch
    backend = hibachi.backend.discover.load_backend("torch", device="cpu")
    for deterministic in (False, True):
        choice = choose(backend, sizes_of(arch, "float32"), AllowedKernels(deterministic), budget=0.2)
        taken = {t.operation: t.name for t in choice.trials if t.why_not is None}
        assert set(taken) == {"linear", "attention", "activations", "sampling"}
        assert set(why(choice, "buckets").values()) == {"shapes are not padded"}
        assert all(t.error is not None and t.error < 1e-4 for t in choice.trials if t.times)
        assert choice.backend.deterministic or not deterministic
    params = hibachi.SamplingParams(temperature=0, max_tokens=24)
    texts = []
    for how in ("off", "0.2s"):
        with hibachi.LLM("tiny", backend="torch", device="cpu", autotune=how) as llm:
            texts.append(llm.generate("It is a truth", params)[0].text)
            assert llm.deterministic
    assert texts[0] == texts[1]


# ---- the sizes that steps are padded to ------------------------------------------------------------------------------


class Static(Tunable):
    """Like a library that compiles for each shape."""

    shapes = CallShapes(few="all", any_width=True)


def times(each):
    """Times of a step in which every token takes `each` milliseconds, beside 10 that are there whatever it holds."""
    linear = {rows_named(n): 10 + each * n for n in (1, 16, 64, 256)} | {"head, 1": 0.0, "head, 64": 0.0}
    attention = {f"{n} x 256": 0.0 for n in (1, 16, 64)} | {"prompt of 256": 0.0}
    return {"linear": linear, "attention": attention}


def test_finer_ladders_are_worth_their_programs_where_tokens_cost():
    def judged(each):
        found = {name: padded(times(each), replace(Static.shapes, ladder=ladder)) for name, ladder in LADDERS.items()}
        assert [count for _, count in found.values()] == sorted(count for _, count in found.values())
        return min(found, key=lambda name: np.prod(list(found[name][0].values())))

    assert judged(0.0) == "powers" and judged(1.0) in ("quarters", "eighths")


def test_the_price_of_padding_by_hand():
    cost, count = padded(times(1.0), replace(Static.shapes, ladder=(1, 1)))
    rows = [1, 2, 4, 4, *[8] * 4, *[16] * 8]
    assert count == 7 + 4 and cost["1 to 16 rows"] == pytest.approx((10 + np.mean(rows)) * (1 + 11 * 5 / 3600))
    tokens = [*[64] * 32, *[128] * 64, *[256] * 128, *[512] * 256]
    assert cost["33 to 512 tokens"] == pytest.approx((10 + np.mean(tokens)) * (1 + 11 * 5 / 3600))
    assert padded(times(1.0), CallShapes(few="all"))[1] == 4 * (5 + 4)  # 2, 8, 16, 32, 64
    assert padded({"linear": {}}, Static.shapes) == ({}, 0)


def test_a_library_that_compiles_gets_a_ladder():
    backend = Static()
    backend.found = ()
    choice = choose(backend, SIZES, AllowedKernels(False), budget=0.05)
    [taken] = [t for t in choice.trials if t.operation == "buckets" and t.why_not is None]
    assert choice.backend.shapes.parts == LADDERS[taken.name] and set(taken.times) and "programs" in taken.note
    assert backend.shapes.ladder is None  # the user's own object stays as it was
    assert choose(NumpyBackend(), SIZES, AllowedKernels(False), budget=0.05).trials == []  # there is nothing to choose


def test_where_nothing_could_be_timed_the_ladder_stays():
    class Fails(Static):
        def attend(self, *args, **more):
            raise RuntimeError("no memory")

    choice = choose(Fails(), SIZES, AllowedKernels(False), budget=0.05)
    assert set(why(choice, "buckets").values()) == {"nothing was measured"} and choice.backend.shapes.ladder is None
    assert "no memory" in table(choice.trials)


# ---- the dtype -------------------------------------------------------------------------------------------------------

ARCH = describe(locate("tiny")).arch


def _known(dtype):
    """float64 stands for it, as NumPy has none."""
    return "float64" if dtype == "bfloat16" else dtype


class Halves(Tunable):
    """A library that knows bfloat16, and multiplies faster in it."""

    waits = "float32"

    def dtype(self, name):
        return super().dtype(_known(name))

    def put(self, a, dtype=None):
        return super().put(a, _known(dtype))

    def put_weight(self, w, dtype):
        return super().put_weight(w, _known(dtype))

    def zeros(self, shape, dtype):
        return super().zeros(shape, _known(dtype))

    def linear(self, x, w, b=None):
        time.sleep(0.006 * (self.waits == ("bfloat16" if x.dtype == np.float64 else "float32")))
        return super().linear(x, w, b)


class SlowHalves(Halves):
    waits = "bfloat16"


@pytest.mark.slow
def test_the_fastest_dtype_is_taken_that_the_checkpoint_allows(tmp_path):
    files = (tmp_path / f"{i}.json" for i in range(99))

    def settled(backend, stored, dtype=None, rounding=False):
        allowed = AllowedKernels(False, rounding)
        return settle(backend, ARCH, dtype, stored=stored, allowed=allowed, budget=0.05, file=next(files))

    choice = settled(Halves(), "bfloat16")
    assert choice.dtype == "bfloat16" and "times the fastest" in why(choice, "dtype")["float32"]
    assert settled(SlowHalves(), "bfloat16").dtype == "float32"
    # Digits that the checkpoint has are not given up unasked.
    choice = settled(Halves(), "float32")
    assert choice.dtype == "float32" and "weights lose digits" in why(choice, "dtype")["bfloat16"]
    assert settled(Halves(), None).dtype == settled(Halves(), "float16").dtype == "float32"
    assert settled(Halves(), "float32", rounding=True).dtype == "bfloat16"
    # Nor is what somebody asked for.
    assert settled(Halves(), "bfloat16", "float32").dtype == "float32"
    plain = NumpyBackend(native=False)
    assert why(settled(plain, "bfloat16"), "dtype") == {"float32": None, "bfloat16": "numpy has none"}


def test_without_time_the_dtype_is_float32():
    choice = settle(Halves(), ARCH, None, stored="bfloat16", allowed=AllowedKernels(False))
    assert choice.dtype == "float32" and choice.trials == []


def test_a_model_is_loaded_in_the_dtype_that_was_the_fastest(monkeypatch, tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    shutil.copytree(locate("tiny"), folder)
    weights = load_file(folder / "model.safetensors")
    save_file({name: w.to(torch.bfloat16) for name, w in weights.items()}, folder / "model.safetensors")
    for fastest in ("float32", "bfloat16"):
        monkeypatch.setattr(autotune, "steps_of", lambda trials, fastest=fastest: {"1 row": 1.0})
        monkeypatch.setattr(
            autotune, "DTYPES", (fastest, *({"float32", "bfloat16"} - {fastest}))
        )  # of equals, the first
        file = tmp_path / f"{fastest}.json"
        with hibachi.LLM(folder, backend="torch", device="cpu", autotune="0.1s", kernels=file) as llm:
            assert llm.model.dtype == fastest
            assert llm.generate("It is", hibachi.SamplingParams(max_tokens=2))[0].text


# ---- candidates that need a library ----------------------------------------------------------------------------------


def test_a_candidate_appears_with_its_library_and_falls_back_with_a_reason(monkeypatch, tmp_path):
    def judged():
        importlib.invalidate_caches()
        kernel = [Candidate("linear", "fast", Quick, invariant=True, needs="fast_kernels")]
        choice = choose(tunable(*linears(slow=Slow), *kernel), SIZES, AllowedKernels(True), budget=0.05)
        return why(choice)["fast"], choice.backend

    class Quick(Tunable):
        def linear(self, x, w, b=None):
            import fast_kernels

            return fast_kernels.finish(super().linear(x, w, b))

    monkeypatch.syspath_prepend(tmp_path)
    said, backend = judged()
    assert said == "fast_kernels is not installed" and type(backend) is Slow
    for code, reason in (
        ("import libcuda_of_another_version", "ModuleNotFoundError: No module named 'libcuda_of_another_version'"),
        ("def finish(y): raise RuntimeError('no such device')", "RuntimeError: no such device"),
        ("def finish(y): return 2 * y", "its results are off"),
        ("def finish(y): return y", None),
    ):
        (tmp_path / "fast_kernels.py").write_text(code)
        sys.modules.pop("fast_kernels", None)
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        said, backend = judged()
        assert (said is None) == (reason is None) and (reason is None or reason in said)
        assert type(backend) is (Quick if reason is None else Slow)
    sys.modules.pop("fast_kernels", None)


def test_the_table_has_a_line_for_each_and_one_for_those_that_cannot_be_had():
    shown = table(
        [
            KernelTrial("linear", "a", {"1 row": 1.0, "64 rows": 1234.5}, 1e-4, None),
            KernelTrial("linear", "b", {}, None, "not installed"),
            KernelTrial("linear", "c", {}, None, "not installed"),
            KernelTrial("linear", "d", {"1 row": 2.0, "64 rows": 2000.0}, 2e-4, "2.00 times the fastest", "3 programs"),
        ]
    )
    assert shown.splitlines() == [
        "linear          1 row   64 rows  error",
        "  a             1.000  1234.500  1e-04  <- taken",
        "  b, c                                  not installed",
        "  d             2.000  2000.000  2e-04  2.00 times the fastest (3 programs)",
    ]
