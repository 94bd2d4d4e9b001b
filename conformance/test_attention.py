"""Attention over the paged cache equals attention written out token by token."""

from typing import Any

import numpy as np
import pytest

from hibachi import StepInputs

from .paged import Memory, Row, step_inputs

pytestmark = pytest.mark.promise("paged attention", parts=["arrays and arithmetic"])


def test_attend_equals_slow_attention_on_a_prompt(backend):
    Memory(backend).step([Row(0, 6, (3, 1))])


def test_attend_equals_slow_attention_on_single_tokens(backend):
    memory = Memory(backend)
    memory.step([Row(0, 5, (1, 2)), Row(0, 2, (5,))])
    memory.step([Row(5, 1, (1, 2)), Row(2, 1, (5,))], tile=1)


def test_attend_equals_slow_attention_on_single_tokens_beside_a_chunk(backend):
    memory = Memory(backend)
    memory.step([Row(0, 5, (1, 2)), Row(0, 3, (4, 6))])
    memory.step([Row(5, 1, (1, 2)), Row(3, 5, (4, 6)), Row(0, 3, (7,))])


def test_a_row_goes_on_from_another_whose_last_block_is_copied(backend):
    """Whatever the layout: the blocks that are named have what others have, and no other block changes."""
    memory = Memory(backend)
    memory.step([Row(0, 6, (1, 2)), Row(0, 3, (7,))])
    source, to = (backend.put(np.array(at, "int32")) for at in ([2, 7, 0], [3, 5, 0]))
    memory.cache = backend.copy_blocks(memory.cache, source, to)
    size = memory.block_size
    for old, new in ((2, 3), (7, 5)):
        memory.slow |= {
            new * size + i: memory.slow[old * size + i] for i in range(size) if old * size + i in memory.slow
        }
    memory.step([Row(6, 1, (1, 3)), Row(6, 1, (1, 2)), Row(3, 1, (5,)), Row(3, 1, (7,))], tile=1)


def test_what_blocks_hold_is_kept_elsewhere_and_put_back(backend):
    """As bytes of the host, which another process has: in other blocks, which the rest of the cache does not notice."""
    memory = Memory(backend)
    memory.step([Row(0, 6, (1, 2)), Row(0, 3, (7,))])
    read = backend.read_blocks(memory.cache, backend.put(np.array([2, 7, 0], "int32")))
    held = [np.frombuffer(half.tobytes(), half.dtype).reshape(half.shape) for half in backend.fetch(read)()]
    memory.step([Row(6, 2, (1, 2)), Row(3, 1, (7,))])  # what was read is not a view
    at = backend.put(np.array([3, 5, 0], "int32"))
    memory.cache = backend.write_blocks(memory.cache, at, [backend.put(half) for half in held])
    size = memory.block_size
    for old, new, positions in ((2, 3, 2), (7, 5, 3)):
        memory.slow |= {new * size + i: memory.slow[old * size + i] for i in range(positions)}
    memory.step([Row(6, 1, (1, 3)), Row(8, 1, (1, 2, 4)), Row(3, 1, (5,)), Row(4, 1, (7, 6))], tile=1)


def test_attend_gives_the_same_whatever_the_size_of_the_tiles(backend):
    for tile in (1, 2, 8):
        memory = Memory(backend)
        memory.step([Row(0, 7, (2, 5))], tile=tile)
        memory.step([Row(7, 1, (2, 5)), Row(0, 6, (1, 3))], tile=tile)


def test_attend_never_looks_ahead(backend):
    memory = Memory(backend)
    memory.step([Row(0, 4, (1,))])
    memory.step([Row(4, 4, (1, 2))])


def test_attend_writes_before_it_reads(backend):
    """A request may start on blocks that another one fills in the same step."""
    Memory(backend).step([Row(4, 1, (1, 2)), Row(0, 4, (1,))])


def test_attend_remembers_what_earlier_steps_wrote(backend):
    memory = Memory(backend)
    for at in range(6):
        memory.step([Row(at, 1, (7, 2))])


