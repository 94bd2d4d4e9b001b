"""Foreign clients against a server that runs: each in an environment of its own, by a script in clients/.

The scripts print what they were answered as JSON; it must be what the engine says in this process. With pytest's -s
the transcripts are shown.
"""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

import hibachi
from hibachi import LLM, SamplingParams

from .conftest import serving
from .venvs import CLIENTS, environment, run, strangers, strangers_for_node

pytestmark = pytest.mark.install

FOLDER = Path(hibachi.__file__).parent / "data" / "tiny"
PROMPT = "It is a truth universally acknowledged"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How do you do?"}]
LENGTH = 12


@pytest.fixture(scope="module")
def llm():
    with LLM(FOLDER) as found:
        yield found


@pytest.fixture(scope="module")
def expected(llm):
    params = SamplingParams(temperature=0, max_tokens=LENGTH)
    chat = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in MESSAGES) + "<|im_start|>assistant\n"
    ids = llm.tokenizer.encode(chat, add_special_tokens=False)
    text, chat = (c.text for c in llm.generate([llm.tokenizer.encode(PROMPT), ids], params))
    (vector,) = llm.embed([PROMPT])
    return {
        "text": text,
        "text_streamed": text,
        "chat": chat,
        "chat_streamed": chat,
        "chat_tokens": LENGTH,
        "embedding": vector.embedding,
        "embedding_of_ids": vector.embedding,
        "models": ["tiny"],
    }


def asked(url):
    told = {"url": url, "prompt": PROMPT, "messages": MESSAGES, "max_tokens": LENGTH, "folder": str(FOLDER)}
    return json.dumps(told)


def check(name, output, expected, says):
    """says: the names of what must be said, all of it as expected. "unknown_model" may be said besides."""
    said = json.loads(output.splitlines()[-1])
    if "unknown_model" in said:
        assert "other" in said.pop("unknown_model")
    assert set(said) == set(says.split())
    for key, value in said.items():
        if isinstance(expected[key], np.ndarray):
            assert np.allclose(value, expected[key], atol=1e-6), key
            said[key] = f"{len(value)} numbers, as expected"
        else:
            assert value == expected[key], key
    print(f"\n{name}: {json.dumps(said)}")


CHAT, TEXT = "chat chat_streamed ", "text text_streamed "
PYTHON = [
    ("litellm", "litellm_flow.py", CHAT + TEXT + "chat_tokens embedding"),
    ("langchain-openai tokenizers", "langchain_flow.py", CHAT + TEXT + "chat_tokens embedding embedding_of_ids"),
    ("llm", "llm_flow.py", CHAT + TEXT),
    ("httpx", "httpx_flow.py", CHAT + TEXT + "embedding"),
    ("pydantic-ai-slim[openai]", "pydantic_ai_flow.py", CHAT + "chat_tokens"),
    ("openai-agents", "agents_flow.py", CHAT + "chat_tokens"),
    ("llama-index-llms-openai-like", "llama_index_flow.py", CHAT + TEXT),
    ("haystack-ai", "haystack_flow.py", CHAT + "embedding"),
    ("dspy", "dspy_flow.py", "chat"),
]
NODE = [
    ("openai", "node_flow.mjs", CHAT + TEXT + "chat_tokens embedding models"),
    ("ai @ai-sdk/openai-compatible", "ai_compatible_flow.mjs", CHAT + "chat_tokens embedding"),
    ("ai @ai-sdk/openai", "ai_openai_flow.mjs", CHAT + "chat_tokens"),
    ("@langchain/openai @langchain/core", "langchain_flow.mjs", CHAT + TEXT + "chat_tokens embedding"),
]


@pytest.mark.parametrize("packages, script, says", PYTHON, ids=lambda given: given.split()[0])
def test_a_client_in_python(url, home, expected, packages, script, says):
    programs = strangers(home, *packages.split())
    output = run(programs / "python", CLIENTS / script, asked(url), cwd=home, LLM_USER_PATH=str(home / "llm"))
    check(packages, output, expected, says)


@pytest.mark.parametrize("packages, script, says", NODE, ids=lambda given: given.split()[-1])
def test_a_client_for_node(url, home, expected, packages, script, says):
    strangers_for_node(home, *packages.split())
    script = shutil.copy(CLIENTS / script, home)
    check(packages, run("node", script, asked(url), cwd=home), expected, says)


