"""Every program in examples/ runs from anywhere and prints what it should."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
RHYME = [
    "Twinkle, twinkle, little star,",
    "How I wonder what you are!",
    "Up above the world so high,",
    "Like a diamond in the sky.",
]
VERSE = "Mary had a little lamb, its fleece was white as snow, and everywhere that Mary went the lamb was sure to go."
COVERED = {
    "custom_jax",
    "custom_numpy",
    "custom_torch",
    "feedforward",
    "guided_melody",
    "llm_stream",
    "music_codebooks",
    "nine_numpy",
    "own_cache",
    "paged_attention",
    "recurrent_state",
    "served_letters",
    "time_series",
    "verify_rwkv",
}
SERVED = {"served_client", "served_flowers", "served_phonemes", "served_string"}  # test_served.py runs them


def run(name, *arguments, cwd):
    """What the example prints. Warnings count as failures, as in our own tests."""
    command = [sys.executable, "-W", "error", EXAMPLES / f"{name}.py", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    return done.stdout


def completions(out):
    """{what stood before the bar: what came after it}, of every line that has one."""
    return dict(line.split("|") for line in out.splitlines() if "|" in line)


def test_every_example_is_run_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == COVERED | SERVED


def test_every_example_is_listed():
    page = (EXAMPLES / "README.md").read_text()
    assert [path.name for path in EXAMPLES.glob("*.py") if f"({path.name})" not in page] == []


@pytest.mark.parametrize("name", sorted(COVERED | SERVED))
def test_an_example_fits_on_a_page_and_says_what_it_shows(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    assert text.startswith('"""')
    assert len(text.splitlines()) <= 80


def test_custom_numpy_samples_the_same_events_in_a_batch_and_alone(tmp_path):
    out = run("custom_numpy", cwd=tmp_path)
    assert "the same events when run alone: 5 of 5" in out
    assert out.count("> discharge") == 5


def test_nine_numpy_counts_up(tmp_path):
    assert run("nine_numpy", cwd=tmp_path).strip() == "[[6, 7, 8, 9], [7, 8, 9]]"


def test_guided_melody_has_the_same_notes_at_three_levels_and_keeps_to_its_grammar(tmp_path):
    lines = run("guided_melody", cwd=tmp_path).splitlines()
    assert len(lines) == 12
    melodies = [line.partition("|")[2] for line in lines]
    assert melodies[:4] == melodies[4:8] == melodies[8:] and len(set(melodies)) == 4
    notes = [note.split(":") for melody in melodies for note in melody.split()]
    assert len(notes) == 12 * 6 and all(48 <= int(p) <= 72 and 1 <= int(n) <= 8 for p, n in notes)


def test_custom_torch_recites_the_rest_of_each_line(tmp_path):
    found = completions(run("custom_torch", cwd=tmp_path))
    assert len(found) == 4
    assert [prompt + rest for prompt, rest in found.items()] == RHYME


@pytest.mark.slow
def test_custom_jax_counts_on_in_english(tmp_path):
    found = completions(run("custom_jax", cwd=tmp_path))
    assert found["thirty-four "].startswith("thirty-five thirty-six ")
    assert found["fifty-eight fifty-"].startswith("nine sixty sixty-one ")
    assert found["sixty-nine "].startswith("seventy seventy-one ")


def test_music_codebooks_ends_in_silence_wherever_it_is_taken_up(tmp_path):
    out = run("music_codebooks", cwd=tmp_path)
    assert out.startswith("112 frames from 1:")  # 64 of the tune, and the fourth voice enters 48 later
    assert "5 of 5 end alike" in out
    lines = [line.strip() for line in out.splitlines() if re.fullmatch(r"  [.A-Ga-g]+", line)]
    voices = [lines[i] + lines[i + 4] for i in range(4)]
    assert {voice.strip(".") for voice in voices} == {voices[0].strip(".")}  # all sing the same tune
    assert [len(voice) - len(voice.lstrip(".")) for voice in voices] == [0, 16, 32, 48]


