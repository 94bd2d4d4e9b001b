"""The four distributions: what they say of themselves, and what is inside what we build."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BACKENDS = "torch", "jax", "mlx"
FOLDERS = {"hibachi": ROOT} | {f"hibachi-{name}": ROOT / f"hibachi_{name}" for name in BACKENDS}
PROJECTS = {name: tomllib.loads((folder / "pyproject.toml").read_text()) for name, folder in FOLDERS.items()}


def settings(name: str) -> dict:
    """What a pyproject.toml tells its hatch_build.py."""
    return PROJECTS[name]["tool"]["hatch"]["metadata"]["hooks"]["custom"]


def build(kind: str, source: Path, out: Path) -> Path:
    """Build with the very functions that pip calls, in a process of their own, as pip does."""
    code = f"import sys, hatch_build; print(hatch_build.build_{kind}(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


class Release:
    """A source archive, unpacked elsewhere and built into a wheel."""

    def __init__(self, source: Path, out: Path):
        sdist = build("sdist", source, out)
        with tarfile.open(sdist) as tar:
            tar.extractall(out, filter="data")
        unpacked = out / sdist.name.removesuffix(".tar.gz")
        self.wheel = build("wheel", unpacked, out)
        self.texts = [(unpacked / "PKG-INFO").read_text(), metadata(self.wheel).as_string()]
        self.version = metadata(self.wheel)["Version"]
        self.needs = requirements(self.wheel)
        self.files = set(zipfile.ZipFile(self.wheel).namelist())


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as z:
        [name] = [n for n in z.namelist() if n.endswith(".dist-info/METADATA")]
        return Parser().parsestr(z.read(name).decode())


def requirements(wheel: Path) -> list[str]:
    return metadata(wheel).get_all("Requires-Dist", [])


@pytest.fixture(scope="module")
def releases(tmp_path_factory):
    return {name: Release(folder, tmp_path_factory.mktemp(name)) for name, folder in FOLDERS.items()}


# What the project files say


def test_the_four_versions_are_one():
    assert len({project["project"]["version"] for project in PROJECTS.values()}) == 1


def test_the_backends_are_built_by_the_same_code():
    assert len({(FOLDERS[f"hibachi-{name}"] / "hatch_build.py").read_bytes() for name in BACKENDS}) == 1


def test_the_core_needs_three_packages():
    names = {re.match(r"[\w-]+", need)[0] for need in PROJECTS["hibachi"]["project"]["dependencies"]}
    assert names == {"numpy", "array-api-compat", "typing-extensions"}


def test_requirements_have_a_lower_bound_and_no_upper_one():
    lists = [PROJECTS["hibachi"]["project"]["dependencies"], *settings("hibachi")["extras"].values()]
    lists += [settings(f"hibachi-{name}")["needs"] for name in BACKENDS]
    needs = [need for listed in lists for need in listed]
    assert [need for need in needs if not re.fullmatch(r"[\w-]+(\[[\w,]+\])?>=[\d.]+", need)] == []


def test_our_backends_are_entry_points_of_the_core_only():
    listed = PROJECTS["hibachi"]["project"]["entry-points"]["hibachi.backends"]
    assert listed == {
        "numpy": "hibachi.tensor.numpy_backend:NumpyBackend",
        "torch": "hibachi_torch:TorchBackend",
        "jax": "hibachi_jax:JaxBackend",
        "mlx": "hibachi_mlx:MlxBackend",
    }
    assert [name for name, project in PROJECTS.items() if "entry-points" in project["project"]] == ["hibachi"]


# `hibachi` on the public index is a stranger's, so nothing may tell a reader to install it by that name.
BY_NAME = re.compile(r"""pip3? +install +(-\S+ +)*["']?hibachi([-_][a-z]+)?(\[[^]]*\])?(?![\w.\[-])(?! @ )""")


@pytest.mark.parametrize(
    "text, forbidden",
    [
        ("pip install hibachi", True),
        ("pip install -U 'hibachi[torch]'", True),
        ("pip install hibachi-torch", True),
        ('pip install ".[torch]"', False),
        ("pip install ./hibachi_torch", False),
        ("pip install hibachi-0.1.0-py3-none-any.whl", False),
        ('pip install "hibachi[torch] @ git+https://example.org/hibachi"', False),
    ],
)
def test_an_install_by_bare_name_is_recognised(text, forbidden):
    assert bool(BY_NAME.search(text)) == forbidden


def test_no_text_says_to_install_by_bare_name():
    folders = ["docs", "deploy", "examples", "benchmarks", "hibachi", *(f"hibachi_{name}" for name in BACKENDS)]
    files = [*ROOT.glob("*.md"), *(f for folder in folders for f in (ROOT / folder).rglob("*"))]
    kinds = {".md", ".py", ".ipynb", ".html", ".yaml", ".yml", ""}
    texts = {f: f.read_text() for f in files if f.is_file() and f.suffix in kinds}
    assert [str(f.relative_to(ROOT)) for f, text in texts.items() if BY_NAME.search(text)] == []


def test_importing_the_core_imports_no_array_library_but_numpy():
    names = {*BACKENDS, *(f"hibachi_{name}" for name in BACKENDS)}
    code = f"import sys, hibachi; print({names} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# What we build


def test_the_core_wheel_holds_the_suite_and_the_data_and_no_backend(releases):
    files = releases["hibachi"].files
    assert {top for name in files if not (top := name.split("/")[0]).endswith(".dist-info")} == {"hibachi"}
    assert {"hibachi/py.typed", "hibachi/__init__.py"} <= files
    for source, place in (("conformance", "hibachi/conformance"), ("hibachi/data/tiny", "hibachi/data/tiny")):
        ours = [f for f in (ROOT / source).rglob("*") if f.is_file() and "__pycache__" not in f.parts]
        assert ours, f"{source} is empty"
        assert {f"{place}/{f.relative_to(ROOT / source).as_posix()}" for f in ours} <= files
    assert any(name.endswith("/licenses/LICENSE") for name in files)


@pytest.mark.parametrize("name", [f"hibachi-{name}" for name in BACKENDS])
def test_a_backend_wheel_holds_its_package_only(releases, name):
    package = name.replace("-", "_")
    files = {file for file in releases[name].files if ".dist-info/" not in file}
    assert {f"{package}/py.typed", f"{package}/__init__.py"} <= files
    assert {file.split("/")[0] for file in files} == {package}
    assert f"{package}/hatch_build.py" not in files


def test_releases_name_each_other_by_version(releases):
    core = releases["hibachi"]
    for extra in BACKENDS:
        assert f"hibachi-{extra}=={core.version}; extra == '{extra}'" in core.needs
        assert f"hibachi=={core.version}" in releases[f"hibachi-{extra}"].needs


@pytest.mark.parametrize("name", FOLDERS)
def test_a_release_names_no_path_of_the_machine_that_built_it(releases, name):
    for text in releases[name].texts:
        assert "file:" not in text
        assert str(ROOT) not in text


def test_a_wheel_straight_from_the_checkout_takes_what_lies_beside_it(tmp_path):
    """What `pip install ".[torch]"` and `pip install ./hibachi_torch` rely on."""
    core, torch = FOLDERS["hibachi"], FOLDERS["hibachi-torch"]
    needs = requirements(build("wheel", core, tmp_path))
    assert f"hibachi-torch @ {torch.as_uri()} ; extra == 'torch'" in needs
    assert f"hibachi @ {core.as_uri()}" in requirements(build("wheel", torch, tmp_path))
