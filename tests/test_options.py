"""Options of engines: what is misspelt is answered in one sentence, with the nearest name."""

import argparse
import dataclasses
import inspect

import numpy as np
import pytest

import hibachi
from hibachi.cli.main import parser
from hibachi.common.options import check_variables
from hibachi.engine import config
from hibachi.llm.options import OPTIONS, TextConfig, TextOptions
from hibachi.llm.own import open_texts
from hibachi.offline import settings as offline
from hibachi.server import settings as serving


class Model:
    vocab_size, max_model_len = 10, 64

    def logits(self, tokens, lengths):
        return np.zeros((len(tokens), 10), np.float32)

    def forward(self, tokens):
        return tokens[:, -1]


@pytest.mark.parametrize(
    "make, wrong, near",
    [
        (lambda **o: hibachi.LLM("tiny", **o), "max_num_sequences", "max_num_seqs"),
        (lambda **o: hibachi.LLM("tiny", **o), "quantisation", "quantization"),
        (lambda **o: hibachi.AutoregressiveBatchInference(Model(), **o), "stop_tokens", "stop_token"),
        (lambda **o: hibachi.AutoregressiveBatchInference(Model(), **o), "max_queued_reqs", "max_num_queued_reqs"),
        (lambda **o: hibachi.FeedforwardBatchInference(Model(), **o), "batch_size", "max_batch_size"),
        (lambda **o: open_texts(f"{__name__}:Model", **o), "scheduling_polcy", "scheduling_policy"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_nearest(make, wrong, near):
    with pytest.raises(hibachi.ConfigError, match=f"^[A-Za-z]+ has no option '{wrong}'; did you mean '{near}'\\?$"):
        make(**{wrong: 3})


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"max_num_seqs": None}, "max_num_seqs must be an integer >= 1; got None"),
        ({"block_size": 0}, "block_size must be an integer >= 1; got 0"),
        ({"max_num_queued_reqs": True}, r"max_num_queued_reqs must be an integer >= 0 \(or None: no limit\); got True"),
        ({"pause_after": 0}, r"pause_after must be an integer >= 1 \(or None: no limit\); got 0"),
        ({"restart": "always"}, 'restart must be "never"'),
        ({"stall_after": 0}, r"stall_after must be a number of seconds > 0 \(or None: never\); got 0"),
    ],
)
def test_a_wrong_value_is_refused_before_a_file_is_opened(wrong, message):
    with pytest.raises(hibachi.ConfigError, match=f"^{message}"):
        hibachi.LLM("nowhere", **wrong)


def test_one_that_resembles_nothing_is_answered_with_all():
    with pytest.raises(hibachi.ConfigError, match=r"has no option 'zz'; expected one of max_batch_size, .*record\.$"):
        hibachi.FeedforwardBatchInference(Model(), zz=1)


@pytest.mark.parametrize(
    "wrong, told",
    [
        ("max_new_tokens", "did you mean 'max_tokens'?"),
        ("tempertaure", "did you mean 'temperature'?"),
        ("do_sample", "did you mean 'temperature'? 0 is greedy"),
        ("num_beams", "beams=Beams(width=...)"),
        ("guidance_scale", "guidance=Guidance(scale, ...)"),
        ("stop_strings", "did you mean 'stop'?"),
        ("num_return_sequences", "did you mean 'n'?"),
        ("zz", "expected one of temperature, top_k"),
    ],
)
def test_parameters_of_other_libraries_are_answered_with_ours(wrong, told):
    for make in (hibachi.SamplingParams, hibachi.SamplingParams().with_):
        with pytest.raises(hibachi.InvalidCall) as refused:
            make(**{wrong: 1})
        assert told in str(refused.value) and isinstance(refused.value, TypeError)


def test_whatever_is_filled_by_keyword_says_what_it_lacks():
    for make in (hibachi.Terms, hibachi.StopRule, hibachi.StructuredOutputs):
        with pytest.raises(
            TypeError, match=f"^{make.__name__} has no option 'temperature': it is a field of the param"
        ):
            make(temperature=0)


