"""Types that every floor shares: sampling parameters, stop rules, terms, requests, finish reasons."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, Literal, TypeAlias, TypeVar

from hibachi.common.options import SAMPLED, check_options, spelled_fields
from hibachi.errors import InvalidCall, InvalidRequest, shown
from hibachi.structured import StructuredOutputs, as_structured

Pooling: TypeAlias = Literal["mean", "last", "cls"]
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Of a language model: a text, token ids, or {"prompt_embeds": array}."""


class Finish(StrEnum):
    """Why a stream ended. Compares equal to its value: `stream.finish_reason == "stop"`."""

    STOP = "stop"  # a stop token, a stop string or a stop predicate
    LENGTH = "length"  # the limit of new tokens, or the end of the context
    CANCELLED = "cancelled"  # the consumer closed or dropped its stream
    ERROR = "error"  # the request failed; iterating its stream raises the error
    CLOSED = "closed"  # the engine was closed first


def _check(ok: bool, name: str, expected: str, got: object) -> None:
    if not ok:
        raise InvalidRequest.at((name,), f" must be {expected}; got {shown(got)}.")


def _tuple(x: object) -> tuple[Any, ...]:
    """A tuple of the elements; () for None. A value without elements becomes one element, for the check that
    follows.
    """
    try:
        return () if x is None else tuple(x) if isinstance(x, Iterable) else (x,)
    except Exception:  # an array of rank 0, or a class of the caller's own
        return (x,)


