"""What a request for tokens may say, in a body or in a query; and in which form its answer goes out."""

import json
from urllib.parse import parse_qsl

import msgspec
import numpy as np
import pytest

from hibachi.errors import PromptTooLong
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.openai.bodies import Bounds
from hibachi.llm.dialects.tokens.accept import Accept, media_type
from hibachi.llm.dialects.tokens.arrays import as_npy
from hibachi.llm.dialects.tokens.bodies import Given, of_query
from hibachi.llm.dialects.tokens.parse import AskedModel, asked_of
from hibachi.llm.dialects.tokens.writing import NDJSON, SSE, STREAMS, WHOLE
from hibachi.llm.tokenizers.prompts import check_fits
from hibachi.request import SamplingParams

JSON, MSGPACK, NPY = WHOLE[0], WHOLE[2], WHOLE[1]
ARRAY = as_npy(np.arange(3, dtype=np.int32))


def given(query=(), **fields):
    return Given(json.dumps(fields).encode(), JSON, query)


@pytest.mark.parametrize("kind", [JSON, MSGPACK, "application/vnd.own+json", "application/x-msgpack"])
def test_parameters_stand_beside_the_prompt(kind):
    encode = msgspec.json.encode if "json" in kind else msgspec.msgpack.encode
    fields = {"prompt": [1, 2], "max_tokens": 3, "model": "m", "stop": [7], "atol": 0.5}
    one = Given(encode(fields), kind)
    assert (one.said.model, one.said.max_tokens, one.said.atol, one.own) == ("m", 3, 0.5, False)
    assert one.prompt(None).tolist() == [1, 2] and one.stop("float32").tolist() == [7.0]


def test_input_is_another_name_of_prompt():
    assert given(input=[4]).prompt(None).tolist() == [4]
    for fields, says in (({}, "prompt is missing"), ({"prompt": [1], "input": [1]}, "mean the same")):
        with pytest.raises(Refused, match=says):
            given(**fields).prompt(None)
    assert given(prompt=[1], stop=None).stop(None) is None


@pytest.mark.parametrize("kind", [NPY, "application/octet-stream"])
def test_beside_an_array_parameters_stand_in_the_query(kind):
    one = Given(ARRAY, kind, parse_qsl("model=a%20b&max_tokens=5&stream=true&stop=[[1,2]]&timeout=1.5&cache_salt=7"))
    said = one.said
    assert (said.model, said.max_tokens, said.stream, said.timeout) == ("a b", 5, True, 1.5)
    assert said.cache_salt == "7" and not one.own
    assert one.prompt(None).tolist() == [0, 1, 2] and one.stop(None).tolist() == [[1, 2]]


def test_bytes_of_other_types_are_for_the_model_to_read():
    assert Given(b"RIFF", "audio/wav", [("max_tokens", "5")]).own
    assert Given(b"RIFF", "application/octet-stream").own
    with pytest.raises(Refused, match="expected an array as numpy"):
        Given(b"RIFF", NPY).prompt(None)


@pytest.mark.parametrize(
    "query, param",
    [
        ("max_tokens=5&max_tokens=6", "max_tokens"),
        ("model=a&model=a", "model"),
        ("prompt=1", "prompt"),
        ("max_tokens=five", "max_tokens"),
        ("max_tokens=", "max_tokens"),
        ("stream=maybe", "stream"),
        ("encoding=hex", "encoding"),
        ("no_such=1", "no_such"),
        ("allowed_token_ids=[a]", "allowed_token_ids"),
        ("logit_bias=" + "[" * 5000, "logit_bias"),
    ],
)
def test_queries_that_are_refused_by_name(query, param):
    with pytest.raises(Refused) as e:
        of_query(parse_qsl(query, keep_blank_values=True))
    assert (e.value.status, e.value.param) == (400, param)


def test_lists_in_a_query_are_written_as_in_json():
    said = of_query([("allowed_token_ids", "[1,2]"), ("logit_bias", '{"3":-1.5}')])
    assert said.allowed_token_ids == [1, 2] and said.logit_bias == {"3": -1.5}


