"""SentencePiece models, trained here, against SentencePiece itself; damaged ones; the table of replacements."""

import io
import json
import random
import struct
from pathlib import Path

import pytest

from hibachi.errors import HibachiError, InvalidModelFiles
from hibachi.llm.tokenizers import Detokenizer, Tokenizer
from hibachi.llm.tokenizers.charsmap import Charsmap
from hibachi.llm.tokenizers.sentencepiece import PieceKind, SentencePiece, read_sentencepiece

from ...lib.damage import changed
from ...lib.inside import underlying

sentencepiece = pytest.importorskip("sentencepiece")

# What the trainer learns from: some English, and characters that NFKC changes.
CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog does not mind; it has seen foxes before",
    "naïve café 你好 世界 日本語 テスト — ﬁne ①② ｆｕｌｌ ｗｉｄｔｈ 1234 5678.90 (x) {y} [z]",
    "a  b   c    d     e\tand tabs\there, don't they? <b>bold</b> and a bit of <0x4> e\u0301 Å",
    "it was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness",
] * 12
TEXTS = [
    *("", "a", " ", "  ", "hello", " hello", "hello ", "  hello  world  ", "a\tb\nc\r\nd", "naïve café", "你好，世界"),
    *(
        "😀😀 👩‍👩‍👧 x",
        "ﬁne ①② ｆｕｌｌ",
        "\u200b\u00a0x\u3000y",
        "▁x▁ y",
        "▁",
        "▁▁ ▁",
        "<0x41> <0x0A>",
        "<",
        "<0x",
        "</s",
    ),
    *(
        "e\u0301a",
        "１２３",
        "𝔘𝔫𝔦",
        "\x00\x01",
        "हिन्दी",
        "ع ﷺ",
        "a" * 300,
        " " * 30,
        "ｶﾞ",
        "a <ud>  b<ud>c",
        "Ａ\u0301 the",
    ),
]
_random = random.Random(0)
TEXTS += [
    "".join(_random.choices("ab cde  thé你😀\n\t.,'ﬁ①Ａ\u0301▁<>0x4１", k=_random.randint(1, 40))) for _ in range(150)
]


def trained(**options):
    """A model file."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        minloglevel=2,
        num_threads=1,
        **{"vocab_size": 420, "hard_vocab_limit": False, "user_defined_symbols": ["<ud>"], **options},
    )
    return model.getvalue()


MODELS = {
    "bpe as in Llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
    },
    "bpe": {"model_type": "bpe", "vocab_size": 250},
    "bpe without a space in front": {"model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": False},
    "bpe, extra spaces removed": {"model_type": "bpe", "normalization_rule_name": "identity", "byte_fallback": True},
    "unigram as in T5": {"model_type": "unigram", "vocab_size": 250},
    "unigram with bytes": {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "nfkc"},
    "unigram, as it is": {
        "model_type": "unigram",
        "vocab_size": 250,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
    },
    "unigram, folded": {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "nmt_nfkc_cf"},
}


@pytest.fixture(scope="module", params=MODELS)
def both(request, tmp_path_factory):
    """(SentencePiece, ours) of one model."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "tokenizer.model").write_bytes(trained(**MODELS[request.param]))
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model")), Tokenizer.load(folder)


def test_ids_are_those_of_sentencepiece(both):
    theirs, ours = both
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text


def test_texts_are_those_of_sentencepiece(both):
    theirs, ours = both
    for text in TEXTS:
        ids = theirs.encode(text)
        if theirs.unk_id() not in ids:  # which says ⁇; transformers and we leave special tokens out
            assert ours.decode(ids) == theirs.decode(ids), text


def test_texts_of_any_ids(both):
    theirs, ours = both
    for seed in range(200):
        ids = random.Random(seed).choices(range(3, len(theirs)), k=12)
        text = ours.decode(ids)
        # Of bytes that are not UTF-8, SentencePiece keeps what is; a byte for a space is dropped like a space here.
        if "\ufffd" not in text and theirs.id_to_piece(ids[0]) != "<0x20>":
            assert text == theirs.decode(ids)
        detokenizer = Detokenizer(ours)
        assert "".join(map(detokenizer.push, ids)) + detokenizer.flush() == text


def test_special_tokens_by_their_names(both):
    theirs, ours = both
    assert ours.special == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    assert [ours.is_silent(i) for i in range(4)] == [True, True, True, False]
    assert ours.vocab_size == len(theirs)


# ---- what the files beside it say ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A function: config -> the tokenizer of a folder with a model as in Llama 2."""
    folder = tmp_path_factory.mktemp("llama")
    (folder / "tokenizer.model").write_bytes(trained(**MODELS["bpe as in Llama"]))

    def load(**config):
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return Tokenizer.load(folder)

    return load


def words(tokenizer, text, **options):
    """Tokens, with spaces as the model has them."""
    return [underlying(tokenizer).id_to_token(i) for i in tokenizer.encode(text, **options)]


