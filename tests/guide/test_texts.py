"""Answers in a form: the language model that ships, in this process and in another, and models of one's own."""

import json
import re

import numpy as np
import pytest

from hibachi import LLM, AutoregressiveBatchInference, InvalidRequest, NumpyBackend, SamplingParams
from hibachi.engine.guide.protocol import FormRefused
from hibachi.llm.remote.llm import RemoteLLM
from hibachi.testing.toys import SumPaged

from ..lib.letters import Letters

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMS = {
    "json": {"json": PERSON},
    "regex": {"regex": r"[a-c]{3}-\d\d"},
    "choice": {"choice": ["yes", "no", "né"]},
    "lark": {"grammar": 'start: "x" NUM "!"\nNUM: /[0-9]{2,4}/'},
    "gbnf": {"grammar": 'root ::= "ab" [0-9] tail\ntail ::= "." | "?"'},
}
FITS = {
    "json": lambda text: {*json.loads(text)} == {"name", "age", "tags"},
    "regex": lambda text: re.fullmatch(r"[a-c]{3}-\d\d", text),
    "choice": lambda text: text in ("yes", "no", "né"),
    "lark": lambda text: re.fullmatch(r"x[0-9]{2,4}!", text),
    "gbnf": lambda text: re.fullmatch(r"ab[0-9][.?]", text),
}


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", backend="numpy", max_num_seqs=8) as found:
        yield found


def params(form, **more):
    return SamplingParams(structured_outputs=form, **{"max_tokens": 90, "seed": 1} | more)


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_comes_out_whole(llm, form, temperature):
    answers = llm.generate(["My form: ", "Once"], params(FORMS[form], temperature=temperature))
    for answer in answers:
        assert FITS[form](answer.text), answer.text
        assert answer.finish_reason == "stop" and answer.choices[0].stop_reason is None


def test_stop_strings_end_it_as_anywhere(llm):
    answer = llm.generate("x", params({"regex": "a{3}bc{3}"}, stop="b"))[0]
    assert answer.text == "aaa" and answer.choices[0].stop_reason == "b"


def test_an_answer_that_may_end_and_need_not_ends_by_the_end_token_only(llm):
    """`a*` after three a: with ignore_eos it goes on to max_tokens."""
    form = {"regex": "a{3}a*"}
    free = llm.generate("x", params(form, max_tokens=40, ignore_eos=True))[0]
    assert free.finish_reason == "length" and set(free.text) == {"a"}
    ended = llm.generate("x", params(form, max_tokens=40, logit_bias=dict.fromkeys(llm.eos_ids, 100)))[0]
    assert ended.finish_reason == "stop" and ended.text.startswith("aaa")
    long = llm.generate("x", params(form, max_tokens=40, min_tokens=20, logit_bias=dict.fromkeys(llm.eos_ids, 100)))[0]
    assert len(long.token_ids) == 20


def test_blanks_come_one_at_a_time_after_a_comma_and_a_colon(llm):
    """The commonest complaint is of blanks without end: here they are as likely as can be."""
    blanks = {
        i: 100 for i in range(llm.vocab_size) if not llm.tokenizer.token_bytes(i).strip() and i not in llm.eos_ids
    }
    blanks = dict(list(blanks.items())[:300])
    answer = llm.generate("x", params({"json": PERSON}, temperature=0, logit_bias=blanks, max_tokens=200))[0]
    value = json.loads(answer.text)
    assert answer.text in (json.dumps(value), json.dumps(value, ensure_ascii=False))
    spaced = {"json": PERSON, "whitespace_pattern": "[ ]{0,3}"}
    wide = llm.generate("x", params(spaced, temperature=0, logit_bias=blanks, max_tokens=200))[0]
    assert wide.text.startswith('{   "name"   :   "') and json.loads(wide.text)


def test_what_says_nothing_in_a_schema_is_no_reason_to_refuse_it(llm):
    """As clients send it: pydantic's paths, zod's records and prefixes. Properties may have the names of keywords."""
    note = {"type": "string", "format": "starts_with", "pattern": "^ab{2}$"}
    names = {"type": "object", "propertyNames": {"type": "string"}, "maxProperties": 0}
    properties = {"format": {"enum": ["path"]}, "propertyNames": names, "list": {"type": "array", "items": note}}
    properties["list"] |= {"minItems": 1, "maxItems": 1}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    for given in (schema, {"anyOf": [{"$ref": "#/$defs/it"}], "$defs": {"it": schema}}):
        (answer,) = llm.generate("x", params({"json": given}))
        assert json.loads(answer.text) == {"format": "path", "propertyNames": {}, "list": ["abb"]}


