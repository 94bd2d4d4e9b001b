"""`--compat tgi`: TGI's flags, variables, limits, names and figures; a model's name, and its fingerprint."""

from __future__ import annotations

import copy
import http.client
import importlib.util
import json
import logging
import pickle
import shutil
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hibachi import LLM
from hibachi.cli.main import main
from hibachi.engine.scheduler.policy import Fair, Priority, WaitingServed
from hibachi.errors import ConfigError
from hibachi.llm.dialects.openai.bodies import Bounds
from hibachi.llm.model.files import TINY
from hibachi.llm.own import open_texts
from hibachi.llm.remote import identity
from hibachi.llm.remote.identity import name_of, system_fingerprint
from hibachi.offline.tasks.choose import names_of as names_of_lines
from hibachi.server import load_model
from hibachi.server.metrics import is_work
from hibachi.server.served import bounds_of, names_of
from hibachi.server.settings import SETTINGS, settle
from hibachi.server.tgi_settings import BY_KEY, FLAGS, NAMELESS, TgiAsked, table
from hibachi.server.web.keys import tenants_of
from hibachi.server.web.tenants import Tenant, Tenants

from .conftest import Gate, site
from .test_metrics import Figures
from .test_streams import at_rest, until

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def without_variables(monkeypatch):
    for name in [*(s.variable for s in SETTINGS.values()), *(f.variable for f in FLAGS)]:
        monkeypatch.delenv(name, raising=False)


def tgi(flags=None, environment=None, file=None, **ours):
    """Settled with --compat tgi. flags: TGI's."""
    return settle({"compat": "tgi", **ours}, environment or {}, file, flags or {})


@pytest.fixture
def taken(monkeypatch):
    """taken(*args): the settings, and the lines for the log, that the command hands to the server."""

    def call(*args):
        found = []
        module = SimpleNamespace(serve=lambda settings, remarks: found.append((settings, remarks)) or 0)
        monkeypatch.setitem(sys.modules, "hibachi.server.run", module)
        assert main(["serve", *args]) == 0
        return found.pop()

    return call


# ---- every row of the table ------------------------------------------------------------------------------------------

