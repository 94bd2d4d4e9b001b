"""Engines that break their promises, each with the promise that it breaks, seen from without.

A mutant is an honest engine between a model, a request and a stream of which one is changed on its way: what the engine
is made with, how it calls the model, what a request asks for, or what a client gets. Nothing within it is touched.
"""

import functools
import inspect
import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import array_api_strict
import numpy as np

from conformance.serving import Serving
from hibachi import (
    ArrayBackend,
    AutoregressiveBatchInference,
    ConfigError,
    FeedforwardBatchInference,
    Finish,
    HibachiError,
    InvalidRequest,
    Item,
    ItemStream,
    NumpyBackend,
    PromptTooLong,
    SamplingParams,
    State,
    StopRule,
    Terms,
)

from .mutants import Mutant

SOON = 1.5  # seconds until a stream that never ends counts as a broken promise
CALLS = ("forward", "logits", "step")


def face(promise: str, breaks: str, backend: Any = None, **methods: Any) -> Mutant:
    """Methods of the classes that users see get other ones in their place, whose first argument is the honest one."""

    def broken(honest: Any) -> Any:
        def method(name: str, replacement: Any) -> Any:
            found = getattr(honest, name)
            return lambda self, *a, **k: replacement(MethodType(found, self), *a, **k)

        own = {name: method(name, r) for name, r in methods.items() if hasattr(honest, name)}
        return type(honest.__name__, (honest,), own)

    faces = map(broken, (AutoregressiveBatchInference, FeedforwardBatchInference))
    both = dict(zip(("autoregressive", "feedforward"), faces, strict=True))
    return Mutant(f"test_{promise}", breaks, {"serve": Serving(backend or NumpyBackend(), patience=SOON, **both)})


# ---- what is changed on its way --------------------------------------------------------------------------------------


def made(promise: str, breaks: str, **options: Callable[[Any], Any]) -> Mutant:
    """Options of the engine go through functions; an option that was not given is None to them."""

    def init(honest: Any, *args: Any, **given: Any) -> None:
        honest(*args, **given | {name: change(given.get(name)) for name, change in options.items()})

    return face(promise, breaks, __init__=init)


def called(promise: str, breaks: str, change: Any, names: tuple[str, ...] = CALLS) -> Mutant:
    """change(method, *arguments): what the engine gets of a call of the model."""

    def init(honest: Any, model: Any, *args: Any, **options: Any) -> None:
        for name in names:
            method = getattr(model, name, None)
            if method is not None and not hasattr(method, "changed"):
                wrapped = functools.wraps(method)(partial(lambda m, *a, **k: change(m, *a, **k), method))
                wrapped.changed = True  # type: ignore[attr-defined]
                setattr(model, name, wrapped)
        honest(model, *args, **options)

    return face(promise, breaks, __init__=init)


def returned(promise: str, breaks: str, change: Callable[[Any], Any]) -> Mutant:
    """What the model computes, its cache aside, goes through a function."""

    def call(method: Any, *args: Any) -> Any:
        out = method(*args)
        if hasattr(out, "send"):
            return out
        return (change(out[0]), out[1]) if method.__name__ == "step" else change(out)

    return called(promise, breaks, call)


def shown(promise: str, breaks: str, change: Callable[[Any], Any]) -> Mutant:
    """The tokens that a model without a cache is given go through a function."""
    return called(promise, breaks, lambda method, tokens, *args: method(change(tokens), *args), ("forward", "logits"))


def stepped(promise: str, breaks: str, **fields: Any) -> Mutant:
    """Fields of the inputs of a step go through functions."""

    def step(method: Any, params: Any, cache: Any, x: Any) -> Any:
        return method(params, cache, replace(x, **{name: change(getattr(x, name)) for name, change in fields.items()}))

    return called(promise, breaks, step, ("step",))


def asked(promise: str, breaks: str, prompt: Any = lambda p: p, **options: Callable[[Any], Any]) -> Mutant:
    """The prompt, and what a request brings beside it, goes through functions; what is not given is None to them."""

    def run(honest: Any, *args: Any, **more: Any) -> Any:
        if args:
            args = (prompt(args[0]), *args[1:])
        return honest(*args, **more | {name: change(more.get(name)) for name, change in options.items()})

    return face(promise, breaks, run=run)


