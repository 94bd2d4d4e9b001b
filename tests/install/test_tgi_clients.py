"""TGI's clients against `hibachi serve --compat tgi`: PyPI's text-generation, and huggingface_hub's InferenceClient.

Each is in an environment of its own. What it says to an expression must be what the engine says in this process. With
pytest's -s the transcripts are shown. T-.. are facts of TGI.
"""

import pytest

from hibachi import LLM, SamplingParams

from .conftest import TEMPLATE, serving
from .venvs import strangers, transcript

pytestmark = [pytest.mark.install, pytest.mark.xdist_group("tgi clients")]

PROMPT = "It is a truth"
OURS = "text_generation.errors."  # the client's own errors

SETUP = """
from text_generation import AsyncClient, Client
from text_generation.types import Grammar, Message
import asyncio

key = {"Authorization": "Bearer k"}
client, other = Client("URL", key, timeout=60), AsyncClient("URL", key, timeout=60)
text = "It is a truth"
hello = [Message(role="user", content="How do you do?")]
"""

MODEL = '''
import numpy as np

class Ends:
    """Counts from the last byte on; "z" is its end, and at "!" it fails."""

    vocab_size, max_model_len, eos_ids = 128, 64, (122,)

    class tokenizer:
        encode = staticmethod(lambda text: list(text.encode()))
        decode = staticmethod(lambda ids: bytes(ids).decode("latin-1"))

    def logits(self, tokens, lengths):
        last = tokens[np.arange(len(lengths)), np.asarray(lengths) - 1]
        if (last == 33).any():
            raise RuntimeError("a secret of the model")
        return np.eye(128, dtype=np.float32)[(last + 1) % 128] * 50
'''


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny") as found:
        yield found


@pytest.fixture(scope="module")
def tgi(tmp_path_factory):
    """The address of a server as TGI's users have it, with the key "k", and a model that is told of tools."""
    more = ("--api-key", "k", "--chat-template", TEMPLATE, "--tool-call-parser", "generic")
    with serving(tmp_path_factory.mktemp("tgi") / "log", "--compat", "tgi", *more) as found:
        yield found


@pytest.fixture(scope="module")
def client(tgi, tmp_path_factory):
    """client(expressions, url, setup): what text-generation says to each."""
    home = tmp_path_factory.mktemp("text-generation")
    programs = strangers(home, "text-generation==0.7.0")

    def said(asked, url=tgi, setup=SETUP):
        return transcript(programs / "python", setup.replace("URL", url), asked, home)

    return said


def raised(found, kind, words=""):
    assert "raised" in found, found
    assert found["raised"][0] == kind and words in found["raised"][1], found


def greedy(llm, prompt, n, form=None):
    (found,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=n, structured_outputs=form))
    return found


def answered(llm, n, form=None):
    """What is answered to `hello`."""
    text = "<|im_start|>user\nHow do you do?<|im_end|>\n<|im_start|>assistant\n"
    return greedy(llm, llm.tokenizer.encode(text, add_special_tokens=False), n, form)


