"""A run that is ended anywhere and begun again leaves what an uninterrupted one does."""

import collections
import gzip
import json
import os
import random
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from hibachi.backend.kernels.library import NUMERICS, possible
from hibachi.llm.model import MEANING
from hibachi.offline.files.table import NAMES

from .made import MODELS, PLAIN, SLOW, lines


@pytest.fixture(scope="module")
def forks():
    """What runs `hibachi run-batch` fast; see killed.py."""
    script = Path(__file__).with_name("killed.py")
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.stdin.close()


class Runs:
    """Runs in one folder."""

    def __init__(self, forks, folder):
        self._forks, self.folder = forks, folder
        (folder / "models.py").write_text(MODELS)
        (folder / "stdin").write_text("")
        self.write("\n".join(lines()) + "\n")

    def write(self, text, name="in.jsonl"):
        (self.folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    def __call__(self, *more, model="Letters", i="in.jsonl", o="out.jsonl", plain=PLAIN, **job):
        """Returns the exit status, negative for a signal."""
        name = model if model.islower() else f"./models.py:{model}"
        argv = ["-i", *i.split(), "-o", o, *plain, *more, "--model", name]
        print(json.dumps({"argv": argv, "cwd": str(self.folder), **job}), file=self._forks.stdin, flush=True)
        return int(self._forks.stdout.readline())

    def said(self):
        return "".join((self.folder / name).read_text() for name in ("stdout", "stderr"))

    def content(self, name="out.jsonl"):
        return (self.folder / name).read_bytes()

    def rows(self, name="out.jsonl"):
        return [json.loads(line) for line in self.content(name).splitlines()]

    def computed(self, name="out.jsonl"):
        """How often a result of each row came into the journal."""
        found = collections.Counter()
        for line in self.content(name + ".journal").splitlines(keepends=True):
            if line.endswith(b"\n") and line[9:].startswith((b'["row"', b'["error"')):
                found[json.loads(line[9:])[1]] += 1
        return dict(found)

    def fresh(self):
        """As if nothing had been run."""
        for path in self.folder.glob("out.*"):
            path.unlink()

    def places(self, *more, **job):
        """The names of all places that such a run passes; undone afterwards."""
        log = self.folder / "log"
        assert self(*more, log=str(log), **job) in (0, 3)
        return log.read_text().splitlines()


@pytest.fixture
def runs(forks, tmp_path):
    return Runs(forks, tmp_path)


def clean(runs, *more, **job):
    """What an uninterrupted run leaves; undone."""
    o = job.get("o", "out.jsonl")
    assert runs(*more, **job) == 3, runs.said()
    found = runs.content(o)
    runs.fresh()
    return found


# ---- killed ----------------------------------------------------------------------------------------------------------

ONCE = [
    "opened .journal",
    "loading",
    "in a line of head",
    "before fsync .journal",
    "after fsync folder",
    "in a line of row",
    "in a line of error",
    "all computed",
    "opened .part",
    "writing",
    "before fsync .part",
    "after fsync .part",
    "in a line of note",
    "before rename .jsonl",
    "after rename .jsonl",
    "before the exit",
]
SOME = [ONCE[i] for i in (2, 4, 5, 7, 9, 12, 13, 14)]


def killed_and_resumed(runs, place, expected, *more, **job):
    assert runs(*more, kill_at=place, **job) == -9, f"no place {place}: {runs.said()}"
    assert runs(*more, **job) in (0, 3), runs.said()
    o = job.get("o", "out.jsonl")
    assert runs.content(o) == expected, place
    assert set(runs.computed(o).values()) == {1} and len(runs.computed(o)) == 40, place
    assert not list(runs.folder.glob("*.part"))
    assert runs(*more, **job) == 0 and "is finished: 40 rows, 4 failed. There was nothing to do." in runs.said()
    runs.fresh()


def test_killed_wherever_a_file_changes_hands(runs):
    expected = clean(runs)
    assert len(expected.splitlines()) == 40
    for place in SOME:
        killed_and_resumed(runs, place, expected)


@pytest.mark.slow
def test_the_places_are_all_that_there_are(runs):
    assert set(runs.places()) <= {*ONCE, "after fsync .journal", "before fsync folder"}


def test_killed_at_random_times_again_and_again(runs):
    draw, expected, kills = random.Random(1), clean(runs, *SLOW, model="Slow"), 0
    while runs(*SLOW, model="Slow", kill_after=draw.uniform(0.1, 0.4)) == -9:
        kills += 1
        assert kills < 50
    assert kills and runs.content() == expected and set(runs.computed().values()) == {1}


@pytest.mark.slow
@pytest.mark.parametrize("o", [f"out.{name}" for name in (*NAMES, "csv.gz", "jsonl.gz") if name != "tsv"])
def test_killed_at_each_place_and_format(runs, o):
    expected, places = clean(runs, o=o), runs.places(o=o)
    runs.fresh()
    assert len(places) > 40
    for place in range(len(places)):
        killed_and_resumed(runs, place, expected, o=o)


@pytest.mark.slow
@pytest.mark.parametrize("o", ["out.jsonl", "out.parquet"])
def test_killed_at_places_of_runs_that_were_killed_before(runs, o):
    draw, expected = random.Random(2), clean(runs, o=o)
    for _ in range(25):
        for _ in range(3):
            runs(o=o, kill_at=draw.randrange(60))
        assert runs(o=o) in (0, 3) and runs.content(o) == expected and set(runs.computed(o).values()) == {1}
        runs.fresh()


def texts(n=40):
    begin = "She was told that nobody in the town would ever come back, and so "
    return "".join(
        json.dumps({"id": i, "prompt": begin * (i % 3) + "abc"[i % 3] * (i % 7)} if i % 11 else {"prompt": i}) + "\n"
        for i in range(n)
    )


def openai(n=40):
    for i in range(n):
        body = {"prompt": "She was " * (i % 5 + 1), "max_tokens": 5, "n": 1 + i % 2, "temperature": 1.0}
        if i % 7 == 3:
            body = {"messages": [{"role": "user", "content": "hi"}]}  # the model has no template
        where = "/v1/audio" if i % 13 == 5 else "/v1/chat/completions" if "messages" in body else "/v1/completions"
        yield json.dumps({"custom_id": f"r{i % 37}", "method": "POST", "url": where, "body": body}) + "\n\n"


@pytest.mark.slow
@pytest.mark.parametrize("o", ["out.jsonl", "out.parquet"])
@pytest.mark.parametrize("rows", [texts, openai])
def test_killed_at_each_place_with_a_model_of_texts(runs, rows, o):
    """Whose rows share what is in the cache, and whose answers are drawn."""
    plain = ("--engine", "own", "--plain", *(() if rows is openai else PLAIN[4:-1]))
    job = {"plain": plain, "model": "tiny", "o": o}
    runs.write("".join(rows()))
    expected, places = clean(runs, **job), runs.places(**job)
    runs.fresh()
    for place in range(0, len(places), 2):
        assert runs(kill_at=place, **job) == -9 and runs(**job) in (0, 3), runs.said()
        assert runs.content(o) == expected, places[place]
        assert set(runs.computed(o).values()) == {1} and len(runs.computed(o)) == 40
        runs.fresh()


@pytest.mark.slow
def test_fifty_kills_at_random_times(runs):
    draw, expected, kills = random.Random(3), clean(runs, *SLOW, model="Slow"), 0
    while kills < 50:
        while runs(*SLOW, model="Slow", kill_after=draw.uniform(0, 0.5)) == -9:
            kills += 1
        assert runs.content() == expected and set(runs.computed().values()) == {1}
        runs.fresh()


# ---- a machine that died ---------------------------------------------------------------------------------------------


def crashes(runs, draw, expected, times):
    assert runs() == 3
    whole = runs.content("out.jsonl.journal")
    for _ in range(times):
        cut = whole[: draw.randrange(len(whole))] + draw.choice([b"", b"\0" * draw.randrange(5000), b"\xff\0a"])
        if cut[:9].strip(b"\0") == b"\xff\0a":
            continue
        runs.write(cut, "out.jsonl.journal")
        (runs.folder / "out.jsonl").unlink(missing_ok=True)
        assert runs() == 3, runs.said()
        assert runs.content() == expected and set(runs.computed().values()) == {1}


def test_a_journal_that_ends_anywhere_with_zeros_or_without(runs):
    crashes(runs, random.Random(4), clean(runs), 6)


@pytest.mark.slow
def test_a_journal_that_ends_anywhere_many_times(runs):
    crashes(runs, random.Random(5), clean(runs), 200)


def test_a_journal_damaged_in_the_middle(runs):
    expected = clean(runs)
    assert runs() == 3
    hurt = bytearray(runs.content("out.jsonl.journal"))
    at = [i for i, byte in enumerate(hurt) if byte == 10]
    hurt[at[6] + 30] ^= 1
    runs.write(bytes(hurt), "out.jsonl.journal")
    (runs.folder / "out.jsonl").unlink()
    assert runs() == 3 and f"line 8 (byte {at[6] + 1}) is damaged" in runs.said()
    assert "1 rows" in runs.said() or "39 were done before" in runs.said()
    assert runs.content() == expected


# ---- errors again ----------------------------------------------------------------------------------------------------


@pytest.fixture
def unlucky(runs):
    """A finished run of which some rows failed that would not any more."""
    text = "\n".join(json.dumps({"tokens": [13, 13, i] if i % 6 == 5 else [i % 11, i % 5, 3]}) for i in range(30))
    runs.write(text + "\nno JSON\n")
    (runs.folder / "broken").touch()
    assert runs(model="Flaky") == 3 and sum(row["error"] is not None for row in runs.rows()) == 6
    (runs.folder / "broken").unlink()
    shutil.copytree(runs.folder, runs.folder / "kept")
    return runs


def as_it_was(runs):
    runs.fresh()
    for path in (runs.folder / "kept").glob("out.*"):
        shutil.copy(path, runs.folder)


def retried(runs):
    """The output of a retry that nothing interrupts; undone."""
    assert runs("--retry-errors", model="Flaky") == 3, runs.said()
    found = runs.content()
    assert [row["error"] is not None for row in runs.rows()] == [False] * 30 + [True]
    times = runs.computed()
    assert {n for n, count in times.items() if count == 2} == {5, 11, 17, 23, 29, 30} and set(times.values()) == {1, 2}
    as_it_was(runs)
    return found


def test_errors_are_computed_again_if_that_is_wanted(unlucky):
    before, expected = unlucky.content(), retried(unlucky)
    assert unlucky(model="Flaky") == 0 and unlucky.content() == before != expected


@pytest.mark.parametrize("place", [*ONCE[4:6], *ONCE[7:9], *ONCE[11:14]])
def test_killed_while_errors_are_computed_again(unlucky, place):
    expected = retried(unlucky)
    retry_killed(unlucky, place, expected)


def retry_killed(runs, place, expected):
    assert runs("--retry-errors", model="Flaky", kill_at=place) == -9, runs.said()
    assert runs("--retry-errors", model="Flaky") == 3, runs.said()
    assert runs.content() == expected
    times = runs.computed()
    assert all(times[n] == 2 for n in (5, 11, 17, 23, 29)) and times[0] == 1
    as_it_was(runs)


@pytest.mark.slow
def test_killed_at_each_place_while_errors_are_computed_again(unlucky):
    expected, places = retried(unlucky), unlucky.places("--retry-errors", model="Flaky")
    as_it_was(unlucky)
    for place in range(len(places)):
        retry_killed(unlucky, place, expected)


def test_what_failed_again_before_the_kill_is_not_tried_a_third_time(unlucky):
    (unlucky.folder / "broken").touch()
    assert unlucky("--retry-errors", model="Flaky", kill_at="all computed") == -9
    assert unlucky.computed()[5] == 2
    assert unlucky("--retry-errors", model="Flaky") == 3 and unlucky.computed()[5] == 2
    assert unlucky("--retry-errors", model="Flaky") == 3 and unlucky.computed()[5] == 3, "a new retry tries all again"


# ---- what is not as it was -------------------------------------------------------------------------------------------


def edited(runs, number, **values):
    rows = runs.content("in.jsonl").decode().splitlines()
    rows[number] = json.dumps(json.loads(rows[number]) | values)
    runs.write("\n".join(rows) + "\n")


def test_an_input_that_was_touched_moved_or_named_otherwise_is_the_same(runs):
    assert runs() == 3
    os.utime(runs.folder / "in.jsonl", (1, 1))
    assert runs() == 0 and "nothing to do" in runs.said()
    (runs.folder / "in.jsonl").rename(runs.folder / "other.jsonl")
    assert runs(i="other.jsonl") == 0 and "nothing to do" in runs.said()
    assert runs(i=str(runs.folder / "other.jsonl")) == 0 and "nothing to do" in runs.said()


def test_a_run_that_goes_on_under_another_name_of_its_input_writes_the_same(runs):
    expected = clean(runs)
    assert runs(kill_at="in a line of error") == -9
    assert runs(i="./in.jsonl") == 3 and runs.content() == expected
    runs.fresh()
    assert runs(kill_at="all computed") == -9
    (runs.folder / "in.jsonl").rename(runs.folder / "other.jsonl")
    assert runs("--errors", "e.jsonl", i="other.jsonl") == 3 and runs.content() == expected
    assert {row["file"] for row in runs.rows("e.jsonl")} == {"in.jsonl"}
    assert runs("--errors", "e.jsonl", i="other.jsonl") == 0
    assert runs("--seed", "1", "--overwrite", i="other.jsonl") == 3
    assert runs.rows()[4]["error"].startswith("other.jsonl, line 5: "), "another run"


def test_a_place_is_told_once_after_an_accepted_change_under_another_name(runs):
    assert runs() == 3
    edited_text = runs.content("in.jsonl").replace(b'"id": 3,', b'"id": 99,')
    assert edited_text != runs.content("in.jsonl")
    runs.write(edited_text, "other.jsonl")
    assert runs("--accept-changes", i="other.jsonl") == 3
    assert [e.count("line 23: ") for e in (runs.rows()[22]["error"],)] == [1]
    assert not any("in.jsonl" in (row["error"] or "") for row in runs.rows())


def test_an_edited_line_is_refused_by_its_number_and_nothing_is_touched(runs):
    assert runs() == 3
    before = runs.content(), runs.content("out.jsonl.journal")
    edited(runs, 2, note="other")
    edited(runs, 17, tokens=[1, 2, 3])
    assert runs() == 1 and "edited since they were computed: in.jsonl, line 3; in.jsonl, line 18\n" in runs.said()
    assert "--accept-changes" in runs.said() and (runs.content(), runs.content("out.jsonl.journal")) == before


@pytest.mark.parametrize("place", [None, "after fsync folder", "in a line of row", "after rename .jsonl"])
def test_accepted_changes_compute_what_changed_and_say_so(runs, place):
    assert runs() == 3
    before = runs.rows()
    edited(runs, 2, tokens=[2, 2, 2])
    edited(runs, 16, note="other")
    runs.write(runs.content("in.jsonl") + b'{"id": 40, "tokens": [1]}\n')
    if place:
        assert runs("--accept-changes", kill_at=place) == -9
    assert runs("--accept-changes") in (0, 3), runs.said()
    after, times = runs.rows(), runs.computed()
    assert {n for n, count in times.items() if count == 2} == {2, 16} and times[40] == 1
    assert [row["id"] for row in after if row["changed"]] == [2, 16, 40]
    assert after[2]["changed"].startswith("input.in.jsonl: ") and after[16]["note"] == "other"
    for number in set(range(40)) - {2, 16}:
        assert after[number] == before[number] | {"changed": None}
    assert runs() == 0 and "nothing to do" in runs.said(), "the changes are accepted for good"


def test_an_accepted_change_that_is_killed_before_its_row_is_computed_is_not_forgotten(runs):
    assert runs() == 3
    edited(runs, 2, tokens=[2, 2, 2])
    assert runs("--accept-changes", kill_at="after fsync folder") == -9
    assert runs() == 3 and runs.computed()[2] == 2 and runs.rows()[2]["changed"]


def test_a_row_that_could_not_be_read_and_now_can(runs):
    assert runs() == 3
    text = runs.content("in.jsonl").replace(b"{ no JSON", b"{}")
    runs.write(text)
    assert runs("--accept-changes") == 3 and "no JSON" not in runs.rows()[22]["error"]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (("--max-tokens", "6"), "columns.params.max_tokens: 5 before, now 6"),
        (("--temperature", "0.5"), "columns.params.temperature: 1.0 before, now 0.5"),
        (("--seed", "1"), "seed: 0 before, now 1"),
        (("--shard", "1/2"), "shard: [1, 1] before, now [1, 2]"),
        (("--token-ids",), "token_ids: False before, now True"),
        (("--param", "top_p=0.5"), "columns.params.top_p: nothing before, now 0.5"),
    ],
)
def test_another_option_is_refused_by_name(runs, more, named):
    assert runs() == 3
    assert runs(*more) == 1 and named in runs.said(), runs.said()