def sampled(promise: str, breaks: str, change: Callable[[SamplingParams], SamplingParams]) -> Mutant:
    """Parameters go through a function."""

    def run(honest: Any, prompt: Any, *args: Any, **options: Any) -> Any:
        if args:
            args = (change(args[0]), *args[1:])
        elif "params" in options:
            options["params"] = change(options["params"])
        return honest(prompt, *args, **options)

    return face(promise, breaks, run=run)


def ruled(promise: str, breaks: str, change: Any) -> Mutant:
    """change(predicate, tokens) takes the place of stop predicates, of requests or of rules."""

    def other(rule: Any) -> Any:
        if isinstance(rule, StopRule):
            return rule if rule.where is None else replace(rule, where=partial(change, rule.where))
        return partial(change, rule) if callable(rule) else rule

    return asked(promise, breaks, stop_rule=other)


def got(promise: str, breaks: str, kind: Any) -> Mutant:
    """Streams, or single results, are of another class."""

    def run(honest: Any, *args: Any, **options: Any) -> Any:
        result = honest(*args, **options)
        result.__class__ = kind
        return result

    return face(promise, breaks, run=run)


# ---- how -------------------------------------------------------------------------------------------------------------


def neighbour(out: Any) -> Any:
    return out[::-1]


def one_before() -> Any:
    """What comes is kept for the next one, which gets it."""
    found: list[Any] = []

    def change(new: Any) -> Any:
        found.append(new)
        return found[-2:][0]

    return change


def without_nan(out: Any) -> Any:
    return np.nan_to_num(out, nan=0, posinf=9, neginf=-9)


def for_good(method: Any, *args: Any, failed: Any = {}) -> Any:  # noqa: B006
    """A model that raised once raises whenever it is called."""
    try:
        out = method(*args)
    except BaseException:
        failed[id(method)] = method
        raise
    if id(method) in failed:
        raise RuntimeError("as I said")
    return out


def kept_secret(method: Any, *args: Any) -> Any:
    try:
        return method(*args)
    except Exception:
        raise RuntimeError("it failed") from None


def lengths_of_all(method: Any, tokens: Any, lengths: Any) -> Any:
    return method(tokens, lengths * 0 + tokens.shape[1])


def one(rows: Any) -> int:
    return 1


def widest() -> Any:
    most = [0]

    def widen(tokens: Any) -> Any:
        most[0] = max(most[0], tokens.shape[1])
        return np.pad(tokens, ((0, 0), (most[0] - tokens.shape[1], 0)))

    return widen


def falling() -> Any:
    """Each request has more priority than the one before."""
    numbers = itertools.count()
    return lambda terms: Terms(priority=-next(numbers))


def sharing() -> NumpyBackend:
    """Copies nothing that goes to the model or comes from it."""
    backend = NumpyBackend()
    backend.copy = lambda t: t  # type: ignore[method-assign]
    backend.put_all = list  # type: ignore[assignment,method-assign]
    return backend


def storing_nan() -> NumpyBackend:
    backend = NumpyBackend(native=False)
    backend.storable = lambda k, v, dtype: (k, v)  # type: ignore[method-assign]
    return backend


class Late(ItemStream):
    """Nobody hears that it was closed."""

    def close(self) -> None:
        pass


class Lossy(ItemStream):
    async def __aiter__(self) -> Any:
        await anext(self)
        while (item := await anext(self, None)) is not None:
            yield item


class Batched(ItemStream):
    def __iter__(self) -> Any:
        return (item[None] if hasattr(item, "shape") else item for item in super().__iter__())


class Withheld(ItemStream):
    def __iter__(self) -> Any:
        yield from [*super().__iter__()]


class Silent(ItemStream):
    error = None

    def __iter__(self) -> Any:
        with suppress(HibachiError):
            yield from super().__iter__()


class AtItsLimit(ItemStream):
    finish_reason = Finish.LENGTH


class Cancelled(ItemStream):
    finish_reason = Finish.CANCELLED


class Shifted(ItemStream):
    """Log-probabilities stand one token further on."""

    @property
    def logprobs(self) -> Any:
        found = super().logprobs
        return [*found[1:], *found[:1]]

    @property
    def prompt_logprobs(self) -> Any:
        found = super().prompt_logprobs
        return None if found is None else [found[0], *found[2:], *found[1:2]]


