"""Every series of /metrics: its name, kind, labels, meaning and source, and its names in vLLM and TGI.

The page, the names of other projects and docs/metrics.md are all generated from these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, TypeAlias

from hibachi.engine.runners.meters import Histogram

Value: TypeAlias = "float | Histogram"
Values: TypeAlias = "Mapping[tuple[str, ...], Value]"  # by label values
Kind: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class Series:
    """One series. read: the value, or values by their label values, of a `View`; None means unknown here."""

    name: str
    kind: Kind
    help: str
    read: Callable[[Any], Value | Values | None]
    labels: tuple[str, ...] = ()

    def values(self, view: Any) -> Values:
        found = self.read(view)
        return {} if found is None else found if isinstance(found, Mapping) else {(): found}


@dataclass(frozen=True)
class Foreign:
    """One of our series under another project's name. change: converts our values to theirs; None means unchanged."""

    name: str
    labels: tuple[str, ...] | None = None  # None means ours
    change: Callable[[Values], Values] | None = None


def _made(kind: Kind) -> Callable[..., Series]:
    def make(name: str, read: str | Callable[[Any], Value | Values | None], help: str, *labels: str) -> Series:
        """read: an attribute of a `View`, dotted, or what finds the value in one."""
        return Series(name, kind, help, attrgetter(read) if isinstance(read, str) else read, labels)

    return make


counter, gauge, histogram = _made("counter"), _made("gauge"), _made("histogram")


def _phases(name: str) -> Callable[[Any], Values]:
    of = attrgetter(name)
    return lambda v: {("prefill",): of(v.engine.prefill), ("decode",): of(v.engine.decode)}


def _drafters(name: str) -> Callable[[Any], Values]:
    """By who proposes."""
    return lambda v: {(who,): getattr(each, name) for who, each in v.engine.drafted.by.items()}