def test_other_model_files_and_templates_are_refused_by_name(runs):
    runs.write("{% for m in messages %}{{ m.content }}{% endfor %}", "chat.jinja")
    assert runs("--chat-template", "chat.jinja") == 3
    runs.write(MODELS + "\n#", "models.py")
    assert runs("--chat-template", "chat.jinja") == 1 and "model.source: " in runs.said()
    runs.write(MODELS, "models.py")
    runs.write("{% for m in messages %}{{ m.content }};{% endfor %}", "chat.jinja")
    assert runs("--chat-template", "chat.jinja") == 1 and "settings.chat_template: chat.jinja" in runs.said()


def test_an_engine_that_differs_is_found_when_it_is_there(runs):
    assert runs("--limit", "10") == 3
    assert runs("--backend", "array_api_strict") == 1 and "engine.backend: numpy" in runs.said()
    assert runs.computed().keys() == set(range(10))
    assert runs("--backend", "array_api_strict", "--accept-changes") == 3
    assert [bool(row["changed"]) for row in runs.rows()] == [False] * 10 + [True] * 30


KERNELS = pytest.mark.skipif(not possible(), reason="there are no kernels, so bits have no name")
NOW = f'"meaning":{MEANING},'


@pytest.mark.parametrize(
    "now, before, said",
    [
        pytest.param(
            *(f'"{NUMERICS} float32"', '"cpu-0 float32"'),
            (
                f"engine.numerics: cpu-0 float32 before, now {NUMERICS} float32",
                f"The name of the bits changed from cpu-0 float32 to {NUMERICS} float32: ",
            ),
            marks=KERNELS,
            id="numerics",
        ),
        (
            NOW,
            "",
            ("engine.meaning: nothing before, now", f"files changed from 1 to {MEANING} (docs/offline.md): what"),
        ),
        (NOW, '"meaning":99,', ("engine.meaning: 99 before, now", f"files changed from 99 to {MEANING} (docs/offline")),
    ],
)
def test_what_an_earlier_version_computed_otherwise_is_told_with_what_to_do(runs, now, before, said):
    """A journal of an earlier version, whose kernels had other bits, or which understood files in another way."""
    plain = (*PLAIN, "--backend", "numpy", "--max-tokens", "2")
    assert runs("--limit", "5", model="tiny", plain=plain) in (0, 3), runs.said()
    journal = runs.folder / "out.jsonl.journal"
    head, *others = journal.read_bytes().splitlines(keepends=True)
    assert head.count(now.encode()) == 1
    text = head[9:-1].replace(now.encode(), before.encode())
    journal.write_bytes(b"%08x %b\n" % (zlib.crc32(text), text) + b"".join(others))
    written = journal.read_bytes()
    assert runs(model="tiny", plain=plain) == 1
    for message in (*said, "finish with the version of hibachi", "begin anew with --overwrite"):
        assert message in runs.said()
    assert journal.read_bytes() == written


