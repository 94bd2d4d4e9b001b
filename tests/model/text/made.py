"""Tokenizers made for these tests, one of each kind, and real ones, cut to a thousand merges."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Raw

import hibachi
from hibachi.llm.tokenizers import Tokenizer

SHIPPED = Path(hibachi.__file__).parent / "llm" / "data" / "tiny"
DATA = Path(__file__).parents[2] / "data"

CORPUS = ["the cat sat on the mat. 😀 naïve café 你好 👩‍👩‍👧 the end", "a b ab abc 😀😀 aab bab"] * 4


def byte_level():
    """Tokens are pieces of UTF-8, as in GPT-2 and Llama 3; 0 is special."""
    raw = Raw(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False),
    )
    return raw


def byte_fallback(strip=1):
    """Tokens are text, other characters come as <0x..>, as in Llama 2; the first space is dropped, or the first few."""
    vocab = {"<unk>": 0} | {f"<0x{b:02X}>": 1 + b for b in range(256)}
    for piece in ("▁", "a", "b", "c", "▁a", "ab", "▁ab", "é", "<0xZZ>", "<0x+5>"):
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    raw = Raw(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", strip, 0)]
    )
    raw.add_tokens([AddedToken("</s>", special=True)])
    return raw


def metaspace():
    """Unigram, as in T5: the first token loses its spaces."""
    pieces = [
        ("<unk>", 0.0),
        ("▁", -2.0),
        ("▁▁", -3.0),
        ("a", -2.5),
        ("b", -2.5),
        ("▁a", -2.0),
        ("ab", -3.0),
        ("é", -4.0),
    ]
    raw = Raw(models.Unigram(pieces, 0))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    return raw


def wordpiece():
    """As in BERT: words are joined by spaces, ##pieces are not, and a point stands at its word."""
    words = ["[UNK]", "a", "b", "ab", "##a", "##b", "##ab", ".", "'", "s", "don", "n't", "😀", "##é"]
    raw = Raw(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece()
    raw.add_tokens([AddedToken("[SEP]", special=True)])
    return raw


def suffixes():
    """As in CLIP: a word ends with </w>."""
    words = ["<unk>", "a</w>", "b</w>", "a", "b", "ab</w>", "é</w>"]
    raw = Raw(
        models.BPE({w: i for i, w in enumerate(words)}, [("a", "b</w>")], unk_token="<unk>", end_of_word_suffix="</w>")
    )
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.decoder = decoders.BPEDecoder()
    return raw


def no_decoder():
    raw = Raw(models.WordLevel({w: i for i, w in enumerate(["?", "a", "b", "é", " x"])}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return raw


def odd_steps():
    """A chain of decoders that is not one of those we know."""
    raw = byte_fallback()
    raw.normalizer = normalizers.Replace(Regex("c+"), "c")
    raw.decoder = decoders.Sequence([decoders.Replace(Regex("▁+"), " "), decoders.Strip("b", 1, 0), decoders.Fuse()])
    return raw


BYTES, FALLBACK = Tokenizer(byte_level()), Tokenizer(byte_fallback())
MADE = {
    "byte level": BYTES,
    "byte fallback": FALLBACK,
    "byte fallback, three spaces": Tokenizer(byte_fallback(strip=3)),
    "metaspace": Tokenizer(metaspace()),
    "wordpiece": Tokenizer(wordpiece()),
    "suffixes": Tokenizer(suffixes()),
    "no decoder": Tokenizer(no_decoder()),
    "odd steps": Tokenizer(odd_steps()),
    "tiny": Tokenizer.load(SHIPPED),
    "smollm2": Tokenizer.load(DATA / "smollm2"),
    "gpt2": Tokenizer.load(DATA / "gpt2"),
}
FAITHFUL = {
    name: MADE[name] for name in ("byte level", "byte fallback", "tiny", "smollm2", "gpt2")
}  # any text survives
for tokenizer in MADE.values():
    tokenizer.text_after(())  # makes the tables

every_kind = pytest.mark.parametrize("tokenizer", MADE.values(), ids=MADE)
every_faithful = pytest.mark.parametrize("tokenizer", FAITHFUL.values(), ids=FAITHFUL)
