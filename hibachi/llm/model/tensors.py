"""A checkpoint under canonical names: what a family says about its files, applied when a tensor is read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from typing_extensions import override

from hibachi.backend.packing import Rows
from hibachi.llm.model.arch import Arch, Shapes, shapes
from hibachi.llm.model.families import Family
from hibachi.llm.model.fields import Config
from hibachi.llm.model.rope import HostArray
from hibachi.llm.model.weights import Checkpoint, Weights, refuse_quantized, settle_vocabulary

_TEXT = re.compile(r"(model\.)?language_model\.(model\.)?")
_OTHER_MEDIA = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")


class Canonical(Weights):
    """The tensors of `files` as the decoder calls them; each is read when asked for.

    Checks first that names and shapes are those that the arch implies; raises one InvalidModelFiles that lists
    everything that is wrong, and UnknownArchitecture for quantized weights.

    files: without what is not read, in the usual spelling. arch: as given, with `tied` as the files have it.
    """

    files: Checkpoint
    arch: Arch

    def __init__(self, files: Checkpoint, family: Family, config: Config, arch: Arch) -> None:
        self.files, self._family, self.arch = files, family, arch
        self._names, self._prefix, entries = family.names(config), family.prefix, files.entries
        for name in list(files):
            entry, usual = entries.pop(name), self._usual(name)
            entries[name if usual in entries else usual] = entry
        if not any(name.startswith(family.prefix) for name in files):
            self._prefix = ""
        required, optional = shapes(arch, fused=self._names)
        must, may = self._stored(required), self._stored(optional)
        for name in list(files):
            useless = name.endswith(family.skipped) and name not in must and name not in may
            if useless or (family.within and _OTHER_MEDIA.match(name)):
                del entries[name]
        refuse_quantized(files, config)
        embed, head = (self._places(f"{name}.weight")[0] for name in ("embed", "head"))
        tied = settle_vocabulary(files, embed, head, arch.vocab_size, tied=arch.tied)
        self.arch = replace(arch, tied=tied)
        for i, layer in enumerate(arch.layers):
            if layer.experts:
                self._part_experts(f"{self._prefix}{self._names['layers']}{i}.")
        files.check(must, may)
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
        each = [self.files[place] for place in self._places(name)]
        array = np.stack(each) if "{}" in self._names[base] else each[0]
        if base in self._family.transposed and array.ndim == 2:
            array = array.T
        change = self._family.reordered.get(base)
        return array if change is None else change(array, self.arch)

    @override
    def matrices(self, name: str) -> list[Rows]:
        _, base, _ = _parts(name)
        if name not in self._found or base in self._family.transposed or base in self._family.reordered:
            return super().matrices(name)
        return [m for place in self._places(name) for m in self.files.matrices(place)]

    def _usual(self, name: str) -> str:
        """A name in the files as the family spells it."""
        if self._family.within:
            name = _TEXT.sub(self._family.prefix, name, count=1) if _TEXT.match(name) else name
        for other, usual in self._family.respelled.items():
            name = name.replace(other, usual)
        bare = name.removeprefix(self._family.prefix)
        return bare if [bare] == self._places("head.weight") else name

    def _part_experts(self, at: str) -> None:
        """Give each expert of a layer tensors of its own where all lie in one array, [experts, rows, columns], as
        transformers 5 has them in memory.
        """
        entries, front = self.files.entries, at + self._names["experts.gate"].partition("{}")[0]
        for fused, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            whole = entries.get(front + fused)
            if whole is None or len(whole.shape) != 3 or whole.shape[1] % len(parts):
                continue  # the check will name it
            count, rows, columns = whole.shape
            each = replace(whole, shape=(count, len(parts), rows // len(parts), columns))
            own = {
                f"{at}{self._names[f'experts.{part}'].format(e)}.weight": matrix
                for e, expert in enumerate(each)
                for part, matrix in zip(parts, expert, strict=True)
            }
            if not own.keys() & entries.keys():
                del entries[front + fused]
                entries |= own

    def _places(self, name: str) -> list[str]:
        """Names in the files: one, or those of all experts."""
        number, base, suffix = _parts(name)
        theirs = self._names[base]
        if theirs.startswith("/"):
            return [f"{theirs[1:]}.{suffix}"]
        front = self._prefix + ("" if number is None else f"{self._names['layers']}{number}.")
        experts = self.arch.experts.count if self.arch.experts and "{}" in theirs else 1
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
