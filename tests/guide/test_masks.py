"""Masks are those of the library, for vocabularies of every kind."""

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from hibachi.engine.guide.protocol import Grammar, GuideFailed, Vocabulary

from . import made

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "integer"}, "é": {"enum": ["x", "ß"]}},
    "required": ["name", "n", "é"],
    "additionalProperties": False,
}
TEXT = '{"name": "a\\n ü", "n":-12, "é": "ß"}'


def test_masks_are_those_that_the_library_computes_from_the_tokenizers_file(tiny):
    """Nor is anything forced: any way to cut the text is allowed."""
    file = LLTokenizer((made.TINY / "tokenizer.json").read_text(), eos_token=0)
    grammar = tiny.check(json=SCHEMA)
    theirs, ours = LLMatcher(file, grammar.source, log_level=0), tiny.guides.compile(grammar)
    for token in [*tiny.cut(TEXT), None]:
        expected = np.unpackbits(np.frombuffer(theirs.compute_bitmask(), np.uint8), bitorder="little")[:2048]
        np.testing.assert_array_equal(tiny.masks(ours)[0], expected.astype(bool))
        if token is not None:
            ours.advance([token])
            assert theirs.consume_token(token)
    assert ours.complete and tiny.allowed(ours) == {0}


def test_masks_of_many_guides_are_those_of_each_alone(tiny):
    forms = [{"regex": "[a-c]+"}, {"choice": ["yes", "no"]}, {"json": SCHEMA}, {"grammar": "start: <[7-9]>"}] * 3
    guides = [tiny.guide(**form) for form in forms]
    together = tiny.masks(*guides)
    for guide, mask in zip(guides, together, strict=True):
        np.testing.assert_array_equal(tiny.masks(guide)[0], mask)
    assert len({mask.tobytes() for mask in together}) == 4
    assert tiny.guides.masks([], np.zeros((0, 64), np.uint32)) == []


def test_end_tokens_are_allowed_where_the_answer_may_end_and_never_as_text():
    """Whatever their bytes are, and whether they are special or not."""
    setting = made.Setting(made.of_bytes([b"</s>", b"<|end|>", b"<tool>", b"ab"], special=[258], ends=(256, 257)))
    guide = setting.guide(regex=".*")
    assert setting.allowed(guide) >= {256, 257, 259} and 258 not in setting.allowed(guide)
    guide = setting.guide(json={"type": "string"})
    guide.advance([ord('"')])
    assert not setting.allowed(guide) & {256, 257, 258} and 259 in setting.allowed(guide)
    guide.advance([ord('"')])
    assert guide.complete and setting.allowed(guide) == {256, 257}


def test_an_end_token_in_a_range_of_ids_is_allowed_only_where_the_answer_may_end():
    setting = made.Setting(made.of_bytes([b"</s>", b"x"], ends=(256,)))
    guide, other = setting.guide(grammar="start: <[*]> <[250-257]>"), setting.guide(regex="a*")
    np.testing.assert_array_equal(setting.masks(guide, other)[:, 256], [False, True])
    assert setting.allowed(guide) == {*range(256), 257}
    guide.advance([257])
    assert setting.allowed(guide) == {*range(250, 256), 257}
    guide.advance([257])
    assert guide.complete and setting.allowed(guide) == {256}


def test_without_end_tokens_an_answer_ends_where_no_token_goes_on():
    """Though bytes would, as the grammar says."""
    setting = made.Setting(Vocabulary([b"a", b"b"]))
    guide = setting.guide(regex="ab(x|bx)?")
    guide.advance([0, 1])
    assert not guide.complete and setting.allowed(guide) == {1}
    guide.advance([1])
    with pytest.raises(GuideFailed, match="no token"):
        setting.allowed(guide)
    guide = setting.guide(regex="ab(x)?")
    guide.advance([0, 1])
    assert setting.allowed(guide) == set() and guide.complete
    guide.take_back(1)
    assert not guide.complete and setting.allowed(guide) == {1}
    guide = setting.guide(grammar="start: <[1]> <[2]>")  # that which stands for the end
    guide.advance([1])
    with pytest.raises(GuideFailed, match="no token"):
        setting.allowed(guide)


def test_an_end_token_that_the_vocabulary_has_not_is_none(tiny):
    setting = made.Setting(Vocabulary(tiny.vocabulary.tokens, tiny.vocabulary.special, (0, 5000)))
    guide = setting.guide(choice=["a"])
    guide.advance(setting.cut("a"))
    assert guide.complete and setting.allowed(guide) == {0}


def test_tokens_that_mean_the_same_are_all_allowed_and_those_that_mean_nothing_never():
    setting = made.Setting(made.of_bytes([b"", b"ab", b"ab", b"a", b"b" * 2000], ends=(0,)))
    assert setting.allowed(setting.guide(regex="ab")) == {97, 257, 258, 259}
    assert setting.allowed(setting.guide(regex="b{2000}")) == {98}  # longer than any real one


@pytest.mark.parametrize("more", [0, 1, 31])
def test_a_model_without_end_tokens_has_masks_of_its_own_size(more):
    """At 256 tokens the library's mask has a word more than ours."""
    setting = made.Setting(made.of_bytes([b"ab"] * more))
    first, second = setting.guide(choice=["a", "ab"]), setting.guide(choice=["b"])
    longer = set(range(256, 256 + more))
    assert setting.allowed(first) == {97} | longer
    np.testing.assert_array_equal(setting.masks(first, second).sum(axis=1), [1 + more, 1])
    first.advance([97])
    assert not first.complete and setting.allowed(first) == {98}
    first.advance([98])
    assert first.complete and setting.allowed(first) == set()


def test_a_guide_that_cannot_go_on_fails_alone_and_by_name(tiny):
    """The grammar goes on with a byte that is no text by itself and that no token has as a whole."""
    setting = made.Setting(Vocabulary([b"a", b"b", b"</s>"], frozenset(), (2,)))
    stuck, well = setting.guide(regex="ax|b"), setting.guide(regex="ab")
    stuck.advance([0])
    bits = np.zeros((2, 1), np.uint32)
    failed, none = setting.guides.masks([stuck, well], bits)
    assert none is None and bits[1] == 1
    assert isinstance(failed, GuideFailed) and "no token of the model goes on" in str(failed)
    for act in (lambda: stuck.advance([1]), lambda: stuck.take_back(1), lambda: stuck.forced(3)):
        with pytest.raises(GuideFailed, match="no token"):
            act()
    assert not stuck.complete


@pytest.mark.parametrize(
    "bits",
    [
        np.zeros((1, 63), np.uint32),
        np.zeros((2, 64), np.uint32),
        np.zeros((1, 64), np.int32),
        np.zeros((1, 128), np.uint32)[:, ::2],
    ],
)
def test_an_array_of_another_shape_is_refused(tiny, bits):
    with pytest.raises(ValueError, match=r"Expected bits as a C-contiguous uint32 array \[1, 64\]; got"):
        tiny.guides.masks([tiny.guide(regex="a")], bits)


def test_a_grammar_that_was_not_checked_fails_and_says_nothing_of_it(tiny):
    with pytest.raises(GuideFailed) as caught:
        tiny.guides.compile(Grammar('start: "secret" nowhere'))
    assert "secret" not in str(caught.value)
