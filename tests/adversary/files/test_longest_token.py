"""A bound on the bytes of a token: no text has fewer tokens than it says. So nothing is refused that would fit."""

import json
import random
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ...lib.inside import underlying

pytest.importorskip("tokenizers")

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Raw

from hibachi.llm.model.gguf.tokenizer import read_tokenizer
from hibachi.llm.tokenizers import Tokenizer, longest
from hibachi.llm.tokenizers.own import NoTokenizer, OwnTokenizer
from hibachi.llm.tokenizers.pieces import byte_letters

from ...model.text import made
from .test_vocabulary import sentencepiece

DATA = Path(__file__).parents[2] / "data"
KINDS = {
    "words": "the cat sat on a mat and then ab",
    "spaces": " \t\n\r\u00a0\u2003\u3000",
    "controls": "".join(map(chr, range(32))) + "\x7f\u0085\u200b\ufeff\ufffd",
    "accents": "eaoıιωsḍ\u0301\u0308\u0323\u0345\u0314\u0342\u0307",
    "forms": "\u212a\u212b\u2126\u1fef\u037e\u1fbe\ufb01\ufdfa\uff21\U0001d400\u0130\u1100\u1161\u11a8",
    "far": "你好世界한글日本😀👩\u200d\U000e0100\U0010ffff\U00040000\U000f0000",
    "signs": "<>|_▁Ġ#@!?'\"`\\/0123456789x",
}
TOKENS = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<0x41>", "▁a", "\u2581\u2581", "é", "e\u0301"]


def text_of(rng):
    """A random text of one kind or several, in runs."""
    parts = []
    for _ in range(rng.randint(1, 12)):
        letters = KINDS[rng.choice(list(KINDS))]
        run = rng.choice(letters) * rng.choice((1, 3, 60)) if rng.random() < 0.3 else ""
        parts += [run, "".join(rng.choices(letters, k=rng.randint(0, 20))), rng.choice([*TOKENS, "", ""])]
    return "".join(parts)


def check(tokenizer, text):
    count, size = len(tokenizer.encode(text, add_special_tokens=False)), len(text.encode())
    assert tokenizer.fewest_tokens(text) <= count, text
    if tokenizer.longest_token is not None:
        assert size <= tokenizer.longest_token * count, text


# ---- tokenizers of all kinds -----------------------------------------------------------------------------------------

LETTERS = byte_letters()
WHOLE = {letter: i for i, letter in enumerate(LETTERS)} | {"th": 256, "the": 257, "Ġthe": 258, "ĠĠ": 259, "ĠĠĠĠ": 260}
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ")]


def byte_level(normalizer=None, cut=None, added=(), vocab=None, **options):
    raw = Raw(models.BPE(WHOLE if vocab is None else vocab, MERGES if vocab is None else [], **options))
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut is None)
    raw.pre_tokenizer = letters if cut is None else pre_tokenizers.Sequence([cut, letters])
    raw.decoder = decoders.ByteLevel()
    if normalizer is not None:
        raw.normalizer = normalizer
    raw.add_tokens(list(added))
    return Tokenizer(raw)


def fallback(normalizer=None, fuse=True, lacks=(), cut=None, **options):
    """As Llama 2."""
    vocab = {"<unk>": 0} | {f"<0x{b:02X}>": 1 + b for b in range(256) if b not in lacks}
    for piece in ("▁", "a", "b", "▁a", "ab", "▁▁", "é"):
        vocab[piece] = 300 + len(vocab)
    merges = [("▁", "a"), ("a", "b"), ("▁", "▁")]
    raw = Raw(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=fuse, **options))
    raw.normalizer = normalizer or normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if cut is not None:
        raw.pre_tokenizer = cut
    return Tokenizer(raw)


def unigram(byte_fallback):
    pieces = [("<unk>", 0.0), *((f"<0x{b:02X}>", -9.0) for b in range(256)), ("▁", -2.0), ("a", -2.5), ("▁the", -3.0)]
    raw = Raw(models.Unigram(pieces, 0, byte_fallback))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    return Tokenizer(raw)


