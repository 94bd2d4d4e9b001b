#!/bin/sh
# transformers 5.24.0, Phi3ForCausalLM with LongRoPE: in a padded batch, a short row's logits change once another row
# has more positions than original_max_position_embeddings, as all rows of a call take the long factors then. The
# attention mask and position_ids are those of each row. Seen: beside a row of 32 positions (of 32) off by 1e-6, beside
# one of 33 by 0.1 or more.
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
rope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 8, long_factor=[4.0] * 8)
config = transformers.Phi3Config(
    vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0,
    num_key_value_heads=2, max_position_embeddings=128, original_max_position_embeddings=32, rope_parameters=rope,
    eos_token_id=1, bos_token_id=2,
)
model = transformers.Phi3ForCausalLM(config).eval()
with torch.no_grad():
    for p in model.parameters():
        if p.ndim > 1:
            p.normal_(0, 0.3)


def beside(n):
    """A row of 10 tokens, padded on the left, beside one of n: how far it is from what it gets alone."""
    short, long = torch.randint(3, 50, (1, 10)), torch.randint(3, 50, (1, n))
    place = torch.stack([torch.arange(n) - (n - 10), torch.arange(n)])
    rows = torch.cat([torch.cat([torch.zeros(1, n - 10, dtype=int), short], 1), long])
    with torch.no_grad():
        alone = model(short).logits[:, -1]
        both = model(rows, attention_mask=(place >= 0).int(), position_ids=place.clamp(min=0)).logits[:1, -1]
    return float((both - alone).abs().max())


far = {n: beside(n) for n in (20, 32, 33)}
print({n: f"{x:.1e}" for n, x in far.items()})
assert far[20] < 1e-4 and far[32] < 1e-4 and far[33] > 0.1
PY
