"""The experiments: each asks for the same outputs once more, with one thing about the calls changed.

Every request is computed alone first, each in a cache of its own; these outputs are what the trials compare with. The
tokens of all rows are fixed, so one output that is wrong does not make the next one wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hibachi.verify.bench import PADS, STEPS, Bench, Result, Rows, Variant
from hibachi.verify.drive import BLOCK, CachedDriver, Found, Outputs, Piece, WholeDriver

TOKENS = (0, 1, 2)
WHOLE, CACHED, ALL = (0, 1), (2,), (0, 1, 2, None)


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


def run(bench: Bench, trials: tuple[Trial, ...] | None = None) -> dict[str, Result]:
    """The result of each trial that applies to models of this rung, by key."""
    results: dict[str, Result] = {}
    stopped = ""
    for trial in TRIALS if trials is None else trials:
        if bench.rung not in trial.rungs:
            continue
        result = results[trial.key] = Result(trial.key, trial.title)
        if why := (stopped and f"not tried: see {stopped!r}") or trial.skip(bench):
            result.state, result.why = "skipped", why
            continue
        _try(bench, trial, result)
        if trial.first and result.faulty:
            stopped = trial.title
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
        seen = bench.base[first.row.partition("#")[0], first.seen]
        fault = bench.exact or not bench.rounding(first.size, seen)
        if fault:
            result.bad.append(label)
        if result.state == "equal" or (fault and result.state == "rounding"):
            result.state, result.first, result.variant = "differs" if fault else "rounding", first, label


# ---- a request for itself --------------------------------------------------------------------------------------------


def requests(b: Bench) -> list[tuple[str, int]]:
    """All that trials need, the most important first."""
    if b.rung is None:
        return [(name, 0) for name in b.names]
    rows = [("a", b.main), ("a", 1), (b.names[1], b.main), (b.names[1], b.long)]
    rows += [(name, n) for name in b.names[1:] for n in (b.main, 1)]
    if b.half:
        rows.append(("a", b.half))
    return list(dict.fromkeys(rows))


def alone(b: Bench) -> Iterator[Variant]:
    for row, n in requests(b):
        yield (f"row {row}, a prompt of {n}" if n else f"row {row}"), lambda row=row, n=n: b.learn(row, n)


def inputs(b: Bench) -> Iterator[Variant]:
    def touched() -> Outputs:
        if names := b.driver.touched:
            raise Found(f"A call has written into {', '.join(names)}.")
        return {}

    yield "all calls until here", touched


def again(b: Bench) -> Iterator[Variant]:
    for i in (2, 3):
        yield f"time {i}", b.alone
    if b.rung == 2:
        yield "every call made twice", lambda: b.alone(times=2)


def after(b: Bench) -> Iterator[Variant]:
    other = (b.names[1], b.long if b.rung is not None else 0)
    yield "after a longer request", lambda: (b.alone(*other), b.alone())[1]
    yield "turn by turn with another", lambda: turns(b, [("a", b.main), (b.names[1], b.main)])
    if b.rung is not None:
        yield "turn by turn with a longer one", lambda: turns(b, [("a", b.main), other])
        yield "turn by turn with a shorter one", lambda: turns(b, [(b.names[1], 1), ("a", b.main)])


def turns(b: Bench, rows: Rows) -> Outputs:
    session, out = b.driver.fresh(), Outputs()
    for calls in zip(*(b.prompt(*row) for row in rows), strict=True):
        for call in calls:
            out |= session.call(call)
    return out


# ---- a sequence in other pieces --------------------------------------------------------------------------------------


def wanted(b: Bench) -> Iterator[Variant]:
    for n in (b.half, 1):
        if n:
            yield (
                f"of token {n} in a prompt of {b.main}",
                lambda n=n: b.driver.fresh().call([Piece("a", 0, b.main, at=n - 1)]),
            )


def decode(b: Bench) -> Iterator[Variant]:
    for n in range(b.main + 1, b.main + STEPS + 1):
        yield f"a prompt of {n} at once", lambda n=n: b.driver.fresh().call([Piece("a", 0, n)])


def chunks(b: Bench) -> Iterator[Variant]:
    sizes = [c for c in b.chunks if c < b.main] or [1]
    for size in sizes:
        yield f"chunks of {size}", lambda size=size: chunked(b, size)
    yield f"chunks of {b.main - 1} and 1", lambda: chunked(b, b.main - 1)


def chunked(b: Bench, size: int) -> Outputs:
    session, out = b.driver.fresh(), Outputs()
    for start in range(0, b.main, size):
        end = min(start + size, b.main)
        out |= session.call([Piece("a", start, end, emit=end == b.main)])
    for call in b.prompt("a", b.main)[1:]:
        out |= session.call(call)
    return out


# ---- another place ---------------------------------------------------------------------------------------------------


def slots(b: Bench) -> Iterator[Variant]:
    def own() -> Outputs:
        session = b.driver.fresh()
        empty = session.written()
        out = b.alone(session=session)
        own = set(session.slots("a", b.main + STEPS).tolist())
        for name, now in session.written().items():
            changed = (now != empty[name]).any(axis=1).nonzero()[0].tolist()
            if stray := [s for s in changed if s not in own and s >= BLOCK]:  # nobody owns block 0
                raise Found(f"In {name}, {len(stray)} slots were written to that are not the request's.")
        return out

    yield "an empty cache", own


def persistent(b: Bench) -> Iterator[Variant]:
    for shift in (1, 2):
        yield f"in row {shift}", lambda shift=shift: b.alone(session=b.driver.fresh(shift=shift))


def blocks(b: Bench) -> Iterator[Variant]:
    yield "blocks in no order", lambda: b.alone(session=b.driver.fresh(scattered=True))


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
        session.call([Piece("a#1", 0, b.main)])
        session.place["a"] = 1
        session.table[1, :shared] = session.table[session.place["a#1"], :shared]
        out = session.call([Piece("a", shared * BLOCK, b.main)])
        for call in b.prompt("a", b.main)[1:]:
            out |= session.call(call)
        return out

    if shared:
        yield f"{shared * BLOCK} tokens computed by another request", found


def slack(b: Bench) -> Iterator[Variant]:
    yield "padding tokens and rows", lambda: b.alone(slack=True)


# ---- company ---------------------------------------------------------------------------------------------------------


def copies(b: Bench) -> Iterator[Variant]:
    for size in b.sizes:
        yield f"{size} rows", lambda size=size: b.together([(f"a#{i}" if i else "a", b.main) for i in range(size)])


def neighbours(b: Bench) -> Iterator[Variant]:
    for size in b.sizes:
        yield f"{size} rows", lambda size=size: b.together([("a", b.main), *((r, b.main) for r in b.others(size - 1))])
    if b.rung is not None:
        rows = [("a", 1), *((r, 1) for r in b.others(2))]
        yield f"{len(rows)} rows of one token", lambda: b.together(rows)


def order(b: Bench) -> Iterator[Variant]:
    rows = [(r, b.main) for r in ("a", *b.others(2))]
    yield f"the last of {len(rows)} rows", lambda: b.together(rows[::-1])
    yield f"the second of {len(rows)} rows", lambda: b.together([rows[1], rows[0], *rows[2:]])


def ragged(b: Bench) -> Iterator[Variant]:
    long, one = (b.names[1], b.long), (b.others(2)[1], 1)
    yield "beside a longer prompt", lambda: b.together([("a", b.main), long])
    yield "beside a longer and a shorter one", lambda: b.together([long, ("a", b.main), one])


def mixed(b: Bench) -> Iterator[Variant]:
    def joined() -> Outputs:
        """Others are prefilled in chunks while the row decodes; not every row of a call has an output."""
        session, other = b.driver.fresh(), b.names[1]
        out = session.call([Piece("a", 0, b.main)])
        third = -(-b.long // STEPS)
        for i, call in enumerate(b.prompt("a", b.main)[1:]):
            end = min((i + 1) * third, b.long)
            out |= session.call([Piece(other, i * third, end, emit=end == b.long), *call])
        return out

    def ended() -> Outputs:
        """The row ends its prompt in a call in which the one before it does not."""
        session, other = b.driver.fresh(), b.names[1]
        out = session.call([Piece(other, 0, 2, emit=False), Piece("a", 0, b.main)])
        return out | session.call([Piece(other, 2, 4, emit=False), *b.prompt("a", b.main)[1]])

    yield "while another is prefilled", joined
    yield "where another has no output yet", ended


# ---- padding ---------------------------------------------------------------------------------------------------------


def padded(b: Bench, **how: Any) -> Iterator[Variant]:
    d = b.driver
    assert isinstance(d, WholeDriver)
    for n in (b.main, 1):
        for extra in PADS:
            yield (
                f"{extra} in front of a prompt of {n}",
                lambda n=n, extra=extra: d.call([Piece("a", 0, n)], extra=extra, **how),
            )


def values(b: Bench) -> Iterator[Variant]:
    """Other tokens as padding: `padded` has the first."""
    d = b.driver
    assert isinstance(d, WholeDriver)
    for fill in d.fills[1:]:
        for label, make in padded(b, fill=fill):
            yield f"{label}, with {fill[0].tolist()}", make


def beside(b: Bench) -> Iterator[Variant]:
    yield from ragged(b)


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
    return "" if padded else "steps are not padded here, or always to one shape"


def no_lookahead(b: Bench) -> str:
    return "" if b.half else "the context is too short"


TRIALS = (
    Trial("alone", "a request alone", ALL, alone, first=True),
    Trial("inputs", "its arguments afterwards", ALL, inputs, first=True),
    Trial("again", "the same once more", ALL, again, first=True),
    Trial("after", "after and between other requests", ALL, after, first=True),
    Trial("wanted", "outputs of other tokens asked for", CACHED, wanted, no_lookahead),
    Trial("decode", "the prompt at once, not token by token", CACHED, decode),
    Trial("chunks", "the prompt in chunks", CACHED, chunks),
    Trial("slots", "where it writes in the cache", CACHED, slots, no_pages),
    Trial("blocks", "other blocks of the cache", CACHED, blocks, no_pages),
    Trial("used", "a cache that was used before", CACHED, used),
    Trial("prefix", "blocks shared with another request", CACHED, prefix, has_state),
    Trial("row", "another row of the engine", CACHED, persistent),
    Trial("copies", "beside copies of itself", ALL, copies),
    Trial("neighbours", "beside others of its length", ALL, neighbours),
    Trial("order", "rows in another order", ALL, order),
    Trial("ragged", "beside longer and shorter ones", CACHED, ragged),
    Trial("mixed", "prefill and decode in one call", CACHED, mixed),
    Trial("padding", "padding in front of it", WHOLE, padded, no_padding),
    Trial("values", "other values in the padding", WHOLE, values, one_fill),
    Trial("beside", "padded beside longer ones", WHOLE, beside, no_padding),
    Trial("slack", "padding tokens in the step", CACHED, slack, no_slack),
)
