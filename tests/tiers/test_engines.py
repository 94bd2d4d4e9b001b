"""Engines with tiers: what was kept is found, in this process and in the next one, and no bit differs for it."""

import hashlib
import math
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from hibachi import (
    LLM,
    AutoregressiveBatchInference,
    ConfigError,
    InvalidRequest,
    KVStoreError,
    KVTiers,
    NumpyBackend,
    SamplingParams,
    Terms,
    Trie,
    UnsupportedOperation,
    prefix,
)
from hibachi.engine.recording.replay import read, replay
from hibachi.engine.runners.entries import Entries
from hibachi.engine.scheduler.names import extended, state_name
from hibachi.engine.scheduler.scheduler import Scheduler
from hibachi.engine.scheduler.sequence import Seq
from hibachi.engine.scheduler.step import Limits
from hibachi.engine.scheduler.tiers import Tiers
from hibachi.engine.tiers import sealed
from hibachi.engine.tiers.host import HostTier, Wish
from hibachi.engine.tiers.keeping import Keeper
from hibachi.llm.model import MEANING
from hibachi.request import Request
from hibachi.testing.toys import SumBoth, SumLogits, SumPaged, SumState, expected

from ..engine.models import until
from ..engine.test_given_kv import begun
from ..engine.test_own_cache import Attends

NUMPY = NumpyBackend()
DRAWN = SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True, logprobs=1)
SIZE = 1 << 24


class Dictionary:
    """A store whose methods can be made to fail, to wait, or to lose."""

    def __init__(self):
        self.held, self.failing, self.gate = {}, set(), threading.Event()
        self.gate.set()

    def _enter(self, method):
        self.gate.wait(20)
        if method in self.failing:
            raise OSError("the cable is cut")

    def has(self, names):
        self._enter("has")
        return [name in self.held for name in names]

    def get(self, names):
        self._enter("get")
        return [self.held.get(name) for name in names]

    def put(self, entries):
        self._enter("put")
        self.held |= dict(entries)

    def drop(self):
        self._enter("drop")
        self.held.clear()

    def close(self):
        self.closed = True


