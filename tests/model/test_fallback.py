"""Architectures that hibachi has no description of, run by transformers over our cache (docs/transformers.md)."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from hibachi import LLM, AutoregressiveBatchInference, ConfigError, SamplingParams, UnknownArchitecture
from hibachi.backend.numpy_backend import NumpyBackend
from hibachi.errors import InvalidModelFiles, MissingExtra, ModelError
from hibachi.llm.model.registry import load_model
from hibachi_torch import TorchBackend
from hibachi_torch import transformers_model as fallback
from hibachi_torch.transformers_attention import CannotRun, _settings

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("transformers_list", ROOT / "docs" / "transformers_list.py")
listing = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(listing)

PAGE = (ROOT / "docs" / "transformers.md").read_text()
LISTED = {  # by model_type: paged, with its own cache, refused
    kind: rest
    for kind, *rest in re.findall(r"^\| `([^_`].*?)` \| (?!class).+? \| (.*) \| (.*) \| (.*) \|$", PAGE, re.M)
}
SKETCH = """apertus arcee cohere cohere2 ernie4_5 exaone4 gemma gemma2 gemma3_text glm glm4 gpt2 gpt_neox granite
granitemoe helium hunyuan_v1_dense lfm2 llama mistral mixtral nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3
phimoe qwen2 qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2"""


@pytest.fixture(autouse=True)
def quiet():
    threads, verbosity = torch.get_num_threads(), transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(verbosity)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """folder_of(model_type, **changes of its config): a folder with a tiny model, made once."""
    made = {}

    def make(kind, **changes):
        key = (kind, repr(changes))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(kind)
            listing.tiny(kind, **changes).save_pretrained(made[key])
        return made[key]

    return make


@pytest.fixture
def damaged(folder_of, tmp_path):
    """damaged(config=..., weights=...): a copy of a folder; both are functions that change a dict in place."""

    def make(kind="olmo", config=None, weights=None):
        source = folder_of(kind)
        settings = json.loads((source / "config.json").read_text())
        tensors = safetensors.torch.load_file(source / "model.safetensors")
        for change, value in ((config, settings), (weights, tensors)):
            if change is not None:
                change(value)
        (tmp_path / "config.json").write_text(json.dumps(settings))
        safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return make


def load(folder, dtype="float32", max_model_len=128):
    return TorchBackend("cpu").foreign_model(folder, dtype=dtype, max_model_len=max_model_len)


def greedy(model, prompt, n=8, **options):
    with AutoregressiveBatchInference(
        model, backend=model.backend, max_model_len=model.max_model_len, block_size=4, **options
    ) as engine:
        return list(engine.run(np.array(prompt), SamplingParams(temperature=0, max_tokens=n)))


# ---- what runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cohere2", "olmo", "nemotron", "opt", "deepseek_v3", "gemma3n_text", "gpt_oss"])
def test_logits_and_greedy_tokens_are_those_of_the_model_itself(kind):
    verdict = listing.judge(kind)
    assert verdict.agrees, verdict
    assert verdict.mixed, "no step had a piece of a prompt beside a request that decodes"


@pytest.mark.slow
def test_the_page_lists_what_runs_how_and_what_is_refused():
    verdicts = [listing.judge(kind) for kind in listing.kinds()]
    tried = [v for v in verdicts if not v.why.startswith(listing.NOT_TRIED)]
    assert all(v.mixed for v in tried if v.agrees and not v.unpaged)
    found = {kind: rest for kind, _, *rest in (listing.row(v, ()) for v in tried)}
    assert {kind: without_numbers(rest) for kind, rest in found.items()} == {
        kind: without_numbers(rest) for kind, rest in LISTED.items()
    }


def without_numbers(cells):
    return [re.sub(r"\d\.\de[+-]\d+", "", text) for text in cells]


def test_the_page_lists_what_the_first_sketch_ran():
    ran = set(SKETCH.split())
    assert len(ran) == 38
    paged = {kind for kind, (paged, _, _) in LISTED.items() if paged and not paged.startswith("no: ")}
    assert ran - paged == {"lfm2"}  # with convolutions, as it is published
    assert "conv" in LISTED["lfm2"][0] and LISTED["lfm2"][1]


def test_a_prompt_longer_than_a_step_gives_the_same_tokens(folder_of):
    prompt = list(range(3, 60))
    model = load(folder_of("olmo"))
    own = transformers.AutoModelForCausalLM.from_pretrained(folder_of("olmo"))
    expected = own.generate(
        torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(prompt) :].tolist()
    assert greedy(model, prompt) == greedy(model, prompt, max_num_batched_tokens=16) == expected


def test_gpt_oss_gives_the_tokens_of_its_own_generate_with_its_sinks(folder_of):
    folder, prompt = folder_of("gpt_oss"), list(range(3, 33))
    own = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    expected = own.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(prompt) :].tolist()
    assert greedy(load(folder), prompt, n=12) == expected
    without = load(folder)
    for layer in without.module.model.layers:
        layer.self_attn.sinks.data.fill_(5.0)
    assert greedy(without, prompt, n=12) != expected


@pytest.mark.parametrize(
    "options, why",
    [
        (dict(s_aux=torch.ones(3)), "no tensor of 4 numbers"),
        (dict(s_aux=1.0), "no tensor of 4 numbers"),
        (dict(sinks=torch.ones(1, 4, 5, 1)), "sinks of another kind"),
        (dict(position_bias=torch.ones(4, 5, 5)), "a position bias for each pair"),
        (dict(softcap="20"), "softcap is no plain number"),
    ],
)
def test_options_of_attention_that_are_not_ours_are_refused(options, why):
    with pytest.raises(CannotRun, match=why):
        _settings(options, 4)


def test_two_models_run_side_by_side(folder_of):
    prompts = [list(range(3, 23)), list(range(40, 70))]
    models = [load(folder_of("olmo")), load(folder_of("cohere2"))]
    alone = [[greedy(m, p, n=40) for p in prompts] for m in models]
    engines = [AutoregressiveBatchInference(m, backend=m.backend, max_model_len=128, block_size=4) for m in models]
    try:
        streams = [[e.run(np.array(p), SamplingParams(temperature=0, max_tokens=40)) for p in prompts] for e in engines]
        assert [[list(s) for s in each] for each in streams] == alone
    finally:
        for e in engines:
            e.close()


def test_an_unregistered_architecture_is_offered_to_the_backend(folder_of):
    model = load_model(folder_of("olmo"), TorchBackend("cpu"))
    assert model.arch_name == "OlmoForCausalLM"
    assert (model.vocab_size, model.dtype, model.max_model_len) == (97, "float32", 256)
    with pytest.raises(UnknownArchitecture, match="OlmoForCausalLM"):
        load_model(folder_of("olmo"), NumpyBackend())


def test_windows_are_read_from_the_masks_and_keys_from_the_calls(folder_of):
    model = load(folder_of("gemma4_text"))
    assert [call.window for call in model._calls] == [None, 8, None, None]
    sizes = [(s.kv_heads, s.k_dim, s.v_dim, s.dtype) for s in model.cache_spec()]
    assert sizes == [(2, 16, 16, "float32"), (2, 12, 12, "float32"), *[(2, 16, 16, "float32")] * 2]


def test_shards(folder_of, tmp_path):
    own = transformers.AutoModelForCausalLM.from_pretrained(folder_of("olmo"))
    own.save_pretrained(tmp_path, max_shard_size="20KB")
    first, *_, last = sorted(tmp_path.glob("*.safetensors"))
    assert first.name[6:11] == "00001" < "00003" < last.name[6:11]
    others = {name: torch.zeros_like(t) for name, t in safetensors.torch.load_file(first).items()}  # not in the index
    safetensors.torch.save_file(others | safetensors.torch.load_file(last), last)
    assert greedy(load(tmp_path), [5, 6, 7]) == greedy(load(folder_of("olmo")), [5, 6, 7])


def test_half_precision(folder_of):
    model = load(folder_of("olmo"), dtype="bfloat16")
    assert model.dtype == "bfloat16" and {s.dtype for s in model.cache_spec()} == {"bfloat16"}
    assert len(greedy(model, [5, 6, 7])) == 8


def test_ids_that_begin_and_end_a_text(damaged):
    folder = damaged(config=lambda c: c.update(eos_token_id=2, bos_token_id=None))
    model = load(folder)
    assert (model.eos_ids, model.bos_ids) == ((2,), ())
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 50256, 8], "bos_token_id": 9}')
    model = load(folder)
    assert (model.eos_ids, model.bos_ids) == ((2, 7, 8), (9,))


def test_the_longest_sequence(folder_of):
    assert load(folder_of("olmo"), max_model_len=None).max_model_len == 256
    for n in (1, 2, 3, 4, 5, 9):
        assert load(folder_of("olmo"), max_model_len=n).max_model_len == n
    assert load(folder_of("mamba2"), max_model_len=None).max_model_len == 2**20  # states only
    for bad in (0, 257):
        with pytest.raises(ConfigError, match=r"max_model_len must be between 1 and 256.*got"):
            load(folder_of("olmo"), max_model_len=bad)


def test_longrope_ends_where_its_angles_change(folder_of):
    rope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 6, long_factor=[2.0] * 6)
    rope |= dict(short_mscale=1.0, long_mscale=1.0, original_max_position_embeddings=64)
    folder = folder_of("phimoe", rope_parameters=rope)
    assert load(folder, max_model_len=None).max_model_len == 64
    with pytest.raises(ConfigError, match="between 1 and 64"):
        load(folder, max_model_len=65)


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, why, shares",
    [
        ("bloom", "attention interface", []),
        ("jamba", "another kind than attention (linear_attention)", ["prompts come whole"]),
        ("lfm2", "another kind than attention (conv)", []),
        ("falcon_h1", "another kind than attention (hybrid)", []),
        ("mamba2", "another kind than attention (linear_attention)", []),  # states only
        ("bart", "takes no positions", ["rows of one length only share"]),
        ("doge", "works on its attention masks by itself", []),
        ("roberta", "differ from its own", ["rows of one length only share"]),
    ],
)
def test_what_the_paged_engine_cannot_run_runs_with_its_own_cache(folder_of, kind, why, shares, caplog):
    verdict = listing.judge(kind)
    assert verdict.agrees and why in verdict.unpaged, verdict
    assert verdict.shares == "; ".join(word for word, what in listing.SHARES.items() if what in shares)
    assert caplog.text.count("runs with a cache of its own, as the paged engine cannot run it") == 1


def test_texts_and_forms_of_a_model_with_its_own_cache(tmp_path):
    shipped = ROOT / "hibachi" / "llm" / "data" / "tiny"
    listing.tiny("bamba", vocab_size=json.loads((shipped / "config.json").read_text())["vocab_size"]).save_pretrained(
        tmp_path
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((shipped / name).read_bytes())
    with LLM(tmp_path, backend="torch", deterministic=False) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, structured_outputs={"regex": "[0-9]{3}"})
        answers = llm.generate(["She was", "The letter was from"], params)
    assert all(re.fullmatch("[0-9]{3}", answer.text) for answer in answers)


@pytest.mark.parametrize(
    "kind, changes, why",
    [
        ("bert", dict(is_decoder=False), ["not causal, nor with a window", "it returns no cache"]),
        ("rwkv", {}, ["attention interface", "two rows at once differ by"]),
        ("openai-gpt", {}, ["attention interface", "it keeps no cache"]),
        ("recurrent_gemma", {}, ["linear_attention", "it returns no cache"]),
    ],
)
def test_what_would_be_wrong_is_refused_with_both_reasons(folder_of, kind, changes, why):
    with pytest.raises(UnknownArchitecture, match=r"neither in the paged engine: .*; nor with a cache") as e:
        load(folder_of(kind, **changes))
    assert all(words in str(e.value) for words in [*why, "CachedModel"])


def test_chunked_attention_runs_within_one_chunk(folder_of):
    model = load(folder_of("llama4_text"), max_model_len=8)
    assert {call.window for call in model._calls} == {None}


def test_a_backend_that_attends_wrongly_is_found_out(folder_of, caplog):
    class Blind(TorchBackend):
        def attend(self, *args, window=None, **options):
            return super().attend(*args, **options)

    assert hasattr(Blind("cpu").foreign_model(folder_of("cohere2"), dtype="float32", max_model_len=None), "past")
    assert "differ from its own" in caplog.text


def test_a_layer_that_is_left_out_of_a_later_step_is_found_out(folder_of):
    model = load(folder_of("olmo"))
    model.module.model.layers = model.module.model.layers[:2]
    with pytest.raises(ModelError, match="made 2 calls of attention"):
        greedy(model, [5, 6, 7])


def test_a_model_type_that_transformers_does_not_know(damaged):
    assert load(damaged(config=lambda c: c.update(model_type="of tomorrow", architectures=["X"]))) is None
    assert load(damaged(config=lambda c: c.update(model_type="clip", architectures=["X"]))) is None
    assert load(damaged(config=lambda c: c.update(model_type=["olmo"], architectures=["X"]))) is None


def test_code_in_a_folder_is_never_run(damaged):
    code = "import pathlib; pathlib.Path(__file__).with_name('was_run').touch()"
    auto_map = {"AutoConfig": "mine.Mine", "AutoModelForCausalLM": "mine.Mine"}
    folder = damaged(config=lambda c: c.update(model_type="mine", auto_map=auto_map))
    (folder / "mine.py").write_text(code)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(code)
    with pytest.raises(UnknownArchitecture, match=r"auto_map .* runs no code from a model's folder"):
        load(folder)
    known = damaged(config=lambda c: c.update(auto_map=auto_map))  # transformers' own class is used
    assert load(known).arch_name == "OlmoForCausalLM"
    assert not list(folder.rglob("was_run"))


def test_pickles_are_not_read(damaged):
    folder = damaged()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InvalidModelFiles, match=r"expected model\.safetensors"):
        load(folder)


def test_weights_that_do_not_fit_are_named(damaged):
    def lose(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.1.extra"] = torch.zeros(3)

    with pytest.raises(InvalidModelFiles) as e:
        load(damaged(weights=lose))
    assert "missing: model.layers.1.mlp.up_proj.weight" in str(e.value)
    assert "not part of this architecture: model.layers.1.extra" in str(e.value)


def test_weights_of_another_shape_and_damaged_files(damaged):
    with pytest.raises(InvalidModelFiles, match="do not load into"):
        load(damaged(config=lambda c: c.update(intermediate_size=81)))
    folder = damaged()
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-10])
    with pytest.raises(InvalidModelFiles):
        load(folder)


@pytest.mark.parametrize(
    "change, error, match",
    [
        (dict(architectures=["OlmoForSequenceClassification"]), UnknownArchitecture, "the variant that generates"),
        (dict(is_causal=False), UnknownArchitecture, "is_causal is False; supported: True"),
        (dict(num_attention_heads=5), InvalidModelFiles, "Take config.json"),
        (dict(hidden_size="wide"), InvalidModelFiles, r"config\.json: transformers' OlmoConfig refuses it"),
    ],
)
def test_configs_that_cannot_be_served(damaged, change, error, match):
    with pytest.raises(error, match=match):
        load(damaged(config=lambda c: c.update(change)))


def test_quantized_weights_and_settings_of_a_quantization_that_is_undone(damaged):
    def quantize(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].to(torch.int8)

    settings = dict(quantization_config={"quant_method": "gptq", "bits": 4})
    assert load(damaged(config=lambda c: c.update(settings))).arch_name == "OlmoForCausalLM"
    with pytest.raises(UnknownArchitecture, match=r"quantized .*'gptq': .*up_proj\.weight is I8"):
        load(damaged(config=lambda c: c.update(settings), weights=quantize))


def test_a_head_of_its_own_counts_whatever_the_config_says(damaged, caplog):
    def own(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0)

    model = load(damaged(config=lambda c: c.update(tie_word_embeddings=True), weights=own))
    assert torch.equal(model.params["lm_head.weight"], model.params["model.embed_tokens.weight"].flip(0))
    assert caplog.text.count("lm_head.weight holds other numbers than the embeddings") == 1


def test_a_config_cannot_choose_how_attention_is_computed(damaged):
    chosen = dict(attn_implementation="someone/kernel", _attn_implementation="someone/kernel", return_dict=False)
    folder = damaged(config=lambda c: c.update(chosen, output_attentions=True))
    assert len(greedy(load(folder), [5, 6, 7])) == 8


def test_a_dtype_to_compute_in(folder_of):
    with pytest.raises(ConfigError, match="dtype must be one of float32"):
        load(folder_of("olmo"), dtype="int8")


def test_without_transformers_the_extra_is_named(folder_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"'olmo'.*'hf'"):
        load(folder_of("olmo"))


def test_transformers_is_as_talkative_as_before(folder_of):
    transformers.logging.set_verbosity_info()
    load(folder_of("olmo"))
    assert transformers.logging.get_verbosity() == transformers.logging.INFO


def test_masks_are_read_exactly():
    register = fallback.register
    register()
    from transformers import masking_utils as m

    from hibachi_torch.transformers_attention import _look_mask, looking

    left = torch.zeros(1, dtype=int)
    with looking(100):
        assert _look_mask(mask_function=m.causal_mask_function).window is None
        assert _look_mask(mask_function=m.sliding_window_causal_mask_function(7)).window == 7
        assert _look_mask(mask_function=m.sliding_window_causal_mask_function(100)).window is None
        assert _look_mask(mask_function=m.sliding_window_causal_mask_function(99)).window == 99
        for bad in (
            m.bidirectional_mask_function,
            m.sliding_window_bidirectional_mask_function(9),
            m.chunked_causal_mask_function(25, left),
            m.chunked_causal_mask_function(33, left),
            m.or_masks(m.causal_mask_function, lambda b, h, q, k: (q < 3) & (k < 3)),
            m.or_masks(m.causal_mask_function, m.blockwise_overlay(torch.zeros(1, 5, dtype=int))),
        ):
            assert _look_mask(mask_function=bad).fault
        assert _look_mask(mask_function=m.causal_mask_function, attention_mask=torch.tensor([[True, False]])).fault
        assert _look_mask().fault
