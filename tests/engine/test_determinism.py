"""deterministic=True: what is promised, how it is checked on the loaded model, and what happens where it is false."""

import logging
import re
import threading
from functools import partial

import numpy as np
import pytest
import torch.nn.functional as F

from hibachi import (
    LLM,
    AutoregressiveBatchInference,
    ConfigError,
    ModelError,
    NotDeterministic,
    NumpyBackend,
    SamplingParams,
    State,
    load_model,
)
from hibachi.backend.numpy_backend import InvariantNumpyBackend
from hibachi.llm.model.files import TINY
from hibachi.testing.toys import SumPaged
from hibachi_torch import TorchBackend
from hibachi_torch.invariant_backend import InvariantTorchBackend

from .models import PATIENCE, until
from .sampling import Row, Rows

GREEDY = SamplingParams(temperature=0, max_tokens=6)


def engine(model, **options):
    return AutoregressiveBatchInference(model, max_model_len=model.max_model_len, dtype=model.dtype, **options)


class Liar(InvariantNumpyBackend):
    """Says that it is deterministic, and multiplies as the library likes."""

    def linear(self, x, w, b=None):
        return NumpyBackend.linear(self, x, w, b)


class LooksAtOthers(InvariantNumpyBackend):
    """Deterministic in every way but one: a row is scaled by how many others there are."""

    def silu(self, x):
        return super().silu(x) * np.float32(1 + 1e-6 * len(x))


class Raises(InvariantNumpyBackend):
    def silu(self, x):
        raise FloatingPointError("planted")


class Masked:
    """Logits of which some are -inf, and the others depend on how many rows there are."""

    vocab_size, max_model_len, dtype, params = 32, 64, "float32", None

    def cache_spec(self):
        return [State((1,))]

    def step(self, params, cache, x):
        logits = np.full((len(x.last), 32), -np.inf, np.float32)
        logits[:, :8] = np.arange(8) + 1e-6 * len(cache[0])
        return logits, cache


def test_the_check_of_a_model_that_masks_tokens_says_by_how_much_it_is_off():
    with pytest.raises(NotDeterministic, match=r"differs by up to \d"):
        engine(Masked(), backend="numpy", deterministic=True)


@pytest.mark.parametrize("lie", [Liar, LooksAtOthers])
def test_a_model_that_is_not_invariant_cannot_fool_the_check(lie):
    with pytest.raises(
        NotDeterministic, match=r"(?s)the output after \d+ random tokens differs by up to \d.*=False"
    ) as e:
        engine(load_model(TINY, lie()), deterministic=True)
    assert "Liar" in str(e.value) or "LooksAtOthers" in str(e.value)


def test_where_nobody_asked_such_a_model_is_served_without_the_promise(caplog):
    with caplog.at_level(logging.WARNING, "hibachi.engine"), engine(load_model(TINY, Liar())) as e:
        assert not e.deterministic
        assert len(e.run([1, 2, 3], GREEDY).collect()) == 6
        with pytest.raises(NotDeterministic):
            e.selfcheck()
    assert "deterministic=False, as the check of the model failed" in caplog.text


def test_what_the_model_raises_in_the_check_is_raised():
    with pytest.raises(ModelError, match="planted"):
        engine(load_model(TINY, Raises()), deterministic=True)


def test_the_check_runs_at_any_time_beside_requests_and_disturbs_none(caplog):
    with caplog.at_level(logging.INFO, "hibachi.engine"), LLM("tiny", deterministic=True) as llm:
        want = [c.token_ids for c in llm.generate(["She was", "The letter"], GREEDY.with_(max_tokens=40))]
        streams = [
            llm.engine.run(llm.tokenizer.encode(p), GREEDY.with_(max_tokens=40)) for p in ("She was", "The letter")
        ]
        assert llm.selfcheck() == 30
        assert [s.collect() for s in streams] == want
    [line] = [r.getMessage() for r in caplog.records if "numerics" in r.getMessage()]
    assert line.startswith("deterministic=True; numpy ") and llm.backend.fingerprint() in line


