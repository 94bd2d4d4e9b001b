"""Every documented way of installing, for real: a fresh environment each, from a copy of the checkout."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from . import venvs

pytestmark = pytest.mark.install

ROOT = Path(__file__).parents[2]
# Run in the new environment. Sizes are of the files each distribution brought, without the bytecode that pip makes.
LOOK = """
import importlib.metadata, json, pathlib, hibachi
def size(d):
    files = [pathlib.Path(d.locate_file(f)) for f in d.files or [] if f.suffix != ".pyc"]
    return sum(p.stat().st_size for p in files if p.is_file())
print(json.dumps({
    "core": hibachi.__file__,
    "backends": list(hibachi.available_backends()),
    "sizes": {d.name.lower().replace("_", "-"): size(d) for d in importlib.metadata.distributions()},
}))
"""
ASK = """
import sys
from hibachi import BackendNotInstalled
from hibachi.backend.discover import resolve
try:
    resolve(sys.argv[1])
except BackendNotInstalled as e:
    print(e)
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy, so that nothing is written into the tree that is tested; a space in its name is no accident."""
    return venvs.checkout(tmp_path_factory.mktemp("a copy") / "checkout")


class Environment:
    def __init__(self, home: Path):
        self.home = home
        self.python = str(home / "venv" / "bin" / "python")
        subprocess.run([sys.executable, "-m", "venv", home / "venv"], check=True)
        self.pip("pip>=23.2", cwd=home)

    def pip(self, *arguments: str, cwd: Path) -> None:
        # The constraint keeps torch at the version whose CPU build the other tests use.
        constrained = os.environ | {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
        self.run("-m", "pip", "install", "--quiet", *arguments, cwd=cwd, env=constrained)

    def run(self, *arguments: str, cwd: Path | None = None, **more) -> str:
        command = [self.python, *arguments]
        done = subprocess.run(command, cwd=cwd or self.home, capture_output=True, text=True, **more)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def look(self) -> dict:
        return json.loads(self.run("-c", LOOK).splitlines()[-1])


@pytest.fixture
def environment(tmp_path):
    yield Environment(tmp_path)
    shutil.rmtree(tmp_path)  # half a gigabyte with torch in it


@pytest.mark.parametrize(
    "arguments, backends",
    [
        (["."], ["numpy"]),
        ([".[torch]"], ["numpy", "torch"]),
        ([".[jax]"], ["jax", "numpy"]),
        ([".[mlx]"], ["mlx", "numpy"]),
        (["./hibachi_torch"], ["numpy", "torch"]),
        (["--editable", ".[torch,jax,test]"], ["jax", "numpy", "torch"]),
    ],
    ids=" ".join,
)
def test_install(environment, checkout, arguments, backends):
    environment.pip(*arguments, cwd=checkout)
    environment.run("-m", "pip", "check")
    seen = environment.look()
    assert sorted(seen["backends"]) == backends
    for name in {"torch", "jax", "mlx"} & set(backends):
        environment.run("-c", f"import hibachi_{name}")
    if "--editable" in arguments:
        for package in ("hibachi", "hibachi_torch", "hibachi_jax"):
            where = environment.run("-c", f"import {package}; print({package}.__file__)")
            assert Path(where.strip()).is_relative_to(checkout)
        environment.run("-m", "pytest", "--version")
    else:
        assert Path(seen["core"]).is_relative_to(environment.home)
    if arguments == ["."]:
        brought = {name: size for name, size in seen["sizes"].items() if name not in {"pip", "setuptools"}}
        assert set(brought) == {"hibachi", "numpy", "array-api-compat", "typing-extensions"}
        assert sum(size for name, size in brought.items() if name != "numpy") <= 15e6
        for name in ("torch", "jax", "mlx"):  # none of them is installed, and the core says how to change that
            assert f"pip install '.[{name}]'" in environment.run("-c", ASK, name)
        assert "demo" in environment.run(str(environment.home / "venv" / "bin" / "hibachi"), "--help")
