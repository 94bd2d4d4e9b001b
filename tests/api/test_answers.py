"""What answers look like, byte by byte; and OpenAI's description of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from msgspec import UNSET

from hibachi.llm.dialects.errors import Refused, body_of
from hibachi.llm.dialects.openai.answers import (
    DONE,
    ChatAnswer,
    ChatChoice,
    ChatLogprobs,
    ChatMessage,
    ChatPiece,
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    Function,
    FunctionDelta,
    TextOffsets,
    TokenTexts,
    ToolCall,
    ToolCallDelta,
    chat_logprobs,
    embeddings,
    encode,
    event,
    finite,
    joined,
    model,
    models,
    prompt_scores,
    usage,
)
from hibachi.llm.dialects.openai.answers import completion_logprobs as told_with_offsets

from ..lib.described import description

INF = float("inf")
# Token 3 is a dash, and 4 and 5 are its parts; 6 is the same text as 1, by another spelling.
RAW = [b"He", b"llo", b" you", b"\xe2\x80\x94", b"\xe2", b"\x80\x94", b"llo", b"\x00\x0f\xff"]


def text(ids):
    return b"".join(RAW[i] for i in ids).decode(errors="replace")


@pytest.fixture
def words():
    return TokenTexts(RAW.__getitem__, text)


def completion_logprobs(ids, scores, most, words, at=0, **named):
    """Of tokens whose text is in the answer."""
    return told_with_offsets(ids, scores, most, words, TextOffsets(words, at).of(ids, words.text(ids)), **named)


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_what_tokens_look_like(words):
    assert words(0) == ("He", [72, 101])
    assert words(3) == ("—", [226, 128, 148])
    assert words(4) == ("bytes:\\xe2", [226])
    assert words(5) == ("bytes:\\x80\\x94", [128, 148])
    assert words(7) == ("bytes:\\x00\\x0f\\xff", [0, 15, 255])
    assert words.text([0, 1, 4, 5]) == "Hello—"


def test_a_token_is_looked_up_once():
    asked = []
    words = TokenTexts(lambda i: asked.append(i) or RAW[i], text)
    assert [words(i) for i in (0, 1, 0, 1)] == [("He", [72, 101]), ("llo", [108, 108, 111])] * 2
    assert asked == [0, 1]


# ---- log-probabilities -----------------------------------------------------------------------------------------------


def test_log_probabilities_of_a_completion(words):
    """As many as were asked for, the likeliest first, and the token itself; offsets are characters, not bytes."""
    scores = [{1: -2.0, 2: -3.0, 0: -0.25}, {1: -5.0, 2: -0.5, 0: -1.0}, {3: -0.125, 0: -4.0}, {2: 0.0}]
    assert completion_logprobs([0, 1, 3, 2], scores, 2, words) == CompletionLogprobs(
        tokens=["He", "llo", "—", " you"],
        token_logprobs=[-0.25, -5.0, -0.125, 0.0],
        top_logprobs=[
            {"He": -0.25, "llo": -2.0},
            {" you": -0.5, "He": -1.0, "llo": -5.0},
            {"—": -0.125, "He": -4.0},
            {" you": 0.0},
        ],
        text_offset=[0, 2, 5, 6],
    )
    found = completion_logprobs([0, 1], [{0: -1.0, 2: -0.5, 1: -2.0}, {0: -0.5, 1: -1.0}], 3, words)
    assert [list(top) for top in found.top_logprobs] == [[" you", "He", "llo"], ["He", "llo"]]


def test_of_the_token_alone(words):
    found = completion_logprobs([1], [{0: -0.5, 1: -1.0}], 0, words)
    assert found == CompletionLogprobs(["llo"], [-1.0], [{"llo": -1.0}], [0])


def test_the_first_token_of_a_prompt_has_none(words):
    found = completion_logprobs([0, 1], [None, {1: -1.0}], 1, words)
    assert found == CompletionLogprobs(["He", "llo"], [None, -1.0], [None, {"llo": -1.0}], [0, 2])


def test_offsets_go_on_after_what_was_written(words):
    assert completion_logprobs([0, 2, 1], [{0: 0.0}, {2: 0.0}, {1: 0.0}], 0, words, 7).text_offset == [7, 9, 13]
    assert completion_logprobs([], [], 3, words, 7) == CompletionLogprobs([], [], [], [])


def test_offsets_are_places_in_the_text_however_it_comes(words):
    """Parts of a letter, a token that is not in the text, and what a stop string has cut off."""
    ids, told = [0, 4, 5, 7, 2, 1, 1], "He— youllo"
    assert TextOffsets(words).of(ids, told) == [0, 2, 2, 3, 3, 7, 10]
    places = TextOffsets(words)
    parts = [([0, 4], "He"), ([5, 7], "—"), ([2], " you"), ([], ""), ([1, 1], "llo")]
    assert [at for some, piece in parts for at in places.of(some, piece)] == [0, 2, 2, 3, 3, 7, 10]
    assert TextOffsets(words, 5).of([2, 0], "you He") == [5, 8]


def test_tokens_of_the_same_text_share_an_entry(words):
    """That of the likelier one: 1 and 6 look alike."""
    assert completion_logprobs([0], [{0: -3.0, 6: -2.0, 1: -1.0}], 3, words).top_logprobs == [{"llo": -1.0, "He": -3.0}]
    found = completion_logprobs([6], [{1: -1.0, 6: -9.0}], 1, words)
    assert (found.token_logprobs, found.top_logprobs) == ([-9.0], [{"llo": -1.0}])


def test_a_prompt_and_its_completion(words):
    prompt = completion_logprobs([0], [None], 1, words)
    new = completion_logprobs([1, 2], [{1: -1.0}, {2: -2.0}], 1, words, 2)
    whole = CompletionLogprobs(
        tokens=["He", "llo", " you"],
        token_logprobs=[None, -1.0, -2.0],
        top_logprobs=[None, {"llo": -1.0}, {" you": -2.0}],
        text_offset=[0, 2, 5],
    )
    assert joined([prompt, None, new]) == whole
    assert prompt.tokens == ["He"] and new.tokens == ["llo", " you"]


def test_log_probabilities_of_a_chat(words):
    """With bytes, from which half a letter can be put together; the likeliest first, and no more than asked for."""
    found = chat_logprobs([0, 4], [{1: -2.0, 0: -0.25, 2: -3.0}, {0: -0.5, 4: -7.0}], 2, words)
    assert json.loads(encode(found)) == {
        "content": [
            {
                "token": "He",
                "logprob": -0.25,
                "bytes": [72, 101],
                "top_logprobs": [
                    {"token": "He", "logprob": -0.25, "bytes": [72, 101]},
                    {"token": "llo", "logprob": -2.0, "bytes": [108, 108, 111]},
                ],
            },
            {
                "token": "bytes:\\xe2",
                "logprob": -7.0,
                "bytes": [226],
                "top_logprobs": [
                    {"token": "He", "logprob": -0.5, "bytes": [72, 101]},
                    {"token": "bytes:\\xe2", "logprob": -7.0, "bytes": [226]},
                ],
            },
        ],
        "refusal": None,
    }
    alone = chat_logprobs([4], [{0: -0.5, 4: -7.0}], 0, words)
    assert encode(alone) == (
        b'{"content":[{"token":"bytes:\\\\xe2","logprob":-7.0,"bytes":[226],"top_logprobs":[]}],"refusal":null}'
    )
    assert encode(ChatLogprobs([])) == b'{"content":[],"refusal":null}'


def test_tokens_by_their_ids(words):
    """return_tokens_as_token_ids: names that are all different; places and bytes are those of the texts."""
    scores = [{0: -0.5, 6: -1.0}, {4: -7.0}]
    found = completion_logprobs([0, 4], scores, 2, words, 3, named_ids=True)
    plain = completion_logprobs([0, 4], scores, 2, words, 3)
    assert found.tokens == ["token_id:0", "token_id:4"] and found.text_offset == plain.text_offset
    assert found.top_logprobs == [{"token_id:0": -0.5, "token_id:6": -1.0}, {"token_id:4": -7.0}]
    assert found.token_logprobs == plain.token_logprobs
    spoken, plainly = (chat_logprobs([0, 4], scores, 2, words, named_ids=named).content for named in (True, False))
    assert [s.token for s in spoken] == found.tokens and [t.token for t in spoken[0].top_logprobs] == [
        "token_id:0",
        "token_id:6",
    ]
    assert [s.bytes for s in spoken] == [s.bytes for s in plainly]


@pytest.mark.parametrize("tell", [completion_logprobs, chat_logprobs])
def test_no_token_is_left_out_in_silence(tell, words):
    with pytest.raises(ValueError, match="shorter"):
        tell([0, 1], [{0: -1.0}], 1, words)


def test_scores_of_a_prompt_have_ranks(words):
    found = prompt_scores([None, {0: -2.0, 1: -0.5, 4: -INF}, {2: -1.0}], words)
    assert found == [
        None,
        {
            "1": {"logprob": -0.5, "rank": 1, "decoded_token": "llo"},
            "0": {"logprob": -2.0, "rank": 2, "decoded_token": "He"},
            "4": {"logprob": -9999.0, "rank": 3, "decoded_token": "bytes:\\xe2"},
        },
        {"2": {"logprob": -1.0, "rank": 1, "decoded_token": " you"}},
    ]
    assert prompt_scores([], words) == []


def test_what_is_impossible_is_told_as_a_number(words):
    """-9999, as OpenAI does: JSON has no infinity, and null would say that there is none."""
    assert [finite(p) for p in (-INF, -1e30, -9999.5, -9998.5, -0.0, 0.0)] == [-9999, -9999, -9999, -9998.5, 0, 0]
    assert type(finite(np.float32(-1.5))) is float
    scores = [{0: -0.5, 1: -INF}]
    assert encode(completion_logprobs([1], scores, 2, words)) == (
        b'{"tokens":["llo"],"token_logprobs":[-9999.0],"top_logprobs":[{"He":-0.5,"llo":-9999.0}],"text_offset":[0]}'
    )
    assert encode(completion_logprobs([1], scores, 0, words).top_logprobs) == b'[{"llo":-9999.0}]'
    assert encode(chat_logprobs([1], scores, 2, words)).count(b'"logprob":-9999.0') == 2
    assert encode(prompt_scores(scores, words)).count(b'"logprob":-9999.0') == 1


# ---- answers ---------------------------------------------------------------------------------------------------------


def test_usage():
    """K-30: prompt and completion make up the total, and what the cache gave is told."""
    assert encode(usage(5, 7)) == b'{"prompt_tokens":5,"completion_tokens":7,"total_tokens":12}'
    assert encode(usage(5, 0, 0)) == (
        b'{"prompt_tokens":5,"completion_tokens":0,"total_tokens":5,"prompt_tokens_details":{"cached_tokens":0}}'
    )
    assert encode(usage(40, 2, 32).prompt_tokens_details) == b'{"cached_tokens":32}'


COMPLETION = CompletionAnswer(
    "cmpl-1", "text_completion", 1700000000, "tiny", [CompletionChoice(0, "Hi", None, "stop")]
)
CHAT = ChatAnswer(
    "chatcmpl-1",
    "chat.completion",
    1700000000,
    "tiny",
    [ChatChoice(0, ChatMessage("assistant", "Hi"), None, "length")],
    usage(5, 1, 0),
)


def chunk(*pieces, used=UNSET):
    return ChatAnswer("chatcmpl-1", "chat.completion.chunk", 1700000000, "tiny", list(pieces), used)


def test_a_completion():
    """What was not asked for is not there; what OpenAI always tells is, as null."""
    assert encode(COMPLETION) == (
        b'{"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"tiny",'
        b'"choices":[{"index":0,"text":"Hi","logprobs":null,"finish_reason":"stop"}]}'
    )
    more = CompletionChoice(
        1, "", CompletionLogprobs([], [], [], []), None, prompt_logprobs=[None], token_ids=[7], prompt_token_ids=[8, 9]
    )
    assert encode(more) == (
        b'{"index":1,"text":"","logprobs":{"tokens":[],"token_logprobs":[],"top_logprobs":[],"text_offset":[]},'
        b'"finish_reason":null,"prompt_logprobs":[null],"token_ids":[7],"prompt_token_ids":[8,9]}'
    )


def test_a_chat():
    assert encode(CHAT) == (
        b'{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"tiny",'
        b'"choices":[{"index":0,"message":{"role":"assistant","content":"Hi","refusal":null},'
        b'"logprobs":null,"finish_reason":"length"}],'
        b'"usage":{"prompt_tokens":5,"completion_tokens":1,"total_tokens":6,"prompt_tokens_details":{"cached_tokens":0}}}'
    )
    more = ChatAnswer("a", "b", 0, "c", [], prompt_logprobs=[None], prompt_token_ids=[7])
    assert encode(more) == (
        b'{"id":"a","object":"b","created":0,"model":"c","choices":[],"prompt_logprobs":[null],"prompt_token_ids":[7]}'
    )
    with_ids = ChatChoice(1, ChatMessage("assistant", ""), None, "stop", [7])
    assert encode(with_ids).endswith(b'"finish_reason":"stop","token_ids":[7]}')


def test_what_stopped_a_text():
    """`stop_reason` is told, also as null, where it is known: at the end."""
    message = ChatMessage("assistant", "")
    for stop, told in ((None, b"null"), ("END", b'"END"'), (0, b"0"), (7, b"7")):
        end = b',"stop_reason":' + told + b"}"
        for choice in (
            CompletionChoice(0, "", None, "stop", stop_reason=stop),
            ChatChoice(0, message, None, "stop", stop_reason=stop),
            ChatPiece(0, Delta(), None, "stop", stop_reason=stop),
        ):
            assert encode(choice).endswith(end)


def test_chunks_of_a_chat():
    """The first bears the role, those between only text, the last only why it ended."""
    head = b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"tiny","choices":['
    for piece, told in (
        (ChatPiece(0, Delta("assistant", ""), None, None), b'"delta":{"role":"assistant","content":""}'),
        (ChatPiece(0, Delta(None, "Hi"), None, None), b'"delta":{"content":"Hi"}'),
        (ChatPiece(0, Delta(), None, None), b'"delta":{}'),
    ):
        assert encode(chunk(piece)) == head + b'{"index":0,' + told + b',"logprobs":null,"finish_reason":null}]}'
    assert encode(ChatPiece(1, Delta(), None, "stop", [7])) == (
        b'{"index":1,"delta":{},"logprobs":null,"finish_reason":"stop","token_ids":[7]}'
    )
    assert encode(chunk(used=None)).endswith(b'"choices":[],"usage":null}')  # where the last chunk will have it
    last = b'"usage":{"prompt_tokens":5,"completion_tokens":1,"total_tokens":6}}'
    assert encode(chunk(used=usage(5, 1))) == head + b"]," + last  # T-36: no choices


def test_events():
    """Each is one line and an empty one, whatever is in it, and text is UTF-8."""
    assert event({"a": 1}) == b'data: {"a":1}\n\n'
    assert event({"text": "é\n\ndata: [DONE]\r\n\u2028\u2029\u0085\\"}) == (
        b'data: {"text":"\xc3\xa9\\n\\ndata: [DONE]\\r\\n\\u2028\\u2029\\u0085\\\\"}\n\n'
    )
    assert event(chunk()) == b"data: " + encode(chunk()) + b"\n\n"
    assert DONE == b"data: [DONE]\n\n"


def test_models():
    one = {
        "id": "tiny",
        "object": "model",
        "created": 1700000000,
        "owned_by": "hibachi",
        "root": "path/to/tiny",
        "parent": None,
        "max_model_len": 512,
        "numerics": None,
        "server": None,
    }
    assert model("tiny", 1700000000, 512, "path/to/tiny") == one
    assert model("tiny", 1700000000, 512, "path/to/tiny", "cpu-1 float32") == one | {"numerics": "cpu-1 float32"}
    assert models([model(name, 1700000000, None, "path/to/tiny") for name in ("tiny", "other")]) == {
        "object": "list",
        "data": [one | {"max_model_len": None}, one | {"id": "other", "max_model_len": None}],
    }


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8"])
def test_vectors(dtype):
    """Packed as float32, the lowest byte first: 1.0 is 00 00 80 3f, -2.5 is 00 00 20 c0, and 0.1 is cd cc cc 3d."""
    vectors = [np.array([1.0, -2.5, 0.1], dtype), np.array([0.0], dtype)]
    plain = embeddings(vectors, "tiny", 9, packed=False)
    packed = embeddings(vectors, "tiny", 9, packed=True)
    numbers = [d.pop("embedding") for d in plain["data"]]
    assert numbers == [pytest.approx([1.0, -2.5, 0.1], abs=1e-7), [0.0]] and type(numbers[0][0]) is float
    assert [d.pop("embedding") for d in packed["data"]] == ["AACAPwAAIMDNzMw9", "AAAAAA=="]
    assert plain == packed
    assert plain == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0}, {"object": "embedding", "index": 1}],
        "model": "tiny",
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
    }


# ---- OpenAI's description --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def described():
    """described(name, answer): the answer, as it is sent, is what OpenAI's document calls by this name."""
    check = description("openai-openapi.json")
    return lambda name, answer: check(name, json.loads(encode(answer)))


