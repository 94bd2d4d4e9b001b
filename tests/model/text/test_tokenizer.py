"""Text to ids and back, and the files that say how."""

import json
import shutil
import sys
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, processors

from hibachi.errors import InvalidModelFiles, InvalidRequest, MissingExtra
from hibachi.llm.tokenizers import Tokenizer, render_chat

from .made import BYTES, DATA, FAITHFUL, FALLBACK, SHIPPED, byte_level, metaspace

TEXTS = [
    *("Hello world", "  a  b", "don't I'll we've", "naïve 你好 😀\n\n x\t", "e\u0301 Å 12345 x1y2", "", "   "),
    *("a\u00a0b", "!!!???", "<|endoftext|>x<|endoftext|>", "<|im_start|>user\nHi<|im_end|> ", "the end. The END"),
]


@pytest.mark.parametrize("tokenizer", [t for n, t in FAITHFUL.items() if n != "smollm2"])  # it lacks some bytes
@given(text=st.text())
def test_decoding_gives_the_encoded_text(tokenizer, text):
    # byte fallback writes spaces as ▁, and drops one in front
    expected = text.replace("▁", " ").removeprefix(" ") if tokenizer is FALLBACK else text
    got = tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False).removeprefix("<s>")
    assert got == expected or (tokenizer is FALLBACK and got == text.replace("▁", " "))


def test_special_tokens_are_added_as_the_file_says():
    assert BYTES.encode("cat")[0] == 0
    assert BYTES.encode("cat", add_special_tokens=False) == BYTES.encode("cat")[1:]
    assert BYTES.decode([0, *BYTES.encode("cat")]) == "cat"
    assert BYTES.decode([0], skip_special_tokens=False) == "<s>"


def test_ids_without_a_token_have_no_text():
    assert BYTES.decode([BYTES.vocab_size, 10**6]) == ""
    assert BYTES.is_silent(10**6) and BYTES.is_silent(0) and not BYTES.is_silent(80)


@pytest.mark.parametrize("text", ["\ud800", b"bytes", 3, None])
def test_a_prompt_that_is_not_text_is_refused(text):
    with pytest.raises(InvalidRequest, match=f"valid Unicode; got {type(text).__name__}"):
        BYTES.encode(text)


# ---- tokenizer.json --------------------------------------------------------------------------------------------------


def test_settings_from_training_are_dropped(tmp_path):
    raw = byte_level()
    raw.enable_truncation(3)
    raw.enable_padding(length=50)
    raw.save(str(tmp_path / "tokenizer.json"))
    text = "the cat sat on the mat"
    assert Tokenizer.load(tmp_path).encode(text) == BYTES.encode(text)


def test_ids_are_not_drawn(tmp_path):
    """BPE's dropout, from a file and in Python; Unigram's sampling, which files do not keep."""
    raw, unigram = byte_level(), metaspace()
    raw.model.dropout = 0.5
    raw.save(str(tmp_path / "tokenizer.json"))
    unigram.model.alpha, unigram.model.nbest_size = 0.1, 4
    text, one = "the cat sat on abab aab", Tokenizer(metaspace())
    for tokenizer, sure in ((Tokenizer.load(tmp_path), BYTES), (Tokenizer(raw), BYTES), (Tokenizer(unigram), one)):
        assert {tuple(tokenizer.encode(text)) for _ in range(20)} == {tuple(sure.encode(text))}


def test_ids_must_fit_the_model(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path, vocab_size=300).vocab_size == 300
    with pytest.raises(InvalidModelFiles, match=r"below vocab_size 299, but for added.*; got 299 for .*\. Take both"):
        Tokenizer.load(tmp_path, vocab_size=299)


PAD = {"added_tokens_decoder": {"300": {"content": "[PAD]", "special": True}}, "eos_token": "[PAD]"}


