"""Models of GGUF files in Q4_0 and Q8_0, whose blocks are multiplied as they are."""

import json

import gguf
import numpy as np
import pytest

import hibachi
from hibachi import NumpyBackend
from hibachi.cli.main import main
from hibachi.errors import InvalidModelFiles
from hibachi.model.files import open_files
from hibachi.model.gguf import GGUF
from hibachi.model.registry import load_model
from hibachi.remote.identity import system_fingerprint
from hibachi.tensor.numpy_backend import Int4NumpyBackend, Int8NumpyBackend
from tests.tensor.native import skip_without

from .test_gguf import make

skip_without()


def quantized(path, kind_of, what="llama", **entries):
    """The file of a model whose matrices are stored as kind_of(name) says, None as they are; and all tensors, with the
    numbers that they come to."""
    _, stored = make(path, what, entries)
    blocks = {}
    for name, array in stored.items():
        kind = kind_of(name)
        if kind is None or np.ndim(array) < 2 or array.shape[-1] % 32:
            continue
        number = gguf.GGMLQuantizationType[kind]
        blocks[name] = kind, gguf.quants.quantize(np.asarray(array, np.float32), number)
        stored[name] = gguf.quants.dequantize(blocks[name][1], number)
    return make(path, what, entries, blocks)[0], stored


def mixed(name):
    """As files are that are mostly of four bits: embeddings in eight, a matrix that is not quantized."""
    return "Q8_0" if "token_embd" in name else None if "blk.1.attn_v" in name else "Q4_0"


def kinds(model, layer=0):
    each = model.params["layers"][layer].items()
    return {
        name: {w.kind for w in (ws if isinstance(ws, list) else [ws])} for name, ws in each if not hasattr(ws, "ndim")
    }


def rows_of(w, backend):
    return backend.get(backend.weight_rows(w, np.arange(w.shape[0])))


def answers(model, prompts=((3, 4, 5, 6, 7), tuple(range(20)))):
    params = hibachi.SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True)
    with hibachi.AutoregressiveBatchInference(model, backend=model.backend, max_num_seqs=4) as engine:
        streams = [engine.run(list(p), params) for p in prompts]
        return [(list(s), s.logprobs) for s in streams], engine.facts


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_those_of_the_library(tmp_path, kind, dtype):
    """Also where rows of queries and keys have another order, and are stacked."""
    path, stored = quantized(tmp_path / "m.gguf", lambda _: kind)
    b = NumpyBackend()
    model, plain = (load_model(path, b, dtype=dtype, gguf_unpack=u) for u in (False, True))
    assert (model.quantization, plain.quantization) == (kind.lower(), "none")
    names = ("qkv", "o", "gate_up", "down")
    assert kinds(model) == {name: {kind.lower()} for name in names} and kinds(plain) == {
        name: {dtype} for name in names
    }
    for name in names:
        ours, theirs = (m.params["layers"][0][name] for m in (model, plain))
        np.testing.assert_array_equal(rows_of(ours, b), rows_of(theirs, b))
    np.testing.assert_array_equal(rows_of(model.params["embed"], b), b.get(b.put(stored["token_embd.weight"], dtype)))


def test_answers_are_those_of_its_own_products(tmp_path):
    """All layers in one call, operation by operation, on another library, together and alone: the same bits."""
    path, _ = quantized(tmp_path / "m.gguf", mixed)
    model = load_model(path, NumpyBackend(), dtype="float32")
    assert model.fused is not None and model.quantization == "q4_0+q8_0"
    assert kinds(model)["qkv"] == {"q4_0"} and kinds(model, 1)["qkv"] == {
        "float32"
    }  # parts are of one kind, or unpacked
    want, facts = answers(model)
    assert facts.quantization == "q4_0+q8_0"
    for i, prompt in enumerate(((3, 4, 5, 6, 7), tuple(range(20)))):
        assert answers(model, [prompt])[0] == [want[i]]
    model.fused = None
    assert answers(model)[0] == want
    jax = pytest.importorskip("hibachi_jax").JaxBackend("cpu")
    assert answers(load_model(path, jax, dtype="float32"))[0] == want


def test_unpacked_numbers_are_nearly_the_same_and_are_told_apart(tmp_path):
    path, _ = quantized(tmp_path / "m.gguf", mixed)
    found = {}
    for unpack in (False, True):
        model = load_model(path, NumpyBackend(), dtype="float32", gguf_unpack=unpack)
        _, facts = answers(model)
        h = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
        found[unpack] = model.backend.linear(h, model.params["layers"][0]["o"]), system_fingerprint(facts, str(path))
    near, exact = found[False][0], found[True][0]
    assert 0 < np.abs(near - exact).max() < 0.02 * np.abs(exact).max()
    assert found[False][1] != found[True][1]


