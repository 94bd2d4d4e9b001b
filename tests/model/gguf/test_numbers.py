"""Numbers of a GGUF file: quantized ones against slow decoders, the others as they are."""

import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from hibachi.errors import InvalidModelFiles, MissingExtra
from hibachi.llm.model.gguf import GGUF
from hibachi.llm.model.gguf.file import _TYPES, READABLE, read_header

ROOT = Path(__file__).parents[3]
SMOLLM2 = ROOT / ".smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def write(path, tensors):
    """A GGUF file of tensors: name -> (array, kind)."""
    w = gguf.GGUFWriter(path, "x")
    for name, (array, kind) in tensors.items():
        w.add_tensor(name, array, raw_dtype=Kind[kind])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return read_header(path)[1]


# ---- decoders of one block, written after the format's description in ggml's source ---------------------------------


def half(b):
    return struct.unpack("<e", b)[0]


def q4_0(b):
    d, q = half(b[:2]), b[2:]
    return [d * ((x & 15) - 8) for x in q] + [d * ((x >> 4) - 8) for x in q]


def q4_1(b):
    d, m, q = half(b[:2]), half(b[2:4]), b[4:]
    return [d * (x & 15) + m for x in q] + [d * (x >> 4) + m for x in q]


def fifth_bits(b):
    high = int.from_bytes(b[:4], "little")
    low = [x & 15 for x in b[4:]] + [x >> 4 for x in b[4:]]
    return [x | (high >> i & 1) << 4 for i, x in enumerate(low)]


def q5_0(b):
    return [half(b[:2]) * (x - 16) for x in fifth_bits(b[2:])]


def q5_1(b):
    return [half(b[:2]) * x + half(b[2:4]) for x in fifth_bits(b[4:])]


def q8_0(b):
    return [half(b[:2]) * x for x in struct.unpack("<32b", b[2:])]


