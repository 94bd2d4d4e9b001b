"""LLM.embed and LLM.score, against transformers."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers

import hibachi
from hibachi.errors import InvalidModelFiles, InvalidRequest, PromptTooLong
from hibachi.llm.model.files import TINY

TEXTS = [
    "Emma was pleased.",
    "She",
    "It is a truth universally acknowledged, that a single man in possession of a good",
]


@pytest.fixture
def llm():
    with hibachi.LLM("tiny", max_num_seqs=2, max_num_batched_tokens=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference():
    return transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


@pytest.mark.parametrize("pooling, of", [("mean", lambda h: h.mean(0)), ("last", lambda h: h[-1])])
def test_vectors_are_pooled_hidden_states(llm, reference, pooling, of):
    for out, text in zip(llm.embed(TEXTS, pooling=pooling, normalize=False), TEXTS, strict=True):
        assert out.prompt == text and out.prompt_token_ids == llm.tokenizer.encode(text)
        with torch.no_grad():
            states = reference.model(torch.tensor([out.prompt_token_ids]))[0][0].numpy()
        np.testing.assert_allclose(out.embedding, of(states), atol=1e-4)


def test_by_default_vectors_have_length_one_and_come_from_the_last_token(llm):
    [plain], [vector] = llm.embed(TEXTS[0], pooling="last", normalize=False), llm.embed(TEXTS[0])
    assert np.linalg.norm(vector.embedding) == pytest.approx(1)
    np.testing.assert_allclose(vector.embedding * np.linalg.norm(plain.embedding), plain.embedding, rtol=1e-5)


def test_the_files_say_how_to_pool(tmp_path):
    shutil.copytree(TINY, tmp_path, dirs_exist_ok=True)
    (tmp_path / "1_Pooling").mkdir()
    config = tmp_path / "1_Pooling" / "config.json"
    config.write_text(json.dumps({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}))
    with hibachi.LLM(tmp_path) as llm:
        [by_files], [asked] = llm.embed(TEXTS[2]), llm.embed(TEXTS[2], pooling="mean", normalize=False)
        np.testing.assert_array_equal(by_files.embedding, asked.embedding)
        (tmp_path / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Normalize"}]))
        assert np.linalg.norm(llm.embed(TEXTS[2])[0].embedding) == pytest.approx(1)
        config.write_text(json.dumps({"pooling_mode": "mean"}))  # as newer files have it
        np.testing.assert_array_equal(llm.embed(TEXTS[2], normalize=False)[0].embedding, asked.embedding)
        (tmp_path / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Dense"}]))
        with pytest.raises(
            InvalidModelFiles, match=r"got sentence_transformers\.models\.Dense, which vectors here do not"
        ):
            llm.embed(TEXTS[2])
        (tmp_path / "modules.json").unlink()
        config.write_text(json.dumps({"pooling_mode_max_tokens": True}))
        with pytest.raises(InvalidModelFiles, match="got pooling_mode_max_tokens"):
            llm.embed(TEXTS[2])


def test_a_score_is_the_log_likelihood_of_the_continuation(llm, reference):
    prompt, continuations = "It was a fine morning, and she", [" was very happy.", " xylophone", " of"]
    for out, continuation in zip(llm.score(prompt, continuations), continuations, strict=True):
        ids = llm.tokenizer.encode(prompt + continuation)
        before = len(llm.tokenizer.encode(prompt))
        assert out.token_ids == ids[before:] and out.continuation == continuation
        with torch.no_grad():
            logits = reference(torch.tensor([ids])).logits[0, before - 1 : -1].double().log_softmax(-1)
        wanted = logits[range(len(ids) - before), ids[before:]]
        np.testing.assert_allclose(out.logprobs, wanted, atol=1e-4)
        assert out.logprob == pytest.approx(wanted.sum().item(), abs=1e-3)
        assert out.greedy == bool((logits.argmax(-1) == torch.tensor(ids[before:])).all())


def test_what_a_greedy_run_writes_is_greedy_in_its_score(llm):
    [out] = llm.generate("Emma was", hibachi.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    [score] = llm.score([llm.tokenizer.encode("Emma was")], [out.token_ids])
    assert score.greedy and score.token_ids == out.token_ids


@pytest.mark.parametrize(
    "arguments, error, says",
    [
        ((["a", "b"], ["c"]), InvalidRequest, "a continuation for each of 2 prompts"),
        (("Emma", ""), InvalidRequest, "at least one token"),
        (("Emma", [[]]), InvalidRequest, "at least one token"),
        (("Emma " * 600, " was"), PromptTooLong, "511 tokens"),
    ],
)
def test_what_cannot_be_scored_is_refused(llm, arguments, error, says):
    with pytest.raises(error, match=says):
        llm.score(*arguments)


@pytest.mark.parametrize("ids", [[5000], [-1], [1.5], []])
def test_what_cannot_be_embedded_is_refused(llm, ids):
    with pytest.raises(InvalidRequest):
        llm.embed([ids])
    assert len(llm.embed("Still here")) == 1