def test_every_option_is_spelled_out():
    """So that help() and editors show it; and those of texts reach whatever makes them."""
    for face in (hibachi.LLM, hibachi.AutoregressiveBatchInference, hibachi.FeedforwardBatchInference):
        kinds = {p.kind for p in inspect.signature(face).parameters.values()}
        assert inspect.Parameter.VAR_KEYWORD not in kinds
    llm = {p.name for p in inspect.signature(hibachi.LLM).parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert llm == set(OPTIONS)


@pytest.mark.parametrize(
    "record, keywords",
    [
        (config.BatchConfig, config.BatchOptions),
        (config.EngineConfig, config.EngineOptions),
        (config.FeedforwardConfig, config.FeedforwardOptions),
        (config.WorkerConfig, config.WorkerOptions),
        (TextConfig, TextOptions),
    ],
)
def test_the_keywords_of_an_option_are_those_of_its_record(record, keywords):
    assert {one.name: one.type for one in dataclasses.fields(record)} == {
        name: kind.__forward_arg__ for name, kind in keywords.__annotations__.items()
    }


def commands(name="", of=None):
    """{command: {option: what argparse does with it}}, of all commands and those below them."""
    of, found = of or parser(), {}
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub, its in action.choices.items():
                found |= commands(f"{name} {sub}".strip(), its)
    own = {o: a for a in of._actions for o in a.option_strings if o.startswith("--")}
    return found | ({name: own} if name else {})


COMMANDS = commands()

# ---- one word everywhere ---------------------------------------------------------------------------------------------

PYTHON_ONLY = {
    "cache_tokens": "kv_cache_memory_bytes is what an operator knows",
    "reserve_all": "for programs that cannot have a request wait in the midst",
    "max_prefill_tokens": "for programs that measure",
    "record": "a file of all prompts: not by a flag that is left on",
    "overlap": "for programs that measure",
    "kv_tiers": "its fields are settings each, which begin with kv_",
}


def test_each_option_is_one_word_everywhere():
    """In Python, as a flag, in files, as a variable: of what serves and of what computes files."""
    on_serve = {name for name in OPTIONS if name not in PYTHON_ONLY}
    for settings, command, lacks in (
        (serving, "serve", set()),
        (offline, "run-batch", {"scheduling_policy", "max_num_queued_reqs", "pause_after", "restart"}),
    ):
        for name in on_serve - lacks:
            setting = settings.SETTINGS[name]
            assert (setting.key, setting.variable) == (name, f"HIBACHI_{name.upper()}")
            assert setting.flag == f"--{name.replace('_', '-')}" and setting.flag in COMMANDS[command]
        assert not {*settings.SETTINGS} & {*PYTHON_ONLY}, "an exception that is none any more"


@pytest.mark.parametrize(
    "command, said",
    [
        (
            "sim",
            "max_num_seqs max_num_batched_tokens max_prefill_tokens block_size max_model_len max_num_queued_reqs "
            "reserve_all enable_prefix_caching scheduling_policy",
        ),
        ("bench fit", "max_num_batched_tokens backend device dtype"),
        ("generate", "backend device dtype quantization autotune kernels deterministic max_model_len"),
    ],
)
def test_simulator_bench_and_generate_say_the_same_words(command, said):
    flags = {f"--{name.replace('_', '-')}" for name in said.split()}
    assert {*said.split()} <= {*OPTIONS} and flags <= {*COMMANDS[command]}


@pytest.mark.parametrize("name", ["chat_template_kwargs", "response_format", "include_reasoning", "temperature"])
def test_what_is_no_variable_of_a_template_is_not_given_to_it(name):
    with pytest.raises(hibachi.ConfigError, match=f"^LLM.chat has no option '{name}': .*[a-z=]"):
        check_variables("LLM.chat", {"enable_thinking": False, name: None})
    check_variables("LLM.chat", {"enable_thinking": False, "reasoning_effort": "low"})
