"""A transformer of the library transformers with its own cache: what it needs to be batched is eight lines.

The weights are random. Sixteen prompts run at once in an engine; then `generate` of the library runs them one by one,
and the tokens are compared. `hibachi serve own_cache.py:Gpt` streams the same model over HTTP, token ids in and out.
"""

import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hibachi


class Gpt:
    past = hibachi.OwnCache()

    def __init__(self, model=None):
        self.model = model or random_gpt()
        self.vocab_size, self.max_model_len = self.model.config.vocab_size, self.model.config.n_positions

    def step(self, tokens, lengths, past):
        # Places of all positions in their rows, below 0 for padding: the last one is at lengths - 1.
        place = torch.arange(-tokens.shape[1] - (past.get_seq_length() if past else 0), 0) + lengths[:, None]
        out = self.model(
            tokens,
            attention_mask=(place >= 0).int(),
            position_ids=place[:, -tokens.shape[1] :],
            cache=past,
            use_cache=True,
        )
        return out.logits[:, -1], out.cache


def random_gpt():
    torch.manual_seed(0)
    sizes = {"vocab_size": 1000, "n_positions": 256, "n_embd": 256, "n_layer": 6, "n_head": 8}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()


def main():
    model, new = random_gpt(), 48
    prompts = [torch.randint(1000, (n,)) for n in torch.randint(2, 60, (16,)).tolist()]
    greedy = hibachi.SamplingParams(temperature=0, max_tokens=new)
    with hibachi.AutoregressiveBatchInference(Gpt(model), backend="torch", deterministic=False) as engine:
        engine.run(prompts[0], greedy).collect()  # the first calls of a library take longer
        began = time.perf_counter()
        at_once = [stream.collect() for stream in [engine.run(prompt, greedy) for prompt in prompts]]
        ours = time.perf_counter() - began
    how = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        began = time.perf_counter()
        one_by_one = [
            model.generate(p[None], attention_mask=torch.ones_like(p[None]), **how)[0, len(p) :] for p in prompts
        ]
        theirs = time.perf_counter() - began
    same = sum(a == b.tolist() for a, b in zip(at_once, one_by_one, strict=True))
    print(f"{same} of {len(prompts)} have the tokens of `generate`; at once {theirs / ours:.1f} times as fast")


if __name__ == "__main__":
    main()
