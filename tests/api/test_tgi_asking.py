"""TGI's rules, fact by fact (T-25 to T-31, T-41): its limits there are 2 continuations, 3 stop strings, the 4 likeliest
tokens, 5 tokens of a prompt and 6 in all."""

from __future__ import annotations

import json

import pytest

from hibachi.errors import EngineFailed, InternalError, ModelError, OutOfCapacity, PromptTooLong, QueueFull
from hibachi.llm.dialects.dialects import TGI, TGI_STREAM
from hibachi.llm.dialects.errors import Refused, as_refused
from hibachi.llm.dialects.openai.bodies import Bounds, read
from hibachi.llm.dialects.tgi.bodies import GenerateBody, fields_of
from hibachi.llm.dialects.tgi.limits import TgiLimits
from hibachi.llm.dialects.tgi.parse import fit, generation

LIMITS = TgiLimits(2, 3, 4, 5, 6)
CONTEXT = 100


def asked(inputs="Hello", *, limits=LIMITS, bounds=None, stream=False, full_text=False, **parameters):
    return generation(
        read(GenerateBody, json.dumps({"inputs": inputs, "parameters": parameters}).encode()),
        limits,
        bounds or Bounds(),
        CONTEXT,
        stream=stream,
        full_text=full_text,
    )


def fitted(ids, *, limits=LIMITS, bounds=None, **parameters):
    given = asked(limits=limits, **parameters)
    return fit(given, ids, limits, bounds or Bounds(), CONTEXT), given.asked.params.max_tokens


def refused(call, *args, **more):
    with pytest.raises(Refused) as found:
        call(*args, **more)
    told = TGI.error(found.value)
    assert TGI.status(found.value) == 422 and told["error_type"] == "validation"
    return told["error"].removeprefix("Input validation error: ")


# ---- facts -----------------------------------------------------------------------------------------------------------


def test_more_than_fits_is_refused():
    """T-25, and the prompt alone."""
    words = refused(fitted, [7], max_new_tokens=10)
    assert words == "`inputs` tokens + `max_new_tokens` must be <= 6. Given: 1 `inputs` tokens and 10 `max_new_tokens`"
    assert fitted([7], max_new_tokens=5) == ([7], 5)
    assert refused(fitted, [7] * 6) == "`inputs` must have less than 5 tokens. Given: 6"
    assert "max_new_tokens` must be <= 6" in refused(fitted, [7] * 6, max_new_tokens=1)  # which is looked at first
    assert refused(fitted, []) == "`inputs` cannot be empty"


def test_several_continuations_must_be_drawn():
    """T-26."""
    assert refused(asked, best_of=2) == "you must use sampling when `best_of` is > 1"
    for name, value in (("do_sample", True), ("temperature", 1.0), ("top_k", 5), ("top_p", 0.5), ("typical_p", 0.5)):
        assert asked(best_of=2, **{name: value}).asked.params.n == 2
    assert asked(best_of=1).asked.params.n == 1
    for wrong in (0, -1, 3):
        assert refused(asked, best_of=wrong, do_sample=True) == f"`best_of` must be > 0 and <= 2. Given: {wrong}"


def test_a_share_of_probability_is_more_than_none_and_less_than_all():
    """T-27."""
    for name in ("top_p", "typical_p"):
        for wrong in (1.0, 0.0, -0.1, 2):
            assert refused(asked, **{name: wrong}) == f"`{name}` must be > 0.0 and < 1.0"
        assert getattr(asked(**{name: 0.99}).asked.params, name) == 0.99
        assert getattr(asked().asked.params, name) == 1.0


def test_how_many_of_the_likeliest_are_told():
    """T-28."""
    assert refused(asked, top_n_tokens=5) == "`top_n_tokens` must be >= 0 and <= 4. Given: 5"
    assert "`top_n_tokens`" in refused(asked, top_n_tokens=-1)
    assert [asked(**p).top for p in ({"top_n_tokens": 4}, {"top_n_tokens": 0}, {})] == [4, 0, 0]


def test_a_temperature_of_nothing_is_refused():
    """T-29."""
    for name in ("temperature", "repetition_penalty"):
        for wrong in (0, 0.0, -1.5):
            assert refused(asked, **{name: wrong}) == f"`{name}` must be strictly positive"
    for wrong in (-2.1, 2.1):
        assert refused(asked, frequency_penalty=wrong) == "`frequency_penalty` must be >= -2.0 and <= 2.0"
    assert asked(frequency_penalty=-2, repetition_penalty=0.5).asked.params.frequency_penalty == -2


