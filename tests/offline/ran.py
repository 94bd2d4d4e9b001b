"""Small runs of `hibachi run-batch` in this process, which share one engine of the shipped model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hibachi.cli.main import main
from hibachi.llm.own import open_texts
from hibachi.llm.remote.opening import template_of
from hibachi.offline.tasks import choose

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def lines(rows: list[Any]) -> str:
    """Rows as JSON Lines; a text is a line as it is."""
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


class Runs:
    """Runs in a folder of their own. told: standard error of the last. loaded: how often a model was asked for."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        self.told, self.loaded, self._out = "", 0, ""
        self._names: list[str] = []

    def __call__(self, given: dict[str, Any], *flags: str, out: str = "out.jsonl", again: bool = False) -> int:
        """given: files by their names, each a text, bytes, or a list of rows. Returns the exit status."""
        if not again:
            for name in (out, f"{out}.journal"):
                (self.folder / name).unlink(missing_ok=True)
        for name, what in given.items():
            what = lines(what) if isinstance(what, list) else what
            data = what if isinstance(what, bytes) else what.encode("utf-8", "surrogatepass")
            (self.folder / name).write_bytes(data)
        self._names = [str(self.folder / name) for name in given]
        words = ["run-batch", "-i", *self._names, "-o", str(self.folder / out), "--engine", "own", *flags]
        status = main(words)
        self._out, self.told = self._capsys.readouterr()
        return status

    def at(self, url: str, *flags: str) -> list[Any]:
        """The rows of the last input, computed by a server."""
        out = self.folder / "there.jsonl"
        words = ["run-batch", "-i", *self._names, "-o", str(out), "--overwrite", "--url", url, *flags]
        assert main(words) in (0, 3), self._capsys.readouterr()
        return self.rows(out.name)

    @property
    def texts(self) -> Any:
        """The shipped model."""
        return SHARED["tiny"]

    def said(self) -> list[str]:
        """Standard output of the last, and all that came since."""
        more = self._capsys.readouterr()
        return [*self._out.splitlines(), *more.out.splitlines(), *more.err.splitlines()]

    def rows(self, out: str = "out.jsonl") -> list[Any]:
        return [json.loads(line) for line in (self.folder / out).read_text().splitlines()]

    def of(self, rows: list[Any], *flags: str, **more: Any) -> list[Any]:
        """Rows of a file of JSON Lines, and what became of them."""
        self({"in.jsonl": rows}, *flags, **more)
        return self.rows(more.get("out", "out.jsonl"))


SHARED: dict[str, Any] = {}


def share(monkeypatch: pytest.MonkeyPatch, runs: Runs) -> None:
    """All runs with the shipped model take one engine, which nobody closes."""
    if not SHARED:
        SHARED["tiny"] = open_texts("tiny", max_model_len=256)

    def open_settled(settings: Any, **more: Any) -> Any:
        runs.loaded += 1
        if settings.model != "tiny":
            return _open(settings, **more)
        return SHARED["tiny"], template_of(settings.chat_template)

    _open = choose.open_settled
    monkeypatch.setattr(choose, "open_settled", open_settled)
    monkeypatch.setattr(SHARED["tiny"], "close", lambda *within: None)


def end() -> None:
    for texts in SHARED.values():
        texts.close()
    SHARED.clear()
