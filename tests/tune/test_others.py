"""Others who have the processors while something is timed are noticed."""

import os
import sys
import time

import pytest

from hibachi.llm.tune.load import Watch

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="this system does not say")


def stat(root, *busy):
    """A file as Linux writes it: user time of processors in ticks, and much that is none of it."""
    (root / "proc").mkdir(exist_ok=True)
    lines = [f"cpu{n} {ticks} 0 0 {10**6} {10**5} 0 0 0 7 7" for n, ticks in enumerate(busy)]
    (root / "proc/stat").write_text("\n".join(["cpu 9 9 9 9 9 9 9 9", *lines, "intr 1", ""]))


@linux
def test_what_others_had_of_the_processors_that_may_be_used(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2})
    clock = [100.0, 50.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(time, "process_time", lambda: clock[1])
    each = os.sysconf("SC_CLK_TCK")
    stat(tmp_path, 1000, 1000, 1000)
    watch = Watch(tmp_path)
    clock[:] = 110.0, 53.0  # ten seconds, of which this process computed three
    stat(tmp_path, 1000 + 3 * each, 1000 + 10 * each, 1000)
    assert watch.others() == pytest.approx(0.0)  # the second processor is not ours
    stat(tmp_path, 1000 + 8 * each, 1000, 1000 + 5 * each)
    assert watch.others() == pytest.approx(1.0)


@pytest.mark.parametrize("text", [None, "", "cpu0 no number", "cpu 1 2 3"])
def test_a_system_that_does_not_say(tmp_path, text):
    if text is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/stat").write_text(text)
    assert Watch(tmp_path).others() is None