def test_promptfoo(url, home, expected):
    """A chat and a text that must be as expected, by its own assertions."""
    strangers_for_node(home, "promptfoo")
    config = {"apiBaseUrl": f"{url}/v1", "apiKey": "none", "temperature": 0, "max_tokens": LENGTH}
    chat = {"prompts": [json.dumps(MESSAGES)], "providers": [{"id": "openai:chat:tiny", "config": config}]}
    text = {"prompts": [PROMPT], "providers": [{"id": "openai:completion:tiny", "config": config}]}
    own = {
        "PROMPTFOO_DISABLE_TELEMETRY": "1",
        "PROMPTFOO_DISABLE_UPDATE": "1",
        "PROMPTFOO_CONFIG_DIR": str(home / "own"),
    }
    for name, asking in (("chat", chat), ("text", text)):
        (home / "asking.json").write_text(
            json.dumps({**asking, "tests": [{"assert": [{"type": "equals", "value": expected[name]}]}]})
        )
        program = home / "node_modules" / ".bin" / "promptfoo"
        told = run(program, "eval", "-c", "asking.json", "-o", "out.json", "--no-cache", "--no-table", cwd=home, **own)
        stats = json.loads((home / "out.json").read_text())["results"]["stats"]
        assert (stats["successes"], stats["failures"], stats["errors"]) == (1, 0, 0), told
        assert stats["tokenUsage"]["completion"] == LENGTH
        print(f"promptfoo, {name}: as expected")


def test_locust(url, home):
    programs = strangers(home, "locust")
    command = [programs / "locust", "-f", CLIENTS / "locustfile.py", "--headless", "--json", "--host", url]
    found = json.loads(run(*command, "-u", "4", "-r", "4", "-t", "5s", cwd=home))
    for kind in found:
        print(f"locust, {kind['name']}: {kind['num_requests']} requests, {kind['num_failures']} failures")
        assert kind["num_requests"] > 0 == kind["num_failures"]
    assert {kind["name"] for kind in found} == {"whole", "streamed"}