SERIES = (
    # ---- requests ----
    counter("hibachi_requests_total", "requests.arrived", "Requests for text that came, refused ones among them."),
    counter(
        "hibachi_requests_finished_total",
        "requests.finished",
        "Queued requests that ended: whole (stop, length), left by the client (cancelled), or cut off (error, closed).",
        "reason",
    ),
    counter(
        "hibachi_requests_rejected_total",
        "requests.rejected",
        "Requests that were answered with an error before they were queued.",
        "reason",
        "status",
    ),
    gauge(
        "hibachi_requests_open", lambda v: len(v.requests.open), "Requests for text that are not answered to the end."
    ),
    gauge("hibachi_streams_open", "requests.streams", "Of the open requests, those that are answered piece by piece."),
    gauge("hibachi_requests_running", "stats.running", "Continuations in the batch."),
    gauge("hibachi_requests_waiting", "stats.waiting", "Continuations in the queue."),
    gauge(
        "hibachi_requests_waiting_by_reason",
        lambda v: {("capacity",): v.stats.waiting - v.stats.held, ("grammar",): v.stats.held},
        "Continuations in the queue: for a place in the batch, or for their grammar to be compiled.",
        "reason",
    ),
    gauge("hibachi_requests_paused", "health.paused", "Continuations whose clients read too slowly."),
    histogram(
        "hibachi_time_to_first_token_seconds", "requests.first", "From the arrival of a request to its first token."
    ),
    histogram(
        "hibachi_inter_token_seconds",
        "requests.between",
        "From one token of a continuation to the next; k that come together after t seconds count as k times t/k.",
    ),
    histogram(
        "hibachi_time_per_output_token_seconds",
        "requests.per_token",
        "The mean of a whole answer's times from token to token.",
    ),
    histogram(
        "hibachi_request_seconds", "requests.total", "From the arrival of a request to the end of its whole answer."
    ),
    histogram(
        "hibachi_request_preparation_seconds", "requests.preparation", "Reading, checking and tokenizing a request."
    ),
    histogram("hibachi_request_queue_seconds", "requests.queue", "From when a request is queued to its first step."),
    histogram("hibachi_request_prefill_seconds", "requests.prefill", "From a request's first step to its first token."),
    histogram(
        "hibachi_request_decode_seconds", "requests.decode", "From the first token of a whole answer to the last."
    ),
    histogram(
        "hibachi_request_inference_seconds", "requests.inference", "From the first step of a whole answer to its end."
    ),
    histogram(
        "hibachi_request_prompt_tokens",
        "requests.prompt_sizes",
        "Tokens of the prompts of a request, of whole answers.",
    ),
    histogram("hibachi_request_generation_tokens", "requests.answer_sizes", "Tokens of a whole answer."),
    histogram(
        "hibachi_request_cached_tokens",
        "requests.cached_sizes",
        "Tokens of the prompts of a request that were found in the cache.",
    ),
    histogram(
        "hibachi_request_max_tokens", "requests.max_tokens", "The parameter max_tokens of requests that have one."
    ),
    histogram("hibachi_request_n", "requests.n", "The parameter n of requests."),
    counter(
        "hibachi_prompt_tokens_total",
        "requests.prompt_tokens",
        "Tokens of prompts, of requests whose first token has come.",
    ),
    counter(
        "hibachi_cached_prompt_tokens_total",
        "requests.cached_tokens",
        "Tokens of prompts that were found in the cache, of requests whose first token has come.",
    ),
    counter("hibachi_generation_tokens_total", "requests.generated", "Tokens that were generated and sent."),
    counter(
        "hibachi_tenant_requests_total",
        lambda v: v.by_tenant(0),
        "Requests for text that were queued and have ended, by the tenant whose key they brought. Told to admins.",
        "tenant",
    ),
    counter(
        "hibachi_tenant_prompt_tokens_total",
        lambda v: v.by_tenant(1),
        "Tokens of the prompts of ended requests, by tenant. Told to admins.",
        "tenant",
    ),
    counter(
        "hibachi_tenant_generation_tokens_total",
        lambda v: v.by_tenant(2),
        "Tokens of the answers of ended requests, by tenant. Told to admins.",
        "tenant",
    ),
    counter(
        "hibachi_http_requests_total",
        "requests.http",
        "Requests over HTTP to known routes; status 499: the client left before there was an answer.",
        "method",
        "route",
        "status",
    ),
    gauge(
        "hibachi_http_requests_open",
        "served.open_requests",
        "Requests over HTTP that are not answered to the end, this one among them.",
    ),
    histogram(
        "hibachi_grammar_compile_seconds", "engine.grammars", "The time that compiling a request's grammar takes."
    ),
    counter("hibachi_forms_checked_total", "forms.checks", "Forms of answers that came for the first time."),
    counter("hibachi_forms_known_total", "forms.hits", "Forms of answers that were checked before."),
    counter(
        "hibachi_forms_refused_total",
        lambda v: {(keyword,): n for keyword, n in v.forms.refused.items()},
        "New forms that were refused, by the keyword that is not supported; empty: for another reason.",
        "keyword",
    ),
    # ---- the batch ----
    counter(
        "hibachi_steps_total",
        _phases("rows.count"),
        "Steps of the batch; prefill: with tokens of prompts, perhaps beside others.",
        "phase",
    ),
    counter(
        "hibachi_steps_failed_total",
        "engine.failed",
        "Steps that did not happen, as memory ran out or the device failed.",
    ),
    counter("hibachi_steps_joined_total", "engine.joined", "Steps in which requests began beside others that went on."),
    histogram("hibachi_batch_rows", _phases("rows"), "Continuations in a step.", "phase"),
    gauge("hibachi_batch_rows_limit", "stats.max_num_seqs", "The most continuations that there may be in a step."),
    histogram(
        "hibachi_batch_occupancy_ratio",
        _phases("occupancy"),
        "Continuations in a step, as a share of the limit.",
        "phase",
    ),
    histogram("hibachi_batch_tokens", _phases("tokens"), "Tokens computed in a step, padding left out.", "phase"),
    counter("hibachi_computed_tokens_total", "engine.computed", "Tokens that the model was given, padding among them."),
    counter("hibachi_padding_tokens_total", "engine.padding", "Padding: computed tokens that belong to no request."),
    gauge(
        "hibachi_padding_ratio", "engine.padding_share", "Padding as a share of all tokens computed since the start."
    ),
    histogram("hibachi_step_seconds", _phases("seconds"), "The time of a step.", "phase"),
    histogram(
        "hibachi_step_model_seconds", _phases("model"), "The time of a step in the model and the sampler.", "phase"
    ),
    counter(
        "hibachi_model_seconds_total",
        lambda v: {(part,): seconds for part, seconds in v.engine.parts.items()},
        "Of a decoder on hibachi's kernels, the time of its parts: attention, linear, norms, and model for the rest.",
        "part",
    ),
    counter(
        "hibachi_expert_tokens_total",
        lambda v: {(str(i),): tokens for i, tokens in enumerate(v.engine.expert_tokens)},
        "Likewise, tokens that each expert of the last layer with experts has computed.",
        "expert",
    ),
    histogram(
        "hibachi_step_host_seconds",
        _phases("host"),
        "The rest of a step's time: scheduling, packing, delivering.",
        "phase",
    ),
    gauge(
        "hibachi_step_host_ratio",
        "engine.host_share",
        "Time outside model and sampler as a share of all steps' time since the start.",
    ),
    counter(
        "hibachi_drafts_total",
        _drafters("steps"),
        "Times that a continuation computed proposed tokens, by who proposed them.",
        "drafter",
    ),
    counter("hibachi_draft_tokens_total", _drafters("proposed"), "Proposed tokens that were computed.", "drafter"),
    counter(
        "hibachi_draft_accepted_tokens_total", _drafters("accepted"), "Of these, tokens that came anyhow.", "drafter"
    ),
    counter(
        "hibachi_draft_accepted_by_position_total",
        lambda v: {(who, str(i)): n for who, own in v.engine.drafted.by.items() for i, n in enumerate(own.by_position)},
        "Of these, by their place among the proposals of a step, from 0.",
        "drafter",
        "position",
    ),
    histogram(
        "hibachi_step_accepted_tokens",
        lambda v: v.engine.drafted.kept(v.stats.new_tokens),
        "Proposed tokens that a continuation got in a step beside its own: 0 where it had none.",
    ),
    # ---- the cache ----
    gauge("hibachi_cache_blocks", "stats.blocks", "Blocks of the cache; 0: the model keeps none."),
    gauge(
        "hibachi_cache_free_blocks",
        "stats.free_blocks",
        "Blocks that can be had, those with contents that may serve again among them.",
    ),
    gauge("hibachi_cache_idle_blocks", "stats.cached_blocks", "Free blocks with contents that may serve again."),
    gauge(
        "hibachi_cache_capacity_tokens", lambda v: v.stats.blocks * v.engine.block_size, "Tokens that the cache holds."
    ),
    gauge(
        "hibachi_cache_used_tokens",
        lambda v: (v.stats.blocks - v.stats.free_blocks) * v.engine.block_size,
        "Tokens that the blocks of running requests hold, or have room for.",
    ),
    gauge(
        "hibachi_cache_usage_ratio",
        lambda v: 1 - v.stats.free_blocks / v.stats.blocks if v.stats.blocks else 0.0,
        "The share of the blocks that running requests hold.",
    ),
    counter(
        "hibachi_cache_evictions_total",
        "stats.evictions",
        "Blocks with contents that might have served again, taken for something else.",
    ),
    counter(
        "hibachi_prefix_queried_tokens_total",
        "stats.prefix_queries",
        "Tokens of prompts that were looked for in the cache.",
    ),
    counter("hibachi_prefix_hit_tokens_total", "stats.prefix_hits", "Tokens of prompts that were found in the cache."),
    counter(
        "hibachi_tier_hit_tokens_total", "stats.tier_hits", "Of these, tokens from host memory, a disk or a store."
    ),
    counter(
        "hibachi_preemptions_total", "stats.preemptions", "Times that a request lost its place, to compute again later."
    ),
    # ---- the system ----
    gauge(
        "hibachi_info",
        lambda v: {tuple(v.about.values()): 1},
        "What is served, and how; always 1.",
        "version",
        "model",
        "backend",
        "device",
        "dtype",
        "deterministic",
        "engine",
    ),
    gauge("hibachi_up", lambda v: int(v.health.ok), "1: the engine is well; 0: it is stalled, failed or closed."),
    counter("hibachi_engine_restarts_total", "restarts", "Times that the engine began again."),
    gauge("hibachi_uptime_seconds", "uptime", "Seconds since the server began."),
    gauge(
        "hibachi_resident_memory_bytes",
        "resident",
        "Memory of the server, and of the engine if it has a process of its own.",
        "process",
    ),
    gauge("hibachi_device_memory_bytes", "memory_size", "Memory of the device, if it has its own."),
    gauge("hibachi_device_memory_free_bytes", "memory_free", "Free memory of the device, if it has its own."),
    gauge(
        "hibachi_device_utilization_ratio",
        "engine.utilization",
        "How busy the device is: as NVML reports it, and on CPUs the processors' time of the engine's process.",
    ),
)


