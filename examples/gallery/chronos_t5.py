"""Chronos-T5: twenty futures of each series, of an encoder and a decoder: the rung between levels 1 and 2.

In the checkout, in an environment of its own:

    pip install ".[torch,serve]" "chronos-forecasting>=2.3"
    python examples/gallery/chronos_t5.py
    hibachi serve examples/gallery/chronos_t5.py:Forecasts
    curl http://127.0.0.1:8000/v1/generate -H "Content-Type: application/json" \\
        -d '{"prompt": [0], "inputs": {"series": [1.5, 2.5, 3.5, 2.5]}, "max_tokens": 8, "seed": 1, "top_k": 50}'

A series comes as an input, and `encode` has the library cut it into ids and read it. New tokens are ids; the library's
`output_transform` makes values of them. Positions are relative, so those of rows need not be told. The library's loop
is given the uniform numbers that the engine draws with, so it draws the same tokens.
"""

from unittest.mock import patch

import numpy as np
import torch
from chronos import ChronosConfig, ChronosPipeline
from chronos.chronos import ChronosModel
from side_by_side import WORK, arguments, compare, uniforms_of
from transformers import DynamicCache, EncoderDecoderCache, T5Config, T5ForConditionalGeneration

import hibachi

VOCAB, LONGEST, PAD, END, SAMPLES, TOP_K = 4096, 256, 0, 1, 20, 50
SIZES = {"tiny": (32, 2, 2), "real": (256, 4, 4)}  # width, layers of each half, heads; the latter of chronos-t5-tiny


class Forecasts:
    backend, vocab_size, max_model_len, past = "torch", VOCAB, LONGEST, hibachi.OwnCache()

    def __init__(self, pipeline=None):
        self.pipeline, self.inputs = pipeline or network("tiny"), {"series": hibachi.Input((None,))}
        self.model = self.pipeline.inner_model

    def encode(self, series, lengths):
        real = torch.arange(series.shape[1]) >= series.shape[1] - lengths[:, None]
        ids, mask, _ = self.pipeline.tokenizer.context_input_transform(series.masked_fill(~real, torch.nan))
        out = self.model(ids, attention_mask=mask, decoder_input_ids=ids[:, :1] * 0 + PAD, use_cache=True)
        return out.cache.cross_attention_cache, mask.long()

    def step(self, tokens, lengths, past, encoded):
        cross, mask = encoded
        cache = EncoderDecoderCache(past or DynamicCache(), cross)
        width = tokens.shape[1] + cache.get_seq_length()
        out = self.model(
            encoder_outputs=(mask[..., None],),  # of which `cross` has all
            attention_mask=mask,
            decoder_input_ids=tokens.long(),
            decoder_attention_mask=(torch.arange(width) >= width - lengths[:, None]).long(),
            cache=cache,
            use_cache=True,
        )
        return out.logits[:, -1].index_fill(1, torch.tensor(END), -torch.inf), cache.self_attention_cache


def network(size):
    torch.manual_seed(0)
    width, layers, heads = SIZES[size]
    chronos = ChronosConfig(
        tokenizer_class="MeanScaleUniformBins",
        tokenizer_kwargs={"low_limit": -15.0, "high_limit": 15.0},
        context_length=512,
        prediction_length=64,
        n_tokens=VOCAB,
        n_special_tokens=2,
        pad_token_id=PAD,
        eos_token_id=END,
        use_eos_token=True,
        model_type="seq2seq",
        num_samples=SAMPLES,
        temperature=1.0,
        top_k=TOP_K,
        top_p=1.0,
    )
    config = T5Config(
        vocab_size=VOCAB, d_model=width, d_kv=width // heads, d_ff=4 * width, num_layers=layers, num_heads=heads,
        pad_token_id=PAD, eos_token_id=END, decoder_start_token_id=PAD,
    )  # fmt: skip
    model = ChronosModel(chronos, T5ForConditionalGeneration(config).eval())
    return ChronosPipeline(chronos.create_tokenizer(), model)


def main():
    asked = arguments(__doc__)
    (longest, new), pipeline, random = WORK[asked.size], network(asked.size), np.random.default_rng(0)
    series = [
        torch.tensor(np.cumsum(random.normal(size=n)), dtype=torch.float32) for n in range(longest - 15, longest + 1)
    ]
    numbers = [uniforms_of(seed, SAMPLES, new) for seed in range(16)]

    @torch.inference_mode()
    def forecast(series, numbers):
        given = iter(np.concatenate(numbers).T)
        with patch.object(torch, "multinomial", lambda weights, num_samples: drawn(weights, next(given))):
            ids, mask, _ = pipeline.tokenizer.context_input_transform(pipeline._prepare_and_validate_context(series))
            return pipeline.model(ids, mask, new).tolist()

    compare(
        Forecasts(pipeline),
        lambda prompt, series, seed: forecast([series], [numbers[seed]])[0],
        [[PAD]] * 16,
        new,
        asked,
        [{"series": each} for each in series],
        batch=lambda: forecast(series, numbers),
        samples=SAMPLES,
        params={"top_k": TOP_K},
    )


def drawn(weights, numbers):
    """Of each row, by the inverse of its distribution function."""
    below = weights.double().cumsum(1) < torch.tensor(numbers)[:, None]
    return below.sum(1, keepdim=True)


if __name__ == "__main__":
    main()
