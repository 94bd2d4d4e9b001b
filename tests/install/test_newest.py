"""The newest torch, jax and transformers that pip finds here, torch in a build for the CPU: an environment of their
own, without our constraints. Where the newest torch has no such build, a test that is skipped says so.
"""

import re
import shutil
import sys

import pytest

from . import venvs
from .venvs import VERSIONS, run

pytestmark = [pytest.mark.install, pytest.mark.slow, pytest.mark.xdist_group("newest")]  # what is installed once

LIBRARIES = "torch", "jax", "transformers"

TOKENS = """
from hibachi import LLM, SamplingParams
prompts = ["She was", "It is a truth universally acknowledged", "No"]
for backend in ("numpy", "torch", "jax"):
    with LLM("tiny", backend=backend) as llm:
        answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
        print(backend, [list(map(int, answer.choices[0].token_ids)) for answer in answers])
"""

# An architecture that only transformers knows: its own greedy tokens, and ours.
MODULE = """
import torch
from transformers import ArceeConfig, ArceeForCausalLM
from hibachi import AutoregressiveBatchInference, SamplingParams, load_model
torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
ids = dict(vocab_size=97, bos_token_id=None, eos_token_id=None, pad_token_id=None)
module = ArceeForCausalLM(ArceeConfig(max_position_embeddings=64, **ids, **sizes)).eval()
module.save_pretrained("arcee")
model = load_model("arcee", "torch")
print(type(model).__name__)
prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 10], [11]]
params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
with AutoregressiveBatchInference(model, max_model_len=64) as engine:
    streams = [engine.run(prompt, params) for prompt in prompts]
    print([list(map(int, stream)) for stream in streams])
options = dict(do_sample=False, max_new_tokens=12)
print([module.generate(torch.tensor([p]), **options)[0, len(p):].tolist() for p in prompts])
"""


def versions(pip, name, cwd):
    """Those that fit this machine, the newest first."""
    told = re.search(r"Available versions: (.*)", run(pip, "index", "versions", name, cwd=cwd))
    assert told is not None, name
    return told[1].split(", ")


def for_the_cpu(found):
    """Of torch's versions, the newest one built for the CPU. On Linux those say so; others would bring CUDA."""
    return next((v for v in found if sys.platform != "linux" or v.endswith("+cpu")), None)


class Newest:
    """An environment with the newest libraries, hibachi and its backends."""

    def __init__(self, home):
        self.home = home
        checkout = venvs.checkout(home / "checkout")
        run(sys.executable, "-m", "venv", home / "venv", cwd=home)
        self.programs = home / "venv" / "bin"
        pip = self.programs / "pip"
        run(self.programs / "python", "-m", "pip", "install", "--quiet", "--upgrade", "pip", cwd=home)
        self.found = {name: versions(pip, name, home) for name in LIBRARIES}
        self.wanted = {name: found[0] for name, found in self.found.items()}
        self.wanted["torch"] = for_the_cpu(self.found["torch"])
        if self.wanted["torch"] is None:
            pytest.skip(f"{gap(self.found['torch'][0], 'none')} Without one nothing is run.")
        pins = [f"{name}=={version}" for name, version in self.wanted.items()]
        run(pip, "install", "--quiet", *pins, f"{checkout}[torch,jax,text,hf,test]", cwd=home, PIP_CONSTRAINT="")

    def run(self, program, *arguments):
        return run(self.programs / program, *arguments, cwd=self.home)


def gap(newest, ran):
    return (
        f"torch {newest} is the newest for this machine, and pip finds no build of it for the CPU; the newest that it "
        f"finds: {ran}. PIP_EXTRA_INDEX_URL can name PyTorch's index of such builds."
    )


@pytest.fixture(scope="module")
def newest(tmp_path_factory):
    home = tmp_path_factory.mktemp("newest")
    yield Newest(home)
    shutil.rmtree(home)


def test_the_newest_versions_are_installed(newest):
    said = newest.run("python", "-c", VERSIONS, *LIBRARIES, "jaxlib", "numpy")
    print(f"\n{said}")
    assert [f"{name} {version}" for name, version in newest.wanted.items()] == said.strip().split(", ")[:3]
    newest.run("pip", "check")


def test_the_newest_torch_has_a_build_for_the_cpu(newest):
    latest, ran = newest.found["torch"][0], newest.wanted["torch"]
    if latest.partition("+")[0] != ran.partition("+")[0]:
        pytest.skip(gap(latest, ran))


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_a_backend_keeps_every_promise(name, newest):
    said = newest.run("hibachi", "conformance", "--backend", name, "-x")
    print(said)
    assert " passed" in said and " failed" not in said


def test_a_small_model_gives_the_tokens_that_numpy_gives(newest):
    said = dict(line.split(" ", 1) for line in newest.run("python", "-c", TOKENS).splitlines())
    assert said.keys() == {"numpy", "torch", "jax"} and len(set(said.values())) == 1, said


def test_a_model_of_transformers_gives_its_own_tokens(newest):
    kind, ours, theirs = newest.run("python", "-c", MODULE).splitlines()[-3:]
    assert kind == "TransformersModel" and ours == theirs
