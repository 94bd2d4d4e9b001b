"""POST /v1/generate of models whose frames the engine draws, that draw themselves, and that take inputs; the same
wherever the engine is.
"""

import base64
import json
from urllib.parse import quote

import numpy as np
import pytest

import hibachi
from hibachi import SamplingParams
from hibachi.engine.sampling.uniforms import draws, fork
from hibachi.llm.own import open_model
from hibachi.llm.texts import Texts
from hibachi.llm.tokens import Tokens

from .anytoken import Sung
from .test_generate import ENGINES, FILE, MSGPACK, NPY, PATH, events_of, npy, opened, pack, post, unpacked

SINGS = [[1, 2], [3, 4]]
HOURS = [10 * i for i in range(12)]


@pytest.fixture(scope="module", params=ENGINES)
def sung(request):
    with opened("Sung", request.param, max_num_seqs=4) as here:
        yield here


@pytest.fixture(scope="module", params=ENGINES)
def spoken(request):
    with opened("Spoken", request.param, max_num_seqs=4) as here:
        yield here


def direct(**how):
    with hibachi.AutoregressiveBatchInference(Sung(), deterministic=False) as engine:
        stream = engine.run(SINGS, SamplingParams(**how))
        return [frame.tolist() for frame in stream], stream.logprobs


def said(i, n=4):
    """What a request with this seed and speaker gets after two tokens."""
    normal = draws(np.full(n, i), np.arange(2, 2 + n), 1)[1][:, 0]
    return np.stack([normal, i + 0.5 + np.array(HOURS[1 : 1 + n])], axis=1).astype(np.float32).tolist()


def ask(i, **more):
    inputs = {"speaker": [i, 0.5], "hours": HOURS}
    return {"prompt": [[0, 0], [0, 0]], "max_tokens": 4, "seed": i, "inputs": inputs} | more


# ---- frames that the engine draws ----------------------------------------------------------------------------------


def test_frames_are_those_of_the_engine(sung):
    body = {"prompt": SINGS, "max_tokens": 6, "seed": 5, "logprobs": 1}
    told = sung.post(PATH, body).json()
    frames, scores = direct(seed=5, max_tokens=6, logprobs=1)
    assert (told["tokens"], told["shape"], told["dtype"]) == (frames, [2], "int32")
    assert all(frame[1] % 2 == 0 for frame in frames) and len({frame[0] for frame in frames}) > 1
    assert [[{int(i): p for i, p in one.items()} for one in each] for each in told["logprobs"]] == scores
    for accept in ("text/event-stream", MSGPACK):
        opening, tokens, _ = events_of(sung.post(PATH, {**body, "stream": True}, headers={"Accept": accept}))
        assert (opening["shape"], opening["dtype"], tokens) == ([2], "int32", frames)


def test_several_samples_are_one_answer(sung, spoken):
    body = {"prompt": SINGS, "max_tokens": 6, "seed": 5, "logprobs": 1}
    assert sung.post(PATH, body | {"use_beam_search": True}).json()["error"]["param"] == "use_beam_search"
    told = sung.post(PATH, body | {"n": 3}).json()
    alone = [sung.post(PATH, body | {"seed": fork(5, i)}).json() for i in range(3)]
    assert [one["tokens"] for one in told["samples"]] == [one["tokens"] for one in alone]
    assert [one["logprobs"] for one in told["samples"]] == [one["logprobs"] for one in alone]
    assert told["usage"]["completion_tokens"] == 18 and told["usage"]["prompt_tokens"] == 2
    [packed] = unpacked(sung.post(PATH, body | {"n": 3}, headers={"Accept": MSGPACK}).content)
    assert [np.frombuffer(one["tokens"], "int32").reshape(-1, 2).tolist() for one in packed["samples"]] == [
        one["tokens"] for one in alone
    ]
    drawn = spoken.post(PATH, ask(3, n=2)).json()["samples"]
    assert [one["tokens"] for one in drawn] == [said(3), spoken.post(PATH, ask(3, seed=fork(3, 1))).json()["tokens"]]
    for more in ({"n": 0}, {"n": 5, "stream": True}, {"n": 10**6}):
        assert sung.post(PATH, body | more).json()["error"]["param"] == "n"
    assert sung.post(PATH, body | {"n": 2}, headers={"Accept": NPY}).json()["error"]["param"] == "n"


