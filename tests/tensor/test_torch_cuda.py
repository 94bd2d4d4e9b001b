"""The CUDA backend of PyTorch on stand-ins for what needs a device: the recorder of graphs and the attention kernel.

The recorder of `Recorded` keeps a step and runs it again when it is launched, on the arrays that it was recorded with
and into the output that it gave then, as a graph does. So what is stale or not copied shows as a wrong token.
"""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest

import hibachi
from hibachi import StepInputs
from hibachi.backend.array_backend import ArrayBackend
from hibachi.engine.scheduler.lower import lower, pad

torch = pytest.importorskip("torch")
from hibachi.common.shapes import fixed  # noqa: E402
from hibachi_torch import TorchBackend  # noqa: E402
from hibachi_torch.cuda import CudaTorchBackend  # noqa: E402
from hibachi_torch.cuda_graphs import MOST, StepGraphs  # noqa: E402

from ..engine.models import Turnstile  # noqa: E402

PROMPTS = [[1, 2, 3], [4, 5], list(range(40)), [7], [9, 9, 9, 9], [3, 1, 4, 1, 5, 9, 2, 6]]


class Recorded:
    """A recorder for tests. `launches` counts replays, over all of a kind."""

    launches = 0

    def record(self, launch):
        out, cache = launch()

        def replay():
            type(self).launches += 1
            out.copy_(launch()[0])

        return (out, cache), replay


def cuda(recorder=Recorded, **kwargs):
    backend = CudaTorchBackend("cpu", recorder=recorder, **kwargs)
    backend.varlen = None
    return backend


def greedy(tokens=24, **kwargs):
    return hibachi.SamplingParams(max_tokens=tokens, temperature=0, **kwargs)


def generate(backend, prompts=PROMPTS, tokens=24, **options):
    with hibachi.LLM("tiny", backend=backend, deterministic=False, block_size=16, **options) as llm:
        return [out.token_ids for out in llm.generate(prompts, greedy(tokens))]


@pytest.fixture(scope="module")
def expected():
    return generate(TorchBackend("cpu", native=False))


@pytest.fixture
def reasons(caplog):
    caplog.set_level(logging.WARNING, logger="hibachi.torch")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "hibachi.torch"]


def test_a_device_chooses_the_class():
    assert type(TorchBackend("cuda")) is CudaTorchBackend and type(TorchBackend("cuda:1")) is CudaTorchBackend
    assert not isinstance(TorchBackend("cpu"), CudaTorchBackend)
    with pytest.raises(hibachi.UnsupportedOperation, match="deterministic=False"):
        TorchBackend("cuda").invariant()


# ---- graphs --------------------------------------------------------------------------------------------------------


def test_replayed_steps_give_the_tokens_of_steps_that_are_not(expected, reasons):
    backend, Recorded.launches = cuda(), 0
    assert generate(backend) == expected
    assert Recorded.launches > 10
    assert not [r for r in reasons() if "CUDA graphs" in r]


def test_the_engine_pads_decode_steps_to_few_shapes_and_leaves_prompts_alone():
    shapes, turnstile = set(), Turnstile()

    class Watched(CudaTorchBackend):
        def guard(self):
            turnstile.arrive()
            return super().guard()

        def compile(self, fn, *, donate=()):
            if donate != (1,):
                return fn

            def step(params, cache, x):
                shapes.add((x.tile_q.shape[1], x.tok.shape[0], x.row.shape[0], x.block_table.shape[1]))
                return fn(params, cache, x)

            return step

    with hibachi.LLM("tiny", backend=Watched("cpu"), deterministic=False, block_size=16, max_num_seqs=6) as llm:
        try:
            streams = [llm.engine.run([5], greedy(1))]
            turnstile.wait()  # those that come meanwhile are computed together, in the other five rows
            streams += [llm.engine.run(prompt, greedy()) for prompt in PROMPTS[:5]]
        finally:
            turnstile.open()
        for stream in streams:
            stream.collect()
    assert {s for s in shapes if s[0] == 1} <= {(1, n, n, 4) for n in (2, 6)}
    assert any(tile > 1 and tokens == sum(map(len, PROMPTS[:5])) for tile, tokens, *_ in shapes)  # exactly its tokens


