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

from .venvs import environment, run

pytestmark = pytest.mark.install

CLIENTS = Path(__file__).parent / "clients"
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


def check(name, output, expected):
    """What must be said by all, and what is said beyond that."""
    said = json.loads(output.splitlines()[-1])
    assert {"text", "text_streamed", "chat", "chat_streamed"} <= set(said)
    if "unknown_model" in said:
        assert "other" in said.pop("unknown_model")
    for key, value in said.items():
        if isinstance(expected[key], np.ndarray):
            assert np.allclose(value, expected[key], atol=1e-6), key
            said[key] = f"{len(value)} numbers, as expected"
        else:
            assert value == expected[key], key
    print(f"\n{name}: {json.dumps(said)}")


@pytest.mark.parametrize(
    "packages, script",
    [
        (["litellm"], "litellm_flow.py"),
        (["langchain-openai", "tokenizers"], "langchain_flow.py"),
        (["llm"], "llm_flow.py"),
    ],
    ids=["litellm", "langchain-openai", "llm"],
)
def test_a_client_in_python(url, home, expected, packages, script):
    programs = environment(home, *packages)
    output = run(programs / "python", CLIENTS / script, asked(url), cwd=home, LLM_USER_PATH=str(home / "llm"))
    check(packages[0], output, expected)


def test_the_official_client_for_node(url, home, expected):
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    (home / "package.json").write_text("{}")
    run("npm", "install", "--no-audit", "--no-fund", "--silent", "openai", cwd=home)
    print("\n" + run("npm", "ls", "openai", cwd=home).split()[-1])
    script = shutil.copy(CLIENTS / "node_flow.mjs", home)
    check("openai for Node", run("node", script, asked(url), cwd=home), expected)


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
