"""The C interface as Python sees it: structs and functions. Twin of `src/api.h`, `attention.h`, `exchange.h`,
`step.cpp` and `operations.cpp`; ABI and the sizes of structs are compared when a library is loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

ABI = 11
_i32, _i64, _f32, _p = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Sizes(ctypes.Structure):
    """As in attention.h."""

    _fields_ = [
        *((n, _i64) for n in ("tokens", "rows", "heads", "kv_heads", "k_dim", "v_dim")),
        *((n, _i64) for n in ("blocks", "block_size", "cache_blocks")),
        *((n, _i64) for n in ("q_stride", "k_stride", "v_stride", "window")),
        *((n, _f32) for n in ("scale", "softcap")),
    ]


class Op(ctypes.Structure):
    """As in step.cpp."""

    _fields_ = [
        *((n, _i32) for n in ("kind", "outputs", "from_", "to", "added", "which", "gated", "groups")),
        *((n, _i64) for n in ("from_at", "to_at", "n", "k", "window", "experts", "wide", "leaves", "leaf")),
        *((n, _f32) for n in ("scale", "number")),
        *((n, _p) for n in ("w", "b", "scales")),
    ]


class Step(ctypes.Structure):
    """As in step.cpp."""

    _fields_ = [
        *((n, _i64) for n in ("tokens", "outputs", "rows", "blocks", "block_size", "cache_blocks")),
        *((n, _i64) for n in ("heads", "kv_heads", "head_dim", "cascade", "positions", "vocabulary")),
        *((n, _p) for n in ("index", "buffers", "widths", "turns", "caches", "seconds")),
    ]


class Scanned(ctypes.Structure):
    """As in api.h."""

    _fields_ = [
        *((n, _i64) for n in ("rows", "tokens", "dim", "size")),
        *((f"{n}_stride", _i64) for n in ("dt", "x", "gate", "in", "out")),
        *((n, _p) for n in ("state", "dt", "x", "gate", "in", "out", "decay", "skip", "y", "last")),
    ]


class Mixture(ctypes.Structure):
    """As in api.h."""

    _fields_ = [
        *((n, _i64) for n in ("tokens", "each", "experts", "dim", "inner", "activation", "gated")),
        *((n, _i64) for n in ("into_kind", "out_kind", "leaves")),
        *((n, _p) for n in ("into", "out", "into_scales", "out_scales")),
    ]


ENDED, LATE = 1, 2
"""As in exchange.h."""


class RankExchange(ctypes.Structure):
    """As in exchange.h."""

    _fields_ = [
        ("shared", _p),
        *((n, _i32) for n in ("first", "end", "mine")),
        ("last", ctypes.c_uint64),
        *((n, ctypes.c_double) for n in ("awake", "patience")),
    ]


def addresses(places: Sequence[int]) -> Any:
    """An array of pointers. The caller must keep the arrays that it points to."""
    return (_p * len(places))(*places)


STRUCTS = (Sizes, Op, Step, Scanned, Mixture, RankExchange)
_LETTERS: dict[str, Any] = {"i": ctypes.c_int, "n": _i64, "f": _f32, "p": _p}
FUNCTIONS = {  # name: what it returns ("b": whether it was done) and its arguments
    "panel": "n:",
    "int8_rounded": "n:n",
    "threads": "i:",
    "set_threads": ":i",
    "set_distances": ":p",
    "xla_version": ":i",
    "sets": "n:ppppi",
    "linear": "b:iiipnppppnnnn",
    "packed": "n:inn",
    "pack": "b:iippppnnnn",
    "rows": "b:iippppnnn",
    "attend": "b:ippppppppppipnpp",
    "rms_norm": "b:ipnppnnf",
    "layer_norm": "b:ipnpppnnf",
    "softmax": "b:ippnn",
    "rope": "b:ipnpppnnn",
    "activate": "b:iipnpnni",
    "convolve": "b:ippnppppnnnn",
    "scan": "b:ip",
    "lists": "n:nnn",
    "route": "b:ipnnnipp",
    "experts": "b:ippppp",
    "best": "b:pnnpp",
    "draw_parameters": "n:",
    "draw": "b:pnnppp",
    "mass": "b:pnnpp",
    "keep_bits": "b:ppnn",
    "kept_rows": "b:ipnppppnn",
    "exchange_bytes": "n:i",
    "exchange_sum": "i:ppn",
    "exchange_rows": "i:ppnnpn",
    "step": "b:ippn",
}


class WrongLibrary(Exception):
    """A library that is not the twin of this file."""


class Kernels:
    """The functions of a library by name, without `hibachi_`. Those that need memory raise MemoryError,
    and IndexError for places that are not there.

    Raises OSError for a library that does not load, and WrongLibrary.
    """

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        try:
            abi = self._library.hibachi_abi
        except AttributeError:
            raise WrongLibrary(f"{path} is no library of hibachi's kernels.") from None
        if (found := abi()) != ABI:
            raise WrongLibrary(f"{path} has the interface {found}; expected {ABI}. Install hibachi anew.")
        for twin in STRUCTS:
            size = self._function(f"sizeof_{twin.__name__}", "n:")()
            if size != ctypes.sizeof(twin):
                raise WrongLibrary(
                    f"The struct {twin.__name__} has {size} bytes in {path} and {ctypes.sizeof(twin)} in {__name__}."
                )
        for name, signature in FUNCTIONS.items():
            setattr(self, name, self._function(name, signature))

    def _function(self, name: str, signature: str) -> Any:
        returned, _, letters = signature.partition(":")
        found: Any = self._library[f"hibachi_{name}"]  # an object of its own
        found.argtypes = [_LETTERS[letter] for letter in letters]
        found.restype = ctypes.c_int if returned == "b" else _LETTERS.get(returned)
        if returned == "b":
            found.errcheck = _was_done
        return found

    def symbol(self, name: str) -> Any:
        """The address of a function, for others to call."""
        return self._library[f"hibachi_{name}"]

    def __getattr__(self, name: str) -> Any:  # for type checkers: the functions are found by name
        raise AttributeError(name)


def _was_done(code: int, function: Any, arguments: Any) -> None:
    if code == 1:
        raise MemoryError("There is no memory for what a kernel needs besides its arrays.")
    if code:
        raise IndexError(
            "A place lies outside of the array that it is a place of: a row of a weight, or a slot, position, block or "
            "end of a step. A model must not write into its inputs."
        )
