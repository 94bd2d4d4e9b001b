"""A model of your own over HTTP, streaming: `hibachi serve served_letters.py:Letters`"""

import numpy as np

TEXT = "Mary had a little lamb, its fleece was white as snow, and everywhere that Mary went the lamb was sure to go.\n"
LETTERS = sorted(set(TEXT))


class Tokenizer:
    def encode(self, text):
        return [LETTERS.index(letter) for letter in text]

    def decode(self, ids):
        return "".join(LETTERS[i] for i in ids)


class Letters:
    tokenizer = Tokenizer()
    vocab_size, max_model_len, eos_ids = len(LETTERS), 256, [LETTERS.index("\n")]

    def __init__(self):  # counts which letter follows the last three
        ids = np.array(self.tokenizer.encode("\n\n\n" + TEXT))
        self.counts = np.zeros((self.vocab_size,) * 4, np.float32)
        np.add.at(self.counts, (ids[:-3], ids[1:-2], ids[2:-1], ids[3:]), 1)

    def logits(self, tokens, lengths):  # (batch, sequence), (batch,) -> (batch, letters)
        real = np.arange(tokens.shape[1]) >= tokens.shape[1] - lengths[:, None]
        tokens = np.where(real, tokens, 0)  # padding, on the left of shorter rows, reads as ends of lines
        last = np.pad(tokens, ((0, 0), (3, 0)))[:, -3:]
        return np.log(self.counts[tuple(last.T)] + 1e-9)
