"""Numbers of a GGUF file: quantized ones as the library gguf reads them, the others as they are."""

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from hibachi.errors import InvalidModelFiles, MissingExtra
from hibachi.llm.model.gguf import GGUF
from hibachi.llm.model.gguf.file import READABLE, read_header

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


HALVES = {  # where a block has the scales that are halves
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def random_rows(kind, rows, blocks, seed=0):
    """Rows of blocks of random bytes, their scales of usual size."""
    rng, size = np.random.default_rng(seed), gguf.GGML_QUANT_SIZES[Kind[kind]][1]
    data = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in HALVES[kind]:
        data[:, :, at : at + 2] = rng.uniform(-2, 2, (rows, blocks, 1)).astype("<f2").view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", HALVES)
def test_quantized_numbers_are_those_of_the_library_gguf(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("hibachi.llm.model.gguf.file._QUANTIZED_WINDOW", 512)  # smaller than the tensor
    rows = random_rows(kind, 5, 3)
    stored = write(tmp_path / "m.gguf", {"before": (random_rows(kind, 1, 1, 1), kind), "w": (rows, kind)})["w"]
    read, expected = stored.read(), gguf.quants.dequantize(rows, Kind[kind])
    assert (stored.dtype, stored.shape) == (kind, expected.shape) and read.dtype == np.float32
    np.testing.assert_array_equal(read, expected)
    np.testing.assert_array_equal(stored.read("float16"), read.astype("float16"))
    assert kind in READABLE


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
def test_tensors_of_a_real_file_are_numbers_of_usual_size():
    model = GGUF(SMOLLM2)
    for name in model:
        a = model[name]
        assert a.shape == model.shape(name) and np.isfinite(a).all() and 0 < a.std() < 5, name