def test_guidellm(url, home):
    """Twenty requests, four at a time, with as many tokens in and out as it asked for."""
    programs = strangers(home, "guidellm")
    run(
        *[programs / "guidellm", "run", "--disable-progress", "--backend", f"kind=openai_http,target={url}"],
        *["--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=20"],
        *["--tokenizer", f"kind=huggingface_auto,model={FOLDER}"],
        *["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"],
        *["--output", f"kind=json,path={home / 'out.json'}"],
        cwd=home,
    )
    (benchmark,) = json.loads((home / "out.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    print(f"guidellm: {len(requests['successful'])} requests, {len(requests['errored'])} errors")
    assert len(requests["successful"]) == 20 and not requests["errored"]
    assert {request["output_tokens"] for request in requests["successful"]} == {8}


def test_curl(url, expected, home):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    body = {"prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0}
    curl = ["curl", "--silent", "--show-error", f"{url}/v1/completions"]
    json_ = ["-H", "Content-Type: application/json"]
    whole = json.loads(run(*curl, *json_, "-d", json.dumps(body), cwd=home))
    assert whole["choices"][0]["text"] == expected["text"]
    *events, end = run(*curl, "-N", *json_, "-d", json.dumps({**body, "stream": True}), cwd=home).strip().split("\n\n")
    assert end == "data: [DONE]"
    assert "".join(json.loads(e.removeprefix("data: "))["choices"][0]["text"] for e in events) == expected["text"]
    refused = json.loads(run(*curl, "-d", json.dumps(body), cwd=home))  # curl calls it a form
    print(f"\ncurl -d without a header: {refused['error']['message']}")
    assert "expected Content-Type: application/json" in refused["error"]["message"]


# Says JSON to whatever ends with a line feed, and has room for the prompts of programs that write code.
MODEL = """
import numpy as np

SAID = b'{"name": "Emma"}'

class Says:
    vocab_size, max_model_len, eos_ids = 256, 65536, (0,)

    class tokenizer:
        encode = staticmethod(lambda text: list(text.encode()))
        decode = staticmethod(lambda ids: bytes(ids).decode(errors="replace"))

    def logits(self, tokens, lengths):
        scores = np.zeros((len(lengths), 256), np.float32)
        for row, length in enumerate(lengths):
            said = length - 1 - np.flatnonzero(np.asarray(tokens[row, :length]) == 10)[-1]
            scores[row, SAID[said] if said < len(SAID) else 0] = 50
        return scores
"""


@pytest.fixture(scope="module")
def says(tmp_path_factory):
    """The address of a server of this model, as "tiny"."""
    folder = tmp_path_factory.mktemp("says")
    (folder / "says.py").write_text(MODEL)
    with serving(folder / "log", "--served-model-name", "tiny", model=f"{folder / 'says.py'}:Says") as found:
        yield found


def test_instructor(says, home):
    """In the mode that asks for JSON in words: the others need guided decoding."""
    programs = strangers(home, "instructor")
    said = run(programs / "python", CLIENTS / "instructor_flow.py", asked(says), cwd=home)
    print(f"instructor: {said.strip()}")
    assert json.loads(said) == {"found": {"name": "Emma"}}


def test_aider(says, home):
    programs = strangers(home, "aider-chat")
    told = run(
        *[programs / "aider", "--model", "openai/tiny", "--openai-api-base", f"{says}/v1", "--openai-api-key", "none"],
        *[
            "--chat-mode",
            "ask",
            "--message",
            "Who are you?",
            "--no-git",
            "--yes-always",
            "--no-check-update",
            "--no-pretty",
        ],
        *["--analytics-disable", "--no-show-model-warnings"],
        cwd=home,
        HOME=str(home),
    )
    print(told)
    assert '{"name": "Emma"}' in told.splitlines()


def test_lm_eval_scores_as_the_engine_does(url, home, llm):
    """Token-id prompts with echo and logprobs; multiple choice, whole texts, and generation until a stop string."""
    programs = environment(home, "lm-eval[api]", "transformers")
    tasks = shutil.copytree(CLIENTS / "lm_eval_tasks", home / "tasks")
    for file in tasks.glob("*.yaml"):
        file.write_text(file.read_text().replace("FOLDER", str(tasks)))
    model = f"model=tiny,base_url={url}/v1/completions,tokenizer_backend=huggingface,tokenizer={FOLDER}"
    names = "hibachi_choice,hibachi_last_word,hibachi_rolling,hibachi_generate"
    table = run(
        *[programs / "lm_eval", "--model", "local-completions", "--include_path", tasks, "--tasks", names],
        *["--model_args", f"{model},tokenized_requests=True,num_concurrent=4,max_length=512"],
        *["--output_path", home / "out", "--log_samples"],
        cwd=home,
    )
    print("\n" + table)
    samples = {name: _samples(home / "out", name) for name in names.split(",")}
    assert list(map(len, samples.values())) == [4, 4, 2, 3]
    for name in ("hibachi_choice", "hibachi_last_word"):
        for sample in samples[name]:
            requests = [a for _, a in sorted(sample["arguments"].items())]
            for request, answer in zip(requests, sample["filtered_resps"], strict=True):
                (score,) = llm.score(request["arg_0"], request["arg_1"])
                assert float(answer[0]) == pytest.approx(score.logprob, abs=1e-3)
                assert (answer[1] in (True, "True")) == score.greedy
    for sample in samples["hibachi_rolling"]:
        text = sample["arguments"]["gen_args_0"]["arg_0"]
        (score,) = llm.score([[llm.eos_ids[0]]], [llm.tokenizer.encode(text)])
        (answer,) = sample["filtered_resps"]
        assert float(answer[0] if isinstance(answer, list) else answer) == pytest.approx(score.logprob, abs=1e-3)
    params = SamplingParams(temperature=0, max_tokens=16, stop=["."])
    for sample in samples["hibachi_generate"]:
        (done,) = llm.generate(sample["arguments"]["gen_args_0"]["arg_0"], params)
        assert sample["resps"][0][0] == done.text
    assert all(math.isfinite(s["acc"]) for s in samples["hibachi_choice"])


def _samples(out, name):
    (file,) = out.rglob(f"samples_{name}_*.jsonl")
    return sorted(map(json.loads, file.read_text().splitlines()), key=lambda s: s["doc_id"])