def test_overwrite_begins_anew_what_differs_and_only_that(runs):
    expected = clean(runs, "--seed", "1")
    assert runs("--limit", "20") == 3
    assert runs("--seed", "1", "--overwrite", kill_at="all computed") == -9
    assert len(runs.computed()) == 40 and b'"seed":0' not in runs.content("out.jsonl.journal")
    assert runs("--seed", "1", "--overwrite") == 3 and runs.content() == expected
    assert set(runs.computed().values()) == {1}, "the second time nothing differed"


def test_overwrite_with_another_engine_begins_anew(runs):
    assert runs("--limit", "10") == 3
    assert runs("--backend", "array_api_strict", "--overwrite") == 3
    assert "changed" not in runs.rows()[0] and runs.computed() == dict.fromkeys(range(40), 1)
    assert "begins anew" in runs.said()


def test_what_shapes_the_output_is_written_again_and_nothing_computed(runs):
    assert runs() == 3
    assert runs("--result-prefix", "r_") == 3 and runs.rows()[0]["r_output"] is not None
    assert runs("--format", "csv") == 3 and runs.content().startswith(b"id,")
    assert runs("--errors", "e.jsonl") == 3 and len(runs.rows("e.jsonl")) == 4
    assert set(runs.computed().values()) == {1}


