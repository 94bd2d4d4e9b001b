"""Level 0 keeps what it showed its model where the model computes: nobody notices, whoever comes, goes or fails."""

import numpy as np
import pytest

from hibachi import AutoregressiveBatchInference, NumpyBackend
from hibachi.backend.discover import resolve
from hibachi.engine.runners.kept_inputs import Grown
from hibachi.engine.scheduler.sequence import Seq

from ..lib.inside import built, kept_inputs

PROMPTS = [[1.0], [2.0, 3.0], [5.0, 1.0, 4.0], [7.0] * 20]


class Apart(NumpyBackend):
    """As if the device had memory of its own. Counts the batches that come from the host."""

    name = "numpy"
    asynchronous = True

    def __init__(self):
        super().__init__()
        self.batches = 0

    def put(self, a, dtype=None):
        self.batches += np.ndim(a) >= 2
        return super().put(a, dtype)


class Weighed:
    """Its next token depends on every token and its place, counted from the right; writes into what it is shown."""

    max_model_len = 200
    calls = 0
    fails_at = None

    def __init__(self, width=()):
        self.width = width

    def forward(self, tokens, lengths):
        type(self).calls += 1
        if self.calls == self.fails_at:
            raise ValueError("once")
        at = np.arange(tokens.shape[1])[None] >= tokens.shape[1] - lengths[:, None]
        at = at.reshape(at.shape + (1,) * len(self.width))
        weights = np.arange(tokens.shape[1], 0, -1).reshape(1, -1, *(1,) * len(self.width))
        out = np.fmod((np.where(at, tokens, 0) * weights).sum(axis=1), 11.0)
        tokens[...] = -1e9
        return out


def alone(prompt, new, **options):
    with AutoregressiveBatchInference(Weighed(), padding_token=-5.0, backend="numpy", **options) as engine:
        return np.stack(engine.run(prompt, max_tokens=new).collect()).tolist()


@pytest.fixture
def apart():
    return Apart()


@pytest.mark.parametrize("deterministic", [None, True])
@pytest.mark.parametrize("fails_at", [None, 3, 40])
def test_tokens_are_those_of_the_host(serve, apart, deterministic, fails_at):
    model = Weighed()
    model.fails_at, Weighed.calls = fails_at, 0
    one = serve(model, backend=apart, padding_token=-5.0, max_num_seqs=4, deterministic=deterministic)
    new = [60, 33, 47, 58]
    streams = [one.run(prompt, max_tokens=n) for prompt, n in zip(PROMPTS * 2, new * 2, strict=True)]
    for prompt, n, stream in zip(PROMPTS * 2, new * 2, streams, strict=True):
        assert np.stack(stream.collect()).tolist() == alone(prompt, n)


def test_a_batch_comes_from_the_host_only_when_rows_come_or_go(serve, apart):
    one = serve(Weighed(), backend=apart, padding_token=-5.0, max_num_seqs=4)
    one.run(PROMPTS[1], max_tokens=100).collect()
    assert apart.batches == 1
    streams = [one.run(prompt, max_tokens=100) for prompt in PROMPTS[:2]]
    assert [len(stream.collect()) for stream in streams] == [100, 100]
    assert apart.batches <= 5


def test_frames_stay_where_they_are_as_well(serve, apart):
    one = serve(Weighed((3,)), backend=apart, padding_token=[[0.0] * 3])
    got = one.run([[1.0, 2.0, 3.0]], max_tokens=30).collect()
    with AutoregressiveBatchInference(Weighed((3,)), backend="numpy") as plain:
        assert np.array_equal(got, plain.run([[1.0, 2.0, 3.0]], max_tokens=30).collect())
    assert apart.batches == 1


def test_tokens_of_another_dtype_go_over_the_host(serve, apart):
    class Wide:
        max_model_len = 20

        def forward(self, tokens):
            return (tokens[:, -1] + 1).astype(np.int64)

    one = serve(Wide(), backend=apart)
    assert [int(t) for t in one.run(np.array([1, 2], np.int16), max_tokens=5).collect()] == [3, 4, 5, 6, 7]
    assert apart.batches == 5


def test_a_reader_who_writes_into_a_token_changes_nothing(serve, apart):
    one = serve(Weighed(), backend=apart, padding_token=-5.0)
    got = []
    for token in one.run(PROMPTS[2], max_tokens=20):
        got.append(float(token))
        token[...] = 3.0
    assert got == alone(PROMPTS[2], 20)


def seqs(*numbers):
    return [Seq(1, None, number=number) for number in numbers]


@pytest.fixture
def grown():
    """Of two rows, after a step of lengths 2 and 3."""
    grown = Grown(Apart(), useful=True)
    grown.keep(seqs(4, 6), np.arange(6.0).reshape(2, 3), np.array([8.0, 9.0]), np.array([2, 3]))
    grown.begin()
    return grown


def test_the_next_step_gets_one_token_more(grown):
    assert grown.tokens(seqs(4, 6), np.array([3, 4]), 4).tolist() == [[0, 1, 2, 8], [3, 4, 5, 9]]
    assert grown.tokens(seqs(4, 6), np.array([3, 4]), 3).tolist() == [[1, 2, 8], [4, 5, 9]]


@pytest.mark.parametrize(
    ("who", "lengths", "width"),
    [
        ([4, 6], [2, 3], 3),  # the same step again
        ([4, 6], [4, 5], 5),
        ([4, 6], [3, 4], 5),  # needs padding
        ([4], [3], 3),
        ([4, 7], [3, 4], 4),
        ([6, 4], [3, 4], 4),
        ([4, 6], [3, 4, 4], 4),  # filled up with another row
    ],
)
def test_else_the_host_puts_them_together(grown, who, lengths, width):
    assert grown.tokens(seqs(*who), np.array(lengths), width) is None


def test_what_is_older_than_a_step_is_gone(grown):
    grown.begin()
    assert grown.tokens(seqs(4, 6), np.array([3, 4]), 4) is None


@pytest.mark.parametrize("lost", [lambda runner: runner.adopt(None), lambda runner: runner.rebuild(keep=False)])
def test_another_scheduler_or_device_begins_anew(serve, apart, lost):
    engine = serve(Weighed(), backend=apart)
    grown = kept_inputs(engine)
    grown.keep(seqs(0), np.zeros((1, 2)), np.zeros(1), np.array([2]))
    lost(built(engine).runner)
    grown.begin()
    assert grown.tokens(seqs(0), np.array([3]), 3) is None


def test_where_each_width_is_compiled_or_the_device_is_the_host_nothing_is_kept():
    for backend in (NumpyBackend(), resolve("jax")):
        assert not Grown(backend, useful=True).useful
    assert not Grown(Apart(), useful=False).useful
