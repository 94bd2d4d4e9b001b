"""What `pip install .` brings and what `import hibachi` costs beyond NumPy's own import.

Targets: 3 dependencies, at most 15 MB without NumPy and the bytecode that pip makes, at most 0.25 s. Makes a
throw-away environment.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import venv
from pathlib import Path
from statistics import median

TIMER = "import time, numpy; t = time.perf_counter(); import hibachi; print(time.perf_counter() - t)"
ROOT = Path(__file__).parent.parent


def run(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=tempfile.gettempdir()).stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=9)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder, "bin", "python")
        before = set(run(python, "-m", "pip", "freeze", "--all").split())
        run(python, "-m", "pip", "install", "--quiet", str(ROOT))
        packages = sorted(set(run(python, "-m", "pip", "freeze", "--all").splitlines()) - before)
        site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        size = {
            p.name: sum(f.stat().st_size for f in p.rglob("*") if f.is_file() and f.suffix != ".pyc")
            for p in site.iterdir()
            if p.is_dir()
        }
        ours = {
            n: s for n, s in size.items() if not n.startswith(("numpy", "pip", "setuptools", "pkg_resources", "_dist"))
        }
        times = [float(run(python, "-c", TIMER)) for _ in range(args.repeat)]
    print("installed:", ", ".join(p.split(" @ ")[0] for p in packages))
    print(f"size without NumPy: {sum(ours.values()) / 1e6:.1f} MB")
    print(f"import hibachi beyond numpy: {median(times) * 1e3:.0f} ms (median of {len(times)})")
