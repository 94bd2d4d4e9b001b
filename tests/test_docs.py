"""What the pages say is true: their code runs and prints what is shown, their commands, files and names exist.

(That no page tells a reader to install by the bare name is checked in test_packaging.py.)
"""

import contextlib
import importlib.util
import io
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

import hibachi
from hibachi.cli.main import parser
from hibachi.serve.app import ROUTES

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "examples/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Block:
    kind: str
    text: str
    line: int


def blocks(page):
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    return [Block(m[1], m[2], text.count("\n", 0, m.start(2))) for m in FENCE.finditer(text)]


def prose(page):
    return FENCE.sub("", page.read_text())


def page_id(page):
    return str(page.relative_to(ROOT))


def programs(page):
    """(a block of Python, what it prints or None): a text block that follows one at once is what it prints."""
    text = page.read_text()
    found = list(FENCE.finditer(text))
    for i, m in enumerate(found):
        if m[1] == "python":
            after = found[i + 1] if i + 1 < len(found) else None
            shown = after is not None and after[1] == "text" and not text[m.end() : after.start()].strip()
            # Blank lines before it, so that a traceback names the line of the page.
            yield "\n" * text.count("\n", 0, m.start(2)) + m[2], after[2] if shown else None


ADDRESS = "http://127.0.0.1:8000"


@contextlib.contextmanager
def served(page, folder):
    """Where the model is served that is a page's first block of Python, if other blocks ask ADDRESS for it."""
    model, *others = [source for source, _ in programs(page)] or [""]
    if not any(ADDRESS in source for source in others):
        yield ADDRESS
        return
    from hibachi.lm.own import open_model

    from .serve.conftest import site

    file, name = re.search(r"^hibachi serve (\w+\.py):(\w+)$", page.read_text(), re.MULTILINE).groups()
    (folder / file).write_text(model)
    with open_model(f"{folder / file}:{name}") as what, site(what) as here:
        yield here.url


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_python_of_a_page_runs_and_prints_what_is_shown(page, tmp_path):
    """All blocks of a page in one namespace, from top to bottom, as a reader would paste them."""
    namespace = {"__name__": "__main__"}
    with served(page, tmp_path) as url:
        for source, shown in programs(page):
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(source.replace(ADDRESS, url), str(page), "exec"), namespace)
            if shown is not None:
                assert out.getvalue().rstrip() == shown.rstrip()


def test_the_example_of_the_readme_does_the_same_on_every_backend():
    namespace, printed = {}, []
    for source, _ in list(programs(ROOT / "README.md"))[:3]:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(source, "README.md", "exec"), namespace)
        printed.append(out.getvalue())
    assert printed[0]
    assert printed == printed[:1] * 3


def test_the_pages_have_the_examples_that_they_should():
    count = {page_id(page): len(list(programs(page))) for page in PAGES}
    assert count["README.md"] == 5  # NumPy, PyTorch, JAX, a language model, a model to be served
    assert count["docs/models.md"] >= 10
    assert count["docs/backends.md"] >= 3


SERVED = {route.path for route in ROUTES} | {"/metrics"}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]["custom"]


def check_command(line):
    """That a line of a shell block names commands, options and files that exist."""
    words = shlex.split(line, comments=True)
    if not words:
        return
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in targets
    elif words[0] == "hibachi":
        parser().parse_args(words[1:])  # exits for an unknown command or option
    elif words[0] == "curl":
        [url] = (w for w in words if w.startswith("http://127.0.0.1:8000/"))
        assert url.removeprefix("http://127.0.0.1:8000") in SERVED
    elif words[:2] == ["pip", "install"]:
        for place in (w for w in words[2:] if not w.startswith("-")):
            folder, _, extras = place.partition("[")
            assert (ROOT / folder / "pyproject.toml").is_file()
            assert set(filter(None, extras.rstrip("]").split(","))) <= {*EXTRAS["backends"], *EXTRAS["extras"]}
    elif words[0] in ("python", ".venv/bin/python"):
        assert (ROOT / words[1]).is_file()
    else:
        raise AssertionError(f"no rule for the command {words[0]!r}")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_commands_of_a_page_exist(page):
    for block in blocks(page):
        if block.kind == "sh":
            for line in block.text.splitlines():
                check_command(line)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_block_says_what_it_is(page):
    assert {b.kind for b in blocks(page)} <= {"python", "text", "sh", "toml"}


def anchors(page):
    """Names of the headings of a page, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        found = (page.parent / file).resolve() if file else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_files_that_a_page_names_exist(page):
    folders = [ROOT, ROOT / "hibachi", ROOT / "docs"]
    for name in re.findall(r"`((?:[\w-]+/)+[\w.-]*|[\w-]+\.(?:py|toml))`", prose(page)):
        media_type = name.startswith(("application/", "text/"))
        assert media_type or any((folder / name).exists() for folder in folders), name


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_names_that_a_page_uses_are_public(page):
    for name in re.findall(r"\bhibachi\.([A-Za-z]\w*)", page.read_text()):
        group = name in ("backends", "kernels", "models", "policies", "router_policies")  # of entry points
        assert hasattr(hibachi, name) or group or importlib.util.find_spec(f"hibachi.{name}"), name


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_a_page_has_no_overlong_lines_and_no_path_of_a_machine(page):
    for number, line in enumerate(page.read_text().splitlines(), 1):
        assert len(line) <= 125 or line.startswith("|"), f"line {number}"
        assert not re.search(r"(?<!\w)/(home|work|tmp|root|Users)/", line), f"line {number}"
