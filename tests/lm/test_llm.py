"""Text in, text out, on the model that ships. Nothing here knows what that model writes."""

import asyncio
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hibachi import (
    LLM,
    BackendNotFound,
    BackendNotInstalled,
    ConfigError,
    EngineClosed,
    HibachiError,
    InvalidModelFiles,
    InvalidRequest,
    MissingExtra,
    NumpyBackend,
    PromptTooLong,
    RequestError,
    SamplingParams,
    UnknownArchitecture,
    UnsupportedOperation,
)
from hibachi.backend.kernels.library import NUMERICS, SWITCH, possible
from hibachi.cli.main import main
from hibachi.llm import llm as module
from hibachi.llm.chatformat.format import PLAIN
from hibachi.llm.chatformat.reading.reader import AnswerReader
from hibachi.llm.model.describe import describe
from hibachi.llm.model.files import TINY

from ..engine.models import GatedNumpy, until

PROMPTS = ["She was", "It is a truth universally acknowledged, that", "Mr. Knightley looked at her with", '"My dear,']
VOCAB, CONTEXT = 2048, 512


def greedy(n=24, **options):
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **options)


def drawn(seed, tokens=24, **options):
    return SamplingParams(seed=seed, max_tokens=tokens, ignore_eos=True, **options)


def ids(completions):
    return [c.token_ids for c in completions]


def joined(pieces):
    """Text and token ids of all pieces."""
    return "".join(p.text for p in pieces), [i for p in pieces for i in p.token_ids]


async def listed(stream):
    return [piece async for piece in stream]


def fixture(make):
    """An LLM for all tests of this file, its thread running."""
    with make() as llm:
        llm.generate(PROMPTS[0], greedy(1))
        yield llm


@pytest.fixture(scope="module")
def llm():
    yield from fixture(lambda: LLM("tiny"))


@pytest.fixture(scope="module")
def small(llm):
    """With a context of 32 tokens."""
    yield from fixture(lambda: LLM("tiny", max_model_len=32))


@pytest.fixture(scope="module")
def expected(llm):
    """What greedy decoding gives for each prompt."""
    return llm.generate(PROMPTS, greedy())


def test_the_text_model_within_one_of_images_writes_what_it_writes_alone(tmp_path, expected):
    """Its tensors have a prefix, those of other media are not even of a dtype that is read."""
    numbers = pytest.importorskip("safetensors.numpy")
    folder = shutil.copytree(TINY, tmp_path / "model", ignore=shutil.ignore_patterns("generation_config.json"))
    text = json.loads((TINY / "config.json").read_text()) | {"model_type": "mistral", "sliding_window": None}
    text["eos_token_id"] = 7
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    tensors = {f"language_model.{name}": t for name, t in numbers.load_file(TINY / "model.safetensors").items()}
    tensors["vision_tower.patch_conv.weight"] = np.zeros((2, 3), np.int8)
    numbers.save_file(tensors, folder / "model.safetensors")
    for ids_of_all, eos in ({}, (7,)), ({"eos_token_id": [8, 9]}, (8, 9)):
        (folder / "config.json").write_text(json.dumps(whole | ids_of_all))
        with LLM(folder) as llm:
            assert llm.eos_ids == (*eos, 0) and ids(llm.generate(PROMPTS, greedy())) == ids(
                expected
            )  # 0: the tokenizer's
    d, alone = describe(folder), describe(TINY)
    assert d.problem is None and (d.architecture, d.parameters) == (whole["architectures"][0], alone.parameters)
    assert (d.context, d.vocab_size, d.token) == (CONTEXT, VOCAB, alone.token)


# ---- prompts and results ---------------------------------------------------------------------------------------------


