"""Turns bodies of Anthropic's API into chats in OpenAI's form, which the rest of the server reads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from msgspec import UNSET
from msgspec.json import encode

from hibachi.errors import FieldPath, shown
from hibachi.llm.chatformat.errors import UNSUPPORTED
from hibachi.llm.dialects.errors import Refused, refusing, unsupported
from hibachi.llm.dialects.forms import JsonSchemaFormat, NamedSchema
from hibachi.llm.dialects.messages.bodies import (
    OF_SERVER,
    PAGE,
    REFUSED,
    Block,
    Choice,
    CountBody,
    CustomTool,
    MessagesBody,
    RedactedThinking,
    TextBlock,
    ThinkingText,
    ToolResult,
    ToolUse,
    Turn,
)
from hibachi.llm.dialects.openai.bodies import ChatBody, taken
from hibachi.llm.dialects.openai.parse import ParsedRequest
from hibachi.llm.dialects.steps import ReadingStep, Steps
from hibachi.llm.dialects.textmodel import TextModel

Placed: TypeAlias = tuple[FieldPath, Block]  # where a block stands, such as ("messages", 0, "content", 1)
Message: TypeAlias = dict[str, Any]  # in OpenAI's form
TOOL_DEFAULTS: dict[str, tuple[list[Any], str]] = {
    "allowed_callers": ([None, [], ["direct"]], "Only the model itself calls tools"),
    "defer_loading": ([None, False], "The model is shown all tools from the beginning"),
    "input_examples": ([None, []], "Chat templates show no examples: say them in the description"),
}
"""Fields of a tool that may only have these values, and why."""
BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
"""What Claude Code writes in front of its system prompt. It differs in each request, so that nothing behind it would be
found in the cache.
"""
EFFORTS = {"xhigh": "high", "max": "high"}  # levels that templates do not know
KEEPING = [{"type": "clear_thinking_20251015", "keep": keep} for keep in ("all", {"type": "all"})]
SWITCHES = ("enable_thinking", "thinking")
"""Variables by which chat templates turn reasoning on and off. A template reads one of them at most."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def request(model: TextModel, body: CountBody) -> Steps[tuple[ParsedRequest, list[int]]]:
    """What a message asks for, and the token ids of its prompt. Raises Refused, InvalidRequest or PromptTooLong."""
    chat: ChatBody = yield ReadingStep("body", partial(chat_of, body))
    with refusing(partial(in_body, body)):
        return (yield from model.chat(chat))


def fit(asked: ParsedRequest, prompt: int, context: int) -> bool:
    """max_tokens is what an answer has at most, and must be sent: where the context holds less, that is the limit.

    prompt: its tokens. context: tokens that it holds. Returns whether it is the limit.
    """
    wanted, room = asked.params.max_tokens, context - prompt
    if wanted is None or not 1 <= room < wanted:
        return False
    asked.params, asked.max_tokens = asked.params.with_(max_tokens=room), room
    return True


def chat_of(body: CountBody) -> ChatBody:
    """The same as a chat. Raises Refused, which names the field."""
    for name, why in REFUSED.items():
        if (given := getattr(body, name)) not in (UNSET, None, [], {}) and not _keeps_all(name, given):
            refused = unsupported(name, why)
            if name == "thread":  # by this code clients know that they may go on without one
                refused.code = "thread_unsupported_request"
            raise refused
    if not body.messages:
        raise Refused.at("messages", " is empty: send at least one.", code="empty_array")
    messages, goes_on = _messages(body.messages, _system(body.system))
    chat = ChatBody(messages=messages, model=body.model)
    if goes_on:
        chat.continue_final_message, chat.add_generation_prompt = True, False
    _set_tools(chat, body)
    _set_thinking(chat, body)
    _set_format(chat, body)
    if isinstance(body, MessagesBody):
        _set_limits(chat, body)
    return chat


def _keeps_all(name: str, given: Any) -> bool:
    """Whether the context is only to be managed so that nothing is taken out of it, as Claude Code asks."""
    if name != "context_management" or not isinstance(given, dict) or given.keys() != {"edits"}:
        return False
    return isinstance(given["edits"], list) and all(edit in KEEPING for edit in given["edits"])


def _set_limits(chat: ChatBody, body: MessagesBody) -> None:
    if body.max_tokens < 1:
        raise Refused.at(
            "max_tokens",
            f" must be an integer >= 1; got {shown(body.max_tokens)}. To fill the cache alone, send the "
            f"beginning of a conversation to POST /v1/warm.",
        )
    chat.max_tokens, chat.stream, chat.stop = body.max_tokens, body.stream, body.stop_sequences
    chat.temperature, chat.top_p, chat.top_k = body.temperature, body.top_p, body.top_k
    chat.seed = body.seed


def _set_format(chat: ChatBody, body: CountBody) -> None:
    config = body.output_config
    wanted = body.output_format if config is None or config.format is None else config.format
    if config is not None and config.format is not None and body.output_format is not None:
        raise Refused.at("output_format", " is the old name of output_config.format. Send one of them.")
    if config is not None:
        chat.reasoning_effort = EFFORTS.get(config.effort or "", config.effort)
    if wanted is not None:
        named = NamedSchema(name="answer", schema=wanted.schema)
        chat.response_format = JsonSchemaFormat(json_schema=named)


