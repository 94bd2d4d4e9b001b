"""What the pages say is true: their code runs and prints what is shown, their commands, files and names exist.

(That no page tells a reader to install by the bare name is checked in test_packaging.py.)
"""

import ast
import contextlib
import importlib.util
import io
import re
import shlex
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

import pytest

import hibachi
import hibachi.errors
from benchmarks.bench.__main__ import parser as bench_parser
from hibachi.cli.main import parser
from hibachi.server.app import ROUTES

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
LINKED = [*PAGES, *(ROOT / name for name in ("benchmarks/README.md", "benchmarks/RESULTS.md", "deploy/README.md"))]
GROUPS = (
    "backends",
    "kernels",
    "models",
    "policies",
    "router_policies",
    "guides",
    "drafters",
    "kv_stores",
)  # of entry points
LOGGERS = ("serve",)
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
    from hibachi.llm.own import open_model

    from .serve.conftest import site

    file, name = re.search(r"^hibachi serve (\w+\.py):(\w+)$", page.read_text(), re.MULTILINE).groups()
    (folder / file).write_text(model)
    with open_model(f"{folder / file}:{name}") as what, site(what) as here:
        yield here.url


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_python_of_a_page_runs_and_prints_what_is_shown(page, tmp_path, monkeypatch):
    """Each block by itself, as a reader would paste it: with no name from another one, in an empty folder, and without
    the variable by which the tests choose NumPy.
    """
    monkeypatch.delenv("HIBACHI_DEFAULT_BACKEND")
    with served(page, tmp_path) as url:
        for source, shown in programs(page):
            printed = run_alone(source.replace(ADDRESS, url), page)
            if shown is not None:
                assert printed.rstrip() == shown.rstrip()


def run_alone(source, page):
    """What a program prints."""
    with (
        tempfile.TemporaryDirectory() as empty,
        contextlib.chdir(empty),
        contextlib.redirect_stdout(io.StringIO()) as out,
    ):
        exec(compile(source, str(page), "exec"), {"__name__": "__main__"})
    return out.getvalue()


def test_the_example_of_the_readme_does_the_same_on_every_backend():
    sources = [(s, page) for page in (ROOT / "README.md", ROOT / "docs/models.md") for s, _ in programs(page)]
    printed = [run_alone(source, page) for source, page in sources if "NextNote" in source]
    assert printed[0]
    assert printed == printed[:1] * 3


BRINGS = {  # what a block uses: the extra, or the package, that brings it
    r"^(?:import|from) torch\b": "torch",
    r"^(?:import|from) jax\b": "jax",
    r"^(?:import|from) transformers\b": "hf",
    r"^(?:import|from) msgspec\b": "serve",
    r"\bLLM\(": "text",
    r"^(?:import|from) array_api_strict\b": "array-api-strict",
}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_a_page_says_what_its_programs_need_to_be_installed(page):
    source = "\n".join(source for source, _ in programs(page))
    for used, extra in BRINGS.items():
        if re.search(used, source, re.MULTILINE):
            named = rf"extras? [^.]*`{extra}`|\[(?:[\w,]+,)?{extra}[\],]|pip install {extra}"
            assert re.search(named, page.read_text()), f"{page_id(page)} does not say: {extra}"


def test_the_pages_have_the_examples_that_they_should():
    count = {page_id(page): len(list(programs(page))) for page in PAGES}
    assert count["README.md"] == 3  # a class of one's own, a language model, a model to be served
    assert count["docs/models.md"] >= 10
    assert count["docs/backends.md"] >= 3


SERVED = {route.path for route in ROUTES} | {"/metrics"}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]["custom"]


def check_program(word, told):
    """A program that a command names is in the checkout, told of elsewhere on the page, or is the reader's own."""
    file = re.fullmatch(r"((?:[\w-]+/)*)(\w+\.py)(?::\w+)?", word)
    if file and file[1]:
        assert (ROOT / file[1] / file[2]).is_file(), f"{word} is not there"
    elif file:
        assert file[2].startswith(("my_", "mine.", "my.")) or file[2] in told, f"{word}: where is it to be found?"


def check_command(line, told):
    """That a line of a shell block names commands, options and files that exist. told: the text of its page."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):  # a variable of the environment
        del words[0]
    if not words:
        return
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(w for w in words[1:] if "=" not in w) <= set(targets)
    elif words[0] == "hibachi":
        parser().parse_args(words[1:])  # exits for an unknown command or option
        for word in words[1:]:
            check_program(word, told.replace(line, ""))
    elif words[0] == "torchrun":
        assert words[1] == "--nproc-per-node" and words[3:5] == ["-m", "hibachi"]
        parser().parse_args(words[5:])
    elif words[0] == "curl":
        [url] = (w for w in words if w.startswith("http://127.0.0.1:8000/"))
        assert url.removeprefix("http://127.0.0.1:8000") in SERVED
    elif words[:2] == ["pip", "install"]:
        for place in (w for w in words[2:] if not w.startswith("-")):
            folder, _, extras = place.partition("[")
            assert (ROOT / folder / "pyproject.toml").is_file()
            assert set(filter(None, extras.rstrip("]").split(","))) <= {*EXTRAS["backends"], *EXTRAS["extras"]}
    elif words[:3] == ["python", "-m", "benchmarks.bench"]:
        bench_parser().parse_args(words[3:])
    elif words[0] in ("python", ".venv/bin/python"):
        assert (ROOT / words[1]).is_file()
    else:
        raise AssertionError(f"no rule for the command {words[0]!r}")


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_commands_of_a_page_exist(page):
    for block in blocks(page):
        if block.kind == "sh":
            for line in block.text.replace("\\\n", " ").splitlines():
                check_command(line, page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_block_says_what_it_is(page):
    assert {b.kind for b in blocks(page)} <= {"python", "text", "sh", "toml"}


def anchors(page):
    """Names of the headings of a page, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", LINKED, ids=page_id)
