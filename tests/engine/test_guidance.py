"""Guidance: the logits of several rows are mixed, and all of them get the token that is drawn."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hibachi import (
    Beams,
    Guidance,
    Input,
    InvalidModelOutput,
    InvalidRequest,
    ModelError,
    NonFiniteOutput,
    NumpyBackend,
    PromptTooLong,
    SamplingParams,
    load_model,
)
from hibachi.engine import build
from hibachi.engine.sampling.uniforms import of_codebooks, uniforms
from hibachi.llm.model.files import TINY
from hibachi.testing.toys import SumTokens

from ..decode.reference import distribution
from ..guide.toyguides import rule, toy_guides
from .frames import DEPTHS, EMBED, RUNGS, K
from .linking import whole
from .models import until
from .test_beams import PROMPT, Few, V, logits_of, own_cache
from .test_codebooks import LIBRARIES, PROMPTS, frames
from .test_depth import EACH, small
from .test_depth import logits_of as in_depth
from .test_equality_matrix import Preempting

NEW = 6


# ---- frames, beside a loop -----------------------------------------------------------------------------------------


def apart(known, drawn):
    h = sum(EMBED[k][known[:, k]].sum(axis=0) for k in range(K))
    return small(h).reshape(K, -1)[len(drawn)].astype(np.float64)


def by_hand(logits, prompt, other, scale, seed):
    """What a loop draws: a frame's ids one after another, each of the mixed logits, for both rows."""
    own, other, seeds = np.array(prompt), np.array(other), of_codebooks(seed, K)
    for _ in range(NEW):
        drawn = []
        for k, how in enumerate(EACH):
            a, b = logits(own, drawn), logits(other, drawn)
            u = uniforms(seeds[k : k + 1], np.array([len(own)]))[0]
            drawn.append(int(np.argmax(np.cumsum(distribution(b + scale * (a - b), **how)) > u)))
        own, other = np.concatenate([own, [drawn]]), np.concatenate([other, [drawn]])
    return own[len(prompt) :]


SCALES = [1.5, 0.0, 3.0, -1.0, 1.0, 2.25]
OTHERS = [np.roll(prompt, 1, axis=1)[: 1 + i % 3] for i, prompt in enumerate(PROMPTS)]
RIGHT = {
    kind: [by_hand(logits, p, o, s, i) for i, (p, o, s) in enumerate(zip(PROMPTS, OTHERS, SCALES, strict=False))]
    for kind, logits in (("depth", in_depth), ("plain", apart))
}
CONDITIONS = {
    "two rows": dict(max_num_seqs=2),
    "company": dict(max_num_seqs=12),
    "chunk": dict(max_num_seqs=5, max_num_batched_tokens=5, max_prefill_tokens=2),
    "preempted": dict(max_num_seqs=8, max_model_len=24, block_size=4),
}


def runs():
    for library, kind, rung, condition in itertools.product(LIBRARIES, RIGHT, RUNGS, CONDITIONS):
        if library != "jax" or (rung == "state" and condition == "company"):  # op by op, each shape is compiled
            yield pytest.param(library, kind, rung, condition, id=f"{library}-{kind}-{rung}-{condition}")


@pytest.mark.parametrize(("library", "kind", "rung", "condition"), [*runs()])
@pytest.mark.parametrize("own", [False, True], ids=["by scale", "by a function"])
def test_frames_are_what_a_loop_draws(own, library, kind, rung, condition, serve, monkeypatch):
    preempted = condition == "preempted" and rung != "whole"  # which holds no memory that others may need
    if preempted:
        monkeypatch.setattr(build, "RecordedScheduler", Preempting)
    model = (DEPTHS if kind == "depth" else RUNGS)[rung](library)
    engine = serve(model, backend=library, **CONDITIONS[condition])
    streams = []
    for i, (prompt, other, scale) in enumerate(zip(PROMPTS, OTHERS, SCALES, strict=False)):
        how = SamplingParams(seed=i, max_tokens=NEW, codebooks=EACH)
        mix = (lambda a, b, scale=scale: b + scale * (a - b)) if own else None
        streams.append(engine.run(prompt, how, guidance=Guidance(scale, prompt=other, mix=mix)))
        streams[-1].beside = engine.run(prompt, how)
    for stream, want in zip(streams, RIGHT[kind], strict=True):
        assert np.array_equal(frames(stream), want)
        assert len(stream.beside.collect()) == NEW
    assert not preempted or engine.stats().preemptions
    whole(engine, replays=not preempted)


