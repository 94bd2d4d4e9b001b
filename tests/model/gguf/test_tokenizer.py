"""Tokenizers out of GGUF metadata, against the tokenizer.json that one came from and against slow ones of ours."""

import hashlib
import json
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from hibachi.errors import InvalidModelFiles, MissingExtra, UnknownArchitecture
from hibachi.model.gguf.file import read_header
from hibachi.model.gguf.tokenizer import read_tokenizer
from hibachi.model.text import Tokenizer

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "data"
SMOLLM2 = ROOT / ".smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BYTES = [f"<0x{i:02X}>" for i in range(256)]

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces   and    more ",
    "it's I'LL they've 'twas",
    "1 12 123 1234 12345.678e-9 0x1F ٣٤٥ ½ Ⅷ",
    "def f(x: int) -> str:\n\treturn x**2  # ünïcode\r\n\n\n",
    "你好，世界 こんにちは 안녕하세요 Привет مرحبا नमस्ते",
    "😀 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u00e9 ﬁ",
    "\x00\x01\x7f\u200b\ufeff\u2028",
    "<|im_start|>user\nHi <|im_end|>\n<|endoftext|><repo_name>",
    "a" * 300,
]


def metadata(**entries):
    return {f"tokenizer.{'' if name == 'chat_template' else 'ggml.'}{name}": value for name, value in entries.items()}


def build(**entries):
    return read_tokenizer(Path("m.gguf"), metadata(**entries) | {"general.architecture": entries.get("arch", "llama")})


# ---- byte-level ----------------------------------------------------------------------------------------------------


def byte_level(pre="gpt-2", more=(), **entries):
    """All bytes, three words, and `more` tokens of a type each."""
    words = {"merges": ["t h", "th e", "Ġ the"], "tokens": ["th", "the", "Ġthe"]}
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *words["tokens"], *(t for t, _ in more)]
    types = np.array([NORMAL] * (len(tokens) - len(more)) + [kind for _, kind in more], np.int32)
    usual = {"model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types, "merges": words["merges"]}
    return build(**(usual | entries))


def test_smollm2_is_the_tokenizer_that_it_was():
    """Cut to a thousand merges."""
    folder = DATA / "smollm2"
    original = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = json.loads((folder / "tokenizer.json").read_text())
    special = {t["content"] for t in model["added_tokens"]}
    tokens = sorted(model["model"]["vocab"], key=model["model"]["vocab"].get)
    pieces = build(
        model="gpt2",
        pre="smollm",
        tokens=tokens,
        token_type=np.array([CONTROL if t in special else NORMAL for t in tokens]),
        merges=[" ".join(m) for m in model["model"]["merges"]],
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        padding_token_id=2,
        add_bos_token=False,
    )
    assert made_of_texts(pieces.raw) == made_of_texts(original)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert pieces.special == {name: config[name] for name in ("bos_token", "eos_token", "unk_token", "pad_token")}


WHOLE = "697fb60007ceed031e7ce412af8faaf2f2988ca42057e728da83bf60e755a6f8"  # by all of tokenizer.json


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.exists(), reason=f"{SMOLLM2.name} is not in .smollm2: make .smollm2/fetched")
def test_the_file_of_smollm2_has_that_tokenizer():
    pieces = read_tokenizer(SMOLLM2, read_header(SMOLLM2)[0])
    assert hashlib.sha256(json.dumps(made_of_texts(pieces.raw)).encode()).hexdigest() == WHOLE
    assert pieces.chat_template.strip() == (DATA / "smollm2" / "chat_template.jinja").read_text().strip()


