"""Models that forget their past where several tokens follow it: their prompts come whole."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
import transformers

import hibachi
from hibachi import AutoregressiveBatchInference, ConfigError, OwnCache, SamplingParams

PROMPTS = [[(5 * i + n) % 47 + 3 for i in range(n)] for n in (3, 8, 40, 21, 8, 33)]
SMALL = dict(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class Sums:
    """The next token is the sum of all before it, of which it keeps a state; with `forgets` only of the last chunk."""

    past, vocab_size, forgets = OwnCache(), 50, True

    def step(self, tokens, lengths, past):
        before = 0 if past is None or (self.forgets and tokens.shape[1] > 1) else past["sum"]
        total = before + tokens.sum(axis=1)
        return np.eye(50, dtype=np.float32)[total % 50], {"sum": total}


def right(prompt):
    tokens = [*prompt]
    for _ in range(8):
        tokens.append(sum(tokens) % 50)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("forgets", (True, False))
def test_prompts_come_whole_where_chunks_would_be_forgotten(forgets, caplog):
    caplog.set_level(logging.WARNING)
    model = Sums()
    model.forgets = forgets
    with AutoregressiveBatchInference(model, backend="numpy", **SMALL) as engine:
        streams = [engine.run(prompt, GREEDY) for prompt in PROMPTS]
        assert [s.collect() for s in streams] == [right(prompt) for prompt in PROMPTS]
    assert ("Sums.step: prompts come whole, not in chunks, as outputs are others" in caplog.text) == forgets


class Once(Sums):
    """Some calls spoil the past that they are given, and fail."""

    calls = -80  # those of the start

    def step(self, tokens, lengths, past):
        self.calls += 1
        if past is not None and self.calls > 0 and self.calls % 3 == 0:
            past["sum"][:] = 7
            raise RuntimeError("sometimes")
        return super().step(tokens, lengths, past)


def test_a_call_that_fails_once_harms_nobody():
    with AutoregressiveBatchInference(Once(), backend="numpy", **SMALL) as engine:
        streams = [engine.run(prompt, GREEDY) for prompt in PROMPTS]
        assert [s.collect() for s in streams] == [right(prompt) for prompt in PROMPTS]


class Refuses(Sums):
    def step(self, tokens, lengths, past):
        if past is not None and tokens.shape[1] > 1:
            raise ValueError("one at a time")
        return super().step(tokens, lengths, past)


def test_prompts_come_whole_where_a_chunk_is_refused(caplog):
    with AutoregressiveBatchInference(
        Refuses(), backend="numpy", max_model_len=64, max_num_batched_tokens=16
    ) as engine:
        assert [engine.run(prompt, GREEDY).collect() for prompt in PROMPTS] == [right(prompt) for prompt in PROMPTS]
    assert "it failed where several tokens followed a past: ValueError: one at a time" in caplog.text


class Transformer:
    past = hibachi.OwnCache()

    def __init__(self, model):
        self.model, self.vocab_size = model.eval(), model.config.vocab_size

    def step(self, tokens, past):
        out = self.model(tokens.long(), cache=past, use_cache=True)
        return out.logits[:, -1], out.cache


class WithLengths(Transformer):
    """As docs/models.md has it."""

    def step(self, tokens, lengths, past):
        width = tokens.shape[1] + (past.get_seq_length() if past else 0)
        place = torch.arange(width) - (width - lengths[:, None])
        mask, new = (place >= 0).int(), place[:, -tokens.shape[1] :]
        out = self.model(tokens, attention_mask=mask, position_ids=new, cache=past, use_cache=True)
        return out.logits[:, -1], out.cache


ATTENTION = dict(intermediate_size=32, num_attention_heads=2, num_key_value_heads=2)
RECURRENT = {
    "Mamba": dict(state_size=8),
    "FalconMamba": dict(state_size=8),
    "Jamba": ATTENTION
    | dict(attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, expert_layer_period=100, num_experts=2)
    | dict(use_mamba_kernels=False),
}


def of_transformers(kind, **sizes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=50, hidden_size=16, num_hidden_layers=2, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1 and "A_log" not in name:
                p.normal_(0, 0.3)
    return model


@pytest.mark.parametrize("kind", RECURRENT)
def test_state_models_of_transformers_are_right_in_small_steps(kind):
    model = of_transformers(kind, **RECURRENT[kind])
    with AutoregressiveBatchInference(Transformer(model), backend="torch", **SMALL) as engine:
        streams = [engine.run(prompt, GREEDY) for prompt in PROMPTS]
        for prompt, stream in zip(PROMPTS, streams, strict=True):
            tokens = [*prompt, *stream.collect()]
            with torch.no_grad():
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == tokens[len(prompt) :]


@pytest.mark.parametrize("cache_tokens", (None, 96))
def test_rows_on_both_sides_of_longropes_border_are_those_of_their_own_loop(cache_tokens, caplog):
    """Beyond it all angles of a call are others. With 96 positions in the cache requests are preempted."""
    rope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[4.0] * 4)
    sizes = dict(pad_token_id=0, max_position_embeddings=128, original_max_position_embeddings=32)
    model = of_transformers("Phi3", **ATTENTION, **sizes, rope_parameters=rope)
    step, params = WithLengths(model).step, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [PROMPTS[2][:n] for n in (10, 25, 28, 3, 31, 40, 25)]
    with AutoregressiveBatchInference(
        WithLengths(model), backend="torch", **SMALL | dict(max_num_seqs=6), cache_tokens=cache_tokens, block_size=8
    ) as engine:
        found = [stream.collect() for stream in [engine.run(prompt, params) for prompt in prompts]]
        assert bool(engine.stats().preemptions) == bool(cache_tokens)
    for prompt, tokens in zip(prompts, found, strict=True):
        text, past, new = [*prompt], None, prompt
        for _ in tokens:
            with torch.no_grad():
                logits, past = step(torch.tensor([new]), torch.tensor([len(text)]), past)
            text.append(int(logits.argmax()))
            new = text[-1:]
        assert tokens == text[len(prompt) :]
    assert "prompts come whole, not in chunks, as outputs are others where several tokens cross 32" in caplog.text
    assert "rows of one length only share calls, as a row beside one longer than 32, which it names" in caplog.text


class Leaks(Sums):
    """A row gets something of its neighbours, far more than rounding."""

    forgets = False

    def step(self, tokens, lengths, past):
        logits, past = super().step(tokens, lengths, past)
        return logits + 0.02 * (len(tokens) > 2), past


def test_what_is_no_rounding_is_refused():
    with pytest.raises(
        ConfigError, match=r"Leaks.step must return the same outputs whoever shares the call.* by up to 0.02"
    ):
        AutoregressiveBatchInference(Leaks(), backend="numpy", max_model_len=64)
