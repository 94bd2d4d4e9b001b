"""Safetensors: one file or shards, three dtypes, and what is said about damaged ones."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hibachi.errors import InvalidModelFiles
from hibachi.model.weights import Checkpoint

TENSORS = {"a": torch.linspace(-3, 3, 12).reshape(3, 4), "b": torch.arange(5.0), "c": torch.tensor(2.0)}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def write_shards(path):
    """a and b in one file, c in another."""
    save_file({k: TENSORS[k] for k in "ab"}, path / "1.safetensors")
    save_file({"c": TENSORS["c"]}, path / "2.safetensors")
    names = {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}
    (path / INDEX).write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_come_by_name_exactly(tmp_path, dtype):
    stored = {name: t.to(dtype) for name, t in TENSORS.items()}
    save_file(stored, tmp_path / SINGLE)
    read = dict(Checkpoint(tmp_path))
    assert read.keys() == stored.keys()
    for name, a in read.items():
        assert a.dtype == (np.float16 if dtype == torch.float16 else np.float32)
        assert a.shape == stored[name].shape
        np.testing.assert_array_equal(a, stored[name].float().numpy())


def test_shards_are_one_checkpoint(tmp_path):
    write_shards(tmp_path)
    read = Checkpoint(tmp_path)
    assert sorted(read) == ["a", "b", "c"]
    for name in read:
        np.testing.assert_array_equal(read[name], TENSORS[name].numpy())


def test_no_weights_at_all(tmp_path):
    with pytest.raises(InvalidModelFiles, match=r"expected model\.safetensors.*save_pretrained"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "empty", "junk", "longer"])
def test_a_damaged_file_is_named(tmp_path, damage):
    save_file(TENSORS, tmp_path / SINGLE)
    data = (tmp_path / SINGLE).read_bytes()
    damaged = {"truncated": data[:-3], "empty": b"", "junk": b"x" * 100, "longer": data + b"123"}[damage]
    (tmp_path / SINGLE).write_bytes(damaged)
    with pytest.raises(InvalidModelFiles, match=r"model\.safetensors is not a complete.*download the file again"):
        Checkpoint(tmp_path)


def test_missing_shards_are_listed(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "2.safetensors").unlink()
    with pytest.raises(InvalidModelFiles, match=r"names 2 shards; missing .*: 2\.safetensors\. Download"):
        Checkpoint(tmp_path)


def test_tensors_that_no_shard_holds_are_listed(tmp_path):
    write_shards(tmp_path)
    save_file({"d": TENSORS["c"]}, tmp_path / "2.safetensors")
    with pytest.raises(InvalidModelFiles, match="no shard holds: c"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": "../1.safetensors"}}])
def test_an_index_of_another_form_is_refused(tmp_path, index):
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(InvalidModelFiles, match="expected a weight_map"):
        Checkpoint(tmp_path)


def test_all_faults_come_in_one_error(tmp_path):
    save_file(TENSORS | {"e": torch.tensor([1, 2])}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(InvalidModelFiles) as e:
        checkpoint.check({"a": (4, 3), "b": (5,), "d": (1, 2)}, {"e": (2,), "f": (7,)})
    assert [line.strip() for line in str(e.value).split("\n")[1:-1]] == [
        "d is missing (expected shape (1, 2))",
        "a has shape (3, 4), expected (4, 3)",
        "c () is not part of this architecture",
        "e is stored as I64, expected one of BF16, F16, F32, F64",
    ]
    assert "from one download" in str(e.value)


def test_what_is_optional_may_be_there_or_not(tmp_path):
    save_file(TENSORS, tmp_path / SINGLE)
    Checkpoint(tmp_path).check({"a": (3, 4), "b": (5,)}, {"c": (), "d": (9,)})
