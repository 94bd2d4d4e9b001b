"""Settings: from flags, the environment, a file or the default; that each reaches its place; keys and tenants."""

import importlib.util
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hibachi import KVTiers
from hibachi.cli import main
from hibachi.common.settings.kinds import SWITCH
from hibachi.errors import ConfigError
from hibachi.llm.remote.opening import engine_options
from hibachi.llm.remote.settings import tiers_of
from hibachi.request import SamplingParams, Terms
from hibachi.server import load_model as opening
from hibachi.server.settings import GROUPS, SETTINGS, misspelled, settle
from hibachi.server.web.keys import tenants_of
from hibachi.server.web.tenants import Tenant

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def log_as_before():
    """`hibachi serve` decides where its log goes, which is not for the tests after these."""
    loggers = [logging.getLogger(name) for name in ("hibachi", "uvicorn.error", "asyncio")]
    before = [(log.handlers, log.propagate, log.level) for log in loggers]
    yield
    for log, (handlers, propagate, level) in zip(loggers, before, strict=True):
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)


def settings(**flags):
    return settle(flags, {})


def as_file(tmp_path, text, name="serve.toml"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


# ---- where values come from ------------------------------------------------------------------------------------------

# A value other than the default for each setting: as text, and what becomes of it.
GIVEN = {
    "model": ("m", "m"),
    "served_model_name": ("a b", ("a", "b")),
    "backend": ("torch", "torch"),
    "device": ("cuda:1", "cuda:1"),
    "dtype": ("bfloat16", "bfloat16"),
    "quantization": ("int8", "int8"),
    "gguf_unpack": ("true", True),
    "autotune": ("off", "off"),
    "kernels": ("kernels.json", "kernels.json"),
    "deterministic": ("true", True),
    "numerics": ("cpu-7", "cpu-7"),
    "tensor_parallel_size": ("2", 2),
    "tp_leaves": ("4", 4),
    "pipeline_parallel_size": ("2", 2),
    "max_model_len": ("77", 77),
    "generation_config": ("vllm", "vllm"),
    "chat_template": ("chatml", "chatml"),
    "seed": ("5", 5),
    "engine": ("own", "own"),
    "max_num_seqs": ("3", 3),
    "max_num_batched_tokens": ("100", 100),
    "block_size": ("32", 32),
    "kv_cache_memory_bytes": ("1.5GiB", 3 << 29),
    "speculative_config": ("auto", "auto"),
    "enable_prefix_caching": ("no", False),
    "scheduling_policy": ("fcfs", "fcfs"),
    "restart": ("1", True),
    "exit_on_failure": ("1", True),
    "kv_host_bytes": ("1M", 1 << 20),
    "kv_disk": ("kv", "kv"),
    "kv_disk_bytes": ("2M", 2 << 20),
    "kv_store": ("redis://h", "redis://h"),
    "kv_key_file": ("key", "key"),
    "kv_load_failure": ("fail", "fail"),
    "kv_eviction": ("frequency", "frequency"),
    "kv_recency_window": ("3", 3),
    "stall_after": ("2.5", 2.5),
    "host": ("::1", "::1"),
    "port": ("0", 0),
    "uds": ("s.sock", "s.sock"),
    "ssl_certfile": ("c.pem", "c.pem"),
    "ssl_keyfile": ("k.pem", "k.pem"),
    "ssl_ca_certs": ("a.pem", "a.pem"),
    "root_path": ("/llm", "/llm"),
    "allowed_origins": ("https://a.example https://b.example", ("https://a.example", "https://b.example")),
    "api_key": ("k1 k2", ("k1", "k2")),
    "api_keys": ("keys.toml", "keys.toml"),
    "share_prefixes": ("on", True),
    "max_num_queued_reqs": ("9", 9),
    "request_timeout": ("8", 8.0),
    "queue_timeout": ("7", 7.0),
    "max_tokens": ("20", 20),
    "arrival_timeout": ("3", 3.0),
    "pause_after": ("6", 6),
    "drain_timeout": ("5", 5.0),
    "max_body_size": ("2k", 2048),
    "responses_store": ("off", 0),
    "max_logprobs": ("4", 4),
    "max_n": ("2", 2),
    "tool_call_parser": ("hermes", "hermes"),
    "reasoning_parser": ("none", "none"),
    "reasoning_field": ("both", "both"),
    "split_special_tokens": ("off", False),
    "enable_auto_tool_choice": ("off", False),
    "compat": ("tgi", "tgi"),
    "metric_names": ("vllm", "vllm"),
    "log_format": ("json", "json"),
    "log_level": ("debug", "debug"),
}


def test_there_are_at_most_69_flags_and_each_is_tried_here(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out.replace("--[no-]", "--")  # TGI's are not shown: see test_compat.py
    flags = set(re.findall(r"^  (?:-\w, )?--([a-z-]+)", shown, re.MULTILINE)) - {"help"}
    assert len(flags) <= 69
    assert {flag.replace("-", "_") for flag in flags} == {*SETTINGS, "config"}
    assert GIVEN.keys() == SETTINGS.keys()


@pytest.fixture
def taken(monkeypatch):
    """taken(*args): the settings that the command hands to the server."""
    found = []

    def call(*args):
        module = SimpleNamespace(serve=lambda settings, remarks: found.append(settings) or 0)
        monkeypatch.setitem(sys.modules, "hibachi.server.run", module)
        assert main(["serve", *args]) == 0
        return found.pop()

    for setting in SETTINGS.values():
        monkeypatch.delenv(setting.variable, raising=False)
    return call


@pytest.mark.parametrize("key", GIVEN)
def test_a_setting_comes_from_a_flag_a_variable_or_a_file_in_this_order(key, taken, tmp_path, monkeypatch):
    setting, (text, value) = SETTINGS[key], GIVEN[key]
    default = getattr(taken(), key)
    assert default != value
    flags = [setting.flag, *(text.split() if setting.kind.many else [text])]
    if setting.kind is SWITCH:
        flags = [setting.flag if value else f"--no-{setting.name}"]
    assert getattr(taken(*flags), key) == value

    monkeypatch.setenv(setting.variable, text)
    assert getattr(taken(), key) == value
    monkeypatch.delenv(setting.variable)

    if isinstance(value, bool):
        written, other = str(value).lower(), str(not value).lower()
    elif isinstance(value, (int, float)):
        written, other = repr(value), repr(value + 1)
    else:
        written, other = repr(list(value) if isinstance(value, tuple) else value), '["other"]'
        names = {"tool_call_parser": '"xlam"', "reasoning_parser": '"cohere"'}  # of which only some are taken
        other = other if setting.kind.many else names.get(key, '"other"')
    for name in (setting.name, key):
        assert getattr(taken("--config", as_file(tmp_path, f"{name} = {written}\n")), key) == value

    if setting.kind.metavar.count("|") == 0 or key == "generation_config":  # the flag wins over all, and so on down
        file = as_file(tmp_path, f"{key} = {other}\n")
        assert getattr(taken("--config", file), key) not in (value, default) or setting.kind is SWITCH
        monkeypatch.setenv(setting.variable, text)
        assert getattr(taken("--config", file), key) == value
        if setting.kind is SWITCH:
            flags[0] = f"--no-{setting.name}" if value else setting.flag
            assert getattr(taken("--config", file, *flags), key) is not value


def test_the_model_may_stand_without_a_flag(taken):
    assert taken("m").model == taken("--model", "m").model == "m"
    assert taken("m", "--model", "m").model == "m"


@pytest.mark.parametrize(
    "args, message",
    [
        (["--port", "x"], "hibachi: --port: expected an integer from 0 to 65535; got 'x'.\n"),
        (["--port", "65536"], "--port: expected an integer from 0 to 65535; got '65536'."),
        (["--engine", "both"], "--engine: expected one of child, own; got 'both'."),
        (["--max-num-seqs", "0"], "--max-num-seqs: expected an integer >= 1; got '0'."),
        (["--request-timeout", "nan"], "--request-timeout: expected seconds >= 0; got 'nan'."),
        (["--max-body-size", "1X"], "--max-body-size: expected bytes, such as 1048576, 512M or 4G; got '1X'."),
        (["--host", ""], "--host: expected a text; got ''."),
        (["a", "--model", "b"], "Two models were given: a and --model b."),
        (["--config", "no/such.toml"], "--config no/such.toml: No such file"),
        (["--api-keys", "no/such.toml"], "--api-keys no/such.toml: No such file"),
        (["--ssl-keyfile", "k"], "--ssl-keyfile is the key of --ssl-certfile, which is missing."),
        (["--ssl-certfile", "no/such"], "--ssl-certfile no/such"),
        (["--ssl-ca-certs", "ca"], "checks the certificates of clients over TLS, so it needs --ssl-certfile."),
        (["--root-path", "llm"], "--root-path: expected a path such as /llm, without a slash at its end; got 'llm'."),
        (["--allowed-origins", "page.example"], "--allowed-origins: expected origins, such as https://page.example"),
        (["--chat-template", "no/such.jinja", "--port", "0"], "no/such.jinja: there is no such file"),
        (["--generation-config", "no/such", "--engine", "own", "--port", "0"], "expected auto, vllm, or a folder"),
        (["--scheduling-policy", "luck", "--engine", "own", "--port", "0"], "No policy is called 'luck'"),
        (["--uds", "no/such/socket"], "--uds no/such/socket: no such file"),
    ],
)
def test_a_wrong_value_is_explained_in_a_line(args, message, capsys):
    assert main(["serve", *args]) == 1
    out, err = capsys.readouterr()
    assert message in err and err.splitlines()[-1].startswith("hibachi: ") and not out
    assert "Traceback" not in err


def test_errors_name_the_variable_or_the_file(tmp_path):
    with pytest.raises(ConfigError, match=r"^HIBACHI_PORT: expected an integer .* got 'x'\.$"):
        settle({}, {"HIBACHI_PORT": "x"})
    for text, message in (
        ("port = 'x'", r"serve.toml: port: expected an integer"),
        ("max-num-seqs = true", r"serve.toml: max-num-seqs: expected an integer >= 1; got True"),
        ("restart = 1", r"serve.toml: restart: expected true or false; got 1"),
        ("served-model-name = [1]", r"serve.toml: served-model-name: expected texts"),
        ("prot = 1", r"serve.toml: there is no setting prot\. Did you mean port\?"),
        ("[server]\nport = 1", r"serve.toml: there is no setting server"),
        ("port =", r"serve.toml: expected TOML; "),
    ):
        with pytest.raises(ConfigError, match=message):
            settle({}, {}, as_file(tmp_path, text))


def test_an_empty_variable_is_none_and_a_misspelled_one_is_told_of():
    assert settle({}, {"HIBACHI_PORT": ""}).port == 8000
    for words, meant in ((("1", "true", "yes", "on", "YES"), True), (("0", "false", "no", "off", "No"), False)):
        found = [settle({}, {"HIBACHI_SHARE_PREFIXES": word}).share_prefixes for word in words]
        assert found == [meant] * 5
    [line] = misspelled({"HIBACHI_APIKEY": "secret", "HIBACHI_VARIANT": "none", "HIBACHI_PORT": "1", "PATH": ""})
    assert line == "HIBACHI_APIKEY is not a setting; HIBACHI_API_KEY is"


def test_no_error_shows_a_key(tmp_path):
    for call in (
        lambda: settle({}, {}, as_file(tmp_path, 'api-key = [5, "secret"]')),
        lambda: tenants_of(settings(api_keys=as_file(tmp_path, "[a]\nkey = 'secret'\n[b]\nkey = 'secret'"))),
        lambda: tenants_of(settings(api_keys=as_file(tmp_path, "[a]\nkey = ['secret']\nkeys = 'secret'"))),
        lambda: tenants_of(settings(api_keys=as_file(tmp_path, "a = 'secret'"))),
    ):
        with pytest.raises(ConfigError) as e:
            call()
        assert "secret" not in str(e.value)


def test_without_the_extra_the_error_names_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve"]) == 1
    err = capsys.readouterr().err
    assert "`hibachi serve` needs the package 'uvicorn'" in err and "pip install '.[serve]'" in err


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_each_api_key_is_a_tenant(tmp_path):
    tenants = tenants_of(settings(api_key=["one", "two"]))
    assert tenants.admit(b"Bearer one") == "key1" and tenants.admit(b"Bearer two") == "key2"
    text = """
        [team-a]
        key = "three"
        priority = -5
        max_requests = 2
        [team-b]
        keys = ["four", "five"]
    """
    tenants = tenants_of(settings(api_key=["one"], api_keys=as_file(tmp_path, text)))
    assert [tenants.admit(f"Bearer {k}".encode()) for k in ("one", "three", "four", "five")] == [
        "key1",
        "team-a",
        "team-b",
        "team-b",
    ]
    assert tenants.of("team-a") == Tenant(-5, 2) and tenants.of("team-b") == tenants.of("key1") == Tenant()


def test_a_table_does_not_take_the_name_of_a_key_of_the_command_line(tmp_path):
    file = as_file(tmp_path, "[key1]\nkey = 'x'\nadmin = true")
    with pytest.raises(ConfigError, match="key1 is what the tenant of a key of --api-key is called"):
        tenants_of(settings(api_key=["one"], api_keys=file))


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "there is no tenant in it"),
        ("[a]", "expected key = "),
        ("[a]\nkey = ''", "expected key = "),
        ("[a]\nkeys = []", "expected key = "),
        ("[a]\nkey = 'k'\nlimit = 3", "a: limit is not known. Expected key, keys, priority, max_requests, admin."),
        ("[a]\nkey = 'k'\npriority = 1.5", "a: priority must be an integer; got 1.5"),
        ("[a]\nkey = 'k'\nadmin = 1", "a: admin must be true or false; got 1"),
        ("[a]\nkey = ' k'", "a: a key begins or ends with a blank"),
        ("[a]\nkey = 'k'\nmax_requests = 0", "a: max_requests must be an integer >= 1; got 0"),
        ("[a]\nkey = 'k'\nmax_requests = true", "a: max_requests must be an integer >= 1; got True"),
        ("[a", "expected TOML"),
    ],
)
def test_a_wrong_file_of_keys_is_explained(tmp_path, text, message):
    with pytest.raises(ConfigError, match=r"keys\.toml") as e:
        tenants_of(settings(api_keys=as_file(tmp_path, text, "keys.toml")))
    assert message in str(e.value)