TEMPLATE = "{{ messages }}"
REFUSED, NOTHING, QUIET = "refused", "nothing", "quiet"  # quiet: nothing either, but the log need not say so
GIVEN = {  # the value, and what becomes of it
    "model_id": ("org/x", {"model": "org/x"}),
    "revision": ("v1", {"model": "org/name@v1"}),
    "tokenizer_config_path": ("CONFIG", {"chat_template": TEMPLATE}),
    "dtype": ("bfloat16", {"dtype": "bfloat16"}),
    "quantize": ("eetq", {"quantization": "int8"}),
    "kv_cache_dtype": ("fp8_e5m2", REFUSED),
    "rope_scaling": ("linear", REFUSED),
    "rope_factor": ("2", REFUSED),
    "lora_adapters": ("a,b", REFUSED),
    "weights_cache_override": ("/w", REFUSED),
    "huggingface_hub_cache": ("/hub", {"tgi.huggingface_hub_cache": "/hub"}),
    "trust_remote_code": (True, NOTHING),
    "max_concurrent_requests": ("7", {"tgi.max_concurrent_requests": 7}),
    "max_best_of": ("3", {"tgi.max_best_of": 3}),
    "max_stop_sequences": ("6", {"tgi.max_stop_sequences": 6}),
    "max_top_n_tokens": ("8", {"tgi.max_top_n_tokens": 8}),
    "max_client_batch_size": ("9", {"tgi.max_client_batch_size": 9}),
    "max_input_tokens": ("50", {"tgi.max_input_tokens": 50}),
    "max_input_length": ("51", {"tgi.max_input_tokens": 51}),
    "max_total_tokens": ("100", {"max_model_len": 100, "tgi.max_total_tokens": 100}),
    "payload_limit": ("3000000", {"max_body_size": 3_000_000}),
    "max_image_fetch_size": ("1000", NOTHING),
    "max_batch_prefill_tokens": ("512", {"max_num_batched_tokens": 512}),
    "max_batch_total_tokens": ("4096", {"tgi.max_batch_total_tokens": 4096}),
    "max_batch_size": ("5", {"max_num_seqs": 5}),
    "waiting_served_ratio": ("1.2", {"tgi.waiting_served_ratio": 1.2}),
    "max_waiting_tokens": ("30", {"tgi.max_waiting_tokens": 30}),
    "hostname": ("127.0.0.2", {"host": "127.0.0.2"}),
    "port": ("80", {"port": 80}),
    "api_key": ("secret", {"api_key": ("secret",)}),
    "cors_allow_origin": ("https://a.example", {"allowed_origins": ("https://a.example",)}),
    "graceful_termination_timeout": ("3", {"drain_timeout": 3.0}),
    "json_output": (True, {"log_format": "json"}),
    "prometheus_port": ("9001", NOTHING),
    "validation_workers": ("4", NOTHING),
    "sharded": ("true", QUIET),
    "num_shard": ("2", {"tensor_parallel_size": 2}),
    "shard_uds_path": ("/tmp/x", NOTHING),
    "master_addr": ("host", NOTHING),
    "master_port": ("1", NOTHING),
    "speculate": (
        "2",
        {"speculative_config": '{"num_speculative_tokens": 2, "prompt_lookup_min": 2, "auto": true}'},
    ),
    "cuda_graphs": ("1,2", NOTHING),
    "cuda_memory_fraction": ("0.5", NOTHING),
    "disable_custom_kernels": (True, NOTHING),
    "disable_grammar_support": (True, {"tgi.disable_grammar_support": True}),
    "enable_prefill_logprobs": (True, QUIET),
    "watermark_gamma": ("0.5", NOTHING),
    "watermark_delta": ("-2", NOTHING),
    "otlp_endpoint": ("http://o", NOTHING),
    "otlp_service_name": ("n", NOTHING),
    "ngrok": (True, NOTHING),
    "ngrok_authtoken": ("secret", NOTHING),
    "ngrok_edge": ("e", NOTHING),
    "usage_stats": ("on", NOTHING),
    "env": (True, NOTHING),
}
VARIABLES = [key for key in GIVEN if key not in ("hostname", "env")]


def test_each_flag_of_the_launcher_is_tried_here():
    assert GIVEN.keys() == BY_KEY.keys() and len(FLAGS) == len(BY_KEY)


def at(settings, path):
    for part in path.split("."):
        settings = getattr(settings, part)
    return settings


def given(key, tmp_path):
    value, expected = GIVEN[key]
    if value == "CONFIG":
        file = tmp_path / "tokenizer_config.json"
        file.write_text(json.dumps({"chat_template": TEMPLATE}))
        value = str(file)
    return value, expected


def shows(key, where, expected, found):
    """What becomes of it, or that the log says why nothing does, once."""
    settings, remarks = found
    assert not any("secret" in line for line in remarks)
    mine = [line for line in remarks if where in line]
    if isinstance(expected, dict):
        assert {path: at(settings, path) for path in expected} == expected
        assert {path: at(settings_of_none(), path) for path in expected} != expected
        assert len(mine) == (key == "quantize")
        return
    assert len(mine) == (expected == NOTHING) and all(BY_KEY[key].about in line for line in mine)
    assert settings.tgi == TgiAsked()


def settings_of_none():
    return settle({"compat": "tgi"}, {})


@pytest.mark.parametrize("key", GIVEN)
def test_a_flag_becomes_what_the_table_says(key, taken, tmp_path, capsys):
    value, expected = given(key, tmp_path)
    flag = BY_KEY[key].flag
    args = ["--compat", "tgi", *(["--model-id", "org/name"] if key == "revision" else ())]
    if expected == REFUSED:
        assert main(["serve", *args, flag, value]) == 1
        assert f"hibachi: {flag} cannot be followed" in capsys.readouterr().err
        return
    for words in ([flag], [flag, value], [f"{flag}={value}"]):
        if (value is True) == (len(words) == 1 and "=" not in words[0]):
            shows(key, flag, expected, taken(*args, *words))


