"""A model that says JSON and, unless it is kept from that, something before: for whatever ends with a line feed. It has
room for the prompts of programs that write much.
"""

import numpy as np

BEFORE, SAID = b"Of course! ", b'{"name": "Emma", "mood": "good", "age": 21}'


class Bytes:
    """Tokens are bytes, and 0 is the end."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")

    def token_bytes(self, token):
        return bytes([token]) if token else b""


class Talks:
    vocab_size, max_model_len, eos_ids = 256, 65536, (0,)
    tokenizer = Bytes()

    def logits(self, tokens, lengths):
        scores = np.zeros((len(lengths), 256), np.float32)
        for row, length in enumerate(lengths):
            said = bytes(tokens[row, :length].astype(np.uint8)).rpartition(b"\n")[2]
            for score, text in ((30, SAID), (50, BEFORE + SAID)):
                if text.startswith(said):
                    scores[row, [*text, 0][len(said)]] = score
        return scores
