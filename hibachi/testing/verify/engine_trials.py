"""Experiments with real engines: rows that come, leave, cancel and fail. They are made when all others found no fault.

Answers are compared with those that the engine gives to each request alone, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from hibachi.backend.array_backend import Array, HostArray
from hibachi.backend.infer import mapped
from hibachi.engine.runners.borders import borders_of
from hibachi.engine.runners.owncache.trial import AHEAD
from hibachi.errors import InvalidRequest
from hibachi.testing.verify.answers import Trouble, show
from hibachi.testing.verify.drive import Found, Outputs
from hibachi.testing.verify.engines import Engines
from hibachi.testing.verify.subject import Subject, Variant

LONGEST = 4096  # the longest context that is tried
BESIDE = "beside the longest prompt"
MOST_ONES = 6  # prompts of one token


def _variant(what: str, find: Callable[[], Trouble | None]) -> Variant:
    """find: what is wrong, or None."""

    def make() -> Outputs:
        if (trouble := find()) is not None:
            raise Found(f"expected {trouble.expected}; got {trouble.got}")
        return {}

    return what, make


def requests(s: Subject) -> Iterator[Variant]:
    e = s.engines

    def together(now: str, **options: Any) -> Variant:
        return _variant(now, lambda: e.changed_together(e.engine(**options), now))

    yield _variant("one after another", partial(unanswered, e))
    yield _variant("asked again", partial(unsteady, e))
    yield together("all at once", padding=None)
    for pad in e.pads:
        yield together(f"padded with {show(pad.ravel())}", padding=pad)
    if s.kind.has_past:
        yield together("two at a time, in chunks of at most 3 tokens", rows=2, max_num_batched_tokens=3, block_size=4)
    else:
        yield together("two at a time", rows=2)


def unanswered(e: Engines) -> Trouble | None:
    what = "an output" if not e.kind.has_tokens else f"{e.n} tokens"
    for prompt, answer in zip(e.prompts, e.alone, strict=True):
        if (answer.ending, len(answer.items)) != ("length", e.n):
            return Trouble(f"{what} for {show(prompt)}, alone", answer.told())
    return None


def unsteady(e: Engines) -> Trouble | None:
    """What differs when all are asked again, twice, alone, in another order."""
    order = range(len(e.prompts))[::-1]
    for _ in range(2):
        got = e.answers(e.engine(), [e.prompts[i] for i in order])
        if trouble := e.differs(order, got, "when it is asked again", was="the first time"):
            return trouble
    return None


# ---- rows come and go ------------------------------------------------------------------------------------------------


def joins(s: Subject) -> Iterator[Variant]:
    e = s.engines

    def join() -> Trouble | None:
        everyone = range(len(e.prompts))
        engine = e.engine()
        with e.held(engine, call=2, n=e.n) as first:
            streams = [first, *(e.ask(engine, e.prompts[i]) for i in everyone[1:])]
        got = [e.read(stream) for stream in streams]
        return e.differs(everyone, got, "when others join while the first is running")

    yield _variant("while the first is running", join)


def leaves(s: Subject) -> Iterator[Variant]:
    e = s.engines

    def leave() -> Trouble | None:
        n = [1 + i % e.n for i in range(len(e.prompts))]
        got = e.together(e.engine(), e.prompts, n)
        return e.differs(range(len(got)), got, "when the others end at different steps", n)

    yield _variant("each at another step", leave)


def cancels(s: Subject) -> Iterator[Variant]:
    e = s.engines

    def cancel() -> Trouble | None:
        engine, gone = e.engine(), len(e.prompts) // 2
        with e.spy.holding(2 if not e.kind.has_tokens else 4) as reached:
            with e.held(engine):
                streams = [e.ask(engine, prompt) for prompt in e.prompts]
            e.wait(reached, streams)
            e.cancel(streams[gone])
        rest = [i for i in range(len(streams)) if i != gone]
        trouble = e.differs(rest, [e.read(streams[i]) for i in rest], "when one of the others cancels")
        return trouble or e.differs([gone], e.answers(engine, [e.prompts[gone]]), "after it was cancelled")

    yield _variant("in the midst of a step", cancel)


# ---- lengths that it names ---


def borders(s: Subject) -> Iterator[Variant]:
    """What the engine finds of them when it is made: whether tokens on both sides may come at once, and rows share."""

    def look() -> Trouble | None:
        longest = s.limit or max(borders_of(s.model)) + 2 * AHEAD
        said = [r for r in s.engines.engine(longest=longest).facts.remarks if "which it names" in r]
        return Trouble("outputs that depend on the row only", "; ".join(said)) if said else None

    yield _variant(", ".join(map(str, sorted(borders_of(s.model)))), look)


def no_borders(s: Subject) -> str:
    return "" if borders_of(s.model) else "it names none"


# ---- short and long prompts ------------------------------------------------------------------------------------------


def ones(s: Subject) -> Iterator[Variant]:
    """A prompt of one token is answered or refused, and an empty one refused. Neither touches the others."""
    e = s.engines
    short = list(np.unique(np.concatenate(e.prompts), axis=0)[:MOST_ONES, None])
    longest = int(np.argmax([len(prompt) for prompt in e.prompts]))

    def beside(padding: HostArray | None) -> Trouble | None:
        engine = e.engine(padding=padding)
        try:
            e.ask(engine, short[0][:0])
            return Trouble("that an empty prompt is refused", "a stream")
        except InvalidRequest:
            pass
        alone = e.answers(engine, short)
        got = e.together(engine, [e.prompts[0], e.prompts[longest], *short])
        if trouble := e.differs([0, longest], got[:2], "beside prompts of one token"):
            return trouble
        now = "beside longer ones" if padding is None else "beside longer ones, so that it is padded"
        for one, answer, want in zip(short, got[2:], alone, strict=True):
            if want.ending == "length" and (trouble := e.different(one, answer, want, now)):
                return trouble
        return None

    for pad in [None, *e.pads]:
        what = "not padded" if pad is None else f"padded with {show(pad.ravel())}"
        yield _variant(what, partial(beside, pad))


def longest(s: Subject) -> Iterator[Variant]:
    """With new tokens up to max_model_len; alone, and beside others."""
    e, limit = s.engines, s.limit or 0

    def last() -> Trouble | None:
        engine, prompt = e.engine(rows=4, longest=limit), e.prompts[0]
        if s.drawn_ids:
            prompt = s.drawn(limit - 2, s.seed)
        else:  # with what the model says after it
            more = limit - 2 - len(prompt)
            [answer] = e.answers(engine, [prompt], more)
            if len(answer.items) < more:
                return Trouble(f"{more} tokens for a prompt of {len(prompt)}", answer.told())
            prompt = np.concatenate([prompt, np.array(answer.items).astype(prompt.dtype)])
        [alone] = e.answers(engine, [prompt], 2)
        if (alone.ending, len(alone.items)) != ("length", 2):
            return Trouble(f"2 tokens for a prompt of {len(prompt)}, which max_model_len={limit} allows", alone.told())
        got = e.together(engine, [e.prompts[0], prompt, e.prompts[1]], [e.n, 2, e.n])
        return e.different(prompt, got[1], alone, "beside two others", 2) or e.differs([0, 1], [got[0], got[2]], BESIDE)

    yield _variant(f"of {limit - 2} tokens", last)


def no_limit(s: Subject) -> str:
    if s.limit is None:
        return "it has no max_model_len"
    return "" if s.limit <= LONGEST else f"{s.limit} tokens take long; --max-model-len N tries fewer"


# ---- faults stay alone -----------------------------------------------------------------------------------------------


class Poison(Exception):
    """Raised in place of a model."""


def raises(s: Subject) -> Iterator[Variant]:
    """Before the model computes, and after; with the first token, and later."""
    e = s.engines

    def before(rows: list[HostArray], more: int) -> None:
        if any(e.is_guilty(row, more) for row in rows):
            raise Poison("made to fail by hibachi verify")

    def after(rows: list[HostArray], out: Any, more: int) -> Any:
        before(rows, more)
        return out

    def fail(hook: str, way: Callable[..., Any], more: int) -> Trouble | None:
        return _isolated(e, hook, partial(way, more=more), "ModelError", more, "the call raises")

    for more in (0, 1) if e.n > 1 else (0,):
        when = f"after {more} tokens" if e.n > 1 else "for its input"
        yield _variant(f"{when}, before it computes", partial(fail, "before", before, more))
        yield _variant(f"{when}, when it is done", partial(fail, "after", after, more))


def nan(s: Subject) -> Iterator[Variant]:
    e = s.engines

    def spoil(rows: list[HostArray], out: Any) -> Any:
        wrong = np.array([np.nan if e.is_guilty(row) else 0 for row in rows], np.float32)

        def one(_: str, leaf: Array) -> Array:
            more = e.backend.put(wrong.reshape(-1, *(1,) * (leaf.ndim - 1)))
            return leaf + more if e.backend.xp.isdtype(leaf.dtype, "real floating") else leaf

        return mapped(one, out)

    def fail() -> Trouble | None:
        return _isolated(e, "after", spoil, "NonFiniteOutput", 0, "the output is NaN")

    yield _variant("in its first output", fail)


def _isolated(e: Engines, hook: str, way: Callable[..., Any], ending: str, more: int, what: str) -> Trouble | None:
    """All together: the guilty request ends so after `more` tokens, the others as alone. Then all is well again.

    hook: of the spy, which is to do this way.
    """
    assert e.guilty is not None  # found out before anything is made to fail
    everyone = range(len(e.prompts))
    # else it could not be told which request's row it is
    engine = e.engine() if e.takes_lengths else e.engine(padding=None)
    setattr(e.spy, hook, way)
    try:
        got = e.together(engine, e.prompts)
    finally:
        e.spy.undo()
    guilty = got[e.guilty]
    if (guilty.ending, len(guilty.items)) != (ending, more):
        return Trouble(f"{more} tokens, then {ending}, for the one request of which {what}", guilty.told())
    rest = [i for i in everyone if i != e.guilty]
    if trouble := e.differs(rest, [got[i] for i in rest], f"beside a request of which {what}"):
        return trouble
    return e.differs(everyone, e.together(engine, e.prompts), f"after a request of which {what}")


def shapes(s: Subject) -> Iterator[Variant]:
    """An output of a wrong shape is refused, and the next requests are served."""
    e = s.engines

    def fail(name: str, spoil: Callable[[list[HostArray], Any], Any]) -> Trouble | None:
        engine = e.engine()
        e.spy.after = spoil
        try:
            got = e.together(engine, e.prompts)
        finally:
            e.spy.undo()
        for answer in got:
            if answer.ending != "InvalidModelOutput":
                return Trouble(f"InvalidModelOutput for an output with {name}", answer.told())
        got = e.together(engine, e.prompts)
        return e.differs(range(len(got)), got, f"after an output with {name}")

    ways: dict[str, Callable[[list[HostArray], Any], Any]] = {
        "a row too few": lambda rows, out: mapped(lambda _, leaf: leaf[:-1, ...], out),
        "a dimension too many": lambda rows, out: mapped(lambda _, leaf: leaf[None, ...][:0, ...], out),
        "a tuple": lambda rows, out: (out, None),
    }
    for name, spoil in ways.items():
        yield _variant(name, partial(fail, name, spoil))


def no_guilty(s: Subject) -> str:
    return "" if s.engines.guilty is not None else "no prompt can be told from the others"


def no_nan(s: Subject) -> str:
    whole = s.vocab is None and np.asarray(s.engines.alone[0].items[0]).dtype.kind != "f"
    return no_guilty(s) or ("integers cannot be NaN" if whole else "")
