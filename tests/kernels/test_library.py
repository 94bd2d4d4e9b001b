"""The kernels' library: which variant is taken, installed or compiled once for a machine, whole or not at all."""

import contextlib
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hibachi import NumpyBackend
from hibachi.backend.kernels import abi, build, library
from hibachi.backend.kernels.build import ARM, X86, BuildFailed
from hibachi.backend.kernels.library import SWITCH, NativeUnavailable, choose

from ..tensor import native

SUFFIX = library._SUFFIX
PROBED = bool(build.variants()) and build.variants()[0].level > 0


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """The folder of small sources; nobody has compiled them."""
    return native.small_kernels(monkeypatch, tmp_path)


@pytest.fixture
def kept(tmp_path):
    """Where compiled kernels are kept."""
    return tmp_path / "cache" / "hibachi" / "kernels"


def again(monkeypatch):
    """The library as another process finds it."""
    native.begin_anew(monkeypatch)
    return library.library()


def level_is(sources, level):
    """The probe finds a processor of this level."""
    text = f'__attribute__((visibility("default"))) int hibachi_level(void) {{ return {level}; }}'
    (sources / "probe.c").write_text(text)


@pytest.mark.parametrize(
    "flags, said",
    [
        ("fpu avx512f amx_bf16 amx_tile amx_int8", "this processor has AMX, which hibachi does not use yet"),
        ("fpu avx512f amx_tile", None),  # of int8 alone
        ("fpu avx2", None),
    ],
)
def test_instructions_that_are_not_used_are_told(tmp_path, flags, said):
    assert library.unused(tmp_path) is None, "not on Linux"
    (tmp_path / "proc").mkdir()
    cpu = f"processor\t: 0\nmodel name\t: amx_tile amx_bf16\nflags\t\t: {flags}\nbugs\t\t: none\n\n"
    (tmp_path / "proc" / "cpuinfo").write_text(2 * cpu)
    found = library.unused(tmp_path)
    assert found is None if said is None else found is not None and found.startswith(said)


@pytest.mark.skipif(not library.possible(), reason="there are no kernels")
def test_doctor_shows_what_is_not_used(monkeypatch):
    monkeypatch.setattr(library, "unused", lambda: "it has AMX")
    assert any(line.endswith("; it has AMX") for line in NumpyBackend().remarks())


# ---- which variant ---------------------------------------------------------------------------------------------------


def test_variants_are_those_of_the_processors_family():
    assert build.variants("x86_64") == build.variants("AMD64") == X86
    assert build.variants("aarch64") == build.variants("arm64") == ARM
    assert build.variants("riscv64") == ()
    assert [v.level for v in X86] == [1, 2, 3] and {v.name for v in build.M1} == {v.name for v in ARM}


@pytest.mark.parametrize(
    ("asked", "there", "level", "names"),
    [
        ("auto", X86, 1, ["avx2"]),
        ("auto", X86, 2, ["avx512"]),
        ("auto", X86, 3, ["avx512bf16", "avx512"]),  # not all processors gain by its instructions
        ("auto", X86[:1], 3, ["avx2"]),  # a wheel without the better ones
        ("auto", ARM, 0, ["neon"]),
        ("avx2", X86, 3, ["avx2"]),
        ("avx512", X86, 3, ["avx512"]),
        ("neon", ARM, 0, ["neon"]),
    ],
)
def test_those_that_may_be_the_fastest_are_tried_or_the_one_that_was_asked_for(asked, there, level, names):
    assert [v.name for v in choose(asked, there, level)] == names


