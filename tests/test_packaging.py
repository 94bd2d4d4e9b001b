"""The four distributions: what they say of themselves, and what is inside what we build."""

import os
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


def call(function: str, source: Path, out: Path, **env: str) -> Path:
    """What a function that pip calls has made, in a process of its own, as pip does."""
    code = f"import sys, hatch_build; print(hatch_build.{function}(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, env=os.environ | env)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


def build(kind: str, source: Path, out: Path) -> Path:
    return call(f"build_{kind}", source, out)


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


def asked_first(source: Path, out: Path, **env: str) -> list[str]:
    """The requirements that pip follows: it asks for them before it builds."""
    folder = call("prepare_metadata_for_build_wheel", source, out, **env)
    return Parser().parsestr((folder / "METADATA").read_text()).get_all("Requires-Dist", [])


@pytest.mark.parametrize("name", FOLDERS)
def test_a_process_that_asked_for_metadata_builds_a_wheel_without_paths(name: str, tmp_path: Path):
    """Frontends such as tox ask by keyword, and may keep the process."""
    code = (
        "import sys, hatch_build\n"
        "hatch_build.prepare_metadata_for_build_wheel(metadata_directory=sys.argv[1], config_settings=None)\n"
        "print(hatch_build.build_wheel(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=FOLDERS[name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "file:" not in metadata(tmp_path / done.stdout.splitlines()[-1]).as_string()
    [asked] = tmp_path.glob("*.dist-info/METADATA")
    assert "file:" in asked.read_text()


def names(needs: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", need)[0] for need in needs}


@pytest.fixture(scope="module")
def releases(tmp_path_factory):
    return {name: Release(folder, tmp_path_factory.mktemp(name)) for name, folder in FOLDERS.items()}


# What the project files say


def test_the_four_versions_are_one():
    assert len({project["project"]["version"] for project in PROJECTS.values()}) == 1


def test_the_backends_are_built_by_the_same_code():
    assert len({(FOLDERS[f"hibachi-{name}"] / "hatch_build.py").read_bytes() for name in BACKENDS}) == 1


def test_the_core_needs_three_packages():
    needs = PROJECTS["hibachi"]["project"]["dependencies"]
    assert names(needs) == {"numpy", "array-api-compat", "typing-extensions"}


def test_requirements_have_a_lower_bound_and_no_upper_one():
    lists = [PROJECTS["hibachi"]["project"]["dependencies"], *settings("hibachi")["extras"].values()]
    lists += [settings(f"hibachi-{name}")["needs"] for name in BACKENDS]
    needs = [need for listed in lists for need in listed]
    assert [need for need in needs if not re.fullmatch(r"[\w-]+(\[[\w,]+\])?>=[\d.]+", need)] == []


def test_each_backend_registers_itself_and_the_core_names_all():
    """The core too: so it knows what to say of one that is not installed, and where all are editable."""
    listed = {name: project["project"]["entry-points"]["hibachi.backends"] for name, project in PROJECTS.items()}
    assert listed == {
        "hibachi": {
            "numpy": "hibachi.backend.numpy_backend:NumpyBackend",
            "torch": "hibachi_torch:TorchBackend",
            "jax": "hibachi_jax:JaxBackend",
            "mlx": "hibachi_mlx:MlxBackend",
        },
        "hibachi-torch": {"torch": "hibachi_torch:TorchBackend"},
        "hibachi-jax": {"jax": "hibachi_jax:JaxBackend"},
        "hibachi-mlx": {"mlx": "hibachi_mlx:MlxBackend"},
    }


def test_every_package_has_the_same_licence():
    assert len({(folder / "LICENSE").read_bytes() for folder in FOLDERS.values()}) == 1


@pytest.mark.parametrize("example", ["third_party_backend", "third_party_model"])
def test_a_third_partys_package_does_not_ask_an_index_for_us(example):
    project = tomllib.loads((ROOT / "examples" / example / "pyproject.toml").read_text())["project"]
    assert "hibachi" not in names(project["dependencies"])


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
    for source, place in (("conformance", "hibachi/conformance"), ("hibachi/llm/data", "hibachi/llm/data")):
        ours = [f for f in (ROOT / source).rglob("*") if f.is_file() and "__pycache__" not in f.parts]
        assert ours, f"{source} is empty"
        assert {f"{place}/{f.relative_to(ROOT / source).as_posix()}" for f in ours} <= files


@pytest.mark.parametrize("name", FOLDERS)
def test_a_wheel_holds_the_licence_and_its_entry_points(releases, name):
    wheel = zipfile.ZipFile(releases[name].wheel)
    info = releases[name].wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"
    assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    registered = wheel.read(f"{info}/entry_points.txt").decode()
    for backend, place in PROJECTS[name]["project"]["entry-points"]["hibachi.backends"].items():
        assert f"{backend} = {place}\n" in registered


@pytest.mark.parametrize("name", [f"hibachi-{name}" for name in BACKENDS])
def test_a_backend_wheel_holds_its_package_only(releases, name):
    package = name.replace("-", "_")
    files = {file for file in releases[name].files if ".dist-info/" not in file}
    assert {f"{package}/py.typed", f"{package}/__init__.py"} <= files
    assert {file.split("/")[0] for file in files} == {package}
    assert f"{package}/hatch_build.py" not in files


def test_the_core_names_its_backends_by_version_and_they_do_not_name_it(releases):
    """Where one is installed alone, pip would fetch `hibachi` from the index, with whatever version."""
    core = releases["hibachi"]
    for extra in BACKENDS:
        assert f"hibachi-{extra}=={core.version}; extra == '{extra}'" in core.needs
        assert releases[f"hibachi-{extra}"].needs == settings(f"hibachi-{extra}")["needs"]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_release_names_no_path_of_the_machine_that_built_it(releases, name):
    for text in releases[name].texts:
        assert "file:" not in text
        assert str(ROOT) not in text


@pytest.mark.parametrize("name", FOLDERS)
def test_a_wheel_straight_from_the_checkout_is_that_of_the_release(releases, name, tmp_path):
    straight = build("wheel", FOLDERS[name], tmp_path)
    assert metadata(straight).as_string() == metadata(releases[name].wheel).as_string()
    assert set(zipfile.ZipFile(straight).namelist()) == releases[name].files


def test_pip_is_told_where_the_others_lie(tmp_path):
    """What `pip install ".[torch]"` and `pip install ./hibachi_torch` rely on. No kernel is compiled for that."""
    core, torch = FOLDERS["hibachi"], FOLDERS["hibachi-torch"]
    needs = asked_first(core, tmp_path, HIBACHI_TARGET="linux-aarch64")
    assert f"hibachi-torch @ {torch.as_uri()} ; extra == 'torch'" in needs
    assert asked_first(torch, tmp_path) == [f"hibachi @ {core.as_uri()}", *settings("hibachi-torch")["needs"]]


@pytest.mark.parametrize("package", ["hibachi_torch", "hibachi_jax", "hibachi_mlx"])
def test_a_backend_without_hibachi_says_where_that_comes_from(tmp_path, package):
    """`pip install hibachi` would fetch a stranger's package of that name."""
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text((ROOT / package / "__init__.py").read_text())
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {package}"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    *_, said = done.stderr.splitlines()
    assert said.startswith(f"ModuleNotFoundError: {package} needs hibachi itself, from the same")