def test_small_limits_leave_something_to_check():
    model = load_model(TINY, NumpyBackend().invariant())
    cell = sum(s.kv_heads * (s.k_dim + s.v_dim) for s in model.cache_spec()) * 4
    for options in (
        dict(max_num_seqs=1),
        dict(max_num_seqs=2, max_num_batched_tokens=2),
        dict(max_num_seqs=4, kv_cache_memory_bytes=16 * 4 * cell),
        dict(block_size=1, max_num_seqs=3),
    ):
        with engine(model, deterministic=True, **options) as e:
            assert e.selfcheck() >= 3, options
    with AutoregressiveBatchInference(model, max_model_len=2, deterministic=True) as e:
        assert e.selfcheck() == 3


@pytest.mark.parametrize("native", [False, True], ids=["plain", "kernels"])
@pytest.mark.parametrize("make", [NumpyBackend, partial(TorchBackend, "cpu")], ids=["numpy", "torch"])
def test_the_default_is_deterministic_where_that_costs_little(make, native):
    """Wherever hibachi's kernels load; and on plain torch, but not on plain NumPy."""
    backend = make(native=native)
    with LLM("tiny", backend=backend) as llm:
        assert llm.deterministic is llm.backend.deterministic is (native or backend.name == "torch")
    with LLM("tiny", backend=make(native=native), deterministic=False) as llm:
        assert not llm.deterministic and llm.backend.deterministic is native


def test_a_model_that_was_made_on_other_kernels_is_refused():
    model = load_model(TINY, NumpyBackend(native=False))
    with pytest.raises(ConfigError, match=r"made on NumpyBackend.*invariant\(\)"):
        engine(model, deterministic=True)
    with engine(model) as e:
        assert not e.deterministic


# ---- proposed tokens -------------------------------------------------------------------------------------------------


class SeveralOutputs(SumPaged):
    """Computes other bits where a row has several outputs."""

    dtype = "float32"

    def step(self, params, cache, x):
        out, cache = super().step(params, cache, x)
        rows = x.seg[x.last]
        return out * np.float32(1 + 1e-6 * (len(set(rows.tolist())) < len(rows))), cache


