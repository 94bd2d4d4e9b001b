"""The digest of all bytes of a model's files: right, or an error; and kept, but never an old one."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from hibachi.errors import InvalidModelFiles
from hibachi.llm.model.digest import FilesDigest
from hibachi.llm.model.files import SHIPPED, open_files

ROOM = "hibachi.llm.model.digest"
PIECE = 1000


@pytest.fixture
def paths(tmp_path, monkeypatch):
    """Three files that did not change lately, one of several pieces, and a cache folder of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in {"PIECE": PIECE, "_READ": 64, "_SETTLED": -(10**9)}.items():
        monkeypatch.setattr(f"{ROOM}.{name}", value)
    return made(tmp_path / "model", {"a": os.urandom(2 * PIECE + 300), "b": b"", "c": b"c" * PIECE})


def made(folder, contents):
    folder.mkdir(exist_ok=True)
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in contents]


def found(paths):
    return FilesDigest(paths).result()


def expected(paths):
    def of(data):
        return hashlib.blake2b(data, digest_size=16)

    whole = b""
    for path in paths:
        data = path.read_bytes()
        pieces = [data[i : i + PIECE] for i in range(0, len(data), PIECE)] or [b""]
        file = of(b"".join(of(piece).digest() for piece in pieces)).hexdigest()
        whole += f"{path.name}\0{len(data)}\0{file}\0".encode()
    return of(whole).hexdigest()


@pytest.fixture
def reads(monkeypatch):
    """The names of files that were opened, once for each piece."""
    names = []
    on_open(monkeypatch, lambda path: names.append(path.name))
    return names


def on_open(monkeypatch, call):
    """call: is called with each path of a model that is opened, before that."""
    opened = Path.open

    def noted(path, *how, **more):
        if path.parent.name == "model" and how == ("rb",):
            call(path)
        return opened(path, *how, **more)

    monkeypatch.setattr(Path, "open", noted)


def test_it_is_of_names_order_and_all_bytes(paths, tmp_path):
    first = found(paths)
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    assert first == expected(paths) == found(tmp_path / "copy" / path.name for path in paths)
    others = [paths[::-1], paths[:2], [*paths, paths[0]], [*paths[:2], *made(tmp_path / "model", {"d": b"c" * PIECE})]]
    for at in (0, PIECE, 2 * PIECE + 299):
        data = bytearray(paths[0].read_bytes())
        data[at] ^= 1
        others.append([*made(tmp_path / f"other{at}", {"a": data}), *paths[1:]])
    assert len({first, *map(found, others)}) == 1 + len(others)


def test_a_second_start_reads_nothing_and_a_change_what_changed(paths, reads):
    first = found(paths)
    assert sorted(reads) == ["a", "a", "a", "b", "c"]
    assert found(paths) == first and len(reads) == 5
    before = paths[2].stat()
    paths[2].write_bytes(b"C" * PIECE)
    os.utime(paths[2], ns=(before.st_atime_ns, before.st_mtime_ns))  # as if it were the old one
    reads.clear()
    assert found(paths) == found(paths) == expected(paths) != first and reads == ["c"]


def test_what_changed_just_now_is_not_kept(paths, reads, monkeypatch):
    """It may change again within a tick of the clock of files."""
    monkeypatch.setattr(f"{ROOM}._SETTLED", 2 * 10**9)
    assert found(paths) == found(paths) == expected(paths) and len(reads) == 10


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(b"C" * PIECE),
        lambda path: path.write_bytes(b"c"),
        lambda path: path.replace(path.with_name("away")),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: exec("raise OSError(5, 'Input/output error', str(path))"),
    ],
)
def test_files_that_change_while_they_are_read_are_an_error(paths, monkeypatch, change):
    with monkeypatch.context() as m:
        on_open(m, lambda path: change(paths[2]) if path == paths[2] else None)
        with pytest.raises(InvalidModelFiles, match=r"(c changed while|cannot be read: .*/c).*again\."):
            found(paths)
    if paths[2].is_file():
        assert found(paths) == expected(paths)


def test_it_is_of_what_was_there_when_it_began(paths):
    begun = FilesDigest(paths)
    paths[1].write_bytes(b"more")
    with pytest.raises(InvalidModelFiles, match="b changed while the model was loaded"):
        begun.result()
    with pytest.raises(InvalidModelFiles, match="none cannot be read"):
        FilesDigest([paths[0].with_name("none")])


def test_a_damaged_file_of_the_cache_is_made_anew(paths, reads, tmp_path):
    first = found(paths)
    [place] = (tmp_path / "cache/hibachi/digests").iterdir()
    whole = place.read_bytes()
    damaged = [bytes(b ^ (i == at) for i, b in enumerate(whole)) for at in range(0, len(whole), 29)]
    for bad in [b"", whole[:-1], whole[40:], whole + b"x", b"\xff" * 99, *damaged]:
        place.write_bytes(bad)
        reads.clear()
        assert found(paths) == first and len(reads) == 5
    assert place.read_bytes() == whole and [*place.parent.iterdir()] == [place]


@pytest.mark.parametrize("home", [True, False])
def test_a_cache_that_cannot_be_written_is_none(paths, tmp_path, monkeypatch, home):
    if home:
        (tmp_path / "cache").write_bytes(b"")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: exec("raise RuntimeError"))
    assert found(paths) == found(paths) == expected(paths)


def test_the_files_of_a_model_are_those_that_it_is_made_of(tmp_path):
    folder = shutil.copytree(SHIPPED["tiny"], tmp_path / "tiny")
    made(folder, {"notes.txt": b"x", "old.safetensors": b"x"})
    names = [path.name for path in open_files(folder).paths]
    assert names == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
