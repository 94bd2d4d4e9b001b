"""What files cost: `hibachi run-batch` beside the engine in one's own program, and beside other libraries.

formats   Rows of token ids of W1's kind (`benchmarks.bench work`), each with its own max_tokens, greedy, by
          `LLM.generate` and from files into files, in turns of --piece rows with a new engine each. Timed from the
          loaded model to the output in its place. Expected: JSON Lines at least 0.95 of the engine's tokens/s, CSV and
          Parquet within 5 % of JSON Lines. The engine has rows in the file's order, run-batch the longest first:
          `sorted` is the engine with that order too, so that the rest is what files cost.
composed  W2 (64 rows that share 512 tokens) shuffled into W1 (64 rows), as one file, against one after the other by
          `LLM.generate`, each with an empty cache. Expected: at most 1.05 of the time. --peers: beside it transformers
          (static batches of 16, left-padded) and kvboost (`generate_batch`; also with the rows that share first, their
          prefix warmed), and how many rows have the tokens that they have alone.
million   Many rows through a model that costs nothing, by the command itself, seen from outside: rows/s, seconds of
          processor, memory of each process over time. --resume-at N: kill -9 once N rows are in the journal, and the
          same command again. Expected: 3,000 rows a second of one core, at most 300 MB over the loaded model and flat,
          a resume at row 900,000 computes within 15 s.
steps     Rows of W1's lengths through a small model: steps of the engine against the fewest there can be, the longest
          answer or all tokens by the places. Expected: at most 1.02.

    python benchmarks/offline.py formats --model .smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --rows 256 --rounds 2
    python benchmarks/offline.py composed --model 135m --peers kvboost,transformers --kvboost-python ENV/bin/python
    python benchmarks/offline.py million --rows 1000000 --engine own,child --plot memory.png
    python benchmarks/offline.py million --rows 1000000 --engine child --resume-at 900000
    python benchmarks/offline.py steps

A model is a folder, a GGUF file, or one of `benchmarks.bench model`'s shapes (31m, 135m), made with random weights. Who
else was at the machine meanwhile is printed: figures with more than a few percent are worth little.
"""

from __future__ import annotations

import argparse
import csv
import gc
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.bench import randommodel
from benchmarks.bench.watch import Watch
from benchmarks.bench.work import longest, make, totals, write
from hibachi import SamplingParams
from hibachi.backend.kernels.threads import processors
from hibachi.llm.remote.opening import open_settled
from hibachi.offline import Batch, Done, Watcher, run_batch
from hibachi.offline.drive import Drive
from hibachi.offline.files.sources import Sources
from hibachi.offline.journal import Journal
from hibachi.offline.settings import settle
from hibachi.offline.tasks.column_task import ColumnTask
from hibachi.offline.tasks.columns import Columns
from hibachi.testing.bench.machine import machine
from hibachi.testing.bench.work import TimedRequest

WAYS = ("engine", "sorted", "jsonl", "csv", "parquet", "own")
PEERS = ("transformers", "kvboost")
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
MODEL = '''
import numpy as np

class Trivial:
    """The next number is the likeliest token."""

    vocab_size, max_model_len = 32, 64

    def logits(self, tokens, lengths):
        n = len(tokens)
        out = np.zeros((n, 32), np.float32)
        out[np.arange(n), (tokens[np.arange(n), -1] + 1) % 32] = 5.0
        return out

class Letters:
    def encode(self, text):
        return [ord(c) % 32 for c in text]

    def decode(self, ids):
        return "".join(chr(96 + int(i)) for i in ids)

class Spoken(Trivial):
    tokenizer = Letters()
'''


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print(f"\n| {' | '.join(columns)} |\n|---|{'---:|' * (len(columns) - 1)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print(flush=True)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---- a turn of a language model ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Turn:
    """seconds: from the loaded model to the last answer. tokens: new ones of each request, in their order."""

    seconds: float
    tokens: list[list[int]]
    steps: int = 0
    others: float = 0.0  # share of the machine that others had
    cpu: float = 0.0  # seconds of processor, of all its processes

    @property
    def new(self) -> int:
        return sum(map(len, self.tokens))

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "new_tokens": self.new,
            "steps": self.steps,
            "others": self.others,
            "cpu": self.cpu,
        }


