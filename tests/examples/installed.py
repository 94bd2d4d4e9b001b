"""Installing an example's package where only the test sees it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def python_with(example: Path, target: Path) -> Callable[..., str]:
    """Installs `example` into `target`; gives a function that runs Python there and returns what it prints."""
    # Offline: what it needs is here already.
    offline = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, "--target", target, example], check=True)
    path = os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=target, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
