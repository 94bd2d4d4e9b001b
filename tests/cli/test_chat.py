"""hibachi chat: in a terminal, and with standard input as the conversation."""

import io
import os
import select
import shutil
import signal
import subprocess
import sys

import pytest

import hibachi
from hibachi.cli import chat
from hibachi.cli.main import main
from hibachi.errors import ConfigError
from hibachi.llm.model.files import TINY

from .terminal import Terminal

TEMPLATE = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}answer:{% endif %}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The tiny model with a chat template, which makes no conversation partner of it, but a model that answers."""
    folder = shutil.copytree(TINY, tmp_path_factory.mktemp("chat") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def answers(model):
    """What it answers, greedily, in two turns."""
    params = hibachi.SamplingParams(temperature=0, max_tokens=6)
    with hibachi.LLM(model) as llm:
        talk = [{"role": "user", "content": "Good morning."}]
        [first] = llm.chat(talk, params)
        talk += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "How is Emma?"}]
        [second] = llm.chat(talk, params)
        return first.text, second.text


def talk(model, *args, stdin):
    command = [sys.executable, "-m", "hibachi", "chat", "--model", str(model), "--temperature", "0", *args]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60)


def write(terminal, text):
    os.write(terminal.master, text.encode())


def test_lines_of_standard_input_are_the_conversation(model, answers):
    done = talk(model, "--max-tokens", "6", stdin="Good morning.\n\nHow is Emma?\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{answers[0]}\n\n{answers[1]}\n\n", "")


def test_clear_forgets_and_quit_ends(model, answers):
    done = talk(model, "--max-tokens", "6", stdin="Good morning.\n/clear\nGood morning.\n/quit\nHow is Emma?\n")
    assert (done.returncode, done.stdout) == (0, f"{answers[0]}\n\n{answers[0]}\n\n")


def test_a_system_message_comes_first(model):
    params = hibachi.SamplingParams(temperature=0, max_tokens=6)
    with hibachi.LLM(model) as llm:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Good morning."}]
        [wanted] = llm.chat(messages, params)
    done = talk(model, "--max-tokens", "6", "--system", "Be brief.", stdin="Good morning.\n")
    assert done.stdout == f"{wanted.text}\n\n"


def test_a_conversation_that_has_grown_too_long_says_so_and_goes_on(model, answers):
    done = talk(model, "--max-tokens", "6", stdin=f"{'Good morning. ' * 400}\nGood morning.\n")
    assert (done.returncode, done.stdout) == (0, f"{answers[0]}\n\n")
    assert "/clear begins a new one" in done.stderr


def test_a_model_without_a_template_is_refused_at_once():
    done = talk("tiny", stdin="Good morning.\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("hibachi: This model has no chat template")


def test_in_a_terminal_answers_stream_and_control_c_stops_only_the_answer(model, answers):
    with Terminal("chat", "--model", str(model), "--temperature", "0", "--max-tokens", "400") as terminal:
        assert "Ctrl-D ends the conversation" in terminal.read(until="> ")
        write(terminal, "Good morning.\n")
        terminal.read(until=answers[0].replace("\n", "\r\n"))
        terminal.process.send_signal(signal.SIGINT)
        terminal.read(until="(stopped)\r\n\r\n> ")
        write(terminal, "half a li")
        terminal.read(until="half a li")
        while not select.select([terminal.master], [], [], 1)[0]:  # Python notes one that comes too early too late
            terminal.process.send_signal(signal.SIGINT)
        terminal.read(until="half a li\r\n> ")  # the line is dropped
        write(terminal, "\x04")
        terminal.read()
        assert terminal.process.wait() == 0


def test_without_a_model_it_takes_what_make_chat_fetched_or_says_how(model, answers, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(chat, "__file__", str(tmp_path / "checkout" / "hibachi" / "cli" / "chat.py"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["chat"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("hibachi: `hibachi chat` needs a model: run `make chat`") and "--model" in line
    for where in ("checkout", "here"):  # the working directory comes first
        shutil.copytree(model, tmp_path / where / ".smollm2")
        if where == "checkout":
            with pytest.raises(ConfigError):
                chat.fetched()  # `make chat` was interrupted
        (tmp_path / where / ".smollm2" / "fetched").touch()
        assert chat.fetched().absolute() == tmp_path / where / ".smollm2"
        if where == "checkout":
            monkeypatch.setattr("sys.stdin", io.StringIO("Good morning.\n"))
            assert main(["chat", "--temperature", "0", "--max-tokens", "6"]) == 0
            assert capsys.readouterr().out == f"{answers[0]}\n\n"


def test_the_recommended_sampling_holds_unless_another_is_given(model, monkeypatch):
    taken = []
    monkeypatch.setattr(chat, "talk", lambda llm, params, *_: taken.append((params.temperature, params.top_p)))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    named = shutil.copytree(model, model.parent / "SmolLM2")
    (named / "generation_config.json").unlink()
    for args in ([], ["--temperature", "1"]):
        assert main(["chat", "--model", str(named), *args]) == 0
    assert taken == [(0.2, 0.9), (1.0, 0.9)]
