"""What is kept for the next start: damaged, or where nothing can be kept."""

import json
import logging
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from hibachi import LLM, SamplingParams
from hibachi.tensor.cachefolder import cache_folder, move
from hibachi.tensor.candidates import Candidate
from hibachi.tensor.native import build
from hibachi.tensor.native.build import NativeLibrary, NativeUnavailable
from hibachi.tensor.numpy_backend import NumpyBackend
from hibachi.tune.autotune import choose
from hibachi.tune.cases import ModelSizes

ROOT = Path(__file__).parents[3]
MB = 2**20


@pytest.fixture(params=["a file in its place", "a file above it", "no home", "no room"])
def nowhere(request, own_home, monkeypatch, small_disk):
    """`with nowhere:` the user's cache folder cannot be had."""
    cache = own_home / "cache"
    if request.param == "a file in its place":
        cache.mkdir()
        (cache / "hibachi").write_text("")
    elif request.param == "a file above it":
        cache.write_text("")
    elif request.param == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home.")))
    return small_disk(100) if request.param == "no room" else nullcontext(request.param)


def warnings_of(caplog, text):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and text in r.getMessage()]


# ---- kernels ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path):
    """library(): compiled kernels in small, as another process has them."""
    try:
        build.compiler()
    except NativeUnavailable as e:
        pytest.skip(str(e))
    (tmp_path / "one.cpp").write_text('static char much[100000] = {1}; extern "C" int sum() { return 2 + much[0]; }')
    build._said.clear()
    return lambda: NativeLibrary("small", tmp_path, "here", lambda: ([], []), ())


