"""The table of agreement with transformers: the largest difference of a logit, by architecture and library.

The cases are those of tests/model/test_agreement.py, which fails where a greedy token differs or a log-probability is
off by 1e-4: tiny random weights, prompts in chunks beside rows that decode, 32 greedy tokens.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.model.test_agreement import CASES, LIBRARIES, PROMPTS, make, run

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or list(LIBRARIES)
    print(f"{'':18}" + "".join(f"{name:>20}" for name in wanted))
    for name in CASES:
        line = f"{name:18}"
        with tempfile.TemporaryDirectory() as folder:
            reference = make(name, folder)
            for library in wanted:
                worst, same, total = 0.0, 0, 0
                for prompt, tokens, ours in zip(PROMPTS, *run(folder, LIBRARIES[library]()), strict=True):
                    with torch.no_grad():
                        logits = reference(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
                    logits = logits[len(prompt) - 1 : -1]
                    worst = max(worst, float(np.abs(ours - logits.double().log_softmax(-1).numpy()).max()))
                    same += sum(a == b for a, b in zip(tokens, logits.argmax(-1).tolist(), strict=True))
                    total += len(tokens)
                line += f"{worst:11.1e} {same:>3}/{total}"
        print(line, flush=True)
