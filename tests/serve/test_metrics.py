"""Figures at /metrics: they agree with what was asked and answered, whatever their names."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families as parsed

from hibachi.llm.own import open_texts
from hibachi.request import SamplingParams
from hibachi.server.metrics import RequestMeter
from hibachi.server.record import Record
from hibachi.server.series import NAMES, SERIES
from hibachi.server.web.tenants import Tenant, Tenants

from .conftest import ENGINES, site
from .test_streams import LONG, at_rest, send, until

ROOT = Path(__file__).parents[2]
GREEDY = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}


class Figures(dict):
    """Samples of a page: name and label values, in the order of their names -> value."""

    def __init__(self, text):
        for family in parsed(text):
            for s in family.samples:
                key = (s.name, *(value for _, value in sorted(s.labels.items())))
                assert key not in self, f"twice: {key}"
                self[key] = s.value

    def __missing__(self, key):
        return self[key,] if isinstance(key, str) and (key,) in self else 0.0

    def sum(self, name):
        return sum(value for (own, *_), value in self.items() if own == name)


ADMIN = {"ops": Tenant(admin=True)}


def scrape(server, **more):
    answer = server.client.get("/metrics", **more)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Figures(answer.text)


def calm(server):
    """Figures when nothing runs. Those of a child are of its last sign of life: two more are waited for."""
    engine = server.texts.engine
    for _ in range(2 if hasattr(engine, "pid") else 0):
        last = engine.stats()
        until(lambda last=last: engine.stats() is not last)
    until(lambda: at_rest(server) and not server.served.meter.open)
    return scrape(server)


@pytest.fixture(scope="module", params=ENGINES)
def chunked(request):
    """Prompts are computed sixteen tokens at a time, beside each other; rows for four."""
    options = dict(max_num_seqs=4, max_num_batched_tokens=16, max_num_queued_reqs=256)
    with ENGINES[request.param]("tiny", **options) as texts, site(texts) as here:
        yield here


# ---- requests --------------------------------------------------------------------------------------------------------


def test_histograms_hold_every_request_and_gauges_go_back(server):
    """V-36."""
    before = calm(server)
    whole = [server.complete(f"Chapter {i}", **GREEDY | {"max_tokens": 5 + i}) for i in range(6)]
    answers = [server.post("/v1/completions", {"prompt": "Emma", "stream": True, **GREEDY}) for _ in range(4)]
    assert all(a.text.endswith("data: [DONE]\n\n") for a in answers)
    now = calm(server)

    def gained(name, *labels):
        return now[name, *labels] - before[name, *labels]

    tokens = sum(a["usage"]["completion_tokens"] for a in whole) + 4 * 20
    prompts = sum(a["usage"]["prompt_tokens"] for a in whole) + 4 * len(server.texts.tokenizer.encode("Emma"))
    assert gained("hibachi_requests_total") == gained("hibachi_requests_finished_total", "length") == 10
    for name in ("time_to_first_token", "request", "request_queue", "request_prefill", "request_decode"):
        assert gained(f"hibachi_{name}_seconds_count") == 10, name
    for name in ("request_preparation", "request_inference", "time_per_output_token"):
        assert gained(f"hibachi_{name}_seconds_count") == 10, name
    assert gained("hibachi_generation_tokens_total") == tokens
    assert gained("hibachi_inter_token_seconds_count") == tokens - 10
    assert gained("hibachi_prompt_tokens_total") == prompts
    for name, total in (("generation_tokens", tokens), ("prompt_tokens", prompts)):
        assert gained(f"hibachi_request_{name}_count") == 10 and gained(f"hibachi_request_{name}_sum") == total
    assert gained("hibachi_request_max_tokens_sum") == tokens and gained("hibachi_request_n_sum") == 10
    assert gained("hibachi_http_requests_total", "POST", "/v1/completions", "200") == 10
    for name in ("requests_running", "requests_waiting", "requests_open", "streams_open", "requests_paused"):
        assert now["hibachi_" + name] == 0, name
    assert now["hibachi_cache_usage_ratio"] == 0 and now["hibachi_up"] == 1


def test_times_make_up_the_whole(server):
    """Of one request: preparation, queue, prefill and decoding are the time that it took."""
    before = calm(server)
    began = time.monotonic()
    server.complete("It is a truth", **GREEDY | {"max_tokens": 100})
    took = time.monotonic() - began
    now = calm(server)

    def gained(name):
        return now[f"hibachi_{name}_seconds_sum"] - before[f"hibachi_{name}_seconds_sum"]

    parts = [gained("request_" + name) for name in ("preparation", "queue", "prefill", "decode")]
    assert all(part >= 0 for part in parts) and gained("request_prefill") > 0
    assert sum(parts) <= gained("request") <= took
    assert sum(parts) == pytest.approx(gained("request"), abs=0.1)
    assert gained("time_to_first_token") == pytest.approx(sum(parts[:3]), abs=1e-3)
    assert gained("inter_token") == pytest.approx(parts[3], rel=1e-6)
    assert gained("time_per_output_token") == pytest.approx(parts[3] / 99, rel=1e-6)
    assert gained("request_inference") == pytest.approx(gained("request") - parts[0] - parts[1], abs=1e-3)


def test_continuations_have_times_of_their_own(server):
    before = calm(server)
    server.complete("Emma", **GREEDY | {"temperature": 1, "n": 4, "seed": 1})
    now = calm(server)
    assert now["hibachi_generation_tokens_total"] - before["hibachi_generation_tokens_total"] == 80
    assert now["hibachi_inter_token_seconds_count"] - before["hibachi_inter_token_seconds_count"] == 80 - 4
    assert now["hibachi_time_to_first_token_seconds_count"] - before["hibachi_time_to_first_token_seconds_count"] == 1
    decode = now["hibachi_request_decode_seconds_sum"] - before["hibachi_request_decode_seconds_sum"]
    between = now["hibachi_inter_token_seconds_sum"] - before["hibachi_inter_token_seconds_sum"]
    assert 2 * decode < between <= 4 * decode * 1.001  # they go side by side


def test_tokens_that_come_together_share_the_time():
    meter = RequestMeter()
    record = Record(SamplingParams(n=2), 3, meter, arrival=100.0)
    meter.begun(record)
    meter.came(record, 3, 101.0, None)
    record.first = 101.0
    assert meter.first.sum == 1.0 and meter.first.count == 1
    assert meter.between.count == 2 and meter.between.sum == 0.0
    meter.came(record, 4, 103.0, 101.0)
    assert meter.between.count == 6 and meter.between.sum == 2.0
    assert meter.between.counts[meter.between.bounds.index(0.5)] == 4
    meter.came(record, 1, 103.0, None)  # the other continuation
    assert meter.first.count == 1 and meter.between.count == 6 and meter.generated == 8


def test_why_requests_end(server):
    before = calm(server)
    server.complete("Emma", max_tokens=3)
    text = server.complete("Emma", max_tokens=30)["choices"][0]["text"]
    assert server.complete("Emma", max_tokens=30, stop=text[2:6])["choices"][0]["finish_reason"] == "stop"
    first = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"][0]
    empty = server.complete("Emma", max_tokens=30, stop_token_ids=[first])
    assert empty["usage"]["completion_tokens"] in (0, 1)
    late = server.post("/v1/completions", {**LONG, "timeout": 0.02})
    assert late.status_code == 408
    sock = send(server, {**LONG, "stream": True})
    until(lambda: scrape(server)["hibachi_streams_open"] == 1)
    assert scrape(server)["hibachi_requests_open"] == 1
    sock.close()
    until(lambda: not scrape(server)["hibachi_streams_open"])
    now = calm(server)
    name = "hibachi_requests_finished_total"
    gained = {r: now[name, r] - before[name, r] for r in ("stop", "length", "cancelled", "error", "closed")}
    assert gained == {"stop": 2, "length": 2, "cancelled": 1, "error": 1, "closed": 0}
    assert now["hibachi_request_seconds_count"] - before["hibachi_request_seconds_count"] == 4  # whole answers
    assert now["hibachi_http_requests_total", "POST", "/v1/completions", "408"] >= 1


def test_who_is_refused(server):
    before = calm(server)
    server.post("/v1/completions", {"prompt": "a", "model": "other"})
    server.post("/v1/completions", {"prompt": "a", "n": 0})
    server.post("/v1/chat/completions", {"messages": "Emma"})
    server.post("/v1/completions", {"prompt": [1] * 600})
    server.post("/tokenize", {})  # no request for text
    server.client.get("/nowhere/" + "x" * 50)  # nor a route
    now = calm(server)
    name = "hibachi_requests_rejected_total"
    for reason, status in (("model_not_found", "404"), ("invalid_value", "400"), ("context_length_exceeded", "400")):
        assert now[name, reason, status] - before[name, reason, status] >= 1, reason
    assert now.sum(name) - before.sum(name) == 4
    assert now["hibachi_requests_total"] - before["hibachi_requests_total"] == 4
    assert now["hibachi_http_requests_total", "POST", "/tokenize", "400"] >= 1
    assert not any("nowhere" in str(key) for key in now)
    ended = now.sum("hibachi_requests_finished_total") + now.sum(name)
    assert now["hibachi_requests_total"] == ended


@pytest.mark.parametrize("which", ENGINES)
def test_a_full_queue_and_tenants(which, slow_model):
    tenants = Tenants((("k-anne", "anne"), ("k-emma", "emma"), ("k-too", "emma"), ("k-admin", "ops")), ADMIN)
    long = LONG | {"max_tokens": 400}
    many = long | {"stream": True, "n": 8}
    keys = {name: {"Authorization": f"Bearer k-{name}"} for name in ("anne", "emma", "nobody")}
    with (
        ENGINES[which](slow_model, max_num_seqs=1, max_num_queued_reqs=7) as texts,
        site(texts, tenants=tenants) as here,
    ):
        with here.client.stream("POST", "/v1/completions", json=many, headers=keys["anne"]) as busy:
            lines = busy.iter_lines()  # without it, the client would leave
            next(lines)
            assert here.post("/v1/completions", long, headers=keys["anne"]).status_code == 429
        until(lambda: not scrape(here)["hibachi_requests_open"])
        until(lambda: at_rest(here))
        answer = here.post("/v1/completions", GREEDY | {"prompt": "Emma"}, headers=keys["emma"])
        assert answer.status_code == 200, answer.text
        assert here.post("/v1/completions", {"prompt": "a"}, headers=keys["nobody"]).status_code == 401
        assert not [key for key in scrape(here) if "tenant" in key[0]], "names are for admins"
        assert not [key for key in scrape(here, headers=keys["anne"]) if "tenant" in key[0]]
        now = scrape(here, headers={"Authorization": "Bearer k-admin"})
    assert now["hibachi_requests_rejected_total", "queue_full", "429"] == 1
    assert now["hibachi_requests_rejected_total", "invalid_api_key", "401"] == 1
    assert now["hibachi_requests_total"] == 4
    assert {key[1]: value for key, value in now.items() if key[0] == "hibachi_tenant_requests_total"} == {
        "anne": 1,
        "emma": 1,
        "ops": 0,
    }
    assert now["hibachi_tenant_generation_tokens_total", "emma"] == 20
    assert now["hibachi_tenant_prompt_tokens_total", "emma"] == answer.json()["usage"]["prompt_tokens"]


# ---- the engine ------------------------------------------------------------------------------------------------------


def test_hits_of_the_cache_are_counted_in_tokens(server):
    """V-37."""
    words = server.texts.tokenizer.encode("Mr. Knightley walked across the wet lawn before breakfast. " * 40)[:200]
    server.complete(words)
    before = calm(server)
    reported = 0
    for _ in range(3):
        usage = server.complete(words)["usage"]
        reported += usage["prompt_tokens_details"]["cached_tokens"]
    assert reported >= 3 * 180
    now = calm(server)
    for name in ("prefix_hit_tokens_total", "cached_prompt_tokens_total", "request_cached_tokens_sum"):
        assert now["hibachi_" + name] - before["hibachi_" + name] == reported, name
    for name in ("prefix_queried_tokens_total", "prompt_tokens_total"):
        assert now["hibachi_" + name] - before["hibachi_" + name] == 600, name


def test_steps_are_counted_by_phase(server):
    before = calm(server)
    server.complete([7, 8, 9], **GREEDY | {"max_tokens": 11})
    now = calm(server)
    for phase, steps, tokens in (("prefill", 1, 3), ("decode", 10, 10)):
        for name in ("batch_rows", "batch_tokens", "step_seconds", "step_model_seconds", "step_host_seconds"):
            assert now[f"hibachi_{name}_count", phase] - before[f"hibachi_{name}_count", phase] == steps, name
        assert now["hibachi_batch_tokens_sum", phase] - before["hibachi_batch_tokens_sum", phase] == tokens
        assert now["hibachi_steps_total", phase] - before["hibachi_steps_total", phase] == steps
    assert now["hibachi_computed_tokens_total"] - before["hibachi_computed_tokens_total"] == 13
    assert 0 < now["hibachi_step_host_ratio"] < 1 and now["hibachi_batch_rows_limit"] == 16
    assert now["hibachi_cache_capacity_tokens"] == 16 * now["hibachi_cache_blocks"]


def test_who_leaves_frees_everything_wherever_it_was(chunked):
    """V-40: waiting, running, and between the chunks of a prompt; the others get what they would have got."""
    alone = chunked.complete("Emma", **GREEDY | {"max_tokens": 60})["choices"][0]["text"]
    before = calm(chunked)
    company = []

    def ask():
        company.append(chunked.complete("Emma", **GREEDY | {"max_tokens": 60})["choices"][0]["text"])

    asking = threading.Thread(target=ask)
    asking.start()
    running = [send(chunked, {**LONG, "stream": True, "prompt": f"Chapter {i}"}) for i in range(2)]
    name = "hibachi_inter_token_seconds_count"
    until(lambda: scrape(chunked)[name] > before[name] + 9)
    # Prompts of thirty chunks each, of which one at a time is computed beside the others; and more than there are rows.
    long = [send(chunked, {**LONG, "max_tokens": 30, "prompt": [i + 3] * 480, "stream": i % 2 > 0}) for i in range(8)]
    until(lambda: scrape(chunked)["hibachi_requests_open"] >= 8 + 2)
    time.sleep(0.02)
    for sock in long + running:
        sock.close()
    asking.join(20)
    until(lambda: not scrape(chunked)["hibachi_requests_open"])
    now = calm(chunked)
    name = "hibachi_requests_finished_total"
    assert company == [alone]
    assert now[name, "cancelled"] - before[name, "cancelled"] == 10
    assert now[name, "length"] - before[name, "length"] == 1
    for name in ("requests_running", "requests_waiting", "streams_open", "http_requests_open"):
        assert now["hibachi_" + name] == (name == "http_requests_open"), name  # this scrape
    assert now["hibachi_cache_free_blocks"] == now["hibachi_cache_blocks"] > 0
    assert now["hibachi_generation_tokens_total"] - before["hibachi_generation_tokens_total"] < 60 + 2 * 500


def test_a_scrape_waits_for_no_step(gated):
    gate, server = gated
    gate.let()
    with send(server, {"prompt": "It is", "max_tokens": 50}):  # its second step is held
        until(lambda: scrape(server)["hibachi_requests_running"] == 1)
        for _ in range(5):
            assert scrape(server)["hibachi_requests_open"] == 1
        gate.open()


def test_a_scrape_is_cheap(server):
    times = []
    for _ in range(30):
        began = time.perf_counter()
        server.client.get("/metrics")
        times.append(time.perf_counter() - began)
    assert min(times) < 0.01  # 3 ms on a machine that does nothing else, client included


def test_memory_and_what_is_served(server):
    now = scrape(server)
    processes = {key[1]: value for key, value in now.items() if key[0] == "hibachi_resident_memory_bytes"}
    child = server.texts.engine.pid is not None
    assert set(processes) == ({"server", "engine"} if child else {"server"})
    assert all(1e7 < size < 1e10 for size in processes.values())
    (info,) = [f for f in parsed(server.client.get("/metrics").text) if f.name == "hibachi_info"]
    labels = info.samples[0].labels
    assert labels["model"] == "tiny" and labels["dtype"] == "float32" and labels["backend"].startswith("numpy")
    assert labels["engine"] == ("child" if child else "server")
    assert now["hibachi_uptime_seconds"] > 0 and now["process_start_time_seconds"] > 0


# ---- names -----------------------------------------------------------------------------------------------------------

WANTED = {
    "hibachi": " ".join(series.name for series in SERIES),
    "vllm": """num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total
        prefix_cache_hits_total num_preemptions_total prompt_tokens_total prompt_tokens_cached_total
        generation_tokens_total request_success_total admission_rejections_total request_prompt_tokens
        request_generation_tokens iteration_tokens_total request_params_n request_params_max_tokens
        time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds
        e2e_request_latency_seconds request_queue_time_seconds request_inference_time_seconds
        request_prefill_time_seconds request_decode_time_seconds""",
    "tgi": """request_count request_success request_failure batch_inference_count batch_inference_success queue_size
        batch_current_size batch_max_total_tokens request_duration request_validation_duration request_queue_duration
        request_inference_duration request_mean_time_per_token_duration request_generated_tokens request_input_length
        request_max_new_tokens batch_next_size batch_inference_duration batch_forward_duration""",
}
ODD = 'a "model"\\of\nours'
PREFIX = {"hibachi": "", "vllm": "vllm:", "tgi": "tgi_"}


@pytest.fixture(scope="module")
def pages():
    """After one request that is fine and one that is not, under each project's names; the model has an odd one."""
    found = {}
    for names in NAMES:
        settings = dict(served_model_name=(ODD,), metric_names=names)
        with open_texts("tiny", max_num_seqs=4) as texts, site(texts, **settings) as here:
            here.complete("Emma", **GREEDY)
            assert here.post("/v1/completions", {"prompt": "Emma", "max_tokens": -1}).status_code == 400
            found[names] = here.client.get("/metrics").text
    return found


