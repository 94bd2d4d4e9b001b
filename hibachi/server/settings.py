"""The settings of `hibachi serve`: one list, from which come flags, the TOML file, HIBACHI_* and the table in the docs.

A flag wins over the environment, that over the file, and the file over the default. With `--compat tgi` the launcher's
flags and variables come between the environment and the file: see `hibachi.server.tgi_settings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from hibachi.common.settings import settle as shared
from hibachi.common.settings.kinds import SWITCH, Setting, choice, integer, seconds, size, text, texts
from hibachi.llm.remote.settings import CHAT, ENGINE, MODEL
from hibachi.server import tgi_settings as tgi
from hibachi.server.web.settings import ADDRESS, LOG

_MODEL, *_OTHERS = MODEL
GROUPS: dict[str, tuple[Setting, ...]] = {
    "model": (
        _MODEL,
        Setting("served-model-name", texts("NAME"), None, "names by which requests may call the model", "as --model"
                " says"),
        *_OTHERS,
        Setting("seed", integer(0), None, "seed of requests without one", "random"),
    ),
    "engine": (
        Setting("engine", choice("child", "own"), "child", "process of the engine: its own, or the server's"),
        *ENGINE,
        Setting("scheduling-policy", text("NAME"), None,
                "which request starts next: priority, fcfs, fair, shares, waiting-served, or an installed one",
                "shares with several keys, else priority"),
        Setting("restart", SWITCH, False, "start the engine again when it dies, fails or stalls, or its device is"
                " lost"),
        Setting("exit-on-failure", SWITCH, False, "exit with status 1 when the engine has failed or stalled for good"),
        Setting("stall-after", seconds(), 30.0, "seconds without a step, while work waits, after which /health is"
                " 503; 0 means never"),
    ),
    "address": (
        *ADDRESS,
        Setting("root-path", text("PATH"), None, "path under which a proxy serves this server, such as /llm"),
        Setting("allowed-origins", texts("ORIGIN"), None, "let web pages of these origins send requests, such as"
                " https://page.example; * means any"),
    ),
    "keys": (
        Setting("api-key", texts("KEY"), None, "accept only requests with one of these keys; each key is its own"
                " tenant",
                "no key needed"),
        Setting("api-keys", text("FILE"), None, "TOML file of tenants: their keys, priorities and limits"),
        Setting("share-prefixes", SWITCH, False, "let tenants share cached prefixes; each can then tell what others"
                " sent"),
    ),
    "load": (
        Setting("max-num-queued-reqs", integer(0), 1024, "requests that may wait; beyond that they get 429"),
        Setting("request-timeout", seconds(), 0.0, "seconds for a request, which may ask for less; 0 means no limit"),
        Setting("queue-timeout", seconds(), 0.0, "seconds that a request may wait to start; it may ask for less;"
                " 0 means no limit"),
        Setting("max-tokens", integer(1), None, "most new tokens of a continuation, even if a request asks for more",
                "as the context holds"),
        Setting("arrival-timeout", seconds(), 60.0, "seconds to wait for a request's headers and body; 0 means no"
                " limit"),
        Setting("pause-after", integer(0), 256, "unread tokens after which a slow reader's request pauses; 0 means"
                " never"),
        Setting("drain-timeout", seconds(), 25.0, "seconds for running requests to end after SIGTERM"),
        Setting("max-body-size", size(), "16M", "largest body of a request"),
        Setting("responses-store", size(off=True), "64M", "responses that are kept for each key, in memory; 0 or off"
                " means none"),
        Setting("max-logprobs", integer(0), 20, "most log-probabilities returned with each token"),
        Setting("max-n", integer(1), 128, "most continuations of a prompt"),
    ),
    "chats": (
        *CHAT,
        Setting("enable-auto-tool-choice", SWITCH, True, "vLLM's, without effect: a model may always choose"),
    ),
    "dialect": (
        Setting("compat", choice("none", tgi.COMPAT), "none", "tgi: also accept the flags and variables of"
                " text-generation-inference, with its limits and defaults"),
    ),
    "reports": (
        Setting("metric-names", choice("hibachi", "vllm", "tgi"), "hibachi", "naming scheme of /metrics"),
        *LOG,
    ),
}  # fmt: skip
SETTINGS = shared.by_key(GROUPS)

_OF_TGI = {key: replace(s, default=tgi.DEFAULTS[key]) if key in tgi.DEFAULTS else s for key, s in SETTINGS.items()}
_settle = partial(shared.settle, SETTINGS, "serve")


def settle(
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: str | None = None,
    tgi_flags: Mapping[str, Any] | None = None,
) -> SimpleNamespace:
    """See `hibachi.common.settings.settle`. tgi_flags: of TGI's launcher, by their keys; they count with `compat` only.

    `tgi`: what they ask for besides settings, a `TgiAsked`; None means without `compat`. `remarks`: lines for the log.
    Raises ConfigError.
    """
    found = _settle(flags, environment, file)
    found.tgi, found.remarks = None, []
    if found.compat != tgi.COMPAT:
        return found
    given = tgi.read(tgi_flags or {}, environment)
    found = shared.settle(_OF_TGI, "serve", flags, environment, file, others=given.others)
    found.tgi = given.done(found)
    found.model, remark = tgi.revised(found.model, given.revision)
    found.remarks = [*given.remarks, *([remark] if remark else [])]
    return found


misspelled = partial(shared.misspelled, SETTINGS)
table = partial(shared.table, SETTINGS)
