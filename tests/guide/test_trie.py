"""Catalogues: a trie against sets of tuples, and outputs that are one of its paths, on every rung with logits."""

import pickle
from functools import partial

import numpy as np
import pytest
import torch

from hibachi import (
    AutoregressiveBatchInference,
    Beams,
    InvalidRequest,
    NumpyBackend,
    SamplingParams,
    Trie,
    UnsupportedOperation,
)
from hibachi.backend import masks
from hibachi.engine.guide.protocol import Grammar, GuideFailed
from hibachi.engine.trie import TrieGuides
from hibachi.testing.toys import VOCAB, SumLogits, SumOwn, SumPaged, SumState, SumTokens

from ..engine.test_overlap import Late
from .test_engine import SumBooks, engine
from .toyguides import rule

RNG = np.random.default_rng(5)
SQUARE = RNG.integers(0, VOCAB, (60, 4))
RAGGED = [RNG.integers(0, VOCAB, n).tolist() for n in RNG.integers(1, 7, 40)]
CATALOGUES = {
    "an array": SQUARE,
    "uint8": SQUARE.astype(np.uint8),
    "lists": RAGGED,
    "arrays in a tuple": tuple(np.array(p, np.int32) for p in RAGGED),
    "one": [[3]],
    "twice": [[1, 2], (1, 2), [1]],
    "torch": torch.tensor(SQUARE),
    "255": [[255, 0], [0, 255]],
    "256": [[256, 0], [0, 256]],
    "large ids": [[70_000, 1], [70_000]],
    "a wide root": np.arange(700).reshape(-1, 1) % 601,
}


@pytest.mark.parametrize("paths", CATALOGUES.values(), ids=CATALOGUES)
def test_it_knows_what_a_set_of_tuples_knows(paths):
    trie, known = Trie(paths), {tuple(map(int, path)) for path in paths}
    assert len(trie) == len(known) and (trie.most, trie.depth) == (max(map(max, known)), max(map(len, known)))
    after = {path[:n]: set[int]() for path in known for n in range(len(path) + 1)}
    for path in after:
        if path:
            after[path[:-1]].add(path[-1])
    size, at = trie.most + 40, {(): trie.root}
    for path in sorted(after, key=len):
        if path:
            at[path] = trie.step(at[path[:-1]], path[-1])
        assert trie.is_end(at[path]) == (path in known)
        assert trie.step(at[path], trie.most + 1) == -1 == trie.step(at[path], 2**31)
    assert sorted(at.values()) == list(range(len(after)))
    ids, nodes, offsets = trie.children(list(at.values()))
    bits = np.empty((len(at), masks.words(size)), np.uint32)
    trie.masks(list(at.values()), bits, ends=(trie.most + 3,))
    may = ~masks.forbidden(bits, (len(at), size))
    for i, path in enumerate(at):
        mine = slice(offsets[i], offsets[i + 1])
        assert ids[mine].tolist() == sorted(after[path])
        assert nodes[mine].tolist() == [at[*path, token] for token in ids[mine].tolist()]
        assert set(np.flatnonzero(may[i])) == after[path] | ({trie.most + 3} if path in known else set())
    again = [pickle.loads(pickle.dumps(Trie(paths))) for _ in range(2)]
    assert again[0] is again[1] and again[0].step(0, trie.most + 1) == -1 and len(again[0]) == len(trie)


def test_a_large_catalogue_is_small():
    """10^6 paths of 4 ids may take 100 MB; here are a tenth of them."""
    trie = Trie(np.random.default_rng(0).integers(0, 32_000, (100_000, 4)))
    assert len(trie) > 99_000 and trie.nbytes < 10e6


@pytest.mark.parametrize(
    "paths, message",
    [
        ([], "got no path"),
        (np.zeros((0, 4), int), "got no path"),
        ([[1], [], [2]], "got none in path 1"),
        (np.zeros((3, 0), int), "got none in path 0"),
        ([[1, 2], [3, -1]], "from 0 to 2147483647; got -1 to 3. Look for a padding id"),
        ([[2**31]], "got 2147483648"),
        ([[2**70]], "Ids are integers"),
        ([[1.5]], "Ids are integers"),
        ([["a"]], "Ids are integers"),
        ([[[1, 2], [3, 4]]], "Ids are integers"),
        ([1, 2], "sequences of token ids .* got \\[1, 2\\]"),
        ("abc", "it holds no sequences"),
        (np.arange(4), "it holds no sequences"),
        (3, "sequences of token ids"),
    ],
)
def test_what_is_no_catalogue_is_refused(paths, message):
    with pytest.raises(InvalidRequest, match=message):
        Trie(paths)


def test_a_guide_goes_on_and_back_and_is_forked():
    trie = Trie([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2]])
    guide = TrieGuides(trie, ()).compile(Grammar(""))
    assert guide.forced(9) == ([1, 2, 3], 3) and guide.forced(2) == ([1, 2], 2)
    assert TrieGuides(trie, (7,)).compile(Grammar("")).forced(9) == ([1, 2], 2)  # 7 may come there, too
    with pytest.raises(GuideFailed):
        guide.advance([1, 2, 4])
    guide.advance([1, 2, 3])
    other = guide.fork()
    other.advance([5])
    assert other.complete and not guide.complete and guide.forced(9) == ([], 0)
    other.take_back(3)
    assert other.forced(9) == ([2, 3], 2)
    with pytest.raises(GuideFailed, match="0 to 3"):
        guide.take_back(4)


RUNGS = {
    "level 1": (SumLogits, {}),
    "own cache": (SumOwn, {}),
    "paged": (SumPaged, {}),
    "state": (SumState, {}),
    "preempted": (SumPaged, dict(cache_tokens=40, block_size=4, max_num_batched_tokens=8)),
    "overlapping": (SumPaged, dict(backend=Late, overlap=True)),
    "proposals": (SumPaged, dict(speculative_config={"method": "ngram", "num_speculative_tokens": 4})),
}