def test_an_empty_text_is_refused():
    """T-30."""
    assert refused(asked, "") == "`inputs` cannot be empty"


def test_the_last_tokens_are_kept():
    """T-31."""
    assert fitted([1, 2, 3, 4, 5], truncate=2, max_new_tokens=1)[0] == [4, 5]
    assert fitted([1, 2], truncate=5, max_new_tokens=1)[0] == [1, 2]
    for wrong in (0, 6, -1):
        assert refused(asked, truncate=wrong) == f"`truncate` must be strictly positive and less than 5. Given: {wrong}"


def test_without_parameters_tokens_are_drawn():
    """T-41: and with empty ones the likeliest are taken."""
    found = [
        generation(read(GenerateBody, body), LIMITS, Bounds(), CONTEXT, stream=False)
        for body in (b'{"inputs":"a"}', b'{"inputs":"a","parameters":null}', b'{"inputs":"a","parameters":{}}')
    ]
    assert [g.asked.params.greedy for g in found] == [False, False, True]
    assert found[0].seed != found[1].seed and found[0].seed == found[0].asked.params.seed
    assert found[2].seed is None
    assert {g.asked.params.temperature for g in found[:2]} == {1.0}


# ---- rules -----------------------------------------------------------------------------------------------------------


def test_rules_are_looked_at_in_order():
    """Each body breaks one rule more than the one before, which is looked at earlier."""
    broken = (
        ("truncate", 0),
        ("top_n_tokens", 9),
        ("seed", 3),
        ("stop", ["a"] * 4),
        ("max_new_tokens", 0),
        ("top_k", 0),
        ("typical_p", 1),
        ("top_p", 1),
        ("frequency_penalty", 3),
        ("repetition_penalty", 0),
        ("temperature", 0),
        ("best_of", 3),
        ("watermark", True),
    )
    body = {"best_of": 2, "grammar": {"type": "json", "value": "{"}}  # which is looked at last
    for name, value in broken:
        body[name] = value
        drawn = {} if name == "truncate" else body
        given = {**drawn, "do_sample": True, name: value}
        assert refused(asked, **given).startswith(f"`{name}`"), name
    assert refused(asked, "", top_n_tokens=9).startswith("`top_n_tokens`")
    assert refused(asked, "", truncate=9).startswith("`inputs`")
    assert refused(asked, grammar=body["grammar"]).startswith("grammar.value")


def test_what_draws():
    """As in TGI's shards: a temperature of 1 alone does not."""
    for name, value in (("do_sample", True), ("temperature", 0.5), ("top_k", 1), ("top_p", 0.5), ("typical_p", 0.5)):
        found = asked(**{name: value})
        assert not found.asked.params.greedy and found.seed is not None, name
    for none in ({}, {"temperature": 1}, {"do_sample": False}, {"seed": 3}, {"top_n_tokens": 2}):
        found = asked(**none)
        assert found.asked.params.greedy and found.seed is None, none
    assert asked(top_k=4, temperature=0.25).asked.params.top_k == 4
    assert asked(temperature=0.25).asked.params.temperature == 0.25


def test_seeds():
    assert asked(do_sample=True, seed=2**64 - 1).seed == 2**64 - 1
    assert refused(asked, seed=1, best_of=2, do_sample=True) == "`seed` must not be set when `best_of` > 1"
    for wrong in (-1, 2**64):
        assert refused(asked, seed=wrong).startswith("`seed` must be >= 0")


def test_what_cannot_be_streamed():
    assert refused(asked, stream=True, best_of=2) == "`best_of` != 1 is not supported when streaming tokens"
    words = refused(asked, stream=True, decoder_input_details=True)
    assert words == "`decoder_input_details` == true is not supported when streaming tokens"
    assert asked(stream=True, best_of=1, decoder_input_details=False).asked.stream


def test_what_is_not_served_is_refused_by_name():
    for name, value in (("watermark", True), ("adapter_id", "x")):
        assert refused(asked, **{name: value}).startswith(f"`{name}` is not supported")
    for name, value in (("watermark", False), ("watermark", None), ("adapter_id", None)):
        asked(**{name: value})