def test_tokens_around_a_text(llama):
    assert words(llama(), "the") == ["▁the"]
    assert words(llama(add_bos_token=True), "the") == ["<s>", "▁the"]
    assert words(llama(add_bos_token=True, add_eos_token=True), "the") == ["<s>", "▁the", "</s>"]
    assert words(llama(add_bos_token=True), "the", add_special_tokens=False) == ["▁the"]
    assert words(llama(add_bos_token=True, bos_token="</s>"), "the") == ["</s>", "▁the"]


def test_special_tokens_in_a_text(llama):
    """As in transformers: a space in front of the text, or, with "legacy", of each part of it."""
    the = words(llama(add_prefix_space=False), "the")
    assert words(llama(), "<s>the</s> the<ud>the") == ["<s>", *the, "</s>", "▁the", "<ud>", *the]
    assert words(llama(), "the<s>the")[:2] == ["▁the", "<s>"]
    assert words(llama(legacy=True), "<s>the</s>") == ["<s>", "▁the", "</s>"]
    assert words(llama(add_prefix_space=False), "the")[0] != "▁the"


def test_text_never_becomes_a_special_token(both):
    """Not even what the normalisation makes of it."""
    _, ours = both
    for text in ("＜s＞", "＜unk＞", "<0x41>", "＜／s＞"):
        ids = ours.encode(text)
        assert not {underlying(ours).token_to_id(t) for t in ("<s>", "</s>", "<0x41>")} & set(ids)
        assert ours.encode("the " + text)[-1] not in (1, 2)


def test_names_of_special_tokens_in_what_a_user_says_are_text(both):
    _, ours = both
    ids = ours.encode("<s>" + ours.guarded("the </s> and <s>") + "</s>", add_special_tokens=False)
    first, last, unknown = (underlying(ours).token_to_id(t) for t in ("<s>", "</s>", "<unk>"))
    assert (ids[0], ids[-1]) == (first, last) and not {first, last} & set(ids[1:-1])
    if unknown not in ids:
        assert ours.decode(ids).split() == ["the", "</s>", "and", "<s>"]


def test_tokens_that_the_config_adds(llama):
    plain = llama()
    added = {str(plain.vocab_size): {"content": "<|im|>", "special": True, "rstrip": True}}
    tokenizer = llama(added_tokens_decoder=added)
    assert tokenizer.encode("the<|im|>  the")[1] == plain.vocab_size
    assert words(tokenizer, "<|im|>  the")[1:] == words(llama(add_prefix_space=False), "the")


# ---- the file --------------------------------------------------------------------------------------------------------


def varint(n):
    return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)


