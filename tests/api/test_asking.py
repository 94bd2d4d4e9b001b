"""From bodies to what the engine is asked; what is refused, by which name and with which words."""

from __future__ import annotations

import json

import pytest

from hibachi.llm.dialects.chat import Conversation
from hibachi.llm.dialects.errors import Refused
from hibachi.llm.dialects.openai import parse as asking
from hibachi.llm.dialects.openai.bodies import Bounds, ChatBody, CompletionBody, EmbeddingBody, read
from hibachi.llm.dialects.openai.parse import ParsedRequest
from hibachi.request import FILTERS, Beams, SamplingParams, Terms

from ..lib.filters import TRIED

# What the server was started with; none of it is a default of SamplingParams.
SERVER = SamplingParams(
    **{f.name: TRIED[f.name].some[-1] for f in FILTERS},
    seed=3,
    max_tokens=99,
    stop=("END",),
    stop_token_ids=(2,),
    ignore_eos=True,
    logit_bias={1: 0.5},
    allowed_token_ids=(1, 2, 3),
    bad_words=("bad",),
    min_tokens=1,
    n=2,
    best_of=3,
    prompt_logprobs=4,
    num_speculative_tokens=5,
)
PLAIN = SamplingParams()
SMALL = Bounds(n=3, prompts=2, logprobs=5, stop=2, stop_length=4, bias=2, token_ids=2, messages=2)
USER = {"role": "user", "content": "a"}


def completion(*, defaults=PLAIN, bounds=SMALL, **fields):
    return asking.completion(read(CompletionBody, json.dumps({"prompt": "a"} | fields).encode()), defaults, bounds)


def chat(*, defaults=PLAIN, bounds=SMALL, **fields):
    return asking.chat(read(ChatBody, json.dumps({"messages": [USER]} | fields).encode()), defaults, bounds)


def embedding(**fields):
    return asking.embedding(read(EmbeddingBody, json.dumps(fields).encode()), SMALL)


def refused(ask, **fields):
    """Its words, the field that it names, and its code; all with status 400."""
    with pytest.raises(Refused) as caught:
        ask(**fields)
    error = caught.value
    assert (error.status, error.kind, error.headers) == (400, "invalid_request_error", {})
    return str(error), error.param, error.code


def prompt(asked):
    """What says how its prompt becomes tokens."""
    return asked.chat or asked


BOTH = pytest.mark.parametrize("ask", [completion, chat])


# ---- what is asked ---------------------------------------------------------------------------------------------------


def test_a_completion_that_says_nothing_more():
    """The server's parameters, but for the length of an answer, which is OpenAI's."""
    assert completion(defaults=SERVER) == ParsedRequest(
        params=SERVER.with_(max_tokens=16),
        terms=Terms(priority=0, tenant="", timeout=None, queue_timeout=None, cache_salt=None),
        stream=False,
        usage=False,
        usage_always=False,
        token_ids=False,
        logprobs=None,
        prompts=["a"],
        special=True,
        echo=False,
        prompt_scores=False,
        unwritten=False,
        chat=None,
    )


def test_a_chat_that_says_nothing_more():
    """It may go on to the end of the context."""
    assert chat(defaults=SERVER) == ParsedRequest(
        params=SERVER.with_(max_tokens=None),
        terms=Terms(priority=0, tenant="", timeout=None, queue_timeout=None, cache_salt=None),
        stream=False,
        usage=False,
        usage_always=False,
        token_ids=False,
        logprobs=None,
        prompts=[],
        truncation=None,
        named_ids=False,
        front="",
        echo=False,
        prompt_scores=False,
        unwritten=False,
        chat=Conversation([{"role": "user", "content": "a"}], {"add_generation_prompt": True}),
    )


