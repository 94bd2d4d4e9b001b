"""Dia of transformers: a text is spoken in frames of nine codebooks, each later than the first: own cache and `encode`.

In the checkout, in an environment of its own:

    pip install ".[torch,serve]" "transformers>=5.24"
    python examples/gallery/dia_speech.py
    hibachi serve examples/gallery/dia_speech.py:Dia
    python examples/gallery/dia_speech.py --show  # bodies of requests for /v1/generate

The class is for the rung between levels 1 and 2. A codebook says BEGIN as often as it is late, then codes. The first
one says END where the piece ends, at the latest in frame `end`; the others say theirs as many frames later as they are
late, and whoever is through says PAD. Where the first said END is an array of the cache, beside the keys and values.
With guidance, a second row reads a text of zeros, and `mixed` does what the library does with both.
"""

import torch
from side_by_side import WORK, arguments, compare
from transformers import DiaConfig, DiaForConditionalGeneration, DynamicCache, EncoderDecoderCache, GenerationConfig

import hibachi

BOOKS, CODES, END, PAD, BEGIN, VOCAB, LONGEST = 9, 1024, 1024, 1025, 1026, 1028, 256
SCALE, TOP_K = 3.0, 45  # of guidance
SIZES = {"tiny": (32, 2, 2, [0, 1, 2, 2, 3, 3, 4, 4, 5]), "real": (256, 6, 8, None)}  # width, layers, heads, delays


class Dia:
    backend, codebooks, vocab_size, max_model_len, past = "torch", BOOKS, VOCAB, LONGEST, hibachi.OwnCache()
    stop_rule = hibachi.StopRule(where=lambda frames: frames[:, -1] == END)

    def __init__(self, model=None, guided=False):
        self.model, self.guided = model or network("tiny"), guided
        self.inputs = {"text": hibachi.Input((None,), "int64"), "end": hibachi.Input((), "int32", example=LONGEST)}
        self.late = torch.tensor(self.model.config.delay_pattern)

    def encode(self, text, lengths):
        return crossed(self.model.model, text, lengths), torch.ones_like(text)

    def step(self, tokens, lengths, past, encoded, end):
        (cross, mask), new = encoded, tokens.shape[1]
        kept, ended = past or (DynamicCache(), torch.full_like(lengths, LONGEST))
        cache = EncoderDecoderCache(kept, cross)
        width = new + cache.get_seq_length()
        place = torch.arange(width) - (width - lengths[:, None])  # of each position in its row, below 0 for padding
        out = self.model(
            encoder_outputs=(mask[..., None],),  # of which `cross` has all
            attention_mask=mask,
            decoder_input_ids=tokens.long(),
            decoder_attention_mask=(place >= 0).long(),
            decoder_position_ids=place[:, -new:].clamp(min=0),
            cache=cache,
            use_cache=True,
        )
        said = torch.where(tokens[..., 0] == END, place[:, -new:], LONGEST).amin(1)
        ended = torch.minimum(ended, said.to(ended.dtype))
        logits = delayed(out.logits[:, -1].unflatten(0, (-1, BOOKS)), lengths, ended, end, self.late)
        return logits if self.guided else allowed(logits, free(logits)), (kept, ended)


def crossed(model, text, lengths):
    """What the decoder would compute of texts in its first step: keys and values of its cross-attention. The library
    counts positions from the left, so padding goes to the right, and back.
    """
    place, front = torch.arange(text.shape[1])[None], text.shape[1] - lengths.long()[:, None]
    text = text.gather(1, (place + front) % text.shape[1])
    seen = model.encoder(text, (place < lengths[:, None]).long()).last_hidden_state
    seen = seen[torch.arange(len(text))[:, None], (place - front) % text.shape[1]]
    cache = DynamicCache()
    for place, layer in enumerate(model.decoder.layers):
        both = layer.cross_attention.k_proj(seen), layer.cross_attention.v_proj(seen)
        cache.update(
            *(each.unflatten(-1, (-1, layer.cross_attention.head_dim)).transpose(1, 2) for each in both), place
        )
    return cache