def test_bounds_of_requests_stay_as_they_are():
    """As those of steps, see `tests/engine/test_meters.py`."""
    meter = RequestMeter()
    for seconds, first, last, n in ((meter.first, 5e-4, 300, 30), (meter.between, 5e-5, 10, 28)):
        assert (seconds.bounds[0], seconds.bounds[-1], len(seconds.bounds)) == (first, last, n)
    assert meter.prompt_sizes.bounds == tuple(2**n for n in range(18))
    assert meter.n.bounds == (1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 64, 128)


@pytest.mark.parametrize("names", NAMES)
def test_every_series_is_there_once_with_help_and_type(pages, names):
    lines = pages[names].splitlines()
    helped = [line.split()[2] for line in lines if line.startswith("# HELP ")]
    typed = [line.split()[2] for line in lines if line.startswith("# TYPE ")]
    assert helped == typed and len(set(helped)) == len(helped)
    assert {PREFIX[names] + name for name in WANTED[names].split()} <= set(helped)
    families = {re.sub("_(bucket|sum|count)$", "", re.split("[{ ]", line)[0]) for line in lines if line[:1] != "#"}
    assert families - {"tgi_request", "tgi_batch_inference"} <= set(helped)
    replaced = {s.name for s in SERIES if s.name in NAMES[names]}
    assert {s.name for s in SERIES} - replaced <= set(helped) and replaced.isdisjoint(helped)


