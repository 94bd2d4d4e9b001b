"""Packing: the panels of matrices that lie in arrays and in files, byte by byte against a slow definition."""

import json
import os

import numpy as np
import pytest

from hibachi import InvalidModelFiles, NumpyBackend
from hibachi.backend import stored
from hibachi.backend.kernels.memory import Slabs
from hibachi.backend.packing import pack
from hibachi.backend.stored import Stored
from hibachi.llm.model.weights import Checkpoint

from .native import every_variant, skip_without

skip_without()
PANEL = 48
SIZES = [(1, 1), (47, 5), (49, 130), (200, 67)]


@pytest.fixture(scope="module")
def run():
    return NumpyBackend(native=True).library.kernels


def rounded(w):
    """The bits of bfloat16, to the nearest, ties to even."""
    bits = w.view(np.uint32).astype(np.uint64)
    near = ((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16).astype(np.uint16)
    return np.where(np.isnan(w), np.uint16(0x7FC0), near)


def panels(w, into):
    """The definition: lanes of as many numbers as fit into 32 bits, 48 rows beside each other; and scales."""
    n, k = w.shape
    depth, empty = {"float32": (1, 0), "bfloat16": (2, 0), "int8": (4, 128)}[into]
    scales = None
    values = w if into == "float32" else rounded(w)
    if into == "int8":
        most = np.abs(w).max(axis=1)
        fits = np.isfinite(most) & (most > 1e-30)
        factor = np.where(fits, np.float32(127) / np.where(fits, most, 1), 0).astype(np.float32)
        with np.errstate(invalid="ignore"):
            values = np.where(fits[:, None], np.rint(w * factor[:, None]) + 128, 128).astype(np.uint8)
        scales = np.zeros(-(-n // PANEL) * PANEL, np.float32)
        scales[:n] = np.where(fits, most / np.float32(127), np.where(most <= 1e-30, 0, np.nan))
    whole = np.full((-(-n // PANEL) * PANEL, -(-k // depth) * depth), empty, values.dtype)
    whole[:n, :k] = values
    return whole.reshape(-1, PANEL, whole.shape[1] // depth, depth).transpose(0, 2, 1, 3).reshape(-1), scales


def numbers(n, k, dtype):
    """Numbers as they are stored, and as float32: with ties, rows of zeros, tiny and not finite ones."""
    w = np.random.default_rng(n * k).standard_normal((n, k)).astype(np.float32)
    w[:, k // 2] *= 30
    w[::7, 0] = 1.00390625  # halfway between two of bfloat16
    for row, value in ((3, 0), (4, 1e-37), (5, np.inf), (6, np.nan)):
        w[row : row + 1, k // 3 :] = value
    if dtype == "F16":
        with np.errstate(over="ignore"):
            half = w.astype(np.float16)
        return half, half.astype(np.float32)
    if dtype == "BF16":
        bits = rounded(w)
        return bits.view([("bfloat16", np.uint16)]), (bits.astype(np.uint32) << 16).view(np.float32)
    return w, w


def same(got, want):
    assert got.tobytes() == want.tobytes() if got.dtype != np.float32 else np.array_equal(got, want, equal_nan=True)


def file_of(path, *arrays, dtype):
    """A safetensors file with these matrices, which begin at odd places."""
    header, data = {}, b""
    for name, array in [("odd", np.zeros(3, np.uint8)), *((f"w{i}", a) for i, a in enumerate(arrays))]:
        kind = "U8" if name == "odd" else dtype
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.mkdir()
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return Checkpoint(path)


@pytest.mark.parametrize("window", [1, 100_000])
@pytest.mark.parametrize("into", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_panels_are_those_of_the_definition_wherever_the_rows_lie(tmp_path, monkeypatch, run, dtype, into, window):
    monkeypatch.setattr(stored, "WINDOW", window)
    for n, k in SIZES:
        given, wide = numbers(n, k, dtype)
        more, wider = numbers(n + 3, k, dtype)
        files = file_of(tmp_path / f"{n}-{k}", given, more, dtype=dtype)
        unread = files.matrices("w0") + files.matrices("w1")
        assert all(isinstance(part, Stored) for part in unread)
        order = np.random.default_rng(0).permutation(n).astype(np.int32)
        turned = Stored(unread[0].file, dtype, (n, k), unread[0].offset, order)
        for parts, whole in (
            ([given], wide),
            ([given, more, given], np.concatenate([wide, wider, wide])),
            (unread, np.concatenate([wide, wider])),
            ([turned, more], np.concatenate([wide[order], wider])),
        ):
            data, scales = pack(parts, into, run, Slabs())
            want, wanted_scales = panels(whole, into)
            same(data, want)
            assert (scales is None) is (wanted_scales is None)
            if scales is not None:
                np.testing.assert_array_equal(scales, wanted_scales)


@pytest.mark.parametrize("into", ["float32", "bfloat16"])
def test_all_numbers_of_float16_and_bfloat16_are_read_exactly(run, into):
    every = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    half, bits = every.view(np.float16), every.view([("bfloat16", np.uint16)])
    for given, wide in ((half, half.astype(np.float32)), (bits, (every.astype(np.uint32) << 16).view(np.float32))):
        data, _ = pack([given], into, run, Slabs())
        want, _ = panels(wide, into)
        same(data, want)


def test_arrays_of_other_kinds_are_cast(run):
    w = np.random.default_rng(0).standard_normal((50, 9))
    want, _ = panels(w.astype(np.float32), "bfloat16")
    for given in (w, np.asfortranarray(w), w.astype(">f4"), np.repeat(w, 2, axis=1)[:, ::2]):
        same(pack([given], "bfloat16", run, Slabs())[0], want)


def test_every_variant_packs_the_same(monkeypatch):
    runs = [b.library.kernels for b in every_variant(lambda: NumpyBackend(native=True), monkeypatch)]
    for dtype in ("F32", "F16", "BF16"):
        given, wide = numbers(100, 131, dtype)
        for run in runs:
            for into in ("float32", "bfloat16", "int8"):
                same(pack([given], into, run, Slabs())[0], panels(wide, into)[0])


def test_parts_of_several_widths_are_refused(run):
    with pytest.raises(ValueError, match=r"expected parts of 4 columns; got \(3, 4\), \(3, 5\)"):
        pack([np.zeros((3, 4)), np.zeros((3, 5))], "float32", run, Slabs())


def test_experts_are_matrices_of_one_tensor(tmp_path, run):
    given, wide = numbers(6, 40, "F16")
    given, wide = given.reshape(3, 2, 40), wide.reshape(3, 2, 40)
    found = file_of(tmp_path / "m", given, dtype="F16").matrices("w0")
    assert len(found) == 3
    for part, each in zip(found, wide, strict=True):
        same(pack([part], "float32", run, Slabs())[0], panels(each, "float32")[0])
        np.testing.assert_array_equal(part.read(np.float32), each)


def test_few_rows_are_mapped_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "WINDOW", 5000)
    [part] = file_of(tmp_path / "m", np.zeros((300, 10), np.float32), dtype="F32").matrices("w0")
    assert [len(rows) for rows in part.rows(PANEL)] == [96, 96, 96, 12]


def test_a_file_that_was_cut_since_it_was_opened_is_named(tmp_path, run):
    given, _ = numbers(200, 67, "BF16")
    [part] = file_of(tmp_path / "m", given, dtype="BF16").matrices("w0")
    os.truncate(part.file, part.offset + given.nbytes - 1)
    with pytest.raises(InvalidModelFiles, match=r"model\.safetensors has changed since it was opened.*download"):
        pack([part], "bfloat16", run, Slabs())


def test_rows_that_are_not_there_are_refused(run):
    out = np.zeros(run.packed(0, 2, 4), np.uint8)
    order, w = np.array([0, 2], np.int32), np.zeros((2, 4), np.float32)
    with pytest.raises(IndexError):
        run.pack(0, 0, w.ctypes.data, order.ctypes.data, out.ctypes.data, None, 0, 2, 2, 4)