# ---- single ids ----------------------------------------------------------------------------------------------------


def test_tokens_are_those_of_transformers(serve):
    torch.manual_seed(0)
    sizes = dict(vocab_size=60, n_positions=128, n_embd=64, n_layer=2, n_head=4, initializer_range=0.3)
    gpt = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()
    engine = serve(own_cache.Gpt(gpt), backend="torch", max_model_len=128, max_num_seqs=64)
    rng, streams = np.random.default_rng(1), []
    cases = [
        (rng.integers(0, 60, n).tolist(), rng.integers(0, 60, m).tolist()) for n, m in rng.integers(1, 30, (20, 2))
    ]
    for i, (prompt, other) in enumerate(cases):
        greedy = SamplingParams(temperature=0, max_tokens=12)
        streams.append(engine.run(prompt, greedy, guidance=Guidance(1.2 + i / 10, prompt=other)))
    for i, ((prompt, other), stream) in enumerate(zip(cases, streams, strict=True)):
        given, negative = torch.tensor([prompt]), torch.tensor([other])
        out = gpt.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=12, do_sample=False, pad_token_id=0,
            guidance_scale=1.2 + i / 10, negative_prompt_ids=negative,
            negative_prompt_attention_mask=torch.ones_like(negative),
        )  # fmt: skip
        assert stream.collect() == out[0, len(prompt) :].tolist()


@dataclass  # which has no hash
class Contrast:
    by: float

    def __call__(self, own, *others):
        return own + np.float32(self.by) * sum(others)


def drawn_by_hand(prompts, mix, seed, *, allowed=range(V), n=8, **how):
    """Tokens, and their log-probabilities."""
    out, scores = [], []
    for _ in range(n):
        x = mix(*(logits_of([*p, *out])[None] for p in prompts))[0].astype(np.float64)
        kept = np.where(np.isin(np.arange(V), allowed), x, -np.inf)
        u = uniforms(np.array([seed], np.uint64), np.array([len(prompts[0]) + len(out)]))[0]
        out.append(int(np.argmax(np.cumsum(distribution(kept, **how)) > u)))
        scores.append(x[out[-1]] - np.log(np.exp(x).sum()))
    return out, scores


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_function_mixes_any_number_of_rows(rows, serve):
    """Log-probabilities are of the mixed logits, and masks act on these."""
    engine = serve(Few(), max_num_seqs=16, max_model_len=40)
    how, mix = dict(temperature=0.9, top_k=3), Contrast(-0.4)
    streams = []
    for seed in range(4):
        others = [[seed, 1][: 1 + i % 2] * (1 + i) for i in range(rows)]
        allowed = [0, 1, 3] if seed % 2 else range(V)
        params = SamplingParams(seed=seed, max_tokens=8, logprobs=0, allowed_token_ids=[*allowed], **how)
        guidance = [Guidance(mix=mix if not i else None, prompt=p) for i, p in enumerate(others)]
        streams.append((engine.run(PROMPT, params, guidance=guidance), [PROMPT, *others], seed, allowed))
    for stream, prompts, seed, allowed in streams:
        tokens, scores = drawn_by_hand(prompts, mix, seed, allowed=allowed, **how)
        assert stream.collect() == tokens
        assert [p[t] for p, t in zip(stream.logprobs, tokens, strict=True)] == pytest.approx(scores, abs=1e-4)
    whole(engine)


class Tinted(Few):
    inputs = {"tint": Input((V,))}  # noqa: RUF012

    def logits(self, tokens, lengths, tint):
        return super().logits(tokens, lengths) + np.asarray(tint)


