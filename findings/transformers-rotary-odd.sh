#!/bin/sh
# transformers 5.24.0, GPTNeoXForCausalLM: rotary_pct 0.25 of heads of 12 is 3 dimensions, and 4 are turned, by the
# frequencies theta ** (-0 / 3) and theta ** (-2 / 3). So a head of an odd part is neither refused nor turned by 3 or 2
# of its dimensions. Seen: the fourth dimension of a query changes with its position, the fifth does not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/python" - <<'PY'
import torch
import transformers
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding, apply_rotary_pos_emb

transformers.logging.set_verbosity_error()
config = transformers.GPTNeoXConfig(hidden_size=48, num_attention_heads=4, rotary_pct=0.25)
place = torch.arange(8)[None]
rotary = GPTNeoXRotaryEmbedding(config)
query = torch.ones(1, 1, 8, 12)
cos, sin = rotary(query, place)
turned, _ = apply_rotary_pos_emb(query, query, cos, sin)
moves = [bool((turned[0, 0, :, d] != turned[0, 0, 0, d]).any()) for d in range(12)]
print("dimensions that turn:", [d for d, moved in enumerate(moves) if moved], "frequencies", rotary.inv_freq.tolist())
assert moves == [True] * 4 + [False] * 8
assert torch.allclose(rotary.inv_freq, torch.tensor([1.0, 10000 ** (-2 / 3)]))
PY
