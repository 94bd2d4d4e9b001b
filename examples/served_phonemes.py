"""Public weights over HTTP, a word in and its sounds out: `hibachi serve served_phonemes.py:Phonemes`

    curl "http://127.0.0.1:8000/v1/generate?temperature=0" -d hello \\
        -H "Content-Type: text/plain" -H "Accept: text/plain"

answers "HH EH1 L OW0". The model is the one in g2p-en 2.1.0 by Kyubyong Park and Jongseok Kim
(https://github.com/Kyubyong/g2p, Apache-2.0): a GRU reads the letters, another one says the phonemes. Its weights come
with the package, of which nothing is imported. Beforehand, where the server starts:

    python -m pip download --no-deps g2p-en==2.1.0   # or the variable G2P_EN names the file
"""

import io
import os
import zipfile

import numpy as np

import hibachi

LETTERS = ["<pad>", "<unk>", "</s>", *"abcdefghijklmnopqrstuvwxyz"]
VOWELS = "AA AE AH AO AW AY EH ER EY IH IY OW OY UH UW"
CONSONANTS = "B CH D DH F G HH JH K L M N NG P R S SH T TH V W Y Z ZH"
SOUNDS = sorted([*CONSONANTS.split(), "UW", *(vowel + stress for vowel in VOWELS.split() for stress in "012")])
PHONEMES = ["<pad>", "<unk>", "<s>", "</s>", *SOUNDS]
FIRST = len(LETTERS)  # the id of the first phoneme: one vocabulary holds letters, then phonemes
UNKNOWN, WORD_ENDS, SPEAK, DONE = 1, 2, FIRST + 2, FIRST + 3
MOST = 20  # phonemes of a word


class Phonemes:
    """A hibachi.CachedModel. A prompt is a word's letters, WORD_ENDS, SPEAK."""

    vocab_size, max_model_len, eos_ids = FIRST + len(PHONEMES), 128, [DONE]

    def __init__(self, backend):
        self.backend = backend.invariant()  # the same bits, whoever shares the batch
        with zipfile.ZipFile(os.environ.get("G2P_EN", "g2p_en-2.1.0-py3-none-any.whl")) as wheel:
            weights = np.load(io.BytesIO(wheel.read("g2p_en/checkpoint20.npz")))
        self.params = {name: self.put(name, weights[name]) for name in weights}

    def put(self, name, weight):
        return self.backend.put_weight(weight, "float32") if name.endswith(("w_ih", "w_hh", "fc_w")) else weight

    def cache_spec(self):  # what the network remembers, and how many phonemes it was asked for
        return [hibachi.State(shape=(256,)), hibachi.State(shape=(), dtype="int32")]

    def step(self, params, cache, x):
        h, said = cache  # (B, 256), (B,)
        states, counts = [], []
        for ids in x.tok.reshape(len(h), -1).T:  # with a State, all rows have equally many tokens
            h, speaks = h.copy(), ids >= FIRST
            for part, rows, inputs in (("enc", ~speaks, ids), ("dec", speaks, ids - FIRST)):
                if rows.any():
                    h[rows] = self.cell(params, part, params[f"{part}_emb"][inputs[rows]], h[rows])
            said = said + speaks
            states.append(h)
            counts.append(said)
        wanted = np.stack(states, axis=1).reshape(-1, 256)[x.last]
        logits = np.full((len(wanted), self.vocab_size), -np.inf, np.float32)
        logits[:, FIRST:] = self.backend.linear(wanted, params["fc_w"], params["fc_b"])
        tired = np.stack(counts, axis=1).ravel()[x.last] > MOST
        logits[tired] = np.where(np.arange(self.vocab_size) == DONE, 0, -np.inf)
        return logits, [h, said]

    def cell(self, params, part, x, h):
        """One step of a GRU (Cho et al. 2014), its gates in the order r, z, n."""
        of_x = np.split(self.backend.linear(x, params[f"{part}_w_ih"], params[f"{part}_b_ih"]), 3, axis=1)
        of_h = np.split(self.backend.linear(h, params[f"{part}_w_hh"], params[f"{part}_b_hh"]), 3, axis=1)
        r, z = (1 / (1 + np.exp(-of_x[i] - of_h[i])) for i in (0, 1))
        return (1 - z) * np.tanh(of_x[2] + r * of_h[2]) + z * h

    def read(self, data, kind):  # what the body of a request means
        word = data.decode(errors="replace").strip().lower()
        if not kind.startswith("text/plain") or not word or len(word.split()) > 1:
            raise ValueError(f"Expected one word as text/plain; got {word[:50]!r} as {kind}.")
        return [*(LETTERS.index(c) if c in LETTERS[3:] else UNKNOWN for c in word), WORD_ENDS, SPEAK]

    def write(self, tokens):  # the body of an answer, and its type
        return " ".join(PHONEMES[i - FIRST] for i in tokens if i != DONE).encode(), "text/plain"
