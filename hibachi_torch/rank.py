"""A rank that another process of the same group has started: `python -m hibachi_torch.rank`."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

from hibachi_torch.group import FOLDER


def main() -> None:
    open_, given, options = pickle.loads(Path(os.environ[FOLDER], "opening").read_bytes())
    open_(*given, **options)  # returns when rank 0 has closed


if __name__ == "__main__":
    main()