def test_a_limit_can_be_extended_and_taken_back(runs):
    expected = clean(runs)
    assert runs("--limit", "3") == 0 and len(runs.rows()) == 3
    assert runs("--limit", "3") == 0 and "nothing to do" in runs.said()
    assert runs("--limit", "10") == 3 and len(runs.rows()) == 10
    assert runs() == 3 and runs.content() == expected and set(runs.computed().values()) == {1}
    assert runs("--limit", "3") == 0 and len(runs.rows()) == 3


def test_shards_are_the_whole(runs):
    assert runs() == 3
    whole = runs.rows()
    for i in (1, 2, 3):
        assert runs("--shard", f"{i}/3", o=f"out.{i}.jsonl") in (0, 3)
        assert runs.rows(f"out.{i}.jsonl") == whole[i - 1 :: 3]


def test_an_input_that_changes_while_it_is_read_is_noticed(runs):
    runs.write("\n".join(lines(40)) + "\n")
    edit = runs.folder / "in.jsonl"
    program = (
        MODELS
        + f"""
class Editing(Letters):
    def logits(self, tokens, lengths):
        text = Path({str(edit)!r}).read_text()
        Path({str(edit)!r}).write_text(text.replace('"id": 3,', '"id": 4,'))
        return super().logits(tokens, lengths)
"""
    )
    runs.write(program, "models.py")
    assert runs(model="Editing") == 1 and "was changed while the run read it" in runs.said()
    assert not (runs.folder / "out.jsonl").exists()
    assert runs(model="Editing") == 1 and "input.in.jsonl" in runs.said()
    assert runs("--accept-changes", model="Editing") == 3 and [r["id"] for r in runs.rows()[3:5]] == [4, 4]


