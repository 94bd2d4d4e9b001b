"""From settings to a model, here and in another process: options, defaults, template, first tokens."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("tokenizers")

from hibachi.common.settings.settle import settle
from hibachi.errors import ConfigError
from hibachi.llm.holding import about
from hibachi.llm.remote import opening
from hibachi.llm.remote.opening import engine_options, open_settled
from hibachi.llm.remote.settings import LLMSettings
from hibachi.request import SamplingParams


def settings(engine="own", stall_after=0.0, **flags):
    return settle(LLMSettings, {"engine": engine, "stall_after": stall_after, **flags}, {})


@pytest.mark.parametrize("engine, where", [("own", "in this process"), ("child", "in process ")])
def test_a_model_is_open_and_warm(engine, where):
    texts, template = open_settled(settings(engine, max_num_seqs="3", max_model_len="77"))
    with texts:
        assert template is None
        limits = texts.engine.facts.limits
        assert (limits.rows, limits.max_model_len) == (3, 77)
        assert engine == "child" or texts.stats().steps >= 2  # of a child they come a little later
        assert where in about(texts) and " on cpu, float32, deterministic; engine in " in about(texts)
        assert texts.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids


def test_what_is_not_decided_is_left_to_the_engine():
    assert engine_options(settings()) == dict(
        max_num_seqs=64, max_num_batched_tokens=1024, enable_prefix_caching=True, stall_after=None
    )
    of_own = engine_options(settings(model="pkg:Class", autotune="1s", stall_after=2.0))
    assert "autotune" not in of_own and of_own["stall_after"] == 2.0
    assert engine_options(settings(autotune="1s"))["autotune"] == "1s"


def test_defaults_and_template_come_from_where_the_settings_say(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"top_k": 7}')
    (tmp_path / "t.jinja").write_text("<{{ messages[0].content }}>")
    of = settings(generation_config=str(tmp_path), chat_template=str(tmp_path / "t.jinja"))
    texts, template = open_settled(of)
    with texts:
        assert texts.default_params == SamplingParams(top_k=7)
        assert template == "<{{ messages[0].content }}>"


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"chat_template": "no/such"}, "--chat-template no/such: there is no such file."),
        ({"generation_config": "none"}, "--generation-config none: expected auto, vllm, or a folder with"),
    ],
)
def test_what_is_wrong_in_the_settings_is_found_before_the_model_is_loaded(flags, message, monkeypatch):
    monkeypatch.setattr(opening, "open_model", lambda *args, **options: pytest.fail("it was loaded"))
    with pytest.raises(ConfigError) as e:
        open_settled(settings(**flags))
    assert str(e.value).startswith(message)


@pytest.mark.parametrize(
    "template, message", [("toolz", "--chat-template toolz: .*there are: none"), ("{% for %}", "--chat-template: ")]
)
def test_a_template_that_does_not_do_closes_the_model_again(template, message, monkeypatch):
    opened, really = [], opening.open_model
    monkeypatch.setattr(opening, "open_model", lambda *a, **o: opened.append(really(*a, **o)) or opened[0])
    with pytest.raises(ConfigError, match=message):
        open_settled(settings(chat_template=template))
    assert opened[0].health().state == "closed"


def test_a_template_that_wants_more_than_a_greeting_is_taken(caplog):
    source = "{{ raise_exception('tools are needed') }}"
    with caplog.at_level(logging.WARNING, "hibachi.remote"):
        texts, template = open_settled(settings(chat_template=source))
    texts.close()
    assert template == source and "tried with a greeting, and failed" in caplog.text
