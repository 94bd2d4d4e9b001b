"""Linked requests of every kind, for tests of any model: samples, one that is guided, beams, and one alone."""

from hibachi import Beams, Guidance, SamplingParams
from hibachi.engine.recording.replay import replay

from .models import until

NEW = 7
PROMPTS = {"many": [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2], "mixed": [5, 3, 1, 4], "beams": [1, 2, 3, 4, 5, 6], "one": [8, 9]}
OTHER = [2, 7, 1, 8, 2, 8, 1, 8, 2]


def drawn(heat, seed=7, **how):
    """heat: the temperature at which several tokens of the model are likely."""
    return SamplingParams(**{"temperature": heat, "seed": seed, "max_tokens": NEW} | how)


def searched(n=3, width=4, **how):
    return SamplingParams(**{"max_tokens": NEW, "n": n, "beams": Beams(width, 0.7)} | how)


def asked(engine, kind, heat, n=5):
    """The streams of one kind of request."""
    prompt = PROMPTS[kind]
    if kind == "many":
        return engine.run_many(prompt, drawn(heat, logprobs=1), n)
    if kind == "beams":
        return engine.run_many(prompt, searched())
    guided = Guidance(1.5, prompt=OTHER) if kind == "mixed" else None
    return [engine.run(prompt, drawn(heat, logprobs=2), guidance=guided)]


def said(streams):
    """All bits of answers, and how they ended."""
    out = []
    for stream in streams:
        tokens, score = [int(token) for token in stream.collect()], stream.score
        logprobs = [{i: float(p).hex() for i, p in each.items()} for each in stream.logprobs]
        out.append((tokens, logprobs, None if score is None else float(score).hex(), stream.finish_reason))
    return out


def whole(engine, *, replays=True):
    """Nothing is left of the requests that were here, and the plans can be played again."""
    until(lambda: engine.stats().running == engine.stats().waiting == 0)
    core = engine.core
    scheduler = core.scheduler
    scheduler.check()
    assert scheduler.waits == scheduler.paused_rows == core.paused == scheduler.held == 0 and not core.live()
    assert scheduler.pool is None or scheduler.pool.free == scheduler.pool.usable
    assert not replays or not (dump := engine.dump())["complete"] or replay(dump)
