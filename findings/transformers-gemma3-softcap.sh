#!/bin/sh
# transformers 5.24.0, Gemma3ForCausalLM: attn_logit_softcapping is a field of its config, documented as the factor of a
# tanh on the attention scores, and no layer uses it: the logits are the same bits with 0.5 and without. In Gemma 2 the
# field of the same name changes them; final_logit_softcapping counts in both. An engine that follows the documentation
# and one that follows the library disagree. Seen: Gemma3 0.0, Gemma2 0.1 or more.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/python" - <<'PY'
import torch
import transformers

transformers.logging.set_verbosity_error()
tokens = torch.arange(3, 40)[None]


def logits(name, cap):
    sizes = dict(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    config = getattr(transformers, f"{name}Config")(
        **sizes, num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=4, attn_logit_softcapping=cap
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.3)
        return model(tokens).logits


far = {name: float((logits(name, 0.5) - logits(name, None)).abs().max()) for name in ("Gemma3Text", "Gemma2")}
print({name: f"{x:.1e}" for name, x in far.items()})
assert far["Gemma3Text"] == 0 and far["Gemma2"] > 0.1
PY
