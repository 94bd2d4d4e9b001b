"""Tokenizer, detokenizer and chat templates."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Raw
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from hibachi.errors import InvalidModelFiles, InvalidRequest, MissingExtra
from hibachi.model.text import Detokenizer, Tokenizer, render_chat

SHIPPED = Path(__file__).parents[2] / "hibachi" / "data" / "tiny"
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


def byte_fallback():
    """Tokens are text, other characters come as <0x..>, as in Llama 2; the first space is dropped."""
    vocab = {"<unk>": 0} | {f"<0x{b:02X}>": 1 + b for b in range(256)}
    for piece in ("▁", "a", "b", "c", "▁a", "ab", "▁ab", "é"):
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    raw = Raw(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return raw


BYTES, FALLBACK = Tokenizer(byte_level()), Tokenizer(byte_fallback())
TOKENIZERS = {"byte level": BYTES, "byte fallback": FALLBACK}
if (SHIPPED / "tokenizer.json").exists():
    TOKENIZERS["shipped"] = Tokenizer.load(SHIPPED)

every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)


def pieces_of(tokenizer, ids, stop=()):
    detokenizer = Detokenizer(tokenizer, stop)
    pieces = [detokenizer.push(i) for i in ids]
    return [*pieces, detokenizer.flush()], detokenizer.stopped


# ---- tokenizer -----------------------------------------------------------------------------------------------


@every_tokenizer
@given(text=st.text())
def test_decoding_gives_the_encoded_text(tokenizer, text):
    # byte fallback writes spaces as ▁, and drops one in front
    expected = text.replace("▁", " ").removeprefix(" ") if tokenizer is FALLBACK else text
    got = tokenizer.decode(tokenizer.encode(text))
    assert got == expected or (tokenizer is FALLBACK and got == text.replace("▁", " "))


def test_special_tokens_are_added_as_the_file_says():
    assert BYTES.encode("cat")[0] == 0
    assert BYTES.encode("cat", add_special_tokens=False) == BYTES.encode("cat")[1:]
    assert BYTES.decode([0, *BYTES.encode("cat")]) == "cat"
    assert BYTES.decode([0], skip_special_tokens=False) == "<s>"


def test_ids_without_a_token_have_no_text():
    assert BYTES.decode([BYTES.vocab_size, 10**6]) == ""


@pytest.mark.parametrize("text", ["\ud800", b"bytes", 3, None])
def test_a_prompt_that_is_not_text_is_refused(text):
    with pytest.raises(InvalidRequest, match=f"valid Unicode; got {type(text).__name__}"):
        BYTES.encode(text)


def test_settings_from_training_are_dropped(tmp_path):
    raw = byte_level()
    raw.enable_truncation(3)
    raw.enable_padding(length=50)
    raw.save(str(tmp_path / "tokenizer.json"))
    text = "the cat sat on the mat"
    assert Tokenizer.load(tmp_path).encode(text) == BYTES.encode(text)


def test_ids_must_fit_the_model(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path, vocab_size=300).vocab_size == 300
    with pytest.raises(InvalidModelFiles, match=r"below vocab_size 299; got ids up to 299\. Take both"):
        Tokenizer.load(tmp_path, vocab_size=299)


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(InvalidModelFiles, match=r"tokenizer\.json is missing.*save_pretrained"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidModelFiles, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("module", ["tokenizers", "minijinja"])
def test_a_missing_library_says_how_to_install_it(tmp_path, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"{module}.*pip install '\.\[text\]' in the checkout"):
        Tokenizer.load(tmp_path) if module == "tokenizers" else render_chat("", [])


# ---- detokenizer ---------------------------------------------------------------------------------------------


@every_tokenizer
@given(text=st.text(st.sampled_from("ab c😀é你👩‍👧\n")))
def test_the_pieces_of_a_text_are_the_text(tokenizer, text):
    ids = tokenizer.encode(text)
    pieces, _ = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""  # nothing was held back longer than needed


@settings(max_examples=300)
@given(ids=st.lists(st.integers(0, BYTES.vocab_size + 1), max_size=40) | st.lists(st.integers(1, 256), max_size=300))
def test_the_pieces_of_any_tokens_are_their_text(ids):
    assert "".join(pieces_of(BYTES, ids)[0]) == BYTES.decode(ids)


def test_a_character_comes_when_its_last_byte_does():
    ids = [BYTES.encode(c, add_special_tokens=False) for c in ("x", "👻", "y")]
    assert [len(i) for i in ids] == [1, 4, 1] or len(ids[1]) > 1
    pieces, _ = pieces_of(BYTES, [i for part in ids for i in part])
    assert pieces == ["x", *[""] * (len(ids[1]) - 1), "👻", "y", ""]


def test_half_a_character_at_the_end_is_replaced():
    ids = BYTES.encode("x👻", add_special_tokens=False)[:-1]
    assert "".join(pieces_of(BYTES, ids)[0]) == "x\ufffd"


def test_a_leading_space_inside_the_text_is_kept():
    ids = FALLBACK.encode("a ab  ab") + FALLBACK.encode(" a")
    assert "".join(pieces_of(FALLBACK, ids)[0]) == FALLBACK.decode(ids)


@every_tokenizer
@given(before=st.text(st.sampled_from("ab c😀é你\n")), text=st.text(st.sampled_from("ab c😀é你\n")))
def test_a_text_may_go_on_after_another(tokenizer, before, text):
    front, ids = tokenizer.encode(before), tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer, after=front)
    pieces = [*map(detokenizer.push, ids), detokenizer.flush()]
    assert tokenizer.decode(front) + "".join(pieces) == tokenizer.decode(front + ids)


@every_tokenizer
@given(text=st.text(st.sampled_from("ab c😀é你\n")), at=st.integers(0, 20))
def test_a_text_goes_on_after_its_prompt(tokenizer, text, at):
    ids = tokenizer.encode(text)
    prompt = tokenizer.decode(ids[:at])
    if "\ufffd" not in prompt:  # else the prompt ends inside a character
        detokenizer = Detokenizer(tokenizer, after=ids[:at])
        pieces = [*map(detokenizer.push, ids[at:]), detokenizer.flush()]
        assert prompt + "".join(pieces) == tokenizer.decode(ids)


def test_a_space_after_the_prompt_is_kept():
    assert pieces_of(FALLBACK, FALLBACK.encode("a"))[0][0] == "a"
    assert Detokenizer(FALLBACK, after=FALLBACK.encode("b")).push(FALLBACK.encode("a")[0]) == " a"


@pytest.mark.parametrize("ids", [[128], [255], [300], BYTES.encode("😀", add_special_tokens=False), [1, 2, 200]])
def test_a_token_costs_the_same_anywhere_in_the_text(ids):
    class Counting(Tokenizer):
        decoded = 0

        def decode(self, ids, **kw):
            self.decoded += len(ids)
            return super().decode(ids, **kw)

    tokenizer, detokenizer = Counting(byte_level()), None
    detokenizer = Detokenizer(tokenizer)
    for i in ids * 1000:
        detokenizer.push(i)
    assert tokenizer.decoded < 100 * 1000 * len(ids)


# ---- stop strings --------------------------------------------------------------------------------------------


def stopped_text(text, stop):
    """The obvious definition: letter by letter, until the text ends in a stop string."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stop if text[:end].endswith(s)]
        if hits:
            return text[: end - max(map(len, hits))], True
    return text, False