# ---- that they reach their places ------------------------------------------------------------------------------------


def test_settings_become_options_of_the_engine():
    given = {key: text.split() if SETTINGS[key].kind.many else text for key, (text, _) in GIVEN.items()}
    every = settle(given | {"enable_prefix_caching": "yes"}, {})
    tenants = tenants_of(settings(api_key=["a", "b"]))
    assert engine_options(every) | opening.options(every, tenants) == dict(
        backend="torch",
        device="cuda:1",
        dtype="bfloat16",
        quantization="int8",
        gguf_unpack=True,
        autotune="off",
        kernels="kernels.json",
        deterministic=True,
        numerics="cpu-7",
        tensor_parallel_size=2,
        tp_leaves=4,
        pipeline_parallel_size=2,
        max_model_len=77,
        max_num_seqs=3,
        max_num_batched_tokens=100,
        block_size=32,
        kv_cache_memory_bytes=3 << 29,
        speculative_config="auto",
        enable_prefix_caching=True,
        kv_tiers=KVTiers(
            host_bytes=1 << 20,
            disk="kv",
            disk_bytes=2 << 20,
            store="redis://h",
            key_file="key",
            load_failure="fail",
            eviction="frequency",
            recency_window=3,
        ),
        scheduling_policy="fcfs",
        max_num_queued_reqs=9,
        pause_after=6,
        restart="on_failure",
        stall_after=2.5,
    )
    child = opening.options(settings(restart=True, pause_after="0"), tenants)
    assert child["restart"] == "on_failure" and child["pause_after"] is None
    assert engine_options(settings(stall_after="0"))["stall_after"] is None
    assert child["scheduling_policy"] == "shares"
    assert opening.options(settings(), tenants_of(settings(api_key=["a"])))["scheduling_policy"] is None


