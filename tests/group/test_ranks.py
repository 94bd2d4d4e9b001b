"""One model over several ranks: the bits are those of one, and what fails on one rank is rolled back on all."""

import json
import re
import socket
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from hibachi import (
    LLM,
    Beams,
    ConfigError,
    EngineFailed,
    KVTiers,
    NonFiniteOutput,
    NotDeterministic,
    NumpyBackend,
    Paged,
    SamplingParams,
    UnsupportedOperation,
)
from hibachi.backend.group import GroupLost, check_leaves, share, tree
from hibachi.backend.stored import Stored, columns, part
from hibachi.engine.group import link
from hibachi.engine.group.leader import facts_of
from hibachi.engine.group.link import RankWatch, Reports, connected
from hibachi.engine.group.message import Mirror
from hibachi.llm.model.arch import Experts, Layer
from hibachi.llm.model.decoder import Decoder
from hibachi.llm.model.shards import fits, stages_of

from ..guide.toyguides import rule, toy_guides
from ..lib.inside import flights
from . import ranks as group_of_threads
from .ranks import Threads, Together, arch_of, collected, weights_of

DRAWN = SamplingParams(temperature=0.8, seed=1, max_tokens=8, ignore_eos=True, logprobs=1)
ARCH = arch_of()
WEIGHTS = weights_of(ARCH)


def prompts(n=6, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 97, int(length)).tolist() for length in rng.integers(2, 60, n)]


def answers(size, leaves, arch=ARCH, weights=WEIGHTS, *, alone=False, **options):
    with Together(size, leaves, arch, weights, **options) as ranks:
        run = ranks.engine.run
        if alone:
            return [collected([run(prompt, DRAWN)])[0] for prompt in prompts()]
        return collected([run(prompt, DRAWN) for prompt in prompts()])


def mixed_of(count, each, **more):
    """A layer of experts, and one without."""
    experts = Experts(count, each, intermediate=512, normalised=True)
    return arch_of(**dict(layers=(Layer(experts=True), Layer()), experts=experts) | more)


MIXED = mixed_of(5, 2)
ALL_HEADS = arch_of(qk_norm="all", norms="after", head_dim=192)
KINDS = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "int8": ("float32", "int8"),
    "int4": ("bfloat16", "int4"),
}
CASES = {
    **{kind: (ARCH, {}, *how) for kind, how in KINDS.items()},
    "two heads of keys": (arch_of(kv_heads=2), {}, "float32", None),
    "biases, an own head": (
        arch_of(attention_bias=True, mlp_bias=True, tied=False),
        {"biases": ".bias"},
        "float32",
        None,
    ),
    "norms after as well": (arch_of(norms="both"), {}, "float32", None),
    "in parallel": (arch_of(parallel=True), {}, "float32", None),
    **{f"experts in {kind}": (MIXED, {}, *how) for kind, how in KINDS.items()},
    "experts, norms after as well": (mixed_of(3, 3, norms="both"), {}, "bfloat16", None),
    "experts in parallel": (mixed_of(4, 2, parallel=True), {}, "float32", None),
    "norms over all heads": (ALL_HEADS, {}, "float32", None),
    "experts, norms over all heads": (mixed_of(5, 2, qk_norm="all"), {}, "float32", "int8"),
}


@pytest.mark.parametrize("case", CASES)
def test_bits_are_the_same_for_1_2_4_and_8_ranks_in_8_leaves(case):
    arch, more, dtype, how = CASES[case]
    weights = weights_of(arch, **more)
    backend = NumpyBackend() if how is None else NumpyBackend().quantized(how)
    options = {"backend": backend, "dtype": dtype}
    one = answers(1, 8, arch, weights, **options)
    assert not any(isinstance(answer, Exception) for answer in one), one
    assert all(answers(size, 8, arch, weights, **options) == one for size in (2, 4, 8))