def made_of_texts(raw):
    """The vocabulary, ids of texts and texts of ids."""
    found = [sorted(raw.get_vocab().items())]
    novel = (DATA / "emma.txt").read_text()
    for text in (*TEXTS, *(novel[i : i + 997] for i in range(0, len(novel), 997))):
        for special in (False, True):
            ids = raw.encode(text, add_special_tokens=special).ids
            found.append([text, ids, raw.decode(ids, skip_special_tokens=special)])
    # ids in an order that no text has: broken characters
    found += [raw.decode([i, i // 2, i // 3]) for i in range(0, raw.get_vocab_size(), 97)]
    return found


CUTS = {  # pre: what becomes of a text
    "gpt-2": "It| isn|'t| 12345| +=| x|,| | é",
    "mpt": "It| isn|'t| 12345| +=| x|,| | é",
    "smollm": "It| isn|'t| |1|2|3|4|5| +=| x|,| | é",
    "llama-bpe": "It| isn|'t| |123|45| +=| x|,| | é",
    "dbrx": "It| isn|'t| |123|45| +=| x|,| | é",
    "qwen2": "It| isn|'t| |1|2|3|4|5| +=| x|,| | é",
    "tekken": "It| isn|'t| |1|2|3|4|5| +=| x|,| | é",
    "gpt-4o": "It| isn't| |123|45| +=| x|,| | é",
    "falcon": "It| isn|'|t| |123|45| |+=| x|,| | é",
    "falcon3": "It| isn|'|t| |1|2|3|4|5| |+=| x|,| | é",
}


@pytest.mark.parametrize("pre", CUTS)
def test_text_is_cut_as_the_name_says(pre):
    words = byte_level(pre).raw.pre_tokenizer.pre_tokenize_str(CUTS[pre].replace("|", ""))
    decode = tokenizers.decoders.ByteLevel().decode
    assert [decode([w]) for w, _ in words] == CUTS[pre].split("|")


def test_a_word_that_is_a_token_is_not_built_from_parts_where_llama_3_says_so():
    more = [("xyz", NORMAL)]
    assert byte_level("llama-bpe", more).raw.encode("xyz", add_special_tokens=False).tokens == ["xyz"]
    assert byte_level("qwen2", more).raw.encode("xyz").tokens == ["x", "y", "z"]


def test_qwen_composes_characters_and_others_do_not():
    decomposed, composed = "e\u0301", "\u00e9"
    for pre, same in (("qwen2", True), ("mpt", True), ("gpt-2", False), ("smollm", False)):
        raw = byte_level(pre).raw
        assert (raw.encode(decomposed).ids == raw.encode(composed).ids) is same


@pytest.mark.parametrize(
    "entries, tokens",
    [
        ({}, ["the"]),
        ({"add_bos_token": True}, ["<s>", "the"]),
        ({"add_eos_token": True}, ["the", "</s>"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<s>", "the", "</s>"]),
        ({"pre": "llama-bpe"}, ["<s>", "the"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["the"]),
        ({"add_bos_token": True, "bos_token_id": 9999}, ["the"]),
    ],
)
def test_what_is_put_around_a_text(entries, tokens):
    more = [("<s>", CONTROL), ("</s>", CONTROL)]
    raw = byte_level(more=more, **({"bos_token_id": 259, "eos_token_id": 260} | entries)).raw
    assert raw.encode("the").tokens == tokens
    assert raw.encode("the", add_special_tokens=False).tokens == ["the"]


def test_types_of_tokens():
    more = [("<|x|>", CONTROL), ("<think>", USER_DEFINED), ("[PAD261]", UNUSED), ("[PAD262]", UNUSED), ("zzz", UNUSED)]
    pieces = byte_level(more=more, bos_token_id=259, padding_token_id=261, chat_template="{{ bos_token }}")
    raw = pieces.raw
    assert raw.encode("the<|x|> <think>the").tokens == ["the", "<|x|>", "Ġ", "<think>", "the"]
    assert raw.decode([257, 259, 260, 257]) == "the<think>the"  # control is silent, what users defined is text
    assert raw.id_to_token(261) is None and raw.id_to_token(263) == "zzz"
    assert raw.encode("[PAD261]").ids == raw.encode("[PAD26").ids + raw.encode("1]").ids
    text = Tokenizer(**pieces._asdict())
    assert text.special == {"bos_token": "<|x|>", "pad_token": "[PAD261]"} and text.is_silent(259)
    assert text.render_chat([]) == "<|x|>"


def test_old_files_that_do_not_name_their_cut():
    for arch, pre in (("gptneox", "mpt"), ("falcon", "falcon"), ("starcoder2", "starcoder"), ("gpt2", "gpt-2")):
        for entries in ({"pre": "default"}, {"pre": None}):
            raw = byte_level(**entries, arch=arch).raw
            assert raw.to_str() == byte_level(pre).raw.to_str()


# ---- SentencePiece -------------------------------------------------------------------------------------------------

WORDS = "▁the ▁quick ▁brown ▁fox ▁jumps ▁over ▁lazy ▁dog er qu ick ow own ▁b ▁f ox um mp ▁l az zy ▁d og ▁▁ ▁▁▁▁"


def sentencepiece(**entries):
    """Characters, parts of words and bytes; scores fall with the id, and the newest tokens are not to be merged."""
    letters = [chr(i) for i in range(97, 123)] + ["▁", "T", "."]
    parts = sorted({w[:n] for w in WORDS.split() for n in range(2, len(w) + 1)}, key=lambda w: (len(w), w))
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *parts, *letters, "<turn>", "<two words>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(parts) + len(letters)), CONTROL, USER_DEFINED]
    scores = [0.0] * 259 + [-float(i) for i in range(len(parts) + len(letters))] + [-1000.0] * 2
    usual = {"model": "llama", "tokens": tokens, "token_type": np.array(types), "scores": np.array(scores, np.float32)}
    return build(**(usual | entries)), usual | entries


def slow_sentencepiece(text, entries):
    """The definition: join the neighbours that give the token of the highest score, the leftmost first, until none."""
    score = {
        t: s
        for t, s, kind in zip(entries["tokens"], entries["scores"], entries["token_type"], strict=True)
        if kind == NORMAL
    }
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [(score[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in score]
        if not pairs:
            break
        i = -max(pairs)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [p for part in parts for p in ([part] if part in score else [BYTES[b] for b in part.encode()])]


SENTENCES = [
    "the quick brown fox jumps over the lazy dog.",
    "The  quick    brown     fox",
    "thethe dogdog overquick",
    "é 😀 \n\t",
    "x",
    " ",
    "   ",
    "",
]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_joins_by_score(prefix):
    pieces, entries = sentencepiece(add_space_prefix=prefix, add_bos_token=False)
    for text in SENTENCES:
        expected = slow_sentencepiece(" " + text if prefix and text else text, entries)
        encoded = pieces.raw.encode(text)
        assert encoded.tokens == expected, text
        assert pieces.raw.decode(encoded.ids) == text


def test_sentencepiece_begins_with_bos_and_finds_tokens_as_a_whole():
    pieces, _ = sentencepiece()  # the ids of bos, eos and unk are those that llama.cpp assumes
    raw = pieces.raw
    assert raw.encode("the<turn>dog<two words>").tokens == ["<s>", "▁the", "<turn>", "▁dog", "<two words>"]
    assert raw.decode(raw.encode("the fox").ids) == "the fox"
    assert pieces.special == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_sentencepiece_with_merges_takes_those():
    pieces, _ = sentencepiece(merges=["o w", "ow n"], add_bos_token=False)
    assert pieces.raw.encode("own the").tokens == ["▁", "own", "▁", "t", "h", "e"]


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entries, error, message",
    [
        ({"model": "t5"}, UnknownArchitecture, "tokenizer of the kind 't5'; known: gpt2 .byte-level BPE. and llama"),
        ({"model": None}, UnknownArchitecture, "of the kind None"),
        ({"pre": "viking"}, UnknownArchitecture, "cuts text as for 'viking'.*known: dbrx.*load_model"),
        ({"pre": "default"}, UnknownArchitecture, "cuts text as for 'default'"),
        ({"tokens": None}, InvalidModelFiles, "tokens must be a list of strings; got no such entry"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, InvalidModelFiles, "all different; got 'a' as 0 and 2"),
        ({"tokens": ["a"]}, InvalidModelFiles, "token_type must be 1 numbers, one for each token; got array"),
        ({"merges": None}, InvalidModelFiles, "merges must be a list of strings"),
        ({"merges": ["q q"]}, InvalidModelFiles, "cannot be built: .*out of vocabulary"),
    ],
)
def test_a_tokenizer_that_we_cannot_build_is_explained(entries, error, message):
    with pytest.raises(error, match=rf"m\.gguf.*{message}"):
        byte_level(**entries)


@pytest.mark.parametrize("scores", [None, np.zeros(3)])
def test_scores_must_be_there(scores):
    with pytest.raises(InvalidModelFiles, match=r"scores must be [0-9]+ numbers, one for each token"):
        sentencepiece(scores=scores)


@pytest.mark.parametrize("text", ["$A", "$5", "$B:1", "a:b:c", ":0", "\n", "🙂"])
def test_a_strange_special_token_is_taken_literally(text):
    raw = byte_level(more=[(text, CONTROL)], add_bos_token=True, bos_token_id=259).raw
    assert raw.encode("the").tokens == [text, "the"]


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtra, match=r"pip install '\.\[text\]'"):
        build(model="gpt2", tokens=["a"], merges=["a b"])