@pytest.mark.parametrize("key", VARIABLES)
def test_and_so_does_a_variable(key, taken, tmp_path, monkeypatch):
    value, expected = given(key, tmp_path)
    variable = BY_KEY[key].variable
    text = "true" if value is True else value
    if key == "revision":
        monkeypatch.setenv("MODEL_ID", "org/name")
    monkeypatch.setenv(variable, text)
    before = taken()[0]
    assert before.compat == "none" and before.tgi is None and before.port == 8000  # without --compat tgi it is not read
    monkeypatch.setenv("HIBACHI_COMPAT", "tgi")
    if expected == REFUSED:
        with pytest.raises(ConfigError, match=f"^{variable} cannot be followed"):
            tgi(environment={variable: text})
        return
    shows(key, variable, expected, taken())
    monkeypatch.setenv(variable, "")  # is as if it were not there
    assert not [line for line in taken()[1] if variable in line]


@pytest.mark.parametrize(
    "flags",
    [
        {"num_shard": "1"},
        {"sharded": "false"},
        {"cuda_memory_fraction": "1.0"},
        {"usage_stats": "off"},
        {"trust_remote_code": "false"},
        {"rope_factor": "1.0"},
    ],
    ids=str,
)
def test_what_changes_nothing_is_not_said(flags):
    assert tgi(flags).remarks == ()


def test_short_flags_and_several_origins(taken):
    args = ("--compat=tgi", "-p", "81", "-g", "4", "-e", "--cors-allow-origin", "https://a.b")
    found, remarks = taken(*args, "--cors-allow-origin", "https://c.d", "org/x")
    assert (found.port, found.drain_timeout, found.model) == (81, 4.0, "org/x")
    assert found.allowed_origins == ("https://a.b", "https://c.d") and len(remarks) == 1


# ---- which counts ----------------------------------------------------------------------------------------------------


def test_ours_win_and_flags_before_variables_and_the_file_is_last(tmp_path):
    file = tmp_path / "s.toml"
    file.write_text('compat = "tgi"\nmax-model-len = 60\n')
    ours, hibachi = {"max_model_len": "10"}, {"HIBACHI_MAX_MODEL_LEN": "20"}
    flag, variable = {"max_total_tokens": "30"}, {"MAX_TOTAL_TOKENS": "40"}
    found = [
        settle(ours, hibachi | variable, str(file), flag),
        settle({}, hibachi | variable, str(file), flag),
        settle({}, variable, str(file), flag),
        settle({}, variable, str(file)),
        settle({}, {}, str(file)),
    ]
    assert [s.max_model_len for s in found] == [10, 20, 30, 40, 60]
    assert [s.tgi.max_total_tokens for s in found] == [30, 30, 30, 40, None]


def test_the_flag_of_ours_may_take_it_back(tmp_path):
    found = settle({"compat": "none"}, {"HIBACHI_COMPAT": "tgi", "PORT": "5"})
    assert found.tgi is None and found.port == 8000


def test_defaults_are_the_launchers():
    found = tgi()
    assert (found.host, found.port, found.metric_names, found.drain_timeout) == ("0.0.0.0", 3000, "tgi", 90.0)
    assert (found.max_body_size, found.allowed_origins) == (2_000_000, ("*",))
    limits = found.tgi
    assert limits == TgiAsked() and limits.max_concurrent_requests == 128 and limits.max_client_batch_size == 4
    assert (limits.max_best_of, limits.max_stop_sequences, limits.max_top_n_tokens) == (2, 4, 5)
    assert tgi(metric_names="vllm").metric_names == "vllm"
    plain = settle({}, {})
    assert plain.tgi is None and plain.remarks == () and plain.max_body_size == 16 << 20 and plain.port == 8000


def test_the_name_of_a_pod_is_no_address():
    found = tgi(environment={"HOSTNAME": "pod-7"})
    assert found.host == "0.0.0.0" and [line for line in found.remarks if line.startswith("HOSTNAME ")]
    assert settle({}, {"HOSTNAME": "pod-7"}).remarks == ()


@pytest.mark.parametrize("words", [["--model-id", "x"], ["--max-total-tokens=5"], ["-p", "5"], ["--json-output"]])
def test_without_compat_its_flags_are_unknown_and_no_model(words, capsys):
    with pytest.raises(SystemExit) as e:
        main(["serve", *words])
    assert e.value.code == 2
    err = capsys.readouterr().err
    assert "unrecognized arguments: --" in err and "--compat tgi takes them" in err and "Traceback" not in err


