"""Engines that break what they promise to models with a cache of their own, and of what comes beside tokens."""

from dataclasses import replace
from typing import Any

import numpy as np

from .engine_mutants import GOOD, Shifted, called, for_good, got, made, neighbour, returned, sampled, without_nan
from .mutants import Mutant


def leaves(past: Any) -> list[Any]:
    """The arrays of a past, in any nesting."""
    if isinstance(past, np.ndarray):
        return [past]
    parts = past.values() if isinstance(past, dict) else past if isinstance(past, (list, tuple)) else ()
    return [a for part in parts for a in leaves(part)]


def changed(past: Any, change: Any) -> Any:
    """The same nesting of other arrays."""
    if isinstance(past, dict):
        return {name: changed(part, change) for name, part in past.items()}
    if isinstance(past, (list, tuple)):
        return type(past)(changed(part, change) for part in past)
    with np.errstate(over="ignore", invalid="ignore"):
        return change(past) if isinstance(past, np.ndarray) else past


def given(promise: str, breaks: str, change: Any) -> Mutant:
    """Arrays of a past go through a function before a model is given it."""

    def step(method: Any, tokens: Any, lengths: Any, past: Any, *rest: Any) -> Any:
        return method(tokens, lengths, changed(past, change), *rest)

    return called(promise, breaks, step, ("step",))


def layers_only(method: Any, tokens: Any, lengths: Any, past: Any) -> Any:
    return method(tokens, lengths, None if past is None else past.layers)


def its_own_fault(method: Any, *args: Any) -> Any:
    logits, new = method(*args)
    if any(a.dtype != np.float32 for a in leaves(new)) or not leaves(new):
        raise RuntimeError("no past")
    return logits, new


def spread(a: Any) -> Any:
    return a + 0 * a.sum()


PASTS = [
    given("mixed_lengths_stream_what_each_streams_alone_from_their_own_pasts", "gives rows their neighbours' pasts",
          neighbour),
    given("rows_of_a_past_join_part_and_come_back_in_their_order", "turns the rows round", neighbour),
    given("a_past_that_another_row_leaves_is_not_changed", "rounds it", lambda a: a.astype(np.float16).astype(a.dtype)),
    given("who_loses_its_past_goes_on_as_if_nothing_had_happened", "goes on with nothing", lambda a: 0 * a),
    made("requests_that_begin_alike_begin_with_copies_of_one_past", "finds nothing",
         enable_prefix_caching=lambda on: False),
    called("a_past_comes_back_in_the_nesting_in_which_it_was_returned", "gives a part of it", layers_only, ("step",)),
    called("a_step_that_raises_fails_the_guilty_request_alone_whatever_it_wrote_into_its_past", GOOD, for_good),
    returned("nan_in_the_past_of_one_row_stays_with_it", "draws from it", without_nan),
    given("nan_in_a_past_that_no_output_shows_never_reaches_another", "multiplies NaN by a weight of zero", spread),
    called("a_past_of_another_length_axis_or_dtype_fails_its_request_alone", "calls it the model's fault",
           its_own_fault, ("step",)),
]  # fmt: skip


def by_nobody(encode: Any, source: Any) -> Any:
    try:
        return encode(source)
    except RuntimeError:
        return encode(abs(source))


def encoded(promise: str, breaks: str, change: Any) -> Mutant:
    return called(promise, breaks, change, ("encode",))


ENCODERS = [
    encoded("each_row_has_what_its_own_source_was_encoded_to", "encodes another one",
            lambda encode, source: encode(source + 1)),
    made("who_loses_its_past_keeps_what_its_source_was_encoded_to", "has memory for all",
         cache_tokens=lambda n: 20 * n),
    encoded("a_source_that_cannot_be_encoded_fails_its_request_alone", "encodes another one", by_nobody),
]  # fmt: skip


def rounded(method: Any, *args: Any) -> Any:
    """Random numbers, and what a step is told of them, have 16 bits."""
    if hasattr(args[-1], "uniform"):
        return method(*args[:-1], replace(args[-1], uniform=args[-1].uniform.astype("float16").astype("float32")))
    *others, uniform, normal = args
    return method(*others, uniform.astype("float16").astype("float32"), normal)


def told(promise: str, breaks: str, change: Any) -> Mutant:
    """change(voice, count, hours) of what calls are given beside tokens and lengths."""

    def call(method: Any, *args: Any) -> Any:
        *others, voice, count, hours = args
        return method(*others, *change(voice, count, hours))

    return called(promise, breaks, call)


def other_rows(method: Any, params: Any, cache: Any, x: Any) -> Any:
    return method(params, cache, replace(x, inputs={name: a[::-1] for name, a in x.inputs.items()}))


ARRIVE = "arrive_bit_equal"
BESIDE = [
    returned("frames_are_drawn_by_seed_position_and_codebook_at_each_level", "turns codebooks round",
             lambda out: [a[::-1] for a in out] if isinstance(out, (list, tuple)) else out[:, ::-1]),
    called("frames_drawn_in_depth_see_the_ids_before_them_at_each_level", "shows those of others",
           lambda method, k, given, codes, past: method(k, given, codes[::-1], past), ("depth",)),
    sampled("each_codebook_may_have_parameters_of_its_own", "takes one for all", lambda p: p.with_(codebooks=None)),
    got("log_probabilities_belong_to_the_ids_of_their_codebook", "gives them to the frame before", Shifted),
    returned("nan_in_one_codebook_fails_its_request_alone", "draws from it", without_nan),
    called(f"random_numbers_{ARRIVE}_at_each_level", "rounds them to 16 bits", rounded),
    told(f"inputs_of_a_request_{ARRIVE}_with_its_row", "loses the sign of zero",
         lambda voice, count, hours: (voice + np.float32(0), count, hours)),
    told(f"inputs_per_position_{ARRIVE}_with_zeros_where_rows_are_shorter", "pads with ones",
         lambda voice, count, hours: (voice, count, np.where(hours == 0, np.float32(1), hours))),
    called("the_inputs_of_a_step_are_those_of_its_rows_and_positions", "gives those of others", other_rows, ("step",)),
]  # fmt: skip

OWN = [*PASTS, *ENCODERS, *BESIDE]
