"""Reading a request, in steps. Each may take long: whoever runs them says where, so that dialects wait for nothing."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReadingStep:
    """A part of the work. kind: what it is about: the body (`size`: bytes that it reads besides), a text (characters),
    a chat template, the form of an answer (bytes of what says it).
    """

    kind: Literal["body", "text", "template", "form"]
    work: Callable[[], Any]
    size: int = 0


Steps: TypeAlias = Generator[ReadingStep, Any, T]
"""Yields steps, is sent the result of each, or thrown what it raised, and returns what they are for."""


def run(steps: Steps[T]) -> T:
    """Run all steps here, one after another. Raises what they raise."""
    try:
        step = next(steps)
        while True:
            try:
                found = step.work()
            except BaseException as e:
                step = steps.throw(e)
            else:
                step = steps.send(found)
    except StopIteration as e:
        result: T = e.value
        return result