def step_inputs(backend, rows, *, start=5, width=2, tokens=None):
    """A decode step of so many rows, each with blocks of its own."""
    table = 1 + np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    packed = lower(
        np.arange(rows), np.full(rows, start, np.int32), np.ones(rows, np.int32), np.ones(rows, bool), table, 4
    )
    packed = pad(packed, fixed(rows, rows, width, 1), trash_row=rows)
    names = [f.name for f in dataclasses.fields(packed)]
    tok = np.arange(rows, dtype=np.int32) if tokens is None else np.array(tokens, np.int32)
    first, *rest = backend.put_all([tok, *(getattr(packed, n) for n in names)])
    return StepInputs(tok=first, **dict(zip(names, rest, strict=True)))


def adds(params, cache, x):
    """A model of one number: writes tokens into its cache, in place, and returns what stands there and at `pos`."""
    cache[0][0].view(-1).index_copy_(0, x.slot.long(), x.tok.float())
    return (cache[0][0].view(-1)[x.slot.long()] * params["by"] + x.pos)[x.last.long()][:, None], list(cache)


def make_graphs(step=adds, recorder=Recorded):
    spoiled = []
    return StepGraphs(step, recorder, spoiled.append), spoiled


def fresh_cache():
    return [(torch.zeros(20, 4),)]


def test_a_shape_is_recorded_at_its_second_step_and_replayed_from_its_third_on():
    graphs, _ = make_graphs()
    backend, params, cache = cuda(), {"by": 10}, fresh_cache()
    Recorded.launches, got = 0, []
    for n in range(5):
        out, cache = graphs(params, cache, step_inputs(backend, 3, start=n, tokens=[n, 1, 2]))
        got.append((out[:, 0].tolist(), len(graphs), Recorded.launches))
    assert got == [([10.0 * n + n, 10.0 + n, 20.0 + n], int(n > 0), max(n - 1, 0)) for n in range(5)]
    graphs(params, cache, step_inputs(backend, 4))
    assert len(graphs) == 1  # another shape, seen once


def test_outputs_stay_what_they_were_when_the_next_step_is_replayed():
    graphs, _ = make_graphs()
    backend, params, cache = cuda(), {"by": 1}, fresh_cache()
    outs = [graphs(params, cache, step_inputs(backend, 2, start=n))[0] for n in range(6)]
    assert [o[0, 0].item() for o in outs] == list(range(6))


@pytest.mark.parametrize("what", ["cache", "params"])
def test_another_cache_or_other_weights_drop_the_recordings(what):
    made = []

    class Counted(Recorded):
        def __init__(self):
            made.append(self)

    graphs, _ = make_graphs(recorder=Counted)
    backend, params, cache = cuda(), {"by": 1}, fresh_cache()
    for n in range(4):
        graphs(params, cache, step_inputs(backend, 2, start=n))
    views = [(cache[0][0].view(20, 4),)]  # the same memory
    graphs(params, views, step_inputs(backend, 2, start=4))
    assert len(graphs) == len(made) == 1
    if what == "cache":
        cache = fresh_cache()
    else:
        params = {"by": 2}
    out, _ = graphs(params, cache, step_inputs(backend, 2, start=5, tokens=[7, 8]))
    assert out[:, 0].tolist() == ([12.0, 13.0] if what == "cache" else [19.0, 21.0])
    assert len(graphs) == 0 and len(made) == 2
    assert cache[0][0].view(-1)[step_inputs(backend, 2, start=5).slot.long()].tolist() == [7.0, 8.0]


class Refuses(Recorded):
    """The first shape cannot be recorded."""

    tries = 0

    def record(self, launch):
        self.tries += 1
        if self.tries == 1:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().record(launch)


def test_a_step_that_cannot_be_recorded_runs_as_before_and_says_why_once(expected, reasons):
    backend = cuda(Refuses)
    assert generate(backend) == expected
    [said] = [r for r in reasons() if "CUDA graphs" in r]
    why = "recording a step failed with RuntimeError: operation not permitted when stream is capturing"
    assert said.endswith(f"{why}.") and backend.remarks()[1].endswith(f"but not all ({why})")