@pytest.fixture
def opened():
    """opened(**flags): what is served then. All with the engine in this process."""
    served = []

    def make(**flags):
        served.append(opening.opened(settings(engine="own", **flags)))
        return served[-1]

    yield make
    for each in served:
        each.texts.close()


def test_settings_reach_the_model_that_is_served(opened, model_copy):
    served = opened(
        served_model_name=["a", "b"],
        max_model_len="77",
        max_num_seqs="3",
        max_num_batched_tokens="100",
        block_size="32",
        kv_cache_memory_bytes="1M",
        seed="5",
        request_timeout="8",
        queue_timeout="7",
        max_body_size="2k",
        max_logprobs="4",
        responses_store="3k",
        max_n="2",
        chat_template="{{ messages[0].content }}!",
        api_key=["k"],
        max_num_queued_reqs="9",
        enable_prefix_caching="off",
    )
    assert served.names == ("a", "b") and served.settings.model == "tiny" and served.max_model_len == 77
    terms = served.terms(Terms(), "")
    assert (terms.timeout, terms.queue_timeout, served.settings.max_body_size) == (8.0, 7.0, 2048)
    assert served.responses.limit == 3072
    assert (served.bounds.n, served.bounds.logprobs) == (2, 4)
    assert served.tenants.admit(b"Bearer k") == "key1"
    assert served.texts.default_params.seed == 5
    limits = served.texts.engine.facts.limits
    assert (limits.rows, limits.budget, limits.max_model_len, limits.block_size) == (3, 100, 77, 32)
    assert served.texts.stats().prefix_queries == 0  # nothing is looked for
    assert served.texts.stats().steps >= 2  # it is warm


