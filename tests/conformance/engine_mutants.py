"""Deliberately broken engines, each with the promise that it breaks.

A mutant is an honest engine in which a method of the engine, its scheduler, block pool or runner was replaced before it
started, or a method of the face that users see. The replacement gets the honest method as its first argument.
"""

from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import array_api_strict
import numpy as np

from conformance.nine import OPERATIONS as NINE
from conformance.serving import Serving
from hibachi import (
    ArrayBackend,
    AutoregressiveBatchInference,
    ConfigError,
    FeedforwardBatchInference,
    Finish,
    InvalidRequest,
    Item,
    ItemStream,
    ModelError,
    NonFiniteOutput,
    NumpyBackend,
    PromptTooLong,
    State,
)
from hibachi.engine.runners.groups import Alone
from hibachi.engine.runners.runner import Outcome
from hibachi.engine.streams.channel import Channel

from .mutants import Mutant

SOON = 1.5  # seconds until a stream that never ends counts as a broken promise


def serving(change: Any = None, backend: Any = None, **methods: Any) -> Serving:
    """What the tests are given in place of `serve`: engines with `change(engine)` and other methods."""

    def broken(face: Any) -> Any:
        def serve(self: Any, *parts: Any) -> Any:
            worker = face._serve(self, *parts)
            if change is not None:
                change(worker.engine)
            return worker

        def method(name: str, replacement: Any) -> Any:
            honest = getattr(face, name)
            return lambda self, *a, **k: replacement(MethodType(honest, self), *a, **k)

        own = {name: method(name, r) for name, r in methods.items() if hasattr(face, name)}
        return type(face.__name__, (face,), {"_serve": serve, **own})

    faces = map(broken, (AutoregressiveBatchInference, FeedforwardBatchInference))
    return Serving(backend or NumpyBackend(), **dict(zip(("autoregressive", "feedforward"), faces, strict=True)),
                   patience=SOON)  # fmt: skip


def mutant(promise: str, breaks: str, change: Any = None, **options: Any) -> Mutant:
    return Mutant(f"test_{promise}", breaks, {"serve": serving(change, **options)})


def part(path: str) -> Any:
    """mutant(), for methods of the engine's part at `path`."""

    def make(promise: str, breaks: str, **methods: Any) -> Mutant:
        def change(engine: Any) -> None:
            owner = engine
            for name in filter(None, path.split(".")):
                if name == "sampler" and not hasattr(owner, name):
                    owner = owner.main.head  # of a model with a cache
                owner = getattr(owner, name)
            for name, replacement in methods.items():
                setattr(owner, name, partial(replacement, getattr(owner, name)))

        return mutant(promise, breaks, change)

    return make


core, runner, scheduler, pool, sampler = map(part, ("", "runner", "scheduler", "scheduler.pool", "runner.sampler"))
inputs, memory, call, head = map(part, ("runner.inputs", "runner.memory", "runner.main", "runner.main.head"))


def face(promise: str, breaks: str, **methods: Any) -> Mutant:
    return mutant(promise, breaks, **methods)


def prompts(promise: str, breaks: str, **methods: Any) -> Mutant:
    """mutant(), for methods of what takes prompts in."""

    def build(honest: Any, backend: Any) -> Any:
        built = honest(backend)
        for name, replacement in methods.items():
            setattr(built.prompts, name, partial(replacement, getattr(built.prompts, name)))
        built.prompts._fitted.clear()
        return built

    return face(promise, breaks, _build=build)


# ---- the batch of a model without a cache ------------------------------------------------------------------


def pad_right(batch: Any, rows: Any, lengths: Any, width: int, padding: Any, only: Any = lambda missing: True) -> Any:
    out = batch(rows, lengths, width, padding)
    for i, n in enumerate(lengths.tolist()):
        if only(width - n):
            out[i] = np.roll(out[i], n - width, axis=0)
    return out


def pad_as_rows(batch: Any, rows: Any, lengths: Any, width: int, padding: Any) -> Any:
    out = batch(rows, lengths, width, padding)
    return np.concatenate([out, out[:1]]) if (lengths != width).any() else out


def pad_with_first_token(batch: Any, rows: Any, lengths: Any, width: int, padding: Any) -> Any:
    out = batch(rows, lengths, width, padding)
    for i, n in enumerate(lengths.tolist()):
        out[i, : width - n] = out[i, width - n]
    return out


def cut_to_the_shortest(forward: Any, tokens: Any, *lengths: Any) -> Any:
    if not lengths:
        return forward(tokens)
    least = int(lengths[0].min())
    return forward(tokens[:, -least:], np.minimum(lengths[0], least))


def pad_anyway(engine: Any) -> None:
    grouping = engine.runner.grouping
    if not grouping.padded:
        engine.runner.grouping = replace(grouping, padded=True)
        honest = engine.runner._batch
        engine.runner._batch = lambda rows, lengths, width, padding: honest(rows, lengths, width, 0)


def never_trim(shape: Any, rows: Any, lengths: Any) -> Any:
    owner = shape.__self__
    rows, lengths, width = shape(rows, lengths)
    owner.widest = max(width, getattr(owner, "widest", 0))
    return rows, lengths, owner.widest


def one_pass_a_row(run: Any, plan: Any) -> Any:
    parts = [run.__self__._forward(plan, plan.end, np.array([i])) for i in range(len(plan.rows))]
    return Outcome(parts, {})


def swap_rows(run: Any, plan: Any) -> Any:
    outcome = run(plan)
    for p in outcome.parts:
        p.tokens = None if p.tokens is None else p.tokens[::-1]
        p.batch = None if p.batch is None else p.batch[::-1]
    return outcome


def compute_while_idle(step: Any) -> bool:
    busy = step()
    if not busy:
        step.__self__.runner.forward(np.ones((1, 1), int))
    return busy