def test_the_other_row_may_differ_by_its_inputs(serve):
    engine = serve(Tinted(), max_num_seqs=8, max_model_len=40)
    params, tints = SamplingParams(seed=3, max_tokens=8), np.eye(2, V, dtype=np.float32) * 4
    want = drawn_by_hand([PROMPT, PROMPT], lambda a, b: b + tints[1] + 2 * (a + tints[0] - b - tints[1]), 3)[0]
    guided = Guidance(2.0, inputs={"tint": tints[1]})
    streams = [engine.run(PROMPT, params, inputs={"tint": tints[0]}, guidance=guided) for _ in range(3)]
    assert [s.collect() for s in streams] == [want] * 3
    with pytest.raises(InvalidRequest, match="inputs must have the arrays tint; got hue"):
        engine.run(PROMPT, params, inputs={"tint": tints[0]}, guidance=Guidance(inputs={"hue": 1}))


def test_of_what_one_row_forbids_the_request_decides(serve):
    class Forbidding(Few):
        """The first token of a prompt says which id is forbidden."""

        def logits(self, tokens, lengths):
            x = super().logits(tokens, lengths)
            tokens = np.asarray(tokens)
            x[np.arange(len(x)), tokens[np.arange(len(x)), tokens.shape[1] - np.asarray(lengths)]] = -np.inf
            return x

    engine = serve(Forbidding(), max_num_seqs=8, max_model_len=40)

    def mix(a, b):
        a, b = a.copy(), b.copy()
        return np.where(np.arange(V) == 1, -np.inf, np.where(np.arange(V) == 2, a, b + 3 * (a - b)))

    want, _ = drawn_by_hand([PROMPT, [2, 0]], mix, 5, n=12)
    assert (
        engine.run(PROMPT, SamplingParams(seed=5, max_tokens=12), guidance=Guidance(3, prompt=[2, 0])).collect() == want
    )
    assert 2 in want and 1 not in want


def test_forms_stops_and_ends_count_for_the_request(serve):
    engine = serve(Few(), max_num_seqs=8, max_model_len=24)
    toy_guides(engine)
    guided = Guidance(2.0, prompt=[4, 4])
    formed = engine.run(PROMPT, SamplingParams(structured_outputs=rule([1, 2], [3], most=5)), guidance=guided)
    tokens = formed.collect()
    assert len(tokens) == 5 and tokens[1::2] == [3, 3] and formed.finish_reason == "stop"
    stopped = engine.run(PROMPT, SamplingParams(seed=1, min_tokens=3), stop_rule=lambda t: t >= 0, guidance=guided)
    assert len(stopped.collect()) == 3 and stopped.stop_token is not None
    short = engine.run(PROMPT, SamplingParams(seed=1), guidance=Guidance(2.0, prompt=[1] * 19))
    assert len(short.collect()) == 5 and short.finish_reason == "length"  # the other row is full
    assert len(engine.run([1] * 20, SamplingParams(seed=1), guidance=guided).collect()) == 4
    whole(engine)


# ---- faults and bad input ------------------------------------------------------------------------------------------


class Spoilt(Few):
    """What begins with 4 4 4 is of no use, from its sixth token on."""

    spoil = "nan"

    def logits(self, tokens, lengths):
        x, tokens = super().logits(tokens, lengths), np.asarray(tokens)
        for i, n in enumerate(lengths.tolist()):
            if n >= 6 and (tokens[i, tokens.shape[1] - n :][:3] == 4).all():
                if self.spoil == "error":
                    raise RuntimeError("spoilt")
                x[i] = np.nan
        return x


@pytest.mark.parametrize("spoil", ["nan", "error"])
@pytest.mark.parametrize("which", ["own", "other"])
def test_a_fault_of_one_row_ends_its_request_only(which, spoil, serve):
    """Calls are halved to find it, and rows whose outputs come from different calls are still drawn together."""
    model = Spoilt()
    model.spoil = spoil
    engine = serve(model, max_num_seqs=16, max_model_len=40)
    fine, bad = [PROMPT, [2, 0]], [PROMPT, [4, 4, 4]] if which == "other" else [[4, 4, 4], [2, 0]]
    params = SamplingParams(seed=2, max_tokens=8)

    def ask(pair):
        return engine.run(pair[0], params, guidance=Guidance(2.0, prompt=pair[1]))

    want, _ = drawn_by_hand(fine, lambda a, b: b + 2 * (a - b), 2)
    streams = [ask(fine), ask(bad), ask(fine), engine.run(PROMPT, params)]
    with pytest.raises(NonFiniteOutput if spoil == "nan" else ModelError):
        streams[1].collect()
    assert [streams[0].collect(), streams[2].collect()] == [want, want] and len(streams[3].collect()) == 8
    whole(engine)


