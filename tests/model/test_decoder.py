"""Loading the decoder: tied heads, vocabularies, dtypes, biases and shapes. Its numbers: test_agreement.py."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hibachi.backend.numpy_backend import NumpyBackend
from hibachi.errors import ConfigError, InvalidModelFiles, UnknownArchitecture, UnsupportedOperation
from hibachi.llm.model.registry import load_model
from hibachi_jax import JaxBackend
from hibachi_torch import TorchBackend

from ..tensor.arches import inputs

SHAPES = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
MODELS = {
    "plain": {},
    "tied, wide heads": dict(tie_word_embeddings=True, head_dim=16),
    "biases": dict(attention_bias=True, mlp_bias=True),
}


def save(name, path):
    """The directory that a random model of transformers is saved in."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPES | MODELS[name])).eval()
    with torch.no_grad():
        for parameter, p in model.named_parameters():  # the default is too small to tell errors from noise
            p.normal_(1.0 if "norm" in parameter else 0.0, 0.3)
    model.save_pretrained(path)
    return path


def cache_of(model, dtype="float32"):
    return [model.backend.make_cache(s, blocks=4, block_size=8, rows=1, dtype=dtype) for s in model.cache_spec()]


def prompt(backend, n):
    """The inputs of the step of one prompt of n tokens."""
    return dataclasses.replace(inputs(backend, [0], [n], [True]), tok=backend.put(np.arange(n, dtype=np.int32)))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A directory with a plain model."""
    return save("plain", tmp_path_factory.mktemp("plain"))


EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def changed(folder, tensors=None, **fields):
    """The folder with other tensors, and other fields in config.json."""
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    save_file(load_file(file) | (tensors or {}), file)
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def test_a_tied_head_is_the_embedding_itself_also_where_the_files_hold_a_copy(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("hibachi.backend.stored.WINDOW", 1 << 10)  # of several windows
    folder = save("tied, wide heads", tmp_path)
    rounded = load_file(folder / "model.safetensors")[EMBED].bfloat16()
    last = rounded.clone()
    last[-1, -1] += 1
    for copy in ({}, {EMBED: rounded, HEAD: rounded.clone()}, {EMBED: rounded, HEAD: rounded.float()}):
        model = load_model(changed(folder, copy), TorchBackend("cpu"))
        assert model.params["head"] is model.params["embed"] and model.arch.tied
    assert not caplog.text
    model = load_model(changed(folder, {EMBED: rounded, HEAD: last}), TorchBackend("cpu"))
    assert model.params["head"] is not model.params["embed"] and not model.arch.tied


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("taller", [[EMBED], [HEAD], [EMBED, HEAD]])
def test_rows_beyond_the_vocabulary_are_not_used(tmp_path, caplog, taller, quantization):
    folder, logits = save("plain", tmp_path), []
    tensors = load_file(folder / "model.safetensors")
    for more in ({}, {name: torch.cat([tensors[name], torch.ones(32, 32)]) for name in taller}):
        b = NumpyBackend()
        b = b if quantization == "none" else b.quantized(quantization)
        model = load_model(changed(folder, more), b)
        logits.append(b.get(model.step(model.params, cache_of(model), prompt(b, 9))[0]))
    assert logits[0].shape == (1, SHAPES["vocab_size"])
    np.testing.assert_array_equal(*logits)
    assert caplog.text.count("more rows than vocab_size (96)") == 1 and " and ".join(taller) in caplog.text
    with pytest.raises(InvalidModelFiles, match=r"has shape \(90, 32\), expected \(96, 32\)"):
        load_model(changed(folder, {name: tensors[name][:90].clone() for name in taller}), b)


LEFT_OVER = {"quantization_config": {"quant_method": "gptq", "bits": 4}}


def test_settings_of_a_quantization_that_is_undone_are_passed_over(tmp_path):
    folder = save("plain", tmp_path)
    assert load_model(changed(folder, **LEFT_OVER), NumpyBackend()).quantization == "none"


@pytest.mark.parametrize(
    "tensors, method, why",
    [
        ({"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}, "gptq", "model.norm.weight is F8_E4M3"),
        ({"model.layers.0.mlp.up_proj.weight_scale": torch.ones(3)}, "gptq", "up_proj.weight_scale is F32"),
        ({}, "bitnet", "its layers round plain weights when they compute"),
    ],
)
def test_quantized_weights_are_refused_by_the_name_of_the_method(tmp_path, tensors, method, why):
    folder = changed(save("plain", tmp_path), tensors, quantization_config={"quant_method": method})
    with pytest.raises(UnknownArchitecture, match=rf"quantized \(quant_method '{method}': .*{why}\).*unquantized"):
        load_model(folder, NumpyBackend())


def test_the_step_is_pure(plain):
    b = NumpyBackend()
    model = load_model(plain, b)
    params, model.params = model.params, None
    cache = cache_of(model)
    logits, after = model.step(params, cache, prompt(b, 5))
    assert logits.shape == (1, SHAPES["vocab_size"]) and len(after) == len(cache)


@pytest.mark.parametrize("library", [TorchBackend("cpu"), JaxBackend()], ids=["torch", "jax"])
def test_bfloat16_computes_and_caches_in_bfloat16(plain, library):
    logits = []
    for dtype in ("float32", "bfloat16"):
        model = load_model(plain, library, dtype=dtype)
        cache = cache_of(model, dtype="float16")  # the model's own wish wins
        step = library.compile(model.step)
        with library.guard():
            out, cache = step(model.params, cache, prompt(library, 9))
            keys = cache[0].keys if hasattr(cache[0], "keys") else cache[0][0]
            assert keys.dtype == library.dtype(dtype)
            logits.append(library.get(out)[0])
    exact, rounded = logits
    assert rounded.dtype == np.float32
    assert 1e-4 < np.linalg.norm(rounded - exact) / np.linalg.norm(exact) < 0.05


def test_a_shorter_context_needs_smaller_tables(plain):
    assert load_model(plain, NumpyBackend(), max_model_len=7).params["ropes"][0][0].shape == (7, 4)
    assert load_model(plain, NumpyBackend()).max_model_len == SHAPES["max_position_embeddings"]


@pytest.mark.parametrize("length", [0, -1, 65])
def test_a_context_that_the_model_does_not_have_is_refused(plain, length):
    with pytest.raises(ConfigError, match=f"between 1 and 64.*got {length}"):
        load_model(plain, NumpyBackend(), max_model_len=length)


@pytest.mark.parametrize("dtype, error", [("int8", ConfigError), ("bfloat16", UnsupportedOperation)])
def test_a_dtype_that_cannot_be_computed_with_is_refused(plain, dtype, error):
    with pytest.raises(error, match=dtype):
        load_model(plain, NumpyBackend(native=False), dtype=dtype)


def test_numpy_computes_bfloat16_only_where_kernels_do_all_of_it(tmp_path):
    torch.manual_seed(0)
    config = transformers.GemmaConfig(**SHAPES | {"head_dim": 8})
    path = tmp_path  # its embeddings are scaled
    transformers.GemmaForCausalLM(config).save_pretrained(path)
    with pytest.raises(UnsupportedOperation, match="NumPy has no arithmetic in bfloat16"):
        load_model(path, NumpyBackend(), dtype="bfloat16")


def test_biases_are_recognised_by_their_presence(tmp_path):
    path = save("biases", tmp_path)
    config = json.loads((path / "config.json").read_text())
    del config["attention_bias"], config["mlp_bias"]
    (path / "config.json").write_text(json.dumps(config))
    assert "qkv_bias" in load_model(path, NumpyBackend()).params["layers"][0]


def test_biases_that_the_config_denies_are_refused(tmp_path):
    path = save("biases", tmp_path)
    config = json.loads((path / "config.json").read_text()) | {"mlp_bias": False}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidModelFiles, match=r"mlp\.down_proj\.bias .* not part of this architecture"):
        load_model(path, NumpyBackend())


def test_weights_of_another_size_are_refused_with_every_name(plain, tmp_path):
    config = json.loads((plain / "config.json").read_text()) | {"intermediate_size": 48, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((plain / "model.safetensors").read_bytes())
    with pytest.raises(InvalidModelFiles) as e:
        load_model(tmp_path, NumpyBackend())
    text = str(e.value)
    assert "model.layers.0.mlp.down_proj.weight has shape (32, 40), expected (32, 48)" in text
    assert "model.layers.2.input_layernorm.weight is missing (expected shape (32,))" in text
    assert text.count("\n") == 1 + 2 * 3 + 9