def admit_one(admit: Any, *args: Any) -> Any:
    owner = admit.__self__
    owner._free_rows, others = owner._free_rows[-1:], owner._free_rows[:-1]
    admitted = admit(*args)
    owner._free_rows = others + owner._free_rows
    return admitted


def last_first(add: Any, seq: Any) -> None:
    add(seq)
    waiting = add.__self__._waiting
    waiting.appendleft(waiting.pop())


def flatten_tokens(forward: Any, tokens: Any, *lengths: Any) -> Any:
    return forward(tokens.reshape(*tokens.shape[:2], -1) if tokens.ndim > 3 else tokens, *lengths)


def widen_integers(forward: Any, tokens: Any, *lengths: Any) -> Any:
    return forward(tokens.astype("int64") if tokens.dtype == "int32" else tokens, *lengths)


def keep_batch_dimension(submit: Any, job: Any) -> Any:
    stream = submit(job)
    read = stream.read
    stream.read = lambda item: read(item)[None]
    return stream


def arrays_only(admit: Any, prompt: Any) -> Any:
    if isinstance(prompt, list):
        raise InvalidRequest("no lists")
    return admit(prompt)


def keep_a_reference(admit: Any, prompt: Any) -> Any:
    _, kind, n = admit(prompt)
    return np.asarray(prompt), kind, n


class Sharing(NumpyBackend):
    """Copies nothing that goes to the model or comes from it."""

    def copy(self, t: Any) -> Any:
        return t

    def put_all(self, arrays: Any) -> Any:
        return list(arrays)


def share_lengths(call: Any, tokens: Any, lengths: Any) -> Any:
    return call.__self__.forward(tokens, lengths)


BATCHING = [
    runner("mixed_lengths_in_any_order_stream_what_each_streams_alone", "pads on the right", _batch=pad_right),
    runner("mixed_lengths_in_any_order_stream_what_each_streams_alone", "delivers the neighbour's token",
           run=swap_rows),
    runner("a_longer_request_joins_a_running_batch", "pads along the batch", _batch=pad_as_rows),
    runner("a_request_longer_by_exactly_one_joins_a_batch_of_one", "appends the padding if it is exactly one",
           _batch=partial(lambda batch, *a: pad_right(batch, *a, only=lambda missing: missing == 1))),
    runner("a_shorter_request_joins_a_running_batch", "cuts all rows to the shortest",
           forward=cut_to_the_shortest),
    mutant("without_a_padding_token_nothing_is_padded", "pads with zeros then", pad_anyway),
    runner("a_padding_token_pads_on_the_left_and_lengths_count_the_rest", "pads with the first token",
           _batch=pad_with_first_token),
    runner("a_padding_token_pads_on_the_left_and_lengths_count_the_rest", "passes lengths as int64",
           forward=lambda forward, tokens, lengths: forward(tokens, lengths.astype("int64"))),
    runner("what_stands_in_the_padding_changes_nothing", "passes the length of the longest for all",
           forward=lambda forward, tokens, lengths: forward(tokens, lengths * 0 + tokens.shape[1])),
    runner("a_model_that_looks_at_the_last_token_needs_no_lengths", "pads on the right", _batch=pad_right),
    core("an_idle_engine_computes_nothing", "computes while nobody asks", step=compute_while_idle),
    scheduler("requests_in_the_queue_share_their_first_forward_pass", "admits one request a step",
              _admit=admit_one),
    runner("rows_of_equal_length_share_a_pass_where_nothing_is_padded", "gives each row a pass",
           run=one_pass_a_row),
    scheduler("a_free_row_is_taken_at_the_next_step", "waits until the whole batch is done",
              _admit=lambda admit, *args: [] if admit.__self__.running else admit(*args)),
    scheduler("requests_start_in_the_order_in_which_they_came", "serves the last one first", add=last_first),
    runner("the_batch_is_as_wide_as_its_longest_row", "never trims", _shape=never_trim),
    core("the_engine_counts_what_waits_and_runs", "counts no prompt tokens",
         stats=lambda stats: replace(stats(), prompt_tokens=0)),
    core("the_engine_counts_what_waits_and_runs", "counts the cancelled only",
         stats=lambda stats: replace(stats(), finished=0)),
    core("a_cancelled_request_gives_its_row_to_the_next", "leaves the row to the cancelled",
         cancel=lambda cancel, job: None),
    core("a_request_cancelled_in_the_queue_never_runs", "forgets to look into the queue",
         cancel=lambda cancel, job: cancel(job) if job.seq.row >= 0 else None),
    runner("tokens_may_be_frames_of_several_codes", "remembers the first code for all",
           written=lambda write, rows, positions, tokens: write(rows, positions, tokens[..., :1])),
    runner("tokens_may_have_any_rank", "flattens tokens", forward=flatten_tokens),
    runner("tokens_may_be_continuous", "rounds what it remembers",
           written=lambda write, rows, positions, tokens: write(rows, positions, np.round(tokens))),
    runner("tokens_keep_their_dtype", "shows integers of another width", forward=widen_integers),
    face("items_are_native_arrays_of_the_shape_of_a_token", "keeps the batch dimension",
         submit=keep_batch_dimension),
    prompts("prompts_may_be_lists_host_arrays_or_native_arrays", "takes arrays only", taken=arrays_only),
    mutant("a_model_may_use_the_memory_of_its_output_again", "keeps the model's array", backend=Sharing()),
    runner("a_model_may_write_into_what_it_is_given", "gives away its own lengths", _call=share_lengths),
    prompts("what_happens_to_a_prompt_later_changes_nothing", "keeps a reference", taken=keep_a_reference),
]  # fmt: skip


# ---- when requests end -------------------------------------------------------------------------------------