# ---- the names of others -------------------------------------------------------------------------------------------


def _together(values: Values) -> Values:
    """All label values in one."""
    first, *rest = values.values()
    for value in rest:
        first = first + value  # type: ignore[operator]  # numbers, or histograms
    return {(): first}


def _total(values: Values) -> Values:
    """All label values in one number, which is 0 before there is any."""
    return {(): sum(values.values())}  # type: ignore[arg-type]  # numbers


def _by_last(values: Values) -> Values:
    """By the last label alone."""
    found: dict[tuple[str, ...], Any] = {("0",): 0}
    for (*_, key), value in values.items():
        found[key,] = found.get((key,), 0) + value
    return found


def _renamed(names: Mapping[str, str]) -> Callable[[Values], Values]:
    """By the first label alone, under other values; those that have none are left out."""

    def change(values: Values) -> Values:
        found: dict[tuple[str, ...], Any] = {(name,): 0 for name in names.values()}
        for (key, *_), value in values.items():
            if key in names:
                found[names[key],] += value
        return found

    return change


def _whole(values: Values) -> Values:
    return {(): sum(n for (reason,), n in values.items() if reason in ("stop", "length"))}  # type: ignore[misc]  # one label


def _refusals(values: Values) -> Values:
    found: dict[tuple[str, ...], Any] = {("overloaded",): 0, ("validation",): 0, ("template",): 0}
    for (reason, status), n in values.items():
        kind = "template" if reason in ("template_error", "no_chat_template") else "validation"
        found["overloaded" if status in ("429", "503") else kind,] += n
    return found