class KeepsWrong(SumPaged):
    """What was computed of a proposal stays in the cache."""

    dtype = "float32"

    def __init__(self, backend):
        super().__init__(backend)
        self._kept = {}  # by place: a value

    def step(self, params, cache, x):
        if not x.start.any():  # of other texts
            self._kept.clear()
        out, [(keys, values)] = super().step(params, cache, x)
        size = values.shape[1]
        for slot in x.slot.tolist():
            if slot in self._kept:
                values[slot // size, slot % size] = self._kept.pop(slot)
        rows = x.seg[x.last]
        for n in np.flatnonzero(rows[1:] == rows[:-1]).tolist():
            slot = int(x.slot[x.last[n + 1]])
            self._kept[slot] = values[slot // size, slot % size].copy()
        return out, [(keys, values)]


def of_sums(model, **options):
    return engine(model(NumpyBackend(native=False).invariant()), **options)


@pytest.mark.parametrize("model", [SeveralOutputs, KeepsWrong])
def test_a_model_that_only_proposals_change_is_served_without_them_unless_they_are_asked_for(model, caplog):
    by_name = {"method": "ngram", "num_speculative_tokens": 3}
    with caplog.at_level(logging.INFO, "hibachi.engine"):
        for config, proposes, says in (
            ("off", False, None),
            ("auto", False, r"speculative_config: off for \w+, as .*where tokens are proposed \(speculated\)"),
            (by_name, True, r"deterministic=False, as speculative_config may change bits: .*\(speculated\)"),
        ):
            caplog.clear()
            with of_sums(model, deterministic=True, speculative_config=config) as e:
                assert (e.core.drafting is not None) is proposes and e.deterministic is not proposes
                assert len(e.run([1, 2, 3], GREEDY).collect()) == 6
                with pytest.raises(NotDeterministic, match=r"\(speculated\): the output after \d+ random tokens"):
                    e.selfcheck()
            told = [r.getMessage() for r in caplog.records if "speculative_config" in r.getMessage()]
            assert len(told) == (says is not None) and (says is None or re.search(says, told[0])), told


def test_the_check_tries_right_proposals_and_wrong_ones_beside_others():
    seen = []

    class Seen(SumPaged):
        dtype = "float32"

        def step(self, params, cache, x):
            seen.append(np.bincount(x.seg[x.last]))
            return super().step(params, cache, x)

    for config in ("off", "auto"):
        seen.clear()
        with of_sums(Seen, deterministic=True, speculative_config=config):
            several = [outputs for outputs in seen if max(outputs, default=0) > 1]
            assert not several if config == "off" else len(several) > 5
    assert max(max(outputs) for outputs in several) == 5 and any(len(outputs) > 3 for outputs in several)


# ---- models with products of their own -------------------------------------------------------------------------------


class OwnProducts(InvariantTorchBackend):
    """As a model that multiplies with PyTorch itself: MKL rounds 1 to 3 rows in another way."""

    def put_weight(self, w, dtype):
        return self.put(w, dtype)

    def linear(self, x, w, b=None):
        return F.linear(x, w, b)


def test_steps_are_padded_for_models_with_products_of_their_own():
    model = load_model(TINY, OwnProducts("cpu"))
    with pytest.raises(NotDeterministic):
        engine(model, deterministic=True)
    model.any_shape = False
    with engine(model, deterministic=True) as e:
        assert e.selfcheck() == 30
        prompts = [[5, 9], [7] * 11, [3], list(range(1, 40))]
        alone = [e.run(p, GREEDY).collect() for p in prompts]
        together = [e.run(p, GREEDY) for p in prompts]
        assert [s.collect() for s in together] == alone


class Seen:
    """Level 0. mixes: the rows of a call change each other, though not the tokens of the test."""

    max_model_len = 16

    def __init__(self, mixes):
        self.mixes, self.seen, self.go, self.held = mixes, [], threading.Event(), False

    def forward(self, tokens):
        self.held = not self.go.is_set()
        assert self.go.wait(PATIENCE)
        self.seen.append(len(tokens))
        out = tokens[:, -1] + 1.0
        return out + 1e-12 * tokens.sum() if self.mixes and len(tokens) > 1 else out


@pytest.mark.parametrize(
    "mixes, deterministic, most", [(False, True, 3), (True, True, 1), (False, None, 3), (True, False, 3)]
)
def test_models_without_a_cache_share_calls_where_that_leaves_no_trace(mixes, deterministic, most):
    model = Seen(mixes)
    model.go.set()
    with AutoregressiveBatchInference(model, deterministic=deterministic, max_num_seqs=3) as e:
        e.run(np.array([[0.0], [2.0]]), max_tokens=2).collect()
        model.seen.clear()
        model.go.clear()
        before = e.run(np.array([[9.0]]), max_tokens=1)  # holds up the engine, so that the others begin together
        until(lambda: model.held)
        streams = [e.run(np.array([[1.0], [2.0]]), max_tokens=12) for _ in range(3)]
        model.go.set()
        before.collect()
        assert [[round(float(t[0])) for t in s.collect()] for s in streams] == [[*range(3, 15)]] * 3
        assert e.deterministic is bool(deterministic)
    assert max(model.seen) == most


# ---- sampling --------------------------------------------------------------------------------------------------------


def test_log_probabilities_do_not_depend_on_how_many_others_ask_for():
    """A list of 16 that ends in a tie does not say whose the values are; one of 128 would. They round differently."""
    logits = np.zeros((2, 300), np.float32)
    logits[0, :5], logits[0, 5:40] = np.linspace(2, 1, 5), 0.5
    logits[1] = np.random.default_rng(0).normal(size=300)
    for backend in (NumpyBackend(), TorchBackend("cpu")):
        for others in (3, 20, 200):
            rows = Rows(backend, 300, [Row(SamplingParams(temperature=0, logprobs=n)) for n in (6, others)])
            alone = rows.draw(logits, [0]).logprobs[0]
            assert rows.draw(logits).logprobs[0] == alone