def test_defaults_of_sampling_come_from_where_the_setting_says(opened, model_copy, tmp_path):
    folder = str(model_copy({"generation_config.json": lambda _: b'{"temperature": 0.3, "top_p": 0.9}'}))
    assert opened(model=folder).texts.default_params == SamplingParams(temperature=0.3, top_p=0.9)
    assert opened(model=folder, generation_config="vllm").texts.default_params == SamplingParams()
    (tmp_path / "generation_config.json").write_text('{"top_k": 7, "suppress_tokens": [5]}')
    for place in (tmp_path, tmp_path / "generation_config.json"):
        texts = opened(model=folder, generation_config=str(place)).texts
        assert (texts.default_params, texts.rules.bad_words) == (SamplingParams(top_k=7), ((5,),))


def test_a_chat_template_may_be_a_file_a_name_or_source(opened, tmp_path):
    source = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    assert opened(chat_template=source).chat_template == source
    assert opened(chat_template=as_file(tmp_path, source, "t.jinja")).chat_template == source
    with pytest.raises(ConfigError, match="chat-template"):
        opened(chat_template="{% for %}")
    with pytest.raises(ConfigError, match=r"--chat-template toolz: .* of which there are: none"):
        opened(chat_template="toolz")


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_tables_of_the_page_are_those_of_the_code():
    spec = importlib.util.spec_from_file_location("serving_tables", ROOT / "docs" / "serving_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    page = (ROOT / "docs" / "serving.md").read_text()
    assert tables.written(page) == page, "run: python docs/serving_tables.py"
    page = (ROOT / "docs" / "routing.md").read_text()
    assert tables.written(page, tables.OF_ROUTE) == page, "run: python docs/serving_tables.py"


def test_every_setting_says_what_it_is_in_a_line():
    for group in GROUPS.values():
        for s in group:
            assert s.help and "\n" not in s.help and len(s.help) < 100
            assert s.default is None or s.kind.read(s.default) is not None


def test_settings_of_tiers_that_say_nothing_or_too_little():
    assert tiers_of(settle({}, {})) is None
    for given, said in (
        (
            {"kv_eviction": "importance"},
            "--kv-eviction importance: nothing is kept. Add --kv-host-bytes N, --kv-disk DIR",
        ),
        ({"kv_disk": "kv"}, "expected both or neither; got disk='kv', disk_bytes=None"),
        ({"kv_host_bytes": "1M", "enable_prefix_caching": "no"}, "--no-enable-prefix-caching shares none"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            tiers_of(settle(given, {}))