def test_answers_are_as_openai_describes_them(described, words):
    """But for the null of an echoed prompt's first token, and a packed vector, which the document forgot."""
    scores = completion_logprobs([0, 4], [{0: -0.5, 1: -INF}, {4: -2.0}], 2, words)
    described("CreateCompletionResponse", COMPLETION)
    choice = CompletionChoice(0, "He", scores, "length", token_ids=[0, 4])
    described("CreateCompletionResponse", CompletionAnswer("a", "text_completion", 1, "b", [choice], usage(5, 2, 0)))
    described("CreateChatCompletionResponse", CHAT)
    spoken = chat_logprobs([0, 4], [{0: -0.5, 1: -INF}, {4: -2.0}], 2, words)
    choices = [ChatChoice(0, ChatMessage("assistant", "He"), spoken, "stop", [0, 4])]
    described("CreateChatCompletionResponse", ChatAnswer("a", "chat.completion", 1, "b", choices, usage(5, 2)))
    for stop in (None, "END", 7):
        stopped = [CompletionChoice(0, "He", None, "stop", stop_reason=stop)]
        described("CreateCompletionResponse", CompletionAnswer("a", "text_completion", 1, "b", stopped, usage(5, 2)))
        spoke = [ChatChoice(0, ChatMessage("assistant", "He"), None, "stop", None, stop)]
        described("CreateChatCompletionResponse", ChatAnswer("a", "chat.completion", 1, "b", spoke, usage(5, 2)))
    described("CompletionUsage", usage(5, 2, 1))
    described("ListModelsResponse", models([model("tiny", 1, 512, "tiny")]))
    described("Model", model("tiny", 1, None, "tiny"))
    vector = [np.ones(3, np.float32)]
    described("CreateEmbeddingResponse", embeddings(vector, "tiny", 9, packed=False))
    described("ErrorResponse", body_of(Refused("No.", param="n", code="invalid_value")))
    described("ErrorResponse", body_of(Refused("No.")))


