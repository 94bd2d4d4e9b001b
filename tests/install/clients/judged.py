"""hibachi as canitoolcall wants an engine: its readers of answers, by the templates of the models that it names."""

from pathlib import Path

from canitoolcall.adapters.base import Adapter, Support
from canitoolcall.results import ParsedToolCall, ParseResult

from hibachi.llm.chatformat.format import PLAIN, thinking_of
from hibachi.llm.chatformat.reading.parser import Parser
from hibachi.llm.chatformat.reading.whole import joined
from hibachi.llm.chatformat.templates.choosing import Formats
from hibachi.llm.chatformat.templates.known import named
from hibachi.llm.chatformat.tools import Tool, Toolbox
from hibachi.llm.tokenizers import render_chat

TEMPLATES = Path(__file__).parents[3] / ".templates"
FORMS = {  # a template, or the records of calls and of reasoning where none of the templates is the model's
    "deepseek-ai/DeepSeek-V3-0324": ("deepseek_v3", None),
    "deepseek-ai/DeepSeek-V3.1": "deepseek-ai-DeepSeek-V3.1",
    "deepseek-ai/DeepSeek-V3.2": "deepseek-ai-DeepSeek-V3.2",
    "deepseek-ai/DeepSeek-V4-Flash": "deepseek-ai-DeepSeek-V4",
    "deepseek-ai/DeepSeek-V4.1-Flash": ("deepseek_v41", "deepseek_v32"),
    "google/gemma-4-31B-it": "google-gemma-4-31B-it",
    "zai-org/GLM-4.5": "GLM-4.6",
    "zai-org/GLM-4.7": "GLM-4.7-Flash",
    "zai-org/GLM-5.3": "GLM-4.7-Flash",
    "openai/gpt-oss-20b": "openai-gpt-oss-120b",
    "moonshotai/Kimi-K2-Instruct-0905": "Kimi-K2-Instruct",
    "moonshotai/Kimi-K2.6": "Kimi-K2-Thinking",
    "moonshotai/Kimi-K3": "Kimi-K3",
    "meta-llama/Llama-3.3-70B-Instruct": "meta-llama-Llama-3.3-70B-Instruct",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": ("llama4_pythonic", None),
    "mistralai/Devstral-Small-2507": "unsloth-mistral-Devstral-Small-2507",
    "mistralai/Magistral-Small-2506": ("mistral", "qwen3"),  # which thinks in plain text
    "mistralai/Magistral-Small-2509": ("mistral", "magistral"),
    "mistralai/Ministral-3-14B-Instruct-2512": ("mistral", None),
    "mistralai/Ministral-3-14B-Reasoning-2512": "mistralai-Ministral-3-14B-Reasoning-2512",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistralai-Mistral-Nemo-Instruct-2407",
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": "Mistral-Small-3.2-24B-Instruct-2506",
    "Qwen/Qwen3-0.6B": "Qwen-Qwen3-0.6B",
    "Qwen/Qwen3-4B-Instruct-2507": "Qwen-Qwen3-0.6B",
    "Qwen/Qwen3-4B-Thinking-2507": "Qwen-Qwen3-0.6B",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": "Qwen3-Coder",
    "Qwen/Qwen3-Coder-Next": "Qwen3-Coder",
    "Qwen/Qwen3.5-9B": "Qwen3.5-4B",
    "Qwen/Qwen3.8-27B": "Qwen3.5-4B",
}


class Hibachi(Adapter):
    """A unit is one character, so that a text may be cut anywhere. A call that is marked as incomplete is none."""

    name, pinned_version = "hibachi", "0"

    def __init__(self):
        self._formats = Formats()

    def version(self):
        return self.pinned_version

    def supports(self, family, model):
        return Support(model in FORMS)

    def parser_config(self, raw):
        return {"format": str(FORMS[raw.model])}

    def units(self, raw):
        return list(map(ord, raw.text))

    def parse(self, raw, tools):
        return self.parse_stream(raw, [self.units(raw)], tools)

    def parse_stream(self, raw, chunks, tools):
        format = self._format(raw.model)
        asked = (tool["function"] for tool in tools)
        box = Toolbox(tuple(Tool(each["name"], each.get("parameters") or {"type": "object"}) for each in asked))
        parser = Parser(format, box, thinking_of(format.reasoning, raw.generation_prompt or ""))
        events = [event for chunk in chunks for event in parser.feed("".join(map(chr, chunk)))]
        answer = joined([*events, *parser.end(raw.truncated)])
        calls = (ParsedToolCall(call.name, call.arguments) for call in answer.calls if call.complete)
        return ParseResult(answer.content or None, answer.reasoning, tuple(calls))

    def _format(self, model):
        form = FORMS[model]
        if isinstance(form, tuple):
            return named(*form).over(PLAIN)
        template = (TEMPLATES / f"{form}.jinja").read_text()
        ends = {"bos_token": "<s>", "eos_token": "</s>"}
        return self._formats.of(template, lambda messages, **more: render_chat(template, messages, **{**ends, **more}))