def test_what_was_read_of_a_changed_input_is_computed_again_when_it_is_put_back(runs):
    text = "".join(json.dumps({"id": i, "note": "x" * 1000, "tokens": [i % 9, 1]}) + "\n" for i in range(300))
    runs.write(text)
    program = (
        MODELS
        + """
class Editing(Letters):
    def __init__(self):
        if Path("edit").exists():
            Path("in.jsonl").write_text(Path("in.jsonl").read_text()[:-6] + "7]}" + chr(10))
            Path("edit").unlink()
"""
    )
    runs.write(program, "models.py")
    assert runs(model="Editing") == 0
    expected = runs.content()
    runs.fresh()
    runs.write("", "edit")
    assert runs(model="Editing") == 1 and "was changed while the run read it" in runs.said()
    runs.write(text)
    assert runs(model="Editing") == 0 and runs.content() == expected, runs.said()
    assert {row: n for row, n in runs.computed().items() if n > 1} == {299: 2}


# ---- files that are not ours -----------------------------------------------------------------------------------------


def test_an_output_of_somebody_elses_is_not_touched(runs):
    runs.write("mine", "out.jsonl")
    assert runs() == 1 and "is not what a run of this journal wrote" in runs.said() and runs.content() == b"mine"
    assert not (runs.folder / "out.jsonl.journal").exists()
    assert runs("--overwrite", kill_at="all computed") == -9 and runs.content() == b"mine"
    assert runs("--overwrite") == 3 and len(runs.rows()) == 40
    assert runs() == 0 and "nothing to do" in runs.said()