def test_what_nobody_knows_is_unknown_with_compat_too(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--compat", "tgi", "--max-total-token", "5"])
    assert "unrecognized arguments: --max-total-token" in capsys.readouterr().err


# ---- what does not go together ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"max_input_tokens": "100", "max_total_tokens": "100"}, "max-input-tokens must be less than max-total-tokens"),
        ({"max_total_tokens": "101", "max_batch_total_tokens": "100"}, "at most max-batch-total-tokens.* 101 and 100"),
        ({"max_batch_prefill_tokens": "101", "max_batch_total_tokens": "100"}, "max-batch-prefill-tokens must be"),
        ({"max_input_tokens": "5", "max_input_length": "5"}, "--max-input-tokens and --max-input-length say the same"),
        ({"quantize": "gptq"}, "^--quantize gptq: .* --quantization int8"),
        ({"quantize": "int8"}, "^--quantize: expected one of awq"),
        ({"max_batch_size": "0"}, "^--max-batch-size: expected an integer >= 1; got '0'"),
        ({"validation_workers": "0"}, "^--validation-workers: expected an integer >= 1"),
        ({"waiting_served_ratio": "nan"}, "^--waiting-served-ratio: expected a number >= 0; got 'nan'"),
        ({"port": "65536"}, "^--port: expected an integer from 0 to 65535"),
        ({"tokenizer_config_path": "no/such"}, "^--tokenizer-config-path no/such: expected a tokenizer_config.json"),
    ],
    ids=str,
)
def test_a_wrong_value_is_explained(flags, message):
    with pytest.raises(ConfigError, match=message):
        tgi(flags)


def test_what_just_goes_together():
    found = tgi({"max_input_tokens": "99", "max_total_tokens": "100", "max_batch_total_tokens": "100"})
    assert found.tgi.max_batch_total_tokens == 100
    flags = {"max_batch_prefill_tokens": "50", "max_input_tokens": "99", "max_batch_total_tokens": "50"}
    assert tgi(flags).max_num_batched_tokens == 50  # less than the longest prompt, which is computed in parts


def test_an_error_names_the_variable_and_shows_no_key():
    with pytest.raises(ConfigError, match=r"^MAX_BEST_OF: expected an integer >= 1; got 'x'"):
        tgi(environment={"MAX_BEST_OF": "x"})
    with pytest.raises(ConfigError, match=r"^--max-input-tokens and MAX_INPUT_LENGTH say the same"):
        tgi({"max_input_tokens": "5"}, {"MAX_INPUT_LENGTH": "6"})
    with pytest.raises(ConfigError) as e:
        tgi({"api_key": ""})
    assert "got something else" in str(e.value)


@pytest.mark.parametrize(
    "model, revision, found",
    [
        ("org/name", "v1", "org/name@v1"),
        ("org/name@v0", "v1", "org/name@v0"),
        ("pkg:Class", "v1", "pkg:Class"),
        (str(TINY), "v1", str(TINY)),
        ("tiny", "v1", "tiny"),
        ("org/name", None, "org/name"),
    ],
)
def test_a_revision_is_of_names_on_the_hub(model, revision, found):
    settings = tgi({"model_id": model, "revision": revision})
    assert settings.model == found and bool(settings.remarks) == (revision is not None and found == model)


def test_a_tokenizers_config_may_have_no_template_or_several(tmp_path):
    file = tmp_path / "c.json"
    several = [{"name": "tool", "template": "x"}, {"name": "default", "template": "{{ 1 }}"}]
    for config, template in (
        ({}, None),
        ([], None),
        ({"chat_template": 5}, None),
        ({"chat_template": several[:1]}, None),
        ({"chat_template": several}, "{{ 1 }}"),
    ):
        file.write_text(json.dumps(config))
        found = tgi({"tokenizer_config_path": str(file)})
        assert found.chat_template == template and len(found.remarks) == (template is None)


# ---- what reaches the engine -----------------------------------------------------------------------------------------


def options(settings):
    return load_model.options(settings, tenants_of(settings))