def test_experts_are_multiplied_as_they_are(tmp_path):
    path, _ = quantized(tmp_path / "m.gguf", lambda _: "Q4_0", "mixtral")
    model = load_model(path, NumpyBackend(), dtype="float32")
    had = kinds(model)
    assert had["gate_up"] == had["qkv"] == {"q4_0"} and had["router"] == {"float32"}
    assert had["down"] == {"float32"}  # of 48 columns, which no blocks fit
    want, _ = answers(model)
    assert model.fused is not None
    model.fused = None
    assert answers(model)[0] == want
    jax = pytest.importorskip("hibachi_jax").JaxBackend("cpu")
    assert answers(load_model(path, jax, dtype="float32"))[0] == want


def test_states_and_what_is_small(tmp_path):
    path, _ = quantized(tmp_path / "m.gguf", lambda _: "Q8_0", "mamba")
    model = load_model(path, NumpyBackend(), dtype="float32")
    had = kinds(model)
    assert had["in_proj"] == had["out_proj"] == {"q8_0"} and had["x_proj"] == had["dt_proj"] == {"float32"}
    assert model.quantization == "q8_0"


@pytest.mark.parametrize("make_backend, kept", [(Int8NumpyBackend, "int8"), (Int4NumpyBackend, "int4")])
def test_what_was_asked_for_goes_before_blocks(tmp_path, make_backend, kept):
    path, stored = quantized(tmp_path / "m.gguf", lambda _: "Q8_0")
    b = make_backend()
    model = load_model(path, b, dtype="float32")
    assert model.quantization == kept and kinds(model)["o"] == {b.panels}
    want = b.put_weight(stored["blk.0.attn_output.weight"].astype(np.float32), "float32")
    np.testing.assert_array_equal(rows_of(model.params["layers"][0]["o"], b), rows_of(want, b))


def test_backends_without_kernels_unpack(tmp_path):
    path, _ = quantized(tmp_path / "m.gguf", mixed)
    model = load_model(path, NumpyBackend(native=False), dtype="float32")
    assert model.quantization == "none" and isinstance(model.params["layers"][0]["qkv"], np.ndarray)


# ---- what is wrong with a file ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["blk.1.attn_k.weight", "token_embd.weight", "blk.0.ffn_down.weight"])
def test_a_scale_that_is_no_number_is_refused(tmp_path, where, scale):
    path, _ = quantized(tmp_path / "m.gguf", lambda _: "Q4_0")
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == where)
    with path.open("r+b") as file:
        file.seek(int(tensor.data_offset) + 18 * (tensor.n_elements // 32 - 1))
        file.write(np.float16(scale).tobytes())
    with pytest.raises(
        InvalidModelFiles, match=r"m.gguf: a block of .* in Q4_0 has a scale that is NaN or infinite.*again"
    ):
        load_model(path, NumpyBackend(), dtype="float32")
    with pytest.raises(InvalidModelFiles, match=r"in Q4_0 has a scale that is NaN or infinite"):
        load_model(path, NumpyBackend(native=False), dtype="float32")  # where blocks are unpacked


def test_a_file_that_is_cut_is_refused(tmp_path):
    path, _ = quantized(tmp_path / "m.gguf", lambda _: "Q4_0")
    model, whole = GGUF(path), path.read_bytes()
    path.write_bytes(whole[: len(whole) - 4096])
    with pytest.raises(InvalidModelFiles, match="is not a complete GGUF file"):
        GGUF(path)
    with pytest.raises(InvalidModelFiles, match="has changed since it was opened"):
        for name in model:
            NumpyBackend().put_rows(model.matrices(name), "float32") if len(model.shape(name)) == 2 else model[name]


def test_blocks_that_do_not_fit_their_rows_are_refused(tmp_path):
    path, _ = quantized(tmp_path / "m.gguf", lambda _: "Q4_0")
    raw = bytearray(path.read_bytes())
    at = raw.index(b"blk.0.ffn_down.weight") + len(b"blk.0.ffn_down.weight") + 4  # its first dimension, 96
    raw[at : at + 8] = (48).to_bytes(8, "little")
    path.write_bytes(raw)
    with pytest.raises(InvalidModelFiles, match=r"\(64, 48\), is stored as Q4_0, whose rows have a multiple of 32"):
        GGUF(path)


# ---- what users see --------------------------------------------------------------------------------------------------


def test_inspect_says_how_matrices_are_multiplied(tmp_path, capsys):
    path, _ = quantized(tmp_path / "m.gguf", mixed)
    assert main(["inspect", str(path)]) == 0
    said = capsys.readouterr().out
    assert "multiplied    as Q4_0 and Q8_0, activations rounded to eight bits; not with --gguf-unpack" in said
    assert main(["inspect", "--json", str(path)]) == 0
    memory = {(m["backend"], m["dtype"]): m["weights"] for m in json.loads(capsys.readouterr().out)["memory"]}
    numbers = open_files(path).tensors()
    q4, q8, rest = (
        sum(int(np.prod(numbers.shape(n))) for n in numbers if numbers.dtype(n) == kind)
        for kind in ("Q4_0", "Q8_0", "F32")
    )
    assert memory["numpy", "float32"] == q4 * 18 // 32 + q8 * 34 // 32 + 4 * rest
