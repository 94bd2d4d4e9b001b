"""Special tokens: those that the files beside a tokenizer name, added to it as transformers 5 does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hibachi.common.installed import need
from hibachi.errors import InvalidModelFiles
from hibachi.llm.model.fields import read_json

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OTHERS = ("extra_special_tokens", "additional_special_tokens")  # of transformers 5, and 4
_MATCHING = ("lstrip", "rstrip", "normalized", "single_word", "special")


def add_special_tokens(
    raw: Any, path: Path, config: Mapping[str, Any], *, rows: int | None = None, flags: bool = False
) -> dict[str, str]:
    """Add what a folder names to `raw`, a `tokenizers.Tokenizer`. Returns name -> text, such as bos_token -> <s>.

    config: what tokenizer_config.json says. Without added_tokens_decoder in it, special_tokens_map.json and
    added_tokens.json count as well. rows: of the model's embedding; a token that has neither an id nor a row to spare
    stays text. flags: add_bos_token and add_eos_token count; a tokenizer.json says itself what goes around a text.

    Raises InvalidModelFiles for a field of the wrong type, and for a token that has another id than the files say.
    """
    where = path / "tokenizer_config.json"
    config = dict(config)
    ids: dict[int, Any] = {}
    listed = config.get("added_tokens_decoder")
    if listed is None and (file := path / "special_tokens_map.json").exists():
        ours = _others_field(config)
        config |= {k: v for k, v in read_json(file).items() if not ours or k not in _OTHERS}
    named = dict(_named(where, config))
    others = _others(where, config)
    if listed is not None:
        for i, token in _object(where, "added_tokens_decoder", listed).items():
            ids[_id(where, i)] = _token(where, "added_tokens_decoder", token, special=False)
    else:
        if (file := path / "added_tokens.json").exists():
            special = {t.content for t in [*named.values(), *others]}
            for text, i in read_json(file).items():
                ids[_id(file, i)] = _token(file, text, text, special=text in special)
        ids |= raw.get_added_tokens_decoder()

    names = {name: str(token.content) for name, token in named.items()}
    for token in [*named.values(), *ids.values(), *others]:
        token.special = token.special or token.content in names.values()
    known = {t.content for t in [*raw.get_added_tokens_decoder().values(), *ids.values()]}
    raw.add_tokens([token for _, token in sorted(ids.items(), key=lambda entry: entry[0])])
    for number, token in ids.items():
        if raw.token_to_id(token.content) != number:
            raise InvalidModelFiles(
                f"{path}: the tokenizer and the files beside it contradict each other: expected the id {number} for "
                f"{token.content!r:.80}; got {raw.token_to_id(token.content)}. Take all of them from one download."
            )
    new, spare = [], 2**32 if rows is None else rows - _next_id(raw)
    for token in [*named.values(), *others]:
        if token.content not in known:
            needs_row = raw.token_to_id(token.content) is None
            spare -= needs_row
            if spare >= 0 or not needs_row:
                new.append(token)
    raw.add_tokens(new)
    if config.get("split_special_tokens") is True:
        raw.encode_special_tokens = True
    if flags:
        _surround(raw, config, names)
    return names


def _named(where: Path, config: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Tokens with a name, the usual ones first; any name that ends in _token is one."""
    more = config.get("extra_special_tokens")
    more = more if isinstance(more, dict) else {}
    for name in NAMED:
        if config.get(name) is not None:
            yield name, _token(where, name, config[name])
    for name, value in [*config.items(), *more.items()]:
        text = name.endswith("_token") and isinstance(value, (str, dict))
        if name not in NAMED and (text or name in more):
            yield name, _token(where, name, value)


def _others(where: Path, config: Mapping[str, Any]) -> list[Any]:
    """Tokens without a name."""
    field = _others_field(config)
    value = config.get(field, [])
    if not isinstance(value, list):
        raise InvalidModelFiles(f"{where}: {field} must be a list of tokens; got {value!r:.80}. Download it again.")
    return [_token(where, field, token) for token in value]


def _others_field(config: Mapping[str, Any]) -> str:
    """Which field has them; an object has names for its tokens."""
    return next((field for field in _OTHERS if config.get(field) and not isinstance(config[field], dict)), "")


def _token(where: Path, field: str, value: Any, *, special: bool = True) -> Any:
    """A text, or an object with it and how it matches."""
    given = value if isinstance(value, dict) else {"content": value}
    options = {name: given[name] for name in _MATCHING if name in given}
    try:
        if isinstance(given.get("content"), str):
            return need("tokenizers", "Text").AddedToken(given["content"], **{"special": special, **options})
    except TypeError:
        pass
    raise InvalidModelFiles(
        f"{where}: {field} must be a text, or an object with a text as content; got {value!r:.80}. Download it again."
    )


def _object(where: Path, field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidModelFiles(f"{where}: {field} must be an object; got {value!r:.80}. Download it again.")
    return value


def _id(where: Path, value: Any) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 10:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**32:
        raise InvalidModelFiles(f"{where}: expected the id of a token; got {value!r:.40}. Download it again.")
    return value


def _next_id(raw: Any) -> int:
    """The id that the next new token gets."""
    ids: list[int] = [raw.get_vocab_size(with_added_tokens=False), *(1 + i for i in raw.get_added_tokens_decoder())]
    return max(ids)


def _surround(raw: Any, config: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Begin and end texts as add_bos_token and add_eos_token say."""
    used = {n: i for n in ("bos_token", "eos_token") if (i := raw.token_to_id(names.get(n, ""))) is not None}
    used = {n: i for n, i in used.items() if config.get(f"add_{n}") is True}
    parts = [*(n for n in used if n == "bos_token"), "$A", *(n for n in used if n == "eos_token")]
    raw.post_processor = need("tokenizers", "Text").processors.TemplateProcessing(
        single=" ".join(parts),
        special_tokens=[{"id": n, "ids": [i], "tokens": [names[n]]} for n, i in used.items()],
    )
