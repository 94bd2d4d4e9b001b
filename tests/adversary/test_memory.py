"""Memory goes back when what needed it has ended: programs, token tables, and tables of positions."""

import gc
import json
import tracemalloc
import weakref
from contextlib import contextmanager
from random import Random
from threading import Event

import numpy as np
import pytest

from hibachi import LLM, AutoregressiveBatchInference, NumpyBackend, SamplingParams
from hibachi.backend.kernels.library import why_missing
from hibachi.engine.runners import tokentable
from hibachi.engine.runners.tokentable import TokenHistory, TokenTable
from hibachi.llm.model import rope
from hibachi.llm.model.files import locate, open_files
from hibachi.llm.model.registry import load_model
from tests.engine.models import PATIENCE, Background, ints, until

from ..lib.inside import built

MB = 2**20


def native_torch():
    torch_backends = pytest.importorskip("hibachi_torch")
    if why := why_missing():
        pytest.skip(why)
    return torch_backends.TorchBackend("cpu", native=True)


@pytest.mark.parametrize("make", [NumpyBackend, native_torch], ids=["numpy", "torch native"])
def test_m7_a_backend_is_freed_with_the_last_engine_on_it(make):
    """All that is compiled once for a backend was asked for: plain and filtered draws, log-probabilities, changes."""
    made = []
    for seed in range(2):
        llm = LLM("tiny", backend=make(), max_num_seqs=2)
        made.append(weakref.ref(llm.backend))
        plain = SamplingParams(max_tokens=2, seed=seed)
        llm.generate(["She was", "He"], [plain, plain.with_(top_k=5, logprobs=2, repetition_penalty=1.2)])
        llm.close()
        del llm
    until(lambda: gc.collect() >= 0 and not any(b() for b in made))  # a watchdog may be about to leave


def test_m7_engines_on_one_backend_share_their_programs(monkeypatch):
    backend, compiled = NumpyBackend(), []
    monkeypatch.setattr(backend, "compile", lambda fn, donate=(): compiled.append(fn) or fn)
    first, second = (backend.program(np.add, 3) for _ in range(2))
    assert first is second and len(compiled) == 1
    assert backend.program(np.add, 4) is not first and backend.program(np.multiply, 3) is not first


# ---- token tables --------------------------------------------------------------------------------------------------


@contextmanager
def at_most(peak, left):
    """No more than `peak` bytes are held while the block runs, and soon after it no more than `left`."""
    gc.collect()
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] <= peak
        until(lambda: gc.collect() >= 0 and tracemalloc.get_traced_memory()[0] <= left)
    finally:
        tracemalloc.stop()


class Next:
    """Level 0: looks at the last token alone, so that all memory is the engine's."""

    def forward(self, tokens):
        return (tokens[:, -1] + 1) % 10


class NextLogits:
    """Level 1, likewise."""

    vocab_size = 10

    deterministic = False  # no calls but those of requests

    def logits(self, tokens, lengths):
        return np.eye(10, dtype=np.float32)[(tokens[:, -1] + 1) % 10]


