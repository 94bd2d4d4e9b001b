"""Blocks of GGUF files, Q4_0 and Q8_0, that are multiplied as they are."""

from itertools import pairwise

import gguf
import numpy as np
import pytest

import hibachi
from hibachi import NumpyBackend
from hibachi.errors import InvalidModelFiles
from hibachi.model.files import open_files
from hibachi.model.gguf import GGUF
from hibachi.model.registry import load_model
from hibachi.remote.identity import system_fingerprint
from hibachi.tensor.discover import resolve
from hibachi.tensor.packing import as_stored
from tests.tensor.native import skip_without

from .test_gguf import make

skip_without()
KINDS = {name: gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q8_0")}


def quantized(path, kinds, what="llama", entries=()):
    """The file of a model of which the matrices are stored as kinds(name) says, None as they are; and its tensors, with
    the numbers that they come to."""
    _, stored = make(path, what, entries)
    writer, arch = gguf.GGUFWriter(path, what), gguf.GGUFReader(path)
    for field in arch.fields.values():
        if field.name.startswith(f"{what}."):
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1])
    for name, array in stored.items():
        array, kind = np.asarray(array, np.float32), KINDS.get(kinds(name))
        if kind is None or array.ndim < 2 or array.shape[-1] % 32:
            writer.add_tensor(name, array)
            continue
        blocks = gguf.quants.quantize(array, kind)
        writer.add_tensor(name, blocks, raw_dtype=kind)
        stored[name] = gguf.quants.dequantize(blocks, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, stored


def mixed(name):
    """Embeddings in Q8_0 and one value projection in float32, as files have them that are mostly of four bits."""
    return "Q8_0" if "token_embd" in name else None if "blk.1.attn_v" in name else "Q4_0"


def logits(model, tokens=range(20)):
    """Of a prompt, by an engine."""
    with hibachi.AutoregressiveBatchInference(model, backend=model.backend, max_num_seqs=2) as engine:
        stream = engine.run(np.array(tokens, np.int32), hibachi.SamplingParams(temperature=0, max_tokens=6, logprobs=3))
        return stream.result()


def packed(model, layer=0):
    return {name: w.kind for name, w in model.params["layers"][layer].items() if hasattr(w, "kind")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_those_of_the_library(tmp_path, kind, dtype):
    path, stored = quantized(tmp_path / "m.gguf", lambda _: kind)
    backend = NumpyBackend()
    model = load_model(path, backend, dtype=dtype)
    assert set(packed(model).values()) == {kind.lower()} and model.fused is not None
    rows = backend.get(backend.weight_rows(model.params["embed"], np.arange(40)))
    np.testing.assert_array_equal(rows, backend.get(backend.put(stored["token_embd.weight"], dtype)))
    plain = load_model(open_files(path, gguf_unpack=True), backend, dtype=dtype)
    assert set(packed(plain).values()) == {dtype}
    for name in ("qkv", "o", "gate_up", "down"):
        ours, theirs = (m.params["layers"][0][name] for m in (model, plain))
        at = np.arange(ours.shape[0])
        np.testing.assert_array_equal(backend.weight_rows(ours, at), backend.weight_rows(theirs, at))
    assert (model.quantization, plain.quantization) == (kind.lower(), "none")
