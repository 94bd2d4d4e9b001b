"""A forecast of a run before it begins: its tokens, how many of them the cache saves, and the time."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hibachi.common.phases import duration
from hibachi.engine.batchengine import Facts
from hibachi.engine.build import eos_ids_of
from hibachi.engine.forms import Forms
from hibachi.engine.scheduler.compose import Composer
from hibachi.engine.scheduler.step import Limits
from hibachi.engine.simulator.steptime import StepTime, read_step_time
from hibachi.errors import ConfigError, printable
from hibachi.llm.model.files import locate, open_files
from hibachi.llm.model.registry import arch_of
from hibachi.llm.own import is_own
from hibachi.llm.remote.opening import generation_of, template_of
from hibachi.llm.texts import Texts
from hibachi.llm.tokenizers.own import NoTokenizer, OwnTokenizer
from hibachi.llm.users_model import model_named
from hibachi.offline.batch import PIPE, Batch
from hibachi.offline.checks import check_columns
from hibachi.offline.drive import WINDOW_BYTES, WINDOW_ROWS
from hibachi.offline.files.sources import Sources, expand
from hibachi.offline.settings import BatchSettings
from hibachi.offline.tasks.choose import resolve_lines, text_task
from hibachi.offline.tasks.task import Prepared, RowError, RowTask
from hibachi.request import SamplingParams

BLOCK = 16  # positions of a cache block, where no setting says it
CACHE = 1 << 30  # bytes, likewise


@dataclass(slots=True)
class Forecast:
    """rows: that can be computed; wrong: that cannot. Tokens: of the prompts, of these those that the cache would
    spare, and new ones at most. longest: tokens of the longest answer. seconds: least and most, if anything is known of
    the speed."""

    rows: int = 0
    wrong: int = 0
    first_wrong: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    longest: int = 0
    read: float = 0.0  # positions that steps of one token read, in all
    pairs: float = 0.0  # of a token of a prompt and one before it
    seconds: tuple[float, float] | None = None
    told_by: str = ""

    def text(self) -> str:
        """For people."""
        lines = [f"{self.rows:,} rows" + (f", and {self.wrong:,} that cannot be computed" if self.wrong else "")]
        if self.first_wrong is not None:
            lines.append(f"  the first of these: {printable(self.first_wrong)}")
        lines.append(f"{self.prompt_tokens:,} tokens of prompts")
        if self.prompt_tokens:
            share = self.cached_tokens / self.prompt_tokens
            spared = f"{self.cached_tokens:,} from the cache ({share:.1%})"
            lines.append(f"  of these {spared}, as rows that begin alike go together")
        lines.append(f"{self.new_tokens:,} new tokens at most, {self.longest:,} in the longest answer")
        if self.seconds is None:
            lines.append("Time: not known. Give --step-time (from `hibachi bench fit`), or --report of an earlier run.")
        else:
            least, most = self.seconds
            span = duration(most) if most < 1.1 * least else f"{duration(least)} to {duration(most)}"
            lines.append(f"Time: about {span}, {self.told_by}")
        return "\n".join(lines)


def forecast(batch: Batch, *, report: str | None = None, step_time: str | None = None) -> Forecast:
    """Read all rows, and compute nothing: of a model from files no weights are loaded; one of your own is made.

    report: of an earlier run; step_time: of `hibachi bench fit`.

    Raises ConfigError, InvalidInput, OSError.
    """
    if batch.url is not None or batch.task == "forward":
        raise ConfigError("--plan counts tokens by the model's own tokenizer: expected --model with one.")
    earlier, times = _rates(report), None if step_time is None else read_step_time(step_time)
    if PIPE in batch.inputs:
        raise ConfigError("--plan reads the input to its end, after which nothing would be left of a pipe: name files.")
    beside = [os.path.realpath(name) for name in batch.beside]
    names = [n for n in expand(batch.inputs) if n in batch.inputs or os.path.realpath(n) not in beside]
    sources = Sources(names, delimiter=batch.delimiter, encoding=batch.encoding)
    texts = _unloaded(batch.settings)
    work = _work(batch, texts, sources)
    found, limits = Forecast(), texts.engine.facts.limits
    cache = _Cache(limits.blocks)
    for prepared in _composed(batch, sources.rows(lambda n: not batch.selects(n), stop=batch.limit), work, found):
        n, new = prepared.prompt_tokens, prepared.new_tokens
        blocks = (n - 1) // limits.block_size  # whole ones before the last token, which is computed always
        cached = min(cache.take(prepared.key), blocks) * limits.block_size
        found.rows += 1
        found.prompt_tokens += n
        found.cached_tokens += cached
        found.new_tokens += new
        found.longest = max(found.longest, prepared.longest_answer)
        found.read += new * (prepared.longest - prepared.longest_answer / 2)
        found.pairs += (n - cached) * (prepared.longest - prepared.longest_answer + cached) / 2
    _time(found, limits.rows, earlier, times)
    return found


def _work(batch: Batch, texts: Texts, sources: Sources) -> RowTask:
    """What would compute the rows, on a model that is not loaded."""
    template = template_of(batch.settings.chat_template)

    def open_() -> tuple[Texts, str | None]:
        return texts, template

    batch = resolve_lines(batch, sources.columns)
    work = text_task(batch, open_)
    check_columns(work, sources, batch)
    work.open()
    return work


def _composed(batch: Batch, rows: Iterator[Any], work: Any, found: Forecast) -> Iterator[Prepared]:
    """The rows as a run would start them."""
    window: dict[int, Prepared] = {}
    composer, size, over = Composer(), 0, False
    while True:
        while not over and len(composer) < WINDOW_ROWS and size < WINDOW_BYTES:
            row = next(rows, None)
            if row is None:
                over = True
                break
            try:
                if row.error is not None:
                    raise RowError(f"{row.place}: {row.error}")
                prepared = work.prepare(row)
            except RowError as e:
                found.wrong += 1
                found.first_wrong = found.first_wrong or str(e)
                continue
            window[row.number] = prepared
            size += prepared.size
            composer.add(row.number, prepared.key, prepared.longest)
        if not len(composer):
            return
        prepared = window.pop(composer.take())
        size -= prepared.size
        yield prepared


class _Cache:
    """Blocks of prompts, the least recently used of which makes room."""

    def __init__(self, blocks: int) -> None:
        self._blocks = max(blocks - 1, 0)
        self._held: OrderedDict[Hashable, None] = OrderedDict()

    def take(self, key: Sequence[Hashable]) -> int:
        """How many of a prompt's first blocks are there; from now on all are."""
        hits, going, name = 0, True, 0
        for block in key:
            name = hash((name, block))
            going = going and name in self._held
            hits += going
            self._held[name] = None
            self._held.move_to_end(name)
        while len(self._held) > self._blocks:
            self._held.popitem(last=False)
        return hits