@pytest.mark.parametrize(
    ("asked", "there", "level", "message"),
    [
        ("auto", X86, 0, r"none of the sets of instructions .*\(avx2, avx512, avx512bf16\)"),
        ("auto", (), 0, r"none of the sets .*\(x86-64, ARM\)"),
        ("avx512", X86, 1, "HIBACHI_VARIANT=avx512 needs instructions .* it can use avx2$"),
        ("avx2", X86, 0, "HIBACHI_VARIANT=avx2 needs instructions .* it can use none of the variants"),
        ("neon", X86, 2, "must be auto, none or one of avx2, avx512, avx512bf16; got 'neon'"),
        ("avx512", X86[:1], 2, "must be auto, none or one of avx2; got 'avx512'"),
        ("AVX2", X86, 2, "got 'AVX2'"),
        ("", X86, 2, "got ''"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(asked, there, level, message):
    with pytest.raises(NativeUnavailable, match=message):
        choose(asked, there, level)


@pytest.mark.skipif(not PROBED, reason="processors of this family are all alike")
def test_a_variant_that_the_processor_lacks_is_refused_and_none_is_done_without(sources, monkeypatch, caplog):
    level_is(sources, 1)
    assert library.library().variant.name == "avx2"
    monkeypatch.setenv(SWITCH, "avx512")
    for look in (library.library, library.why_missing, NumpyBackend):
        with pytest.raises(NativeUnavailable, match="HIBACHI_VARIANT=avx512 needs instructions"):
            look()
    monkeypatch.delenv(SWITCH)
    level_is(sources, 0)
    native.begin_anew(monkeypatch)
    assert "none of the sets of instructions" in library.why_missing()
    assert not NumpyBackend().native
    assert [r.message.partition(":")[0] for r in caplog.records if "no kernels" in r.message] == [
        "There are no kernels for this machine"
    ]


def test_a_word_that_is_no_variant_is_refused(sources, monkeypatch):
    monkeypatch.setenv(SWITCH, "fast")
    for look in (library.library, library.why_missing, NumpyBackend):
        with pytest.raises(NativeUnavailable, match=r"HIBACHI_VARIANT must be auto, none or one of .*; got 'fast'"):
            look()


def test_none_goes_without_and_compiles_nothing(sources, kept, monkeypatch, caplog):
    monkeypatch.setenv(SWITCH, "none")
    assert library.why_missing() == "HIBACHI_VARIANT=none is set"
    assert library.state() == "not used, as HIBACHI_VARIANT=none is set"
    with pytest.raises(NativeUnavailable, match="HIBACHI_VARIANT=none is set"):
        library.library()
    assert type(NumpyBackend()) is NumpyBackend and not NumpyBackend().native
    with pytest.raises(NativeUnavailable):
        NumpyBackend(native=True)
    assert not list(kept.iterdir()) and not caplog.records


def test_a_switch_is_looked_at_whenever_kernels_are_asked_for(sources, monkeypatch):
    assert library.why_missing() is None
    monkeypatch.setenv(SWITCH, "none")
    assert library.why_missing()
    monkeypatch.setenv(SWITCH, "auto")
    assert library.why_missing() is None


# ---- compiled --------------------------------------------------------------------------------------------------------


def test_all_files_become_one_library_which_is_compiled_once(sources, kept, monkeypatch, caplog):
    assert "to be compiled by" in library.state() and not list(kept.iterdir())
    made = library.library()
    assert made.kernels.panel() == 3 and made.origin == "compiled" and library.why_missing() is None
    tried = {*made.choice.rates}
    assert made.variant.name in tried and caplog.text.count("Compiling kernels") == len(tried)
    assert made.path.parent == kept and str(made.path) in library.state() and library.state().startswith(f"{made}; ")
    names = {p.name.partition("-")[0] for p in kept.iterdir()}
    assert names == tried | {"choice"} | ({"probe"} if PROBED else set())
    assert {p.suffix for p in kept.iterdir()} == {SUFFIX, ".lock", ".sha256", ".json"}  # nothing is left of the work
    caplog.clear()
    assert again(monkeypatch).kernels.panel() == 3 and not caplog.records


def test_whatever_it_depends_on_makes_another(sources, tmp_path, monkeypatch):
    paths = {library.library().path}
    (sources / "two.cpp").write_text("int two() { return 3; }")
    found = again(monkeypatch)
    paths.add(found.path)
    assert found.kernels.panel() == 4
    (sources / "more.h").write_text("// a header")
    paths.add(again(monkeypatch).path)
    wrapped = tmp_path / "another-compiler"
    wrapped.write_text(f'#!/bin/sh\nexec {build.compiler()} "$@"\n')
    wrapped.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapped))
    paths.add(again(monkeypatch).path)
    assert len(paths) == 4


def test_state_compiles_nothing_where_those_of_an_earlier_version_are_kept(sources, kept, monkeypatch):
    library.library()
    (sources / "two.cpp").write_text("int two() { return 3; }")
    native.begin_anew(monkeypatch)
    before = sorted(kept.iterdir())
    assert "to be compiled by" in library.state()
    assert sorted(kept.iterdir()) == before


DAMAGE = {
    "empty": lambda data: b"",
    "a part": lambda data: data[: len(data) // 3],
    "a byte in the middle": lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    "more at the end": lambda data: data + b"more",
}


@pytest.mark.parametrize("damage", [*DAMAGE, "the probe", "the seal is empty", "the seal is no text", "no seal"])
def test_what_is_damaged_is_compiled_anew(damage, sources, kept, monkeypatch, caplog):
    path = library.library().path
    whole = path.read_bytes()
    seal = path.with_name(f"{path.name}.sha256")
    damaged = path
    if damage == "the probe":
        (damaged,) = kept.glob(f"probe-*{SUFFIX}") if PROBED else [path]
    if damage.endswith("no seal"):
        seal.unlink()
    elif damage.startswith("the seal"):
        seal.write_bytes(b"" if damage == "the seal is empty" else b"\xff\xfe\xff")
    else:
        data = damaged.read_bytes()
        damaged.unlink()  # as it is open
        damaged.write_bytes(DAMAGE.get(damage, DAMAGE["a part"])(data))
    caplog.clear()
    assert again(monkeypatch).kernels.panel() == 3
    said = [r.getMessage() for r in caplog.records if " is damaged, " in r.getMessage()]
    assert len(said) == 1 and path.read_bytes() == whole
    caplog.clear()
    assert again(monkeypatch).kernels.panel() == 3 and not caplog.records


def test_what_does_not_compile_is_told_once_and_leaves_nothing(sources, kept, monkeypatch, caplog):
    (sources / "two.cpp").write_text("int two() { return nonsense; }")
    asked = []
    run = build.run
    monkeypatch.setattr(build, "run", lambda *given: asked.append(1) or run(*given))
    why = library.why_missing()
    assert "do not compile" in why and "nonsense" in why
    before = len(asked)
    assert library.why_missing() == why and library.state() and len(asked) == before  # a compiler that failed
    with pytest.raises(NativeUnavailable, match="nonsense"):
        library.library()
    assert not NumpyBackend().native and caplog.text.count("There are no kernels") == 1
    assert not [p for p in kept.iterdir() if not p.name.startswith("probe-") and p.suffix != ".lock"]


def test_a_function_that_nobody_wrote_is_missed_at_loading(sources):
    (sources / "two.cpp").unlink()
    assert "two" in library.why_missing()


def test_without_a_compiler_it_says_so(sources, kept, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert "there are none: no C++ compiler was found" in library.state()
    assert "no C++ compiler was found. Install g++ or clang++" in library.why_missing()
    assert not list(kept.iterdir())


def test_a_compiler_that_does_not_answer_is_told(sources, tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    broken.write_text("no program")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert f"the compiler {broken} does not answer" in library.why_missing()


def test_a_compiler_that_hangs_is_ended(sources, tmp_path, monkeypatch):
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\n[ $1 = --version ] || exec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setattr(build, "_PATIENCE", 0.2)
    assert "took more than" in library.why_missing()


def test_a_build_that_fails_leaves_what_was_there(sources, tmp_path):
    (sources / "one.cpp").write_text("nonsense")
    to = tmp_path / f"there{SUFFIX}"
    to.write_bytes(b"before")
    with pytest.raises(BuildFailed, match="nonsense"):
        build.build(build.variants()[0], to, build.compiler())
    assert to.read_bytes() == b"before" and not list(tmp_path.glob("building-*"))


def test_a_folder_that_cannot_be_written_is_no_crash(sources, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "file" in library.why_missing() and library.state()


@pytest.mark.parametrize(("system", "machine"), [("Windows", "AMD64"), ("Linux", "riscv64")])
def test_other_machines_are_told_what_there_is(system, machine, sources, kept, monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert machine in library.why_missing()
    assert not list(kept.iterdir())


PROCESS = """
import sys
from pathlib import Path
from hibachi.backend.kernels import build, library
build.SOURCES = Path(sys.argv[1])
print(library.library().path)
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """compiler(seconds): $CXX is one that notes each call and takes so long; returns how many it had."""

    calls, real = tmp_path / "calls", build.compiler()

    def slow(seconds):
        calls.touch()
        wrapped = tmp_path / "slow-compiler"
        wrapped.write_text(
            f'#!/bin/sh\n[ $1 = --version ] && exec {real} --version\necho "$$" >> {calls}\n'
            f'sleep {seconds} && exec {real} "$@"\n'
        )
        wrapped.chmod(0o755)
        monkeypatch.setenv("CXX", str(wrapped))
        return lambda: calls.read_text().split()

    return slow


def starts(sources):
    command = [sys.executable, "-c", PROCESS, str(sources)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_of_five_processes_one_compiles(sources, kept, compiler):
    """N-12."""
    calls = compiler(0.3)
    said = [p.communicate(timeout=60) for p in [starts(sources) for _ in range(5)]]
    assert len({out for out, _ in said}) == 1 and said[0][0].startswith(str(kept))
    tried = len({p.name.partition("-")[0] for p in kept.glob(f"*{SUFFIX}")} - {"probe"})  # variants
    assert len(calls()) == tried * (len(list(sources.glob("*.cpp"))) + 1) + PROBED  # each file, the library, the probe
    assert sum(err.count("Compiling kernels, once for this machine") for _, err in said) == tried
    assert not list(kept.glob("building-*"))


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_one_that_is_ended_while_it_compiles_holds_up_nobody(how, sources, kept, compiler):
    calls = compiler(60)
    process = starts(sources)
    while not calls():  # at work
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(how)
    process.communicate(timeout=5)
    if how == signal.SIGINT:
        assert not [pid for pid in calls() if os.path.exists(f"/proc/{pid}")] and not list(kept.glob("building-*"))
    for pid in calls() if how == signal.SIGKILL else ():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(pid), signal.SIGKILL)
    compiler(0)
    process = starts(sources)
    assert process.communicate(timeout=60)[0].startswith(str(kept)) and not list(kept.glob("building-*"))


@pytest.fixture
def gone(sources, monkeypatch):
    """Where a library was that has to be compiled anew."""
    path = library.library().path
    path.unlink()
    native.begin_anew(monkeypatch)
    return path


def test_a_lock_is_waited_for_and_the_user_is_told(gone, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    told, phase = [], library.phase
    monkeypatch.setattr(library, "phase", lambda what, *more: told.append(what) or phase(what, *more))
    with gone.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        other = threading.Thread(target=library.library)
        other.start()
        while not told:
            time.sleep(0.001)
        assert not gone.exists()
    other.join()
    assert told[0] == "waiting for another process, which compiles kernels" and gone.exists()


@pytest.mark.parametrize("locks", [True, False])
def test_what_a_killed_process_left_is_removed_if_a_lock_says_that_nobody_is_at_it(locks, gone, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    if not locks:
        monkeypatch.setattr(fcntl, "flock", lambda file, how: (_ for _ in ()).throw(OSError(37, "No locks available")))
    left = gone.with_name(f"building-{gone.name}-x")
    left.mkdir()
    (left / "a.o").write_text("")
    assert library.library().path == gone and gone.exists()
    assert left.exists() is not locks


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(28, "No space left on device")])
def test_a_cache_that_cannot_be_written_is_told_with_a_way_out(error, sources, kept, monkeypatch, caplog):
    def fails(variant, to, cxx, told):
        raise error

    monkeypatch.setattr(library, "build", fails)
    why = library.why_missing()
    assert why == (
        f"{kept}, where they are kept, cannot be written ({error.strerror}). Set XDG_CACHE_HOME to a folder that can "
        "be written"
    )
    assert not NumpyBackend().native and caplog.text.count("There are no kernels") == 1


def test_without_a_home_it_says_so(sources, monkeypatch, caplog):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("Could not determine home directory")))
    assert "there is no home to keep anything in, and XDG_CACHE_HOME is not set" in library.why_missing()
    assert library.state() and not NumpyBackend().native and caplog.text.count("There are no kernels") == 1


def test_on_a_terminal_the_phase_tells_and_no_line_stays(sources, monkeypatch, caplog):
    monkeypatch.setattr(library, "phases_shown", lambda: True)
    assert library.why_missing() is None and "Compiling kernels" not in caplog.text


# ---- the interface ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (native.small_source(interface=abi.ABI + 1), f"has the interface {abi.ABI + 1}; expected {abi.ABI}"),
        (native.small_source(wrong=8), r"The struct Op has \d+ bytes in .* and \d+ in hibachi.backend.kernels.abi"),
        (f"int two(); {native.EXPORT} sum() {{ return two(); }}", "is no library of hibachi's kernels"),
    ],
    ids=["another ABI", "another struct", "a stranger"],
)
def test_a_library_that_is_no_twin_is_not_used(text, message, sources, monkeypatch, caplog):
    (sources / "one.cpp").write_text(text)
    with pytest.raises(NativeUnavailable, match=message):
        library.library()
    assert not NumpyBackend().native and caplog.text.count("There are no kernels") == 1


@pytest.mark.parametrize(("code", "error"), [(1, MemoryError), (2, IndexError)])
def test_what_was_not_done_is_an_exception(code, error, sources):
    found = native.small_source().replace("hibachi_step() { return 0", f"hibachi_step() {{ return {code}")
    (sources / "one.cpp").write_text(found)
    kernels = library.library().kernels
    with pytest.raises(error):
        kernels.step(0, 0, 0, 0)
    kernels.mass(0, 0, 0, 0, 0)
    with pytest.raises(AttributeError):
        _ = kernels.nothing


# ---- installed -------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(sources, tmp_path, monkeypatch):
    """The folder of a wheel's kernels, all variants of this processor. Nothing can be compiled any more."""
    folder = tmp_path / "lib"
    folder.mkdir()
    cxx = build.compiler()
    for variant in build.variants():
        build.build(variant, folder / f"{variant.name}{SUFFIX}", cxx)
    if PROBED:
        build.build_probe(folder / f"probe{SUFFIX}", [cxx])
    seal(folder)
    native.without_compiler(monkeypatch, tmp_path)
    return folder


def seal(folder):
    """A manifest of what is there."""
    manifest = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob(f"*{SUFFIX}")}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_an_installed_library_is_used_and_nothing_is_compiled(installed, kept):
    found = library.library()
    assert found.origin == "installed" and found.path.parent == installed and found.kernels.panel() == 3
    assert library.why_missing() is None and library.state().startswith(f"{found}; ") and ", installed: " in str(found)
    assert [p.name.partition("-")[0] for p in kept.iterdir()] == ["choice"]


def test_of_the_installed_variants_too_one_can_be_asked_for(installed, monkeypatch):
    for variant in build.variants():
        if variant.level <= library.library().variant.level:
            with monkeypatch.context() as patch:
                patch.setenv(SWITCH, variant.name)
                assert library.library().variant is variant
    if PROBED:
        for name in ("avx512", "avx512bf16"):
            (installed / f"{name}{SUFFIX}").unlink(missing_ok=True)
        seal(installed)
        native.begin_anew(monkeypatch)
        assert library.library().variant.name == "avx2"


@pytest.mark.skipif(not PROBED, reason="processors of this family are all alike")
def test_an_installed_variant_that_the_processor_lacks_is_refused(installed, sources, monkeypatch):
    level_is(sources, 1)
    monkeypatch.undo()  # there is a compiler again
    build.run([[build.compiler(), "-x", "c", "-shared", "-fPIC", str(sources / "probe.c"), "-o",
                str(installed / f"probe{SUFFIX}")]])  # fmt: skip
    seal(installed)
    monkeypatch.setattr(library, "INSTALLED", installed)
    native.begin_anew(monkeypatch)
    monkeypatch.delenv(SWITCH, raising=False)
    assert library.library().variant.name == "avx2"
    monkeypatch.setenv(SWITCH, "avx512")
    with pytest.raises(NativeUnavailable, match="HIBACHI_VARIANT=avx512 needs instructions"):
        library.library()


@pytest.mark.parametrize("part", ["library", "probe"])
@pytest.mark.parametrize("damage", [*DAMAGE, "missing"])
def test_a_damaged_installed_library_is_not_loaded(part, damage, installed, monkeypatch, caplog):
    if part == "probe" and not PROBED:
        pytest.skip("there is none for this processor")
    path = library.library().path if part == "library" else installed / f"probe{SUFFIX}"
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(DAMAGE[damage](data))
    native.begin_anew(monkeypatch)
    if damage == "a part":  # what loading it would do
        script = f"import ctypes; ctypes.CDLL({str(path)!r})"
        assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode != 0
    why = library.why_missing()
    assert path.name in why and (damage == "missing" or "is damaged. Install hibachi anew" in why)
    assert not NumpyBackend().native and caplog.text.count("There are no kernels") == 1
    assert path.name in library.state()


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b'{"avx2": 1}', bytes(100), b"\xff\xfe"], ids=lambda d: f"{d[:10]!r}"
)
def test_a_damaged_manifest_is_told(data, installed, caplog):
    (installed / "manifest.json").write_bytes(data)
    assert library.why_missing() and library.state()
    assert not NumpyBackend().native and caplog.text.count("There are no kernels") == 1


def test_an_installed_library_of_another_version_is_not_used(installed, sources, monkeypatch, caplog):
    (sources / "one.cpp").write_text(native.small_source(interface=abi.ABI + 1))
    monkeypatch.undo()
    monkeypatch.setattr(library, "INSTALLED", installed)
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.delenv(SWITCH, raising=False)
    for variant in build.variants():
        build.build(variant, installed / f"{variant.name}{SUFFIX}", build.compiler())
    seal(installed)
    native.begin_anew(monkeypatch)
    assert f"has the interface {abi.ABI + 1}; expected {abi.ABI}. Install hibachi anew" in library.why_missing()
    assert caplog.text.count("There are no kernels") == 1
