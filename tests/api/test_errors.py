"""Which error is answered how: its status, what it is called, and whether trying again may help."""

from __future__ import annotations

import asyncio
import inspect
import re
from types import SimpleNamespace

import pytest

from hibachi import errors
from hibachi.errors import EngineFailed, HibachiError, InvalidRequest, InvalidTensorOperation, PromptTooLong, QueueFull
from hibachi.llm.dialects.dialects import ANTHROPIC, OPENAI
from hibachi.llm.dialects.errors import Refused, as_refused, body_of
from hibachi.llm.dialects.openai.answers import encode
from hibachi.llm.tokenizers.prompts import LEAST_TEXT, TextPrompts, check_fits

ANSWERS = {  # class: status, type, code, and whether trying again may help
    "InvalidRequest": (400, "invalid_request_error", None, False),
    "InvalidCall": (400, "invalid_request_error", None, False),
    "PromptTooLong": (400, "invalid_request_error", "context_length_exceeded", False),
    "RequestError": (400, "invalid_request_error", None, False),
    "QueueFull": (429, "rate_limit_error", "queue_full", True),
    "DeadlineExceeded": (408, "timeout_error", "deadline_exceeded", False),
    "EngineError": (503, "server_error", "engine_failed", True),
    "EngineFailed": (503, "server_error", "engine_failed", True),
    "NotDeterministic": (503, "server_error", "engine_failed", True),
    "EngineClosed": (503, "server_error", "shutting_down", True),
    "OutOfCapacity": (503, "server_error", "out_of_memory", True),
    "InternalError": (500, "server_error", "internal_error", False),
    "ModelFault": (500, "server_error", "model_fault", False),
    "ModelError": (500, "server_error", "model_fault", False),
    "InvalidModelOutput": (500, "server_error", "model_fault", False),
    "NonFiniteOutput": (500, "server_error", "model_fault", False),
    "InvalidTensorOperation": (500, "server_error", "model_fault", False),
    "HibachiError": (500, "server_error", "model_fault", False),
    "KVStoreError": (503, "server_error", "store_failed", True),
    "BackendError": (500, "server_error", "model_fault", False),
    "BackendNotFound": (500, "server_error", "model_fault", False),
    "BackendNotInstalled": (500, "server_error", "model_fault", False),
    "UnsupportedOperation": (400, "invalid_request_error", "unsupported", False),
    "ConfigError": (400, "invalid_request_error", "unsupported", False),
    "UnknownArchitecture": (400, "invalid_request_error", "unsupported", False),
    "InvalidModelFiles": (400, "invalid_request_error", "unsupported", False),
    "InvalidTrace": (400, "invalid_request_error", "unsupported", False),
    "MissingExtra": (400, "invalid_request_error", "unsupported", False),
}


def made(name):
    """An error of this class, or of a class that somebody derived from it."""
    cls = getattr(errors, name)
    if cls is InvalidTensorOperation:
        return cls("cat", expected="one shape", got="two", mend="Pad them")
    return cls("What was wrong.")


def derived(error):
    error.__class__ = type("Own", (type(error),), {})
    return error


def test_every_error_of_ours_has_an_answer():
    known = inspect.getmembers(errors, lambda x: inspect.isclass(x) and issubclass(x, HibachiError))
    assert {name for name, _ in known} == set(ANSWERS)


@pytest.mark.parametrize("own", [False, True], ids=["itself", "a class of it"])
@pytest.mark.parametrize("name", ANSWERS)
def test_how_an_error_is_answered(name, own):
    error = derived(made(name)) if own else made(name)
    found = as_refused(error, retry_after=7)
    status, kind, code, again = ANSWERS[name]
    assert (found.status, found.kind, found.code, found.param) == (status, kind, code, None)
    late = {"X-Should-Retry": "false"} if status == 408 else {}
    assert found.headers == ({"Retry-After": "7"} if again else late)
    secret = status in (500, 503) or name == "QueueFull"
    told = not secret or name in ("EngineError", "NotDeterministic", "EngineClosed")
    assert (str(found) == str(error)) is told and (
        "What was wrong" in str(found) or "cat: expected" in str(found)
    ) is told


