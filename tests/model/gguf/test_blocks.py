"""Models of GGUF files in Q4_0 and Q8_0, whose blocks are multiplied as they are."""

import json

import gguf
import numpy as np
import pytest

import hibachi
from hibachi import NumpyBackend
from hibachi.backend.numpy_backend import Int4NumpyBackend, Int8NumpyBackend
from hibachi.cli.main import main
from hibachi.errors import InvalidModelFiles
from hibachi.llm.model.files import open_files
from hibachi.llm.model.gguf import GGUF
from hibachi.llm.model.registry import load_model
from hibachi.llm.remote.identity import system_fingerprint
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
        number = None if kind is None else gguf.GGMLQuantizationType[kind]
        if kind is None or np.ndim(array) < 2 or array.shape[-1] % gguf.GGML_QUANT_SIZES[number][0]:
            continue
        blocks[name] = kind, packed(array, number)
        stored[name] = gguf.quants.dequantize(blocks[name][1], number)
    return make(path, what, entries, blocks)[0], stored


def packed(array, number):
    """Blocks; of NVFP4, which the library does not write, random ones of that shape, with scales of usual size."""
    if number.name != "NVFP4":
        return gguf.quants.quantize(np.asarray(array, np.float32), number)
    rng = np.random.default_rng(array.size)
    raw = rng.integers(0, 256, (array.size // 64, 36), dtype=np.uint8)
    raw[:, :4] = rng.integers(0x20, 0x30, (len(raw), 4))
    return raw.reshape(*array.shape[:-1], -1)


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


# ---- blocks that are unpacked ----------------------------------------------------------------------------------------

WIDE = {"embedding_length": 256, "feed_forward_length": 256}  # for blocks of any kind


def widened(path, kind):
    """As `quantized`, all matrices of a Llama whose rows are whole blocks of any kind."""
    wide, rng = {64: 256, 32: 128, 96: 256}, np.random.default_rng(0)
    stored = {
        name: rng.normal(size=[wide.get(n, n) for n in a.shape]) / 8 for name, a in make(path, "llama")[1].items()
    }
    number = gguf.GGMLQuantizationType[kind]
    blocks = {name: (kind, packed(array, number)) for name, array in stored.items() if array.ndim > 1}
    stored |= {name: gguf.quants.dequantize(raw, number) for name, (_, raw) in blocks.items()}
    return make(path, "llama", WIDE, stored | blocks)[0], stored


@pytest.mark.parametrize("kind", ["MXFP4", "NVFP4", "TQ1_0", "TQ2_0"])
def test_answers_are_those_of_the_numbers_that_blocks_come_to(tmp_path, kind):
    path, stored = widened(tmp_path / "m.gguf", kind)
    assert GGUF(path).dtype("layers.0.q.weight") == kind
    plain, _ = make(tmp_path / "plain.gguf", "llama", WIDE, stored)
    want, got = (answers(load_model(p, NumpyBackend(), dtype="float32"))[0] for p in (plain, path))
    assert got == want


@pytest.mark.parametrize("what, kind", [("llama", "NVFP4"), ("mixtral", "NVFP4"), ("llama", "Q4_0")])
def test_scales_beside_matrices_are_multiplied_in(tmp_path, what, kind):
    """One of a matrix, or one of each expert; those of activations, which are not quantized here, change nothing."""
    path, stored = quantized(tmp_path / "m.gguf", lambda _: kind, what)
    blocks = {}
    for name, array in list(stored.items()):
        if np.ndim(array) > 1:
            factors = np.linspace(0.5, 2, len(array) if np.ndim(array) == 3 else 1, dtype=np.float32)
            stored[name] = np.asarray(array, np.float32) * factors.reshape(-1, *(1,) * (np.ndim(array) - 1))
            base = name.removesuffix(".weight")
            blocks |= {f"{base}.scale": factors, f"{base}.input_scale": np.float32([7])}
    raw = {t.name: (t.tensor_type.name, t.data) for t in gguf.GGUFReader(path).tensors}
    scaled, _ = make(tmp_path / "scaled.gguf", what, (), raw | blocks)
    plain, _ = make(tmp_path / "plain.gguf", what, (), stored)
    want, got = (answers(load_model(p, NumpyBackend(), dtype="float32"))[0] for p in (plain, scaled))
    assert got == want
    for wrong in (np.float32([np.inf]), np.ones(3, np.float32)):
        make(scaled, what, (), raw | blocks | {"blk.1.attn_q.scale": wrong})
        with pytest.raises(InvalidModelFiles, match=rf"scaled.gguf: the scale of a tensor .* in {kind} must be finite"):
            GGUF(scaled)


# ---- what is wrong with a file ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, at, scale",
    [
        *[("Q4_0", 0, np.float16(number).tobytes()) for number in (np.nan, np.inf, -np.inf)],
        *[("Q4_1", 2, np.float16(np.nan).tobytes()), ("TQ1_0", 52, np.float16(np.inf).tobytes())],
        *[("MXFP4", 0, b"\xff"), ("NVFP4", 3, b"\x7f")],
    ],
)
@pytest.mark.parametrize("where", ["blk.1.attn_k.weight", "token_embd.weight", "blk.0.ffn_down.weight"])
def test_a_scale_that_is_no_number_is_refused(tmp_path, where, kind, at, scale):
    path, _ = widened(tmp_path / "m.gguf", kind)
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == where)
    values, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    with path.open("r+b") as file:
        file.seek(int(tensor.data_offset) + size * (tensor.n_elements // values - 1) + at)
        file.write(scale)
    for native in (True, False):  # False: where blocks are unpacked
        with pytest.raises(
            InvalidModelFiles, match=rf"m.gguf: a block of .* in {kind} has a scale that is NaN or infinite.*again"
        ):
            load_model(path, NumpyBackend(native=native), dtype="float32")


@pytest.mark.parametrize("number, name", [(9, "Q8_1"), (31, "Q4_0_4_4"), (77, "type 77"), (41, "Q1_0")])
def test_blocks_that_cannot_be_read_are_named(tmp_path, number, name):
    path, _ = make(tmp_path / "m.gguf", "llama")
    data = path.read_bytes()
    at = data.index(b"blk.0.ffn_down.weight") + len(b"blk.0.ffn_down.weight") + 20  # after two dimensions
    path.write_bytes(data[:at] + number.to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(InvalidModelFiles, match=rf"ffn_down.weight' is stored as {name}, which cannot be read here"):
        GGUF(path)


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