@pytest.mark.parametrize(
    "files",
    [
        *({"tokenizer.json": ["[PAD]"]}, {"tokenizer.json": ["[PAD]", "<x>", "<y>"]}, {"tokenizer_config.json": PAD}),
        {"added_tokens.json": {"[PAD]": 300}, "special_tokens_map.json": {"pad_token": "[PAD]"}},
    ],
)
def test_added_tokens_may_lack_a_row(tmp_path, files):
    """Gemma 3's <image_soft_token>, and [PAD] of many a fine-tune: they load, and no prompt may have them."""
    raw = byte_level()
    raw.add_special_tokens(files.get("tokenizer.json", []))
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    raw.enable_padding(length=50, pad_id=300, pad_token="[PAD]")  # of training
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer, known = Tokenizer.load(tmp_path, vocab_size=300), Tokenizer.load(tmp_path, vocab_size=400)
    assert tokenizer.encode("the cat") == known.encode("the cat") == BYTES.encode("the cat")
    assert known.encode("[PAD]")[-1] == 300 and tokenizer.eos_id is None
    assert known.eos_id == (300 if "tokenizer_config.json" in files else None)
    for ask in (tokenizer.encode, tokenizer.spans):
        with pytest.raises(InvalidRequest, match=r"holds '\[PAD\]', which is token 300 .* no row"):
            ask("the [PAD] cat" + " cat" * 2000)
    assert tokenizer.split_special("a[PAD]<s>") == ["a[PAD]", 0]
    raw.post_processor = processors.TemplateProcessing(single="$A [PAD]", special_tokens=[("[PAD]", 300)])
    raw.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidModelFiles, match=r"that stand around no text; got 300 for '\[PAD\]'\. Take both"):
        Tokenizer.load(tmp_path, vocab_size=300)


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(InvalidModelFiles, match=r"has none of tokenizer\.json.*tokenizer\.model.*save_pretrained"):
        Tokenizer.load(tmp_path)
    for content in (b"{", b"[]", b"\xff", b"{}", b'{"model": {"vocab": {}}}', b"[" * 10**6):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(InvalidModelFiles, match=r"tokenizer\.json(: expected| cannot be read)"):
            Tokenizer.load(tmp_path)


def damaged(folder, change):
    """A tokenizer.json with something changed."""
    content = json.loads(byte_level().to_str())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_two_tokens_with_one_id_are_refused(tmp_path):
    def change(content):
        content["model"]["vocab"]["the"] = content["model"]["vocab"]["a"]

    with pytest.raises(InvalidModelFiles, match=r"an id of its own for every token; got (\d+) for 'a' and 'the'"):
        Tokenizer.load(damaged(tmp_path, change))