MIXES = {
    "an error": (lambda a, b: 1 // 0, InvalidRequest, "`mix` .* raised ZeroDivisionError"),
    "its end": (lambda a, b: exit(1), InvalidRequest, "`mix` .* raised SystemExit"),
    "a shape": (lambda a, b: a[0], InvalidModelOutput, r"Guidance.mix must return shape \(1, 5\)"),
    "none": (lambda a, b: None, InvalidModelOutput, "Guidance.mix must return an array"),
    "nan": (lambda a, b: a * np.nan, NonFiniteOutput, "NaN"),
    "nothing": (lambda a, b: a - np.inf, NonFiniteOutput, "infinity"),
    "too few rows": (lambda a: a, InvalidRequest, "`mix` .* raised TypeError"),
}


@pytest.mark.parametrize(("mix", "kind", "message"), MIXES.values(), ids=MIXES)
def test_what_a_function_does_wrong_ends_its_request_only(mix, kind, message, serve):
    engine = serve(Few(), max_num_seqs=16, max_model_len=40)
    params = SamplingParams(seed=2, max_tokens=8)

    def written(a, b):  # into what it was given
        a -= b
        return a

    want, _ = drawn_by_hand([PROMPT, [2, 0]], lambda a, b: a - b, 2)
    good = [engine.run(PROMPT, params, guidance=Guidance(prompt=[2, 0], mix=written)) for _ in range(2)]
    with pytest.raises(kind, match=message):
        engine.run(PROMPT, params, guidance=Guidance(prompt=[2, 0], mix=mix)).collect()
    assert [s.collect() for s in good] == [want, want]
    whole(engine)


def test_what_cannot_guide_is_refused(serve):
    engine = serve(Few(), max_num_seqs=3, max_model_len=40)
    params, mix = SamplingParams(max_tokens=3), Contrast(1)

    def refused(message, guidance, kind=InvalidRequest, engine=engine, prompt=(1,), params=params):
        with pytest.raises(kind, match=message):
            engine.run([*prompt], params, guidance=guidance)
        assert engine.stats().running == engine.stats().waiting == 0

    refused("at least one token", Guidance(prompt=[]))
    refused("at most 39 tokens; got 40", Guidance(prompt=[1] * 40), PromptTooLong)
    refused("from 0 to 4", Guidance(prompt=[5]))
    refused("inputs must have the arrays none", Guidance(inputs={"a": 1}))
    refused("must be a hibachi.Guidance, or several; got 3", 3)
    refused("must be a hibachi.Guidance, or several", [])
    refused("several; got", [Guidance(), 2])
    refused("expected guidance.0..mix; got None for 2 rows", [Guidance()] * 2)
    refused("at most max_num_seqs=3; got 4", [Guidance(mix=mix)] * 3)
    refused("beams, which draw nothing", Guidance(), params=params.with_(beams=Beams(2)))
    refused("Use run_many", Guidance(), params=params.with_(n=2))
    for scale in (float("nan"), float("inf"), "2", None):
        with pytest.raises(InvalidRequest, match="scale must be a number from -1e30 to 1e30"):
            Guidance(scale)
    with pytest.raises(InvalidRequest, match="mix must be a function"):
        Guidance(mix=3)
    returns = serve(SumTokens(NumpyBackend()), max_num_seqs=3)
    refused("guidance mixes logits, and SumTokens returns tokens", Guidance(), engine=returns, params=None)
    paged = serve(load_model(TINY), max_num_seqs=8, max_model_len=100, cache_tokens=128, backend="numpy")
    refused(
        "2 linked sequences need .* positions .*; it has 128", Guidance(prompt=[1] * 70), engine=paged, prompt=[1] * 70
    )
    until(lambda: engine.stats().finished == 0)