class Nothing(Item):
    async def _wait(self) -> None:
        return None


class Stubborn(Item):
    def cancel(self) -> None:
        pass


def kept(honest: Any, *args: Any, streams: Any = [], **options: Any) -> Any:  # noqa: B006
    streams.append(honest(*args, **options))
    return streams[-1]


def lenient(name: str, change: Any) -> Any:
    """A method that takes a keyword argument which it should refuse."""

    def method(honest: Any, *args: Any, **options: Any) -> Any:
        return honest(*args, **options | {n: change(options[n]) for n in {name} & options.keys()})

    return method


def nan_for_nonsense(run: Any, item: Any) -> Any:
    try:
        return run(item)
    except InvalidRequest:
        return run(np.nan)


def hope(run: Any, prompt: Any, **options: Any) -> Any:
    try:
        return run(prompt, **options)
    except PromptTooLong:
        return run(prompt[:1], **options | {"max_tokens": 1})


def arrays_only(prompt: Any) -> Any:
    if isinstance(prompt, list):
        raise InvalidRequest("no lists")
    return prompt


def take_anything(init: Any, *args: Any, **options: Any) -> None:
    with suppress(ConfigError):
        init(*args, **options)


def level_0(init: Any, model: Any, **options: Any) -> None:
    class Lowest:
        forward, backend = staticmethod(model.forward), model.backend

    init(Lowest(), **options)


def computes_first(init: Any, model: Any, **options: Any) -> None:
    init(model, **options)
    model.forward(np.ones((1, 1), int))


def unasked(init: Any, model: Any, *args: Any, **options: Any) -> None:
    if "lengths" not in inspect.signature(model.forward).parameters:
        honest = model.forward
        model.forward = lambda tokens, lengths: honest(tokens, lengths)
    init(model, *args, **options)


def states_of_one(method: Any, params: Any, cache: Any, x: Any) -> Any:
    """New rows find states that are not zeros."""
    spec = method.__self__.cache_spec()
    return method(params, [c + 1 if isinstance(s, State) else c for s, c in zip(spec, cache, strict=True)], x)


def any_cache(method: Any, params: Any, cache: Any, x: Any) -> Any:
    out, new = method(params, list(cache), x)
    return out, new or cache


def larger(honest: Any, *args: Any, max_batch_size: int, **options: Any) -> None:
    honest(*args, max_batch_size=2 * max_batch_size, **options)


# ---- models without a cache ------------------------------------------------------------------------------------------

