"""A grammar guides a model that writes no text: pitches and lengths of a melody take turns, at three levels.

Tokens 0 to 127 are pitches, as in MIDI, and 128 to 135 are lengths in eighths. The model is a small random recurrent
network, which knows nothing of turns. The grammar names token ids, so there is no tokenizer.
"""

import numpy as np

import hibachi

PITCHES, LENGTHS, UNITS = 128, 8, 64
NOTES = 6
MELODY = f"start: note{{{NOTES}}}\nnote: <[48-72]> <[128-135]>\n"  # within two octaves
rng = np.random.default_rng(0)
IN, RECURRENT = rng.normal(size=(PITCHES + LENGTHS, UNITS)), rng.normal(size=(UNITS, UNITS)) / 8
OUT = rng.normal(size=(UNITS, PITCHES + LENGTHS)) / 4


def run(h, tokens):
    """h (B, units), tokens (B, n) -> the state after all tokens, (B, units)."""
    for column in tokens.T:
        h = np.tanh(IN[column] + (h[:, None] * RECURRENT.T).sum(2))  # a sum whose bits do not depend on B
    return h


def logits_of(h):
    return (h[:, :, None] * OUT).sum(1).astype(np.float32)


class Whole:
    """Level 1: all tokens each time."""

    vocab_size, max_model_len = PITCHES + LENGTHS, 64

    def logits(self, tokens, lengths):
        rows = [row[None, len(row) - n :] for row, n in zip(tokens, lengths, strict=True)]
        return logits_of(np.concatenate([run(np.zeros((1, UNITS)), row) for row in rows]))


class OwnState:
    """With a cache of its own: the state after the tokens so far."""

    vocab_size, max_model_len, past = PITCHES + LENGTHS, 64, hibachi.OwnCache()

    def step(self, tokens, lengths, past):
        h = run(np.zeros((len(tokens), UNITS)) if past is None else past, tokens)
        return logits_of(h), h


class KeptState:
    """Level 2: the engine keeps the state."""

    vocab_size, max_model_len, params = PITCHES + LENGTHS, 64, None

    def cache_spec(self):
        return [hibachi.State(shape=(UNITS,), dtype="float64")]

    def step(self, params, cache, x):
        tokens = x.tok.reshape(len(cache[0]), -1)  # with a State, all rows have equally many tokens
        h = run(cache[0], tokens)
        return logits_of(h[x.last // tokens.shape[1]]), [h]


def main():
    form = {"grammar": MELODY}
    for model in (Whole(), OwnState(), KeptState()):
        with hibachi.AutoregressiveBatchInference(model, backend="numpy") as engine:
            streams = [
                engine.run([60, 130], hibachi.SamplingParams(seed=seed, structured_outputs=form)) for seed in range(4)
            ]
            for stream in streams:
                notes = np.array(stream.collect()).reshape(-1, 2)
                print(f"{type(model).__name__}|{' '.join(f'{pitch}:{length - 127}' for pitch, length in notes)}")


if __name__ == "__main__":
    main()