def test_the_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            assert urlsplit(target).scheme == "https" and urlsplit(target).netloc, target
            continue
        file, _, anchor = target.partition("#")
        found = (page.parent / file).resolve() if file else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_files_that_a_page_names_exist(page):
    folders = [ROOT, ROOT / "hibachi", ROOT / "docs"]
    for name in re.findall(r"`((?:[\w-]+/)+[\w.-]*|[\w-]+\.(?:py|toml))`", prose(page)):
        other = name.startswith(("application/", "text/", "cpu-"))  # types of media, names of numerics
        assert other or any((folder / name).exists() for folder in folders), name


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_names_that_a_page_uses_are_public(page):
    for name in re.findall(r"\bhibachi\.([A-Za-z]\w*)", page.read_text()):
        group = name in GROUPS + LOGGERS
        assert hasattr(hibachi, name) or group or importlib.util.find_spec(f"hibachi.{name}"), name


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_a_page_has_no_overlong_lines_and_no_path_of_a_machine(page):
    for number, line in enumerate(page.read_text().splitlines(), 1):
        assert len(line) <= 125 or line.startswith("|"), f"line {number}"
        assert not re.search(r"(?<!\w)/(home|work|tmp|root|Users)/", line), f"line {number}"


def test_every_page_and_public_name_has_its_place_on_the_site():
    """`make docs` builds it; tests/install/test_docs_site.py checks what that makes."""
    nav = (ROOT / "tools/docs/mkdocs.yml").read_text()
    for page in PAGES:
        assert re.search(rf"[ -]{re.escape(page_id(page))}$", nav, re.MULTILINE), f"{page_id(page)}: not in mkdocs.yml"
    tree = ast.parse((ROOT / "tools/docs/reference.py").read_text())
    [pages] = (n.value for n in tree.body if isinstance(n, ast.AnnAssign) and n.target.id == "PAGES")
    told = [name for _, _, names in ast.literal_eval(pages).values() for name in names]
    errors = {name for name in hibachi.__all__ if hasattr(hibachi.errors, name)}
    assert sorted(told) == sorted(set(hibachi.__all__) - errors), "PAGES in tools/docs/reference.py"


def test_the_picture_of_the_demo_is_small_moves_by_css_and_ends_with_the_last_frame():
    text = (ROOT / "docs/demo.svg").read_text()
    assert len(text) < 150_000
    picture = ElementTree.fromstring(text)
    kinds = {element.tag.rpartition("}")[2] for element in picture.iter()}
    assert kinds == {"svg", "title", "style", "rect", "g", "text", "tspan"}  # no script, nothing from elsewhere
    assert "url(" not in text and "@import" not in text and "prefers-color-scheme:dark" in text
    still = [g for g in picture if g.tag.endswith("}g") and g.get("visibility") != "hidden"]
    lines = sorted((float(t.get("y")), "".join(t.itertext())) for g in still for t in g)
    assert len(lines) == len({y for y, _ in lines}) == 20  # no line lies on another
    assert lines[0][1].startswith("hibachi demo: 16 prompts") and lines[-1][1].endswith("16 of 16 texts")


def test_a_picture_is_drawn_of_the_frames_of_a_terminal():
    spec = importlib.util.spec_from_file_location("demo_svg", ROOT / "tools/demo_svg.py")
    demo_svg = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo_svg)
    frames = [["title"], ["title", "\x1b[1m<a>\x1b[22m b"], ["title", "c" * 500]]
    program = (
        f"import sys\nfrom hibachi.common.progress import Screen\ns = Screen(sys.stdout)\nfor f in {frames}: s.draw(f)"
    )
    recorded = demo_svg.record([sys.executable, "-c", program])
    assert [lines for _, lines in recorded] == frames and recorded[0][0] == 0
    picture = ElementTree.fromstring(demo_svg.draw([(float(i), lines) for i, lines in enumerate(frames)]))
    groups = [(g.get("visibility"), ["".join(t.itertext()) for t in g]) for g in picture if g.tag.endswith("}g")]
    assert groups == [(None, ["title"]), ("hidden", ["<a> b"]), (None, ["c" * demo_svg.COLUMNS])]


def test_sentences_are_short():
    """At most one in twenty has over 30 words. `python tools/docs/sentences.py --show` prints them."""
    spec = importlib.util.spec_from_file_location("sentences", ROOT / "tools/docs/sentences.py")
    counter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(counter)
    counts = [counter.count(file) for file in counter.default_files()]
    total, longer = sum(n for n, _ in counts), sum(len(long) for _, long in counts)
    assert total > 1000 and longer / total < 0.05
    words = " ".join(["word"] * 30)
    assert [counter.words(s) for s in counter.sentences(f"{words}. One {words}: `a b c`.\n- An item\n")] == [30, 32, 2]
