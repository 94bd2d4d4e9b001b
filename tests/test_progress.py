"""What a person sees of long work: bars on terminals, lines in pipes, and never a failure."""

import io
import os
import subprocess
import sys
import threading
import time

import pytest

from hibachi.common import phases, progress
from hibachi.common.phases import duration, is_live, phase, phases_shown, showing_phases, size_of
from hibachi.common.progress import Progress, Screen, figure, shown

from .cli.terminal import Screen as Glass


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


class Terminal(io.StringIO):
    """columns x lines."""

    def __init__(self, columns=80, lines=24):
        super().__init__()
        self.size = columns, lines

    def isatty(self):
        return True

    def seen(self):
        glass = Glass(self.size[1])
        glass.write(self.getvalue().replace("\n", "\r\n"))  # as terminals do
        return glass.text


@pytest.fixture(autouse=True)
def sizes(monkeypatch):
    """The terminals of these tests say their own size."""
    for module in (phases, progress):
        monkeypatch.setattr(module, "size_of", lambda file: os.terminal_size(file.size))
    monkeypatch.setenv("TERM", "xterm")


# ---- in a pipe ---------------------------------------------------------------------------------------------------


def test_a_line_after_a_few_seconds_then_one_a_minute_and_one_at_the_end(clock):
    file = io.StringIO()
    bar, at = Progress(1000, "rows", file, clock=clock), []
    for second in range(200):
        before = len(file.getvalue())
        clock.now = 100.0 + second
        bar.update(second * 5, **{"tokens/s": second * 10.0})
        if len(file.getvalue()) > before:
            at.append(second)
    assert at == [5, 65, 125, 185]
    bar.close()
    bar.close()
    lines = file.getvalue().splitlines()
    assert lines[0] == "25/1,000 rows, 2 %  5 rows/s  50 tokens/s  5.0 s, 3:15 min left"
    assert lines[-1] == "ended at 995 of 1,000 rows in 3:19 min  5 rows/s  1,990 tokens/s"
    assert len(lines) == 5 and "\x1b" not in file.getvalue()


def test_without_a_total_there_is_no_end_in_sight(clock):
    file = io.StringIO()
    with Progress(None, "rows", file, clock=clock, what="reading") as bar:
        clock.now += 10
        bar.update(50)
    assert file.getvalue() == "reading  50 rows  5 rows/s  10.0 s\nreading  50 rows in 10.0 s  5 rows/s\n"


def test_a_total_that_was_a_guess_is_not_missed(clock):
    file = io.StringIO()
    bar = Progress(1000, "rows", file, clock=clock)
    clock.now += 10
    bar.update(990)
    bar.close(whole=True)
    assert file.getvalue().splitlines()[-1] == "990 rows in 10.0 s  99 rows/s"


def test_what_was_done_earlier_says_nothing_of_the_speed(clock):
    file = io.StringIO()
    bar = Progress(1000, "rows", file, clock=clock, before=900)
    clock.now += 10
    bar.update(950)
    assert file.getvalue() == "950/1,000 rows, 95 %  5 rows/s  10.0 s, 10.0 s left\n"


def test_figures_stay_and_may_be_text(clock):
    file = io.StringIO()
    bar = Progress(None, "rows", file, clock=clock)
    bar.update(0, failed=3, **{"of the cache": "41 %"})
    clock.now += 10
    bar.update(10, failed=4)
    assert file.getvalue() == "10 rows  1 rows/s  4 failed  41 % of the cache  10.0 s\n"


def test_nothing_to_do(clock):
    file = io.StringIO()
    bar = Progress(0, "rows", file, clock=clock)
    clock.now += 10
    bar.update(0)
    bar.close()
    assert file.getvalue() == "0/0 rows, 100 %  10.0 s\n0 rows in 10.0 s\n"


# ---- on a terminal -----------------------------------------------------------------------------------------------