def test_a_shape_that_cannot_be_recorded_gives_up_no_other():
    graphs, _ = make_graphs(recorder=Refuses)
    backend, params, cache, Refuses.launches = cuda(), {"by": 1}, fresh_cache(), 0
    for rows in (2, 3):
        for n in range(4):
            out, _ = graphs(params, cache, step_inputs(backend, rows, start=n, tokens=range(rows)))
            assert out[:, 0].tolist() == [n + i for i in range(rows)]
    assert len(graphs) == 1 and Refuses.launches == 2


def test_a_step_that_returns_a_cache_of_its_own_is_not_recorded():
    def copies(params, cache, x):
        out, new = adds(params, cache, x)
        return out, [(new[0][0].clone(),)]

    graphs, _ = make_graphs(copies)
    for n in range(3):
        graphs({"by": 1}, fresh_cache(), step_inputs(cuda(), 2, start=n))
    cache, params = fresh_cache(), {"by": 1}
    for n in range(3):
        graphs(params, cache, step_inputs(cuda(), 2, start=n))
    assert graphs.why == ["a step returns another cache than the one it was given"] and len(graphs) == 0


def test_more_shapes_than_we_keep_run_as_they_are():
    graphs, _ = make_graphs()
    backend, params = cuda(), {"by": 1}
    cache = [(torch.zeros(4 * MOST, 4),)]
    for rows in range(1, MOST + 3):
        for n in range(3):
            out, _ = graphs(params, cache, step_inputs(backend, rows, start=n))
            assert out.shape == (rows, 1)
    assert graphs.why == [f"there are more than {MOST} shapes of steps"] and len(graphs) == MOST


def test_a_request_that_fails_fails_alone_while_steps_are_recorded(expected):
    def raises(output, logits):
        if len(output) == 5:
            raise ValueError("not this one")
        return logits

    with hibachi.LLM("tiny", backend=cuda(), deterministic=False, block_size=16) as llm:
        good = [llm.stream(p, greedy()) for p in PROMPTS]
        bad = llm.stream([1, 2], greedy(logits_processors=(raises,)))
        assert [list(s.tokens) for s in good] == expected
        with pytest.raises(hibachi.InvalidRequest, match="not this one"):
            list(bad.tokens)


class Stale:
    """A recorder whose replays write at the places of the step that was recorded, as a kept index would."""

    def record(self, launch):
        out, cache = launch()
        then = [t.clone() for layer in cache for t in layer]

        def replay():
            out.normal_()
            for t, old in zip((t for layer in cache for t in layer), then, strict=True):
                t.copy_(old).add_(1)

        return (out, cache), replay


def test_a_replay_that_comes_to_something_else_costs_the_cache_and_no_token(expected, reasons):
    assert generate(cuda(Stale)) == expected
    assert any("came to something else" in r for r in reasons())


# ---- movement ------------------------------------------------------------------------------------------------------


def test_put_all_moves_every_array_whatever_its_dtype():
    rng = np.random.default_rng(0)
    arrays = [
        rng.integers(0, 9, (3, 2)).astype(np.int32),
        rng.normal(size=5).astype(np.float32),
        np.zeros((0, 4), np.int32),
        np.array([1, 2, 3], np.int64),
        rng.integers(0, 9, 7).astype(np.int32)[::-1],
    ]
    moved = cuda().put_all(arrays)
    for a, t in zip(arrays, moved, strict=True):
        assert t.numpy().dtype == a.dtype
        np.testing.assert_array_equal(t.numpy(), a)


@pytest.mark.parametrize("make", [cuda, lambda: ArrayBackend(np), lambda: TorchBackend("cpu", native=False)])
def test_fetch_gives_what_get_gives(make):
    backend = make()
    arrays = [backend.put(np.arange(3, dtype=np.int32)), backend.put(np.array([True, False]))]
    for a, b in zip(backend.fetch(arrays)(), arrays, strict=True):
        np.testing.assert_array_equal(a, backend.get(b))


# ---- attention -----------------------------------------------------------------------------------------------------