BATCHING = [
    returned("mixed_lengths_in_any_order_stream_what_each_streams_alone", "turns rows round", neighbour),
    made("a_longer_request_joins_a_running_batch", "does not pad", padding_token=lambda token: None),
    returned("a_request_longer_by_exactly_one_joins_a_batch_of_one", "turns two rows round", neighbour),
    made("a_shorter_request_joins_a_running_batch", "lets it wait", max_num_seqs=one),
    made("without_a_padding_token_nothing_is_padded", "pads with zeros then", padding_token=lambda token: token or 0),
    made("a_padding_token_pads_on_the_left_and_lengths_count_the_rest", "pads with another one",
         padding_token=lambda token: token - 1),
    called("what_stands_in_the_padding_changes_nothing", "passes the length of the longest for all", lengths_of_all),
    shown("a_model_that_looks_at_the_last_token_needs_no_lengths", "pads on the right", lambda tokens: tokens[:, ::-1]),
    face("an_idle_engine_computes_nothing", "computes while nobody asks", __init__=computes_first),
    made("requests_in_the_queue_share_their_first_forward_pass", "admits one request a step", max_num_seqs=one),
    made("rows_of_equal_length_share_a_pass_where_nothing_is_padded", "gives each row a pass", max_num_seqs=one),
    made("a_free_row_is_taken_at_the_next_step", "leaves one empty", max_num_seqs=one),
    asked("requests_start_in_the_order_in_which_they_came", "serves the last one first", terms=falling()),
    shown("the_batch_is_as_wide_as_its_longest_row", "never trims", widest()),
    face("the_engine_counts_what_waits_and_runs", "counts no prompt tokens",
         stats=lambda stats: replace(stats(), prompt_tokens=0)),
    got("a_cancelled_request_gives_its_row_to_the_next", "leaves the row to the cancelled", Late),
    got("a_request_cancelled_in_the_queue_never_runs", "forgets to look into the queue", Late),
    shown("tokens_may_be_frames_of_several_codes", "shows the first code for all",
          lambda tokens: tokens[..., :1].repeat(tokens.shape[-1], -1)),
    shown("tokens_may_have_any_rank", "flattens tokens", lambda tokens: tokens.reshape(*tokens.shape[:2], -1)),
    shown("tokens_may_be_continuous", "rounds what it remembers", np.round),
    shown("tokens_keep_their_dtype", "shows integers of another width",
          lambda tokens: tokens.astype("int64") if tokens.dtype == "int32" else tokens),
    got("items_are_native_arrays_of_the_shape_of_a_token", "keeps the batch dimension", Batched),
    asked("prompts_may_be_lists_host_arrays_or_native_arrays", "takes arrays only", arrays_only),
    face("a_model_may_use_the_memory_of_its_output_again", "keeps the model's array", sharing()),
    called("a_model_may_write_into_what_it_is_given", "takes what it wrote for tokens",
           lambda method, tokens, lengths: method(tokens, lengths) + 0 * tokens.sum(1, keepdims=True)
           if (tokens > 1).all() else method(tokens, lengths)[:, ::-1]),
    asked("what_happens_to_a_prompt_later_changes_nothing", "looks at it later",
          lambda p: p if isinstance(p, list) else np.full_like(p, 5)),
    asked("the_stop_token_is_the_last_item_unless_it_is_not_wanted", "swallows it", include_stop=lambda wanted: False),
    made("rows_that_stop_together_leave_together", "lets none leave", stop_token=lambda token: None),
    asked("a_request_may_bring_its_own_stop_rule", "ignores it", stop_rule=lambda rule: None),
    made("a_stop_token_of_several_codes_must_match_in_all_of_them", "is content with one code",
         stop_token=lambda token: StopRule(where=lambda tokens: (tokens == np.ravel(token)).any(1))),
    asked("a_stop_token_of_floats_may_be_off_by_atol", "ignores atol",
          stop_rule=lambda rule: replace(rule, atol=0) if isinstance(rule, StopRule) else rule),
    ruled("a_stop_predicate_sees_the_new_tokens_of_all_its_rows_at_once", "asks row by row",
          lambda where, tokens: np.concatenate([where(tokens[i : i + 1]) for i in range(len(tokens))])),
    asked("max_new_tokens_is_the_number_of_tokens", "gives one more", max_tokens=lambda n: n + 1),
    made("a_request_ends_where_the_context_ends", "ends one token before", max_model_len=lambda n: n - 1),
    got("a_stop_token_at_the_limit_counts_as_a_stop", "counts it as the limit", AtItsLimit),
    called("a_model_may_be_async", "does not await it", lambda method, *args: method(*args).close()),
    got("streams_can_be_read_in_a_running_event_loop", "loses the first item", Lossy),
    sampled("parameters_say_when_to_end", "ignores their stop tokens", lambda p: p.with_(stop_token_ids=())),
]  # fmt: skip

FEEDFORWARD = [
    returned("single_inputs_are_batched_and_each_gets_its_row", "gives it the neighbour's row", neighbour),
    face("single_inputs_beyond_the_batch_size_wait_for_the_next_batch", "computes twice as many", __init__=larger),
    asked("single_inputs_of_different_shapes_are_never_mixed", "cuts them to the shortest", lambda x: np.ravel(x)[:1]),
    asked("single_inputs_of_different_dtypes_are_never_mixed", "makes floats of all", lambda x: x.astype("float32")),
    got("the_result_of_a_single_input_can_be_awaited", "gives nothing then", Nothing),
]  # fmt: skip

# ---- faults ----------------------------------------------------------------------------------------------------------

