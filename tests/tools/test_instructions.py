"""What system and developer say, in the templates of many models: it is shown and moves nothing."""

import json
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("minijinja")

from hibachi.errors import InvalidRequest
from hibachi.llm.chatformat.errors import BadField
from hibachi.llm.chatformat.talk import Talk
from hibachi.llm.tokenizers import render_chat

TESTS = Path(__file__).parents[1]
OURS = [*(TESTS / "data" / "chat_templates").glob("*.jinja"), *(TESTS / "tools" / "templates").glob("*.jinja")]
FETCHED = sorted((TESTS.parent / ".templates").glob("*.jinja"))
ROLES = {
    "s": "system",
    "d": "developer",
    "u": "user",
    "a": "assistant",
    "c": "assistant",
    "t": "tool",
    "e": "assistant",
}
# By the letters of ROLES; c: calls a tool; e: says nothing.
CONVERSATIONS = {
    "one system": "su",
    "two systems": "ssu",
    "system, then developer": "sdu",
    "two developers": "ddu",
    "a later system": "uasu",
    "a later developer": "suadu",
    "two of the user": "uu",
    "one developer": "du",
    "the first request of Codex": "sdduu",
    "later requests of Codex": "sdduuaduasdu",
    "system behind the user": "usausa",
    "system at the end": "suasu" + "as",
    "an answer first": "auau",
    "system, then an answer": "saduau",
    "empty answers": "ueu" + "eeu" + "edu",
}
WITH_TOOLS = {
    "system behind a result": "suctsau",
    "developer between call and result": "ucdtau",
    "a developer behind a result, then the user": "suctdu",
    "systems among two calls": "uctssctdau",
    "the user behind a result": "uctu" + "auctctu",
    "an empty answer behind a result": "ucteu",
}
TOOLS = [
    {"type": "function", "function": {"name": "look_up", "description": "d", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "description": "c"}}, "required": ["city"]}}}
]  # fmt: skip


class Words:
    """What of a tokenizer a conversation needs. rendered: how many times it was."""

    special_ids = ()

    def __init__(self, template):
        self.chat_templates = {"default": template}
        self.rendered = 0

    def render_chat(self, messages, **variables):
        self.rendered += 1
        given = {"bos_token": "<s>", "eos_token": "</s>", "strftime_now": 1.7e9, **variables}
        return render_chat(self.chat_templates["default"], messages, **given)

    guarded = bare = staticmethod(str)

    def split_special(self, text):
        return [text]


def conversation(letters):
    found = []
    for i, letter in enumerate(letters):
        m = {"role": ROLES[letter], "content": "" if letter == "e" else word(i)}
        if letter == "c":
            function = {"name": "look_up", "arguments": {"city": word(i)}}
            m |= {"content": None, "tool_calls": [{"id": f"call_{i:05}", "type": "function", "function": function}]}
            m["reasoning_content"] = "So?"
        if letter == "t":
            m["tool_call_id"] = f"call_{letters.rindex('c', 0, i):05}"
        found.append(m)
    return found


def word(i):
    return f"Quand{chr(97 + i)}rpi says this."


def text(talk, letters, begin=True):
    more = {"tools": TOOLS} if "c" in letters else {}
    return talk.prompt_text(conversation(letters), {"add_generation_prompt": begin, **more})


def lost(template, kinds):
    """Conversations in which something is missing, and those that are refused."""
    talk, missing, refused = Talk(Words(template)), [], []
    for kind, letters in kinds.items():
        try:
            shown = text(talk, letters)
        except InvalidRequest:
            refused.append(kind)
        else:
            missing += [(kind, i) for i in range(len(letters)) if letters[i] != "e" and word(i) not in shown]
    return missing, refused


@pytest.mark.parametrize("file", OURS + FETCHED, ids=lambda f: f.stem)
def test_all_is_shown(file):
    assert lost(file.read_text(), CONVERSATIONS) == ([], [])


@pytest.mark.skipif(not FETCHED, reason="the templates are not there: make .templates/fetched")
def test_beside_calls_all_is_shown_too():
    for file in FETCHED:
        if lost(file.read_text(), {"no system": "uctau"}) == ([], []):  # of those that take calls at all
            assert lost(file.read_text(), WITH_TOOLS) == ([], []), file.stem


