"""How a model's files say that the vector of a text is made from its hidden states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hibachi.errors import InvalidModelFiles
from hibachi.llm.model.fields import Fields, read_json, read_text
from hibachi.request import Pooling

_FLAGS: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
}

_MODULES = ("Transformer", "Pooling", "Normalize")


def pooling_of(path: Path) -> tuple[Pooling, bool]:
    """The pooling of the model in a folder, and whether vectors are scaled to length 1.

    As sentence-transformers writes it: `1_Pooling/config.json`, and a module Normalize in `modules.json`. Without these
    files the last token, to length 1. Raises InvalidModelFiles for a pooling that we do not have.
    """
    file = path / "1_Pooling" / "config.json"
    if not file.is_file():
        return "last", True
    c, modules = Fields(read_json(file)), _modules(path / "modules.json")
    chosen = [name for name in c.config if name.startswith("pooling_mode_") and c.config[name] is True]
    if isinstance(named := c.get("pooling_mode"), str):  # since sentence-transformers 5.4
        chosen = [
            next((flag for flag, pooling in _FLAGS.items() if pooling in (named, named.removesuffix("token"))), named)
        ]
    if odd := [str(m.get("type")) for m in modules if not str(m.get("type")).endswith(_MODULES)]:
        raise InvalidModelFiles(
            f"{path / 'modules.json'}: expected modules out of {', '.join(_MODULES)}; got {', '.join(odd)}, which "
            f"vectors here do not pass through. Pass pooling= to have them without."
        )
    if len(chosen) != 1 or chosen[0] not in _FLAGS:
        raise InvalidModelFiles(
            f"{file}: expected one of {', '.join(_FLAGS)} to be true; got {', '.join(chosen) or 'none'}. Pass pooling= "
            f"to choose one."
        )
    return _FLAGS[chosen[0]], any("Normalize" in str(m.get("type")) for m in modules)


def _modules(file: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads(read_text(file)) if file.is_file() else []
    except (OSError, ValueError, RecursionError) as e:
        raise InvalidModelFiles(f"{file} cannot be read as JSON: {e}. Download it again.") from e
    return [m for m in modules if isinstance(m, dict)] if isinstance(modules, list) else []