def including(stop: bool) -> Any:
    def add(honest: Any, job: Any) -> None:
        job.include_stop = stop
        honest(job)

    return add


def one_leaves(run: Any, plan: Any) -> Any:
    outcome = run(plan)
    for p in outcome.parts:
        p.stopped = p.stopped & (np.cumsum(p.stopped) <= 1)
    return outcome


def only_its_own(make: Any, kind: Any, rule: Any) -> Any:
    prompts = make.__self__
    if not rule.tokens and rule.where is None:
        return make(kind, rule)
    kept, prompts._stop = prompts._stop, None
    try:
        return make(kind, rule)
    finally:
        prompts._stop = kept


def stopping(change: Any) -> Any:
    """A `_made` whose stoppers go through `change`."""

    def make(honest: Any, kind: Any, rule: Any) -> Any:
        stopper = honest(kind, rule)
        change(stopper)
        return stopper

    return make


def any_code(stopper: Any) -> None:
    if stopper.tokens is not None:
        stopper.match = lambda tokens: (tokens[:, None] == stopper.tokens).any(-1).any(1)


def exact(stopper: Any) -> None:
    stopper.atol = 0


def row_by_row(stopper: Any) -> None:
    if (where := stopper.where) is not None:
        stopper.where = lambda batch: np.concatenate([where(batch[i : i + 1]) for i in range(len(batch))])


def ending_later(by: int) -> Any:
    def add(honest: Any, seq: Any) -> None:
        honest(seq)
        seq.end = max(seq.end + by, seq.prompt_len + 1)

    return add


def short_context(add: Any, seq: Any) -> None:
    add(seq)
    seq.end = max(min(seq.end, add.__self__.limits.max_model_len - 1), seq.prompt_len + 1)


def limit_before_stop(commit: Any, plan: Any, stopped: Any) -> Any:
    over = plan.end + 1 >= commit.__self__.table.end[plan.rows]
    return commit(plan, stopped & ~over[plan.emit])


def never_awaited(engine: Any) -> None:
    class Wait:
        close = engine.runner.wait.close

        def __call__(self, result: Any) -> Any:
            return result.close() if hasattr(result, "send") else result

    engine.runner.wait = Wait()


class Lossy(ItemStream):
    async def __aiter__(self) -> Any:
        await anext(self)
        while (item := await anext(self, None)) is not None:
            yield item


def becomes(kind: Any) -> Any:
    """A `run` whose results are of another class."""

    def run(honest: Any, *args: Any, **options: Any) -> Any:
        result = honest(*args, **options)
        result.__class__ = kind
        return result

    return run


ENDINGS = [
    core("the_stop_token_is_the_last_item_unless_it_is_not_wanted", "swallows the stop token",
         add=including(stop=False)),
    core("the_stop_token_is_the_last_item_unless_it_is_not_wanted", "always delivers the stop token",
         add=including(stop=True)),
    runner("rows_that_stop_together_leave_together", "lets one leave a step", run=one_leaves),
    prompts("a_request_may_bring_its_own_stop_rule", "ignores it",
         stop=lambda stopper, kind, stop, params: stopper(kind, None, params)),
    prompts("a_request_may_bring_its_own_stop_rule", "forgets the engine's own", _made=only_its_own),
    prompts("a_stop_token_of_several_codes_must_match_in_all_of_them", "is content with one code",
         _made=stopping(any_code)),
    prompts("a_stop_token_of_floats_may_be_off_by_atol", "ignores atol", _made=stopping(exact)),
    prompts("a_stop_predicate_sees_the_new_tokens_of_all_its_rows_at_once", "asks row by row",
         _made=stopping(row_by_row)),
    scheduler("max_new_tokens_is_the_number_of_tokens", "gives one more", add=ending_later(1)),
    scheduler("max_new_tokens_is_the_number_of_tokens", "gives one less", add=ending_later(-1)),
    scheduler("a_request_ends_where_the_context_ends", "ends one token before", add=short_context),
    scheduler("a_stop_token_at_the_limit_counts_as_a_stop", "counts it as the limit", commit=limit_before_stop),
    mutant("a_model_may_be_async", "does not await it", never_awaited),
    face("streams_can_be_read_in_a_running_event_loop", "loses the first item", run=becomes(Lossy)),
]  # fmt: skip


# ---- feed-forward ------------------------------------------------------------------------------------------


def larger_batches(init: Any, *args: Any, max_batch_size: int, **options: Any) -> None:
    init(*args, max_batch_size=2 * max_batch_size, **options)


def recast(change: Any) -> Any:
    """A `run` of the feed-forward runner that changes inputs which come together."""

    def run(honest: Any, plan: Any) -> Any:
        inputs = [seq.owner.prompt for seq in plan.seqs]
        for seq in plan.seqs:
            seq.owner.prompt = change(seq.owner.prompt, inputs)
        return honest(plan)

    return run


class Nothing(Item):
    async def _wait(self) -> None:
        return None


class Stubborn(Item):
    def cancel(self) -> None:
        pass


FEEDFORWARD = [
    runner("single_inputs_are_batched_and_each_gets_its_row", "gives it the neighbour's row", run=swap_rows),
    scheduler("single_inputs_are_batched_and_each_gets_its_row", "computes one a time", _admit=admit_one),
    face("single_inputs_beyond_the_batch_size_wait_for_the_next_batch", "computes twice as many",
         __init__=larger_batches),
    runner("single_inputs_of_different_shapes_are_never_mixed", "cuts them to the shortest",
           run=recast(lambda x, inputs: x.ravel()[: min(i.size for i in inputs)])),
    runner("single_inputs_of_different_dtypes_are_never_mixed", "makes floats of all",
           run=recast(lambda x, inputs: x.astype("float32"))),
    face("the_result_of_a_single_input_can_be_awaited", "gives nothing then", run=becomes(Nothing)),
]  # fmt: skip


