"""A draft model proposes: answers are those without it, and what it computes is what a fresh one would."""

import logging
import random

import numpy as np
import pytest

from hibachi import AutoregressiveBatchInference, ConfigError, NumpyBackend, SamplingParams
from hibachi.engine.runners.job import Job
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import Limits
from hibachi.engine.speculation.draft_runner import DraftModel
from hibachi.engine.streams.channel import Channel
from hibachi.request import Request
from hibachi.testing.toys import SumPaged, expected

GREEDY = SamplingParams(temperature=0, max_tokens=20)


class Soft(SumPaged):
    """The most likely token has a probability of 0.69 at temperature 1."""

    def __init__(self):
        super().__init__(NumpyBackend())

    def step(self, params, cache, x):
        logits, cache = super().step(params, cache, x)
        return logits * 0.003, cache


class Guesser(Soft):
    """Right but where the sum is a multiple of `wrong`. Counts its calls, and the tokens of each; keeps its logits."""

    max_model_len = 64

    def __init__(self, wrong=0):
        super().__init__()
        self.wrong, self.sizes, self.outputs = wrong, [], []

    def step(self, params, cache, x):
        self.sizes.append(len(x.tok))
        logits, cache = super().step(params, cache, x)
        if self.wrong:
            most = logits.argmax(axis=-1)
            at = np.flatnonzero(most % self.wrong == 0)
            logits[at] = np.roll(logits[at], 1, axis=-1)
        self.outputs.append(logits)
        return logits, cache


def engine(draft, k=4, model=None, **options):
    config = None if draft is None else {"model": draft, "num_speculative_tokens": k}
    given = {"max_model_len": 64, "overlap": False, "deterministic": False, "block_size": 4} | options
    return AutoregressiveBatchInference(Soft() if model is None else model, **{"speculative_config": config} | given)


def drafted(e):
    return e.core.drafting.drafted


def test_right_guesses_give_five_tokens_a_step_and_each_token_is_computed_once():
    draft = Guesser()
    with engine(draft) as e:
        assert e.run([1, 2], GREEDY).collect() == expected([1, 2], 20)
        assert e.stats().steps == 5
        # The prompt and the first token; three guesses; then each time what came last and was not computed. Where the
        # row had no block yet, what was guessed is computed again.
        assert draft.sizes[:4] == [3, 1, 1, 1]
        assert sum(draft.sizes) <= 2 + 20 + 12
        assert drafted(e).accepted == drafted(e).proposed


KINDS = [
    dict(temperature=0),
    dict(temperature=0.7),
    dict(temperature=1.0, presence_penalty=1.0, logprobs=2),
    dict(temperature=0, stop_token_ids=[2], min_tokens=3),
    dict(temperature=1.5, top_k=3, logit_bias={3: 2.0}),
]


def many(e):
    prefix = [7, 1, 3, 3, 5, 2, 8, 4, 9]
    streams = []
    for i in range(16):
        params = SamplingParams(**KINDS[i % 5] | {"seed": i, "max_tokens": 10 + i})
        streams.append(e.run([*prefix[: i % 10], i % 10, 3], params))
    return [(s.collect(), s.logprobs, s.finish_reason, s.stop_token) for s in streams]