@pytest.mark.parametrize("names", NAMES)
def test_the_page_can_be_read_by_others(pages, names):
    families = list(parsed(pages[names]))
    assert all(f.type != "unknown" and f.documentation for f in families)
    for family in families:
        if family.type != "histogram":
            continue
        by_series = {}
        for s in family.samples:
            key = tuple(sorted((k, v) for k, v in s.labels.items() if k != "le"))
            by_series.setdefault(key, {}).setdefault(s.name.removeprefix(family.name), []).append(s)
        for found in by_series.values():
            values = [s.value for s in found["_bucket"]]
            assert values == sorted(values) and found["_bucket"][-1].labels["le"] == "+Inf"
            assert found["_count"][0].value == values[-1]
            assert (found["_sum"][0].value > 0) == (values[-1] > values[0] or found["_sum"][0].value > 0)


def test_labels_are_escaped(pages):
    (info,) = [f for f in parsed(pages["hibachi"]) if f.name == "hibachi_info"]
    assert info.samples[0].labels["model"] == ODD
    assert 'model="a \\"model\\"\\\\of\\nours"' in pages["hibachi"]


def test_the_names_of_vllm(pages):
    families = {f.name: f for f in parsed(pages["vllm"])}
    for name, family in families.items():
        if name.startswith("vllm:"):
            assert {(s.labels["model_name"], s.labels["engine"]) for s in family.samples} == {(ODD, "0")}
    success = {s.labels["finished_reason"]: s.value for s in families["vllm:request_success"].samples}
    assert success == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    steps = [s.value for s in families["vllm:iteration_tokens_total"].samples if s.name.endswith("_count")]
    assert families["vllm:iteration_tokens_total"].type == "histogram" and steps == [20]
    assert families["vllm:generation_tokens"].samples[0].value == 20