def test_prompts_wait_if_one_of_the_two_flags_is_given():
    assert options(tgi())["scheduling_policy"] is None
    policy = options(tgi({"waiting_served_ratio": "1.5"}))["scheduling_policy"]
    assert isinstance(policy, WaitingServed) and (policy.ratio, policy.patience) == (1.5, 20)
    assert isinstance(policy.order, Priority)
    policy = options(tgi({"max_waiting_tokens": "7"}))["scheduling_policy"]
    assert (policy.ratio, policy.patience) == (0.3, 7)
    assert options(tgi({"max_waiting_tokens": "7"}, scheduling_policy="fcfs"))["scheduling_policy"] == "fcfs"
    several = options(tgi({"max_waiting_tokens": "7"}, api_key=["a", "b"]))["scheduling_policy"]
    assert isinstance(several.order, Fair)
    for other in (pickle.loads(pickle.dumps(policy)), copy.deepcopy(policy)):  # to another process; to begin again
        assert (other.ratio, other.patience) == (0.3, 7) and other.rank.__self__ is other.order is not policy.order


def test_tokens_of_the_batch_are_what_the_cache_holds():
    found = options(tgi({"max_batch_total_tokens": "4096"}))
    assert found["cache_tokens"] == 4096
    assert "cache_tokens" not in options(tgi({"max_batch_total_tokens": "4096"}, kv_cache_memory_bytes="1M"))
    with LLM("tiny", cache_tokens=100, block_size=16) as llm:
        assert llm.engine.facts.limits.blocks == 7 + 1  # one for what nobody reads
    with pytest.raises(ConfigError, match="cache_tokens"):
        LLM("tiny", cache_tokens=0)


def test_of_openais_limits_only_the_number_of_prompts_changes():
    assert bounds_of(tgi(), 64) == replace(bounds_of(settle({}, {}), 64), prompts=4)


# ---- names -----------------------------------------------------------------------------------------------------------


def test_a_model_is_called_by_the_last_part_of_its_path(tmp_path, monkeypatch):
    for name in ("folder", "some.model", "file.gguf"):
        (tmp_path / name).touch()
    assert name_of(str(tmp_path / "folder")) == "folder" == name_of(f"{tmp_path}/folder/")
    assert name_of(str(tmp_path / "some.model")) == "some.model"
    assert name_of(str(tmp_path / "file.gguf")) == "file"
    for given in ("org/name", "org/name/file.gguf", "org/name@v1", "pkg:Class", "pkg.mod:Class.Inner", "tiny"):
        assert name_of(given) == given
    monkeypatch.chdir(tmp_path)
    assert name_of(".") == tmp_path.name and name_of("file.gguf") == "file"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert name_of("~/file.gguf") == "file"
    path = str(tmp_path / "file.gguf")
    assert names_of_lines(path) == (path, "file") and names_of_lines("org/name") == ("org/name",)


def test_with_compat_any_model_is_called_tgi_too():
    assert names_of(tgi({"model_id": "org/name"})) == ("tgi", "org/name")
    assert names_of(settle({"model": "org/name"}, {})) == ("org/name",)


# ---- the fingerprint -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def facts():
    with LLM("tiny") as llm:
        return llm.engine.facts


