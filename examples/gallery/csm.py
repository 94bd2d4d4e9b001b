"""CSM of transformers, text in, speech out: frames of codes, which a depth decoder draws one after another.

In the checkout, in an environment of its own:

    pip install ".[torch,serve]" "transformers>=5.24"
    python examples/gallery/csm.py
    hibachi serve examples/gallery/csm.py:Speech
    curl http://127.0.0.1:8000/v1/generate -H "Content-Type: application/json" \\
        -d '{"prompt": [[0, 0, 0, 0], [0, 0, 0, 0]], "inputs": {"text": [5, 7, -1, -1]}, "max_tokens": 3}'

The class is for the rung between levels 1 and 2. The backbone's step returns its last hidden state; `depth` draws the
first code from it, and then asks the depth decoder, whose cache lasts for one frame. The input `text` has an id for
each position of the prompt that is text, where its frame counts for nothing, and -1 for those that are frames.
"""

import torch
from side_by_side import WORK, arguments, compare
from transformers import CsmConfig, CsmForConditionalGeneration, DynamicCache

import hibachi

CODES, TEXTS, LONGEST = 64, 50, 256  # ids of a codebook and of texts, of which the last three are marks
SIZES = {"tiny": (4, 32, 2, 2), "real": (16, 256, 4, 8)}  # codebooks; width, layers, heads of both decoders


class Speech:
    backend, vocab_size, max_model_len, past = "torch", CODES, LONGEST, hibachi.OwnCache()

    def __init__(self, model=None):
        self.model = model or network("tiny")
        self.inputs = {"text": hibachi.Input((), "int32", per="position", example=[-1])}
        self.codebooks = self.model.config.num_codebooks

    def step(self, tokens, lengths, past, text):
        cache = past or DynamicCache()
        width = tokens.shape[1] + cache.get_seq_length()
        place = torch.arange(width) - (width - lengths[:, None])  # of each position in its row, below 0 for padding
        frames = self.model.backbone_model.embed_tokens(tokens)
        out = self.model.backbone_model(
            inputs_embeds=torch.where(text[..., None] < 0, frames, self.model.embed_text_tokens(text.clamp(min=0))),
            attention_mask=(place >= 0).long(),
            position_ids=place[:, -tokens.shape[1] :].clamp(min=0),
            cache=cache,
            use_cache=True,
        )
        return out.last_hidden_state[:, -1], out.cache

    def depth(self, k, given, codes, past):
        if k == 0:
            return self.model.lm_head(given), None
        shown, hidden = (codes[:, [1, 0]], given) if k == 1 else (codes[:, k - 1 : k], None)  # the first is replaced
        out = self.model.depth_decoder(shown, hidden, cache=past, use_cache=True, logits_to_keep=1)
        return out.logits[:, 0], out.cache


def network(size):
    torch.manual_seed(0)
    books, width, layers, heads = SIZES[size]
    sizes = {
        "num_codebooks": books, "vocab_size": CODES, "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": 4 * width,
    }  # fmt: skip
    config = CsmConfig(
        depth_decoder_config=sizes | {"backbone_hidden_size": width, "max_position_embeddings": books + 1},
        codec_config={
            "model_type": "mimi", "num_hidden_layers": 1, "num_filters": 4, "hidden_size": 64, "upsample_groups": 64,
        },
        text_vocab_size=TEXTS, max_position_embeddings=LONGEST, codebook_pad_token_id=CODES - 1, pad_token_id=TEXTS - 3,
        bos_token_id=TEXTS - 2, audio_token_id=TEXTS - 3, audio_eos_token_id=TEXTS - 1, **sizes,
    )  # fmt: skip
    return CsmForConditionalGeneration(config).eval()


def main():
    asked = arguments(__doc__)
    (longest, new), library, random = WORK[asked.size], network(asked.size), torch.Generator().manual_seed(0)
    texts = [torch.randint(TEXTS - 3, (n,), generator=random).tolist() for n in range(longest - 15, longest + 1)]

    def spoken(texts):
        width = max(map(len, texts))
        ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
        mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
        how = {"do_sample": False, "depth_decoder_do_sample": False, "max_new_tokens": new}
        return library.generate(ids, attention_mask=mask, **how).tolist()

    def own(prompt, text):
        return spoken([text[: len(prompt)]])[0]

    prompts = [[[0] * library.config.num_codebooks] * len(text) for text in texts]
    inputs = [{"text": text + [-1] * (new - 1)} for text in texts]
    compare(Speech(network(asked.size)), own, prompts, new, asked, inputs, batch=lambda: spoken(texts))


if __name__ == "__main__":
    main()
