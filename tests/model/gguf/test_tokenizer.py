"""Tokenizers out of GGUF metadata, against the tokenizer.json that one came from and against slow ones of ours."""

import hashlib
import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from hibachi.errors import InvalidModelFiles, MissingExtra, UnknownArchitecture
from hibachi.llm.model.gguf import cuts
from hibachi.llm.model.gguf.ends import end_ids
from hibachi.llm.model.gguf.file import read_header
from hibachi.llm.model.gguf.tokenizer import read_tokenizer
from hibachi.llm.tokenizers import Tokenizer

from ...lib.inside import underlying

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
    """A name with a dot is one as it is."""
    return {name if "." in name else f"tokenizer.ggml.{name}": value for name, value in entries.items()}


def build(**entries):
    return read_tokenizer(Path("m.gguf"), {"general.architecture": "llama"} | metadata(**entries))


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
    assert pieces.chat_template["default"].strip() == (DATA / "smollm2" / "chat_template.jinja").read_text().strip()


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


TEXT = "it'dx SaM'S  1234,\n \n    _`e\u0301 b (日本の キ 한국) aIMGIMGAZ"
CUTS = {  # what becomes of the text
    "default": "it|'|dx| SaM|'|S| | |123|4|,|\n \n    |_|`|e|\u0301| b| |(|日本の| キ| 한국|)| aIMGIMGAZ",
    "gpt-2": "it|'d|x| SaM|'|S| | 1234|,|\n \n   | _`|e|\u0301| b| (|日本の| キ| 한국|)| aIMGIMGAZ",
    "smollm": "it|'d|x| SaM|'|S|  |1|2|3|4|,|\n \n   | _`|e|\u0301| b| (|日本の| キ| 한국|)| aIMGIMGAZ",
    "falcon": "it|'|dx| SaM|'|S| | |123|4|,|\n \n    |_`|e|\u0301| b| |(|日本の| キ| 한국|)| aIMGIMGAZ",
    "falcon3": "it|'|dx| SaM|'|S| | |1|2|3|4|,|\n \n    |_`|e|\u0301| b| |(|日本の| キ| 한국|)| aIMGIMGAZ",
    "llama-bpe": "it|'d|x| SaM|'S| | |123|4|,\n| \n|   | _`|e|\u0301| b| (|日本の| キ| 한국|)| aIMGIMGAZ",
    "minicpm5": "it|'d|x| SaM|'S|  |123|4|,\n| \n|   | _`|e|\u0301| b| (|日本の| キ| 한국|)| aIMGIMGAZ",
    "jais-2": "it|'d|x| SaM|'S| | |123|4|,\n| \n|  | | _`|e|\u0301| b| (|日本の| キ| 한국|)| aIMGIMGAZ",
    "qwen2": "it|'d|x| SaM|'S| | |1|2|3|4|,\n| \n|   | _`|e|\u0301| b| (|日本の| キ| 한국|)| aIMGIMGAZ",
    "qwen35": "it|'d|x| SaM|'S| | |1|2|3|4|,\n| \n|   | _`|e\u0301| b| (|日本の| キ| 한국|)| aIMGIMGAZ",
    "ufakzeka": "it|'dx| SaM|'S| | |1|2|3|4|,\n| \n|   | _`|e|\u0301| b| (|日本の| キ| 한국|)| aIMGIMGAZ",
    "laguna": "it|'d|x| SaM|'S| | |1|2|3|4|,|\n| |\n|   | _`|e|\u0301| b| (|日本の| キ| 한국|)| aIMGIMGAZ",
    "seed-coder": "it|'d|x| SaM|'S| | |1|2|3|4|,|\n \n|   | _`|e|\u0301| b| (|日本の| キ| 한국|)| aIMGIMGAZ",
    "exaone-moe": "it|'d|x SaM|'S| | |1|2|3|4|,\n| \n|   | _`|e\u0301 b| (|日本の キ 한국|)| aIMGIMGAZ",
    "tekken": "it|'dx| Sa|M|'S| | |1|2|3|4|,\n| \n|   | _`|e\u0301| b| (|日本の| キ| 한국|)| a|IMGIMGAZ",
    "gpt-4o": "it'd|x| Sa|M'S| | |123|4|,\n| \n|   | _`|e\u0301| b| (|日本の| キ| 한국|)| a|IMGIMGAZ",
    "tiny_aya": "it'd|x| Sa|M'S|  |1|234|,\n| \n|   | _`|e\u0301| b| (|日本の| キ| 한국|)| a|IMGIMGAZ",
    "youtu": "it'd|x| Sa|M'S| | |1|2|3|4|,\n| \n|   | _`|e\u0301| b| (|日本の| |キ| |한국|)| a|IMGIMGAZ",
    "kimi-k2": "it'd|x| Sa|M'S| | |123|4|,\n| \n|   | _`|e\u0301| b| (|日本|の| キ| 한국|)| a|IMGIMGAZ",
    "deepseek-llm": "it|'|dx| SaM|'|S|  |1234|,|\n| |\n|   | _`|e|\u0301| b| (|日本の| |キ| |한국|)| aIMGIMGAZ",
    "deepseek-coder": "it|'|dx| SaM|'|S|  |1|2|3|4|,|\n| |\n|   | _|`|e|\u0301| b| (|日本の| |キ| |한국|)| aIMGIMGAZ",
    "deepseek-v3": "it|'dx| SaM|'S|  |123|4|,\n| \n|   | _`|e\u0301| b| (|日本の| |キ| 한국|)| aIMGIMGAZ",
    "spark2_5": "it|'dx| SaM|'S|  |1|2|3|4|,|\n| \n   | _`|e\u0301| b| (|日本の| |キ| 한국|)| aIMGIMGAZ",
    "afmoe": "it|'dx| SaM|'S|  |1|234|,\n| \n|   | _`|e\u0301| b| (|日本の| |キ| |한국|)| aIMGIMGAZ",
    "superbpe": "it'dx SaM'S  |1|234|,\n \n    _`e\u0301 b (日本の キ 한국) aIMGIMGAZ",
    "poro-chat": "it'dx| SaM'S| | 1234|,\n \n   | _`e\u0301| b| (|日本の| キ| 한국|)| aIMGIMGAZ",
    "viking": "it'dx| SaM'S| | |1|2|3|4|,\n \n   | _`e\u0301| b| (|日本の| キ| 한국|)| aIMGIMGAZ",
    "chameleon": "it|'|dx| SaM|'|S|  |1|2|3|4|,|\n| |\n|    |_|`|e|\u0301| b| |(|日本の| キ| 한국|)| a|IMGIMGAZ",
}
SAME = {  # other names for it
    "gpt-2": "phi-2 gigachat a.x-4.0 mellum modern-bert exaone4 jina-es jina-de jina-v2-es jina-v2-de "
    "jina-v1-en jina-v2-code roberta-bpe jais trillion granite-docling mpt olmo",
    "smollm": "starcoder refact codeshell exaone minerva-7b mellum2 command-r",
    "llama-bpe": "llama3 llama-v3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano glm4 glm5 dbrx smaug-bpe chatglm-bpe",
    "qwen2": "deepseek-r1-qwen stablelm2 kormo f2llmv2 megrez hunyuan solar-open grok-2 bailingmoe "
    "bailingmoe2 llada-moe",
    "gpt-4o": "llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m",
    "tiny_aya": "cohere2moe",
    "deepseek-v3": "hunyuan-dense joyai-llm hy_v4",
    "poro-chat": "bloom gpt3-finnish",
}


