"""Foreign clients against a server that runs: each in an environment of its own, by a script in clients/.

The scripts print what they were answered as JSON; it must be what the engine says in this process. Those named
.._forms ask for answers in a form, in each way that the client has, and print what it made of them. Frameworks over
these clients, and those of other dialects: test_agents.py. With pytest's -s the transcripts are shown.
"""

import json
import math
import shutil
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import hibachi
from hibachi import LLM, SamplingParams

from ..serve.conftest import SLOW
from .clients.plans import BEFORE, SAID, THOUGHT
from .conftest import serving
from .overheard import form_in, overheard
from .venvs import CLIENTS, environment, run, strangers, strangers_for_node

pytestmark = pytest.mark.install

FOLDER = Path(hibachi.__file__).parent / "llm" / "data" / "tiny"
PROMPT = "It is a truth universally acknowledged"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How do you do?"}]
MOOD = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}},
    "required": ["mood"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "mood", "strict": True, "schema": MOOD}}
LENGTH, ROOM = 12, 80  # tokens; ROOM is for answers in a form


def in_template(messages):
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages) + "<|im_start|>assistant\n"


def messages_in(body):
    """Of a chat, or of a body for /v1/responses, with their contents as texts."""
    found = body.get("messages") or body["input"]
    if "instructions" in body:
        found = [{"role": "system", "content": body["instructions"]}, *found]
    texts = [m["content"] if isinstance(m["content"], str) else m["content"][0]["text"] for m in found]
    return [{**m, "content": text} for m, text in zip(found, texts, strict=True)]


@pytest.fixture(scope="module")
def llm():
    with LLM(FOLDER) as found:
        yield found


@pytest.fixture(scope="module")
def expected(llm):
    params = SamplingParams(temperature=0, max_tokens=LENGTH)
    ids = llm.tokenizer.encode(in_template(MESSAGES), add_special_tokens=False)
    text, chat = (c.text for c in llm.generate([llm.tokenizer.encode(PROMPT), ids], params))
    (typed,) = llm.generate([ids], SamplingParams(temperature=0, max_tokens=ROOM, structured_outputs={"json": MOOD}))
    (vector,) = llm.embed([PROMPT])
    return {
        "text": text,
        "text_streamed": text,
        "chat": chat,
        "chat_streamed": chat,
        "chat_tokens": LENGTH,
        "mood": json.loads(typed.text),
        "embedding": vector.embedding,
        "models": ["tiny"],
    }


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    """The address of a server of the model `Talks` in clients/plans.py, as "tiny"."""
    log = tmp_path_factory.mktemp("talks") / "log"
    with serving(log, "--served-model-name", "tiny", model=f"{CLIENTS / 'plans.py'}:Talks") as found:
        yield found


def asked(url, **more):
    told = {"url": url, "prompt": PROMPT, "messages": MESSAGES, "max_tokens": LENGTH, "folder": str(FOLDER)}
    return json.dumps({**told, **more})


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


class Forms:
    """Asks for answers in a form, and knows what was sent."""

    def __init__(self, llm, tiny, notes, asked):
        self._llm, self._tiny, self._notes, self.asked = llm, tiny, notes, asked

    def check(self, name, output, ways):
        """ways: the names of what must be said, in this order, after one request each. They begin with how the form is
        sent: see `form_in`.
        """
        said = json.loads(output.splitlines()[-1])
        assert list(said) == ways.split() and len(self._notes) == len(said)
        for (way, found), (url, body) in zip(said.items(), self._notes, strict=True):
            how, form = form_in(body)
            print(f"{name}, {way}: {json.dumps(body.get('response_format') or form)} -> {json.dumps(found)}")
            assert how == way.partition("_")[0]
            expected = self._expected(body, form) if url == self._tiny else SAID
            assert found == (expected if isinstance(found, str) else json.loads(expected)), expected
        self._notes.clear()

    def _expected(self, body, form):
        prompt = body["prompt"] if "prompt" in body else in_template(messages_in(body))
        ids = self._llm.tokenizer.encode(prompt, add_special_tokens=False)
        params = SamplingParams(temperature=0, max_tokens=ROOM, stop=body.get("stop"), structured_outputs=form)
        (answer,) = self._llm.generate([ids], params)
        assert answer.finish_reason == "stop", answer
        return answer.text


