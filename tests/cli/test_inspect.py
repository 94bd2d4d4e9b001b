"""hibachi inspect: what it says of models in every kind of files."""

import json
import shutil

import pytest
import torch
import transformers

from hibachi.cli import main
from hibachi.llm.model.families import FAMILIES
from hibachi.llm.model.files import TINY


@pytest.fixture
def inspect(capsys):
    """inspect(*args): exit status, standard output and standard error."""

    def call(*args):
        status = main(["inspect", *map(str, args)])
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def facts(inspect):
    def call(model):
        status, out, _ = inspect(model, "--json")
        return status, json.loads(out)

    return call


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A Gemma 2 in bfloat16, in several files."""
    folder = tmp_path_factory.mktemp("sharded")
    sizes = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=4, head_dim=16)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, sliding_window=8)
    config = transformers.Gemma2Config(**sizes, **heads)
    model = transformers.Gemma2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="40kB")
    return folder, sum(p.numel() for p in model.parameters())


def test_a_page_for_people(inspect):
    status, out, err = inspect("tiny")
    assert (status, err) == (0, "") and max(map(len, out.splitlines())) <= 80
    assert "LlamaForCausalLM" in out and "3.3 million (F16 3.3 million)" in out and "512 tokens" in out
    assert "4 layers, 256 wide, 4 heads on 2 of keys and values of 64" in out


def test_what_the_files_recommend_in_vain(inspect, facts, model_copy):
    said = {"num_beams": 4, "no_repeat_ngram_size": 2, "forced_eos_token_id": 7, "top_k": 5, "length_penalty": 1.0}
    path = model_copy({"generation_config.json": lambda _: json.dumps(said).encode()})
    assert "not obeyed    no_repeat_ngram_size 2\n              num_beams 4\n" in inspect(path)[1]
    assert facts(path)[1]["not_obeyed"] == {"num_beams": 4, "no_repeat_ngram_size": 2, "forced_eos_token_id": 7}


def test_a_draft_model_beside_it(inspect, tmp_path):
    status, out, err = inspect("tiny", "--draft", "tiny")
    assert (status, err) == (0, "") and max(map(len, out.replace(str(TINY), "").splitlines())) <= 80
    assert out.count("numpy         float32      12.5 MiB      4.0 KiB") == 2
    other = tmp_path / "other"
    shutil.copytree(TINY, other)
    tokenizer = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    one, two = (next(token for token, i in vocab.items() if i == n) for n in (7, 9))
    vocab[one], vocab[two] = 9, 7
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    status, out, _ = inspect("tiny", "--draft", other, "--json")
    assert status == 1 and "same tokens, id by id" in json.loads(out)["problem"]


def test_facts_for_programs(facts):
    status, d = facts("tiny")
    assert status == 0 and d["problem"] is None and d["mapping"] == "hibachi: the decoder"
    assert (d["parameters"], d["stored"], d["vocab_size"]) == (3279104, {"F16": 3279104}, 2048)
    assert d["chat_template"] is None and d["windows"] == [] and d["experts"] == 0
    memory = {(m["backend"], m["dtype"]): m for m in d["memory"]}
    token = 2 * 2 * 64 * 4 * 4  # keys and values, heads, their width, layers, bytes
    assert memory["torch", "float32"]["weights"] == 4 * 3279104
    assert memory["torch", "float32"]["cache_per_token"] == token
    assert memory["torch", "bfloat16"]["full_context"] == token // 2 * 512
    assert memory["torch", "int8"]["weights"] == 3279104 and memory["torch", "int8"]["cache_per_token"] is None
    vocabulary, rest = 2048 * 256, 3279104 - 2048 * 256
    assert memory["numpy", "int4"]["weights"] == vocabulary * 34 // 32 + rest * 18 // 32
    assert ("numpy", "bfloat16") in memory and ("numpy", "float16") not in memory
    assert {"numpy", "torch", "jax"} <= {name for name, _ in memory}


def test_shards_windows_and_a_second_architecture(facts, inspect, sharded):
    folder, parameters = sharded
    status, d = facts(folder)
    shards = len(list(folder.glob("*.safetensors")))
    assert status == 0 and shards > 1 and d["files"] == f"safetensors, {shards} shards"
    assert (d["architecture"], d["parameters"], d["windows"]) == ("Gemma2ForCausalLM", parameters, [8])
    assert d["stored"] == {"BF16": parameters}
    assert "8 tokens in 2 of 4 layers" in inspect(folder)[1]


def test_a_model_in_the_cache_of_the_hub(facts, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository, commit = tmp_path / "models--someone--novels", "0123456789abcdef0123456789abcdef01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    shutil.copytree(TINY, repository / "snapshots" / commit)
    status, d = facts("someone/novels")
    assert (status, d["architecture"]) == (0, "LlamaForCausalLM") and commit in d["path"]


@pytest.mark.parametrize(
    "mark, name", [("<|im_start|>", "ChatML"), ("[INST]", "Llama 2 or Mistral"), ("{{ messages }}", "its own")]
)
def test_the_template_has_a_name(facts, tmp_path, mark, name):
    folder = shutil.copytree(TINY, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(mark)
    assert facts(folder)[1]["chat_template"] == name


def test_a_model_that_would_not_load_is_described_all_the_same(facts, inspect, tmp_path):
    folder = shutil.copytree(TINY, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 641}))
    status, d = facts(folder)
    assert status == 1 and d["parameters"] == 3279104 and "expected (641, 256)" in d["problem"]
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LamaForCausalLM"]}))
    status, out, _ = inspect(folder)
    assert status == 1 and "nothing that is registered" in out and "Nearest known: LlamaForCausalLM" in out


@pytest.mark.parametrize(
    "name, content", [("generation_config", '{"temperature": "x"}'), ("tokenizer", '{"model": {}}'), ("tokenizer", "{")]
)
def test_a_file_that_every_command_refuses_is_a_problem(facts, model_copy, name, content):
    status, d = facts(model_copy({f"{name}.json": lambda _: content.encode()}))
    assert status == 1 and f"{name}.json" in d["problem"]


def test_what_is_no_model_is_an_error(inspect, tmp_path):
    for model, says in (("no/such/folder/x", "There is no folder"), (tmp_path, "config.json is missing")):
        status, out, err = inspect(model)
        assert (status, out) == (1, "") and says in err


def test_without_a_model_it_lists_the_registry(inspect):
    status, out, _ = inspect()
    assert status == 0 and {line.split()[0] for line in out.splitlines()} >= FAMILIES.keys() | {"MambaForCausalLM"}
    assert json.loads(inspect("--json")[1])["LlamaForCausalLM"] == "hibachi"


def test_a_model_of_the_user(inspect, facts):
    status, d = facts("hibachi.testing.toys:SumBoth")
    assert (status, d["level"], d["paged_layers"], d["state_layers"]) == (0, 2, 1, 1)
    assert (d["numbers_per_token"], d["numbers_per_request"], d["vocab_size"]) == (3, 1, 10)
    status, out, _ = inspect("hibachi.testing.toys:Count")
    assert status == 0 and "0, tokens out: the whole sequence is computed in each step" in out
    assert "the model itself" in out
    status, d = facts("hibachi.testing.toys:SumOwn")
    assert (status, d["level"], d["own_cache"], d["vocab_size"]) == (0, 1, True, 10)
    assert "between levels 1 and 2, a cache of its own" in inspect("hibachi.testing.toys:SumOwn")[1]
    assert inspect("hibachi.testing.toys:Nobody")[0] == 1


def test_a_model_of_frames_in_depth(inspect, tmp_path):
    (tmp_path / "sung.py").write_text(
        "class Sung:\n    codebooks, vocab_size, vocab_sizes = 2, 9, (9, 4)\n"
        "    def logits(self, tokens, lengths): ...\n    def depth(self, k, given, codes, past): ...\n"
    )
    status, out, _ = inspect(f"{tmp_path}/sung.py:Sung")
    assert status == 0 and "codebooks     2, drawn in depth, of (9, 4) ids" in out
