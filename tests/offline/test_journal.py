"""What the journal keeps: through torn and damaged lines, other processes and results that come again."""

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from hibachi.errors import ConfigError
from hibachi.offline import journal as module
from hibachi.offline.journal import Journal
from hibachi.offline.whole import Busy, into_place

HEAD = {"created": 7, "input": {"a.jsonl": "3 bytes"}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "out.jsonl.journal"


@pytest.fixture
def of():
    """of(path): a journal, which is closed in the end."""
    made = []

    def open_(path):
        made.append(Journal(path))
        return made[-1]

    yield open_
    for journal in made:
        journal.close()


@pytest.fixture
def filled(path):
    """With a head, ten results of which number 3 is an error, and a note."""
    journal = Journal(path)
    journal.head(HEAD)
    for row in range(10):
        journal.row(row, 100 + row, {"output": f"é {row}"}, failed=row == 3)
    journal.note("end", {"rows": 10})
    journal.close()
    return path


def opened(path):
    """(rows that have a result, damaged lines)"""
    journal = Journal(path)
    found = [row for row in range(20) if journal.has(row)], journal.damaged
    journal.close()
    return found


def test_everything_is_there_again(filled, of):
    journal = of(filled)
    assert journal.heads == [HEAD] and journal.notes == {"end": {"rows": 10}} and journal.damaged == []
    assert journal.done == 10 and journal.failures == 1 and list(journal.failed_rows(journal.size)) == [3]
    assert journal.result(4) == (104, {"output": "é 4"}) and journal.failed(3) and not journal.failed(4)
    assert not journal.has(10) and not journal.failed(10) and journal.size == filled.stat().st_size


def test_each_line_is_a_checksum_and_json(filled):
    for line in filled.read_bytes().splitlines():
        checksum, text = line.split(b" ", 1)
        assert int(checksum, 16) == zlib.crc32(text) and json.loads(text)[0] in ("head", "row", "error", "note")


def test_results_can_be_read_before_they_are_flushed_and_the_last_one_counts(filled, of):
    journal = of(filled)
    journal.row(3, 1, {"output": "better"})
    assert journal.result(3) == (1, {"output": "better"}) and journal.failures == 0 and journal.done == 10
    journal.row(5, 2, {"error": "worse"}, failed=True)
    journal.close()
    again = of(filled)
    assert again.result(3) == (1, {"output": "better"}) and again.failed(5) and again.done == 10


def test_rows_come_in_any_order_and_far_apart(path, of):
    journal = of(path)
    journal.head(HEAD)
    for row in (5000, 2, 1_000_000):
        journal.row(row, row, {"n": row})
    journal.close()
    again = of(path)
    assert again.done == 3 and [again.has(row) for row in (2, 3, 5000, 999_999, 1_000_000)] == [1, 0, 1, 0, 1]
    assert again.result(1_000_000) == (1_000_000, {"n": 1_000_000})


def test_long_results_and_half_surrogates(path, of):
    journal = of(path)
    journal.head(HEAD)
    values = {"output": "x" * 50_000 + "\ud800\n\u2028", "nan": float("inf")}
    journal.row(0, 0, values)
    journal.row(1, 0, {})
    assert journal.result(0) == (0, values)
    journal.close()
    assert of(path).result(0) == (0, values)


def test_a_forgotten_row_is_there_again_until_it_is_written_again(filled, of):
    journal = of(filled)
    journal.forget(3)
    journal.forget(15)
    assert not journal.has(3) and journal.failures == 0 and journal.done == 9
    journal.close()
    assert opened(filled)[0] == list(range(10))


def test_heads_divide_the_rows(filled, of):
    journal = of(filled)
    journal.head({"created": 8})
    journal.row(4, 1, {})
    journal.row(11, 1, {})
    journal.close()
    again = of(filled)
    assert [h["created"] for h in again.heads] == [7, 8]
    assert [again.segment(row) for row in (3, 4, 11)] == [0, 1, 1]


def test_begun_anew_nothing_is_left(filled, of):
    journal = of(filled)
    journal.clear()
    assert journal.heads == [] and journal.notes == {} and journal.done == 0 and not journal.has(4)
    journal.head({"created": 9})
    journal.row(1, 1, {})
    journal.close()
    again = of(filled)
    assert again.heads == [{"created": 9}] and again.done == 1 and again.result(1) == (1, {})


# ---- damage ----------------------------------------------------------------------------------------------------------


def test_wherever_it_is_cut_off_whole_lines_stay_and_it_can_be_written_on(filled, of):
    whole = filled.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for at in range(0, len(whole), 7):
        filled.write_bytes(whole[:at])
        rows, damaged = opened(filled)
        lines = sum(end <= at for end in ends)
        assert rows == list(range(min(max(lines - 1, 0), 10))) and damaged == []
        if lines:
            journal = of(filled)
            journal.row(12, 1, {"n": 12})
            journal.close()
            assert opened(filled) == ([*rows, 12], [])


@pytest.mark.parametrize("tail", [b"\0" * 4096, b"1234", b'99999999 ["row",4', b"\xff" * 100])
def test_a_tail_that_a_machine_left_as_it_died_is_dropped(filled, tail):
    whole = filled.read_bytes()
    filled.write_bytes(whole + tail)
    assert opened(filled) == (list(range(10)), []) and filled.read_bytes() == whole


@pytest.mark.parametrize("line", range(2, 12))
def test_a_line_damaged_in_the_middle_is_named_and_only_its_row_is_lost(filled, line):
    lines = filled.read_bytes().splitlines(keepends=True)
    at = sum(map(len, lines[: line - 1]))
    hurt = bytearray(lines[line - 1])
    hurt[len(hurt) // 2] ^= 1
    filled.write_bytes(b"".join([*lines[: line - 1], hurt, *lines[line:]]))
    rows, damaged = opened(filled)
    assert damaged == [(line, at)] and rows == [row for row in range(10) if row != line - 2]


def test_a_whole_line_at_the_end_that_is_damaged_is_named_too(filled, of):
    raw = bytearray(filled.read_bytes())
    raw[-3] ^= 1
    filled.write_bytes(raw)
    journal = of(filled)
    assert [line for line, _ in journal.damaged] == [12] and journal.notes == {} and journal.done == 10


def test_line_ends_that_somebody_changed_lose_nothing_silently(filled, of):
    filled.write_bytes(filled.read_bytes().replace(b"\n", b"\r\n"))
    before = filled.read_bytes()
    with pytest.raises(ConfigError, match="line 1, byte 0"):
        of(filled)
    assert filled.read_bytes() == before


def test_a_damaged_head_is_refused_and_nothing_is_touched(filled, of):
    raw = bytearray(filled.read_bytes())
    raw[40] ^= 1
    filled.write_bytes(raw)
    with pytest.raises(ConfigError, match="damaged where it says what made the run"):
        of(filled)
    assert filled.read_bytes() == raw


@pytest.mark.parametrize(
    "content",
    [b"hello\n", b"x", b"id,text\n1,2\n", b"d41d8cd98f00b204 file\n", b'{"a": 1}', b"12345678 rows\n", b"\n", b"1\n"],
)
def test_a_file_of_somebody_elses_is_refused_and_not_touched(path, content, of):
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="no journal"):
        of(path)
    assert path.read_bytes() == content


def test_a_result_that_changes_on_the_disk_meanwhile_is_noticed(filled, of):
    journal = of(filled)
    raw = filled.read_bytes().replace(b'["row",4,104', b'["row",4,105')
    with filled.open("r+b") as file:
        file.write(raw)
    with pytest.raises(ConfigError, match="row 4"):
        journal.result(4)


# ---- one process -----------------------------------------------------------------------------------------------------


def test_a_second_process_is_refused_until_the_first_has_ended(filled, of):
    journal = of(filled)
    open_it = f"from hibachi.offline.journal import Journal; Journal({str(filled)!r})"
    second = subprocess.run([sys.executable, "-c", open_it], capture_output=True, text=True)
    assert "Busy" in second.stderr and str(filled) in second.stderr
    with pytest.raises(Busy):
        of(filled)
    journal.close()
    of(filled).close()


def test_a_journal_that_says_nothing_is_removed(path, of):
    of(path).close()
    assert not path.exists()
    journal = of(path)
    journal.head(HEAD)
    journal.close()
    assert path.exists()


def test_a_file_that_its_holder_has_just_removed_is_not_used(path, monkeypatch, of):
    fstat = os.fstat
    monkeypatch.setattr(module.os, "fstat", lambda file: (path.unlink(missing_ok=True), fstat(file))[1])
    with pytest.raises(Busy):
        of(path)


def test_a_link_is_not_followed(tmp_path, path, of):
    other = tmp_path / "other"
    path.symlink_to(other)
    with pytest.raises(ConfigError, match="a link, or no regular file"):
        of(path)
    assert not other.exists() and path.is_symlink()


@pytest.fixture
def windows(monkeypatch):
    """As if this were Windows, as far as locks and reading are concerned. locked: the places of the bytes."""
    locked = []

    def locking(file, mode, n):
        if locked:
            raise PermissionError("locked")
        locked.append(os.lseek(file, 0, os.SEEK_CUR))

    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK=2))
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(os, "pread")
    return locked