def _set_thinking(chat: ChatBody, body: CountBody) -> None:
    """As in Anthropic's API, reasoning is off unless it is asked for. Where a model reasons anyway it is not told."""
    wanted = body.thinking
    kind = "disabled" if wanted is None else wanted.type
    if kind != "adaptive":
        chat.chat_template_kwargs = dict.fromkeys(SWITCHES, kind == "enabled")
    chat.include_reasoning = kind != "disabled" and (wanted is None or wanted.display != "omitted")


# ---- tools -------------------------------------------------------------------------------------------------------


def _set_tools(chat: ChatBody, body: CountBody) -> None:
    if body.tools:
        chat.tools = [_tool(given, ("tools", i)) for i, given in enumerate(body.tools)]
    choice = body.tool_choice
    if choice is None:
        return
    if (choice.name is None) is (choice.type == "tool"):
        what = "is missing" if choice.name is None else "is for the type 'tool'"
        raise Refused.at("tool_choice.name", f" {what}.")
    if not body.tools and choice.type in ("any", "tool"):
        raise Refused.at("tool_choice", f" is {choice.type!r}, and there are no tools.")
    if body.tools:
        chat.tool_choice = _choice(choice)
        chat.parallel_tool_calls = False if choice.disable_parallel_tool_use else None


def _choice(given: Choice) -> Any:
    if given.type == "tool":
        return {"type": "function", "function": {"name": given.name}}
    return _CHOICES[given.type]


def _tool(given: dict[str, Any], place: FieldPath) -> dict[str, Any]:
    kind = given.get("type")
    if kind == "function":
        raise _unserved(place, kind, "Here a tool has name, description and input_schema")
    if isinstance(kind, str) and kind != "custom":
        raise _unserved(place, kind, OF_SERVER)
    tool = taken(CustomTool, given, PAGE, place)
    for name, (values, why) in TOOL_DEFAULTS.items():
        if getattr(tool, name) not in values:
            raise unsupported((*place, name), f"{why}, so only {encode(values[-1]).decode()} is")
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _unserved(place: FieldPath, kind: str, why: str) -> Refused:
    return Refused.at(place, f" of type {kind[:60]!r} is not supported: {why}.", code=UNSUPPORTED)


# ---- messages ----------------------------------------------------------------------------------------------------


def _system(given: str | list[TextBlock] | None) -> str:
    texts = [given or ""] if given is None or isinstance(given, str) else [block.text for block in given]
    return _joined(BILLING.sub("", text) for text in texts)


def _messages(given: Sequence[Turn], system: str) -> tuple[list[Message], bool]:
    """In OpenAI's form, behind the system prompt, and whether the last one is to be continued."""
    out: list[Message] = []
    calls: dict[str, FieldPath] = {}  # by id, those of the last message of the assistant
    answered = set[str]()  # ids of those that have a result
    front = 0  # where the next result stands
    last: Message = {}
    for role, blocks in _turns(given, system):
        last = {}
        if role == "assistant":
            last, calls = _of_assistant(blocks)
            answered.clear()
            out.append(last)
            front = len(out)
        else:
            results, said = _of_others(blocks, calls, answered)
            out[front:front] = results
            front += len(results)
            if said or not results:
                out.append({"role": role, "content": said})
    if last and calls:
        raise Refused(
            calls.popitem()[1],
            ": the last message calls a tool. Send its result, in a message of the user.",
            param="messages",
            code="invalid_value",
        )
    if last and not last["content"]:  # there is nothing to be continued
        return out[:-1], False
    return out, bool(last)


def _turns(given: Sequence[Turn], system: str) -> Iterator[tuple[str, list[Placed]]]:
    """Role and blocks. Messages of one role that follow each other are one."""
    role, blocks = "system", list[Placed]()
    if system:
        blocks.append((("system",), TextBlock(system)))
    for of, own in _made(given):
        if of != role:
            if blocks or role != "system":
                yield role, blocks
            role, blocks = of, []
        blocks += own
    if blocks or role != "system":
        yield role, blocks


def _made(given: Sequence[Turn]) -> Iterator[tuple[str, list[Placed]]]:
    """Role and blocks of each message. Calls that were cut off and have no result are left out, and so is a message of
    the assistant that has nothing but reasoning left.
    """
    cut, results = set[FieldPath](), set[str]()  # where calls stand; ids of results behind
    for i, turn in reversed([*enumerate(given)]):
        for j, block in reversed([*enumerate([] if isinstance(turn.content, str) else turn.content)]):
            if isinstance(block, ToolResult):
                results.add(block.tool_use_id)
            elif isinstance(block, ToolUse) and block.incomplete and block.id not in results:
                cut.add((i, j))
            elif isinstance(block, ToolUse):
                results.discard(block.id)
    for i, turn in enumerate(given):
        place: FieldPath = ("messages", i, "content")
        if isinstance(turn.content, str):
            yield turn.role, [(place, TextBlock(turn.content))]
            continue
        ours = turn.role == "assistant"
        blocks = [((*place, j), block) for j, block in enumerate(turn.content) if not ours or (i, j) not in cut]
        if len(blocks) == len(turn.content) or not ours or any(_says(block) for _, block in blocks):
            yield turn.role, blocks