def test_one_token_with_two_ids_is_refused(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    content = (tmp_path / "tokenizer.json").read_text()
    assert content.count('"the":') == 1
    (tmp_path / "tokenizer.json").write_text(content.replace('"the":', '"the": 299, "the":'))
    with pytest.raises(InvalidModelFiles, match=r"cannot be read: 'the' is in it twice"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("bad", [-1, 1.5, "7", None, True, 2**32])
def test_an_id_must_be_one(tmp_path, bad):
    with pytest.raises(InvalidModelFiles, match="expected an id for the token 'the'; got"):
        Tokenizer.load(damaged(tmp_path, lambda content: content["model"]["vocab"].update(the=bad)))


@pytest.mark.parametrize(
    "added",
    [
        [("<x>", 80)],  # a token of the vocabulary has it
        [("<x>", 300), ("<y>", 300)],
        [("<x>", 300), ("<x>", 301)],
        [("the", 300)],  # has another
        [("<x>", 400)],  # leaves out some
    ],
)
def test_added_tokens_need_ids_of_their_own(tmp_path, added):
    def change(content):
        content["added_tokens"] += [
            {"id": i, "content": t, "special": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for t, i in added
        ]

    with pytest.raises(
        InvalidModelFiles, match=r"tokenizer\.json: expected an id of its own for every token; got \d+ for"
    ):
        Tokenizer.load(damaged(tmp_path, change))


@pytest.mark.parametrize("module", ["tokenizers", "minijinja"])
def test_a_missing_library_says_how_to_install_it(tmp_path, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"{module}.*pip install '\.\[text\]' in the checkout"):
        Tokenizer.load(tmp_path) if module == "tokenizers" else render_chat("", [])


# ---- GPT-2's two files -----------------------------------------------------------------------------------------------

CONFIGS = [
    {"tokenizer_class": "GPT2Tokenizer"},
    {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True, "add_bos_token": True},
    {"tokenizer_class": "Qwen2Tokenizer"},
    {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "add_eos_token": True, "bos_token": "<s>"},
    {"tokenizer_class": "GPT2Tokenizer", "pad_token": "!!", "unk_token": None},
]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """GPT-2's tokenizer under the file names of Hugging Face."""
    folder, source = tmp_path_factory.mktemp("gpt2"), DATA / "gpt2"
    shutil.copy(source / "encoder.json", folder / "vocab.json")
    shutil.copy(source / "vocab.bpe", folder / "merges.txt")
    return folder


def same_as(theirs, ours, texts):
    """Ids and texts, with and without special tokens, are those of transformers."""
    for text in texts:
        for add in (True, False):
            ids = theirs.encode(text, add_special_tokens=add)
            assert ours.encode(text, add_special_tokens=add) == ids
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.special == theirs.special_tokens_map


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: ", ".join(map(str, c.values())))
def test_gpt2s_files_give_what_transformers_makes_of_them(gpt2, config):
    transformers = pytest.importorskip("transformers")
    (gpt2 / "tokenizer_config.json").write_text(json.dumps(config))
    kind = getattr(transformers, config["tokenizer_class"].removesuffix("Fast"))
    novel = (DATA / "emma.txt").read_text().split("\n\n")
    same_as(kind.from_pretrained(gpt2), Tokenizer.load(gpt2), [*TEXTS, *novel])


def test_openais_names_of_the_two_files(gpt2):
    (gpt2 / "tokenizer_config.json").write_text("{}")
    ours, theirs = Tokenizer.load(DATA / "gpt2"), Tokenizer.load(gpt2)
    assert ours.vocab_size == 1257 and ours.special["eos_token"] == "<|endoftext|>"
    assert all(ours.encode(t) == theirs.encode(t) for t in TEXTS)


def two_files(folder, vocab='{"a": 0, "b": 1, "ab": 2}', merges="#version: 0.2\na b\n", config="{}"):
    (folder / "vocab.json").write_text(vocab)
    (folder / "merges.txt").write_text(merges)
    (folder / "tokenizer_config.json").write_text(config)
    return folder


def test_two_small_files(tmp_path):
    tokenizer = Tokenizer.load(two_files(tmp_path))
    assert tokenizer.encode("abba") == [2, 1, 0] and tokenizer.decode([2, 1, 0]) == "abba" and tokenizer.special == {}


@pytest.mark.parametrize(
    "files, message",
    [
        (
            {"vocab": '{"a": 0, "b": 0}'},
            r"vocab\.json: expected an id of its own for every token; got 0 for 'a' and 'b'",
        ),
        ({"vocab": "["}, r"vocab\.json cannot be read"),
        ({"merges": "a b\na b c\n"}, r"merges\.txt: expected two tokens in line 2; got 'a b c'"),
        ({"merges": "a c\n"}, r"merges\.txt does not belong to vocab\.json"),
        (
            {"config": '{"tokenizer_class": "BartTokenizer"}'},
            r"tokenizer_class out of GPT2.*got 'BartTokenizer'.*save_pre",
        ),
    ],
)
def test_two_files_that_cannot_be_used(tmp_path, files, message):
    with pytest.raises(InvalidModelFiles, match=message):
        Tokenizer.load(two_files(tmp_path, **files))


# ---- special tokens --------------------------------------------------------------------------------------------------

SPECIAL_TEXTS = [
    "Hello <s> the </s>x<pad> <x>[a b] the é! e\u0301! theHello the. <|im_end|> <|endoftext|>\n<file_sep>  <s>",
    "<s>Hello",
    "  <x>  <x>",
    "[a b][a b] the the",
    "Hello the[a b]<|im_start|>user\nHi<|im_end|>",
    "",
]


def token(content, **options):
    return {"content": content, **dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False), **options}


FOLDERS = {  # the files beside a tokenizer.json that has no added tokens but one
    "nothing": {},
    "names": {"config": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": None, "image_token": "<x>"}},
    "names of the vocabulary": {"config": {"bos_token": "the", "unk_token": "Hello", "eos_token": "<|endoftext|>"}},
    "additional": {"config": {"additional_special_tokens": ["<x>", "the"]}},
    "extra": {"config": {"extra_special_tokens": ["<x>", "[a b]"], "additional_special_tokens": ["<pad>"]}},
    "extra by name": {"config": {"extra_special_tokens": {"image_token": "<x>"}}},
    "flags do not count": {"config": {"bos_token": "<s>", "add_bos_token": True, "add_eos_token": True}},
    "split": {"config": {"bos_token": "<s>", "split_special_tokens": True}},
    "ids": {
        "config": {
            "bos_token": "<s>",
            "added_tokens_decoder": {
                "2048": token("<s>", lstrip=True),
                "2049": token("<x>", rstrip=True, special=True),
                "2050": token("é!", normalized=True),
                "2051": token("[a b]", single_word=True, special=True),
            },
        },
        "map": {"eos_token": "not read"},
    },
    "ids of the vocabulary": {"config": {"added_tokens_decoder": {"THE": token("the", special=True, lstrip=True)}}},
    "map": {"config": {"bos_token": "<x>"}, "map": {"bos_token": token("<s>", rstrip=True), "eos_token": "</s>"}},
    "map only": {"map": {"bos_token": "<s>", "additional_special_tokens": ["<x>"]}},
    "map and additional": {
        "config": {"additional_special_tokens": ["<x>"]},
        "map": {"additional_special_tokens": ["the"]},
    },
    "added": {"config": {"pad_token": "<pad>"}, "added": {"<pad>": 2048, "<x>": 2049, "the": "THE"}},
    "the file's own, named": {"config": {"eos_token": "<file_sep>"}, "own": [token("<file_sep>", rstrip=True)]},
    "the file's own, listed": {
        "config": {"added_tokens_decoder": {"2048": token("<file_sep>", special=True)}},
        "own": [token("<file_sep>", lstrip=True)],
    },
}


def folder_with(path, config=None, map=None, added=None, own=()):
    content = json.loads((SHIPPED / "tokenizer.json").read_text())
    the, size = content["model"]["vocab"]["the"], 2048
    content["added_tokens"] += [{"id": size + i, "special": False, **t} for i, t in enumerate(own)]
    (path / "tokenizer.json").write_text(json.dumps(content))
    files = {"tokenizer_config.json": config, "special_tokens_map.json": map, "added_tokens.json": added}
    for name, value in files.items():
        if value is not None:
            text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **value} if value is config else value)
            (path / name).write_text(text.replace('"THE"', f'"{the}"' if value is config else str(the)))
    return path


