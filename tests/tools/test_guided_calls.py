"""Calls that a model writes under their grammar: whole, as alone in any company, preempted and with proposals."""

import json

import pytest

from hibachi import LLM, SamplingParams
from hibachi.llm.chatformat.format import (
    HERMES,
    CallBegun,
    CallEnded,
    ChatFormat,
    ReasoningFormat,
    Slot,
    Tagged,
    Thinking,
    ToolFormat,
)
from hibachi.llm.chatformat.grammar.answer import checked_form
from hibachi.llm.chatformat.reading.parser import Parser
from hibachi.llm.chatformat.reading.reader import AnswerReader
from hibachi.llm.chatformat.tools import Tool, Toolbox

TOOLS = (
    Tool(
        "walk",
        {
            "type": "object",
            "properties": {"to": {"type": "string", "maxLength": 9}, "miles": {"type": "integer", "maximum": 99}},
            "required": ["to", "miles"],
        },
    ),
    Tool("dance", {"type": "object", "properties": {"with": {"enum": ["Jane", "Mary"]}}, "required": ["with"]}),
    Tool("rest", {}),
)
OFTEN = ToolFormat(call=("the <", Slot.NAME, "> ", Slot.ARGUMENTS, "</>"), marker="the")
"""Calls that begin with a word which the model says often."""
FORMATS = {
    "hermes": ChatFormat(HERMES),
    "often": ChatFormat(OFTEN, ReasoningFormat("<", "and")),
    "tagged": ChatFormat(
        ToolFormat(
            call=("the <", Slot.NAME, ">", Slot.ARGUMENTS, "</>"),
            marker="the",
            arguments=Tagged("<", ">", "</a>"),
        )
    ),
}
PROMPTS = [f"Mr. Darcy {word} " for word in ("said", "thought", "went to", "saw", "was", "had")]


def forms(llm, mode="auto"):
    """Of each format, behind reasoning and without."""
    split, ends = llm.tokenizer.split_special, llm.eos_ids
    return [
        (
            format,
            thinking,
            checked_form(
                AnswerReader(format, Toolbox(TOOLS, mode), thinking),
                None,
                split,
                llm.engine.forms.guides.check,
                ends=ends,
            ),
        )
        for format in FORMATS.values()
        for thinking in (Thinking.NONE, Thinking.OPEN)
    ]


def params(i, form):
    return SamplingParams(
        max_tokens=60, seed=i, temperature=(0.0, 1.0)[i % 2], structured_outputs=form, logprobs=1, presence_penalty=0.2
    )


def asked(llm):
    found = [*forms(llm), *forms(llm, "required")]
    return [params(i, form) for i, (_, _, form) in enumerate(found)], found


def told(answers):
    return [(a.token_ids, a.finish_reason, a.logprobs) for a in answers]


@pytest.fixture(scope="module")
def alone():
    with LLM("tiny", backend="numpy", max_num_seqs=1) as llm:
        each, found = asked(llm)
        answers = [llm.generate(PROMPTS[i % 6], one)[0] for i, one in enumerate(each)]
        return answers, found


def test_calls_come_and_keep_to_their_schemas(alone):
    whole = 0
    for answer, (format, thinking, _) in zip(*alone, strict=True):
        parser = Parser(format, Toolbox(TOOLS), thinking)
        events = [*parser.feed(answer.text), *parser.end(cut=answer.finish_reason == "length")]
        names = [e.name for e in events if isinstance(e, CallBegun)]
        ended = [e for e in events if isinstance(e, CallEnded) and e.complete]
        assert {*names} <= {"walk", "dance", "rest"} and len(ended) >= len(names) - 1, answer.text
        whole += len(ended)
    assert whole > 10


@pytest.mark.parametrize(
    "options",
    [
        dict(max_num_seqs=16),
        dict(max_num_seqs=8, cache_tokens=192, block_size=8, max_num_batched_tokens=32),
        dict(max_num_seqs=8, speculative_config={"method": "ngram", "num_speculative_tokens": 4}),
    ],
    ids=["company", "preempted", "proposals"],
)
def test_the_same_bits_as_alone(alone, options):
    with LLM("tiny", backend="numpy", **options) as llm:
        each, _ = asked(llm)
        prompts = [PROMPTS[i % 6] for i in range(len(each))]
        noise = [llm.stream("It is a truth ", SamplingParams(max_tokens=60, seed=i)) for i in range(4)]
        assert told(llm.generate(prompts, each)) == told(alone[0])
        if "cache_tokens" in options:
            assert llm.stats().preemptions
        for stream in noise:
            stream.close()


def test_a_call_that_must_come_is_whole_json():
    with LLM("tiny", backend="numpy") as llm:
        (_, _, form), *_ = forms(llm, "required")
        text = llm.generate("He ", SamplingParams(max_tokens=99, temperature=0, structured_outputs=form))[0].text
        first = text.split("</tool_call>")[0].removeprefix("<tool_call>")
        assert json.loads(first)["name"] in ("walk", "dance", "rest")