# field: [(what is sent, the parameter, its value)]; what counts as nothing in Python still overrules the server.
PARAMETERS = {
    **{f.name: [(x, f.name, x if f.integer else float(x)) for x in TRIED[f.name].right] for f in FILTERS},
    "n": [(1, "n", 1), (3, "n", 3)],
    "best_of": [(2, "best_of", 2), (3, "best_of", 3)],
    "max_tokens": [(1, "max_tokens", 1), (2**31, "max_tokens", 2**31 - 1)],
    "min_tokens": [(0, "min_tokens", 0), (16, "min_tokens", 16)],
    "num_speculative_tokens": [(n, "num_speculative_tokens", n) for n in (0, 3, 2**31 - 1)],
    "stop": [("x", "stop", ("x",)), ([], "stop", ()), (["x", "four"], "stop", ("x", "four"))],
    "bad_words": [([], "bad_words", ()), (["x", "four"], "bad_words", ("x", "four"))],
    "stop_token_ids": [([], "stop_token_ids", ()), ([0, 7], "stop_token_ids", (0, 7))],
    "allowed_token_ids": [([0], "allowed_token_ids", (0,)), ([7, 8], "allowed_token_ids", (7, 8))],
    "ignore_eos": [(False, "ignore_eos", False), (True, "ignore_eos", True)],
    "include_stop_str_in_output": [(False, "include_stop", False), (True, "include_stop", True)],
    "logit_bias": [({"7": -100, "8": 100}, "logit_bias", ((7, -100.0), (8, 100.0)))],
    "prompt_logprobs": [(0, "prompt_logprobs", 0), (5, "prompt_logprobs", 5)],
    "seed": [
        (0, "seed", 0),
        (5, "seed", 5),
        (-1, "seed", 18446744073709551615),
        (-5, "seed", 18446744073709551611),  # and not 5, which draws something else
        (18446744073709551615, "seed", 18446744073709551615),
        (18446744073709551616, "seed", 0),
    ],
}
SENT = [pytest.param(f, *row, id=f"{f}-{row[0]}") for f, rows in PARAMETERS.items() for row in rows]


@BOTH
@pytest.mark.parametrize("field, sent, name, value", SENT)
def test_a_parameter_overrules_the_server(ask, field, sent, name, value):
    """Alone, the others are the server's. At the edges of what is allowed."""
    found = ask(defaults=SERVER, **{"max_tokens": 16} | {field: sent}).params
    assert found == SERVER.with_(**{"max_tokens": 16} | {name: value})
    if field != "seed":  # True == 1
        assert type(getattr(found, name)) is type(value)


@BOTH
@pytest.mark.parametrize("field", PARAMETERS)
def test_null_leaves_a_parameter_to_the_server(ask, field):
    assert ask(defaults=SERVER, **{field: None}) == ask(defaults=SERVER)


def test_negative_seeds_are_seeds_of_their_own():
    assert [completion(seed=s).params.seed for s in (5, -5)] == [5, 2**64 - 5]


# What is sent, the parameter that is named, and what is said.
WRONG = [
    ({"temperature": -0.01}, "temperature", "temperature must be a finite number >= 0 (0 is greedy); got -0.01."),
    ({"n": 0}, "n", "n must be an integer from 1 to 16384; got 0."),
    ({"n": 4}, "n", "n must be at most 3; got 4."),
    ({"n": 3, "best_of": 2}, "best_of", "best_of must be an integer from n, 3, to 16384; got 2."),
    ({"best_of": 4}, "best_of", "best_of must be at most 3; got 4."),
    ({"max_tokens": -1}, "max_tokens", "max_tokens must be an integer >= 1 (or None: no limit); got -1."),
    ({"min_tokens": 8, "max_tokens": 7}, "min_tokens", "min_tokens must be at most max_tokens, 7; got 8."),
    ({"stop": ""}, "stop", "stop must be non-empty strings; got ''."),
    ({"stop": ["a", "b", "c"]}, "stop", "stop has 3 entries; at most 2 are served."),
    ({"stop": "fiver"}, "stop", "stop has 5 characters; at most 4 are served."),
    ({"stop": ["a", "fiver"]}, "stop", "stop has 5 characters; at most 4 are served."),
    ({"bad_words": ["a", "b", "c"]}, "bad_words", "bad_words has 3 entries; at most 2 are served."),
    ({"bad_words": ["a", "fiver"]}, "bad_words", "bad_words has 5 characters; at most 4 are served."),
    ({"stop_token_ids": [1, 2, 3]}, "stop_token_ids", "stop_token_ids has 3 entries; at most 2 are served."),
    ({"allowed_token_ids": [1, 2, 3]}, "allowed_token_ids", "allowed_token_ids has 3 entries; at most 2 are served."),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "logit_bias must be for token ids, integers >= 0; got {-1: 1.0}."),
    ({"logit_bias": {"the": 1}}, "logit_bias", "logit_bias maps token ids to numbers."),
    ({"logit_bias": {"1": 1, "2": 1, "3": 1}}, "logit_bias", "logit_bias has 3 entries; at most 2 are served."),
    ({"prompt_logprobs": 6}, "prompt_logprobs", "prompt_logprobs must be at most 5; got 6."),
    ({"timeout": 0}, "timeout", "timeout must be seconds > 0 (or None: any time); got 0.0."),
    ({"queue_timeout": 0}, "queue_timeout", "queue_timeout must be seconds > 0 (or None: any time); got 0.0."),
    ({"stream_options": {}}, "stream_options", "stream_options needs stream to be true."),
]