@pytest.mark.parametrize("how", ["float32", "bfloat16", "int8"])
def test_bits_are_the_same_for_1_2_and_3_stages(how):
    arch = mixed_of(5, 2, layers=(Layer(), Layer(experts=True), Layer(), Layer(), Layer(experts=True)), tied=False)
    weights, backend = weights_of(arch), NumpyBackend()
    options = {"backend": backend.quantized(how), "dtype": "float32"} if how == "int8" else {"dtype": how}
    options["deterministic"] = False  # a trial would be between any two steps
    if how == "float32":
        special = arch_of(embed_scale=2.0, residual_scale=0.5, norms="both", learned_positions=True, head_bias=True)
        given = special, weights_of(special)
        assert answers(1, 1, *given, stages=2) == answers(1, 1, *given)
    one, leaved = answers(1, 1, arch, weights, **options), answers(1, 4, arch, weights, **options)
    assert not any(isinstance(answer, Exception) for answer in one), one
    assert all(answers(1, 1, arch, weights, stages=stages, **options) == one for stages in (2, 3, 5))
    assert answers(2, 4, arch, weights, stages=2, **options) == leaved


def test_operations_one_by_one_give_the_bits_of_one_call():
    weights, backend = weights_of(MIXED), NumpyBackend().quantized("int8")

    def apart(mine):
        model = Decoder.build(MIXED, weights, mine)
        assert model.fused is not None
        model.fused = None
        return model

    with Together(2, 8, make=apart, backend=backend) as ranks:
        found = collected([ranks.engine.run(prompt, DRAWN) for prompt in prompts()])
    assert found == answers(2, 8, MIXED, weights, backend=backend)


@pytest.mark.parametrize("size", [3, 4])
def test_bits_of_a_request_are_those_alone_and_in_company(size):
    arch = arch_of(heads=12, kv_heads=12)
    weights = weights_of(arch)
    assert answers(size, size, arch, weights) == answers(size, size, arch, weights, alone=True)
    if size == 3:
        assert answers(3, 3, arch, weights) == answers(1, 3, arch, weights) != answers(1, 1, arch, weights)


def test_a_step_has_two_sums_a_layer_and_one_gather():
    with Together(2, 2, ARCH, WEIGHTS) as ranks:
        ranks.engine.run([1, 2, 3], DRAWN).collect()
        ranks.engine.selfcheck()
        steps = ranks.engine.core.runner.memory.leader.steps
        assert [(rank.sums, rank.gathers) for rank in ranks.group.ranks] == [(4 * steps, steps)] * 2
        assert ranks.engine.facts.numerics == "cpu-2/2 float32" and ranks.engine.deterministic


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("error", [MemoryError, ValueError])
def test_what_fails_on_one_rank_is_rolled_back_on_all(rank, error):
    def harm(of):
        if of.sums in (6, 27):  # in the middle of a step
            raise error("made up")

    want = answers(2, 2)
    assert answers(2, 2, harms={rank: harm}) == want