GOOD = "fails all who come after"
FAULTS = [
    called("a_model_that_raises_fails_the_guilty_request_alone", GOOD, for_good),
    called("the_error_of_a_request_names_what_the_model_raised", "keeps it secret", kept_secret),
    got("tokens_before_an_error_are_delivered", "delivers nothing then", Withheld),
    called("a_model_that_fails_once_harms_nobody", GOOD, for_good),
    called("if_everybody_is_guilty_all_fail_and_the_next_are_served", GOOD, for_good),
    returned("a_token_that_is_not_finite_fails_its_request_alone", "delivers it", without_nan),
    returned("logits_that_are_not_finite_fail_their_request_alone", "draws from them", without_nan),
    returned("an_output_of_the_wrong_shape_fails_its_step_only", "makes it fit",
             lambda out: np.resize(out, (len(out),)) if isinstance(out, np.ndarray) else out),
    returned("an_output_of_the_wrong_dtype_fails_its_step_only", "casts it", lambda out: out.astype("int64")),
    returned("an_output_that_is_no_array_fails_its_step_only", "unpacks tuples",
             lambda out: out[0] if isinstance(out, tuple) else out),
    called("what_is_no_exception_fails_its_request_alone", GOOD, for_good),
    got("an_engine_that_fails_tells_every_stream", "ends them in silence", Silent),
    got("a_stop_predicate_that_raises_fails_its_own_requests_alone", "ends them in silence", Silent),
    got("a_stop_predicate_of_the_wrong_shape_fails_its_own_request_alone", "ends it in silence", Silent),
    face("whoever_drops_a_stream_gives_its_row_away_and_disturbs_nobody", "holds on to the stream", run=kept),
    asked("a_bad_prompt_is_refused_at_the_call_and_touches_nobody", "takes a number for a prompt",
          lambda prompt: [prompt] if isinstance(prompt, int) else prompt),
    face("bad_options_are_refused_at_the_call", "takes 0 for no limit", run=lenient("max_tokens", lambda n: n or None)),
    face("bad_settings_are_refused_where_the_engine_is_made", "takes 0 rows for 1",
         __init__=lenient("max_num_seqs", lambda n: n or 1)),
    face("a_stop_or_padding_token_of_another_shape_than_the_tokens_is_refused", "takes its first element",
         __init__=lenient("stop_token", lambda token: np.ravel(token)[0])),
    got("closing_finishes_the_running_step_and_ends_every_stream_once", "calls it cancelled", Cancelled),
    got("closing_from_outside_ends_a_request_that_would_run_on", "calls it finished", AtItsLimit),
    face("an_engine_that_never_ran_can_be_closed", "opens again", close=lambda close: None),
    face("draining_finishes_what_came_and_takes_nothing_new", "does not wait",
         drain=lambda drain, timeout=None: drain(0) or True),
    called("a_single_input_that_makes_the_model_raise_fails_alone", GOOD, for_good),
    returned("a_single_output_that_is_not_finite_fails_alone", "delivers it", without_nan),
    called("single_outputs_of_the_wrong_type_or_number_fail_their_step_only", "makes them fit",
           lambda method, x: np.resize(np.asarray(method(x)), x.shape)),
    face("a_single_input_that_is_no_numbers_is_refused_at_the_call", "takes NaN instead", run=nan_for_nonsense),
    got("a_single_input_may_be_cancelled_and_closing_ends_the_others", "does not cancel", Stubborn),
]  # fmt: skip

# ---- caches ----------------------------------------------------------------------------------------------------------