@BOTH
@pytest.mark.parametrize("fields, param, message", WRONG, ids=[json.dumps(fields) for fields, _, _ in WRONG])
def test_what_is_out_of_range(ask, fields, param, message):
    assert refused(ask, **fields) == (message, param, "invalid_value")


@BOTH
def test_texts_are_bounded_where_the_server_says_so(ask):
    """Each stop string and each bad word, exactly there."""
    for field in ("stop", "bad_words"):
        fits = ask(bounds=Bounds(), **{field: ["x" * 1024]}).params
        assert getattr(fits, field) == ("x" * 1024,)
        message, param, _ = refused(ask, bounds=Bounds(), **{field: ["x" * 1025]})
        assert (message, param) == (f"{field} has 1025 characters; at most 1024 are served.", field)


@BOTH
def test_on_what_terms(ask):
    found = ask(timeout=0.001, queue_timeout=1e300, cache_salt="salt").terms
    assert found == Terms(priority=0, tenant="", timeout=0.001, queue_timeout=3155760000.0, cache_salt="salt")
    found = ask(timeout=1e300, queue_timeout=0.5, cache_salt="").terms
    assert found == Terms(priority=0, tenant="", timeout=3155760000.0, queue_timeout=0.5, cache_salt="")


@BOTH
def test_streams_and_what_they_tell(ask):
    def told(**fields):
        found = ask(**fields)
        return found.stream, found.usage, found.usage_always, found.token_ids

    assert told(stream=False) == told(stream=None, stream_options=None) == (False, False, False, False)
    assert told(stream=True) == told(stream=True, stream_options={}) == (True, False, False, False)
    assert told(stream=True, stream_options={"include_usage": True}) == (True, True, False, False)
    assert told(stream=True, stream_options={"continuous_usage_stats": True}) == (True, False, True, False)
    assert told(stream=True, stream_options={"include_obfuscation": True}) == (True, False, False, False)
    assert told(return_token_ids=True) == (False, False, False, True)


@BOTH
def test_the_best_of_several_cannot_be_streamed(ask):
    message, param, _ = refused(ask, n=1, best_of=2, stream=True)
    assert (message, param) == ("best_of cannot be streamed: which are the best is known at the end.", "best_of")
    assert refused(ask, defaults=SERVER, stream=True)[1] == "best_of"  # the server's own is no other
    assert ask(n=2, best_of=2, stream=True).stream and ask(n=1, best_of=2).params.runs == 2


# ---- completions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt, prompts",
    [
        ("a", ["a"]),
        ("", [""]),
        (["a"], ["a"]),
        (["a", ""], ["a", ""]),
        ([7, 0, 9], [[7, 0, 9]]),
        ([[7], [0, 9]], [[7], [0, 9]]),
        (["a", [7]], ["a", [7]]),
        ([[7], "a"], [[7], "a"]),
    ],
)
def test_prompts(prompt, prompts):
    """T-37 is otherwise here: several are served, as many as the server says."""
    assert completion(prompt=prompt).prompts == prompts
    assert embedding(input=prompt) == prompts