def delayed(logits, at, ended, end, late):
    """With what a codebook must say at a position before it begins, where it ends, and behind that."""
    at, ends = at[:, None], torch.minimum(ended, end)[:, None] + late  # (rows, 1), (rows, books)
    must = torch.where(at <= late, BEGIN, torch.where(at == ends, END, torch.where(at > ends, PAD, -1)))[..., None]
    return logits.masked_fill((must >= 0) & (torch.arange(VOCAB) != must), -torch.inf)


def free(logits):
    """Which codebooks may say more than one thing."""
    return logits.isfinite().all(-1, keepdim=True)


def allowed(logits, free):
    """A free codebook says codes only; but the first one says END where that is the likeliest, and never else."""
    ids, first = torch.arange(VOCAB), torch.arange(BOOKS)[:, None] == 0
    logits = logits.masked_fill(free & (ids >= CODES) & ~(first & (ids == END)), -torch.inf)
    likeliest = logits.argmax(-1, keepdim=True) == END
    return logits.masked_fill(first & (likeliest != (ids == END)), -torch.inf)


def mixed(own, other):
    """The guidance of the library: of the request's own logits, those whose mixed ones are the highest."""
    far = torch.where(own.isfinite(), own + SCALE * (own - other), own)
    low = far < far.topk(TOP_K).values[..., -1:]
    return allowed(own.masked_fill(low, -torch.inf), free(own))


def network(size):
    torch.manual_seed(3)
    width, layers, heads, delays = SIZES[size]
    sizes = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "initializer_range": 0.1,
    }
    attention = {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": width // heads}
    cross = {f"cross_{name}": value for name, value in attention.items()} | {"cross_hidden_size": width}
    config = DiaConfig(encoder_config=sizes | attention, decoder_config=sizes | attention | cross, delay_pattern=delays)
    model = DiaForConditionalGeneration(config).eval()
    model.logits_dense.weight.data[END] *= 2  # so that some end by themselves
    return model


def main():
    asked = arguments(__doc__)
    (longest, new), library, random = WORK[asked.size], network(asked.size), torch.Generator().manual_seed(0)
    texts = [torch.randint(1, 256, (n,), generator=random) for n in range(longest - 15, longest + 1)]
    late = library.config.delay_pattern
    ids = {"eos_token_id": END, "pad_token_id": PAD, "bos_token_id": BEGIN}

    @torch.inference_mode()
    def spoken(texts, scale=None):
        text = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        begin = torch.where(torch.arange(late[-1] + 1)[:, None] <= torch.tensor(late), BEGIN, PAD)
        how = GenerationConfig(max_new_tokens=new, do_sample=False, guidance_scale=scale, top_k=TOP_K, **ids)
        found = library.generate(
            text,
            attention_mask=(text > 0).long(),
            decoder_input_ids=begin.expand(len(texts), -1, -1),
            decoder_attention_mask=torch.ones(len(texts), late[-1] + 1).long(),
            generation_config=how,
        )
        return [frames[1 : 2 + (frames[1:, -1] == END).int().argmax()].tolist() for frames in found]

    inputs, prompts = [{"text": text, "end": new - late[-1]} for text in texts], [[[BEGIN] * BOOKS]] * 16
    beside = [hibachi.Guidance(inputs=each | {"text": torch.zeros_like(each["text"])}, mix=mixed) for each in inputs]
    for scale, guidance in ((SCALE, beside), (None, None)):
        compare(
            Dia(network(asked.size), guided=bool(guidance)),
            lambda prompt, text, end, scale=scale: spoken([text], scale)[0],
            prompts,
            new,
            asked,
            inputs,
            batch=lambda scale=scale: spoken(texts, scale),
            guidance=guidance,
        )


if __name__ == "__main__":
    main()
