"""Stores beyond this process: found by an address, the same wherever they are, and never believed or waited for."""

import itertools
import os
import sys
import threading
import time
from importlib import metadata

import pytest

from hibachi.engine.tiers import sealed
from hibachi.engine.tiers.sealed import FAILURES, Sealed, key_of
from hibachi.engine.tiers.store import GROUP, open_store
from hibachi.errors import ConfigError, KVStoreError, MissingExtra
from tests.lib.waits import until

ROOT, OTHER = b"r" * 16, b"o" * 16
KEY = key_of(None, ROOT)
NAMES = [bytes([i]) * 16 for i in range(3)]
DATA = bytes(range(256)) * 40


def opened(address, root=ROOT):
    return Sealed(open_store(address, root), key_of(None, root), root)


def round_trip(address):
    store, other = opened(address), opened(address, OTHER)
    assert store.has(NAMES) == [False] * 3 and store.get(NAMES) == [None] * 3
    assert (store.has([]), store.get([]), store.put([])) == ([], [], None)
    store.drop()  # there is nothing yet
    store.put([(NAMES[0], DATA), (NAMES[1], b"")])
    other.put([(NAMES[2], DATA)])
    again = opened(address)
    assert again.has(NAMES) == [True, True, False] and again.get(NAMES) == [DATA, b"", None]
    store.put([(NAMES[0], DATA)])  # it is there already
    store.drop()
    assert again.get(NAMES) == [None] * 3 and other.get(NAMES) == [None, None, DATA]
    store.close()


def test_entries_come_back_and_roots_stay_apart(address):
    round_trip(address)


def test_files_are_asked_for_side_by_side(monkeypatch):
    """Each may be a request over the network."""
    together = threading.Barrier(8, timeout=20)
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.exists", lambda fs, path: together.wait() >= 0)
    assert open_store("memory://x", ROOT).has([bytes([i]) * 16 for i in range(8)]) == [True] * 8


class Fake:
    """A store whose methods return what `answer` does, or raise what it raises."""

    def __init__(self, answer=None):
        self.entries, self.answer, self.calls = {}, answer, 0

    def has(self, names):
        return self.told(names)

    def get(self, names):
        return self.told(names)

    def told(self, names):
        self.calls += 1
        return [self.entries.get(name) for name in names] if self.answer is None else self.answer(names)

    def put(self, entries):
        self.entries.update(entries)

    def drop(self):
        self.entries.clear()

    def close(self):
        raise OSError("gone")


def sent(name=NAMES[0], data=b"data", key=KEY, root=ROOT):
    """What goes out for an entry."""
    store = Fake()
    Sealed(store, key, root).put([(name, data)])
    return store.entries[name]


WHOLE = sent()


@pytest.mark.parametrize(
    "came",
    [
        b"",
        WHOLE[:39],
        WHOLE[:-1],
        WHOLE + b"\0",
        WHOLE + WHOLE,
        b"HBKV" + WHOLE[4:],
        WHOLE[:4] + b"\2" + WHOLE[5:],
        sent(root=OTHER),
        sent(root=ROOT[:15] + b"R"),  # another of which the first bytes are the same
        sent(key=b"another key of 16"),
        sent(name=NAMES[1]),
        WHOLE.decode("latin1"),
        bytearray(WHOLE),
        5,
    ],
)
def test_what_is_not_what_was_sent_is_a_miss_and_told_once(came, caplog):
    store = Sealed(Fake(lambda names: [came, WHOLE]), KEY, ROOT)
    assert store.get([NAMES[0]] * 2) == [None, b"data"]
    assert store.get([NAMES[0]] * 2) == [None, b"data"] and caplog.text.count("another key") == 1


def test_no_byte_of_an_entry_can_change():
    for at in range(len(WHOLE)):
        came = bytes(b ^ (1 << at % 8) * (i == at) for i, b in enumerate(WHOLE))
        assert Sealed(Fake(lambda names, came=came: [came]), KEY, ROOT).get(NAMES[:1]) == [None]


