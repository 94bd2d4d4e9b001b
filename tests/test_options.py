"""Options of engines: what is misspelt is answered in one sentence, with the nearest name."""

import argparse
import inspect
import logging

import numpy as np
import pytest

import hibachi
from hibachi.cli.main import main, parser
from hibachi.common.options import RENAMED, check_variables
from hibachi.engine.declared import own_stop
from hibachi.llm.options import OPTIONS
from hibachi.llm.own import open_texts
from hibachi.offline import settings as offline
from hibachi.router import settings as router
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


def test_one_that_resembles_nothing_is_answered_with_all():
    with pytest.raises(hibachi.ConfigError, match=r"has no option 'zz'; expected one of max_batch_size, .*record\.$"):
        hibachi.FeedforwardBatchInference(Model(), zz=1)


@pytest.mark.parametrize(
    "wrong, told",
    [
        ("max_new_tokens", "it is called 'max_tokens' now"),
        ("tempertaure", "did you mean 'temperature'?"),
        ("do_sample", "did you mean 'temperature'? 0 is greedy"),
        ("num_beams", "There is no beam search"),
        ("guidance_scale", "a model may compute both rows"),
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


# ---- old names -------------------------------------------------------------------------------------------------------


def engine(**options):
    return hibachi.AutoregressiveBatchInference(Model(), **options)


def forward(**options):
    return hibachi.FeedforwardBatchInference(Model(), **options)


def run(**options):
    with engine(backend="numpy") as made:
        made.run([1], **options)


OF_ENGINES = [
    ("max_batch_size", "max_num_seqs"),
    ("max_batch_tokens", "max_num_batched_tokens"),
    ("cache_bytes", "kv_cache_memory_bytes"),
    ("prefix_cache", "enable_prefix_caching"),
    ("policy", "scheduling_policy"),
    ("max_waiting", "max_num_queued_reqs"),
    ("max_len", "max_model_len"),
]


@pytest.mark.parametrize(
    "make, what, old, new",
    [
        *((engine, "AutoregressiveBatchInference", *pair) for pair in [*OF_ENGINES, ("stop", "stop_rule")]),
        *((lambda **o: hibachi.LLM("tiny", **o), "LLM", *pair) for pair in OF_ENGINES),
        *((lambda **o: open_texts(f"{__name__}:Model", **o), "OwnTexts", *pair) for pair in OF_ENGINES),
        (forward, "FeedforwardBatchInference", "max_num_seqs", "max_batch_size"),
        (forward, "FeedforwardBatchInference", "max_waiting", "max_num_queued_reqs"),
        (run, "AutoregressiveBatchInference.run", "max_new_tokens", "max_tokens"),
        (run, "AutoregressiveBatchInference.run", "stop", "stop_rule"),
    ],
)
def test_whoever_writes_an_old_name_in_python_is_told_the_new_one(make, what, old, new):
    with pytest.raises(
        hibachi.ConfigError, match=f"^{what} has no option '{old}' any more: it is called '{new}' now\\.$"
    ):
        make(**{old: 3})


@pytest.mark.parametrize("old, new", [("load", "load_backend"), ("available", "available_backends")])
def test_old_functions_name_the_new_ones(old, new):
    module = {}
    exec(f"from hibachi import {old}", module)
    for written in (getattr(hibachi, old), module[old]):
        with pytest.raises(hibachi.ConfigError, match=f"^hibachi.{old} is called hibachi.{new} now\\.$"):
            written("numpy")
    assert callable(getattr(hibachi, new)) and new in hibachi.__all__ and old not in hibachi.__all__


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
ON_LINES = {
    "serve": {
        "--max-batch-size=3": "--max-num-seqs",
        "--max-batch-tokens=3": "--max-num-batched-tokens",
        "--cache-bytes=1G": "--kv-cache-memory-bytes",
        "--prefix-cache": "--enable-prefix-caching",
        "--no-prefix-cache": "--no-enable-prefix-caching",
        "--policy=fair": "--scheduling-policy",
        "--max-waiting=3": "--max-num-queued-reqs",
        "--max-queued=3": "--max-num-queued-reqs",
        "--max-len=64": "--max-model-len",
        "--max-new-tokens=3": "--max-tokens",
        "--cors=*": "--allowed-origins",
    },
    "route --upstream=http://127.0.0.1:1": {
        "--max-queued=3": "--max-num-queued-reqs",
        "--max-waiting=3": "--max-num-queued-reqs",
        "--cors=*": "--allowed-origins",
    },
    "run-batch -i in -o out": {
        "--max-batch-size=3": "--max-num-seqs",
        "--cache-bytes=1G": "--kv-cache-memory-bytes",
        "--no-prefix-cache": "--no-enable-prefix-caching",
        "--max-len=64": "--max-model-len",
        "--max-new-tokens=3": "--max-tokens",
    },
    "sim": {
        "--rows=3": "--max-num-seqs",
        "--max-batch-size=3": "--max-num-seqs",
        "--budget=3": "--max-num-batched-tokens",
        "--prefill=3": "--max-prefill-tokens",
        "--blocks=3": "--num-blocks",
        "--no-prefix-cache": "--no-enable-prefix-caching",
        "--policy=fair": "--scheduling-policy",
        "--max-waiting=3": "--max-num-queued-reqs",
        "--max-len=64": "--max-model-len",
    },
    "bench throughput": {
        "--rows=3": "--max-num-seqs",
        "--prefix-cache": "--enable-prefix-caching",
        "--no-prefix-cache": "--no-enable-prefix-caching",
    },
    "bench compare": {"--rows=3": "--max-num-seqs", "--prefix-cache": "--enable-prefix-caching"},
    "bench latency": {"--rows=3": "--max-num-seqs"},
    "bench growth": {"--cache-mib=3": "--kv-cache-memory-bytes"},
    "bench fit": {"--budget=3": "--max-num-batched-tokens"},
    "generate": {"--max-len=64": "--max-model-len", "--max-new-tokens=3": "--max-tokens"},
    "chat": {"--max-len=64": "--max-model-len", "--max-new-tokens=3": "--max-tokens"},
}


@pytest.mark.parametrize("line, old, new", [(c, *pair) for c, pairs in ON_LINES.items() for pair in pairs.items()])
def test_an_old_flag_is_told_the_new_one(line, old, new, capsys):
    command = line.partition(" -")[0]
    assert new in COMMANDS[command]
    with pytest.raises(SystemExit) as ended:
        main([*line.split(), old])
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (2, "")
    unit = ", in bytes: 4096M for what was 4096" if "mib" in old else ""
    assert told.err.endswith(f"hibachi {command}: error: {old.partition('=')[0]} is called {new} now{unit}\n")


@pytest.mark.parametrize(
    "line", ["route --max-queued 3", "run-batch --max-batch-size=3 -i in.csv", "bench fit --budget 3"]
)
def test_an_old_flag_is_told_before_what_is_missing(line, capsys):
    with pytest.raises(SystemExit):
        main(line.split())
    assert " now\n" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["generate", "chat", "demo", "bench growth"])
def test_no_command_is_told_a_flag_that_it_lacks(line, capsys):
    with pytest.raises(SystemExit):
        main([*line.split(), "--no-prefix-cache"])
    assert capsys.readouterr().err.endswith("error: unrecognized arguments: --no-prefix-cache\n")


SETTLED = {
    serving: {"prefix-cache": "enable-prefix-caching", "max_queued": "max-num-queued-reqs", "cors": "allowed-origins"},
    offline: {"max_batch_size": "max-num-seqs", "cache-bytes": "kv-cache-memory-bytes", "max-len": "max-model-len"},
    router: {"max-queued": "max-num-queued-reqs", "cors": "allowed-origins"},
}


@pytest.mark.parametrize(
    "settings, old, new", [(s, old, new) for s, all_ in SETTLED.items() for old, new in all_.items()]
)
def test_an_old_name_in_a_file_or_a_variable_is_told_the_new_one(settings, old, new, tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(f"{old} = 3")
    with pytest.raises(hibachi.ConfigError, match=f"config.toml: {old} is called {new} now\\.$"):
        settings.settle({}, {}, str(file))
    variable, now = (f"HIBACHI_{name.upper().replace('-', '_')}" for name in (old, new))
    assert settings.misspelled({variable: "3"}) == [f"{variable} has no effect here: its name is {now}"]


def test_run_batch_warns_of_an_old_variable(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HIBACHI_MAX_BATCH_SIZE", "3")
    (tmp_path / "in.csv").write_text("")
    main(["run-batch", "-i", str(tmp_path / "in.csv"), "-o", str(tmp_path / "out.csv")])
    remark = "hibachi: HIBACHI_MAX_BATCH_SIZE has no effect here: its name is HIBACHI_MAX_NUM_SEQS.\n"
    assert capsys.readouterr().err.startswith(remark)


def test_every_old_name_is_old():
    """No new name is an old one as well, but of feed-forward, where both are there."""
    assert {*RENAMED} & {*RENAMED.values()} == {"max_batch_size", "max_num_seqs"}
    assert not {*RENAMED} & {*OPTIONS} - {"max_num_seqs"}


class OldStop(Model):
    stop = 3


class Halts(Model):
    def stop(self):
        """Ends something of its own."""


class NewStop(Model):
    stop_rule, stop = 3, print


def test_the_old_attribute_of_a_class_is_told_of(caplog):
    with caplog.at_level(logging.WARNING, "hibachi"):
        assert own_stop(OldStop()) is None
    assert caplog.messages == ["OldStop.stop is not read: the attribute is called stop_rule now"]
    caplog.clear()
    assert own_stop(NewStop()).tokens == (3,) and own_stop(Halts()) is None and not caplog.messages


# ---- one word everywhere ---------------------------------------------------------------------------------------------

PYTHON_ONLY = {
    "cache_tokens": "kv_cache_memory_bytes is what an operator knows",
    "reserve_all": "for programs that cannot have a request wait in the midst",
    "max_prefill_tokens": "for programs that measure",
    "record": "a file of all prompts: not by a flag that is left on",
    "overlap": "for programs that measure",
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
        ("bench throughput", "max_num_seqs enable_prefix_caching max_model_len backend device dtype quantization"),
        ("bench compare", "max_num_seqs enable_prefix_caching max_model_len backend device dtype quantization"),
        ("bench latency", "max_num_seqs enable_prefix_caching max_model_len backend device dtype quantization"),
        ("bench growth", "kv_cache_memory_bytes backend device dtype"),
        ("bench fit", "max_num_batched_tokens backend device dtype"),
        ("generate", "backend device dtype quantization autotune kernels deterministic max_model_len"),
    ],
)
def test_simulator_bench_and_generate_say_the_same_words(command, said):
    flags = {f"--{name.replace('_', '-')}" for name in said.split()}
    assert {*said.split()} <= {*OPTIONS} and flags <= {*COMMANDS[command]}


def test_no_command_has_an_old_flag():
    """But where the word means something else."""
    meant = {
        "--policy": {"route"},  # of the router, which chooses an upstream
        "--rows": {"bench growth", "bench fit"},  # lists of them
        "--max-batch-size": {"serve"},  # of TGI's launcher, hidden
        "--stop": {"generate"},  # stop strings
    }
    for command, flags in COMMANDS.items():
        for old in RENAMED:
            flag = f"--{old.replace('_', '-')}"
            if old != "max_num_seqs" and flag in flags:
                assert command in meant.get(flag, ()), (command, flag)


@pytest.mark.parametrize("name", ["chat_template_kwargs", "response_format", "include_reasoning", "temperature"])
def test_what_is_no_variable_of_a_template_is_not_given_to_it(name):
    with pytest.raises(hibachi.ConfigError, match=f"^LLM.chat has no option '{name}': .*[a-z=]"):
        check_variables("LLM.chat", {"enable_thinking": False, name: None})
    check_variables("LLM.chat", {"enable_thinking": False, "reasoning_effort": "low"})