@settings(max_examples=300)
@given(
    text=st.text(st.sampled_from("ab 😀"), max_size=30),
    stop=st.lists(st.text(st.sampled_from("ab 😀"), min_size=1, max_size=5), max_size=3),
)
@every_tokenizer
def test_the_text_ends_before_a_stop_string_wherever_tokens_end(tokenizer, text, stop):
    ids = tokenizer.encode(text)
    pieces, stopped = pieces_of(tokenizer, ids, stop)
    assert ("".join(pieces), stopped) == stopped_text(tokenizer.decode(ids), stop)


def test_what_may_become_a_stop_string_waits():
    detokenizer = Detokenizer(BYTES, stop="ENDE")
    ids = BYTES.encode("xENDyENDE!", add_special_tokens=False)
    assert len(ids) == 10  # one letter each
    assert [detokenizer.push(i) for i in ids] == ["x", "", "", "", "ENDy", "", "", "", "", ""]
    assert detokenizer.stopped and detokenizer.flush() == ""


def test_what_did_not_become_a_stop_string_comes_at_the_end():
    detokenizer = Detokenizer(BYTES, stop=["ENDE"])
    assert [detokenizer.push(i) for i in BYTES.encode("END", add_special_tokens=False)] == ["", "", ""]
    assert detokenizer.flush() == "END" and not detokenizer.stopped


