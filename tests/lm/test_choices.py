"""Several continuations of a prompt, the best of them, and what only a tokenizer can serve."""

import asyncio

import pytest

from hibachi import LLM, InvalidRequest, SamplingParams
from hibachi.engine.sampling.uniforms import fork

from ..engine.models import until

PROMPT, OTHER = "She was", "Mr. Knightley looked at her with"


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny") as llm:
        llm.generate(PROMPT, SamplingParams(max_tokens=1))
        yield llm


def drawn(tokens=12, **params):
    return SamplingParams(**{"seed": 1, "max_tokens": tokens, "ignore_eos": True} | params)


def one(llm, prompt=PROMPT, **params):
    [out] = llm.generate(prompt, drawn(**params))
    return out


# ---- n -------------------------------------------------------------------------------------------------------


def test_the_first_choice_is_that_of_a_single_one(llm):
    single, three = one(llm), one(llm, n=3)
    assert [c.index for c in three.choices] == [0, 1, 2] and len(single.choices) == 1
    assert three.choices[0] == single.choices[0] and (three.text, three.token_ids) == (single.text, single.token_ids)
    assert three.finish_reason == three.choices[0].finish_reason == "length"
    assert len({c.text for c in three.choices}) == 3


def test_choices_are_those_of_their_seeds(llm):
    """Whoever shares the batch, and wherever they stand among other prompts."""
    outs = llm.generate([PROMPT, OTHER], [drawn(n=3), drawn(n=2, seed=9)])
    for out, prompt, seed in zip(outs, (PROMPT, OTHER), (1, 9), strict=True):
        for i, choice in enumerate(out.choices):
            assert choice.token_ids == one(llm, prompt, seed=fork(seed, i)).token_ids
    assert [len(out.choices) for out in outs] == [3, 2]


def test_without_a_seed_choices_differ(llm):
    assert len({tuple(c.token_ids) for c in one(llm, seed=None, n=4, temperature=1.5).choices}) == 4


def test_more_choices_than_rows_wait_their_turn(llm):
    assert len({c.text for c in one(llm, n=40, temperature=1.5).choices}) > 30


def test_each_choice_ends_for_its_own_reason(llm):
    whole = one(llm, n=3)
    stop = whole.choices[1].text[3:8]
    out = one(llm, n=3, stop=stop)
    for got, full in zip(out.choices, whole.choices, strict=True):
        at = full.text.find(stop)
        assert (got.text, got.finish_reason) == ((full.text, "length") if at < 0 else (full.text[:at], "stop"))
    assert [c.finish_reason for c in out.choices].count("stop") >= 1


def test_log_probabilities_of_choices(llm):
    for choice in one(llm, n=2, logprobs=1).choices:
        assert len(choice.logprobs) == len(choice.token_ids) == 12
        own = [found[i] for i, found in zip(choice.token_ids, choice.logprobs, strict=True)]
        assert choice.cumulative_logprob == pytest.approx(sum(own))
    assert one(llm).cumulative_logprob is None


def test_beams_come_best_first_with_their_scores(llm):
    out = one(llm, n=3, beams={"width": 5})
    assert [c.index for c in out.choices] == [0, 1, 2] and len({c.text for c in out.choices}) == 3
    scores = [c.score for c in out.choices]
    assert scores == sorted(scores, reverse=True) and scores[0] < 0 and one(llm).choices[0].score is None
    for choice in out.choices:  # of 12 tokens each, whose log-probabilities are known otherwise
        [likely] = llm.score(PROMPT, [llm.tokenizer.decode(choice.token_ids)])
        if likely.token_ids == choice.token_ids:
            assert choice.score * 12 == pytest.approx(likely.logprob, abs=1e-3)
    assert one(llm, beams={"width": 5}).choices[0].token_ids == out.choices[0].token_ids
    stop = out.choices[0].text[5:8]
    cut = one(llm, n=3, beams={"width": 5}, stop=stop).choices
    assert cut[0].text == out.choices[0].text[: out.choices[0].text.find(stop)] and cut[0].finish_reason == "stop"
    assert [c.score for c in cut] == scores
    word = out.choices[0].text.split()[0]
    assert all(word not in c.text for c in one(llm, n=3, beams={}, bad_words=[word]).choices)
    pieces = {i: "" for i in range(3)}
    for piece in llm.stream(PROMPT, drawn(n=3, beams={"width": 5})):
        pieces[piece.index] += piece.text
    assert [*pieces.values()] == [c.text for c in out.choices]


