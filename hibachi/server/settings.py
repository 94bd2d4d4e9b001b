"""The settings of `hibachi serve`: one list, from which come flags, the TOML file, HIBACHI_* and the table in the docs.

A flag wins over the environment, that over the file, and the file over the default. With `--compat tgi` the launcher's
flags and variables come between the environment and the file: see `hibachi.server.tgi_settings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hibachi.common.settings import settle as shared
from hibachi.common.settings.kinds import SWITCH, choice, integer, seconds, setting, size, text, texts
from hibachi.llm.remote.settings import ChatSettings, EngineSettings, LLMSettings, ModelSettings
from hibachi.server import tgi_settings
from hibachi.server.tgi_settings import COMPAT, TgiAsked
from hibachi.server.web.settings import AddressSettings, KeySettings, LogSettings


@dataclass(frozen=True, kw_only=True)
class ServedModelSettings(ModelSettings):
    """The model, and how requests call it."""

    served_model_name: tuple[str, ...] | None = setting(
        texts("NAME"), None, "names by which requests may call the model", "as --model says"
    )
    seed: int | None = setting(integer(0), None, "seed of requests without one", "random")


@dataclass(frozen=True, kw_only=True)
class ServedEngineSettings(EngineSettings):
    """The engine of a server."""

    engine: str = setting(choice("child", "own"), "child", "process of the engine: its own, or the server's")
    scheduling_policy: str | None = setting(
        text("NAME"),
        None,
        "which request starts next: priority, fcfs, fair, shares, waiting-served, or an installed one",
        "shares with several keys, else priority",
    )
    restart: bool = setting(
        SWITCH, False, "start the engine again when it dies, fails or stalls, or its device is lost"
    )
    exit_on_failure: bool = setting(SWITCH, False, "exit with status 1 when the engine has failed or stalled for good")
    stall_after: float = setting(
        seconds(), 30.0, "seconds without a step, while work waits, after which /health is 503; 0 means never"
    )


@dataclass(frozen=True, kw_only=True)
class PageSettings(AddressSettings):
    """Where it listens, and for whose pages."""

    root_path: str | None = setting(text("PATH"), None, "path under which a proxy serves this server, such as /llm")
    allowed_origins: tuple[str, ...] | None = setting(
        texts("ORIGIN"), None, "let web pages of these origins send requests, such as https://page.example; * means any"
    )


@dataclass(frozen=True, kw_only=True)
class ServedKeySettings(KeySettings):
    """Who may send requests."""

    api_key: tuple[str, ...] | None = setting(
        texts("KEY"), None, "accept only requests with one of these keys; each key is its own tenant", "no key needed"
    )
    api_keys: str | None = setting(text("FILE"), None, "TOML file of tenants: their keys, priorities and limits")
    share_prefixes: bool = setting(
        SWITCH, False, "let tenants share cached prefixes; each can then tell what others sent"
    )


@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """Limits of requests."""

    max_num_queued_reqs: int = setting(integer(0), 1024, "requests that may wait; beyond that they get 429")
    request_timeout: float = setting(seconds(), 0.0, "seconds for a request, which may ask for less; 0 means no limit")
    queue_timeout: float = setting(
        seconds(), 0.0, "seconds that a request may wait to start; it may ask for less; 0 means no limit"
    )
    max_tokens: int | None = setting(
        integer(1), None, "most new tokens of a continuation, even if a request asks for more", "as the context holds"
    )
    arrival_timeout: float = setting(
        seconds(), 60.0, "seconds to wait for a request's headers and body; 0 means no limit"
    )
    pause_after: int = setting(
        integer(0), 256, "unread tokens after which a slow reader's request pauses; 0 means never"
    )
    drain_timeout: float = setting(seconds(), 25.0, "seconds for running requests to end after SIGTERM")
    max_body_size: int = setting(size(), "16M", "largest body of a request")
    responses_store: int = setting(
        size(off=True), "64M", "responses that are kept for each key, in memory; 0 or off means none"
    )
    max_logprobs: int = setting(integer(0), 20, "most log-probabilities returned with each token")
    max_n: int = setting(integer(1), 128, "most continuations of a prompt")


@dataclass(frozen=True, kw_only=True)
class ServedChatSettings(ChatSettings):
    """How chats are answered."""

    enable_auto_tool_choice: bool = setting(SWITCH, True, "vLLM's, without effect: a model may always choose")


@dataclass(frozen=True, kw_only=True)
class DialectSettings:
    """Whose flags count besides ours."""

    compat: str = setting(
        choice("none", COMPAT),
        "none",
        "tgi: also accept the flags and variables of text-generation-inference, with its limits and defaults",
    )


@dataclass(frozen=True, kw_only=True)
class ReportSettings(LogSettings):
    """Metrics and logs."""

    metric_names: str = setting(choice("hibachi", "vllm", "tgi"), "hibachi", "naming scheme of /metrics")


@dataclass(frozen=True, kw_only=True)
class ServeSettings(
    ReportSettings,
    DialectSettings,
    ServedChatSettings,
    LoadSettings,
    ServedKeySettings,
    PageSettings,
    ServedEngineSettings,
    ServedModelSettings,
    LLMSettings,
):
    """All of them. tgi: what flags of text-generation-inference ask for besides; None means without `compat`. remarks:
    lines for the log.
    """

    command = "serve"
    tgi: TgiAsked | None = None
    remarks: tuple[str, ...] = ()


GROUPS = shared.groups_of(
    model=ServedModelSettings,
    engine=ServedEngineSettings,
    address=PageSettings,
    keys=ServedKeySettings,
    load=LoadSettings,
    chats=ServedChatSettings,
    dialect=DialectSettings,
    reports=ReportSettings,
)
SETTINGS = shared.by_key(GROUPS)


def settle(
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: str | None = None,
    tgi_flags: Mapping[str, Any] | None = None,
) -> ServeSettings:
    """See `hibachi.common.settings.settle`. tgi_flags: of TGI's launcher, by their keys; they count with `compat` only.
    Raises ConfigError.
    """
    found = shared.settle(ServeSettings, flags, environment, file)
    if found.compat != COMPAT:
        return found
    given = tgi_settings.read(tgi_flags or {}, environment)
    found = shared.settle(ServeSettings, flags, environment, file, defaults=tgi_settings.DEFAULTS, others=given.others)
    model, remark = tgi_settings.revised(found.model, given.revision)
    remarks = (*given.remarks, *([remark] if remark else []))
    return replace(found, tgi=given.done(found.max_num_batched_tokens), model=model, remarks=remarks)


misspelled = partial(shared.misspelled, SETTINGS)
table = partial(shared.table, SETTINGS)