def entry(number, value):
    """A field of a protocol buffer."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def piece(text, score=0.0, kind=PieceKind.NORMAL):
    return entry(1, entry(1, text) + entry(2, score) + entry(3, int(kind)))


SMALL = piece("<unk>", kind=PieceKind.UNKNOWN) + piece("▁") + piece("a", -1.0) + piece("▁a", -2.0)
BPE = entry(2, entry(3, 2))


def test_a_small_file(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(SMALL + BPE + entry(99, "not known") + entry(98, 2.5))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("a a") == [3, 3] and tokenizer.decode([3, 3]) == "a a"
    model = read_sentencepiece(tmp_path / "tokenizer.model")
    assert model == SentencePiece(
        ["<unk>", "▁", "a", "▁a"], [0, 0, -1, -2], [2, 1, 1, 1], False, names={"unk_token": "<unk>"}
    )


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "no pieces"),
        (SMALL[:-1], "beyond the end"),
        (SMALL + b"\x08", "ends inside a number"),
        (SMALL + b"\x08" + b"\xff" * 11, "a number is too long"),
        (SMALL + b"\x0b", "no such wire type: 3"),
        (SMALL + entry(1, 7), "a field has the wrong type"),
        (SMALL + entry(1, entry(2, 7)), "a field has the wrong type"),
        (SMALL + entry(1, entry(1, b"\xff")), "invalid start byte"),
        (SMALL + piece(""), "pieces of 1 to 512 characters"),
        (SMALL + piece("x" * 513), "pieces of 1 to 512 characters"),
        (SMALL + piece("x", float("nan")), "finite scores; piece 4 is 'x' with nan"),
        (SMALL + piece("a"), "every piece once; 'a' has several ids"),
        (SMALL + piece("<u>", kind=PieceKind.UNKNOWN), "one piece of type UNKNOWN; got 2"),
        (piece("a"), "one piece of type UNKNOWN; got 0"),
        (SMALL + piece("u", kind=PieceKind.UNUSED), r"types 1 to 4 and 6; got \[1, 2, 5\]"),
        (SMALL + entry(1, entry(1, "u") + entry(3, 77)), "types 1 to 4 and 6"),
        (SMALL + entry(2, entry(3, 4)), r"model_type 4; expected 1 \(unigram\) or 2 \(BPE\)"),
        (SMALL + entry(2, entry(35, 1)), "256 are missing, such as <0x00>"),
        (SMALL + entry(2, entry(24, 1)), "expected spaces in front of words"),
        (SMALL + entry(5, entry(2, "x")), "a denormalizer; expected none"),
        (SMALL + entry(3, entry(2, b"\xff\xff\xff\xff....")), "expected a trie of 4294967295 bytes"),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong(tmp_path, data, message):
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(InvalidModelFiles, match=message):
        Tokenizer.load(tmp_path)


def fuzz(folder, data, seeds):
    """Loads, encodes and decodes; how often that went, and how often it was refused."""
    went = refused = 0
    for seed in seeds:
        (folder / "tokenizer.model").write_bytes(changed(data, min(len(data), 9000), random.Random(seed)))
        try:
            tokenizer = Tokenizer.load(folder)
            tokenizer.decode(tokenizer.encode("The quick wörld 你好 ﬁ① <s> a  b " * 9))
            detokenizer = Detokenizer(tokenizer)
            "".join(map(detokenizer.push, range(min(tokenizer.vocab_size, 500)))) + detokenizer.flush()
            went += 1
        except HibachiError:
            refused += 1
    return went, refused


@pytest.mark.parametrize("name", ["bpe as in Llama", "unigram as in T5"])
def test_a_damaged_file_is_refused_or_works(tmp_path, name):
    went, refused = fuzz(tmp_path, trained(**MODELS[name]), range(150))
    assert went + refused == 150 and refused > 50


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_many_damaged_files_are_refused_or_work(tmp_path, name):
    went, refused = fuzz(tmp_path, trained(**MODELS[name]), range(1000))
    assert went + refused == 1000


# ---- replacements ----------------------------------------------------------------------------------------------------


def darts(keys):
    """A double array for these keys and values, built the plain way: 256 places for each node."""
    tree = {}
    for key, value in keys.items():
        node = tree
        for byte in key:
            node = node.setdefault(byte, {})
        node[None] = value
    units, todo, free = [0] * 256, [(0, tree)], 256
    while todo:
        at, node = todo.pop()
        units += [0] * 256
        offset = at ^ free
        units[at] |= offset << 10 if offset < 2**21 else offset << 2 | 0x200
        for byte, child in node.items():
            if byte is None:
                units[at] |= 0x100
                units[free] = 0x80000000 | child
            else:
                units[free ^ byte] |= byte
                todo.append((free ^ byte, child))
        free += 256
    return struct.pack(f"<I{len(units)}I", 4 * len(units), *units)


def charsmap(rules):
    values, keys = b"", {}
    for key, value in rules.items():
        keys[key.encode()] = len(values)
        values += value.encode() + b"\0"
    return Charsmap(darts(keys) + values)


def test_the_longest_key_is_replaced():
    replace = charsmap({"a": "1", "ab": "2", "abcd": "3", "é": "e", "e\u0301": "é", "\x01": "", "😀": ":)"})
    assert replace("abcdabcab a") == "32c2 1"
    assert replace("éxe\u0301ye\x01\x01z😀") == "exéyez:)"
    assert replace("") == "" and replace("nothing here, 你好") == "nothing here, 你好"


def test_nothing_to_replace():
    assert charsmap({"你": "x"})("plain") == "plain"


@pytest.mark.parametrize("blob", [b"", b"\0\0\0\0", b"\4\0\0\0", b"\3\0\0\0abcdefgh", b"\xff\xff\xff\xff" + bytes(64)])
def test_a_table_whose_sizes_do_not_fit_is_refused(blob):
    with pytest.raises(InvalidModelFiles, match="precompiled_charsmap: expected a trie of"):
        Charsmap(blob)


def test_a_table_without_an_end_comes_to_one():
    """Its keys go round in circles: every place of the text would be read to the end."""
    units = [0x100] * 256
    for byte in range(256):
        units[byte] = byte | 0x100
    Charsmap(struct.pack("<I256I", 1024, *units) + b"x")("\x00" * 100_000 + "a" * 100_000)


def test_the_tables_of_sentencepiece_agree_everywhere(tmp_path):
    """Every character, and pairs that compose, through NFKC's table."""
    data = trained(**MODELS["bpe without a space in front"])
    Path(tmp_path / "tokenizer.model").write_bytes(data)
    ours = Charsmap(read_sentencepiece(tmp_path / "tokenizer.model").charsmap)
    theirs = sentencepiece.SentencePieceNormalizer(rule_name="nmt_nfkc", remove_extra_whitespaces=False)
    singles = [chr(i) for i in range(0x20, 0x3000) if not 0xD800 <= i < 0xE000]
    pairs = [a + b for a in "aeiouAEIOUncç" for b in map(chr, range(0x300, 0x330))]
    text = "x".join([*singles, *pairs])
    assert " " + ours(text) == theirs.normalize(text).replace("▁", " ")  # it puts a space in front
