"""What a model's files recommend: sampling, tokens that may not come, and where a text ends."""

import json
from functools import cache
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Raw

from hibachi import LLM, load_model
from hibachi.errors import InvalidModelFiles
from hibachi.llm.model.describe import describe
from hibachi.llm.model.files import open_files
from hibachi.llm.model.generation import NOT_OBEYED, Generation, TokenRules
from hibachi.llm.model.recommended import chat_sampling
from hibachi.llm.remote.llm import RemoteLLM
from hibachi.request import SamplingParams

from .gguf.test_gguf import make

CONFIGS = Path(__file__).parents[1] / "data" / "generation_configs"


def folder(path, **config):
    (path / "generation_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    "config, defaults",
    [
        ({}, {}),
        (
            {"bos_token_id": 1, "eos_token_id": [2, 3], "max_length": 20, "num_beams": 4, "transformers_version": "4"},
            {},
        ),
        (  # Llama 3's
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9},
            {"temperature": 0.6, "top_p": 0.9},
        ),
        (  # Qwen 2.5's
            {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
            {"repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
        ),
        (
            {"min_p": 0.1, "typical_p": 0.9, "max_new_tokens": 2048, "stop_strings": ["</answer>", "\n\n"]},
            {"min_p": 0.1, "typical_p": 0.9, "max_tokens": 2048, "stop": ("</answer>", "\n\n")},
        ),
        ({"stop_strings": "end", "temperature": 1}, {"stop": "end", "temperature": 1}),
        # null is not given, and whether to sample need not be said
        ({"do_sample": None, "temperature": 0.6, "top_k": None, "repetition_penalty": None}, {"temperature": 0.6}),
        # greedy is meant; what else the file says of drawing does not count, penalties do
        ({"do_sample": False}, {"temperature": 0.0}),
        (
            {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 50, "min_p": 0.1, "typical_p": 0.9},
            {"temperature": 0.0},
        ),
        ({"do_sample": False, "repetition_penalty": 1.2}, {"repetition_penalty": 1.2, "temperature": 0.0}),
    ],
)
def test_what_a_file_sets(tmp_path, config, defaults):
    assert Generation.read(folder(tmp_path, **config)).params() == defaults
    SamplingParams(**defaults)


def test_no_file_sets_nothing(tmp_path):
    assert Generation.read(tmp_path).params() == {}


@pytest.mark.parametrize(
    "name, bad, expected",
    [
        ("temperature", -0.1, "a finite number >= 0"),
        ("temperature", "hot", "a finite number >= 0"),
        ("temperature", float("inf"), "a finite number >= 0"),
        ("top_k", 1.5, "an integer >= -1"),
        ("top_k", -2, "an integer >= -1"),
        ("top_p", 0, r"a number in \(0, 1\]"),
        ("top_p", True, r"a number in \(0, 1\]"),
        ("min_p", 2, r"a number in \[0, 1\]"),
        ("typical_p", [0.5], r"a number in \(0, 1\]"),
        ("repetition_penalty", 0, "a finite number > 0"),
        ("max_new_tokens", 0, "an integer >= 1"),
        ("stop_strings", [""], "non-empty strings"),
        ("stop_strings", 7, "non-empty strings"),
        ("begin_suppress_tokens", [1.0], "a list of token ids"),
        ("bad_words_ids", [[5], []], "a list of lists of token ids"),
        ("min_new_tokens", True, "an integer >= 0"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(tmp_path, name, bad, expected):
    found = Generation.read(folder(tmp_path, **{name: bad}))
    with pytest.raises(InvalidModelFiles, match=rf"generation_config\.json: {name} .*must be {expected}"):
        found.params()
        found.rules(97, ())


def test_whether_to_sample_must_be_yes_or_no(tmp_path):
    with pytest.raises(InvalidModelFiles, match=r"do_sample must be true, false or null; got 'yes'"):
        Generation.read(folder(tmp_path, do_sample="yes")).params()


def test_a_file_that_is_no_object_is_refused(tmp_path):
    for content in ("[]", "{", "\x00"):
        (tmp_path / "generation_config.json").write_text(content)
        with pytest.raises(InvalidModelFiles, match=r"generation_config\.json"):
            Generation.read(tmp_path).params()
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").mkdir()
    with pytest.raises(InvalidModelFiles, match=r"generation_config\.json cannot be read as JSON: it is no file"):
        Generation.read(tmp_path)


def test_files_at_hand(tmp_path):
    """They are of another kind, with stop_str and stop_token_ids: nothing in them is a default of ours."""
    files = sorted(CONFIGS.glob("*.json"))
    assert len(files) == 19
    for file in files:
        (tmp_path / "generation_config.json").write_bytes(file.read_bytes())
        assert Generation.read(tmp_path).params() == {}


# ---- what may come, and what ends a text ----------------------------------------------------------------------------

SAYS = dict(temperature=0, max_tokens=4, include_stop=True)


@cache
def parrot(*likely):
    """A Llama that says the first of these tokens always, or where it may not the next: (its config, its tensors)."""
    sizes = dict(vocab_size=97, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    no_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = transformers.LlamaConfig(**sizes, **no_ids, max_position_embeddings=64, tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(config)
    tensors = {k: torch.zeros_like(v) for k, v in model.state_dict().items()}
    tensors["model.norm.weight"] += 1
    tensors["model.embed_tokens.weight"] += 1
    for less, token in enumerate(likely):
        tensors["lm_head.weight"][token] = 0.5 - less / 8
    return config.to_dict() | {"architectures": ["LlamaForCausalLM"]}, tensors


def made(path, *likely, config=None, **files):
    """A folder with it. config: changes to config.json. files: the contents of others, by name."""
    own, tensors = parrot(*(likely or (50, 0, 1)))
    save_file(tensors, path / "model.safetensors")
    raw = Raw(models.BPE({chr(0x100 + i): i for i in range(90)}, []))
    raw.add_special_tokens([AddedToken(t, special=True) for t in ("<end>", "<x>", *(f"<{i}>" for i in range(7)))])
    raw.save(str(path / "tokenizer.json"))
    for name, content in {"config": own | (config or {}), **files}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def said(model, opened=LLM, **params):
    with opened(model, backend="numpy") as llm:
        return llm.generate([[5, 6]], SamplingParams(**SAYS | params))[0].token_ids


@pytest.mark.parametrize(
    "config",
    [
        dict(suppress_tokens=[50, 9999, -1]),
        dict(bad_words_ids=[[50, 50], [50, 0]]),
        dict(begin_suppress_tokens=[50]),
        dict(eos_token_id=50, min_new_tokens=3),
        dict(eos_token_id=50, bad_words_ids=[[50]]),
        dict(eos_token_id=[50, 300], suppress_tokens=[50]),
        dict(eos_token_id=[50], begin_suppress_tokens=[50]),
    ],
    ids=str,
)
def test_what_may_come_is_as_in_transformers(tmp_path, config):
    path = made(tmp_path, generation_config=config)
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    theirs = model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, do_sample=False)[0, 2:].tolist()
    assert said(path) == theirs
    with LLM(path, backend="numpy", speculative_config={"method": "ngram", "num_speculative_tokens": 3}) as llm:
        assert [c.token_ids for c in llm.generate([[5, 6, *theirs, 5, 6]] * 2, SamplingParams(**SAYS))] == [theirs] * 2


def test_old_files_forbid_in_config_json(tmp_path):
    path = made(tmp_path, config=dict(suppress_tokens=[50]))
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert said(path) == model.generate(torch.tensor([[5, 6]]), max_new_tokens=4, do_sample=False)[0, 2:].tolist()


def test_a_request_goes_before_what_the_files_forbid(tmp_path):
    rules = dict(suppress_tokens=[50], begin_suppress_tokens=[0], min_new_tokens=3, eos_token_id=1)
    path = made(tmp_path, generation_config=rules)
    usual = said(path, opened=RemoteLLM)
    assert usual == said(path) == said(path, logit_bias={50: -1.0}) and usual[1:] == [0, 0, 0] and usual[0] > 1
    assert said(path, logit_bias={50: 0}) == said(path, allowed_token_ids=[50, 7]) == [50] * 4
    assert said(path, allowed_token_ids=[1, 2]) == [2, 2, 2, 1] and said(path, max_tokens=2) == usual[:2]
    assert said(path, allowed_token_ids=[1, 2], min_tokens=1) == [2, 1]


def test_a_sequence_stays_forbidden_where_a_request_names_its_tokens(tmp_path):
    path = made(tmp_path, generation_config=dict(bad_words_ids=[[50, 50], [50, 0]]))
    assert said(path, logit_bias={50: 0}) == said(path) != [50] * 4


@pytest.mark.parametrize(
    "config, generation, named, ends",
    [
        (80, None, "<end>", (80, 90)),
        (None, 80, "<end>", (80, 90)),
        (None, None, "<end>", (90,)),
        (90, [80, 90], None, (90, 80)),
        (90, [], None, (90,)),
        ([90, 200], None, "no token", (90,)),
    ],
)
def test_a_text_ends_where_any_file_says(tmp_path, config, generation, named, ends):
    files = dict(generation_config={"eos_token_id": generation}, tokenizer_config={"eos_token": named})
    path = made(tmp_path, 90, 0, config={"eos_token_id": config}, **files)
    assert load_model(path, "numpy").eos_ids == (ends[:-1] if named == "<end>" else ends)  # it has no tokenizer
    for opened in (LLM, RemoteLLM):
        with opened(path, backend="numpy") as llm:
            assert llm.eos_ids == ends
            [out] = llm.generate([[5, 6]], SamplingParams(temperature=0, max_tokens=4))
            assert (out.token_ids, out.finish_reason, out.choices[0].stop_reason) == ([], "stop", None)
    assert said(path, ignore_eos=True) == [90] * 4 and said(path, min_tokens=2) == [0, 0, 90]


def test_a_gguf_file_recommends_too(tmp_path, caplog):
    keys, path = gguf.Keys.General, tmp_path / "m.gguf"
    make(path, "llama")
    [first, *_] = said(path)
    entries = {keys.SAMPLING_TEMP: 0.15, keys.SAMPLING_TOP_K: 7, keys.SAMPLING_TOP_P: 0.5, keys.SAMPLING_MIN_P: 0.1}
    entries |= {keys.SAMPLING_PENALTY_REPEAT: 1.1, keys.NAME: "SmolLM2", "tokenizer.ggml.suppress_tokens": [first, 40]}
    odd = {keys.SAMPLING_MIROSTAT: 2, keys.SAMPLING_PENALTY_LAST_N: 64, keys.SAMPLING_SEQUENCE: "top_k;temperature"}
    entries |= odd | {keys.SAMPLING_XTC_PROBABILITY: 0.0, "general.sampling.mirostat_tau": 5.0}
    make(path, "llama", {f"/{name}": value for name, value in entries.items()})
    want = {"temperature": 0.15, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.1}
    assert chat_sampling(open_files(path)) == want  # and not SmolLM2's
    assert describe(path).not_obeyed == odd
    with LLM(path, backend="numpy") as llm:
        assert (llm.default_params, llm.rules) == (SamplingParams(**want), TokenRules(bad_words=((first,),)))
    assert first not in said(path)
    make(path, "llama", {f"/{keys.SAMPLING_TEMP}": -1.0, f"/{keys.SAMPLING_TOP_K}": 9})
    with LLM(path, backend="numpy") as llm:
        assert llm.default_params == SamplingParams(top_k=9)
    assert "m.gguf: general.sampling.temp is -1.0, which cannot be followed" in caplog.text


def test_ids_outside_the_vocabulary_are_left_out_with_one_warning(tmp_path, caplog):
    rules = dict(suppress_tokens=[97], bad_words_ids=[[1, 98], [0]], eos_token_id=[80, 300], pad_token_id=9999)
    path = made(tmp_path, config=dict(eos_token_id=50256, bos_token_id=50257), generation_config=rules)
    with LLM(path, backend="numpy") as llm:
        assert (llm.eos_ids, llm.model.bos_ids, llm.rules) == ((80,), (), TokenRules(bad_words=((0,),)))
    make(tmp_path / "m.gguf", "llama", {"/tokenizer.ggml.eos_token_id": 40})
    load_model(tmp_path / "m.gguf", "numpy")
    assert [r.message.partition("left out: ")[2] for r in caplog.records] == [
        "bos_token_id of config.json: 50257; eos_token_id of config.json: 50256; eos_token_id of "
        "generation_config.json: 300; suppress_tokens of generation_config.json: 97; bad_words_ids of "
        "generation_config.json: 98",
        "eos_token_id of m.gguf: 40",
    ]


# ---- what is not obeyed ----------------------------------------------------------------------------------------------

NO_MATTER = "assistant_ num_assistant prompt_lookup max_matching speculation target_lookbehind is_assistant use_mtp "
NO_MATTER += "cache_ use_cache max_cache low_memory prefill compile disable_compile continuous "  # of speed
NO_MATTER += "output_ return_dict transformers_version renormalize "  # of what is returned besides tokens
NO_MATTER += "bos_token eos_token pad_token decoder_start"  # read elsewhere, or of no use


def test_what_is_not_obeyed_is_known():
    """Every setting of transformers is obeyed, listed, or does not matter, and so what it does by default."""
    fresh = transformers.GenerationConfig()
    theirs = {name for name in vars(fresh) if not name.startswith("_")}
    obeyed = {"do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "stop_strings"}
    obeyed |= {"max_new_tokens", "min_new_tokens", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids"}
    listed = {name for name in NOT_OBEYED if not name.startswith("general.")}
    assert {n for n in theirs - obeyed if not n.startswith(tuple(NO_MATTER.split()))} == listed
    assert Generation(fresh._get_default_generation_params()).not_obeyed() == {}
    assert Generation(dict.fromkeys(NOT_OBEYED, 7)).not_obeyed() == dict.fromkeys(NOT_OBEYED, 7)


def test_a_gguf_vocabulary_beyond_the_rows_is_refused(tmp_path):
    tokens = {"tokens": [*"abcdefg", "ab", "cd"], "merges": ["a b"], "model": "gpt2", "pre": "gpt-2"}
    make(path := tmp_path / "m.gguf", "llama", {f"/tokenizer.ggml.{name}": value for name, value in tokens.items()})
    assert open_files(path).tokenizer(vocab_size=9).vocab_size == 9
    with pytest.raises(InvalidModelFiles, match=r"at most 8 tokens, as many as rows of token_embd\.weight; got 9"):
        open_files(path).tokenizer(vocab_size=8)