def q2_k(b):
    scales, q, d, least, out = b[:16], b[16:80], half(b[80:82]), half(b[82:84]), []
    for part in range(16):  # of 16 values each
        first, shift = 32 * (part // 8) + 16 * (part % 2), 2 * (part % 8 // 2)
        scale, minimum = d * (scales[part] & 15), least * (scales[part] >> 4)
        out += [scale * (x >> shift & 3) - minimum for x in q[first : first + 16]]
    return out


def q3_k(b):
    mask, q, packed, d, out = b[:32], b[32:96], b[96:108], half(b[108:110]), []
    for part in range(16):
        low = packed[part % 8] >> 4 * (part // 8) & 15
        scale = (low | (packed[8 + part % 4] >> 2 * (part // 4) & 3) << 4) - 32
        shift, bit = 2 * (part % 8 // 2), part // 2
        for i in range(16 * (part % 2), 16 * (part % 2) + 16):
            x = q[32 * (part // 8) + i] >> shift & 3
            out.append(d * scale * (x - (0 if mask[i] >> bit & 1 else 4)))
    return out


def six_bits(packed, i):
    """Scale and minimum of a part of Q4_K or Q5_K."""
    if i < 4:
        return packed[i] & 63, packed[i + 4] & 63
    return (packed[i + 4] & 15) | packed[i - 4] >> 6 << 4, packed[i + 4] >> 4 | packed[i] >> 6 << 4


def q4_k(b, high=bytes(32)):
    d, least, packed, q, out = half(b[:2]), half(b[2:4]), b[4:16], b[16:144], []
    for part in range(8):  # of 32 values each
        scale, minimum = six_bits(packed, part)
        for i in range(32):
            x = q[32 * (part // 2) + i] >> 4 * (part % 2) & 15 | (high[i] >> part & 1) << 4
            out.append(d * scale * x - least * minimum)
    return out


def q5_k(b):
    return q4_k(b[:16] + b[48:176], b[16:48])


def q6_k(b):
    low, high, scales, d = b[:128], b[128:192], struct.unpack("<16b", b[192:208]), half(b[208:210])
    out = []
    for i in range(256):
        n, row, column = i // 128, i % 128 // 32, i % 32
        x = low[64 * n + 32 * (row % 2) + column] >> 4 * (row // 2) & 15
        x |= (high[32 * n + column] >> 2 * row & 3) << 4
        out.append(d * scales[i // 16] * (x - 32))
    return out


SLOW = {  # decoder, where a block has its halves
    "Q4_0": (q4_0, [0]),
    "Q4_1": (q4_1, [0, 2]),
    "Q5_0": (q5_0, [0]),
    "Q5_1": (q5_1, [0, 2]),
    "Q8_0": (q8_0, [0]),
    "Q2_K": (q2_k, [80, 82]),
    "Q3_K": (q3_k, [108]),
    "Q4_K": (q4_k, [0, 2]),
    "Q5_K": (q5_k, [0, 2]),
    "Q6_K": (q6_k, [208]),
}


def random_rows(kind, rows, blocks, seed=0):
    """Rows of blocks of random bytes, their scales of usual size."""
    rng, size = np.random.default_rng(seed), gguf.GGML_QUANT_SIZES[Kind[kind]][1]
    data = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in SLOW[kind][1]:
        data[:, :, at : at + 2] = rng.uniform(-2, 2, (rows, blocks, 1)).astype("<f2").view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", SLOW)
def test_quantized_numbers_are_those_of_a_slow_decoder(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("hibachi.llm.model.gguf.file._QUANTIZED_WINDOW", 512)  # smaller than the tensor
    rows, (values, size) = random_rows(kind, 5, 3), gguf.GGML_QUANT_SIZES[Kind[kind]]
    stored = write(tmp_path / "m.gguf", {"w": (rows, kind)})["w"]
    read = stored.read()
    blocks = rows.reshape(-1, size)
    slow = np.array([SLOW[kind][0](block.tobytes()) for block in blocks]).reshape(5, 3 * values)
    assert (stored.dtype, stored.shape) == (kind, slow.shape) and read.dtype == np.float32
    np.testing.assert_allclose(read, slow, rtol=1e-6, atol=1e-6 * np.abs(slow).max())
    np.testing.assert_array_equal(stored.read("float16"), read.astype("float16"))


def test_blocks_are_as_large_as_the_library_says():
    ours = {name: (values, size) for name, values, size in _TYPES.values()}
    theirs = {kind.name: gguf.GGML_QUANT_SIZES[kind] for kind in gguf.quants._type_traits}
    both = ours.keys() & theirs.keys()
    assert both >= SLOW.keys() and both <= READABLE
    assert {name: ours[name] for name in both} == {name: theirs[name] for name in both}


def test_numbers_that_are_not_quantized_come_exactly_without_the_library(tmp_path, monkeypatch):
    a = np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32)
    bits = a.view(np.uint32) >> 16
    kinds = {
        "f32": (a, "F32"),
        "f16": (a.astype(np.float16), "F16"),
        "bf16": (bits.astype("<u2").view(np.uint8), "BF16"),
        "f64": (a.astype(np.float64), "F64"),
        "q4_0": (random_rows("Q4_0", 1, 1), "Q4_0"),
        "i8": (np.zeros((2, 2), np.int8), "I8"),
    }
    stored = write(tmp_path / "m.gguf", kinds)
    monkeypatch.setitem(sys.modules, "gguf", None)
    expected = {"f32": a, "f16": a.astype(np.float16), "bf16": (bits << 16).view(np.float32), "f64": a.astype(float)}
    for name, numbers in expected.items():
        assert stored[name].read().dtype == numbers.dtype
        np.testing.assert_array_equal(stored[name].read(), numbers)
        np.testing.assert_array_equal(stored[name].read(np.float64), numbers.astype(np.float64))
    with pytest.raises(MissingExtra, match=r"Reading Q4_0 weights needs.*extra 'gguf': pip install '\.\[gguf\]'"):
        stored["q4_0"].read()
    with pytest.raises(InvalidModelFiles, match="stored as I8; expected one of BF16"):
        stored["i8"].read()


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.exists(), reason=f"{SMOLLM2.name} is not in .smollm2: make .smollm2/fetched")
def test_tensors_of_a_real_file_are_those_of_the_slow_decoders():
    stored, kinds = read_header(SMOLLM2)[1], set()
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.7.ffn_down.weight", "blk.29.ffn_gate.weight"):
        t, (decode, _) = stored[name], SLOW[stored[name].dtype]
        _, size = gguf.GGML_QUANT_SIZES[Kind[t.dtype]]
        blocks = np.fromfile(SMOLLM2, np.uint8, 2000 * size, offset=t.offset).reshape(-1, size)
        slow = np.concatenate([decode(b.tobytes()) for b in blocks])
        np.testing.assert_allclose(t.read().reshape(-1)[: len(slow)], slow, rtol=1e-6, atol=1e-7)
        kinds.add(t.dtype)
    assert kinds == {"Q8_0", "Q4_1"}
    model = GGUF(SMOLLM2)
    for name in model:
        a = model[name]
        assert a.shape == model.shape(name) and np.isfinite(a).all() and 0 < a.std() < 5, name
