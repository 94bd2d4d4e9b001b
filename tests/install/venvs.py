"""Environments of their own for programs that are not ours."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLIENTS = Path(__file__).parent / "clients"
VERSIONS = "import importlib.metadata as m, sys; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep=', ')"
OFFLINE = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_COLOR": "1"}


def checkout(place):
    """A copy of this one there, without what was made in it. Returns the place."""
    skip = shutil.ignore_patterns(
        ".git", ".venv*", "__pycache__", ".*_cache", ".smollm2", ".g2p", ".templates", ".tokenizers", "dist"
    )
    return shutil.copytree(ROOT, place, ignore=skip)


def run(*command, cwd, input=None, **env):
    """What it printed. input: a text that it reads."""
    done = subprocess.run(
        list(map(str, command)),
        **{"stdin": subprocess.DEVNULL} if input is None else {"input": input},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=1200,
        env=os.environ | OFFLINE | {"HF_HOME": str(cwd)} | env,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


def environment(home, *packages):
    """Its folder of programs. Says which versions it has of what was asked for."""
    return _filled(home, packages, PIP_CONSTRAINT=str(ROOT / "constraints.txt"))


def strangers(home, *packages):
    """As `environment`, with the versions that these packages ask for. Where pip cannot install them, the test is
    skipped.
    """
    try:
        return _filled(home, packages)
    except (AssertionError, subprocess.TimeoutExpired) as e:
        pytest.skip(f"pip cannot install {', '.join(packages)}: {str(e)[-300:].strip()}")


def strangers_for_node(home, *packages):
    """Installs them into `home`, and says which versions it has. Where npm is missing or fails, the test is skipped."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    (home / "package.json").write_text("{}")
    try:
        run("npm", "install", "--no-audit", "--no-fund", "--silent", *packages, cwd=home)
    except (AssertionError, subprocess.TimeoutExpired) as e:
        pytest.skip(f"npm cannot install {', '.join(packages)}: {str(e)[-300:].strip()}")
    names = [re.sub(r"(?<=.)@.*", "", package) for package in packages]
    abouts = [json.loads((home / "node_modules" / name / "package.json").read_text()) for name in names]
    print("\n" + ", ".join(f"{about['name']} {about['version']}" for about in abouts))


def transcript(python, setup, asked, cwd):
    """What a client said to each expression of `asked`, by its name; see clients/transcript.py, whose text is shown."""
    told = json.dumps({"setup": setup, "asked": asked})
    shown, said = run(python, CLIENTS / "transcript.py", cwd=cwd, input=told).rstrip("\n").rsplit("\n", 1)
    print(f"\n{shown}")
    return json.loads(said)


def _filled(home, packages, **env):
    run(sys.executable, "-m", "venv", home / "venv", cwd=home)
    python = home / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", *packages, cwd=home, **env)
    names = [re.split(r"[^\w-]", package)[0] for package in packages]
    print(f"\n{run(python, '-c', VERSIONS, *names, cwd=home).strip()}")
    return home / "venv" / "bin"