@pytest.mark.parametrize("name", CUTS)
def test_text_is_cut_as_the_name_says(name):
    decode = tokenizers.decoders.ByteLevel().decode
    for pre in (name, *SAME.get(name, "").split()):
        words = byte_level(pre).raw.pre_tokenizer.pre_tokenize_str(TEXT)
        assert [decode([w]) for w, _ in words] == CUTS[name].split("|"), pre


def test_what_else_the_name_says():
    """Of all names that llama.cpp knows but "whitespace", whose models write nothing."""
    marks = {"gemma4", "granite-embed-multi-311m", "sarvam-moe"}
    assert {*CUTS, *" ".join(SAME.values()).split(), *marks} == set(cuts.CUTS)
    assert len(cuts.CUTS) == 90 and len(set(CUTS.values())) == len(CUTS)
    llama = {"llama-bpe", "llama3", "llama-v3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken"}
    whole = {"glm4", "glm5", "minicpm5", "youtu", "granite-embed-multi-97m"}
    assert {name for name, cut in cuts.CUTS.items() if cut.whole} == llama | whole
    assert {name for name, cut in cuts.CUTS.items() if cut.bos} == llama | {"chameleon"}


@pytest.mark.parametrize("text", ["1" * 30000, "1" * 30000 + "a", " " * 30000 + "a", " \n" * 15000 + "a"])
def test_a_long_run_of_anything_is_cut_in_one_pass(text):
    for name in CUTS:
        steps, start = byte_level(name).raw.pre_tokenizer, time.perf_counter()
        steps.pre_tokenize_str(text)
        assert time.perf_counter() - start < 1.5, name  # one that looks at the rest of the run takes 3 to 10