# ---- faults ------------------------------------------------------------------------------------------------


def blame_everybody(run: Any, plan: Any) -> Any:
    outcome = run(plan)
    if outcome.faults:
        fault = next(iter(outcome.faults.values()))
        return Outcome([], dict.fromkeys(range(len(plan.rows)), fault))
    return outcome


def blame_the_neighbour(run: Any, plan: Any) -> Any:
    outcome = run(plan)
    outcome.faults = {(i + 1) % len(plan.rows): fault for i, fault in outcome.faults.items()}
    return outcome


def say_nothing(run: Any, plan: Any) -> Any:
    outcome = run(plan)
    outcome.faults = {i: ModelError("it failed") for i in outcome.faults}
    return outcome


def give_up(run: Any, plan: Any) -> Any:
    outcome = run(plan)
    if len(outcome.faults) == len(plan.rows):
        raise RuntimeError("all failed")
    return outcome


def deliver_nan(run: Any, plan: Any) -> Any:
    outcome = run(plan)
    outcome.faults = {i: f for i, f in outcome.faults.items() if not isinstance(f, NonFiniteOutput)}
    return outcome


class Withheld(Channel):
    """Shows its items at the end, if that is a good one."""

    def __init__(self) -> None:
        super().__init__()
        self.items: list[Any] = []

    def push(self, item: Any, wakeups: Any) -> None:
        self.items.append(item)

    def end(self, reason: Finish, *args: Any) -> bool:
        if reason is not Finish.ERROR:
            self.buffer.extend(self.items)
        return super().end(reason, *args)


def withhold(prepare: Any, *args: Any, **options: Any) -> Any:
    job = prepare(*args, **options)
    job.channel = Withheld()
    return job


def fail_all_of_a_failed_step(forward: Any, plan: Any, *args: Any) -> Any:
    owner = forward.__self__
    if getattr(owner, "failed", None) is plan:
        raise RuntimeError("as I said")
    try:
        return forward(plan, *args)
    except Exception:
        owner.failed = plan
        raise


def repaired(repair: Any) -> Any:
    """A forward pass whose output goes through `repair(output, input)`."""
    return lambda forward, tokens, *lengths: repair(forward(tokens, *lengths), tokens)


def resize(out: Any, tokens: Any) -> Any:
    return np.resize(out, (tokens.shape[0], *tokens.shape[2:])) if isinstance(out, np.ndarray) else out


def repair_singles(engine: Any) -> None:
    model = engine.runner.model
    engine.runner.model = SimpleNamespace(forward=lambda x: np.resize(np.asarray(model.forward(x)), x.shape))


def first_column(stopper: Any) -> None:
    if (where := stopper.where) is not None:
        stopper.where = lambda batch: np.reshape(where(batch), (len(batch), -1))[:, 0]


def keep_streams(submit: Any, job: Any) -> Any:
    stream = submit(job)
    vars(submit.__self__).setdefault("kept", []).append(stream)
    return stream


def lenient(name: str, change: Any) -> Any:
    """A method that takes a keyword argument which it should refuse."""

    def method(honest: Any, *args: Any, **options: Any) -> Any:
        if name in options:
            options[name] = change(options[name])
        return honest(*args, **options)

    return method


def nan_for_nonsense(run: Any, item: Any) -> Any:
    try:
        return run(item)
    except InvalidRequest:
        return run(np.nan)


def close_if_it_ran(close: Any) -> None:
    if close.__self__._worker is not None:
        close()


