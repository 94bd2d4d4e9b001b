"""A recommender as TIGER: a T5 of transformers writes items as ids of four levels; beams under a catalogue of them.

In the checkout, in an environment of its own:

    pip install ".[torch,serve]" "transformers>=5.24"
    python examples/gallery/tiger_items.py
    hibachi serve examples/gallery/tiger_items.py:Items
    curl http://127.0.0.1:8000/v1/generate -H "Content-Type: application/json" \\
        -d '{"prompt": [0], "inputs": {"history": [5, 300, 600, 900]}, "max_tokens": 4, "temperature": 0}'

What somebody took comes as an input, and `encode` has the library read it. Positions are relative, so those of rows
need not be told. `run_many(..., allowed=hibachi.Trie(catalogue))` with `Beams` among the parameters gives the best
items; the library's `generate` is given the same catalogue as a function of what may come next.
"""

import numpy as np
import torch
from side_by_side import WORK, arguments, compare
from transformers import DynamicCache, EncoderDecoderCache, T5Config, T5ForConditionalGeneration

import hibachi

LEVELS, CODES, PAD, ITEMS = 4, 256, 0, 10_000  # ids of level i begin at 1 + i * CODES
VOCAB, LONGEST = 1 + LEVELS * CODES, 256
SIZES = {"tiny": (32, 2, 2, 5), "real": (256, 4, 4, 50)}  # width, layers of each half, heads; beams


class Items:
    backend, vocab_size, max_model_len, past = "torch", VOCAB, LONGEST, hibachi.OwnCache()

    def __init__(self, model=None):
        self.model, self.inputs = model or network("tiny"), {"history": hibachi.Input((None,), "int64")}

    def encode(self, history, lengths):
        real = torch.arange(history.shape[1]) >= history.shape[1] - lengths[:, None]
        out = self.model(history, real.long(), decoder_input_ids=history[:, :1] * 0 + PAD, use_cache=True)
        return out.cache.cross_attention_cache, torch.ones_like(history)

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
        return out.logits[:, -1], cache.self_attention_cache


def network(size):
    torch.manual_seed(0)
    width, layers, heads, _ = SIZES[size]
    config = T5Config(
        vocab_size=VOCAB, d_model=width, d_kv=width // heads, d_ff=4 * width, num_layers=layers, num_heads=heads,
        pad_token_id=PAD, decoder_start_token_id=PAD, eos_token_id=None,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).eval()


def main():
    asked = arguments(__doc__)
    longest, library, random = WORK[asked.size][0], network(asked.size), np.random.default_rng(0)
    beams = SIZES[asked.size][-1]
    catalogue = 1 + random.integers(CODES, size=(ITEMS, LEVELS)) + CODES * np.arange(LEVELS)
    lengths = np.linspace(1, longest // LEVELS, 16).astype(int)  # in items
    histories = [torch.tensor(catalogue[random.integers(ITEMS, size=n)].ravel()) for n in lengths]
    trie, after = hibachi.Trie(catalogue), {}
    for item in catalogue.tolist():
        for level in range(LEVELS):
            after.setdefault(tuple(item[:level]), set()).add(item[level])
    after = {begun: sorted(ids) for begun, ids in after.items()}

    @torch.inference_mode()
    def recommended(histories):
        ids = torch.nn.utils.rnn.pad_sequence(histories, batch_first=True)
        found = library.generate(
            ids,
            attention_mask=(ids != PAD).long(),
            num_beams=beams,
            num_return_sequences=beams,
            max_new_tokens=LEVELS,
            do_sample=False,
            prefix_allowed_tokens_fn=lambda _, begun: after[tuple(begun[1:].tolist())],
        )
        return found[:, 1:].unflatten(0, (-1, beams)).tolist()

    params = hibachi.SamplingParams(max_tokens=LEVELS, beams=hibachi.Beams(beams))

    def at_once(engine):
        inputs = [{"history": history} for history in histories]
        groups = [engine.run_many([PAD], params, beams, inputs=each, allowed=trie) for each in inputs]
        return [[stream.collect() for stream in group] for group in groups]

    compare(
        Items(library),
        lambda prompt, history: recommended([history])[0],
        [[PAD]] * len(histories),
        LEVELS,
        asked,
        [{"history": history} for history in histories],
        at_once=at_once,
        batch=lambda: recommended(histories),
        rows=beams,
    )


if __name__ == "__main__":
    main()
