"""Vocabularies without merges, made so that finding those takes for ever."""

import itertools
import json
import random
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from ...lib.inside import underlying

pytest.importorskip("tokenizers")

from hibachi.errors import InvalidModelFiles
from hibachi.llm.model.gguf.tokenizer import read_tokenizer
from hibachi.llm.tokenizers import Tokenizer, merges
from hibachi.llm.tokenizers.merges import cuts

NORMAL, UNKNOWN, BYTE = 1, 2, 6
BYTES = [f"<0x{i:02X}>" for i in range(256)]
RNG = random.Random(0)


def words(count, letters, longest):
    return list(dict.fromkeys("".join(RNG.choices(letters, k=RNG.randint(1, longest))) for _ in range(count)))


HOSTILE = {
    "one of a megabyte": (["a", "b", "ab" * 500_000], "a token; got 1000000"),
    "each the beginning of the next": (["a" * n for n in range(1, 1501)], "a token; got 1500"),
    "of each other in every way": (
        ["".join(word) for n in range(1, 16) for word in itertools.product("ab", repeat=n)],
        "ways to cut",
    ),
    "large": ([f"{n:05}" * 100 for n in range(17_000)], "characters of tokens"),
}


def gguf(tokens, scores=None):
    """SentencePiece in GGUF."""
    tokens = ["<unk>", *BYTES, *dict.fromkeys(tokens)]
    types = np.array([UNKNOWN] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 257), np.int32)
    scores = -np.arange(len(tokens), dtype=np.float32) if scores is None else scores
    entries = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    return read_tokenizer(Path("m.gguf"), {f"tokenizer.ggml.{name}": value for name, value in entries.items()}).raw


def sentencepiece(folder, tokens):
    """The same as a tokenizer.model."""

    def field(number, data):
        size, out = len(data), b""
        while size >= 128:
            size, out = size >> 7, out + bytes([size & 127 | 128])
        return bytes([number << 3 | 2]) + out + bytes([size]) + data

    pieces = [("<unk>", UNKNOWN), *((b, BYTE) for b in BYTES), *((t, NORMAL) for t in dict.fromkeys(tokens))]
    data = b"".join(
        field(1, field(1, text.encode()) + b"\x15" + struct.pack("<f", -n) + bytes([3 << 3, kind]))
        for n, (text, kind) in enumerate(pieces)
    )
    (folder / "tokenizer.model").write_bytes(data + field(2, b"\x18\x02\x98\x02\x01"))  # BPE, with bytes
    return underlying(Tokenizer.load(folder))


@pytest.mark.parametrize("form", ["gguf", "sentencepiece"])
@pytest.mark.parametrize("what", HOSTILE)
def test_m4_a_vocabulary_that_would_take_for_ever_is_refused(tmp_path, what, form):
    tokens, message = HOSTILE[what]
    message = message if form == "gguf" else f"{message}|of 1 to 512 characters"
    began = time.perf_counter()
    with pytest.raises(InvalidModelFiles, match=message):
        gguf(tokens) if form == "gguf" else sentencepiece(tmp_path, tokens)
    assert time.perf_counter() - began < 10


def test_m4_the_memory_for_it_is_bounded():
    tokens, _ = HOSTILE["each the beginning of the next"]
    tracemalloc.start()
    try:
        with pytest.raises(InvalidModelFiles):
            gguf(tokens)
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("form", ["gguf", "sentencepiece"])
def test_m4_the_merges_of_a_vocabulary_are_all_there_are(tmp_path, form):
    """Against a loop over everything, with the orders of both: 64 dashes as trained vocabularies have them."""
    tokens = list(dict.fromkeys([*"abc-", *("-" * n for n in range(2, 65)), *words(3000, "abc", 8)]))
    there = set(tokens)
    every = [(t, at) for t in tokens for at in range(1, len(t)) if t[:at] in there and t[at:] in there]
    assert list(cuts(tokens, "")) == every and len(every) > 2000
    longest_first = form == "sentencepiece"
    every.sort(key=lambda way: (tokens.index(way[0]), -way[1] if longest_first else way[1]))
    raw = gguf(tokens) if form == "gguf" else sentencepiece(tmp_path, tokens)
    found = json.loads(raw.model.__getstate__())["merges"]
    assert [tuple(pair) for pair in found] == [(t[:at], t[at:]) for t, at in every]


def test_m4_a_large_vocabulary_loads():
    """Over 60k tokens, each of which two others make, and longer ones than anybody trains."""
    tokens = ["a" * n for n in range(1, 1 + merges.LONGEST)]
    tokens += dict.fromkeys(word[:n] for word in words(20_000, "abcdefghijklmnop", 12) for n in range(1, 1 + len(word)))
    assert len(tokens) > 60_000
    began = time.perf_counter()
    assert gguf(tokens).encode("abc").ids
    assert time.perf_counter() - began < 20