_ENDS = {"stop": "stop", "length": "length", "cancelled": "abort", "closed": "abort", "error": "error"}

VLLM: dict[str, tuple[Foreign, ...]] = {
    "hibachi_requests_running": (Foreign("vllm:num_requests_running"),),
    "hibachi_requests_waiting": (Foreign("vllm:num_requests_waiting"),),
    "hibachi_requests_finished_total": (Foreign("vllm:request_success_total", ("finished_reason",), _renamed(_ENDS)),),
    "hibachi_requests_rejected_total": (Foreign("vllm:admission_rejections_total"),),
    "hibachi_time_to_first_token_seconds": (Foreign("vllm:time_to_first_token_seconds"),),
    "hibachi_inter_token_seconds": (Foreign("vllm:inter_token_latency_seconds"),),
    "hibachi_time_per_output_token_seconds": (Foreign("vllm:request_time_per_output_token_seconds"),),
    "hibachi_request_seconds": (Foreign("vllm:e2e_request_latency_seconds"),),
    "hibachi_request_queue_seconds": (Foreign("vllm:request_queue_time_seconds"),),
    "hibachi_request_prefill_seconds": (Foreign("vllm:request_prefill_time_seconds"),),
    "hibachi_request_decode_seconds": (Foreign("vllm:request_decode_time_seconds"),),
    "hibachi_request_inference_seconds": (Foreign("vllm:request_inference_time_seconds"),),
    "hibachi_request_prompt_tokens": (Foreign("vllm:request_prompt_tokens"),),
    "hibachi_request_generation_tokens": (Foreign("vllm:request_generation_tokens"),),
    "hibachi_request_max_tokens": (Foreign("vllm:request_params_max_tokens"),),
    "hibachi_request_n": (Foreign("vllm:request_params_n"),),
    "hibachi_prompt_tokens_total": (Foreign("vllm:prompt_tokens_total"),),
    "hibachi_cached_prompt_tokens_total": (Foreign("vllm:prompt_tokens_cached_total"),),
    "hibachi_generation_tokens_total": (Foreign("vllm:generation_tokens_total"),),
    "hibachi_batch_tokens": (Foreign("vllm:iteration_tokens_total", (), _together),),
    "hibachi_cache_usage_ratio": (Foreign("vllm:kv_cache_usage_perc"),),
    "hibachi_drafts_total": (Foreign("vllm:spec_decode_num_drafts_total", (), _total),),
    "hibachi_draft_tokens_total": (Foreign("vllm:spec_decode_num_draft_tokens_total", (), _total),),
    "hibachi_draft_accepted_tokens_total": (Foreign("vllm:spec_decode_num_accepted_tokens_total", (), _total),),
    "hibachi_draft_accepted_by_position_total": (
        Foreign("vllm:spec_decode_num_accepted_tokens_per_pos_total", ("position",), _by_last),
    ),
    "hibachi_prefix_queried_tokens_total": (Foreign("vllm:prefix_cache_queries_total"),),
    "hibachi_prefix_hit_tokens_total": (Foreign("vllm:prefix_cache_hits_total"),),
    "hibachi_preemptions_total": (Foreign("vllm:num_preemptions_total"),),
}