def varlen_of_torch(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa, seqused_k, block_table):
    """`torch.nn.attention.varlen.varlen_attn` as FlashAttention 2 takes it, row by row, from its documentation."""
    assert cu_k is not None and cu_k.shape == cu_q.shape and enable_gqa
    if k.shape[1] % 256:
        raise RuntimeError("Paged KV cache block size must be divisible by 256")
    assert all(t.dtype == torch.int32 for t in (cu_q, cu_k, seqused_k, block_table))
    assert max_k == block_table.shape[1] * k.shape[1] and int(seqused_k.max()) <= max_k
    out = torch.full_like(q, torch.nan)  # of tokens that are in no row
    group = q.shape[1] // k.shape[2]
    for i, (a, b) in enumerate(zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True)):
        n, seen = b - a, int(seqused_k[i])
        assert n <= max_q
        if not n or not seen:
            continue
        keys, values = (t[block_table[i].long()].flatten(0, 1)[:seen].repeat_interleave(group, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[a:b].float(), keys.float()) * scale
        at, j = torch.arange(n)[:, None] + seen - n, torch.arange(seen)[None]
        left, right = window_size
        hidden = torch.zeros(n, seen, dtype=torch.bool)
        if left >= 0:
            hidden |= j < at - left
        if right >= 0:
            hidden |= j > at + right
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        out[a:b] = torch.einsum("hqk,khd->qhd", weights, values.float()).to(q.dtype)
    return out


def attend(
    backend, q, *, dtype="bfloat16", block_size=256, heads=4, kv_heads=2, dim=16, padded=False, left=None, **options
):
    """Attention of rows with q new tokens each on `backend`: [T, heads, dim], and the cache but for block 0.

    left: what others left in keys and in values where the rows have not written.
    """
    rng = np.random.default_rng(3)
    n = len(q)
    start = rng.integers(0, 2 * block_size, n).astype(np.int32)
    table = 1 + rng.permutation(4 * n).astype(np.int32).reshape(n, 4)
    packed = lower(np.arange(n), start, np.array(q, np.int32), np.ones(n, bool), table, block_size)
    if padded:
        packed = pad(packed, fixed(2 * n, 2 * n, 4, 1), trash_row=n)
    names = [f.name for f in dataclasses.fields(packed)]
    arrays = backend.put_all([getattr(packed, name) for name in names])
    x = StepInputs(tok=arrays[0], **dict(zip(names, arrays, strict=True)))

    def normal(*shape):
        return backend.put(rng.normal(size=shape).astype(np.float32), dtype)

    cache = normal(4 * n + 1, block_size, kv_heads, dim), normal(4 * n + 1, block_size, kv_heads, dim)
    if left is not None:
        written = torch.arange(4 * block_size).view(4, -1) < torch.from_numpy(start)[:, None, None]
        of = torch.from_numpy(table.ravel()).long()
        for half, value in zip(cache, left, strict=True):
            half[0] = value
            half[of] = torch.where(written.view(4 * n, -1)[:, :, None, None], half[of], value)
    t = len(packed.pos)
    q, k, v = normal(t, heads, dim), normal(t, kv_heads, dim), normal(t, kv_heads, dim)
    out, cache = backend.attend(q, k, v, cache, x, **options)
    return out[: n if padded else t].float().numpy(), [c[1:].float().numpy() for c in cache]


@pytest.mark.parametrize("q", [[1, 1, 1], [1, 1, 70, 3, 33], [40], [1]])
@pytest.mark.parametrize("options", [{}, {"window": 5}, {"scale": 0.3}, {"window": 300, "scale": 0.1}], ids=str)
def test_the_varlen_kernel_attends_as_the_gathering_one(q, options, reasons):
    backend = cuda()
    backend.varlen = varlen_of_torch
    got, cache = attend(backend, q, **options)
    want, written = attend(TorchBackend("cpu", native=False), q, **options)
    assert not reasons(), "it gathers"
    np.testing.assert_allclose(got, want, atol=0.03)
    np.testing.assert_array_equal(cache, written)


def test_padded_decode_steps_attend_alike_whatever_others_left():
    """The kernel itself leaves out what lies there; what is gathered was cleared of NaN as it was written."""
    nan, backend = float("nan"), cuda()
    backend.varlen = varlen_of_torch
    want, _ = attend(TorchBackend("cpu", native=False), [1, 1, 1], padded=True)
    for left in (None, (nan, nan)):
        np.testing.assert_allclose(attend(backend, [1, 1, 1], padded=True, left=left)[0], want, atol=0.03)
    for left in (None, (nan, 0.0)):
        np.testing.assert_array_equal(attend(cuda(), [1, 1, 1], padded=True, left=left)[0], want)


def test_a_kernel_that_lets_nan_through_is_not_taken(reasons):
    """NaN that others left behind the end of a row, times a weight of 0."""

    def careless(q, k, v, cu_q, cu_k, max_q, max_k, *, seqused_k, block_table, **options):
        out = varlen_of_torch(
            q, k.nan_to_num(), v.nan_to_num(), cu_q, cu_k, max_q, max_k,
            seqused_k=seqused_k, block_table=block_table, **options,
        )  # fmt: skip
        for i, row in enumerate(block_table.long()):
            out[cu_q[i] : cu_q[i + 1]] += (v[row].flatten(0, 1)[seqused_k[i] :] * 0).sum()
        return out

    backend = cuda()
    backend.varlen = careless
    got = attend(backend, [1, 9])[0]
    np.testing.assert_array_equal(got, attend(TorchBackend("cpu", native=False), [1, 9])[0])
    assert "its result differs by nan" in reasons()[0]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dtype": "float32"}, "not float32"),
        ({"softcap": 20.0}, "softcap"),
        ({"bias": torch.tensor([[0.0, -0.1]] * 4)}, "it has no bias"),
        ({"sinks": torch.ones(4), "softcap": 20.0}, "it has no softcap and no sinks"),
        ({"dim": 12}, "multiple of 8"),
        ({"block_size": 16}, "cache blocks of 16 positions: RuntimeError: Paged KV cache block size"),
    ],
    ids=["float32", "softcap", "bias", "sinks", "dim", "block"],
)
def test_what_the_kernel_does_not_take_is_gathered_and_said_once(options, why, reasons):
    backend = cuda()
    backend.varlen = varlen_of_torch
    got = [attend(backend, [1, 9], **options)[0] for _ in range(2)]
    want, _ = attend(TorchBackend("cpu", native=False), [1, 9], **options)
    assert np.array_equal(got[0], want) and np.array_equal(got[1], want)
    assert len(reasons()) == 1 and why in reasons()[0]
    assert why in backend.remarks()[0]


