"""Wheels with compiled kernels: what is in them, that they are the same each time, and one of them in use.

Of other systems: test_elsewhere.py.
"""

import hashlib
import json
import os
import subprocess
import sys

import pytest

from hibachi.backend.kernels import build

from ..kernels.test_numerics import ANSWERS, GOLDEN
from .venvs import environment
from .wheels import FOLDER, TARGETS, members

pytestmark = [pytest.mark.install, pytest.mark.xdist_group("wheels")]  # what is built once, serves all

LARGEST = 1_000_000  # bytes of a library
MACHINE = "linux-x86_64"
here = pytest.mark.skipif(
    sys.platform != "linux" or build.variants() is not build.X86, reason=f"the wheel {MACHINE} is for another machine"
)


@pytest.mark.parametrize("target", TARGETS)
def test_a_wheel_has_its_tag_and_small_libraries(target, builder):
    wheel = builder.wheel(target)
    tag, names = TARGETS[target]
    assert wheel.name.endswith(f"-py3-none-{tag}.whl")
    inside = members(wheel)
    (told,) = (text.decode() for name, text in inside.items() if name.endswith(".dist-info/WHEEL"))
    assert "Root-Is-Purelib: false" in told
    assert {f"py3-none-{t}" for t in tag.split(".")} == {n[5:] for n in told.splitlines() if n.startswith("Tag: ")}
    libraries = {name.removeprefix(FOLDER): data for name, data in inside.items() if name.startswith(FOLDER)}
    manifest = json.loads(libraries.pop("manifest.json"))
    assert manifest == {name: hashlib.sha256(data).hexdigest() for name, data in libraries.items()}
    assert sorted(libraries) == names.split()
    print("\n", target, {name: len(data) for name, data in libraries.items()}, len(wheel.read_bytes()))
    for name, data in libraries.items():
        assert len(data) <= LARGEST, name
        for path in (str(builder.home), str(builder.checkout), os.path.expanduser("~")):
            assert len(path) < 4 or path.encode() not in data, f"{name} names a folder of the machine that built it"


def test_another_build_from_another_folder_gives_the_same_bytes(builder):
    """In isolation, with what the project file asks for."""
    again = members(builder.build(MACHINE, builder.copy("another folder")))
    once = members(builder.wheel(MACHINE))
    assert again.keys() == once.keys()
    assert [name for name in once if once[name] != again[name]] == []


@pytest.mark.skipif(sys.platform != "linux", reason="auditwheel is for Linux")
@pytest.mark.parametrize("target", [t for t in TARGETS if t.startswith("linux")])
def test_auditwheel_finds_what_the_tag_promises(target, builder):
    wheel = builder.wheel(target)
    said = subprocess.run(
        [builder.programs / "auditwheel", "show", wheel], capture_output=True, text=True, timeout=300, check=True
    ).stdout
    print(said)
    words = " ".join(said.split())
    assert f'consistent with the following platform tag: "manylinux_2_17_{target.partition("-")[2]}"' in words


# ---- in use ----------------------------------------------------------------------------------------------------------


class Installed:
    """The wheel in an environment of its own. No compiler is found there, and no kernels of others."""

    def __init__(self, home, wheel):
        self.home = home
        self.programs = environment(home, f"hibachi[text] @ {wheel.as_uri()}")

    def run(self, *arguments, **more):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("HIBACHI_", "OMP_", "PYTHON", "CXX"))}
        env |= {
            "PATH": str(self.programs),
            "XDG_CACHE_HOME": str(self.home / "cache"),
            "HIBACHI_AUTOTUNE": "off",
        } | more
        command = [self.programs / "python", *arguments]
        return subprocess.run(command, cwd=self.home, env=env, capture_output=True, text=True, timeout=600)

    def nothing_was_compiled(self):
        return not list((self.home / "cache").rglob("*.so"))


LOOK = "from hibachi.backend.kernels.library import library; print(library())"


@pytest.fixture(scope="module")
def installed(builder, tmp_path_factory):
    return Installed(tmp_path_factory.mktemp("installed"), builder.wheel(MACHINE))


@here
@pytest.mark.parametrize("variant", ["auto", "avx2", "avx512"])
def test_the_installed_kernels_give_the_answers_that_are_written_down(variant, installed):
    found = installed.run("-c", LOOK, HIBACHI_VARIANT=variant)
    if "needs instructions that this processor" in found.stderr:
        pytest.skip(f"this processor does not have what {variant} needs")
    assert found.returncode == 0, found.stderr
    assert ", installed: " in found.stdout and (variant == "auto" or found.stdout.startswith(variant)), found.stdout
    for dtype, digest in GOLDEN.items():
        done = installed.run(ANSWERS, "numpy", dtype, HIBACHI_VARIANT=variant)
        assert done.stdout.split() == [digest], done.stderr
    assert installed.nothing_was_compiled()