BEGUN = {"json": '{"name": "É', "regex": "ab", "choice": "n", "lark": "x1", "gbnf": "ab4"}


@pytest.mark.parametrize("kind", FORMS)
def test_a_form_goes_on_behind_what_the_prompt_has_written(llm, kind):
    form = {**FORMS[kind], "begun": BEGUN[kind]}
    drawn = params(form, temperature=1.0).with_(n=3)
    for answer in llm.generate(["Here: " + BEGUN[kind]] * 2, [drawn, params(form, temperature=0)]):
        for choice in answer.choices:
            assert choice.finish_reason == "stop" and FITS[kind](BEGUN[kind] + choice.text)
    for wrong in ("§", {"choice": "yes", "gbnf": "ab4."}.get(kind, "§§")):
        with pytest.raises(InvalidRequest, match=r"^structured_outputs\.begun: no such answer begins so"):
            llm.generate("x", params({**FORMS[kind], "begun": wrong}))


def test_an_engine_in_another_process(llm):
    each = [params(form, seed=i, temperature=1.0) for i, form in enumerate(FORMS.values())]
    here = llm.generate(["Here: "] * 5, each)
    with RemoteLLM("tiny", backend="numpy") as there:
        assert [a.text for a in there.generate(["Here: "] * 5, each)] == [a.text for a in here]
        with pytest.raises(FormRefused):
            there.generate("x", params({"json": {"not": {}}}))
        assert there.generate("x", params({"choice": ["yes"]}))[0].text == "yes"
        assert there.generate("x", params({"choice": ["yes"], "begun": "y"}))[0].text == "es"


# ---- tokenizers and tokens of one's own ------------------------------------------------------------------------------


class Spelling(Letters):
    def token_bytes(self, token):
        return bytes([97 + token])


def own(tokenizer):
    made = SumPaged(NumpyBackend())
    made.tokenizer = tokenizer
    return AutoregressiveBatchInference(made, max_model_len=64)


def test_a_tokenizer_that_spells_its_tokens_guides_texts():
    with own(Spelling()) as e:
        ids = e.run([1, 2], params({"regex": "(ab|cd){3}"}, temperature=0)).collect()
        assert re.fullmatch("(ab|cd){3}", Letters().decode(ids))


@pytest.mark.parametrize("tokenizer", [None, Letters()], ids=["none", "decode only"])
def test_without_token_bytes_only_grammars_over_ids_are_taken(tokenizer):
    with own(tokenizer) as e:
        ids = e.run([1, 2], params({"grammar": "start: pair{3}\npair: <[0-2]> <[5,7]>\n"})).collect()
        assert all(i <= 2 for i in ids[::2]) and all(i in (5, 7) for i in ids[1::2]) and len(ids) == 6
        for form in ({"regex": "a"}, {"json_object": True}, {"choice": ["a"]}, {"grammar": 'start: "a"'}):
            with pytest.raises(InvalidRequest, match="needs token_bytes"):
                e.run([1, 2], params(form))
        assert len(e.run(np.array([1, 2]), max_tokens=3).collect()) == 3


@pytest.mark.parametrize(
    "pattern, fits, others",
    [
        (r"\d", "5", "٣"), (r"\w", "a_5", "é"), (r"\s", " ", "\u00a0\u2003"), (r"\D", "a٣", "5"), (r"\W", "-é", "a"),
        (r"\S", "aé", " \u00a0"), (r"[\d.]", "5.", "٣"), (r"[^\d]", "a٣", "5"), (r"[^\W]", "a", "é-"),
        (r"[\W5]", "5é", "a"), (r"[^\s]", "é", " \u00a0"), (r"\\d[\]\d]", [r"\d]", r"\d5"], [r"\d٣", "5]"]),
    ],
)  # fmt: skip
def test_classes_are_of_ascii_in_both(tiny, pattern, fits, others):
    """A regular expression, and a pattern within a schema."""
    bare, within = tiny.guide(regex=pattern), tiny.guide(json={"pattern": f"^{pattern}$", "type": "string"})
    for texts, right in ((fits, True), (others, False)):
        for text in texts:
            assert tiny.fits(bare, text) is tiny.fits(within, json.dumps(text, ensure_ascii=False)) is right, text