def test_chat_and_asyncio_have_choices_too(llm):
    assert asyncio.run(llm.agenerate(PROMPT, drawn(n=2))) == llm.generate(PROMPT, drawn(n=2))


# ---- best_of -------------------------------------------------------------------------------------------------


def test_the_best_are_the_most_likely_in_order(llm):
    every = one(llm, n=6, logprobs=0)
    ranked = sorted(every.choices, key=lambda c: -c.cumulative_logprob)
    best = one(llm, n=3, best_of=6)
    assert [c.token_ids for c in best.choices] == [c.token_ids for c in ranked[:3]]
    assert [c.index for c in best.choices] == [0, 1, 2] and best.text == ranked[0].text
    assert best.logprobs is None and best.cumulative_logprob is None  # not asked for
    assert one(llm, n=3, best_of=6, logprobs=0).choices[0].logprobs == ranked[0].logprobs
    assert one(llm, n=2, best_of=2) == one(llm, n=2)


def test_the_token_that_ends_a_text_counts(model_copy):
    """A text that ends at once has one token, and is chosen only if that token is likely."""
    with LLM(model_copy({"generation_config.json": lambda _: b"{}"})) as llm:
        first = {}
        for i in range(40):
            out = one(llm, n=1, seed=fork(1, i), max_tokens=1, logprobs=0)
            first[i] = out.token_ids[0]
        stop = first[7]
        params = drawn(n=1, best_of=40, max_tokens=1, stop_token_ids=[stop], include_stop=True, logprobs=0)
        [kept] = llm.generate(PROMPT, params)
        [cut] = llm.generate(PROMPT, params.with_(include_stop=False))
        assert kept.token_ids in ([stop], cut.token_ids)
        assert (cut.token_ids == []) == (kept.token_ids == [stop])


# ---- streams -------------------------------------------------------------------------------------------------


async def listed(stream):
    return [piece async for piece in stream]


@pytest.mark.parametrize("way", ["for", "async for"])
def test_pieces_say_whose_they_are(llm, way):
    params = drawn(n=3, logprobs=0, temperature=1.5)
    stream = llm.stream(PROMPT, params)
    pieces = list(stream) if way == "for" else asyncio.run(listed(stream))
    out = stream.completion()
    assert out == llm.generate(PROMPT, params)[0]
    for choice in out.choices:
        own = [p for p in pieces if p.index == choice.index]
        assert "".join(p.text for p in own) == choice.text
        assert [i for p in own for i in p.token_ids] == choice.token_ids
        assert [found for p in own for found in p.logprobs] == choice.logprobs
    assert stream.finish_reasons == ["length"] * 3
    assert [p.index for p in pieces] != sorted(p.index for p in pieces)  # as they come


def test_pieces_have_log_probabilities_only_if_asked(llm):
    assert {p.logprobs for p in llm.stream(PROMPT, drawn(3))} == {None}


@pytest.mark.parametrize("way", ["for", "async for", "with"])
def test_leaving_a_stream_frees_all_its_rows(llm, way):
    async def leave(stream):
        async for _ in stream:
            break

    with llm.stream(PROMPT, drawn(400, n=5)) as stream:
        if way == "for":
            for _ in stream:
                break
            assert stream.finish_reasons == ["cancelled"] * 5
        elif way == "async for":
            asyncio.run(leave(stream))
            assert stream.finish_reasons == ["cancelled"] * 5
    until(lambda: llm.stats().running == llm.stats().waiting == 0)