CACHES = [
    stepped("mixed_lengths_stream_what_each_streams_alone_from_the_cache", "gives rows the others' blocks",
            block_table=neighbour),
    stepped("long_prompts_are_computed_in_chunks_beside_the_others", "shows the blocks of the others",
            block_table=neighbour),
    called("a_model_may_have_paged_and_recurrent_layers", "leaves the states as they were", states_of_one, ("step",)),
    made("a_step_computes_no_more_tokens_than_it_may", "computes whole prompts",
         max_num_batched_tokens=lambda n: 10**6),
    stepped("blocks_may_have_any_size", "reads blocks from the back", block_table=lambda table: table[:, ::-1]),
    stepped("longer_and_shorter_requests_join_a_running_batch_with_a_cache", "shows joiners the first row's blocks",
            block_table=lambda table: table[:1].repeat(len(table), 0)),
    returned("rows_and_blocks_are_used_again_and_again", "gives rows the neighbour's token", neighbour),
    called("a_row_is_given_with_a_fresh_state", "leaves the state as it was", states_of_one, ("step",)),
    returned("a_model_with_a_cache_may_return_tokens_itself", "delivers the neighbour's frame", neighbour),
    asked("requests_with_a_cache_end_at_a_stop_token_a_limit_or_the_context", "swallows the stop token",
          include_stop=lambda wanted: False),
    asked("a_cache_that_is_too_small_for_all_makes_them_wait_their_turn", "lets the last overtake", terms=falling()),
    made("who_loses_its_memory_goes_on_as_if_nothing_had_happened", "has memory for all",
         kv_cache_memory_bytes=lambda n: None),
    made("what_requests_have_in_common_is_computed_once", "finds nothing", enable_prefix_caching=lambda on: False),
    asked("requests_of_different_salts_share_nothing", "forgets the salt", terms=lambda terms: None),
    face("a_request_that_can_never_fit_is_refused_at_the_call", "hopes for the best", run=hope),
    face("a_cancelled_request_gives_its_blocks_to_the_next", "loses the blocks",
         stats=lambda stats: replace(stats(), free_blocks=0)),
    got("a_request_may_be_cancelled_within_its_prompt", "computes on for nobody", Late),
    face("nan_in_a_cache_fails_its_request_alone_and_never_reaches_the_next", "keeps NaN in values", storing_nan()),
    face("a_step_may_write_into_its_inputs", "gives away its own arrays", sharing()),
    called("a_step_that_returns_no_cache_fails_and_the_next_are_served", "takes what comes", any_cache, ("step",)),
    face("nan_that_a_cancelled_request_left_never_reaches_the_next", "keeps NaN in values", storing_nan()),
    face("nan_that_no_output_shows_never_reaches_the_next", "keeps NaN in values", storing_nan()),
    called("a_step_that_raises_fails_the_guilty_request_alone", GOOD, for_good),
    called("if_a_step_raises_for_everybody_all_fail_and_the_next_are_served", GOOD, for_good),
    got("a_stop_predicate_that_raises_fails_alone_with_a_cache_too", "ends it in silence", Silent),
    returned("a_step_with_an_output_of_the_wrong_shape_or_dtype_fails_its_requests", "adds what is missing",
             lambda out: np.pad(out, ((0, 0), (0, 10 - out.shape[1])))),
]  # fmt: skip

# ---- sampling --------------------------------------------------------------------------------------------------------


def seed_by_arrival() -> Any:
    numbers = itertools.count()
    return lambda p: p.with_(seed=p.seed + next(numbers) if p.seed is not None else None)


SAMPLING = [
    sampled("temperature_zero_takes_the_most_likely_token", "draws at temperature 1",
            lambda p: p.with_(temperature=p.temperature or 1.0)),
    sampled("a_seed_gives_the_same_tokens_on_every_backend", "takes the next seed", lambda p: p.with_(seed=p.seed + 1)),
    sampled("a_seed_gives_the_same_tokens_alone_and_in_a_batch", "adds the row to the seed", seed_by_arrival()),
    sampled("without_a_seed_every_request_draws_afresh", "always takes the seed 1", lambda p: p.with_(seed=1)),
    sampled("every_row_has_its_own_parameters", "takes those of the one before", one_before()),
    sampled("the_temperature_makes_likely_tokens_more_or_less_likely", "takes all temperatures for 1",
            lambda p: p.with_(temperature=1.0)),
    sampled("top_k_and_top_p_leave_the_most_likely_tokens", "ignores top_k", lambda p: p.with_(top_k=0)),
    sampled("min_p_and_typical_p_leave_tokens_by_their_probability", "ignores min_p", lambda p: p.with_(min_p=0.0)),
    sampled("penalties_make_what_was_there_less_likely", "takes presence for frequency",
            lambda p: p.with_(frequency_penalty=p.presence_penalty + p.frequency_penalty, presence_penalty=0.0)),
    sampled("tokens_may_be_forbidden_or_favoured", "ignores biases", lambda p: p.with_(logit_bias={})),
    sampled("a_logits_processor_changes_the_logits_of_its_request", "does not ask it",
            lambda p: p.with_(logits_processors=())),
    sampled("a_request_that_allows_no_token_fails_alone", "draws anything", lambda p: p.with_(
        allowed_token_ids=None, logits_processors=())),
    got("the_tokens_of_a_prompt_have_log_probabilities", "gives them to the token before", Shifted),
    returned("a_token_with_minus_infinity_never_comes", "makes it finite", lambda logits: np.maximum(logits, -1)),
    returned("logprobs_are_the_logarithms_of_the_softmax_of_the_raw_logits", "divides by two",
             lambda logits: logits / 2),
    got("logprobs_belong_to_the_tokens_of_their_own_stream", "gives them to the token before", Shifted),
]  # fmt: skip