@pytest.mark.parametrize("name", ["out.jsonl.part", "e.jsonl", "e.jsonl.part", "out.jsonl.journal"])
def test_other_files_of_somebody_elses_are_not_touched(runs, name):
    runs.write("mine", name)
    assert runs("--errors", "e.jsonl") == 1 and name in runs.said() and runs.content(name) == b"mine"


def test_an_output_that_was_edited_since_is_not_touched(runs):
    assert runs() == 3
    whole = runs.content()
    runs.write(whole + b"\n", "out.jsonl")
    assert runs() == 1 and "is not what a run of this journal wrote" in runs.said()
    assert runs("--overwrite") == 3 and runs.content() == whole and set(runs.computed().values()) == {1}


def test_an_output_that_appears_meanwhile_is_not_touched(runs):
    other = "class Other(Letters):\n    def __init__(self): Path('out.jsonl').write_text('x')\n"
    runs.write(MODELS + other, "models.py")
    assert runs(model="Other") == 1 and "has changed since the run began" in runs.said()
    assert runs.content() == b"x" and not (runs.folder / "out.jsonl.part").exists()
    (runs.folder / "out.jsonl").unlink()
    assert runs(model="Other") == 3 and set(runs.computed().values()) == {1}


def test_an_output_that_is_an_input_by_any_name_is_refused(runs):
    (runs.folder / "link.jsonl").symlink_to("in.jsonl")
    (runs.folder / "hard.jsonl").hardlink_to(runs.folder / "in.jsonl")
    before = runs.content("in.jsonl")
    for o in ("in.jsonl", "./in.jsonl", "link.jsonl", "hard.jsonl"):
        assert runs("--overwrite", o=o) == 1 and "is an input" in runs.said(), o
        assert runs("--overwrite", "--errors", o) == 1 and "is an input" in runs.said(), o
    assert runs(i="link.jsonl", o="in.jsonl") == 1 and runs.content("in.jsonl") == before
    runs.write(before, "out.jsonl.journal")
    assert runs(i="out.jsonl.journal") == 1 and runs.content("out.jsonl.journal") == before


def test_outputs_that_cannot_be_are_refused_before_anything_is_computed(runs):
    (runs.folder / "folder.jsonl").mkdir()
    os.mkfifo(runs.folder / "pipe.jsonl")
    for o, why in [
        ("folder.jsonl", "is a folder"),
        ("no/out.jsonl", "there is no folder"),
        ("pipe.jsonl", "no regular file"),
    ]:
        assert runs(o=o) == 1 and why in runs.said()
        assert runs("--errors", o) == 1 and why in runs.said()
    assert runs("--format", "jsonl", o="/dev/null") == 1 and "no regular file" in runs.said()
    assert runs("--errors", "out.jsonl") == 1 and "under one name" in runs.said()
    assert not list(runs.folder.glob("*.journal"))


@pytest.mark.parametrize("i", [".", "*.jsonl"])
def test_an_output_in_the_folder_of_the_input_is_no_input_of_the_next_start(runs, i):
    assert runs("--errors", "e.jsonl", i=i, kill_at="after rename .jsonl") == -9
    assert runs("--errors", "e.jsonl", i=i) == 3 and runs("--errors", "e.jsonl", i=i) == 0
    assert "is finished: 40 rows" in runs.said()
    (runs.folder / "out.jsonl.journal").unlink()
    assert runs("--overwrite", i=i) == 1 and "is an input" in runs.said(), "it may be one of somebody else's"


def test_an_input_is_named_once(runs):
    assert runs(i="in.jsonl ./in.jsonl") == 1 and "each file once" in runs.said()
    assert runs(i="- -") == 1 and "read once" in runs.said()


