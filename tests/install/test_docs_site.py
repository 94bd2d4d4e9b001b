"""The site of the documentation is built, and every link in it leads somewhere.

That the Markdown is right where a Git host shows it is checked in tests/test_docs.py.
"""

import re
import shutil
import subprocess
import tomllib

import pytest

from hibachi import __all__ as public_names

from .venvs import ROOT, environment, run

pytestmark = [pytest.mark.install, pytest.mark.xdist_group("docs")]

NEEDED = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]["custom"]["extras"]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """(the folder of the site, the Python that built it, what that said)"""
    home = tmp_path_factory.mktemp("docs")
    python = environment(home, *NEEDED["docs"], "numpy") / "python"
    return home / "site", python, run(python, ROOT / "tools/docs/build.py", home / "site", cwd=home)


def test_every_link_of_the_site_leads_somewhere(built):
    site, _, said = built
    print(said)
    pages, links = map(int, re.search(r"(\d+) pages, (\d+) links", said).groups())
    assert pages > 50 and links > 2000
    assert pages == len(list(site.rglob("*.html")))


def test_every_public_name_is_in_the_reference(built):
    site, *_ = built
    told = {
        name for page in (site / "reference").glob("*.html") for name in re.findall(r'id="([\w.]+)"', page.read_text())
    }
    assert {f"hibachi.{name}" for name in public_names} <= told


@pytest.mark.parametrize(
    ("page", "added", "said"),
    [
        ("index.html", '<a href="docs/nosuch.html">x</a>', "docs/nosuch.html leads nowhere"),
        ("index.html", '<a href="docs/models.html#nosuch">x</a>', "#nosuch has no such anchor"),
        ("docs/models.html", '<img src="nosuch.png">', "nosuch.png leads nowhere"),
        ("index.html", '<script src="https://example.org/x.js"></script>', "is loaded from the network"),
        ("index.html", '<a href="http:/x">x</a>', "is no address of https"),
        ("index.html", "<p>text\n- no list</p>", "Markdown that was not understood: '- no list'"),
        ("index.html", r"<p><code>a\|b</code></p>", "Markdown that was not understood: 'a"),
    ],
)
def test_what_is_broken_is_found(built, tmp_path, page, added, said):
    site, python, _ = built
    copy = shutil.copytree(site, tmp_path / "site")
    (copy / page).write_text((copy / page).read_text().replace("</article>", f"{added}</article>"))
    code = "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import build; build.check(pathlib.Path(sys.argv[2]))"
    done = subprocess.run(
        [python, "-c", code, ROOT / "tools/docs", copy.resolve()], capture_output=True, text=True, timeout=120
    )
    assert done.returncode and said in done.stderr, done.stderr


@pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")
def test_search_works_from_a_file_and_without_a_network(built, tmp_path):
    site, *_ = built
    address = f"{(site / 'index.html').as_uri()}?q=repetition+penalty"
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}",
        "--proxy-server=127.0.0.1:9",
    ]
    seen = run(BROWSER, *options, "--virtual-time-budget=10000", "--dump-dom", address, cwd=tmp_path)
    assert re.search(r'<a href="[^"]*reference/sampling\.html[^"]*" class="md-search-result__link"', seen)