def test_texts_and_streams_by_both_classes(client, llm):
    expected = greedy(llm, PROMPT, 6)
    asked = {}
    for of, it in (("whole", "client"), ("async", "other")):
        asked[of] = f"{it}.generate(text, max_new_tokens=6, top_n_tokens=2)"
        asked[f"{of} streamed"] = f"{it}.generate_stream(text, max_new_tokens=6, top_n_tokens=2)"
    asked["full"] = "client.generate(text, max_new_tokens=6, return_full_text=True).generated_text"
    asked["twenty"] = "client.generate(text).details.generated_tokens"
    said = client(asked)
    whole, stream = said["whole"], said["whole streamed"]
    assert (said["async"], said["async streamed"]) == (whole, stream)
    assert whole["generated_text"] == expected.text and said["full"] == PROMPT + expected.text
    details = whole["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("length", 6, None)
    assert [t["id"] for t in details["tokens"]] == list(expected.token_ids)
    assert [len(t) for t in details["top_tokens"]] == [2] * 6 and details["top_tokens"][0][0] == details["tokens"][0]
    # T-34: an event for each token, and the text with the last only.
    assert [e["token"] for e in stream] == details["tokens"]
    assert [e["top_tokens"] for e in stream] == details["top_tokens"]
    assert [e["generated_text"] for e in stream] == [None] * 5 + [expected.text]
    assert stream[-1]["details"] == {"finish_reason": "length", "generated_tokens": 6, "seed": None}
    assert said["twenty"] == 20  # which the client asks for where nobody says it


def test_parameters_have_their_effect(client, llm):
    drawn = "client.generate(text, do_sample=True, max_new_tokens=6"
    said = client(
        {
            "seeded": f"{drawn}, seed=7)",
            "again": f"{drawn}, seed=7)",
            "unseeded": f"(first := {drawn}))",
            "by its seed": f"{drawn}, seed=first.details.seed)",
            "best": f"{drawn}, best_of=2)",
            "all": f"{drawn}, seed=1, temperature=0.7, top_k=5, top_p=0.9, typical_p=0.9, repetition_penalty=1.2, "
            "frequency_penalty=0.3).details.generated_tokens",
            "stopped": 'client.generate(text, stop_sequences=["nature"])',
            "stopped stream": 'client.generate_stream(text, stop_sequences=["nature"])',
            "prefill": "client.generate(text, decoder_input_details=True, max_new_tokens=1).details.prefill",
            "cut": "client.generate(text, decoder_input_details=True, max_new_tokens=1, truncate=2).details.prefill",
        }
    )
    assert said["seeded"] == said["again"] and said["seeded"]["details"]["seed"] == 7
    assert said["unseeded"] == said["by its seed"]
    (second,) = said["best"]["details"]["best_of_sequences"]
    first = said["best"]["details"]["tokens"]
    assert sum(t["logprob"] for t in first) >= sum(t["logprob"] for t in second["tokens"]) and said["all"] == 6
    for found in (said["stopped"], said["stopped stream"][-1]):
        assert found["generated_text"] == " of the nature" and found["details"]["finish_reason"] == "stop_sequence"
    ids = llm.tokenizer.encode(PROMPT)
    for name, expected in (("prefill", ids), ("cut", ids[-2:])):  # T-31
        assert [t["id"] for t in said[name]] == expected and said[name][0]["logprob"] is None
        assert all(t["logprob"] < 0 for t in said[name][1:])


MOOD = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["mood", "age"],
    "additionalProperties": False,
}
REGEX = "[a-c]{3}-[0-9]{2}"


# What the server says to what it does not take: as an error of the client's own, whole or as the event of a stream.
INVALID = {
    "max_new_tokens=1000": "`inputs` tokens + `max_new_tokens` must be <= 512. Given: 4 `inputs` tokens and 1000",
    "max_new_tokens=0": "`max_new_tokens` must be strictly positive",
    "stop_sequences=['a'] * 5": "`stop` supports up to 4 stop sequences. Given: 5",
    "top_n_tokens=6": "`top_n_tokens` must be >= 0 and <= 5. Given: 6",
    "watermark=True": "`watermark` is not supported",
    "grammar=Grammar(type='json', value='{')": "grammar.value must be a JSON schema",
}


def test_what_is_invalid_is_a_validation_error(client):
    """T-33: of a stream too, whose status is 200."""
    asked = {}
    for more in INVALID:
        for call in ("client.generate", "other.generate", "client.generate_stream", "other.generate_stream"):
            asked[f"{call} {more}"] = f"{call}(text, {more})"
    said = client({**asked, "best": "client.generate(text, do_sample=True, best_of=3)"})
    raised(said["best"], f"{OURS}ValidationError", "`best_of` must be > 0 and <= 2. Given: 3")
    for name in asked:
        words = INVALID[name.partition(" ")[2]]
        raised(said[name], f"{OURS}ValidationError", f"Input validation error: {words}")


