"""What an engine needs of an array library besides operations on arrays."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hibachi.backend.group import GroupLost
from hibachi.backend.kernels.library import possible, why_missing
from hibachi.common.shapes import CallShapes
from hibachi.errors import ConfigError

PORTABLE = ("float32", "bfloat16")
"""The dtypes in which the kernels compute; bits of others have no name."""


class Library:
    """The answers of a library that has nothing to say."""

    name: str = "array_api"
    shapes: CallShapes = CallShapes()
    """The shapes of calls that this library wants."""
    deterministic: bool = False
    """What a row of a call comes to, bit by bit, does not depend on the other rows: on how many there are, where it
    stands among them, or what they hold. So for every operation of the decoder and of sampling."""
    prefers_invariant: bool = False
    """`invariant()` costs little, so that deterministic=None means True."""
    numerics: str | None = None
    """The name of the bits that come out (`hibachi.backend.kernels.library`); None means they have no name."""
    asynchronous: bool = False
    """Calls return before the device has done them, so that the next step may be prepared meanwhile."""
    kernels: str = "default"
    """Which set of kernels this is, for `fingerprint`."""

    @property
    def keeps_promise(self) -> bool:
        """Does deterministic=None mean True?"""
        return self.deterministic or self.prefers_invariant

    def out_of_memory(self, error: BaseException) -> bool:
        """Did this error mean that memory ran out? The engine then computes fewer tokens at once, and tries again."""
        return isinstance(error, MemoryError)

    def fatal(self, error: BaseException) -> bool:
        """Did this error mean that the device is lost? No call would succeed any more, whatever the request."""
        return isinstance(error, GroupLost)

    def guard(self) -> AbstractContextManager[Any]:
        """Entered around every step: switches off gradients and the like."""
        return nullcontext()

    def memory(self) -> tuple[int, int] | None:
        """Free and total bytes of the device, or None if unknown."""
        return None

    def utilization(self, processors: float) -> float | None:
        """How busy the device was lately, 0 to 1; None if unknown. processors: what the machine's were, by this
        process.
        """
        return processors

    def fingerprint(self) -> str:
        """What the bits of a result depend on besides model and request: library, device and threads, kernels.

        Where it names numerics (`cpu-2`), they alone are what bits depend on. Otherwise the same string on two machines
        is no promise, as libraries choose their code by the processor; another one says that bits may differ.
        """
        facts = self.versions()
        if self.numerics:
            return f"{facts.get('library', self.name)}; {facts.get('device', 'default')}; numerics {self.numerics}"
        return f"{facts.get('library', self.name)}; {facts.get('device', 'default')}; kernels {self.kernels}"

    def remarks(self) -> list[str]:
        """What else `hibachi doctor` should say about this backend, a line each."""
        return []

    def versions(self) -> dict[str, str]:
        """For `hibachi doctor` and `fingerprint`: "library" and "device", in words; others are shown as they are."""
        return {"library": self.name, "device": "default"}


def check_numerics(asked: str | None, backend: Library, *, portable: bool = True, dtype: str | None = None) -> None:
    """Refuse a backend, or a model on it, whose bits do not have the name that was asked for; None means any will do.

    A name may have a dtype behind it, as those of models do: "cpu-2 float32". portable, dtype: of the model, see
    `Decoder`. Raises ConfigError, which says which names there are here.
    """
    name, space, of = (asked or "").partition(" ")
    known = not space or (of in PORTABLE and dtype in (None, of))
    plain = name.partition("/")[0]  # without leaves
    if asked is None or (portable and known and name == backend.numerics):
        return
    if not (here := possible()):
        raise ConfigError(f"numerics must be None here, as there are no kernels ({why_missing()}); got {asked!r}.")
    if plain in here and dtype is not None and of in PORTABLE and dtype != of:
        raise ConfigError(f"numerics={asked!r} was asked for, but the dtype is {dtype}. Pass dtype={of!r} as well.")
    if plain not in here or not known:
        raise ConfigError(f"numerics must be one of {', '.join(here)}, which this machine can compute; got {asked!r}.")
    raise ConfigError(
        f"numerics={asked!r} was asked for, but the bits of {'' if portable else 'this model on '}"
        f"{backend.fingerprint()} have {(portable and backend.numerics) or 'no name'}. hibachi's kernels compute "
        f"{', '.join(here)} here, on the CPU with numpy, torch or jax, for most models. Take those, or leave it out."
    )