def test_a_bar_is_drawn_in_its_place(clock):
    file = Terminal()
    bar = Progress(40, "requests", file, clock=clock)
    for i in range(0, 41, 5):
        clock.now += 1
        bar.update(i)
        share = "#" * (i // 2)
        (line, rest) = file.seen()
        assert line.startswith(f"[{share:20}] {i}/40 requests, ") and rest == ""
    bar.close()
    assert file.seen() == ["40 requests in 9.0 s  4.44 requests/s", ""]


def test_frames_are_whole_and_not_too_many(clock):
    file = Terminal()
    bar = Progress(10**6, "rows", file, clock=clock)
    for i in range(1000):
        clock.now += 0.001
        bar.update(i)
    frames = file.getvalue().split("\x1b[?7l")[1:]
    assert 9 <= len(frames) <= 11 and all(f.endswith("\x1b[?7h") for f in frames)


def test_a_line_that_stays_stands_above_the_bar(clock):
    file = Terminal()
    bar = Progress(4, "rows", file, clock=clock)
    bar.update(1)
    bar.say("row 1 failed")
    bar.say("row 2 failed")
    bar.update(2)
    clock.now += 1
    bar.update(3)
    lines = file.seen()
    assert lines[:2] == ["row 1 failed", "row 2 failed"] and "3/4 rows" in lines[2] and lines[3:] == [""]
    bar.close()
    bar.say("over")
    assert file.seen()[2].startswith("ended at 3 of 4 rows") and file.seen()[3:] == ["over", ""]


def test_a_said_line_in_a_pipe(clock):
    file = io.StringIO()
    Progress(4, "rows", file, clock=clock).say("row 1 failed")
    assert file.getvalue() == "row 1 failed\n"


def test_a_screen_shows_the_last_lines_that_fit():
    file = Terminal(80, 4)
    screen = Screen(file)
    for frame in (["a", "b"], ["c", "d", "e", "f", "g"], ["h"]):
        screen.draw(frame)
        assert file.seen() == [*frame[-3:], ""]


def test_a_screen_begins_anew_when_its_size_has_changed():
    file = Terminal(80, 10)
    screen = Screen(file)
    screen.draw(["a", "b"])
    assert "\x1b[2J" not in file.getvalue()
    file.size = 40, 10
    screen.draw(["a", "b"])
    assert file.getvalue().count("\x1b[2J\x1b[H") == 1
    screen.draw(["a", "b"])
    assert file.getvalue().count("\x1b[2J\x1b[H") == 1 and file.seen()[:2] == ["a", "b"]


# ---- what kind of file it is -------------------------------------------------------------------------------------


@pytest.mark.parametrize("term, live", [("xterm", True), ("dumb", False), (None, False)])
def test_only_a_terminal_that_understands_is_drawn_on(monkeypatch, term, live):
    monkeypatch.delenv("TERM")
    if term:
        monkeypatch.setenv("TERM", term)
    assert is_live(Terminal()) is live and not is_live(io.StringIO())


def test_what_is_no_file_any_more_is_not_live():
    closed = io.StringIO()
    closed.close()
    assert not is_live(closed) and not is_live(None)


def test_sizes(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("LINES", raising=False)
    assert size_of(io.StringIO()) == (80, 24)
    monkeypatch.setenv("COLUMNS", "120")
    assert size_of(io.StringIO()) == (120, 24)
    monkeypatch.setenv("COLUMNS", "many")
    monkeypatch.setenv("LINES", "7")
    assert size_of(io.StringIO()) == (80, 7)


class Broken(Terminal):
    def __init__(self, error):
        super().__init__()
        self.error, self.tries = error, 0

    def write(self, text):
        self.tries += 1
        raise self.error


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), OSError(5, "gone"), ValueError("closed"), UnicodeEncodeError("ascii", "é", 0, 1, "x")]
)
@pytest.mark.parametrize("live", [True, False])
def test_a_file_that_goes_away_fails_nothing(clock, error, live):
    file = Broken(error)
    with Progress(4, "rows", file, live, clock=clock) as bar:
        for i in range(4):
            clock.now += 100
            bar.update(i)
        bar.say("so")
    assert file.tries == 1  # and nothing more is tried


def test_a_program_without_standard_error(monkeypatch, clock):
    monkeypatch.setattr(sys, "stderr", None)
    with Progress(4, "rows", clock=clock) as bar:
        clock.now += 10
        bar.update(1)


# ---- tqdm --------------------------------------------------------------------------------------------------------


def test_tqdm_is_taken_where_it_is(capsys):
    pytest.importorskip("tqdm")
    with shown(4, "requests") as bar:
        for i in range(1, 5):
            bar.update(i, **{"tokens/s": 1234.5})
    err = capsys.readouterr().err
    assert "4/4" in err and "requests/s" in err and "tokens/s=1,23" in err