@pytest.mark.parametrize("model, options", RUNGS.values(), ids=RUNGS)
def test_outputs_are_paths_and_the_same_in_any_company(model, options):
    """Two catalogues, a grammar and requests without a form side by side, with log-probabilities or without."""
    tries = [Trie(SQUARE), Trie(RAGGED)]

    def request(e, i):
        params = SamplingParams(temperature=[0, 300.0][i % 2], seed=i, logprobs=[None, 2][i % 3 == 0])
        return e.run([i % 9, 2, 3, i % 7] * (1 + i % 3), params, allowed=tries[i // 4 % 2])

    with engine(model) as one:
        solo = [(s.collect(), s.logprobs, s.finish_reason) for s in (request(one, i) for i in range(16))]
    assert all(got in trie for got, trie in ((s[0], [SQUARE.tolist(), RAGGED][i // 4 % 2]) for i, s in enumerate(solo)))
    assert len({tuple(got) for got, *_ in solo}) > 6 and {reason for *_, reason in solo} == {"stop"}
    options = dict(options)
    backend = options.pop("backend", NumpyBackend)()
    with engine(model, backend=backend, max_num_seqs=8, **options) as e:
        others = [e.run([i] * (3 + i), max_tokens=12) for i in range(4)]
        others += [
            e.run([i], SamplingParams(structured_outputs=rule([5, 6], [7], most=9)), max_tokens=9) for i in range(4)
        ]
        streams = [request(e, i) for i in range(16)]
        assert [(s.collect(), s.logprobs, s.finish_reason) for s in streams] == solo
        assert {len(s.collect()) for s in others} == {9, 12}
        e.core.scheduler.check()


def test_continuations_and_beams_are_paths_too():
    """As many beams as there are paths find all of them, in the order of their scores."""
    paths = SQUARE[:12]
    with engine(partial(SumLogits, margin=2.0), max_num_seqs=12) as e:
        found = [tuple(s.collect()) for s in e.run_many([1, 2], SamplingParams(seed=1), 9, allowed=Trie(paths))]
        assert len(set(found)) > 1 and {*found} <= {*map(tuple, paths.tolist())}
        streams = e.run_many([1, 2], SamplingParams(beams=Beams(12)), 12, allowed=Trie(paths))
        found = {tuple(stream.collect()): stream.score for stream in streams}
    norm = np.log(np.exp(2.0) + VOCAB - 1)
    want = {
        tuple(p): np.mean([2.0 * (p[i] == (3 + sum(p[:i]) + 1) % VOCAB) - norm for i in range(4)])
        for p in paths.tolist()
    }
    assert found.keys() == want.keys() and all(abs(found[path] - want[path]) < 1e-5 for path in want)
    assert [*found.values()] == sorted(found.values(), reverse=True)


def test_forced_tokens_take_no_steps_where_the_engine_speculates():
    path = RNG.integers(0, VOCAB, 40).tolist()
    with engine(speculative_config={"method": "ngram", "num_speculative_tokens": 8}) as e:
        assert e.run([1, 2], allowed=Trie([path])).collect() == path
        assert e.stats().steps < 30  # how many are guessed at a time depends on the clock


def test_the_end_token_comes_only_where_a_path_ends():
    """The model wants 9, its end, after 8; the sum of [8, 1] is 9 and wants 0."""
    catalogue = Trie([[1], [1, 0], [1, 0, 9, 9]])
    with engine(eos=(9,)) as e:
        assert e.run([8], allowed=catalogue).collect() == [1, 0, 9]  # of its path; it ends the stream as anywhere
        assert e.run([7], SamplingParams(logit_bias={9: 50}, temperature=0), allowed=catalogue).collect()[0] == 1
        assert e.run([8], SamplingParams(ignore_eos=True), allowed=catalogue).collect() == [1, 0, 9, 9]
    with engine() as e:  # no end token: only what goes on may come, unless the request names one
        assert e.run([7], allowed=catalogue).collect() == [1, 0, 9, 9]
        assert e.run([8, 8, 5], SamplingParams(stop_token_ids=[3, 99]), allowed=catalogue).collect() == [1, 3]
        stream = e.run([7], max_tokens=2, allowed=catalogue)
        assert stream.collect() == [1, 0] and stream.finish_reason == "length"


def test_what_cannot_be_held_to_a_catalogue_is_refused_by_name():
    trie = Trie([[1, 2]])
    with engine() as e:
        with pytest.raises(InvalidRequest, match=r"allowed must be a hibachi.Trie .* got \[\[1\]\]"):
            e.run([1], allowed=[[1]])
        with pytest.raises(InvalidRequest, match=r"allowed must have token ids from 0 to 9 .* got 10"):
            e.run([1], allowed=Trie([[10]]))
        with pytest.raises(InvalidRequest, match="allowed is a form of its own; got structured_outputs too"):
            e.run([1], SamplingParams(structured_outputs=rule([5], most=3)), allowed=trie)
        with pytest.raises(InvalidRequest, match="leaves no token"):
            e.run([1], SamplingParams(allowed_token_ids=[3]), allowed=trie).collect()
        assert e.run([1], allowed=trie).collect() == [1, 2]
    for model, prompt in ((SumTokens, np.array([1, 2])), (SumBooks, np.ones((3, SumBooks.codebooks), np.int32))):
        e = AutoregressiveBatchInference(model(NumpyBackend()), max_model_len=64)
        with e, pytest.raises(UnsupportedOperation, match="allowed needs a model that returns logits of single ids"):
            e.run(prompt, allowed=trie)