def test_a_prompt_is_a_text_or_token_ids(llm, expected):
    own = llm.tokenizer.encode(PROMPTS[0])
    for prompt in (PROMPTS[0], [PROMPTS[0]], own, tuple(own), [own], np.array(own), np.array([own])):
        [out] = llm.generate(prompt, greedy())
        assert (out.token_ids, out.text, out.prompt_token_ids) == (expected[0].token_ids, expected[0].text, own)
    assert llm.generate(PROMPTS[0], greedy())[0].prompt == PROMPTS[0]


def test_results_come_in_the_order_of_the_prompts(llm, expected):
    lengths = [20, 1, 12, 5]
    outs = llm.generate(PROMPTS, [greedy(n) for n in lengths])
    assert ids(outs) == [e.token_ids[:n] for e, n in zip(expected, lengths, strict=True)]
    assert [out.prompt for out in outs] == PROMPTS
    assert {out.finish_reason for out in outs} == {"length"}


def test_more_prompts_than_rows_wait_their_turn(llm):
    prompts = [[i] for i in range(1, 41)]
    outs = llm.generate(prompts, greedy(3))
    assert [out.prompt for out in outs] == prompts and {len(out.token_ids) for out in outs} == {3}


def test_no_prompts_no_results(llm):
    assert llm.generate([], greedy()) == [] and asyncio.run(llm.agenerate([])) == []


def test_parameters_may_differ_within_a_batch(llm, expected):
    params = [greedy(), drawn(7), drawn(8, temperature=0.5, top_k=5), drawn(9, top_p=0.5)]
    outs = llm.generate(PROMPTS, params)
    assert outs[0].token_ids == expected[0].token_ids
    assert ids(outs[1:]) == [llm.generate(p, q)[0].token_ids for p, q in zip(PROMPTS[1:], params[1:], strict=True)]


def test_defaults_are_those_of_vllm_but_for_the_limit(llm):
    """V: vLLM's max_tokens is 16; here None: up to the model's own end, or the end of the context."""
    assert SamplingParams() == SamplingParams(temperature=1.0, top_p=1.0, max_tokens=None)
    [out] = llm.generate(PROMPTS[0], SamplingParams(max_tokens=16))
    assert 1 <= len(out.token_ids) <= 16 and out.logprobs is None
    [out] = llm.generate([5, 6], greedy().with_(max_tokens=None, ignore_eos=True))
    assert len(out.token_ids) == llm.engine.max_model_len - 2


def test_requests_without_parameters_get_those_of_the_model(llm, model_copy, expected):
    """From generation_config.json. Parameters of one's own take the place of all of them."""
    assert llm.default_params == SamplingParams(temperature=0.8, top_p=0.95)
    config = b'{"do_sample": false, "top_p": 0.3, "max_new_tokens": 7, "stop_strings": ["never that"]}'
    with LLM(model_copy({"generation_config.json": lambda _: config})) as own:
        assert own.default_params == SamplingParams(temperature=0, max_tokens=7, stop="never that")
        assert own.generate(PROMPTS[0])[0].token_ids == expected[0].token_ids[:7]
        pieces = list(own.stream(PROMPTS[0]))
        assert joined(pieces)[1] == expected[0].token_ids[:7]
        assert own.generate(PROMPTS[0], drawn(1)) == llm.generate(PROMPTS[0], drawn(1))
        longer = own.default_params.with_(max_tokens=9)
        two = ids(own.generate(PROMPTS[:2], [None, longer]))
        assert two == [expected[0].token_ids[:7], expected[1].token_ids[:9]]


def test_agenerate_is_generate(llm, expected):
    async def main():
        both = llm.agenerate(PROMPTS, greedy()), llm.agenerate(PROMPTS[0], greedy())
        return await asyncio.gather(*both)

    many, one = asyncio.run(main())
    assert many == expected and one == expected[:1]


# ---- sampling --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-6}, {"temperature": 1e-40}])
def test_what_leaves_one_choice_is_greedy(llm, expected, options):
    assert ids(llm.generate(PROMPTS, drawn(3, **options))) == ids(expected)


