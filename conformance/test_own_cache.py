"""Models with a cache of their own (between levels 1 and 2): each row finds its own past, whoever shares the call.

Rows come, leave, wait and come back, and the engine puts their pasts side by side and takes them apart. The toys make
each token of all that is in a row's past, so `expected` is right only if nothing of it was lost or another's.
"""

from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from hibachi.testing.toys import SumOwn, SumOwnState, expected

from .ownpasts import LONG, PROMPTS, Encoding, Marked, bits, sequences
from .serving import BLOCK, PARTS

pytestmark = pytest.mark.promise("caches of the model's own", parts=PARTS)

POISON = 0  # the sums of these prompts never lead to it
SOURCES = [1, 2, 3], [5], [9, 9, 9, 9, 9, 9, 9], [4, 6], [8]


def check(serve, engine, prompts=PROMPTS, n=5):
    """All of them at once stream what each streams alone."""
    for prompt, stream in zip(prompts, serve.together(engine, prompts, max_tokens=n), strict=True):
        serve.expect(stream, expected(prompt, n))


def watched(serve, new_only=False, **options):
    """A model that knows its pasts again, and an engine for it."""
    model = Marked(serve.backend, new_only)
    engine = serve.cached(model, enable_prefix_caching=False, **options)
    model.watch(sequences(PROMPTS, 12))
    return model, engine


def as_it_was(model):
    """Every past was what the model had returned for its row, and is as it was when it returned it."""
    assert not model.wrong, f"the model was given {model.wrong[0]}"
    for array, copy in model.kept:
        same = np.array_equal(bits(model.backend.get(array)), bits(copy))
        assert same, "what the model returned was written to afterwards"


# rows and their pasts


def test_mixed_lengths_stream_what_each_streams_alone_from_their_own_pasts(serve):
    """Of all positions, of the new ones only, and of states."""
    for model in (SumOwn(serve.backend), SumOwn(serve.backend, new_only=True), SumOwnState(serve.backend)):
        check(serve, serve.cached(model, max_num_batched_tokens=8))


def test_rows_of_a_past_join_part_and_come_back_in_their_order(serve):
    """One joins while others run, one in the midst leaves, and one more takes its place."""
    for new_only in (False, True):
        model, engine = watched(serve, new_only, max_num_batched_tokens=8)
        gate = serve.gate(step=3)
        first = engine.run(PROMPTS[0], max_tokens=9, stop_rule=gate)
        gate.wait(first)
        lengths = (2, 7, 1, 4)
        others = [engine.run(prompt, max_tokens=n) for prompt, n in zip(PROMPTS[1:], lengths, strict=True)]
        gate.open()
        serve.expect(first, expected(PROMPTS[0], 9))
        for prompt, n, stream in zip(PROMPTS[1:], lengths, others, strict=True):
            serve.expect(stream, expected(prompt, n))
        as_it_was(model)


def test_a_past_that_another_row_leaves_is_not_changed(serve):
    """Not in a bit, NaN and infinities included: rows end, are cancelled, and new ones get their places."""
    model, engine = watched(serve)
    for _ in range(2):
        gate = serve.gate(step=3)
        stays = engine.run(LONG, max_tokens=9)
        ends, leaves = engine.run(PROMPTS[0], max_tokens=2), engine.run(PROMPTS[2], max_tokens=12, stop_rule=gate)
        gate.wait(leaves)
        leaves.close()
        gate.open()
        serve.expect(ends, expected(PROMPTS[0], 2))
        serve.expect(engine.run(PROMPTS[4], max_tokens=3), expected(PROMPTS[4], 3))
        serve.expect(stays, expected(LONG, 9))
    as_it_was(model)


def test_who_loses_its_past_goes_on_as_if_nothing_had_happened(serve):
    """It is computed again from the row's tokens."""
    model, engine = watched(serve, cache_tokens=4 * BLOCK, max_num_batched_tokens=8)
    check(serve, engine, n=9)
    stats = engine.stats()
    assert stats.preemptions > 0, "nobody lost its past"
    assert (stats.waiting, stats.running, stats.free_blocks) == (0, 0, stats.blocks)
    as_it_was(model)


def test_requests_that_begin_alike_begin_with_copies_of_one_past(serve):
    engine = serve.cached(SumOwn(serve.backend))
    serve.expect(engine.run(LONG, max_tokens=3), expected(LONG, 3))
    again = engine.run([*LONG[:BLOCK], 7], max_tokens=3)
    serve.expect(again, expected([*LONG[:BLOCK], 7], 3))
    assert again.reused == BLOCK, f"{again.reused} tokens were copied, of {BLOCK} that a block of both has"


class Nested(SumOwn):
    """Its past has the nesting of libraries, and more in it than arrays."""

    class Cache:
        def __init__(self, layers):
            self.layers, self.config, self.seen = layers, "as it is", 0

    def step(self, tokens: Any, lengths: Any, past: Any) -> tuple[Any, Any]:
        if past is not None:
            assert isinstance(past, self.Cache) and past.config == "as it is" and past.layers[0] is None
            assert past.layers[1]["none"] == (None, 3)
        logits, new = super().step(tokens, lengths, None if past is None else {"layers": [past.layers[1]["k"]]})
        return logits, self.Cache([None, {"k": new["layers"][0], "none": (None, 3)}])


def test_a_past_comes_back_in_the_nesting_in_which_it_was_returned(serve):
    check(serve, serve.cached(Nested(serve.backend)), n=3)


# what goes wrong with a past


