"""hibachi chat with a model that reasons: thoughts stand apart from the answer."""

import io
import re
import sys

import pytest

from hibachi.cli import chat
from hibachi.cli.thoughts import ShownAnswer
from hibachi.errors import InvalidRequest
from hibachi.llm.chatformat.format import Reasoned, Said
from hibachi.llm.own import open_texts
from hibachi.request import SamplingParams

from ..serve.saying import SAYS, THINKS, told
from .test_chat import model, talk  # noqa: F401 -- a fixture

LONG = SamplingParams(temperature=0, max_tokens=300)
DEEP = told("<think>\nLet me\tsee.\x1b[2J\n</think>\n\nWell.")[0]["content"]
NEXT = told("<think>\nOn.\n</think>\n\nYes.")[0]["content"]


class Tty(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(scope="module")
def says(tmp_path_factory):
    file = tmp_path_factory.mktemp("says") / "says.py"
    file.write_text(SAYS)
    with open_texts(f"{file}:Says") as texts:
        yield texts


@pytest.fixture
def answers(says, monkeypatch, capsys):
    """answers(*lines): standard output and error, and the prompts that were sent."""

    def call(*lines, terminal=False, params=LONG, template=THINKS, out=None, submit=None):
        sent, left = [], iter(lines)
        own = type(says).submit

        def recorded(ids, *args, **more):
            sent.append(bytes(ids[0]).decode())
            return (submit or own)(says, ids, *args, **more)

        monkeypatch.setattr(says, "submit", recorded, raising=False)
        monkeypatch.setattr(chat, "_read", lambda terminal: next(left, None))
        if out is not None:
            monkeypatch.setattr(sys, "stdout", out)
        chat.talk(says, params, [], terminal, None, template)
        found = capsys.readouterr()
        return found.out if out is None else out.getvalue(), found.err, sent

    return call


def test_in_a_pipe_the_output_is_what_is_said(answers):
    out, err, sent = answers(DEEP, NEXT)
    assert out == "Well.\n\nYes.\n\n"
    assert err == "(Let me\tsee.\x1b[2J)\n(On.)\n"
    assert "<think>\nLet me\tsee.\x1b[2J\n</think>\nWell.<|end|>" in sent[1], "this template keeps thoughts"


def test_a_terminal_dims_thoughts_and_is_not_steered(answers, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out, err, _ = answers(DEEP, out=Tty())
    assert (out, err) == ("\x1b[2mLet me\tsee.\\x1b[2J\x1b[22m\n\nWell.\n\n", "")
    monkeypatch.setenv("NO_COLOR", "1")
    out, err, _ = answers(NEXT, out=Tty())
    assert (out, err) == ("(On.)\n\nYes.\n\n", "")


def test_a_limit_within_thoughts_is_told(answers):
    out, err, _ = answers(DEEP, NEXT, params=LONG.with_(max_tokens=12))
    assert out == "\n\n\n\n" and err.startswith("(Let )\n(The limit came before an answer. --max-tokens")


class Broken:
    """A stream in which Ctrl-C comes after so many pieces."""

    def __init__(self, stream, pieces):
        self._stream, self._pieces = stream, pieces
        self.choices = stream.choices

    @property
    def finish_reason(self):
        return self._stream.finish_reason

    def __iter__(self):
        for _ in range(self._pieces):
            yield next(self._stream)
        raise KeyboardInterrupt

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stream.close()


@pytest.mark.parametrize(("pieces", "kept"), [(12, False), (36, True)])
def test_an_interrupt_keeps_what_was_said_and_forgets_mere_thoughts(says, answers, pieces, kept):
    first = []

    def submit(texts, ids, *args, **more):
        [stream] = type(texts).submit(texts, ids, *args, **more)
        first.append(stream)
        return [stream if len(first) > 1 else Broken(stream, pieces)]

    text = told("<think>\nLet me see.\n</think>\n\nWell, well, well.")[0]["content"]
    out, _, sent = answers(text, NEXT, terminal=True, submit=submit)
    assert ("(stopped)" in out) is kept and ("forgotten)" in out) is not kept
    assert ("Let me see." in sent[1].rpartition("Say")[0]) is kept and "Yes." in out
    with pytest.raises(KeyboardInterrupt):
        first.clear()
        answers(text, submit=submit)


def test_a_message_that_a_template_refuses_ends_no_conversation_in_a_terminal(answers):
    refuses = "{% if 'bad' in messages[-1].content %}{{ raise_exception('no bad words') }}{% endif %}" + THINKS
    out, err, _ = answers("bad", NEXT, terminal=True, template=refuses)
    assert "no bad words" in err and out == "Yes.\n\n"
    with pytest.raises(InvalidRequest, match="no bad words"):
        answers("bad", NEXT, template=refuses)


def test_thoughts_behind_what_is_said(monkeypatch, capsys):
    out = Tty()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("NO_COLOR", "1")
    shown = ShownAnswer()
    shown.tell([Said("a"), Reasoned("b"), Reasoned("c"), Said("d"), Reasoned("e")])
    shown.end()
    assert out.getvalue() == "a\n\n(bc)\n\nd\n\n(e)"
    assert shown.message == {"role": "assistant", "content": "ad", "reasoning_content": "bce"}


THINKING = """{% for m in messages %}{{ m.role }}:
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:<think>
{% endif %}"""


def test_a_template_of_ones_own(model, tmp_path):  # noqa: F811
    (tmp_path / "own.jinja").write_text(THINKING)
    flags = ("--max-tokens", "6", "--chat-template")
    done = talk(model, *flags, str(tmp_path / "own.jinja"), stdin="Good morning.\n")
    assert (done.returncode, done.stdout) == (0, "\n\n")
    assert re.search(r"\(.{5,}\)\n\(The limit came before", done.stderr, re.DOTALL), done.stderr


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nowhere.jinja", "--chat-template nowhere.jinja: there is no such file."),
        ("unknown", "--chat-template unknown: expected a file, Jinja source, or the name of one of the model's"),
        ("{% if %}", "--chat-template: The chat template cannot be run: "),
        ("{{ raise_exception('never') }}", "The chat template refuses this conversation: never"),
    ],
)
def test_a_template_that_is_none_is_an_error_of_one_line(model, given, words, capsys):  # noqa: F811
    from hibachi.cli.main import main

    assert main(["chat", "--model", str(model), "--chat-template", given]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hibachi: {words}")
