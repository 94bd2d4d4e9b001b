"""Sixteen requests at once in an engine, beside a library's own loop that takes them one by one: every program of this
folder ends here, and prints one line.
"""

import argparse
import json
import statistics
import time

import numpy as np

import hibachi

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


def compare(model, own, prompts, new, asked, inputs=None):
    """model: for an engine. own: from a prompt, and inputs by name, to the `new` likeliest tokens of the library's
    loop; fewer where the model ends. asked: of `arguments`. inputs: {name: lists} of each prompt.
    """
    requests = list(zip(prompts, inputs or [{}] * len(prompts), strict=True))
    # Turns repeat their prompts, so nothing is kept from one to the next.
    with hibachi.AutoregressiveBatchInference(model, enable_prefix_caching=False) as engine:

        def start(prompt, given, **more):
            params = hibachi.SamplingParams(temperature=0, max_tokens=new, **more)
            return engine.run(prompt, params, inputs=given or None)

        def at_once():
            return [stream.collect() for stream in [start(*request) for request in requests]]

        def one_by_one():
            return [own(prompt, **given) for prompt, given in requests]

        ratios = []
        for turn in range(asked.rounds + 1):
            ours, seconds = timed(at_once)
            theirs, longer = timed(one_by_one)
            if turn:  # in the first turn libraries compile and tune
                ratios.append(longer / seconds)
        company = [certainty(stream) for stream in [start(*request, logprobs=0) for request in requests]]
        alone = [certainty(start(*request, logprobs=0)) for request in requests]
    ours = [np.array(each).tolist() for each in ours]  # frames are arrays
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    print(
        f"{same} of {len(prompts)} equal; at once {statistics.median(ratios):.1f} times as fast; "
        f"bits alone = in company: {'yes' if alone == company else 'no'}"
    )
    if asked.show:
        asked_for = [{"prompt": prompt} | ({"inputs": given} if given else {}) for prompt, given in requests]
        print(json.dumps([each | {"tokens": got} for each, got in zip(asked_for, ours, strict=True)]))


def certainty(stream):
    """Every bit of the log-probabilities of a stream's tokens."""
    stream.collect()
    by_id = [each for at in stream.logprobs for each in (at if isinstance(at, list) else [at])]  # a list of a frame
    return [float(likely).hex() for each in by_id for likely in each.values()]


def timed(job):
    began = time.perf_counter()
    return job(), time.perf_counter() - began