@pytest.mark.parametrize("file", OURS + FETCHED, ids=lambda f: f.stem)
def test_one_system_message_has_the_bytes_that_the_template_gives_it(file):
    template = file.read_text()
    for letters in ("su", "suau", "u", "uau"):
        with suppress(InvalidRequest):
            alone = Words(template).render_chat(conversation(letters), add_generation_prompt=False)
            if all(word(i) in alone for i in range(len(letters))):
                assert text(Talk(Words(template)), letters, False) == alone


@pytest.mark.parametrize("file", OURS + FETCHED, ids=lambda f: f.stem)
def test_what_comes_later_changes_nothing_in_front(file):
    """But what a message of the user changes, too."""
    talk = Talk(Words(file.read_text()))

    def kept(front, behind):
        """Up to where the texts are the same, as far as to the end of `front`."""
        before, after = text(talk, front, False), text(talk, front + behind, False)
        end = before.index(word(len(front) - 1)) + len(word(0))
        return next((i for i in range(end) if before[i] != after[i : i + 1]), end) - end

    for front in ("ua", "sua", "sddua", "uasua", "suaduadua"):
        for speaker in "sd":
            assert kept(front, f"{speaker}u") >= kept(front, "u"), (front, speaker)
    with suppress(InvalidRequest, ValueError):  # of templates that take no calls, or show no results
        for front in ("uct", "suct"):
            assert kept(front, "s") == 0 and kept(front, "da") >= kept(front, "a"), front


def test_a_mark_says_what_the_user_did_not_say():
    alternates = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    marked = "<system-message>\n{}\n</system-message>"
    assert text(Talk(Words(alternates)), "suadu") == (
        f"[user]{marked.format(word(0))}\n\n{word(1)}[assistant]{word(2)}[user]{marked.format(word(3))}\n\n{word(4)}"
    )
    assert text(Talk(Words(alternates)), "sda").startswith(text(Talk(Words(alternates)), "sd"))


def test_a_text_that_no_form_shows_is_refused_by_name():
    hides = "{% for m in messages %}[{{ m.role }}]{{ m.content[:40] }}{% endfor %}"
    led = [{"role": "system", "content": "Be brief. " * 9}, {"role": "user", "content": "Hi"}]
    for messages, at in ((led, 0), ([led[1], *led], 1)):
        with pytest.raises(BadField, match="template does not show what system says here") as caught:
            Talk(Words(hides)).prompt_text(messages, {})
        assert caught.value.path == ("messages", at, "content")
    changes = "{% for m in messages %}[{{ m.role }}]{{ m.content | tojson }}{% endfor %}"
    said = [{"role": "system", "content": 'A "quoted"\nword'}, led[1]]
    assert Talk(Words(changes)).prompt_text(said, {}) == f"[system]{json.dumps(said[0]['content'])}" + '[user]"Hi"'


@pytest.mark.parametrize("letters", ["s", "us", "uas", "d", "sd"])
@pytest.mark.parametrize("name", ["qwen2.5-instruct", "llama-3-instruct", "mistral-instruct"])
def test_ten_thousand_system_messages_are_rendered_once(name, letters):
    words = Words((TESTS / "data" / "chat_templates" / f"{name}.jinja").read_text())
    talk = Talk(words)
    many = (letters * 10_000)[: letters.count("s") * 10_000 or 10_000] + "u"
    messages = [{"role": ROLES[letter], "content": f"Say {i}."} for i, letter in enumerate(many)]
    first = talk.prompt_text(messages, {})  # learns what the template does
    words.rendered = 0
    began = time.process_time()
    assert talk.prompt_text(messages, {}) == first and f"Say {len(many) - 1}." in first
    assert words.rendered == 1
    assert time.process_time() - began < 1


@pytest.mark.parametrize("file", OURS + FETCHED, ids=lambda f: f.stem)
def test_a_call_whose_arguments_were_cut_off_is_shown_as_the_template_can(file):
    talk, variables = Talk(Words(file.read_text())), {"tools": TOOLS, "add_generation_prompt": True}
    messages = conversation("uctau")
    function = messages[1]["tool_calls"][0]["function"]
    try:
        talk.prompt_text(messages, variables)
    except InvalidRequest:
        return  # it takes no calls
    for arguments in ('{"city": "Quand', '[["Quand"]]', "Quand{{", '{"a' + '"\\' * 9):
        function["arguments"] = arguments
        text = talk.prompt_text(messages, variables)
        shown = text.partition(word(0))[2].partition(word(2))[0]
        assert "look_up" in shown
        forms = (arguments, json.dumps(arguments)[1:-1])
        function["arguments"] = {}
        assert any(form in shown for form in forms) or text == talk.prompt_text(messages, variables)
