"""n-gram speculation of other engines beside hibachi's, on text that repeats its prompt.

    python benchmarks/speculation_peers.py prepare FOLDER --gguf .smollm2/MODEL.gguf --text TEXT
    python benchmarks/speculation_peers.py hibachi FOLDER
    PYTHON benchmarks/speculation_peers.py transformers FOLDER
    PYTHON benchmarks/speculation_peers.py llamacpp FOLDER
    PYTHON benchmarks/speculation_peers.py vllm FOLDER

prepare writes the prompts of `speculation.py repeat` as token ids, the model in bfloat16 as a folder for Hugging Face,
and the same numbers as bfloat16 GGUF. Every engine reads these. PYTHON is the interpreter of an environment in which
that engine is installed (llamacpp: the package xllamacpp, which is llama.cpp's server in a wheel); nothing else is
needed there.

An engine runs in a process for each way to speculate, all at once, and takes turns: each turn has prompts of its own,
which every way runs, the others idle. `plain` is without. Then it is asked at temperature 0.7 with a seed a request.
The table shows for each way: tokens a second and processor seconds a token (medians over turns; threads that wait for
others burn time too), their ratios to plain turn by turn, passes of the model a token (1.0 plain), and the share of its
answers that equal plain's, all ids. `plain again` is the first turn's prompts a second time: what differs there is not
speculation's fault. Prefix caches are off, end tokens ignored, all filters off.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# Each engine's ways to speculate: its own words for "plain", its defaults, and k proposals in a step.
WAYS: dict[str, dict[str, Any]] = {
    "hibachi": {
        "plain": "off",
        "auto": "auto",
        "k": {"method": "ngram", "num_speculative_tokens": "K"},
        "k, 2 to 4": {
            "method": "ngram",
            "num_speculative_tokens": "K",
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        },
    },
    # 10 is what its class of candidates has as default.
    "transformers": {"plain": None, "default": 10, "k": "K"},
    # `default` is what --spec-default means. ngram-simple proposes at least as many tokens as its n-gram has: with its
    # 12, never 4.
    "llamacpp": {
        "plain": {"type": "NONE"},
        "default": {"type": "NGRAM_MOD"},
        "ngram-simple": {"type": "NGRAM_SIMPLE"},
        "ngram-cache": {"type": "NGRAM_CACHE"},
        "k": {"type": "NGRAM_SIMPLE", "size_n": "K", "size_m": "K"},
    },
    # It has no default for the number; 5 with n-grams of up to 4 is the example of its documentation.
    "vllm": {
        "plain": None,
        "example": {
            "method": "ngram",
            "num_speculative_tokens": 5,
            "prompt_lookup_max": 4,
        },
        "k": {"method": "ngram", "num_speculative_tokens": "K"},
    },
}
MAX_LEN = 1536


class Request:
    """prompt: ids. tokens: how many to make. answer: ids that came."""

    def __init__(self, prompt: list[int], tokens: int, seed: int, temperature: float) -> None:
        self.prompt, self.tokens, self.seed, self.temperature = prompt, tokens, seed, temperature
        self.answer: list[int] = []


# Engines. Each has version and run(requests), which fills in the answers and returns how many passes a row took in all,
# the one of its prompt counted, so that plain is one a token. rows: requests at once.


class Hibachi:
    def __init__(self, s: dict[str, Any]) -> None:
        from importlib.metadata import version

        from hibachi import LLM, SamplingParams

        self.params, self.rows, self.version = SamplingParams, s["rows"], version("hibachi")
        self.llm = LLM(
            s["model"],
            backend=s["backend"],
            dtype=s["dtype"],
            max_num_seqs=s["rows"],
            max_model_len=MAX_LEN,
            enable_prefix_caching=False,
            speculative_config=s["way"],
        )

    def run(self, requests: list[Request]) -> float:
        before = self.llm.stats().steps
        params = [
            self.params(temperature=r.temperature, seed=r.seed, max_tokens=r.tokens, ignore_eos=True) for r in requests
        ]
        for r, out in zip(requests, self.llm.generate([r.prompt for r in requests], params), strict=True):
            r.answer = list(map(int, out.outputs[0].token_ids if hasattr(out, "outputs") else out.token_ids))
        return (self.llm.stats().steps - before) * min(self.rows, len(requests))


class Transformers:
    def __init__(self, s: dict[str, Any]) -> None:
        import torch
        import transformers

        if s["rows"] != 1:
            sys.exit("transformers looks up n-grams for one row at a time only: say --rows 1.")
        if s["threads"]:
            torch.set_num_threads(s["threads"])
        self.torch, self.way, self.version, self.passes = torch, s["way"], transformers.__version__, 0
        transformers.utils.logging.disable_progress_bar()
        loader = transformers.AutoModelForCausalLM
        self.model: Any = loader.from_pretrained(s["model"], dtype=getattr(torch, s["dtype"])).eval()
        self.model.generation_config.eos_token_id = None  # among the arguments, None would mean the model's own
        self.model.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.passes += 1

    def run(self, requests: list[Request]) -> float:
        before = self.passes
        for r in requests:
            how: dict[str, Any] = dict(do_sample=False)
            if r.temperature:
                how = dict(do_sample=True, temperature=r.temperature, top_k=0, top_p=1.0)
            if self.way:
                how["prompt_lookup_num_tokens"] = self.way
            ids = self.torch.tensor([r.prompt])
            self.torch.manual_seed(r.seed)
            with self.torch.inference_mode():
                out = self.model.generate(
                    ids,
                    attention_mask=self.torch.ones_like(ids),
                    max_new_tokens=r.tokens,
                    pad_token_id=0,
                    **how,
                )
            r.answer = out[0].tolist()[len(r.prompt) :]
        return self.passes - before


class LlamaCpp:
    """The server of llama.cpp in this process, asked over HTTP on the loopback."""

    def __init__(self, s: dict[str, Any]) -> None:
        from importlib.metadata import version

        import xllamacpp

        self.rows, self.version = s["rows"], version("xllamacpp") + " " + xllamacpp.get_system_info()
        p = xllamacpp.CommonParams()
        p.model.path = s["model"]
        p.n_ctx, p.n_parallel = (MAX_LEN + 80) * s["rows"], s["rows"]
        if s["threads"]:
            p.cpuparams.n_threads = p.cpuparams_batch.n_threads = s["threads"]
        p.cache_ram_mib, p.fit_params, p.verbosity = 0, False, 1
        way = dict(s["way"])
        kind = "COMMON_SPECULATIVE_TYPE_" + way.pop("type")
        p.speculative.types = [getattr(xllamacpp.common_speculative_type, kind)]
        for name, value in way.items():
            setattr(p.speculative.ngram_simple, name, value)
        self.server: Any = xllamacpp.Server(p)
        self.address = self.server.listening_address.split("//")[-1]

    def one(self, r: Request) -> float:
        asked = dict(prompt=r.prompt, n_predict=r.tokens, seed=r.seed, temperature=r.temperature, stream=False)
        asked.update(samplers=["temperature"] if r.temperature else ["top_k"], top_k=1, return_tokens=True)
        asked.update(ignore_eos=True, cache_prompt=False)
        connection = http.client.HTTPConnection(self.address)
        connection.request("POST", "/completion", json.dumps(asked), {"Content-Type": "application/json"})
        came = json.loads(connection.getresponse().read())
        connection.close()
        if "error" in came:
            raise RuntimeError(str(came["error"]))
        r.answer = came["tokens"]
        return len(r.answer) - came["timings"].get("draft_n_accepted", 0)

    def run(self, requests: list[Request]) -> float:
        with ThreadPoolExecutor(self.rows) as pool:
            return sum(pool.map(self.one, requests))


class Vllm:
    """In this process, which is its fastest way on few cores."""

    def __init__(self, s: dict[str, Any]) -> None:
        for name, value in (
            ("VLLM_CPU_KVCACHE_SPACE", "1"),
            ("VLLM_CPU_NUM_OF_RESERVED_CPU", "0"),
            ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
            ("VLLM_LOGGING_LEVEL", "ERROR"),
            ("VLLM_NO_USAGE_STATS", "1"),
        ):
            os.environ.setdefault(name, value)
        if s["threads"]:
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{s['threads'] - 1}")
        import vllm

        self.params, self.version, self.rows, self.count = vllm.SamplingParams, vllm.__version__, s["rows"], 0
        options: dict[str, Any] = {"speculative_config": s["way"]} if s["way"] else {}
        self.engine: Any = vllm.LLM(
            model=s["model"],
            dtype=s["dtype"],
            max_num_seqs=s["rows"],
            max_model_len=MAX_LEN,
            enable_prefix_caching=False,
            enforce_eager=s["eager"],
            disable_log_stats=True,
            skip_tokenizer_init=True,
            seed=0,
            **options,
        ).llm_engine

    def run(self, requests: list[Request]) -> float:
        live, passes = {}, 0
        for r in requests:
            self.count += 1
            live[str(self.count)] = r
            params = self.params(
                temperature=r.temperature, seed=r.seed, max_tokens=r.tokens, ignore_eos=True, detokenize=False
            )
            self.engine.add_request(str(self.count), {"prompt_token_ids": r.prompt}, params)
        while live:
            for out in self.engine.step():
                ids = list(out.outputs[0].token_ids)
                passes += len(ids) > len(live[out.request_id].answer)
                live[out.request_id].answer = ids
                if out.finished:
                    del live[out.request_id]
        return passes


ENGINES: dict[str, Any] = {"hibachi": Hibachi, "transformers": Transformers, "llamacpp": LlamaCpp, "vllm": Vllm}


def child() -> None:
    """One engine with one way: requests come as lines of JSON, answers go as lines of JSON."""
    settings = json.loads(sys.argv[2])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print is for nobody to parse
    engine = ENGINES[settings["engine"]](settings)

    def tell(**what: Any) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    tell(version=engine.version)
    for line in sys.stdin:
        requests = [Request(**one) for one in json.loads(line)]
        clock, cpu = time.perf_counter(), time.process_time()
        passes = engine.run(requests)
        seconds, cpu = time.perf_counter() - clock, time.process_time() - cpu
        tell(seconds=seconds, cpu=cpu, passes=passes, answers=[r.answer for r in requests])
    out.close()
    os._exit(0)  # servers and pools that would not end


class Way:
    """A process that runs one engine in one way."""

    def __init__(self, settings: dict[str, Any]) -> None:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "child", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.version = self.read()["version"]

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the engine's process ended with status {self.process.wait()}; its last words are above.")
        found: dict[str, Any] = json.loads(line)
        return found

    def turn(self, requests: list[dict[str, Any]], temperature: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([{**r, "temperature": temperature} for r in requests]) + "\n")
        self.process.stdin.flush()
        found = self.read()
        found["tokens"] = sum(map(len, found["answers"]))
        if found["tokens"] != sum(r["tokens"] for r in requests):
            print("   (answers of other lengths than asked)", flush=True)
        return found

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def agreement(plain: list[list[int]], other: list[list[int]]) -> str:
    """How many answers are equal; and of all tokens, the share before the first that differs."""
    same, alike = 0, 0
    for a, b in zip(plain, other, strict=True):
        same += a == b
        alike += next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"{same} of {len(plain)} equal ({alike / max(1, sum(map(len, plain))):.0%} of tokens before the first other)"


def table(ways: dict[str, Way], blocks: list[list[dict[str, Any]]], temperature: float) -> list[list[int]]:
    """One line for each way, over all blocks of requests. Returns the plain answers."""
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    names = list(ways)
    for i, block in enumerate(blocks):
        for name in names if i % 2 else names[::-1]:
            turns[name].append(ways[name].turn(block, temperature))
    again = ways["plain"].turn(blocks[0], temperature)
    m, plain = statistics.median, turns["plain"]
    answers = {name: [ids for t in each for ids in t["answers"]] for name, each in turns.items()}
    for name, each in turns.items():
        line = f"temperature {temperature:.1f} {name:12} {m(t['tokens'] / t['seconds'] for t in each):7.1f} tokens/s, "
        line += f"processor {m(t['cpu'] / t['tokens'] for t in each) * 1e3:7.2f} ms a token, "
        line += f"{sum(t['passes'] for t in each) / sum(t['tokens'] for t in each):.2f} passes a token"
        if name != "plain":
            speed = [p["seconds"] / t["seconds"] for p, t in zip(plain, each, strict=True)]
            cpu = [t["cpu"] / p["cpu"] for p, t in zip(plain, each, strict=True)]
            line += f"; {spread(speed)}x as fast, processor {spread(cpu)}x; "
            line += agreement(answers["plain"], answers[name])
        print(line, flush=True)
    print(f"temperature {temperature:.1f} plain again  {agreement(plain[0]['answers'], again['answers'])}", flush=True)
    return answers["plain"]


def beside(folder: Path, engine: str, answers: list[list[int]]) -> None:
    """Plain greedy answers beside those that other engines left in the folder: a sign that the model is the same."""
    (folder / f"plain-{engine}.json").write_text(json.dumps(answers))
    for other in sorted(folder.glob("plain-*.json")):
        theirs = json.loads(other.read_text())
        if other.stem != f"plain-{engine}" and list(map(len, theirs)) == list(map(len, answers)):
            print(f"plain greedy answers beside {other.stem[6:]}'s: {agreement(theirs, answers)}", flush=True)


def compare(a: argparse.Namespace) -> None:
    blocks = [json.loads(line) for line in (a.folder / "prompts.jsonl").read_text().splitlines()]
    most = (len(blocks) - 1) // len(a.temperatures)
    if not 1 <= a.turns <= most:
        sys.exit(f"--turns must be from 1 to {most}, as FOLDER has no more prompts; got {a.turns}.")
    if a.requests or a.tokens:
        blocks = [[{**r, "tokens": min(r["tokens"], a.tokens or MAX_LEN)} for r in b[: a.requests]] for b in blocks]
    model = str(a.model or a.folder / ("model.gguf" if a.engine == "llamacpp" else "model"))
    settings = dict(engine=a.engine, model=model, backend=a.backend, dtype=a.dtype, rows=a.rows, threads=a.threads)
    settings["eager"] = a.eager
    ways: dict[str, Way] = {}
    for name, way in WAYS[a.engine].items():
        if a.ways and name not in a.ways:
            continue
        said = json.loads(json.dumps(way).replace('"K"', str(a.k)))
        ways[name] = Way({**settings, "way": said})
        print(f"{name}: {json.dumps(said)}", flush=True)
    if "plain" not in ways:
        sys.exit("--ways must have plain, which the others are compared with.")
    first = next(iter(ways.values())).version
    print(f"{a.engine} {first}; rows {a.rows}, {a.turns} turns of {len(blocks[0])} requests, k = {a.k}", flush=True)
    for each in ways.values():
        each.turn(blocks[-1][: max(2, a.rows)], 0.0)  # warm
        each.turn(blocks[-1][: max(2, a.rows)], 0.7)
    for i, temperature in enumerate(a.temperatures):  # prompts of their own, as some engines remember what they saw
        answers = table(ways, blocks[i * a.turns : (i + 1) * a.turns], temperature)
        if not temperature:
            beside(a.folder, a.engine, answers)
    for each in ways.values():
        each.close()


def prepare(a: argparse.Namespace) -> None:
    """Needs hibachi with the extras torch, text, gguf and hf."""
    import gguf
    import numpy as np
    from load import write_safetensors
    from speculation import repeat

    from hibachi import LLM

    (a.folder / "model").mkdir(parents=True, exist_ok=True)
    write_safetensors(a.folder / "model", a.gguf)
    read = gguf.GGUFReader(a.gguf)
    write = gguf.GGUFWriter(a.folder / "model.gguf", read.fields["general.architecture"].contents())
    for field in read.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[1] if len(field.types) > 1 else None
        write.add_key_value(field.name, field.contents(), field.types[0], inner)
    write.add_file_type(int(gguf.LlamaFileType.MOSTLY_BF16))
    for t in read.tensors:
        numbers = gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32)
        kind = gguf.GGMLQuantizationType.F32 if numbers.ndim == 1 else gguf.GGMLQuantizationType.BF16
        # Rows that are not a matrix stay float32 in files of llama.cpp, but with the numbers of the folder.
        rounded = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType.BF16)
        if numbers.ndim == 1:
            rounded = gguf.quants.dequantize(rounded, gguf.GGMLQuantizationType.BF16)
        write.add_tensor(t.name, rounded, raw_dtype=kind)
    write.write_header_to_file()
    write.write_kv_data_to_file()
    write.write_tensors_to_file()
    write.close()
    a.temperature = 0.0
    with LLM(a.gguf, max_model_len=MAX_LEN) as llm:
        work = repeat(llm, a, a.requests * (2 * a.turns + 1))
    asked = [dict(prompt=list(map(int, ids)), tokens=p.max_tokens, seed=p.seed) for ids, p in work]
    with (a.folder / "prompts.jsonl").open("w") as out:
        for i in range(0, len(asked), a.requests):
            out.write(json.dumps(asked[i : i + a.requests]) + "\n")
    print(f"{len(asked)} requests, the first with a prompt of {len(asked[0]['prompt'])} ids")


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        return child()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="engine", required=True)
    p = verbs.add_parser("prepare")
    p.add_argument("folder", type=Path)
    p.add_argument("--gguf", required=True, help="SmolLM2-135M-Instruct, or another of its architecture")
    p.add_argument("--text", required=True, help="a text file")
    p.add_argument("--requests", type=int, default=4, help="of a turn")
    p.add_argument("--turns", type=int, default=5, help="at each of two temperatures")
    p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--chars", type=int, default=1500)
    for name in ENGINES:
        p = verbs.add_parser(name)
        p.add_argument("folder", type=Path)
        p.add_argument("--model", help="another than FOLDER's")
        p.add_argument("--backend", default="torch", help="hibachi's")
        p.add_argument("--dtype", default="bfloat16", help="llamacpp: that of its file")
        p.add_argument("--rows", type=int, default=1, help="requests at once")
        p.add_argument("--threads", type=int, default=os.cpu_count(), help="0: as it likes; hibachi does always")
        p.add_argument("--eager", action="store_true", help="vllm: do not compile")
        p.add_argument("--k", type=int, default=4)
        p.add_argument("--turns", type=int, default=5)
        p.add_argument("--requests", type=int, help="at most so many of a turn")
        p.add_argument("--tokens", type=int, help="at most so many of a request")
        p.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
        p.add_argument("--ways", nargs="+", help="of " + ", ".join(WAYS[name]) + "; by default all")
    a = parser.parse_args()
    if a.engine == "prepare":
        prepare(a)
    else:
        compare(a)


if __name__ == "__main__":
    main()