@pytest.mark.parametrize(
    "answer, said",
    [
        (lambda names: [None], "expected 2 items; got fewer"),
        (lambda names: [None] * 3, "expected 2 items; got more"),
        (lambda names: itertools.repeat(None), "expected 2 items; got more"),
        (lambda names: None, "TypeError"),
        (lambda names: sys.exit(1), "SystemExit"),
    ],
)
@pytest.mark.parametrize("what", ["get", "has"])
def test_another_number_of_answers_is_a_failure_of_the_store(what, answer, said):
    with pytest.raises(KVStoreError, match=f"failed to {what}: .*{said}"):
        getattr(Sealed(Fake(answer), KEY, ROOT), what)(NAMES[:2])


def test_only_true_says_that_an_entry_is_there():
    assert Sealed(Fake(lambda names: [True, 1, "no"]), KEY, ROOT).has(NAMES) == [True, False, False]


def test_a_call_that_takes_too_long_is_left_behind():
    goes_on = threading.Event()
    slow = Fake(lambda names: [None] * len(names) if goes_on.wait(20) else None)
    store = Sealed(slow, KEY, ROOT, timeout=0.05)
    with pytest.raises(KVStoreError, match=r"no answer within 0\.05 s"):
        store.get(NAMES)
    with pytest.raises(KVStoreError, match="has not come back"):
        store.put([(NAMES[0], DATA)])
    assert slow.calls == 1 and not slow.entries
    goes_on.set()
    until(lambda: all(thread.name != "hibachi-kv-store" for thread in threading.enumerate()))
    assert store.get(NAMES) == [None] * 3


def test_a_store_that_goes_on_failing_is_left_alone_ever_longer(monkeypatch, caplog):
    now = 1000.0
    monkeypatch.setattr(sealed, "monotonic", lambda: now)

    def fail(names):
        raise ConnectionResetError("it is \x1b away")

    store = Sealed(inner := Fake(fail), KEY, ROOT)

    def failed():
        with pytest.raises(KVStoreError) as e:
            store.get(NAMES)
        return str(e.value)

    for _ in range(FAILURES):
        assert failed().endswith(r"failed to get: ConnectionResetError: it is \x1b away")
    for seconds in (1, 2, 4, 8, 16, 32, 60, 60):
        calls = inner.calls
        now += seconds - 0.01
        assert "left alone for another" in failed() and inner.calls == calls
        now += 0.02
        assert "failed to get" in failed() and inner.calls == calls + 1
    with pytest.raises(KVStoreError, match="failed to close: OSError: gone"):  # which it is asked all the same
        store.close()
    inner.answer = None
    now += 61
    assert store.get(NAMES) == [None] * 3
    said = [record.message.rpartition(": ")[2] for record in caplog.records]
    assert said[:2] + said[-2:] == [
        "left alone for 1 s", "left alone for 2 s", "left alone for 60 s", "the store of cache blocks answers again",
    ]  # fmt: skip
    inner.answer = fail
    assert all("failed to get" in failed() for _ in range(FAILURES))


def test_a_store_that_is_away_does_not_answer_when_it_is_closed(caplog):
    store, inner.close = Sealed(inner := Fake(lambda names: 1 / 0), KEY, ROOT), lambda: None
    for _ in range(FAILURES):
        with pytest.raises(KVStoreError, match="ZeroDivisionError"):
            store.get(NAMES)
    store.close()
    assert "answers again" not in caplog.text


@pytest.mark.slow
def test_a_redis_that_is_a_program_of_its_own(redis_program):
    process, address = redis_program
    round_trip(address)
    store = opened(address)
    store.put([(name, DATA * 100) for name in NAMES])
    assert store.get(NAMES) == [DATA * 100] * 3
    process.kill()
    process.wait()
    began = time.monotonic()
    with pytest.raises(KVStoreError, match="ConnectionError"):
        store.get(NAMES)
    assert time.monotonic() - began < 6


# ---- by an address ---------------------------------------------------------------------------------------------------


def theirs(given, root):
    store = Fake()
    store.made_with = given, root
    return store


def broken(given, root):
    raise OSError("no table")


nothing = dict


