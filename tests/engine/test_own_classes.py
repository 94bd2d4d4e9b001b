"""Model classes of transformers with their own caches: each row gets what its own loop gives, or they are refused."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from hibachi import AutoregressiveBatchInference, ConfigError, OwnCache, SamplingParams
from hibachi.engine.runners.owncache import trial

LIST = Path(__file__).parents[2] / "docs" / "transformers_list.py"
spec = importlib.util.spec_from_file_location("transformers_list", LIST)
listing = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(listing)

WINDOWS = {"mistral", "gemma3_text", "starcoder2", "phi3", "gpt_oss", "gemma2", "cohere2"}
STATES = {"falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"}
KINDS = """\
mistral gemma3_text starcoder2 phi3 falcon_mamba mamba jamba bamba falcon_h1 granitemoehybrid lfm2 qwen3_next
qwen3_5_text bloom mpt mamba2 gpt_oss gemma2 recurrent_gemma rwkv xlstm llama gpt2 cohere2""".split()  # noqa: SIM905
CACHES = {
    "default": None,
    "dynamic": lambda config: transformers.DynamicCache(),
    "static": lambda config: transformers.StaticCache(config, max_cache_len=512),
    "fp8": lambda config: transformers.QuantizedCache("fp8", config),
}


class WithLengths:
    """As docs/models.md has it, but that the width is kept beside the cache, and what forward lacks is left out."""

    past = OwnCache()

    def __init__(self, module, make):
        self.module, self.make, self.vocab_size = module, make, module.config.vocab_size
        self.takes = inspect.signature(module.forward).parameters
        self.name = "state" if "state" in self.takes else "cache"

    def step(self, tokens, lengths, past):
        cache, width = past or (self.make and self.make(self.module.config), 0)
        width += tokens.shape[1]
        place = torch.arange(width) - (width - lengths[:, None])
        logits, cache = self.called(
            tokens, cache, attention_mask=(place >= 0).int(), position_ids=place[:, -tokens.shape[1] :]
        )
        return logits, (cache, width)

    def called(self, tokens, cache, **others):
        others = {name: value for name, value in others.items() if name in self.takes}
        out = self.module(tokens.long(), use_cache=True, **{self.name: cache}, **others)
        return out.logits[:, -1].float(), out[self.name]


class OfStates(WithLengths):
    def step(self, tokens, past):
        return self.called(tokens, past or (self.make and self.make(self.module.config)))


def own_loop(model, prompt, new):
    """Greedy tokens and their log-probabilities, of the prompt at once and then token by token."""
    text, fresh, past, found = [*prompt], prompt, None, []
    for _ in range(new):
        with torch.no_grad():
            tokens, lengths = torch.tensor([fresh]), torch.tensor([len(text)])
            logits, past = (
                model.step(tokens, past) if isinstance(model, OfStates) else model.step(tokens, lengths, past)
            )
        token = int(logits[0].argmax())
        found.append((token, float(logits[0].log_softmax(-1)[token])))
        text.append(token)
        fresh = [token]
    return found


def judged(kind, cache, window, chunk):
    """Why it is refused, or "" where all is right."""
    longest = dict(max_seq_len=512) if kind == "mpt" else dict(max_position_embeddings=512)
    changes = longest | (dict(sliding_window=window) if kind in WINDOWS else {})
    model = (OfStates if kind in STATES else WithLengths)(listing.tiny(kind, **changes), CACHES[cache])
    random = np.random.default_rng(1)
    prompts = [random.integers(3, model.vocab_size, n).tolist() for n in (3, 8, 20, 40, 400)]
    options = dict(backend="torch", max_model_len=448, max_num_batched_tokens=chunk, deterministic=False)
    try:
        engine = AutoregressiveBatchInference(model, **options)
    except ConfigError as e:
        return str(e)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
    with engine:
        streams = [engine.run(prompt, params) for prompt in prompts]
        for prompt, stream in zip(prompts, streams, strict=True):
            got, want = stream.collect(), own_loop(model, prompt, 8)
            assert got == [token for token, _ in want]
            scores = [step[token] for step, token in zip(stream.logprobs, got, strict=True)]
            np.testing.assert_allclose(scores, [score for _, score in want], atol=1e-4)
        return ""


REFUSED = {  # with any cache; other causes have the class's own words
    "recurrent_gemma": "KeyError: 'cache'|only supported for models with only full attention",
    "rwkv": "must go on from the past that it is given|object is not subscriptable",
    "xlstm": r"the past's \.seqlen_offset is array\(\[3\]\), and array\(\[4\]\)|has no attribute 'rnn_state'",
}
OTHERS = {  # of those that are right with their default cache
    "dynamic": "IndexError: list index out of range",  # it has no layers of states
    "static": r"\.cumulative_length is array\(3\), and array\(4\) .*DynamicCache\(\)|tensor \D*512",
    "fp8": r"_quantized_keys\[1\] is array\(.*DynamicCache\(\)|only supported for models with only full attention",
}
CASES = [(kind, window) for kind in KINDS for window in (8, 4096)[: 1 + (kind in WINDOWS)]]


@pytest.mark.parametrize("kind, window", CASES)
def test_a_class_with_its_default_cache_is_right_or_refused_by_name(kind, window):
    why = judged(kind, "default", window, 64)
    assert re.search(REFUSED[kind], why) if kind in REFUSED else not why


@pytest.mark.slow
@pytest.mark.parametrize("cache, chunk", [("default", 2048), *((c, n) for c in OTHERS for n in (64, 2048))])
@pytest.mark.parametrize("kind, window", CASES)
def test_a_class_with_another_cache_is_right_or_refused_by_name(kind, window, cache, chunk):
    why = judged(kind, cache, window, chunk)
    if kind in REFUSED or (why and cache in OTHERS):
        assert re.search(REFUSED.get(kind) or OTHERS[cache], why)
    else:
        assert not why


def test_what_is_right_is_most():
    assert len(KINDS) == 24 and len(KINDS) - len(REFUSED) >= 19


@pytest.mark.parametrize("cache_tokens, most", [(None, 2**23), (96, 2**23), (None, 0)])
def test_rows_on_both_sides_of_longropes_border_are_those_of_their_own_loop(cache_tokens, most, caplog, monkeypatch):
    """Beyond it all angles of a call are others. With 96 positions in the cache requests are preempted. most: bytes of
    a past that is tried."""
    monkeypatch.setattr(trial, "MOST_BYTES", most)
    rope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 6, long_factor=[4.0] * 6)
    sizes = dict(max_position_embeddings=128, original_max_position_embeddings=32, sliding_window=None)
    model = WithLengths(listing.tiny("phi3", **sizes, rope_parameters=rope), None)
    random = np.random.default_rng(0)
    prompts = [random.integers(3, model.vocab_size, n).tolist() for n in (10, 25, 28, 3, 31, 40, 25)]
    options = dict(max_model_len=64, max_num_seqs=6, max_num_batched_tokens=16, block_size=8, cache_tokens=cache_tokens)
    with AutoregressiveBatchInference(model, backend="torch", **options) as engine:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        found = [stream.collect() for stream in [engine.run(prompt, params) for prompt in prompts]]
        assert bool(engine.stats().preemptions) == bool(cache_tokens)
    assert found == [[token for token, _ in own_loop(model, prompt, 12)] for prompt in prompts]
    for what in ("prompts come whole, not in chunks, as ", "rows of one length only share calls, as "):
        why = caplog.text.partition(what)[2].partition("\n")[0]
        assert ("tokens cross 32, which it" in why or "one longer than 32, which it" in why) == bool(most), why
        assert ("it names 32 as LongRoPE's, too long to be tried" in why) != bool(most)
