"""What is kept for the next start: damaged, or where nothing can be kept."""

import json
import logging
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from hibachi.backend.kernels import library
from hibachi.backend.kernels.library import SWITCH
from hibachi.common.cachefolder import move
from hibachi.errors import ConfigError
from hibachi.llm.tune import store as kept
from hibachi.llm.tune.cases import ModelSizes
from hibachi.llm.tune.trial import KernelTrial

from ...tensor.native import begin_anew, small_kernels

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
def kernels(tmp_path, own_home, monkeypatch):
    """The folder of small sources, of which nothing is compiled yet."""
    sources = small_kernels(monkeypatch, tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(own_home / "cache"))
    return sources


@pytest.fixture
def found(kernels, monkeypatch):
    """found(): the kernels, as another process finds them."""

    def find():
        begin_anew(monkeypatch)
        return library.library()

    return find


def test_kernels_are_had_once_there_is_room_again(kernels, found, own_home, small_disk):
    with small_disk(100):
        assert library.why_missing()
    assert found().kernels.panel() == 3
    assert not [p for p in own_home.rglob("*") if p.name.startswith("building-")]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    (tmp_path / "made").write_bytes(b"all of it")
    seen = []
    monkeypatch.setattr("os.fsync", lambda _: seen.append((tmp_path / "to").exists()))
    move(tmp_path / "made", tmp_path / "to")
    assert seen == [False] and (tmp_path / "to").read_bytes() == b"all of it"


# ---- the choice of kernels -------------------------------------------------------------------------------------------

SIZES = ModelSizes("float32", ((96, 64, 2), (64, 64, 2), (256, 64, 2), (64, 128, 2)), (300, 64), 2, 4, 2, 16)


def changed(**values):
    return lambda found: json.dumps(found | values)


CHOICES = {
    "an empty list": lambda found: "[]",
    "nothing": lambda found: "",
    "cut off": lambda found: json.dumps(found)[:-20],
    "numbers": lambda found: "[1, 2]",
    "not UTF-8": lambda found: b"\xff\xfe\xff",
    "deep": lambda found: "[" * 100_000,
    "large": lambda found: json.dumps(found) + " " * (2 * MB),
    "another format": changed(format=99),
    "no model": changed(model=None),
    "a model of other fields": changed(model={"dtype": "float32"}),
    "sizes that are words": changed(model={"dtype": "float32", "matrices": "many", "head": 3}),
    "taken is a list": changed(taken=["native"]),
    "a name that is a number": changed(taken={"linear": 7}),
    "a number of too many digits": lambda found: f'{{"format": {"9" * 10_000}}}',
}


@pytest.mark.parametrize("what", [*CHOICES, "whole"])
def test_a_damaged_file_of_kernels_is_told(what, tmp_path):
    path = tmp_path / "kernels.json"
    kept.write(path, SIZES, True, [KernelTrial("linear", "native", {"1": 1.0}, None, None)])
    content = CHOICES.get(what, json.dumps)(json.loads(path.read_text()))
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if what == "whole":
        assert kept.read(path) == (SIZES, True, {"linear": "native"})
    else:
        with pytest.raises(ConfigError, match=r"kernels.json is no file of kernels.*Write one with --autotune") as e:
            kept.read(path)
        assert len(str(e.value)) < 600


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
    env = {"PATH": "/usr/bin:/bin", SWITCH: "none", "PYTHONPATH": str(ROOT), "HOME": str(home)} | environment
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
