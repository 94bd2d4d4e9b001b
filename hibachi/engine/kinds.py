"""Which kind of the ladder a model is, and how its methods are called."""

from __future__ import annotations

import inspect
from typing import Any

from hibachi.backend.layout import OwnCache
from hibachi.engine.ladder import ModelKind
from hibachi.engine.runners.extra_inputs import KEEP, declared_by, wanted
from hibachi.errors import ConfigError


def kind_of(model: Any) -> ModelKind:
    """The highest kind of the ladder that the model is, feed-forward apart. Raises ConfigError if none, and for a
    method that does not take what it is called with.
    """

    def has(name: str) -> bool:
        found = getattr(model, name, None)  # PyTorch's modules all have a `forward`, perhaps one that only raises
        return callable(found) and getattr(found, "__name__", "") != "_forward_unimplemented"

    if has("step") and has("cache_spec"):
        check_takes(model, "step", "params", "cache", "x")
        return ModelKind.PAGED
    if isinstance(getattr(model, "past", None), OwnCache) and callable(getattr(model, "step", None)):
        if not _has_vocabulary(model) and getattr(model, "vocab_size", 0) is not None:
            raise ConfigError(
                f"{type(model).__name__} has `past`, so it also needs `vocab_size`, an integer >= 1, or None: then "
                f"`step` returns the next tokens."
            )
        lengths = ["lengths"] if takes_lengths(model, ModelKind.OWN_CACHE) else []
        check_takes(model, "step", "tokens", *lengths, "past")
        return ModelKind.OWN_CACHE
    if has("logits"):
        if not _has_vocabulary(model):
            raise ConfigError(f"{type(model).__name__} has `logits`, so it also needs `vocab_size`, an integer >= 1.")
        check_takes(model, "logits", "tokens", "lengths")
        return ModelKind.LOGITS
    if has("forward"):
        check_takes(model, "forward", "tokens")
        if str(getattr(model.forward, "__module__", "")).startswith("transformers"):
            raise ConfigError(
                f"{type(model).__name__} is a model of the library transformers: expected the class of docs/models.md, "
                f'"a cache of the model\'s own", around it, with `past` and `step`; or hibachi.LLM(folder).'
            )
        return ModelKind.FORWARD
    raise ConfigError(
        f"A model needs one of `forward(tokens)`, `logits(tokens, lengths)`, `step(tokens, lengths, past)` with an "
        f"attribute `past`, or `step(params, cache, x)` with `cache_spec()`; {type(model).__name__} has none. See "
        f"docs/models.md."
    )


def _has_vocabulary(model: Any) -> bool:
    size = getattr(model, "vocab_size", None)
    return isinstance(size, int) and size > 0


def level_told(kind: ModelKind) -> str:
    """The level at which a model is used, what it does, and what the next one would take, in a line."""
    if kind is ModelKind.PAGED:
        return "level 2, a step over the engine's cache: only new tokens are computed"
    if kind is ModelKind.OWN_CACHE:
        return (
            "between levels 1 and 2, a cache of its own: only new tokens are computed; with `cache_spec` and a `step` "
            "over the engine's cache, prompts and rows of any length would share calls"
        )
    done = "logits out" if kind.level else "tokens out"
    higher = "" if kind.level else "; with `logits` the engine would sample"
    return (
        f"level {kind.level}, {done}: the whole sequence is computed in each step{higher}; with `past` and `step`, or "
        f"`cache_spec` and `step`, only new tokens would be"
    )


def check_takes(model: Any, name: str, *arguments: str) -> None:
    """Raise ConfigError if the method cannot be called with these arguments, by their places."""
    try:
        signature = inspect.signature(getattr(model, name))
    except (TypeError, ValueError):  # compiled code need not tell
        return
    named = {} if arguments[-1] == "x" else dict.fromkeys(wanted(getattr(model, name), declared_by(model)))
    if name == "forward" and "lengths" in signature.parameters:
        named["lengths"] = None
    try:
        signature.bind(*arguments, **named)
    except TypeError as e:
        if isinstance(model, type):
            raise ConfigError(
                f"A model is an object; got the class {model.__name__} itself. Make one of it: {model.__name__}()."
            ) from None
        raise ConfigError(
            f"{type(model).__name__}.{name} is called as `{name}({', '.join(arguments)})`; got a method "
            f"`{name}{signature}`: {e}. Add what is missing, or give defaults to what hibachi does not pass."
        ) from None


def takes_lengths(model: Any, kind: ModelKind) -> bool:
    """Whether its method takes the number of real tokens of each row. Without it, rows of one length share a call where
    a model has a cache of its own: there it is a parameter `lengths`, or one of three of any names.
    """
    if kind is ModelKind.LOGITS:
        return True
    if kind is ModelKind.FORWARD:
        return "lengths" in inspect.signature(model.forward).parameters
    if kind is not ModelKind.OWN_CACHE:
        return False
    try:
        parameters = inspect.signature(model.step).parameters
    except (TypeError, ValueError):  # compiled code need not tell
        return True
    named = {*wanted(model.step, declared_by(model)), KEEP}
    needed = [p for p in parameters.values() if p.kind <= p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    return "lengths" in parameters or len([p for p in needed if p.name not in named]) == 3