def test_a_fingerprint_is_of_bits_and_files_not_of_places(facts, tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "SMALL", 1000)  # so that the weights are read in pieces
    monkeypatch.setattr(identity, "PIECE", 64)
    mine = system_fingerprint(facts, "tiny")
    assert mine.startswith("fp_") and len(mine) == 15 and int(mine[3:], 16) >= 0
    here = tmp_path / "elsewhere"
    shutil.copytree(TINY, here)
    (here / "README.md").write_text("of no account")
    assert system_fingerprint(facts, str(here)) == mine == system_fingerprint(facts, str(TINY))
    # the name of the bits counts, and not which library computed them
    assert system_fingerprint(replace(facts, fingerprint="another"), "tiny") == mine
    others = [
        replace(facts, numerics=None),
        replace(facts, numerics=None, fingerprint="another"),
        replace(facts, numerics="cpu-0 float32"),
        replace(facts, dtype="bfloat16"),
        replace(facts, quantization="int8"),
    ]
    found = {system_fingerprint(other, "tiny") for other in others}
    for place in ("config.json", "weights", "end"):
        file = here / "config.json" if place == "config.json" else max(here.glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-1 if place == "end" else (len(data) - 64) // 15 * 3 + 32 if place == "weights" else 1] ^= 1
        file.write_bytes(data)
        found.add(system_fingerprint(facts, str(here)))
    monkeypatch.setattr(identity, "MEANING", 1)
    found.add(system_fingerprint(facts, "tiny"))
    assert len(found) == 9 and mine not in found


def test_of_a_model_of_ones_own_its_file_counts(facts, tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    file.write_text("x = 1")
    one = system_fingerprint(facts, f"{file}:A")
    assert one != system_fingerprint(facts, f"{file}:B")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "pkg" / "mod.py").write_text("x = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    named = system_fingerprint(facts, "pkg.mod:A")
    (tmp_path / "pkg" / "mod.py").write_text("x = 2")
    file.write_text("x = 2")
    assert named != system_fingerprint(facts, "pkg.mod:A") and one != system_fingerprint(facts, f"{file}:A")
    assert system_fingerprint(facts, "no_such.module:A") != named  # nothing is read of what is not there


def test_the_engine_in_another_process_gives_the_same(texts):
    assert system_fingerprint(texts.engine.facts, "tiny") == system_fingerprint(replace(texts.engine.facts), str(TINY))
    assert texts.engine.facts.quantization == "none"


# ---- served ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compat(texts):
    with site(texts, metric_names="tgi", tgi=TgiAsked(max_input_tokens=20, max_total_tokens=40)) as here:
        yield here


def refusal(answer, status, code=None):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert code is None or error["code"] == code, error
    return error


def test_a_request_may_call_the_model_tgi_or_by_its_name(compat):
    assert compat.complete("Emma")["model"] == "tgi"
    assert compat.complete("Emma", model="tiny")["model"] == "tiny"
    fingerprint = system_fingerprint(compat.texts.engine.facts, "tiny")
    assert compat.complete("Emma", model="tgi")["system_fingerprint"] == fingerprint
    body = {"prompt": "Emma", "max_tokens": 2, "stream": True}
    assert f'"system_fingerprint":"{fingerprint}"' in compat.post("/v1/completions", body).text


@pytest.mark.parametrize("name", sorted(NAMELESS))
def test_a_client_that_was_told_no_name(compat, server, name):
    """huggingface_hub's chat_completion says "dummy" then. It is listed nowhere, and a model may be called so."""
    assert compat.complete("Emma", model=name)["model"] == "tgi"
    assert [m["id"] for m in compat.client.get("/v1/models").json()["data"]] == ["tgi", "tiny"]
    if name:
        refusal(compat.client.get(f"/v1/models/{name}"), 404, "model_not_found")
        with site(compat.texts, served_model_name=("tiny", name), tgi=TgiAsked()) as here:
            assert here.complete("Emma", model=name)["model"] == name
    # Without --compat tgi:
    refusal(server.post("/v1/completions", {"prompt": "a", "model": name}), 404, "model_not_found")


def test_t37_five_prompts_are_400_by_name(compat):
    """T-37."""
    refused = refusal(compat.post("/v1/completions", {"prompt": ["a"] * 5, "max_tokens": 1}), 400)
    assert refused["param"] == "prompt" and "4" in refused["message"]
    assert len(compat.complete(["a"] * 4, max_tokens=1)["choices"]) == 4


def test_k29_statuses_of_bad_requests(compat):
    """K-29: kvboost's 422 and 422 are 400; 503 of a full queue is 429: see below, and test_overload.py."""
    assert refusal(compat.post("/v1/completions", {"model": "other", "prompt": "a"}), 404, "model_not_found")
    assert refusal(compat.post("/v1/completions", {"prompt": []}), 400)["param"] == "prompt"
    assert refusal(compat.post("/v1/completions", {"prompt": "a", "max_tokens": 0}), 400)["param"] == "max_tokens"


def test_the_longest_prompt_is_that_of_every_route(compat):
    """T-25: and TGI's routes say it in TGI's way."""
    error = refusal(compat.post("/v1/completions", {"prompt": [5] * 21, "max_tokens": 1}), 400)
    assert error["code"] == "context_length_exceeded" and "limit of 20 tokens" in error["message"]
    assert compat.complete([5] * 20, max_tokens=1)
    answer = compat.post("/generate", {"inputs": "Emma", "parameters": {"max_new_tokens": 100}})
    assert answer.status_code == 422 and "must be <= 40" in answer.json()["error"]
    assert answer.json()["error_type"] == "validation"


def test_t35_figures_count_what_became_of_requests(texts):
    """T-35: one good request and one bad one; the bad stream has the status 200, and counts as a failure."""
    with site(texts, metric_names="tgi", tgi=TgiAsked()) as here:
        assert here.post("/generate", {"inputs": "Emma", "parameters": {"max_new_tokens": 2}}).status_code == 200
        bad = here.post("/generate_stream", {"inputs": "", "parameters": {}})
        assert bad.status_code == 200 and '"error_type":"validation"' in bad.text
        assert here.client.get("/").status_code == here.client.get("/health").status_code == 200
        until(lambda: at_rest(here))
        now = Figures(here.client.get("/metrics").text)
        assert now["tgi_request_count_total"] == 2 and now["tgi_request_success_total"] == 1
        failures = {key[1]: value for key, value in now.items() if key[0] == "tgi_request_failure_total"}
        assert failures == {"generation": 0, "dropped": 0, "overloaded": 0, "validation": 1, "template": 0}
        assert is_work("POST", "/") and not is_work("GET", "/")  # which is asked every few seconds
        for path in ("/", "/invocations", "/generate"):
            assert here.post(path, {"inputs": "", "parameters": {}}).status_code == 422
        now = Figures(here.client.get("/metrics").text)
        assert now["tgi_request_count_total"] == 5 and now["tgi_request_failure_total", "validation"] == 4
        refusal(here.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}), 400)
        now = Figures(here.client.get("/metrics").text)
        assert now["tgi_request_failure_total", "template"] == 1 and now["tgi_request_failure_total", "validation"] == 4