@pytest.mark.parametrize(
    "raw, kind, code",
    [
        (b"{", JSON, "invalid_json"),
        (b'{"prompt": [NaN]}', JSON, "invalid_json"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", JSON, "invalid_json"),
        (b"\x81\xa6prompt" + b"\x91" * 100_000 + b"\x00", MSGPACK, "invalid_msgpack"),
        (b"\x81\xa6prompt\xdd\x3b\x9a\xca\x00", MSGPACK, "invalid_msgpack"),
        (b"\x81\xa6prompt\xc6\x3b\x9a\xca\x00", MSGPACK, "invalid_msgpack"),
        (b"", MSGPACK, "invalid_msgpack"),
        (b"\x81\xa5model\xa1\xff", MSGPACK, "invalid_msgpack"),
        (b"[]", JSON, "invalid_type"),
        (b'{"max_tokens": 1.5, "prompt": [1]}', JSON, "invalid_type"),
        (b'{"nonsense": 1, "prompt": [1]}', JSON, "unknown_parameter"),
        (b"\x81\xa1x\x01", MSGPACK, "unknown_parameter"),
    ],
)
def test_bodies_that_are_refused(raw, kind, code):
    with pytest.raises(Refused) as e:
        Given(raw, kind)
    assert (e.value.status, e.value.code) == (400, code)


def test_a_body_that_names_its_parameters_takes_none_from_the_query():
    with pytest.raises(Refused, match="none in the query"):
        given([("max_tokens", "3")], prompt=[1])


# ---- what is asked -------------------------------------------------------------------------------------------------


def asked(stop=None, *, feedforward=False, defaults=None, bounds=None, **fields):
    said = given(prompt=[1], **fields).said
    return asked_of(said, stop, AskedModel(bounds or Bounds(), feedforward, defaults, eos_ids=(9,)))


def test_a_model_that_samples_by_itself():
    one, ids = asked(np.array([[1, 2]]), atol=0.5, max_tokens=3, timeout=2.0, cache_salt="s", priority=-1)
    assert (one.params, one.max_tokens, one.include_stop, ids) == (None, 3, True, ())
    assert one.stop_rule.atol == 0.5 and one.stop_rule.tokens[0].tolist() == [1, 2]
    assert (one.terms.timeout, one.terms.cache_salt, one.terms.priority) == (2.0, "s", -1)
    (bare, _), (ruled, _) = asked(), asked(np.array([4, 5]))
    assert bare.stop_rule is None and bare.max_tokens is None
    assert ruled.stop_rule.tokens == (4, 5)  # which are equal where the numbers are


def test_a_model_that_gives_logits():
    one, ids = asked(
        np.array([4]), defaults=SamplingParams(top_k=3), max_tokens=2, temperature=0.5, seed=-1, logprobs=1
    )
    p = one.params
    assert (p.top_k, p.max_tokens, p.temperature, p.seed, p.logprobs) == (3, 2, 0.5, 2**64 - 1, 1)
    assert p.stop_token_ids == (4, 9) and ids == (4,) and one.stop_rule is None
    assert asked(defaults=SamplingParams(), ignore_eos=True)[0].params.stop_token_ids == ()
    assert asked(defaults=SamplingParams())[0].params.max_tokens is None  # to the end of the context
    assert asked(defaults=SamplingParams(), logit_bias={"3": 1})[0].params.logit_bias == ((3, 1.0),)


def test_the_operator_s_limit_of_new_tokens():
    assert (
        asked(bounds=Bounds(new=5))[0].max_tokens == 5 and asked(bounds=Bounds(new=5), max_tokens=9)[0].max_tokens == 5
    )
    assert asked(bounds=Bounds(new=5), max_tokens=2)[0].max_tokens == 2


SAMPLING = {"temperature": 0.5, "top_k": 2, "top_p": 0.5, "min_p": 0.1, "seed": 1, "logprobs": 0, "ignore_eos": True,
            "num_speculative_tokens": 0}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_is_refused_by_name_where_there_are_no_logits(name):
    for feedforward in (False, True):
        with pytest.raises(Refused, match=f"{name} is not supported") as e:
            asked(feedforward=feedforward, **{name: SAMPLING[name]})
        assert (e.value.status, e.value.param) == (400, name)


@pytest.mark.parametrize(
    "fields, stop",
    [({"max_tokens": 1}, None), ({"include_stop": True}, None), ({"stream": True}, None), ({}, np.array([1]))],
)
def test_a_feed_forward_model_generates_nothing(fields, stop):
    with pytest.raises(Refused, match="one output for each input"):
        asked(stop, feedforward=True, **fields)


@pytest.mark.parametrize(
    "stop, more, param",
    [
        (None, {"max_tokens": 0}, "max_tokens"),
        (None, {"atol": 0.5}, "atol"),
        (np.array([1]), {"atol": -1.0}, "atol"),
        (np.array(1), {}, "stop"),
        (np.zeros((17, 2)), {}, "stop"),
        (None, {"timeout": 0.0}, "timeout"),
        (None, {"request_id": "a b"}, "request_id"),
        (None, {"defaults": SamplingParams(), "top_p": 2.0}, "top_p"),
        (None, {"defaults": SamplingParams(), "atol": 0.5}, "atol"),
        (None, {"defaults": SamplingParams(), "logprobs": 21}, "logprobs"),
        (None, {"defaults": SamplingParams(), "logit_bias": {"x": 1}}, "logit_bias"),
        (None, {"defaults": SamplingParams(), "allowed_token_ids": [0] * 5000}, "allowed_token_ids"),
        (np.array([1.5]), {"defaults": SamplingParams()}, "stop"),
        (np.array([[1]]), {"defaults": SamplingParams()}, "stop"),
    ],
)
def test_what_is_out_of_range(stop, more, param):
    with pytest.raises(Refused) as e:
        asked(stop, **more)
    assert (e.value.status, e.value.param) == (400, param)


def test_as_many_as_were_asked_for_must_fit():
    check_fits(5, 5, 10)
    with pytest.raises(PromptTooLong, match=r"max_tokens is 6.* has 5 tokens.* is 10 tokens.* at most 5") as found:
        check_fits(5, 6, 10)
    assert found.value.path == ("max_tokens",)
    with pytest.raises(PromptTooLong, match=r"context length is 10 tokens.* at least 11 tokens \(10 in the prompt"):
        check_fits(10, None, 10)


# ---- Accept --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header, ours, expected",
    [
        (None, WHOLE, JSON),
        (b"*/*", STREAMS, SSE),
        (b"application/*", STREAMS, NDJSON),
        (b"application/x-ndjson", STREAMS, NDJSON),
        (b"application/msgpack;q=0.9, application/json;q=0.5", WHOLE, MSGPACK),
        (b"application/x-msgpack", WHOLE, MSGPACK),
        (b"application/octet-stream", WHOLE, NPY),
        (b"*/*, application/json;q=0", WHOLE, NPY),
        (b"APPLICATION/X-NPY ; q=0.1", WHOLE, NPY),
        (b"application/json;q=0.1, */*;q=0.2", WHOLE, NPY),
        (b"text/html", WHOLE, None),
        (b"application/json;q=0", WHOLE, None),
        (b"application/json;q=nan", WHOLE, None),
        (b"application/json;q=2", WHOLE, None),
        (b"", WHOLE, JSON),
        (b"nonsense", WHOLE, None),
    ],
)
def test_the_form_that_a_client_takes(header, ours, expected):
    assert Accept(header).best(tuple(ours)) == expected


@pytest.mark.parametrize(
    "header, another",
    [
        (b"audio/wav", True),
        (b"audio/*;q=0.5", True),
        (b"audio/wav, application/json;q=0.9", True),
        (b"audio/wav, application/json", True),
        (b"audio/wav;q=0.5, application/json", False),
        (b"*/*", False),
        (b"application/*", False),
        (b"audio/wav;q=0", False),
        (None, False),
    ],
)
def test_a_type_that_only_the_model_may_make(header, another):
    assert Accept(header).prefers_another(WHOLE) is another


@pytest.mark.parametrize(
    "header, named",
    [
        (None, False),
        (b"*/*", False),
        (b"audio/wav, */*", False),
        (b"application/json;q=0, */*", False),
        (b"application/*", True),
        (b"application/json;q=0.1, */*", True),
    ],
)
def test_whether_a_type_of_ours_is_asked_for(header, named):
    assert Accept(header).names(WHOLE) is named


def test_media_types():
    assert media_type(b" Audio/WAV ; rate=8000") == "audio/wav" and media_type(b"") == ""