@pytest.mark.parametrize("options", [{"temperature": 1e30}, {"top_k": 10**9}, {"top_k": -1}, {"top_p": 1 - 1e-9}])
def test_limits_far_out_are_no_limits(llm, options):
    [out] = llm.generate(PROMPTS[0], drawn(3, **options))
    assert len(out.token_ids) == 24
    if "temperature" not in options:
        assert out.token_ids == llm.generate(PROMPTS[0], drawn(3))[0].token_ids


# ---- logprobs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [0, 1, 5])
def test_logprobs_name_the_likeliest_tokens_and_the_drawn_one(llm, wanted):
    [out] = llm.generate(PROMPTS[0], drawn(5, logprobs=wanted))
    assert len(out.logprobs) == len(out.token_ids)
    for token, found in zip(out.token_ids, out.logprobs, strict=True):
        assert token in found and len(found) in (wanted, wanted + 1)
        assert list(found.values()) == sorted(found.values(), reverse=True) and max(found.values()) <= 0


def test_logprobs_are_those_of_each_prefix_computed_anew(llm):
    [out] = llm.generate(PROMPTS[1], drawn(5, 12, temperature=0.7, top_p=0.9, logprobs=1))
    prefixes = [out.prompt_token_ids + out.token_ids[:i] for i in range(12)]
    anew = [c.logprobs[0] for c in llm.generate(prefixes, greedy(1, logprobs=VOCAB))]
    for whole in anew:
        assert len(whole) == VOCAB and np.exp(list(whole.values())).sum() == pytest.approx(1)
    own = sum(found[token] for token, found in zip(out.token_ids, out.logprobs, strict=True))
    assert own == pytest.approx(sum(whole[token] for token, whole in zip(out.token_ids, anew, strict=True)), abs=1e-4)


def test_logprobs_end_where_the_text_does(llm, expected):
    stream = llm.stream(PROMPTS[0], greedy(logprobs=0, stop=expected[0].text[10:14]))
    until(lambda: stream.tokens.finish_reason is not None)  # the engine was faster than the reader
    _, tokens = joined(list(stream))
    out = stream.completion()
    assert len(out.logprobs) == len(out.token_ids) < len(expected[0].token_ids) and out.token_ids == tokens


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_a_stop_string_may_cross_tokens(llm, expected):
    pieces = [piece.text for piece in llm.stream(PROMPTS[1], greedy())]
    border = len("".join(pieces[:6]))
    text = expected[1].text
    stop = text[border - 2 : border + 2]
    end = text.index(stop)
    outs = llm.generate(PROMPTS, [greedy(), greedy(stop=["never that", stop]), greedy(), greedy()])
    assert (outs[1].text, outs[1].finish_reason) == (text[:end], "stop")
    assert outs[1].token_ids == expected[1].token_ids[: len(outs[1].token_ids)]  # with those of the stop string
    assert llm.tokenizer.decode(outs[1].token_ids).startswith(text[:end] + stop)
    assert [outs[0], *outs[2:]] == [expected[0], *expected[2:]]
    streamed = list(stream := llm.stream(PROMPTS[1], greedy(stop=stop)))
    assert joined(streamed) == (text[:end], outs[1].token_ids) and stream.finish_reason == "stop"


def test_a_stop_string_frees_the_row(llm, expected):
    before = llm.stats().new_tokens
    llm.generate(PROMPTS[0], greedy(400, stop=expected[0].text[:5]))
    until(lambda: llm.stats().running == 0)
    assert llm.stats().new_tokens - before < 100


def test_a_stop_id_ends_the_text_before_it(llm, expected):
    tokens = expected[0].token_ids
    end = tokens.index(tokens[9])
    [out] = llm.generate(PROMPTS[0], greedy(stop_token_ids=[VOCAB + 5, tokens[9]]))
    assert (out.token_ids, out.finish_reason) == (tokens[:end], "stop")
    assert out.text == llm.tokenizer.decode(tokens[:end])


