"""What hibachi promises about a model of your own, if the model lets it: `hibachi conformance --model mine.py:Mine`.

Not collected with the promises about backends. Where several are broken, the first is the one to mend first.
"""

import numpy as np
import pytest

from hibachi import InvalidRequest
from hibachi.testing.answers import Trouble

LONGEST = 4096  # the longest context that is tried


def check(trouble, mend):
    if trouble is not None:
        pytest.fail(f"expected  {trouble.expected}\ngot       {trouble.got}\nmend      {mend}", pytrace=False)


def skip_feedforward(own):
    if own.rung is None:
        pytest.skip("does not apply: a feed-forward model has no sequence")


def skip_unanswered(own):
    if own.unanswered is not None:
        pytest.skip("not judged, as requests alone are not answered")


def skip_unsteady(own):
    """Where there is nothing to compare with."""
    skip_unanswered(own)
    if own.unsteady is not None:
        pytest.skip("not judged, as a request asked again gives something else")


def skip_mixed(own):
    skip_unsteady(own)
    if own.mixed is not None:
        pytest.skip("not judged, as requests together give something else than alone")


# ---- what a model must do --------------------------------------------------------------------------------------------


def test_a_request_alone_is_answered(own):
    check(
        own.unanswered,
        "See docs/models.md for what a model is given and what it returns. Is it another library's? --backend NAME. "
        "Does it take other prompts? --prompt, --examples or --vocab-size.",
    )


PURE = (
    "A call must be a function of its arguments: no generator of its own, no counter, no buffer, no dropout (call "
    ".eval()). The engine samples (level 1), and keeps the past (level 2)."
)


def test_a_call_leaves_its_arguments_as_they_were(own):
    skip_unanswered(own)
    _, changed = own.replayed
    trouble = Trouble("arguments that are the same after a call", f"changes in {', '.join(changed)}")
    check(trouble if changed else None, "Compute on a copy: the engine may use the arrays that it passes once more.")


def test_a_call_with_the_same_arguments_gives_the_same(own):
    skip_unanswered(own)
    check(own.replayed[0], PURE)


def test_a_request_asked_again_gives_the_same(own):
    skip_unanswered(own)
    check(
        own.unsteady,
        f"{PURE} What an earlier request left behind in the model must not matter; a cache and states that the engine "
        f"hands over are clean.",
    )


# ---- whoever shares the batch ----------------------------------------------------------------------------------------

APART = (
    "A row of the output may depend on the same row of the input only. Look for a mean, sum or softmax over dimension "
    "0, batch normalisation in training mode (call .eval()), sorted rows, code for a batch of one. If it is rounding, "
    "allow more: --tolerance."
)
PADDING = (
    "Rows are padded on the left: those of row i are tokens[i, S - lengths[i]:], the newest is tokens[i, -1]. Mask "
    "what is before them, and count positions from there. A model that knows its padding token is judged with "
    "--padding-token, one that never gets padding with --no-padding."
)
AT_EVERY_STEP = (
    "Rows come and go at every step, and stand elsewhere in the batch: remember nothing of them but what the engine "
    "hands over."
)


def test_requests_together_give_what_each_gives_alone(own):
    skip_unsteady(own)
    check(own.mixed, APART)


def test_padding_on_the_left_changes_nothing(own):
    if not own.can_pad:
        pytest.skip("does not apply: rows of this model are never padded")
    skip_mixed(own)
    check(own.misled, PADDING)


def test_more_requests_than_rows_give_what_each_gives_alone(own):
    skip_mixed(own)
    check(own.changed_together(own.engine(rows=2, padding=own.padding), "two at a time"), AT_EVERY_STEP)


def test_who_joins_in_the_midst_changes_nothing(own):
    skip_feedforward(own)
    skip_mixed(own)
    everyone = range(len(own.prompts))
    engine = own.engine(padding=own.padding)
    with own.held(engine, call=min(3, own.n), n=own.n) as first:
        streams = [first, *(own.ask(engine, own.prompts[i]) for i in everyone[1:])]
    got = [own.read(stream) for stream in streams]
    check(own.differs(everyone, got, "when others join while the first is running"), AT_EVERY_STEP)