def test_keys_and_routes(client, tgi):
    """T-38: TGI's 401 has no body, and this client fails on it; ours can be read."""
    said = client(
        {
            "none": "Client('URL').generate(text)".replace("URL", tgi),
            "wrong": "AsyncClient('URL', {'Authorization': 'Bearer K'}).generate(text)".replace("URL", tgi),
            "stream": "Client('URL').generate_stream(text)".replace("URL", tgi),
            "route": "Client('URL/nowhere', key).generate(text)".replace("URL", tgi),
        }
    )
    for name in ("none", "wrong", "stream"):
        raised(said[name], f"{OURS}UnknownError", "key")
    raised(said["route"], f"{OURS}NotFoundError", "POST /nowhere: this route does not exist.")


def test_who_comes_while_all_places_are_taken(client, tmp_path):
    """T-32: OverloadedError at once, for this one only."""
    crowd = "asyncio.gather(*(other.generate(text, max_new_tokens=300) for _ in range(6)), return_exceptions=True)"
    asked = {"crowd": crowd, "then": "client.generate(text, max_new_tokens=1).generated_text"}
    with serving(tmp_path / "log", "--compat", "tgi", "--max-concurrent-requests", "2") as url:
        said = client(asked, url)
    ends = [found.get("raised") or found["details"]["generated_tokens"] for found in said["crowd"]]
    assert ends.count(300) == 2 and ends.count([f"{OURS}OverloadedError", "Model is overloaded"]) == 4, ends
    assert said["then"] == " of"


def test_a_model_that_fails_and_one_that_ends(client, tmp_path):
    """T-39: GenerationError, and the next request is served. The end token is a token like others, and special."""
    (tmp_path / "ends.py").write_text(MODEL)
    asked = {
        "whole": "client.generate('!')",
        "streamed": "other.generate_stream('!')",
        "midway": "client.generate_stream(' ')",
        "ended": "client.generate('w')",
        "streamed to the end": "client.generate_stream('w')",
    }
    with serving(tmp_path / "log", "--compat", "tgi", model=f"{tmp_path / 'ends.py'}:Ends", quiet=False) as url:
        said = client(asked, url)
    for name in ("whole", "streamed", "midway"):
        raised(said[name], f"{OURS}GenerationError", "Request failed during generation: ")
        assert "secret" not in said[name]["raised"][1]
    assert said["ended"]["generated_text"] == "xy" and said["ended"]["details"]["finish_reason"] == "eos_token"
    tokens = said["ended"]["details"]["tokens"]
    assert [(t["text"], t["special"]) for t in tokens] == [("x", False), ("y", False), ("z", True)]
    assert [e["token"] for e in said["streamed to the end"]] == tokens


HUB = """
import os

os.environ["HF_HUB_OFFLINE"] = "0"  # else it asks no server at all
from huggingface_hub import AsyncInferenceClient, InferenceClient

client, other = InferenceClient("URL", token="k", timeout=60), AsyncInferenceClient("URL", token="k", timeout=60)
text = "It is a truth"
hello = [{"role": "user", "content": "How do you do?"}]
"""


