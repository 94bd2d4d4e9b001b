"""Safetensors: one file or shards, cast while reading, and what is said about damaged ones."""

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hibachi.errors import InvalidModelFiles
from hibachi.llm.model.weights import Checkpoint

ROOT = Path(__file__).parents[2]
TENSORS = {"a": torch.linspace(-3, 3, 12).reshape(3, 4), "b": torch.arange(5.0), "c": torch.tensor(2.0)}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def write_shards(path, dtype=torch.float32):
    """a and b in one file, c in another."""
    save_file({k: TENSORS[k].to(dtype) for k in "ab"}, path / "1.safetensors")
    save_file({"c": TENSORS["c"].to(dtype)}, path / "2.safetensors")
    names = {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}
    (path / INDEX).write_text(json.dumps({"weight_map": names}))


def raw(header, data=b""):
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_come_by_name_exactly(tmp_path, dtype):
    stored = {name: t.to(dtype) for name, t in TENSORS.items()}
    save_file(stored, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.keys() == stored.keys()
    for name, a in checkpoint.items():
        assert a.dtype == {torch.float64: np.float64, torch.float16: np.float16}.get(dtype, np.float32)
        assert a.shape == checkpoint.shape(name) == stored[name].shape
        assert a.flags.writeable and a.flags.owndata
        np.testing.assert_array_equal(a, stored[name].to(torch.float64).numpy())


@pytest.mark.parametrize("window", [8, 40, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_numbers_are_cast_while_they_are_read(tmp_path, monkeypatch, dtype, window):
    monkeypatch.setattr("hibachi.backend.stored.WINDOW", window)
    stored = {name: t.to(dtype) for name, t in TENSORS.items()}
    save_file(stored, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    assert {checkpoint.dtype(name) for name in checkpoint} == {
        {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    }
    for wanted in (np.float64, "float32", np.float16):
        for name, t in stored.items():
            a = checkpoint.read(name, wanted)
            assert a.dtype == wanted
            np.testing.assert_array_equal(a, t.to(torch.float64).numpy().astype(wanted))


def test_shards_are_one_checkpoint(tmp_path):
    write_shards(tmp_path)
    read = Checkpoint(tmp_path)
    assert sorted(read) == ["a", "b", "c"] and len(read) == 3 and "a" in read and "d" not in read
    for name in read:
        np.testing.assert_array_equal(read[name], TENSORS[name].numpy())


def test_shards_may_be_links_to_elsewhere(tmp_path):
    """As in a Hub cache, where a snapshot has links to ../../blobs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    write_shards(blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", file.name))
    assert sorted(Checkpoint(snapshot)) == ["a", "b", "c"]


def test_an_empty_tensor_is_one(tmp_path):
    save_file({"e": torch.zeros(0, 3), "a": TENSORS["a"]}, tmp_path / SINGLE)
    assert Checkpoint(tmp_path)["e"].shape == (0, 3)


def test_a_name_that_is_not_there(tmp_path):
    save_file(TENSORS, tmp_path / SINGLE)
    with pytest.raises(KeyError):
        Checkpoint(tmp_path)["d"]


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_no_weights_at_all(tmp_path):
    with pytest.raises(InvalidModelFiles, match=r"expected model\.safetensors.*save_pretrained"):
        Checkpoint(tmp_path)
    (tmp_path / "m.Q4_0.gguf").touch()
    with pytest.raises(InvalidModelFiles, match=r"weights in m\.Q4_0\.gguf beside a config\.json: name that file"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_never_read(tmp_path, name):
    """A pickle that leaves a mark when it is loaded."""
    (tmp_path / name).write_bytes(b"cos\nmkdir\n(V" + str(tmp_path / "loaded").encode() + b"\ntR.")
    with pytest.raises(InvalidModelFiles, match=rf"weights in {name}.*run any code.*from_pretrained.*save_pretrained"):
        Checkpoint(tmp_path)
    assert not (tmp_path / "loaded").exists()


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / SINGLE)
    with pytest.raises(InvalidModelFiles, match="No weights"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "empty", "junk", "longer"])
def test_a_damaged_file_is_named(tmp_path, damage):
    save_file(TENSORS, tmp_path / SINGLE)
    data = (tmp_path / SINGLE).read_bytes()
    damaged = {"truncated": data[:-3], "empty": b"", "junk": b"x" * 100, "longer": data + b"123"}[damage]
    (tmp_path / SINGLE).write_bytes(damaged)
    with pytest.raises(InvalidModelFiles, match=r"model\.safetensors is not a complete.*download the file again"):
        Checkpoint(tmp_path)


def f32(shape, start, stop):
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}


HEADERS = {
    "no JSON": b"{",
    "no object": [],
    "no UTF-8": b'{"\xff": 1}',
    "deep": b"[" * 100_000,
    "a long number": b'{"a": ' + b"9" * 10_000 + b"}",
    "a name twice": b'{"a": 1, "a": 1}',
    "no tensor": {"a": 1},
    "no dtype": {"a": {"shape": [4], "data_offsets": [0, 16]}},
    "a dtype that is no name": {"a": {"dtype": 7, "shape": [4], "data_offsets": [0, 16]}},
    "a negative shape": {"a": f32([-4], 0, 16)},
    "two negative sizes": {"a": f32([-2, -2], 0, 16)},
    "a broken shape": {"a": f32([4.0], 0, 16)},
    "a shape of truth values": {"a": f32([True], 0, 4)},
    "a shape that is a number": {"a": f32(4, 0, 16)},
    "a shape beyond 64 bits": {"a": f32([2**64], 0, 16)},
    "a product that overflows": {"a": f32([2**32, 2**32], 0, 16)},
    "a shape beyond the file": {"a": f32([2**40], 0, 2**42)},
    "nothing, but wide": {"a": f32([2**62, 0], 0, 0), "b": f32([4], 0, 16)},
    "many dimensions": {"a": f32([1] * 70, 0, 4), "b": f32([3], 4, 16)},
    "a negative offset": {"a": f32([4], -16, 0)},
    "one offset": {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0]}},
    "offsets the wrong way round": {"a": f32([4], 16, 0)},
    "fewer bytes than numbers": {"a": f32([5], 0, 16)},
    "an overlap": {"a": f32([3], 0, 12), "b": f32([2], 8, 16)},
    "a gap": {"a": f32([1], 0, 4), "b": f32([2], 8, 16)},
    "bytes that are nobody's": {"a": f32([3], 0, 12)},
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_promises_what_is_not_there(tmp_path, what):
    (tmp_path / SINGLE).write_bytes(raw(HEADERS[what], bytes(16)))
    with pytest.raises(InvalidModelFiles, match=r"model\.safetensors is not a complete.*[Dd]ownload"):
        Checkpoint(tmp_path)


def test_a_length_that_is_not_there_is_not_read(tmp_path):
    for size in (2**63, 2**40, 10**6):
        (tmp_path / SINGLE).write_bytes(size.to_bytes(8, "little") + b"{}")
        with pytest.raises(InvalidModelFiles, match=f"header should have {size} bytes, the file has 10"):
            Checkpoint(tmp_path)


def test_a_file_that_shrinks(tmp_path):
    save_file(TENSORS, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    (tmp_path / SINGLE).write_bytes(b"")
    with pytest.raises(InvalidModelFiles, match="has changed since it was opened"):
        checkpoint["a"]


def test_missing_shards_are_listed(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "2.safetensors").unlink()
    with pytest.raises(InvalidModelFiles, match=r"names 2 shards; missing .*: 2\.safetensors\. Download"):
        Checkpoint(tmp_path)


def test_tensors_that_no_shard_holds_are_listed(tmp_path):
    write_shards(tmp_path)
    save_file({"d": TENSORS["c"]}, tmp_path / "2.safetensors")
    with pytest.raises(InvalidModelFiles, match=r"their shard does not hold: c in 2\.safetensors"):
        Checkpoint(tmp_path)


def test_the_index_says_which_shard_counts(tmp_path):
    write_shards(tmp_path)
    others = {"a": torch.zeros(2), "b": -TENSORS["b"], "stray": torch.tensor([1])}
    save_file({"c": TENSORS["c"], **others}, tmp_path / "2.safetensors")
    read = Checkpoint(tmp_path)
    assert sorted(read) == ["a", "b", "c"]
    for name in read:
        np.testing.assert_array_equal(read[name], TENSORS[name].numpy())


OUTSIDE = [
    "../1.safetensors",
    "./here.safetensors",
    "/etc/passwd",
    "a/../../x",
    "..",
    ".",
    "",
    "x\\y",
    "c:x",
    "a\0b",
    7,
    None,
    ["x"],
]


@pytest.mark.parametrize(
    "index", [{}, {"weight_map": []}, *({"weight_map": {"a": "here.safetensors", "b": name}} for name in OUTSIDE)]
)
def test_an_index_that_names_files_elsewhere_is_refused(tmp_path, index):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(TENSORS, tmp_path / "1.safetensors")
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(InvalidModelFiles, match="expected a weight_map from tensor names to names of files beside it"):
        Checkpoint(folder)


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
    with pytest.raises(InvalidModelFiles, match="e is stored as I64, expected one of F64, F32, F16, BF16"):
        checkpoint["e"]


def test_what_is_optional_may_be_there_or_not(tmp_path):
    save_file(TENSORS, tmp_path / SINGLE)
    Checkpoint(tmp_path).check({"a": (3, 4), "b": (5,)}, {"c": (), "d": (9,)})


# ---- fuzzing -------------------------------------------------------------------------------------------------------


# ---- memory --------------------------------------------------------------------------------------------------------

LOAD = """
import json, sys
import numpy as np
from hibachi.llm.model.registry import load_model
from hibachi.backend.discover import load_backend

def status(key):  # of this process, in bytes
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024

folder, name, dtype = sys.argv[1:]
backend = load_backend(name)
backend.get(backend.put(np.ones(8, np.float32), dtype))
before = status("VmRSS:")
model = load_model(folder, backend, dtype=dtype, max_model_len=64)
print(json.dumps(status("VmHWM:") - before))
"""


def big_folder(path, hidden=768, inner=2048, layers=12, vocab=16384):
    """A Llama of 110 million random bfloat16 numbers in three shards; returns how many."""
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    for i in range(layers):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{n}_proj.weight": (hidden, hidden) for n in "qkvo"}
        shapes |= {f"{at}mlp.{n}_proj.weight": (inner, hidden) for n in ("gate", "up")}
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, inner)
        shapes |= {f"{at}{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
    shapes["model.norm.weight"] = (hidden,)
    places = {name: f"{i % 3}.safetensors" for i, name in enumerate(shapes)}
    for file in sorted(set(places.values())):
        save_file({n: torch.zeros(shapes[n], dtype=torch.bfloat16) for n in shapes if places[n] == file}, path / file)
    (path / INDEX).write_text(json.dumps({"weight_map": places}))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "vocab_size": vocab}
    config |= {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    config |= {"num_attention_heads": 12, "max_position_embeddings": 64, "tie_word_embeddings": False}
    (path / "config.json").write_text(json.dumps(config))
    return sum(int(np.prod(shape)) for shape in shapes.values())


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    folder = tmp_path_factory.mktemp("big")
    return folder, big_folder(folder)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize(
    "library, dtype",
    [("numpy", "float32"), ("numpy", "bfloat16"), ("torch", "float32"), ("torch", "bfloat16"), ("jax", "float32")],
)
def test_loading_takes_little_more_than_the_weights(big, library, dtype):
    folder, count = big
    command = [sys.executable, "-c", LOAD, str(folder), library, dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    factor = json.loads(done.stdout) / (count * (4 if dtype == "float32" else 2))
    assert 1 <= factor < 1.1


def test_reading_a_tensor_keeps_no_second_copy(tmp_path):
    numbers = 8 << 20
    save_file({"a": torch.zeros(numbers, dtype=torch.bfloat16)}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    tracemalloc.start()
    a = checkpoint.read("a", np.float32)
    assert tracemalloc.get_traced_memory()[1] < 1.1 * a.nbytes
    tracemalloc.stop()