DAMAGE = {
    "empty": lambda data: b"",
    "a few bytes": lambda data: data[:20],
    "a part": lambda data: data[: len(data) // 3],
    "without the last byte": lambda data: data[:-1],
    "zeros, as after a crash": lambda data: bytes(len(data)),
    "a byte in the middle": lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    "more at the end": lambda data: data + b"more",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_kernels_are_compiled_anew(library, damage, caplog):
    assert library().loaded.sum() == 3
    path = library().place()
    whole = path.read_bytes()
    path.unlink()  # as it is open
    path.write_bytes(DAMAGE[damage](whole))
    if damage == "a part":  # what loading it would do
        script = f"import ctypes; ctypes.CDLL({str(path)!r})"
        assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode != 0
    with caplog.at_level(logging.INFO):
        assert library().loaded.sum() == 3
    assert len(warnings_of(caplog, "damaged")) == 1 and caplog.text.count("Compiling") == 1
    assert path.read_bytes() == whole
    caplog.clear()
    assert library().loaded.sum() == 3 and not caplog.records


def test_who_does_not_wait_has_damaged_kernels_compiled_in_the_background(library, monkeypatch, caplog):
    assert library().why_missing() is None
    library().place().unlink()
    library().place().write_bytes(b"")
    started = []
    monkeypatch.setattr(build.subprocess, "Popen", lambda *args, **_: started.append(args))
    assert "in the background" in library().why_not_yet() and len(started) == 1
    assert warnings_of(caplog, "damaged")
    assert "to be compiled" in library().state()

    def none(*_, **__):
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(build.subprocess, "Popen", none)
    assert library().why_not_yet() and warnings_of(caplog, "temporarily")


def test_kernels_that_cannot_be_kept_are_done_without(library, nowhere, caplog):
    made = library()
    with nowhere as how:
        assert made.why_not_yet() == library().why_not_yet() != "being compiled in the background, for the next start"
        assert len(warnings_of(caplog, "Native kernels cannot be kept")) == (how != "no home")
        assert made.why_missing() and made.state()
        with pytest.raises(NativeUnavailable):
            _ = made.loaded


def test_a_compiler_that_fails_is_asked_once(library, tmp_path, monkeypatch):
    (tmp_path / "one.cpp").write_text("nothing;")
    made, calls = library(), []
    run = build._run
    monkeypatch.setattr(build, "_run", lambda commands: calls.append(1) or run(commands))
    assert "do not compile" in made.why_missing() and made.why_missing() == made.why_missing() and len(calls) == 1


def test_a_compiler_that_hangs_is_ended(library, tmp_path, monkeypatch):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\n[ $1 = --version ] || exec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setattr(build, "_PATIENCE", 0.2)
    assert "took more than" in library().why_missing()


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    (tmp_path / "made").write_bytes(b"all of it")
    seen = []
    monkeypatch.setattr("os.fsync", lambda _: seen.append((tmp_path / "to").exists()))
    move(tmp_path / "made", tmp_path / "to")
    assert seen == [False] and (tmp_path / "to").read_bytes() == b"all of it"


# ---- the choice of kernels -------------------------------------------------------------------------------------------

SIZES = ModelSizes("float32", ((96, 64, 2), (64, 64, 2), (256, 64, 2), (64, 128, 2)), (300, 64), 2, 4, 2, 16)


class Other(NumpyBackend):
    pass


class Tunable(NumpyBackend):
    def candidates(self):
        found = {"plain": NumpyBackend, "other": Other}
        return [Candidate("linear", name, source, invariant=True) for name, source in found.items()]


def chosen(budget=0.02):
    return choose(Tunable(), SIZES, deterministic=True, budget=budget)


def changed(**values):
    return lambda trials: json.dumps([trials[0] | values, *trials[1:]])


CHOICES = {
    "an empty list": lambda trials: "[]",
    "nothing": lambda trials: "",
    "cut off": lambda trials: json.dumps(trials)[:-20],
    "no list": lambda trials: '{"linear": "plain"}',
    "numbers": lambda trials: "[1, 2]",
    "not UTF-8": lambda trials: b"\xff\xfe\xff",
    "deep": lambda trials: "[" * 100_000,
    "large": lambda trials: json.dumps(trials) + " " * (2 * MB),
    "NaN": changed(times={"1": float("nan")}),
    "an infinite time": changed(times={"1": float("inf")}),
    "a time that is a word": changed(times={"1": "fast"}),
    "times in a list": changed(times=[1.0]),
    "a name that is a number": changed(name=7),
    "an error that is a word": changed(error="none"),
    "a reason that is a number": changed(why_not=0),
    "a field too many": changed(more=1),
    "a name that nobody knows": changed(name="magic"),
    "one missing": lambda trials: json.dumps(trials[1:]),
    "one twice": lambda trials: json.dumps([*trials, trials[0]]),
    "a number of too many digits": lambda trials: f'[{{"operation": {"9" * 10_000}}}]',
}


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    """A choice as it is kept; measured once, as that takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        assert not chosen().known
        (path,) = cache_folder().glob("kernels-*.json")
        return path.name, json.loads(path.read_text())


@pytest.mark.parametrize("what", [*CHOICES, "whole"])
def test_a_damaged_choice_is_not_used_and_the_log_says_so(what, trials, caplog):
    name, kept = trials
    content = CHOICES.get(what, json.dumps)(kept)
    cache_folder().mkdir(parents=True)
    (cache_folder() / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert chosen(budget=0.0).known is (what == "whole")
    lines = warnings_of(caplog, "made anew")
    assert len(lines) == (what != "whole") and all(name in line and len(line) < 600 for line in lines)


def test_a_damaged_choice_is_made_anew(trials, caplog):
    name, _ = trials
    cache_folder().mkdir(parents=True)
    (cache_folder() / name).write_text("[]")
    choice = chosen()
    assert not choice.known and choice.kernels
    assert [t.operation for t in choice.trials if t.why_not is None].count("linear") == 1
    assert len(warnings_of(caplog, "made anew")) == 1
    assert chosen().known and len(warnings_of(caplog, "")) == 1  # it was written anew


def test_a_choice_that_cannot_be_kept_is_made_all_the_same(nowhere, caplog, own_home):
    with nowhere:
        choice = chosen()
    assert not choice.known and choice.kernels
    assert len(warnings_of(caplog, "is not kept")) == 1
    assert not list(own_home.rglob("kernels-*"))  # no part of one


def test_an_engine_is_the_same_with_a_damaged_choice(monkeypatch, caplog):
    """It fell back on kernels whose bits depend on the batch, and said nothing."""
    pytest.importorskip("torch")
    pytest.importorskip("tokenizers")
    monkeypatch.setenv("HIBACHI_NATIVE", "0")  # they would be compiled for this test, in the background
    params, seen = SamplingParams(max_tokens=4, temperature=0), []
    for _ in range(2):
        with LLM("tiny", backend="torch", device="cpu", dtype="float32", autotune="0.02s") as llm:
            seen.append((llm.deterministic, type(llm.backend), llm.generate("It is", params)[0].text))
        for path in cache_folder().glob("kernels-*.json"):
            path.write_text("[]")
    assert seen[0] == seen[1] and seen[0][0] and warnings_of(caplog, "made anew")


# ---- the programs of JAX ---------------------------------------------------------------------------------------------

JAX = """
import logging, os, resource, sys
logging.basicConfig(format="LOG %(message)s")
from pathlib import Path
if sys.argv[1]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
import jax, jax.numpy as jnp
from hibachi_jax import JaxBackend
print("kept", JaxBackend()._kept)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
print("sum", float(jax.jit(lambda x: jnp.tanh(x @ x).sum())(jnp.ones((64, 64)))))
"""


def with_jax(home, limit="", **environment):
    env = {"PATH": "/usr/bin:/bin", "HIBACHI_NATIVE": "0", "PYTHONPATH": str(ROOT), "HOME": str(home)} | environment
    done = subprocess.run([sys.executable, "-c", JAX, limit], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "sum 4096.0" in done.stdout, done.stderr
    return done.stdout, done.stderr.count("LOG What JAX compiles is not kept")


@pytest.mark.slow
def test_programs_of_jax_that_cannot_be_kept_or_are_damaged_are_compiled_again(own_home):
    pytest.importorskip("jax")
    out, said = with_jax(own_home)
    assert "kept None" not in out and not said
    kept = [f for f in own_home.rglob("*-cache") if f.is_file()]
    assert kept
    for file in kept:
        file.write_bytes(file.read_bytes()[:100])
    assert with_jax(own_home)[1] == 0
    (own_home / "file").write_text("")
    for more in ({"XDG_CACHE_HOME": str(own_home / "file")}, {"limit": "1000"}):
        out, said = with_jax(own_home, **more)
        assert "kept None" in out and said == 1
