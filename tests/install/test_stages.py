"""Wheels that are made in one place and installed in another, as a Dockerfile does; and an index where somebody else
has taken our names: pip must not take a package from there.
"""

import json
import os
import re
import shlex
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from . import venvs
from .venvs import ROOT, run

pytestmark = [pytest.mark.install, pytest.mark.xdist_group("stages")]

STAGES = re.search(r"```Dockerfile\n(FROM.*?)```", (ROOT / "deploy/README.md").read_text(), re.S)[1]
FIRST, SECOND = re.findall(r"\bpip (?:wheel|install) .*", STAGES)
OURS = ("hibachi", "hibachi-torch", "hibachi-jax", "hibachi-mlx", "strict-backend", "more-models")
PIPS = {"oldest": "pip==23.2", "newest": "pip"}
ALONE = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}  # only what a command names
SAY = """
import hibachi
from hibachi import LLM, SamplingParams
for backend in ("torch", "numpy"):
    with LLM("tiny", backend=backend) as llm:
        (answer,) = llm.generate(["She was"], SamplingParams(temperature=0, max_tokens=5))
        print(*answer.choices[0].token_ids)
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return venvs.checkout(tmp_path_factory.mktemp("a copy") / "checkout")


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """python(kind of PIPS): the Python of an environment that has it, made once, and what builds a wheel."""
    made = {}

    def found(kind):
        if kind not in made:
            home = tmp_path_factory.mktemp(kind)
            run(sys.executable, "-m", "venv", home / "venv", cwd=home)
            made[kind] = home / "venv" / "bin" / "python"
            run(made[kind], "-m", "pip", "install", "--quiet", "--upgrade", PIPS[kind], "hatchling", "build", cwd=home)
        return made[kind]

    return found


@pytest.mark.slow
def test_wheels_of_the_first_stage_are_all_that_the_second_needs(python, checkout, tmp_path):
    wheels = tmp_path / "wheels"

    def moved(command):
        places = {"/src": str(checkout), "/wheels": str(wheels)}
        return [re.sub(r"^/(src|wheels)", lambda m: places[m[0]], word) for word in shlex.split(command)[1:]]

    run(python("newest"), "-m", "pip", "--quiet", *moved(FIRST), cwd=tmp_path)
    told = {wheel.name.partition("-")[0]: metadata(wheel) for wheel in wheels.glob("hibachi*.whl")}
    assert told.keys() == {"hibachi", "hibachi_torch"}
    assert "Requires-Dist: hibachi-torch==" in told["hibachi"] and "Requires-Dist: hibachi" not in told["hibachi_torch"]
    assert "file:" not in "".join(told.values()) and str(checkout) not in "".join(told.values())
    image = tmp_path / "image" / "bin" / "python"
    run(sys.executable, "-m", "venv", tmp_path / "image", cwd=tmp_path)
    checkout.rename(checkout.with_name("gone"))
    try:
        run(image, "-m", "pip", "--quiet", *moved(SECOND), cwd=tmp_path, **ALONE)
    finally:
        checkout.with_name("gone").rename(checkout)
    run(image, "-m", "pip", "check", cwd=tmp_path)
    torch, numpy = run(image, "-c", SAY, cwd=tmp_path).splitlines()
    assert torch == numpy and len(torch.split()) == 5
    shutil.rmtree(tmp_path)  # half a gigabyte with torch in it


def metadata(wheel):
    with zipfile.ZipFile(wheel) as file:
        (name,) = (n for n in file.namelist() if n.endswith(".dist-info/METADATA"))
        return file.read(name).decode()


@pytest.fixture(scope="module")
def strangers(tmp_path_factory):
    """The address of an index that has our names, in our version and in one that is far newer."""
    home = tmp_path_factory.mktemp("index")
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    for name in OURS:
        (home / name).mkdir()
        links = []
        for v in (version, "99.0"):
            info = f"{name.replace('-', '_')}-{v}"
            with zipfile.ZipFile(home / name / f"{info}-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"{info}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {v}\n")
                wheel.writestr(
                    f"{info}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
                )
                wheel.writestr(f"{info}.dist-info/RECORD", "")
            links.append(f'<a href="{info}-py3-none-any.whl">{info}-py3-none-any.whl</a>')
        (home / name / "index.html").write_text(f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>")
    return home


def chosen(python, strangers, cwd, *arguments):
    """{name: where from} of all that pip would install."""
    index = os.environ.get("PIP_EXTRA_INDEX_URL", "") + " " + strangers.as_uri()
    report = cwd / "report.json"
    options = ["--dry-run", "--ignore-installed", "--no-build-isolation", "--quiet", "--report", report]
    run(python, "-m", "pip", "install", *options, *arguments, cwd=cwd, PIP_EXTRA_INDEX_URL=index)
    found = json.loads(report.read_text())["install"]
    return {item["metadata"]["name"]: item["download_info"]["url"] for item in found}


@pytest.mark.parametrize("kind", PIPS)
@pytest.mark.parametrize(
    "asked, expected",
    [
        (["."], {"hibachi"}),
        ([".[jax]"], {"hibachi", "hibachi-jax"}),
        (["./hibachi_jax"], {"hibachi", "hibachi-jax"}),
        ([".", "./hibachi_jax"], {"hibachi", "hibachi-jax"}),
        (["--editable", ".[jax]"], {"hibachi"}),
        (["--editable", "./hibachi_jax"], {"hibachi-jax"}),
        (["--editable", ".", "--editable", "./hibachi_jax"], {"hibachi", "hibachi-jax"}),
        (["./examples/third_party_backend"], {"strict-backend"}),
        (["./examples/third_party_model"], {"more-models"}),
    ],
    ids=lambda asked: " ".join(asked) if isinstance(asked, list) else "",
)
def test_a_checkout_takes_nothing_from_a_stranger(kind, asked, expected, python, strangers, checkout):
    found = chosen(python(kind), strangers, checkout, *asked)
    assert expected == found.keys() & set(OURS)
    assert {name for name in expected if not found[name].startswith(checkout.as_uri())} == set()


@pytest.mark.parametrize("what", ["wheel", "sdist"])
def test_a_backend_alone_does_not_take_a_strangers_core(what, python, strangers, checkout, tmp_path):
    command = ["-m", "build", f"--{what}", "--no-isolation", "--outdir", tmp_path, checkout / "hibachi_jax"]
    run(python("newest"), *command, cwd=tmp_path)
    (made,) = Path(tmp_path).iterdir()
    assert chosen(python("newest"), strangers, tmp_path, made).keys() & set(OURS) == {"hibachi-jax"}


def test_the_index_of_strangers_would_be_used(python, strangers, tmp_path):
    """Otherwise the tests above could not fail."""
    found = chosen(python("newest"), strangers, tmp_path, "hibachi")
    assert found["hibachi"].startswith(strangers.as_uri()) and "99.0" in found["hibachi"]
