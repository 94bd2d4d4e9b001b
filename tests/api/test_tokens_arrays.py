"""Arrays in bodies: lists, {dtype, shape, data}, .npy; and what is none of these."""

import base64
import io
import json
import pickle
import struct

import msgspec
import numpy as np
import pytest

from hibachi.errors import ModelError
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.tokens.arrays import MOST_RANK, as_lists, as_npy, of_json, of_msgpack, of_npy, plain

pack = msgspec.msgpack.encode


def same(found, expected):
    expected = np.asarray(expected)
    assert found.dtype == expected.dtype and found.shape == expected.shape
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "given, dtype",
    [
        ([1, 2, 3], np.int64),
        ([[1, 2], [3, -4]], np.int64),
        ([0.5, 2], np.float64),
        ([[[0.1]]], np.float64),
        ([True, False], np.bool_),
        (7, np.int64),
        (0.25, np.float64),
        ([], np.int64),
        ([[], []], np.int64),
        ([2**63, 1], np.uint64),
        ([-(2**63)], np.int64),
    ],
)
def test_lists_of_numbers(given, dtype):
    expected = np.asarray(given, dtype)
    same(of_json(json.dumps(given).encode(), "prompt"), expected)
    same(of_msgpack(pack(given), "prompt"), expected)


def test_lists_say_no_dtype_so_1_may_mean_1_0():
    for read, raw in ((of_json, b"[1, 2]"), (of_msgpack, pack([1, 2]))):
        same(read(raw, "prompt", "float32"), np.array([1.0, 2.0]))
        same(read(raw, "prompt", "int32"), np.array([1, 2]))
    same(of_json(b" [ 1,\n 2 ] ", "prompt"), np.array([1, 2]))


def test_what_is_no_number_is_written_as_a_text_in_json_both_ways():
    given = np.array([[1.5, np.nan], [np.inf, -np.inf]], np.float32)
    told = as_lists(given)
    assert told == [[1.5, "NaN"], ["Infinity", "-Infinity"]]
    same(of_json(msgspec.json.encode(told), "prompt"), given.astype(np.float64))
    same(of_msgpack(pack(given.tolist()), "prompt"), given.astype(np.float64))
    assert as_lists(np.array([0.5, 1.5])) == [0.5, 1.5] and as_lists(np.array([True])) == [True]
    with pytest.raises(Refused, match="base64"):
        as_lists(np.array([1j]))


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "int64", "float16", "float32", "complex64"])
def test_bytes_in_json_and_msgpack(dtype):
    given = np.arange(6).reshape(2, 3).astype(dtype)
    data = {"dtype": dtype, "shape": [2, 3]}
    same(of_json(json.dumps(data | {"data": base64.b64encode(given.tobytes()).decode()}).encode(), "prompt"), given)
    same(of_msgpack(pack(data | {"data": given.tobytes()}), "prompt"), given)


def test_bfloat16_is_read_as_the_same_numbers():
    bits = struct.pack("<2H", 0x3F80, 0xC040)  # 1, -3
    same(of_msgpack(pack({"dtype": "bfloat16", "shape": [2], "data": bits}), "prompt"), np.float32([1, -3]))


def packed(**changes):
    return json.dumps({"dtype": "int32", "shape": [2], "data": base64.b64encode(bytes(8)).decode()} | changes).encode()


@pytest.mark.parametrize(
    "raw, says",
    [
        (b"[[1, 2], [3]]", "prompt: lists must be of equal lengths"),
        (b"[[1], 2]", r"prompt\[1\]: expected numbers, in lists of equal depth"),
        (b'[1, "2"]', r"prompt\[1\]"),
        (b'[1, "NaN", null]', r"prompt\[2\]"),
        (b"[null]", r"prompt\[0\]"),
        (b"[1, {}]", r"prompt\[1\]"),
        (b"[true, 2]", r"prompt\[0\]"),
        (b'"hello"', "expected numbers; got a text"),
        (b"[1e400]", "prompt"),
        (b"[" + b"9" * 400 + b"]", "64 bits"),
        (b"[-1, 9223372036854775808]", "64 bits"),
        (b"[" * 60 + b"]" * 60, f"{MOST_RANK} deep"),
        (packed(dtype="object"), r"prompt.dtype: expected one of bool"),
        (packed(dtype="<i4"), r"prompt.dtype"),
        (packed(shape=[3]), "takes 12 bytes of data; got 8"),
        (packed(shape=[10**9]), "takes 4000000000 bytes"),
        (packed(shape=[2**62, 2**62, 0, 4]), "dimensions"),
        (packed(shape=[-1, -2]), "dimensions"),
        (packed(shape=[1] * 40 + [2]), "dimensions"),
        (packed(shape=[10**40]), "dimensions|prompt.shape"),
        (packed(data="AAAA==A"), "prompt.data"),
        (packed(data=[0, 0]), "prompt.data"),
        (packed(more=1), "more"),
        (b'{"dtype": "int32"}', "missing"),
    ],
)
def test_what_is_no_array(raw, says):
    with pytest.raises(Refused, match=says) as e:
        of_json(raw, "prompt")
    assert e.value.status == 400 and e.value.param.startswith("prompt")


