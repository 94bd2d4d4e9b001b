"""The decoder of MusicGen, of transformers: frames of four codebooks, each later than the one before by a frame.

In the checkout, in an environment of its own:

    pip install ".[torch,serve]" "transformers>=5.24"
    python examples/gallery/musicgen.py
    hibachi serve examples/gallery/musicgen.py:Music
    curl http://127.0.0.1:8000/v1/generate -H "Content-Type: application/json" \\
        -d '{"prompt": [[64, 64, 64, 64]], "inputs": {"end": 9}, "max_tokens": 8, "temperature": 0}'

The class is for the rung between levels 1 and 2. A codebook that has not begun, or is over, says SILENT: all its
other logits are -inf. The input `end` is the length of the piece, the first frame included. The decoder counts
positions from the start of its cache; `place` says where they are in each row. With guidance, a second row hears no
text: `Guidance(inputs=)` gives it zeros.
"""

import torch
from side_by_side import WORK, arguments, compare
from transformers import DynamicCache, EncoderDecoderCache, MusicgenDecoderConfig, MusicgenForCausalLM

import hibachi

BOOKS, SILENT, LONGEST, SCALE = 4, 64, 256, 3.0  # SILENT is an id beyond those that can be said
SIZES = {"tiny": (32, 2, 2), "real": (256, 6, 8)}  # width, layers, heads


class Music:
    backend, codebooks, vocab_size, max_model_len, past = "torch", BOOKS, SILENT + 1, LONGEST, hibachi.OwnCache()

    def __init__(self, model=None):
        self.model = model or network("tiny")
        end = hibachi.Input((), "int32", example=LONGEST)  # in trials a piece of no length would be silent
        self.inputs = {"text": hibachi.Input((None, self.model.config.hidden_size)), "end": end}

    def encode(self, text, lengths):  # no position knows of another
        out = placed(self.model, torch.zeros(len(text), 1).long())(
            torch.full((len(text) * BOOKS, 1), SILENT), encoder_hidden_states=text, use_cache=True
        )
        return text, out.cache.cross_attention_cache, torch.ones(text.shape[:2]).long()

    def step(self, tokens, lengths, past, encoded, end):
        text, cross, mask = encoded
        cache = EncoderDecoderCache(past or DynamicCache(), cross)
        width = tokens.shape[1] + cache.get_seq_length()
        place = torch.arange(width) - (width - lengths[:, None])  # of each position in its row, below 0 for padding
        model = placed(self.model, place[:, -tokens.shape[1] :].clamp(min=0))
        out = model(
            tokens.mT.flatten(0, 1).long(),  # (rows * books, new)
            attention_mask=(place >= 0).long(),
            encoder_hidden_states=text,
            encoder_attention_mask=mask,
            cache=cache,
            use_cache=True,
        )
        return delayed(out.logits[:, -1].unflatten(0, (-1, BOOKS)), lengths, end), cache.self_attention_cache


def placed(model, place):
    """The model, whose next tokens are at these places (rows, new). It would count them from the start of the cache."""
    table = model.model.decoder.embed_positions
    table.forward = lambda *_: table.weights[place]
    return model


def delayed(logits, at, end):
    """With SILENT, which is certain for a codebook that has not begun at a position, or is over."""
    at, end, books = at[:, None], end[:, None], torch.arange(BOOKS)
    silent = ((at <= books) | (at > end - BOOKS + books))[..., None]  # (rows, books, 1)
    return torch.cat([logits.masked_fill(silent, -torch.inf), torch.where(silent, 0.0, -torch.inf)], dim=-1)


def network(size):
    torch.manual_seed(0)
    width, layers, heads = SIZES[size]
    config = MusicgenDecoderConfig(
        vocab_size=SILENT, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, ffn_dim=4 * width,
        num_codebooks=BOOKS, max_position_embeddings=LONGEST, pad_token_id=SILENT, bos_token_id=SILENT,
        initializer_factor=0.1,
    )  # fmt: skip
    return MusicgenForCausalLM(config).eval()


def main():
    asked = arguments(__doc__)
    (longest, new), library, random = WORK[asked.size], network(asked.size), torch.Generator().manual_seed(0)
    texts = [torch.randn(n, library.config.hidden_size, generator=random) for n in range(longest - 15, longest + 1)]
    how = {"max_length": new + 1, "do_sample": False, "num_return_sequences": 1, "decoder_start_token_id": SILENT}

    @torch.inference_mode()
    def generated(texts, scale=None):
        text = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        real = torch.nn.utils.rnn.pad_sequence([torch.ones(len(each)).long() for each in texts], batch_first=True)
        codes = library.generate(
            torch.full((BOOKS * len(texts), 1), SILENT),
            attention_mask=torch.ones(len(texts), 1).long(),  # the first frame is no padding
            encoder_hidden_states=torch.cat([text, torch.zeros_like(text)]) if scale else text,
            encoder_attention_mask=torch.cat([real, real]) if scale else real,
            guidance_scale=scale,
            cache=EncoderDecoderCache(DynamicCache(), DynamicCache()),  # its own would mix text and frames
            **how,
        )
        return [late(each) for each in codes]

    def late(codes):  # (books, n): the library's answer to frames that are later for each book
        frames = torch.full((codes.shape[1] + BOOKS - 1, BOOKS), SILENT)
        for book in range(BOOKS):
            frames[book : book + codes.shape[1], book] = codes[book]
        return frames.tolist()

    inputs, prompts = [{"text": text, "end": new + 1} for text in texts], [[[SILENT] * BOOKS]] * 16
    beside = [hibachi.Guidance(SCALE, inputs=each | {"text": torch.zeros_like(each["text"])}) for each in inputs]
    for scale, guidance in ((SCALE, beside), (None, None)):
        compare(
            Music(network(asked.size)),
            lambda prompt, text, end, scale=scale: generated([text], scale)[0],
            prompts,
            new,
            asked,
            inputs,
            batch=lambda scale=scale: generated(texts, scale),
            guidance=guidance,
        )


if __name__ == "__main__":
    main()