@pytest.mark.parametrize(
    "prompt, message, code",
    [
        ([], "{} is empty: send a text, token ids, or a list of these.", "empty_array"),
        ([7, "a"], "{} mixes token ids with other things.", "invalid_type"),
        ([7, [8]], "{} mixes token ids with other things.", "invalid_type"),
        (["a", 7], "{} mixes token ids with other things.", "invalid_type"),
        ([[7], 8], "{} mixes token ids with other things.", "invalid_type"),
        ([[]], "{} holds an empty list.", "empty_array"),
        ([[7], []], "{} holds an empty list.", "empty_array"),
        (["a", "b", "c"], "{} has 3 entries; at most 2 are served.", "invalid_value"),
        ([[7], [8], [9]], "{} has 3 entries; at most 2 are served.", "invalid_value"),
    ],
)
def test_prompts_that_are_none(prompt, message, code):
    assert refused(completion, prompt=prompt) == (message.format("prompt"), "prompt", code)
    assert refused(embedding, input=prompt) == (message.format("input"), "input", code)


def test_special_tokens_may_be_left_out():
    assert completion(add_special_tokens=False).special is False
    assert completion(add_special_tokens=True).special is True


def test_log_probabilities_of_a_completion():
    """How many beside the token: 0 are asked for as well as 5."""
    for n in (0, 5):
        found = completion(logprobs=n)
        assert found.logprobs == found.params.logprobs == n
        assert found.params.prompt_logprobs is None and not found.prompt_scores
    none = completion(defaults=SERVER)
    assert none.logprobs is None and none.params.logprobs is None
    said = "logprobs must be an integer >= 0 (or None: none); got -1."
    assert refused(completion, logprobs=-1) == (said, "logprobs", "invalid_value")
    said = "logprobs must be at most 5; got 6."
    assert refused(completion, logprobs=6) == (said, "logprobs", "invalid_value")


def test_an_echo_scores_the_prompt_if_logprobs_are_asked_for():
    found = completion(echo=True, logprobs=0)
    assert found.echo is True and found.params.prompt_logprobs == 0 and not found.prompt_scores
    assert completion(echo=True, logprobs=3).params.prompt_logprobs == 3
    assert completion(echo=True).params.prompt_logprobs is None
    for off in (False, None):
        found = completion(echo=off, logprobs=3)
        assert found.echo is False and found.params.prompt_logprobs is None


def test_an_echo_does_not_change_how_many_log_probabilities_of_the_prompt_were_asked_for():
    for n, beside in ((4, 1), (1, 4), (0, 2), (2, 0)):
        found = completion(echo=True, logprobs=beside, prompt_logprobs=n)
        assert (found.params.prompt_logprobs, found.params.logprobs, found.logprobs) == (n, beside, beside)
        assert found.prompt_scores is True


@BOTH
def test_log_probabilities_of_a_prompt(ask):
    found = ask(prompt_logprobs=0)
    assert found.params.prompt_logprobs == 0 and found.logprobs is None and not found.echo
    if ask is completion:
        assert found.prompt_scores is True


def test_no_new_token_is_for_an_echo():
    """K-29: without one it is refused. With one, the token that is made anyhow is not written."""
    found = completion(max_tokens=0, echo=True)
    assert found.unwritten is True and found.echo is True and found.params.max_tokens == 1
    assert completion(max_tokens=1, echo=True).unwritten is False
    for off in ({}, {"echo": False}, {"echo": None}):
        said = "max_tokens must be at least 1; 0 is for echo."
        assert refused(completion, max_tokens=0, **off) == (said, "max_tokens", "invalid_value")


# ---- chats -----------------------------------------------------------------------------------------------------------


