"""Architectures in a distribution of their own: installed, found by their entry points, right on every library."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from .installed import python_with

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_model"
PROMPTS = [[5, 6, 7], list(range(20, 40)), [9]]
GREEDY = f"""
import sys, hibachi
prompts = {PROMPTS}
for library in ("numpy", "torch"):
    model = hibachi.load_model(sys.argv[1], library, max_model_len=64)
    with hibachi.AutoregressiveBatchInference(model, max_num_batched_tokens=8) as engine:
        params = hibachi.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        print([stream.collect() for stream in [engine.run(p, params) for p in prompts]])
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return python_with(EXAMPLE, tmp_path_factory.mktemp("site"))


def test_a_family_of_another_package_gives_the_tokens_of_transformers(python, tmp_path):
    torch.manual_seed(0)
    sizes = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=3)
    config = transformers.StableLmConfig(**sizes, num_key_value_heads=3, max_position_embeddings=64)
    model = transformers.StableLmForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(1.0 if "norm" in name and "weight" in name else 0.0, 0.15)
    model.save_pretrained(tmp_path)

    def greedy(prompt):
        ids = list(prompt)
        for _ in range(12):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    wanted = str([greedy(p) for p in PROMPTS])
    assert python("-c", GREEDY, str(tmp_path)).splitlines() == [wanted, wanted]


def test_a_loader_of_another_package_gives_a_model_of_its_own(python, tmp_path):
    torch.manual_seed(0)
    gru, embed = torch.nn.GRU(32, 32, batch_first=True), torch.nn.Embedding(50, 32)
    head = torch.nn.Linear(32, 50, bias=False)
    tensors = {f"gru.{name}": p for name, p in gru.state_dict().items()}
    save_file(tensors | {"embed.weight": embed.weight, "head.weight": head.weight}, tmp_path / "model.safetensors")
    config = dict(architectures=["GruForCausalLM"], vocab_size=50, hidden_size=32, eos_token_id=0)
    (tmp_path / "config.json").write_text(json.dumps(config))

    def greedy(prompt):
        ids = list(prompt)
        for _ in range(12):
            with torch.no_grad():
                ids.append(int(head(gru(embed(torch.tensor([ids])))[0][0, -1]).argmax()))
        return ids[len(prompt) :]

    wanted = str([greedy(p) for p in PROMPTS])
    assert python("-c", GREEDY, str(tmp_path)).splitlines() == [wanted, wanted]


def test_an_installed_architecture_is_listed_with_who_brings_it(python):
    code = "from hibachi.llm.model.registry import architectures; print(architectures()['GruForCausalLM'])"
    assert python("-c", code).split() == ["more-models"]
