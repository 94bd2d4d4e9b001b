"""The experiments: each asks for the same outputs once more, with one thing about the calls changed.

Every request is computed alone first, each in a cache of its own; these outputs are what the trials compare with. The
tokens of all rows are fixed, so one output that is wrong does not make the next one wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hibachi.common.phases import phase
from hibachi.engine.ladder import ModelKind
from hibachi.testing.verify import engine_trials as live
from hibachi.testing.verify.drive import BLOCK, CachedDriver, Found, Outputs, Span, WholeDriver
from hibachi.testing.verify.ownpasts import OwnDriver
from hibachi.testing.verify.subject import MAIN, PADS, STEPS, Rows, Subject, TrialResult, Variant

OWN, CACHED, WHOLE = (ModelKind.OWN_CACHE,), (ModelKind.PAGED,), (ModelKind.FORWARD, ModelKind.LOGITS)
PASTS, SEQUENCES, ALL = (*OWN, *CACHED), (*WHOLE, *OWN, *CACHED), tuple(ModelKind)
TOLD = (*WHOLE, *CACHED, ModelKind.FEEDFORWARD)  # of these, rows of a call can be told apart from outside
IN_ORDER = "blocks in order"


@dataclass(frozen=True, slots=True)
class Trial:
    """title: the thing that is changed. kinds: of models that it applies to. skip: why it does not apply after all.

    first: without it nothing else is worth a try. last: it is only tried if nothing else is wrong; it judges answers of
    engines, up to rounding.
    """

    key: str
    title: str
    kinds: tuple[ModelKind, ...]
    variants: Callable[[Subject], Iterator[Variant]]
    skip: Callable[[Subject], str] = lambda s: ""
    first: bool = False
    last: bool = False


def run(subject: Subject) -> dict[str, TrialResult]:
    """The result of each trial that applies to models of this kind, by key."""
    results: dict[str, TrialResult] = {}
    stopped = ""
    for trial in TRIALS:
        if subject.kind not in trial.kinds:
            continue
        result = results[trial.key] = TrialResult(trial.key, trial.title, exact=subject.exact)
        if trial.last:
            result.state = "alike"
            stopped = "not tried" if any(r.wrong for r in results.values()) else ""
        if why := stopped or trial.skip(subject):
            result.state, result.why = "skipped", why
            continue
        with phase(f"trying: {trial.title}"):
            _try(subject, trial, result)
        if trial.first and result.wrong:
            stopped = "not tried"
    if "inputs" in results and not results["inputs"].wrong and subject.driver.touched:
        results["inputs"].fail("all calls", touched(subject))
    return results


def _try(subject: Subject, trial: Trial, result: TrialResult) -> None:
    for label, make in trial.variants(subject):
        try:
            worst, first = subject.compare(make())
        except Found as e:
            result.fail(label, str(e))
            continue
        except Exception as e:
            result.fail(label, f"{type(e).__name__}: {e}", e)
            continue
        if first is None:
            continue
        result.worst = max(result.worst, worst)
        wrong = not subject.rounding(first.size, subject.base[first.row.partition("#")[0], first.seen])
        if wrong or subject.exact:
            result.bad.append(label)
        if result.state == "equal" or (wrong and result.state == "rounding"):
            result.state, result.first, result.variant = "differs" if wrong else "rounding", first, label


# ---- a request for itself --------------------------------------------------------------------------------------------


def requests(s: Subject) -> list[tuple[str, int]]:
    """All that trials need, the most important first."""
    if not s.kind.has_tokens:
        return [(name, 0) for name in s.names]
    rows = [("a", s.main), ("a", s.short), (s.names[1], s.main), (s.names[1], s.long)]
    rows += [(name, n) for name in s.names[1:] for n in (s.main, s.short)]
    if s.half:
        rows.append(("a", s.half))
    return list(dict.fromkeys(rows))


def alone(s: Subject) -> Iterator[Variant]:
    for row, n in requests(s):
        yield (f"row {row}, a prompt of {n}" if n else f"row {row}"), partial(s.learn, row, n)


def inputs(s: Subject) -> Iterator[Variant]:
    def look() -> Outputs:
        if names := touched(s):
            raise Found(names)
        return {}

    yield "all calls until here", look


def touched(s: Subject) -> str:
    return f"a call has written into {', '.join(s.driver.touched)}" if s.driver.touched else ""


def again(s: Subject) -> Iterator[Variant]:
    for i in (2, 3):
        yield f"time {i}", s.alone
    if s.kind is ModelKind.PAGED:
        yield "every call made twice", partial(s.alone, times=2)


def after(s: Subject) -> Iterator[Variant]:
    other = (s.names[1], s.long if s.kind.has_tokens else 0)

    def later() -> Outputs:
        s.alone(*other)
        return s.alone()

    yield "after a longer request", later
    yield "turn by turn with another", partial(turns, s, [("a", s.main), (s.names[1], s.main)])
    if s.kind.has_tokens:
        yield "turn by turn with a longer one", partial(turns, s, [("a", s.main), other])
        yield "turn by turn with a shorter one", partial(turns, s, [(s.names[1], s.short), ("a", s.main)])


def turns(s: Subject, rows: Rows) -> Outputs:
    session, out = s.driver.fresh(), Outputs()
    for calls in zip(*(s.prompt(*row) for row in rows), strict=True):
        for call in calls:
            out |= session.call(call)
    return out


# ---- a sequence in other pieces --------------------------------------------------------------------------------------


def wanted(s: Subject) -> Iterator[Variant]:
    for n in (s.half, s.short):
        if n:
            yield f"of token {n} in a prompt of {s.main}", partial(s.call, Span("a", 0, s.main, at=n - 1))


def decode(s: Subject) -> Iterator[Variant]:
    for n in range(s.main + 1, s.main + STEPS + 1):
        yield f"a prompt of {n} at once", partial(s.call, Span("a", 0, n))


def chunks(s: Subject) -> Iterator[Variant]:
    sizes = [c for c in s.chunks if c < s.main] or [1]
    for size in sizes:
        yield f"chunks of {size}", partial(chunked, s, size)
    yield f"chunks of {s.main - 1} and 1", partial(chunked, s, s.main - 1)


def chunked(s: Subject, size: int) -> Outputs:
    """A prompt in pieces of this size; of a long one, the beginning is one piece."""
    session, out = s.driver.fresh(), Outputs()
    begin = max(0, s.main - MAIN - 1)
    if begin:
        session.call([Span("a", 0, begin, emit=False)])
    for start in range(begin, s.main, size):
        end = min(start + size, s.main)
        out |= session.call([Span("a", start, end, emit=end == s.main)])
    for call in s.prompt("a", s.main)[1:]:
        out |= session.call(call)
    return out


# ---- another place ---------------------------------------------------------------------------------------------------


def slots(s: Subject) -> Iterator[Variant]:
    def own(scattered: bool) -> Outputs:
        session = s.driver.fresh(scattered=scattered)
        empty = session.written()
        out = s.alone_in(session)
        own = set(session.slots("a", s.main + STEPS).tolist())
        for name, now in session.written().items():
            changed = (now != empty[name]).any(axis=1).nonzero()[0].tolist()
            if stray := [slot for slot in changed if slot not in own and slot >= BLOCK]:  # no sequence owns block 0
                raise Found(f"in {name}, {len(stray)} slots were written to that are not the request's")
        return out

    yield IN_ORDER, partial(own, False)
    yield "blocks in no order", partial(own, True)


def laid_out(s: Subject, **layout: Any) -> Outputs:
    return s.alone_in(s.driver.fresh(**layout))


def persistent(s: Subject) -> Iterator[Variant]:
    for shift in (1, 2):
        yield f"in row {shift}", partial(laid_out, s, shift=shift)


def blocks(s: Subject) -> Iterator[Variant]:
    yield "blocks in no order", partial(laid_out, s, scattered=True)


def used(s: Subject) -> Iterator[Variant]:
    def second() -> Outputs:
        session = s.driver.fresh()
        session.place = {s.names[1]: 0, "a": 0}
        s.alone_in(session, s.names[1], s.long)
        return s.alone_in(session)

    yield "where a longer request has been", second


def prefix(s: Subject) -> Iterator[Variant]:
    shared = (s.main - 1) // BLOCK

    def found() -> Outputs:
        session = s.driver.fresh()
        s.alone_in(session, "a#1")
        s.alone_in(session, s.names[1])  # where it is that "a" comes, so that nothing of "a" is there
        session.place["a"] = session.place[s.names[1]]
        session.table[session.place["a"], :shared] = session.table[session.place["a#1"], :shared]
        out: Outputs = session.call([Span("a", shared * BLOCK, s.main)])
        for call in s.prompt("a", s.main)[1:]:
            out |= session.call(call)
        return out

    if shared:
        yield f"{shared * BLOCK} tokens computed by another request", found


def slack(s: Subject) -> Iterator[Variant]:
    yield "padding tokens and rows", partial(s.alone, slack=True)


# ---- company ---------------------------------------------------------------------------------------------------------


def copies(s: Subject) -> Iterator[Variant]:
    for size in s.sizes:
        yield f"{size} rows", partial(s.together, [(f"a#{i}" if i else "a", s.main) for i in range(size)])


def neighbours(s: Subject) -> Iterator[Variant]:
    for size in s.sizes:
        yield f"{size} rows", partial(s.together, [("a", s.main), *((r, s.main) for r in s.others(size - 1))])
    if s.kind.has_tokens:
        rows = [("a", s.short), *((r, s.short) for r in s.others(2))]
        yield f"{len(rows)} rows of {s.short}", partial(s.together, rows)


def order(s: Subject) -> Iterator[Variant]:
    rows = [(r, s.main) for r in ("a", *s.others(2))]
    yield f"the last of {len(rows)} rows", partial(s.together, rows[::-1])
    yield f"the second of {len(rows)} rows", partial(s.together, [rows[1], rows[0], *rows[2:]])


def ragged(s: Subject) -> Iterator[Variant]:
    long, one = (s.names[1], s.long), (s.others(2)[1], s.short)
    yield "beside a longer prompt", partial(s.together, [("a", s.main), long])
    yield "beside a longer and a shorter one", partial(s.together, [long, ("a", s.main), one])


def mixed(s: Subject) -> Iterator[Variant]:
    def joined() -> Outputs:
        """Others are prefilled in chunks while the row decodes; not every row of a call has an output."""
        session, other = s.driver.fresh(), s.names[1]
        out: Outputs = session.call([Span("a", 0, s.main)])
        third = -(-s.long // STEPS)
        for i, call in enumerate(s.prompt("a", s.main)[1:]):
            end = min((i + 1) * third, s.long)
            out |= session.call([Span(other, i * third, end, emit=end == s.long), *call])
        return out

    def ended() -> Outputs:
        """The row ends its prompt in a call in which the one before it does not."""
        session, other = s.driver.fresh(), s.names[1]
        out: Outputs = session.call([Span(other, 0, 2, emit=False), Span("a", 0, s.main)])
        out |= session.call([Span(other, 2, 4, emit=False), *s.prompt("a", s.main)[1]])
        return out

    yield "while another is prefilled", joined
    yield "where another has no output yet", ended


def spoilt(s: Subject) -> Iterator[Variant]:
    """The past of another is NaN, in whatever order they come: only that one may notice."""

    def beside(rows: Rows) -> Outputs:
        session, out = s.driver.fresh(), Outputs()
        first, *rest = (
            [p for part in parts for p in part] for parts in zip(*(s.prompt(*r) for r in rows), strict=True)
        )
        session.call(first)
        session.spoil(s.names[1])
        for call in rest:
            with np.errstate(all="ignore"), suppress(Exception):  # an engine finds out whose fault it is
                out |= {key: row for key, row in session.call(call).items() if key[0] == "a"}
        return out

    rows = [("a", s.main), (s.names[1], s.main)]
    yield "it comes second", partial(beside, rows)
    yield "it comes first", partial(beside, rows[::-1])


def no_floats(s: Subject) -> str:
    d = s.driver
    return "" if isinstance(d, OwnDriver) and any(d.floats) else "its past has no real numbers"


# ---- padding ---------------------------------------------------------------------------------------------------------


def padded(s: Subject, **how: Any) -> Iterator[Variant]:
    for n in (s.main, s.short):
        for extra in PADS:
            yield (
                f"{extra} in front of a prompt of {n}",
                partial(s.call, Span("a", 0, n), extra=extra, **how),
            )


def values(s: Subject) -> Iterator[Variant]:
    """Other tokens as padding: `padded` has the first."""
    d = s.driver
    assert isinstance(d, WholeDriver)
    for fill in d.fills[1:]:
        for label, make in padded(s, fill=fill):
            yield f"{label}, with {fill[0].tolist()}", make


def no_padding(s: Subject) -> str:
    d = s.driver
    return "" if isinstance(d, WholeDriver) and d.fills else "it is never padded"


def one_fill(s: Subject) -> str:
    d = s.driver
    return no_padding(s) or ("" if isinstance(d, WholeDriver) and len(d.fills) > 1 else "one padding token is given")


def no_pages(s: Subject) -> str:
    d = s.driver
    return "" if isinstance(d, CachedDriver) and d.paged else "it has no keys and values"


def has_state(s: Subject) -> str:
    d = s.driver
    return no_pages(s) or ("a state cannot be shared" if isinstance(d, CachedDriver) and d.states else "")


def no_slack(s: Subject) -> str:
    padded = s.backend.shapes.compiled and not s.backend.shapes.sizes
    return "" if padded else "no padded steps on this backend"


def no_lookahead(s: Subject) -> str:
    return "" if s.half else "the context is too short"


TRIALS = (
    Trial("alone", "a request alone", ALL, alone, first=True),
    Trial("inputs", "its arguments afterwards", ALL, inputs, first=True),
    Trial("again", "the same once more", ALL, again, first=True),
    Trial("row", "another row of the engine", CACHED, persistent),
    Trial("slots", "where it writes in the cache", CACHED, slots, no_pages),
    Trial("blocks", "other blocks of the cache", CACHED, blocks, no_pages),
    Trial("after", "after and between other requests", ALL, after, first=True),
    Trial("wanted", "outputs of other tokens asked for", CACHED, wanted, no_lookahead),
    Trial("decode", "the prompt at once, not token by token", PASTS, decode),
    Trial("chunks", "the prompt in chunks", PASTS, chunks),
    Trial("used", "a cache that was used before", CACHED, used),
    Trial("prefix", "blocks shared with another request", CACHED, prefix, has_state),
    Trial("copies", "beside copies of itself", ALL, copies),
    Trial("neighbours", "beside others of its length", ALL, neighbours),
    Trial("order", "rows in another order", ALL, order),
    Trial("ragged", "beside longer and shorter ones", PASTS, ragged),
    Trial("spoilt", "beside one whose past is NaN", OWN, spoilt, no_floats),
    Trial("mixed", "prefill and decode in one call", CACHED, mixed),
    Trial("padding", "padding in front of it", WHOLE, padded, no_padding),
    Trial("values", "other values in the padding", WHOLE, values, one_fill),
    Trial("beside", "padded beside longer ones", WHOLE, ragged, no_padding),
    Trial("slack", "padding tokens in the step", CACHED, slack, no_slack),
    Trial("engine", "requests to an engine", ALL, live.requests, last=True),
    Trial("joins", "others join an engine", SEQUENCES, live.joins, last=True),
    Trial("leaves", "others end early", SEQUENCES, live.leaves, last=True),
    Trial("cancels", "another is cancelled", ALL, live.cancels, last=True),
    Trial("borders", "across lengths that it names", OWN, live.borders, live.no_borders, last=True),
    Trial("ones", "prompts of one token", SEQUENCES, live.ones, last=True),
    Trial("longest", "the longest prompt", SEQUENCES, live.longest, live.no_limit, last=True),
    Trial("raises", "a call raises for another", TOLD, live.raises, live.no_guilty, last=True),
    Trial("nan", "the output for another is NaN", TOLD, live.nan, live.no_nan, last=True),
    Trial("shapes", "outputs of a wrong shape", ALL, live.shapes, last=True),
)
