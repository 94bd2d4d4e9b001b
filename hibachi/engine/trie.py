"""Catalogues: an output must be one of many sequences of token ids, as the items of a recommender are."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from typing_extensions import override

from hibachi.backend.array_backend import HostArray
from hibachi.backend.masks import WORD
from hibachi.engine.conversions import to_host
from hibachi.engine.guide.protocol import Grammar, Guide, GuideFailed
from hibachi.errors import InvalidRequest, shown, text_of
from hibachi.request import MOST_INT

_EXPECTED = "sequences of token ids (a list of lists, or an array [n, length])"
_BIT = np.uint32(1)
WIDE, MOST_WIDE = 256, 64  # children of a node whose mask is kept, and how many of those are


class Levels(NamedTuple):
    """The nodes of a catalogue. ids, ends [nodes]: the id that leads to each, and whether a path ends there. first
    [nodes + 1]: the first child of each. depth: of the deepest.
    """

    ids: HostArray
    first: HostArray
    ends: HostArray
    depth: int


class Trie:
    """A catalogue of sequences of token ids, for `run(allowed=)`: an output is one of them.

    paths: of any lengths, in lists, or an integer array [n, length] of any library. The same path may come several
    times. Raises InvalidRequest without a path, for an empty one, and for what is no id from 0 to 2^31 - 1.

    A node is an integer, and stands for the ids on the way to it from `root`. Nodes are numbered by depth, then by
    their ids: the children of a node follow one another. A catalogue never changes, and any thread may use it. Ids take
    1, 2 or 4 bytes, whichever hold the largest; a node takes 5 bytes more.
    """

    __slots__ = ("__weakref__", "_digest", "_ends", "_first", "_ids", "_wide", "depth", "most")

    root: int = 0
    most: int
    """The largest id."""
    depth: int
    """The length of the longest path."""

    def __init__(self, paths: Any) -> None:
        levels = paths if isinstance(paths, Levels) else _levels(*_read(paths))
        self._ids, self._first, self._ends, self.depth = levels
        self.most, digest = int(self._ids.max()), blake2b(digest_size=16)
        for array in levels[:3]:
            digest.update(array.data)
        self._digest = digest.digest()
        self._wide: dict[tuple[int, int], HostArray] = {}

    def __len__(self) -> int:
        """How many different paths there are."""
        return int(np.count_nonzero(self._ends))

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self._ids.nbytes + self._first.nbytes + self._ends.nbytes

    def step(self, node: int, token: int) -> int:
        """The child of a node by an id; -1 if it has none."""
        end = int(self._first[node + 1])
        at = bisect_left(self._ids, token, int(self._first[node]), end)
        return at if at < end and self._ids[at] == token else -1

    def is_end(self, node: int) -> bool:
        """Whether a path ends here; others may go on."""
        return bool(self._ends[node])

    def below(self, node: int) -> range:
        """The nodes of its children."""
        return range(self._first[node], self._first[node + 1])

    def children(self, nodes: Any) -> tuple[HostArray, HostArray, HostArray]:
        """The children of nodes [m]: their ids, int32 [k], in order, and their nodes, int64 [k], one node's after
        another's; and where those of each node begin, int64 [m + 1].
        """
        at = np.asarray(nodes, np.int64)
        first = self._first[at].astype(np.int64)
        offsets = np.zeros(len(at) + 1, np.int64)
        np.cumsum(self._first[at + 1] - first, out=offsets[1:])
        found = np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], np.diff(offsets))
        return self._ids[found].astype(np.int32), found, offsets

    def masks(self, nodes: Any, bits: HostArray, ends: Sequence[int] = ()) -> None:
        """Fill bits, uint32 [m, ceil(V / 32)], with what may come at nodes [m]: bit t % 32 of word t // 32 for id t.

        V: more than the largest id. ends: ids that may come as well where a path ends.
        """
        at = np.asarray(nodes, np.int64)
        wide = self._first[at + 1] - self._first[at] > WIDE
        self._fill(np.where(wide, len(self._ids) - 1, at), bits)  # the last node has no children
        for i in np.flatnonzero(wide).tolist():
            bits[i] = self._wide_mask(int(at[i]), bits.shape[1])
        if len(ends):
            done = np.flatnonzero(self._ends[at])
            for token in ends:
                bits[done, token // WORD] |= _BIT << np.uint32(token % WORD)

    def _fill(self, nodes: HostArray, bits: HostArray) -> None:
        ids, _, offsets = self.children(nodes)
        bits[:] = 0
        row = np.repeat(np.arange(len(nodes)), np.diff(offsets))
        word = row * bits.shape[1] + ids // WORD
        new = np.flatnonzero(np.diff(word, prepend=-1))  # a node's ids are in order, so those of a word stand together
        if len(new):
            which = _BIT << (ids % WORD).astype(np.uint32)
            bits[row[new], ids[new] // WORD] = np.bitwise_or.reduceat(which, new)

    def _wide_mask(self, node: int, words: int) -> HostArray:
        """The mask of a node of many children, such as the root, which is kept."""
        if (found := self._wide.get((node, words))) is None:
            if len(self._wide) >= MOST_WIDE:
                self._wide = {}
            found = np.empty(words, np.uint32)
            self._fill(np.array([node]), found[None])
            self._wide[node, words] = found
        return found

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self._digest, Levels(self._ids, self._first, self._ends, self.depth))


_known: WeakValueDictionary[bytes, Trie] = WeakValueDictionary()


def _restored(digest: bytes, levels: Levels) -> Trie:
    """A catalogue that was pickled: one and the same, however often it comes."""
    return _known.get(digest) or _known.setdefault(digest, Trie(levels))


def _read(given: Any) -> tuple[HostArray, HostArray]:
    """The ids of all paths, one path's after another's, and the length of each. Raises InvalidRequest."""
    try:
        if isinstance(given, (str, bytes)) or getattr(given, "ndim", 2) != 2:
            raise TypeError("it holds no sequences")
        if hasattr(given, "ndim"):
            array = to_host(given)
            flat, lengths = array.reshape(-1), np.full(len(array), array.shape[1])
        else:
            rows = list(given)
            lengths = np.fromiter(map(len, rows), np.int64, len(rows))
            flat = np.array(list(chain.from_iterable(rows)))
    except Exception as e:  # of a class of the caller's own as well
        raise InvalidRequest(f"A Trie takes {_EXPECTED}; got {shown(given)}: {text_of(e)}.") from e
    if not len(lengths) or not lengths.all():
        got = f"none in path {int(np.argmin(lengths))}" if len(lengths) else "no path"
        raise InvalidRequest(f"A Trie takes one path or more, each of one id or more; got {got}. Leave empty ones out.")
    if flat.ndim != 1 or flat.dtype.kind not in "iu":
        raise InvalidRequest(f"A Trie takes {_EXPECTED}; got {shown(given)}. Ids are integers.")
    if flat.min() < 0 or flat.max() > MOST_INT:
        raise InvalidRequest(
            f"A Trie takes token ids from 0 to {MOST_INT}; got {flat.min()} to {flat.max()}. Look for a padding id, "
            f"and give paths of several lengths as lists."
        )
    return flat, lengths


def _levels(flat: HostArray, lengths: HostArray) -> Levels:
    """Made depth by depth: the nodes of a depth are the different pairs of parent and id."""
    base = int(flat.max()) + 1
    begin, width = np.cumsum(lengths) - lengths, 1
    at = np.zeros(len(lengths), np.int64)  # the node of each path that goes on, among those of its depth
    ids, counts, ends = [np.zeros(1, np.min_scalar_type(base - 1))], [], []
    for depth in count():
        over = lengths == depth
        ends.append(np.bincount(at[over], minlength=width) > 0)
        at, begin, lengths = at[~over], begin[~over], lengths[~over]
        if not len(at):
            counts.append(np.zeros(width, np.int64))
            break
        pairs, at = np.unique(at * base + flat[begin + depth].astype(np.int64), return_inverse=True)
        counts.append(np.bincount(pairs // base, minlength=width))
        ids.append((pairs % base).astype(ids[0].dtype))
        width = len(pairs)
    first = np.ones(sum(map(len, ids)) + 1, np.int32)
    np.cumsum(np.concatenate(counts), out=first[1:])
    first[1:] += 1
    return Levels(np.concatenate(ids), first, np.concatenate(ends), len(ids) - 1)


@dataclass(frozen=True, slots=True)
class TrieGuides:
    """Makes the guides of requests for one catalogue. ends: ids that may come where a path ends, and end the output."""

    trie: Trie
    ends: tuple[int, ...]
    eos_ids: tuple[int, ...] = ()

    def compile(self, grammar: Grammar) -> TrieGuide:
        """A guide at the root."""
        return TrieGuide(self)

    def masks(self, guides: Sequence[Guide], bits: Any) -> list[GuideFailed | None]:
        """See `GuideMaker`."""
        self.trie.masks([guide.node for guide in guides if isinstance(guide, TrieGuide)], bits, self.ends)
        return [None] * len(guides)


class TrieGuide:
    """See `Guide`. nodes: on the way of one output, the root first."""

    def __init__(self, guides: TrieGuides, nodes: Sequence[int] = (Trie.root,)) -> None:
        self._guides, self._nodes = guides, list(nodes)

    @property
    def node(self) -> int:
        return self._nodes[-1]

    def advance(self, tokens: Sequence[int]) -> None:
        nodes, node = [], self.node
        for token in tokens:
            if (node := self._guides.trie.step(node, token)) < 0:
                raise GuideFailed("A token came that no path of `allowed` has there.")
            nodes.append(node)
        self._nodes += nodes

    def take_back(self, n: int) -> None:
        if not 0 <= n < len(self._nodes):
            raise GuideFailed(f"Expected to take back 0 to {len(self._nodes) - 1} tokens; got {n}.")
        del self._nodes[len(self._nodes) - n :]

    @property
    def complete(self) -> bool:
        return not self._guides.trie.below(self.node)

    def forced(self, most: int) -> tuple[list[int], int]:
        trie, node, found = self._guides.trie, self.node, list[int]()
        while len(found) < most and len(trie.below(node)) == 1 and not (self._guides.ends and trie.is_end(node)):
            found.append(int(trie.children([node])[0][0]))
            node = trie.below(node)[0]
        return found, len(found)

    def fork(self) -> TrieGuide:
        return TrieGuide(self._guides, self._nodes)
