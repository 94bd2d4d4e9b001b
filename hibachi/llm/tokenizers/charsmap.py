"""SentencePiece's table of what characters are replaced by before tokenizing, such as NFKC and tidier spaces."""

from __future__ import annotations

import re
import struct
from functools import cache

from hibachi.errors import InvalidModelFiles

_LONGEST_VALUE = 64  # bytes that stand for a character; Unicode's have at most 33
_LONGEST = 255  # bytes of a key; Unicode's have a few dozen, and a broken table might have no end


class Charsmap:
    """A `precompiled_charsmap`: at each place of a text the longest key is replaced by its value.

    The layout is that of SentencePiece: a uint32 with the size of a trie, the trie, values that end in a zero byte. The
    trie is a double array of uint32 as Darts-clone has it (Yata): a node's child for byte b is at its offset XOR b.
    """

    def __init__(self, blob: bytes) -> None:
        """Raises InvalidModelFiles if the sizes do not fit, or a text could become too long."""
        size = int.from_bytes(blob[:4], "little")
        if len(blob) < 8 or size % 4 or not 4 <= size <= len(blob) - 4:
            raise InvalidModelFiles(
                f"precompiled_charsmap: expected a trie of {size} bytes and its values; got {len(blob)} bytes. "
                f"Copy or download the tokenizer again."
            )
        self._units = struct.unpack_from(f"<{size // 4}I", blob, 4)
        self._values = blob[4 + size :]
        if (longest := max(map(len, self._values.split(b"\0")))) > _LONGEST_VALUE:
            raise InvalidModelFiles(
                f"precompiled_charsmap: expected characters to be replaced by at most {_LONGEST_VALUE} bytes; got "
                f"{longest}. Copy or download the tokenizer again."
            )
        # A run of ASCII that no key in ASCII begins in stays as it is, up to a letter that a key may begin with.
        plain = bytes(b for b in range(128) if not self._begins_key(b))
        self._plain = re.compile(b"[" + re.escape(plain) + b"]+(?![\\x80-\\xff])" if plain else b"(?!)")
        self._value = cache(self._read)

    def __call__(self, text: str) -> str:
        """What a broken table makes of a text is not defined."""
        data, out, at = text.encode(), [], 0
        while at < len(data):
            if run := self._plain.match(data, at):
                out.append(run[0])
                at = run.end()
                continue
            size, value = self._match(data, at)
            if size:
                out.append(self._value(value))
            else:
                first = data[at]  # of a character of 1 to 4 bytes
                size = 1 + (first >= 0xC0) + (first >= 0xE0) + (first >= 0xF0)
                out.append(data[at : at + size])
            at += size
        return b"".join(out).decode(errors="replace")

    def _match(self, data: bytes, at: int) -> tuple[int, int]:
        """Length of the longest key that stands there, and where its value is; 0 if none does."""
        found, value, node = 0, 0, 0
        for size, byte in enumerate(data[at : at + _LONGEST], 1):
            child = self._child(node, byte)
            if child is None:
                break
            node = child
            leaf = node ^ _offset(self._units[node])
            if self._units[node] & 0x100 and leaf < len(self._units):
                found, value = size, self._units[leaf] & 0x7FFFFFFF
        return found, value

    def _child(self, node: int, byte: int) -> int | None:
        child = node ^ _offset(self._units[node]) ^ byte
        return child if child < len(self._units) and self._units[child] & 0x800000FF == byte else None

    def _begins_key(self, byte: int) -> bool:
        node = self._child(0, byte)
        if node is None:
            return False
        return bool(self._units[node] & 0x100) or any(self._child(node, b) is not None for b in range(1, 128))

    def _read(self, at: int) -> bytes:
        end = self._values.find(b"\0", at)
        return self._values[at : end if end >= 0 else None]


def _offset(unit: int) -> int:
    """From a node to where its children are."""
    return unit >> 10 << ((unit & 0x200) >> 6)
