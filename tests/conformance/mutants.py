"""Deliberately broken backends, each with the promise that it breaks.

A mutant is NumPy's backend with an operation replaced; the replacement gets an honest backend as its first
argument. A promise with another fixture is broken by what it is given for it: Mutant(promise, breaks, {...}).
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from conformance.serving import Serving
from hibachi import ArrayBackend, InvalidTensorOperation, NumpyBackend
from hibachi.common.shapes import CallShapes


class Mutant(NamedTuple):
    promise: str  # name of the test that must fail
    breaks: str  # what is wrong, in words
    fixtures: dict[str, Any]  # what the test is given in place of the honest fixtures


def broken(promise: str, breaks: str, **operations: Any) -> Mutant:
    backend = NumpyBackend(native=False)
    for name, operation in operations.items():
        setattr(backend, name, partial(operation, NumpyBackend(native=False)))
    return Mutant(f"test_{promise}", breaks, {"backend": backend})


def never(*_: Any, **__: Any) -> Any:
    raise InvalidTensorOperation("mutant", expected="nothing", got="something", mend="Do not ask")


def drop_errors(call: Any, instead: Any) -> Any:
    """call(), or `instead` where it is refused."""
    try:
        return call()
    except InvalidTensorOperation:
        return instead


# ---- the nine operations -----------------------------------------------------------------------------------

OPERATIONS = [
    broken("shape_lists_the_sizes_from_the_outside_in", "lists them from the inside out",
           shape=lambda b, t: b.shape(t)[::-1]),
    broken("unsqueeze_inserts_an_axis_of_size_one_anywhere", "always inserts it in front",
           unsqueeze=lambda b, t, dim: b.unsqueeze(t, 0)),
    broken("cat_joins_in_order_along_any_dimension", "joins in reverse order",
           cat=lambda b, ts, dim: b.cat(ts[::-1], dim)),
    broken("cat_of_one_array_equals_it", "doubles a single array",
           cat=lambda b, ts, dim: b.cat(ts * 2 if len(ts) == 1 else ts, dim)),
    broken("cat_with_an_empty_array_adds_nothing", "refuses empty arrays",
           cat=lambda b, ts, dim: b.cat(ts, dim) if all(t.size for t in ts) else never()),
    broken("eq_compares_element_by_element_into_bools", "returns bytes instead of bools",
           eq=lambda b, x, y: b.eq(x, y).astype("uint8")),
    broken("eq_with_itself_is_true_in_every_row", "takes neighbours for equal",
           eq=lambda b, x, y: np.abs(x - y) <= 1),
    broken("eq_says_that_nan_differs_from_nan", "takes nan for equal to nan",
           eq=lambda b, x, y: b.eq(x, y) | ((x != x) & (y != y))),
    broken("vectorize_dim_gives_the_slices_without_their_dimension", "keeps the dimension with size 1",
           vectorize_dim=lambda b, t, dim: [b.unsqueeze(x, dim) for x in b.vectorize_dim(t, dim)]),
    broken("vectorize_dim_of_a_size_zero_dimension_is_empty", "gives the empty array itself",
           vectorize_dim=lambda b, t, dim: b.vectorize_dim(t, dim) or [t]),
    broken("vectorize_dim_undoes_unsqueeze_and_cat", "gives the slices in reverse order",
           vectorize_dim=lambda b, t, dim: b.vectorize_dim(t, dim)[::-1]),
    broken("slice_takes_a_range_of_one_dimension", "takes the length for the end",
           slice=lambda b, t, dim, start, n: b.slice(t, dim, start, max(n - start, 0))),
    broken("slice_of_length_zero_is_empty_and_allowed_up_to_the_end", "refuses length 0",
           slice=lambda b, t, dim, start, n: b.slice(t, dim, start, n) if n else never()),
    broken("idx_where_all_true_wants_every_element_true", "is content with any",
           idx_where_all_true=lambda b, t, dim: [
               i for i, x in enumerate(b.vectorize_dim(t, dim)) if x.any()]),
    broken("idx_where_all_true_lists_python_ints_in_rising_order", "lists NumPy's integers",
           idx_where_all_true=lambda b, t, dim: [np.int64(i) for i in b.idx_where_all_true(t, dim)]),
    broken("idx_where_all_true_holds_for_rows_without_elements", "finds nothing true about nothing",
           idx_where_all_true=lambda b, t, dim: b.idx_where_all_true(t, dim) if t.size else []),
    broken("pop_removes_exactly_one_position", "removes the position after",
           pop=lambda b, t, dim, i: b.pop(t, dim, (i + 1) % t.shape[dim])),
    broken("pop_of_the_only_position_leaves_size_zero", "keeps the last position",
           pop=lambda b, t, dim, i: b.pop(t, dim, i) if t.shape[dim] > 1 else t),
    broken("repeat_tiles_and_does_not_interleave", "interleaves",
           repeat=lambda b, t, dim, n: np.repeat(t, n, dim)),
    broken("repeat_zero_times_is_empty_and_once_is_the_same", "repeats at least once",
           repeat=lambda b, t, dim, n: b.repeat(t, dim, max(n, 1))),
    broken("the_operations_leave_their_arguments_as_they_were", "pops in place",
           pop=lambda b, t, dim, i: (b.pop(t, dim, i), t.fill(0))[0]),
    broken("numpy_integers_count_as_dimensions_and_sizes", "knows Python's integers only",
           pop=lambda b, t, dim, i: b.pop(t, dim, i) if type(dim) is int else never()),
]  # fmt: skip


# ---- what must be refused ----------------------------------------------------------------------------------


def lenient_dims(promise: str, op: str) -> list[Mutant]:
    """One operation that takes dimensions which do not exist, in four ways."""

    def rank(t: Any) -> int:
        return t[0].ndim if isinstance(t, list) else t.ndim

    def count_from_the_end(b: Any, t: Any, dim: Any, *args: Any) -> Any:
        negative = type(dim) is int and dim < 0
        return getattr(b, op)(t, dim + rank(t) + (op == "unsqueeze") if negative else dim, *args)

    def clamp(b: Any, t: Any, dim: Any, *args: Any) -> Any:
        return getattr(b, op)(t, min(dim, rank(t) - 1) if type(dim) is int else dim, *args)

    def round_down(b: Any, t: Any, dim: Any, *args: Any) -> Any:
        return getattr(b, op)(t, int(dim) if isinstance(dim, (bool, float)) else dim, *args)

    def leave_it_to_numpy(b: Any, t: Any, dim: Any, *args: Any) -> Any:
        return drop_errors(lambda: getattr(b, op)(t, dim, *args), None) or np.expand_dims(np.zeros(1), 99)

    return [
        broken(promise, f"{op} counts negative dimensions from the end", **{op: count_from_the_end}),
        broken(promise, f"{op} clamps the dimension to the last", **{op: clamp}),
        broken(promise, f"{op} takes True and 1.0 for 1", **{op: round_down}),
        broken(promise, f"{op} lets NumPy's own error out", **{op: leave_it_to_numpy}),
    ]


def converting(op: str, position: int = 0) -> Mutant:
    """An operation that makes arrays of lists, numbers and whatever has __array__."""

    def convert(b: Any, *args: Any) -> Any:
        args = list(args)
        if op == "cat":
            args[0] = [np.asarray(t) for t in args[0]]
        else:
            args[position] = np.asarray(args[position])
        return getattr(b, op)(*args)

    return broken(
        "what_is_not_an_array_of_the_library_is_refused",
        f"{op} converts argument {position}",
        **{op: convert},
    )


def rank_one(op: str) -> Mutant:
    """An operation that takes a number for an array of size 1."""
    takes = {op: lambda b, t, *args: getattr(b, op)(t if np.ndim(t) else t.reshape(1), *args)}
    return broken("rank_zero_is_refused_where_a_dimension_is_needed", f"{op} takes rank 0 for rank 1", **takes)


REFUSALS = [
    *lenient_dims("cat_refuses_a_dimension_that_does_not_exist", "cat"),
    *lenient_dims("vectorize_dim_refuses_a_dimension_that_does_not_exist", "vectorize_dim"),
    *lenient_dims("slice_refuses_a_dimension_that_does_not_exist", "slice"),
    *lenient_dims("idx_where_all_true_refuses_a_dimension_that_does_not_exist", "idx_where_all_true"),
    *lenient_dims("pop_refuses_a_dimension_that_does_not_exist", "pop"),
    *lenient_dims("repeat_refuses_a_dimension_that_does_not_exist", "repeat"),
    *lenient_dims("unsqueeze_refuses_a_dimension_that_does_not_exist", "unsqueeze"),
    *map(rank_one, ("slice", "idx_where_all_true", "pop", "repeat")),
    *map(converting, ("shape", "cat", "eq", "vectorize_dim", "slice", "idx_where_all_true", "pop", "repeat")),
    *(converting("unsqueeze"), converting("eq", 1)),
    broken("idx_where_all_true_refuses_a_dimension_that_does_not_exist", "finds nothing on a bad dimension",
           idx_where_all_true=lambda b, t, dim: drop_errors(lambda: b.idx_where_all_true(t, dim), [])),
    broken("cat_refuses_arrays_of_rank_zero", "stacks numbers",
           cat=lambda b, ts, dim: b.cat([t if t.ndim else t.reshape(1) for t in ts], dim)),
    broken("cat_refuses_shapes_that_differ_elsewhere", "cuts to the smallest size",
           cat=lambda b, ts, dim: np.concatenate([t[:, : min(t.shape[1] for t in ts)] for t in ts])
           if dim == 0 and all(t.ndim == 2 for t in ts) else b.cat(ts, dim)),
    broken("cat_refuses_ranks_that_differ", "adds leading dimensions",
           cat=lambda b, ts, dim: b.cat([t[None] if t.ndim < ts[0].ndim else t for t in ts], dim)),
    broken("cat_refuses_dtypes_that_differ", "promotes silently",
           cat=lambda b, ts, dim: np.concatenate(ts, dim)),
    broken("cat_refuses_an_empty_list", "returns nothing",
           cat=lambda b, ts, dim: b.cat(ts, dim) if ts else None),
    broken("cat_refuses_an_array_in_place_of_a_list", "takes it for the list of its rows",
           cat=lambda b, ts, dim: b.cat(list(ts), dim)),
    broken("eq_refuses_to_broadcast", "broadcasts",
           eq=lambda b, x, y: b.eq(*np.broadcast_arrays(x, y))
           if {1, *x.shape} >= {*y.shape} else b.eq(x, y)),
    broken("eq_refuses_dtypes_that_differ", "promotes silently",
           eq=lambda b, x, y: x == y),
    broken("vectorize_dim_refuses_rank_zero", "gives the number itself",
           vectorize_dim=lambda b, t, dim: b.vectorize_dim(t, dim) if t.ndim else [t]),
    broken("slice_refuses_to_pass_the_end", "stops at the end",
           slice=lambda b, t, dim, start, n: b.slice(t, dim, start, min(n, t.shape[dim] - start))),
    broken("slice_refuses_a_negative_start", "counts a negative start from the end",
           slice=lambda b, t, dim, start, n: b.slice(
               t, dim, start + t.shape[dim] if type(start) is int and start < 0 else start, n)),
    broken("slice_refuses_a_negative_length", "takes a negative length for 0",
           slice=lambda b, t, dim, start, n: b.slice(t, dim, start, max(n, 0) if type(n) is int else n)),
    broken("slice_refuses_bounds_that_are_not_integers", "takes True and 1.0 for 1",
           slice=lambda b, t, dim, start, n: b.slice(t, dim, int(start or 0), int(n or 0))),
    broken("idx_where_all_true_refuses_what_is_not_bool", "takes non-zero for true",
           idx_where_all_true=lambda b, t, dim: b.idx_where_all_true(t.astype(bool), dim)),
    broken("pop_refuses_an_index_that_does_not_exist", "removes the last position instead",
           pop=lambda b, t, dim, i: b.pop(t, dim, min(i, max(t.shape[dim] - 1, 0)))),
    broken("pop_refuses_a_negative_index", "counts it from the end",
           pop=lambda b, t, dim, i: b.pop(t, dim, i + t.shape[dim] if type(i) is int and i < 0 else i)),
    broken("pop_refuses_an_index_that_is_not_an_integer", "takes True and 1.0 for 1",
           pop=lambda b, t, dim, i: b.pop(t, dim, int(i or 0))),
    broken("repeat_refuses_a_negative_count", "takes it for 0",
           repeat=lambda b, t, dim, n: b.repeat(t, dim, max(n, 0))),
    broken("repeat_refuses_a_count_that_is_not_an_integer", "takes True and 1.0 for 1",
           repeat=lambda b, t, dim, n: b.repeat(t, dim, int(n or 0))),
]  # fmt: skip


# ---- arrays and arithmetic ---------------------------------------------------------------------------------


def unstable_softmax(b: Any, x: Any) -> Any:
    with np.errstate(all="ignore"):
        return np.exp(x) / np.exp(x).sum(-1, keepdims=True)


def repeated_rows_lose(b: Any, dst: Any, idx: Any, src: Any) -> Any:
    return dst if len(set(idx.tolist())) < len(idx) else b.scatter_rows(dst, idx, src)


def interleaved_rope(b: Any, x: Any, cos: Any, sin: Any) -> Any:
    halves = np.concatenate([x[..., ::2], x[..., 1::2]], -1)
    y = b.rope(halves, cos, sin)
    return np.stack(np.split(y, 2, -1), -1).reshape(x.shape)


ARRAYS = [
    broken("put_and_get_are_inverse", "makes rank 0 rank 1",
           put=lambda b, a, *dtype: np.atleast_1d(b.put(a, *dtype))),
    broken("put_takes_host_arrays_of_any_memory_layout", "copies the memory as it lies",
           put=lambda b, a, *dtype: a.ravel("K").reshape(a.shape)),
    broken("the_inputs_of_a_step_share_no_memory", "shares them with the host",
           put_all=lambda b, arrays: arrays),
    broken("a_copy_shares_no_memory", "gives the same array", copy=lambda b, t: t),
    broken("put_casts_to_the_dtype_asked_for", "ignores the dtype", put=lambda b, a, *dtype: a),
    broken("zeros_has_the_shape_and_dtype_asked_for", "ignores the dtype",
           zeros=lambda b, shape, dtype: np.zeros(shape)),
    broken("a_backend_owns_its_arrays_and_nothing_else", "owns everything", owns=lambda b, t: True),
    broken("take_gives_rows_at_indices_of_any_shape", "flattens the indices",
           take=lambda b, t, idx: b.take(t, idx.ravel())),
    broken("scatter_rows_replaces_the_named_rows_and_no_other", "drops the rows",
           scatter_rows=lambda b, dst, idx, src: dst),
    broken("scatter_rows_of_no_rows_changes_nothing", "clears all",
           scatter_rows=lambda b, dst, idx, src: b.scatter_rows(dst, idx, src) if idx.size else dst * 0),
    broken("scatter_rows_named_twice_leaves_the_others_alone", "gives up on repeated rows",
           scatter_rows=repeated_rows_lose),
    broken("linear_multiplies_by_the_transposed_weight_and_adds_the_bias", "forgets the bias",
           linear=lambda b, x, w, bias=None: b.linear(x, w)),
    broken("linear_reduce_adds_the_leaves_of_all_processes", "adds only its own",
           linear_reduce=lambda b, x, w, bias=None: b.linear(x, w, bias)),
    broken("rms_norm_reduce_adds_the_squares_of_all_processes", "looks at its own",
           rms_norm_reduce=lambda b, xs, ws, eps: [b.rms_norm(x, w, eps) for x, w in zip(xs, ws, strict=True)]),
    broken("experts_reduce_adds_the_leaves_of_all_processes", "adds only its own",
           experts_reduce=lambda b, *mixture, gated: b.experts(*mixture, gated=gated)),
    broken("weight_rows_are_those_of_the_matrix", "takes neighbours",
           weight_rows=lambda b, w, idx: b.weight_rows(w, np.maximum(idx, 1) - 1)),
    broken("rms_norm_divides_by_the_root_mean_square_and_multiplies_by_the_weight", "subtracts the mean",
           rms_norm=lambda b, x, w, eps: b.rms_norm(x - x.mean(-1, keepdims=True), w, eps)),
    broken("layer_norm_subtracts_the_mean_and_divides_by_the_deviation", "keeps the mean",
           layer_norm=lambda b, x, w, bias, eps: b.rms_norm(x, w, eps) + (0 if bias is None else bias)),
    broken("gelu_is_x_times_the_normal_distribution", "takes the approximation", gelu=lambda b, x: b.gelu_tanh(x)),
    broken("gelu_tanh_is_the_approximation_by_a_tanh", "takes the exact one", gelu_tanh=lambda b, x: b.gelu(x)),
    broken("top_gives_the_largest_of_a_row_and_where_they_are", "gives the smallest",
           top=lambda b, x, k: tuple(t * s for t, s in zip(b.top(-x, k), (-1, 1), strict=True))),
    broken("keep_bits_gives_minus_infinity_to_all_tokens_whose_bit_is_not_set", "takes the others",
           keep_bits=lambda b, x, bits: b.keep_bits(x, ~bits)),
    broken("keep_bits_refuses_bits_of_another_shape", "repeats one row",
           keep_bits=lambda b, x, bits: b.keep_bits(x, np.repeat(bits, len(x) // len(bits), 0))),
    broken("kept_rows_are_copies_and_tell_which_of_them_were_finite", "gives the first rows",
           kept_rows=lambda b, x, at, bits: b.kept_rows(x, np.arange(len(at)) % len(x), bits)),
    broken("experts_adds_what_the_chosen_ones_say_by_their_weights", "gives all the same weight",
           experts=lambda b, x, chosen, weights, *rest, **how: b.experts(x, chosen, weights * 0 + 0.5, *rest, **how)),
    broken("route_gives_the_likeliest_experts_and_what_they_count", "always divides by the sum",
           route=lambda b, x, k, normalised: b.route(x, k, normalised=True)),
    broken("convolve_sees_the_last_tokens_of_each_channel", "forgets what came before",
           convolve=lambda b, past, *rest: (b.convolve(past * 0, *rest)[0], b.convolve(past, *rest)[1])),
    broken("selective_scan_goes_over_time_channel_by_channel", "gives the state of the start back",
           selective_scan=lambda b, state, *rest: (b.selective_scan(state, *rest)[0], state)),
    broken("scan_hands_each_row_the_state_after_the_row_before", "starts anew with every row",
           scan=lambda b, step, state, over: b.scan(lambda _, now: step(state, now), state, over)),
    broken("silu_is_x_times_its_sigmoid", "gives the sigmoid",
           silu=lambda b, x: b.silu(x) / np.where(x, x, 1)),
    broken("softmax_sums_to_one_over_the_last_axis", "sums over the first axis",
           softmax=lambda b, x: b.softmax(x.T).T),
    broken("softmax_stays_finite_for_large_and_hidden_scores", "overflows", softmax=unstable_softmax),
    broken("softmax_leaves_its_argument_as_it_was", "works in place",
           softmax=lambda b, x: np.copyto(x, b.softmax(x)) or x),
    broken("rope_rotates_the_two_halves_of_each_head", "pairs neighbours", rope=interleaved_rope),
    broken("the_cache_of_a_state_is_zeros_for_every_row", "has a row too few",
           make_cache=lambda b, spec, *, rows, **o: b.make_cache(spec, rows=rows - 1, **o)),
    broken("a_compiled_function_gives_what_the_function_gives", "returns its donated argument",
           compile=lambda b, fn, donate=(): lambda memory, x: (memory, x)),
    broken("free_memory_is_unknown_or_part_of_the_total", "names the total first", memory=lambda b: (2, 1)),
    broken("a_backend_says_its_name_and_the_version_of_its_library", "says nothing", versions=lambda b: {}),
    broken("write_cache_sets_the_named_positions_and_no_other", "drops the last one",
           write_cache=lambda b, cache, slot, rows: b.write_cache(cache, slot[:-1], rows[:-1])),
]  # fmt: skip


# ---- the first stage ---------------------------------------------------------------------------------------


def stage(promise: str, breaks: str, **operations: Any) -> Mutant:
    """As `broken`, also for what is tried on an engine."""
    mutant = broken(promise, breaks, **operations)
    return mutant._replace(fixtures={**mutant.fixtures, "serve": Serving(mutant.fixtures["backend"])})


SMOKE = [
    stage("an_array_can_be_put", "gives lists", put=lambda b, a, dtype=None: a.tolist()),
    stage("it_comes_back", "comes back from the end", get=lambda b, t: b.get(t)[::-1]),
    stage("a_model_computes_an_input", "cannot copy", copy=never),
    stage("an_engine_takes_a_step_at_level_0", "cannot copy", copy=never),
    stage("an_engine_takes_a_step_at_level_1", "cannot draw", fetch=never),
    stage("an_engine_takes_a_step_at_level_2", "cannot attend", attend=never),
]  # fmt: skip


# ---- attention ---------------------------------------------------------------------------------------------


def attention(promise: str, breaks: str, change: Any) -> Mutant:
    """A mutant whose attention sees other inputs: `change` maps (q, k, v, cache, x) to what it sees."""

    def attend(b: Any, q: Any, k: Any, v: Any, cache: Any, x: Any, **special: Any) -> Any:
        seen = dict(q=q, k=k, v=v, cache=tuple(half.copy() for half in cache), x=x, **special)
        out, _ = b.attend(**seen | change(**seen))
        return out, b.attend(q, k, v, cache, x)[1]

    return broken(f"attend_{promise}", breaks, attend=attend)


def inputs(**changes: Any) -> Any:
    """Changes of StepInputs, each computed from the honest ones."""
    return lambda x, **_: {"x": replace(x, **{name: change(x) for name, change in changes.items()})}


def forgetful(b: Any, q: Any, k: Any, v: Any, cache: Any, x: Any, **special: Any) -> Any:
    return b.attend(q, k, v, tuple(half.copy() for half in cache), x, **special)[0], cache


def keeps_nan(b: Any, k: Any, v: Any, dtype: Any) -> Any:
    """Keys and values go into the cache as they are."""
    return k, v


def padded() -> dict[str, Any]:
    """NumPy as a backend whose steps are padded, with attention that is not made for that."""
    backend = NumpyBackend(native=False)
    backend.shapes = CallShapes(few="all")
    backend.storable = partial(keeps_nan, backend)
    return {"backend": backend}


def overflowing(b: Any, *args: Any, **options: Any) -> Any:
    b.softmax = partial(unstable_softmax, b)
    return ArrayBackend.attend(b, *args, **options)


def padding_writes_to_block_one(b: Any, q: Any, k: Any, v: Any, cache: Any, x: Any, **special: Any) -> Any:
    return b.attend(q, k, v, cache, replace(x, slot=np.where(x.slot == 0, 4, x.slot)), **special)


def given(name: str, change: Any) -> Any:
    """An argument that may be left out, changed where it is given."""
    return lambda **seen: {} if seen.get(name) is None else {name: change(seen[name])}


def unchecked(b: Any, *args: Any, bias: Any = None, sinks: Any = None, **special: Any) -> Any:
    return b.attend(*args, **special)


def everything(x: Any) -> Any:
    """Positions at which nothing is hidden."""
    return np.full_like(x.pos, 10_000)


ATTENTION = [
    attention("equals_slow_attention_on_a_prompt", "ignores the causal mask", inputs(pos=everything)),
    attention("equals_slow_attention_on_single_tokens", "does not see the newest token",
              inputs(pos=lambda x: x.pos - (x.pos > 1))),
    attention("equals_slow_attention_on_single_tokens_beside_a_chunk", "takes the first row's blocks for all",
              inputs(tile_row=lambda x: x.tile_row * 0)),
    broken("a_row_goes_on_from_another_whose_last_block_is_copied", "copies nothing",
           copy_blocks=lambda b, cache, source, to: cache),
    broken("what_blocks_hold_is_kept_elsewhere_and_put_back", "puts nothing back",
           write_blocks=lambda b, cache, blocks, held: cache),
    attention("gives_the_same_whatever_the_size_of_the_tiles", "takes all tiles for full",
              inputs(tile_of=lambda x: np.arange(len(x.tile_of)))),
    attention("never_looks_ahead", "sees one token ahead", inputs(pos=lambda x: x.pos + 1)),
    attention("writes_before_it_reads", "reads before it writes", inputs(slot=lambda x: x.slot * 0)),
    attention("reads_no_block_and_no_position_of_others", "reads the rest of the last block",
              inputs(pos=lambda x: x.pos // 4 * 4 + 3)),
    attention("shares_key_heads_among_groups_of_query_heads", "deals key heads out in turn",
              lambda q, k, **_: {"q": np.concatenate([q[:, i :: q.shape[1] // k.shape[1]]
                                                      for i in range(q.shape[1] // k.shape[1])], 1)}),
    attention("scales_the_scores_as_told", "ignores the scale", lambda **_: {"scale": None}),
    attention("sees_no_further_back_than_its_window", "ignores the window", lambda **_: {"window": None}),
    attention("caps_the_scores_softly", "ignores the cap", lambda **_: {"softcap": None}),
    attention("adds_a_bias_by_distance", "ignores the bias", lambda **_: {"bias": None}),
    attention("adds_the_bias_after_scale_and_cap_and_sees_no_further_for_it", "scales the bias",
              given("bias", lambda bias: bias * 2)),
    attention("gives_sinks_a_share_without_a_value", "ignores the sinks", lambda **_: {"sinks": None}),
    attention("leaves_sinks_out_of_scale_and_cap_and_bias", "scales the sinks",
              given("sinks", lambda sinks: sinks * 3)),
    broken("attend_refuses_a_bias_or_sinks_that_do_not_fit", "takes what it gets", attend=unchecked),
    attention("gives_padding_no_influence", "takes padded blocks for context", inputs(pos=everything)),
    attention("does_not_catch_nan_from_padding_tokens", "lets one token's NaN into all",
              lambda q, **_: {"q": q + 0 * q[0, 0, 0]}),
    broken("attend_remembers_what_earlier_steps_wrote", "returns the cache of before", attend=forgetful),
    broken("attend_gives_padding_no_influence", "writes padding into block 1",
           attend=padding_writes_to_block_one),
    broken("attend_stays_finite_for_large_scores", "overflows", attend=overflowing),
    broken("attend_takes_nothing_from_where_a_row_has_not_written", "multiplies NaN by a weight of zero",
           storable=keeps_nan),
    broken("attend_gives_nan_to_what_sees_it_and_to_nothing_else", "multiplies NaN by a weight of zero",
           storable=keeps_nan),
    Mutant("test_attend_does_not_catch_nan_from_padding_tokens", "multiplies NaN by a weight of zero", padded()),
]  # fmt: skip

# ---- invariant kernels -------------------------------------------------------------------------------------


def variant(promise: str, breaks: str, **operations: Any) -> Mutant:
    """A backend whose invariant kernels are not all invariant."""
    backend, kernels = NumpyBackend(native=False), NumpyBackend(native=False).invariant()
    for name, operation in operations.items():
        setattr(kernels, name, partial(operation, NumpyBackend(native=False).invariant()))
    backend.invariant = lambda: kernels  # type: ignore[method-assign]
    return Mutant(f"test_{promise}", breaks, {"backend": backend})


def capacity(b: Any, x: Any, chosen: Any, weights: Any, *rest: Any, gated: bool) -> Any:
    """As where each expert has room for so many tokens and no more."""
    return b.experts(x, chosen, np.where(np.arange(len(x))[:, None] < 6, weights, 0), *rest, gated=gated)


IN_EVERY_COMPANY = "a_row_the_same_bits_in_every_company"
KERNELS = [
    variant(f"route_gives_{IN_EVERY_COMPANY}", "divides a single row's weights in another way",
            route=lambda b, x, k, normalised: tuple(
                t * np.float32(1 + 2**-22 * (len(x) == 1)) if i == 0 else t
                for i, t in enumerate(b.route(x, k, normalised=normalised)))),
    variant("a_state_gets_the_same_bits_in_every_company_and_in_pieces", "loses digits of a state between two calls",
            selective_scan=lambda b, state, *rest: b.selective_scan(np.float32(np.float16(state)), *rest)),
    variant(f"linear_gives_{IN_EVERY_COMPANY}", "multiplies as the library likes",
            linear=lambda _, *args: NumpyBackend(native=False).linear(*args)),
    variant(f"norms_and_activations_give_{IN_EVERY_COMPANY}", "normalises over the batch",
            rms_norm=lambda b, x, w, eps: x / np.sqrt((x * x).mean() + eps) * w),
    variant(f"experts_give_{IN_EVERY_COMPANY}", "drops what is beyond an expert's capacity", experts=capacity),
    variant("attend_gives_a_token_the_same_bits_in_every_step", "attends as the library likes",
            attend=lambda _, *args, **special: NumpyBackend(native=False).attend(*args, **special)),
]  # fmt: skip

MUTANTS = [*OPERATIONS, *REFUSALS, *ARRAYS, *SMOKE, *ATTENTION, *KERNELS]