def gguf(model, **entries):
    letters = [f"<0x{b:02X}>" for b in range(256)] if model == "llama" else list(LETTERS)
    tokens = ["<unk>", "<s>", *letters, *(["▁", "a", "▁a"] if model == "llama" else ["th"])]
    types = [2, 3] + [6 if model == "llama" else 1] * 256 + [1] * (len(tokens) - 258)
    entries = {"model": model, "tokens": tokens, "token_type": np.array(types, np.int32), "pre": "gpt-2"} | entries
    entries |= {"scores": -np.arange(len(tokens), dtype=np.float32)} if model == "llama" else {"merges": ["t h"]}
    named = {f"tokenizer.ggml.{name}": value for name, value in entries.items()}
    return Tokenizer(read_tokenizer(Path("m.gguf"), named).raw)


def cut(expression, behavior):
    return pre_tokenizers.Split(Regex(expression), behavior)


BOUNDED = {
    "GPT-2": byte_level(),
    "Llama 3": byte_level(cut=cut(r"\p{L}+|\s+", "isolated"), ignore_merges=True),
    "Qwen": byte_level(normalizers.NFC(), added=[AddedToken("<|im_start|>", special=True, normalized=False)]),
    "compatible": byte_level(normalizers.NFKC()),
    "decomposed": byte_level(normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])),
    "NFKD": byte_level(normalizers.NFKD()),
    "a long one is added": byte_level(added=[AddedToken("the cat sat on"), AddedToken("<|endoftext|>", special=True)]),
    "normalized ones are added": byte_level(normalizers.NFC(), added=[AddedToken("e\u0301", normalized=True)]),
    "shorter": byte_level(normalizers.Replace("the", "t")),
    "unknown letters": byte_level(vocab={"?": 0, "a": 1, "Ġ": 2}, unk_token="?"),
    "digits": byte_level(cut=pre_tokenizers.Digits(individual_digits=True)),
    "Llama 2": fallback(),
    "Gemma": fallback(normalizers.Replace(" ", "▁"), cut=cut(" ", "merged_with_previous")),
    "metaspace": fallback(normalizers.NFKC(), cut=pre_tokenizers.Metaspace()),
    "unknown characters": fallback(fuse=False, lacks=range(5)),
    "unigram with bytes": unigram(True),
    "GGUF, byte level": gguf("gpt2"),
    "GGUF, NFC": gguf("gpt2", pre="qwen2"),
    "GGUF, SentencePiece": gguf("llama"),
    "shipped": made.MADE["tiny"],
    "gpt2": made.MADE["gpt2"],
    "byte level": made.MADE["byte level"],
    "byte fallback": made.MADE["byte fallback"],
}
UNBOUNDED = {
    "spaces at the ends": byte_level(normalizers.Strip()),
    "accents": byte_level(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "something becomes nothing": byte_level(normalizers.Replace("a", "")),
    "an expression": byte_level(normalizers.Replace(Regex(" +"), " ")),
    "BERT's normalizer": byte_level(normalizers.BertNormalizer()),
    "controls": byte_level(normalizers.Nmt()),
    "spaces between words": byte_level(cut=pre_tokenizers.WhitespaceSplit()),
    "what is removed": byte_level(cut=cut(" ", "removed")),
    "spaces at a token": byte_level(added=[AddedToken("<s>", lstrip=True)]),
    "and behind it": byte_level(added=[AddedToken("<s>", rstrip=True)]),
    "letters that are not there": byte_level(vocab={"a": 0, "b": 1}),
    "unknown ones are joined": byte_level(vocab={"?": 0, "a": 1}, unk_token="?", fuse_unk=True),
    "not all bytes": fallback(lacks=[0x41]),
    "unigram without bytes": unigram(False),
    "affixes": made.MADE["suffixes"],
    "words": made.MADE["wordpiece"],
    "a list of words": made.MADE["no decoder"],
    "T5": made.MADE["metaspace"],
    "some bytes are not there": made.MADE["smollm2"],
}


@pytest.mark.parametrize("name", [*BOUNDED, *UNBOUNDED])
def test_no_text_has_fewer_tokens_than_the_bound_says(name):
    tokenizer = (BOUNDED | UNBOUNDED)[name]
    assert (tokenizer.longest_token is None) is (name in UNBOUNDED)
    rng = random.Random(name)
    for _ in range(200):
        check(tokenizer, text_of(rng))
    for letters in KINDS.values():  # the worst are runs
        for letter in letters:
            check(tokenizer, letter * 50)
    vocab = underlying(tokenizer).get_vocab(with_added_tokens=True)
    for word in sorted(vocab, key=len)[-20:]:
        check(tokenizer, tokenizer.decode([vocab[word]], skip_special_tokens=False) * 3)
    for word in TOKENS:
        check(tokenizer, word * 20)
        check(tokenizer, "  " * 40 + word + "  " * 40)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=80))
