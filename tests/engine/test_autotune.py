"""Kernels are chosen by timing them, once for a machine."""

from __future__ import annotations

import time

import numpy as np
import pytest

import hibachi
from hibachi.engine import autotune
from hibachi.engine.autotune import Sizes, choose, seconds_of, sizes_of, table
from hibachi.errors import ConfigError, UnsupportedOperation
from hibachi.model.describe import describe
from hibachi.model.files import locate
from hibachi.tensor.kernels import Candidate
from hibachi.tensor.numpy_backend import NumpyBackend

SIZES = Sizes("float32", ((96, 64, 2), (64, 64, 2), (256, 64, 2), (64, 128, 2)), (300, 64), 2, 4, 2, 16)


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


def why(choice):
    return {t.name: t.why_not for t in choice.trials}


def test_the_fastest_that_is_right_is_taken_and_the_others_say_why_not():
    backend = tunable(*linears(slow=Slow, wrong=Wrong, broken=Broken, plain=NumpyBackend))
    choice = choose(backend, SIZES, deterministic=True, budget=0.05)
    said = why(choice)
    assert said["plain"] is None and "times the fastest" in said["slow"]
    assert "off by 1.0e-03" in said["wrong"] and said["broken"] == "RuntimeError: no such instruction"
    assert not choice.known and "<- taken" in table(choice.trials)
    x = np.ones((1, 64), np.float32)
    assert (choice.backend.linear(x, choice.backend.put_weight(np.ones((8, 64), np.float32), "float32")) == 64).all()


def test_a_choice_is_kept_and_its_file_may_be_damaged(cache):
    backend = tunable(*linears(slow=Slow, plain=NumpyBackend))
    assert not choose(backend, SIZES, deterministic=True, budget=0.05).known
    (kept,) = cache.glob("kernels-*.json")
    again = choose(backend, SIZES, deterministic=True, budget=0.05)
    assert again.known and why(again)["plain"] is None
    assert choose(backend, SIZES, deterministic=True, budget=0.0).known  # it needs no time
    assert not choose(backend, SIZES, deterministic=True, budget=0.05, refresh=True).known
    kept.write_text("{")
    assert not choose(backend, SIZES, deterministic=True, budget=0.05).known
    assert choose(backend, SIZES, deterministic=True, budget=0.05).known
    # What it depends on is in the name.
    assert not choose(tunable(*linears(plain=NumpyBackend)), SIZES, deterministic=True, budget=0.05).known


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    backend = tunable(*linears(plain=NumpyBackend, slow=Slow))
    assert why(choose(backend, SIZES, deterministic=True, budget=0.05))["plain"] is None


def test_without_time_the_last_whole_set_is_taken():
    backend = tunable(*linears(plain=NumpyBackend, slow=Slow))
    assert type(choose(backend, SIZES, deterministic=False, budget=0.0).backend) is Slow
    assert choose(NumpyBackend(), SIZES, deterministic=False, budget=0.0).trials == []


def test_deterministic_means_invariant_candidates_or_an_error():
    found = [Candidate("linear", "varies", NumpyBackend), *linears(steady=Slow)]
    choice = choose(tunable(*found), SIZES, deterministic=True, budget=0.05)
    assert why(choice) == {"varies": "depends on the batch", "steady": None}
    with pytest.raises(UnsupportedOperation):
        choose(tunable(found[0]), SIZES, deterministic=True)


def test_budgets(monkeypatch):
    assert [seconds_of(b) for b in ("off", "1s", "0.5s", "2", 3)] == [0, 1, 0.5, 2, 3] and seconds_of("full") > 5
    assert seconds_of(None) == 0  # as the tests' environment says
    monkeypatch.delenv("HIBACHI_AUTOTUNE")
    assert seconds_of(None) == 1
    for bad in ("soon", "-1s", float("nan")):
        with pytest.raises(ConfigError, match="autotune must be"):
            seconds_of(bad)


def test_pytorch_is_tuned_for_the_shipped_model_and_gives_the_same_text():
    pytest.importorskip("torch")
    arch = describe(locate("tiny")).arch
    backend = hibachi.tensor.discover.load("torch", device="cpu")
    for deterministic in (False, True):
        choice = choose(backend, sizes_of(arch, "float32"), deterministic=deterministic, budget=0.2)
        taken = {t.operation: t.name for t in choice.trials if t.why_not is None}
        assert set(taken) == {"linear", "attention", "activations", "sampling"}
        assert all(t.error is not None and t.error < 1e-4 for t in choice.trials if t.times)
        assert choice.backend.deterministic or not deterministic
    params = hibachi.SamplingParams(temperature=0, max_tokens=24)
    texts = []
    for how in ("off", "0.2s"):
        with hibachi.LLM("tiny", backend="torch", device="cpu", autotune=how) as llm:
            texts.append(llm.generate("It is a truth", params)[0].text)
            assert llm.deterministic
    assert texts[0] == texts[1]
    assert autotune._read(next((autotune.Path(autotune.os.environ["XDG_CACHE_HOME"]) / "hibachi").glob("*.json")))
