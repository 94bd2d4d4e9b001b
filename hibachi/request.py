"""The words that every floor shares: sampling parameters, when to stop, why a request ended."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, Literal, TypeAlias, TypeVar

from hibachi.errors import InvalidRequest, shown

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
        raise InvalidRequest(f"{name} must be {expected}; got {shown(got)}.")


def _tuple(x: object) -> tuple[Any, ...]:
    """Its elements; none for None. What has no elements is one, for the check that follows."""
    try:
        return () if x is None else tuple(x) if isinstance(x, Iterable) else (x,)
    except TypeError:  # an array of rank 0
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
    """Of a frozen dataclass with slots: it crosses a pipe as the tuple of its fields, which takes little time."""
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


def _filters(p: SamplingParams) -> None:
    t, k = p.temperature, p.top_k
    _check(_is_real(t) and t >= 0, "temperature", "a finite number >= 0 (0 is greedy)", t)
    _check(_is_int(k) and k >= -1, "top_k", "an integer >= -1 (0 or -1: no limit)", k)
    _check(_is_real(p.top_p) and 0 < p.top_p <= 1, "top_p", "a number in (0, 1]", p.top_p)
    _check(_is_real(p.min_p) and 0 <= p.min_p <= 1, "min_p", "a number in [0, 1]", p.min_p)
    _check(_is_real(p.typical_p) and 0 < p.typical_p <= 1, "typical_p", "a number in (0, 1]", p.typical_p)
    x = p.repetition_penalty
    _check(_is_real(x) and x > 0, "repetition_penalty", "a finite number > 0 (1: none)", x)
    for name in ("presence_penalty", "frequency_penalty"):
        x = getattr(p, name)
        _check(_is_real(x) and -2 <= x <= 2, name, "a number in [-2, 2]", x)
    _clip_ints(p, "top_k")
    for name in ("temperature", "repetition_penalty"):
        x = getattr(p, name)
        if x and not 1 / MOST_FLOAT <= x <= MOST_FLOAT:
            object.__setattr__(p, name, min(max(x, 1 / MOST_FLOAT), MOST_FLOAT))


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


def _clip_ints(p: SamplingParams, *names: str) -> None:
    for name in names:
        if (n := getattr(p, name)) is not None and n > MOST_INT:
            object.__setattr__(p, name, MOST_INT)


def _set_ids(p: SamplingParams, name: str) -> None:
    given = getattr(p, name)
    ids = tuple(map(_as_int, _tuple(given)))
    _check(all(_is_int(i) and i >= 0 for i in ids), name, "integers >= 0", given)
    object.__setattr__(p, name, ids)


# What checks which fields of SamplingParams, and brings them into their form; in this order.
_FILTERS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty")
_CHECKS: dict[Callable[[SamplingParams], None], tuple[str, ...]] = {
    _filters: (*_FILTERS, "frequency_penalty"),
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
}
_CHECK_OF = {name: check for check, names in _CHECKS.items() for name in names}
_values = operator.attrgetter(*_CHECK_OF)


@_soon_pickled
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens from logits and when to end; definitions and defaults are vLLM's.

    They act in this order. `logprobs` are those of the raw logits. Then: allowed_token_ids; bad_words, logit_bias,
    min_tokens; logits_processors; repetition, presence and frequency penalties; temperature; min_p; top_k; top_p;
    typical_p; the draw.

    temperature: 0 is greedy (argmax); otherwise logits are divided by it.
    top_k: keep the k most likely tokens (0 or -1: all). top_p: keep the smallest set with this much probability mass.
    min_p: keep tokens with this share of the most likely one's probability (0: all). typical_p: keep the smallest set
    with this much mass of those whose information is nearest to the entropy (Meister et al. 2023; 1: all). Each filter
    counts among what those before it left; ties with the last token kept are kept.
    repetition_penalty: logits of tokens in prompt or output are divided by it if positive, else multiplied (1: none).
    presence_penalty: taken from the logit of every token in the output, once; frequency_penalty: for each time.
    logit_bias: {token id: what is added to its logit}; kept as a tuple of pairs. allowed_token_ids: only these may come
    (None: all). bad_words: texts that the output may not contain, at the beginning of a word or elsewhere
    (`hibachi.LLM` only): the token that would complete one cannot come; another spelling in tokens can.
    logits_processors: functions (ids of the output so far, native float32 logits [V]) -> logits [V].

    seed: the same seed, prompt and logits give the same tokens, whoever shares the batch; None draws a fresh seed.
    max_tokens: limit of new tokens; None: up to the end of the context. min_tokens: before so many, no stop token can
    come, and nothing else that stops counts.
    stop: strings that end the text and are not part of it (`hibachi.LLM` only). stop_token_ids: token ids that end it.
    include_stop: deliver what ended it, the token, or the string in a text; None: streams of tokens (`run`) deliver it,
    texts leave it out. ignore_eos: do not end at the
    model's own end-of-sequence token. skip_special_tokens: False: the text shows special tokens among those that came
    (`hibachi.LLM` only).

    n: how many continuations. best_of: run so many, and keep the n with the largest log-probability, best first (None:
    n). Continuation 0 has the seed, the others have seeds made from it. (Both `hibachi.LLM` only.)
    logprobs: with each token, the log-probabilities of the N most likely tokens and of the token itself; natural
    logarithm. prompt_logprobs: the same for each token of the prompt but the first (models with a cache only).

    A number so large or small that it means the same as a smaller or larger one is clipped: integers to 2^31 - 1,
    temperature and repetition_penalty to between 1e-30 and 1e30. Raises InvalidRequest for a value out of its range.
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

    def __post_init__(self) -> None:
        for check in _CHECKS:
            check(self)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def runs(self) -> int:
        """How many sequences such a request takes: best_of, else n."""
        return self.best_of or self.n

    def with_(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed. Raises InvalidRequest for an unknown field, or a value out of its range.

        Only what changes is checked, so that a seed of its own for each of a million rows costs little.
        """
        own = type(self) is SamplingParams  # else a subclass, which may have fields of its own
        known = _CHECK_OF.keys() if own else {f.name for f in fields(self)}
        if not changes.keys() <= known:
            raise InvalidRequest(f"SamplingParams has no field {', '.join(sorted(changes.keys() - known))}.")
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


