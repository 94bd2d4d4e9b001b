"""A recurrent model whose state the engine keeps (level 2): it computes new tokens only, never the past again.

The model is an echo state network (Jaeger 2001): a fixed random recurrent layer, and a readout fitted by least
squares. The engine holds one state a request, hands over zeros to a request that starts, and keeps a new state only
if the step succeeded.
"""

import numpy as np

import hibachi

VERSE = "Mary had a little lamb, its fleece was white as snow, and everywhere that Mary went the lamb was sure to go.\n"
ALPHABET = sorted(set(VERSE))
UNITS = 300


class EchoState:
    """A hibachi.CachedModel."""

    vocab_size = len(ALPHABET)  # `step` returns logits, the engine samples
    max_model_len = 1024

    def __init__(self, ids):
        rng = np.random.default_rng(0)
        recurrent = rng.normal(size=(UNITS, UNITS))
        recurrent *= 0.8 / np.abs(np.linalg.eigvals(recurrent)).max()
        self.params = {"in": rng.normal(size=(self.vocab_size, UNITS)), "recurrent": recurrent}
        states = self.run(self.params, np.zeros((1, UNITS)), np.array([ids[:-1] * 3]))[0]
        wanted = np.eye(self.vocab_size)[ids[1:] * 3]
        square = states.T @ states + 1e-3 * np.eye(UNITS)
        self.params["out"] = np.linalg.solve(square, states.T @ wanted)

    @staticmethod
    def run(params, h, tokens):
        """h (B, units), tokens (B, n) -> the states after each token (B, n, units)."""
        states = []
        for column in tokens.T:
            h = np.tanh(params["in"][column] + h @ params["recurrent"])
            states.append(h)
        return np.stack(states, axis=1)

    def cache_spec(self):
        return [hibachi.State(shape=(UNITS,), dtype="float64")]

    def step(self, params, cache, x):
        (h,) = cache  # (B, units)
        states = self.run(params, h, x.tok.reshape(len(h), -1))  # with a State, all rows have equally many tokens
        wanted = states.reshape(-1, UNITS)[x.last]
        return (wanted @ params["out"]).astype(np.float32), [states[:, -1]]


def main():
    model = EchoState([ALPHABET.index(c) for c in VERSE])
    greedy = hibachi.SamplingParams(temperature=0, max_tokens=None)
    newline = ALPHABET.index("\n")
    prompts = ["Mary had", "Mary had a little lamb, its fl", "and everywhere that M"]
    with hibachi.AutoregressiveBatchInference(model, stop_token=newline, backend="numpy") as engine:
        streams = [engine.run([ALPHABET.index(c) for c in p], greedy, include_stop=False) for p in prompts]
        for prompt, stream in zip(prompts, streams, strict=True):
            print(f"{prompt}|{''.join(ALPHABET[i] for i in stream)}")
        stats = engine.stats()
    print(f"{stats.prompt_tokens} prompt and {stats.new_tokens} new tokens in {stats.steps} steps")


if __name__ == "__main__":
    main()