def test_end_of_text_ends_it_unless_ignored(model_copy, expected):
    tokens = expected[0].token_ids
    eos = tokens[9]
    folder = model_copy({"generation_config.json": lambda _: b'{"eos_token_id": [%d, 0]}' % eos})
    with LLM(folder) as llm:
        [out] = llm.generate(PROMPTS[0], greedy().with_(ignore_eos=False))
        assert (out.token_ids, out.finish_reason) == (tokens[: tokens.index(eos)], "stop")
        assert llm.generate(PROMPTS[0], greedy())[0].token_ids == tokens


def test_special_tokens_that_are_shown_stand_in_the_text(llm):
    [end] = llm.tokenizer.special_ids
    params = drawn(3, tokens=12, temperature=2.0, logit_bias={end: 20})
    [hidden] = llm.submit(["x"], params)
    [shown] = llm.submit(["x"], params, reader=AnswerReader(PLAIN, shown=frozenset({end})))
    for stream in (hidden, shown):
        for _ in stream:
            pass
    hidden, shown = hidden.completion(), shown.completion()
    assert hidden.token_ids == shown.token_ids and end in shown.token_ids
    assert hidden.text == llm.tokenizer.decode(hidden.token_ids)
    assert shown.text == llm.tokenizer.decode(shown.token_ids, skip_special_tokens=False) != hidden.text


@pytest.mark.parametrize("limit", [None, 30, 1000])
def test_the_end_of_the_context_ends_the_text(small, limit):
    [out] = small.generate([1, 2, 3], greedy(limit))
    assert (len(out.token_ids), out.finish_reason) == (29, "length")


def test_the_longest_prompt_gets_one_token(small):
    [out] = small.generate([7] * 31, greedy(None))
    assert (len(out.token_ids), out.finish_reason) == (1, "length")


# ---- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["for", "async for"])
@pytest.mark.parametrize("params", [greedy(), drawn(1, 60, temperature=1e3), drawn(2, 60, temperature=1e3)])
def test_the_pieces_are_the_text(llm, way, params):
    """At a high temperature anything comes, halves of characters among it."""
    stream = llm.stream(PROMPTS[2], params)
    pieces = list(stream) if way == "for" else asyncio.run(listed(stream))
    [out] = llm.generate(PROMPTS[2], params)
    assert joined(pieces) == (out.text, out.token_ids) and out.text == llm.tokenizer.decode(out.token_ids)
    assert stream.completion() == out and stream.finish_reason == out.finish_reason == "length"
    assert all(p.text for p in pieces[:-1])


def test_who_reads_late_gets_one_piece_for_each_continuation(llm):
    stream = llm.stream(PROMPTS[2], drawn(1, logprobs=1, n=2))
    until(lambda: all(c.tokens.finish_reason for c in stream.choices))
    pieces = asyncio.run(stream.come())
    [out] = llm.generate(PROMPTS[2], drawn(1, logprobs=1, n=2))
    assert [(p.index, p.text, p.token_ids, p.logprobs) for p in pieces] == [
        (c.index, c.text, c.token_ids, c.logprobs) for c in out.choices
    ]
    assert asyncio.run(stream.come()) == []


def test_the_text_goes_on_after_the_prompt(model_copy, expected):
    """With a tokenizer that drops a space at the beginning of a text, as those of Llama 2 do."""

    def dropping(data):
        tokenizer = json.loads(data)
        strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        tokenizer["decoder"] = {"type": "Sequence", "decoders": [tokenizer["decoder"], strip]}
        return json.dumps(tokenizer).encode()

    assert any(e.text.startswith(" ") for e in expected)
    with LLM(model_copy({"tokenizer.json": dropping})) as llm:
        assert [out.text for out in llm.generate(PROMPTS, greedy())] == [e.text for e in expected]


def test_leaving_the_loop_frees_the_row(llm):
    stream = llm.stream(PROMPTS[0], greedy(400))
    for _ in stream:
        break
    assert stream.finish_reason == "cancelled"
    until(lambda: llm.stats().running == 0)
    with pytest.raises(RequestError, match="ended early, which cancels the request"):
        stream.completion()