def test_through_a_link_the_output_is_written_where_it_leads(runs):
    (runs.folder / "deep").mkdir()
    (runs.folder / "out.jsonl").symlink_to("deep/real.jsonl")
    assert runs() == 3 and (runs.folder / "out.jsonl").is_symlink() and len(runs.rows("deep/real.jsonl")) == 40
    assert runs(o="deep/real.jsonl") == 0 and "nothing to do" in runs.said()


def test_errors_have_a_file_which_is_whole_or_not_there(runs):
    more = "--errors", "out.errors"
    assert runs(*more) == 3
    expected = runs.content("out.errors")
    first = json.loads(expected.splitlines()[0])
    assert first["row"] == 4 and first["line"] == 5 and first["file"] == "in.jsonl" and "no" in first["error"]
    runs.fresh()
    for place in ("before rename .errors", "after rename .errors", "before rename .jsonl", "after rename .jsonl"):
        assert runs(*more, kill_at=place) == -9 and runs(*more) in (0, 3), runs.said()
        assert runs.content("out.errors") == expected and set(runs.computed().values()) == {1}
        runs.fresh()
    assert runs(*more) == 3
    (runs.folder / "out.errors").unlink()
    assert runs(*more) == 3 and runs.content("out.errors") == expected


# ---- a full disk -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1100, 1500, 3000, 5500])
def test_a_disk_that_is_full_loses_nothing(runs, most):
    expected = clean(runs)
    assert len(expected) > 5500
    assert runs(most=most) == 1 and "File too large" in runs.said() and "out.jsonl." in runs.said()
    assert "Run the same command again" in runs.said() and not (runs.folder / "out.jsonl").exists()
    done = runs.computed()
    assert runs() == 3 and runs.content() == expected and set(runs.computed().values()) == {1}
    assert most < 1500 or done


def test_a_disk_that_is_full_while_the_output_is_written(runs):
    expected = clean(runs)
    assert runs(kill_at="all computed") == -9
    size = len(runs.content("out.jsonl.journal"))
    assert size < len(expected) - 10 or len(expected) < size
    most = min(len(expected) // 2, size)
    assert runs(most=most) == 1 and "out.jsonl.part" in runs.said()
    assert not (runs.folder / "out.jsonl.part").exists()
    assert runs() == 3 and runs.content() == expected and set(runs.computed().values()) == {1}


# ---- signals ---------------------------------------------------------------------------------------------------------

ENDS = pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])


@ENDS
def test_a_signal_lets_what_runs_end_and_the_rest_is_done_by_the_same_command(runs, name, status):
    expected = clean(runs, *SLOW, model="Slow")
    assert runs(*SLOW, model="Slow", signals=[("in a line of row", name)]) == status
    assert f"Ended by {name}, after what ran was finished. Run the same command again" in runs.said()
    assert 4 <= sum(len(row) > 1 for row in [runs.computed()]) + len(runs.computed()) < 40
    assert not (runs.folder / "out.jsonl").exists()
    assert runs(*SLOW, model="Slow") == 3 and runs.content() == expected and set(runs.computed().values()) == {1}


@pytest.mark.slow
@ENDS
def test_a_second_signal_ends_it_at_once(runs, name, status):
    expected = clean(runs, *SLOW, model="Slow")
    assert runs(*SLOW, model="Slow", signals=[("in a line of row", name)] * 2) == status
    assert "after what ran was finished" not in runs.said() and len(runs.computed()) < 10
    assert runs(*SLOW, model="Slow") == 3 and runs.content() == expected and set(runs.computed().values()) == {1}


@ENDS
def test_a_signal_before_the_model_is_there_ends_it_at_once(runs, name, status):
    assert runs(signals=[("loading", name)]) == status
    assert not list(runs.folder.glob("out*")), "there was nothing to keep"
    assert runs() == 3


@ENDS
def test_a_signal_while_the_output_is_written_is_heard_after_it_and_a_second_one_at_once(runs, name, status):
    expected = clean(runs)
    assert runs(signals=[("writing", name)]) == 3 and runs.content() == expected
    runs.fresh()
    assert runs(signals=[("writing", name)] * 2) == status
    assert not (runs.folder / "out.jsonl").exists() and not (runs.folder / "out.jsonl.part").exists()
    assert runs() == 3 and runs.content() == expected and set(runs.computed().values()) == {1}


def test_fail_fast_ends_at_the_first_row_that_fails_and_can_be_resumed_without(runs):
    expected = clean(runs)
    assert runs("--fail-fast") == 3 and "Ended at the first row that failed: " in runs.said()
    assert not (runs.folder / "out.jsonl").exists()
    assert runs() == 3 and runs.content() == expected


# ---- pipes -----------------------------------------------------------------------------------------------------------