@pytest.mark.parametrize("stages, leaves, rank", [(2, 1, 1), (3, 1, 1), (3, 1, 2), (2, 2, 0), (2, 2, 1), (2, 2, 3)])
def test_what_fails_in_one_stage_is_rolled_back_with_all_that_is_in_flight(stages, leaves, rank, caplog):
    arch = arch_of(layers=(Layer(),) * 3)
    weights = weights_of(arch)

    def harm(of):
        n = of.sums + of.sent
        if n in (8, 9) or n % (7 * leaves**2) == 5:
            of.sent += 1
            raise (MemoryError if n < 10 else ValueError)("made up")

    def all_of(size, **options):
        with Together(size, leaves, arch, weights, max_num_batched_tokens=24, **options) as ranks:
            run, scored = ranks.engine.run, DRAWN.with_(prompt_logprobs=1)  # which takes a step by itself
            streams = [run(prompt, scored if i == 2 else DRAWN) for i, prompt in enumerate(prompts(9))]
            return collected(streams), ranks.engine.meters().failed

    want, _ = all_of(1)
    found, failed = all_of(leaves, stages=stages, harms={rank: harm}, deterministic=False)
    assert found == want and failed >= 3 and (leaves > 1 or "memory ran out" in caplog.text)


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_work_at_the_same_time_whatever_happens_to_requests(stages):
    """Preemptions, shared prefixes, cancels, samples of one prompt, beams, a grammar, scored prompts, vectors."""
    arch, rng = arch_of(layers=(Layer(),) * 3), np.random.default_rng(2)
    weights = weights_of(arch)
    begun = [rng.integers(0, 97, 40).tolist() for _ in range(2)]
    given = [begun[i % 2][: rng.integers(16, 40)] + rng.integers(0, 97, 5).tolist() for i in range(16)]
    params = [DRAWN.with_(max_tokens=int(rng.integers(1, 30)), logprobs=i % 3 or None, seed=i % 4) for i in range(16)]
    params[6] = params[6].with_(prompt_logprobs=1)
    params[7] = params[7].with_(structured_outputs=rule(range(5), [7], range(3, 9), most=12), ignore_eos=False)
    options = {"max_num_seqs": 6, "cache_tokens": 128, "max_num_batched_tokens": 25}

    def all_of(**more):
        with Together(1, 1, arch, weights, **options | more) as ranks:
            engine, told, sizes, left, entered, rushed = ranks.engine, [], [], [], [], []
            toy_guides(engine)
            if more:
                core, runner, leader = engine.core, engine.core.runner, engine.core.runner.memory.leader
                launch, land = runner.launch, runner.land

                def enters():
                    with leader.alone():
                        entered.append(len(told))

                def launched(plan, before):
                    rushed.extend(leader.waiting)  # who waits for its turn gets it first
                    told.append(1 + len(flights(engine)))
                    sizes.append((plan.tokens, len(plan.rows) - len(plan.fresh)))
                    flight = launch(plan, before)
                    if told[-1] == stages and len(entered) < 5 and not leader.waiting:
                        threading.Thread(target=enters).start()
                        while not leader.waiting:
                            time.sleep(0.001)
                    for seq in plan.seqs if len(told) % 3 == 0 else ():
                        if seq.owner.request.params.seed == 1:  # its reader leaves while it is in flight
                            core.inbox.put((core.cancel, seq.owner))
                    return flight

                runner.launch = launched
                runner.land = lambda flight, held: (left.append(not held.all()), land(flight, held))[1]
            streams = [engine.run(prompt, how) for prompt, how in zip(given, params, strict=True)]
            streams += engine.run_many(given[0], DRAWN.with_(n=3, seed=9))
            streams += engine.run_many(given[0][:9], SamplingParams(n=3, beams=Beams(4), max_tokens=7))
            vector = engine.embed(given[3])
            found = collected([stream for i, stream in enumerate(streams) if i % 4 != 1])
            assert engine.stats().preemptions and not engine.meters().failed and ranks.group.ranks[0].epoch == 0
            if more:
                assert [*map(max, zip(*sizes, strict=True))] == [-(-25 // stages), 6 // stages]
                assert max(told) == stages and any(left)
                assert len(entered) == 5 < len(told) - entered[-1] and not rushed
            return [*found, vector.result().tolist()]

    assert all_of(stages=stages) == all_of()


@pytest.mark.parametrize("restart", ["on_failure", "never"])
def test_an_engine_whose_loop_failed_drops_what_was_in_flight(restart):
    arch = arch_of(layers=(Layer(),) * 3)
    weights = weights_of(arch)
    with Together(1, 1, arch, weights, stages=3, restart=restart, deterministic=False) as ranks:
        engine, checked = ranks.engine, []

        def broken():
            if len(flights(engine)) == 2:
                raise ValueError("made up")
            return make_room()

        make_room, engine.core.scheduler.make_room = engine.core.scheduler.make_room, broken
        assert any(isinstance(each, EngineFailed) for each in collected([engine.run(p, DRAWN) for p in prompts()]))
        if restart == "on_failure":
            assert collected([engine.run(p, DRAWN) for p in prompts()]) == answers(1, 1, arch, weights)

        def check():
            with suppress(EngineFailed):
                checked.append(engine.selfcheck())

        thread = threading.Thread(target=check, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive() and len(checked) == engine.core.restarts == (restart == "on_failure")


def test_a_nan_on_one_rank_fails_the_row_that_has_it_alone():
    arch = arch_of(tied=False)
    weights = weights_of(arch)
    weights["embed.weight"][96] = np.nan  # of a token that one prompt has
    given = [[1, 96, 2], *([t % 96 for t in prompt] for prompt in prompts())]
    with Together(2, 2, arch, weights) as it:
        found = collected([it.engine.run(prompt, DRAWN.with_(logit_bias={96: -100.0})) for prompt in given])
    assert isinstance(found[0], NonFiniteOutput) and not any(isinstance(each, Exception) for each in found[1:])


def test_a_rank_that_ends_or_hangs_is_named_and_all_streams_end():
    for how, told in (("end", "Rank 1 has ended."), ("hang", "Rank [01] does not answer")):
        stop = threading.Event()

        def harm(of, how=how, stop=stop):
            if of.sums > 40:
                if how == "hang":
                    stop.wait(20)
                raise SystemExit

        with Together(2, 2, ARCH, WEIGHTS, harms={1: harm}) as ranks:
            ranks.group.patience = 2.0
            began = time.monotonic()
            streams = [
                ranks.engine.run(prompt, SamplingParams(max_tokens=60, ignore_eos=True)) for prompt in prompts(3)
            ]
            errors = collected(streams)
            assert all(isinstance(error, EngineFailed) for error in errors), errors
            assert re.match(told, str(errors[0])), errors[0]
            assert ranks.engine.health().state == "failed" and time.monotonic() - began < 15
            stop.set()


def test_sums_in_an_order_that_depends_on_the_place_are_found_out(monkeypatch):
    """As those of gloo's all-reduce, from three ranks on."""

    def ring(parts):
        pieces = [np.array_split(part.reshape(-1), len(parts)) for part in parts]
        sums = [sum((pieces[(i + k) % 3][i] for k in range(1, 3)), pieces[i][i]) for i in range(3)]
        return np.concatenate(sums).reshape(parts[0].shape)

    arch = arch_of(heads=12, kv_heads=12, hidden_size=512)
    monkeypatch.setattr(group_of_threads, "tree", ring)
    with (
        Together(3, 3, arch, weights_of(arch), dtype="bfloat16", max_num_seqs=32) as ranks,
        pytest.raises(NotDeterministic, match="does not compute the same bits whatever shares the batch"),
    ):
        ranks.engine.selfcheck()


def test_ranks_that_are_not_alike_are_refused_before_the_first_request():
    group = Threads(2)
    group.ranks[1].facts = {"files": "others"}
    group.ranks[0].facts = {"files": "these"}
    model = Decoder.build(ARCH, WEIGHTS, NumpyBackend().in_leaves(2, group.ranks[1]), dtype="bfloat16")

    def other():
        connection = connected(group.ranks[1], facts_of(model, model.backend))[0]
        assert connection.receive() is None
        connection.close()

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(ConfigError, match="the same files; rank 1 has others, and rank 0 these"):
        connected(group.ranks[0], {})
    thread.join()
    facts = facts_of(model, model.backend)
    assert facts["numerics"] == "cpu-2/2" and facts["dtype"] == "bfloat16" and facts["leaves"] == "2"
    assert facts["layers"] == str(model.cache_spec())
    with pytest.raises(GroupLost, match=r"Expected 2 ranks within 0.2 s; missing: \[1\]"):
        connected(Threads(2).ranks[0], {}, 0.2)


def test_who_is_no_rank_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(link, "INTRODUCED", (0.2, 100))
    group, found = Threads(2), []
    here = threading.Thread(target=lambda: found.append(connected(group.ranks[0], {}, 10)))
    here.start()
    host, port, _ = json.loads(group.ranks[1].meet("hibachi", None, 10))
    strangers = [socket.create_connection((host, port)) for _ in range(4)]
    for stranger, said in zip(strangers, (b"", b"\xff" * 4, b"\x09\0\0\0no number", b"\x02\0\0\0[]"), strict=True):
        stranger.sendall(said)
    mine = connected(group.ranks[1], {})[0]
    here.join(10)
    assert list(found[0]) == [1]
    for each in (*strangers, mine, found[0][1]):
        each.close()


def test_a_report_of_before_does_not_explain_what_fails_later():
    group, made = Threads(2), []
    here = threading.Thread(target=lambda: made.append(connected(group.ranks[0], {}, 10)))
    here.start()
    mine = connected(group.ranks[1], {})[0]
    here.join(10)
    watch = RankWatch(made[0], lambda: None)
    Reports(mine, lambda: 7).failed(MemoryError("then"), 0, memory=True)
    assert watch.failure(5.0, 0)["memory"] and watch.failure(0.1, 1) is None
    assert watch.slowest().startswith("Rank 1 does not answer: it was last heard 0 s ago")
    watch.close()
    mine.close()


def test_a_rank_that_went_astray_is_an_error_that_names_the_step(monkeypatch):
    real = Mirror.checksum

    def other(mirror, call):
        return real(mirror, call) ^ (threading.current_thread().name == "hibachi-engine")

    monkeypatch.setattr(Mirror, "checksum", other)
    with Together(2, 2, ARCH, WEIGHTS) as ranks:
        began = time.monotonic()
        [error] = collected([ranks.engine.run([1, 2], SamplingParams(max_tokens=90, ignore_eos=True))])
        assert isinstance(error, EngineFailed) and time.monotonic() - began < 10, error
        assert re.match(
            r"Rank 1 went astray: The tables of step 0 are not those of rank 0\. The model needs", str(error)
        )


def test_tiers_keep_what_all_ranks_have(tmp_path):
    tiers = KVTiers(disk=tmp_path, disk_bytes=1 << 26, cache_id="these weights")
    want, hits = None, []
    for size, turns in ((2, 2), (2, 1), (4, 2), (1, 1)):  # a restart; then others' entries, which are not met
        with Together(size, 4, ARCH, WEIGHTS, kv_tiers=tiers, cache_tokens=160) as ranks:
            for _ in range(turns):
                found = collected([ranks.engine.run(prompt, DRAWN) for prompt in prompts(8)])
                want = want or found
                assert found == want
            hits.append(ranks.engine.stats().tier_hits)
    assert hits[0] > 0 and hits[1] > hits[0] and hits[2] > 0 and hits[3] == 0, hits


def test_tiers_keep_what_all_stages_have(tmp_path, monkeypatch):
    monkeypatch.setattr("hibachi.engine.tiering.LATEST", 0.0)
    arch = arch_of(layers=(Layer(),) * 7)  # four of them in one stage
    weights, tiers = weights_of(arch), KVTiers(disk=tmp_path, disk_bytes=1 << 26, cache_id="these weights")
    want, hits = [answers(1, leaves, arch, weights) for leaves in (1, 2)], []
    for leaves, _ in ((1, 0), (1, 1), (2, 0)):
        options = {"deterministic": False, "kv_tiers": tiers, "kv_cache_memory_bytes": 10 * 16 * 4 * 4096 // leaves}
        with Together(leaves, leaves, arch, weights, stages=2, **options) as ranks:
            for _ in range(2):
                streams = [ranks.engine.run(prompt, DRAWN) for prompt in prompts()]
                ranks.engine.selfcheck()  # from another thread
                assert collected(streams) == want[leaves - 1]
            assert ranks.engine.stats().blocks == 10 and ranks.group.ranks[0].epoch == 0
            hits.append(ranks.engine.stats().tier_hits)
    assert 0 < hits[0] < hits[1] and hits[2] > 0, hits


def test_what_is_not_shared_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"divides the 9 heads.*With a leaf a rank that is 1, 3, 9"):
        Decoder.build(arch_of(heads=9, kv_heads=3), {}, NumpyBackend().in_leaves(4))
    assert fits(ARCH, 8, 8) and not fits(ARCH, 16, 16)
    narrow = arch_of(heads=4, intermediate=160 * 2)
    rounded = NumpyBackend().quantized("int8").in_leaves(2)
    with pytest.raises(ConfigError, match="in int8 leaves cut 320 columns into multiples of 64; so many do: 1, 5"):
        Decoder.build(narrow, weights_of(narrow), rounded)
    with pytest.raises(UnsupportedOperation, match="layer norms over all heads"):
        Decoder.build(arch_of(qk_norm="all", norm="layer"), {}, NumpyBackend().in_leaves(2))
    assert fits(arch_of(kv_heads=2), 4, 4) and not fits(arch_of(kv_heads=2, qk_norm="all"), 4, 4)
    with pytest.raises(UnsupportedOperation, match="speculative_config cannot be used with Decoder, as it is cut into"):
        Together(1, 1, ARCH, WEIGHTS, stages=2, speculative_config={"num_speculative_tokens": 2})
    with pytest.raises(ConfigError, match="=3: each stage has a layer at least; expected at most 2"):
        Decoder.build(ARCH, {}, NumpyBackend().in_leaves(1, Threads(3, 3).ranks[0]))
    assert [len(layers) for layers in stages_of(arch_of(layers=(Layer(),) * 9, vocab_size=20_000), 3)] == [4, 4, 1]
    several = mixed_of(8, 2, layers=(Layer(experts=True), *(Layer(),) * 4))
    assert [len(layers) for layers in stages_of(several, 2)] == [1, 4]
    with pytest.raises(UnsupportedOperation, match="a model without stages"):
        Together(1, 1, make=lambda backend: Mine({}, backend), stages=2)
    with pytest.raises(UnsupportedOperation, match="takes the backend torch"):
        LLM("tiny", backend="numpy", tensor_parallel_size=2)
    for bad in (0, -1, 1.5, True, "two"):
        with pytest.raises(ConfigError, match="tensor_parallel_size must be"):
            LLM("tiny", backend="numpy", tensor_parallel_size=bad)
    for bad in (0, 3, 129, 2**31, 1.5):
        with pytest.raises(ConfigError, match="tp_leaves must be"):
            check_leaves(bad, 2)


def test_a_tree_adds_neighbours_and_shares_are_whole():
    parts = [f"{i}" for i in range(7)]

    class Term(str):
        def __add__(self, other):
            return Term(f"({self}+{other})")

    assert tree([Term(p) for p in parts]) == "(((0+1)+(2+3))+((4+5)+6))"
    for n in (1, 5, 97, 128):
        for size in (1, 2, 3, 8):
            pieces = [list(range(n))[share(n, rank, size)] for rank in range(size)]
            assert [i for piece in pieces for i in piece] == list(range(n)) and len(pieces[0]) == max(map(len, pieces))


class Mine:
    """A model of one's own, which says itself how its arrays are cut."""

    vocab_size, dtype, portable = 50, "float32", True

    def __init__(self, weights, backend):
        self.backend = backend
        self.size = 1 if backend.group is None else backend.group.size
        self.params = backend.shard(weights, self.param_specs(), "float32")

    def param_specs(self):
        return {"q": "rows", "k": "rows", "v": "rows", "o": "columns", "head": "rows"}

    def cache_spec(self):
        return [Paged(4 // self.size, 32, 32)]

    def step(self, params, cache, x):
        b = self.backend
        h = b.take(params["embed"], x.tok)
        q, k, v = (b.xp.reshape(b.linear(h, params[name]), (h.shape[0], -1, 32)) for name in "qkv")
        out, cache[0] = b.attend(q, k, v, cache[0], x)
        out = b.take(b.xp.reshape(out, (h.shape[0], -1)), x.last)
        h = b.take(h, x.last) + b.linear_reduce(out, params["o"])
        return b.gather(b.logits(h, params["head"]), self.vocab_size), cache


def test_a_model_of_ones_own_is_cut_as_it_says():
    rng = np.random.default_rng(0)
    shapes = {"embed": (50, 64), "q": (128, 64), "k": (128, 64), "v": (128, 64), "o": (64, 128), "head": (50, 64)}
    weights = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    found = []
    for size in (1, 2, 4):
        with Together(size, 4, make=lambda backend: Mine(weights, backend)) as ranks:
            found.append(collected([ranks.engine.run([t % 50 for t in prompt], DRAWN) for prompt in prompts()]))
    assert found[0] == found[1] == found[2] and not any(isinstance(each, Exception) for each in found[0])
    with pytest.raises(ConfigError, match=r"tp_leaves=3: the columns of o .* it has 128\. Expected one of 1, 2, 4, 8"):
        Mine(weights, NumpyBackend().in_leaves(3))


@pytest.mark.parametrize("order", [None, [1, 0, 2, 4, 3, 5]])
@pytest.mark.parametrize("kind, stored", [("F32", "<f4"), ("BF16", "<u2"), ("F16", "<f2")])
def test_rows_and_columns_of_a_matrix_in_a_file(tmp_path, kind, stored, order):
    numbers = np.arange(6 * 8).reshape(6, 8).astype(stored)
    (tmp_path / "w").write_bytes(b"head" + numbers.tobytes())
    rows = None if order is None else np.array(order, np.int32)
    w = Stored(tmp_path / "w", kind, (6, 8), 4, rows)
    whole = numbers if order is None else numbers[order]
    assert np.array_equal(columns(w, 2, 6).view(stored), whole[:, 2:6])
    for which in (slice(0, 2), slice(3, 6), slice(2, 4)):  # the last one cuts rows that change places
        found = part(w, which)
        got = found.read() if isinstance(found, Stored) else found
        want = w.read()[which]
        assert np.array_equal(got, want) and isinstance(found, Stored) == (order is None or which.start != 2)
    assert np.array_equal(columns(numbers, 1, 3), numbers[:, 1:3]) and np.array_equal(
        part(numbers, slice(2)), numbers[:2]
    )
