"""A checkpoint under canonical names: what a family says about its files, applied when a tensor is read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from typing_extensions import override

from hibachi.model.arch import Arch, Shapes, shapes
from hibachi.model.families import Family
from hibachi.model.fields import Config
from hibachi.model.rope import HostArray
from hibachi.model.weights import Checkpoint, Weights
from hibachi.tensor.packing import Rows


class Canonical(Weights):
    """The tensors of `files` as the decoder calls them; each is read when asked for.

    Checks first that names and shapes are those that the arch implies; raises one InvalidModelFiles that lists
    everything that is wrong.
    """

    def __init__(self, files: Checkpoint, family: Family, config: Config, arch: Arch) -> None:
        self._files, self._family, self._arch = files, family, arch
        self._names = family.names(config)
        self._prefix = family.prefix if any(name.startswith(family.prefix) for name in files) else ""
        required, optional = shapes(arch, fused=self._names)
        useless = {n: files.shape(n) for n in files if n.endswith(family.skipped)}
        files.check(self._stored(required), self._stored(optional) | useless)
        names = (*required, *optional)
        self._found = dict.fromkeys(n for n in names if all(place in files for place in self._places(n)))

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __contains__(self, name: object) -> bool:  # Mapping's would read the tensor
        return name in self._found

    def __getitem__(self, name: str) -> HostArray:
        if name not in self._found:
            raise KeyError(name)
        _, base, _ = _parts(name)
        each = [self._files[place] for place in self._places(name)]
        array = np.stack(each) if "{}" in self._names[base] else each[0]
        if base in self._family.transposed and array.ndim == 2:
            array = array.T
        change = self._family.reordered.get(base)
        return array if change is None else change(array, self._arch)

    @override
    def matrices(self, name: str) -> list[Rows]:
        _, base, _ = _parts(name)
        if name not in self._found or base in self._family.transposed or base in self._family.reordered:
            return super().matrices(name)
        return [m for place in self._places(name) for m in self._files.matrices(place)]

    def _places(self, name: str) -> list[str]:
        """Names in the files: one, or those of all experts."""
        number, base, suffix = _parts(name)
        theirs = self._names[base]
        if theirs.startswith("/"):
            return [f"{theirs[1:]}.{suffix}"]
        front = self._prefix + ("" if number is None else f"{self._names['layers']}{number}.")
        experts = self._arch.experts.count if self._arch.experts and "{}" in theirs else 1
        return [f"{front}{theirs.format(e)}.{suffix}" for e in range(experts)]

    def _stored(self, wanted: Shapes) -> Shapes:
        """Names and shapes in the files, of tensors by their canonical names and shapes."""
        out: Shapes = {}
        for name, shape in wanted.items():
            _, base, _ = _parts(name)
            if base in self._family.transposed and len(shape) == 2:
                shape = shape[::-1]
            out |= dict.fromkeys(self._places(name), shape[1:] if "{}" in self._names[base] else shape)
        return out


def _parts(name: str) -> tuple[str | None, str, str]:
    """Number of the block (or None), canonical name, "weight" or "bias"."""
    base, suffix = name.rsplit(".", 1)
    if not base.startswith("layers."):
        return None, base, suffix
    _, number, base = base.split(".", 2)
    return number, base, suffix
