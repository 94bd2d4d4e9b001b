"""Models with several codebooks, with random numbers, inputs or an encoder are judged as all others."""

import numpy as np
import pytest

from hibachi import Input, load_backend
from hibachi.testing.verify import Subject, verify
from tests.engine.frames import DEPTHS, RUNGS, DrawnState, DrawnWhole, OwnFrames, SizedDepth, ToldWhole, WholeFrames
from tests.engine.test_own_encode import Pooled, Smooth, Translator

VALUES = [np.zeros((n, 2), np.float32) + n for n in (4, 6, 5)]
WIDE = [np.zeros((n, 5), np.float32) + n for n in (4, 6, 5)]


def judged(model, **options):
    return verify(Subject(model, **options))


def causes(report):
    return [cause.key for cause in report.causes]


@pytest.mark.parametrize("library", ["numpy", "torch", pytest.param("jax", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("models", [RUNGS, DEPTHS], ids=["plain", "depth"])
def test_frames_pass(models, rung, library):
    report = judged(models[rung](library), backend=load_backend(library))
    assert report.good, "\n".join(report.lines())


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (DrawnWhole, {"examples": VALUES}),
        (DrawnState, {"examples": VALUES}),
        (ToldWhole, {"examples": WIDE}),
        (Translator, {}),
        (Pooled, {}),
        (Smooth, {"examples": [np.arange(4, dtype=np.float32), np.ones(5, np.float32)]}),
    ],
    ids=lambda x: x.__name__ if isinstance(x, type) else "",
)
def test_draws_inputs_and_encoders_pass(model, options):
    report = judged(model(), **options)
    assert report.good, "\n".join(report.lines())


class Sized(SizedDepth, OwnFrames):
    pass


def test_codebooks_of_other_sizes_pass_and_probabilities_are_told():
    assert judged(Sized()).good

    class Softmax(Sized):
        def depth(self, k, given, codes, past):
            logits, past = super().depth(k, given, codes, past)
            odds = np.exp(logits - logits.max(axis=1, keepdims=True))
            return odds / odds.sum(axis=1, keepdims=True), past

    Softmax.vocab_sizes = (7, 7, 7)
    assert causes(judged(Softmax())) == ["probabilities"]


def test_who_draws_with_a_generator_of_its_own_is_told_to_use_the_given_numbers():
    class Own(DrawnWhole):
        draws = 0

        def forward(self, tokens):
            return tokens[:, -1, :] * 0 + np.random.default_rng().normal(size=(len(tokens), 2)).astype(np.float32)

    report = judged(Own(), examples=VALUES)
    assert not report.good
    assert "declare `draws = n`" in "\n".join(report.lines())


class MixesRows(WholeFrames):
    def scored(self, h):
        return super().scored(h - h.mean(axis=0, keepdims=True))


class MixesCodes(DEPTHS["state"]):
    def depth(self, k, given, codes, past):
        return super().depth(k, given, codes[::-1], past)


class MixesDraws(DrawnWhole):
    def forward(self, tokens, uniform, normal):
        return super().forward(tokens, uniform[::-1], normal)


class DropsThePast(OwnFrames):
    def step(self, tokens, lengths, past):
        return super().step(tokens, lengths, None if past is None else past[:, :0])


class SharesTheSource(Translator):
    def step(self, tokens, lengths, past, encoded):
        return super().step(tokens, lengths, past, {k: v[:1].repeat(len(v), 0) for k, v in encoded.items()})

    inputs = {"source": Input((None,), "int32", example=np.arange(9))}  # noqa: RUF012


class ForgetsTheMask(Translator):
    def encode(self, source):
        out = super().encode(source)
        return {"values": out["values"] + 1, "mask": out["mask"]}

    def step(self, tokens, lengths, past, encoded):
        encoded = {"values": encoded["values"] + (encoded["values"] == 0), "mask": np.ones_like(encoded["mask"])}
        return super().step(tokens, lengths, past, encoded)


class SpeaksOfTheFirst(ToldWhole):
    inputs = {"speaker": Input((2,)), "hours": Input((), "int32", per="position")}  # noqa: RUF012

    def forward(self, tokens, prompt_len, seed, speaker, hours):
        return super().forward(
            tokens, prompt_len[:1].repeat(len(tokens), 0), seed[:1].repeat(len(tokens)), speaker, hours
        )


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (MixesRows, {}),
        (MixesCodes, {}),
        (MixesDraws, {"examples": VALUES}),
        (SharesTheSource, {}),
        (ForgetsTheMask, {}),
        (SpeaksOfTheFirst, {"examples": WIDE}),
    ],
    ids=lambda x: x.__name__ if isinstance(x, type) else "",
)
def test_what_mixes_requests_is_found(model, options):
    assert not judged(model(), **options).good


def test_a_past_that_is_dropped_is_found():
    report = judged(DropsThePast())
    assert not report.good and "past" in "\n".join(report.lines())


class WritesIntoTheSource(Translator):
    def step(self, tokens, lengths, past, encoded):
        out = super().step(tokens, lengths, past, encoded)
        encoded["values"][...] = 3
        return out


def test_a_step_that_writes_into_what_was_encoded_is_found():
    report = judged(WritesIntoTheSource())
    assert not report.good and "written into encoded['values']" in "\n".join(report.lines())