FAULTS = [
    runner("a_model_that_raises_fails_the_guilty_request_alone", "fails the whole batch", run=blame_everybody),
    runner("a_model_that_raises_fails_the_guilty_request_alone", "blames the neighbour", run=blame_the_neighbour),
    runner("the_error_of_a_request_names_what_the_model_raised", "keeps it secret", run=say_nothing),
    face("tokens_before_an_error_are_delivered", "delivers nothing then", check=withhold),
    runner("a_model_that_fails_once_harms_nobody", "fails all of a step that failed",
           _forward=fail_all_of_a_failed_step),
    runner("if_everybody_is_guilty_all_fail_and_the_next_are_served", "gives up then", run=give_up),
    runner("a_token_that_is_not_finite_fails_its_request_alone", "delivers it", run=deliver_nan),
    runner("a_token_that_is_not_finite_fails_its_request_alone", "fails the whole batch", run=blame_everybody),
    runner("logits_that_are_not_finite_fail_their_request_alone", "draws from them", run=deliver_nan),
    runner("an_output_of_the_wrong_shape_fails_its_step_only", "makes it fit", forward=repaired(resize)),
    runner("an_output_of_the_wrong_shape_fails_its_step_only", "gives up then", run=give_up),
    runner("an_output_of_the_wrong_dtype_fails_its_step_only", "casts it",
           forward=repaired(lambda out, tokens: out.astype(tokens.dtype))),
    runner("an_output_that_is_no_array_fails_its_step_only", "unpacks tuples",
           forward=repaired(lambda out, tokens: out[0] if isinstance(out, tuple) else out)),
    runner("what_is_no_exception_fails_its_request_alone", "fails the whole batch", run=blame_everybody),
    core("an_engine_that_fails_tells_every_stream", "ends them in silence",
         end_all=lambda end_all, reason, error=None: end_all(reason)),
    runner("a_stop_predicate_that_raises_fails_its_own_requests_alone", "fails the whole batch",
           run=blame_everybody),
    prompts("a_stop_predicate_of_the_wrong_shape_fails_its_own_request_alone", "looks at the first code only",
         _made=stopping(first_column)),
    core("whoever_drops_a_stream_gives_its_row_away_and_disturbs_nobody", "computes on for nobody",
         cancel=lambda cancel, job: None),
    face("whoever_drops_a_stream_gives_its_row_away_and_disturbs_nobody", "holds on to the stream",
         submit=keep_streams),
    face("a_bad_prompt_is_refused_at_the_call_and_touches_nobody", "takes a number for a prompt",
         run=lambda run, prompt, *a, **k: run([prompt] if isinstance(prompt, int) else prompt, *a, **k)),
    face("bad_options_are_refused_at_the_call", "takes 0 for no limit",
         run=lenient("max_tokens", lambda n: n or None)),
    face("bad_settings_are_refused_where_the_engine_is_made", "takes 0 rows for 1",
         __init__=lenient("max_num_seqs", lambda n: n or 1)),
    face("bad_settings_are_refused_where_the_engine_is_made", "takes a padding token's first element",
         __init__=lenient("padding_token", lambda token: np.ravel(token)[0])),
    face("a_stop_or_padding_token_of_another_shape_than_the_tokens_is_refused", "takes its first element",
         __init__=lenient("stop_token", lambda token: np.ravel(token)[0])),
    core("closing_finishes_the_running_step_and_ends_every_stream_once", "calls it cancelled",
         end_all=lambda end_all, reason, error=None: end_all(Finish.CANCELLED)),
    core("closing_from_outside_ends_a_request_that_would_run_on", "calls it finished",
         end_all=lambda end_all, reason, error=None: end_all(Finish.LENGTH)),
    face("an_engine_that_never_ran_can_be_closed", "opens again", close=close_if_it_ran),
    face("draining_finishes_what_came_and_takes_nothing_new", "does not wait",
         drain=lambda drain, timeout=None: drain(0) or True),
    runner("a_single_input_that_makes_the_model_raise_fails_alone", "fails the whole batch", run=blame_everybody),
    runner("a_single_output_that_is_not_finite_fails_alone", "delivers it", run=deliver_nan),
    mutant("single_outputs_of_the_wrong_type_or_number_fail_their_step_only", "makes them fit", repair_singles),
    face("a_single_input_that_is_no_numbers_is_refused_at_the_call", "takes NaN instead", run=nan_for_nonsense),
    face("a_single_input_may_be_cancelled_and_closing_ends_the_others", "does not cancel", run=becomes(Stubborn)),
]  # fmt: skip


# ---- caches ------------------------------------------------------------------------------------------------


def share_a_block(alloc: Any, n: int) -> Any:
    blocks = alloc(n)
    if blocks:
        blocks[0] = vars(alloc.__self__).setdefault("shared", blocks[0])
    return blocks


def release_twice(release: Any, blocks: Any, sound: int) -> None:
    release(blocks, sound=sound)
    release(blocks[:1], sound=sound)


def release_at_once(alloc: Any, n: int) -> Any:
    blocks = alloc(n)
    if blocks:
        alloc.__self__.release(blocks, sound=0)
    return blocks


def skip_a_token(schedule: Any, *now: Any) -> Any:
    plan = schedule(*now)
    if plan is not None:
        schedule.__self__.table.computed[plan.rows[~plan.emit]] += 1
    return plan


def large_budget(engine: Any) -> None:
    engine.scheduler.budget = 10**6
    engine.scheduler.limits = replace(engine.scheduler.limits, budget=10**6, chunk=10**6)


def round_block_size(engine: Any) -> None:
    size = engine.runner.limits.block_size
    engine.runner.inputs.limits = replace(engine.runner.limits, block_size=1 << (size - 1).bit_length())


def show_first_blocks(admit: Any, seq: Any) -> None:
    admit(seq)
    blocks = admit.__self__.inputs.block_table
    if seq.row != (first := vars(admit.__self__).setdefault("first", seq.row)):
        blocks[seq.row] = blocks[first]


def fail_who_waits(reserve: Any, *args: Any) -> Any:
    blocks = reserve(*args)
    if blocks is None:
        raise MemoryError("no blocks")
    return blocks


def overtake(admit: Any, *args: Any) -> Any:
    owner = admit.__self__
    admitted, queue = admit(*args), owner.policy._queue._heap
    if not admitted and len(queue) > 1 and owner._free_rows:
        first = queue.pop(0)
        admitted = admit(*args)
        queue.insert(0, first)
    return admitted


def forget_the_last(suspend: Any, seq: Any, row: int) -> None:
    suspend(seq, row)
    seq.owner.history._pieces[-1][-1] = 0


def hope(check: Any, request: Any) -> Any:
    try:
        return check(request)
    except PromptTooLong:
        return check(replace(request, prompt=request.prompt[:1], max_tokens=1))


def keep_blocks(cancel: Any, seq: Any, *reason: Any) -> Any:
    seq.blocks = []
    return cancel(seq, *reason)


def advance_on_failure(forward: Any, plan: Any, idx: Any, call: Any) -> Any:
    owner = forward.__self__.memory
    try:
        return forward(plan, idx, call)
    except Exception:
        for layer, state in zip(owner.spec, owner.cache, strict=True):
            if isinstance(layer, State):
                state[plan.rows[idx]] += 1
        raise


def storing(promise: str, breaks: str, storable: Any) -> Mutant:
    """A backend that writes other keys and values into its cache."""
    backend = NumpyBackend(native=False)
    backend.storable = storable
    return mutant(promise, breaks, backend=backend)


def add_columns(step: Any, *args: Any) -> Any:
    logits, cache = step(*args)
    return np.pad(logits, ((0, 0), (0, 10 - logits.shape[1]))), cache


def show_the_block_table(inputs: Any, rows: Any, *rest: Any) -> Any:
    x, table = inputs(rows, *rest), inputs.__self__.block_table
    return replace(x, block_table=table[rows[0] : rows[0] + 1]) if len(rows) == 1 else x


