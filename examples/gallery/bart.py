"""BART of transformers, an encoder and a decoder with a cache of its own: the rung between levels 1 and 2.

In the checkout, in an environment of its own:

    pip install ".[torch,serve]" "transformers>=5.24"
    python examples/gallery/bart.py
    hibachi serve examples/gallery/bart.py:Bart
    curl http://127.0.0.1:8000/v1/generate -H "Content-Type: application/json" \\
        -d '{"prompt": [2], "inputs": {"source": [5, 6, 7, 8]}, "max_tokens": 8, "temperature": 0}'

A text to be read comes as the input `source`. `encode` reads it once for each request, and those of several at once.
What it returns, the engine keeps beside the request: the keys and values of cross-attention, which the library would
compute in the first step. The library counts positions from the left; `place` says where they are in each row.
"""

from functools import partial

import torch
from side_by_side import arguments, compare, work
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache, EncoderDecoderCache

import hibachi

VOCAB, LONGEST, START = 1000, 256, 2
SIZES = {"tiny": (32, 2, 2), "real": (256, 6, 8)}  # width, layers of each half, heads


class Bart:
    backend, vocab_size, max_model_len, past = "torch", VOCAB, LONGEST, hibachi.OwnCache()

    def __init__(self, model=None):
        self.model, self.inputs = model or network("tiny"), {"source": hibachi.Input((None,), "int64")}

    def encode(self, source, lengths):
        place = torch.arange(source.shape[1]) - (source.shape[1] - lengths[:, None])
        model = placed(self.model, torch.zeros(len(source), 1).long(), place.clamp(min=0))
        out = model(source, (place >= 0).long(), decoder_input_ids=source[:, :1], use_cache=True)
        return out.encoder_last_hidden_state, out.cache.cross_attention_cache, torch.ones_like(source)

    def step(self, tokens, lengths, past, encoded):
        hidden, cross, mask = encoded
        cache = EncoderDecoderCache(past or DynamicCache(), cross)
        width = tokens.shape[1] + cache.get_seq_length()
        place = torch.arange(width) - (width - lengths[:, None])  # of each position in its row, below 0 for padding
        model = placed(self.model, place[:, -tokens.shape[1] :].clamp(min=0))
        out = model(
            encoder_outputs=(hidden,),
            attention_mask=mask,
            decoder_input_ids=tokens.long(),
            decoder_attention_mask=(place >= 0).long(),
            cache=cache,
            use_cache=True,
        )
        return out.logits[:, -1], cache.self_attention_cache


def placed(model, *places):
    """The model, whose next tokens of the decoder, and of the encoder, are at these places (rows, new). It would count
    them from the start of the cache, or of the longest row.
    """
    for half, place in zip((model.model.decoder, model.model.encoder), places, strict=False):
        half.embed_positions.forward = partial(looked_up, half.embed_positions, place)
    return model


def looked_up(table, place, *_, **__):
    return torch.nn.functional.embedding(place + table.offset, table.weight)


def network(size):
    torch.manual_seed(0)
    width, layers, heads = SIZES[size]
    half = {"layers": layers, "attention_heads": heads, "ffn_dim": 4 * width}
    halves = {f"{name}_{key}": value for name in ("encoder", "decoder") for key, value in half.items()}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "forced_eos_token_id"))
    config = BartConfig(
        vocab_size=VOCAB,
        max_position_embeddings=LONGEST,
        d_model=width,
        init_std=0.2,
        pad_token_id=1,
        decoder_start_token_id=START,
        **halves,
        **ids,
    )
    return BartForConditionalGeneration(config).eval()


def main():
    asked = arguments(__doc__)
    sources, new = work(VOCAB, asked.size)
    library = network(asked.size)

    @torch.inference_mode()
    def own(prompt, source):
        ids = torch.tensor([source])
        how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "num_beams": 1, "max_new_tokens": new}
        found = library.generate(ids, **how)
        return found[0, len(prompt) :].tolist()

    inputs = [{"source": source} for source in sources]
    compare(Bart(network(asked.size)), own, [[START]] * len(sources), new, asked, inputs)


if __name__ == "__main__":
    main()