@pytest.mark.parametrize("wrong", [0, 2])
def test_answers_are_those_without(wrong):
    """Greedy, sampled, changed logits; prefix hits; few rows, few blocks, few tokens a step, preemption."""
    with engine(None) as e:
        want = many(e)
    auto = {"model": Guesser(wrong), "num_speculative_tokens": 8, "auto": True}
    for options in (
        {},
        {"max_num_seqs": 5},
        {"cache_tokens": 96, "max_num_seqs": 12},
        {"max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"speculative_config": auto, "deterministic": True},
    ):
        with engine(Guesser(wrong), **options) as e:
            assert many(e) == want
            assert many(e) == want  # now with hits in the cache
            assert drafted(e).proposed or "deterministic" in options
            e.core.scheduler.check()
            if "cache_tokens" in options:
                assert e.stats().preemptions and e.stats().prefix_hits


def test_a_guess_is_drawn_as_the_main_model_draws():
    """A model that is its own draft model guesses right at any temperature: the same number for the same position."""
    with engine(Guesser()) as e:
        e.core.drafting.asker.model.sure = 0
        for seed in range(5):
            for more in (dict(top_k=3), dict(top_p=0.7), dict(min_p=0.2), {}):
                e.run([1, 2], SamplingParams(temperature=1.5, seed=seed, max_tokens=20, **more)).collect()
        assert drafted(e).accepted == drafted(e).proposed == 300


def test_it_stops_where_it_is_not_sure():
    draft = Guesser()
    with engine(draft) as e:
        e.core.drafting.asker.model.sure = 0.99  # at a high temperature no token is that likely
        assert e.run([1, 2], SamplingParams(temperature=9.0, seed=1, max_tokens=8)).collect()
        assert not drafted(e).proposed
        assert e.run([1, 2], GREEDY).collect() == expected([1, 2], 20)


# ---- what the pools hold -------------------------------------------------------------------------------------------


class Rows:
    """A draft model by itself, and rows with blocks that a test gives them."""

    def __init__(self, k=3, blocks=40, budget=64, rows=4):
        self.limits = Limits(rows, budget, budget, 64, blocks, 4)
        self.draft = DraftModel(Guesser(), NumpyBackend(), "float32", self.limits, k, sure=0)
        self.model = self.draft.calls.model

    def seq(self, row, blocks, length, **params):
        params = SamplingParams(**{"temperature": 0} | params)
        seq = Seq(length, None, row=row, blocks=list(blocks), length=length)
        seq.owner = Job(seq, Channel(None), Request(None, params))
        return seq

    def ask(self, *asked, most=3):
        """(seq, tokens) of each row -> proposals; and how many tokens were computed in each call."""
        self.model.sizes.clear()
        seqs, tokens = zip(*asked, strict=True)
        found = self.draft.propose(list(seqs), [np.array(t, np.int32) for t in tokens], [most] * len(asked))
        return [f.tolist() for f in found], list(self.model.sizes)

    def as_a_fresh_one(self, *asked, most=3):
        """`ask`, and the same of a new draft model; all logits of guesses must be equal."""
        self.model.outputs.clear()
        found, sizes = self.ask(*asked, most=most)
        mine = self.model.outputs[-1]
        other = Rows()
        others = [(other.seq(s.row, range(1 + 8 * s.row, 9 + 8 * s.row), len(t)), t) for s, t in asked]
        want, _ = other.ask(*others, most=most)
        assert found == want
        np.testing.assert_allclose(mine, other.model.outputs[-1], rtol=1e-5)
        return sizes


def answer(tokens, n):
    return [*tokens, *expected(tokens, n)]


def test_what_came_as_guessed_is_not_computed_again():
    r = Rows()
    seq = r.seq(0, range(1, 9), 3)
    assert r.as_a_fresh_one((seq, [1, 2, 3])) == [3, 1, 1]
    assert r.as_a_fresh_one((seq, answer([1, 2, 3], 4))) == [2, 1, 1]  # the last guess, and what was drawn behind it
    assert r.as_a_fresh_one((seq, [*answer([1, 2, 3], 4), 0])) == [1, 1, 1]
    wrong = [*answer([1, 2, 3], 4), 0, 9, 9]
    assert r.as_a_fresh_one((seq, wrong)) == [2, 1, 1]
    assert r.as_a_fresh_one((seq, wrong)) == [1, 1, 1]  # asked again, as a step failed
    assert r.as_a_fresh_one((seq, wrong[:-2])) == [1, 1, 1]


def test_blocks_with_the_same_tokens_are_shared_and_others_are_not():
    r = Rows()
    tokens = answer([1, 2, 3], 14)
    first = r.seq(0, range(1, 9), 17)
    assert r.ask((first, tokens))[1] == [17, 1, 1]
    second = r.seq(1, [1, 2, 3, 4, 11, 12], 17)
    assert r.as_a_fresh_one((second, tokens)) == [1, 1, 1]
    third = r.seq(2, [1, 2, 21, 22, 23, 24], 17)  # a hit of two blocks
    assert r.as_a_fresh_one((third, tokens)) == [9, 1, 1]
    others = [*tokens[:9], 5, *tokens[10:]]
    fourth = r.seq(3, [1, 2, 31, 32, 33, 34], 17)
    assert r.as_a_fresh_one((fourth, others)) == [9, 1, 1]
    r.draft.forget(first)
    again = r.seq(0, [1, 2, 31, 32, 35, 36], 17)  # a block was given to other tokens behind the same beginning
    assert r.as_a_fresh_one((again, tokens)) == [9, 1, 1]


def test_long_rows_catch_up_over_several_calls_and_others_do_not_wait():
    r = Rows(budget=8)
    long, short = r.seq(0, range(1, 9), 20), r.seq(1, range(9, 17), 2)
    tokens, few = answer([1, 2, 3], 17), [4, 5]
    found, sizes = r.ask((long, tokens), (short, few))
    assert found == [[], expected(few, 3)] and sizes == [8, 1, 1]
    found, sizes = r.ask((long, tokens))
    assert found == [[]] and sizes == [8]
    assert r.draft.lacks(long, 20) == 6
    assert r.as_a_fresh_one((long, tokens)) == [6, 1, 1]


def test_random_rows_are_as_fresh_ones():
    """Rows come and go, take blocks of others that begin alike or that are gone, are preempted; guesses come or not."""
    r, dice = Rows(), random.Random(3)
    live, free = {}, list(range(1, 40))
    starts = [[1, 2, 3, 4, last, 6, 7, 8, 9] for last in range(3)]

    def blocks(tokens, row):
        """Eight, the first of them perhaps those of a row that begins alike."""
        found = []
        for other, (seq, theirs) in live.items():
            n = (min(len(tokens), len(theirs)) - 1) // 4
            while tokens[: 4 * n] != theirs[: 4 * n]:
                n -= 1
            if other != row and n > len(found):
                found = seq.blocks[:n]
        dice.shuffle(free)
        return [*found, *(free.pop() for _ in range(8 - len(found)))]

    def leave(row):
        seq, tokens = live.pop(row)
        free.extend(set(seq.blocks) - {b for other, _ in live.values() for b in other.blocks})
        return seq, tokens

    computed = 0
    for _ in range(150):
        row = dice.randrange(4)
        if row not in live:
            tokens = dice.choice(starts)[: dice.randrange(1, 10)]
            live[row] = r.seq(row, blocks(tokens, row), len(tokens)), tokens
        elif len(live[row][1]) > max(live[row][0].length, 27) or dice.random() < 0.05:
            r.draft.forget(leave(row)[0])
            continue
        elif len(live[row][1]) > live[row][0].length and dice.random() < 0.2:
            seq, tokens = leave(row)
            seq.length, seq.blocks = len(tokens), blocks(tokens, row)
            live[row] = seq, tokens
        seq, tokens = live[row]
        computed += sum(r.as_a_fresh_one((seq, tokens)))
        tokens += [dice.randrange(10)] if dice.random() < 0.3 else expected(tokens, dice.randrange(1, 5))
    assert computed < 150 * 6


# ---- what may be wrong ---------------------------------------------------------------------------------------------


class Broken(Guesser):
    """Raises, or has no numbers, from its `after`-th call on."""

    def __init__(self, what, after=0):
        super().__init__()
        self.what, self.after, self.calls = what, after, 0

    def step(self, params, cache, x):
        logits, cache = super().step(params, cache, x)
        self.calls += 1
        if self.calls <= self.after:
            return logits, cache
        if isinstance(self.what, BaseException):
            raise self.what
        return self.what(logits), cache


@pytest.mark.parametrize(
    "what",
    [ValueError("no"), MemoryError("none left"), lambda x: x[:, :3], lambda x: [1], SystemExit(1)],
    ids=["raises", "memory", "shape", "no array", "exit"],
)
def test_a_model_that_fails_is_off_after_three_times_and_the_log_says_so_once(what, caplog):
    draft = Broken(what, after=6)
    with caplog.at_level(logging.WARNING, "hibachi.draft"), engine(draft) as e:
        assert many(e) == many(e)
        assert e.run([1, 2], GREEDY).collect() == expected([1, 2], 20)
        assert e.core.drafting.asker.model.off
    assert draft.calls == 6 + 3
    assert [r.message.count("is off, as it failed 3 times") for r in caplog.records if r.name == "hibachi.draft"] == [1]


def test_outputs_that_are_not_finite_propose_nothing_for_their_row():
    def spoilt(logits):
        return np.full_like(logits, np.nan)

    draft = Broken(spoilt)
    with engine(draft) as e:
        assert e.run([1, 2], GREEDY).collect() == expected([1, 2], 20)
        assert draft.calls == 1 and not drafted(e).proposed and not e.core.drafting.asker.model.off


class Small(Guesser):
    max_model_len = 8


class Other(Guesser):
    vocab_size = 11


class Whole:
    vocab_size = 10

    def logits(self, tokens, lengths):
        return tokens


def test_a_shorter_context_guesses_within_it_and_the_log_says_so(caplog):
    draft = Small()
    with caplog.at_level(logging.INFO, "hibachi.engine"), engine(draft) as e:
        assert e.run([1, 2], GREEDY).collect() == expected([1, 2], 20)
        assert 4 <= drafted(e).proposed <= 8
    assert "guesses within the first 8 tokens" in caplog.text
    assert sum(draft.sizes) <= 12


@pytest.mark.parametrize(
    ("draft", "match"),
    [
        ("tiny", "takes a draft model as an object"),
        (3, "takes a draft model as an object"),
        (Whole(), "as an object with `step`"),
        (Other(), "same vocabulary, 10 tokens; Other has 11"),
    ],
)
def test_what_cannot_guess_is_refused_at_the_start(draft, match):
    with pytest.raises(ConfigError, match=match):
        engine(draft)


@pytest.mark.parametrize("k", [0, -1, 65, 2.5, "4", True, None])
def test_numbers_of_guesses_that_are_none(k):
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        engine(Guesser(), k=k)


def test_its_pools_count_in_the_memory():
    one = 4 * 4 * 3  # bytes of a block of SumPaged: keys of two numbers, values of one
    with engine(None, kv_cache_memory_bytes=40 * one) as e:
        alone = e.stats().blocks
    with engine(Guesser(), kv_cache_memory_bytes=40 * one, max_num_seqs=4) as e:
        both = e.stats().blocks
        assert e.facts.remarks == ("a token takes 12 bytes of the cache, and 12 of the draft model's",)
    assert alone == 40 and both == (40 - 4) // 2
    with pytest.raises(ConfigError, match="the draft model 192 bytes of its own"):
        engine(Guesser(), kv_cache_memory_bytes=5 * one, max_num_seqs=4)
