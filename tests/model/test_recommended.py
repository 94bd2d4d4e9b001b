"""How a chat model is sampled when nobody says how: by its files, else by its name."""

import json
import shutil
from types import SimpleNamespace

import pytest

from hibachi.llm.model.files import TINY, open_files
from hibachi.llm.model.generation import Generation
from hibachi.llm.model.recommended import USUAL, chat_sampling


def folder(tmp_path, name, generation=None):
    made = shutil.copytree(TINY, tmp_path / name)
    (made / "generation_config.json").write_text(json.dumps(generation or {}))
    return open_files(made)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("SmolLM2-135M-Instruct", {"temperature": 0.2, "top_p": 0.9}),
        (".smollm2", {"temperature": 0.2, "top_p": 0.9}),
        ("models--Qwen--Qwen2.5-0.5B-Instruct", {"temperature": 0.7, "top_p": 0.8}),
        ("llama-3.2-1b", {"temperature": 0.6, "top_p": 0.9}),
        ("llama-31", USUAL),
        ("my-model", USUAL),
    ],
)
def test_by_the_name_of_its_folder(tmp_path, name, wanted):
    found = chat_sampling(folder(tmp_path, name))
    assert wanted.items() <= found.items() and (wanted is not USUAL or found == USUAL)


def test_its_files_come_first(tmp_path):
    said = {"do_sample": True, "temperature": 0.4}
    assert chat_sampling(folder(tmp_path, "smollm2", said)) == {"temperature": 0.4}
    assert chat_sampling(folder(tmp_path, "smollm2-b", {"repetition_penalty": 1.5})) == {
        "temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.5,
    }  # fmt: skip


@pytest.mark.parametrize("key", ["general.name", "general.basename"])
def test_a_gguf_file_says_its_name(tmp_path, key):
    gguf = SimpleNamespace(metadata={key: "SmolLM2 135M Instruct", "general.size_label": 3})
    files = SimpleNamespace(config={}, gguf=gguf, path=tmp_path / "weights.gguf", generation=Generation({}))
    assert chat_sampling(files) == {"temperature": 0.2, "top_p": 0.9}