TGI: dict[str, tuple[Foreign, ...]] = {
    "hibachi_requests_total": (Foreign("tgi_request_count"),),
    "hibachi_requests_finished_total": (
        Foreign("tgi_request_success", (), _whole),
        Foreign(
            "tgi_request_failure",
            ("err",),
            _renamed({"error": "generation", "cancelled": "dropped", "closed": "dropped"}),
        ),
    ),
    "hibachi_requests_rejected_total": (Foreign("tgi_request_failure", ("err",), _refusals),),
    "hibachi_requests_running": (Foreign("tgi_batch_current_size"),),
    "hibachi_requests_waiting": (Foreign("tgi_queue_size"),),
    "hibachi_time_per_output_token_seconds": (Foreign("tgi_request_mean_time_per_token_duration"),),
    "hibachi_request_seconds": (Foreign("tgi_request_duration"),),
    "hibachi_request_preparation_seconds": (Foreign("tgi_request_validation_duration"),),
    "hibachi_request_queue_seconds": (Foreign("tgi_request_queue_duration"),),
    "hibachi_request_inference_seconds": (Foreign("tgi_request_inference_duration"),),
    "hibachi_request_prompt_tokens": (Foreign("tgi_request_input_length"),),
    "hibachi_request_generation_tokens": (Foreign("tgi_request_generated_tokens"),),
    "hibachi_request_max_tokens": (Foreign("tgi_request_max_new_tokens"),),
    "hibachi_step_accepted_tokens": (Foreign("tgi_request_skipped_tokens"),),
    "hibachi_steps_failed_total": (Foreign("tgi_batch_inference_failure"),),
    "hibachi_steps_total": (
        Foreign("tgi_batch_inference_count", ("method",)),
        Foreign("tgi_batch_inference_success", ("method",)),
    ),
    "hibachi_batch_rows": (Foreign("tgi_batch_next_size", (), _together),),
    "hibachi_step_seconds": (Foreign("tgi_batch_inference_duration", ("method",)),),
    "hibachi_step_model_seconds": (Foreign("tgi_batch_forward_duration", ("method",)),),
    "hibachi_step_host_seconds": (Foreign("tgi_batch_decode_duration", ("method",)),),
    "hibachi_steps_joined_total": (Foreign("tgi_batch_concat"),),
    "hibachi_cache_capacity_tokens": (Foreign("tgi_batch_max_total_tokens"),),
    "hibachi_cache_used_tokens": (Foreign("tgi_batch_current_max_tokens"),),
}