def test_cancelling_the_task_frees_the_rows(llm):
    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(llm.agenerate(PROMPTS, greedy(400)), 0.05)

    asyncio.run(main())
    until(lambda: llm.stats().running == llm.stats().waiting == 0)


def test_a_completion_before_the_end_is_refused(llm):
    with llm.stream(PROMPTS[0], greedy(400)) as stream, pytest.raises(RequestError):
        stream.completion()


# ---- life ------------------------------------------------------------------------------------------------------------


def test_closing_ends_what_runs():
    llm = LLM("tiny")
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(llm.generate, PROMPTS, greedy(400))
        stream = llm.stream(PROMPTS[0], greedy(400))
        next(iter(stream.tokens))
        llm.close()
        with pytest.raises(EngineClosed, match="closed"):
            future.result()
    for call in (llm.generate, llm.stream, lambda p: asyncio.run(llm.agenerate(p))):
        with pytest.raises(EngineClosed):
            call(PROMPTS[0])
    llm.close()


def test_a_stream_of_a_closed_engine_says_so():
    with LLM("tiny") as llm:
        stream = llm.stream(PROMPTS[0], greedy(400))
    list(stream)
    assert stream.finish_reason == "closed"
    with pytest.raises(EngineClosed):
        stream.completion()


def test_it_closes_with_its_block():
    async def main():
        async with LLM("tiny") as llm:
            await llm.agenerate(PROMPTS[0], greedy(1))
        return llm

    with LLM("tiny") as llm:
        llm.generate(PROMPTS[0], greedy(1))
    for closed in (llm, asyncio.run(main())):
        with pytest.raises(EngineClosed):
            closed.generate(PROMPTS[0])


def test_draining_takes_nothing_new():
    with LLM("tiny") as llm:
        stream = llm.stream(PROMPTS[0], greedy(5))
        assert llm.drain() and len(list(stream.tokens)) == 5
        with pytest.raises(EngineClosed, match="no new requests"):
            llm.generate(PROMPTS[0])


# ---- chat ------------------------------------------------------------------------------------------------------------

TEMPLATE = b"{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ name }}:"
HELLO = [{"role": "user", "content": "How do you do?"}]


def test_a_chat_is_its_rendered_text(model_copy):
    with LLM(model_copy({"chat_template.jinja": lambda _: TEMPLATE})) as llm:
        [out] = llm.chat(HELLO, greedy(), name="Emma")
        assert out.prompt == "user: How do you do?\nEmma:"
        assert out == llm.generate(out.prompt, greedy())[0]
        both = llm.chat([HELLO, HELLO + HELLO], [greedy(3), greedy(5)])
        assert [len(o.token_ids) for o in both] == [3, 5] and both[1].prompt.count("do?") == 2
        for wrong in ("Hello", ["Hello"], HELLO[0], [[]]):
            with pytest.raises(InvalidRequest, match="list of messages"):
                llm.chat(wrong)


# ---- bad input -------------------------------------------------------------------------------------------------------