@pytest.mark.parametrize("given", [[[1], [2, 3]], [1, "2"], [b"12"], "text", b"12", [None], [-1, 2**63], {"a": 1}])
def test_what_is_no_array_in_msgpack(given):
    with pytest.raises(Refused) as e:
        of_msgpack(pack(given), "prompt")
    assert e.value.status == 400


# ---- .npy ----------------------------------------------------------------------------------------------------------


def npy(array, **options):
    out = io.BytesIO()
    np.save(out, array, **options)
    return out.getvalue()


@pytest.mark.parametrize(
    "given",
    [
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(6, dtype=">f4").reshape(3, 2),
        np.arange(6, dtype=np.float16)[::-2],
        np.zeros((3, 0, 2), np.uint8),
        np.float64(2.5),
        np.array([True, False]),
    ],
)
def test_npy(given):
    found = of_npy(npy(given))
    same(found, np.asarray(given).astype(np.asarray(given).dtype.newbyteorder("=")))
    assert found.dtype.isnative and found.flags.c_contiguous


def test_npy_of_version_2_and_of_other_writers():
    out = io.BytesIO()
    np.lib.format.write_array(out, np.arange(3), version=(2, 0))
    same(of_npy(out.getvalue()), np.arange(3))
    same(of_npy(made(b'{"shape":(2,),"fortran_order":False,"descr":"<i2"}', bytes(4))), np.zeros(2, np.int16))


def made(header, data=b"", version=1):
    size = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes([version, 0]) + size + header + data


class Bomb:
    def __reduce__(self):
        raise AssertionError("unpickled")


def head(descr="'<i4'", shape="(2,)", fortran="False"):
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}}}".encode()


@pytest.mark.parametrize(
    "data, says",
    [
        (b"", "expected an array as numpy.save writes it"),
        (b"\x93NUMPY", "expected an array"),
        (npy(np.array([{}, 1], object), allow_pickle=True), "no objects"),
        (npy(np.zeros(2, [("a", "i4"), ("b", "f8")])), "no objects, texts or records"),
        (npy(np.array(["text"])), "no objects"),
        (npy(np.array(["2020-01-01"], "M8[D]")), "no objects"),
        (pickle.dumps([1, 2]), "expected an array"),
        (made(head(), bytes(7)), "takes 8 bytes of data; got 7"),
        (made(head(), bytes(9)), "takes 8 bytes of data; got 9"),
        (made(head(shape="(10**9,)"), bytes(8)), "header of the .npy"),
        (made(head(shape="(1000000000,)"), bytes(8)), "takes 4000000000 bytes"),
        (made(head(shape="(-2,)"), bytes(8)), "dimensions"),
        (made(head(shape="(2.0,)"), bytes(8)), "tuple of integers"),
        (made(head(shape="(True, 2)"), bytes(8)), "tuple of integers"),
        (made(head(shape="[2]"), bytes(8)), "tuple of integers"),
        (made(head(fortran="'no'"), bytes(8)), "True or False"),
        (made(head(descr="'|O'"), bytes(16)), "no objects"),
        (made(head(descr="'<f3'"), bytes(8)), "dtype <f3"),
        (made(head(descr="'<i4,<i4'"), bytes(16)), "no objects"),
        (made(b"__import__('os').abort()"), "header of the .npy"),
        (made(b"(" * 4000), "header of the .npy"),
        (made(b"{'descr': '<i4'}"), "dictionary of descr"),
        (made(b"x" * 5000), "at most 4096 bytes"),
        (made(head(), bytes(8), version=3), "version 1 or 2"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + bytes(50), "at most 4096 bytes"),
    ],
)
def test_what_is_no_npy_of_numbers(data, says):
    with pytest.raises(Refused, match=says):
        of_npy(data)


# ---- out -----------------------------------------------------------------------------------------------------------


def test_what_goes_out_is_little_endian_in_c_order():
    given = np.asfortranarray(np.arange(6, dtype=">i2").reshape(2, 3))
    found = plain(given)
    assert found.tobytes() == given.astype("<i2").tobytes(order="C")
    same(of_npy(as_npy(found)), np.arange(6, dtype=np.int16).reshape(2, 3))
    assert plain(np.zeros(2, np.longdouble)).dtype == np.float64
    for bad in (np.array([None]), np.array(["a"])):
        with pytest.raises(ModelError, match="must return numbers"):
            plain(bad)