NAMES: dict[str, Mapping[str, tuple[Foreign, ...]]] = {"hibachi": {}, "vllm": VLLM, "tgi": TGI}


# ---- the page ------------------------------------------------------------------------------------------------------


def page(view: Any, names: str) -> str:
    """All series in Prometheus' text format. Written here, as prometheus-client takes ten times as long."""
    constant = {"model_name": view.about["model"], "engine": "0"} if names == "vllm" else {}
    families: dict[str, tuple[Series, list[str]]] = {}
    for series in SERIES:
        values = series.values(view)
        for own in NAMES[names].get(series.name, (Foreign(series.name),)):
            _, lines = families.setdefault(own.name, (series, []))
            labels = series.labels if own.labels is None else own.labels
            more = constant if own.name != series.name else {}
            for key, value in (own.change(values) if own.change else values).items():
                lines += _lines(own.name, more | dict(zip(labels, key, strict=True)), value)
    parts = []
    for name, (series, lines) in families.items():
        parts += [f"# HELP {name} {series.help}", f"# TYPE {name} {series.kind}", *lines]
    return "\n".join(parts) + "\n"


def _lines(name: str, labels: Mapping[str, str], value: Value) -> Iterator[str]:
    shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    braces = f"{{{shown}}}" if shown else ""
    if not isinstance(value, Histogram):
        yield f"{name}{braces} {value}"
        return
    start, so_far = f"{name}_bucket{{{shown}{',' if shown else ''}le=", 0
    for bound, count in zip(value.bounds, value.counts, strict=False):
        so_far += count
        yield f'{start}"{bound}"}} {so_far}'
    so_far += value.counts[-1]
    yield f'{start}"+Inf"}} {so_far}'
    yield f"{name}_sum{braces} {value.sum}"
    yield f"{name}_count{braces} {so_far}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def table() -> str:
    """All series as Markdown, for docs/metrics.md."""
    rows = ["| series | type | labels | meaning | vLLM | TGI |", "|---|---|---|---|---|---|"]
    for s in SERIES:
        others = (_shown(NAMES[names].get(s.name, ()), s.labels) for names in ("vllm", "tgi"))
        labels = ", ".join(f"`{label}`" for label in s.labels)
        rows.append(f"| {' | '.join([f'`{s.name}`', s.kind, labels, s.help, *others])} |")
    return "\n".join(rows) + "\n"


def _shown(found: Sequence[Foreign], ours: tuple[str, ...]) -> str:
    """Names, with their labels where those are others than ours."""
    each = []
    for f in found:
        differ = f.labels is not None and f.labels != ours
        each.append(
            f"`{f.name}`" + (f" ({', '.join(f'`{x}`' for x in f.labels or ()) or 'no labels'})" if differ else "")
        )
    return ", ".join(each)
