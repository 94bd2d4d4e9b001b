"""Which variant runs is measured once for a processor. Whatever is wrong with what was kept costs a line in the log."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import pytest

from hibachi.backend.kernels import trial
from hibachi.backend.kernels.trial import DEFAULT, ROWS, Choice, processor, settled


class Timed:
    """Kernels whose products take as long as they are said to: seconds by rows and distance, for a panel."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds, self.distance, self.calls, self.panels = clock, seconds, None, 0, 0

    def set_distances(self, at):
        import ctypes

        self.distance = list((ctypes.c_int64 * len(ROWS)).from_address(at))

    def set_threads(self, n):
        pass

    def linear(self, *arguments):
        rows, columns = arguments[-4:-2]
        self.calls, self.panels = self.calls + 1, columns // 48
        self.clock[0] += self.seconds(rows, self.distance[ROWS.index(rows)]) * self.panels


@pytest.fixture
def clock(monkeypatch):
    time = [0.0]
    monkeypatch.setattr(trial.time, "perf_counter", lambda: time[0])
    return time


def timed(clock, **seconds):
    return {name: Timed(clock, given) for name, given in seconds.items()}


def names(candidates):
    return {name: f"{name}-1" for name in candidates}


def test_the_fastest_is_taken_with_its_distances_and_kept(clock, tmp_path):
    there = timed(clock, new=lambda rows, d: 1e-6 * rows, old=lambda rows, d: 1e-6 * rows / (1.5 if d == 0 else 1.2))
    found = settled(there, names(there), tmp_path)
    assert (found.variant, found.distances) == ("old", (0,) * 4) and found.rates["new"] == pytest.approx(
        [55.3] * 4, 0.01
    )
    assert "old" not in str(found) and "new has 55, 55, 55, 55" in str(found)
    there = timed(clock, new=lambda *_: 1, old=lambda *_: 1)
    assert settled(there, names(there), tmp_path) == found and not there["new"].calls, "measured again"


def test_what_is_hardly_faster_is_not_taken(clock, tmp_path):
    there = timed(clock, new=lambda rows, d: 1e-6 / (1 if d in DEFAULT else 1.02), old=lambda rows, d: 0.985e-6)
    found = settled(there, names(there), tmp_path)
    assert (found.variant, found.distances) == ("new", DEFAULT)


def test_a_product_is_of_as_many_panels_as_take_a_moment(clock):
    there = timed(clock, new=lambda rows, d: 1.4e-4)
    trial.trial(there, names(there), "any")
    assert there["new"].panels == 10


@pytest.mark.parametrize(("falls", "turns"), [(1, 7), (0.99, 40)])
def test_what_still_falls_is_timed_again(clock, falls, turns):
    there = timed(clock, new=lambda rows, d: 1e-2 * falls ** there["new"].calls)
    trial.trial(there, names(there), "any")
    assert there["new"].calls == turns * len(ROWS) * (3 + 5)  # usual distances, and all


def test_a_processor_is_told_from_its_kin(tmp_path):
    (tmp_path / "proc").mkdir()
    text = "model name\t: One\ncpu family\t: 26\nmodel\t\t: 2\nstepping\t: 1\n\nmodel name\t: Two\n"
    (tmp_path / "proc" / "cpuinfo").write_text(text)
    assert processor(tmp_path) == "One 26 2 1"


def another(**changes):
    kept = asdict(Choice(processor(), {"new": "new-1"}, "new", (1, 2, 3, 4), {"new": (1.0, 2.0, 3.0, 4.0)}))
    return json.dumps(kept | changes)


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ("", "is damaged"),
        ("[]", "is damaged"),
        ("{}", "is damaged"),
        ("[" * 100_000, "is damaged"),
        (another(distances=[1, 2, 3]), "is damaged"),
        (another(distances=[1, 2, 3, 2**63]), "is damaged"),
        (another(distances=[1, 2, 3, -2]), "is damaged"),
        (another(distances=[1, 2, 3, 1.5]), "is damaged"),
        (another(rates={"new": [1]}), "is damaged"),
        (another(rates=None), "is damaged"),
        (another(rates={"new": [10**400] * 4}), "is damaged"),
        (another(rates={"new": [1.0, 2.0, 3.0, float("nan")]}), "is damaged"),
        (another(rates={"new": [1.0, 2.0, 3.0, -4.0]}), "is damaged"),
        (another(variant=["new"]), "is damaged"),
        (another(variant={}), "is damaged"),
        (another(processor=None), "is damaged"),
        (another(processor="Another 1"), "is of another processor, 'Another 1'"),
        (another(variant="gone", rates={"gone": [1.0] * 4}, libraries={"gone": "gone-1"}), "names gone, which this"),
        (another(libraries={"new": "new-0"}), None),  # of another version
        (another(), ...),
    ],
)
def test_what_was_kept_and_cannot_be_used_is_told_and_measured_anew(held, said, clock, tmp_path, caplog):
    there = timed(clock, new=lambda rows, d: 1e-6)
    settled(there, names(there), tmp_path)
    [file] = tmp_path.iterdir()
    file.write_text(held)
    there["new"].calls = 0
    found = settled(there, names(there), tmp_path)
    if said is ...:
        assert found.distances == (1, 2, 3, 4) and not there["new"].calls
        return
    assert there["new"].calls and found.distances == DEFAULT
    assert [said in r.message for r in caplog.records] == ([] if said is None else [True])
    assert json.loads(file.read_text())["distances"] == [*DEFAULT], "not written anew"


def test_a_folder_that_cannot_be_written_costs_a_line(clock, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    there = timed(clock, new=lambda rows, d: 1e-6)
    assert settled(there, names(there), tmp_path / "file").variant == "new"
    assert "cannot be written" in caplog.text and len(caplog.records) == 1


@pytest.mark.parametrize("make", (os.mkdir, os.mkfifo))
def test_what_is_no_file_is_told_and_nothing_is_left_beside_it(make, clock, tmp_path, caplog):
    there = timed(clock, new=lambda rows, d: 1e-6)
    settled(there, names(there), tmp_path)
    [file] = tmp_path.iterdir()
    file.unlink()
    make(file)
    assert settled(there, names(there), tmp_path).variant == "new"
    assert "no ordinary file" in caplog.text and [*tmp_path.iterdir()] == [file]