def test_attend_reads_no_block_and_no_position_of_others(backend):
    memory = Memory(backend).dirty()
    memory.step([Row(0, 3, (1, 2)), Row(0, 5, (4, 6))])
    memory.step([Row(3, 1, (1, 2)), Row(5, 2, (4, 6))])


def test_attend_shares_key_heads_among_groups_of_query_heads(backend):
    for heads, kv_heads in ((4, 4), (6, 2), (4, 1)):
        memory = Memory(backend, heads=heads, kv_heads=kv_heads)
        memory.step([Row(0, 5, (1, 2))])
        memory.step([Row(5, 1, (1, 2))])


def test_attend_scales_the_scores_as_told(backend):
    Memory(backend).step([Row(0, 5, (1, 2))], scale=1.5)


def test_attend_sees_no_further_back_than_its_window(backend):
    for window in (1, 3, 100):
        memory = Memory(backend)
        memory.step([Row(0, 7, (1, 2)), Row(0, 2, (5,))], window=window)
        memory.step([Row(2, 1, (5,)), Row(7, 4, (1, 2, 3))], window=window, pad=2 if backend.shapes.compiled else 0)


def test_attend_caps_the_scores_softly(backend):
    memory = Memory(backend)
    memory.step([Row(0, 5, (1, 2))], scale=2.0, softcap=1.5)
    memory.step([Row(5, 1, (1, 2))], scale=2.0, softcap=1.5, window=4)


def test_attend_stays_finite_for_large_scores(backend):
    Memory(backend).step([Row(0, 5, (1, 2))], scale=1000.0)


def test_attend_gives_padding_no_influence(backend):
    memory = Memory(backend).dirty()
    memory.step([Row(0, 3, (1,)), Row(0, 5, (4, 6))], pad=3)
    memory.step([Row(3, 1, (1,)), Row(5, 1, (4, 6))], pad=3)


def test_attend_does_not_catch_nan_from_padding_tokens(backend):
    """They repeat a real token, so one request with NaN would otherwise spoil the whole batch.

    Where no token is padding, tiles are filled up with the first token of all, and here that is NaN.
    """
    memory, first = Memory(backend), Row(0, 3, (2,))
    if backend.shapes.compiled:
        memory.step([Row(0, 3, (1,)), Row(0, 5, (4, 6))], pad=3, padding=float("nan"))
        memory.step([Row(3, 1, (1,)), Row(5, 1, (4, 6))], pad=3, padding=float("nan"))
    else:
        memory.step([first, Row(0, 3, (1,)), Row(0, 5, (4, 6))], sick=3)
        memory.step([first, Row(3, 1, (1,)), Row(5, 1, (4, 6))], sick=3)


def test_attend_takes_nothing_from_where_a_row_has_not_written(backend):
    """NaN of the blocks' last owner: behind the end of a row, in blocks of its own that it comes to later, and in
    block 0, which pads the tables of shorter rows. Multiplied by weights of 0 it would stay NaN."""
    for window in (3, None):
        memory = Memory(backend).dirty(float("nan"))
        memory.step([Row(0, 1, (5, 3)), Row(0, 3, (1, 2, 7)), Row(0, 5, (4, 6))], window=window)
    for at in range(3, 6):
        memory.step([Row(at, 1, (1, 2, 7)), Row(at - 2, 1, (5, 3))], tile=1)


def test_attend_gives_nan_to_what_sees_it_and_to_nothing_else(backend):
    """Not to tokens before it, though they are computed in the same step: others may share their blocks."""
    memory = Memory(backend)
    memory.step([Row(0, 1, (5, 3)), Row(0, 3, (1, 2, 7)), Row(0, 5, (4, 6))], nan=(2, 7))
    memory.step([Row(3, 1, (1, 2, 7)), Row(1, 1, (5, 3))], tile=1)
    memory.step([Row(5, 1, (4, 6)), Row(2, 1, (5, 3))], tile=1, nan=(1,))
    memory.step([Row(6, 1, (4, 6)), Row(3, 1, (5, 3))], tile=1)


