"""A model from files without a tokenizer takes token ids and gives them, wherever a text would do."""

import asyncio
import json
import re
import shutil
import sys

import gguf
import numpy as np
import pytest

from hibachi import LLM, AutoregressiveBatchInference, InvalidRequest, SamplingParams, load_model
from hibachi.cli.main import main
from hibachi.llm.remote.llm import RemoteLLM
from hibachi.llm.tokenizers.own import NoTokenizer

PROMPT = [3, 4]
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
REFUSED = "has no tokenizer.*must be a list of token ids; got a text"


@pytest.fixture(scope="module")
def folder(damaged_models):
    return damaged_models["no tokenizer"]


@pytest.fixture(scope="module")
def expected():
    with LLM("tiny", backend="numpy") as whole:
        return whole.generate([PROMPT], GREEDY)[0].token_ids


@pytest.fixture(scope="module", params=["here", "in a child process"])
def llm(request, folder):
    with (LLM if request.param == "here" else RemoteLLM)(str(folder), backend="numpy") as llm:
        yield llm


@pytest.fixture(autouse=True)
def no_thread_is_left():
    """That of `llm` outlives a test."""


# ---- Python ----------------------------------------------------------------------------------------------------------


def test_ids_in_and_ids_out(llm, expected):
    [done] = llm.generate([PROMPT], GREEDY)
    assert (done.token_ids, done.text, done.finish_reason) == (expected, "", "length")
    assert asyncio.run(llm.agenerate([PROMPT], GREEDY))[0].token_ids == expected
    assert [c.token_ids for c in llm.each([PROMPT, PROMPT], GREEDY)] == [expected, expected]
    assert [len(c.token_ids) for c in llm.generate([PROMPT], GREEDY.with_(n=2, temperature=1))[0].choices] == [5, 5]
    assert llm.score([PROMPT], [expected])[0].greedy
    assert np.isfinite(llm.embed([PROMPT])[0].embedding).all()


def test_a_stream_has_a_piece_for_each_token(llm, expected):
    stream = llm.stream(PROMPT, GREEDY)
    pieces = [next(stream), *stream.take(2), *stream]
    assert [piece.token_ids for piece in pieces] == [[i] for i in expected]
    assert {piece.text for piece in pieces} == {""} and stream.completion().token_ids == expected


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate("She was", GREEDY),
        lambda llm: llm.generate([PROMPT, "She was"], GREEDY),
        lambda llm: llm.stream("She was", GREEDY),
        lambda llm: llm.embed("She was"),
        lambda llm: llm.score("She", " was"),
    ],
)
def test_a_text_is_refused(llm, call):
    with pytest.raises(InvalidRequest, match=rf"{REFUSED}\. If .*AutoTokenizer.*save_pretrained\(path\)") as e:
        call(llm)
    assert "has none of tokenizer.json" in str(e.value)


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_texts_among_the_parameters_are_refused(llm, name):
    told = rf"^{name} takes a tokenizer, and this model has none; got \('x',\)\. Use stop_token_ids"
    with pytest.raises(InvalidRequest, match=told):
        llm.generate([PROMPT], GREEDY.with_(**{name: ["x"]}))


def test_texts_that_the_files_would_stop_at_are_passed_over(folder, expected, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"stop_strings": ["x"]}')
    with LLM(tmp_path / "model", backend="numpy") as llm:
        assert llm.default_params.stop == () and llm.generate([PROMPT])[0].token_ids


def test_a_conversation_is_refused(llm):
    with pytest.raises(InvalidRequest, match="no tokenizer and no chat template: expected a prompt of token ids"):
        llm.chat([{"role": "user", "content": "x"}])


def test_the_engine_itself(folder, expected):
    with LLM(folder, backend="numpy") as llm:
        assert isinstance(llm.tokenizer, NoTokenizer) and llm.engine.run(PROMPT, GREEDY).collect() == expected
    with AutoregressiveBatchInference(load_model(folder, "numpy")) as engine:
        assert engine.run(PROMPT, GREEDY).collect() == expected


