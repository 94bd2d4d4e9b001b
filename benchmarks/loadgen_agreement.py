"""Does `hibachi bench serve` see what other load generators see? The same texts, arrivals, lengths; runs alternate.

    .venv/bin/python benchmarks/loadgen_agreement.py --peer vllm=PYTHON --peer aiperf=COMMAND --tokenizer FOLDER

A peer is `vllm bench serve`, named by an interpreter that has vllm, or aiperf, named by its command. Both load a
tokenizer, which changes nothing that is measured. The server has a model whose steps take 20 ms, most of which it
sleeps, so that the processors that the generators take do not change what they are to measure. Requests come at a
constant rate. Expected: medians within 10 %.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from itertools import islice
from pathlib import Path
from statistics import median

from benchmarks.bench import work
from hibachi.testing.bench import traffic

sys.path.insert(0, str(Path(__file__).parent))
serving = import_module("serving")


class Steady(serving.Free):
    """The next letter, after 20 ms."""

    def step(self, params, cache, x):
        time.sleep(0.02)
        return super().step(params, cache, x)


STEADY = f"{Path(__file__)}:Steady"

VLLM = """
import argparse, sys
from vllm.benchmarks import serve
try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser
except ImportError:
    Parser = argparse.ArgumentParser
parser = Parser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
SHOWN = (
    "requests/s",
    "tokens/s",
    *(f"{name} {what}" for name in ("TTFT", "TPOT", "ITL", "E2E") for what in ("mean", "p50", "p99")),
)


def ours(args, url: str, folder: Path) -> dict[str, float]:
    out = folder / "ours.json"
    command = [sys.executable, "-m", "hibachi", "bench", "serve", "--url", url, "--work", str(folder / "work.jsonl")]
    command += ["--words", "--arrivals", "constant", "--rate", str(args.rate), "--out", str(out)]
    _run(command)
    of = json.loads(out.read_text())["figures"]
    assert of["ok"] == args.requests, of
    found = {"requests/s": of["requests_per_second"], "tokens/s": of["tokens_per_second"], "cpu": of["cpu_seconds"]}
    for name in ("ttft", "tpot", "itl", "e2e"):
        found |= {f"{name.upper()} {what}": 1e3 * of[name][what] for what in ("mean", "p50", "p99")}
    return found


def vllm(args, url: str, folder: Path, python: str) -> dict[str, float]:
    command = [python, "-c", VLLM, "--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"]
    command += ["--model", "tiny", "--tokenizer", args.tokenizer, "--dataset-name", "custom", "--disable-shuffle"]
    command += ["--dataset-path", str(folder / "vllm.jsonl"), "--custom-output-len", str(args.new), "--ignore-eos"]
    command += ["--skip-chat-template", "--num-prompts", str(args.requests), "--request-rate", str(args.rate)]
    command += ["--burstiness", "1e6", "--temperature", "0", "--save-result", "--result-dir", str(folder)]  # constant
    command += ["--result-filename", "vllm.json", "--percentile-metrics", "ttft,tpot,itl,e2el", "--disable-tqdm"]
    _run([*command, "--metric-percentiles", "50,99"])
    of = json.loads((folder / "vllm.json").read_text())
    assert of["completed"] == args.requests, of
    found = {"requests/s": of["request_throughput"], "tokens/s": of["output_throughput"]}
    for name, theirs in (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("E2E", "e2el")):
        found |= {
            f"{name} {w}": of[f"{k}_{theirs}_ms"] for w, k in (("mean", "mean"), ("p50", "median"), ("p99", "p99"))
        }
    return found


def aiperf(args, url: str, folder: Path, command: str) -> dict[str, float]:
    line = [command, "profile", "-m", "tiny", "--endpoint-type", "completions", "--url", url, "--streaming"]
    line += ["--input-file", str(folder / "aiperf.jsonl"), "--custom-dataset-type", "single_turn"]
    line += ["--dataset-sampling-strategy", "sequential", "--request-count", str(args.requests)]
    line += ["--request-rate", str(args.rate), "--arrival-pattern", "constant", "--use-server-token-count"]
    line += ["--extra-inputs", f"max_tokens:{args.new}", "--extra-inputs", "ignore_eos:true", "--extra-inputs"]
    line += ["temperature:0", "--use-legacy-max-tokens", "--tokenizer", args.tokenizer, "--ui", "none"]
    line += ["--output-artifact-dir", str(folder / "aiperf"), "--no-server-metrics", "--no-gpu-telemetry"]
    _run([*line, "--workers-max", "1"])
    [file] = (folder / "aiperf").rglob("profile_export_aiperf.json")
    of = json.loads(file.read_text())
    file.unlink()
    found = {"requests/s": of["request_throughput"]["avg"], "tokens/s": of["output_token_throughput"]["avg"]}
    # Its inter-token latency is one value a request: what others call TPOT.
    for name, theirs in (("TTFT", "time_to_first_token"), ("TPOT", "inter_token_latency"), ("E2E", "request_latency")):
        found |= {f"{name} {w}": of[theirs][k] for w, k in (("mean", "avg"), ("p50", "p50"), ("p99", "p99"))}
    return found


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)[:300]}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


PEERS = {"vllm": vllm, "aiperf": aiperf}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", required=True)
    parser.add_argument("--tokenizer", default="gpt2", help="a folder, or a name on the Hub, for the peers to load")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--input", type=int, default=48, help="words")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--engine", choices=("own", "child"), default="child")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="add the runs to those of before, and show all")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and the server with it
    peers = dict(each.split("=", 1) for each in args.peer)
    made = traffic.Random(args.input, args.new)
    asks = list(islice(made.asks(traffic.arrivals("constant", None, 0)), args.requests))
    texts = [traffic.text(a.prompt) for a in asks]
    runs: dict[str, list[dict[str, float]]] = {"hibachi": [], **{name: [] for name in peers}}
    if args.keep and args.keep.exists():
        runs |= json.loads(args.keep.read_text())
    with (
        tempfile.TemporaryDirectory() as name,
        serving.server(STEADY, args.engine, "--served-model-name", "tiny") as one,
    ):
        folder = Path(name)
        work.write([work.TimedRequest(a.id, 0.0, list(a.prompt), a.new) for a in asks], folder / "work.jsonl")
        lines = {"vllm": [{"prompt": t} for t in texts], "aiperf": [{"text": t} for t in texts]}
        for peer, each in lines.items():
            (folder / f"{peer}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in each))
        for _ in range(args.repeat):
            time.sleep(2)  # the one before is still being cleared away
            runs["hibachi"].append(ours(args, one.url, folder))
            for peer, command in peers.items():
                time.sleep(2)
                runs[peer].append(PEERS[peer](args, one.url, folder, command))
            if args.keep:
                args.keep.write_text(json.dumps(runs))
    print(f"{args.requests} requests, {args.rate:g} a second, {args.input} words in, {args.new} out, steps of 20 ms;")
    print(f"medians of {len(runs['hibachi'])} alternating runs; times in ms; hibachi's over the peer's in brackets\n")
    print(f"{'':12}{'hibachi':>10}" + "".join(f"{peer:>20}" for peer in peers))
    for name in SHOWN:
        mine = median(r[name] for r in runs["hibachi"])
        line = f"{name:12}{mine:10.2f}"
        for peer in peers:
            theirs = [r[name] for r in runs[peer] if name in r]
            line += f"{median(theirs):11.2f} ({mine / median(theirs):5.3f})" if theirs else f"{'-':>19}"
        print(line)


if __name__ == "__main__":
    main()