def test_other_fields_and_types_are_named():
    assert "parameters.stop_sequences" in refused(asked, stop_sequences=["a"])
    assert "parameters.top_k" in refused(asked, top_k="5")
    assert "inputs" in refused(read, GenerateBody, b"{}")
    assert "prompt" in refused(read, GenerateBody, b'{"inputs": "a", "prompt": "b"}')
    assert "JSON" in refused(read, GenerateBody, b"{")


def test_stop_strings():
    assert refused(asked, stop=["a"] * 4) == "`stop` supports up to 3 stop sequences. Given: 4"
    assert "1 to" in refused(asked, stop=[""])
    assert "1 to" in refused(asked, stop=["x" * 1025])
    params = asked(stop=["a", "b"]).asked.params
    assert params.stop == ("a", "b") and params.include_stop


def test_what_is_computed_is_what_is_told():
    """Log-probabilities cost time, so they are asked for only where they are told, or chosen by."""
    assert asked().asked.params.logprobs is None
    assert asked(top_n_tokens=3).asked.params.logprobs is None
    assert asked(top_n_tokens=3, details=True).asked.params.logprobs == 3
    assert asked(stream=True).asked.params.logprobs == 0
    assert asked(best_of=2, do_sample=True).asked.params.logprobs == 0
    prefill = asked(decoder_input_details=True)
    assert prefill.details and prefill.prefill and prefill.asked.params.prompt_logprobs == 0
    assert [asked(full_text=f, **p).full_text for f in (False, True) for p in ({}, {"return_full_text": False})] == [
        False,
        False,
        True,
        False,
    ]


# ---- how many are new ------------------------------------------------------------------------------------------------


def test_the_room_that_is_left():
    wide = TgiLimits(max_total_tokens=4096)
    given = asked(limits=wide)
    fit(given, [1] * 10, wide, Bounds(), 8192)
    assert given.asked.params.max_tokens == 4086
    fit(given, [1] * 10, wide, Bounds(new=50), 8192)  # the server's own limit
    assert given.asked.params.max_tokens == 50
    fit(given, [1] * 10, TgiLimits(), Bounds(), 40)  # what the context holds
    assert given.asked.params.max_tokens == 30


def test_only_the_first_1024_must_fit():
    """As TGI asks for no more at a time; the text then ends where the room does."""
    wide = TgiLimits(max_total_tokens=2000)
    given = asked(limits=wide, max_new_tokens=3000)
    fit(given, [1] * 976, wide, Bounds(), 8192)
    assert given.asked.params.max_tokens == 1024
    assert "Given: 977 `inputs` tokens and 1024" in refused(fit, given, [1] * 977, wide, Bounds(), 8192)


def test_limits_of_a_server_that_need_not_be_like_tgi():
    limits = TgiLimits.of(Bounds(n=7, stop=9, logprobs=11, prompts=13))
    assert (limits.max_best_of, limits.max_stop_sequences, limits.max_top_n_tokens) == (7, 9, 11)
    assert limits.max_client_batch_size == 13 and limits.max_concurrent_requests is None
    assert (limits.total(100), limits.input(100)) == (100, 99)
    low = TgiLimits(max_total_tokens=50, max_input_tokens=80)
    assert (low.total(100), low.input(100), low.total(20)) == (50, 49, 20)


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    (
        (PromptTooLong("x"), 422, "validation"),
        (ModelError("x"), 424, "generation"),
        (QueueFull("x"), 429, "overloaded"),
        (OutOfCapacity("x"), 503, "overloaded"),
        (EngineFailed("x"), 503, "generation"),
        (InternalError("x"), 500, "incomplete_generation"),
        (Refused("x", code="template_error"), 422, "template_error"),
        (Refused("x", code="no_chat_template"), 422, "template_error"),
        (Refused("x", code="tool_error"), 422, "tool_error"),
        (Refused("x", status=401), 401, "authentication"),
        (Refused("x", status=404), 404, "validation"),
        (Refused("x", status=413), 413, "validation"),
    ),
)
def test_errors_have_tgis_types(error, status, kind):
    refused = as_refused(error)
    assert TGI.status(refused) == status
    told = TGI.error(refused)
    assert set(told) == {"error", "error_type"} and told["error_type"] == kind
    assert TGI_STREAM.as_event(refused) == (status not in (401, 413))


def test_fields_of_bodies():
    assert fields_of(b'{"inputs": [1, {"messages": 2}], "stream": true}') == {"inputs", "stream"}
    for nothing in (b"[]", b"{", b"\xff", b"", b'{"a":' * 100_000):
        assert not fields_of(nothing)