def alibi(heads: int = 4) -> np.ndarray:
    """Of each head a slope, that goes on for ever."""
    return np.array([[0, -(2.0 ** -(i + 1))] for i in range(heads)], "float32")


def table(heads: int = 4, n: int = 6) -> np.ndarray:
    """Numbers for some distances, the last of which hold for all beyond."""
    random = np.random.default_rng(1).normal(size=(heads, n - 1))
    return np.concatenate([random, random[:, -1:]], axis=1).astype("float32")


def sinks(heads: int = 4) -> np.ndarray:
    return np.linspace(2, -1, heads).astype("float32")


def test_attend_adds_a_bias_by_distance(backend):
    """In a straight line that never ends (ALiBi), or in a table whose end holds (T5): of prompts, chunks and tokens."""
    for bias in (alibi(), table()):
        memory = Memory(backend).dirty()
        memory.step([Row(0, 9, (3, 1, 6)), Row(0, 2, (5,))], bias=bias)
        memory.step([Row(9, 1, (3, 1, 6)), Row(2, 1, (5,))], tile=1, bias=bias)
        memory.step([Row(3, 1, (5,)), Row(10, 2, (3, 1, 6))], bias=bias, pad=3 if backend.shapes.compiled else 0)


def test_attend_adds_the_bias_after_scale_and_cap_and_sees_no_further_for_it(backend):
    for window in (3, None):
        memory = Memory(backend).dirty(float("nan"))
        memory.step([Row(0, 9, (3, 1, 6)), Row(0, 2, (5,))], bias=table(), scale=2.0, softcap=1.5, window=window)
        memory.step([Row(9, 1, (3, 1, 6))], tile=1, bias=table(), scale=2.0, softcap=1.5, window=window)


def test_attend_gives_sinks_a_share_without_a_value(backend):
    for sink in (sinks(), sinks() + 30, sinks() - 30):  # all that there is, and as good as nothing
        memory = Memory(backend).dirty()
        memory.step([Row(0, 7, (1, 2)), Row(0, 2, (5,))], sinks=sink)
        memory.step([Row(2, 1, (5,)), Row(7, 4, (1, 2, 3))], sinks=sink, pad=2 if backend.shapes.compiled else 0)
        memory.step([Row(11, 1, (1, 2, 3)), Row(3, 1, (5,))], tile=1, sinks=sink)


def test_attend_leaves_sinks_out_of_scale_and_cap_and_bias(backend):
    for window in (1, 3, None):
        memory = Memory(backend, heads=6, kv_heads=2)
        both: dict[str, Any] = dict(bias=table(6), sinks=sinks(6), scale=3.0, softcap=1.5, window=window)
        memory.step([Row(0, 7, (1, 2)), Row(0, 2, (5,))], **both)
        memory.step([Row(7, 1, (1, 2)), Row(2, 1, (5,))], tile=1, **both)


def test_attend_refuses_a_bias_or_sinks_that_do_not_fit(backend):
    """A ValueError that names the argument. NaN too, in an array whose numbers can be seen without waiting."""
    memory = Memory(backend)
    x = StepInputs(**{name: backend.put(a) for name, a in step_inputs([Row(0, 2, (1,))], 4, 2, 0).items()})
    q, k, v = (backend.put(np.ones((2, *shape), "float32")) for shape in ((4, 8), (2, 8), (2, 6)))
    spoilt = dict(bias=table(), sinks=sinks())
    for values in spoilt.values():
        values.flat[-1] = np.nan
    wrong = [
        *(("bias", bias) for bias in (table(3), table()[0], table()[:, :1], table()[None], table().astype("int32"))),
        *(("sinks", sink) for sink in (sinks(3), sinks()[:, None], sinks().astype("int32"))),
        *((name, a) for name, a in spoilt.items() if backend.peek(backend.put(a)) is not None),
    ]
    for name, values in wrong:
        with pytest.raises(ValueError, match=f"attend: expected {name} to be"), backend.guard():
            backend.attend(q, k, v, memory.cache, x, **{name: backend.put(values)})
