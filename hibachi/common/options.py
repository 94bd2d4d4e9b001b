"""Names of options: a misspelt one is answered with the nearest name."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from hibachi.errors import ConfigError, HibachiError, InvalidCall, shown

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
SAMPLED: set[str] = set()  # the fields of SamplingParams, which adds them itself


# Names of transformers and vLLM: the one that is in their place here, if there is one, and what is to be known of it.
ELSEWHERE: dict[str, tuple[str, str]] = {
    "max_length": ("max_tokens", "It counts new tokens only."),
    "max_new_tokens": ("max_tokens", ""),
    "stop_strings": ("stop", ""),
    "num_return_sequences": ("n", ""),
    "do_sample": ("temperature", "0 is greedy, and all others sample."),
    "num_beams": ("beams", "Write beams=Beams(width=...)."),
    "length_penalty": ("beams", "Write beams=Beams(length_penalty=...)."),
    "early_stopping": ("beams", "Write beams=Beams(early_stopping=...)."),
    "guidance_scale": ("", "Write engine.run(prompt, params, guidance=Guidance(scale, ...))."),
    "gpu_memory_utilization": ("kv_cache_memory_bytes", "It takes the bytes of the cache, not a share of the memory."),
}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant."""
    near = difflib.get_close_matches(name, known, 1)
    return near[0] if near else None


def meant(name: str, known: Iterable[str], *, flags: bool = False) -> str:
    """Which of the known names was probably meant, in a question; "" means none was. flags: names are those of a
    command line.
    """
    new, more = ELSEWHERE.get(name, (None, ""))
    if new == "":
        return more
    if new is None or new not in known:
        new, more = nearest(name, known), ""
    if new is None:
        return ""
    spelt = f"--{new.replace('_', '-')}" if flags else repr(new)
    return f"did you mean {spelt}? {more}".strip()


def spelled_fields(cls: type[T]) -> type[T]:
    """Decorator for dataclasses that users fill: likewise, with InvalidCall."""
    made: Any = cls
    made.__init__ = spelled(made.__init__, InvalidCall)
    return cls


def spelled(init: F, error: type[HibachiError] = ConfigError) -> F:
    """Decorator for functions with keyword options: an unknown keyword raises the error and names the nearest option,
    or says that it is a field of SamplingParams.
    """
    parameters = inspect.signature(init).parameters
    known = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY] or [*parameters][1:]
    every = {*parameters}

    def check(args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if unknown := options.keys() - every:
            what = init.__name__
            if "self" in every:
                what = type(args[0]).__name__ + ("" if what == "__init__" else f".{what}")
            raise error(_told(what, min(unknown), known))

    @functools.wraps(init)
    def checked(*args: Any, **options: Any) -> Any:
        check(args, options)
        return init(*args, **options)

    @functools.wraps(init)
    async def awaited(*args: Any, **options: Any) -> Any:
        check(args, options)
        return await init(*args, **options)

    return cast(F, awaited if inspect.iscoroutinefunction(init) else checked)


def takes(config: type) -> Callable[[F], F]:
    """Decorator for functions that take the fields of a dataclass as keywords, `**options`: its signature, which help()
    shows, has each of them, those of its base classes last; an unknown one is answered as by `spelled`.
    """

    def decorate(init: F) -> F:
        own = inspect.signature(init)
        named = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        fields = inspect.signature(config).parameters
        inmost = [fields[name] for cls in config.__mro__ for name in inspect.get_annotations(cls)]
        made: Any = init
        made.__signature__ = own.replace(parameters=[*named, *inmost])
        return spelled(init)

    return decorate


_OVER_HTTP = {
    "chat_template_kwargs": "it takes variables of the template as options of their own, such as enable_thinking=False",
    "include_reasoning": "an answer has its reasoning beside its text",
    "response_format": "pass SamplingParams(structured_outputs=...), see docs/guided.md",
}


def check_variables(what: str, variables: Iterable[str]) -> None:
    """Check names that a chat template will see. Raises ConfigError for a field of SamplingParams or of a chat over
    HTTP, which was meant for the request.
    """
    if over_http := _OVER_HTTP.keys() & variables:
        raise ConfigError(f"{what} has no option {(name := min(over_http))!r}: {_OVER_HTTP[name]}.")
    if meant := SAMPLED.intersection(variables):
        raise ConfigError(_told(what, min(meant), []))


def check_options(what: str, options: Any, known: Iterable[str], error: type[HibachiError] = ConfigError) -> None:
    """Check options that are passed on to another function. Raises the error for an unknown name."""
    known = [*known]
    if unknown := options.keys() - set(known):
        raise error(_told(what, min(name if isinstance(name, str) else shown(name) for name in unknown), known))


def _told(what: str, name: str, known: Iterable[str]) -> str:
    if name in SAMPLED:
        return f"{what} has no option {name!r}: it is a field of the parameters. Pass SamplingParams({name}=...)."
    return f"{what} has no option {name!r}; " + (meant(name, known) or f"expected one of {', '.join(known)}.")