def test_a_word_that_is_a_token_is_not_built_from_parts_where_llama_3_says_so():
    more = [("xyz", NORMAL)]
    assert byte_level("llama-bpe", more).raw.encode("xyz", add_special_tokens=False).tokens == ["xyz"]
    assert byte_level("qwen2", more).raw.encode("xyz").tokens == ["x", "y", "z"]


def test_qwen_composes_characters_and_others_do_not():
    decomposed, composed = "e\u0301", "\u00e9"
    for pre, same in (("qwen2", True), ("command-r", True), ("mpt", True), ("gpt-2", False), ("qwen35", False)):
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


CHAT = {"tokenizer.chat_template": "{{ bos_token }}"}


def test_types_of_tokens():
    more = [("<|x|>", CONTROL), ("<think>", USER_DEFINED), ("[PAD261]", UNUSED), ("[PAD262]", UNUSED), ("zzz", UNUSED)]
    pieces = byte_level(more=more, bos_token_id=259, padding_token_id=261, **CHAT)
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
            raw = byte_level(**entries, **{"general.architecture": arch}).raw
            assert raw.to_str() == byte_level(pre).raw.to_str()


@pytest.mark.parametrize("pre", ["default", "", None])
def test_a_file_that_does_not_say_how_it_cuts_is_read_with_a_warning(caplog, pre):
    raw = byte_level(pre, more=[(".,", NORMAL)]).raw
    [warning] = [r.getMessage() for r in caplog.records]
    assert "m.gguf does not name how its tokenizer cuts text (tokenizer.ggml.pre)" in warning
    assert raw.encode("the12345").tokens == ["the", "1", "2", "3", "4", "5"]
    caplog.clear()
    byte_level("gpt-2")
    assert not caplog.records


# ---- what stands for no text ---------------------------------------------------------------------------------------


def test_names_that_are_special_whatever_their_type():
    """Types in files are wrong at times."""
    ends = [
        "<|im_end|>",
        "</s>",
        "_<EOT>",
        "[EOS]",
        "<turn|>",
        "<end_of_utterance>",
        "[e~[",
        "<|fim_pad|>",
        "<|file_sep|>",
    ]
    tokens = [*ends, "<fim_prefix>", "▁<MID>"]
    for kind in (NORMAL, USER_DEFINED, CONTROL):
        text = Tokenizer(**byte_level(more=[(t, kind) for t in tokens])._asdict())
        ids = text.encode("".join(tokens))
        assert ids == list(range(259, 259 + len(tokens))) and all(map(text.is_silent, ids))
    assert ends_of(tokens=tokens) == list(range(9))
    own = {"eos_token_id": 9, "eom_token_id": 10, "fim_pad_token_id": 0}  # the file's own come first
    assert ends_of(tokens=tokens, **own) == [9, 10, 0, 1, 2, 3, 4, 5, 6, 8]


@pytest.mark.parametrize(
    "tokens, ends",
    [
        ("<|end|> <|return|>", "<|end|> <|return|>"),
        ("<|end|> <|return|> <|call|>", "<|return|> <|call|>"),
        ("<|end|> <|flush|> <|calls|>", "<|flush|> <|calls|>"),
        ("</s> <|tool_response>", "<|tool_response>"),
        ("</s> <eos> <|eot_id|> <|eom_id|>", "</s> <eos> <|eot_id|> <|eom_id|>"),
    ],
)
def test_what_ends_no_text_beside_others(tokens, ends):
    given = tokens.split()
    assert [given[i] for i in ends_of(tokens=given)] == ends.split()
    if "</s>" in given and "</s>" not in ends:  # HTML
        text = Tokenizer(**byte_level(more=[(t, NORMAL) for t in given])._asdict())
        assert text.encode("</s>") == [underlying(text).token_to_id(c) for c in "</s>"]


