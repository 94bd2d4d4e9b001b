"""The decoder of MusicGen without a text, of transformers, with hibachi's attention in place of its own: level 2.

In the checkout, in an environment of its own:

    pip install ".[torch,serve]" "transformers>=5.24"
    python examples/gallery/musicgen_attend.py
    hibachi serve examples/gallery/musicgen_attend.py:Music
    curl http://127.0.0.1:8000/v1/generate -H "Content-Type: application/json" \\
        -d '{"prompt": [[64, 64, 64, 64]], "inputs": {"end": 9}, "max_tokens": 8, "temperature": 0}'

The layers are the library's; only what attends is replaced, and what looks up positions. So the engine keeps the keys
and values, all new tokens of a step share a call, and the bits are those of a request alone. Frames and their delay are
as in musicgen.py.
"""

import torch
from musicgen import BOOKS, LONGEST, SILENT, delayed, network
from side_by_side import WORK, arguments, compare
from transformers import DynamicCache, EncoderDecoderCache

import hibachi
import hibachi_torch


class Attended(torch.nn.Module):  # in the place of a layer's self-attention
    def __init__(self, owner, layer, inner):
        super().__init__()
        self.of, self.inner = (owner, layer), inner  # in a tuple, where torch does not look for modules

    def forward(self, hidden_states, **others):  # (1, T, width)
        (owner, i), inner, heads = self.of, self.inner, (-1, self.inner.head_dim)
        q, k, v = (f(hidden_states[0]).unflatten(1, heads) for f in (inner.q_proj, inner.k_proj, inner.v_proj))
        out, owner.cache[i] = owner.backend.attend(q, k, v, owner.cache[i], owner.x)
        return inner.out_proj(out.flatten(1))[None], None


class Music:
    params, codebooks, vocab_size, max_model_len = None, BOOKS, SILENT + 1, LONGEST
    inputs, backend = {"end": hibachi.Input((), "int32")}, hibachi.load_backend("torch").invariant()

    def __init__(self, model=None):
        self.model = hibachi_torch.invariant(model or network("tiny"))
        decoder = self.model.model.decoder
        for i, layer in enumerate(decoder.layers):
            layer.self_attn = Attended(self, i, layer.self_attn)
        decoder.embed_positions.forward = lambda *_: decoder.embed_positions.weights[self.x.pos]

    def cache_spec(self):
        heads, layers = (getattr(self.model.config, name) for name in ("num_attention_heads", "num_hidden_layers"))
        return [hibachi.Paged(heads, *[self.model.config.hidden_size // heads] * 2)] * layers

    def step(self, params, cache, x):
        self.cache, self.x = list(cache), x
        out = self.model.model(x.tok.T.long(), use_cache=False).last_hidden_state[0, x.last]
        logits = torch.stack([head(out) for head in self.model.lm_heads], dim=1)
        return delayed(logits, x.pos[x.last] + 1, x.inputs["end"][x.seg[x.last]]), self.cache


def main():
    asked = arguments(__doc__)
    (_, new), library = WORK[asked.size], network(asked.size)

    @torch.inference_mode()
    def own(prompt, end):
        ids, pattern = library.build_delay_pattern_mask(torch.tensor(prompt).T, SILENT, end)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        while ids.shape[1] < end:
            new = library.apply_delay_pattern_mask(ids, pattern)[:, -1:]
            out = library(new, cache=cache, use_cache=True)
            ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], dim=1)
        return library.apply_delay_pattern_mask(ids, pattern)[:, 1:].T.tolist()

    compare(Music(network(asked.size)), own, [[[SILENT] * BOOKS]] * 16, new, asked, [{"end": new + 1}] * 16)


if __name__ == "__main__":
    main()