@pytest.mark.parametrize(
    "model, how, times",
    [
        (Next, dict(max_tokens=3), 5),  # its first large call is made twice, see `grown.Rooms`
        (NextLogits, dict(params=SamplingParams(max_tokens=3, temperature=0)), 4),
        (NextLogits, dict(params=SamplingParams(max_tokens=3, temperature=0, repetition_penalty=1.2)), 4),
    ],
    ids=["level 0", "level 1", "level 1 with a penalty"],
)
def test_m9_a_prompt_of_a_million_tokens(model, how, times):
    """Its memory is a few times its own, however many rows there are, and goes when it has ended."""
    prompt = np.arange(10**6, dtype=np.int64) % 10
    with AutoregressiveBatchInference(model(), max_model_len=2**20, max_num_seqs=256, backend="numpy") as engine:
        small = ints(engine.run(prompt[:9], **how).collect())
        with at_most(times * prompt.nbytes, prompt.nbytes // 10):
            engine.run(prompt, **how).collect()
        assert ints(engine.run(prompt[:9], **how).collect()) == small


@pytest.mark.parametrize("width", [1, 4, 64])
@pytest.mark.parametrize("shape", [(), (3,)], ids=str)
def test_m9_the_table_holds_what_lists_hold(width, shape, monkeypatch):
    """Random requests come, grow, lose their rows and get others; all reads against plain lists."""
    monkeypatch.setattr(tokentable, "SIDE_BY_SIDE", (width, width))
    random, rng, rows = Random(width), np.random.default_rng(width), 5
    table = TokenTable(rows, shape, np.int64)
    assert table.width == width
    held, free, parked = {}, list(range(rows)), []
    for _ in range(600):
        act = random.random()
        if act < 0.15 and free:
            if parked and random.random() < 0.5:
                history, tokens = parked.pop()
            else:
                tokens = rng.integers(0, 99, (random.randint(1, 3 * width + 2), *shape)).tolist()
                history = TokenHistory(np.array(tokens))
            row = free.pop()
            table.fill(row, history)
            held[row] = history, tokens
        elif act < 0.22 and held:
            row = random.choice(list(held))
            history, tokens = held.pop(row)
            table.leave(row, history, len(tokens))
            assert history.length == len(tokens) and history.read(0, len(tokens)).tolist() == tokens
            parked.append((history, tokens))
            free.append(row)
        elif held:
            some = np.array(random.sample(sorted(held), random.randint(1, len(held))))
            new = rng.integers(0, 99, (len(some), *shape))
            if shape == ():  # proposed, and read where they stand, until others come
                r, ahead = int(some[0]), np.arange(100, 100 + random.randint(1, 64))
                end = len(held[r][1])
                table.write_ahead(np.full(len(ahead), r), end + np.arange(len(ahead)), ahead)
                assert table.read(r, end - 1, end + len(ahead)).tolist() == [held[r][1][-1], *ahead.tolist()]
            table.write(some, np.array([len(held[r][1]) for r in some.tolist()], np.int32), new)
            for r, token in zip(some.tolist(), new.tolist(), strict=True):
                held[r][1].append(token)
        if not held:
            continue
        some = np.array(sorted(held))
        known = [held[r][1] for r in some.tolist()]
        start = np.array([random.randrange(len(t)) for t in known], np.int32)
        n = np.array([random.choice([1, len(t) - a]) for t, a in zip(known, start.tolist(), strict=True)], np.int32)
        of = np.repeat(np.arange(len(some)), n)
        at = (start[of] + np.arange(len(of)) - (np.cumsum(n) - n)[of]).astype(np.int32)
        wanted = [t for tokens, a, k in zip(known, start.tolist(), n.tolist(), strict=True) for t in tokens[a : a + k]]
        assert table.packed(some, start, n, of, at).tolist() == wanted
        assert table.read(some[0], start[0], start[0] + n[0]).tolist() == known[0][start[0] : start[0] + n[0]]
        lengths = np.array([len(t) for t in known], np.int32)
        window = table.window(some, lengths, int(lengths.max()))
        assert [w[len(w) - len(t) :].tolist() for w, t in zip(window, known, strict=True)] == known


def test_m9_a_row_that_could_not_be_filled_leaves_the_others_as_they_were(monkeypatch):
    table = TokenTable(2, (), np.int32)
    one, other = TokenHistory(np.arange(5, dtype=np.int32)), TokenHistory(np.arange(2000, dtype=np.int32))
    table.fill(0, one)

    def fail(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(TokenHistory, "copy", fail)
        with pytest.raises(MemoryError):
            table.fill(1, TokenHistory(np.arange(9, dtype=np.int32)))
    table.fill(1, other)
    assert table.read(0, 0, 5).tolist() == [0, 1, 2, 3, 4]
    assert table.read(1, 1990, 2000).tolist() == list(range(1990, 2000))


# ---- tables of positions -------------------------------------------------------------------------------------------


def with_context(model_copy, context):
    """A copy of the shipped model that says it was trained for so many positions."""
    return model_copy({"config.json": lambda data: json.dumps(json.loads(data) | context).encode()})


def test_m6_a_context_of_1e8_positions_takes_no_memory(model_copy):
    folder = with_context(model_copy, {"max_position_embeddings": 10**8})
    with at_most(100 * MB, 100 * MB):
        load_model(open_files(folder), NumpyBackend())
    with LLM(folder, backend="numpy", max_num_seqs=2) as llm, LLM("tiny", backend="numpy", max_num_seqs=2) as same:
        greedy = SamplingParams(max_tokens=4, temperature=0, logprobs=3)
        assert said(llm.generate(["She was"], greedy)) == said(same.generate(["She was"], greedy))
        assert built(llm.engine).scheduler.block_table.nbytes < 2 * MB


def said(outputs):
    """All bits of answers."""
    return [
        (c.token_ids, [{t: float(v).hex() for t, v in p.items()} for p in c.logprobs])
        for o in outputs
        for c in o.choices
    ]


@pytest.mark.parametrize("make", [NumpyBackend, native_torch], ids=["numpy", "torch native"])
def test_m6_tables_that_grow_change_no_bit(make, model_copy, monkeypatch):
    backend = make().invariant()
    prompts = [np.random.default_rng(n).integers(3, 2000, n).tolist() for n in (5, 15, 17, 40, 130)]
    params = SamplingParams(max_tokens=20, temperature=0, logprobs=2)
    folder = with_context(model_copy, {"max_position_embeddings": 300})
    with LLM(folder, backend=backend, max_num_seqs=3) as whole:
        wanted = [said(whole.generate([p], params)) for p in prompts]
        vector = whole.embed([prompts[-1]])[0].embedding
    monkeypatch.setattr(rope, "FIRST", 16)
    with LLM(folder, backend=backend, max_num_seqs=3, deterministic=True) as grows:
        sizes = {len(grows.model.params["ropes"][0][0])}
        for p, one in zip(prompts, wanted, strict=True):
            assert said(grows.generate([p], params)) == one
            sizes.add(len(grows.model.params["ropes"][0][0]))
        assert said(grows.generate(prompts, params)) == [answer for one in wanted for answer in one]
        assert sizes == {64, 256}  # 16 and 32 were enough for the first steps of its self-check
    with LLM(folder, backend=backend, max_num_seqs=3) as grows:
        np.testing.assert_array_equal(grows.embed([prompts[-1]])[0].embedding, vector)


def test_m6_tables_that_have_grown_are_those_of_the_whole_context(model_copy, monkeypatch):
    """Also where the context decides which frequencies hold."""
    factors = {"short_factor": [1.5] * 32, "long_factor": [2.5] * 32, "original_max_position_embeddings": 64}
    folder = with_context(model_copy, {"rope_scaling": {"rope_type": "longrope", **factors}})
    whole = load_model(open_files(folder), NumpyBackend()).params["ropes"]
    monkeypatch.setattr(rope, "FIRST", 16)
    model = load_model(open_files(folder), NumpyBackend())
    for positions, size in [(1, 16), (16, 16), (17, 32), (200, 256), (40, 256), (512, 512), (999, 512)]:
        model.reach(positions)
        for table, other in zip(model.params["ropes"][0], whole[0], strict=True):
            np.testing.assert_array_equal(table, other[:size])


def test_m6_tables_grow_while_another_engine_on_the_model_computes(monkeypatch):
    """The step of one begins, the other grows the tables, and the first goes on with those it had."""
    monkeypatch.setattr(rope, "FIRST", 16)
    backend = NumpyBackend(native=False).invariant()
    model = load_model(open_files(locate("tiny")), backend)
    greedy = SamplingParams(temperature=0, max_tokens=3)
    prompts = [list(range(3, 10)), list(range(3, 203))]

    def answer(prompt, **options):
        with AutoregressiveBatchInference(model, backend=backend, max_model_len=512, **options) as engine:
            return engine.run(prompt, greedy).collect()

    attend, begun, grown = type(backend).attend, Event(), Event()

    def slow(self, q, *args, **how):
        if q.shape[0] == 7 and not begun.is_set():
            begun.set()
            assert grown.wait(PATIENCE)
        return attend(self, q, *args, **how)

    before = model.params
    with monkeypatch.context() as patch:
        patch.setattr(type(backend), "attend", slow)
        first = Background(answer, prompts[0])
        assert begun.wait(PATIENCE)
        second = answer(prompts[1])
        grown.set()
    assert model.params is not before and len(before["ropes"][0][0]) == 16
    assert [first.result(), second] == [answer(p) for p in prompts]


def test_m6_recorded_steps_are_forgotten_when_tables_grow(monkeypatch):
    """As graphs hold the addresses of the tables that they were recorded with."""
    pytest.importorskip("torch")
    from hibachi_torch import TorchBackend
    from hibachi_torch.cuda import CudaTorchBackend

    def generate(backend):
        params = SamplingParams(max_tokens=40, temperature=0)
        with LLM("tiny", backend=backend, deterministic=False, block_size=16) as llm:
            return llm.generate([[5, 6, 7]], params)[0].token_ids

    wanted = generate(TorchBackend("cpu"))
    monkeypatch.setattr(rope, "FIRST", 16)
    held = []

    class Recorder:
        def record(self, launch):
            out, cache = launch()
            held.append(out)
            return (out, cache), lambda: out.copy_(launch()[0])

    backend = CudaTorchBackend("cpu", recorder=Recorder)
    backend.varlen = None
    assert generate(backend) == wanted
    assert len(held) > 2  # recorded again for each size of the tables