@_soon_pickled
@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms a request is served; the engine's policy decides what they count.

    priority: smaller is served first. tenant: whose request it is, for a policy that is fair to tenants.
    timeout: seconds from the call within which it must have ended, queue_timeout: within which it must have started;
    otherwise its stream raises DeadlineExceeded, after the tokens that have come. None: any time.
    cache_salt: only requests with the same salt share cached prefixes, so that nobody can find out by timing what
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
    """The terms that a caller passed; None: the default. Raises InvalidRequest for anything else."""
    if value is None:
        return PLAIN
    if not isinstance(value, Terms):
        raise InvalidRequest(f"terms must be a hibachi.Terms (or None); got {shown(value)}. Write Terms(priority=...).")
    return value


def as_params(value: object, default: SamplingParams) -> SamplingParams:
    """The parameters that a caller passed; None: the default. Raises InvalidRequest for anything else."""
    if value is None:
        return default
    if not isinstance(value, SamplingParams):
        expected = "a SamplingParams (or None)"
        raise InvalidRequest(f"params must be {expected}; got {shown(value)}. Write SamplingParams(...).")
    return value


@dataclass(frozen=True, slots=True)
class StopRule:
    """When a request ends, other than by its limit of new tokens.

    tokens: stop tokens, each of the token shape `tok` (an int for scalar tokens); one of them, equal in all elements,
    ends the request. atol: for tokens of floats, how far an element may be off.
    where: called once a step with the native array (B, *tok) of the new tokens of all requests that share this
    predicate; returns a bool array (B,) of the library, or anything NumPy reads as one.
    """

    tokens: Sequence[Any] = ()
    where: Callable[[Any], Any] | None = None
    atol: float = 0.0

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "tokens", tuple(self.tokens))
        except BaseException as e:
            expected = "a sequence of tokens, such as [3, 4]"
            raise InvalidRequest(f"tokens must be {expected}; got {type(self.tokens).__qualname__}.") from e
        _check(self.where is None or callable(self.where), "where", "a callable (or None)", self.where)
        _check(_is_real(self.atol) and self.atol >= 0, "atol", "a finite number >= 0", self.atol)


def as_rule(stop: Any) -> StopRule:
    """What `run(stop=)` takes, as a rule: one, a predicate, a token or a list of them. Raises InvalidRequest."""
    if stop is None:
        return StopRule()
    if isinstance(stop, StopRule):
        return stop
    if callable(stop):
        return StopRule(where=stop)
    return StopRule(tuple(stop) if isinstance(stop, (list, tuple, set, frozenset)) else (stop,))


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """What a request brings that was begun elsewhere: the keys and values of its prompt, and its first token.

    kv: for each layer (keys, values), floats [kv_heads, n, dim] for the n tokens of the prompt, as `model.step` gives
    them to `attend`. token: the first of the output; it counts as output and is not delivered. known: the prompt's ids
    are those that keys and values belong to; False: they only hold places, and nothing is shared with others.
    """

    kv: Any
    token: int
    known: bool = False


@_soon_pickled
@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What an engine is asked for: one stream. It crosses threads, and the pipe to an engine in another process.

    prompt: (sequence, *token), a list or an array; None where embeds is given, floats (sequence, hidden).
    params: how to sample; None: plain sampling, or a model that returns tokens. max_tokens: before
    params.max_tokens. stop_rule, include_stop: as for `AutoregressiveBatchInference.run`. bad_words: token ids that may
    not come one after another. pooling: a vector is wanted in the place of tokens, made so of the model's hidden
    states; unit: of length 1. begun: it was begun elsewhere. kept: a list that gets, before the stream ends, (keys,
    values) for each layer, on the host, float32 [kv_heads, tokens, dim] of all tokens that were computed: all but the
    last.
    """

    prompt: Any
    params: SamplingParams | None = None
    max_tokens: int | None = None
    stop_rule: Any = None
    include_stop: bool | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    embeds: Any = None
    terms: Terms = Terms()
    pooling: Pooling | None = None
    unit: bool = False
    begun: Begun | None = None
    kept: list[Any] | None = None