def test_no_text_at_all_has(text):
    for tokenizer in (*BOUNDED.values(), *UNBOUNDED.values()):
        check(tokenizer, text)


def test_a_bound_is_what_one_token_can_be():
    """It is met, and no larger than it must be."""
    tokenizer = BOUNDED["GPT-2"]
    assert tokenizer.longest_token == 4 and tokenizer.encode("    ") == [260]
    assert tokenizer.fewest_tokens("    " * 100) == 100 == len(tokenizer.encode("    " * 100))
    assert BOUNDED["a long one is added"].longest_token == len("the cat sat on")
    assert BOUNDED["shorter"].longest_token == 12  # of three letters, each of which was three
    assert BOUNDED["Qwen"].longest_token == 4 * len("<|im_start|>")
    assert BOUNDED["Llama 2"].longest_token == 6


def test_bytes_without_a_token_do_not_count():
    tokenizer = made.MADE["smollm2"]  # the vocabulary lacks some controls, as that of the whole model
    assert tokenizer.longest_token is None and tokenizer.encode("\x04" * 100) == []
    assert tokenizer.fewest_tokens("\x04" * 1000) == 0 < tokenizer.fewest_tokens("\x04hello\x04 you")
    assert tokenizer.fewest_tokens("a" * 1000) > 30


def test_what_unicode_makes_of_a_text_is_at_least_a_fourth():
    """The bytes of a character are shared by the parts that it comes apart into: all parts of a result were there."""
    every = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    others = [c for c in every if unicodedata.decomposition(c) or "가" <= c <= "힣"]
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        parts = {c: unicodedata.normalize("NFKD" if "K" in form else "NFD", c) for c in others}
        most = {}
        for c, made_of in parts.items():
            for part in made_of:
                most[part] = max(most.get(part, len(part.encode())), len(c.encode()) / len(made_of))
        results = {c for c in {*others, *most} if unicodedata.normalize(form, c) == c}
        worst = max(sum(most.get(p, len(p.encode())) for p in parts.get(c, c)) / len(c.encode()) for c in results)
        assert 2 < worst <= longest.FORMS[form]
    assert max(len(c.encode()) / len(c.lower().encode()) for c in every) <= longest.FORMS["Lowercase"]


def test_it_is_the_same_from_a_file(tmp_path):
    underlying(BOUNDED["Qwen"]).save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path).longest_token == BOUNDED["Qwen"].longest_token
    config = {"eos_token": {"content": "</s>", "lstrip": True}}  # tokens that the files beside it add count
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).longest_token is None


@pytest.mark.parametrize("kept", [True, False])
def test_sentencepieces_own_file(tmp_path, kept):
    """As Llama 2 has it, and with spaces removed."""
    raw = sentencepiece(tmp_path, ["▁", "a", "▁a", "ab"])
    assert raw is not None
    data = (tmp_path / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(data + b"\x1a\x02\x20" + bytes([not kept]))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.longest_token == (6 if kept else None)
    rng = random.Random(3)
    for _ in range(200):
        check(tokenizer, text_of(rng))


def test_a_text_that_is_put_away_has_no_bound():
    raw = underlying(BOUNDED["GPT-2"])
    raw = Raw.from_str(raw.to_str())
    raw.post_processor = processors.TemplateProcessing(single="th:0", special_tokens=[("th", 256)])
    assert raw.encode("hello", add_special_tokens=False).ids == [] and Tokenizer(raw).longest_token is None
    raw.post_processor = processors.TemplateProcessing(single="th $A", special_tokens=[("th", 256)])
    assert Tokenizer(raw).longest_token == 4


def test_tokenizers_of_ones_own():
    class Own:
        def encode(self, text):
            return list(text.encode())

        def decode(self, ids):
            return bytes(ids).decode(errors="replace")

    assert OwnTokenizer(Own()).longest_token is None and OwnTokenizer(Own()).fewest_tokens("hello") == 0
    own = Own()
    own.longest_token = 1
    assert OwnTokenizer(own).longest_token == 1 and OwnTokenizer(own).fewest_tokens("hé") == 3
    own.longest_token = "many"
    assert OwnTokenizer(own).longest_token is None
    assert NoTokenizer().longest_token is None and NoTokenizer().fewest_tokens("x") == 0