def test_who_leaves_the_queue_is_counted_as_dropped():
    """T-08: once, beside one that runs and is not."""

    def failures(here):
        return {key[1]: n for key, n in scrape(here).items() if key[0] == "tgi_request_failure_total" and n}

    with open_texts("tiny", max_num_seqs=1) as texts, site(texts, metric_names="tgi") as here:
        runs = send(here, {**LONG, "stream": True})
        until(lambda: scrape(here)["tgi_batch_current_size"] == 1)
        waits = [send(here, {**LONG, "stream": stream}) for stream in (True, False)]
        until(lambda: scrape(here)["tgi_queue_size"] == 2)
        assert failures(here) == {}
        for n, one in enumerate(waits, 1):
            one.close()
            until(lambda n=n: (failures(here), scrape(here)["tgi_queue_size"]) == ({"dropped": n}, 2 - n))
            assert scrape(here)["tgi_batch_current_size"] == 1
        runs.close()
        until(lambda: failures(here) == {"dropped": 3})
        assert scrape(here)["tgi_request_success_total"] == 0


def test_the_names_of_tgi(pages):
    """T-35: after one good and one bad request."""
    now = Figures(pages["tgi"])  # (the parser adds _total to counters)
    assert now["tgi_request_count_total"] == 2 and now["tgi_request_success_total"] == 1
    failures = {key[1]: value for key, value in now.items() if key[0] == "tgi_request_failure_total"}
    assert failures == {"generation": 0, "dropped": 0, "overloaded": 0, "validation": 1, "template": 0}
    assert "\ntgi_request_count 2\n" in pages["tgi"] and "# TYPE tgi_request_count counter" in pages["tgi"]
    assert now["tgi_batch_inference_count_total", "decode"] == 19
    assert now["tgi_batch_inference_duration_count", "prefill"] == 1 and now["tgi_queue_size"] == 0
    assert now["tgi_request_generated_tokens_sum"] == 20
    assert now["tgi_request_skipped_tokens_count"] == 20 and now["tgi_request_skipped_tokens_sum"] == 0  # none proposed