REQUESTS = {
    "empty text": (lambda llm: llm.generate(""), InvalidRequest, "at least one token; got ''. Write"),
    "empty ids": (lambda llm: llm.generate([[]]), InvalidRequest, "at least one token; got"),
    "prompt over the context": (
        lambda llm: llm.generate([1] * CONTEXT),
        PromptTooLong,
        "at most 511 tokens; got 512. Shorten it",
    ),
    "ids of another tokenizer": (lambda llm: llm.generate([1, VOCAB]), InvalidRequest, "from 0 to 2047.*got 1 to 2048"),
    "negative id": (lambda llm: llm.generate([-1, 2]), InvalidRequest, "from 0 to 2047.*got -1 to 2"),
    "huge id": (lambda llm: llm.generate([2**70]), InvalidRequest, "must hold numbers"),
    "no prompt": (lambda llm: llm.generate(None), InvalidRequest, "Expected a prompt.*got None"),
    "bytes": (lambda llm: llm.generate(b"She"), InvalidRequest, "Expected a prompt.*got b'She'"),
    "bytes in a list": (lambda llm: llm.generate(["She", b"She"]), InvalidRequest, "a text or a list of token ids"),
    "half a character": (lambda llm: llm.generate("\ud800"), InvalidRequest, "valid Unicode"),
    "floats": (lambda llm: llm.stream([1.5]), InvalidRequest, "a text or a list of token ids"),
    "bools": (lambda llm: llm.stream([True]), InvalidRequest, "a text or a list of token ids"),
    "bad among good": (
        lambda llm: llm.generate([*PROMPTS, [1] * CONTEXT], greedy()),
        PromptTooLong,
        "at most 511 tokens; got 512",
    ),
    "parameters for another number": (
        lambda llm: llm.generate(PROMPTS, [greedy()] * 3),
        InvalidRequest,
        "one for each of 4 prompts; got 3",
    ),
    "parameters of another type": (
        lambda llm: llm.generate(PROMPTS, {"max_tokens": 3}),
        InvalidRequest,
        "must be a SamplingParams.*got {'max_tokens': 3}",
    ),
    "stop token of another rank": (
        lambda llm: llm.engine.run([1, 2], stop_rule=np.zeros((2, 2), int)),
        InvalidRequest,
        r"shape of one token, \(\) or \(1,\); got \(2, 2\). Reshape",
    ),
    "stop id of another rank": (
        lambda llm: llm.generate(PROMPTS, SamplingParams(stop_token_ids=[[1, 2]])),
        InvalidRequest,
        "stop_token_ids must be integers >= 0; got",
    ),
    "chat without a template": (lambda llm: llm.chat(HELLO), InvalidRequest, "no chat template.*Send plain text"),
}


@pytest.fixture
def gated():
    """An LLM that computes one step at a time."""
    backend = GatedNumpy()
    with LLM("tiny", backend=backend) as llm:
        yield llm
        backend.open()


@pytest.fixture
def witness(gated, expected):
    """Another request, in the midst of a step; afterwards it must have gone on as if nothing had happened."""
    stream = gated.stream(PROMPTS[0], greedy())
    gated.backend.wait()
    yield
    assert stream.finish_reason is None and gated.stats().waiting == 0 and gated.stats().running == 1
    gated.backend.open()
    list(stream)
    assert stream.completion() == expected[0]
    stats = gated.stats()
    assert (stats.finished, stats.failed) == (1, 0) and stats.prompt_tokens == len(expected[0].prompt_token_ids)


@pytest.mark.parametrize("what", REQUESTS)
def test_a_bad_request_is_refused_and_touches_nobody(witness, gated, what):
    call, error, message = REQUESTS[what]
    with pytest.raises(error, match=message) as e:
        call(gated)
    assert isinstance(e.value, RequestError)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_tokens": 0}, r"max_tokens must be an integer >= 1 \(or None: no limit\); got 0"),
        ({"max_tokens": -3}, "max_tokens must be .* got -3"),
        ({"max_tokens": 1.5}, "max_tokens must be .* got 1.5"),
        ({"max_tokens": True}, "max_tokens must be .* got True"),
        ({"temperature": -0.1}, "temperature must be a finite number >= 0 .* got -0.1"),
        ({"temperature": float("nan")}, "temperature must be .* got nan"),
        ({"temperature": float("inf")}, "temperature must be .* got inf"),
        ({"temperature": "hot"}, "temperature must be .* got 'hot'"),
        ({"top_k": -2}, "top_k must be an integer >= -1 .* got -2"),
        ({"top_p": 0}, r"top_p must be a number in \(0, 1\]; got 0"),
        ({"top_p": 1.01}, "top_p must be .* got 1.01"),
        ({"seed": -1}, "seed must be an integer >= 0 .* got -1"),
        ({"logprobs": -1}, "logprobs must be an integer >= 0 .* got -1"),
        ({"stop": ""}, "stop must be non-empty strings; got ''"),
        ({"stop": 3}, "stop must be non-empty strings; got 3"),
        ({"stop_token_ids": 3.5}, "stop_token_ids must be integers >= 0; got 3.5"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be integers >= 0"),
    ],
    ids=str,
)
def test_bad_parameters_are_refused(options, message):
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**options)