def test_try_again_in_a_second():
    assert as_refused(QueueFull("x")).headers == {"Retry-After": "1"}


class Theirs(Exception):
    pass


@pytest.mark.parametrize(
    "error",
    [
        *(cls("secret") for cls in (Theirs, RuntimeError, ValueError, TimeoutError, MemoryError, ImportError)),
        *(cls("secret") for cls in (LookupError, ArithmeticError, NotImplementedError, KeyboardInterrupt)),
        asyncio.CancelledError("secret"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_others_raised_is_not_told(error):
    """Not even where ours are of the same kind."""
    found = as_refused(error, retry_after=7)
    assert (found.status, found.kind, found.code, found.param) == (500, "server_error", "internal_error", None)
    assert found.headers == {} and str(found) == "The server made a mistake; its log says more."
    assert b"secret" not in encode(body_of(found))


def test_what_was_behind_an_error_is_not_told():
    error = EngineFailed("The device failed.")
    error.__cause__ = RuntimeError("secret")
    assert b"secret" not in encode(body_of(as_refused(error)))


def test_what_is_refused_already_stays_as_it_is():
    refused = Refused("No.", status=418, kind="teapot_error", param="cup", code="short", headers={"Retry-After": "3"})
    assert as_refused(refused, retry_after=7) is refused
    assert (refused.status, refused.kind, refused.param, refused.code) == (418, "teapot_error", "cup", "short")
    assert refused.headers == {"Retry-After": "3"} and isinstance(refused, HibachiError)


def test_a_refusal_that_says_nothing_more():
    refused = Refused("No.")
    assert (refused.status, refused.kind, refused.param, refused.code) == (400, "invalid_request_error", None, None)
    assert refused.headers == {}
    assert Refused("No.").headers is not refused.headers


def test_the_body_of_an_error():
    """All four are there, null or not."""
    about = Refused('"n" is', param="n", code="invalid_value")
    assert encode(body_of(about)) == (
        b'{"error":{"message":"\\"n\\" is","type":"invalid_request_error","param":"n","code":"invalid_value"}}'
    )
    assert body_of(as_refused(InvalidRequest("No."))) == {
        "error": {"message": "No.", "type": "invalid_request_error", "param": None, "code": None}
    }


# Texts by which clients tell that a conversation must be shortened, as read in their sources on 2026-11-29: LiteLLM
# 1.110.2 (exception_mapping_utils.py, in lower case), langchain-openai 1.7.4 (_handle_openai_bad_request), pi-ai 0.73.1
# (overflow.js). All other errors the SDKs, LiteLLM and langchain-openai know by their status: 401 a key, 404 a model,
# 429 a full queue (tests/install/test_clients.py). Where only max_tokens is too large, langchain-openai knows of no
# overflow.
OVERFLOW = {
    "litellm": r"(?i)this model's maximum context length is|input tokens exceed the configured|prompt is too long",
    "langchain-openai": r"Input tokens exceed the configured limit|prompt is too long",
    "pi-ai": r"(?i)prompt is too long|maximum context length is \d+ tokens",
}


@pytest.mark.parametrize("dialect", [OPENAI, ANTHROPIC], ids=["openai", "anthropic"])
@pytest.mark.parametrize(
    "too_long",
    [
        lambda prompts: check_fits(9, None, prompts.context),
        lambda prompts: check_fits(7, 2, prompts.context),
        lambda prompts: prompts.check_text("a" * 20),
        lambda prompts: prompts.check_size("a" * (LEAST_TEXT + 1)),
    ],
    ids=["ids", "max_tokens", "text", "size"],
)
def test_clients_know_a_context_that_is_exceeded_by_its_words(dialect, too_long):
    with pytest.raises(PromptTooLong) as e:
        too_long(TextPrompts(SimpleNamespace(fewest_tokens=len), 8))
    told = dialect.error(as_refused(e.value))["error"]["message"]
    clients = {name for name, words in OVERFLOW.items() if re.search(words, told)}
    assert clients == set(OVERFLOW) - ({"langchain-openai"} if "max_tokens" in told and dialect is OPENAI else set())