@pytest.mark.parametrize("folder", FOLDERS.values(), ids=FOLDERS)
def test_special_tokens_are_those_of_transformers(tmp_path, folder):
    transformers = pytest.importorskip("transformers")
    folder_with(tmp_path, **folder)
    same_as(transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path), Tokenizer.load(tmp_path), SPECIAL_TEXTS)


@pytest.mark.parametrize("path", [SHIPPED, DATA / "smollm2"], ids=["tiny", "smollm2"])
def test_models_at_hand_tokenize_as_in_transformers(path):
    transformers = pytest.importorskip("transformers")
    same_as(transformers.PreTrainedTokenizerFast.from_pretrained(path), Tokenizer.load(path), [*TEXTS, *SPECIAL_TEXTS])


def test_a_token_that_is_only_named_needs_a_row(tmp_path):
    """Llama 2 with a pad_token that its embedding has no row for: the text <pad> stays text."""
    folder_with(tmp_path, config={"pad_token": "<pad>", "bos_token": "the"})
    tokenizer = Tokenizer.load(tmp_path, vocab_size=2048)
    assert tokenizer.special == {"pad_token": "<pad>", "bos_token": "the"} and tokenizer.vocab_size == 2048
    assert len(tokenizer.encode("<pad>")) > 1 and len(tokenizer.encode("the")) == 1
    assert Tokenizer.load(tmp_path, vocab_size=2049).encode("<pad>") == [2048]


@pytest.mark.parametrize(
    "files, message",
    [
        (
            {"config": {"added_tokens_decoder": {"7": token("<x>")}}},
            r"expected the id 7 for '<x>'; got 2048\. Take all",
        ),
        ({"added": {"<x>": 9999}}, r"contradict each other: expected the id 9999 for '<x>'"),
        ({"config": {"bos_token": 7}}, r"tokenizer_config\.json: bos_token must be a text.*got 7"),
        ({"config": {"bos_token": {"content": 7}}}, "bos_token must be a text"),
        ({"config": {"bos_token": {"content": "x", "lstrip": 1}}}, "bos_token must be a text"),
        ({"config": {"additional_special_tokens": "x"}}, "additional_special_tokens must be a list"),
        ({"config": {"additional_special_tokens": [3]}}, "additional_special_tokens must be a text"),
        ({"config": {"added_tokens_decoder": []}}, "added_tokens_decoder must be an object"),
        ({"config": {"added_tokens_decoder": {"x": token("<x>")}}}, "expected the id of a token; got 'x'"),
        ({"added": {"<x>": -1}}, r"added_tokens\.json: expected the id of a token; got -1"),
        ({"map": []}, r"special_tokens_map\.json: expected a JSON object"),
    ],
)
def test_files_that_contradict_or_make_no_sense(tmp_path, files, message):
    with pytest.raises(InvalidModelFiles, match=message):
        Tokenizer.load(folder_with(tmp_path, **files))


STEPS = [decoders.ByteLevel(), decoders.Fuse(), decoders.Metaspace(), decoders.CTC(), decoders.WordPiece()]
STEPS += [decoders.Strip("a", 0, 1), decoders.Strip("a", 1, 0), decoders.Replace("a", "b"), decoders.ByteFallback()]
STEPS += [decoders.BPEDecoder(), decoders.Sequence([])]


def test_no_ids_have_no_text():
    """A decoder of the library that strips the end of a text fails where an earlier step has joined nothing to one."""
    for steps in product(STEPS, STEPS):
        raw = byte_level()
        raw.decoder = decoders.Sequence(list(steps))
        tokenizer = Tokenizer(raw)
        assert tokenizer.special_ids == {0}
        assert [tokenizer.decode(ids) for ids in ([], [0], [999], [0, 999])] == [""] * 4
        text = tokenizer.text_after(())
        assert text.push(80) + text.flush() == tokenizer.decode([80])


def test_a_token_is_silent_by_its_text():
    """The library leaves out what was named special, even if it has it as an ordinary token."""
    raw = byte_level()
    raw.add_tokens([AddedToken("<x>", special=False)])
    assert not Tokenizer(raw).is_silent(300)
    raw.add_special_tokens([AddedToken("<x>", special=True)])
    assert Tokenizer(raw).is_silent(300)