def test_time_series_stops_some_forecasts_at_the_threshold(tmp_path):
    out = run("time_series", cwd=tmp_path)
    assert len(out.splitlines()) == 5
    assert out.count("flood in") == 2
    assert all(float(level) <= 2.3 for level in re.findall(r"at most ([\d.]+) m", out))


def test_recurrent_state_remembers_the_verse(tmp_path):
    out = run("recurrent_state", cwd=tmp_path)
    found = completions(out)
    assert len(found) == 3
    assert all(VERSE.endswith(prompt + rest) for prompt, rest in found.items())


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_paged_attention_repeats_what_followed_the_last_time(tmp_path, library):
    out = run("paged_attention", library, cwd=tmp_path)
    for prompt, rest in completions(out).items():
        word = prompt.split()[0] + " "
        assert (word * 5).startswith(prompt + rest)
    assert f"{library}: 60 tokens in " in out


def test_feedforward_answers_many_requests_in_few_passes(tmp_path):
    out = run("feedforward", cwd=tmp_path)
    right, requests, passes = map(int, re.search(r"^(\d+) of 100 .*; (\d+) requests in (\d+) forward", out).groups())
    assert right >= 90
    assert requests == 100
    assert 4 <= passes <= 50  # at most 32 at once; how many wait together depends on the machine


def test_llm_stream_streams_two_texts_and_drops_one(tmp_path):
    out = run("llm_stream", cwd=tmp_path)
    assert "* The evening passed off in ... cancelled" in out
    assert "* It is a truth universally acknowledged, that " in out
    assert "* As soon as breakfast was over, they " in out
    assert re.search(r"\* greedy: .+, ended by (length|stop)", out)
    assert float(re.search(r"first token: (-[\d.]+)", out)[1]) < 0


def test_own_cache_gives_the_tokens_of_the_library(tmp_path):
    pytest.importorskip("transformers")
    found = re.fullmatch(r"16 of 16 have the tokens of `generate`; at once ([\d.]+) times as fast\n",
                         run("own_cache", cwd=tmp_path))  # fmt: skip
    assert float(found[1]) > 0


def test_served_letters_is_what_the_readme_shows_and_streams_letter_by_letter(tmp_path):
    file, readme = EXAMPLES / "served_letters.py", (EXAMPLES.parent / "README.md").read_text()
    assert f"```python\n{file.read_text()}```" in readme
    assert len(file.read_text().splitlines()) <= 31
    body = re.search(r"served_letters.py:Letters\ncurl -N \S+/v1/completions -H .* \\\n  -d '(.*)'", readme)[1]
    command = [sys.executable, "-m", "hibachi", "serve", f"{file}:Letters", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as server:
        try:
            url = next(found[1] for line in server.stderr if (found := re.search(r"on (http://\S+) ", line)))
            headers = {"Content-Type": "application/json"}
            for _ in range(20):  # on a machine that is busy all may come at once
                with urlopen(Request(f"{url}/v1/completions", body.encode(), headers), timeout=30) as answer:
                    events = [line.decode().removeprefix("data: ").strip() for line in answer if line.strip()]
                assert events.pop() == "[DONE]"
                letters = [json.loads(event)["choices"][0]["text"] for event in events]
                assert f"`{''.join(letters)}`" in readme
                if len([letter for letter in letters if letter]) > 2:
                    break
            else:
                pytest.fail("all came at once, twenty times")
        finally:
            server.terminate()
            assert server.wait(20) == 0


@pytest.mark.slow
def test_verify_finds_what_the_readme_says_of_rwkv():
    readme = (EXAMPLES.parent / "README.md").read_text()
    shown = re.search(r"verify_rwkv.py:Rwkv --backend torch\n```\n\n```text\n(.*?)```", readme, re.S)[1]
    command = ["verify", "--model", str(EXAMPLES / "verify_rwkv.py:Rwkv"), "--backend", "torch"]
    done = subprocess.run([sys.executable, "-m", "hibachi", *command], capture_output=True, text=True, timeout=280)
    assert done.returncode == 1, done.stderr
    said = [line[:49].rstrip() for line in done.stdout.splitlines()]  # without the size of a difference
    for line in shown.splitlines():
        assert line[:49].rstrip() in said or re.match(r"      \d rows", line), line