def test_who_leaves_early_changes_nothing(own):
    skip_feedforward(own)
    skip_mixed(own)
    n = [1 + i % own.n for i in range(len(own.prompts))]
    got = own.together(own.engine(padding=own.padding), own.prompts, n)
    check(own.differs(range(len(got)), got, "when the others end at different steps", n), AT_EVERY_STEP)


def test_who_cancels_in_the_midst_of_a_step_changes_nothing(own):
    skip_mixed(own)
    engine, gone = own.engine(padding=own.padding), len(own.prompts) // 2
    with own.spy.holding(2 if own.rung is None else 4) as reached:
        with own.held(engine):
            streams = [own.ask(engine, prompt) for prompt in own.prompts]
        own.wait(reached, streams)
        own.cancel(streams[gone])
    rest = [i for i in range(len(streams)) if i != gone]
    got = [own.read(streams[i]) for i in rest]
    check(own.differs(rest, got, "when one of the others cancels"), AT_EVERY_STEP)
    got = own.answers(engine, [own.prompts[gone]])
    check(own.differs([gone], got, "after it was cancelled"), AT_EVERY_STEP)


# ---- short and long prompts ------------------------------------------------------------------------------------------


def test_a_prompt_in_chunks_gives_what_it_gives_whole(own):
    if own.rung != 2:
        pytest.skip("does not apply: only models with a cache get prompts in chunks")
    skip_mixed(own)
    engine = own.engine(rows=2, max_batch_tokens=3, block_size=4)
    check(
        own.changed_together(engine, "in chunks of at most 3 tokens"),
        "A chunk begins at x.start, not at 0: take positions from x.pos, and the past from the cache alone.",
    )


def test_what_others_left_in_the_cache_changes_nothing(own):
    if own.rung != 2:
        pytest.skip("does not apply: only models with a cache get memory that others have used")
    skip_mixed(own)
    own.spy.left = np.nan
    engine = own.engine(rows=4, max_batch_tokens=5, block_size=4)
    check(
        own.changed_together(engine, "where others left NaN in the cache"),
        "Until its row has written to it, a position holds anything, from x.kv_len on. `backend.attend` leaves it out; "
        "attention of your own must do the same, and a weight of 0 is not enough, as 0 * NaN is NaN.",
    )


def test_a_prompt_of_one_token_is_answered_or_refused(own):
    """And an empty one is refused. Neither touches the others."""
    skip_feedforward(own)
    skip_mixed(own)
    ones = list(np.unique(np.concatenate(own.prompts), axis=0)[:6, None])
    longest = int(np.argmax([len(prompt) for prompt in own.prompts]))
    for padding in (None, *own.harmless):
        engine = own.engine(padding=padding)
        with pytest.raises(InvalidRequest):
            own.ask(engine, ones[0][:0])
        alone = own.answers(engine, ones)
        got = own.together(engine, [own.prompts[0], own.prompts[longest], *ones])
        check(own.differs([0, longest], got[:2], "beside prompts of one token"), APART)
        for one, answer, want in zip(ones, got[2:], alone, strict=True):
            if want.ending == "length":
                now = "beside longer ones" if padding is None else "beside longer ones, so that it is padded"
                check(own.different(one, answer, want, now), APART if padding is None else PADDING)


