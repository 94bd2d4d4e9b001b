"""Environments of their own for programs that are not ours."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSIONS = "import importlib.metadata as m, sys; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep=', ')"


def run(*command, cwd, **env):
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(cwd), "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_COLOR": "1"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=1200, env=os.environ | offline | env
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


def environment(home, *packages):
    """Its folder of programs. Says which versions it has of what was asked for."""
    run(sys.executable, "-m", "venv", home / "venv", cwd=home)
    pip = [home / "venv" / "bin" / "python", "-m", "pip", "install", "--quiet"]
    run(*pip, *packages, cwd=home, PIP_CONSTRAINT=str(ROOT / "constraints.txt"))
    names = [re.split(r"[^\w-]", package)[0] for package in packages]
    told = run(home / "venv" / "bin" / "python", "-c", VERSIONS, *names, cwd=home)
    print(f"\n{told.strip()}")
    return home / "venv" / "bin"