@pytest.fixture
def forms(llm, url, talks):
    notes = []
    with overheard(url, notes) as tiny, overheard(talks, notes) as talking:
        yield Forms(llm, url, notes, asked(tiny, talks=talking, max_tokens=ROOM))


CHAT, TEXT = "chat chat_streamed ", "text text_streamed "
TYPED = "schema schema_streamed object "
VLLM = " ".join(f"structured_{k} structured_{k}_text guided_{k}" for k in ("choice", "regex", "json", "grammar"))


def test_llm(url, home, expected):
    """A command of its own, over the official client."""
    python = strangers(home, "llm") / "python"
    check("llm", run(python, CLIENTS / "llm_flow.py", asked(url), cwd=home, LLM_USER_PATH=str(home / "llm")), expected,
          CHAT + TEXT)  # fmt: skip


def test_errors_are_known_by_their_types(home, tmp_path):
    """LiteLLM with three prefixes and its Router's fallbacks, both official clients, and langchain-openai."""
    python = strangers(home, "litellm", "langchain-openai", "anthropic") / "python"
    (tmp_path / "slow.py").write_text(SLOW)
    key, model = ("--api-key", "k"), f"{tmp_path / 'slow.py'}:Slow"
    few = ("--served-model-name", "tiny", "--max-num-seqs", "1", "--max-num-queued-reqs", "0")
    with (
        serving(tmp_path / "log", *key) as url,
        serving(tmp_path / "full", *key, *few, model=model) as full,
        occupied(full),
    ):
        said = json.loads(
            run(python, CLIENTS / "errors.py", json.dumps({"url": url, "full": full}), cwd=home, LITELLM_LOG="ERROR")
        )
    print(f"\nerrors: {json.dumps(said)}")
    lite, too_long = "BadRequestError", "ContextWindowExceededError"
    assert said["overflow"] == [too_long] * 3 + [lite] * 2 + ["OpenAIContextOverflowError"]
    assert said["max_tokens"][:2] == [too_long] * 2 and said["max_tokens"][3] == lite
    assert said["model"] == ["NotFoundError"] * 5 + ["OpenAIModelNotFoundError"]
    assert said["key"] == ["AuthenticationError"] * 5 + ["OpenAIAuthenticationError"]
    assert said["full"] == ["RateLimitError"] * 5 + ["OpenAIRateLimitError"]
    assert said["router"] == "from the larger one"