def test_stop_may_be_none_or_a_single_id():
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    assert SamplingParams(stop_token_ids=3) == SamplingParams(stop_token_ids=[3])


@pytest.mark.parametrize(
    "what, error, message",
    [
        ("no config", InvalidModelFiles, r"config\.json is missing. Expected a directory in Hugging Face layout"),
        ("config is no JSON", InvalidModelFiles, r"config\.json cannot be read as JSON.*download the file again"),
        ("unknown architecture", UnknownArchitecture, r"is not registered. Nearest known: LlamaForCausalLM"),
        ("no weights", InvalidModelFiles, r"expected model\.safetensors.*Download them"),
        ("truncated weights", InvalidModelFiles, "not a complete safetensors file.*download the file again"),
        ("weights of another shape", InvalidModelFiles, "is missing.*from one download"),
        ("other tokenizer", InvalidModelFiles, "ids below vocab_size 2048.*; got 1000000 for .* Take both"),
    ],
)
def test_a_damaged_model_is_refused(witness, damaged_models, what, error, message):
    with pytest.raises(error, match=f"(?s){message}") as e:
        LLM(damaged_models[what])
    assert isinstance(e.value, ConfigError)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"model": ""}, ConfigError, "model must be a path or a name, such as .*; got an empty one"),
        ({"model": "no/such/folder"}, InvalidModelFiles, 'no folder no/such/folder: expected "tiny", a folder'),
        ({"backend": "numqy"}, BackendNotFound, "'numqy' is neither a backend .known: .*numpy.* nor a module"),
        ({"backend": "os"}, BackendNotFound, "'os' does not follow the array API. Known backends: .*numpy"),
        ({"backend": "os:nothing"}, BackendNotFound, "no attribute 'nothing'"),
        (
            {"backend": "hibachi:SamplingParams"},
            BackendNotFound,
            "must give a hibachi.ArrayBackend; got SamplingParams",
        ),
        ({"backend": np}, ConfigError, "a name, an ArrayBackend or None; got <module 'numpy'"),
        ({"device": "cuda:0"}, ConfigError, "expected 'cpu' .or None.; got 'cuda:0'. Leave it out"),
        ({"backend": "torch", "device": "nowhere"}, ConfigError, "'torch' does not start on device 'nowhere'.*Leave"),
        ({"backend": GatedNumpy(), "device": "cpu"}, ConfigError, "has its device already.*Leave device out"),
        ({"dtype": "int32"}, ConfigError, "dtype must be one of float32, .*; got 'int32'"),
        (
            {"dtype": "bfloat16", "backend": NumpyBackend(native=False)},
            UnsupportedOperation,
            "numpy has no dtype 'bfloat16'; choose another",
        ),
        ({"deterministic": True, "backend": "array_api_strict"}, UnsupportedOperation, "Pass deterministic=False"),
        ({"max_model_len": 0}, ConfigError, "max_model_len must be between 1 and 512 .*; got 0"),
        ({"max_model_len": 513}, ConfigError, "max_model_len must be between 1 and 512 .*; got 513"),
        ({"max_num_seqs": 0}, ConfigError, "max_num_seqs must be an integer >= 1; got 0"),
        ({"max_num_batched_tokens": 0}, ConfigError, "max_num_batched_tokens must be an integer >= 1; got 0"),
        ({"block_size": 0}, ConfigError, "block_size must be an integer >= 1; got 0"),
        ({"kv_cache_memory_bytes": 100}, ConfigError, "needs .* bytes; got kv_cache_memory_bytes=100. Allow more"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(witness, options, error, message):
    with pytest.raises(error, match=message) as e:
        LLM(**({"model": "tiny"} | options))
    assert isinstance(e.value, HibachiError)


@pytest.mark.parametrize(
    "module, options, error, message",
    [
        ("hibachi_torch", {"backend": "torch"}, BackendNotInstalled, r"not installed.*pip install '\.\[torch\]'"),
        ("hibachi_jax", {"backend": "jax"}, BackendNotInstalled, r"not installed.*pip install '\.\[jax\]'"),
        ("tokenizers", {}, MissingExtra, r"extra 'text': pip install '\.\[text\]'"),
    ],
)
def test_a_missing_library_says_how_to_get_it(witness, monkeypatch, module, options, error, message):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(error, match=message):
        LLM("tiny", **options)


@pytest.mark.skipif(not possible(), reason="there are no kernels")
def test_the_bits_have_the_name_that_was_asked_for_or_the_model_is_refused(monkeypatch, capsys):
    with LLM("tiny", backend="numpy", numerics=NUMERICS) as llm:
        assert llm.engine.facts.numerics == f"{NUMERICS} float32"
    with LLM("tiny", backend="numpy", numerics=f"{NUMERICS} bfloat16", dtype="bfloat16") as llm:
        assert llm.engine.facts.numerics == f"{NUMERICS} bfloat16"
    with pytest.raises(ConfigError, match=r"but the dtype is float32\. Pass dtype='bfloat16' as well"):
        LLM("tiny", backend="numpy", numerics=f"{NUMERICS} bfloat16")
    for name in (f"{NUMERICS} float16", f"{NUMERICS}float32", f"{NUMERICS} ", ""):
        with pytest.raises(ConfigError, match=f"^numerics must be one of {NUMERICS}"):
            LLM("tiny", backend="numpy", numerics=name)
    assert main(["doctor", "--backend", "numpy", "--numerics", "amx-1"]) == 1
    assert "got 'amx-1'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"^numerics must be one of {NUMERICS}, .*; got 'amx-1'"):
        LLM("tiny", backend="numpy", numerics="amx-1")
    with pytest.raises(ConfigError, match=f"the bits of numpy.* have no name. .* compute {NUMERICS} here"):
        LLM("tiny", backend=NumpyBackend(native=False), numerics=NUMERICS)
    monkeypatch.setenv(SWITCH, "none")
    with pytest.raises(ConfigError, match=f"must be None here, as there are no kernels .*; got '{NUMERICS}'.$"):
        LLM("tiny", backend="numpy", numerics=NUMERICS)
    assert main(["generate", "--prompt", "She", "--backend", "numpy", "--numerics", NUMERICS]) == 1
    assert "there are no kernels" in capsys.readouterr().err


@pytest.mark.skipif(not possible(), reason="there are no kernels")
@pytest.mark.parametrize("name", ("numpy", "torch", "jax"))
def test_bits_in_float16_have_no_name(name):
    """The kernels do not compute in it, so that each library has its own."""
    with LLM("tiny", backend=name, dtype="float16") as llm:
        assert llm.engine.facts.numerics is None
    with pytest.raises(ConfigError, match=r"the bits of this model on .* have no name"):
        LLM("tiny", backend=name, dtype="float16", numerics=NUMERICS)


@pytest.mark.skipif(not possible(), reason="there are no kernels")
def test_of_a_model_that_libraries_compute_apart_no_numerics_are_promised(monkeypatch):
    load = module.load_model

    def apart(*args, **options):
        model = load(*args, **options)
        model.portable = False
        return model

    monkeypatch.setattr(module, "load_model", apart)
    with pytest.raises(ConfigError, match=r"the bits of this model on numpy.* have no name\. "):
        LLM("tiny", backend="numpy", numerics=NUMERICS)
