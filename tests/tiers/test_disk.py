"""Entries on disk: what was put is found, bit for bit, or not at all."""

import errno
import hashlib
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from hibachi.engine.tiers import disk
from hibachi.engine.tiers.disk import DiskStore
from hibachi.errors import ConfigError, KVStoreError
from tests.lib.command import called
from tests.lib.waits import until

ROOT, OTHER = bytes(range(16)), bytes(16)
MOST = 1 << 24
WRITER = """
import random, sys
from hibachi.engine.tiers.disk import DiskStore
folder, most, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = DiskStore(folder, most, bytes(range(16)))
for i in range(first, first + 100_000):
    store.put([(i.to_bytes(16, "big"), random.Random(i).randbytes(1 + i * 7919 % 4_000))])
    print(i, flush=True)
"""


def named(i):
    return i.to_bytes(16, "big")


def data_of(i):
    return random.Random(i).randbytes(1 + i * 7919 % 4_000)


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Opens stores in the folder `kv`, which always look what others did, and closes them."""
    monkeypatch.setattr(disk, "_EVERY", 0.0)
    stores = []

    def make(most=MOST, root=ROOT, folder=tmp_path / "kv", **options):
        stores.append(DiskStore(folder, most, root, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def kv(tmp_path):
    return tmp_path / "kv"


@pytest.fixture
def cache(capsys, kv):
    return lambda what, *args: called(capsys, "cache", what, kv, *args)


def there(store, most=999):
    return [i for i, has in enumerate(store.has([*map(named, range(most))])) if has]


def held_bytes(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


def read_by_a_stranger(folder):
    """The entries of ROOT, by what the docstring says of the format, and nothing else."""

    def blake(data, key=b""):
        return hashlib.blake2b(data, key=key, digest_size=16).digest()

    found = {}
    for path in sorted(folder.glob(f"{ROOT.hex()}-*.kv")):
        raw, at = path.read_bytes(), 64
        assert raw[:24] == b"HIBKVS01" + ROOT and raw[32:48] == blake(raw[:32], ROOT)
        while at < len(raw):
            magic, name, length = struct.unpack_from("<8s16sQ", raw, at)
            data = raw[at + 64 : at + 64 + length]
            assert magic == b"HIBKVR01" and raw[at + 32 : at + 48] == blake(raw[at : at + 32], ROOT)
            assert raw[at + 48 : at + 64] == blake(name + data)
            found[name], at = data, at + 64 + length
    return found


@pytest.mark.parametrize("seed", range(6))
def test_a_store_is_a_dictionary_that_lasts(kv, opened, seed, monkeypatch):
    """K-25: what is read back is equal bit for bit, also after a restart."""
    if seed > 3:  # as on file systems that have no locks
        monkeypatch.setattr(disk, "locked", lambda *_, shared=False: None)
    rng, known = random.Random(seed), {}
    other, *stores = opened(root=OTHER), opened(), opened()
    other.put([(named(1), b"other")])
    for _ in range(150):
        at = rng.randrange(2)
        names = [named(rng.randrange(40)) for _ in range(5)]
        match rng.choice("pppgggow" if rng.random() < 0.97 else "d"):
            case "p":
                entries = [(name, rng.randbytes(rng.choice([0, 1, 63, 500]))) for name in names]
                stores[at].put(entries)
                known.update(entries)
            case "g":
                assert stores[at].get(names) == [known.get(name) for name in names]
                assert stores[at].has(names) == [name in known for name in names]
            case "o":
                stores[at].close()
                stores[at] = opened()
            case "w":
                before = held_bytes(kv)
                stores[at].put([*known.items()])  # which it has
                assert held_bytes(kv) == before
            case "d":
                stores[at].drop()
                known.clear()
    assert read_by_a_stranger(kv) == known and other.get([named(1)]) == [b"other"]
    assert (kv).stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in [*kv.iterdir()]} <= {0o600}


# ---- damage ----------------------------------------------------------------------------------------------------------

SMALL = {named(i): bytes([i]) * 9 for i in range(4)}


@pytest.fixture
def small(kv, opened):
    """The bytes of a segment of four records of 73 bytes, and what puts other bytes in their place."""
    store = opened()
    store.put([*SMALL.items()])
    store.close()
    (path,) = kv.iterdir()

    def replace(raw):
        path.write_bytes(raw)
        return opened()

    return path.read_bytes(), replace


def test_a_flipped_bit_anywhere_is_a_miss_and_is_told(small, cache):
    """K-25: a corrupt file is a miss, and never wrong data."""
    raw, replace = small
    assert len(raw) == 64 + 4 * 73
    for at in range(len(raw)):
        store = replace(raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 :])
        record, place = divmod(at - 64, 73) if at >= 64 else (0, at)
        in_header = place < 48
        lost = range(record, 4) if in_header else range(record, record + (at >= 64))  # data behind are found
        for _ in range(2):  # and what is lost is not indexed again
            assert store.get([*SMALL]) == [None if i in lost else data for i, data in enumerate(SMALL.values())], at
        assert store.has([*SMALL]) == [i not in lost for i in range(4)]
        status, out, _ = cache("verify")
        assert status == bool(lost), (at, out)
        if lost:
            start = 64 + record * 73 if at >= 64 else 0
            assert f" at {start}: the {'header' if in_header else 'data of'}" in out
            store.put([*SMALL.items()])
            assert store.get([*SMALL]) == [*SMALL.values()]
            store.drop()
        store.close()


def test_a_segment_that_is_cut_off_anywhere_has_what_came_before(small, cache):
    raw, replace = small
    for size in range(len(raw)):
        store = replace(raw[:size])
        whole = max(size - 64, 0) // 73
        assert store.get([*SMALL]) == [*SMALL.values()][:whole] + [None] * (4 - whole)
        status, out, _ = cache("verify")
        assert status == 0 and f"sound: {whole}, damaged: 0, in segments: 1\n" in out
        assert ("is cut off" in out) == (size not in (0, 64 + 73 * whole))
        store.close()


@pytest.mark.usefixtures("small")
def test_segments_of_other_roots_names_and_users_are_not_read(kv, opened, monkeypatch):
    (path,) = kv.iterdir()
    assert opened(root=OTHER).get([*SMALL]) == [None] * 4
    linked = kv / f"{ROOT.hex()}-{'f' * 15}0.kv"
    moved = path.rename(kv / path.name.replace(ROOT.hex(), OTHER.hex()))
    linked.symlink_to(moved)
    assert opened(root=OTHER).get([*SMALL]) == [None] * 4  # its headers belong to another root
    assert opened().get([*SMALL]) == [None] * 4
    moved.rename(path)
    assert opened().get([*SMALL]) == [*SMALL.values()]
    if os.geteuid() == 0:  # who alone can give files away
        os.chown(path, 12345, -1)
        assert opened().get([*SMALL]) == [None] * 4
        os.chown(kv, 12345, -1)
        assert opened().get([*SMALL]) == [*SMALL.values()]
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
        with pytest.raises(ConfigError, match="belongs to neither this user nor its owner"):
            opened()


# ---- processes that are killed, and others ---------------------------------------------------------------------------


@contextmanager
def writer(folder, most=MOST, first=0):
    command = [sys.executable, "-c", WRITER, str(folder), str(most), str(first)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_a_killed_writer_leaves_all_that_it_put(kv, opened, cache, kills):
    rng, first, put = random.Random(kills), 0, []
    most = 1 << 30
    for _ in range(kills):
        with writer(kv, most, first) as process:
            told = [int(process.stdout.readline()) for _ in range(rng.randrange(1, 20))]
            threading.Event().wait(rng.random() * 0.005)
            os.kill(process.pid, signal.SIGKILL)
            told += map(int, process.stdout.read().split())
        put += told
        first = told[-1] + 1
        store = opened(most)
        assert store.get([*map(named, told)]) == [*map(data_of, told)]
        last = store.get([named(first)])[0]  # was perhaps put, and could not be told
        assert last in (None, data_of(first))
        assert cache("verify")[0] == 0
        store.close()
    store = opened(most)
    assert store.get([*map(named, put)]) == [*map(data_of, put)]


def test_processes_share_a_folder_and_one_is_killed(kv, opened):
    store = opened()
    with writer(kv) as process:
        for i in range(10**6, 10**6 + 30):
            told = int(process.stdout.readline())
            store.put([(named(i), b"mine")])
            assert store.get([named(told), named(i)]) == [data_of(told), b"mine"]
        store.drop()
        until(lambda: there(store, 99_999))  # it notices, and begins another segment
        os.kill(process.pid, signal.SIGKILL)
        told += len(process.stdout.read().split())
    left = there(store, 99_999)
    assert left[-1] in (told, told + 1) and left == [*range(left[0], left[-1] + 1)]
    assert store.get([*map(named, left)]) == [*map(data_of, left)]


def test_others_are_looked_for_once_a_second(opened, monkeypatch):
    looks, listing = [], disk.listing
    monkeypatch.setattr(disk, "_EVERY", 0.3)
    monkeypatch.setattr(disk, "listing", lambda folder: looks.append(0) or listing(folder))
    store, other = opened(), opened()
    fill(other, [1])
    looks.clear()
    began = time.monotonic()
    until(lambda: there(store))
    for _ in range(300):
        store.get([named(2)])
    assert len(looks) <= 1 + (time.monotonic() - began) / 0.3


def test_all_agree_which_of_two_writes_counts_that_did_not_know_of_each_other(opened, monkeypatch):
    monkeypatch.setattr(disk, "_EVERY", 60.0)
    early = opened()
    fill(early, [1])
    monkeypatch.setattr(disk, "_EVERY", 0.0)
    late, reader = opened(), opened()
    late.put([(named(2), b"late")])
    assert reader.get([named(2)]) == [b"late"]
    early.put([(named(2), b"early")])  # in the older segment
    assert reader.get([named(2)]) == opened().get([named(2)]) == [b"late"]


def test_threads_put_and_get_while_old_segments_go(opened):
    store, stop, wrong = opened(1 << 18), threading.Event(), []

    def read():
        rng = random.Random(1)
        while not stop.is_set():
            i = rng.randrange(400)
            wrong.extend(i for data in store.get([named(i)]) if data not in (None, data_of(i)))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for i in range(400):
        store.put([(named(i), data_of(i))])
    stop.set()
    for reader in readers:
        reader.join()
    assert not wrong and store.get([named(399)]) == [data_of(399)]


# ---- the bound -------------------------------------------------------------------------------------------------------

RECORD = 64 + 100  # bytes on disk of data of 100 bytes


def fill(store, which):
    store.put([(named(i), i.to_bytes(4, "big") * 25) for i in which])


@pytest.mark.parametrize("records", [1, 2, 5, 40])
def test_a_full_tier_loses_the_oldest_also_after_a_restart(kv, opened, records, monkeypatch):
    """K-25."""
    monkeypatch.setattr(disk, "_EVERY", 60.0)
    most, left = records * (64 + RECORD), []
    other = opened(most, OTHER)
    fill(other, [0])
    other.close()
    for first in (0, 50):
        store = opened(most)
        assert there(store) == left
        for i in range(first, first + 50):
            fill(store, [i])
            assert held_bytes(kv) <= most
        left = there(store)
        assert left == [*range(first + 50 - len(left), first + 50)]
        assert store.latest(250) == [*map(named, left[:-3:-1])]
        assert len(left) == records or len(left) > 40  # of which three share a segment
        store.close()
    assert there(opened(most, OTHER)) == []
    opened(64 + RECORD)  # a smaller bound holds at once
    assert held_bytes(kv) <= 64 + RECORD


def test_starts_without_end_leave_files_within_bounds(opened, monkeypatch):
    monkeypatch.setattr(disk, "MOST_SEGMENTS", 5)
    for i in range(12):
        store = opened()
        fill(store, [i])
        store.close()
    assert there(opened()) == [*range(7, 12)]


def test_segments_that_others_hold_stay_and_their_room_is_kept(kv, opened):
    most = 32 * (64 + RECORD)  # segments of twice that: the second record of each has its room
    stores = [*(opened(most, bytes([i]) * 16) for i in range(16)), opened(most - 200)]
    for store in stores[:16]:
        fill(store, [1])
    for _ in range(2):
        with pytest.raises(
            KVStoreError, match=f"no room for 228 bytes: of its {most - 200}, other processes hold {most}"
        ):
            fill(stores[16], [1])
    for store in stores[1:16]:
        fill(store, [2])
        assert there(store) == [1, 2]
    (listed,) = [file for file in disk.listing(kv) if file.root == bytes(16)]
    fill(stores[0], [2])
    stores[0].close()
    assert disk.room_of(listed) == (64 + 2 * RECORD, False)  # it grew since it was listed
    fill(stores[16], [1])
    assert there(stores[16]) == [1] and there(stores[0]) == [] and held_bytes(kv) <= most - 200


def test_what_was_read_has_a_second_chance(opened):
    store = opened(16 * (64 + 10 * RECORD))  # segments of ten records
    fill(store, range(10))
    store.get([named(3), named(7)])
    fill(store, range(100, 251))
    assert there(store)[:3] == [3, 7, 100]
    fill(store, range(251, 411))
    assert there(store)[0] == 258  # nobody asked again
    store.get([*map(named, range(258, 268))])
    fill(store, range(411, 420))
    assert there(store)[:6] == [258, 259, 260, 261, 262, 268]  # half of a segment at most


def test_a_second_chance_is_given_in_what_room_a_segment_has(opened):
    for i in range(40):
        fill(each := opened(), [2 * i, 2 * i + 1])
        each.close()
    store = opened(16 * 800)
    before = there(store)
    store.get([*map(named, before)])
    store.put([(named(100), bytes(400))])  # two segments go for one of 800 bytes, which also holds one record
    assert len(before) - len(there(store)) == 4 - 1 - 1


def test_what_cannot_fit_is_refused_without_harm(opened):
    """K-25: oversize."""
    store = opened(1000)
    fill(store, [1])
    with pytest.raises(KVStoreError, match="can have 872 bytes; 873 were refused"):
        store.put([(named(2), bytes(100)), (named(3), bytes(873)), (named(4), bytes(100))])
    assert there(store) == [1, 2, 4]
    store.put([(named(5), bytes(872))])
    assert there(store) == [5]


# ---- disks that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("cut", [True, False], ids=["cut", "torn"])
def test_a_write_that_fails_is_told_once_and_forgotten(opened, cache, monkeypatch, code, cut):
    def half(file, data, at, pwrite=os.pwrite):
        if len(data) < 5000:
            raise OSError(code, os.strerror(code))
        return pwrite(file, data[: len(data) // 2], at)  # as systems do, which tell why not all when asked again

    def no(*_):
        raise OSError(code, os.strerror(code))

    store = opened()
    fill(store, [1])
    with monkeypatch.context() as m:
        m.setattr(os, "pwrite", half)
        if not cut:
            m.setattr(os, "ftruncate", no)
        for _ in range(3):
            with pytest.raises(KVStoreError, match=re.escape(os.strerror(code))):
                store.put([(named(4), bytes(10_000)), (named(5), b"")])
            assert there(store) == [1]
            assert cache("verify")[0] == 0
    fill(store, [2, 3])
    assert there(store) == there(opened()) == [1, 2, 3] and cache("verify")[0] == 0
    with monkeypatch.context() as m:
        m.setattr(os, "pread", no)
        assert store.get([named(1), named(2)]) == [None, None]
    assert None not in store.get([named(1), named(2)])


def test_a_folder_that_vanishes_and_comes_back(kv, tmp_path, opened):
    store = opened()
    fill(store, [1])
    (kv).rename(tmp_path / "away")
    for _ in range(2):
        assert store.get([named(1)]) == [None] and there(store) == []
        with pytest.raises(KVStoreError, match="No such file or directory"):
            fill(store, [2])
    (tmp_path / "away").rename(kv)
    fill(store, [2])
    assert there(store) == there(opened()) == [1, 2]
    shutil.rmtree(kv)
    (kv).mkdir()
    fill(store, [3])
    assert there(store) == there(opened()) == [3]


def test_a_folder_that_a_stopped_process_holds_is_not_waited_for_long(kv, opened, monkeypatch):
    store = opened()
    monkeypatch.setattr(disk, "_PATIENCE", 0.05)
    with disk.alone(kv):
        with pytest.raises(KVStoreError, match=r"Another process has held .* is it stopped"):
            fill(store, [1])
        with pytest.raises(ConfigError, match="is it stopped"):
            opened()
    fill(store, [1])
    assert there(store) == [1]
    store.close()
    with pytest.raises(KVStoreError, match="is closed"):
        fill(store, [2])


@pytest.mark.parametrize(
    "most, options, message",
    [
        (0, {}, "of 0 bytes was asked for, and one entry takes 129"),
        (999, {"entry_bytes": 1000}, "of 999 bytes was asked for, and one entry takes 1128"),
        (1 << 60, {}, rf"of {1 << 60} bytes was asked for, and the disk of .*/kv has \d+ for it. Give it fewer"),
        (MOST, {"root": b"short"}, "has 16 bytes, got 5"),
        (MOST, {"folder": "\0"}, "must be one that this user may write to: embedded null byte"),
        (MOST, {"folder": "/proc"}, "/proc .* must be one that this user may write to: .* or name another folder"),
        (MOST, {"folder": "/dev/null"}, "must be one that this user may write to: .*File exists"),
    ],
)
def test_settings_that_cannot_hold_are_refused(opened, most, options, message):
    with pytest.raises(ConfigError, match=message):
        opened(most, **options)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_lists_roots_the_newest_first(opened, cache):
    fill(opened(root=OTHER), range(2000))
    store = opened()
    fill(store, [1])
    fill(store, [2])
    store.put([(named(2), bytes(5))])
    first = {"root": ROOT.hex(), "entries": 2, "bytes": 64 + 2 * RECORD + 69, "segments": 1}
    second = {"root": OTHER.hex(), "entries": 2000, "bytes": 64 + 2000 * RECORD, "segments": 1}
    total = {"root": "total", "entries": 2002, "bytes": first["bytes"] + second["bytes"], "segments": 2}
    assert json.loads(cache("ls", "--json")[1]) == {"roots": [first, second], "total": total}
    assert cache("ls")[1].splitlines() == [
        "root                                entries      bytes  segments",
        f"{ROOT.hex()}          2      461 B         1",
        f"{OTHER.hex()}      2,000  320.4 KiB         1",
        "total                                 2,002  320.8 KiB         2",
    ]


def test_the_command_clears_what_is_a_caches_only(kv, opened, cache):
    stores = [opened(), opened(root=OTHER)]
    for store in stores:
        fill(store, [1])
    stores[1].close()
    (kv / "notes").touch()
    status, _, err = cache("clear")
    assert status == 1 and "holds what is not of a cache, such as 'notes'" in err and there(stores[0]) == [1]
    (kv / "notes").unlink()
    status, _, err = cache("clear", "--root", "ab" * 16)
    assert status == 1 and "nothing of a root 'abab" in err
    assert cache("clear", "--root", OTHER.hex()) == (0, "segments removed: 1 of 228 B\n", "")
    assert there(stores[0]) == [1] and there(stores[1]) == []
    assert "1 held by processes that run, which begin others" in cache("clear")[1]
    assert there(stores[0]) == [] and not [*kv.iterdir()]
    fill(stores[0], [2])
    assert there(stores[0]) == there(opened()) == [2]
    assert cache("clear")[0] == cache("verify")[0] == cache("ls")[0] == 0
    fill(stores[0], [3])
    (file,) = disk.listing(kv)
    shutil.rmtree(kv)
    assert disk.room_of(file) == (0, False) and [*disk.records(file)] == []
    for what in ("ls", "verify", "clear"):
        assert cache(what)[0] == 1
