"""Text id by id, and stop strings in it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hibachi.llm.tokenizers import Detokenizer, Tokenizer
from hibachi.llm.tokenizers.pieces import AnyText, texts

from ...lib.inside import underlying
from ...lib.leaks import kept
from .made import BYTES, FALLBACK, MADE, byte_level, every_faithful, every_kind, wordpiece

WORDS = st.text(st.sampled_from("ab c😀é你👩‍👧\n"))


SIZES = {id(tokenizer): tokenizer.vocab_size for tokenizer in MADE.values()}


def ids_of(tokenizer):
    """Any ids, and many of few, so that runs of bytes and repetitions come up; some have no token."""
    size = SIZES[id(tokenizer)]
    few = st.lists(st.sampled_from(range(min(size + 2, 300))), max_size=60)
    return st.lists(st.integers(0, size + 1), max_size=40) | few


def pieces_of(tokenizer, ids, stop=(), **options):
    detokenizer = Detokenizer(tokenizer, stop, **options)
    pieces = [detokenizer.push(i) for i in ids]
    return [*pieces, detokenizer.flush()], detokenizer.stopped


# ---- the text --------------------------------------------------------------------------------------------------------


@every_kind
@given(data=st.data())
def test_the_pieces_of_any_ids_are_exactly_their_text(tokenizer, data):
    ids = data.draw(ids_of(tokenizer))
    assert "".join(pieces_of(tokenizer, ids)[0]) == tokenizer.decode(ids)


@every_kind
@settings(max_examples=30)
@given(data=st.data())
def test_special_tokens_may_be_shown(tokenizer, data):
    some = [i for i in range(tokenizer.vocab_size) if tokenizer.is_silent(i)]
    ids = [*data.draw(ids_of(tokenizer)), *some, *data.draw(ids_of(tokenizer))]
    expected = tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(pieces_of(tokenizer, ids, skip_special=False)[0]) == expected


@every_kind
@settings(max_examples=30)
@given(data=st.data())
def test_some_special_tokens_may_be_shown_while_others_are_not(tokenizer, data):
    special = sorted(tokenizer.special_ids)
    shown = frozenset(data.draw(st.sets(st.sampled_from(special)))) if special else frozenset()
    ids = [*data.draw(ids_of(tokenizer)), *special, *data.draw(ids_of(tokenizer)), *special]
    hidden = tokenizer.special_ids - shown
    expected = tokenizer.decode([i for i in ids if i not in hidden], skip_special_tokens=False)
    assert "".join(pieces_of(tokenizer, ids, shown=shown)[0]) == expected
    if not shown:
        assert expected == tokenizer.decode(ids)
    every = tokenizer.decode(ids, skip_special_tokens=False)
    assert "".join(pieces_of(tokenizer, ids, shown=shown, skip_special=False)[0]) == every


def test_the_table_of_what_is_shown_is_made_once():
    shown = frozenset({0})
    assert BYTES.text_showing(shown) is BYTES.text_showing(frozenset({0}))


def test_a_text_is_cut_at_its_special_tokens():
    """The longest first, as where they are read."""
    raw = byte_level()
    raw.add_special_tokens(["<|a|>", "<|a|>b", "[X]"])
    raw.add_tokens(["<tool>"])
    tokenizer = Tokenizer(raw)
    ids = {t: raw.token_to_id(t) for t in ("<|a|>", "<|a|>b", "[X]")}
    assert tokenizer.split_special("") == [] and tokenizer.split_special("a <tool>") == ["a <tool>"]
    assert tokenizer.split_special("[X]c<|a|>b<|a|> [X") == [ids["[X]"], "c", ids["<|a|>b"], ids["<|a|>"], " [X"]
    text = "x<|a|>b[X][X] y"
    parts = tokenizer.split_special(text)
    assert [
        i for p in parts for i in ([p] if isinstance(p, int) else tokenizer.encode(p, add_special_tokens=False))
    ] == (tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.slow
@every_kind
@settings(max_examples=5000, deadline=None)
@given(data=st.data())
def test_the_pieces_of_many_ids_are_exactly_their_text(tokenizer, data):
    ids = data.draw(ids_of(tokenizer))
    assert "".join(pieces_of(tokenizer, ids)[0]) == tokenizer.decode(ids)


@every_faithful
@given(text=WORDS)
def test_no_piece_ends_inside_a_character(tokenizer, text):
    ids = tokenizer.encode(text)
    pieces, _ = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@given(text=WORDS)
def test_nothing_is_held_back_longer_than_needed(text):
    assert pieces_of(BYTES, BYTES.encode(text))[0][-1] == ""
    assert pieces_of(FALLBACK, FALLBACK.encode(text + "a"))[0][-1] == ""  # runs of bytes are held until they end


def test_the_tables_and_the_general_way_give_the_same_as_the_library():
    """Also where they need not: what the general way does not know, the tables do not need."""
    used = {name: type(t.text_after(())).__name__ for name, t in MADE.items()}
    assert {name for name, kind in used.items() if kind == "AnyText"} == {
        "wordpiece",
        "suffixes",
        "no decoder",
        "odd steps",
    }
    assert used["byte level"] == "ByteLevelText" and used["byte fallback"] == used["metaspace"] == "PieceText"


@settings(max_examples=300)
@given(ids=ids_of(BYTES), cut=st.integers(0, 40))
def test_table_and_general_way_agree(ids, cut):
    """Of byte-level tokens, behind a text that ends with a character."""
    front = BYTES.encode(BYTES.decode(ids[:cut])) if "\ufffd" not in BYTES.decode(ids[:cut]) else []
    table = BYTES.text_after(front)
    general = AnyText(BYTES.decode, {i: "" for i in range(BYTES.vocab_size) if not BYTES.is_silent(i)}, front)
    assert "".join(map(table.push, ids)) + table.flush() == "".join(map(general.push, ids)) + general.flush()


def test_bytes_that_are_not_utf_8():
    """Bytes of a byte-level token become U+FFFD as Unicode recommends; a run of single bytes does as a whole."""
    letter = {chr(b) if 0x21 <= b < 0x7F else c: b for c, b in _letters().items()}
    by_byte = {b: underlying(BYTES).token_to_id(c) for c, b in letter.items()}
    for data in (
        b"\xf0\x9f\x98",
        b"\xf0\x9fA",
        b"\xe2\x28\xa1",
        b"\xc0\xaf",
        b"\xed\xa0\x80",
        b"\xf5",
        b"A\x80\x80B\xff",
    ):
        ids = [by_byte[b] for b in data]
        assert "".join(pieces_of(BYTES, ids)[0]) == BYTES.decode(ids) == data.decode(errors="replace")
        ids = [1 + b for b in data]
        assert "".join(pieces_of(FALLBACK, ids)[0]) == FALLBACK.decode(ids) == "\ufffd" * len(data)


def _letters():
    from hibachi.llm.tokenizers.pieces import byte_letters

    return byte_letters()


def test_the_letters_of_bytes():
    from tokenizers import pre_tokenizers

    assert set(_letters()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(_letters().values()) == list(range(256))
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in map(chr, (*range(256), 0x4F60, 0x1F600)):
        ((letters, _),) = split.pre_tokenize_str(text)
        assert bytes(_letters()[c] for c in letters) == text.encode()


def test_a_character_comes_when_its_last_byte_does():
    ids = [BYTES.encode(c, add_special_tokens=False) for c in ("x", "👻", "y")]
    assert len(ids[0]) == len(ids[2]) == 1 < len(ids[1])
    pieces, _ = pieces_of(BYTES, [i for part in ids for i in part])
    assert pieces == ["x", *[""] * (len(ids[1]) - 1), "👻", "y", ""]


def test_a_run_of_bytes_comes_when_it_ends():
    ids = [1 + b for b in "x你".encode()]
    assert pieces_of(FALLBACK, [*ids, 258, *ids])[0] == ["", "", "", "", "x你a", "", "", "", "", "x你"]
    assert pieces_of(FALLBACK, [*ids[:3], 258])[0] == ["", "", "", "\ufffd" * 3 + "a", ""]
    spoilt = pieces_of(FALLBACK, [ids[0], ids[0], 1 + 0xFF, ids[0], 258])[0]
    assert spoilt == ["", "", "\ufffd" * 3, "\ufffd", "a", ""]  # as soon as that is sure


def test_half_a_character_at_the_end_is_replaced():
    ids = BYTES.encode("x👻", add_special_tokens=False)[:-1]
    assert "".join(pieces_of(BYTES, ids)[0]) == "x\ufffd"


def test_ids_without_a_token_say_nothing():
    assert pieces_of(BYTES, [BYTES.vocab_size, 10**9, 0])[0] == ["", "", "", ""]


def test_a_leading_space_inside_the_text_is_kept():
    ids = FALLBACK.encode("a ab  ab") + FALLBACK.encode(" a")
    assert "".join(pieces_of(FALLBACK, ids)[0]) == FALLBACK.decode(ids)


# ---- behind a prompt -------------------------------------------------------------------------------------------------


@every_faithful
@given(before=WORDS, text=WORDS)
def test_a_text_may_go_on_after_another(tokenizer, before, text):
    front, ids = tokenizer.encode(before), tokenizer.encode(text)
    pieces, _ = pieces_of(tokenizer, ids, after=front)
    assert tokenizer.decode(front) + "".join(pieces) == tokenizer.decode(front + ids)


@every_faithful
@given(text=WORDS, at=st.integers(0, 20))
def test_a_text_goes_on_after_its_prompt(tokenizer, text, at):
    ids = tokenizer.encode(text)
    prompt = tokenizer.decode(ids[:at])
    if "\ufffd" not in prompt:  # else the prompt ends inside a character
        pieces, _ = pieces_of(tokenizer, ids[at:], after=ids[:at])
        assert prompt + "".join(pieces) == tokenizer.decode(ids)


@every_kind
@given(data=st.data(), at=st.integers(0, 20))
def test_any_ids_go_on_after_whole_characters(tokenizer, data, at):
    ids = data.draw(ids_of(tokenizer))
    ids, prompt = ids[at:], ids[:at]
    text = tokenizer.decode([*prompt, *ids])
    if "\ufffd" not in text + tokenizer.decode(prompt):
        assert tokenizer.decode(prompt) + "".join(pieces_of(tokenizer, ids, after=prompt)[0]) == text


@pytest.mark.parametrize("tokenizer", [BYTES, FALLBACK], ids=["byte level", "byte fallback"])
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_prompt_may_end_inside_a_character(tokenizer, cut):
    """Then the character comes whole, with the token that completes it."""
    if tokenizer is FALLBACK:
        ids = [1 + b for b in "😀".encode()]
    else:
        ids = [underlying(BYTES).token_to_id(c) for c in ("ð", "Ł", "ĺ", "Ģ")]
        assert BYTES.decode(ids) == "😀"
    assert "".join(pieces_of(tokenizer, ids[cut:], after=ids[:cut])[0]) == "😀"


def test_a_space_after_the_prompt_is_kept():
    assert pieces_of(FALLBACK, FALLBACK.encode("a"))[0][0] == "a"
    assert Detokenizer(FALLBACK, after=FALLBACK.encode("b")).push(FALLBACK.encode("a")[0]) == " a"


# ---- cost ------------------------------------------------------------------------------------------------------------


class Counting(Tokenizer):
    decoded = 0

    def decode(self, ids, **options):
        ids = list(ids)
        self.decoded += len(ids)
        return super().decode(ids, **options)


@pytest.mark.parametrize("ids", [[1], [4], [13], [1, 4, 7, 12]])
def test_a_token_costs_the_same_anywhere_in_the_text(ids):
    tokenizer = Counting(wordpiece())
    detokenizer = Detokenizer(tokenizer)
    for i in ids * 1000:
        detokenizer.push(i)
    assert 1000 < tokenizer.decoded < 100 * 1000 * len(ids)


@pytest.mark.parametrize("ids", [[128], [255], [300], BYTES.encode("😀", add_special_tokens=False), [1, 2, 200]])
def test_the_general_way_costs_the_same_even_where_no_character_is_ever_whole(ids):
    tokenizer = Counting(byte_level())
    text = AnyText(tokenizer.decode, dict.fromkeys(range(1, tokenizer.vocab_size), ""))
    for i in ids * 1000:
        text.push(i)
    assert tokenizer.decoded < 100 * 1000 * len(ids)


def test_a_table_needs_no_decoding():
    tokenizer = Counting(byte_level())
    before = tokenizer.decoded
    assert Detokenizer(tokenizer).push(80)
    assert tokenizer.decoded == before


def test_what_is_kept_of_a_text_does_not_grow():
    text = BYTES.text_after(())
    for i in [128, 255, 200] * 1000:
        text.push(i)
        assert kept(text) <= 3 + kept(BYTES.text_after(()))


def test_an_unknown_decoder_is_left_to_the_library():
    start = texts({"type": "CTC", "pad_token": "-", "word_delimiter_token": "|", "cleanup": True}, {1: "a"}, str)
    assert isinstance(start(()), AnyText)


# ---- stop strings ----------------------------------------------------------------------------------------------------


def stopped_text(text, stop, include, early=0):
    """The obvious definition: letter by letter, until the text ends in a stop string, after so many letters."""
    for end in range(early + 1, len(text) + 1):
        hits = [s for s in stop if text[:end].endswith(s)]
        if hits:
            return text[: end if include else end - max(map(len, hits))], True
    return text, False


@settings(max_examples=300)
@given(
    text=st.text(st.sampled_from("ab 😀"), max_size=30),
    stop=st.lists(st.text(st.sampled_from("ab 😀"), min_size=1, max_size=6), max_size=4),
    include=st.booleans(),
)
@every_faithful
def test_the_text_ends_at_a_stop_string_wherever_tokens_end(tokenizer, text, stop, include):
    ids = tokenizer.encode(text)
    pieces, stopped = pieces_of(tokenizer, ids, stop, include_stop=include)
    assert ("".join(pieces), stopped) == stopped_text(tokenizer.decode(ids), stop, include)


@settings(max_examples=300)
@given(
    text=st.text(st.sampled_from("aab"), max_size=40),
    stop=st.lists(st.text(st.sampled_from("aab"), min_size=2, max_size=8), min_size=1, max_size=3),
)
def test_no_part_of_a_stop_string_leaks(text, stop):
    """What went out is never longer than what goes out in the end."""
    detokenizer, out = Detokenizer(BYTES, stop), ""
    expected, _ = stopped_text(text, stop, include=False)
    for i in BYTES.encode(text, add_special_tokens=False):
        out += detokenizer.push(i)
        assert expected.startswith(out)
    assert out + detokenizer.flush() == expected


@settings(max_examples=300)
@given(
    text=st.text(st.sampled_from("aab"), max_size=30),
    stop=st.lists(st.text(st.sampled_from("aab"), min_size=1, max_size=5), min_size=1, max_size=3),
    least=st.integers(0, 12),
    include=st.booleans(),
)
def test_stop_strings_that_are_complete_too_early_do_not_count(text, stop, least, include):
    ids = BYTES.encode(text, add_special_tokens=False)
    early = len(BYTES.decode(ids[:least]))
    pieces, stopped = pieces_of(BYTES, ids, stop, include_stop=include, min_tokens=least)
    assert ("".join(pieces), stopped) == stopped_text(text, stop, include, early)


def test_what_may_become_a_stop_string_waits():
    detokenizer = Detokenizer(BYTES, stop="ENDE")
    ids = BYTES.encode("xENDyENDE!", add_special_tokens=False)
    assert len(ids) == 10  # one letter each
    assert [detokenizer.push(i) for i in ids] == ["x", "", "", "", "ENDy", "", "", "", "", ""]
    assert detokenizer.stopped and detokenizer.flush() == ""


def test_a_stop_string_that_is_included_need_not_wait():
    detokenizer = Detokenizer(BYTES, stop="ENDE", include_stop=True)
    ids = BYTES.encode("xENDyENDE!", add_special_tokens=False)
    assert [detokenizer.push(i) for i in ids] == ["x", "E", "N", "D", "y", "E", "N", "D", "E", ""]
    assert detokenizer.stopped and detokenizer.flush() == ""


def test_what_did_not_become_a_stop_string_comes_at_the_end():
    detokenizer = Detokenizer(BYTES, stop=["ENDE"])
    assert [detokenizer.push(i) for i in BYTES.encode("END", add_special_tokens=False)] == ["", "", ""]
    assert detokenizer.flush() == "END" and not detokenizer.stopped


def test_a_stop_string_may_be_half_a_character():
    """Bytes that will never be a character: they are seen at the end."""
    ids = BYTES.encode("x👻", add_special_tokens=False)[:-1]
    pieces, stopped = pieces_of(BYTES, ids, "\ufffd")
    assert "".join(pieces) == "x" and stopped


def test_a_long_stop_string_costs_no_more():
    """Its letters are compared at most twice each, though every piece nearly completes it."""
    stop = "a" * 20000 + "b"
    detokenizer = Detokenizer(BYTES, stop)
    a, c = (underlying(BYTES).token_to_id(letter) for letter in "ac")
    assert "".join(detokenizer.push(a) for _ in range(60000)) == "a" * 40000
    assert detokenizer.push(c) == "a" * 20000 + "c"
