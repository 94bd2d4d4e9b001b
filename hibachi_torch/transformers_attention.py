"""The attention of an unmodified `transformers` model, led to our paged cache.

Its models look their attention function up by the name in their config, and hand it queries, keys and values. So two
functions are registered under names of ours. The first only looks: it runs once on a short prompt, and tells which
calls a forward pass makes, what they need and what their masks hide. The second is the real one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from hibachi.backend.array_backend import ArrayBackend, LayerCache
from hibachi.backend.layout import Paged, StepInputs
from hibachi.common.installed import need

PAGED, LOOK = "hibachi", "hibachi_look"


class CannotRun(Exception):
    """Why a model cannot run here: a clause, without a stop."""


@dataclass(frozen=True, slots=True)
class Sight:
    """Handed to the model in place of a mask. window: positions that a query sees, its own among them; None means
    all.
    """

    window: int | None
    fault: str | None = None  # why it is none of ours


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of the attention function in a forward pass."""

    module: Any
    window: int | None
    memory: Paged


# ---- looking -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Look:
    longest: int  # positions that will ever be used
    calls: list[AttentionCall]


_look: ContextVar[_Look] = ContextVar("hibachi_look")


@contextmanager
def looking(longest: int) -> Iterator[list[AttentionCall]]:
    """Within, forward passes of a model under the name LOOK fill the list. Nothing is attended to: outputs are zero."""
    calls: list[AttentionCall] = []
    token = _look.set(_Look(longest, calls))
    try:
        yield calls
    finally:
        _look.reset(token)


def _look_attend(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
) -> tuple[Any, None]:
    seen = attention_mask
    if not isinstance(seen, Sight):
        raise CannotRun("a layer attends without a mask" if seen is None else "it makes its attention masks by itself")
    if seen.fault is not None:
        raise CannotRun(seen.fault)
    q, k, v = _packed(query, key, value)
    _settings(options, q.shape[1])
    memory = Paged(k.shape[1], k.shape[2], v.shape[2], dtype=str(k.dtype).removeprefix("torch."))
    _look.get().calls.append(AttentionCall(module, seen.window, memory))
    return q.new_zeros(1, *q.shape[:2], v.shape[2]), None


def _look_mask(*_: Any, mask_function: Callable[..., Any] | None = None, **options: Any) -> Sight:
    """A mask as a function of (batch, head, query, key) positions: causal, causal with a window, or not ours?"""
    if mask_function is None:
        return Sight(None, "its masks are made in a way that this version does not know")
    padding = options.get("attention_mask")
    if padding is not None and not bool(padding.all()):
        return Sight(None, "it hides tokens as padding")
    longest = _look.get().longest
    key = torch.arange(longest + 1, device=options.get("device", "cpu"))
    zero = torch.zeros((), dtype=key.dtype, device=key.device)

    def seen(query: int) -> Any:
        return mask_function(zero, zero, key.new_tensor([query]), key).expand(key.shape)

    try:
        reach = int(seen(longest - 1).sum())
        window = None if reach == longest else reach
        some = {0, 1, 2, 3, 5, 7, reach - 1, reach, reach + 1, longest // 2, longest // 3, longest - 2, longest - 1}
        for query in some:
            if 0 <= query < longest:
                causal = (key <= query) & (key > query - (window or longest))
                if not torch.equal(seen(query), causal):
                    return Sight(None, f"over {longest} positions its attention mask is not causal, nor with a window")
    except Exception as e:
        return Sight(None, f"its attention mask depends on more than positions ({type(e).__name__}: {e})")
    return Sight(window)


# ---- running -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Step:
    backend: ArrayBackend
    calls: list[AttentionCall]
    cache: list[LayerCache]
    x: StepInputs[Any]
    at: int = 0  # calls made so far


_step: ContextVar[_Step] = ContextVar("hibachi_step")  # a thread has its own: models may run side by side


@contextmanager
def running(
    backend: ArrayBackend, calls: list[AttentionCall], cache: list[LayerCache], x: StepInputs[Any]
) -> Iterator[list[LayerCache]]:
    """Within, one forward pass of a model under the name PAGED attends through `cache`; yields the new cache."""
    step = _Step(backend, calls, list(cache), x)
    token = _step.set(step)
    try:
        yield step.cache
    finally:
        _step.reset(token)
    if step.at != len(calls):
        raise CannotRun(f"a forward pass made {step.at} calls of attention, an earlier one {len(calls)}")


def _paged_attend(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
) -> tuple[Any, None]:
    step = _step.get()
    if step.at >= len(step.calls) or step.calls[step.at].module is not module:
        raise CannotRun("its layers do not attend in the same order every time")
    if attention_mask is not None:
        raise CannotRun("it makes its attention masks by itself")
    q, k, v = _packed(query, key, value)
    i, window = step.at, step.calls[step.at].window
    how = _settings(options, q.shape[1])
    out, step.cache[i] = step.backend.attend(q, k, v, step.cache[i], step.x, window=window, **how)
    step.at += 1
    return out[None], None


_HARMLESS = {"dropout", "sliding_window", "is_causal", "position_ids", "use_cache"}
"""Options that say nothing new: no dropout, what is hidden is read from the mask, and the positions are ours."""


def _settings(options: dict[str, Any], heads: int) -> dict[str, Any]:
    """scale, softcap and sinks of `attend`. Raises CannotRun for an option that changes the result in a way that we do
    not compute."""
    scale, softcap, sinks = (options.pop(name, None) for name in ("scaling", "softcap", "s_aux"))
    for name, value in (("scaling", scale), ("softcap", softcap)):
        if value is not None and not isinstance(value, (int, float)):
            raise CannotRun(f"the attention option {name} is no plain number")
    if sinks is not None and (not isinstance(sinks, torch.Tensor) or tuple(sinks.shape) != (heads,)):
        raise CannotRun(f"its attention sinks (s_aux) are no tensor of {heads} numbers, one for each head")
    for name in options.keys() - _HARMLESS:
        if options[name] is not None and options[name] is not False:
            known = {"sinks": "attention sinks of another kind", "position_bias": "a position bias for each pair"}
            raise CannotRun(
                f"it needs {known.get(name, f'the attention option {name!r}')}, which attend() does not have"
            )
    return {"scale": scale, "softcap": softcap, "sinks": sinks}


def _packed(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """[1, heads, T, dim] -> [T, heads, dim], of all three."""
    if q.ndim != 4 or q.shape[0] != 1 or k.shape[2] != q.shape[2] or v.shape[:3] != k.shape[:3]:
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        raise CannotRun(f"queries, keys and values are not of one row of equally many tokens: {shapes}")
    if q.shape[1] % k.shape[1] or q.shape[3] != k.shape[3] or not q.dtype == k.dtype == v.dtype:
        raise CannotRun(f"queries {tuple(q.shape)} {q.dtype} do not fit keys {tuple(k.shape)} {k.dtype}, {v.dtype}")
    return q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1)


def register() -> None:
    """Tell transformers both functions. PAGED gets no function for masks: then models make none."""
    transformers = need("transformers", "Running a model of transformers", "hf")
    masks = importlib.import_module("transformers.masking_utils")
    transformers.AttentionInterface.register(LOOK, _look_attend)
    transformers.AttentionInterface.register(PAGED, _paged_attend)
    masks.AttentionMaskInterface.register(LOOK, _look_mask)
