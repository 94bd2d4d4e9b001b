"""`LLM.each` and `aeach`: any iterable of prompts, a bounded number of requests, results in either order."""

import asyncio
import contextlib
import gc
import itertools
import threading

import numpy as np
import pytest
import trio

from hibachi import (
    AutoregressiveBatchInference,
    ConfigError,
    EngineClosed,
    InvalidRequest,
    NumpyBackend,
    PromptTooLong,
    SamplingParams,
    Terms,
)
from hibachi.llm import each
from hibachi.llm.texts import Texts
from hibachi.llm.textstream import TextStream
from hibachi.llm.tokenizers.own import OwnTokenizer

from ..engine.models import PATIENCE, Background, Turnstile, until
from ..lib.letters import Letters

ROWS = 2
END = 99


class Down:
    """Level 1: the next token is the last one less 1; 1 goes to the end token. So a prompt says how long it takes."""

    vocab_size = 100

    def logits(self, tokens, lengths):
        last = np.asarray(tokens)[:, -1]
        out = np.zeros((len(last), 100), np.float32)
        out[np.arange(len(last)), np.where(last <= 1, END, last - 1)] = 100.0
        return out


class Gated(Turnstile, NumpyBackend):
    """One step at a time."""

    def guard(self):
        self.arrive()
        return contextlib.nullcontext()


def made(backend="numpy", **options):
    options = {"max_num_seqs": ROWS, "max_model_len": 64, "deterministic": False} | options
    engine = AutoregressiveBatchInference(Down(), backend=backend, padding_token=0, **options)
    params = SamplingParams(temperature=0, max_tokens=None)
    return Texts(engine, OwnTokenizer(Letters(" ")), vocab_size=100, eos_ids=(END,), default_params=params)


@pytest.fixture(scope="module")
def llm():
    with made() as llm:
        llm.generate([[2]])  # its thread is there before the first test
        yield llm


@pytest.fixture
def gated():
    backend = Gated()
    with made(backend) as llm:
        llm.gate = backend
        yield llm
        backend.open()


def answer(prompt):
    """The tokens after it: [.., 3] -> [2, 1]."""
    return list(range(prompt[-1] - 1, 0, -1))


async def alist(some):
    return [x async for x in some]


@pytest.fixture(params=["each", "asyncio", "trio"])
def read(request):
    """read(llm, prompts, ...): all that `each` gives, or `aeach` in a loop."""
    if request.param == "each":
        return lambda llm, *args, **options: list(llm.each(*args, **options))

    async def all_of(llm, args, options):
        return await alist(llm.aeach(*args, **options))

    if request.param == "asyncio":
        return lambda llm, *args, **options: asyncio.run(all_of(llm, args, options))
    return lambda llm, *args, **options: trio.run(all_of, llm, args, options)


def ids(completions):
    return [c.token_ids for c in completions]


# ---- what comes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, iter, lambda p: (x for x in p)], ids=["list", "iterator", "generator"])
def test_each_prompt_has_its_completion_in_order(llm, read, kind):
    prompts = [[9, 1 + i % 7] for i in range(25)]
    out = read(llm, kind(prompts))
    assert ids(out) == [answer(p) for p in prompts] and [c.prompt for c in out] == prompts


def test_in_order_of_completion_each_comes_with_its_place(llm, read):
    prompts = [[40], *[[2]] * 12]
    out = read(llm, prompts, ordered=False)
    assert sorted(i for i, _ in out) == list(range(13))
    assert all(c.token_ids == answer(prompts[i]) and c.prompt == prompts[i] for i, c in out)


def test_the_slow_one_comes_last(gated):
    rows = gated.each([[60], *[[2]] * 12], ordered=False)
    first = Background(next, rows)
    while first.is_alive():
        gated.gate.let()
        first.join(0.001)
    assert first.result()[0] == 1
    gated.gate.open()
    assert [i for i, _ in rows] != sorted(range(13))


def test_texts_and_a_single_prompt(llm, read):
    (one,) = read(llm, "#")
    assert one.prompt == "#" and one.text == '"!'
    assert ids(read(llm, [3, 4])) == [[3, 2, 1]] and read(llm, []) == [] and read(llm, iter(())) == []
    assert ids(read(llm, np.array([[1, 3], [1, 2]]))) == [[2, 1], [1]]


