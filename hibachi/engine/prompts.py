"""Conversion of prompts to the runner's form, and the stop and padding tokens of each kind of token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np

from hibachi.backend.array_backend import ArrayBackend, HostArray
from hibachi.backend.discover import backend_for
from hibachi.backend.nine import NineBackend
from hibachi.backend.protocol import BATCH_DIM
from hibachi.engine.admission import check_ids
from hibachi.engine.runners.nine import NineStops
from hibachi.engine.runners.stops import Stopper, as_token
from hibachi.engine.runners.tokentable import IDS, TokenKind, misfits
from hibachi.errors import ConfigError, InvalidRequest, shown, text_of
from hibachi.request import SamplingParams, StopRule, as_rule

MOST_KINDS = 64  # that are remembered


def kind_of_ids(codebooks: int | None) -> TokenKind:
    """The kind of tokens that the engine samples."""
    return IDS if codebooks is None else TokenKind((codebooks,), IDS.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """The engine's stop rule and padding for one kind of token. stop: for every request, or None. padding: see
    `Job.padding`.
    """

    stop: Any
    padding: Any


class Prompts(Protocol):
    """Converts prompts of requests. kind: the kind of all tokens, if it is fixed."""

    kind: TokenKind | None

    def taken(self, prompt: Any) -> tuple[Any, TokenKind, int]:
        """A copy of a prompt [n, *tok], n >= 1, where its runner wants it, its kind, and n. Raises InvalidRequest."""
        ...

    def more(self, given: Any, kind: TokenKind) -> tuple[Any, int]:
        """Tokens [m, *tok] of a request of this kind, m >= 1, made of one or several, where its runner wants them; and
        m. Raises InvalidRequest.
        """
        ...

    def fitted(self, kind: TokenKind) -> Fitted:
        """The engine's own tokens for this kind. Raises InvalidRequest if they do not fit it."""
        ...

    def stop(self, kind: TokenKind, stop: Any, params: SamplingParams | None) -> Any:
        """The engine's own rule, combined with the request's. Raises InvalidRequest."""
        ...


def dtype_of(given: Any, host: HostArray, backend: ArrayBackend) -> Any:
    """The dtype of numbers that a caller gave, as NumPy says it; of Python's floats and lists of them, what the library
    makes of these by default. host: the same on the host.
    """
    first = given
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    if host.dtype != np.float64 or type(first) not in (float, int, bool):
        return host.dtype
    name = str(backend.xp.asarray([0.5]).dtype).rpartition(".")[2]  # NumPy lacks some, such as bfloat16
    return np.dtype(name) if name in ("float32", "float16") else host.dtype


def check_tokens(host: HostArray, own: TokenKind | None, vocab: int | None, sizes: Sequence[int]) -> None:
    """Check that a prompt consists of tokens of this kind. Raises InvalidRequest.

    own: the kind of all tokens, if it is fixed. vocab: the number of token ids, if it is fixed. sizes: the same of each
    codebook.
    """
    if host.ndim == 0:
        raise InvalidRequest(
            f"A prompt must have the shape (sequence, *token), rank 1 or higher; got a scalar: {shown(host[()])}."
            f"{' Texts take a tokenizer: see hibachi.LLM.' if host.dtype.kind == 'U' else ''}"
        )
    if not host.shape[0]:
        raise InvalidRequest("A prompt must hold at least one token; got an empty one. Start it with a start token.")
    if host.dtype.kind not in "iufb":
        mend = _MENDS.get(host.dtype.kind, "Convert it first.")
        raise InvalidRequest(
            f"A prompt must hold numbers (integers, floats or booleans); got dtype {host.dtype}. {mend}"
        )
    if own is not None and (host.shape[1:] != own.shape or (host.dtype.kind in "iu") != (own.dtype.kind in "iu")):
        of = "token ids, integers of shape ()" if vocab else f"tokens of shape {own.shape} and {own.dtype}"
        if vocab and own.shape:
            of = f"token ids, integers of shape {own.shape}, one of each codebook"
        raise InvalidRequest(
            f"This engine takes prompts of {of}; got tokens of shape {host.shape[1:]} and {host.dtype}. A prompt "
            f"is one sequence, (sequence, *token), without a dimension for the batch: call `run` once for each."
        )
    if vocab is not None:
        check_ids(host, vocab, sizes)