def take_any_cache(engine: Any) -> None:
    engine.runner.main.step = engine.runner.model.step


CACHES = [
    pool("mixed_lengths_stream_what_each_streams_alone_from_the_cache", "gives one block to two rows",
         alloc=share_a_block),
    runner("mixed_lengths_stream_what_each_streams_alone_from_the_cache", "delivers the neighbour's token",
           run=swap_rows),
    scheduler("long_prompts_are_computed_in_chunks_beside_the_others", "skips a token between chunks",
              schedule=skip_a_token),
    memory("a_model_may_have_paged_and_recurrent_layers", "hands out states in reverse order",
           gather=lambda gather, states, held, started: gather(states, held[::-1], started)),
    mutant("a_step_computes_no_more_tokens_than_it_may", "computes whole prompts", large_budget),
    mutant("blocks_may_have_any_size", "takes sizes for powers of two", round_block_size),
    runner("longer_and_shorter_requests_join_a_running_batch_with_a_cache", "shows joiners the first row's blocks",
           admit=show_first_blocks),
    pool("rows_and_blocks_are_used_again_and_again", "frees a block twice", release=release_twice),
    pool("rows_and_blocks_are_used_again_and_again", "frees blocks early", alloc=release_at_once),
    memory("a_row_is_given_with_a_fresh_state", "leaves the state as it was",
           gather=lambda gather, states, held, started: gather(states, held, started | True)),
    runner("a_model_with_a_cache_may_return_tokens_itself", "delivers the neighbour's frame", run=swap_rows),
    core("requests_with_a_cache_end_at_a_stop_token_a_limit_or_the_context", "swallows the stop token",
         add=including(stop=False)),
    scheduler("a_cache_that_is_too_small_for_all_makes_them_wait_their_turn", "fails who has to wait",
              _reserve=fail_who_waits),
    scheduler("a_cache_that_is_too_small_for_all_makes_them_wait_their_turn", "lets small requests overtake",
              _admit=overtake),
    runner("who_loses_its_memory_goes_on_as_if_nothing_had_happened", "forgets its last token",
           suspend=forget_the_last),
    pool("what_requests_have_in_common_is_computed_once", "finds nothing",
         match=lambda match, salt, keys, most: match(salt, keys, 0)),
    pool("requests_of_different_salts_share_nothing", "forgets the salt",
         match=lambda match, salt, keys, most: match(None, keys, most), root=lambda root, salt: (None,)),
    face("a_request_that_can_never_fit_is_refused_at_the_call", "hopes for the best", check=hope),
    scheduler("a_cancelled_request_gives_its_blocks_to_the_next", "loses the blocks", cancel=keep_blocks),
    core("a_request_may_be_cancelled_within_its_prompt", "computes on for nobody",
         cancel=lambda cancel, job: None),
    storing("nan_in_a_cache_fails_its_request_alone_and_never_reaches_the_next", "keeps NaN in values",
            lambda k, v, dtype: (k, v)),
    runner("nan_in_a_cache_fails_its_request_alone_and_never_reaches_the_next", "draws from NaN", run=deliver_nan),
    inputs("a_step_may_write_into_its_inputs", "gives away its own block table", packed=show_the_block_table),
    mutant("a_step_that_returns_no_cache_fails_and_the_next_are_served", "takes what comes", take_any_cache),
    storing("nan_that_a_cancelled_request_left_never_reaches_the_next", "keeps NaN in values",
            lambda k, v, dtype: (k, v)),
    storing("nan_that_no_output_shows_never_reaches_the_next", "keeps NaN in values", lambda k, v, dtype: (k, v)),
    runner("a_step_that_raises_fails_the_guilty_request_alone", "fails the whole batch", run=blame_everybody),
    runner("a_step_that_raises_fails_the_guilty_request_alone", "advances states in a step that fails",
           _forward=advance_on_failure),
    runner("if_a_step_raises_for_everybody_all_fail_and_the_next_are_served", "gives up then", run=give_up),
    runner("a_stop_predicate_that_raises_fails_alone_with_a_cache_too", "fails the whole batch",
           run=blame_everybody),
    runner("a_stop_predicate_that_raises_fails_alone_with_a_cache_too", "advances states in a step that fails",
           _forward=advance_on_failure),
    call("a_step_with_an_output_of_the_wrong_shape_or_dtype_fails_its_requests", "adds what is missing",
         step=add_columns),
]  # fmt: skip


# ---- sampling ----------------------------------------------------------------------------------------------


def admitting(change: Any) -> Any:
    """An `admit` of the sampler after which `change(sampler, row, params)` sets other parameters."""

    def admit(honest: Any, job: Any) -> None:
        honest(job)
        change(honest.__self__, job.seq.row, job.params)

    return admit


def always_draw(s: Any, row: int, params: Any) -> None:
    s._temperature[row] = params.temperature or 1


def one_temperature(s: Any, row: int, params: Any) -> None:
    s._temperature[row] = float(params.temperature > 0)


def newest_for_all(s: Any, row: int, params: Any) -> None:
    s._temperature[:] = params.temperature


def seed_by_row(s: Any, row: int, params: Any) -> None:
    s._seed[row] += np.uint64(row)


def next_seed(s: Any, row: int, params: Any) -> None:
    s._seed[row] += np.uint64(1)


def no_top_k(s: Any, row: int, params: Any) -> None:
    s._top_k[row] = 0


def no_top_p(s: Any, row: int, params: Any) -> None:
    s._top_p[row] = 1


def no_min_p(s: Any, row: int, params: Any) -> None:
    s._min_p[row] = 0


def no_typical_p(s: Any, row: int, params: Any) -> None:
    s._typical_p[row] = 1


