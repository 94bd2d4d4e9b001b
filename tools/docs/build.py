"""Build the site of the documentation into site/, and check every link in it: `make docs`.

    python tools/docs/build.py [FOLDER]      default: site

Its pages are the Markdown files of the checkout, in the same folders, so that their links are right on a Git host and
here. Whatever they link to becomes a page as well: a program is shown, a folder is its README or a list of its files.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser
from os.path import relpath
from pathlib import Path
from urllib.parse import unquote, urlsplit

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

import reference  # noqa: E402  # beside this file
from mkdocs.commands.build import build  # noqa: E402
from mkdocs.config import load_config  # noqa: E402

FENCE = re.compile(r"^```\w*\n.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
CODE_IN_TABLE = re.compile(r"(?<!`)`[^`\n]*\\\|[^`\n]*`")
PICTURES = {".png", ".svg"}


def sources() -> list[Path]:
    """The pages that are there for themselves; others come in by links."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


class Source:
    """The folder that MkDocs reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.waiting, self.seen = sources(), set[Path]()
        while self.waiting:
            file = self.waiting.pop().resolve()
            if file not in self.seen:
                self.seen.add(file)
                self.write(file)
        for name, text in reference.pages().items():
            self.put(ROOT / "reference" / name, text)
        for name in ("site.css", "iframe-worker.js"):
            shutil.copy(HERE / name, folder)

    def put(self, place: Path, text: str) -> None:
        target = self.folder / place.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def write(self, file: Path) -> None:
        if file.is_dir():
            inside = [f for f in sorted(file.rglob("*")) if f.is_file() and f.name[0] != "."]
            inside = [f for f in inside if "__pycache__" not in f.parts]
            lines = [f"- [{f.relative_to(file)}]({self.link(f, file)})" for f in inside]
            self.put(page_of(file), f"# {file.relative_to(ROOT)}\n\n" + "\n".join(lines) + "\n")
        elif file.suffix in PICTURES:
            target = self.folder / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
        elif file.suffix == ".md":
            self.put(file, self.rewritten(file))
        else:
            kind = {".py": "python", ".yaml": "yaml", ".toml": "toml"}.get(file.suffix, "text")
            front = "---\nsearch:\n  boost: 0.3\n---\n"
            self.put(page_of(file), f"{front}# {file.relative_to(ROOT)}\n\n~~~~~~{kind}\n{file.read_text()}~~~~~~\n")

    def rewritten(self, file: Path) -> str:
        """A page whose links lead to what is on the site."""

        def new(m: re.Match[str]) -> str:
            path, hash, anchor = m[2].partition("#")
            if "://" in path or not path:
                return m[0]
            target = (file.parent / path).resolve()
            if not target.exists():
                raise SystemExit(f"{file.relative_to(ROOT)}: {m[2]} leads nowhere")
            return f"{m[1]}{self.link(target, file.parent)}{hash}{anchor}{m[3]}"

        text, end, parts = file.read_text(), 0, list[str]()
        for fence in FENCE.finditer(text):
            parts += [LINK.sub(new, text[end : fence.start()]), fence[0]]
            end = fence.end()
        text = "".join([*parts, LINK.sub(new, text[end:])])
        # A bar in a cell's code is escaped for Git hosts; MkDocs needs no escape there, and would show it.
        return CODE_IN_TABLE.sub(lambda m: m[0].replace(r"\|", "|"), text)

    def link(self, target: Path, folder: Path) -> str:
        """From a page in `folder`."""
        if target.is_dir() and (target / "README.md").is_file():
            target /= "README.md"
        self.waiting.append(target)
        return relpath(page_of(target), folder)


def page_of(file: Path) -> Path:
    """The Markdown that stands for a file or a folder."""
    if file.is_dir():
        return file / "index.md"
    return file if file.suffix in PICTURES | {".md"} else file.with_name(f"{file.name}.md")


def make(site: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Source(Path(folder))
        config = load_config(str(HERE / "mkdocs.yml"), docs_dir=folder, site_dir=str(site))
        for section in config.nav:
            if "Reference" in section:
                section["Reference"] = [f"reference/{name}" for name in reference.pages()]
        named = {page for section in config.nav for part in section.values() for page in map(_file, part)}
        if left := {str(f.relative_to(ROOT)) for f in sources()} - named:
            raise SystemExit(f"tools/docs/mkdocs.yml: no place in nav for {', '.join(sorted(left))}")
        python = config.plugins["mkdocstrings"].config["handlers"]["python"]
        python["paths"] = [str(ROOT)]
        python["options"]["extensions"] = [f"{HERE / 'reference.py'}:Prose"]
        build(config)
    (site / "404.html").unlink(missing_ok=True)  # for web servers only: its links begin with a slash
    for sitemap in site.glob("sitemap.xml*"):  # of addresses, and there is none
        sitemap.unlink()


def _file(entry: str | dict[str, str]) -> str:
    return entry if isinstance(entry, str) else next(iter(entry.values()))


@dataclass
class Html(HTMLParser):
    """What a page has that can be wrong."""

    path: Path
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)  # that a reader may follow
    loads: list[str] = field(default_factory=list)  # that a browser loads with the page
    broken: list[str] = field(default_factory=list)  # paragraphs in which Markdown was not understood
    _code: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = {name: value or "" for name, value in attrs}
        self.ids |= {of[name] for name in ("id", "name") if name in of}
        self._code += tag in ("code", "pre", "script", "style", "td")
        if tag == "a" and "href" in of:
            self.links.append(of["href"])
        elif tag in ("script", "img", "iframe", "source", "video") and "src" in of:
            self.loads.append(of["src"])
        elif tag == "link" and "href" in of:
            self.loads.append(of["href"])

    def handle_endtag(self, tag: str) -> None:
        self._code -= tag in ("code", "pre", "script", "style", "td")

    def handle_data(self, data: str) -> None:
        if r"\|" in data:
            self.broken.append(data.strip()[:60])
        if not self._code and (found := re.search(r"^(- |1\. |\|.*\|$)|```|\]\(|\]\[", data, re.MULTILINE)):
            self.broken.append(data[found.start() :][:60])


def check(site: Path) -> Counter[str]:
    """How many pages, links, files and external addresses there are. Raises SystemExit with all that is wrong."""
    pages = {path: Html(path) for path in sorted(site.rglob("*.html"))}
    count, wrong = Counter[str](pages=len(pages)), list[str]()
    for path, page in pages.items():
        for kind, address in [*(("links", x) for x in page.links), *(("files", x) for x in page.loads)]:
            where = f"{path.relative_to(site)}: {address}"
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                if kind == "files" and parts.scheme != "data":
                    wrong.append(f"{where} is loaded from the network")
                elif parts.scheme not in ("https", "mailto", "data") or (parts.scheme == "https" and not parts.netloc):
                    wrong.append(f"{where} is no address of https")
                count["external"] += 1
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                wrong.append(f"{where} leads nowhere")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids | {"__top"}:
                wrong.append(f"{where} has no such anchor")
            count[kind] += 1
        wrong += [f"{path.relative_to(site)}: Markdown that was not understood: {text!r}" for text in page.broken]
    if wrong:
        raise SystemExit("\n".join(wrong))
    return count


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    site = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "site").resolve()
    print("Making the pages, and then checking every link: half a minute ...", flush=True)
    make(site)
    n = check(site)
    print(
        f"{n['pages']} pages, {n['links']} links, {n['files']} files that pages load, {n['external']} addresses "
        f"elsewhere: none is broken. Open {site / 'index.html'}"
    )


if __name__ == "__main__":
    main()