def llm(**options):
    return LLM(
        "tiny", **{"block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 128, "max_model_len": 256} | options
    )


def own(model, **options):
    model.cache_id = "the weights of a test"
    shape = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
    return AutoregressiveBatchInference(model, backend="numpy", **shape | options)


COLUMNS = {  # how an engine is made; tokens of its ids
    "numpy": (lambda **o: llm(backend="numpy", **o), 2000),
    "torch": (lambda **o: llm(backend="torch", **o), 2000),
    "torch bfloat16": (lambda **o: llm(backend="torch", dtype="bfloat16", **o), 2000),
    "torch int8": (lambda **o: llm(backend="torch", quantization="int8", **o), 2000),
    "jax": (lambda **o: llm(backend="jax", **o), 2000),
    "a state": (lambda **o: own(SumState(NUMPY), **o), 10),
    "a state beside keys": (lambda **o: own(SumBoth(NUMPY), **o), 10),
    "an own cache": (lambda **o: own(Attends(), deterministic=False, **o), 50),
}


def talk(made, vocab, turns=3):
    """Conversations that need twice the small pool; the digest of all that comes, and the engine's statistics."""
    rng, digest = np.random.default_rng(0), hashlib.sha256()
    texts = isinstance(made, LLM)
    long = 60 if texts else 12
    talks = [rng.integers(1, vocab, long).tolist() for _ in range(8)]
    for _ in range(turns):
        if texts:
            answers = [out.choices[0] for out in made.generate([list(t) for t in talks], DRAWN)]
            got = [(a.token_ids, [sorted(x.items()) for x in a.logprobs]) for a in answers]
        else:
            params = SamplingParams(temperature=0.8, seed=1, max_tokens=6)
            got = [(stream.collect(), None) for stream in [made.run(t, params) for t in talks]]
        digest.update(repr(got).encode())
        talks = [t + g + rng.integers(1, vocab, long // 4).tolist() for t, (g, _) in zip(talks, got, strict=True)]
    return digest.hexdigest(), made.stats()


@pytest.mark.parametrize("column", COLUMNS)
def test_every_cell_has_the_same_bits_and_what_was_kept_is_found(column, tmp_path, monkeypatch):
    monkeypatch.setattr("hibachi.engine.tiers.waiting.LEAST_WAIT", 5.0)  # for a busy machine
    make, vocab = COLUMNS[column]
    small = {"cache_tokens": 16 * 34 if vocab == 2000 else 4 * 28}
    disk = {"disk": tmp_path / "kv", "disk_bytes": 1 << 26}
    shared = Dictionary()
    cells = {
        "ample": {},
        "small": small,
        "host": small | {"kv_tiers": KVTiers(host_bytes=SIZE)},
        "ample, host": {"kv_tiers": KVTiers(host_bytes=SIZE)},
        "host and disk": small | {"kv_tiers": KVTiers(host_bytes=SIZE, **disk)},
        "restarted": small | {"kv_tiers": KVTiers(host_bytes=SIZE, **disk)},
        "store": small | {"kv_tiers": KVTiers(host_bytes=SIZE, store=shared)},
        "from the store": small | {"kv_tiers": KVTiers(host_bytes=SIZE, store=shared)},
    }
    digests, found = {}, {}
    for cell, options in cells.items():
        made = make(**options)
        digests[cell], found[cell] = talk(made, vocab)
        made.close()
    assert len(set(digests.values())) == 1, digests
    hits = {cell: stats.prefix_hits for cell, stats in found.items()}
    loads = {cell: stats.tier_hits for cell, stats in found.items()}
    assert all(loads[cell] for cell in cells if cell not in ("ample", "small", "ample, host")), loads
    assert hits["small"] < hits["host"] and hits["host"] >= 0.95 * hits["ample"], hits
    for cell in ("restarted", "from the store"):
        assert hits[cell] > hits["host"] and hits[cell] >= 0.95 * hits["ample"], hits


def turn(made, prompt, **more):
    """The new tokens of a prompt of a toy, and how many of its tokens were found."""
    stream = made.run(prompt, SamplingParams(temperature=0, max_tokens=3), **more)
    tokens = stream.collect()
    assert tokens == expected(prompt, 3)
    return stream.reused


PROMPT = list(range(10)) * 3


def test_a_restarted_engine_finds_what_the_last_one_kept_and_others_do_not(tmp_path):
    tiers = KVTiers(disk=tmp_path, disk_bytes=SIZE)
    with own(SumPaged(NUMPY), kv_tiers=tiers) as made:
        assert turn(made, PROMPT, terms=Terms(cache_salt="a")) == 0
    with own(SumPaged(NUMPY), kv_tiers=tiers) as made:
        assert turn(made, PROMPT, terms=Terms(cache_salt="b")) == 0, "another tenant's"
        assert turn(made, PROMPT, terms=Terms(cache_salt="a")) == 28
        made.reset_cache()
        assert turn(made, PROMPT, terms=Terms(cache_salt="a")) == 0
    with own(SumPaged(NUMPY), kv_tiers=tiers) as made:
        assert turn(made, PROMPT, terms=Terms(cache_salt="b")) == 0, "it was forgotten before"
        assert turn(made, PROMPT, terms=Terms(cache_salt="a")) == 28, "and this was computed after"
    for other in ({"block_size": 2}, {"dtype": "float16"}):
        with own(SumPaged(NUMPY), kv_tiers=tiers, **other) as made:
            assert turn(made, PROMPT, terms=Terms(cache_salt="a")) == 0
    with own(SumPaged(NUMPY), kv_tiers=KVTiers(disk=tmp_path, disk_bytes=SIZE, cache_id="new weights")) as made:
        assert turn(made, PROMPT, terms=Terms(cache_salt="a")) == 0


def test_keys_and_values_from_elsewhere_are_kept_under_no_name():
    tiers = KVTiers(store=Dictionary())
    request, wanted = begun(PROMPT, 5, values=[7] * len(PROMPT), known=True)
    with own(SumPaged(NUMPY), kv_tiers=tiers) as made:
        assert made.submit(made.check(request)).collect() == wanted
        assert turn(made, PROMPT) == 0
    with own(SumPaged(NUMPY), kv_tiers=tiers) as made:
        assert turn(made, PROMPT) == 28


def test_libraries_of_one_numerics_find_what_the_others_kept(tmp_path, monkeypatch):
    tiers, answers = KVTiers(disk=tmp_path, disk_bytes=SIZE), set()
    for backend, meaning in (("torch", MEANING), ("numpy", MEANING), ("jax", MEANING), ("numpy", MEANING + 1)):
        monkeypatch.setattr("hibachi.llm.llm.MEANING", meaning)
        with llm(backend=backend, kv_tiers=tiers) as made:
            found = made.generate([list(range(5, 105))], SamplingParams(temperature=0, max_tokens=4))
            hits = 96 * bool(answers and made.engine.facts.numerics and meaning == MEANING)
            assert made.stats().tier_hits == hits, "files that are read otherwise have other names"
            answers.add(tuple(found[0].choices[0].token_ids))
    assert len(answers) == 1 or not made.engine.facts.numerics


def test_a_restarted_engine_has_what_was_written_last_before_the_first_request(tmp_path, monkeypatch):
    monkeypatch.setattr("hibachi.engine.tiers.host.AT_ONCE", 3)
    tiers = KVTiers(disk=tmp_path, disk_bytes=SIZE)
    with own(SumPaged(NUMPY), kv_tiers=tiers) as made:
        turn(made, PROMPT)
    with own(SumPaged(NUMPY), kv_tiers=tiers) as made:
        host = made.core.tiering.host
        until(lambda: host.counts.brought == 8)
        monkeypatch.setattr(host, "bring", None)
        assert turn(made, PROMPT) == 28
        few = KVTiers(disk=tmp_path, disk_bytes=SIZE, host_bytes=3 * host.used // 8)
    with own(SumPaged(NUMPY), kv_tiers=few) as made:
        host = made.core.tiering.host
        until(lambda: host.counts.brought == 3)
        assert turn(made, PROMPT) == 12, "a prompt that host memory has no room for begins with its beginning"
    threads = threading.active_count()
    own(SumPaged(NUMPY), kv_tiers=few).close()
    assert threading.active_count() == threads, "an engine that nobody asked leaves nothing behind"


def test_a_start_takes_as_long_for_each_of_many_entries_as_of_few():
    store = Dictionary()
    store.held = {number.to_bytes(16): b"some" for number in range(100_000)}
    store.latest = lambda most: list(store.held)
    host = HostTier(Keeper(SIZE), [("disk", store)])
    host.generation(bytes(16))
    host.warm()
    until(lambda: host.counts.brought == 100_000, 5)
    host.close()


def test_a_reset_holds_though_the_store_was_away_and_another_had_reset_it():
    store = Dictionary()
    with own(SumPaged(NUMPY), kv_tiers=KVTiers(store=store)) as made:
        turn(made, PROMPT)
        until(lambda: len(store.held) == 8)
        store.failing = {"drop"}
        made.reset_cache()
        assert turn(made, PROMPT) == 0
    assert len(store.held) == 8, "nothing went to a store that has not forgotten"
    store.failing = set()
    with own(SumPaged(NUMPY), kv_tiers=KVTiers(store=store)) as made:
        assert turn(made, PROMPT) == 28, "nobody could tell this process of it"
        made.reset_cache()
        until(lambda: len(store.held) == 1)
    store.failing = {"get"}
    with own(SumPaged(NUMPY), kv_tiers=KVTiers(store=store)) as made:  # which does not learn of the reset
        turn(made, PROMPT)
        store.failing = set()
        turn(made, [9, *PROMPT])
    assert len(store.held) == 1 and store.closed, "and so keeps to itself what it computes under old names"
    (number,) = store.held
    with own(SumPaged(NUMPY), kv_tiers=KVTiers(store=store)) as made:
        del store.held[number]  # others took its place
        turn(made, PROMPT)
        until(lambda: len(store.held) == 9)
    with own(SumPaged(NUMPY), kv_tiers=KVTiers(store=store)) as made:
        assert turn(made, PROMPT) == 28, "the number that is part of the names is still known"


def test_who_is_reset_last_finds_nothing_of_who_was_reset_before():
    store = Dictionary()
    one, other = (own(SumPaged(NUMPY), kv_tiers=KVTiers(store=store)) for _ in range(2))
    with one, other:
        turn(other, [1])
        one.reset_cache()
        turn(one, PROMPT)
        until(lambda: len(store.held) == 9)
        other.reset_cache()
        assert turn(other, PROMPT) == 0
        until(lambda: len(store.held) == 9)
    with own(SumPaged(NUMPY), kv_tiers=KVTiers(store=store)) as made:
        assert turn(made, PROMPT) == 28


KILLED = """
import sys
from hibachi import LLM, KVTiers, SamplingParams

tiers = KVTiers(host_bytes=1 << 20, disk=sys.argv[1], disk_bytes=3 << 20)
with LLM("tiny", backend="numpy", block_size=16, cache_tokens=16 * 40, kv_tiers=tiers) as llm:
    for n in range(10**6):
        prompts = [[5 + (n + i) % 50, *range(5, 45 + i)] for i in range(4)]
        for prompt, out in zip(prompts, llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20))):
            print(prompt[0], len(prompt), *out.choices[0].token_ids, llm.stats().tier_hits > 0, flush=True)
"""


@pytest.mark.slow
def test_engines_that_are_killed_leave_nothing_unsound_and_no_answer_differs(tmp_path):
    rng, answers, loaded = random.Random(0), {}, 0
    for _ in range(30):
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, tmp_path / "kv"], stdout=subprocess.PIPE, text=True
        ) as made:
            assert made.stdout is not None
            lines = [made.stdout.readline() for _ in range(rng.randint(1, 60))]
            made.kill()
        for line in lines:
            first, length, *tokens, hit = line.split()
            assert answers.setdefault((first, length), tokens) == tokens
            loaded += hit == "True"
        subprocess.run([sys.executable, "-m", "hibachi", "cache", "verify", tmp_path / "kv"], check=True)
    assert loaded > 100


@pytest.mark.parametrize("kind", [{"blocks": 40}, {"checkpoints": 8}, {"blocks": 40, "copies": True}])
@pytest.mark.parametrize("prompt", [18, 3])
def test_after_a_reset_nobody_finds_anything_of_who_ran(kind, prompt):
    """Not even what became full or sound after it: that depends on what was computed before."""
    find = {}
    scheduler = Scheduler(Limits(1, 64, 10, 64, block_size=4, **kind), key_of=lambda seq, n: bytes([n]))
    scheduler.tiers = Tiers(b"old", find.get)
    keys = [bytes([n]) for n in range(6)]
    runs, waits = Seq(prompt, 24 - prompt, keys=keys[: prompt // 4]), Seq(24, 2, keys=[*keys])
    for seq in (runs, waits):
        scheduler.add(seq)
        scheduler.tiers.names(seq, 6)
    plan = scheduler.schedule()
    scheduler.drop_prefixes()
    scheduler.tiers.renew(b"new")
    while runs.finish is None:
        scheduler.commit(plan, np.zeros(int(plan.emit.sum()), bool))
        stores = scheduler.take_stores()
        find |= {name: b"stale" for _, name in [*stores.blocks, *stores.states]}
        find |= {name: b"stale" for name in runs.names}
        plan = scheduler.schedule()
        scheduler.check()
    assert waits.row >= 0 and waits.reused == 0 and not any(plan.loads) and waits.root == b"new"


def test_states_are_looked_for_where_the_blocks_of_a_start_end():
    # Before what has names, or behind: what a recurrent model generates has none.
    seq = Seq(16, 8, keys=[b"1", b"2", b"3"])
    names = extended([], b"root", None, seq.keys, 3)
    tiers = Tiers(b"root", {state_name(names[1]): b"two", state_name(names[2]): b"three"}.get)
    assert [tiers.state(seq, 0, most) for most in (5, 2)] == [(3, b"three"), (2, b"two")]
    tiers.renew(b"new")
    assert tiers.state(seq, 0, 3) is None, "what was kept before a reset"


def test_blocks_wait_for_others_to_be_stored_with_unless_nothing_is_computed(monkeypatch):
    monkeypatch.setattr("hibachi.engine.tiering.LATEST", 60.0)
    data, sizes = Entries.data, []
    monkeypatch.setattr(Entries, "data", lambda some: sizes.append(len(some.names)) or data(some))
    with own(SumPaged(NUMPY), kv_tiers=KVTiers(host_bytes=SIZE)) as made:
        for prompt in (PROMPT, [3, *PROMPT]):
            made.run(prompt, SamplingParams(temperature=0)).collect()
        until(lambda: made.core.tiering.host.counts.stored == 30)
    assert sum(sizes) == 30 and len(sizes) < 6, sizes


def test_a_state_is_loaded_with_all_blocks_before_it_though_other_threads_evict_them():
    asked = []

    def find(name):
        asked.append(name)
        return b"kept" if asked.count(name) == 1 else None  # it makes way as soon as it was seen

    scheduler = Scheduler(Limits(1, 64, 64, 64, 40, 4, checkpoints=8))
    scheduler.tiers = Tiers(b"root", find)
    scheduler.add(Seq(18, 2, keys=[bytes([n]) for n in range(4)]))
    plan = scheduler.schedule()
    assert (len(plan.loads.states), len(plan.loads.blocks), plan.start.tolist()) == (1, 4, [16])


def test_a_callback_that_raises_harms_nobody():
    with own(SumPaged(NUMPY), kv_tiers=KVTiers(host_bytes=SIZE, on_event=lambda *event: 1 / 0)) as made:
        turn(made, PROMPT)
        until(lambda: made.core.tiering.host.counts.stored == 8)
        assert turn(made, PROMPT) == 28


def test_v39_a_store_that_fails_costs_time_only_or_the_request_as_is_wanted(monkeypatch):
    store = Dictionary()
    with own(SumPaged(NUMPY), kv_tiers=KVTiers(store=store)) as made:
        turn(made, PROMPT)
    for method in ("has", "get"):
        store.failing = {method}
        with own(SumPaged(NUMPY), kv_tiers=KVTiers(store=store)) as made:
            assert turn(made, PROMPT) == 0
        with own(SumPaged(NUMPY), kv_tiers=KVTiers(store=store, load_failure="fail")) as made:
            with pytest.raises(KVStoreError, match="the cable is cut"):
                made.run(PROMPT, max_tokens=3).collect()
            assert turn(made, [3, 1]) == 0, "it has nothing to load, and is nobody's fault"
    store.failing = {"put"}
    with own(SumPaged(NUMPY), kv_tiers=KVTiers(store=store)) as made:
        assert turn(made, PROMPT) == 28, "and the next process finds it"
    monkeypatch.setattr("hibachi.engine.runners.memory.arrays_of", lambda *given: 1 / 0)
    with own(SumPaged(NUMPY), kv_tiers=KVTiers(store=store)) as made:
        turn(made, PROMPT, terms=Terms(timeout=20))
        assert made.meters().failed == 1, "what cannot be loaded is not loaded again"


class Read:
    """What was read of one block from a device."""

    def __init__(self, number):
        self.names, self.importance = [number.to_bytes(16)], lambda: [0.0]
        self.data = lambda: [bytes(100)]


@pytest.mark.parametrize("now", [True, False])
def test_a_slow_store_is_left_behind_by_as_much_as_host_memory_holds(now, monkeypatch, caplog):
    threads = threading.active_count()
    monkeypatch.setattr("hibachi.engine.tiers.host.AHEAD", 1)
    store, quick = Dictionary(), Dictionary()
    host = HostTier(Keeper(1000), [("slow", store), ("quick", quick)])
    host.generation(bytes(16))

    def keep(*numbers):
        for number in numbers:
            host.keep(read := Read(number), 100, now=now)
            until(lambda: read.names[0] in quick.held)

    store.gate.clear()
    keep(*range(30))
    assert host.counts.dropped == 30 - 11 and host.used == 1000
    store.gate.set()
    until(lambda: len(store.held) == 11)
    keep(30)
    until(lambda: len(store.held) == 12)
    store.gate.clear()
    keep(*range(31, 34))
    host.close(timeout=0.1)
    assert "300 bytes were not written to slow within 0.1 s" in caplog.text
    store.gate.set()
    until(lambda: len(store.held) == 13)
    until(lambda: threading.active_count() == threads)


def test_a_store_that_became_slower_than_computing_is_left_and_asked_again_some_day(monkeypatch):
    now, asked, came, store = [0.0], [], threading.Semaphore(0), Dictionary()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    host = HostTier(Keeper(1000), [("slow", store)])
    host.generation(bytes(16))

    def get(names):
        now[0] += [1, 3, 3, 0, 0, 0][len(asked)]
        asked.append(names[0][15])
        return [b"data"]

    store.has, store.get = lambda names: [True], get
    for number in range(20):
        host.bring(Wish([number.to_bytes(16)], [], 1.5, math.inf, lambda failed: came.release()))
        assert came.acquire(timeout=20)
    host.close()
    assert asked == [0, 1, 2, 17, 18, 19], "until 0.8 * (0.8 * 1 + 0.2 * 3) + 0.2 * 3 = 1.72 s fade below 1.5 s"


def test_what_is_not_read_yet_lies_on_the_device_and_is_bounded(monkeypatch):
    monkeypatch.setattr("hibachi.engine.tiers.host.AHEAD", 1)
    host, gate = HostTier(Keeper(1000)), threading.Event()
    for number in range(30):
        read = Read(number)
        read.data = lambda: [bytes(100)] * gate.wait(20)
        host.keep(read, 100, now=False)
    assert host.counts.dropped == 27
    gate.set()
    until(lambda: host.counts.stored == 3)
    host.close()


def test_v40_a_request_waits_for_a_store_without_holding_others_and_can_be_cancelled(monkeypatch):
    monkeypatch.setattr("hibachi.engine.tiers.waiting.FIRST_WAIT", 0.5)
    store = Dictionary()
    with own(SumPaged(NUMPY), kv_tiers=KVTiers(store=store)) as made:
        turn(made, PROMPT)
    with own(SumPaged(NUMPY), kv_tiers=KVTiers(store=store)) as made:
        turn(made, [1])
        store.gate.clear()
        began, greedy = time.monotonic(), SamplingParams(temperature=0, max_tokens=3)
        slow = made.run(PROMPT, greedy)
        until(lambda: made.stats().held == 1)
        assert turn(made, [3, 1]) == 0 and time.monotonic() - began < 0.5, "others are served meanwhile"
        monkeypatch.setattr("hibachi.engine.tiers.waiting.LEAST_WAIT", 60.0)
        left, guided = made.run(PROMPT, greedy), made.run(PROMPT, greedy, allowed=Trie([expected(PROMPT, 3)]))
        until(lambda: made.stats().held >= 2)
        scored = made.run(PROMPT, greedy.with_(prompt_logprobs=1))
        assert scored.collect() == expected(PROMPT, 3), "it shares nothing, and looks for nothing"
        assert slow.collect() == expected(PROMPT, 3) and slow.reused == 0, "its time was over"
        left.close()
        until(lambda: made.stats().held == 1)
        assert time.monotonic() - began < 10, "though others wait longer"
        store.gate.set()
        assert guided.collect() == expected(PROMPT, 3) and guided.reused == 28, "it waited for both"
    with own(SumPaged(NUMPY), kv_tiers=KVTiers(store=store)) as made:
        store.held = dict(list(store.held.items())[:4])
        assert turn(made, PROMPT) == 16, "it begins with what there is"


def test_samples_that_do_not_start_together_have_names_of_their_own():
    params = SamplingParams(temperature=1e6, seed=1, max_tokens=14)
    with own(SumPaged(NUMPY), max_num_seqs=2, cache_tokens=64, kv_tiers=KVTiers(host_bytes=SIZE)) as made:
        drawn = [stream.collect() for stream in made.run_many([1, 2], params, 6)]
        for number in range(8):
            turn(made, [9 - number, number] * 14)
        assert [turn(made, [1, 2, *tokens]) for tokens in drawn] == [12] * 6


def test_k23_a_pinned_prompt_stays_and_an_unpinned_one_makes_way():
    with own(SumPaged(NUMPY), cache_tokens=64, kv_tiers=KVTiers(host_bytes=1 << 20)) as made:
        turn(made, PROMPT)
        host = made.core.tiering.host
        until(lambda: host.counts.stored == 8)
        entry = host.used // 8
    with own(SumPaged(NUMPY), cache_tokens=64, kv_tiers=KVTiers(host_bytes=20 * entry)) as made:
        rng = np.random.default_rng(0)
        flood = [rng.integers(0, 10, 30).tolist() for _ in range(8)]
        prefix.warm(made, PROMPT, pin=True)
        for prompt in flood:
            turn(made, prompt)
        assert turn(made, PROMPT) == 28
        with pytest.raises(InvalidRequest, match="half of the host memory"):
            prefix.warm(made, flood[0], pin=True)
        assert prefix.unpin(made, PROMPT) == 28
        for prompt in flood:
            turn(made, prompt)
        assert turn(made, PROMPT) == 0
        assert made.core.tiering.host.used <= 20 * entry


@pytest.mark.parametrize("toy", [SumPaged, SumState, SumBoth])
def test_what_is_pinned_comes_to_host_memory_though_the_device_has_it(toy):
    flood = np.random.default_rng(0).integers(0, 10, (4, 30)).tolist()
    with own(toy(NUMPY), kv_tiers=KVTiers(host_bytes=SIZE)) as made:
        turn(made, PROMPT)
        host = made.core.tiering.host
        until(lambda: host.counts.stored >= (toy is not SumState) * 8 + (toy is not SumPaged))
        used = host.used
    with own(toy(NUMPY), kv_tiers=KVTiers(host_bytes=2 * used)) as made:
        for prompt in (PROMPT, *flood):
            turn(made, prompt)
        prefix.warm(made, PROMPT, pin=True)
        assert made.stats().prefix_hits == 28
        for prompt in flood:
            turn(made, [3, *prompt])
        made.core.scheduler.drop_prefixes()
        assert turn(made, PROMPT) == 28


def test_the_importance_of_a_prompt_can_be_said_and_holds_for_what_comes_back_from_a_store():
    with own(SumPaged(NUMPY), kv_tiers=KVTiers(host_bytes=1 << 20)) as made:
        with pytest.raises(InvalidRequest, match="eviction importance"):
            prefix.warm(made, PROMPT, importance=1.0)
        turn(made, PROMPT)
        host = made.core.tiering.host
        until(lambda: host.counts.stored == 8)
        size = 20 * host.used // 8
    tiers = KVTiers(host_bytes=size, store=Dictionary(), eviction="importance")
    rng, known = np.random.default_rng(0), 0
    for said, stays in ((1e9, True), (1e9, True), (-1e9, False)):
        with own(SumPaged(NUMPY), cache_tokens=64, kv_tiers=tiers) as made:
            prefix.warm(made, PROMPT, importance=said)
            assert made.stats().tier_hits == known
            known = 28
            for _ in range(8):
                turn(made, rng.integers(0, 10, 30).tolist())
            names = made.core.scheduler.tiers.names(made.check(Request(np.array(PROMPT))).seq, 7)
            assert [made.core.tiering.host.has(name) for name in names] == [stays] * 7
            with pytest.raises(InvalidRequest, match="finite number"):
                prefix.warm(made, PROMPT, importance=math.nan)


def test_k24_what_is_stored_and_removed_is_told():
    told = []
    tiers = KVTiers(host_bytes=1 << 16, on_event=lambda *event: told.append(event))
    with own(SumPaged(NUMPY), kv_tiers=tiers) as made:
        for i in range(20):
            turn(made, [i % 10, *PROMPT])
        until(lambda: any(what == "removed" for what, _, _ in told))
        events = made.cache_events()
        assert [(what, tier, name.hex()) for what, tier, name in told[: len(events)]] == [e[1:] for e in events]
        assert made.cache_events(events[3][0]) == made.cache_events()[3:]
        here = {name for what, _, name in told if what == "stored"}
        assert {name for what, _, name in told if what == "removed"} <= here


def test_events_of_several_threads_are_numbered_in_the_order_of_what_happened():
    host, switches = HostTier(Keeper(2000)), sys.getswitchinterval()

    def keep(seed):
        for number in np.random.default_rng(seed).integers(0, 40, 40000).tolist():
            host.keep(Read(number), 100, now=True)

    threads = [threading.Thread(target=keep, args=(seed,)) for seed in range(2)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switches)
    events = host.events(0)
    assert [number for number, *_ in events] == list(range(events[0][0], events[0][0] + len(events)))
    here = {}
    for _, what, _, name in events:
        here[name] = what == "stored"
    assert {name for name, is_here in here.items() if is_here} == {
        name.hex() for name in (n.to_bytes(16) for n in range(40)) if host.has(name)
    }


def test_a_recording_with_loads_is_played_again(tmp_path):
    file = tmp_path / "plans"
    tiers = KVTiers(host_bytes=SIZE)
    with own(SumBoth(NUMPY), cache_tokens=4 * 28, kv_tiers=tiers, record=file) as made:
        talk(made, 10)
        assert made.stats().tier_hits
    assert replay(read(file)) > 10


def test_what_cannot_be_kept_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"cache_id.*; got 5"):
        model = type("Numbered", (SumPaged,), {"cache_id": 5})(NUMPY)
        AutoregressiveBatchInference(model, backend="numpy", kv_tiers=KVTiers(host_bytes=SIZE))
    with pytest.raises(UnsupportedOperation, match="SumLogits shares none"):
        own(SumLogits(NUMPY), kv_tiers=KVTiers(host_bytes=SIZE))
    with pytest.raises(UnsupportedOperation, match="shares none"):
        own(SumPaged(NUMPY), kv_tiers=KVTiers(host_bytes=SIZE), enable_prefix_caching=False)
    with pytest.raises(ConfigError, match=r"one entry, which has \d+ bytes; got 10"):
        own(SumPaged(NUMPY), kv_tiers=KVTiers(host_bytes=10))
    with own(SumPaged(NUMPY)) as made, pytest.raises(UnsupportedOperation, match="kv_tiers"):
        prefix.warm(made, PROMPT, pin=True)
    with pytest.raises(ConfigError, match=r"kv_tiers must be KVTiers\(\.\.\.\) .*; got {'host_bytes': 1}"):
        own(SumPaged(NUMPY), kv_tiers={"host_bytes": 1})
    for wrong, said in (
        ({}, "Tiers need a place"),
        ({"host_bytes": 0}, "host_bytes must be a number of bytes, 1 or more; got 0"),
        ({"disk": tmp_path}, "expected both or neither"),
        ({"host_bytes": 1, "load_failure": "cry"}, "recompute, fail; got 'cry'"),
        ({"host_bytes": 1, "eviction": "cry"}, "frequency, importance; got 'cry'"),
        ({"host_bytes": 1, "recency_window": math.nan}, "number of entries, 0 or more; got nan"),
        ({"disk": "", "disk_bytes": SIZE}, "disk must be a path; got ''"),
        ({"host_bytes": 1, "key_file": "key"}, "key_file='key' is of a store: add store, or leave it out"),
        ({"host_bytes": 1, "cache_id": ""}, "cache_id must be a text that names the model's weights; got ''"),
        ({"host_bytes": 1, "on_event": "log"}, "on_event must be a function of three texts; got 'log'"),
    ):
        with pytest.raises(ConfigError, match=said):
            KVTiers(**wrong)


def test_a_step_that_is_begun_twice_stores_what_was_there_before_the_first_time():
    """Else a block that the step writes to would be kept under the name of what it had."""

    class Stumbles(SumPaged):
        calls = 0

        def step(self, params, cache, x):
            found = super().step(params, cache, x)
            self.calls += 1
            if self.calls % 2:
                raise MemoryError("after the cache was written to")
            return found

    kept = []
    for model in (SumPaged(NUMPY), Stumbles(NUMPY)):
        stores = Dictionary()
        with own(model, overlap=True, deterministic=False, cache_tokens=4 * 20, kv_tiers=KVTiers(store=stores)) as made:
            talk(made, 10, turns=6)
            assert made.stats().tier_hits
        kept.append({name: data[sealed.HEADER.size + sealed.MAC :] for name, data in stores.held.items()})
    assert len(kept[0].keys() & kept[1].keys()) > 50
    assert all(kept[1][name] == data for name, data in kept[0].items() if name in kept[1])