def unlike(a: Turn, b: Turn) -> int:
    """Requests that have other tokens."""
    return sum(x != y for x, y in zip(a.tokens, b.tokens, strict=True))


def _line(number: int, way: str, turn: Turn) -> str:
    return f"{number:3} {way:16} {turn.new:7,} tokens {turn.seconds:7.2f} s {turn.new / turn.seconds:8,.1f}/s"


class Clock(Watcher):
    """When the model was loaded, and how many steps its engine made since, if it is in this process."""

    def begins(self, batch: Batch, drive: Drive, journal: Journal, sources: Sources) -> None:
        self._work = drive.work
        self._before = self._steps()
        self.watch = Watch(os.getpid())
        self.loaded = time.monotonic()

    def writes(self) -> None:
        self.steps = self._steps() - self._before

    def _steps(self) -> int:
        engine = cast(ColumnTask, self._work).serving.engine
        return 0 if engine.pid is not None else engine.stats().steps


def by_files(settings: SimpleNamespace, requests: Sequence[TimedRequest], form: str, folder: Path) -> Turn:
    """`run-batch` from a file of one format into another one of the same."""
    source, out = folder / f"in.{form}", folder / f"out.{form}"
    rows_to_file(source, ({"id": r.id, "tokens": r.prompt, "max_tokens": r.max_tokens} for r in requests))
    clear(out)
    columns = Columns(tokens="tokens", params=GREEDY, param_columns={"max_tokens": "max_tokens"})
    clock = Clock()
    batch = Batch(inputs=[str(source)], output=str(out), settings=settings, columns=columns, token_ids=True)
    began = time.monotonic()
    done: Done = run_batch(batch, clock)
    if done.failed or done.rows != len(requests):
        raise SystemExit(f"{done.failed} rows failed of {done.rows}; expected {len(requests)} without a failure.")
    use = clock.watch.use()
    # `done.seconds` ends when the output is in its place, before the engine is closed.
    seconds = began + done.seconds - clock.loaded
    ids = [row.values["output_token_ids"] for row in Sources([str(out)]).rows()]
    tokens = [json.loads(i) if isinstance(i, str) else list(i) for i in ids]
    return Turn(seconds, tokens, clock.steps, use.others or 0.0, use.cpu_seconds or 0.0)


def by_engine(
    settings: SimpleNamespace, parts: Sequence[Sequence[TimedRequest]], order: Callable[[TimedRequest], Any] | None
) -> Turn:
    """`LLM.generate` of each part, one after the other; a part is sorted by `order` before."""
    texts, _ = open_settled(settings)
    found: dict[int, list[int]] = {}
    try:
        before, watch, began = texts.engine.stats().steps, Watch(os.getpid()), time.monotonic()
        for part in parts:
            asked = sorted(part, key=order) if order else list(part)
            params = [SamplingParams(max_tokens=r.max_tokens, **GREEDY) for r in asked]
            for r, done in zip(asked, texts.generate([r.prompt for r in asked], params), strict=True):
                found[r.id] = [int(i) for i in done.choices[0].token_ids]
        seconds = time.monotonic() - began
        steps, use = texts.engine.stats().steps - before, watch.use()
    finally:
        texts.close()
        del texts
        gc.collect()
    tokens = [found[r.id] for part in parts for r in part]
    return Turn(seconds, tokens, steps, use.others or 0.0, use.cpu_seconds or 0.0)


def longest_first(r: TimedRequest) -> int:
    return -len(r.prompt) - r.max_tokens


def alone(settings: SimpleNamespace, requests: Sequence[TimedRequest]) -> dict[int, list[int]]:
    """The tokens of each request, computed by itself, without a prefix cache."""
    settings = SimpleNamespace(**{**vars(settings), "engine": "own", "enable_prefix_caching": False})
    texts, _ = open_settled(settings)
    try:
        return {
            r.id: [int(i) for i in texts.generate([r.prompt], SamplingParams(max_tokens=r.max_tokens, **GREEDY))[0]
                   .choices[0].token_ids]
            for r in requests
        }  # fmt: skip
    finally:
        texts.close()


