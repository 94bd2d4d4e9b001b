"""Formats of the log: a line of text, or a JSON object, with the time in UTC."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

FIELDS = "fields"  # the attribute of a record that holds what its line says, by name


class TextLines(logging.Formatter):
    """2026-01-31T12:00:00.000Z INFO what happened"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # its name there
        return _time(record)


class Json(logging.Formatter):
    """{"time": ..., "level": ..., "logger": ..., "message": ..., further fields, "traceback" of an error}"""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = getattr(record, FIELDS, None)
        if isinstance(fields, Mapping):
            told |= fields
        if record.exc_info and record.exc_info[0] is not None:
            told["traceback"] = self.formatException(record.exc_info)
        elif record.exc_text:
            told["traceback"] = record.exc_text
        return json.dumps(told, default=str)


FORMATS: dict[str, type[logging.Formatter]] = {"text": TextLines, "json": Json}


def log_to_stderr(level: str, kind: str) -> None:
    """level, kind: as --log-level and --log-format say."""
    handler = logging.StreamHandler()
    handler.setFormatter(FORMATS[kind]())
    for name in ("hibachi", "uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper() if name == "hibachi" else logging.ERROR)  # what is no HTTP has our own line


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
