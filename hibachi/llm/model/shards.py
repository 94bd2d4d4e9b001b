"""The part of a decoder that one of several processes has: layers, heads, units of feed-forward parts, vocabulary."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from typing_extensions import override

from hibachi.backend.array_backend import ArrayBackend
from hibachi.backend.group import MOST_LEAVES, RankPlace, share
from hibachi.backend.packing import Rows
from hibachi.backend.program import ROUNDING
from hibachi.backend.stored import HostArray, part
from hibachi.errors import ConfigError, UnsupportedOperation
from hibachi.llm.model.arch import Arch, shapes
from hibachi.llm.model.weights import Weights, matrices

ALIGNED = 32  # columns of a leaf are a multiple
GROUP = 64  # likewise, where rows are rounded in groups: as in int8.h
WEIGHTS = 0.8  # of the free memory may be weights


def check_shards(arch: Arch, size: int, leaves: int, stages: int = 1) -> None:
    """Raise ConfigError or UnsupportedOperation for a model that so many processes of each of so many stages cannot
    share in so many leaves.
    """
    if stages > len(arch.layers):
        raise ConfigError(
            f"pipeline_parallel_size={stages}: each stage has a layer at least; expected at most {len(arch.layers)}."
        )
    if leaves > 1 and (lacks := _lacks(arch)) is not None:
        raise UnsupportedOperation(
            f"A model with {lacks} is not computed by several processes, nor in leaves. Pass "
            f"tensor_parallel_size=1, and leave tp_leaves out."
        )
    if not fits(arch, size, leaves):
        or_more = "" if arch.qk_norm == "all" else " or is a multiple of them"
        fit = [n for n in range(1, arch.heads + 1) if fits(arch, n, n)]
        raise ConfigError(
            f"tensor_parallel_size={size}, tp_leaves={leaves}: expected a size that divides the {arch.heads} heads, "
            f"that divides the {arch.kv_heads} heads of keys{or_more}, and leaves that cut "
            f"{' and '.join(map(str, _cut(arch)))} columns into multiples of {ALIGNED}. With a leaf a rank that is "
            f"{', '.join(map(str, fit))}."
        )


def check_rounded(params: dict[str, Any], backend: ArrayBackend) -> None:
    """Raise ConfigError where a leaf would begin within a group of rounded numbers."""
    for layer in params["layers"] if backend.leaves > 1 else ():
        down = layer["down"]
        for w in (layer["o"], *(down if isinstance(down, list) else [down])):
            kind, columns = getattr(w, "kind", ""), w.shape[1]
            if kind in ROUNDING and columns % (backend.local_leaves * GROUP):
                whole = columns * backend.leaves // backend.local_leaves
                fit = [n for n in range(1, MOST_LEAVES + 1) if whole % (n * GROUP) == 0]
                raise ConfigError(
                    f"tp_leaves={backend.leaves}: in {kind} leaves cut {whole} columns into multiples of {GROUP}; "
                    f"so many do: {', '.join(map(str, fit))}. Take one of these, or no quantization."
                )


def stages_of(arch: Arch, stages: int) -> list[range]:
    """The layers of each stage, so that the slowest stage takes as short as can be: a step reads each weight once."""
    weights, counts = shapes(arch)[0], [0] * len(arch.layers)
    for name, shape in weights.items():
        if found := re.match(r"layers\.(\d+)\.", name):
            counts[int(found[1])] += math.prod(shape)
    counts[-1] += arch.vocab_size * arch.hidden_size  # of the head
    ends = [0, *accumulate(counts)]
    best: dict[int, tuple[int, list[int]]] = {0: (0, [0])}
    """By layers that stages have: the slowest of these stages, and where each begins."""
    for _ in range(stages):
        best = {
            end: min((max(slowest, ends[end] - ends[begins]), [*cuts, end]) for begins, (slowest, cuts) in some.items())
            for end in range(1, len(ends))
            if (some := {begins: found for begins, found in best.items() if begins < end})
        }
    cuts = best[len(counts)][1]
    return [range(*pair) for pair in pairwise(cuts)]


def fits(arch: Arch, size: int, leaves: int) -> bool:
    """Whether so many processes can share a model in so many leaves."""
    of_keys = arch.kv_heads % size == 0 or (size % arch.kv_heads == 0 and arch.qk_norm != "all")
    return arch.heads % size == 0 and of_keys and (leaves == 1 or not any(n % (leaves * ALIGNED) for n in _cut(arch)))


def _cut(arch: Arch) -> list[int]:
    """The columns of what is cut into leaves."""
    e = arch.experts
    inner = {e.intermediate if e and layer.experts else arch.intermediate for layer in arch.layers}
    heads = [arch.heads, arch.kv_heads] if arch.qk_norm == "all" else [arch.heads]
    return [*(n * arch.head_dim for n in heads), *sorted(inner)]


def smallest(arch: Arch, backend: ArrayBackend, dtype: str, stages: int) -> tuple[int, str]:
    """The fewest processes of each of so many stages in which a model fits, and why. Raises ConfigError where it fits
    in no number of them.
    """
    free, item = backend.memory(), {"int8": 1.0, "int4": 0.57}.get(backend.quantization, 4 if dtype == "float32" else 2)
    if free is None:
        return 1, "processes of one machine share its memory, so more of them need no less"
    whole = int(item * sum(math.prod(shape) for shape in shapes(arch)[0].values()))
    for size in range(1, arch.heads + 1):
        if fits(arch, size, size) and whole / size / stages <= free[0] * WEIGHTS:
            return size, f"weights of {whole >> 20} MiB, and {free[0] >> 20} MiB free on a device"
    raise ConfigError(
        f"tensor_parallel_size='auto': the weights take {whole >> 20} MiB, and a device has {free[0] >> 20} MiB free. "
        f"Take a smaller dtype or quantization, or say how many processes."
    )


def _lacks(arch: Arch) -> str | None:
    """What a model has that is not cut."""
    return "layer norms over all heads" if arch.qk_norm == "all" and arch.norm == "layer" else None


class Shard(Weights):
    """The tensors of a rank, by canonical name: rows of some, others as they are. Columns of `o` and `down` are left to
    the backend, which may round whole rows.

    arch: of the rank's own decoder, which has these layers.
    """

    def __init__(self, whole: Mapping[str, HostArray], arch: Arch, place: RankPlace, layers: range) -> None:
        self._whole, self._of, self._layers = whole, arch, layers
        self._rank, self._size = _, size = place.tp_rank, place.tp_size
        self.arch: Arch = replace(
            arch,
            layers=arch.layers[layers.start : layers.stop],
            heads=arch.heads // size,
            kv_heads=max(1, arch.kv_heads // size),
            intermediate=arch.intermediate // size,
            experts=None if (e := arch.experts) is None else replace(e, intermediate=e.intermediate // size),
            tied=False,  # embeddings are whole
        )

    def __len__(self) -> int:
        return len(self._whole)

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._source(name) in self._whole

    def __getitem__(self, name: str) -> HostArray:
        pieces = [self._whole[self._source(name)][which] for which in self._rows(name)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    @override
    def matrices(self, name: str) -> list[Rows]:
        source = self._source(name)
        found = self._whole.matrices(source) if isinstance(self._whole, Weights) else matrices(self._whole[source])
        return [part(w, which) for w in found for which in self._rows(name)]

    def _source(self, name: str) -> str:
        if found := re.match(r"layers\.(\d+)\.(.*)", name):
            return f"layers.{self._layers[int(found[1])]}.{found[2]}"
        return "embed.weight" if name == "head.weight" and self._of.tied else name

    def _rows(self, name: str) -> list[slice]:
        """Those that the rank has."""
        if self._size == 1:
            return [slice(None)]
        a, kind = self._of, name.split(".")[-2]
        q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        at = self._rank * a.kv_heads // self._size * a.head_dim  # a head of keys may go to several ranks
        of_keys = slice(at, at + max(1, a.kv_heads // self._size) * a.head_dim)
        inner = a.experts.intermediate if a.experts and ".experts." in name else a.intermediate
        of_queries, units = share(q, self._rank, self._size), share(inner, self._rank, self._size)
        cut = {
            "q": [of_queries],
            "k": [of_keys],
            "v": [of_keys],
            "qkv": [of_queries, _moved(of_keys, q), _moved(of_keys, q + kv)],
            "gate": [units],
            "up": [units],
            "gate_up": [units, _moved(units, inner)],
            "q_norm": [of_queries] if a.qk_norm == "all" else [slice(None)],
            "k_norm": [of_keys] if a.qk_norm == "all" else [slice(None)],
            "head": [share(a.vocab_size, self._rank, self._size)],
        }
        return cut.get(kind, [slice(None)])


def _moved(which: slice, by: int) -> slice:
    return slice(which.start + by, which.stop + by)
