"""A rank that another process of the same group has started: `python -m hibachi_torch.rank`."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from hibachi_torch.group import FOLDER


def main() -> None:
    open_, given, options = pickle.loads(Path(os.environ[FOLDER], "opening").read_bytes())
    try:
        open_(*given, **options)
    except SystemExit:  # rank 0 has closed
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # to take the interpreter apart takes a second or more, for which rank 0 would wait


if __name__ == "__main__":
    main()
