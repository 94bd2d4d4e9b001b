"""The experiments: each asks for the same outputs once more, with one thing about the calls changed.

Every request is computed alone first, each in a cache of its own; these outputs are what the trials compare with. The
tokens of all rows are fixed, so one output that is wrong does not make the next one wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from hibachi.verify.drive import BLOCK, CachedDriver, Found, Outputs, Piece, WholeDriver
from hibachi.verify.subject import MAIN, PADS, STEPS, Bench, Result, Rows, Variant

WHOLE, CACHED, ALL = (0, 1), (2,), (0, 1, 2, None)
IN_ORDER = "blocks in order"


@dataclass(frozen=True, slots=True)
class Trial:
    """title: the thing that is changed. rungs: of models that it applies to. skip: why it does not apply after all.

    first: without it nothing else is worth a try.
    """

    key: str
    title: str
    rungs: tuple[int | None, ...]
    variants: Callable[[Bench], Iterator[Variant]]
    skip: Callable[[Bench], str] = lambda b: ""
    first: bool = False


def run(bench: Bench) -> dict[str, Result]:
    """The result of each trial that applies to models of this rung, by key."""
    results: dict[str, Result] = {}
    stopped = ""
    for trial in TRIALS:
        if bench.rung not in trial.rungs:
            continue
        result = results[trial.key] = Result(trial.key, trial.title, exact=bench.exact)
        if why := stopped or trial.skip(bench):
            result.state, result.why = "skipped", why
            continue
        _try(bench, trial, result)
        if trial.first and result.wrong:
            stopped = "not tried"
    if "inputs" in results and not results["inputs"].wrong and bench.driver.touched:
        results["inputs"].fail("all calls", touched(bench))
    return results


def _try(bench: Bench, trial: Trial, result: Result) -> None:
    for label, make in trial.variants(bench):
        try:
            worst, first = bench.compare(make())
        except Found as e:
            result.fail(label, str(e))
            continue
        except Exception as e:
            result.fail(label, f"{type(e).__name__}: {e}", e)
            continue
        if first is None:
            continue
        result.worst = max(result.worst, worst)
        wrong = not bench.rounding(first.size, bench.base[first.row.partition("#")[0], first.seen])
        if wrong or bench.exact:
            result.bad.append(label)
        if result.state == "equal" or (wrong and result.state == "rounding"):
            result.state, result.first, result.variant = "differs" if wrong else "rounding", first, label


# ---- a request for itself --------------------------------------------------------------------------------------------


def requests(b: Bench) -> list[tuple[str, int]]:
    """All that trials need, the most important first."""
    if b.rung is None:
        return [(name, 0) for name in b.names]
    rows = [("a", b.main), ("a", b.short), (b.names[1], b.main), (b.names[1], b.long)]
    rows += [(name, n) for name in b.names[1:] for n in (b.main, b.short)]
    if b.half:
        rows.append(("a", b.half))
    return list(dict.fromkeys(rows))


def alone(b: Bench) -> Iterator[Variant]:
    for row, n in requests(b):
        yield (f"row {row}, a prompt of {n}" if n else f"row {row}"), partial(b.learn, row, n)


def inputs(b: Bench) -> Iterator[Variant]:
    def look() -> Outputs:
        if names := touched(b):
            raise Found(names)
        return {}

    yield "all calls until here", look


def touched(b: Bench) -> str:
    return f"a call has written into {', '.join(b.driver.touched)}" if b.driver.touched else ""


def again(b: Bench) -> Iterator[Variant]:
    for i in (2, 3):
        yield f"time {i}", b.alone
    if b.rung == 2:
        yield "every call made twice", partial(b.alone, times=2)


def after(b: Bench) -> Iterator[Variant]:
    other = (b.names[1], b.long if b.rung is not None else 0)

    def later() -> Outputs:
        b.alone(*other)
        return b.alone()

    yield "after a longer request", later
    yield "turn by turn with another", partial(turns, b, [("a", b.main), (b.names[1], b.main)])
    if b.rung is not None:
        yield "turn by turn with a longer one", partial(turns, b, [("a", b.main), other])
        yield "turn by turn with a shorter one", partial(turns, b, [(b.names[1], b.short), ("a", b.main)])


def turns(b: Bench, rows: Rows) -> Outputs:
    session, out = b.driver.fresh(), Outputs()
    for calls in zip(*(b.prompt(*row) for row in rows), strict=True):
        for call in calls:
            out |= session.call(call)
    return out


# ---- a sequence in other pieces --------------------------------------------------------------------------------------


def wanted(b: Bench) -> Iterator[Variant]:
    for n in (b.half, b.short):
        if n:
            yield f"of token {n} in a prompt of {b.main}", partial(b.call, Piece("a", 0, b.main, at=n - 1))


def decode(b: Bench) -> Iterator[Variant]:
    for n in range(b.main + 1, b.main + STEPS + 1):
        yield f"a prompt of {n} at once", partial(b.call, Piece("a", 0, n))


def chunks(b: Bench) -> Iterator[Variant]:
    sizes = [c for c in b.chunks if c < b.main] or [1]
    for size in sizes:
        yield f"chunks of {size}", partial(chunked, b, size)
    yield f"chunks of {b.main - 1} and 1", partial(chunked, b, b.main - 1)


def chunked(b: Bench, size: int) -> Outputs:
    """A prompt in pieces of this size; of a long one, the beginning is one piece."""
    session, out = b.driver.fresh(), Outputs()
    begin = max(0, b.main - MAIN - 1)
    if begin:
        session.call([Piece("a", 0, begin, emit=False)])
    for start in range(begin, b.main, size):
        end = min(start + size, b.main)
        out |= session.call([Piece("a", start, end, emit=end == b.main)])
    for call in b.prompt("a", b.main)[1:]:
        out |= session.call(call)
    return out


# ---- another place ---------------------------------------------------------------------------------------------------


def slots(b: Bench) -> Iterator[Variant]:
    def own(scattered: bool) -> Outputs:
        session = b.driver.fresh(scattered=scattered)
        empty = session.written()
        out = b.alone(session=session)
        own = set(session.slots("a", b.main + STEPS).tolist())
        for name, now in session.written().items():
            changed = (now != empty[name]).any(axis=1).nonzero()[0].tolist()
            if stray := [s for s in changed if s not in own and s >= BLOCK]:  # nobody owns block 0
                raise Found(f"in {name}, {len(stray)} slots were written to that are not the request's")
        return out

    yield IN_ORDER, partial(own, False)
    yield "blocks in no order", partial(own, True)


def laid_out(b: Bench, **layout: Any) -> Outputs:
    return b.alone(session=b.driver.fresh(**layout))


def persistent(b: Bench) -> Iterator[Variant]:
    for shift in (1, 2):
        yield f"in row {shift}", partial(laid_out, b, shift=shift)


def blocks(b: Bench) -> Iterator[Variant]:
    yield "blocks in no order", partial(laid_out, b, scattered=True)


def used(b: Bench) -> Iterator[Variant]:
    def second() -> Outputs:
        session = b.driver.fresh()
        session.place = {b.names[1]: 0, "a": 0}
        b.alone(b.names[1], b.long, session=session)
        return b.alone(session=session)

    yield "where a longer request has been", second


def prefix(b: Bench) -> Iterator[Variant]:
    shared = (b.main - 1) // BLOCK

    def found() -> Outputs:
        session = b.driver.fresh()
        b.alone("a#1", session=session)
        b.alone(b.names[1], session=session)  # where it is that "a" comes, so that nothing of "a" is there
        session.place["a"] = session.place[b.names[1]]
        session.table[session.place["a"], :shared] = session.table[session.place["a#1"], :shared]
        out: Outputs = session.call([Piece("a", shared * BLOCK, b.main)])
        for call in b.prompt("a", b.main)[1:]:
            out |= session.call(call)
        return out

    if shared:
        yield f"{shared * BLOCK} tokens computed by another request", found


def slack(b: Bench) -> Iterator[Variant]:
    yield "padding tokens and rows", partial(b.alone, slack=True)


# ---- company ---------------------------------------------------------------------------------------------------------


def copies(b: Bench) -> Iterator[Variant]:
    for size in b.sizes:
        yield f"{size} rows", partial(b.together, [(f"a#{i}" if i else "a", b.main) for i in range(size)])


def neighbours(b: Bench) -> Iterator[Variant]:
    for size in b.sizes:
        yield f"{size} rows", partial(b.together, [("a", b.main), *((r, b.main) for r in b.others(size - 1))])
    if b.rung is not None:
        rows = [("a", b.short), *((r, b.short) for r in b.others(2))]
        yield f"{len(rows)} rows of {b.short}", partial(b.together, rows)


def order(b: Bench) -> Iterator[Variant]:
    rows = [(r, b.main) for r in ("a", *b.others(2))]
    yield f"the last of {len(rows)} rows", partial(b.together, rows[::-1])
    yield f"the second of {len(rows)} rows", partial(b.together, [rows[1], rows[0], *rows[2:]])


def ragged(b: Bench) -> Iterator[Variant]:
    long, one = (b.names[1], b.long), (b.others(2)[1], b.short)
    yield "beside a longer prompt", partial(b.together, [("a", b.main), long])
    yield "beside a longer and a shorter one", partial(b.together, [long, ("a", b.main), one])


def mixed(b: Bench) -> Iterator[Variant]:
    def joined() -> Outputs:
        """Others are prefilled in chunks while the row decodes; not every row of a call has an output."""
        session, other = b.driver.fresh(), b.names[1]
        out: Outputs = session.call([Piece("a", 0, b.main)])
        third = -(-b.long // STEPS)
        for i, call in enumerate(b.prompt("a", b.main)[1:]):
            end = min((i + 1) * third, b.long)
            out |= session.call([Piece(other, i * third, end, emit=end == b.long), *call])
        return out

    def ended() -> Outputs:
        """The row ends its prompt in a call in which the one before it does not."""
        session, other = b.driver.fresh(), b.names[1]
        out: Outputs = session.call([Piece(other, 0, 2, emit=False), Piece("a", 0, b.main)])
        out |= session.call([Piece(other, 2, 4, emit=False), *b.prompt("a", b.main)[1]])
        return out

    yield "while another is prefilled", joined
    yield "where another has no output yet", ended


# ---- padding ---------------------------------------------------------------------------------------------------------


def padded(b: Bench, **how: Any) -> Iterator[Variant]:
    for n in (b.main, b.short):
        for extra in PADS:
            yield (
                f"{extra} in front of a prompt of {n}",
                partial(b.call, Piece("a", 0, n), extra=extra, **how),
            )


def values(b: Bench) -> Iterator[Variant]:
    """Other tokens as padding: `padded` has the first."""
    d = b.driver
    assert isinstance(d, WholeDriver)
    for fill in d.fills[1:]:
        for label, make in padded(b, fill=fill):
            yield f"{label}, with {fill[0].tolist()}", make


def no_padding(b: Bench) -> str:
    d = b.driver
    return "" if isinstance(d, WholeDriver) and d.fills else "it is never padded"


def one_fill(b: Bench) -> str:
    d = b.driver
    return no_padding(b) or ("" if isinstance(d, WholeDriver) and len(d.fills) > 1 else "one padding token is given")


def no_pages(b: Bench) -> str:
    d = b.driver
    return "" if isinstance(d, CachedDriver) and d.paged else "it has no keys and values"


def has_state(b: Bench) -> str:
    d = b.driver
    return no_pages(b) or ("a state cannot be shared" if isinstance(d, CachedDriver) and d.states else "")


def no_slack(b: Bench) -> str:
    padded = b.backend.static_shapes and b.backend.step_tokens is None
    return "" if padded else "no padded steps on this backend"


def no_lookahead(b: Bench) -> str:
    return "" if b.half else "the context is too short"


TRIALS = (
    Trial("alone", "a request alone", ALL, alone, first=True),
    Trial("inputs", "its arguments afterwards", ALL, inputs, first=True),
    Trial("again", "the same once more", ALL, again, first=True),
    Trial("row", "another row of the engine", CACHED, persistent),
    Trial("slots", "where it writes in the cache", CACHED, slots, no_pages),
    Trial("blocks", "other blocks of the cache", CACHED, blocks, no_pages),
    Trial("after", "after and between other requests", ALL, after, first=True),
    Trial("wanted", "outputs of other tokens asked for", CACHED, wanted, no_lookahead),
    Trial("decode", "the prompt at once, not token by token", CACHED, decode),
    Trial("chunks", "the prompt in chunks", CACHED, chunks),
    Trial("used", "a cache that was used before", CACHED, used),
    Trial("prefix", "blocks shared with another request", CACHED, prefix, has_state),
    Trial("copies", "beside copies of itself", ALL, copies),
    Trial("neighbours", "beside others of its length", ALL, neighbours),
    Trial("order", "rows in another order", ALL, order),
    Trial("ragged", "beside longer and shorter ones", CACHED, ragged),
    Trial("mixed", "prefill and decode in one call", CACHED, mixed),
    Trial("padding", "padding in front of it", WHOLE, padded, no_padding),
    Trial("values", "other values in the padding", WHOLE, values, one_fill),
    Trial("beside", "padded beside longer ones", WHOLE, ragged, no_padding),
    Trial("slack", "padding tokens in the step", CACHED, slack, no_slack),
)
