"""Runs in processes of their own: engines that die or hang, signals, pipes, and what is left behind."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .made import MODELS, PLAIN, lines

COMMAND = (sys.executable, "-c", "import sys; from hibachi.cli.main import main; sys.exit(main())", "run-batch")
CHILD = ("--engine", "child", *PLAIN[2:])


class Batch:
    """Starts runs in a folder. Ends what it started."""

    def __init__(self, folder):
        self.folder, self.started = folder, []
        (folder / "models.py").write_text(MODELS)
        self.write("\n".join(lines()) + "\n")

    def write(self, text, name="in.jsonl"):
        (self.folder / name).write_text(text)

    def start(self, *more, model="Letters", options=CHILD, i="in.jsonl", o="out.jsonl", **how):
        argv = [*COMMAND, "-i", i, "-o", o, *options, *more, "--model", f"./models.py:{model}"]
        process = subprocess.Popen(
            argv,
            cwd=self.folder,
            env=os.environ | {"SOURCE_DATE_EPOCH": "1700000000"},
            stderr=subprocess.PIPE,
            **({"stdout": subprocess.PIPE} | how),
        )
        self.started.append(process)
        return process

    def __call__(self, *more, data=None, **how):
        """(exit status, what it said)"""
        process = self.start(*more, **how)
        out, err = process.communicate(data, timeout=60)
        self.out = out
        return process.returncode, err.decode() + (out or b"").decode(errors="replace")

    def rows(self, name="out.jsonl"):
        return [json.loads(line) for line in (self.folder / name).read_bytes().splitlines()]

    def fresh(self):
        for path in self.folder.glob("out.*"):
            path.unlink()

    def wait_for(self, name):
        """What a model wrote into a file, once it is there."""
        path, end = self.folder / name, time.monotonic() + 30
        while not (path.exists() and path.read_text()):
            assert time.monotonic() < end, f"no {name}"
            time.sleep(0.01)
        return path.read_text()

    def close(self):
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


@pytest.fixture
def batch(tmp_path):
    batch = Batch(tmp_path)
    yield batch
    batch.close()


def expected(batch, model="Letters", **more):
    status, said = batch(model=model, options=PLAIN, **more)
    assert status in (0, 3), said
    found = batch.rows()
    batch.fresh()
    return found


def children(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid, seconds=5.0):
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


# ---- the engine's process --------------------------------------------------------------------------------------------


def deadly(n=12, guilty=(4,)):
    rows = ({"id": i, "tokens": [31, 31] if i in guilty else [i % 9, i % 4, 1]} for i in range(n))
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.slow
def test_a_row_that_kills_the_engine_becomes_an_error_and_all_others_are_right(batch):
    batch.write(deadly())
    want = expected(batch)
    status, said = batch("--max-num-seqs", "2", model="Deadly")
    assert status == 3, said
    rows = batch.rows()
    assert rows[4]["error"].startswith("in.jsonl, line 5: The engine was lost 3 times") and rows[4]["output"] is None
    assert [r for r in rows if r["id"] != 4] == [r for r in want if r["id"] != 4]
    assert batch(model="Deadly")[0] == 0, "it is finished, whatever failed"


@pytest.mark.slow
def test_many_rows_that_kill_the_engine(batch):
    guilty = (0, 1, 5, 11)
    batch.write(deadly(30, guilty))
    want = expected(batch)
    status, said = batch("--max-num-seqs", "2", model="Deadly")
    assert status == 3, said
    rows = batch.rows()
    assert [r["id"] for r in rows if r["error"]] == [*guilty]
    assert [r for r in rows if not r["error"]] == [r for r in want if r["id"] not in guilty]


@pytest.mark.slow
def test_an_engine_that_dies_with_every_row_ends_the_run_and_no_row_is_blamed(batch):
    batch.write(deadly(9, range(9)))
    status, said = batch("--max-num-seqs", "8", model="Deadly")
    assert status == 1 and "no row was computed" in said and "Run the same command again" in said
    assert not (batch.folder / "out.jsonl").exists()
    assert len((batch.folder / "out.jsonl.journal").read_bytes().splitlines()) == 1, "the head"


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 4])
def test_an_engine_that_is_killed_from_outside_is_started_again(batch, times):
    want = expected(batch)
    process = batch.start("--max-num-seqs", "2", model="Slow")
    journal, killed, size = batch.folder / "out.jsonl.journal", 0, 2000
    while process.poll() is None:
        if killed < times and journal.exists() and journal.stat().st_size > size and children(process.pid):
            os.kill(children(process.pid)[0], signal.SIGKILL)
            killed, size = killed + 1, journal.stat().st_size + 400
        time.sleep(0.002)
    assert process.wait() == 3 and killed == times
    assert batch.rows() == want, process.stderr.read().decode()


@pytest.mark.slow
def test_killed_with_its_engine_at_random_times(batch):
    draw, want, kills = random.Random(7), expected(batch, model="Slow"), 0
    journal, done, longest = batch.folder / "out.jsonl.journal", 0, 2.5  # bytes; seconds
    while True:
        process = batch.start("--max-num-seqs", "2", model="Slow")
        try:
            assert process.wait(draw.uniform(0.3, longest)) == 3
            break
        except subprocess.TimeoutExpired:
            engines = children(process.pid)
            process.kill()
            process.wait()
            kills += 1
            assert all(map(ends, engines)) and kills < 50
            before, done = done, journal.stat().st_size if journal.exists() else 0
            if done <= before:  # a busy machine takes longer than that to begin
                longest *= 1.3
    assert kills and batch.rows() == want


@pytest.mark.slow
def test_an_engine_that_hangs_is_taken_for_lost(batch):
    batch.write(deadly())
    want = expected(batch)
    (batch.folder / "hang").touch()
    process = batch.start("--max-num-seqs", "2", "--stall-after", "1", model="Hanging")
    pid = int(batch.wait_for("hangs"))
    (batch.folder / "hang").unlink()
    assert process.wait(60) == 0 and not alive(pid)
    assert batch.rows() == want


@pytest.mark.slow
def test_a_row_with_which_the_engine_always_hangs_becomes_an_error(batch):
    batch.write(deadly())
    want = expected(batch)
    (batch.folder / "hang").touch()
    status, said = batch("--max-num-seqs", "2", "--stall-after", "0.5", model="Hanging")
    assert status == 3, said
    rows = batch.rows()
    assert rows[4]["error"].startswith("in.jsonl, line 5: The engine was lost 3 times")
    assert [r for r in rows if r["id"] != 4] == [r for r in want if r["id"] != 4]


def test_no_engine_outlives_its_killed_parent_not_even_in_a_long_step(batch):
    batch.write(deadly())
    (batch.folder / "hang").touch()
    process = batch.start(model="Hanging")
    engine = int(batch.wait_for("hangs"))
    assert engine in children(process.pid) and alive(engine)
    process.kill()
    assert ends(engine)
    (batch.folder / "hang").unlink()
    assert batch(model="Hanging", options=CHILD)[0] == 0, "the journal is free again"


def test_no_engine_outlives_a_parent_that_is_killed_while_it_loads(batch):
    process = batch.start(model="Loading")
    engine = int(batch.wait_for("loads"))
    process.kill()
    assert ends(engine)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_the_engine_loads_ends_both_at_once(batch, number, status):
    process = batch.start(model="Loading")
    engine = int(batch.wait_for("loads"))
    process.send_signal(number)
    assert process.wait(10) == status and ends(engine)
    assert b"Traceback" not in process.stderr.read()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_two_signals_end_both_at_once_though_the_engine_is_in_a_long_step(batch, number, status):
    batch.write(deadly())
    (batch.folder / "hang").touch()
    process = batch.start(model="Hanging")
    engine = int(batch.wait_for("hangs"))
    process.send_signal(number)
    time.sleep(0.5)
    assert process.poll() is None, "what runs is finished"
    process.send_signal(number)
    began = time.monotonic()
    assert process.wait(20) == status and ends(engine)
    assert time.monotonic() - began < 8
    assert b"Traceback" not in process.stderr.read()


# ---- one at a time ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_process_on_the_same_output_is_refused(batch):
    batch.write(deadly())
    (batch.folder / "hang").touch()
    process = batch.start(model="Hanging")
    batch.wait_for("hangs")
    status, said = batch(options=PLAIN, model="Hanging")
    assert status == 1 and "Another process is at work on this output" in said
    assert process.poll() is None


# ---- pipes -----------------------------------------------------------------------------------------------------------


def test_a_reader_that_has_seen_enough_ends_the_run_quietly(batch):
    batch.write("".join(json.dumps({"tokens": [i % 9, 1], "note": "x" * 3000}) + "\n" for i in range(400)))
    process = batch.start(options=PLAIN, o="-")
    assert process.stdout.read(100)
    process.stdout.close()
    assert process.wait(30) == 141
    said = process.stderr.read().decode()
    assert "Errno" not in said and "Traceback" not in said and "begins anew." in said


@pytest.mark.parametrize("closed", ["<&-", ">&-"])
def test_standard_streams_that_are_closed(batch, closed):
    command = " ".join(
        f"'{word}'"
        for word in [*COMMAND, "-i", "-", "-o", "-", *PLAIN, "--model", "./models.py:Letters", "--max-tokens", "1"]
    )
    ended = subprocess.run(
        ["sh", "-c", f"{command} {closed}"], cwd=batch.folder, input=b'{"tokens": [1]}\n', capture_output=True
    )
    assert ended.returncode in (0, 1) and b"Traceback" not in ended.stderr, ended.stderr