def test_parameters_for_each_codebook(sung):
    each = [{"top_k": 1}, {"temperature": 0.5}]
    told = sung.post(PATH, {"prompt": SINGS, "max_tokens": 6, "seed": 5, "codebooks": each}).json()
    assert told["tokens"] == direct(seed=5, max_tokens=6, codebooks=each)[0]
    query = f"?max_tokens=6&seed=5&codebooks={quote(json.dumps(each))}"
    assert post(sung, npy(np.int32(SINGS)), NPY, query).json()["tokens"] == told["tokens"]
    packed = pack({"prompt": SINGS, "max_tokens": 6, "seed": 5, "codebooks": each})
    assert post(sung, packed, MSGPACK).json()["tokens"] == told["tokens"]


def test_biases_and_allowed_ids_of_each_codebook(sung):
    each = [{"logit_bias": {"5": 100}}, {"allowed_token_ids": [2, 4]}]
    told = sung.post(PATH, {"prompt": SINGS, "max_tokens": 6, "seed": 5, "codebooks": each}).json()
    assert told["tokens"] == direct(seed=5, max_tokens=6, codebooks=[{"logit_bias": {5: 100}}, each[1]])[0]
    assert {first for first, _ in told["tokens"]} == {5} and {second for _, second in told["tokens"]} <= {2, 4}
    for wrong in ({"logit_bias": {"a": 1}}, {"logit_bias": 1}, {"allowed_token_ids": [9]}, {"allowed_token_ids": {}}):
        answer = sung.post(PATH, {"prompt": SINGS, "codebooks": [{}, wrong]})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "codebooks"


def test_such_a_model_makes_no_text(sung):
    assert sung.post("/v1/completions", {"prompt": "a"}).status_code in (400, 404)
    with open_model(f"{FILE}:Sung") as model:
        assert isinstance(model, Tokens) and not isinstance(model, Texts)


# ---- models that draw, and inputs ----------------------------------------------------------------------------------


def test_seeds_and_inputs_come_to_the_model(spoken):
    for i in (3, 4):
        assert spoken.post(PATH, ask(i)).json()["tokens"] == said(i)
    one, other = (spoken.post(PATH, {**ask(3), "seed": None}).json()["tokens"] for _ in range(2))
    assert one != other


def test_inputs_in_every_form(spoken):
    base = ask(3, prompt=[[0, 0], [0, 0]])
    speaker, hours = np.float32([3, 0.5]), np.int32(HOURS)
    packed = {"speaker": {"dtype": "float32", "shape": [2], "data": base64.b64encode(speaker.tobytes()).decode()}}
    assert spoken.post(PATH, base | {"inputs": base["inputs"] | packed}).json()["tokens"] == said(3)
    raw = {"hours": {"dtype": "int32", "shape": [12], "data": hours.tobytes()}}
    assert post(spoken, pack(base | {"inputs": base["inputs"] | raw}), MSGPACK).json()["tokens"] == said(3)
    query = f"?max_tokens=4&seed=3&inputs={quote(json.dumps(base['inputs']))}"
    assert post(spoken, npy(np.zeros((2, 2), np.float32)), NPY, query).json()["tokens"] == said(3)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"inputs": None}, "inputs"),
        ({"inputs": {"speaker": [1, "NaN"], "hours": HOURS}}, "inputs"),
        ({"inputs": {"speaker": [1, "a"], "hours": HOURS}}, "inputs.speaker[1]"),
        ({"inputs": {"speaker": [1, 2], "hours": HOURS[:1]}}, "inputs"),
        ({"prompt": [[1, 2, 3]]}, "prompt"),
    ],
    ids=str,
)
def test_an_error_names_its_field(spoken, more, field):
    answer = spoken.post(PATH, ask(1) | more)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_names_without_number_are_neither_read_nor_repeated(spoken):
    more = {"inputs": {f"name {i}": "no array" for i in range(10**4)}}
    answer = spoken.post(PATH, ask(1) | more)
    assert answer.status_code == 400 and "got 10000 names" in answer.text and len(answer.text) < 500