def ends_of(**entries):
    return end_ids(metadata(**entries), len(entries["tokens"]))


def test_chat_templates_by_name():
    given = {
        "tokenizer.chat_templates": ["tool_use", "rag"],
        "tokenizer.chat_template.tool_use": "tools {{ tools[0] }}",
    }
    text = Tokenizer(**byte_level(**CHAT, **given, **{"tokenizer.chat_template.rag": "r"})._asdict())
    assert text.chat_templates == {"default": "{{ bos_token }}", "tool_use": "tools {{ tools[0] }}", "rag": "r"}
    assert text.render_chat([]) == "" and text.render_chat([], tools=["x"]) == "tools x"
    assert Tokenizer(**byte_level()._asdict()).chat_templates == {}
    with pytest.raises(InvalidModelFiles, match=r"chat template 'rag' must be UTF-8; got other bytes"):
        byte_level(**{"tokenizer.chat_template.rag": "caf\udce9"})


def test_tokens_that_occur_twice():
    """Where one of them stands for no text. Otherwise what the model says could not be told."""
    more = [("<x>", CONTROL), ("<x>", CONTROL), ("the", UNUSED), ("<pad>", NORMAL), ("<pad>", NORMAL), ("zz", UNUSED)]
    raw = byte_level(more=[*more, ("zz", NORMAL)]).raw
    assert raw.encode("the<x>").ids == [257, 259] and raw.token_to_id("zz") == 265
    assert [raw.decode([i]) for i in (257, 259, 260, 261, 263, 264, 265)] == ["the", "", "", "", "", "", "zz"]
    with pytest.raises(InvalidModelFiles, match="all different; got 'the' as 257 and 259"):
        byte_level(more=[("the", NORMAL)])


def test_spaces_behind_a_token_of_phi_3_belong_to_it():
    more = [("<|user|>", CONTROL), ("</s>", USER_DEFINED), ("<|endoftext|>", CONTROL)]
    for name, strips in (("Phi3", True), ("phi-3-mini", True), ("Phi 3", False), (None, False)):
        raw = byte_level(more=more, **{"general.name": name}).raw
        ids = [raw.encode(f"{token}\n the").ids[1:] for token, _ in more]
        kept = raw.encode("\n the").ids
        assert ids == [[257] if strips else kept] * 2 + [kept]


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


@pytest.mark.parametrize(
    "kind", [{"model": "gemma4"}, {"model": "gpt2", "pre": "gemma4"}, {"model": "gpt2", "pre": "sarvam-moe"}]
)
def test_bpe_over_characters_and_not_over_letters_of_bytes(kind):
    tokens = ["<unk>", "<s>", "</s>", *BYTES, "▁", "t", "h", "e", "th", "the", "▁the", "\n", "\n\n"]
    merges = ["t h", "th e", "▁ the", "\n \n"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 9]
    entries = {
        "tokens": tokens,
        "token_type": np.array(types),
        "merges": merges,
        "unknown_token_id": 0,
        "bos_token_id": 1,
    }
    raw = build(**entries, **kind, add_bos_token=False).raw
    first = [] if kind.get("pre") == "sarvam-moe" else ["<s>"]  # others begin with it whatever the file says
    assert raw.encode("the the\n\né").tokens == [*first, "the", "▁the", "\n\n", "<0xC3>", "<0xA9>"]
    assert raw.decode(raw.encode("  the\né").ids) == "  the\né"


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entries, error, message",
    [
        (
            {"model": "t5"},
            UnknownArchitecture,
            "tokenizer of the kind 't5'; known: gpt2 .byte-level BPE., gemma4 and llama",
        ),
        ({"model": None}, UnknownArchitecture, "of the kind None"),
        ({"pre": "whitespace"}, UnknownArchitecture, "cuts text as for 'whitespace'.*known: a.x-4.0.*load_model"),
        ({"tokens": None}, InvalidModelFiles, "tokens must be a list of strings; got no such entry"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, InvalidModelFiles, "all different; got 'a' as 0 and 2"),
        ({"tokens": ["a"]}, InvalidModelFiles, "token_type must be 1 numbers, one for each token; got array"),
        ({"merges": ["t h", "t\udce9 h"]}, InvalidModelFiles, "merges must be UTF-8; got b't.xe9 h' as number 1"),
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
