"""Sampling as the books define it, for one row, in slow Python: what the batched sampler is compared with.

Written from the definitions (vLLM's documentation of SamplingParams, the papers named in
`hibachi.engine.sampling.draw`), not from our code: lists and float64, no array operation that the sampler uses.
"""

import math


def edited(
    logits,
    prompt=(),
    output=(),
    *,
    allowed_token_ids=None,
    bad_words=(),
    logit_bias=(),
    min_tokens=0,
    stop_tokens=(),
    processors=(),
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
):
    """The logits after everything that comes before the temperature, as a list. bad_words: lists of token ids."""
    out = [float(x) for x in logits]
    output = list(output)
    if allowed_token_ids is not None:
        allowed = set(allowed_token_ids)
        out = [x if i in allowed else -math.inf for i, x in enumerate(out)]
    for word in bad_words:
        *beginning, last = word
        if not beginning or output[-len(beginning) :] == beginning:
            out[last] = -math.inf
    for token, value in dict(logit_bias).items():
        out[token] += value
    if len(output) < min_tokens:
        for token in stop_tokens:
            out[token] = -math.inf
    for processor in processors:
        out = processor(output, out)
    for token in range(len(out)):
        if token in prompt or token in output:
            out[token] = out[token] / repetition_penalty if out[token] > 0 else out[token] * repetition_penalty
        out[token] -= frequency_penalty * output.count(token)
        if token in output:
            out[token] -= presence_penalty
    return out


def distribution(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0):
    """The probability of each token, as a list of floats."""
    logits = [float(x) for x in logits]
    best = max(logits)
    if temperature == 0:
        return [float(i == logits.index(best)) for i in range(len(logits))]
    p = _shares([math.exp((x - best) / temperature) for x in logits])
    if min_p:
        p = _shares([x if x >= min_p * max(p) else 0.0 for x in p])
    if 0 < top_k < len(p):
        p = _shares(_at_least(p, sorted(p, reverse=True)[top_k - 1]))
    if top_p < 1:
        p = _shares(_at_least(p, _least_of_share(p, p, top_p)))
    if typical_p < 1:
        entropy = -sum(x * math.log(x) for x in p if x)
        near = [-abs(-math.log(x) - entropy) if x else -math.inf for x in p]
        limit = _least_of_share(p, near, typical_p)
        p = _shares([x if n >= limit - 1e-12 else 0.0 for x, n in zip(p, near, strict=True)])
    return p


def _shares(weights):
    whole = math.fsum(weights)
    return [w / whole for w in weights]


def _at_least(p, limit):
    return [x if x >= limit else 0.0 for x in p]


def _least_of_share(p, score, share):
    """The score of the last token of the smallest set, in falling order of the score, that has this share of p."""
    mass = 0.0
    for i in sorted(range(len(p)), key=lambda i: -score[i]):
        if p[i] > 0:
            limit = score[i]
            mass += p[i]
        if mass >= share:
            break
    return limit


def log_softmax(logits):
    best = max(logits)
    whole = best + math.log(math.fsum(math.exp(x - best) for x in logits))
    return [x - whole for x in logits]


def chi_square(drawn, p):
    """Pearson's statistic of how often each token was drawn, and the number of tokens that can come, less one."""
    n = len(drawn)
    counts = [0] * len(p)
    for token in drawn:
        counts[token] += 1
    assert all(c == 0 for c, x in zip(counts, p, strict=True) if x == 0), "a token came that cannot"
    some = [(c, n * x) for c, x in zip(counts, p, strict=True) if x > 0]
    return sum((c - e) ** 2 / e for c, e in some), len(some) - 1


def fits(drawn, p):
    """Does chi-square leave room for doubt (1 in 10,000; Wilson and Hilferty's approximation)?"""
    value, freedom = chi_square(drawn, p)
    if freedom == 0:
        return value == 0
    z = 3.719
    limit = freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3
    return value <= limit