def test_params_and_terms_go_in_step(llm, read):
    params = (SamplingParams(temperature=0, max_tokens=n) for n in itertools.count(1))
    out = read(llm, [[9]] * 4, params, terms=itertools.repeat(Terms(priority=3)))
    assert ids(out) == [[8], [8, 7], [8, 7, 6], [8, 7, 6, 5]]
    assert ids(read(llm, [[9], [8]], SamplingParams(temperature=0, max_tokens=1))) == [[8], [7]]


def test_a_stop_string_ends_its_request(llm, read):
    (out,) = read(llm, ["Z"], SamplingParams(temperature=0, max_tokens=None, stop="X"))
    assert out.text == "Y" and out.finish_reason == "stop"


def test_a_stop_string_is_noticed_while_the_request_runs(gated):
    rows = gated.each(["Z"], SamplingParams(temperature=0, max_tokens=None, stop="X"))
    first = Background(next, rows)
    gated.gate.let(4)
    assert first.result().text == "Y"


def test_streams_that_pause_are_read(read):
    with made(pause_after=2) as llm:
        assert ids(read(llm, [[30], [20], [25], [3], [9]])) == [answer([n]) for n in (30, 20, 25, 3, 9)]


def test_several_continuations(llm, read):
    out = read(llm, [[4]] * 5, SamplingParams(n=3, temperature=0, max_tokens=2))
    assert [[c.token_ids for c in one.choices] for one in out] == [[[3, 2]] * 3] * 5
    out = read(llm, [[4]] * 2, SamplingParams(n=9, temperature=0, max_tokens=1))  # more than may run
    assert [len(one.choices) for one in out] == [9, 9]


# ---- bounds ------------------------------------------------------------------------------------------------------


def endless(pulled):
    for i in itertools.count():
        pulled.append(i)
        yield [9, 2 + i % 3]


def test_no_more_is_queued_than_twice_the_rows(llm):
    class Counting(Texts):
        def submit(self, *args, **kwargs):
            out = super().submit(*args, **kwargs)
            running.extend(s for s in out)
            live.append(sum(s.finish_reason is None for s in running))
            return out

    running, live, pulled = [], [], []
    some = Counting(llm.engine, llm.tokenizer, vocab_size=100, eos_ids=(END,), default_params=llm.default_params)
    for n, c in enumerate(some.each(endless(pulled), ahead=20)):
        assert c.token_ids == answer([2 + n % 3]) and len(pulled) <= n + 1 + 20
        if n == 50:
            break
    assert max(live) <= 2 * ROWS and len(running) - 51 <= 20


@pytest.mark.parametrize("ahead", [None, 7])
def test_a_slow_first_row_holds_up_the_others_only_as_far_as_said(gated, ahead, monkeypatch):
    pulled, queued, submit = [], [], gated.submit

    def queue(*args, **kwargs):
        streams = submit(*args, **kwargs)
        queued.extend(streams)
        return streams

    monkeypatch.setattr(gated, "submit", queue)

    def prompts():
        for prompt in [[60], *[[1]] * 100]:
            pulled.append(prompt)
            yield prompt

    rows = gated.each(prompts(), ahead=ahead)
    first = Background(next, rows)
    gated.gate.wait()
    others = (ahead or 2 * ROWS) - 1
    while (stats := gated.stats()).finished < others:  # they are computed meanwhile
        if len(queued) > 1 + stats.finished:  # no step goes by while the next of them is on its way
            gated.gate.let()
            gated.gate.wait()
        assert stats.steps < 55  # of the 60 that the first takes
    until(lambda: len(pulled) == 1 + others and gated.stats().running == 1)
    gated.gate.open()
    assert first.result().token_ids == answer([60])
    assert len(list(rows)) == 100


def test_others_in_the_queue_are_waited_for(read):
    with made(max_num_queued_reqs=1) as llm:
        mine = llm.submit([[50], [50], [50]])
        assert ids(read(llm, [[3]] * 9)) == [[2, 1]] * 9
        for stream in mine:
            stream.close()


