"""Formats of models as data, by name: for what a template does not show, or shows too little of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hibachi.errors import ConfigError
from hibachi.llm.chatformat.format import (
    HERMES,
    THINK,
    ChatFormat,
    Python,
    Quoted,
    ReasoningFormat,
    Slot,
    Tagged,
    ToolFormat,
)

_NAME, _ARGUMENTS, _ID, _NUMBER, _TAG = Slot.NAME, Slot.ARGUMENTS, Slot.ID, Slot.NUMBER, Slot.TAG


def _json(begin: str, end: str, *, name: str = "name", arguments: str = "arguments", between: str = ", ") -> ToolFormat:
    """A list of JSON objects between two texts."""
    call = (f'{{"{name}": "', _NAME, f'", "{arguments}": ', _ARGUMENTS, "}")
    return ToolFormat(call, begin.split("[")[0].strip() or begin, begin, between, end)


def _wrapped(begin: str, end: str) -> ToolFormat:
    """Each call a JSON object between two texts."""
    call = (f'{begin}{{"name": "', _NAME, '", "arguments": ', _ARGUMENTS, f"}}{end}")
    return ToolFormat(call, begin.strip(), between="\n")


def _keyed(name_end: str, lines: str) -> ToolFormat:
    """GLM's: a name, and pairs of keys and values. lines: what stands between them."""
    form = Tagged("<arg_key>", f"</arg_key>{lines}<arg_value>", f"</arg_value>{lines}")
    return ToolFormat(
        ("<tool_call>", _NAME, name_end, _ARGUMENTS, "</tool_call>"), "<tool_call>", between=lines, arguments=form
    )


def _functions(begin: str, end: str, lines: str) -> ToolFormat:
    """Qwen3-Coder's: <function=NAME> with <parameter=KEY>. lines: around values."""
    form = Tagged("<parameter=", f">{lines}", f"{lines}</parameter>\n", python=True)
    call = (f"{begin}\n<function=", _NAME, ">\n", _ARGUMENTS, f"</function>\n{end}")
    return ToolFormat(call, begin, between="\n", arguments=form)


def _invoked(begin: str, end: str, form: Tagged, tag: str = "invoke") -> ToolFormat:
    """MiniMax's and DeepSeek's later ones: <invoke name="NAME"> with <parameter name="KEY">."""
    call = (f'\n<{tag} name="', _NAME, '">\n', _ARGUMENTS, f"</{tag}>")
    return ToolFormat(call, begin, begin, "", f"\n{end}", form)


def _dsml(word: str, blank: str = "") -> ToolFormat:
    tag = f"｜DSML｜{blank}"
    kinds = {kind: '" string="false">' for kind in ("number", "boolean", "object", "array", "null")}
    form = Tagged(f'<{tag}parameter name="', '" string="true">', f"</{tag}parameter>\n", kinds=kinds)
    return _invoked(f"<{tag}{word}>", f"</{tag}{word}>", form, f"{tag}invoke")