def test_ours_is_taken_where_it_is_not(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with shown(4, "requests") as bar:
        bar.update(4)
    out, err = capsys.readouterr()
    assert not out and err.startswith("4 requests in ")


# ---- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x, text", [(0.12345, "0.123"), (5, "5"), (12.34, "12.3"), (1234, "1,234"), (1234567.8, "1,234,568"), (0.0, "0")]
)
def test_figures(x, text):
    assert figure(x) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0.0 s"),
        (59.9, "59.9 s"),
        (59.99, "60.0 s"),
        (245, "4:05 min"),
        (11220, "3:07:00 h"),
        (1e12, "277,777:46:40 h"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


# ---- phases ------------------------------------------------------------------------------------------------------


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(phases, "SHOW_AFTER", 0.0)
    monkeypatch.setattr(phases, "_TICK", 0.001)


def until(seen, file):
    """Wait until the terminal shows it."""
    end = time.monotonic() + 10
    while not any(seen in line for line in file.seen()):
        assert time.monotonic() < end, file.seen()
        time.sleep(0.001)


def shown_lines(file):
    return [line for line in file.seen() if line]


def test_the_innermost_phase_is_shown_below_the_text_and_gone_at_its_end(hurried):
    file = Terminal()
    file.write("The answer")
    with showing_phases(file):
        assert phases_shown()
        with phase("opening a model"):
            until("opening a model  0.", file)
            with phase("reading weights", 30, "layers") as p:
                p.update(12)
                until("reading weights  12/30 layers  0.", file)
                p.update(20, "reading more")
                until("reading more  20/30 layers  0.", file)
                assert len(shown_lines(file)) == 2
            until("opening a model", file)
        assert shown_lines(file) == ["The answer"]
        file.write(" is 42.\n")
        with phase("again", measure=lambda: 1234, unit="MB"):
            until("again  1,234 MB  0.", file)
    assert shown_lines(file) == ["The answer is 42."] and not phases_shown()


def test_text_that_another_writes_meanwhile_is_whole_on_the_last_line_too(hurried):
    file = Terminal(lines=3)
    file.write("1\n2\n3 ")
    with showing_phases(file), phase("working"):
        until("working", file)
        for word in "and so on\n4\n5":
            file.write(word)
            time.sleep(0.002)
    assert [line for line in file.seen() if line] == ["1", "2", "3 and so on", "4", "5"]


def test_lines_that_come_between_two_drawings_are_not_mixed_with_a_phase(monkeypatch):
    monkeypatch.setattr(phases, "SHOW_AFTER", 0.0)
    monkeypatch.setattr(phases, "_TICK", 0.05)
    file = Terminal()
    monkeypatch.setattr(sys, "stderr", file)
    with showing_phases(), phase("opening a model of some size"):
        until("opening", file)
        print("a warning", file=sys.stderr)
        print("x", file=sys.stderr)
        assert shown_lines(file) == ["a warning", "x"]
        until("opening", file)
        sys.stderr.writelines(["y\n", "z\n"])
        assert shown_lines(file) == ["a warning", "x", "y", "z"] and sys.stderr.isatty()
    assert sys.stderr is file and shown_lines(file) == ["a warning", "x", "y", "z"]


def test_what_is_short_is_never_shown(monkeypatch):
    monkeypatch.setattr(phases, "_TICK", 0.001)
    monkeypatch.setattr(phases, "_PAUSE", 0.0)  # it does not belong to what another test has just done
    file = Terminal()
    with showing_phases(file), phase("soon done"):
        time.sleep(0.01)
    assert file.getvalue() == ""


def test_many_short_phases_are_one_long_work(monkeypatch):
    monkeypatch.setattr(phases, "SHOW_AFTER", 0.05)
    monkeypatch.setattr(phases, "_TICK", 0.001)
    file = Terminal()
    with showing_phases(file):
        for i in range(100):
            with phase(f"program {i}"):
                time.sleep(0.002)
    assert "program" in file.getvalue() and not shown_lines(file)


def test_a_pipe_sees_nothing_and_without_a_command_nobody_does(hurried):
    file = io.StringIO()
    with showing_phases(file), phase("working"):
        assert not phases_shown()
        time.sleep(0.01)
    with phase("working"):
        assert not phases_shown()
    assert file.getvalue() == ""


def test_a_narrow_terminal_sees_the_figures(hurried):
    file = Terminal(columns=20)
    with showing_phases(file), phase("compiling kernels \N{SNOWMAN}", 3, "files") as p:
        p.update(1)
        until("1/3", file)
    longest = max(len(line) for line in file.getvalue().replace("\x1b[B\r", "\n").replace("\x1b[K", "\n").splitlines())
    assert longest < 20 and "compil" in file.getvalue()


def test_a_terminal_that_goes_away_harms_nothing(hurried):
    class Gone(Terminal):
        def write(self, text):
            raise OSError("gone")

    with showing_phases(Gone()), phase("working"):
        time.sleep(0.01)


def test_a_phase_that_fails_is_over(hurried):
    file = Terminal()
    with showing_phases(file):
        with pytest.raises(KeyboardInterrupt), phase("working"):
            until("working", file)
            raise KeyboardInterrupt
        assert not shown_lines(file)
        threads = [threading.Thread(target=_some_phases, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not shown_lines(file)
    assert not [t for t in threading.enumerate() if t.name == "hibachi-phases"]


def _some_phases(i):
    for n in range(20):
        with phase(f"thread {i}", 20) as p:
            p.update(n)


ENDS = """
import os, signal, threading
from hibachi.common.phases import ending_at_once, showing_phases

threading.Thread(target=threading.Event().wait).start()  # nothing ends it
with {}:
    try:
        with ending_at_once():
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(5)
    except KeyboardInterrupt:
        os._exit(7)
os._exit(8)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows sends no such signals")
@pytest.mark.parametrize(
    "where, handler, status",
    [
        ("showing_phases()", "default_int_handler", 130),  # a command
        ("open(os.devnull)", "default_int_handler", 7),  # a program of the user's
        ("showing_phases()", "SIG_IGN", 8),  # in the background of a shell, Ctrl-C is not for it
    ],
)
def test_ctrl_c_ends_a_command_whose_threads_go_on(where, handler, status):
    program = f"import signal; signal.signal(signal.SIGINT, signal.{handler})" + ENDS.format(where)
    program = program.replace("wait(5)", "wait(0.1)") if status == 8 else program
    assert subprocess.run([sys.executable, "-c", program], timeout=30).returncode == status