# ---- chat ----------------------------------------------------------------------------------------------------

CHATML = """\
{% for m in messages %}
    {% if m.role not in ['user', 'assistant', 'system'] %}{{ raise_exception('no role ' + m.role) }}{% endif %}
<|im_start|>{{ m.role }}
{% generation %}{{ m.content.strip() }}{% endgeneration %}<|im_end|>
{% endfor %}
{% if tools is not none %}{{ tools | tojson }}{% endif %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
HELLO = [{"role": "user", "content": " Hi <é> "}]


def test_a_chat_is_rendered_as_transformers_does():
    jinja2 = pytest.importorskip("jinja2")
    reference = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    reference.globals["raise_exception"] = None
    source = CHATML.replace("endgeneration", "endif").replace("generation %}", "if true %}", 1)
    for go_on in (True, False):
        expected = reference.from_string(source).render(messages=HELLO, add_generation_prompt=go_on, tools=None)
        assert render_chat(CHATML, HELLO, add_generation_prompt=go_on) == expected
    assert render_chat(CHATML, HELLO) == "<|im_start|>user\nHi <é><|im_end|>\n<|im_start|>assistant\n"


def test_json_in_a_template_is_not_escaped_for_html():
    assert render_chat("{{ tools | tojson }}", [], tools=[{"a": "<é>"}]) == '[{"a": "<é>"}]'
    assert render_chat("{{ {'a': 1} | tojson(indent=1) }}", []) == '{\n "a": 1\n}'


def test_a_template_may_ask_for_the_date():
    assert len(render_chat("{{ strftime_now('%Y-%m-%d') }}", [])) == 10


@pytest.mark.parametrize("messages", [[{"role": "dog", "content": ""}], [{"content": "x"}], ["x"], [3]])
def test_a_conversation_that_the_template_refuses_is_an_invalid_request(messages):
    with pytest.raises(InvalidRequest, match="chat template"):
        render_chat(CHATML, messages)


def test_a_template_that_never_ends_is_stopped():
    endless = "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="fuel"):
        render_chat(endless, [])


def test_a_broken_template_is_a_fault_of_the_files():
    with pytest.raises(InvalidModelFiles, match="cannot be run: syntax error"):
        render_chat("{% for", [])


@pytest.mark.parametrize("place", ["jinja file", "config", "named list"])
def test_the_template_is_found_in_the_files_of_the_model(tmp_path, place):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    template = "{{ bos_token }}{{ eos_token }}|{{ messages[0].content }}"
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": None}
    if place == "config":
        config["chat_template"] = template
    if place == "named list":
        config["chat_template"] = [{"name": "default", "template": template}, {"name": "rag", "template": "no"}]
    if place == "jinja file":
        config["chat_template"] = "the file wins"
        (tmp_path / "chat_template.jinja").write_text(template)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).render_chat(HELLO) == "<s></s>| Hi <é> "


def test_a_model_without_a_template_says_so():
    with pytest.raises(InvalidRequest, match=r"no chat template.*Send plain text"):
        BYTES.render_chat(HELLO)