def test_calls_are_as_openai_describes_them(described):
    """Whole and in chunks; what is told beside them is no contradiction."""
    calls = [
        ToolCall("call_1", "function", Function("look", "{}")),
        ToolCall("b", "function", Function("a", "{"), True),
    ]
    message = ChatMessage("assistant", None, None, calls, "Hm.", "Hm.")
    told = usage(5, 2, reasoning=1)
    choices = [ChatChoice(0, message, None, "tool_calls")]
    described("CreateChatCompletionResponse", ChatAnswer("a", "chat.completion", 1, "b", choices, told))
    begun = ToolCallDelta(0, "call_1", "function", FunctionDelta("look", ""))
    more = ToolCallDelta(0, UNSET, UNSET, FunctionDelta(UNSET, "{"), True)
    for piece in (
        ChatPiece(0, Delta(tool_calls=[begun]), None, None),
        ChatPiece(0, Delta(tool_calls=[more]), None, "length"),
        ChatPiece(0, Delta(reasoning_content="Hm.", reasoning="Hm."), None, None),
        ChatPiece(0, Delta(), None, "tool_calls"),
    ):
        described("CreateChatCompletionStreamResponse", chunk(piece, used=None))
    assert encode(begun) == (b'{"index":0,"id":"call_1","type":"function","function":{"name":"look","arguments":""}}')
    assert encode(more) == b'{"index":0,"function":{"arguments":"{"},"incomplete":true}'
    assert encode(calls[0]) == b'{"id":"call_1","type":"function","function":{"name":"look","arguments":"{}"}}'


def test_chunks_are_as_openai_describes_them(described, words):
    spoken = chat_logprobs([4], [{4: -2.0}], 0, words)
    for pieces, used in (
        ([ChatPiece(0, Delta("assistant", ""), None, None)], None),
        ([ChatPiece(0, Delta(None, "He"), spoken, None)], usage(5, 1)),
        ([ChatPiece(0, Delta(), None, "stop")], None),
        ([ChatPiece(0, Delta(), None, "stop", None, "END")], None),
        ([ChatPiece(0, Delta(), None, "stop", None, 7)], None),
        ([], usage(5, 2)),
    ):
        described("CreateChatCompletionStreamResponse", chunk(*pieces, used=used))