def test_the_longest_prompt_is_answered(own):
    """With new tokens up to max_model_len; alone, and beside others."""
    skip_feedforward(own)
    skip_mixed(own)
    if own.limit > LONGEST:
        pytest.skip(
            f"not judged, as a context of {own.limit} tokens takes long; --max-model-len N judges a shorter one"
        )
    engine, prompt = own.engine(rows=4, longest=own.limit, padding=own.padding), own.long_prompt(own.limit - 2)
    if prompt is None:
        pytest.skip("not judged, as the examples cannot be made so long")
    [alone] = own.answers(engine, [prompt], 2)
    wanted = f"2 tokens for a prompt of {len(prompt)}, which max_model_len={own.limit} allows"
    check(
        None if (alone.ending, len(alone.items)) == ("length", 2) else Trouble(wanted, alone.told()),
        "Positions 0 to max_model_len - 1 may come: make tables that large, or max_model_len smaller.",
    )
    got = own.together(engine, [own.prompts[0], prompt, own.prompts[1]], [own.n, 2, own.n])
    check(own.different(prompt, got[1], alone, "beside two others"), APART)
    check(own.differs([0, 1], [got[0], got[2]], "beside the longest prompt"), APART)


# ---- faults stay alone -----------------------------------------------------------------------------------------------

RERUN = (
    "After a failed step rows are run again in parts: the same arguments must give the same, whatever happened in "
    "between. Keep nothing in the model."
)


class Poison(Exception):
    pass


def find_guilty(own):
    skip_mixed(own)
    if own.guilty is None:
        pytest.skip("not judged, as no prompt can be told from the others")
    return own.guilty


def check_isolated(own, ending, more, what):
    """All together: the guilty request ends so after `more` tokens, the others as alone. Then all is well again."""
    engine, everyone = own.engine(padding=own.padding), range(len(own.prompts))
    got = own.together(engine, own.prompts)
    own.spy.undo()
    guilty = got[own.guilty]
    wanted = f"{more} tokens, then {ending}, for the one request of which {what}"
    check(
        None if (guilty.ending, len(guilty.items)) == (ending, more) else Trouble(wanted, guilty.told()),
        f"{RERUN} If it does so, this is a defect of hibachi: please report it.",
    )
    rest = [i for i in everyone if i != own.guilty]
    check(own.differs(rest, [got[i] for i in rest], f"beside a request of which {what}"), RERUN)
    got = own.together(engine, own.prompts)
    check(own.differs(everyone, got, f"after a request of which {what}"), RERUN)


def test_a_call_that_raises_ends_the_guilty_request_only(own):
    """Before the model computes, and after; with the first token, and later."""
    find_guilty(own)

    def before(call, more):
        if any(own.is_guilty(row, more) for row in call.rows):
            raise Poison("made to fail by the conformance kit")

    def after(call, out, more):
        before(call, more)
        return out

    for more in (0, 1) if own.n > 1 else (0,):
        own.spy.before = lambda call, more=more: before(call, more)
        check_isolated(own, "ModelError", more, "the call raises")
        own.spy.after = lambda call, out, more=more: after(call, out, more)
        check_isolated(own, "ModelError", more, "the call raises when it is done")


def test_nan_in_a_row_ends_its_request_only(own):
    find_guilty(own)
    if own.vocab is None and np.asarray(own.alone[0].items[0]).dtype.kind != "f":
        pytest.skip("does not apply: integers cannot be NaN")

    def spoil(call, out):
        nan = np.array([np.nan if own.is_guilty(row) else 0 for row in call.rows], np.float32)
        return out + own.backend.put(nan.reshape(-1, *(1,) * (out.ndim - 1)))

    own.spy.after = spoil
    check_isolated(own, "NonFiniteOutput", 0, "the output is NaN")


def test_an_output_of_the_wrong_shape_is_refused(own):
    """And the next requests are served."""
    skip_mixed(own)
    engine = own.engine(padding=own.padding)
    for name, spoil in (
        ("a row too few", lambda call, out: out[:-1, ...]),
        ("a dimension too many", lambda call, out: out[None, ...][:0, ...]),
        ("a tuple", lambda call, out: (out,)),
    ):
        own.spy.after = spoil
        got = own.together(engine, own.prompts)
        own.spy.undo()
        for answer in got:
            wanted = Trouble(f"InvalidModelOutput for an output with {name}", answer.told())
            check(None if answer.ending == "InvalidModelOutput" else wanted, "This is a defect of hibachi: report it.")
        got = own.together(engine, own.prompts)
        check(own.differs(range(len(got)), got, f"after an output with {name}"), RERUN)
