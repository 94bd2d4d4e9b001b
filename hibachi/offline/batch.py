"""The description of a run, and which parts of it identify the run: if one of those differs, the journal is another
run's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from hibachi.errors import ConfigError
from hibachi.offline.settings import BatchSettings
from hibachi.offline.tasks import fingerprint as told
from hibachi.offline.tasks.columns import Columns

Task: TypeAlias = Literal["generate", "embed", "forward"]
TASKS: tuple[Task, ...] = ("generate", "embed", "forward")
PIPE = "-"  # as a name: standard input or output


@dataclass(kw_only=True)
class Batch:
    """What a run is to do.

    inputs: files, globs, folders, or "-". output: a file, or "-".
    settings: of the model and its engine, by the names of `hibachi run-batch`'s flags with underscores.
    url: of a server that computes the rows in place of a model. request_timeout: seconds for an answer of the server.
    task: "generate", "embed", or "forward" for a user's own feed-forward model.
    columns: how columns of a row are read.
    openai: the rows are lines of OpenAI's batches; None means if they look so. served_names: model names that such
    lines may use.
    format: of the output, where its name does not tell.
    limit: read only this many rows of the input. shard: (i, n) means every n-th row, beginning with the i-th (from 1).
    seed: of the run, from which rows without a seed get theirs.
    prefix: put in front of the result columns' names. token_ids: write the ids of new tokens to the results.
    overwrite: replace an output that is not of this run, and begin anew where the journal is of another.
    retry_errors: compute failed rows again.
    accept_changes: go on although something has changed since the run began; such rows say so.
    validate: check all rows before any is computed. fail_fast: end at the first row that fails.
    verify_weights: identify the model by all of its weights, not by samples.
    errors: a file for the rows that failed. beside: further files that the caller writes; they are not taken for input
    where a folder or a pattern contains them.
    """

    inputs: Sequence[str]
    output: str
    settings: BatchSettings = field(default_factory=BatchSettings)
    url: str | None = None
    url_model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    concurrency: int = 64
    request_timeout: float = 600.0
    task: Task = "generate"
    columns: Columns = field(default_factory=Columns)
    openai: bool | None = None
    served_names: Sequence[str] = ()
    format: str | None = None
    delimiter: str | None = None
    encoding: str | None = None
    limit: int | None = None
    shard: tuple[int, int] = (1, 1)
    seed: int = 0
    prefix: str = ""
    token_ids: bool = False
    overwrite: bool = False
    retry_errors: bool = False
    accept_changes: bool = False
    validate: bool = False
    fail_fast: bool = False
    verify_weights: bool = False
    errors: str | None = None
    beside: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if self.task not in TASKS:
            raise ConfigError(f"The task must be one of {', '.join(TASKS)}; got {self.task!r}.")
        i, n = self.shard
        if not 1 <= i <= n:
            raise ConfigError(f"A shard is i of n, with i from 1 to n; got {i} of {n}.")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"The limit must be at least 1 row; got {self.limit}.")

    def selects(self, number: int) -> bool:
        """Whether this row is part of the run."""
        i, n = self.shard
        return number % n == i - 1 and (self.limit is None or number < self.limit)

    def facts(self) -> dict[str, Any]:
        """The facts that identify the run, as far as they are known before a model is loaded, as JSON values. Raises
        InvalidModelFiles.
        """
        settings = self.settings
        parsers = [settings.tool_call_parser, settings.reasoning_parser, settings.reasoning_field]
        found: dict[str, Any] = {
            "task": "openai" if self.openai else self.task,
            "columns": _plain(asdict(self.columns)),
            "seed": self.seed,
            "shard": list(self.shard),
            "token_ids": self.token_ids,
            "delimiter": self.delimiter,
            "encoding": self.encoding,
            "versions": told.versions(),
        }
        if self.url is not None:
            return (
                found
                | {"url": self.url, "url_model": self.url_model, "served_names": list(self.served_names)}
                | ({} if self.openai else {"parsers": parsers[1:]})
            )
        return found | {
            "model": told.model_facts(settings.model, weights=self.verify_weights),
            "settings": {
                "quantization": settings.quantization,
                **({"gguf_unpack": True} if settings.gguf_unpack else {}),
                "max_model_len": settings.max_model_len,
                "generation_config": _with_digest(settings.generation_config, "generation_config.json"),
                "chat_template": _with_digest(settings.chat_template),
                "parsers": parsers,
                **({} if settings.split_special_tokens else {"split_special_tokens": False}),
            },
            "served_names": list(self.served_names),
        }


def _with_digest(given: str | None, within: str = "") -> str | None:
    """A setting that may name a file, or the folder that one is in: with a digest of what the file holds."""
    with suppress(OSError, ValueError):  # it may be no name at all
        path = Path(given or "")
        file = path / within if within and path.is_dir() else path
        if given and file.is_file():
            return f"{given}, sha256 {hashlib.sha256(file.read_bytes()).hexdigest()[:32]}"
    return given


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value