@pytest.fixture
def full(tmp_path):
    """A server for two requests at once, and the gate of its model."""
    gate = Gate(tmp_path)
    limits = TgiAsked(max_concurrent_requests=2)
    with open_texts(gate.model, max_num_seqs=4, max_model_len=64) as texts, site(texts, tgi=limits) as here:
        yield gate, here
        gate.open()
    gate.close()


BYTES = {"prompt": [65], "max_tokens": 3}


def begun(here, path="/v1/completions", body=BYTES):
    """A request in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(here.post(path, body)))
    thread.start()
    return thread, found


def test_t32_one_more_is_refused_at_once_before_anything_of_it_is_read(full):
    """T-32."""
    gate, here = full
    first = [begun(here), begun(here, body={**BYTES, "stream": True})]
    until(lambda: len(here.served.meter.open) == 2)
    wrong = {"prompt": [], "nonsense": 1}
    for body in (BYTES, wrong):  # before validation
        answer = here.post("/v1/completions", body)
        assert refusal(answer, 429, "overloaded")["message"] == "Model is overloaded"
        assert answer.headers["retry-after"] == "1"
    for path in ("/generate", "/", "/invocations"):
        answer = here.post(path, {"inputs": "a"})
        assert (answer.status_code, answer.json()) == (
            429,
            {"error": "Model is overloaded", "error_type": "overloaded"},
        )
    stream = here.post("/generate_stream", {"inputs": "a"})
    assert stream.status_code == 200 and '"error_type":"overloaded"' in stream.text
    # what computes nothing is answered
    for path in ("/health", "/info", "/v1/models", "/metrics"):
        assert here.client.get(path).status_code == 200, path
    assert here.post("/tokenize", {"prompt": "a"}).status_code == 200
    gate.open()
    for thread, found in first:
        thread.join()
        assert found[0].status_code == 200
    assert here.complete([65], max_tokens=1)  # there is room again, also after those refused
    assert refusal(here.post("/v1/completions", wrong), 400)


@pytest.mark.parametrize("stream", (False, True), ids=("whole", "stream"))
def test_who_has_the_whole_answer_may_ask_again_at_once(stream):
    """Even where that is all that may be served at once; on another connection, as on the same one requests wait."""
    keys = Tenants((("key-1", "one"),), {"one": Tenant(max_requests=1)})
    body = json.dumps({**BYTES, "stream": stream})
    headers = {"Authorization": "Bearer key-1", "Content-Type": "application/json"}
    limits, options = TgiAsked(max_concurrent_requests=1), {"max_num_seqs": 4, "max_model_len": 64}
    with open_texts("tiny", **options) as texts, site(texts, tgi=limits, tenants=keys) as here:
        lines = [http.client.HTTPConnection("127.0.0.1", here.port) for _ in range(2)]
        for i in range(120):
            line = lines[i % 2]
            line.request("POST", "/v1/completions", body, headers)
            answer = line.getresponse()
            said = answer.read()
            assert answer.status == 200, (i, said)
        for line in lines:
            line.close()


def test_who_sends_slowly_or_leaves_takes_nobodys_place(full):
    gate, here = full
    gate.open()
    lines = [socket.create_connection(("127.0.0.1", here.port)) for _ in range(4)]
    for line in lines:
        line.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    until(lambda: here.served.open_requests == 4)
    assert here.complete([65], max_tokens=1)
    for line in lines:
        line.close()
    until(lambda: here.served.open_requests == 0)
    for _ in range(3):
        assert here.complete([65], max_tokens=1)


@pytest.mark.parametrize("sent", ["{", '{"inputs": ""}', '{"inputs": "a"}', '{"prompt": "a", "x": 1}'])
@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/", "/invocations", "/v1/completions", "/v1/warm"])
def test_a_place_is_free_again_however_a_request_ends(compat, path, sent, monkeypatch):
    """There are two: read to its end, left before its answer, after its first bytes, and refused."""
    monkeypatch.setattr(compat.served.gate, "most", 2)
    for how in ("read", "first", "at once") * 3:
        with socket.create_connection(("127.0.0.1", compat.port)) as line:
            line.sendall(
                f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                f"Connection: close\r\nContent-Length: {len(sent)}\r\n\r\n{sent}".encode()
            )
            while how != "at once" and line.recv(4096 if how == "read" else 20) and how == "read":
                pass
        until(lambda: compat.served.open_requests == 0)
    assert compat.complete([65], max_tokens=1)


def test_without_compat_there_is_no_such_limit(server):
    assert server.served.gate.most is None and server.served.tgi.max_concurrent_requests is None
    assert len(server.complete(["a"] * 5, max_tokens=1)["choices"]) == 5


def test_what_is_opened_has_it_all(monkeypatch):
    before = logging.getLogger("hibachi").level
    settings = tgi({"max_input_tokens": "100", "max_total_tokens": "200", "max_best_of": "3"}, engine="own")
    served = load_model.opened(settings)
    try:
        assert list(served.names) == ["tgi", "tiny"] and served.max_model_len == 200
        assert served.tgi == settings.tgi == TgiAsked(max_best_of=3, max_input_tokens=100, max_total_tokens=200)
        assert served.reading.longest == 100 and served.gate.most == 128 and served.check_name("dummy") == "tgi"
        assert served.fingerprint == system_fingerprint(served.what.engine.facts, "tiny")
        assert served.bounds.prompts == 4 and served.bounds.n == Bounds().n
    finally:
        served.what.close()
        logging.getLogger("hibachi").setLevel(before)


@pytest.mark.parametrize("engine", ("own", "child"))
def test_a_model_that_is_shown_whole_sequences_is_warned_of(engine, caplog):
    settings = tgi({"max_total_tokens": "64"}, engine=engine, model="tests/serve/anytoken.py:Next")
    load_model.opened(settings).what.close()
    assert "Next is slow with many requests: each step computes whole sequences; with `past` and" in caplog.text


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_table_of_the_page_is_that_of_the_code():
    spec = importlib.util.spec_from_file_location("serving_tables", ROOT / "docs" / "serving_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    page = tables.COMING.read_text()
    assert tables.written(page, tables.OF_TGI) == page, "run: python docs/serving_tables.py"
    assert all(f"`{flag.flag}`" in table() for flag in FLAGS)
