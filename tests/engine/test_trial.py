"""Which calls of a model without a cache leave no trace: what is tried, and what follows from it."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from hibachi import AutoregressiveBatchInference, NotDeterministic, SamplingParams
from hibachi.engine.runners.groups import MOST_TOKENS, Alone, Grouping, Traceless, Trials, bucket

GREEDY = SamplingParams(temperature=0, max_tokens=20, logprobs=0)


def test_widths_are_multiples_and_wide_enough():
    widths = [bucket(n) for n in range(1, 3000)]
    assert all(n <= w < n + max(16, n / 8 + 1) for n, w in enumerate(widths, 1))
    assert sorted({*widths})[:18] == [*range(16, 257, 16), 288, 320]


class Fake:
    """A model by its differences: 1e-9 more where `differs(rows, width, own length)` says so."""

    def __init__(self, differs):
        self.differs, self.calls = differs, []

    def __call__(self, prompts, width, rows):
        assert len(prompts) <= rows and all(len(p) <= width for p in prompts)
        self.calls.append((rows, width))
        mixed = sum(int(p.sum()) for p in prompts)
        return np.array([p.sum() + 1e-9 * self.differs(rows, width, len(p), mixed) for p in prompts])


def trials(differs, rows=16, padded=True, one=False, longest=1000):
    prompts = [np.random.default_rng(i).integers(0, 50, 40) for i in range(20)]
    fake = Fake(differs)
    return fake, Trials(fake, prompts, Grouping(padded=padded, longest=longest, known=Alone()), rows, one=one)


def test_all_sizes_where_nothing_differs():
    _, found = trials(lambda rows, width, n, mixed: 0)
    assert found.begin() and found.of(64) == Traceless((1, 2, 4, 8, 16), True)


def test_sizes_that_differ_are_left_out():
    _, found = trials(lambda rows, width, n, mixed: rows < 4)
    assert found.begin() and found.of(32).sizes == (4, 8, 16)
    _, found = trials(lambda rows, width, n, mixed: rows > 8, rows=64)
    assert found.begin() and found.of(32).sizes == (1, 2, 4, 8)
    _, found = trials(lambda rows, width, n, mixed: 0, rows=3)
    assert found.begin() and found.of(32).sizes == (1, 2, 3)


def test_a_width_that_differs_is_not_joined():
    _, found = trials(lambda rows, width, n, mixed: width == 96)
    assert found.begin()
    assert [found.of(w).joined for w in (64, 96, 112)] == [True, False, True]
    assert found.of(96).sizes == (1, 2, 4, 8, 16)


def test_company_that_changes_bits_leaves_nothing_to_share():
    _, found = trials(lambda rows, width, n, mixed: mixed % 2)
    assert not found.begin()
    _, found = trials(lambda rows, width, n, mixed: width > 90 and mixed % 2)
    assert found.begin() and found.of(96) == Traceless((1,), False)


def test_a_width_is_tried_once_and_long_rows_never():
    fake, found = trials(lambda rows, width, n, mixed: 0, longest=10**6)
    assert found.begin()
    before = len(fake.calls)
    assert found.of(64) and len(fake.calls) > before
    before = len(fake.calls)
    assert found.of(64) and found.of(2**19) == Traceless((1,), False) and len(fake.calls) == before


def test_what_cannot_be_tried_is_alone():
    def fails(rows, width, n, mixed):
        if width > 50:
            raise RuntimeError("no")
        return 0

    _, found = trials(fails)
    assert found.begin() and found.of(64) == Traceless((1,), False)


def test_where_each_shape_is_compiled_there_is_one_number_of_rows():
    fake, found = trials(lambda rows, width, n, mixed: 0, one=True)
    assert found.begin() and found.of(64) == Traceless((16,), False)
    assert {rows for rows, _ in fake.calls} == {16}


# ---- engines ---------------------------------------------------------------------------------------------------------


class Rnn:
    """Level 1, on NumPy: products whose bits depend on the number of rows."""

    vocab_size, max_model_len = 50, 200

    def __init__(self, size=96):
        r = np.random.default_rng(0)
        self.e, self.w, self.o = (r.normal(size=s).astype("f4") for s in ((50, size), (size, size), (size, 50)))
        self.threads = set()

    def logits(self, tokens, lengths):
        self.threads.add(threading.current_thread().name)
        h, width = np.zeros((len(tokens), len(self.w)), np.float32), tokens.shape[1]
        for i in range(width):
            new = np.tanh(self.e[tokens[:, i]] + h @ self.w / 9)
            h = np.where((i >= width - lengths)[:, None], new, 0)
        return h @ self.o


@pytest.mark.parametrize("padding", [None, 0])
def test_alone_in_company_and_staggered_all_bits_are_equal(padding):
    prompts = [np.random.default_rng(i).integers(0, 50, 3 + 5 * (i % 7)) for i in range(12)]

    def said(engine, some, wait=False):
        streams = []
        for prompt in some:
            streams.append(engine.run(prompt, GREEDY))
            if wait:
                next(streams[-1])
        return [(s.collect()[-10:], s.logprobs) for s in streams]

    with AutoregressiveBatchInference(Rnn(), padding_token=padding, backend="numpy", max_num_seqs=8) as engine:
        assert engine.deterministic and engine.facts.deterministic and engine.selfcheck() > 50
        alone = [said(engine, [p])[0] for p in prompts]
        assert said(engine, prompts) == alone and said(engine, prompts, wait=True) == alone


def test_a_model_that_mixes_rows_is_served_without_the_promise_or_one_row_a_call(caplog):
    class Mixed(Rnn):
        def logits(self, tokens, lengths):
            out = super().logits(tokens, lengths)
            return out + out.mean()

    with AutoregressiveBatchInference(Mixed(), backend="numpy") as engine:
        assert not engine.deterministic and "deterministic=False for Mixed.logits" in caplog.text
        assert engine.selfcheck() == 0
    with AutoregressiveBatchInference(Mixed(), backend="numpy", deterministic=True) as engine:
        assert engine.deterministic
        streams = [engine.run([1, 2, n], GREEDY) for n in range(4)]
        together = [s.collect() for s in streams]
        assert together == [engine.run([1, 2, n], GREEDY).collect() for n in range(4)]


def test_what_has_begun_to_depend_on_the_batch_is_found():
    class Later(Rnn):
        mixes = False

        def logits(self, tokens, lengths):
            out = super().logits(tokens, lengths)
            return out + self.mixes * out.mean()

    model = Later()
    with AutoregressiveBatchInference(model, backend="numpy") as engine:
        model.mixes = True
        with pytest.raises(NotDeterministic, match="Who shares a call changes the bits"):
            engine.selfcheck()


def test_a_model_that_fails_when_it_is_tried_is_served(caplog):
    class Picky(Rnn):
        def logits(self, tokens, lengths):
            if (tokens > 40).any():
                raise RuntimeError("not these")
            return super().logits(tokens, lengths)

    with AutoregressiveBatchInference(Picky(), backend="numpy") as engine:
        assert not engine.deterministic and "it failed when it was tried: RuntimeError: not these" in caplog.text
        assert engine.run([1, 2], replace(GREEDY, allowed_token_ids=[3])).collect() == [3] * 20


def test_its_own_examples_are_tried():
    class Examples(Rnn):
        example_prompts = ([1, 2, 3], [4, 5])

        def logits(self, tokens, lengths):
            assert tokens.max() <= 5
            return super().logits(tokens, lengths)

    with AutoregressiveBatchInference(Examples(), backend="numpy") as engine:
        assert engine.deterministic


def test_an_async_model_is_tried_in_the_engines_thread():
    class Later(Rnn):
        async def logits(self, tokens, lengths):
            return super().logits(tokens, lengths)

    model = Later()
    with AutoregressiveBatchInference(model, backend="numpy") as engine:
        assert not engine.deterministic
        engine.run([1, 2, 3], GREEDY).collect()
        assert engine.deterministic and model.threads == {"hibachi-engine"}


def test_calls_of_more_than_is_ever_tried_are_made_one_by_one():
    fake, found = trials(lambda rows, width, n, mixed: 0, rows=64, longest=10**5)
    assert found.begin()
    assert found.of(1024).sizes == (1, 2, 4, 8, 16, 32)  # 64 would be 65,536 tokens
    assert found.of(8192) == Traceless((1,), False)
    assert max(rows * width for rows, width in fake.calls) <= MOST_TOKENS


def test_every_place_is_tried_beside_others():
    """A model that lets the row in one place look at the others, wherever that place is."""
    for place in range(8):

        def peeks(prompts, width, rows, place=place):
            sums = [float(p.sum()) for p in prompts]
            if len(sums) > place:
                sums[place] += 1e-9 * sum(sums)
            return np.array(sums)

        prompts = [np.random.default_rng(i).integers(0, 50, 40) for i in range(20)]
        found = Trials(peeks, prompts, Grouping(padded=True, longest=100, known=Alone()), 8, one=False)
        assert not found.begin()