def test_on_windows_a_byte_is_locked_that_no_file_has_and_results_are_read(path, of, windows):
    journal = of(path)
    with pytest.raises(Busy):
        of(path)
    journal.head(HEAD)
    journal.row(0, 1, {"n": "x" * 10_000})
    assert journal.result(0) == (1, {"n": "x" * 10_000})
    journal.row(1, 2, {"n": 5})
    assert journal.result(1) == (2, {"n": 5}) and windows[0] > 1 << 30
    journal.close()
    windows.clear()
    assert of(path).result(1) == (2, {"n": 5})


# ---- files that are whole or not there -------------------------------------------------------------------------------


def test_a_file_is_written_by_one_process_at_a_time(tmp_path):
    out, part = tmp_path / "out", tmp_path / "out.part"
    part.write_text("of a run that was killed")
    with into_place(out, lambda sealed: None) as file:
        file.write(b"first")
        with pytest.raises(Busy), into_place(out, lambda sealed: None):
            pass
        assert part.exists() and not out.exists()
    assert out.read_bytes() == b"first" and not part.exists()


def test_a_file_is_not_written_through_a_link(tmp_path):
    other, part = tmp_path / "other", tmp_path / "out.part"
    part.symlink_to(other)
    with pytest.raises(ConfigError, match="a link, or no regular file"), into_place(tmp_path / "out", lambda s: None):
        pass
    assert not other.exists() and part.is_symlink()


