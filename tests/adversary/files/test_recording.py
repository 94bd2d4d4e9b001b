"""`record=` where the file cannot be written, or no longer."""

import sys

import pytest

from hibachi import LLM, SamplingParams
from hibachi.engine.recording.replay import read, replay
from hibachi.errors import ConfigError

pytest.importorskip("tokenizers")


def answers(llm, count):
    params = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
    return [llm.generate("Once upon a time", params)[0].token_ids for _ in range(count)]


def ended(caplog):
    return [r.getMessage() for r in caplog.records if "recording" in r.getMessage()]


def test_m3_a_recording_ends_where_its_file_may_not_grow(tmp_path, caplog, small_disk):
    path = tmp_path / "plans.jsonl"
    with LLM("tiny") as llm:
        expected = answers(llm, 1)
    with small_disk(20_000), LLM("tiny", record=path) as llm:
        assert answers(llm, 3) == expected * 3
    assert path.stat().st_size == 20_000
    (line,) = ended(caplog)
    assert "ends here" in line and "too large" in line


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is no /dev/full")
def test_m3_a_recording_ends_where_the_disk_is_full(caplog):
    with LLM("tiny", record="/dev/full") as llm:
        assert len(answers(llm, 2)) == 2
        assert llm.dump()["complete"]
    (line,) = ended(caplog)
    assert "ends here" in line and "No space" in line


def test_m3_a_recording_that_cannot_begin_is_refused(tmp_path):
    for path in (tmp_path / "nowhere" / "plans.jsonl", tmp_path, "a\0b", {}):
        with pytest.raises(ConfigError, match=r"record=.* cannot be written"):
            LLM("tiny", record=path)


def test_m3_what_fits_is_what_a_recording_begins_with(tmp_path):
    with LLM("tiny", record=tmp_path / "plans.jsonl") as llm:
        answers(llm, 1)
    assert replay(read(tmp_path / "plans.jsonl")) >= 50