def last_of_equals(best: Any, logits: Any, n: int) -> Any:
    _, finite = best(logits, n)
    return logits.shape[1] - 1 - np.argmax(np.asarray(logits)[:n, ::-1], axis=1), finite


def same_seed(add: Any, job: Any) -> None:
    job.seed = 1
    add(job)


def with_params(change: Any) -> Any:
    """An `admit` of the sampler for a job whose parameters went through `change`."""

    def admit(honest: Any, job: Any) -> None:
        given = job.params
        job.params = change(given)
        honest(job)
        job.params = given

    return admit


def count_prompts(admit: Any, job: Any) -> None:
    admit(job)
    edits = admit.__self__._edits
    edits._counted[job.seq.row] = 0


def forget_min_tokens(admit: Any, job: Any) -> None:
    admit(job)
    admit.__self__._edits._until[job.seq.row] = 0


def apply_nothing(engine: Any) -> None:
    runner = engine.runner
    sampler = runner.sampler if hasattr(runner, "sampler") else runner.main.head.sampler
    sampler._edits._process = lambda x, *rest: x


def faults_for_all(draw: Any, logits: Any, jobs: Any, *rest: Any) -> Any:
    drawn = draw(logits, jobs, *rest)
    drawn.faults = {i: fault for fault in drawn.faults.values() for i in range(len(jobs))}
    return drawn


def no_faults(draw: Any, *args: Any) -> Any:
    drawn = draw(*args)
    drawn.faults = {}
    return drawn


def scores_shifted(score: Any, plan: Any, logits: Any, of: Any) -> Any:
    out = score(plan, logits, of)
    for i in of.idx.tolist():
        scores = plan.seqs[i].owner.scores
        if scores is not None:
            scores[1:] = [*scores[2:], *scores[1:2]]
    return out


def one_chunk_scored(score: Any, plan: Any, logits: Any, of: Any) -> Any:
    kept = [list(plan.seqs[i].owner.scores or ()) for i in of.idx.tolist()]
    out = score(plan, logits, of)
    for i, before, at in zip(of.idx.tolist(), kept, of.start.tolist(), strict=True):
        if at and before:
            plan.seqs[i].owner.scores[:] = before
    return out


def shift_logprobs(draw: Any, *args: Any) -> Any:
    drawn = draw(*args)
    drawn.logprobs = {(i + 1) % len(drawn.tokens): found for i, found in drawn.logprobs.items()}
    return drawn


SAMPLING = [
    sampler("temperature_zero_takes_the_most_likely_token", "draws at temperature 1", admit=admitting(always_draw)),
    sampler("temperature_zero_takes_the_most_likely_token", "takes the last of equals", _best=last_of_equals),
    sampler("a_seed_gives_the_same_tokens_on_every_backend", "takes the next seed", admit=admitting(next_seed)),
    sampler("a_seed_gives_the_same_tokens_alone_and_in_a_batch", "adds the row to the seed",
            admit=admitting(seed_by_row)),
    core("without_a_seed_every_request_draws_afresh", "always takes the seed 1", add=same_seed),
    sampler("every_row_has_its_own_parameters", "takes the newest temperature for all",
            admit=admitting(newest_for_all)),
    sampler("the_temperature_makes_likely_tokens_more_or_less_likely", "takes all temperatures for 1",
            admit=admitting(one_temperature)),
    sampler("top_k_and_top_p_leave_the_most_likely_tokens", "ignores top_k", admit=admitting(no_top_k)),
    sampler("top_k_and_top_p_leave_the_most_likely_tokens", "ignores top_p", admit=admitting(no_top_p)),
    sampler("min_p_and_typical_p_leave_tokens_by_their_probability", "ignores min_p", admit=admitting(no_min_p)),
    sampler("min_p_and_typical_p_leave_tokens_by_their_probability", "ignores typical_p",
            admit=admitting(no_typical_p)),
    sampler("penalties_make_what_was_there_less_likely", "counts the prompt as output", admit=count_prompts),
    sampler("penalties_make_what_was_there_less_likely", "takes presence for frequency",
            admit=with_params(lambda p: p.with_(frequency_penalty=p.presence_penalty + p.frequency_penalty,
                                                presence_penalty=0))),
    sampler("tokens_may_be_forbidden_or_favoured", "ignores biases",
            admit=with_params(lambda p: p.with_(logit_bias={}))),
    sampler("tokens_may_be_forbidden_or_favoured", "allows all",
            admit=with_params(lambda p: p.with_(allowed_token_ids=None))),
    sampler("tokens_may_be_forbidden_or_favoured", "forgets min_tokens", admit=forget_min_tokens),
    mutant("a_logits_processor_changes_the_logits_of_its_request", "does not ask it", apply_nothing),
    sampler("a_logits_processor_changes_the_logits_of_its_request", "fails everybody", draw=faults_for_all),
    sampler("a_request_that_allows_no_token_fails_alone", "draws anything", draw=no_faults),
    head("the_tokens_of_a_prompt_have_log_probabilities", "gives them to the token before", _score=scores_shifted),
    head("the_tokens_of_a_prompt_have_log_probabilities", "scores the first chunk only", _score=one_chunk_scored),
    sampler("a_token_with_minus_infinity_never_comes", "makes it finite",
            draw=lambda draw, logits, *args: draw(np.maximum(logits, -1), *args)),
    sampler("logprobs_are_the_logarithms_of_the_softmax_of_the_raw_logits", "divides by two",
            draw=lambda draw, logits, *args: draw(logits / 2, *args)),
    sampler("logprobs_belong_to_the_tokens_of_their_own_stream", "gives them to the neighbour",
            draw=shift_logprobs),
    prompts("parameters_say_when_to_end", "ignores their stop tokens",
         stop=lambda stopper, kind, stop, params: stopper(kind, stop, None)),
]  # fmt: skip


