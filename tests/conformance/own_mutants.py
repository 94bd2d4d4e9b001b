"""Deliberately broken engines for models with a cache of their own, and for what comes beside tokens."""

from typing import Any

import numpy as np

from .engine_mutants import blame_everybody, deliver_nan, forget_the_last, mutant, part, pool, runner, sampler

pasts, layout, step, encoded = map(part, ("runner._pasts", "runner.layout", "runner._step", "runner._encoded"))
beside, told, inputs = map(part, ("runner._beside", "runner._arguments", "runner.inputs._beside"))


# ---- rows of a past ----------------------------------------------------------------------------------------


def turned(past: Any, of: Any) -> Any:
    return of.with_arrays(past, [np.flip(a, leaf.batch) for leaf, a in zip(of.leaves, past.arrays, strict=True)])


def neighbours(gathered: Any, rows: Any, *how: Any) -> Any:
    return turned(gathered(rows, *how), gathered.__self__._layout)


def turn_who_joins(gathered: Any, rows: Any, *how: Any) -> Any:
    joins = len({id(gathered.__self__.of[row]) for row in rows}) > 1
    found = gathered(rows, *how)
    return turned(found, gathered.__self__._layout) if joins else found


def turn_who_stays(arranged: Any, groups: Any) -> Any:
    found, *others = arranged(groups)
    return [found, *(turned(past, arranged.__self__) for past in others)]


def round_them(arranged: Any, groups: Any) -> Any:
    made = arranged(groups)
    for group, past in zip(groups, made, strict=True):
        if not group.unchanged:
            for i, a in enumerate(past.arrays):
                with np.errstate(over="ignore"):
                    a[...] = a.astype(np.float16) if i == 0 else a
    return made


def write_zeros(arranged: Any, groups: Any) -> Any:
    """Into what was taken apart."""
    before = [a for group in groups for past, _ in group.picks for a in past.arrays]
    made = arranged(groups)
    for a in before:
        if a.flags.writeable and not any(np.shares_memory(a, b) for past in made for b in past.arrays):
            a[...] = 0
    return made


def spread(arranged: Any, groups: Any) -> Any:
    """Rows are chosen by weights of 0 and 1."""
    sums = [[0 * past.arrays[0].sum() for past, _ in group.picks] for group in groups]
    made = arranged(groups)
    for group, past, nothing in zip(groups, made, sums, strict=True):
        if not group.unchanged:
            past.arrays[0][...] += sum(nothing)
    return made


def keep_what_a_step_wrote_into(forget: Any, rows: Any, encoded: bool = False) -> None:
    if encoded:
        forget(rows, encoded)


def layers_only(called: Any, tokens: Any, lengths: Any, past: Any, *rest: Any, **how: Any) -> Any:
    return called(tokens, lengths, None if past is None else past.layers, *rest, **how)


PASTS = [
    pasts("mixed_lengths_stream_what_each_streams_alone_from_their_own_pasts", "gives rows their neighbours' pasts",
          gathered=neighbours),
    pasts("rows_of_a_past_join_part_and_come_back_in_their_order", "turns the rows round when one joins",
          gathered=turn_who_joins),
    layout("a_past_that_another_row_leaves_is_not_changed", "rounds what it puts together", arranged=round_them),
    layout("a_past_that_another_row_leaves_is_not_changed", "clears what it took apart", arranged=write_zeros),
    runner("who_loses_its_past_goes_on_as_if_nothing_had_happened", "forgets its last token", suspend=forget_the_last),
    layout("who_loses_its_past_goes_on_as_if_nothing_had_happened", "turns those round that wait meanwhile",
           arranged=turn_who_stays),
    pool("requests_that_begin_alike_begin_with_copies_of_one_past", "finds nothing",
         match=lambda match, salt, keys, most: match(salt, keys, 0)),
    layout("requests_that_begin_alike_begin_with_copies_of_one_past", "copies zeros",
           cut=lambda cut, *where: [a if a is None else 0 * a for a in cut(*where)]),
    step("a_past_comes_back_in_the_nesting_in_which_it_was_returned", "gives a part of it", called=layers_only),
    runner("a_step_that_raises_fails_the_guilty_request_alone_whatever_it_wrote_into_its_past",
           "goes on with what it wrote into", _forget=keep_what_a_step_wrote_into),
    runner("a_step_that_raises_fails_the_guilty_request_alone_whatever_it_wrote_into_its_past",
           "fails the whole batch", run=blame_everybody),
    layout("nan_in_the_past_of_one_row_stays_with_it", "multiplies NaN by a weight of zero", arranged=spread),
    runner("nan_in_the_past_of_one_row_stays_with_it", "draws from it", run=deliver_nan),
    layout("nan_in_a_past_that_no_output_shows_never_reaches_another", "multiplies NaN by a weight of zero",
           arranged=spread),
    layout("a_past_of_another_length_axis_or_dtype_fails_its_request_alone", "takes what comes",
           _check=lambda *given: None),
    runner("a_past_of_another_length_axis_or_dtype_fails_its_request_alone", "fails the whole batch",
           run=blame_everybody),
]  # fmt: skip


# ---- encoders ----------------------------------------------------------------------------------------------


def first_source(of: Any, *rows: Any) -> Any:
    tree = of(*rows)
    return {"values": tree["values"][:1].repeat(len(tree["values"]), 0), "all": tree["all"]}


