"""Sixteen requests at once in an engine, beside a library's own loop that takes them one by one: every program of this
folder ends here, and prints one line.
"""

import argparse
import json
import statistics
import time

import numpy as np

import hibachi
from hibachi.engine.sampling.uniforms import fork, uniforms

WORK = {"tiny": (20, 8), "real": (60, 48)}  # tokens of the longest prompt, and new ones of each


def arguments(about):
    """Of the command line."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--size", choices=WORK, default="real", help="of the network and the work (default: real)")
    parser.add_argument("--rounds", type=int, default=5, help="turns, of which the median is taken (default: 5)")
    parser.add_argument("--show", action="store_true", help="also print each request and its tokens, as JSON")
    return parser.parse_args()


def work(vocab, size):
    """Sixteen random prompts of different lengths, lists of ids, and how many tokens each should get."""
    random, (longest, new) = np.random.default_rng(0), WORK[size]
    return [random.integers(vocab, size=n).tolist() for n in random.integers(2, longest + 1, 16)], new


def compare(
    model, own, prompts, new, asked, inputs=None, draws=False, at_once=None, batch=None, samples=None, params=None,
    guidance=None, rows=1,
):  # fmt: skip
    """model: for an engine. own: from a prompt, and inputs by name, to the `new` likeliest tokens of the library's
    loop; fewer where the model ends. asked: of `arguments`. inputs: {name: lists or arrays} of each prompt. draws: the
    model draws real values, for which `own` also gets the `seed`; those within 1e-4 of each, or 1e-5, are equal.
    at_once: from an engine to what all requests get; None means that of `run`. batch: from nothing to what the library
    gives them in a batch of its own. samples: how many are drawn of each prompt, by `params` and a `seed`; None means
    that the likeliest tokens are taken. guidance: a second row of each prompt; then the line says so, and `asked` shows
    nothing. rows: of each request.
    """
    bodies = [{"prompt": prompt, "inputs": given} for prompt, given in zip(prompts, inputs or prompts, strict=True)]
    bodies = [body if inputs else {"prompt": body["prompt"]} for body in bodies]
    drawn = draws or samples
    bodies = [body | ({"seed": i} if drawn else {"temperature": 0}) | (params or {}) for i, body in enumerate(bodies)]
    bodies = [body | {"beside": each} for body, each in zip(bodies, guidance, strict=True)] if guidance else bodies
    # Turns repeat their prompts, so nothing is kept from one to the next.
    options = {"enable_prefix_caching": False, "max_num_seqs": len(bodies) * (samples or rows + bool(guidance))}
    with hibachi.AutoregressiveBatchInference(model, **options) as engine:

        def start(prompt, inputs=None, n=None, beside=None, **params):
            params = hibachi.SamplingParams(max_tokens=new, **params)
            if n:
                return engine.run_many(prompt, params, n, inputs=inputs)
            return engine.run(prompt, params, inputs=inputs, guidance=beside)

        def all_of(engine):
            if samples is None:
                return [np.array(stream.collect()).tolist() for stream in [start(**body) for body in bodies]]
            return [[stream.collect() for stream in group] for group in [start(n=samples, **body) for body in bodies]]

        def one_by_one():
            return [own(body["prompt"], **body.get("inputs", {}), **seed_of(body)) for body in bodies]

        jobs = [lambda: (at_once or all_of)(engine), one_by_one, *([batch] if batch else [])]
        ratios = []
        for turn in range(asked.rounds + 1):
            (ours, theirs, *_), (seconds, *longer) = zip(*map(timed, jobs), strict=True)
            if turn:  # the first calls of a library take longer
                ratios.append([each / seconds for each in longer])
        more = {} if draws else {"logprobs": 0}
        company, shown = zip(*[certainty(stream) for stream in [start(**body, **more) for body in bodies]], strict=True)
        alone, _ = zip(*[certainty(start(**body, **more)) for body in bodies], strict=True)
    same = sum(
        np.shape(a) == np.shape(b) and np.allclose(a, b, 1e-4 * draws, 1e-5 * draws)
        for a, b in zip(ours, theirs, strict=True)
    )
    faster, *beside = map(statistics.median, zip(*ratios, strict=True))
    print(
        f"{'guided: ' if guidance else ''}{same} of {len(bodies)} equal; at once {faster:.1f} times as fast"
        + (f", {beside[0]:.1f} times as in its own batch" if beside else "")
        + f"; bits alone = in company: {'yes' if alone == company else 'no'}"
    )
    if asked.show and not guidance:
        shown = [body | {"tokens": np.array(tokens)} for body, tokens in zip(bodies, shown, strict=True)]
        print(json.dumps(shown, default=lambda array: array.tolist()))


class Numbers:
    """Returns what it is given to draw from. draws: as of the model whose numbers they are."""

    max_model_len = 2**20

    def __init__(self, draws):
        self.draws = draws

    def forward(self, tokens, normal):
        return normal


def normals(draws, new):
    """What an engine gives sixteen requests to draw from, with prompts of one token and seeds from 0: (draws,) for each
    of their new tokens.
    """
    with hibachi.AutoregressiveBatchInference(Numbers(draws), backend="torch") as engine:
        streams = [engine.run([[0.0] * draws], hibachi.SamplingParams(seed=i, max_tokens=new)) for i in range(16)]
        return [stream.collect() for stream in streams]


def uniforms_of(seed, samples, new):
    """What an engine draws samples of a prompt of one token with, one number for each token: (samples, new)."""
    return np.stack([uniforms(fork(seed, k), np.arange(1, new + 1)) for k in range(samples)])


def seed_of(body):
    return {name: body[name] for name in body if name == "seed"}


def certainty(stream):
    """Every bit of the log-probabilities of a stream's tokens, or of the values that were drawn; and the tokens."""
    tokens = stream.collect()
    if not stream.logprobs:
        return [float(value).hex() for value in np.ravel(tokens)], tokens
    frames = [each if isinstance(each, list) else [each] for each in stream.logprobs]
    return [float(likely).hex() for frame in frames for by_id in frame for likely in by_id.values()], tokens


def timed(job):
    began = time.perf_counter()
    return job(), time.perf_counter() - began