def test_the_client_of_huggingface_hub(tgi, llm, home):
    programs = strangers(home, "huggingface_hub", "aiohttp")
    asked = {
        "full": "client.text_generation(text, max_new_tokens=6)",
        "whole": "client.text_generation(text, max_new_tokens=6, return_full_text=False)",
        "pieces": "client.text_generation(text, max_new_tokens=6, stream=True)",
        "async": "other.text_generation(text, max_new_tokens=6, return_full_text=False)",
        "stopped": "client.text_generation(text, stop=['nature'], return_full_text=False, details=True)",
        "chat": "client.chat_completion(hello, model='tgi', max_tokens=6, temperature=0).choices[0].message.content",
        "chat streamed": "''.join(c.choices[0].delta.content or '' for c in client.chat_completion("
        "hello, model='tgi', max_tokens=6, temperature=0, stream=True))",
        "nameless chat": "client.chat_completion(hello, max_tokens=6, temperature=0).choices[0].message.content",
        "invalid": "client.text_generation(text, max_new_tokens=1000)",
        "invalid stream": "client.text_generation(text, max_new_tokens=1000, stream=True)",
        "watermark": "client.text_generation(text, watermark=True)",
        "adapter": "client.text_generation(text, adapter_id='a')",
        "key": "InferenceClient('URL', token='K').text_generation(text)".replace("URL", tgi),
    }
    typed = {
        "json": {"type": "json", "value": MOOD},
        "regex": {"type": "regex", "value": REGEX},
        "named": {"type": "json_schema", "value": {"name": "mood", "schema": MOOD}},
    }
    for name, form in typed.items():
        of_text = f"text, max_new_tokens=40, return_full_text=False, grammar={form}"
        asked[f"{name} form"] = f"client.text_generation({of_text})"
        asked[f"{name} form streamed"] = f"''.join(client.text_generation({of_text}, stream=True))"
    # In a chat it takes a named schema in OpenAI's words only.
    named = {"type": "json_schema", "json_schema": {"name": "mood", "schema": MOOD, "strict": True}}
    for name, form in {**typed, "named": named}.items():
        of_chat = f"hello, model='tgi', max_tokens=40, temperature=0, response_format={form}"
        asked[f"{name} form of a chat"] = f"client.chat_completion({of_chat}).choices[0].message.content"
    more = "max_new_tokens=6, details=True, top_n_tokens=2"
    for of, it in (("", "client"), ("async ", "other")):
        asked[f"{of}details"] = f"{it}.text_generation(text, {more}, decoder_input_details=True)"
        asked[f"{of}stream"] = f"{it}.text_generation(text, {more}, stream=True)"
    said = transcript(programs / "python", HUB.replace("URL", tgi), asked, home)
    expected = greedy(llm, PROMPT, 6)
    # As in TGI, POST / gives the text behind the prompt unless it is asked not to; that is the route of this client.
    assert said["full"] == PROMPT + expected.text == said["details"]["generated_text"]
    assert said["whole"] == said["async"] == "".join(said["pieces"]) == expected.text
    assert said["details"] == said["async details"] and said["stream"] == said["async stream"]
    details = said["details"]["details"]
    assert [t["id"] for t in details["prefill"]] == llm.tokenizer.encode(PROMPT)
    assert [t["id"] for t in details["tokens"]] == list(expected.token_ids)
    assert [e["index"] for e in said["stream"]] == [1, 2, 3, 4, 5, 6]
    assert [e["token"] for e in said["stream"]] == details["tokens"]
    assert [e["top_tokens"] for e in said["stream"]] == details["top_tokens"]
    assert said["stream"][-1]["details"]["finish_reason"] == details["finish_reason"] == "length"
    assert said["stopped"]["generated_text"] == " of the nature"
    assert said["stopped"]["details"]["finish_reason"] == "stop_sequence"
    # Unless it is told a name, it calls any server's model "dummy".
    assert said["chat"] == said["chat streamed"] == said["nameless chat"] == answered(llm, 6).text
    for name in typed:
        form = {"regex": REGEX} if name == "regex" else {"json": MOOD}
        assert said[f"{name} form of a chat"] == answered(llm, 40, form).text
        assert said[f"{name} form"] == said[f"{name} form streamed"] == greedy(llm, PROMPT, 40, form).text
    errors = "huggingface_hub.errors."
    for name, words in (
        ("invalid", "`inputs` tokens + `max_new_tokens` must be <= 512"),
        ("invalid stream", "`inputs` tokens + `max_new_tokens` must be <= 512"),
        ("watermark", "`watermark` is not supported"),
        ("adapter", "`adapter_id` is not supported"),
    ):
        raised(said[name], f"{errors}ValidationError", f"Input validation error: {words}")
    raised(said["key"], f"{errors}UnknownError", "No valid API key")