@pytest.mark.parametrize("fault", ["offset", "raises", "missing"])
def test_a_kernel_that_is_wrong_or_absent_is_not_used(fault, reasons):
    backend = cuda()

    def wrong(*args, **kwargs):
        if fault == "raises":
            raise NotImplementedError("no kernel for this device\nand much more")
        return varlen_of_torch(*args, **kwargs) + 0.5

    backend.varlen = None if fault == "missing" else wrong
    np.testing.assert_array_equal(attend(backend, [1, 9])[0], attend(TorchBackend("cpu", native=False), [1, 9])[0])
    why = {"offset": "differs by 0.5", "raises": "no kernel for this device", "missing": "has no varlen_attn"}[fault]
    assert len(reasons()) == 1 and why in reasons()[0] and "\n" not in reasons()[0]


def test_the_kernel_of_this_pytorch_has_the_arguments_that_we_pass():
    import inspect

    from hibachi_torch.cuda_attention import varlen_attn

    found = varlen_attn()
    if found is None:
        pytest.skip("this PyTorch has no varlen_attn with a block table")
    theirs = inspect.signature(found).parameters
    ours = inspect.signature(varlen_of_torch).parameters
    assert list(theirs)[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {n for n, p in ours.items() if p.kind is p.KEYWORD_ONLY} <= set(theirs)


def test_rope_and_fused_writes_come_to_what_the_definition_says():
    x, cos, sin = (
        torch.from_numpy(np.random.default_rng(i).normal(size=s))
        for i, s in enumerate([(5, 3, 8), (5, 1, 4), (5, 1, 4)])
    )
    torch.testing.assert_close(cuda().rope(x, cos, sin), TorchBackend("cpu", native=False).rope(x, cos, sin))