# ---- models ------------------------------------------------------------------------------------------------


def lowest_rung(init: Any, model: Any, **options: Any) -> None:
    init(SimpleNamespace(forward=model.forward, backend=model.backend), **options)


def one_more_if_sampled(run: Any, plan: Any) -> Any:
    outcome = run(plan)
    for p in outcome.parts:
        p.tokens = p.tokens + 1 if p.batch is None else p.tokens
    return outcome


def always_pass_lengths(engine: Any) -> None:
    engine.runner.takes_lengths = True


def take_anything(init: Any, *args: Any, **options: Any) -> None:
    with suppress(ConfigError):
        init(*args, **options)


def long_context(init: Any, *args: Any, max_model_len: Any = 10, **options: Any) -> None:
    init(*args, max_model_len=max_model_len, **options)


def strict_for_all(init: Any, *args: Any, backend: Any = None, **options: Any) -> None:
    init(*args, backend=ArrayBackend(array_api_strict), **options)


def decoding(breaks: str, **operations: Any) -> Mutant:
    backend = NumpyBackend()
    for name, operation in operations.items():
        setattr(backend, name, partial(operation, NumpyBackend()))
    return mutant("a_decoder_gives_the_logits_of_slow_numpy", breaks, backend=backend)


def backwards(b: Any, *args: Any, **options: Any) -> Any:
    *qkv, cache, x = args
    return b.attend(*qkv, cache, replace(x, block_table=x.block_table[:, ::-1]), **options)


MODELS = [
    face("the_highest_rung_that_a_model_has_is_used", "uses the lowest", __init__=lowest_rung),
    runner("each_rung_answers_alike", "adds one to what it drew", run=one_more_if_sampled),
    mutant("lengths_are_passed_only_to_a_model_that_asks_for_them", "always passes them", always_pass_lengths),
    face("what_is_no_model_is_refused", "takes anything", __init__=take_anything),
    face("a_model_may_say_how_long_its_context_is", "does not ask it", __init__=long_context),
    face("the_backend_is_found_from_the_arrays", "takes another library's", __init__=strict_for_all),
    face("a_feed_forward_model_finds_its_backend_alike", "takes another library's", __init__=strict_for_all),
    decoding("does not rotate", rope=lambda b, x, cos, sin: x),
    decoding("reads blocks from the back", attend=backwards),
    decoding("forgets the weights of the norms", rms_norm=lambda b, x, w, eps: b.rms_norm(x, w * 0 + 1, eps)),
]  # fmt: skip


def others_ops(**operations: Any) -> Any:
    """Changes what a runner over nine operations asks; an operation gets the honest ones first."""

    def change(engine: Any) -> None:
        honest = engine.runner._ops
        mine = {name: partial(operation, honest) for name, operation in operations.items()}
        engine.runner._ops = SimpleNamespace(**{"name": "mutant"} | {n: getattr(honest, n) for n in NINE} | mine)

    return change


def nobody_is_strange(run: Any, plan: Any) -> Any:
    outcome = run(plan)
    outcome.faults.clear()
    return outcome


def items_backwards(run: Any, plan: Any) -> Any:
    outcome = run(plan)
    for p in outcome.parts:
        p.items = p.items[::-1]
    return outcome


def all_alone(engine: Any) -> None:
    engine.runner.grouping = replace(engine.runner.grouping, known=Alone())


NINES = [
    mutant("rows_of_equal_length_go_together_and_nothing_is_padded", "shows them one by one", all_alone),
    runner("shorter_rows_are_padded_in_front_and_trimmed_when_the_longest_leaves", "pads behind",
           _wide=lambda wide, rows, width, job: np.roll(wide(rows, width, job), 1, axis=1)),
    runner("shorter_rows_are_padded_in_front_and_trimmed_when_the_longest_leaves", "pads more each time",
           _gathered=lambda gathered, ends, width: gathered(ends, width + 9)),
    mutant("the_engine_asks_for_each_of_the_nine_and_for_nothing_else", "has a way of its own to take rows out",
           others_ops(pop=lambda ops, t, dim, i: np.delete(t, i, dim))),
    prompts("a_stop_token_may_be_left_out_and_requests_bring_rules_of_their_own", "ignores them",
            stop=lambda stop, kind, given, params: stop(kind, None, params)),
    prompts("tokens_of_several_kinds_share_an_engine_and_no_call", "makes all of them integers",
            taken=lambda taken, prompt: taken(prompt.astype("int32"))),
    runner("nan_ends_its_own_row", "takes it for a number", run=nobody_is_strange),
    runner("a_model_that_raises_ends_the_guilty_request_alone", "blames everybody in the batch", run=blame_everybody),
    mutant("a_model_may_write_into_what_it_is_shown_and_use_its_output_again", "copies nothing",
           others_ops(repeat=lambda ops, t, dim, times: t if times == 1 else ops.repeat(t, dim, times))),
    mutant("who_leaves_disturbs_nobody_and_a_row_is_used_again", "takes out the row beside",
           others_ops(pop=lambda ops, t, dim, i: ops.pop(t, dim, (i + 1) % len(t)))),
    runner("inputs_of_a_feedforward_model_are_joined_by_shape", "mixes up who gets what", run=items_backwards),
    prompts("what_is_no_array_of_the_backend_is_refused_at_the_call", "takes lists",
            taken=lambda taken, prompt: taken(np.array(prompt, "int32") if isinstance(prompt, list) else prompt)),
    face("higher_levels_are_refused_with_what_they_need", "takes another backend then",
         __init__=lambda init, *a, backend=None, **options: init(*a, backend="numpy", **options)),
]  # fmt: skip

ENGINES = [*NINES, *BATCHING, *ENDINGS, *FEEDFORWARD, *FAULTS, *CACHES, *SAMPLING, *MODELS]