def test_the_package_tokenizers_is_not_needed(folder, expected, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with LLM(folder, backend="numpy") as llm:
        assert llm.generate([PROMPT], GREEDY)[0].token_ids == expected


@pytest.mark.parametrize("said", [None, "none", "no_vocab"])
def test_a_gguf_file_without_a_vocabulary(tmp_path, said):
    path = tmp_path / "model.gguf"
    w = gguf.GGUFWriter(path, "llama")
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 64, "feed_forward_length": 96}
    for name, value in (sizes | {"attention.head_count": 2, "attention.head_count_kv": 2}).items():
        w.add_uint32(f"llama.{name}", value)
    w.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    if said is not None:
        w.add_string("tokenizer.ggml.model", said)
    block = {"attn_norm": (64,), "ffn_norm": (64,)} | {f"attn_{x}": (64, 64) for x in ("q", "k", "v", "output")}
    block |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    shapes = {"token_embd": (40, 64), "output_norm": (64,)} | {f"blk.0.{name}": shape for name, shape in block.items()}
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        w.add_tensor(f"{name}.weight", random.standard_normal(shape).astype(np.float32) / 8)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    with LLM(path, backend="numpy") as llm:
        ids = llm.generate([PROMPT], GREEDY)[0].token_ids
        assert len(ids) == 5 and llm.engine.run(PROMPT, GREEDY).collect() == ids
        with pytest.raises(InvalidRequest, match=REFUSED):
            llm.generate("She was")


# ---- commands --------------------------------------------------------------------------------------------------------


def test_generate(folder, expected, capsys):
    line = ["generate", "--model", str(folder), "--temperature", "0", "--max-tokens", "5", "--ignore-eos"]
    for prompt in ("3 4", "3,4", " 3, 4\n"):
        assert main([*line, "--prompt", prompt]) == 0
        assert [int(i) for i in capsys.readouterr().out.split()] == expected
    assert main([*line, "--prompt", "3 4", "--echo"]) == 0
    assert [int(i) for i in capsys.readouterr().out.split()] == PROMPT + expected
    assert main([*line, "--prompt", "3 4", "--stop-token-id", str(expected[2])]) == 0  # it ends before it
    assert [int(i) for i in capsys.readouterr().out.split()] == expected[: expected.index(expected[2])]
    for wrong, told in (("She was", "must be token ids; got 'She was'"), ("", "at least one token")):
        assert main([*line, "--prompt", wrong]) == 1
        assert re.search(f"^hibachi: .*{told}", capsys.readouterr().err)


def test_inspect(folder, capsys):
    assert main(["inspect", str(folder)]) == 0
    told = capsys.readouterr().out
    assert re.search(r"^vocabulary +2048$", told, re.M) and re.search(r"^chat template +none$", told, re.M)


def test_run_batch(folder, expected, capsys, tmp_path):
    """Of 16 tokens, where nobody says how many; a row of text is refused alone."""
    rows = [{"prompt": PROMPT}, {"prompt": "She was"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = ["run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--model", str(folder)]
    line += ["--backend", "numpy", "--engine", "own", "--token-ids", "--temperature", "0", "--param", "ignore_eos=true"]
    main(line)
    done, refused = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert len(done["output_token_ids"]) == 16 and done["output_token_ids"][:5] == expected and done["error"] is None
    assert refused["output_token_ids"] is None and re.search(REFUSED, refused["error"])


# ---- HTTP ------------------------------------------------------------------------------------------------------------


def test_a_server(llm, expected):
    pytest.importorskip("uvicorn")
    from ..serve.conftest import site

    body = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
    with site(llm) as server:
        answer = server.post("/v1/generate", {"prompt": PROMPT, **body}).json()
        assert answer["tokens"] == expected
        [choice] = server.complete(PROMPT, **body, return_token_ids=True)["choices"]
        assert (choice["token_ids"], choice["text"], choice["finish_reason"]) == (expected, "", "length")
        del body["max_tokens"]  # then 16, as with OpenAI
        answer = server.post("/v1/completions", {"prompt": PROMPT, **body}).json()
        assert answer["usage"]["completion_tokens"] == 16
        for path, more, told in (
            ("/v1/completions", {"prompt": "She was"}, REFUSED),
            ("/v1/completions", {"prompt": PROMPT, "stop": "x"}, "stop takes a tokenizer"),
            ("/v1/generate", {"prompt": "She was"}, "expected numbers; got a text"),
            ("/v1/embeddings", {"input": "She was"}, REFUSED),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "no chat template"),
        ):
            answer = server.post(path, more)
            assert answer.status_code == 400 and re.search(told, answer.json()["error"]["message"]), answer.text
