"""How many threads there may be: what was set, affinity, and the quota of control groups, on samples of their files."""

import os
from pathlib import Path

import pytest

from hibachi.backend.kernels import threads
from hibachi.backend.kernels.threads import most_threads, quota

TWO, ONE = "0::{}\n", "12:cpu,cpuacct:{}\n4:memory:{}\n"


def groups(root: Path, own: str, **files: str) -> Path:
    """A machine whose process is in the group `own`; files: by path below /sys/fs/cgroup, `__` for a slash."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own)
    for path, text in files.items():
        place = root / "sys/fs/cgroup" / path.replace("__", "/").replace("_dot_", ".")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return root


@pytest.mark.parametrize(
    "limit, found", [("100000 100000", 1), ("250000 100000", 2), ("50000 100000", 1), ("max 100000", None)]
)
def test_a_quota_of_version_two_is_rounded_down(tmp_path, limit, found):
    assert quota(groups(tmp_path, TWO.format("/a/b"), a__b__cpu_dot_max=limit)) == found


def test_the_least_of_all_groups_above_counts(tmp_path):
    root = groups(tmp_path, TWO.format("/a/b"), a__cpu_dot_max="300000 100000", a__b__cpu_dot_max="max 100000")
    assert quota(root) == 3
    (root / "sys/fs/cgroup/cpu.max").write_text("200000 100000")
    assert quota(root) == 2


def test_a_container_sees_its_own_group_at_the_top(tmp_path):
    assert quota(groups(tmp_path, TWO.format("/../../docker/abc"), cpu_dot_max="150000 100000")) == 1


@pytest.mark.parametrize("limit, found", [("150000", 1), ("400000", 4), ("-1", None)])
def test_a_quota_of_version_one(tmp_path, limit, found):
    files = {"cpu__docker__cpu_dot_cfs_quota_us": limit, "cpu__docker__cpu_dot_cfs_period_us": "100000"}
    assert quota(groups(tmp_path, ONE.format("/docker", "/docker"), **files)) == found


@pytest.mark.parametrize("text", ["", "nonsense", "0 0", "1", "-1 100000", "inf 1", "nan 1", "1e300 1e-300"])
def test_files_that_say_nothing_limit_nothing(tmp_path, text):
    assert quota(groups(tmp_path, TWO.format("/"), cpu_dot_max=text)) is None


@pytest.mark.parametrize("own", ["", "\n", "nonsense\n", "0:\n", "::\n", "\x00\xff"])
def test_a_list_of_groups_that_is_none_limits_nothing(tmp_path, own):
    assert quota(groups(tmp_path, own, cpu_dot_max="100000 100000")) is None


def test_elsewhere_there_are_no_groups(tmp_path):
    assert quota(tmp_path) is None


def test_the_least_of_what_was_set_affinity_and_quota(monkeypatch):
    for name in ("HIBACHI_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "processors", lambda: 8)
    monkeypatch.setattr(threads, "quota", lambda: 5)
    assert [most_threads(n) for n in (None, 3, 6, 0)] == [5, 3, 5, 5]
    monkeypatch.setenv("OMP_NUM_THREADS", "2,1")
    assert most_threads(4) == 2
    monkeypatch.setenv("HIBACHI_THREADS", "7")
    assert most_threads(1) == 5
    monkeypatch.setenv("HIBACHI_THREADS", "many")
    assert most_threads(4) == 2
    monkeypatch.setattr(threads, "quota", lambda: None)
    monkeypatch.setattr(threads, "processors", lambda: 1)
    assert most_threads(64) == 1


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity")
def test_affinity_is_asked_for():
    assert threads.processors() == len(os.sched_getaffinity(0))


def test_the_number_of_threads_is_told_with_its_reasons(monkeypatch):
    monkeypatch.setattr(threads, "processors", lambda: 3)
    monkeypatch.setattr(threads.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(threads, "quota", lambda: None)
    for name in ("HIBACHI_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert threads.why_so_many() == "3 threads: 3 of 8 processors may be used"
    monkeypatch.setattr(threads, "quota", lambda: 1)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    told = "1 thread: 3 of 8 processors may be used, a quota of 1, 4 asked for by the environment"
    assert threads.why_so_many() == told