@contextmanager
def occupied(url):
    """A long stream has its only row."""
    body = json.dumps({"prompt": "a", "max_tokens": 500, "stream": True}).encode()
    headers = {"Authorization": "Bearer k", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        answer.read(1)
        yield


def test_forms_by_the_official_client(home, forms):
    python = strangers(home, "openai", "pydantic") / "python"
    ways = "object_streamed schema_async schema_async_streamed object_async schema_generic "
    forms.check("openai", run(python, CLIENTS / "openai_forms.py", forms.asked, cwd=home), TYPED + ways + VLLM)


def test_the_official_client_for_node(url, home, expected, forms):
    strangers_for_node(home, "openai", "zod")
    for script in CLIENTS.glob("*.mjs"):  # node looks for packages beside it
        shutil.copy(script, home)
    flow = CHAT + TEXT + "chat_tokens embedding models"
    check("openai", run("node", "node_flow.mjs", asked(url), cwd=home), expected, flow)
    forms.check("openai", run("node", "node_forms.mjs", forms.asked, cwd=home), TYPED)


@pytest.mark.xdist_group("promptfoo")
def test_promptfoo(url, with_promptfoo, expected):
    """A chat, a text and an answer in a form that must be as expected, by its own assertions."""
    config = {"apiBaseUrl": f"{url}/v1", "apiKey": "none", "temperature": 0, "max_tokens": LENGTH}
    chat = {"prompts": [json.dumps(MESSAGES)], "providers": [{"id": "openai:chat:tiny", "config": config}]}
    text = {"prompts": [PROMPT], "providers": [{"id": "openai:completion:tiny", "config": config}]}
    config = {**config, "max_tokens": ROOM, "response_format": FORM}
    typed = {**chat, "providers": [{"id": "openai:chat:tiny", "config": config}]}
    for name, asking in (("chat", chat), ("text", text), ("mood", typed)):
        asking["tests"] = [{"assert": [{"type": "equals", "value": expected[name]}]}]
        stats = promptfoo(with_promptfoo, asking)["stats"]
        assert (stats["successes"], stats["failures"], stats["errors"]) == (1, 0, 0), stats
        assert stats["tokenUsage"]["completion"] == LENGTH or name == "mood"
        print(f"promptfoo, {name}: as expected")


def promptfoo(home, asking):
    """What it finds. asking: its configuration."""
    (home / "asking.json").write_text(json.dumps(asking))
    program, own = home / "node_modules" / ".bin" / "promptfoo", str(home / "own")
    run(
        *[program, "eval", "-c", "asking.json", "-o", "out.json", "--no-cache", "--no-table", "--no-progress-bar"],
        cwd=home,
        PROMPTFOO_DISABLE_TELEMETRY="1",
        PROMPTFOO_DISABLE_UPDATE="1",
        PROMPTFOO_CONFIG_DIR=own,
        PROMPTFOO_FAILED_TEST_EXIT_CODE="0",
    )
    return json.loads((home / "out.json").read_text())["results"]


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
    quiet = ["curl", "--silent", "--show-error"]
    curl, chat_curl = [*quiet, f"{url}/v1/completions"], [*quiet, f"{url}/v1/chat/completions"]
    json_ = ["-H", "Content-Type: application/json"]
    whole = json.loads(run(*curl, *json_, "-d", json.dumps(body), cwd=home))
    assert whole["choices"][0]["text"] == expected["text"]
    *events, end = run(*curl, "-N", *json_, "-d", json.dumps({**body, "stream": True}), cwd=home).strip().split("\n\n")
    assert end == "data: [DONE]"
    assert "".join(json.loads(e.removeprefix("data: "))["choices"][0]["text"] for e in events) == expected["text"]
    for form in ({"response_format": FORM}, {"structured_outputs": {"json": MOOD}}, {"json_schema": MOOD}):
        chat = {"messages": MESSAGES, "max_tokens": ROOM, "temperature": 0, **form}
        told = json.loads(run(*chat_curl, *json_, "-d", json.dumps(chat), cwd=home))
        assert json.loads(told["choices"][0]["message"]["content"]) == expected["mood"]
    refused = json.loads(run(*curl, "-d", json.dumps(body), cwd=home))  # curl calls it a form
    print(f"\ncurl -d without a header: {refused['error']['message']}")
    assert "expected Content-Type: application/json" in refused["error"]["message"]


def test_aider(talks, plans, home):
    """Its own prompts, and reasoning, which it shows."""
    aider = strangers(home, "aider-chat") / "aider"
    quiet = ["--no-git", "--yes-always", "--no-check-update", "--no-pretty", "--analytics-disable"]
    for url, question, lines in (
        (talks, "Who are you?", [BEFORE + SAID]),
        (plans, "Please think: who are you?", [THOUGHT, BEFORE + SAID]),
    ):
        model = ["--model", "openai/tiny", "--openai-api-base", f"{url}/v1", "--openai-api-key", "none"]
        asking = ["--no-show-model-warnings", "--chat-mode", "ask", "--message", question]
        told = run(aider, *model, *quiet, *asking, cwd=home, HOME=str(home))
        print(told)
        assert [line for line in told.splitlines() if line in lines] == lines


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