def test_how_long_an_answer_may_be():
    """By either name, or both if they agree."""
    for fields in ({"max_tokens": 7}, {"max_completion_tokens": 7}, {"max_tokens": 7, "max_completion_tokens": 7}):
        assert chat(**fields).params.max_tokens == 7
    assert chat(max_tokens=None, max_completion_tokens=7).params.max_tokens == 7
    assert chat(max_tokens=7, max_completion_tokens=None).params.max_tokens == 7
    message, param, code = refused(chat, max_tokens=7, max_completion_tokens=8)
    assert message == (
        "max_tokens is the old name of max_completion_tokens; they say different things. Send one of them."
    )
    assert (param, code) == ("max_tokens", "invalid_value")
    said = "max_tokens must be an integer >= 1 (or None: no limit); got 0."
    assert refused(chat, max_tokens=0) == (said, "max_tokens", "invalid_value")
    said = "max_completion_tokens must be an integer >= 1 (or None: no limit); got 0."
    assert refused(chat, max_completion_tokens=0) == (said, "max_completion_tokens", "invalid_value")
    assert chat(max_tokens=7).max_tokens == 7 and chat().max_tokens is None
    assert completion(max_tokens=7).max_tokens == 7 and completion().max_tokens is None


def test_log_probabilities_of_a_chat():
    def told(**fields):
        found = chat(**fields)
        assert found.params.logprobs == found.logprobs
        return found.logprobs

    assert told() is told(logprobs=False) is told(logprobs=None, top_logprobs=None) is told(top_logprobs=0) is None
    assert told(logprobs=True) == 0
    assert told(logprobs=True, top_logprobs=0) == 0
    assert told(logprobs=True, top_logprobs=5) == 5
    for off in ({}, {"logprobs": False}, {"logprobs": None}):
        said = "top_logprobs needs logprobs to be true."
        assert refused(chat, top_logprobs=2, **off) == (said, "top_logprobs", "invalid_value")
    for wrong in (-1, 6):
        assert refused(chat, logprobs=True, top_logprobs=wrong)[2] == "invalid_value"


def test_variables_of_the_template():
    found = chat(add_generation_prompt=False, chat_template_kwargs={"a": 1, "add_generation_prompt": True})
    assert found.chat.variables == {"a": 1, "add_generation_prompt": False}
    assert chat(chat_template_kwargs={}).chat.variables == {"add_generation_prompt": True}
    assert chat(chat_template_kwargs=None).chat.variables == {"add_generation_prompt": True}


