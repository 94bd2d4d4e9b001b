"""Rotary positions: what config.json says about the frequencies, and the tables of their angles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from hibachi.llm.model.fields import Fields, contradiction

HostArray: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@dataclass(frozen=True, slots=True)
class Linear:
    """Frequencies divided by one factor (position interpolation, Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3:
    """Frequencies as Llama 3.1 stretches them: low ones are divided by `factor`, high ones kept.

    A frequency is high if its wavelength is below original_context / high_freq_factor, and low if it is above
    original_context / low_freq_factor; between the two it is interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: float


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN (Peng et al. 2023): frequencies that turn less than beta_slow times in the original context are divided by
    `factor`, those that turn more than beta_fast times are kept; a ramp between. Angles' cosine and sine are multiplied
    by `magnitude`."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_context: float
    magnitude: float
    whole: bool
    """The ends of the ramp are rounded to whole frequencies."""


@dataclass(frozen=True, slots=True)
class LongRope:
    """LongRoPE (Ding et al. 2024): a divisor for each frequency, one list for contexts up to the original one and one
    beyond. Which of them holds is decided once, by the longest sequence that the engine allows."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: float
    magnitude: float


Scaling: TypeAlias = Linear | Llama3 | Yarn | LongRope


@dataclass(frozen=True, slots=True)
class Rope:
    """One set of rotary frequencies."""

    theta: float
    """Base of the frequencies: number i of dims / 2 is theta ** (-2 i / dims)."""
    dims: int
    """How many dimensions of a head turn, from the first. Of an odd number the last one turns with the next."""
    scaling: Scaling | None = None
    """How the frequencies are stretched beyond the context that the model was first trained with."""


FIRST = 2**14
"""Positions that tables have from the start, where the context is longer: they grow with what is used."""
_PIECE = 1024  # positions
_MOST_DIMS = 2**16
_FASTEST = 1e20  # radians a position: times the last position that is still a float32


def room(positions: int, longest: int) -> int:
    """Positions of tables that must have at least this many: a power of two from `FIRST` on, or `longest`."""
    return min(longest, max(FIRST, 1 << (positions - 1).bit_length()))


def tables(rope: Rope, length: int, *, start: int = 0, longest: int | None = None) -> tuple[HostArray, HostArray]:
    """Cosine and sine of the angles of positions `start` to length - 1: float32 [length - start, dims / 2].

    A position has the same bits in every table. longest: the longest sequence that the engine allows; None means
    `length`.
    """
    pairs = np.arange(0, rope.dims, 2, dtype=np.float64) / rope.dims
    frequencies = _stretched(rope, rope.theta**-pairs, longest or length).astype(np.float32)
    magnitude = np.float32(getattr(rope.scaling, "magnitude", 1.0))
    cos, sin = (np.empty((length - start, len(pairs)), np.float32) for _ in range(2))
    for at in range(start // _PIECE * _PIECE, length, _PIECE):  # whole pieces, so that a position's place is the same
        # In float32, although float64 would be closer to the formula: models are trained with float32 angles.
        angles = np.outer(np.arange(at, at + _PIECE).astype(np.float32), frequencies)
        mine = slice(max(start - at, 0), length - at)
        for table, function in ((cos, np.cos), (sin, np.sin)):
            piece = (function(angles) * magnitude)[mine]
            to = max(at - start, 0)
            table[to : to + len(piece)] = piece
    return cos, sin


def _stretched(rope: Rope, f: HostArray, length: int) -> HostArray:
    s, stretched = rope.scaling, f
    if isinstance(s, Linear):
        stretched = f / s.factor
    elif isinstance(s, Llama3):
        turns = s.original_context * f / (2 * math.pi)  # turns within the original context
        kept = np.clip((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0, 1)
        stretched = kept * f + (1 - kept) * f / s.factor
    elif isinstance(s, Yarn):
        low, high = (_place(rope, s.original_context, turns) for turns in (s.beta_fast, s.beta_slow))
        if s.whole:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope.dims - 1)
        ramp = np.clip((np.arange(len(f)) - low) / (high - low or 0.001), 0, 1)
        stretched = f / s.factor * ramp + f * (1 - ramp)
    elif isinstance(s, LongRope):
        stretched = f / np.array(s.long if length > s.original_context else s.short)
    return stretched


def _place(rope: Rope, context: float, turns: float) -> float:
    """The (fractional) index of the frequency that turns this many times within a context."""
    return rope.dims * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


# ---- config.json ---------------------------------------------------------------------------------------------------
#
# Two generations of files are in use: `rope_theta` and `rope_scaling` at the top level (transformers 4), or both inside
# `rope_parameters` (transformers 5), which for some models holds one such object for each type of layer.


def read_rope(c: Fields, head_dim: int, *, given: Fields | None = None) -> Rope:
    """The rotary frequencies that a config describes.

    given: the object that says how they are stretched; None means `stretching(c)`. What is inside it goes before what
    is beside it. Raises InvalidModelFiles, UnknownArchitecture.
    """
    p = given or stretching(c)
    if given is None and (nested := [name for name, value in p.config.items() if isinstance(value, dict)]):
        raise p.unknown(nested[0], "an object for one type of layer", ["one set of frequencies for all layers"])
    where = p if "rope_theta" in p.config else c
    names = ("rope_theta", "rotary_emb_base")
    base = where.number(*names, default=None if any(n in where.config for n in names) else 1e4)
    parts = ("partial_rotary_factor", "rotary_pct")
    where = p if parts[0] in p.config else c
    share = where.number(*parts, default=None if any(n in where.config for n in parts) else 1.0)
    if share > 1:
        raise where.wrong(parts, "a number in (0, 1]", share)
    dims = int(head_dim * share)
    if dims + dims % 2 > head_dim:
        raise contradiction(f"rotary embeddings pair dimensions, so their number in a head ({dims}) must be even")
    rope = Rope(base, dims, _scaling(c, p, dims))
    _check(rope)
    return rope


def _check(rope: Rope) -> None:
    """Raises InvalidModelFiles for frequencies that are no angles, or too many."""
    if rope.dims > _MOST_DIMS:
        raise contradiction(f"{rope.dims} dimensions of a head turn; expected at most {_MOST_DIMS}")
    pairs = np.arange(0, rope.dims, 2, dtype=np.float64) / rope.dims
    try:
        with np.errstate(all="ignore"):
            found = [_stretched(rope, rope.theta**-pairs, length) for length in (1, 2**31)]
        good = all((np.abs(f) <= _FASTEST).all() for f in found)
    except (ArithmeticError, ValueError):
        good = False
    if not good:
        raise contradiction(f"its rotary frequencies, of base {rope.theta} and {rope.scaling!r:.200}, give no angles")


def kind_of(p: Fields) -> Any:
    """How frequencies are stretched, by its name; `type` is the older spelling."""
    return next((p.config[name] for name in ("rope_type", "type") if name in p.config), "default")


def stretching(c: Fields) -> Fields:
    """The object that says how, of a config with one set of frequencies: `rope_scaling` wins, as in transformers."""
    return next((p for name in ("rope_scaling", "rope_parameters") if (p := c.inside(name)).config), Fields({}))


def _scaling(c: Fields, p: Fields, dims: int) -> Scaling | None:
    kind = kind_of(p)
    if kind == "default":
        return None
    if kind == "linear":
        return Linear(p.number("factor"))
    if kind not in ("llama3", "yarn", "longrope", "su"):
        raise p.unknown("rope_type", kind, ["default", "linear", "llama3", "yarn", "longrope"])
    original, longest = ("original_max_position_embeddings",), c.count("max_position_embeddings")
    beside = c.get(*original) is not None
    context = (c if beside else p).number(*original, default=None if original[0] in p.config else float(longest))
    if kind == "llama3":
        low, high = p.number("low_freq_factor"), p.number("high_freq_factor")
        if low >= high:
            raise contradiction(f"{p.where}low_freq_factor ({low}) must be below {p.where}high_freq_factor ({high})")
        return Llama3(p.number("factor"), low, high, context)
    # A factor that is null is the ratio of the lengths; one that is left out is an error for YaRN alone.
    implied = longest / context if "factor" in p.config or kind != "yarn" else None
    factor, magnitude = p.number("factor", default=implied), p.optional_number("attention_factor")
    if kind == "yarn":
        if magnitude is None and p.get("mscale") and p.get("mscale_all_dim"):
            magnitude = _yarn_magnitude(factor, p.number("mscale")) / _yarn_magnitude(
                factor, p.number("mscale_all_dim")
            )
        return Yarn(
            factor=factor,
            beta_fast=p.number("beta_fast", default=32.0),
            beta_slow=p.number("beta_slow", default=1.0),
            original_context=context,
            magnitude=_yarn_magnitude(factor, 1.0) if magnitude is None else magnitude,
            whole=bool(p.flag("truncate", default="truncate" not in p.config)),
        )
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(context)) if min(factor, context) > 1 else 1.0
    return LongRope(p.numbers("short_factor", dims // 2), p.numbers("long_factor", dims // 2), context, magnitude)


def gemma3_ropes(c: Fields) -> tuple[Rope, ...]:
    """The global frequencies and those of layers with a window, which are never stretched."""
    head_dim, new = c.count("head_dim"), c.inside("rope_parameters")
    c = Fields({**c.config, "original_max_position_embeddings": None})  # only what is inside counts
    local = {"rope_theta": c.number("rope_local_base_freq")}
    kept = new.inside("full_attention").config if new.config else {"rope_type": "default"}
    everywhere = {**kept, **c.inside("rope_scaling").config}
    return (
        read_rope(c, head_dim, given=Fields(everywhere, "rope_parameters.full_attention.")),
        read_rope(Fields({**c.config, **local}), head_dim, given=new.inside("sliding_attention")),
    )


def phi3_ropes(c: Fields) -> tuple[Rope, ...]:
    """Phi-3 has LongRoPE, which its first files call yarn, or none."""
    p = stretching(c)
    kind = kind_of(p)
    if kind not in ("default", "longrope", "su", "yarn"):
        raise p.unknown("rope_type", kind, ["default", "longrope"])
    named = Fields({**p.config, "rope_type": "default" if kind == "default" else "longrope"}, p.where)
    head_dim = c.count("head_dim", default=c.count("hidden_size") // c.count("num_attention_heads"))
    return (read_rope(c, head_dim, given=named),)


def _yarn_magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
