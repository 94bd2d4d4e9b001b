"""MEDS-EIC-AR: futures of patients, of clinical events. hibachi as a backend of its own protocol, `GenerationBackend`.

In the checkout, in an environment of its own:

    pip install ".[torch,serve]" "meds-eic-ar>=0.5.1"
    python examples/gallery/meds_events.py
    hibachi serve examples/gallery/meds_events.py:events
    curl http://127.0.0.1:8000/v1/generate -H "Content-Type: application/json" \\
        -d '{"prompt": [1, 2, 3], "temperature": 0}'

The network is a Llama of transformers, which hibachi reads from files. `Model.set_backend(Continuous(engine))` is all
that the library is told; its loop, which rolls a window over long futures, stays as it is. Here it runs with this
backend and with the library's own, for rows one by one and in a batch.
"""

import tempfile
from typing import NamedTuple

import torch
from MEDS_EIC_AR.model.backends import HFBackend
from MEDS_EIC_AR.model.model import Model
from side_by_side import arguments, compare, work

import hibachi

VOCAB, LONGEST, PAD, END = 1000, 256, 0, 999
SIZES = {"tiny": (2, 2, 4), "real": (4, 4, 64)}  # layers, heads, width of each: the library's "demo" and "micro"


def events(model=None):
    """What an engine takes, of a `Model` of the library."""
    with tempfile.TemporaryDirectory() as folder:
        (model or network("tiny")).HF_model.save_pretrained(folder)
        return hibachi.load_model(folder, "torch")


class Continuous:
    def __init__(self, engine):
        self.engine = engine

    def generate_chunk(self, input_ids, *, attention_mask, generation_config, **_):
        how = generation_config
        params = hibachi.SamplingParams(
            temperature=how.temperature if how.do_sample else 0,
            max_tokens=how.max_new_tokens,
            stop_token_ids=[how.eos_token_id],
            ignore_eos=True,
        )
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        prompts = [row[mask.bool()].tolist() for row, mask in zip(input_ids, real, strict=True)]
        seeds = torch.randint(2**31, (len(prompts),)).tolist()  # so torch.manual_seed rules here too
        streams = [
            self.engine.run(prompt, params.with_(seed=seed)) for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        rows = [torch.tensor(stream.collect()) for stream in streams]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=how.pad_token_id)


class Batch(NamedTuple):
    """What the library reads of a `MEDSTorchBatch`."""

    code: torch.Tensor
    PAD_INDEX: int = PAD


def network(size):
    torch.manual_seed(0)
    layers, heads, width = SIZES[size]
    sizes = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": heads * width}
    more = {"intermediate_size": 4 * heads * width, "max_position_embeddings": LONGEST, "vocab_size": VOCAB}
    return Model(sizes | more | {"eos_token_id": END, "initializer_range": 0.2}).eval()


def main():
    asked = arguments(__doc__)
    prompts, new = work(VOCAB, asked.size)
    prompts = [[1 + token % (END - 1) for token in prompt] for prompt in prompts]  # neither PAD nor END
    model = network(asked.size)

    @torch.inference_mode()
    def generated(prompts, backend):
        model.set_backend(backend)
        turned = [torch.tensor(prompt[::-1]) for prompt in prompts]
        code = torch.nn.utils.rnn.pad_sequence(turned, batch_first=True, padding_value=PAD).flip(1)  # at the left
        found = model.generate(Batch(code), do_sample=False, max_new_tokens=new)
        return [[token for token in row if token != PAD] for row in found.tolist()]

    theirs = HFBackend(model.HF_model)
    compare(
        events(model),
        lambda prompt: generated([prompt], theirs)[0],
        prompts,
        new,
        asked,
        at_once=lambda engine: generated(prompts, Continuous(engine)),
        batch=lambda: generated(prompts, theirs),
    )


if __name__ == "__main__":
    main()