@pytest.mark.parametrize("way", ["for", "async for"])
def test_the_error_of_one_choice_ends_the_stream_after_its_pieces(llm, way):
    def gives_up(output, logits):
        if len(output) == 4:
            raise RuntimeError("enough")
        return logits

    stream = llm.stream(PROMPT, drawn(n=2, logits_processors=[gives_up]))
    pieces = []

    async def read():
        async for piece in stream:
            pieces.append(piece)

    with pytest.raises(InvalidRequest, match="enough"):
        if way == "for":
            for piece in stream:
                pieces.append(piece)
        else:
            asyncio.run(read())
    assert len([i for p in pieces if p.index == 0 for i in p.token_ids]) >= 3  # one may wait for the rest of its text
    until(lambda: llm.stats().running == 0)


def test_the_best_cannot_be_streamed(llm):
    with pytest.raises(InvalidRequest, match=r"best_of cannot be streamed: expected best_of to be n, 2.*got 3"):
        llm.stream(PROMPT, drawn(n=2, best_of=3))
    assert len(list(llm.stream(PROMPT, drawn(n=2, best_of=2)))) > 2


# ---- bad words -----------------------------------------------------------------------------------------------


def test_bad_words_do_not_come(llm):
    """With and without a space in front, of one token and of several."""
    greedy = dict(temperature=0, max_tokens=30)
    text = one(llm, **greedy).text
    words = text.split()
    long = max(words, key=len)
    assert len(llm.tokenizer.encode(" " + long, add_special_tokens=False)) > 1 or len(long) > 3
    for bad in (words[0], long, f" {words[1]}", f"{words[0]} {words[1]}"):
        got = one(llm, bad_words=[bad], **greedy).text
        assert f" {bad.strip()} " not in got and got != text
    free = one(llm, bad_words=["quite another"], **greedy).text
    assert free == text


def test_a_bad_word_of_several_tokens_may_begin(llm):
    ids = llm.tokenizer.encode(" surprizedly", add_special_tokens=False)
    assert len(ids) > 1
    seen = []

    def want(output, logits):  # what the model would love to write
        seen.append(len(output))
        logits = logits.copy()
        logits[ids[len(output) % len(ids)]] = 1e4
        return logits

    # Processors come after bad words, so the last token is kept away only without one.
    [with_it] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=len(ids), logits_processors=[want]))
    assert with_it.text == " surprizedly" and seen == list(range(len(ids)))
    bias = {i: 100 for i in ids}
    params = SamplingParams(temperature=0, max_tokens=60, logit_bias=bias, bad_words=["surprizedly"])
    [out] = llm.generate(PROMPT, params)
    assert "surprizedly" not in out.text and {*out.token_ids} <= {*ids}


# ---- stop strings and min_tokens -----------------------------------------------------------------------------


def test_the_stop_string_may_be_kept(llm):
    whole = one(llm, temperature=0, max_tokens=24)
    stop = whole.text[9:14]
    for include, end in ((False, 0), (True, len(stop))):
        out = one(llm, temperature=0, max_tokens=24, stop=stop, include_stop=include)
        assert out.text == whole.text[: whole.text.index(stop) + end] and out.finish_reason == "stop"
        pieces = list(llm.stream(PROMPT, drawn(24, temperature=0, stop=stop, include_stop=include)))
        assert "".join(p.text for p in pieces) == out.text


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_count_only_after_min_tokens(llm, include):
    """One may begin before, but must be complete after; V-18 for strings."""
    whole = one(llm, temperature=0, max_tokens=40)
    pieces = [llm.tokenizer.decode(whole.token_ids[:i]) for i in range(41)]  # the text of the first i tokens
    for stop in (whole.text[9:12], "e", " ", pieces[9][-2:] + pieces[10][len(pieces[9]) :]):
        for least in (1, 5, 9, 20):
            ends = (at + len(stop) for at in range(len(whole.text)) if whole.text.startswith(stop, at))
            end = next((end for end in ends if end > len(pieces[least])), None)
            text = whole.text if end is None else whole.text[: end if include else end - len(stop)]
            params = drawn(40, temperature=0, stop=stop, min_tokens=least, include_stop=include)
            [out] = llm.generate(PROMPT, params)
            assert out.text == text and out.finish_reason == ("length" if end is None else "stop")
            assert "".join(p.text for p in llm.stream(PROMPT, params)) == text