def _deepseek(before: str, separator: str, behind: str) -> ToolFormat:
    call = (f"<｜tool▁call▁begin｜>{before}", _NAME, separator, _ARGUMENTS, f"{behind}<｜tool▁call▁end｜>")
    between = "\n" if behind else ""
    return ToolFormat(call, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜>", between, "<｜tool▁calls▁end｜>")


def _harmony() -> ChatFormat:
    header = "<|start|>assistant"
    tools = ToolFormat(
        call=(
            f"{header}<|channel|>commentary to=functions.",
            _NAME,
            " <|constrain|>json<|message|>",
            _ARGUMENTS,
            "<|call|>",
        ),
        marker=f"{header}<|channel|>commentary to=functions.",
        most=1,
        spellings=(
            *(
                (*to, typed, _ARGUMENTS, "<|call|>")
                for to in (
                    (f"{header} to=functions.", _NAME, "<|channel|>", _TAG),
                    (f"{header}<|channel|>", _TAG, " to=functions.", _NAME),
                )
                for typed in ("<|message|>", "<|constrain|>json<|message|>", " json<|message|>")
            ),
            # to what is built in, such as python
            (f"{header}<|channel|>", _TAG, " to=", _NAME, "<|constrain|>code<|message|>", _ARGUMENTS, "<|call|>"),
        ),
    )
    return ChatFormat(
        tools=tools,
        reasoning=ReasoningFormat(f"{header}<|channel|>analysis<|message|>", "<|end|>"),
        before_said=f"{header}<|channel|>final<|message|>",
        silent=(f"{header}<|channel|>commentary<|message|>", "<|end|>", "<|return|>"),
        prompted=header,
    )


def _kimi_k3() -> ChatFormat:
    def tag(kind: str) -> str:
        return f'" type="{kind}"<|sep|>'

    form = Tagged(
        '<|open|>argument key="',
        tag("string"),
        "<|close|>argument<|sep|>",
        kinds={kind: tag(kind) for kind in ("number", "boolean", "object", "array", "null")},
        attribute=True,
    )
    call = ('<|open|>call tool="', _NAME, '" index="', _NUMBER, '"<|sep|>', _ARGUMENTS, "<|close|>call<|sep|>")
    begin, end = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
    return ChatFormat(
        tools=ToolFormat(call, begin, begin, "", end, form, first_number=1),
        reasoning=ReasoningFormat("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        before_said="<|open|>response<|sep|>",
        silent=("<|close|>response<|sep|>", "<|close|>message<|sep|>", "<|end_of_msg|>"),
    )


def _minimax_m3() -> ChatFormat:
    mark = "]<]minimax[>["
    form = Tagged(f"{mark}<", ">", f"{mark}</{{key}}>", item="item")
    call = (f'{mark}<invoke name="', _NAME, '">', _ARGUMENTS, f"{mark}</invoke>")
    return ChatFormat(
        tools=ToolFormat(call, f"{mark}<tool_call>", f"{mark}<tool_call>\n", "\n", f"\n{mark}</tool_call>", form),
        reasoning=ReasoningFormat("<mm:think>", "</mm:think>"),
    )


def _muse() -> ChatFormat:
    header = "<|start|>assistant"
    form = Tagged('<atem:parameter name="', '">', "</atem:parameter>\n")
    call = (
        f"{header} to=",
        _NAME,
        '<|message|><atem:function_calls>\n<atem:invoke name="',
        _NAME,
        '">\n',
        _ARGUMENTS,
        "</atem:invoke>\n</atem:function_calls>",
    )
    return ChatFormat(
        tools=ToolFormat(call, f"{header} to=", between="<|eom|>", arguments=form),
        reasoning=ReasoningFormat(f"{header} to=self<|message|>", "<|eom|>"),
        before_said=f"{header} to=user<|message|>",
        silent=("<|eom|>", "<|eot|>"),
        prompted=header,
    )


def _pythonic(begin: str, end: str, between: str = ", ", alone: bool = False) -> ToolFormat:
    marker = begin.strip() if alone else begin.removesuffix("[").strip()
    return ToolFormat((_NAME, "(", _ARGUMENTS, ")"), marker, begin, between, end, Python(), alone)


_LLAMA = ToolFormat(
    call=('{"name": "', _NAME, '", "parameters": ', _ARGUMENTS, "}"),
    marker='{"name"',
    between="; ",
    alone=True,
    spellings=tuple(
        (f'{{{typed}"name": "', _NAME, f'", "{arguments}": ', _ARGUMENTS, "}")
        for typed in ("", '"type": "function", ')
        for arguments in ("arguments", "parameters")
    ),
)
_MISTRAL = ToolFormat(
    call=("[TOOL_CALLS]", _NAME, "[ARGS]", _ARGUMENTS),
    marker="[TOOL_CALLS]",
    id="nine letters",
    spellings=(
        ("[TOOL_CALLS]", _NAME, "[CALL_ID]", _ID, "[ARGS]", _ARGUMENTS),
        ('[TOOL_CALLS][{"name": "', _NAME, '", "arguments": ', _ARGUMENTS, "}]"),
        ('[TOOL_CALLS][{"name": "', _NAME, '", "arguments": ', _ARGUMENTS, ', "id": "', _ID, '"}]'),
    ),
)
_KIMI = ToolFormat(
    call=(
        "<|tool_call_begin|>functions.",
        _NAME,
        ":",
        _NUMBER,
        "<|tool_call_argument_begin|>",
        _ARGUMENTS,
        "<|tool_call_end|>",
    ),
    marker="<|tool_calls_section_begin|>",
    begin="<|tool_calls_section_begin|>",
    end="<|tool_calls_section_end|>",
)
_COHERE = ToolFormat(
    call=('\n    {"tool_call_id": "', _NUMBER, '", "tool_name": "', _NAME, '", "parameters": ', _ARGUMENTS, "}"),
    marker="<|START_ACTION|>",
    begin="<|START_ACTION|>[",
    between=",",
    end="\n]<|END_ACTION|>",
)
_GEMMA = ToolFormat(
    call=("<|tool_call>call:", _NAME, _ARGUMENTS, "<tool_call|>"), marker="<|tool_call>", arguments=Quoted('<|"|>')
)
_FUNCTIONARY = ToolFormat(("<function=", _NAME, ">", _ARGUMENTS, "</function>"), "<function=")
_RECIPIENT = ChatFormat(
    tools=ToolFormat((">>>", _NAME, "\n", _ARGUMENTS), ">>>"), before_said=">>>all\n", prompted=">>>"
)
_QWEN_XML = _functions("<tool_call>", "</tool_call>", "\n")

KNOWN: dict[str, ChatFormat] = {
    "apertus": ChatFormat(
        ToolFormat(
            ('{"', _NAME, '": ', _ARGUMENTS, "}"), "<|tools_prefix|>", "<|tools_prefix|>[", ", ", "]<|tools_suffix|>"
        )
    ),
    "cohere": ChatFormat(_COHERE, silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")),
    "deepseek_v3": ChatFormat(_deepseek("function<｜tool▁sep｜>", "\n```json\n", "\n```")),
    "deepseek_v31": ChatFormat(_deepseek("", "<｜tool▁sep｜>", "")),
    "deepseek_v32": ChatFormat(_dsml("function_calls")),
    "deepseek_v4": ChatFormat(_dsml("tool_calls")),
    "deepseek_v41": ChatFormat(_dsml("calls", " ")),
    "functionary_v31": ChatFormat(_FUNCTIONARY),
    "functionary_v32": _RECIPIENT,
    "gemma4": ChatFormat(_GEMMA),
    "gigachat3": ChatFormat(replace(_wrapped("<|function_call|>", ""), between="", most=1)),
    "glm45": ChatFormat(_keyed("\n", "\n")),
    "glm47": ChatFormat(_keyed("", "")),
    "gpt_oss": _harmony(),
    "granite": ChatFormat(
        replace(
            _json("<|tool_call|>[", "]"),
            spellings=(('<tool_call>[{"name": "', _NAME, '", "arguments": ', _ARGUMENTS, "}]"),),
        )
    ),
    "hermes": ChatFormat(HERMES),
    "hunyuan_a13b": ChatFormat(_json("<tool_calls>[", "]</tool_calls>")),
    "kimi_k2": ChatFormat(_KIMI),
    "kimi_k3": _kimi_k3(),
    "lfm2": ChatFormat(_pythonic("<|tool_call_start|>[", "]<|tool_call_end|>")),
    "llama3_json": ChatFormat(_LLAMA, silent=("<|python_tag|>",)),
    "llama4_json": ChatFormat(_LLAMA, silent=("<|python_start|>", "<|python_end|>", "<|python_tag|>")),
    "llama4_pythonic": ChatFormat(_pythonic("[", "]", alone=True), silent=("<|python_start|>", "<|python_end|>")),
    "longcat": ChatFormat(_wrapped("<longcat_tool_call>\n", "\n</longcat_tool_call>")),
    "minimax_m1": ChatFormat(
        ToolFormat(
            ('{"name": "', _NAME, '", "arguments": ', _ARGUMENTS, "}"),
            "<tool_calls>",
            "<tool_calls>\n",
            "\n",
            "\n</tool_calls>",
        )
    ),
    "minimax_m2": ChatFormat(
        _invoked("<minimax:tool_call>", "</minimax:tool_call>", Tagged('<parameter name="', '">', "</parameter>\n"))
    ),
    "minimax_m3": _minimax_m3(),
    "mistral": ChatFormat(_MISTRAL),
    "muse": _muse(),
    "nemotron_nano_v2": ChatFormat(_json("<TOOLCALL>[", "]</TOOLCALL>")),
    "olmo3": ChatFormat(_pythonic("<function_calls>\n", "\n</function_calls>", "\n")),
    "phi4_mini_json": ChatFormat(_json("functools[", "]")),
    "pythonic": ChatFormat(_pythonic("[", "]", alone=True)),
    "qwen3_coder": ChatFormat(_QWEN_XML),
    "seed_oss": ChatFormat(_functions("<seed:tool_call>", "</seed:tool_call>", "")),
    "xlam": ChatFormat(ToolFormat(_json("[", "]").call, "[", "[", ", ", "]", alone=True)),
}
"""How models write calls, by name."""

_THOUGHTS: dict[str, ChatFormat] = {
    "think": ChatFormat(reasoning=THINK),
    "apertus": ChatFormat(reasoning=ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>")),
    "apriel": ChatFormat(
        reasoning=ReasoningFormat("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
        silent=("[END FINAL RESPONSE]",),
    ),
    "cohere": ChatFormat(reasoning=ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>")),
    "gemma4": ChatFormat(reasoning=ReasoningFormat("<|channel>thought", "<channel|>")),
    "gpt_oss": KNOWN["gpt_oss"],
    "granite": ChatFormat(reasoning=ReasoningFormat("Here is my thought process:", "Here is my response:")),
    "granite33": ChatFormat(reasoning=THINK, silent=("<response>", "</response>")),
    "hunyuan_a13b": ChatFormat(reasoning=THINK, silent=("<answer>", "</answer>")),
    "kimi_k3": KNOWN["kimi_k3"],
    "minimax_m3": KNOWN["minimax_m3"],
    "mistral": ChatFormat(reasoning=ReasoningFormat("[THINK]", "[/THINK]")),
    "muse": KNOWN["muse"],
    "seed_oss": ChatFormat(reasoning=ReasoningFormat("<seed:think>", "</seed:think>")),
}

_ALIASES = {  # names that other servers have for the same
    "deepseek_v3.1": "deepseek_v31",
    "deepseek_v3.2": "deepseek_v32",
    "glm4_moe": "glm45",
    "glm": "glm45",
    "jamba": "hunyuan_a13b",
    "kimi": "kimi_k2",
    "minimax": "minimax_m1",
    "openai": "gpt_oss",
    "openai_gptoss": "gpt_oss",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
}
_THOUGHT_ALIASES = {
    **dict.fromkeys(
        (
            *("deepseek_r1", "deepseek_v3", "deepseek_v31", "deepseek_v32", "ernie45", "glm45", "holo2", "kimi_k2"),
            *("minimax_m2", "nemotron_v3", "olmo3", "qwen3", "step3", "step3p5"),
        ),
        "think",
    ),
    "magistral": "mistral",
    "openai": "gpt_oss",
    "openai_gptoss": "gpt_oss",
}

TOOL_NAMES = tuple(sorted({*KNOWN, *_ALIASES}))
REASONING_NAMES = tuple(sorted({*_THOUGHTS, *_THOUGHT_ALIASES}))

# Texts that, all together, only these templates have. The first that fits is taken.
_SEEN: tuple[tuple[str, tuple[str, ...], ChatFormat], ...] = (
    ("gpt_oss", ("<|channel|>analysis<|message|>", "<|channel|>commentary "), KNOWN["gpt_oss"]),
    ("functionary_v32", (">>>all", "recipient"), KNOWN["functionary_v32"]),
    ("kimi_k3", ("'think'", "'argument'", "<|end_of_msg|>"), KNOWN["kimi_k3"]),
    ("minimax_m3", ("]<]minimax[>[", "<mm:think>"), KNOWN["minimax_m3"]),
    (
        "granite",
        ("<|tool_call|> followed by a JSON list", "<think></think>"),
        replace(KNOWN["granite"], reasoning=THINK, silent=("<response>", "</response>")),
    ),
    ("granite", ("<|tool_call|> followed by a JSON list",), KNOWN["granite"]),
    ("granite", ("<|start_of_role|>available_tools<|end_of_role|>",), KNOWN["granite"]),
    ("apertus", ("<|inner_prefix|>", "<|inner_suffix|>"), _THOUGHTS["apertus"]),
    ("apriel", ("[BEGIN FINAL RESPONSE]",), _THOUGHTS["apriel"]),
    ("llama4_json", ("<|header_start|>", "<|python_start|>"), KNOWN["llama4_json"]),
    ("lfm2", ("<|tool_list_start|>", "<|tool_response_start|>"), KNOWN["lfm2"]),
    ("lfm2", ("List of tools: [", "keep_past_thinking"), replace(KNOWN["lfm2"], reasoning=THINK)),
)


def recognized(template: str) -> tuple[str, ChatFormat] | None:
    """The record of a template's text, with its name, if the text has what only such templates have."""
    return next(((name, form) for name, texts, form in _SEEN if all(t in template for t in texts)), None)


@dataclass(frozen=True, slots=True)
class Named:
    """Records that were asked for by name; None where none was."""

    tools: tuple[str, ChatFormat] | None = None
    reasoning: tuple[str, ChatFormat] | None = None

    def over(self, found: ChatFormat) -> ChatFormat:
        """The format with what was asked for in place of what was found."""
        if self.reasoning is not None:
            found = _with_reasoning(found, *self.reasoning)
        if self.tools is not None:
            name, form = self.tools
            found = replace(found, tools=form.tools, source=name)
            if form.reasoning is not None and self.reasoning is None:
                found = _with_reasoning(found, name, form)
            found = replace(found, silent=tuple(dict.fromkeys((*found.silent, *form.silent))))
            if form.prompted:
                found = replace(found, prompted=form.prompted, before_said=form.before_said)
        return found


def _with_reasoning(found: ChatFormat, name: str, form: ChatFormat) -> ChatFormat:
    return replace(
        found,
        reasoning=form.reasoning,
        before_said=form.before_said,
        silent=form.silent,
        prompted=form.prompted,
        source=name if found.tools is None else found.source,
    )


def named(tool: str | None, reasoning: str | None) -> Named:
    """The records of these names; None and "auto" mean what the template says. Raises ConfigError for unknown names."""
    return Named(
        _taken("tool_call_parser", tool, KNOWN, _ALIASES),
        _taken("reasoning_parser", reasoning, _THOUGHTS, _THOUGHT_ALIASES),
    )


def _taken(
    option: str, name: str | None, records: Mapping[str, ChatFormat], aliases: Mapping[str, str]
) -> tuple[str, ChatFormat] | None:
    if name is None or name == "auto":
        return None
    known = aliases.get(name, name)
    own = "generic" if records is KNOWN else "none"
    if known not in records:
        names = ", ".join(sorted({*records, *aliases}))
        raise ConfigError(
            f"{option} {name!r:.60} is not known: expected one of auto, {own}, {names}. "
            f"Leave it out to have the format derived from the chat template."
        )
    return name, records[known]