def test_a_link_that_somebody_is_quick_to_put_there_is_not_followed(tmp_path, monkeypatch):
    other, part = tmp_path / "other", tmp_path / "out.part"
    part.write_text("left")
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda self, **more: (unlink(self, **more), self.symlink_to(other)))
    with pytest.raises(Busy), into_place(tmp_path / "out", lambda s: None):
        pass
    assert not other.exists()


def test_what_is_written_is_the_runs_until_it_has_its_name(tmp_path):
    out = tmp_path / "out"

    def before(sealed):
        with pytest.raises(Busy), into_place(out, lambda s: None):
            pass

    with into_place(out, before) as file:
        file.write(b"first")
    assert out.read_bytes() == b"first"


def test_on_windows_a_file_takes_its_name_too(tmp_path, windows):
    with into_place(tmp_path / "out", lambda s: None) as file:
        file.write(b"x")
    assert file.closed and (tmp_path / "out").read_bytes() == b"x" and windows[0] > 1 << 30


def test_a_head_is_on_the_disk_and_so_is_the_name_of_the_file(path, of, monkeypatch):
    synced = []
    monkeypatch.setattr(module.os, "fsync", lambda file: synced.append(path.stat().st_size))
    monkeypatch.setattr(module, "sync_folder", synced.append)
    journal = of(path)
    journal.head(HEAD)
    assert synced == [journal.size, path.parent]


# ---- the disk --------------------------------------------------------------------------------------------------------


def test_what_was_written_is_flushed_at_once_and_synced_soon(filled, monkeypatch, of):
    now, synced = [0.0], []
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.os, "fsync", lambda file: synced.append(now[0]))
    journal = of(filled)
    size = filled.stat().st_size
    journal.row(11, 1, {})
    assert filled.stat().st_size == size
    journal.flush()
    assert filled.stat().st_size == journal.size > size and synced == []
    now[0] = 1.5
    journal.flush()  # there is nothing new, but that was not on the disk yet
    journal.flush()
    now[0] = 3.0
    journal.flush()
    assert synced == [1.5]
    journal.note("end", 1)
    assert synced == [1.5, 3.0]


def test_a_full_disk_is_said_with_the_name_of_the_file(filled, of):
    program = f"""if True:
        import resource, signal
        from hibachi.offline.journal import Journal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        journal = Journal({str(filled)!r})
        resource.setrlimit(resource.RLIMIT_FSIZE, (journal.size + 1000,) * 2)
        for row in range(10, 2000):
            journal.row(row, row, {{"n": row}})
            journal.flush()"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "OSError" in ended.stderr and str(filled) in ended.stderr and "File too large" in ended.stderr
    journal = of(filled)
    assert journal.damaged == [] and journal.done > 20
    assert all(journal.result(row) == (row, {"n": row}) for row in range(10, journal.done))
