"""Models of one's own and rows for them, for tests of whole runs."""

import json

MODELS = '''
import os, time
from pathlib import Path
import numpy as np

def rows(tokens):
    """Logits that depend on all tokens of a row, and on nothing else."""
    out = np.zeros((len(tokens), 32), np.float32)
    for i, row in enumerate(tokens):
        out[i] = np.cos(np.arange(32) * (1 + int((row * np.arange(1, len(row) + 1)).sum()) % 97)) * 2
    return out

class Letters:
    vocab_size, max_model_len = 32, 64
    def logits(self, tokens, lengths):
        return rows([t[:n] for t, n in zip(np.asarray(tokens), np.asarray(lengths))])

class Slow(Letters):
    deterministic = False  # or it is tried, which takes a while
    def logits(self, tokens, lengths):
        time.sleep(0.004)
        return super().logits(tokens, lengths)

class Flaky(Letters):
    """As long as there is a file called broken, rows that begin with 13, 13 fail."""
    def logits(self, tokens, lengths):
        if Path("broken").exists() and (np.asarray(tokens)[:, :2] == 13).all(1).any():
            raise ValueError("13 is unlucky")
        return super().logits(tokens, lengths)

class Deadly(Letters):
    """A row that begins with 31, 31 ends its process."""
    def logits(self, tokens, lengths):
        if (np.asarray(tokens)[:, :2] == 31).all(1).any():
            os._exit(9)
        return super().logits(tokens, lengths)

class Hanging(Letters):
    """A row that begins with 31, 31 takes for ever, as long as there is a file called hang."""
    def logits(self, tokens, lengths):
        if (np.asarray(tokens)[:, :2] == 31).all(1).any() and Path("hang").exists():
            Path("hangs").write_text(str(os.getpid()))
            time.sleep(1000)
        return super().logits(tokens, lengths)

class Loading(Letters):
    def __init__(self):
        Path("loads").write_text(str(os.getpid()))
        time.sleep(1000)
'''
PLAIN = ("--engine", "own", "--tokens-column", "tokens", "--max-tokens", "5", "--temperature", "1", "--plain")
SLOW = ("--max-num-seqs", "4")


def lines(n=40):
    """Rows that share beginnings; some are wrong."""
    for i in range(n):
        row = {"id": i, "tokens": [i % 3, 7, 7, 7, i % 5, i % 30][: 3 + i % 4], "note": "é" * (i % 4), "x": i / 7}
        if i % 9 == 4:
            row["tokens"] = ["no", [99], None, [], "tokens"][i // 9]
        yield "{ no JSON" if i == 22 else json.dumps(row)
