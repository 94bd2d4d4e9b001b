"""The demo and generate in a real terminal."""

import os
import re
import signal

import pytest

from hibachi.cli import demo

from .terminal import Screen, Terminal

ROW = re.compile(r"^( \d|1\d)  \S")


@pytest.fixture(scope="module")
def finished():
    """Everything that a short demo wrote to a terminal of 80x24."""
    with Terminal("demo", "--tokens", "40") as terminal:
        terminal.read()
        assert terminal.process.wait() == 0
    return terminal.output


def test_the_demo_fits_80_columns_and_24_lines(finished):
    screen = Screen(24)
    screen.write(finished)
    lines = screen.text
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert lines[0].startswith("hibachi demo: 16 prompts")
    assert all(ROW.match(line) for line in lines[1:17])
    assert [line[:24] for line in lines[17:19]] == ["16 at once  [##########]", "one by one  [##########]"]
    assert lines[19].endswith(" of 16 texts") and lines[20:] == [""]  # the cursor is where the shell goes on


def test_the_demo_is_drawn_as_it_goes(finished):
    frames = finished.split("\x1b[?7l")[1:]
    assert all(frame.count("\x1b[?7h") == 1 for frame in frames)  # the terminal is itself after every frame
    screen, shown = Screen(24), []
    for frame in frames:
        screen.write("\x1b[?7l" + frame)
        assert len(screen.text) <= 24
        shown.append(screen.text)
    running = [s[17] for s in shown if len(s) > 17 and re.search(r"^16 at once .* batch \d+/16$", s[17])]
    counts = [int(re.search(r"(\d+)/640 tokens", line)[1]) for line in running]
    assert counts and counts == sorted(counts)


def test_each_line_shows_its_prompt_and_its_newest_words(finished):
    screen = Screen(24)
    screen.write(finished)
    for line, prompt in zip(screen.text[1:17], demo.PROMPTS, strict=True):
        assert line[4:].startswith(prompt[:25]) and "…" in line
    assert finished.count("\x1b[1m") == finished.count("\x1b[22m") > 0  # prompts are bold


@pytest.mark.parametrize("rows, columns", [(24, 40), (10, 80), (5, 20)])
def test_a_small_terminal_shows_what_fits(rows, columns):
    with Terminal("demo", "--tokens", "2", rows=rows, columns=columns) as terminal:
        *frames, rest = terminal.read().split("\x1b[?7h")
        assert terminal.process.wait() == 0
    screen = Screen(rows)
    for frame in frames:
        screen.write(frame)
        assert len(screen.text) <= rows
    assert rest == "" and screen.text[-2].endswith(" of 16 texts")  # clipped by the terminal, not by us
    texts = [line for line in screen.text if ROW.match(line)]
    assert len(texts) == min(16, rows - 4) and max(map(len, texts)) <= max(columns, 12)


def test_the_view_follows_a_resize():
    with Terminal("demo", "--tokens", "300") as terminal:
        terminal.read(until="tokens/s")
        terminal.resize(22, 50)
        clear = "\x1b[2J\x1b[H"
        terminal.read(until=clear)
        terminal.output = terminal.output[terminal.output.index(clear) :]
        terminal.read(until="\x1b[?7h")
        terminal.process.send_signal(signal.SIGINT)
        terminal.read()
    screen = Screen(22)
    screen.write(terminal.output)
    assert len(screen.text) <= 22 and max(len(line) for line in screen.text if ROW.match(line)) <= 50


def test_interrupting_the_demo_is_clean():
    with Terminal("demo", "--tokens", "300") as terminal:
        terminal.read(until="tokens/s")
        terminal.process.send_signal(signal.SIGINT)
        output = terminal.read()
        assert terminal.process.wait() == 130
    assert "Traceback" not in output and output.endswith("\x1b[?7h\r\n")


def test_no_colour_where_it_is_not_wanted():
    with Terminal("demo", "--tokens", "1", NO_COLOR="1") as terminal:
        assert "m" not in re.findall(r"\x1b\[[?\d;]*([A-Za-z])", terminal.read())


@pytest.mark.parametrize("way", ["dumb", "--plain"])
def test_no_escapes_where_they_are_not_understood(way):
    plain, term = (["--plain"], "xterm") if way == "--plain" else ([], way)
    with Terminal("demo", "--tokens", "1", *plain, TERM=term) as terminal:
        output = terminal.read()
    assert "\x1b" not in output and " of 16 texts" in output


def test_interrupting_generate_ends_its_line():
    with Terminal("generate", "--prompt", "She was", "--max-tokens", "480", "--ignore-eos") as terminal:
        terminal.read(until=" ")
        terminal.process.send_signal(signal.SIGINT)
        output = terminal.read()
        assert terminal.process.wait() == 130
    assert "Traceback" not in output and output.endswith("\r\n")


def test_generate_asks_for_a_prompt():
    with Terminal("generate", "--max-tokens", "3") as terminal:
        terminal.read(until="Type the prompt, then Ctrl-D.")
        os.write(terminal.master, b"She was\n\x04")
        terminal.read()
        assert terminal.process.wait() == 0


@pytest.mark.parametrize(
    "prompt, text, width, line",
    [
        ("Go on", " now", 20, "[Go on] now"),
        ("Go on", " now\n\nand\tthen", 20, "[Go on] now and then"),
        ("Go on", " 456 123456789 and then", 20, "[Go on]…56789 and then"),
        ("A long prompt, yes", " and more", 20, "[A long]… yes and more"),
        ("Go on", " \x1b[2J\x07", 20, "[Go on] ?[2J?"),
    ],
)
def test_a_line_shows_the_beginning_of_the_prompt_and_the_end_of_the_text(monkeypatch, prompt, text, width, line):
    monkeypatch.delenv("NO_COLOR", raising=False)
    got = demo.newest(prompt, text, width)
    assert got.replace("\x1b[1m", "[").replace("\x1b[22m", "]") == line