def test_what_never_fits_is_an_error(read, monkeypatch):
    monkeypatch.setattr(each, "IN_VAIN", 0.1)
    with made(max_num_queued_reqs=0) as llm, pytest.raises(Exception, match="The queue is full"):
        read(llm, [[3]], SamplingParams(n=5))


# ---- iterables that block, and that are asynchronous ----------------------------------------------------------------


def test_a_generator_may_wait_for_the_results_before(llm, read):
    """Each prompt depends on the answer to the one before."""
    came = threading.Event()

    def prompts():
        yield [9, 3]
        assert came.wait(PATIENCE)
        yield [9, 2]

    def note(rows):
        for row in rows:
            came.set()
            yield row

    assert ids(note(llm.each(prompts()))) == [[2, 1], [1]]


def test_a_loop_goes_on_while_a_generator_blocks(llm):
    go = threading.Event()

    def prompts():
        yield [3]
        assert go.wait(PATIENCE)
        yield [2]

    async def main():
        rows = aiter(llm.aeach(prompts()))
        got = [await anext(rows)]
        asyncio.get_running_loop().call_later(0.001, go.set)  # the loop must run for that
        return [*got, *await alist(rows)]

    assert ids(asyncio.run(main())) == [[2, 1], [1]]


@pytest.mark.parametrize("run", [asyncio.run, lambda c: trio.run(lambda: c)], ids=["asyncio", "trio"])
def test_an_asynchronous_iterable(llm, run):
    answered = []

    async def prompts():
        for i in range(6):
            while i > len(answered):  # comes when the one before was answered
                await (asyncio if run is asyncio.run else trio).sleep(0)
            yield [9, 2 + i]

    async def main():
        async for c in llm.aeach(prompts()):
            answered.append(c)

    run(main())
    assert ids(answered) == [answer([2 + i]) for i in range(6)]


# ---- errors ------------------------------------------------------------------------------------------------------

BAD = [[3], [2], [100], [4], []]


def test_an_error_is_raised_at_its_place(llm, read):
    got = []
    rows = llm.each(BAD)
    with pytest.raises(InvalidRequest, match="Token ids must be from 0 to 99"):
        got.extend(rows)
    assert ids(got) == [[2, 1], [1]] and list(rows) == []
    with pytest.raises(InvalidRequest, match="Token ids must be from"):
        read(llm, BAD)
    with pytest.raises(InvalidRequest, match="Token ids"):
        read(llm, iter(BAD), ordered=False)


def test_errors_are_returned_in_the_place_of_completions(llm, read):
    out = read(llm, [*BAD, [1] * 70, [5]], errors="return")
    assert [type(x).__name__ for x in out] == [
        *["Completion"] * 2, "InvalidRequest", "Completion", "InvalidRequest", "PromptTooLong", "Completion",
    ]  # fmt: skip
    assert isinstance(out[5], PromptTooLong) and out[6].token_ids == answer([5])
    out = dict(read(llm, BAD, ordered=False, errors="return"))
    assert out[3].token_ids == answer([4]) and isinstance(out[4], InvalidRequest)


def test_an_error_of_the_iterable_comes_last(llm, read):
    def prompts():
        yield [3]
        yield [40]
        raise KeyError("file")

    got = []
    with pytest.raises(KeyError, match="file"):
        got.extend(llm.each(prompts(), ordered=False, errors="return"))
    assert sorted(i for i, _ in got) == [0, 1]
    with pytest.raises(KeyError):
        read(llm, prompts())


def test_too_few_params(llm, read):
    for params in ([SamplingParams()], iter([SamplingParams()])):
        with pytest.raises(InvalidRequest, match="params must be one, or as many as there are prompts; they ended b"):
            read(llm, [[3], [4]], params)


def test_an_error_while_it_runs(read):
    class Fails(Down):
        def logits(self, tokens, lengths):
            if (np.asarray(tokens)[:, -1] == 7).any():
                raise RuntimeError("seven")
            return super().logits(tokens, lengths)

    engine = AutoregressiveBatchInference(
        Fails(), backend="numpy", padding_token=0, max_num_seqs=ROWS, max_model_len=64, deterministic=False
    )
    params = SamplingParams(temperature=0)
    with Texts(engine, OwnTokenizer(Letters(" ")), vocab_size=100, eos_ids=(END,), default_params=params) as llm:
        out = read(llm, [[3], [8], [5]], errors="return")
    assert ids([out[0], out[2]]) == [answer([3]), answer([5])] and "seven" in str(out[1])