def _is_int(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _as_int(x: Any) -> Any:
    try:
        return x if isinstance(x, bool) else operator.index(x)
    except Exception:  # no integer, for the check that follows
        return x


def _is_real(x: object) -> bool:
    if not isinstance(x, (int, float)) or isinstance(x, bool):
        return False
    try:
        return math.isfinite(x)
    except OverflowError:  # an integer beyond all floats
        return False


T = TypeVar("T")


def _soon_pickled(cls: type[T]) -> type[T]:
    """Make a frozen dataclass with slots pickle as the tuple of its fields, which is fast."""
    names = tuple(f.name for f in fields(cls))  # type: ignore[arg-type]  # a dataclass, as said
    values = operator.attrgetter(*names)

    def names_of(x: Any) -> tuple[str, ...]:
        return names if type(x) is cls else tuple(f.name for f in fields(x))  # a subclass may have others

    def state(self: T) -> Any:
        return values(self) if type(self) is cls else operator.attrgetter(*names_of(self))(self)

    def restore(self: T, state: Iterable[Any]) -> None:
        for name, value in zip(names_of(self), state, strict=True):
            object.__setattr__(self, name, value)

    for method, does in (("__getstate__", state), ("__setstate__", restore)):
        setattr(cls, method, does)
    return cls


# Larger numbers mean the same as these, and are clipped so that no counter, clock or float32 overflows.
MOST_INT = 2**31 - 1
MOST_FLOAT = 1e30  # its inverse is the least; logits times or over either are finite in float32
MOST_SECONDS = 100 * 365.25 * 24 * 3600.0  # a century
MOST_RUNS = 2**14  # sequences of one request
MOST_BEAMS = 512
MOST_PENALTY = 30  # for the length of a beam: of the longest, it is a finite number


@dataclass(frozen=True, slots=True)
class Filter:
    """A number of `SamplingParams` that changes how probable tokens are. fits: is it in the range that `expected` says?
    integer: expected is one. draws: it is of the draw, so that greedy requests ignore it, and codebooks may
    differ in it. clipped: to positive numbers whose inverse is finite in float32.
    """

    name: str
    fits: Callable[[Any], bool]
    expected: str
    integer: bool = False
    draws: bool = True
    clipped: bool = False


FILTERS: tuple[Filter, ...] = (
    Filter("temperature", lambda x: x >= 0, "a finite number >= 0 (0 is greedy)", clipped=True),
    Filter("top_k", lambda x: x >= -1, "an integer >= -1 (0 or -1: no limit)", integer=True),
    Filter("top_p", lambda x: 0 < x <= 1, "a number in (0, 1]"),
    Filter("min_p", lambda x: 0 <= x <= 1, "a number in [0, 1]"),
    Filter("typical_p", lambda x: 0 < x <= 1, "a number in (0, 1]"),
    Filter("repetition_penalty", lambda x: x > 0, "a finite number > 0 (1: none)", draws=False, clipped=True),
    Filter("presence_penalty", lambda x: -2 <= x <= 2, "a number in [-2, 2]", draws=False),
    Filter("frequency_penalty", lambda x: -2 <= x <= 2, "a number in [-2, 2]", draws=False),
)
DRAWN: tuple[str, ...] = tuple(f.name for f in FILTERS if f.draws)
"""Parameters of the draw, in the order in which `hibachi.engine.sampling.draw.How` has them."""
OF_CODEBOOKS: tuple[str, ...] = (*DRAWN, "logit_bias", "allowed_token_ids")
"""Parameters in which codebooks may differ."""


def _filters(p: SamplingParams) -> None:
    for f in FILTERS:
        x = getattr(p, f.name)
        _check((_is_int if f.integer else _is_real)(x) and f.fits(x), f.name, f.expected, x)
    for f in FILTERS:
        x = getattr(p, f.name)
        if f.integer:
            _clip_ints(p, f.name)
        elif f.clipped and x and not 1 / MOST_FLOAT <= x <= MOST_FLOAT:
            object.__setattr__(p, f.name, min(max(x, 1 / MOST_FLOAT), MOST_FLOAT))


def _seed(p: SamplingParams) -> None:
    seed = p.seed
    _check(seed is None or (_is_int(seed) and seed >= 0), "seed", "an integer >= 0 (or None)", seed)


def _lengths(p: SamplingParams) -> None:
    n, least = p.max_tokens, p.min_tokens
    _check(n is None or (_is_int(n) and n >= 1), "max_tokens", "an integer >= 1 (or None: no limit)", n)
    _check(_is_int(least) and least >= 0, "min_tokens", "an integer >= 0", least)
    _check(n is None or least <= n, "min_tokens", f"at most max_tokens, {n}", least)
    _clip_ints(p, "max_tokens", "min_tokens")


def _scores(p: SamplingParams) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        n = getattr(p, name)
        _check(n is None or (_is_int(n) and n >= 0), name, "an integer >= 0 (or None: none)", n)
    _clip_ints(p, "logprobs", "prompt_logprobs")


def _continuations(p: SamplingParams) -> None:
    _check(_is_int(p.n) and 1 <= p.n <= MOST_RUNS, "n", f"an integer from 1 to {MOST_RUNS}", p.n)
    best, expected = p.best_of, f"an integer from n, {p.n}, to {MOST_RUNS}"
    _check(best is None or (_is_int(best) and p.n <= best <= MOST_RUNS), "best_of", expected, best)


def _flags(p: SamplingParams) -> None:
    _check(
        p.include_stop is None or isinstance(p.include_stop, bool),
        "include_stop",
        "True, False or None",
        p.include_stop,
    )
    for name in ("ignore_eos", "skip_special_tokens"):
        _check(isinstance(getattr(p, name), bool), name, "True or False", getattr(p, name))


def _texts(p: SamplingParams) -> None:
    for name in ("stop", "bad_words"):
        given = getattr(p, name)
        texts = (given,) if isinstance(given, str) else _tuple(given)
        _check(all(isinstance(s, str) and s for s in texts), name, "non-empty strings", given)
        object.__setattr__(p, name, texts)


def _stop_ids(p: SamplingParams) -> None:
    _set_ids(p, "stop_token_ids")


def _allowed_ids(p: SamplingParams) -> None:
    if p.allowed_token_ids is not None:
        _set_ids(p, "allowed_token_ids")
        given = p.allowed_token_ids
        _check(len(given) > 0, "allowed_token_ids", "at least one token id (or None: all)", given)


def _bias(p: SamplingParams) -> None:
    given = p.logit_bias
    pairs = _tuple(given.items() if isinstance(given, Mapping) else given)
    _check(all(isinstance(x, tuple) and len(x) == 2 for x in pairs), "logit_bias", "{token id: number}", given)
    pairs = tuple((_as_int(i), x) for i, x in pairs)
    _check(all(_is_int(i) and i >= 0 for i, _ in pairs), "logit_bias", "for token ids, integers >= 0", given)
    fine = all(_is_real(x) and -100 <= x <= 100 for _, x in pairs)
    _check(fine, "logit_bias", "of numbers in [-100, 100]", given)
    object.__setattr__(p, "logit_bias", tuple(dict(pairs).items()))


def _processors(p: SamplingParams) -> None:
    processors = _tuple(p.logits_processors)
    _check(all(map(callable, processors)), "logits_processors", "callables", p.logits_processors)
    object.__setattr__(p, "logits_processors", processors)


def _codebooks(p: SamplingParams) -> None:
    given = p.codebooks
    found = []
    for i, each in enumerate(_tuple(given)):
        try:
            changes = dict(each)
        except Exception:  # no mapping, or one of the caller's own class
            changes = None
        fine = changes is not None and all(name in OF_CODEBOOKS for name in changes)
        _check(fine, "codebooks", f"one mapping for each codebook, with some of {', '.join(OF_CODEBOOKS)}", given)
        assert changes is not None
        try:
            bare = SamplingParams(**changes)
        except InvalidRequest as e:
            raise InvalidRequest.at(("codebooks",), f" number {i}: ", *e.words) from None
        found.append(tuple((name, getattr(bare, name)) for name in changes))
    object.__setattr__(p, "codebooks", tuple(found))


def _speculation(p: SamplingParams) -> None:
    n, expected = p.num_speculative_tokens, "an integer >= 0 (or None: as many as the engine's)"
    _check(n is None or (_is_int(n) and n >= 0), "num_speculative_tokens", expected, n)
    _clip_ints(p, "num_speculative_tokens")


def _structured(p: SamplingParams) -> None:
    object.__setattr__(p, "structured_outputs", as_structured(p.structured_outputs))


def _beams(p: SamplingParams) -> None:
    given = p.beams
    if isinstance(given, Mapping):
        check_options("Beams", given, (f.name for f in fields(Beams)), InvalidRequest)
        object.__setattr__(p, "beams", Beams(**given))
    beams = p.beams
    _check(beams is None or isinstance(beams, Beams), "beams", "a hibachi.Beams, or its fields by name", given)
    if not isinstance(beams, Beams):
        return
    width = p.n if beams.width is None else beams.width
    _check(p.n <= width <= MOST_BEAMS, "n", f"from 1 to the width of the beams, {min(width, MOST_BEAMS)}", p.n)
    for name in ("best_of", "logprobs"):
        _check(getattr(p, name) is None, name, "None where beams are searched", getattr(p, name))


def _clip_ints(p: SamplingParams, *names: str) -> None:
    for name in names:
        if (n := getattr(p, name)) is not None and n > MOST_INT:
            object.__setattr__(p, name, MOST_INT)


def _set_ids(p: SamplingParams, name: str) -> None:
    given = getattr(p, name)
    ids = tuple(map(_as_int, _tuple(given)))
    _check(all(_is_int(i) and i >= 0 for i in ids), name, "integers >= 0", given)
    object.__setattr__(p, name, ids)


# Functions that check and normalize fields of SamplingParams, in this order.
_CHECKS: dict[Callable[[SamplingParams], None], tuple[str, ...]] = {
    _filters: tuple(f.name for f in FILTERS),
    _seed: ("seed",),
    _lengths: ("max_tokens", "min_tokens"),
    _scores: ("logprobs", "prompt_logprobs"),
    _continuations: ("n", "best_of"),
    _flags: ("ignore_eos", "include_stop", "skip_special_tokens"),
    _texts: ("stop", "bad_words"),
    _stop_ids: ("stop_token_ids",),
    _allowed_ids: ("allowed_token_ids",),
    _bias: ("logit_bias",),
    _processors: ("logits_processors",),
    _codebooks: ("codebooks",),
    _structured: ("structured_outputs",),
    _speculation: ("num_speculative_tokens",),
    _beams: ("beams",),
}
SAMPLED.update(name for names in _CHECKS.values() for name in names)
_CHECK_OF = {name: check for check, names in _CHECKS.items() for name in names}
_values = operator.attrgetter(*_CHECK_OF)


@spelled_fields
@_soon_pickled
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens and when to end. Definitions and defaults are vLLM's, except max_tokens (None; vLLM: 16).

    The fields act in this order. `logprobs` are those of the raw logits. Then: structured_outputs, allowed_token_ids;
    bad_words, logit_bias, min_tokens; logits_processors; repetition, presence and frequency penalties; temperature;
    min_p; top_k; top_p; typical_p; the draw.

    temperature: 0 is greedy (argmax); otherwise logits are divided by it.
    top_k: keep the k most likely tokens (0 or -1 means all).
    top_p: keep the smallest set of most likely tokens with this much probability mass.
    min_p: keep tokens with at least this share of the most likely token's probability (0 means all).
    typical_p: keep the smallest set with this much mass of the tokens whose information is nearest to the entropy
    (Meister et al. 2023; 1 means all). Each filter acts on the tokens that the filters before it kept; tokens tied with
    the last one kept are kept.
    repetition_penalty: logits of tokens in prompt or output are divided by it if positive, else multiplied (1 means
    none).
    presence_penalty: -2 to 2; subtracted once from the logit of every token in the output.
    frequency_penalty: -2 to 2; subtracted once for each time that the token is in the output.
    logit_bias: {token id: number from -100 to 100, added to its logit}; kept as a tuple of pairs.
    allowed_token_ids: only these tokens can be drawn (None means all).
    bad_words: texts that the output may not contain, at the beginning of a word or elsewhere (`hibachi.LLM` only). The
    token that would complete one is masked; the same text spelled with other tokens can still come.
    logits_processors: functions (ids of the output so far, native float32 logits [V]) -> logits [V].

    seed: the same seed, prompt and logits give the same tokens, whatever shares the batch; None means a fresh seed.
    max_tokens: limit of new tokens; None means up to the end of the context.
    min_tokens: until this many tokens are generated, stop tokens are masked and other stop conditions ignored.
    stop: strings that end the text (`hibachi.LLM` only). stop_token_ids: token ids that end the output.
    include_stop: deliver the stop token, or the stop string in a text. None means streams of tokens (`run`) deliver it
    and texts leave it out.
    ignore_eos: do not end at the model's own end-of-sequence token.
    skip_special_tokens: False means the text shows generated special tokens (`hibachi.LLM` only).

    n: number of continuations, 1 to 16384 (`hibachi.LLM` only).
    best_of: generate this many continuations and keep the n with the largest log-probability, best first; None means n
    (`hibachi.LLM` only). Continuation 0 has the seed, the others have seeds derived from it.
    logprobs: with each token, the log-probabilities (natural logarithm) of the N most likely tokens and of the token
    itself.
    prompt_logprobs: the same for each token of the prompt but the first (models with a cache only).

    codebooks: for tokens of several codebooks, one mapping for each: those of temperature, top_k, top_p, min_p and
    typical_p that differ there, and its logit_bias and allowed_token_ids. () means all codebooks are drawn alike. Kept
    as a tuple of tuples of pairs.

    structured_outputs: the form that the output must have, a `StructuredOutputs` or its fields by name: a JSON schema,
    any JSON object, a regular expression, a choice, a grammar. Only tokens that keep to it are drawn, and the end
    token only where it may end. A form that is complete ends the request, whatever min_tokens and ignore_eos say. At
    max_tokens the output is cut in the midst of it.

    beams: search beams in place of draws, a `Beams` or its fields by name; n is how many of them are returned, best
    first. Temperature, filters and seed are of no effect. Masks, biases, penalties and logits_processors act on
    log-probabilities then; a processor of one's own may so add scores of one's own.

    num_speculative_tokens: the most tokens that are proposed for this request in a step, where its engine does so; 0
    means none, None and larger numbers mean as many as for others. It decides about time only.

    Numbers beyond a useful range are clipped without changing their meaning: integers to 2^31 - 1, temperature and
    repetition_penalty to between 1e-30 and 1e30. Raises InvalidRequest for a value out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = ()
    allowed_token_ids: Sequence[int] | None = None
    bad_words: str | Sequence[str] = ()
    logits_processors: Sequence[Callable[[list[int], Any], Any]] = ()
    min_tokens: int = 0
    include_stop: bool | None = None
    n: int = 1
    best_of: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    codebooks: Sequence[Mapping[str, Any]] = ()
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    num_speculative_tokens: int | None = None
    beams: Beams | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for check in _CHECKS:
            check(self)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def of_codebook(self, i: int) -> SamplingParams:
        """The parameters of one codebook."""
        return self.with_(**dict(self.codebooks[i])) if self.codebooks else self

    def for_one(self, n: int) -> SamplingParams:
        """The parameters of each of n continuations."""
        beams = self.beams
        if isinstance(beams, Beams):
            beams = replace(beams, width=n if beams.width is None else beams.width)
        return self.with_(n=1, best_of=None, beams=beams)

    @property
    def runs(self) -> int:
        """Number of sequences that such a request takes: best_of, else n."""
        return self.best_of or self.n

    def with_(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed. Raises InvalidRequest for an unknown field, or a value out of its range.

        Only the changed fields are checked, so giving each of a million rows its own seed costs little.
        """
        own = type(self) is SamplingParams  # else a subclass, which may have fields of its own
        known = _CHECK_OF.keys() if own else {f.name for f in fields(self)}
        check_options("SamplingParams", changes, known, InvalidCall)
        if not own:
            return replace(self, **changes)
        copy = object.__new__(SamplingParams)
        for name, value in zip(_CHECK_OF, _values(self), strict=True):
            object.__setattr__(copy, name, value)
        for name, value in changes.items():
            object.__setattr__(copy, name, value)
        due = {_CHECK_OF[name] for name in changes}
        for check in _CHECKS:
            if check in due:
                check(copy)
        return copy


@spelled_fields
@_soon_pickled
@dataclass(frozen=True, slots=True)
class Terms:
    """Terms on which a request is served; the engine's scheduling policy interprets them.

    priority: smaller is served first.
    tenant: the owner of the request, for a policy that is fair to tenants.
    timeout: seconds from the call within which the request must end. queue_timeout: seconds within which it must start.
    Otherwise its stream raises DeadlineExceeded, after the tokens that have come. None means no limit.
    cache_salt: only requests with the same salt share cached prefixes, so that no tenant can find out by timing what
    others asked.

    Times above a century count as a century. Raises InvalidRequest for a value out of its range.
    """

    priority: int = 0
    tenant: str = ""
    timeout: float | None = None
    queue_timeout: float | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        fine = _is_int(self.priority) and -(2**63) <= self.priority < 2**63
        _check(fine, "priority", "an integer from -2^63 to 2^63 - 1 (smaller is served first)", self.priority)
        _check(isinstance(self.tenant, str), "tenant", "a string", self.tenant)
        for name in ("timeout", "queue_timeout"):
            given = getattr(self, name)
            _check(given is None or (_is_real(given) and given > 0), name, "seconds > 0 (or None: any time)", given)
            if given is not None and given > MOST_SECONDS:
                object.__setattr__(self, name, MOST_SECONDS)
        salt = self.cache_salt
        _check(salt is None or isinstance(salt, str), "cache_salt", "a string (or None)", salt)


PLAIN: Terms = Terms()


def as_terms(value: object) -> Terms:
    """The terms that a caller passed; None means the default. Raises InvalidRequest for anything else."""
    if value is None:
        return PLAIN
    if not isinstance(value, Terms):
        raise InvalidRequest(f"terms must be a hibachi.Terms (or None); got {shown(value)}. Write Terms(priority=...).")
    return value


def as_params(value: object, default: SamplingParams) -> SamplingParams:
    """The parameters that a caller passed; None means the default. Raises InvalidRequest for anything else."""
    if value is None:
        return default
    if not isinstance(value, SamplingParams):
        expected = "a SamplingParams (or None)"
        raise InvalidRequest(f"params must be {expected}; got {shown(value)}. Write SamplingParams(...).")
    return value


@spelled_fields
@dataclass(frozen=True, slots=True)
class StopRule:
    """Conditions that end a request, besides its limit of new tokens.

    tokens: stop tokens, each of the token shape `tok` (an int for scalar tokens). A new token that equals one of them
    in all elements ends the request. atol: for tokens of floats, how far an element may be off.
    where: a predicate, called once a step with the native array (B, *tok) of the new tokens of all requests that share
    it. It returns a bool array (B,) of the library, or anything that NumPy reads as one.
    """

    tokens: Sequence[Any] = ()
    where: Callable[[Any], Any] | None = None
    atol: float = 0.0

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "tokens", tuple(self.tokens))
        except BaseException as e:
            expected = "a sequence of tokens, such as [3, 4]"
            raise InvalidRequest.at(("tokens",), f" must be {expected}; got {type(self.tokens).__qualname__}.") from e
        _check(self.where is None or callable(self.where), "where", "a callable (or None)", self.where)
        _check(_is_real(self.atol) and self.atol >= 0, "atol", "a finite number >= 0", self.atol)


def as_rule(stop: Any) -> StopRule:
    """Convert what `run(stop_rule=)` takes to a `StopRule`: a rule, a predicate, a token or a list of tokens. Raises
    InvalidRequest.
    """
    if stop is None:
        return StopRule()
    if isinstance(stop, StopRule):
        return stop
    if callable(stop):
        return StopRule(where=stop)
    return StopRule(tuple(stop) if isinstance(stop, (list, tuple, set, frozenset)) else (stop,))


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """The start of a request that another engine computed: the keys and values of its prompt, and its first token.

    kv: for each layer (keys, values), floats [kv_heads, n, dim] for the n tokens of the prompt, as `model.step` gives
    them to `attend`.
    token: the first token of the output; it counts as output and is not delivered.
    known: the prompt's ids are those that the keys and values belong to. False means they are placeholders, and nothing
    is shared with other requests.
    """

    kv: Any
    token: int
    known: bool = False


@spelled_fields
@dataclass(frozen=True, slots=True)
class Beams:
    """How beams are searched: the likeliest sequences, in place of draws. Definitions are those of transformers.

    width: sequences that are kept at a time, 1 to 512; None means `SamplingParams.n`, of which the best are returned.
    length_penalty: a sequence of k new tokens has the sum of its log-probabilities over k ** length_penalty as its
    score.
    early_stopping: True ends as soon as `width` sequences are complete; False when no other is likely to become better;
    "never" when none can.

    Of equal scores the lower token id comes first. Raises InvalidRequest for a value out of its range.
    """

    width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        fine = self.width is None or (_is_int(self.width) and 1 <= self.width <= MOST_BEAMS)
        _check(fine, "width", f"an integer from 1 to {MOST_BEAMS} (or None: n)", self.width)
        fine = _is_real(self.length_penalty) and abs(self.length_penalty) <= MOST_PENALTY
        _check(fine, "length_penalty", f"a number from -{MOST_PENALTY} to {MOST_PENALTY}", self.length_penalty)
        fine = self.early_stopping in (True, False, "never") and isinstance(self.early_stopping, (bool, str))
        _check(fine, "early_stopping", "True, False or 'never'", self.early_stopping)


@spelled_fields
@dataclass(frozen=True, slots=True, eq=False)
class Guidance:
    """A second row, whose logits are mixed into those of a request before each draw; both get the token that is drawn.

    scale: the mixed logits are other + scale * (own - other), which is classifier-free guidance (Ho and Salimans 2022;
    of language models, Sanchez et al. 2023). Between 0 and 1 it draws towards the other row, above 1 away from it.
    prompt, prompt_embeds: of the second row; None in both means those of the request. inputs: what the model declares
    as its `inputs`, for the second row; None means those of the request.
    mix: a function of one's own in place of the formula: of the rows' raw logits, native float32 [1, V] each (or
    [1, codebooks, V]), the request's own first, to logits of this shape. Only with it there may be several rows.

    Masks, penalties, temperature and filters act on the mixed logits, and log-probabilities are of these. Raises
    InvalidRequest for a value out of its range.
    """

    scale: float = 1.0
    prompt: Any = None
    prompt_embeds: Any = None
    inputs: Mapping[str, Any] | None = None
    mix: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        _check(
            _is_real(self.scale) and abs(self.scale) <= MOST_FLOAT, "scale", "a number from -1e30 to 1e30", self.scale
        )
        _check(self.mix is None or callable(self.mix), "mix", "a function (or None)", self.mix)


@_soon_pickled
@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request to an engine for one stream. It can be sent to another thread, and through the pipe to an engine in
    another process.

    prompt: (sequence, *token), a list or an array; None where embeds is given. embeds: floats (sequence, hidden).
    params: how to sample; None means defaults, or a model that returns tokens.
    max_tokens: takes precedence over params.max_tokens.
    stop_rule, include_stop: as for `AutoregressiveBatchInference.run`.
    bad_words: sequences of token ids that may not occur in the output. banned_first: ids that may not begin it.
    pooling: a vector is wanted in place of tokens, pooled in this way from the model's hidden states. unit: scale it to
    length 1.
    begun: the request was begun elsewhere.
    inputs: arrays that stay with the request, by the names that the model declares.
    grammar: a `hibachi.engine.guide.protocol.Grammar`, where `params.structured_outputs` was checked already.
    kept: a list that receives, before the stream ends, (keys, values) of each layer, on the host, float32 [kv_heads,
    tokens, dim], for all tokens that were computed: all but the last.
    allowed: a `hibachi.Trie`, one of whose paths the output must be.
    fed: it waits for its caller after each token, see `AutoregressiveBatchInference.run`.
    prediction: token ids of what the output may be, in a list or an array [m]: proposed where the engine speculates,
    and where the output follows them. Those beyond the context are left out.
    """

    prompt: Any
    params: SamplingParams | None = None
    max_tokens: int | None = None
    stop_rule: Any = None
    include_stop: bool | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    banned_first: tuple[int, ...] = ()
    embeds: Any = None
    terms: Terms = Terms()
    pooling: Pooling | None = None
    unit: bool = False
    begun: Begun | None = None
    kept: list[Any] | None = None
    inputs: Mapping[str, Any] | None = None
    grammar: Any = None
    allowed: Any = None
    fed: bool = False
    prediction: Any = None