def vocabulary(settings: SimpleNamespace) -> int:
    texts, _ = open_settled(settings)
    try:
        say(f"{settings.model}: {texts.engine.facts.fingerprint}, {texts.engine.facts.dtype}")
        assert texts.vocab_size is not None
        return texts.vocab_size
    finally:
        texts.close()


# ---- files -----------------------------------------------------------------------------------------------------------


def rows_to_file(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """JSON Lines, CSV (lists as JSON) or Parquet, by the name."""
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        writer = None
        for some in in_pieces(rows, 50_000):
            part = pa.Table.from_pylist(some)
            writer = writer or pq.ParquetWriter(path, part.schema)
            writer.write_table(part)
        if writer is not None:
            writer.close()
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        if path.suffix == ".jsonl":
            for row in rows:
                file.write(json.dumps(row) + "\n")
            return
        to = csv.writer(file)
        for i, row in enumerate(rows):
            if not i:
                to.writerow(row)
            to.writerow([json.dumps(v) if isinstance(v, (list, dict)) else v for v in row.values()])


def in_pieces(rows: Iterable[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    some: list[dict[str, Any]] = []
    for row in rows:
        some.append(row)
        if len(some) == size:
            yield some
            some = []
    if some:
        yield some


def clear(out: Path) -> None:
    for file in (out, journal_of(out), out.with_name(out.name + ".part")):
        file.unlink(missing_ok=True)


def journal_of(out: Path) -> Path:
    return out.with_name(out.name + ".journal")


# ---- formats ---------------------------------------------------------------------------------------------------------


def formats(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    own, child = settings_of(args, folder, "own"), settings_of(args, folder, "child")
    run: dict[str, Callable[[Sequence[TimedRequest]], Turn]] = {
        "engine": lambda part: by_engine(own, [part], None),
        "sorted": lambda part: by_engine(own, [part], longest_first),
        "own": lambda part: by_files(own, part, "jsonl", folder),
    } | {form: partial(_formatted, child, form, folder) for form in ("jsonl", "csv", "parquet")}
    size = vocabulary(own)
    turns: dict[str, list[Turn]] = {way: [] for way in args.ways}
    differ = 0
    for round_ in range(args.rounds):
        requests = make("W1", size, seed=args.seed, turn=round_ + 1, requests=args.rows)
        for at in range(0, args.rows, args.piece):
            part = requests[at : at + args.piece]
            turn = len(turns[args.ways[0]])
            for way in args.ways[::-1] if turn % 2 else args.ways:  # there and back
                turns[way].append(run[way](part))
                say(_line(turn + 1, way, turns[way][-1]))
            first = turns[args.ways[0]][-1]
            differ += sum(unlike(first, turns[way][-1]) for way in args.ways[1:])
    base = {"sorted": "engine", "jsonl": "engine", "csv": "jsonl", "parquet": "jsonl", "own": "engine"}
    wanted = {"jsonl": ">= 0.95", "csv": ">= 0.95", "parquet": ">= 0.95"}
    found: dict[str, Any] = {}

    def shown(way: str) -> list[str]:
        mine, cells = turns[way], []
        for other in dict.fromkeys((base.get(way), "sorted" if way in ("jsonl", "own") else None)):
            if other in turns:
                both = [a.new / a.seconds / (b.new / b.seconds) for a, b in zip(mine, turns[other], strict=True)]
                cells.append(f"{median(both):.3f} of {other}")
                found.setdefault(way, {})[other] = median(both)
        seconds, new = sum(t.seconds for t in mine), sum(t.new for t in mine)
        others, cpu = max(t.others for t in mine), sum(t.cpu for t in mine)
        return [way, f"{new:,}", f"{seconds:,.1f}", f"{new / seconds:,.1f}", "; ".join(cells) or "–",
                wanted.get(way, ""), f"{1e3 * cpu / new:.2f}", f"{others:.0%}"]  # fmt: skip

    print(f"formats: {args.rows:,} rows in turns of {args.piece}, {args.rounds} rounds; {args.model}")
    table(
        (
            "",
            "new tokens",
            "s",
            "tokens/s",
            "median of the ratios",
            "wanted",
            "ms of processor a token",
            "others had, at most",
        ),
        map(shown, args.ways),
    )
    print(f"rows whose tokens differ from those of {args.ways[0]}: {differ}")
    return {
        "turns": {way: [t.as_json() for t in some] for way, some in turns.items()},
        "ratios": found,
        "differ": differ,
    }


def _formatted(
    settings: SimpleNamespace, form: str, folder: Path, part: Sequence[TimedRequest]
) -> Turn:  # a function, so that each has its own form
    return by_files(settings, part, form, folder)


def settings_of(args: argparse.Namespace, folder: Path, engine: str) -> SimpleNamespace:
    flags = {"model": model_of(args.model, folder), "engine": engine, "max_num_seqs": args.at_once}
    for name in ("backend", "dtype", "quantization"):
        if getattr(args, name) is not None:
            flags[name] = getattr(args, name)
    return settle(flags, {})


def model_of(model: str, folder: Path) -> str:
    if model not in randommodel.SHAPES or Path(model).exists():
        return model
    place = folder / f"random-{model}"
    if not (place / "config.json").exists():
        randommodel.write_model(model, place)
    return str(place)


# ---- composed --------------------------------------------------------------------------------------------------------


class Peer:
    """Another library, in a process of its own (offline_peers.py)."""

    def __init__(self, name: str, model: str, args: argparse.Namespace, folder: Path) -> None:
        python = args.kvboost_python if name.startswith("kvboost") else sys.executable
        settings = {"peer": name, "model": model, "dtype": args.dtype, "batch": 16, "threads": processors()}
        command = [python, str(Path(__file__).with_name("offline_peers.py")), json.dumps(settings)]
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.version: str = self._answer()["version"]
        self._file = folder / f"{name}.jsonl"

    def run(self, requests: Sequence[TimedRequest], *, solo: bool = False) -> Turn:
        """solo: each by itself, by transformers."""
        write(requests, self._file)
        assert self._process.stdin is not None
        watch = Watch(self._process.pid)
        self._process.stdin.write(json.dumps({"run": str(self._file), "solo": solo}) + "\n")
        self._process.stdin.flush()
        found, use = self._answer(), watch.use()
        return Turn(found["seconds"], found["tokens"], 0, use.others or 0.0, use.cpu_seconds or 0.0)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = [one for one in self._log.read_text(errors="replace").splitlines() if one.strip()]
            raise Missing(said[-1] if said else f"it ended with status {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


class Missing(Exception):
    """A peer that cannot be had, or that failed."""


def composed(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    own, child = settings_of(args, folder, "own"), settings_of(args, folder, "child")
    size, n = vocabulary(own), args.requests
    names = [p for name in args.peers for p in ((name, f"{name} sorted") if name == "kvboost" else (name,))]
    turns: dict[str, list[Turn]] = {way: [] for way in ("apart", "run-batch", *names)}
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        peers: dict[str, Peer] = {}
        for name in names:
            try:
                peers[name] = Peer(name, own.model, args, folder)
                stack.callback(peers[name].close)
                say(f"{name} {peers[name].version}")
            except (Missing, OSError) as e:
                missing[name] = str(e)
        for round_ in range(args.rounds):
            w1 = make("W1", size, seed=args.seed, turn=round_ + 1, requests=n)
            w2 = [
                TimedRequest(n + r.id, 0.0, r.prompt, r.max_tokens)
                for r in make("W2", size, seed=args.seed, turn=round_ + 1, requests=n)
            ]
            both = [*w1, *w2]
            random.Random(round_).shuffle(both)
            for way in list(turns)[::-1] if round_ % 2 else list(turns):
                if way in missing:
                    continue
                try:
                    if way == "apart":
                        turn = by_engine(own, [w2, w1] if round_ % 2 else [w1, w2], None)
                        order = [r.id for r in ([*w2, *w1] if round_ % 2 else [*w1, *w2])]
                        by_id = dict(zip(order, turn.tokens, strict=True))
                        turn.tokens = [by_id[r.id] for r in both]
                    elif way == "run-batch":
                        turn = by_files(child, both, "jsonl", folder)
                    else:
                        turn = peers[way].run(both)
                except Missing as e:
                    missing[way] = str(e)
                    continue
                turns[way].append(turn)
                say(_line(round_ + 1, way, turn))
        same = _as_alone(args, own, both, turns, peers, missing)
    apart = turns["apart"]

    def shown(way: str) -> list[str]:
        mine = turns[way]
        if way in missing or not mine:
            return [way, missing.get(way, "–"), "", "", "", "", ""]
        ratios = [a.seconds / b.seconds for a, b in zip(mine, apart, strict=False)]
        cpu = sum(t.cpu for t in mine) / sum(t.new for t in mine)
        rate = sum(t.new for t in mine) / sum(t.seconds for t in mine)
        return [way, f"{median(t.seconds for t in mine):,.2f}", f"{rate:,.1f}", f"{1e3 * cpu:.2f}",
                f"{median(ratios):.3f}" + (" (wanted <= 1.05)" if way == "run-batch" else ""), same.get(way, "–"),
                f"{max(t.others for t in mine):.0%}"]  # fmt: skip

    into, out = totals(both)
    print(f"composed: {n} rows of W2 and {n} of W1 shuffled, {into:,} tokens in, {out:,} out; {args.rounds} rounds")
    table(
        ("", "s", "tokens/s", "ms of processor a token", "time, of apart", "rows as alone", "others had, at most"),
        map(shown, turns),
    )
    differ = sum(map(unlike, apart, turns["run-batch"]))
    print(f"rows of run-batch whose tokens differ from those of `apart`: {differ}")
    return {
        "turns": {way: [t.as_json() for t in some] for way, some in turns.items()},
        "as_alone": same,
        "differ": differ,
        "missing": missing,
    }


def _as_alone(
    args: argparse.Namespace,
    own: SimpleNamespace,
    both: Sequence[TimedRequest],
    turns: dict[str, list[Turn]],
    peers: dict[str, Peer],
    missing: dict[str, str],
) -> dict[str, str]:
    """Of the last round: how many of some rows have the tokens that the same library computes of each by itself."""
    if not args.solo:
        return {}
    some = list(range(0, len(both), max(len(both) // args.solo, 1)))[: args.solo]
    requests = [both[i] for i in some]
    truth = [tokens for _, tokens in sorted(alone(own, requests).items())]
    order = [i for _, i in sorted((both[i].id, i) for i in some)]
    found = {}
    for way in ("apart", "run-batch"):
        right = sum(turns[way][-1].tokens[i] == want for i, want in zip(order, truth, strict=True))
        found[way] = f"{right} of {len(some)}"
    for way, peer in peers.items():
        if way in missing:
            continue
        wanted = peer.run(requests, solo=True).tokens
        right = sum(turns[way][-1].tokens[i] == want for i, want in zip(some, wanted, strict=True))
        found[way] = f"{right} of {len(some)}"
    return found


# ---- million ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Ran:
    """One process of the command. Times are seconds after its start.

    loaded: the model was; where a run goes on, the same as `first`. first: the journal had a row more than before.
    written: the output pass began. over: the output was in its place. cpu: seconds of processor of the command and its
    children. samples: (time, bytes of memory of the command, of its children). done: rows in the journal at the end.
    orphans: children that are still there a while after the command was killed.
    """

    status: int
    loaded: float = 0.0
    first: float = 0.0
    written: float = 0.0
    over: float = 0.0
    ended: float = 0.0
    cpu: float = 0.0
    others: float = 0.0
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    done: int = 0
    orphans: list[int] = field(default_factory=list)


def command(flags: Sequence[str], out: Path, log: Path, kill_at: int | None) -> Ran:
    """Run the command, and look at it from outside."""
    journal, part = journal_of(out), out.with_name(out.name + ".part")
    resumed = journal.exists()
    rows, read = _lines(journal, 0)
    had, ran = read, Ran(-1)
    watch, began = Watch(os.getpid()), time.monotonic()
    environment = os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}  # two runs of OpenAI's lines can be compared
    with log.open("ab") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "hibachi", "run-batch", *flags, "-o", str(out), "--plain"],
            stdout=said, stderr=said, env=environment, cwd=Path(__file__).parents[1],
        )  # fmt: skip
    children: list[int] = []
    while True:
        now = time.monotonic() - began
        size = journal.stat().st_size if journal.exists() else 0
        if size < had:  # the torn last line was dropped
            had = size
        if not ran.first and size > had:
            if ran.loaded or resumed:
                ran.first = now
            if not ran.loaded:  # the journal's head is written then; a resumed run writes none
                ran.loaded, had = now, size
        if not ran.written and part.exists():
            ran.written = now
        if not ran.over and ran.written and out.exists():
            ran.over = now
        if now >= len(ran.samples):
            children = _children(process.pid)
            ran.samples.append((now, _resident(process.pid), sum(map(_resident, children))))
        if kill_at is not None:
            more, read = _lines(journal, read)
            rows += more
            if rows > kill_at:
                children = _children(process.pid)
                process.send_signal(signal.SIGKILL)
                kill_at = None
        pid, status, use = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        time.sleep(0.02)
    ran.ended = time.monotonic() - began
    process.returncode = ran.status = os.waitstatus_to_exitcode(status)
    if not ran.over and ran.written and out.exists():
        ran.over = ran.ended
    ran.cpu, ran.others = use.ru_utime + use.ru_stime, watch.use().others or 0.0
    ran.done = rows + _lines(journal, read)[0] - 1  # the head
    if ran.status == -signal.SIGKILL:
        time.sleep(3.0)
        ran.orphans = [child for child in children if _resident(child)]
    elif ran.status:
        raise SystemExit(f"The command ended with status {ran.status}: {log.read_text(errors='replace')[-2000:]}")
    return ran


def _lines(file: Path, read: int) -> tuple[int, int]:
    """(lines of a journal after `read` bytes, its bytes now)"""
    n = 0
    with suppress(FileNotFoundError), file.open("rb") as f:
        f.seek(read)
        while block := f.read(1 << 20):
            n += block.count(b"\n")
            read += len(block)
    return n, read


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *_children(child)]
    return found


def _resident(pid: int) -> int:
    """Bytes; 0: there is no such process."""
    with suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _plain_rows(n: int) -> Iterator[dict[str, Any]]:
    return ({"id": i, "tokens": [i % 30, i // 30 % 30, 2], "note": "x" * 40} for i in range(n))


def _lines_of_openai(n: int) -> Iterator[dict[str, Any]]:
    for i in range(n):
        body = {"model": "m", "prompt": f"row {i}", "max_tokens": 1, "seed": i}
        yield {"custom_id": f"row-{i}", "method": "POST", "url": "/v1/completions", "body": body}


def million(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    (folder / "trivial.py").write_text(MODEL)
    openai = args.kind == "openai"
    name = "Spoken" if openai else "Trivial"
    told: list[dict[str, Any]] = []
    rows_of: list[list[str]] = []
    for form in ("jsonl",) if openai else args.formats:
        source = folder / f"in.{form}"
        say(f"writing {source}")
        rows_to_file(source, _lines_of_openai(args.rows) if openai else _plain_rows(args.rows))
        for engine in args.engine:
            flags = ["-i", str(source), "--model", f"{folder / 'trivial.py'}:{name}", "--engine", engine]
            flags += ["--served-model-name", "m"] if openai else ["--tokens-column", "tokens", "--max-tokens", "1"]
            title = f"{args.kind}, {form}, {engine}"
            out, log = folder / f"out-{engine}.{form}", folder / "said.txt"
            digests = set()
            for kill_at in [None, args.resume_at] if args.compare and args.resume_at else [args.resume_at]:
                clear(out)
                runs = [command(flags, out, log, kill_at)]
                if kill_at is not None:
                    runs.append(command(flags, out, log, None))
                digests.add(_digest(out))
                for i, ran in enumerate(runs):
                    at = title + ("" if kill_at is None else ", resumed" if i else ", killed")
                    told.append({"run": at, "rows": args.rows} | _told(ran))
                    rows_of.append([at, *_shown(ran, args.rows, runs[0].done if i else 0)])
                    say(" | ".join(rows_of[-1]))
                    if ran.orphans:
                        print(f"{at}: processes that outlived the command: {ran.orphans}")
                    if args.plot:
                        told[-1]["picture"] = _draw(args.plot, at, ran, len(told) > 1)
            if len(digests) > 1:
                print(f"{title}: THE RESUMED RUN'S OUTPUT IS ANOTHER THAN THE CLEAN RUN'S")
            elif args.compare and args.resume_at:
                print(f"{title}: the resumed run's output is the clean run's, byte for byte")
            clear(out)
    print(f"million: {args.rows:,} rows of a model that costs nothing; wanted: 3,000 rows a second of one core, "
          "at most 300 MB over the loaded model and flat, the first row of a resume at 900,000 in 15 s")  # fmt: skip
    table(
        ("", "rows/s", "of these while computing", "rows a second of one core", "s to the model, to the first row",
         "output pass, s", "s in all", "MB at first, most", "grew, MB", "children, MB", "others had"),
        rows_of,
    )  # fmt: skip
    return {"runs": told}


def _shown(ran: Ran, rows: int, before: int) -> list[str]:
    """before: rows that an earlier start did."""
    over = ran.over or ran.ended
    done = (ran.done if ran.status < 0 else rows) - before
    computed = (ran.written or over) - ran.loaded
    first, most, grew = _memory(ran)
    return [
        f"{done / (over - ran.loaded):,.0f}",
        f"{done / computed:,.0f}",
        f"{done / ran.cpu:,.0f}" if ran.status == 0 else "–",
        f"{'–' if ran.loaded == ran.first else f'{ran.loaded:.1f}'}, {ran.first:.1f}",
        f"{ran.over - ran.written:.1f}" if ran.over else "–",
        f"{ran.ended:.1f}",
        f"{first:.0f}, {most:.0f}",
        f"{grew:+.0f}",
        f"{max((c for _, _, c in ran.samples), default=0) / 1e6:.0f}",
        f"{ran.others:.0%}",
    ]


def _memory(ran: Ran) -> tuple[float, float, float]:
    """MB of the command: when the model was loaded, at most, and by how much more in the last quarter of the time in
    which rows are computed than in the second."""
    at = [(t, m / 1e6) for t, m, _ in ran.samples if m]
    loaded = [m for t, m in at if t >= ran.loaded] or [m for _, m in at[-1:]]
    end = ran.written or ran.over or ran.ended
    computing = [m for t, m in at if ran.loaded <= t < end]
    quarter = len(computing) // 4
    grew = median(computing[-quarter:]) - median(computing[quarter : 2 * quarter]) if quarter else 0.0
    return (loaded[0] if loaded else 0.0), max((m for _, m in at), default=0.0), grew


def _told(ran: Ran) -> dict[str, Any]:
    names = ("status", "loaded", "first", "written", "over", "ended", "cpu", "others", "done", "orphans", "samples")
    return {name: getattr(ran, name) for name in names}


def _digest(file: Path) -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _draw(path: str, title: str, ran: Ran, more: bool) -> str:
    """Memory over time; one picture a run. Returns its name."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    place = Path(path)
    if more:
        place = place.with_stem(f"{place.stem}-{title.replace(', ', '-')}")
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    at = [t for t, _, _ in ran.samples]
    axes.plot(at, [m / 1e6 for _, m, _ in ran.samples], label="the command", color="#1f77b4")
    if any(c for _, _, c in ran.samples):
        axes.plot(at, [c / 1e6 for _, _, c in ran.samples], label="its engine's process", color="#ff7f0e")
    for when, what in ((ran.loaded, "loaded"), (ran.written, "output pass")):
        if when:
            axes.axvline(when, color="#7f7f7f", linestyle=":")
            axes.annotate(what, (when, 0.02), xycoords=("data", "axes fraction"), rotation=90, fontsize=8, ha="right")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("resident memory, MB")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(loc="center")
    figure.savefig(place, dpi=120)
    pyplot.close(figure)
    return str(place)


# ---- steps -----------------------------------------------------------------------------------------------------------


def steps(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    own = settings_of(args, folder, "own")
    requests = make("W1", vocabulary(own), seed=args.seed, turn=1, requests=args.rows)
    if longest(requests) > 512 and args.model == "tiny":
        raise SystemExit("tiny takes 512 tokens.")
    most, tokens = max(r.max_tokens for r in requests), sum(r.max_tokens for r in requests)
    bound = max(most, tokens / args.at_once)
    ways = {
        "run-batch": by_files(own, requests, "jsonl", folder),
        "engine, the file's order": by_engine(own, [requests], None),
        "engine, longest first": by_engine(own, [requests], longest_first),
    }
    print(f"steps: {args.rows:,} rows, {args.at_once} at once, {tokens:,} new tokens, the longest {most}; bound "
          f"{bound:,.1f} steps. All steps count, also such as only read prompts.")  # fmt: skip
    table(
        ("", "steps", "of the bound", "wanted"),
        ([w, f"{t.steps:,}", f"{t.steps / bound:.4f}", "<= 1.02" if w == "run-batch" else ""] for w, t in ways.items()),
    )
    differ = unlike(ways["run-batch"], ways["engine, the file's order"])
    print(f"rows of run-batch whose tokens differ from the engine's: {differ}")
    return {"bound": bound, "steps": {w: t.steps for w, t in ways.items()}, "differ": differ}


# ---- the command -----------------------------------------------------------------------------------------------------


def some_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        if wrong := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{wrong[0]}: expected some of {','.join(known)}")
        return names

    return parse


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART")

    def part(name: str, run: Callable[[argparse.Namespace, Path], dict[str, Any]], rows: int) -> Any:
        sub = parts.add_parser(name)
        sub.set_defaults(run=run)
        sub.add_argument("--rows", type=int, default=rows, metavar="N", help=f"(default: {rows:,})")
        sub.add_argument("--seed", type=int, default=0, metavar="N", help="of the work (default: 0)")
        sub.add_argument("--folder", type=Path, help="for files and random models (default: temporary)")
        sub.add_argument("--out", metavar="FILE", help="write everything as JSON")
        return sub.add_argument

    def of_model(add: Any, model: str) -> None:
        add("--model", default=model, help=f"(default: {model})")
        add("--backend", metavar="NAME", help="(default: numpy)")
        add("--dtype", metavar="NAME", help="(default: as run-batch decides; with --peers bfloat16)")
        add("--quantization", metavar="NAME", help="(default: none)")
        add("--at-once", type=int, default=64, metavar="N", help="places of the engine (default: 64)")

    add = part("formats", formats, 1024)
    of_model(add, "135m")
    add("--rounds", type=int, default=3, metavar="N", help="(default: 3)")
    add("--piece", type=int, default=128, metavar="N", help="rows of a turn (default: 128)")
    ways = ["engine", "sorted", "jsonl", "csv", "parquet"]
    add("--ways", type=some_of(WAYS), default=ways, help=f"of {','.join(WAYS)} (default: all but own: run-batch with"
        " --engine own)")  # fmt: skip
    add = part("composed", composed, 128)
    of_model(add, "135m")
    add("--rounds", type=int, default=3, metavar="N", help="(default: 3)")
    add("--peers", type=some_of(PEERS), default=[], help=f"of {','.join(PEERS)} (default: none)")
    add("--kvboost-python", default=sys.executable, metavar="FILE", help="an interpreter that has kvboost")
    add("--solo", type=int, default=16, metavar="N", help="rows that are compared with themselves alone (default: 16)")
    add = part("million", million, 1_000_000)
    add("--engine", type=some_of(("own", "child")), default=["own"], help="own,child (default: own)")
    add("--formats", type=some_of(("jsonl", "csv", "parquet")), default=["jsonl"], help="jsonl,csv,parquet (default:"
        " jsonl)")  # fmt: skip
    add("--kind", choices=("rows", "openai"), default="rows", help="openai: lines of OpenAI's batches")
    add("--resume-at", type=int, metavar="N", help="kill -9 when so many rows are in the journal, and go on")
    add("--compare", action="store_true", help="with --resume-at: a clean run before; are the outputs the same bytes?")
    add("--plot", metavar="FILE", help="memory over time; of several runs, several files")
    add = part("steps", steps, 1000)
    of_model(add, "tiny")
    args = parser.parse_args()
    if args.part == "composed":
        args.requests = args.rows // 2
        args.dtype = args.dtype or ("bfloat16" if args.peers else None)
    return args


@contextmanager
def place(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder.resolve()
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)


if __name__ == "__main__":
    asked = arguments()
    print(f"{machine()}\nlast minute's load before: {os.getloadavg()[0]:.2f}", flush=True)
    with place(asked.folder) as at:
        found = asked.run(asked, at)
    if asked.out:
        options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(asked).items()
                   if name != "run"}  # fmt: skip
        Path(asked.out).write_text(json.dumps({"machine": machine(), "options": options, **found}, indent=1) + "\n")