# ---- models ----------------------------------------------------------------------------------------------------------


def strict(init: Any, *args: Any, backend: Any = None, **options: Any) -> None:
    init(*args, backend=ArrayBackend(array_api_strict), **options)


def decoding(breaks: str, **operations: Any) -> Mutant:
    backend = NumpyBackend()
    for name, operation in operations.items():
        setattr(backend, name, partial(operation, NumpyBackend()))
    return face("a_decoder_gives_the_logits_of_slow_numpy", breaks, backend)


MODELS = [
    face("the_highest_rung_that_a_model_has_is_used", "uses the lowest", __init__=level_0),
    returned("each_rung_answers_alike", "turns ids round", lambda out: out[..., ::-1] if out.ndim > 1 else out),
    face("lengths_are_passed_only_to_a_model_that_asks_for_them", "always passes them", __init__=unasked),
    face("what_is_no_model_is_refused", "takes anything", __init__=take_anything),
    made("a_model_may_say_how_long_its_context_is", "does not ask it", max_model_len=lambda n: n or 10),
    face("the_backend_is_found_from_the_arrays", "takes another library's", __init__=strict),
    face("a_feed_forward_model_finds_its_backend_alike", "takes another library's", __init__=strict),
    decoding("does not rotate", rope=lambda b, x, cos, sin: x),
    decoding("forgets the weights of the norms", rms_norm=lambda b, x, w, eps: b.rms_norm(x, w * 0 + 1, eps)),
]  # fmt: skip

# ---- the nine operations ---------------------------------------------------------------------------------------------


def nine(promise: str, breaks: str, **operations: Any) -> Mutant:
    """Operations of the object that an engine has in place of a backend; they get the honest one first."""

    def init(honest: Any, *args: Any, backend: Any, **options: Any) -> None:
        for name, operation in operations.items():
            setattr(backend, name, partial(operation, getattr(backend, name)))
        honest(*args, backend=backend, **options)

    return face(promise, breaks, __init__=init)


NINES = [
    made("rows_of_equal_length_go_together_and_nothing_is_padded", "shows them one by one", max_num_seqs=one),
    made("shorter_rows_are_padded_in_front_and_trimmed_when_the_longest_leaves", "does not pad",
         padding_token=lambda token: None),
    made("the_engine_asks_for_each_of_the_nine_and_for_nothing_else", "never pads", padding_token=lambda token: None),
    asked("a_stop_token_may_be_left_out_and_requests_bring_rules_of_their_own", "ignores them",
          stop_rule=lambda rule: None),
    asked("tokens_of_several_kinds_share_an_engine_and_no_call", "makes all of them integers",
          lambda prompt: prompt.astype("int32")),
    returned("nan_ends_its_own_row", "takes it for a number", without_nan),
    called("a_model_that_raises_ends_the_guilty_request_alone", GOOD, for_good),
    nine("a_model_may_write_into_what_it_is_shown_and_use_its_output_again", "copies nothing",
         repeat=lambda repeat, t, dim, times: t if times == 1 else repeat(t, dim, times)),
    nine("who_leaves_disturbs_nobody_and_a_row_is_used_again", "takes out the row beside",
         pop=lambda pop, t, dim, i: pop(t, dim, (i + 1) % len(t))),
    returned("inputs_of_a_feedforward_model_are_joined_by_shape", "adds one", lambda out: out + 1),
    asked("what_is_no_array_of_the_backend_is_refused_at_the_call", "takes lists",
          lambda prompt: np.array(prompt, "int32") if isinstance(prompt, list) else prompt),
    made("higher_levels_are_refused_with_what_they_need", "takes another backend then", backend=lambda b: "numpy"),
]  # fmt: skip

ENGINES = [*NINES, *BATCHING, *FEEDFORWARD, *FAULTS, *CACHES, *SAMPLING, *MODELS]