class Spoils(SumOwn):
    """Once it is armed, fails at POISON in the way of `how`."""

    armed = False

    def __init__(self, backend: Any, how: Any) -> None:
        super().__init__(backend)
        self.how = how

    def step(self, tokens: Any, lengths: Any, past: Any) -> tuple[Any, Any]:
        with np.errstate(invalid="ignore"):  # NaN becomes an integer
            logits, new = super().step(tokens, lengths, past)
        if not self.armed or not (hit := self.backend.get(tokens) == POISON).any():
            return logits, new
        with suppress(Exception):  # each library has an error of its own for what is never written to
            past["layers"][0][0][...] = 5
        out: tuple[Any, Any] = self.how(self, hit.any(axis=1), logits, new["layers"][0][0])
        return out


def one_fails(serve, how, ending=None):
    """Others are served beside one with POISON in its prompt and one that draws it, and after them.

    ending: of these two; None means any.
    """
    model = Spoils(serve.backend, how)
    engine = serve.cached(model, enable_prefix_caching=False)
    model.armed = True
    drawing = [1, 3]  # its second token is POISON, which comes back when all share a past
    prompts = [PROMPTS[0], drawing, *PROMPTS[2:], [8, POISON]]
    for _ in range(2):
        for prompt, stream in zip(prompts, serve.together(engine, prompts, max_tokens=5), strict=True):
            if POISON not in prompt and prompt != drawing:
                serve.expect(stream, expected(prompt, 5))
            elif ending is None:
                serve.read(stream)
            else:
                serve.expect(stream, expected(prompt, 2) if prompt == drawing else [], ending)


def raising(model, hit, logits, past):
    raise RuntimeError("cannot compute this")


def spoilt(model, hit, logits, past):
    """NaN in the row's past, and in its logits."""
    b = model.backend
    nan = b.put(np.where(hit, np.nan, 0).astype(np.float32))
    return logits + nan[:, None], {"layers": [(past + nan[:, None, None],)]}


def test_a_step_that_raises_fails_the_guilty_request_alone_whatever_it_wrote_into_its_past(serve):
    one_fails(serve, raising, "ModelError")


def test_nan_in_the_past_of_one_row_stays_with_it(serve):
    """The others have not a bit of it, and nor has who gets the row next."""
    one_fails(serve, spoilt, "NonFiniteOutput")


def test_nan_in_a_past_that_no_output_shows_never_reaches_another(serve):
    one_fails(serve, lambda model, hit, logits, past: (logits, spoilt(model, hit, logits, past)[1]))


WRONG = {
    "another axis": lambda b, past: b.xp.permute_dims(past, (0, 2, 1)),
    "another dtype": lambda b, past: b.xp.astype(past, b.xp.int32),
    "a position too few": lambda b, past: past[:, :, 1:],
    "two positions for one token": lambda b, past: b.xp.concat([past, past[:, :, -1:]], axis=2),
    "a row too many": lambda b, past: b.xp.concat([past, past[-1:, ...]], axis=0),
    "no array": lambda b, past: None,
}


def test_a_past_of_another_length_axis_or_dtype_fails_its_request_alone(serve):
    for what, change in WRONG.items():

        def how(model, hit, logits, past, change=change):
            return logits, {"layers": [(change(model.backend, past),)]}

        try:
            one_fails(serve, how, "InvalidModelOutput")
        except AssertionError as e:
            raise AssertionError(f"where a step returns a past with {what}: {e}") from e


# an encoder


def encoding(serve, **options):
    model = Encoding(serve.backend)
    engine = serve.cached(model, enable_prefix_caching=False, **options)
    model.encoded.clear()
    model.shown.clear()
    return model, engine


def with_sources(n):
    return [{"prompt": p, "inputs": {"source": s}, "max_tokens": n} for p, s in zip(PROMPTS, SOURCES, strict=True)]


def translated(serve, engine, n=4):
    for options, stream in zip(with_sources(n), serve.at_once(engine, with_sources(n)), strict=True):
        serve.expect(stream, expected([*options["inputs"]["source"], *options["prompt"]], n))


def test_each_row_has_what_its_own_source_was_encoded_to(serve):
    """Encoded once, and padded with zeros in front of shorter ones."""
    model, engine = encoding(serve)
    translated(serve, engine)
    assert sorted(n for _, n in model.encoded) == sorted(len(s) for s in [SOURCES[0], *SOURCES]), model.encoded
    for values, real in model.shown:
        n = int(real.sum())
        source = (*map(int, values[len(values) - n :]),)
        assert source in map(tuple, SOURCES), f"a call was shown {values.tolist()}, where {real.tolist()}"
        assert not values[: len(values) - n].any() and real[len(values) - n :].all()


def test_who_loses_its_past_keeps_what_its_source_was_encoded_to(serve):
    """Or it is encoded again."""
    _, engine = encoding(serve, cache_tokens=4 * BLOCK, max_num_batched_tokens=8)
    translated(serve, engine, n=9)
    assert engine.stats().preemptions > 0, "nobody lost its past"


def test_a_source_that_cannot_be_encoded_fails_its_request_alone(serve):
    class Fails(Encoding):
        def encode(self, source):
            if (self.backend.get(source) == -1).any():
                raise RuntimeError("cannot encode this")
            return super().encode(source)

    engine = serve.cached(Fails(serve.backend), enable_prefix_caching=False)
    asked = [*with_sources(3), {"prompt": [1], "inputs": {"source": [-1, 2]}, "max_tokens": 3}]
    for options, stream in zip(asked, serve.at_once(engine, asked), strict=True):
        fine = options is not asked[-1]
        items = expected([*options["inputs"]["source"], *options["prompt"]], 3) if fine else []
        serve.expect(stream, items, "length" if fine else "ModelError")
