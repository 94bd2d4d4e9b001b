"""A model of your own over HTTP, streaming: `hibachi serve served_letters.py:Letters`"""

import numpy as np

import hibachi

TEXT = "Mary had a little lamb, its fleece was white as snow, and everywhere that Mary went the lamb was sure to go.\n"
LETTERS = sorted(set(TEXT))


class Tokenizer:
    def encode(self, text):
        return [LETTERS.index(letter) for letter in text]

    def decode(self, ids):
        return "".join(LETTERS[i] for i in ids)


class Letters:
    tokenizer, past = Tokenizer(), hibachi.OwnCache()
    vocab_size, max_model_len, eos_ids = len(LETTERS), 256, [LETTERS.index("\n")]

    def __init__(self):  # counts which letter follows the last three
        ids = np.array(self.tokenizer.encode("\n\n\n" + TEXT))
        self.counts = np.zeros((self.vocab_size,) * 4, np.float32)
        np.add.at(self.counts, (ids[:-3], ids[1:-2], ids[2:-1], ids[3:]), 1)

    def step(self, tokens, past):  # (batch, new letters), the last three before -> (batch, letters), the last three now
        before = np.zeros((len(tokens), 3), int) if past is None else past  # 0 is the end of a line
        last = np.concatenate([before, tokens], axis=1)[:, -3:]
        return np.log(self.counts[tuple(last.T)] + 1e-9), last