def test_the_page_of_the_docs_has_all_series():
    spec = importlib.util.spec_from_file_location("metrics_table", ROOT / "docs" / "metrics_table.py")
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    page = table.PAGE.read_text()
    assert table.written(page) == page, "run: python docs/metrics_table.py"


@pytest.mark.install
@pytest.mark.parametrize("names", NAMES)
def test_debians_promtool_finds_nothing(pages, names, tmp_path):
    """Of what it dislikes, only names that others chose are left."""
    tool = shutil.which("promtool")
    if tool is None:
        if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
            pytest.skip("promtool is not here, nor Debian's apt-get")
        subprocess.run(["apt-get", "download", "prometheus"], cwd=tmp_path, check=True, capture_output=True)
        (package,) = tmp_path.glob("prometheus_*.deb")
        subprocess.run(["dpkg", "-x", package, tmp_path], check=True)
        tool = tmp_path / "usr/bin/promtool"
    done = subprocess.run([tool, "check", "metrics"], input=pages[names], capture_output=True, text=True)
    said = (done.stdout + done.stderr).strip().splitlines()
    if names == "hibachi":
        assert done.returncode == 0 and not said, said
    theirs = re.compile(rf"{PREFIX[names]}\w+ .*(should not contain ':'|\"_(total|count)\" suffix)$")
    assert all(map(theirs.match, said)), said
