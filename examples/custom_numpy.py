"""A model of your own on NumPy: what happens next to a patient, counted from other patients' records.

The model returns logits (level 1 of the ladder), so the engine samples: each request has its own temperature and seed,
ends with a discharge, and gives the same events whoever shares its batch.
"""

from itertools import pairwise

import numpy as np

import hibachi

EVENTS = ["admission", "blood test", "x-ray", "surgery", "antibiotics", "recovery", "discharge"]
ADMISSION, DISCHARGE = 0, 6
PATHS = [  # (how many patients in a hundred, their stay)
    (35, [0, 1, 4, 5, 6]),
    (25, [0, 1, 4, 1, 4, 5, 6]),
    (20, [0, 2, 3, 5, 6]),
    (15, [0, 2, 3, 4, 1, 5, 6]),
    (5, [0, 1, 2, 3, 4, 4, 5, 6]),
]


class NextEvent:
    """Counts which event follows the last two, and the last one where the two were never seen together."""

    vocab_size = len(EVENTS)

    def __init__(self, paths):
        n = self.vocab_size
        self.after_one, self.after_two = np.zeros((n, n)), np.zeros((n, n, n))
        for weight, path in paths:
            for b, c in pairwise(path):
                self.after_one[b, c] += weight
            for (a, b), (_, c) in pairwise(pairwise(path)):
                self.after_two[a, b, c] += weight

    def logits(self, tokens, lengths):
        """(batch, sequence), (batch,) -> (batch, events)."""
        counts = self.after_one[tokens[:, -1]]
        if tokens.shape[1] > 1:
            pairs = self.after_two[tokens[:, -2], tokens[:, -1]]
            known = (lengths > 1) & (pairs.sum(-1) > 0)  # a row of one event has padding, if anything, before it
            counts = np.where(known[:, None], pairs, counts)
        return np.log(counts + 1e-9).astype(np.float32)


def main():
    known = [[0], [0, 1], [0, 2], [0, 1, 4], [0, 2, 3]]  # five patients, from the moment that we know of
    with hibachi.AutoregressiveBatchInference(NextEvent(PATHS), stop_token=DISCHARGE, max_model_len=32) as engine:
        params = [hibachi.SamplingParams(temperature=0.8, seed=i, max_tokens=None) for i in range(len(known))]
        streams = [engine.run(stay, p) for stay, p in zip(known, params, strict=True)]
        together = [stream.collect() for stream in streams]
        for stay, coming in zip(known, together, strict=True):
            print(" > ".join(EVENTS[i] for i in stay), "...", " > ".join(EVENTS[i] for i in coming))
        alone = [engine.run(stay, p).collect() for stay, p in zip(known, params, strict=True)]
        same = sum(a == b for a, b in zip(alone, together, strict=True))
        print(f"the same events when run alone: {same} of {len(known)}")


if __name__ == "__main__":
    main()
