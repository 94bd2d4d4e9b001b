#!/bin/sh
# transformers 5.24.0, RwkvForCausalLM: where two rows go on from `state` with one token each, a row's logits depend on
# its neighbour; with one row they are those of the whole text. Greedy generation of a batch gives other tokens than one
# by one, without a warning. Cause: the state's value [rows, hidden] is mixed with the token's [rows, 1, hidden], which
# broadcasts to [rows, rows, hidden]. Seen: one row off by 1e-7, two rows by 0.1 or more.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/python" - <<'PY'
import torch
import transformers

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
config = transformers.RwkvConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
model = transformers.RwkvForCausalLM(config).eval()
with torch.no_grad():
    for p in model.parameters():
        p.copy_(torch.randn_like(p) * 0.3)
text = torch.randint(0, 50, (2, 8))


def off(rows):
    """How far the last token's logits, from the state, are from those of the whole text."""
    with torch.no_grad():
        whole = model(rows, use_cache=False).logits[:, -1]
        state = model(rows[:, :-1], use_cache=True).state
        return float((model(rows[:, -1:], state=state, use_cache=True).logits[:, -1] - whole).abs().max())


one, two = max(off(text[:1]), off(text[1:])), off(text)
print(f"one row: {one:.1e}, two rows: {two:.1e}")
assert one < 1e-4 < 0.1 < two
PY