_MENDS = dict.fromkeys("USO", "Tokenize it first.")
_MENDS["c"] = "Send real and imaginary parts as numbers of their own: z.view(float)."


class HostPrompts:
    """Converts arrays of any library, lists and numbers to arrays on the host.

    token: a token of the kind that all requests have, a number or an array (*tok); None means each request has its own
    kind. vocab_size: prompts are token ids below it; None means any numbers. sizes: ids of each codebook; () means a
    token is one id. stop: a rule for all requests.
    """

    kind: TokenKind | None

    def __init__(
        self,
        backend: ArrayBackend,
        *,
        vocab_size: int | None,
        token: Any,
        stop_token: Any,
        padding_token: Any,
        stop: Any = None,
        sizes: Sequence[int] = (),
    ) -> None:
        self._backend, self._vocab, self._own = backend, vocab_size, None if stop is None else as_rule(stop)
        self._sizes = sizes
        self._stop, self._padding = stop_token, padding_token
        self._fitted, self._dtypes = dict[TokenKind, Fitted](), dict[Any, Any]()
        self._stoppers: WeakValueDictionary[tuple[TokenKind, StopRule], Stopper] = WeakValueDictionary()
        self._of_ids: WeakValueDictionary[tuple[TokenKind, tuple[int, ...]], Stopper] = WeakValueDictionary()
        self.kind = None if vocab_size is None else kind_of_ids(len(sizes) or None)
        if vocab_size is None and token is not None:
            one = self.host(token)
            if one.dtype.kind not in "iufb":
                raise ConfigError(f"token must be one token, a number or an array of numbers; got {shown(token)}.")
            self.kind = TokenKind(one.shape, self._kept(dtype_of(token, one, backend)))
        if self.kind is not None:
            self.fitted(self.kind)

    def taken(self, prompt: Any) -> tuple[HostArray, TokenKind, int]:
        host = self.host(prompt)
        check_tokens(host, self.kind, self._vocab, self._sizes)
        own = self.kind
        if own is None:
            own = TokenKind(host.shape[1:], self._kept(dtype_of(prompt, host, self._backend)))
        return self._cast(host, own), own, len(host)

    def more(self, given: Any, kind: TokenKind) -> tuple[HostArray, int]:
        host = self.host(given)
        host = host[None] if host.ndim == len(kind.shape) else host
        try:
            check_tokens(host, kind, self._vocab, self._sizes)
            return self._cast(host, kind), len(host)
        except InvalidRequest as e:
            raise InvalidRequest(f"feed takes one token {kind.shape} or several, as a prompt has them. {e}") from None

    def _cast(self, host: HostArray, kind: TokenKind) -> HostArray:
        """A copy, as the caller's may change, in a kind's dtype. Raises InvalidRequest for what that cannot hold."""
        if self._vocab is not None:
            return host.astype(kind.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            tokens = host.astype(kind.dtype)
        for i, value in misfits(host, tokens):
            raise InvalidRequest(
                f"The tokens are {kind.dtype} here, which cannot hold {value}, token {i} of the prompt. Send "
                f"smaller numbers, or take a token= or a backend of a wider dtype."
            )
        return tokens

    def _kept(self, dtype: Any) -> Any:
        """The dtype that the library makes of this one; some have no 64-bit integers."""
        if (found := self._dtypes.get(dtype)) is None:
            try:
                found = self._dtypes[dtype] = self._backend.get(self._backend.put(np.zeros(1, dtype))).dtype
            except Exception as e:
                raise InvalidRequest(
                    f"Tokens must be of a dtype that {self._backend.name} has; got {dtype} ({text_of(e)})."
                ) from e
        return found

    def host(self, value: Any) -> HostArray:
        """Convert any array or list to an array on the host. Raises InvalidRequest."""
        if self._backend.owns(value):
            return self._backend.get(value)
        if hasattr(value, "dtype") and not isinstance(value, (np.ndarray, np.generic)):
            return backend_for(value).get(value)
        try:
            return np.asarray(value)
        except ValueError as e:
            raise InvalidRequest(
                f"A prompt must be an array or a list of equal rows; got a {type(value).__name__} whose rows differ. "
                f"If these are several prompts, call `run` once for each."
            ) from e

    def fitted(self, kind: TokenKind) -> Fitted:
        if (found := self._fitted.get(kind)) is not None:
            return found
        shape, dtype = kind
        padding = None if self._padding is None else as_token(self.host(self._padding), shape, dtype, "padding token")
        stop = None if self._stop is None and self._own is None else self._made(kind, StopRule())
        if len(self._fitted) >= MOST_KINDS:
            self._fitted.clear()
        found = self._fitted[kind] = Fitted(stop, padding)
        return found

    def stop(self, kind: TokenKind, stop: Any, params: SamplingParams | None) -> Stopper | None:
        """Equal rules are one object, to be judged at once."""
        ids = tuple(params.stop_token_ids) if params else ()
        if stop is None and not ids:
            own: Stopper | None = self.fitted(kind).stop
            return own
        if stop is None and (known := self._of_ids.get((kind, ids))) is not None:
            return known
        extra = as_rule(stop)
        rule = StopRule((*extra.tokens, *ids), extra.where, extra.atol)
        try:
            found = self._stoppers.get((kind, rule))
        except TypeError:  # its tokens are arrays, which have no hash
            return self._made(kind, rule)
        if found is None:
            found = self._stoppers[kind, rule] = self._made(kind, rule)
        if stop is None:
            self._of_ids[kind, ids] = found
        return found

    def _made(self, kind: TokenKind, rule: StopRule) -> Stopper:
        own, engines = () if self._stop is None else (self._stop,), self._own
        if engines is not None:
            where = None if rule.where is None else engines.where
            engines = StopRule([self.host(t) for t in engines.tokens], engines.where, engines.atol)
            if where is not None:
                rule, engines = replace(rule, where=self._either(rule.where, where)), replace(engines, where=None)
        return Stopper(StopRule([self.host(t) for t in (*rule.tokens, *own)], rule.where, rule.atol), *kind, engines)

    def _either(self, *wheres: Any) -> Any:
        """A predicate that is true where one of these is. Each gets its own copy, which it may write into."""

        def where(batch: Any) -> HostArray:
            said: HostArray = np.logical_or.reduce([self.host(each(self._backend.copy(batch))) for each in wheres])
            return said

        return where


class NinePrompts:
    """Takes the backend's own arrays and leaves them where they are."""

    kind: TokenKind | None

    def __init__(
        self, backend: NineBackend, *, token: Any, stop_token: Any, padding_token: Any, stop: Any = None
    ) -> None:
        self._ops, self._name, self._own = backend.ops, backend.name, None if stop is None else as_rule(stop)
        self._stop, self._padding = stop_token, padding_token
        self._fitted = dict[TokenKind, Fitted]()
        self.kind = None
        if token is not None:
            self.kind = TokenKind(self._shape(token, "token"), _dtype(token))
            self.fitted(self.kind)

    def taken(self, prompt: Any) -> tuple[Any, TokenKind, int]:
        shape = self._shape(prompt, "prompt")
        if not shape or not shape[0]:
            raise InvalidRequest(
                f"A prompt must have the shape (sequence, *token) with at least one token; got shape {shape}."
            )
        kind = TokenKind(shape[1:], _dtype(prompt))
        if self.kind is not None and kind != self.kind:
            raise InvalidRequest(
                f"This engine takes prompts of tokens of shape {self.kind.shape} and dtype {self.kind.dtype}; got "
                f"{kind.shape} and {kind.dtype}. A prompt is one sequence, without a dimension for the batch."
            )
        try:
            return self._ops.repeat(prompt, BATCH_DIM, 1), kind, shape[0]  # a copy: the caller's may change
        except Exception as e:
            raise InvalidRequest(f"A prompt must be an array of {self._name}; its copy failed: {text_of(e)}.") from e

    def more(self, given: Any, kind: TokenKind) -> tuple[Any, int]:
        shape = self._shape(given, "token")
        tokens = self._ops.unsqueeze(given, BATCH_DIM) if shape == kind.shape else given
        tokens, got, n = self.taken(tokens)
        if got != kind:
            raise InvalidRequest(
                f"feed takes one token {kind.shape} of {kind.dtype}, or several; got shape {shape} of {got.dtype}."
            )
        return tokens, n

    def given(self, item: Any) -> tuple[Any, TokenKind]:
        """A copy of an input of a feed-forward model, of any shape, and its kind. Raises InvalidRequest."""
        shape = self._shape(item, "input")
        try:
            batch = self._ops.repeat(self._ops.unsqueeze(item, BATCH_DIM), BATCH_DIM, 1)
            return self._ops.vectorize_dim(batch, BATCH_DIM)[0], TokenKind(shape, _dtype(item))
        except Exception as e:
            raise InvalidRequest(f"An input must be an array of {self._name}; its copy failed: {text_of(e)}.") from e

    def _shape(self, array: Any, what: str) -> tuple[int, ...]:
        if array is None or isinstance(array, (bool, int, float, complex, str, bytes, list, tuple, dict, set)):
            raise InvalidRequest(
                f"The {what} must be an array of {self._name}, as its backend has the nine operations only; got "
                f"{shown(array)}."
            )
        try:
            return tuple(int(n) for n in self._ops.shape(array))
        except Exception as e:
            raise InvalidRequest(
                f"The {what} must be an array of {self._name}; got {type(array).__module__}."
                f"{type(array).__qualname__} ({text_of(e)})."
            ) from e

    def fitted(self, kind: TokenKind) -> Fitted:
        if (found := self._fitted.get(kind)) is not None:
            return found
        padding = None if self._padding is None else self._one(self._padding, kind, "padding token")
        stop = None
        if self._stop is not None or self._own is not None:
            rule = self._exact(self._own or StopRule())
            given = (*rule.tokens, *(() if self._stop is None else (self._stop,)))
            stop = NineStops([self._one(token, kind, "stop token") for token in given], rule.where)
        if len(self._fitted) >= MOST_KINDS:
            self._fitted.clear()
        found = self._fitted[kind] = Fitted(stop, padding)
        return found

    def _one(self, token: Any, kind: TokenKind, what: str) -> Any:
        """A token as [1, *tok]. Raises InvalidRequest."""
        shape = self._shape(token, what)
        if shape not in (kind.shape, (1, *kind.shape)) or _dtype(token) != kind.dtype:
            raise InvalidRequest(
                f"The {what} must have the shape of one token, {kind.shape} or {(1, *kind.shape)}, and the dtype "
                f"{kind.dtype} of the prompt; got {shape} and {_dtype(token)}. Reshape or convert it, or look at the "
                f"dimensions of the prompt: (sequence, *token)."
            )
        return token if shape == (1, *kind.shape) else self._ops.unsqueeze(token, BATCH_DIM)

    def stop(self, kind: TokenKind, stop: Any, params: SamplingParams | None) -> NineStops | None:
        own: NineStops | None = self.fitted(kind).stop
        if stop is None:
            return own
        rule = self._exact(as_rule(stop))
        if rule.where is not None and own is not None and own.where is not None:
            raise InvalidRequest(
                f"The model has a stop predicate already, and {self._name} has the nine operations only, which join no "
                f"two. Pass tokens, or put both into one predicate."
            )
        tokens = [self._one(token, kind, "stop token") for token in rule.tokens]
        return NineStops([*tokens, *(own.tokens if own else ())], rule.where or (own.where if own else None))

    def _exact(self, rule: StopRule) -> StopRule:
        if rule.atol:
            raise InvalidRequest(
                f"atol takes an ArrayBackend, which can subtract; {self._name} has the nine operations only. Leave it "
                f"out, or pass a predicate."
            )
        return rule


def _dtype(array: Any) -> str:
    """By name; "" where arrays do not tell theirs."""
    return str(getattr(array, "dtype", ""))