def test_rows_by_pipes_either_way(runs):
    assert runs() == 3
    want = runs.rows()
    (runs.folder / "stdin").write_bytes(runs.content("in.jsonl"))
    for i, o in [("-", "-"), ("in.jsonl", "-"), ("-", "out.2.jsonl")]:
        assert runs("--errors", "out.errors", "--overwrite", i=i, o=o) == 3, runs.said()
        assert "A pipe cannot be resumed" in (runs.folder / "stderr").read_text()
        got = runs.rows("stdout" if o == "-" else o)
        assert str(got).replace("standard input", "in.jsonl") == str(want)
        assert [row["row"] for row in runs.rows("out.errors")] == [4, 13, 22, 31]
    assert {path.name for path in runs.folder.glob("out.*")} >= {"out.jsonl", "out.jsonl.journal", "out.2.jsonl"}
    assert not (runs.folder / "out.2.jsonl.journal").exists()
    assert runs(i="-", o="out.2.jsonl") == 1 and "is there already" in runs.said()


@pytest.mark.parametrize("format", ["csv", "parquet", "jsonl.gz"])
def test_other_formats_to_a_pipe(runs, format):
    assert runs(o=f"out.{format}") == 3
    assert runs("--format", format, o="-") == 3 and runs.content("stdout") == runs.content(f"out.{format}")


def test_a_huge_line_on_standard_input_is_an_error_of_its_row(runs):
    data = b'{"tokens": [1]}\n{"x": "' + b"x" * (17 << 20) + b'"}\n{"tokens": [2]}\n'
    (runs.folder / "stdin").write_bytes(data)
    assert runs(i="-") == 3 and [bool(row["error"]) for row in runs.rows()] == [False, True, False]
    assert "standard input, line 2" in runs.rows()[1]["error"]


def test_what_comes_by_a_pipe_is_kept_beside_the_output_and_removed(runs):
    (runs.folder / "stdin").write_bytes(runs.content("in.jsonl"))
    (runs.folder / "tmp").mkdir()
    env = {"TMPDIR": str(runs.folder / "tmp")}
    assert runs(i="-", o="out.jsonl", env=env, kill_at="all computed") == -9
    [kept] = runs.folder.glob("out.jsonl.*.tmp/input")
    assert kept.stat().st_mode & 0o777 == 0o600 and kept.parent.stat().st_mode & 0o777 == 0o700
    assert not list((runs.folder / "tmp").iterdir())
    shutil.rmtree(kept.parent)
    assert runs(i="-", o="-", env=env, kill_at="all computed") == -9
    [kept] = (runs.folder / "tmp").glob("*/input")
    assert runs(i="-", env=env) == 3 and not list(runs.folder.glob("out.jsonl.*"))


def test_a_disk_that_is_full_while_a_pipe_is_read(runs):
    (runs.folder / "stdin").write_bytes(runs.content("in.jsonl"))
    assert runs(i="-", most=1000) == 1 and "File too large" in runs.said() and "/input'" in runs.said()
    assert not list(runs.folder.glob("out*"))


def test_a_piped_run_that_was_killed_while_it_wrote_can_be_run_again(runs):
    (runs.folder / "stdin").write_bytes(runs.content("in.jsonl"))
    assert runs(i="-", kill_at="writing") == -9 and runs(i="-") == 3, runs.said()


# ---- input that breaks off -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["", "\n\n", "id,tokens\n"])
def test_an_input_without_rows(runs, content):
    runs.write(content, "in.any")
    assert runs(i="in.any") == 0 and runs.content() == b"", runs.said()
    assert runs(i="in.any") == 0 and "is finished: 0 rows" in runs.said()


def test_what_could_be_read_of_a_damaged_input_is_computed_and_kept(runs):
    draw = random.Random(6)
    text = "".join(json.dumps({"tokens": [i % 30], "x": draw.random()}) + "\n" for i in range(3000)).encode()
    whole = gzip.compress(text, mtime=0)
    runs.write(whole[: len(whole) // 2], "in.jsonl.gz")
    assert runs(i="in.jsonl.gz") == 1 and "in.jsonl.gz, after line " in runs.said() and "same command" in runs.said()
    assert not (runs.folder / "out.jsonl").exists()
    done = len(runs.computed())
    assert 500 < done < 3000
    runs.write(whole, "in.jsonl.gz")
    assert runs(i="in.jsonl.gz") == 1 and "edited since they were computed: no rows" in runs.said()
    assert runs("--accept-changes", i="in.jsonl.gz") == 0 and set(runs.computed().values()) == {1}
    assert len(runs.rows()) == 3000


def test_an_input_of_parquet_without_its_end_is_refused_and_nothing_begun(runs):
    assert runs(o="out.parquet") == 3
    runs.write(runs.content("out.parquet")[:-10], "in.parquet")
    assert runs(i="in.parquet") == 1 and "in.parquet" in runs.said() and "Traceback" not in runs.said()
    assert not (runs.folder / "out.jsonl.journal").exists()