@pytest.fixture
def installed(monkeypatch):
    points = {name: f"{__name__}:{name}" for name in ("theirs", "broken", "nothing", "lost")}
    found = metadata.EntryPoints(metadata.EntryPoint(n, v, GROUP) for n, v in (points | {"away": "nowhere:x"}).items())
    monkeypatch.setattr("hibachi.common.installed.entry_points", lambda group: found)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])


@pytest.mark.parametrize("given", ["theirs:a/b", "theirs://host?x=1"])
def test_an_installed_store_is_found_by_its_name(installed, given):
    assert open_store(given, ROOT).made_with == (given, ROOT)
    mine = Fake()
    assert open_store(mine, ROOT) is mine


@pytest.mark.parametrize(
    "given, error, said",
    [
        ("broken:", ConfigError, "The store 'broken:' cannot be made: OSError: no table"),
        ("lost:", ConfigError, "The store 'lost:' cannot be loaded: AttributeError"),
        ("nothing:", ConfigError, "'nothing:' cannot be made: TypeError"),
        ("away:x", MissingExtra, "The store 'away:x' needs what is not installed"),
        ("redis", ConfigError, "such as redis://host .* NAME:... of redis, rediss, unix, away, broken, lost,"),
        ("", ConfigError, "expected an URL"),
        ("c://x", ConfigError, "expected an URL"),  # which fsspec takes for a disk of Windows
        ("nobody:x", ConfigError, "'nobody:x': expected an URL"),
        (
            "redis://me:secret/?@host:port/0?password=secret",
            ConfigError,
            "address of Redis cannot be read: expected redis://user",
        ),
        ("nobody://me:secret@host", ConfigError, "cannot be made: ValueError: Protocol not known: nobody"),
        ("s3://bucket", MissingExtra, "'s3://bucket' needs what is not installed: .*s3fs"),
        (Fake, ConfigError, "a class: pass an instance"),
        (5, ConfigError, "got 5, without has, get, put, drop, close"),
        (None, ConfigError, "got None, without has"),
    ],
)
def test_an_address_that_means_no_store_is_refused(installed, given, error, said):
    with pytest.raises(error, match=said) as e:
        open_store(given, ROOT)
    assert "secret" not in str(e.value)


@pytest.mark.parametrize("module, address", [("redis", "redis://host"), ("fsspec.core", "memory://x")])
def test_without_the_package_the_command_is_named(monkeypatch, module, address):
    monkeypatch.setitem(sys.modules, module, None)
    extra = module.partition(".")[0]
    with pytest.raises(MissingExtra, match=rf"pip install '\.\[{extra}\]'"):
        open_store(address, ROOT)


# ---- the key ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def key_file(tmp_path):
    file = tmp_path / "key"
    file.write_bytes(b"k" * 16)
    file.chmod(0o640)
    return file


def test_the_key_is_all_of_the_file(key_file):
    first = key_of(str(key_file), ROOT)
    assert len(first) == 32 and first == key_of(str(key_file), OTHER) != key_of(None, ROOT) != key_of(None, OTHER)
    key_file.write_bytes(b"k" * 16 + b"\n")
    assert key_of(str(key_file), ROOT) != first


@pytest.mark.parametrize(
    "spoil, said",
    [
        (lambda f: f.unlink(), "cannot be read: .*Make one: head -c 32"),
        (lambda f: (f.unlink(), f.mkdir()), "is no key|cannot be read"),
        (lambda f: (f.unlink(), os.mkfifo(f)), "is no key"),
        (lambda f: f.write_bytes(b"k" * 15), "expected a file of 16 to 65536 random bytes"),
        (lambda f: f.write_bytes(b"k" * 65537), "expected a file of 16 to 65536"),
        (lambda f: f.chmod(0o644), "open to all users of this machine. Close it: chmod o-rw"),
    ],
)
def test_a_file_that_is_no_key_is_refused(key_file, spoil, said):
    spoil(key_file)
    with pytest.raises(ConfigError, match=f"--kv-key-file {key_file}.*({said})"):
        key_of(str(key_file), ROOT)