def test_messages():
    """The parts of a text become one; what else is in a message goes to the template as it is."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    given = [{"role": "system", "content": "Be brief.", "name": "x"}, {"role": "user", "content": parts, "weight": 1}]
    assert chat(messages=given).chat.messages == [
        {"role": "system", "content": "Be brief.", "name": "x"},
        {"role": "user", "content": "a\nb", "weight": 1},
    ]
    refusal = {"type": "refusal", "refusal": "No."}
    (found,) = chat(messages=[{"role": "assistant", "content": [refusal]}]).chat.messages
    assert found == {"role": "assistant", "content": "No."}


def test_messages_that_are_none():
    empty = 'messages is empty: send at least one, such as {"role": "user", "content": "Hello"}.'
    assert refused(chat, messages=[]) == (empty, "messages", "empty_array")
    many = "messages has 3 entries; at most 2 are served."
    assert refused(chat, messages=[USER] * 3) == (many, "messages", "invalid_value")
    for without in ({"content": "a"}, {"role": None, "content": "a"}, {"role": 7, "content": "a"}):
        expected = "messages[1] has no role.", "messages[1].role", "missing_required_parameter"
        assert refused(chat, messages=[USER, without]) == expected
    for other in (7, True, {"type": "text", "text": "a"}):
        expected = "messages[0].content must be a text or a list of parts.", "messages[0].content", "invalid_type"
        assert refused(chat, messages=[{"role": "user", "content": other}]) == expected


@pytest.mark.parametrize(
    "part, kind",
    [
        ({"type": "image_url", "image_url": {"url": "a"}}, "'image_url'"),
        ({"type": "text", "text": 7}, "'text'"),
        ({"type": "text", "refusal": "a"}, "'text'"),
        ({"type": "refusal", "text": "a"}, "'refusal'"),
        ({"text": "a"}, "'None'"),
        ("a", "'None'"),
        (None, "'None'"),
        ({"type": "x" * 41}, "'" + "x" * 40 + "'"),
    ],
)
def test_parts_that_are_no_text(part, kind):
    message, param, code = refused(
        chat, messages=[USER, {"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    )
    assert message == f"messages[1].content: only parts of text are served; got {kind}."
    assert (param, code) == ("messages[1].content", "unsupported")


# ---- what is not served ----------------------------------------------------------------------------------------------

UNSERVED = {
    "logprob_token_ids": "logprobs tells of the likeliest tokens",
    "repetition_detection": "Texts end at stop, at stop_token_ids and at max_tokens",
}
UNSERVED_COMPLETIONS = UNSERVED | {
    "suffix": "Insertion is not served",
    "prompt_embeds": "Embeddings are taken in Python only, by hibachi.LLM",
}
UNSERVED_CHATS = UNSERVED | {
    "chat_template": "It is given at the start (--chat-template)",
    "audio": "Only text is served",
    "functions": "Use tools in its place",
    "function_call": "Use tools in its place",
    "web_search_options": "Nothing is searched",
    "moderation": "Nothing is judged",
}


@pytest.mark.parametrize(
    "ask, field, why",
    [(completion, f, w) for f, w in UNSERVED_COMPLETIONS.items()] + [(chat, f, w) for f, w in UNSERVED_CHATS.items()],
)
def test_what_is_not_served(ask, field, why):
    """By its name, even if what it says amounts to nothing; null is as if it were not there."""
    for value in ("", "x") if field == "chat_template" else ("x", {}, False, 0):
        expected = f"{field} is not supported: {why}.", field, "unsupported_parameter"
        assert refused(ask, **{field: value}) == expected
    assert ask(**{field: None}) == ask()


def test_modalities():
    assert chat(modalities=["text"]) == chat(modalities=None) == chat()
    for other in (["audio"], ["text", "audio"], [], "text"):
        said = "modalities is not supported: Only text is served."
        assert refused(chat, modalities=other) == (said, "modalities", "unsupported_parameter")


def test_verbosity():
    assert chat(verbosity="medium") == chat(verbosity=None) == chat()
    for other in ("low", "high", 1):
        said = 'verbosity is not supported: The models served have no such setting, so only "medium" is.'
        assert refused(chat, verbosity=other) == (said, "verbosity", "unsupported_parameter")


def tool(name="look", **more):
    return {"type": "function", "function": {"name": name, **more}}


def test_tools_are_checked_and_shown():
    """More of it in tests/tools/test_asked.py."""
    asked = chat(tools=[tool(strict=True, parameters=None)], tool_choice="required", parallel_tool_calls=False)
    assert asked.chat.variables["tools"] == [tool(parameters={"type": "object", "properties": {}})]
    box = asked.chat.toolbox
    assert (box.mode, box.parallel, box.tools[0].name, box.tools[0].strict) == ("required", False, "look", True)
    assert chat(tools=[tool()], tool_choice="none") == chat(tools=[]) == chat(tools=None) == chat()
    assert chat(tool_choice="auto") == chat(tool_choice="none") == chat(tool_choice=None) == chat()


@pytest.mark.parametrize(
    "fields, param, code",
    [
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": [tool()], "tool_choice": tool("other")}, "tool_choice", "invalid_value"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name", "invalid_value"),
        ({"tools": [tool()] * 1025}, "tools", "invalid_value"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters.type", "invalid_value"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0].type", "unsupported_parameter"),
        ({"tools": [{}]}, "tools[0].function", "invalid_value"),
    ],
)
def test_tools_that_are_wrong_are_refused_by_name(fields, param, code):
    assert refused(chat, bounds=Bounds(), **fields)[1:] == (param, code)


def test_reasoning():
    assert chat(include_reasoning=False).include_reasoning is False
    assert chat(include_reasoning=True) == chat(include_reasoning=None) == chat()
    assert chat(reasoning_effort="low").chat.effort == "low" and chat(reasoning_effort=None) == chat()


# ---- vLLM's fields ---------------------------------------------------------------------------------------------------

# field: what it may say, and what it may not.
EITHER = {
    "thinking_token_budget": (-1, 0),
    "stream_interval": (1, 2),
    "watermarking": (False, True),
    "routed_experts_prompt_start": (0, 1),
    "return_token_offsets": (False, True),
    "return_mm_kwargs": (True, False),
    "vllm_xargs": ({}, {"a": 1}),
    "kv_transfer_params": ({}, {"a": 1}),
    "ec_transfer_params": ({}, {"a": 1}),
}
CHATS = {
    "return_prompt_text": (False, True),
    "media_io_kwargs": ({}, {"image": {}}),
    "mm_processor_kwargs": ({}, {"a": 1}),
}


@pytest.mark.parametrize(
    "ask, field", [(completion, f) for f in EITHER] + [(chat, f) for f in EITHER | CHATS], ids=lambda x: str(x)[:20]
)
def test_what_may_say_its_default_only(ask, field):
    default, other = (EITHER | CHATS)[field]
    assert ask(**{field: default}) == ask(**{field: None}) == ask()
    message, param, code = refused(ask, **{field: other})
    assert message.startswith(f"{field} is not supported: ") and (param, code) == (field, "unsupported_parameter")
    assert message.endswith(f", so only {json.dumps(default)} is.")
    assert asking.DEFAULTS.keys() == (EITHER | CHATS).keys()


@BOTH
def test_beams_as_vllm_spells_them(ask):
    assert ask(use_beam_search=False, length_penalty=1) == ask() and ask().params.beams is None
    assert ask(use_beam_search=True, n=2).params.beams == Beams()
    assert ask(use_beam_search=True, length_penalty=0.5, n=2).params.beams == Beams(length_penalty=0.5)
    assert refused(ask, length_penalty=0.5)[1] == "length_penalty"
    assert refused(ask, use_beam_search=True, length_penalty=1e9)[0].startswith("length_penalty must be")
    assert refused(ask, use_beam_search=True, best_of=3)[1] == "best_of"


@BOTH
def test_special_tokens(ask):
    assert ask(skip_special_tokens=False).params.skip_special_tokens is False
    assert ask(skip_special_tokens=True) == ask(skip_special_tokens=None) == ask()
    assert ask(spaces_between_special_tokens=False) == ask(spaces_between_special_tokens=True) == ask()
    assert prompt(ask(add_special_tokens=True)).special and not prompt(ask(add_special_tokens=False)).special


@BOTH
def test_how_much_of_a_prompt_is_kept(ask):
    assert prompt(ask(truncate_prompt_tokens=3)).truncation.cut([1, 2, 3, 4], 100) == [2, 3, 4]
    assert prompt(ask(truncate_prompt_tokens=3, truncation_side="left")).truncation.cut([1, 2, 3, 4], 100) == [2, 3, 4]
    assert prompt(ask(truncate_prompt_tokens=3, truncation_side="right")).truncation.cut([1, 2, 3, 4], 100) == [1, 2, 3]
    assert prompt(ask(truncate_prompt_tokens=10**30)).truncation.cut([1, 2, 3, 4], 100) == [1, 2, 3, 4]
    fitting = prompt(ask(truncate_prompt_tokens=-1, max_tokens=4)).truncation
    assert fitting.cut(list(range(20)), 10) == list(range(14, 20)) and fitting.cut([1], 3) == [1]
    assert fitting.cut([1, 2], 3) == [2]  # one at least; that there is no room is said later
    assert prompt(ask(truncate_prompt_tokens=-1)).truncation.cut(list(range(20)), 10) == list(range(11, 20))
    for n in (0, -2, -(10**30)):
        assert refused(ask, truncate_prompt_tokens=n)[1:] == ("truncate_prompt_tokens", "invalid_value")
    assert refused(ask, truncation_side="left")[1:] == ("truncation_side", "invalid_value")


def test_tokens_by_their_ids():
    assert completion(logprobs=0, return_tokens_as_token_ids=True).named_ids is True
    assert chat(logprobs=True, return_tokens_as_token_ids=True).named_ids is True
    assert chat(return_tokens_as_token_ids=False) == chat()
    for ask in (completion, chat):
        message, param, _ = refused(ask, return_tokens_as_token_ids=True)
        assert param == "return_tokens_as_token_ids" and message.endswith(" needs logprobs.")


def test_the_last_message_of_a_chat_goes_on():
    assert chat(continue_final_message=False) == chat(continue_final_message=None) == chat()
    asked = chat(continue_final_message=True, add_generation_prompt=False)
    assert asked.chat.open_end is True and asked.chat.variables == {"add_generation_prompt": False}
    for more in ({}, {"add_generation_prompt": True}):
        message, param, code = refused(chat, continue_final_message=True, **more)
        assert (param, code) == ("continue_final_message", "invalid_value") and "add_generation_prompt" in message


def test_a_chat_that_echoes():
    """As vLLM: the last message, if it is the assistant's."""
    said = {"role": "assistant", "content": "Once "}
    assert chat(echo=True, messages=[USER, said]).front == "Once "
    assert chat(echo=True).front == chat(messages=[USER, said]).front == ""
    assert chat(echo=True, messages=[USER, {"role": "assistant", "content": None}]).front == ""


