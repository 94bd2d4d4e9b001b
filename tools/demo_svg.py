"""Draw docs/demo.svg: `hibachi demo` as it was, frame by frame, in slow motion, as sixteen texts take 0.2 seconds.

    python tools/demo_svg.py [FILE]      default: docs/demo.svg; needs what `make demo` installs

The picture moves by CSS alone, as Git hosts remove scripts. A viewer that moves nothing shows the last frame, and so
does one who has asked for less motion.
"""

from __future__ import annotations

import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections import defaultdict
from collections.abc import Sequence
from fcntl import ioctl
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLUMNS, LINES = 96, 30
SLOWER = 4  # times; the picture says so
BEFORE, AFTER = 1.0, 6.0  # seconds that the first and the last frame are shown for
# The demo, drawn as often in slow motion as it is drawn in a terminal.
DEMO = f"import sys, hibachi.cli.demo as demo; demo.FRAME /= {SLOWER}; from hibachi.cli import main; sys.exit(main())"
WIDTH, HEIGHT, MARGIN = 8.4, 20, 18  # of a character, of a line, around them
# What hibachi.common.progress.Screen writes for a frame, and the end of each line.
FRAME = re.compile(r"\x1b\[\?7l(?:\x1b\[\d+A)?\r(.*?)\x1b\[J\x1b\[\?7h", re.DOTALL)
LINE_END = "\x1b[K\n"

Frame = tuple[float, list[str]]  # seconds since the first, lines
Span = tuple[float, float]  # seconds from, and until when, something is shown


def record(command: Sequence[str]) -> list[Frame]:
    """The frames that a command draws in a terminal of COLUMNS x LINES."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")} | {"TERM": "xterm"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=env, cwd=ROOT)
    os.close(theirs)
    frames, text = list[Frame](), ""
    while piece := _read(ours):
        now, text = time.monotonic(), text + piece.decode(errors="replace").replace("\r\n", "\n")
        while found := FRAME.search(text):
            frames.append((now - frames[0][0] if frames else now, found[1].split(LINE_END)[:-1]))
            text = text[found.end() :]
    os.close(ours)
    if process.wait() or not frames:
        raise SystemExit(f"{' '.join(command)} failed, or drew nothing")
    return [(0.0, frames[0][1]), *frames[1:]]


def _read(end: int) -> bytes:
    try:
        return os.read(end, 1 << 16)
    except OSError:  # Linux says so that the other end is closed
        return b""


def draw(frames: Sequence[Frame]) -> str:
    """The picture. Each line is drawn once for as long as it stays the same."""
    total = BEFORE + SLOWER * frames[-1][0] + AFTER
    starts = [0.0, *(BEFORE + SLOWER * seconds for seconds, _ in frames[1:])]
    shown: defaultdict[Span, list[str]] = defaultdict(list)
    height = max(len(lines) for _, lines in frames)
    for row in range(height):
        texts = [lines[row] if row < len(lines) else "" for _, lines in frames]
        first = 0
        for i in range(1, len(texts) + 1):
            if i == len(texts) or texts[i] != texts[first]:
                span = starts[first], starts[i] if i < len(texts) else total
                shown[span].append(_line(texts[first], row))
                first = i
    return _picture(shown, total, height)


def _line(text: str, row: int) -> str:
    parts, left, bold = list[str](), COLUMNS, False
    for part in re.split(r"(\x1b\[(?:1|22)m)", text):
        if part.startswith("\x1b"):
            bold = part == "\x1b[1m"
        elif part:
            cut = part[:left]
            left -= len(cut)
            parts.append(f"<tspan class='b'>{escape(cut)}</tspan>" if bold and cut else escape(cut))
    return f"<text x='{MARGIN}' y='{MARGIN + HEIGHT * row + 15}'>{''.join(parts)}</text>" if parts else ""


def _picture(shown: dict[Span, list[str]], total: float, height: int) -> str:
    rules, groups = list[str](), list[str]()
    for number, ((start, end), lines) in enumerate(sorted(shown.items())):
        if not (inside := "".join(lines)):
            continue
        if start == 0 and end == total:
            groups.append(f"<g>{inside}</g>")
            continue
        steps = [(0.0, "hidden")] * (start > 0) + [(start, "visible")] + [(end, "hidden")] * (end < total)
        frames = "".join(f"{100 * at / total:.2f}%{{visibility:{what}}}" for at, what in steps)
        rules += [f"@keyframes k{number}{{{frames}}}", f".k{number}{{animation-name:k{number}}}"]
        hidden = " visibility='hidden'" if end < total else ""  # where nothing moves
        groups.append(f"<g class='m k{number}'{hidden}>{inside}</g>")
    wide, high = round(2 * MARGIN + COLUMNS * WIDTH), 2 * MARGIN + (height + 1) * HEIGHT
    style = "\n".join(
        [
            "text{font:14px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre;fill:#24292f}",
            ".b{font-weight:bold}.s{opacity:.7}rect{fill:#f6f8fa;stroke:#d0d7de}",
            "@media(prefers-color-scheme:dark){text{fill:#d1d7e0}rect{fill:#15191f;stroke:#3d444d}}",
            f"@media(prefers-reduced-motion:no-preference){{.m{{animation:{total:.2f}s step-end infinite}}}}",
            *rules,
        ]
    )
    size = f"viewBox='0 0 {wide} {high}' width='{wide}' height='{high}'"
    pace = (
        f"<text class='s' x='{wide - MARGIN}' y='{high - MARGIN}' text-anchor='end'>shown {SLOWER} times slower</text>"
    )
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' {size} role='img'>",
            "<title>hibachi demo: sixteen prompts at once, then one by one</title>",
            f"<style>\n{style}\n</style>",
            f"<rect x='.5' y='.5' width='{wide - 1}' height='{high - 1}' rx='8'/>",
            *groups,
            pace,
            "</svg>\n",
        ]
    )


def main() -> None:
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "demo.svg"
    frames = record([sys.executable, "-c", DEMO, "demo", "--backend", "numpy"])
    file.write_text(draw(frames))
    print(f"{file}: {len(frames)} frames, {frames[-1][0]:.1f} s, {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