def test_the_stop_token_may_be_kept(llm):
    whole = one(llm, temperature=0, max_tokens=24)
    stop = whole.token_ids[7]
    end = whole.token_ids.index(stop)
    for include in (False, True):
        out = one(llm, temperature=0, max_tokens=24, stop_token_ids=[stop], include_stop=include, logprobs=0)
        assert out.token_ids == whole.token_ids[: end + include] and out.finish_reason == "stop"
        assert out.text == llm.tokenizer.decode(out.token_ids) and len(out.logprobs) == end + include


def test_end_of_text_at_the_limit_is_a_stop(model_copy, llm):
    """V-17: the limit is "length", the model's own end is "stop", also as the last token that is allowed."""
    tokens = one(llm, temperature=0, max_tokens=24).token_ids
    eos = next(t for i, t in enumerate(tokens) if i > 3 and t not in tokens[:i])
    at = tokens.index(eos)
    config = b'{"eos_token_id": %d}' % eos
    with LLM(model_copy({"generation_config.json": lambda _: config})) as own:
        for limit, reason in ((at, "length"), (at + 1, "stop"), (at + 2, "stop")):
            out = one(own, temperature=0, max_tokens=limit, ignore_eos=False)
            assert (out.token_ids, out.finish_reason) == (tokens[:at], reason)
        # V-18: before min_tokens it cannot come, after them it can
        out = one(own, temperature=0, max_tokens=60, min_tokens=at + 3, ignore_eos=False)
        assert len(out.token_ids) >= at + 3 and eos not in out.token_ids[: at + 3]
        ignored = one(own, temperature=0, max_tokens=24, min_tokens=at + 3, ignore_eos=True)
        assert ignored.token_ids == tokens


# ---- neighbours ----------------------------------------------------------------------------------------------

KINDS = [
    dict(temperature=0),
    dict(),
    dict(temperature=0.8, top_p=0.95),
    dict(top_k=20),
    dict(top_k=100, top_p=0.9),
    dict(min_p=0.1),
    dict(typical_p=0.8),
    dict(temperature=0, repetition_penalty=1.3),
    dict(presence_penalty=1.0, top_k=40),
    dict(temperature=0, frequency_penalty=0.7),
    dict(logit_bias={5: 5.0, 300: -3.0}),
    dict(allowed_token_ids=list(range(200, 900)), top_p=0.9),
    dict(bad_words=["the", "her", "said"]),
    dict(min_tokens=15, ignore_eos=False, top_p=0.8),
    dict(logits_processors=[lambda output, logits: logits * (1 + len(output) % 3)]),
    dict(logprobs=3, prompt_logprobs=1, stop="e", include_stop=True),
]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_request_gets_the_same_whoever_shares_its_batch(library):
    """V-19. Sixteen requests of all kinds at once, and each alone."""
    params = [drawn(20, **{"seed": i} | kind) for i, kind in enumerate(KINDS)]
    prompts = [PROMPT, OTHER] * 8
    with LLM("tiny", backend=library) as llm:
        together = llm.generate(prompts, params)
        again = llm.generate(prompts[::-1], params[::-1])[::-1]
        alone = [llm.generate(prompt, p)[0] for prompt, p in zip(prompts, params, strict=True)]
        for out, other, one in zip(together, again, alone, strict=True):
            assert out.token_ids == other.token_ids == one.token_ids
            assert (out.text, out.finish_reason) == (one.text, one.finish_reason)
        stops = llm.generate(OTHER, drawn(temperature=0))[0].token_ids
        assert stops == llm.generate([OTHER] * 3, [drawn(temperature=0), drawn(), drawn(top_k=3)])[0].token_ids