def test_documents_go_to_the_template():
    documents = [{"title": "a", "text": "b"}]
    assert chat(documents=documents).chat.variables == {"add_generation_prompt": True, "documents": documents}
    assert chat(documents=[]) == chat(documents=None) == chat()


@pytest.mark.parametrize("ask", [completion, chat, embedding])
def test_what_changes_nothing(ask):
    """Fields that are about OpenAI's own service."""
    own = {"input": "a"} if ask is embedding else {}
    for field in (
        *("user", "store", "metadata", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "session_id"),
    ):
        assert ask(**own, **{field: {"a": 1}}) == ask(**own)
    if ask is chat:
        assert chat(parallel_tool_calls=False) == chat(parallel_tool_calls=True) == chat()


@BOTH
def test_what_an_answer_may_be(ask):
    assert ask(prediction=None) == ask() and ask().prediction is None
    assert ask(prediction={"type": "content", "content": "a b"}).prediction == "a b"
    parts = [{"type": "text", "text": text} for text in ("a ", "", "b")]
    assert ask(prediction={"type": "content", "content": parts}).prediction == "a b"
    assert ask(prediction={"type": "content", "content": []}).prediction == ""
    assert ask(prediction={"type": "content", "content": "a"}, n=2).params.n == 2


@BOTH
@pytest.mark.parametrize(
    "given, param",
    [
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": "a", "more": 1}, "prediction.more"),
        ({"type": "content", "content": [{"type": "image_url", "image_url": "a"}]}, "prediction.content[0].type"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content[0].text"),
        ({"type": "content", "content": [{"text": "a"}]}, "prediction.content[0].type"),
    ],
)
def test_a_prediction_that_is_none_is_refused_by_name(ask, given, param):
    assert refused(ask, prediction=given)[1] == param


def test_the_size_of_a_vector():
    """The most is what the model has, which is known when there is one."""
    assert embedding(input="a", dimensions=None) == embedding(input="a", dimensions=10**9) == ["a"]
    assert embedding(input="a", dimensions=1) == ["a"]
    for n in (0, -1, -(10**30)):
        assert refused(embedding, input="a", dimensions=n)[1:] == ("dimensions", "invalid_value")


def test_how_large_the_form_of_a_chat_is():
    tool = {"type": "function", "function": {"name": "look", "description": "a" * 500}}
    assert chat().chat.size == 0
    assert 500 < (alone := chat(tools=[tool]).chat.size) < 600
    schema = {"type": "object", "properties": {"b" * 1000: {}}}
    assert 1000 < chat(guided_json=schema).chat.size < 1100
    assert chat(tools=[tool], guided_json=schema).chat.size > alone + 1000