# ---- a model that is not loaded --------------------------------------------------------------------------------------


class _NoEngine:
    """Only says what it would be."""

    pid = None

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.forms = Forms()

    def close(self, timeout: float | None = None) -> None:
        """Nothing was begun."""


def _unloaded(settings: BatchSettings) -> Texts:
    """Texts with a tokenizer and without weights; a model of one's own is made, to see what it says of itself. Raises
    ConfigError, what reading the model's files raises, and what making one's own raises."""
    rows = settings.max_num_seqs
    size = settings.block_size or BLOCK
    if is_own(settings.model):
        made = model_named(settings.model, settings.backend)
        own = getattr(made, "tokenizer", None)
        tokenizer: Any = NoTokenizer() if own is None else OwnTokenizer(own)
        longest = settings.max_model_len or getattr(made, "max_model_len", None) or 1 << 20
        vocab, defaults = getattr(made, "vocab_size", None), SamplingParams()
        eos = eos_ids_of(made, vocab)
        blocks = rows * -(-longest // size) + 1
    else:
        files = open_files(locate(settings.model))
        arch = arch_of(files)
        longest = (
            settings.max_model_len
            or (arch.max_positions if arch else files.config.get("max_position_embeddings"))
            or 4096
        )
        vocab = arch.vocab_size if arch else files.config.get("vocab_size")
        tokenizer = files.tokenizer(vocab_size=vocab)
        defaults, eos = SamplingParams(**files.generation.params()), ()
        blocks = rows * -(-longest // size) + 1
        if arch is not None:
            width = 4 if (settings.dtype or files.dtype or "float32") == "float32" else 2
            position = sum(2 * arch.kv_heads * arch.head_dim * width for _ in arch.layers)
            blocks = min(blocks, (settings.kv_cache_memory_bytes or CACHE) // (position * size) + 1)
    if (given := generation_of(settings.generation_config)) is not None:
        defaults = SamplingParams(**given.params())
    if not settings.enable_prefix_caching:
        blocks = 0
    limits = Limits(rows, max(settings.max_num_batched_tokens, rows), 1, max(longest, 2), blocks, size)
    facts = Facts(vocab, limits, bool(blocks), None, True, False, "not loaded; nowhere", "none", settings.model)
    engine: Any = _NoEngine(facts)
    return Texts(engine, tokenizer, vocab_size=vocab, eos_ids=eos, default_params=defaults)


# ---- time ------------------------------------------------------------------------------------------------------------


def _rates(report: str | None) -> dict[str, Any] | None:
    """Raises ConfigError, OSError."""
    if report is None:
        return None
    try:
        told = json.loads(Path(report).read_text())
        counts = told["this start"]
        return {"seconds": float(told["seconds"]), **{name: int(counts[name]) for name in _COUNTS}}
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{report}: expected a report that `hibachi run-batch --report` wrote.") from e


_COUNTS = ("prompt_tokens", "cached_tokens", "new_tokens")


def _time(found: Forecast, rows: int, earlier: dict[str, Any] | None, times: StepTime | None) -> None:
    computed = found.prompt_tokens - found.cached_tokens
    if times is not None:
        steps = max(found.longest, -(-found.new_tokens // rows))
        tokens = computed + found.new_tokens
        seconds = (
            times.step * steps
            + times.token * tokens
            + times.row * found.new_tokens
            + times.position * found.read
            + times.pair * (found.pairs + found.read)
        )
        found.seconds, found.told_by = (
            (seconds, seconds),
            f"with {rows} rows at once, if all answers are as long as they may",
        )
    elif earlier is not None:
        before = earlier["prompt_tokens"] - earlier["cached_tokens"]
        shares = [now / then for now, then in ((computed, before), (found.new_tokens, earlier["new_tokens"])) if then]
        if shares:
            found.seconds = (min(shares) * earlier["seconds"], max(shares) * earlier["seconds"])
            found.told_by = "as the earlier run's tokens of prompts and new tokens say"
