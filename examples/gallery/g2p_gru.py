"""How words are spoken, by g2p-en with its real weights, at level 2: the engine keeps the state of its two GRUs.

In the checkout, in an environment of its own:

    pip install ".[serve]" "g2p-en>=2.1"
    python examples/gallery/g2p_gru.py
    hibachi serve examples/gallery/g2p_gru.py:Phonemes
    curl http://127.0.0.1:8000/v1/generate -H "Content-Type: application/json" \\
        -d '{"prompt": [7, 2, 31], "temperature": 0}'

The model is by Kyubyong Park and Jongseok Kim (https://github.com/Kyubyong/g2p, Apache-2.0). One GRU reads the
letters, another says the phonemes; what a token is for says which. The weights are the package's own, and so is
`predict`, with which the tokens are compared. `served_phonemes.py` reads and writes text over HTTP, and needs the
weights only.
"""

import contextlib

import nltk
import numpy as np
from side_by_side import arguments, compare

import hibachi

WORDS = ["hibachi", "batcher", "tokenize", "kernelly", "unpadded", "prefillers", "decodable", "quokkas"]
WORDS += ["blorvish", "snarkle", "twindle", "phromage", "gribbling", "vexley", "zorbital", "quenchify"]
PAD, ENDS, SPEAK, DONE = 0, 2, 2, 3  # ENDS among the letters, SPEAK and DONE among the phonemes
MOST = 20  # phonemes of a word


class Phonemes:
    params, max_model_len = None, 128

    def __init__(self, backend, of=None):
        self.backend, of = backend.invariant(), of or library()  # the same bits, whoever shares the batch
        self.letters = len(of.graphemes)  # the id of the first phoneme: one vocabulary holds letters, then phonemes
        self.vocab_size, self.eos_ids = self.letters + len(of.phonemes), [self.letters + DONE]
        put, linear = (lambda weight: self.backend.put_weight(weight, "float32")), self.backend.linear
        self.tables = [
            linear(emb, put(w), b)
            for emb, w, b in ((of.enc_emb, of.enc_w_ih, of.enc_b_ih), (of.dec_emb, of.dec_w_ih, of.dec_b_ih))
        ]
        self.hidden = (put(of.enc_w_hh), of.enc_b_hh), (put(of.dec_w_hh), of.dec_b_hh)
        self.out = put(of.fc_w), of.fc_b

    def cache_spec(self):
        return [hibachi.State((len(self.hidden[0][1]) // 3,))]

    def step(self, params, cache, x):
        states = [cache[0]]
        for ids in x.tok.reshape(len(cache[0]), -1).T:  # with a State, all rows have equally many tokens
            speaks, h = ids >= self.letters, states[-1].copy()
            for part, rows, names in ((0, ~speaks & (ids != PAD), ids), (1, speaks, ids - self.letters)):
                if rows.any():
                    h[rows] = self.gru(self.tables[part][names[rows]], h[rows], *self.hidden[part])
            states.append(h)
        wanted = np.stack(states[1:], axis=1).reshape(-1, h.shape[1])[x.last]
        letters = np.full((len(wanted), self.letters), -np.inf, np.float32)
        return np.concatenate([letters, self.backend.linear(wanted, *self.out)], axis=1), [h]

    def gru(self, of_x, h, weight, bias):
        """One step of a GRU (Cho et al. 2014), its gates in the order r, z, n."""
        of_h = self.backend.linear(h, weight, bias)
        r, z = np.split(1 / (1 + np.exp(-(of_x + of_h)[:, : -h.shape[1]])), 2, axis=1)
        return (1 - z) * np.tanh(of_x[:, -h.shape[1] :] + r * of_h[:, -h.shape[1] :]) + z * h


def library():
    """The library's object, without the dictionaries that it would download: `predict` is for words not in them."""
    nltk.download = lambda name: False
    from g2p_en import G2p

    class Predicting(G2p):
        def __init__(self):
            with contextlib.suppress(LookupError):
                super().__init__()
            self.load_variables()

    return Predicting()


def prompt_of(of, word):
    """Padding in front, so that prompts are equally long and one call reads all: letters, their end, then SPEAK."""
    ids = [of.g2idx[letter] for letter in word] + [ENDS, len(of.graphemes) + SPEAK]
    return [PAD] * (-len(ids) % 16) + ids


def main():
    asked, of = arguments(__doc__), library()
    words = {tuple(prompt_of(of, word)): word for word in WORDS}

    def own(prompt):
        said = [len(of.graphemes) + of.p2idx[phoneme] for phoneme in of.predict(words[tuple(prompt)])]
        return said if len(said) == MOST else [*said, len(of.graphemes) + DONE]

    compare(Phonemes(hibachi.load_backend("numpy"), of), own, [list(prompt) for prompt in words], MOST, asked)


if __name__ == "__main__":
    main()