def _says(block: Block) -> bool:
    """Whether it is more than reasoning, and no empty text."""
    return bool(block.text) if isinstance(block, TextBlock) else isinstance(block, (ToolUse, ToolResult))


def _of_assistant(blocks: Sequence[Placed]) -> tuple[Message, dict[str, FieldPath]]:
    """The message, and where its calls stand, by their ids."""
    said, thought, calls = list[str](), list[str](), list[dict[str, Any]]()
    places: dict[str, FieldPath] = {}
    for place, block in blocks:
        if isinstance(block, TextBlock):
            said.append(block.text)
        elif isinstance(block, ThinkingText):
            thought.append(block.thinking)
        elif isinstance(block, ToolUse):
            if block.id in places:
                raise Refused.at(
                    (*place, "id"),
                    f": expected an id of its own for each call; {block.id[:60]!r} is that of ",
                    places[block.id],
                    ", too.",
                )
            if not block.name:
                raise Refused.at((*place, "name"), " must be the name of a tool; got ''.")
            places[block.id] = place
            given = block.input if isinstance(block.input, str) else encode(block.input).decode()
            function = {"name": block.name, "arguments": given}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif not isinstance(block, RedactedThinking):
            raise _elsewhere(place, "tool_result", "user")
    message: Message = {"role": "assistant", "content": _joined(said)}
    if thought_ := _joined(thought):
        message["reasoning_content"] = thought_
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return message, places


def _of_others(
    blocks: Sequence[Placed], calls: Mapping[str, FieldPath], answered: set[str]
) -> tuple[list[Message], str]:
    """Results of calls, in the order in which they came, and what is said."""
    said, results = list[str](), list[Message]()
    for place, block in blocks:
        if isinstance(block, TextBlock):
            said.append(block.text)
        elif isinstance(block, ToolResult):
            name = block.tool_use_id
            if name not in calls or name in answered:
                why = "has a result already" if name in answered else "is not of a tool_use in the message before"
                raise Refused.at((*place, "tool_use_id"), f": {name[:60]!r} {why}.")
            answered.add(name)
            results.append({"role": "tool", "tool_call_id": name, "content": _result(block)})
        else:
            raise _elsewhere(place, str(type(block).__struct_config__.tag), "assistant")
    return results, _joined(said)


def _result(given: ToolResult) -> str:
    content = given.content or ""
    text = content if isinstance(content, str) else _joined(block.text for block in content)
    return f"Error: {text}" if given.is_error else text


def _joined(texts: Iterator[str] | Sequence[str]) -> str:
    return "\n".join(text for text in texts if text)


def _elsewhere(place: FieldPath, kind: str, role: str) -> Refused:
    return Refused.at(place, f": a block {kind!r} stands in a message of the {role}.")


# ---- where the fields of a chat stand in its body ----------------------------------------------------------------


def in_body(body: CountBody, path: FieldPath) -> FieldPath:
    """Where a field of the chat that is made of a body stands in it."""
    match path:
        case "response_format", *rest:
            rest = rest[rest[:1] == ["json_schema"] :]
            return "output_config", "format", *rest[rest[:1] == ["schema"] :]
        case "tools", int(i), "function", "parameters", *rest:
            return "tools", i, "input_schema", *rest
        case "tools", int(i), "function", *rest:
            return "tools", i, *rest
        case "tool_choice", "function", *rest:
            return "tool_choice", *rest
        case "stop", *rest:
            return "stop_sequences", *rest
        case "reasoning_effort", *rest:
            return "output_config", "effort", *rest
        case "messages", int(i), "tool_calls", *rest:
            call = rest[0] if rest and isinstance(rest[0], int) else 0
            found = _call_in(body, i, call)
            return ("messages",) if found is None else (*found, *_OF_CALLS.get(rest[-1] if rest else None, ()))
    return path


_OF_CALLS: dict[str | int | None, FieldPath] = {"name": ("name",), "arguments": ("input",), "id": ("id",)}


def _call_in(body: CountBody, message: int, call: int) -> FieldPath | None:
    """Where the body has a call of a message of its chat; None means it has none."""
    calls: list[list[FieldPath]] = []  # of each message
    for role, blocks in _turns(body.messages, _system(body.system)):
        if role == "assistant":
            calls.append([place for place, block in blocks if isinstance(block, ToolUse)])
        else:
            results = sum(isinstance(block, ToolResult) for _, block in blocks)
            said = any(isinstance(block, TextBlock) and block.text for _, block in blocks)
            calls += [[]] * (results + (said or not results))
    found = calls[message] if message < len(calls) else []
    return found[call] if call < len(found) else None
