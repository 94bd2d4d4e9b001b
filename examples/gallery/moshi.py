"""Moshi of transformers: a frame is a text id and the codes of what is said, which a depth decoder draws in turn.

In the checkout, in an environment of its own:

    pip install ".[torch,serve]" "transformers>=5.24"
    python examples/gallery/moshi.py
    hibachi serve examples/gallery/moshi.py:Dialogue
    curl http://127.0.0.1:8000/v1/generate -H "Content-Type: application/json" \\
        -d '{"prompt": [[100, 64, 64, 64, 64]], "inputs": {"heard": [[64, 64, 64, 64], [1, 2, 3, 4]]}, "max_tokens": 2}'

The class is for the rung between levels 1 and 2. `depth` draws the text from the decoder's hidden state, and then the
codes by the depth decoder, whose cache lasts for one frame. The input `heard` has the other speaker's codes for each
position. Codes come as the decoder sees them, each codebook with its delay. START is an id of prompts only.
"""

import torch
from side_by_side import WORK, arguments, compare
from torch.nn.functional import pad
from transformers import DynamicCache, MoshiConfig, MoshiForConditionalGeneration

import hibachi

TEXTS, CODES, BOOKS, LONGEST = 100, 64, 4, 256  # ids that can be said; the next one of each codebook is START
SIZES = {"tiny": (32, 2, 2), "real": (256, 4, 8)}  # width, layers, heads of both decoders


class Dialogue:
    backend, codebooks, max_model_len, past = "torch", 1 + BOOKS, LONGEST, hibachi.OwnCache()
    vocab_size, vocab_sizes = TEXTS + 1, (TEXTS + 1, *[CODES + 1] * BOOKS)

    def __init__(self, model=None):
        self.model = model or network("tiny")
        self.inputs = {"heard": hibachi.Input((BOOKS,), "int32", per="position")}

    def step(self, tokens, lengths, past, heard):
        cache = past or DynamicCache()
        width = tokens.shape[1] + cache.get_seq_length()
        place = torch.arange(width) - (width - lengths[:, None])  # of each position in its row, below 0 for padding
        out = self.model.decoder.model(
            inputs_embeds=embedded(self.model, tokens, heard),
            attention_mask=(place >= 0).long(),
            position_ids=place[:, -tokens.shape[1] :].clamp(min=0),
            cache=cache,
            use_cache=True,
        )
        return out.last_hidden_state[:, -1:], out.cache

    def depth(self, k, given, codes, past):
        if k == 0:
            return pad(self.model.decoder.lm_head(given[:, 0]), (0, 1), value=-torch.inf), None
        out = self.model.depth_decoder(codes[:, k - 1 : k], given, cache=past, use_cache=True)
        return pad(out.logits[:, -1], (0, 1), value=-torch.inf), out.cache


def embedded(model, frames, heard):
    """(rows, positions, 1 + BOOKS) and (rows, positions, BOOKS) -> (rows, positions, width)."""
    codes = torch.cat([frames[..., 1:], heard], dim=-1)
    audio = sum(embed(codes[..., k]) for k, embed in enumerate(model.embed_tokens))
    return model.decoder.model.embed_tokens(frames[..., 0]) + audio


def network(size):
    torch.manual_seed(0)
    width, layers, heads = SIZES[size]
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "ffn_dim": 4 * width}
    config = MoshiConfig(
        vocab_size=TEXTS, audio_vocab_size=CODES, num_codebooks=BOOKS, max_position_embeddings=LONGEST, **sizes,
        depth_decoder_config=sizes | {"max_position_embeddings": 1 + BOOKS},
        audio_encoder_config={
            "model_type": "mimi", "num_hidden_layers": 1, "num_filters": 4, "hidden_size": 64, "upsample_groups": 64,
        },
    )  # fmt: skip
    return MoshiForConditionalGeneration(config).eval()


def main():
    asked = arguments(__doc__)
    (longest, new), library, random = WORK[asked.size], network(asked.size), torch.Generator().manual_seed(0)

    @torch.inference_mode()
    def own(prompt, heard):
        frames, heard, cache, said = torch.tensor([prompt]), torch.tensor([heard]), DynamicCache(), []
        while len(said) < new:
            end = cache.get_seq_length() + frames.shape[1]
            x = embedded(library, frames, heard[:, end - frames.shape[1] : end])
            state = library.decoder.model(inputs_embeds=x, cache=cache, use_cache=True).last_hidden_state[:, -1:]
            text = library.decoder.lm_head(state[:, 0]).argmax(-1, keepdim=True)
            count = {"min_length": 1 + BOOKS, "max_length": 1 + BOOKS}
            frames = library.depth_decoder.generate(last_hidden_state=state, input_ids=text, **count)[None]
            said.append(frames[0, 0].tolist())
        return said

    prompts, inputs = [], []
    for n in range(longest - 15, longest + 1):
        text = torch.randint(TEXTS, (n + new, 1), generator=random)
        said, heard = (torch.randint(CODES, (n + new, BOOKS), generator=random) for _ in range(2))
        prompts.append([[TEXTS, *[CODES] * BOOKS], *torch.cat([text, said], dim=1)[: n - 1].tolist()])
        inputs.append({"heard": heard[:-1].tolist()})
    compare(Dialogue(network(asked.size)), own, prompts, new, asked, inputs)


if __name__ == "__main__":
    main()
