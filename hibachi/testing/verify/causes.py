"""From the pattern of trials that failed to what is wrong with the model, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from hibachi.backend.infer import training
from hibachi.engine.runners.sampler import LOGITS, probabilities
from hibachi.testing.verify import engine_trials as live
from hibachi.testing.verify.drive import CachedDriver, Outputs, Span, WholeDriver
from hibachi.testing.verify.inside import GENERATOR
from hibachi.testing.verify.ownpasts import OwnDriver
from hibachi.testing.verify.subject import Subject, TrialResult
from hibachi.testing.verify.trials import IN_ORDER


@dataclass(frozen=True, slots=True)
class Cause:
    """key: for programs. what: the fault. mend: what to do. saw: the evidence, beside the trials that failed."""

    key: str
    what: str
    mend: str
    saw: tuple[str, ...] = ()


EVAL = "Call .eval() on it before it is used."
FAILS = Cause("fails-alone", "It cannot compute a request alone", "Mend what it says first.")
NAN = Cause(
    "not-finite", "It returns NaN", "Look for an overflow or a division by zero; a float16 model may need float32."
)
ONE = Cause(
    "batch-of-one",
    "It fails on a batch of one row, and not on two",
    "A batch of one row is a batch: look for squeeze() without a dimension, and for code that tells the two apart.",
)
INPUTS = Cause(
    "writes-input",
    "It writes into its arguments",
    "Copy them first: the engine calls again with the same arguments when a step has failed.",
)
TRAINING = Cause("training-mode", "It is in training mode, so dropout draws anew in every call", EVAL)
RANDOM = Cause(
    "random",
    "The same call does not give the same twice: dropout, or a random generator",
    "Switch dropout off. Return logits, and the engine draws, from a seed of each request; or declare `draws = n`, and "
    "draw with the random numbers that it gives you: `x.uniform`, `x.normal`.",
)
STATE = Cause(
    "shared-state",
    "It keeps state of its own, which all rows and requests share",
    "An output may depend on the arguments only. What a request must remember belongs in the cache that `step` gets "
    "and returns (level 2); keep nothing in the model, its class or its module.",
)
STATISTICS = Cause(
    "batch-statistics",
    "Statistics over the batch: a row changes with the content of the others, not with copies of itself nor with their "
    "order. That is batch normalisation in training mode, or a mean or softmax over dimension 0",
    "Normalise with stored statistics (in PyTorch: call .eval()), and reduce over the dimensions of one row only.",
)
SIZE = Cause(
    "batch-size",
    "A row changes with the number of rows, whatever is in them",
    "Look for code that uses the size of dimension 0: a sum over the batch, a division by it, a branch for one row.",
)
ORDER = Cause(
    "row-order", "The outputs are right, but in another order than the rows", "Return output i for row i of the input."
)
MIXED = Cause(
    "rows-mixed",
    "Rows influence each other: a row depends on which others are in the batch",
    "Look for an operation across dimension 0 (of packed tokens: across rows), a sort, a roll, a reshape that joins "
    "batch and sequence, or row 0 used for all.",
)
LENGTH = Cause(
    "other-length",
    "A row reads the length or place of another: rows of equal length are right, rows of different length are not",
    "Each row has its own x.start and x.kv_len, its tokens are cu_q[i] to cu_q[i + 1] - 1, x.seg says whose one is.",
)
RAGGED = Cause(
    "other-place",
    "It takes the tokens or outputs of one row for those of another where not all rows are in the same phase",
    "Return one output for each entry of x.last, and find a row's tokens by x.cu_q or x.seg.",
)
LEAKS = Cause(
    "padding-leaks",
    "Padding leaks into the row: what is in the padding changes the output",
    "Mask it: row i has width - lengths[i] padding tokens in front of its own. Attention must hide them (-inf before "
    "softmax), sums and means must leave them out. Or never pad: leave padding_token out; `--no-padding` judges it so.",
)
COUNTS = Cause(
    "padding-counts",
    "Padding is counted: how much of it there is changes the output, its values do not",
    "Positions, means and lengths must come from `lengths`, not from the width of the batch: the first token of row i "
    "stands at width - lengths[i], and its position is 0.",
)
RIGHT = Cause(
    "padding-right",
    "It expects padding behind the tokens of a row",
    "Rows are padded on the left: the last lengths[i] tokens of row i are its own, the newest is always last.",
)
PAD = Cause(
    "padding",
    "A row with padding in front is not what it is alone",
    "Mask the padding by `lengths`, or never pad: leave padding_token out; `--no-padding` judges it so.",
)
POSITION = Cause(
    "resume-position",
    "The wrong position on resume: a prompt that goes on in a later call is not computed as it is in one call, though "
    "it sees what came before",
    "Use x.pos, the position of each new token in its sequence. Counting from 0 in each call is right for a prompt at "
    "once only.",
)
PAST = Cause(
    "past-lost",
    "A call does not see what earlier calls have computed",
    "Attend over the cache (`backend.attend`), not over this call's tokens alone; begin with the state that `step` "
    "gets.",
)
OWN_PAST = Cause(
    "past-not-continued",
    "Token by token, or in chunks, it computes something else than at once: it does not go on from `past`",
    "Hand `past` to the network, and return the cache that comes back. The new tokens of row i stand at positions "
    "lengths[i] - q to lengths[i] - 1, q of them; none may see a later one.",
)
OWN_CHUNKS = Cause(
    "chunk-not-continued",
    "Where a chunk of several tokens follows a past, it computes something else than at once; one by one it is right",
    "Hand `past` to the network for several tokens as well: some networks start anew with each prompt. Until then an "
    "engine gives it prompts whole, which its log says: a long one holds up the others.",
)
OWN_PADDING = Cause(
    "past-padding",
    "Padding in the past of a shorter row changes its output: rows of equal length are right, others are not",
    "Rows are right-aligned in `past`: row i has lengths[i] - q real positions, at the end. Hide what lies before by a "
    "mask made from `lengths`, and count positions from `lengths`, not from the width of the past.",
)
NAN_PAST = Cause(
    "past-nan",
    "NaN in the past of one row comes to the others, though a row's numbers do not",
    "A sum or a product over several rows counts others with the weight 0, and 0 times NaN is NaN: compute each row "
    "of `past` by itself, or choose values (`where`) in place of multiplying by a mask.",
)
RETURN = Cause(
    "state-not-returned",
    "The state comes back as it was given",
    "Return the new state of every layer, at its place in the list: `return logits, [*new_states]`.",
)
LAST = Cause(
    "wrong-output",
    "It ignores x.last: the output of another token than the one asked for",
    "Return the outputs of the tokens x.last, in its order, one for each: `backend.take(h, x.last)`.",
)
MIDDLE = Cause(
    "middle-output",
    "The output of a token amid a prompt is not that of a prompt that ends there",
    "What belongs to a token is at x.pos; x.kv_len and the size of the call belong to the whole row. Requests for "
    "log-probabilities of the prompt get wrong ones.",
)
FUTURE = Cause(
    "looks-ahead",
    "A token sees those that come after it in the call",
    "Mask the attention causally: `backend.attend` does.",
)
SLOT = Cause(
    "wrong-slot",
    "It writes to the cache where the request has no place",
    "Write key and value of token t to slot x.slot[t]: block * block size + offset. `backend.attend` does.",
)
BLOCKS = Cause(
    "block-table",
    "It depends on which blocks of the cache a request holds",
    "Position p of row i lies in block x.block_table[i, p // block size]: blocks need not be neighbours.",
)
STALE = Cause(
    "stale-cache",
    "It reads what an earlier request left in the cache",
    "Row i may read positions 0 to x.kv_len[i] - 1 only, and x.pos says how far each token sees.",
)
PREFIX = Cause(
    "own-cache",
    "It does not see tokens that another request has computed, though they are in the row's blocks",
    "Read the past through x.block_table only, not from memory of its own by row.",
)
ROW = Cause(
    "row-index",
    "It depends on which row of the engine a request holds",
    "x.row is where a request is kept, not who it is: use it for nothing that reaches the output.",
)
SLACK = Cause(
    "padded-step",
    "Padding tokens in a step change the output (they stand at block 0, and rows of padding at the end)",
    "Count rows by x.kv_len or x.cu_q: tokens from x.cu_q[-1] on are padding, as are rows without tokens.",
)
PROBABLE = Cause("probabilities", "It returns probabilities: never negative, with the sum 1", LOGITS)
ROUNDING = Cause(
    "rounding",
    "Bits depend on the batch, by no more than rounding",
    "Matrix products, sums and attention round differently in other shapes; a library's fast kernels promise no more.",
)
ENGINE = Cause(
    "comings-and-goings",
    "Through an engine a request gets something else than alone, though every call for itself is right",
    "Rows come and go at every step, and stand elsewhere in the batch: remember nothing of them but what the engine "
    "hands over. If it is rounding, allow more: --tolerance.",
)
ONES = Cause(
    "one-token",
    "Prompts of one token and longer ones do not go together",
    "Look for code that takes the token before the last one, or that tells a width of one apart.",
)
LONGEST = Cause(
    "longest-context",
    "It does not compute the longest request that it allows",
    "Positions 0 to max_model_len - 1 may come: make tables that large, or max_model_len smaller.",
)
NEIGHBOUR = Cause(
    "long-neighbour",
    "A short row gets something else beside one that is far longer",
    "Compute what depends on a length by row, from `lengths` or positions, and not from the longest row of the call: "
    "LongRoPE of transformers takes other angles for all rows once one is longer than the model was trained for first.",
)
BORDER = Cause(
    NEIGHBOUR.key,
    "A short row gets something else beside one that is longer than a length which the model names",
    f"{NEIGHBOUR.mend} Until then an engine lets rows of one length only share calls, which its log says.",
)
FAILED = Cause(
    "after-failures",
    "Where a step has failed, requests that are not to blame get something else than alone",
    "Their rows are run again in parts: the same arguments must give the same, whatever happened in between. Keep "
    "nothing in the model. If it does so, this is a defect of hibachi: please report it.",
)
OTHER = Cause(
    "unnamed", "An output depends on more than the request", "Look at the trials that failed, the first one first."
)


def diagnose(s: Subject, results: dict[str, TrialResult]) -> list[Cause]:
    """What is wrong, the root first. Trials whose failure follows from another fault are not named again."""
    bad = {key for key, r in results.items() if r.wrong}
    if not bad:
        if s.vocab is not None and s.vocab > 2 and all(probabilities(rows) > 0 for rows in s.logits()):
            return [PROBABLE]
        return [ROUNDING] if any(r.faulty for r in results.values()) else []
    if "alone" in bad:
        return [_alone(s, results["alone"])]
    found: list[Cause] = []
    if "inputs" in bad:
        found.append(_saw(INPUTS, results["inputs"].why))
    if "again" in bad or ("after" in bad and not bad & PLACES):
        return [*found, _memory(s, "again" in bad)]
    company = _company(s, bad)
    if company is not None and company.key == STATISTICS.key:
        return [*found, company]  # over the tokens of a step: chunks and padding change them too
    found += _pieces(s, bad, results)
    if not bad & PIECES and company is not None:
        found.append(company)
    if company is None and "spoilt" in bad and not bad & PIECES:
        found.append(NAN_PAST)
    if company is None and bad & {"padding", "values", "beside"}:
        found.append(_padding(s, bad))
    for key in filter(bad.__contains__, LIVE):
        why = results[key].why
        found.append(_saw(NEIGHBOUR if key == "longest" and live.BESIDE in why else LIVE[key], why))
    return found or [OTHER]


PIECES, PLACES = {"wanted", "decode", "chunks"}, {"row", "slots", "blocks"}
LIVE = {
    **dict.fromkeys(("engine", "joins", "leaves", "cancels"), ENGINE),
    "borders": BORDER,
    "ones": ONES,
    "longest": LONGEST,
    **dict.fromkeys(("raises", "nan", "shapes"), FAILED),
}


def _saw(cause: Cause, *saw: str) -> Cause:
    return replace(cause, saw=tuple(s for s in saw if s))


def _works(s: Subject, make: Callable[[], Outputs]) -> bool:
    """Can it be computed, and is it what the rows get alone, up to rounding?"""
    try:
        _, first = s.compare(make())
        return first is None or s.rounding(first.size, s.base[first.row.partition("#")[0], first.seen])
    except Exception:
        return False


def _runs(make: Callable[[], Outputs]) -> Outputs | None:
    try:
        return make()
    except Exception:
        return None


# ---- a request for itself --------------------------------------------------------------------------------------------


def _alone(s: Subject, r: TrialResult) -> Cause:
    if r.error is None:
        return _saw(NAN if "NaN" in r.why else FAILS, r.why)
    if _runs(lambda: s.together([("a", s.main), (s.names[1], s.main)])) is not None:
        if norms := [k for k in training(s.model) if "dropout" not in k.lower()]:
            return _saw(STATISTICS, f"In training mode: {', '.join(norms)}.", f"On one row: {r.why}")
        return _saw(ONE, r.why)
    return _saw(FAILS, r.why)


def _memory(s: Subject, again: bool) -> Cause:
    kept = f"Changed by calls: {', '.join(s.changed[:4])}." if s.changed else ""
    if again and (layers := training(s.model)):
        return _saw(TRAINING, f"In training mode: {', '.join(layers)}.", kept)
    if again and (not s.changed or any(GENERATOR in name for name in s.changed)):
        return _saw(RANDOM, kept)
    return _saw(STATE, kept)


# ---- pieces of a sequence, and places in the cache -------------------------------------------------------------------


def _pieces(s: Subject, bad: set[str], results: dict[str, TrialResult]) -> Iterator[Cause]:
    if bad & PIECES:
        if not isinstance(s.driver, OwnDriver):
            yield _resumed(s, bad)
        else:
            yield (
                OWN_PAST if "decode" in bad else _saw(OWN_CHUNKS, f"Of the prompt: {', '.join(results['chunks'].bad)}.")
            )
    if bad & {"slots", "blocks"}:
        yield SLOT if "slots" in bad and IN_ORDER in results["slots"].bad else BLOCKS
    elif "used" in bad:
        yield STALE
    if "row" in bad and not bad & {"slots", "blocks"}:
        yield ROW
    if "prefix" in bad and not bad & (PLACES | PIECES | {"used"}):
        yield PREFIX
    if "slack" in bad and s.backend.shapes.compiled:
        yield SLACK


def _resumed(s: Subject, bad: set[str]) -> Cause:
    d = s.driver
    assert isinstance(d, CachedDriver)

    def at(row: str, j: int) -> Outputs | None:
        return _runs(partial(s.call, Span(row, 0, s.main, at=j)))

    last = at("a", s.main - 1)
    if last and all((out := at("a", j)) and s.equal(out, last) for j in range(s.main - 1)):
        return LAST
    if "wanted" in bad:
        early = s.main // 2
        ours = at("a", early)
        for name in s.names[1:]:
            d.tokens["later"] = np.concatenate([d.of("a")[: early + 1], d.of(name)[early + 1 :]])
            if ours and (theirs := at("later", early)) and not s.equal(ours, theirs):
                return FUTURE
        if not bad & {"decode", "chunks"}:
            return LENGTH if "ragged" in bad else MIDDLE
    if d.states and len(d.moved) < len(d.states):
        layers = [str(i) for i in d.states if i not in d.moved]
        return _saw(RETURN, f"Never changed: the state of layer {', '.join(layers)}.")
    if not _sees_the_past(s, d, chunk="chunks" in bad):
        return PAST
    return _saw(POSITION, *_where(s, d))


def _sees_the_past(s: Subject, d: CachedDriver, chunk: bool) -> bool:
    """Does the end of a prompt depend on its beginning, where an earlier call has computed that?"""
    cut = s.main // 2 if chunk else s.main - 1

    def end(row: str) -> Outputs:
        session = d.fresh()
        session.call([Span(row, 0, cut, emit=False)])
        out: Outputs = session.call([Span(row, cut, s.main)])
        return out

    ours = _runs(partial(end, "a"))
    for name in s.names[1:]:
        d.tokens["other"] = np.concatenate([d.of(name)[:cut], d.of("a")[cut:]])
        theirs = _runs(partial(end, "other"))
        if ours is None or theirs is None or not s.equal(ours, theirs):
            return True
    return False


def _where(s: Subject, d: CachedDriver) -> Iterator[str]:
    """The first thing in the cache that another way of cutting the prompt changes."""
    cut = s.main // 2
    whole, pieces, shifted = d.fresh(), d.fresh(), d.fresh()
    d.tokens["tail"] = d.of("a")[cut:]
    if None in (
        _runs(lambda: whole.call([Span("a", 0, s.main)])),
        _runs(lambda: pieces.call([Span("a", 0, cut, emit=False)]) | pieces.call([Span("a", cut, s.main)])),
        _runs(lambda: shifted.call([Span("tail", 0, s.main - cut)])),
    ):
        return
    one, two, three = whole.written(), pieces.written(), shifted.written()
    for name in one:
        at, now, tail = whole.slots("a", s.main), pieces.slots("a", s.main), shifted.slots("tail", s.main - cut)
        scale = np.abs(one[name][at]).max() or 1.0
        off = np.abs(one[name][at] - two[name][now]).max(axis=1) / scale > s.tolerance
        if not off.any():
            continue
        first = int(off.argmax())
        yield f"In chunks of {cut} and {s.main - cut}, {name} are others from position {first} on."
        alike = np.abs(two[name][now][cut:] - three[name][tail]).max() / scale <= s.tolerance
        if name.startswith("layer 0,") and alike:
            yield "The second chunk gets the keys that it would get as a prompt of its own, from position 0."
        return


# ---- company ---------------------------------------------------------------------------------------------------------


def _company(s: Subject, bad: set[str]) -> Cause | None:
    if not bad & {"copies", "neighbours", "order", "ragged", "mixed"}:
        return None
    if not bad & {"copies", "neighbours", "order"}:
        if isinstance(s.driver, OwnDriver):
            return OWN_PADDING
        return LENGTH if "ragged" in bad else RAGGED
    rows = _first_bad(s)
    if (both := _runs(lambda: s.together(rows))) is None:
        return MIXED
    if _permuted(s, both):
        return ORDER
    orders = [rows[::-1], *(rows[i:] + rows[:i] for i in range(1, len(rows)))]
    steady = all((out := _runs(partial(s.together, o))) and s.equal(_of_a(both), _of_a(out)) for o in orders)
    if "copies" not in bad and steady:
        norms = [k for k in training(s.model) if "dropout" not in k.lower()]
        return _saw(STATISTICS, f"In training mode: {', '.join(norms)}." if norms else "")
    if "copies" in bad and steady:
        same = _runs(lambda: s.together([(f"a#{i}" if i else "a", n) for i, (_, n) in enumerate(rows)]))
        if same is not None and s.equal(_of_a(both), _of_a(same)):
            return SIZE
    return MIXED


def _first_bad(s: Subject) -> list[tuple[str, int]]:
    """The smallest batch in which a row is not what it is alone; two rows are too few to tell orders apart."""
    sizes = [*sorted({*s.sizes, 3} - {2}), 2]
    for size, n in ((size, n) for n in (s.main, s.short) for size in sizes):
        rows = [(row, n) for row in ("a", *s.others(size - 1))]
        if not _works(s, partial(s.together, rows)):
            return rows
    return [(row, s.main) for row in ("a", *s.others(2))]


def _of_a(out: Outputs) -> Outputs:
    return {key: out[key] for key in sorted(out) if key[0] == "a"}


def _permuted(s: Subject, both: Outputs) -> bool:
    """Are the outputs those of the rows alone, but of other rows?"""
    moved = False
    for seen in {k[1] for k in both}:
        keys = [k for k in both if k[1] == seen]
        left = list(keys)
        for key in keys:
            want = s.base[key[0].partition("#")[0], seen]
            hit = next((k for k in left if s.equal({key: both[k]}, {key: want})), None)
            if hit is None:
                return False
            left.remove(hit)
            moved = moved or hit != key
    return moved


# ---- padding ---------------------------------------------------------------------------------------------------------


def _padding(s: Subject, bad: set[str]) -> Cause:
    d = s.driver
    assert isinstance(d, WholeDriver)
    calls = [Span(row, 0, n) for row in s.names[:2] for n in (s.main, s.short)]
    fills = [*d.fills, d.of("a")[:1], d.of(s.names[1])[1:2]]  # the latter also where only one is given
    if d.step.takes_lengths and all(
        _works(s, partial(s.call, call, extra=3, fill=fill, right=True)) for call in calls for fill in fills
    ):
        return RIGHT

    def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
        """Do both ways of padding give the same?"""
        pairs = [[_runs(partial(s.call, call, extra=3, **how)) for how in (one, other)] for call in calls]
        return all(x is not None and y is not None and s.equal(x, y) for x, y in pairs)

    if all(same({"fill": fills[0]}, {"fill": fill}) for fill in fills[1:]):
        return COUNTS if "padding" in bad else PAD
    ignored = d.step.takes_lengths and all(same({"fill": fill}, {"fill": fill, "full": True}) for fill in fills)
    return _saw(LEAKS, "It ignores `lengths`: if others are given, the output is the same." if ignored else "")