def test_a_tokenizer_that_fails(read):
    class Breaks(Letters):
        def decode(self, ids):
            if 5 in ids:
                raise ValueError("five")
            return super().decode(ids)

    with made() as llm:
        llm.tokenizer = OwnTokenizer(Breaks())
        for stop in ((), "~"):
            params = SamplingParams(temperature=0, max_tokens=None, stop=stop)
            out = read(llm, [[3], [9], [4]], params, errors="return")
            assert ids([out[0], out[2]]) == [answer([3]), answer([4])] and str(out[1]) == "five"
        until(lambda: not llm.stats().running)


def test_a_closed_engine(read):
    llm = made()
    rows = llm.each(itertools.repeat([3]), errors="return")
    next(rows)
    llm.close()
    with pytest.raises(EngineClosed):
        for _ in rows:
            pass
    with pytest.raises(EngineClosed):
        read(llm, [[3]], errors="return")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"errors": "ignore"}, 'errors must be "raise" or "return"; got'),
        ({"ahead": 0}, "ahead must be an integer >= 1"),
        ({"ahead": True}, "ahead must be an integer >= 1"),
        ({"params": 3}, "params must be a SamplingParams, an iterable of them, or None; got 3"),
        ({"terms": "now"}, "terms must be a Terms, an iterable of them, or None; got 'now'"),
        ({"prompts": 3}, "Expected a prompt"),
    ],
)
def test_what_cannot_be_is_refused_at_the_call(llm, options, message):
    for call in (llm.each, llm.aeach):
        with pytest.raises((ConfigError, InvalidRequest), match=message):
            call(**({"prompts": [[3]]} | options))


# ---- leaving -----------------------------------------------------------------------------------------------------


def leave_by_break(llm):
    for _ in llm.each(itertools.repeat([40])):
        break


def leave_by_break_of_rows_that_are_held(llm):
    rows = llm.each(itertools.repeat([40]))
    for _ in rows:
        break
    assert list(rows) == []


def leave_by_exception(llm):
    with pytest.raises(KeyError):
        for _ in llm.each(itertools.repeat([40])):
            raise KeyError


def leave_by_close(llm):
    with llm.each([[40]] * 9) as rows:
        next(rows)


async def break_async(llm):
    async for _ in llm.aeach(itertools.repeat([40])):
        break
    await asyncio.sleep(0) if trio_is_off() else await trio.sleep(0)


def trio_is_off():
    from hibachi.engine.streams.channel import in_trio

    return in_trio() is None


async def agenerator():
    while True:
        yield [40]
        await (asyncio if trio_is_off() else trio).sleep(0)


async def leave_by_timeout(llm):
    if trio_is_off():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await alist(llm.aeach(agenerator()))
    else:
        with trio.move_on_after(0.02):
            await alist(llm.aeach(agenerator()))


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_break,
        leave_by_break_of_rows_that_are_held,
        leave_by_exception,
        leave_by_close,
        lambda llm: asyncio.run(break_async(llm)),
        lambda llm: trio.run(break_async, llm),
        lambda llm: asyncio.run(leave_by_timeout(llm)),
        lambda llm: trio.run(leave_by_timeout, llm),
    ],
)
def test_leaving_cancels_what_runs(leave):
    before = threading.active_count()
    with made(max_model_len=1000) as llm:
        leave(llm)
        until(lambda: llm.stats().running == llm.stats().waiting == 0)
    until(lambda: threading.active_count() <= before)  # nor is the thread that reads left


def test_nothing_is_kept_of_what_was_read(llm):
    def streams():
        gc.collect()
        return sum(isinstance(one, TextStream) for one in gc.get_objects())

    before = streams()
    with llm.each(itertools.repeat([3])) as rows:
        for _ in range(50):
            next(rows)
        assert streams() - before <= 2 * ROWS
    until(lambda: streams() <= before)
