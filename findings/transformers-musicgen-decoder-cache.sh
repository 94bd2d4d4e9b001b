#!/bin/sh
# transformers 5.24.0, MusicgenForCausalLM: generate() with its default cache gives other tokens than without a cache. It
# makes a DynamicCache, as for a model without an encoder, so the keys and values of the cross-attention go behind those of
# the frames, in one cache. An EncoderDecoderCache that is passed gives the tokens of use_cache=False. (Without
# num_return_sequences=1, generate() raises a TypeError.) Seen: of 36 codes 0 differ with the cache that is passed, 20 or
# more with its own.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0
"$folder/venv/bin/python" - <<'PY'
import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache, MusicgenDecoderConfig, MusicgenForCausalLM

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
config = MusicgenDecoderConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=128, num_codebooks=4,
    max_position_embeddings=64, pad_token_id=64, bos_token_id=64,
)
model, text = MusicgenForCausalLM(config).eval(), torch.randn(1, 7, 32)


def codes(**how):
    how = dict(max_length=13, do_sample=False, num_return_sequences=1, decoder_start_token_id=64, **how)
    return model.generate(torch.full((4, 1), 64), encoder_hidden_states=text, **how)


without = codes(use_cache=False)
passed = codes(cache=EncoderDecoderCache(DynamicCache(), DynamicCache()))
differ = int((codes() != without).sum()), int((passed != without).sum())
print(f"of {without.numel()} codes {differ[0]} differ with its own cache, {differ[1]} with one that is passed")
assert differ[0] >= 20 and differ[1] == 0, differ
PY
