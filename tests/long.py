"""Which tests `make quick` leaves out: writes long.txt from what pytest says of durations. `make long` runs it."""

import re
import sys
from collections import defaultdict
from pathlib import Path

NAMES = Path(__file__).with_suffix(".txt")
MOST = 0.1  # seconds that a case of a test may take on average, set-up included


def main() -> None:
    times: dict[str, float] = defaultdict(float)
    cases: dict[str, set[str]] = defaultdict(set)
    for line in sys.stdin:
        if found := re.match(r"([\d.]+)s (?:call|setup|teardown) +(([^\[]+).*)", line):
            times[name := found[3].strip()] += float(found[1])
            cases[name].add(found[2])
    if not times:
        sys.exit("no durations to read; see `make long`")
    NAMES.write_text("".join(f"{name}\n" for name in sorted(times) if times[name] > MOST * len(cases[name])))


if __name__ == "__main__":
    main()
