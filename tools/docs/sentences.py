"""Count the sentences of the documentation, and those of more than 30 words.

    python tools/docs/sentences.py [--show] [FILE ...]      default: README, CONTRIBUTING, SECURITY and docs/*.md

Code blocks, tables and headings are left out. An item of a list ends a sentence; so do ".", "?", "!", and a
colon at the end of a line before a list or a block.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 30  # words
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
ITEM = re.compile(r"^ *(?:[-*]|\d+\.) +", re.MULTILINE)
# What may begin the next sentence: a capital, a name in code, a link, a bold word, our own name.
END = re.compile(r"(?<=[.?!])[*)\"']*\s+(?=[\"'(*\[`]*(?:[A-Z`\[]|hibachi))")
ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|etc|vs|cf)\.$")


def default_files() -> list[Path]:
    return [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted(
        (ROOT / "docs").glob("*.md")
    )


def sentences(text: str) -> Iterator[str]:
    text = FENCE.sub("\n\n", text)
    kept = [line for line in text.splitlines() if not re.match(r" *\||#|<!--|!\[", line)]
    for paragraph in re.split(r"\n\s*\n", ITEM.sub("\n\n", "\n".join(kept))):
        flat = " ".join(re.sub(r"\]\([^)]*\)", "]", paragraph).split())
        begun = ""
        for part in END.split(flat):
            begun = f"{begun} {part}".strip()
            if not ABBREVIATION.search(begun):
                yield from filter(None, [begun])
                begun = ""
        yield from filter(None, [begun])


def words(sentence: str) -> int:
    """Code in backticks is one word, however long."""
    return len(re.findall(r"\S*\w\S*", re.sub(r"`[^`]*`", "code", sentence)))


def count(file: Path) -> tuple[int, list[str]]:
    """How many sentences, and the long ones."""
    found = list(sentences(file.read_text()))
    return len(found), [sentence for sentence in found if words(sentence) > LIMIT]


def line(name: str, total: int, longer: int) -> str:
    return f"{name:26} {total:5} sentences, {longer:3} of over {LIMIT} words, {longer / max(total, 1):6.1%}"


def main() -> None:
    show = "--show" in sys.argv[1:]
    files = [Path(arg).resolve() for arg in sys.argv[1:] if arg != "--show"] or default_files()
    total = longer = 0
    for file in files:
        n, long = count(file)
        total, longer = total + n, longer + len(long)
        print(line(str(file.relative_to(ROOT)), n, len(long)))
        if show:
            print(*(f"    {words(sentence)}: {sentence}" for sentence in long), sep="\n")
    print(line("all", total, longer))


if __name__ == "__main__":
    main()