def padded_behind(of: Any, *rows: Any) -> Any:
    tree = of(*rows)
    values, (real,) = tree["values"].copy(), (a.copy() for a in tree["all"])
    for i, n in enumerate(real.sum(axis=1).tolist()):
        values[i], real[i] = np.roll(values[i], n), np.roll(real[i], n)
    return {"values": values, "all": [real]}


def encode_each_time(of: Any, *rows: Any) -> Any:
    of.__self__.clear()
    return of(*rows)


ENCODERS = [
    encoded("each_row_has_what_its_own_source_was_encoded_to", "shows all the first row's", of=first_source),
    encoded("each_row_has_what_its_own_source_was_encoded_to", "pads behind", of=padded_behind),
    encoded("each_row_has_what_its_own_source_was_encoded_to", "encodes for each call", of=encode_each_time),
    encoded("who_loses_its_past_keeps_what_its_source_was_encoded_to", "leaves it to who gets the row",
            forget=lambda forget, rows: None),
    runner("a_source_that_cannot_be_encoded_fails_its_request_alone", "fails the whole batch", run=blame_everybody),
]  # fmt: skip


# ---- frames ------------------------------------------------------------------------------------------------


def one_seed(admit: Any, job: Any) -> None:
    admit(job)
    s = admit.__self__
    first = job.seq.row * s._n
    s._each._seed[first : first + s._n] = job.seed


def one_temperature(admit: Any, job: Any) -> None:
    admit(job)
    s = admit.__self__
    for i in range(s._n):
        row = job.seq.row * s._n + i
        s._each.set(row, job.sampling.of_codebook(0), int(s._each._seed[row]))


def count_new_tokens(draw: Any, logits: Any, jobs: Any, rows: Any, positions: Any) -> Any:
    return draw(logits, jobs, rows, positions - np.array([job.seq.prompt_len for job in jobs]))


def turn_logprobs(draw: Any, *args: Any) -> Any:
    drawn = draw(*args)
    drawn.logprobs = {i: found[::-1] for i, found in drawn.logprobs.items()}
    return drawn


def look_away(draw: Any, *args: Any) -> Any:
    drawn = draw(*args)
    drawn.bad = None
    return drawn


DRAWN_AT_EACH_LEVEL = "frames_are_drawn_by_seed_position_and_codebook_at_each_level"
CODEBOOKS = [
    sampler(DRAWN_AT_EACH_LEVEL, "draws all codebooks with one number", admit=one_seed),
    sampler(DRAWN_AT_EACH_LEVEL, "counts new tokens in place of positions", draw=count_new_tokens),
    sampler("each_codebook_may_have_parameters_of_its_own", "takes the first one's for all", admit=one_temperature),
    sampler("log_probabilities_belong_to_the_ids_of_their_codebook", "gives them in another order",
            draw=turn_logprobs),
    sampler("nan_in_one_codebook_fails_its_request_alone", "draws from it", draw=look_away),
    runner("nan_in_one_codebook_fails_its_request_alone", "fails the whole batch", run=blame_everybody),
]  # fmt: skip


# ---- random numbers and inputs -----------------------------------------------------------------------------


def rounded(drawn: Any, *of: Any) -> Any:
    return tuple(a.astype(np.float16).astype(np.float32) for a in drawn(*of))


def next_numbers(engine: Any) -> None:
    """At level 2 only."""
    if hasattr(engine.runner, "inputs"):
        owner = engine.runner.inputs._beside
        honest = owner.drawn
        owner.drawn = lambda rows, positions: honest(rows, positions + 1)


def change(name: str, of: Any) -> Any:
    """Of what a method is given, one array goes through `of(array)`."""

    def arguments(honest: Any, *rows: Any) -> Any:
        found = honest(*rows)
        return found | {name: of(found[name])} if name in found else found

    return arguments


def as_floats(integers: Any) -> Any:
    return integers.astype(np.float32).astype(np.int64).clip(-(2**31), 2**31 - 1).astype(np.int32)


ARRIVE = "arrive_bit_equal"
BESIDE = [
    beside(f"random_numbers_{ARRIVE}_at_each_level", "rounds them to 16 bits", drawn=rounded),
    mutant(f"random_numbers_{ARRIVE}_at_each_level", "gives a step the numbers of the next token", next_numbers),
    told(f"inputs_of_a_request_{ARRIVE}_with_its_row", "loses the sign of zero",
         of=change("voice", lambda a: a + np.float32(0))),
    told(f"inputs_of_a_request_{ARRIVE}_with_its_row", "makes floats of integers",
         of=change("count", as_floats)),
    told(f"inputs_of_a_request_{ARRIVE}_with_its_row", "gives them to the neighbour",
         of=change("voice", lambda a: a[::-1])),
    told(f"inputs_per_position_{ARRIVE}_with_zeros_where_rows_are_shorter", "pads with ones",
         of=change("hours", lambda a: np.where(a == 0, np.float32(1), a))),
    inputs("the_inputs_of_a_step_are_those_of_its_rows_and_positions", "gives those of the next position",
           inputs=lambda honest, rows, each, positions: honest(rows, each, positions + 1)),
    inputs("the_inputs_of_a_step_are_those_of_its_rows_and_positions", "gives those of the first row",
           inputs=lambda honest, rows, each, positions: honest(rows * 0, each, positions)),
]  # fmt: skip

OWN = [*PASTS, *ENCODERS, *CODEBOOKS, *BESIDE]
