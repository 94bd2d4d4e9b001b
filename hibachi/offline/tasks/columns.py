"""Which columns of a row say what: the prompt, the conversation or the tokens, and how to sample."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from typing import Any

from hibachi.errors import ConfigError, HibachiError, InvalidRequest, shown
from hibachi.llm.chatformat.asked import check_choice, toolbox_of
from hibachi.offline.files import jsonl
from hibachi.offline.files.rows import Row
from hibachi.offline.tasks.task import RowError, RowTask
from hibachi.request import SamplingParams

PROMPTS = ("prompt", "text")  # columns that are taken for prompts, if none is named
PARAMS = tuple(f.name for f in fields(SamplingParams) if f.name != "logits_processors")
NEW_TOKENS = 16  # of a row for which nothing says a limit, as of a completion over HTTP
_INTEGERS = ("top_k", "seed", "max_tokens", "logprobs", "min_tokens", "n", "best_of", "prompt_logprobs",
             "num_speculative_tokens")  # fmt: skip
_TEXTS = ("stop", "bad_words")
LISTS = (*_TEXTS, "stop_token_ids", "allowed_token_ids", "logit_bias", "codebooks", "structured_outputs", "beams")
_FLAGS = {"true": True, "false": False}  # as JSON, Python and spreadsheets write them
# How Arrow's types begin.
_TEXT = ("string", "large_string")
_LIST = ("list", "large_list", "fixed_size_list")
_NUMBERS = ("int", "uint", "float", "double", "halffloat", "decimal", "bool")
_OBJECTS = ("struct",)
_KNOWN = 4096  # distinct sets of parameters that are kept
_LONGEST = 1 << 14  # characters of one that is kept: a schema may have a million


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What a row, or the run for all rows, says of a chat, by the names that OpenAI's API and vLLM's have."""

    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        kinds = (
            ("tools", list, 'a list of tools such as {"type": "function", "function": {"name": ...}}'),
            ("parallel_tool_calls", bool, "true or false"),
            ("reasoning_effort", str, "a text"),
            ("chat_template_kwargs", Mapping, "an object, of variables for the chat template"),
        )
        for name, kind, expected in kinds:
            given = getattr(self, name)
            if given is not None and not isinstance(given, kind):
                raise InvalidRequest(f"{name} must be {expected}; got {shown(given)}.")

    def check(self) -> None:
        """What the tools and the choice say together. Raises InvalidRequest."""
        toolbox_of(self.tools, self.tool_choice, self.parallel_tool_calls)

    def check_for_rows(self) -> None:
        """What the choice says by itself, where each row brings its tools. Raises InvalidRequest."""
        check_choice(self.tool_choice)

    @property
    def variables(self) -> dict[str, Any]:
        """For the template. Which template it is, the run says."""
        return {name: value for name, value in (self.chat_template_kwargs or {}).items() if name != "chat_template"}

    def as_body(self) -> dict[str, Any]:
        """As fields of a request."""
        found = {name: getattr(self, name) for name in CHATS}
        return {name: value for name, value in found.items() if value is not None}


CHATS = tuple(f.name for f in fields(ChatOptions))
NO_OPTIONS = ChatOptions()


def without_nulls(value: Any) -> Any:
    """Of a row of Parquet, where all rows have the names that any has."""
    if isinstance(value, Mapping):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


@dataclass(frozen=True, kw_only=True)
class Columns:
    """How rows become requests. Each of prompt, messages, tokens: the name of a column; at most one is given.

    features: columns of numbers, which together are the input of a feed-forward model, or the tokens.

    template: a text with columns in braces, such as "Summarise: {text}"; {{ and }} stand for braces. system: a system
    message; the prompt is the user's then. chat: likewise without a system message. params: for all rows, of sampling
    and, of chats, `ChatOptions`; param_columns: {parameter: the column with its value}; empty values are as if they
    were not there. Beside messages a column `tools` holds the tools of each row, unless params say which there are.
    """

    prompt: str | None = None
    messages: str | None = None
    tokens: str | None = None
    features: Sequence[str] = ()
    template: str | None = None
    system: str | None = None
    chat: bool = False
    params: Mapping[str, Any] = field(default_factory=dict)
    param_columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        given = [
            n for n in ("prompt", "messages", "tokens", "features", "template") if getattr(self, n) not in (None, ())
        ]
        if len(given) > 1:
            raise ConfigError(f"A row has one prompt: expected one of {', '.join(given)}; got {len(given)} of them.")
        if self.talks and (self.tokens is not None or self.features):
            raise ConfigError(
                "Token ids are what a chat template makes: expected a text or messages with chat; got tokens."
            )
        if self.system is not None and self.messages is not None:
            raise ConfigError("Messages have their own system message: leave system out, or name a column of texts.")
        names = (*self.params, *self.param_columns)
        if unknown := [name for name in names if name not in (*PARAMS, *CHATS)]:
            raise ConfigError(
                f"There is no sampling parameter {unknown[0]!r}. There are: {', '.join(PARAMS)}; and of chats: "
                f"{', '.join(CHATS)}."
            )
        if not self.talks and (vain := [name for name in names if name in CHATS]):
            raise ConfigError(
                f"{vain[0]} is for chats: expected messages, a system message or chat beside it; got none."
            )
        if both := [name for name in self.params if name in self.param_columns]:
            raise ConfigError(f"{both[0]} is given for all rows, and by a column. Leave one out.")
        try:
            SamplingParams(**self.sampling)
            options = self.options_of({})
            if self.tools is None:
                options.check()
            else:
                options.check_for_rows()
        except InvalidRequest as e:
            raise ConfigError(str(e)) from e
        _names(self.template or "")

    @property
    def talks(self) -> bool:
        """Do the prompts go through the model's chat template?"""
        return self.chat or self.system is not None or self.messages is not None

    @property
    def sampling(self) -> dict[str, Any]:
        """Of the parameters for all rows, those of sampling."""
        return {name: value for name, value in self.params.items() if name not in CHATS}

    @property
    def tools(self) -> str | None:
        """The column of tools; not every row need have it. None means there is none."""
        if "tools" in self.params or not self.talks:
            return None
        return self.param_columns.get("tools", "tools" if self.messages is not None else None)

    @property
    def brings_tools(self) -> bool:
        """Whether rows may have tools."""
        return self.tools is not None or bool(self.params.get("tools"))

    def options_of(self, given: Mapping[str, Any]) -> ChatOptions:
        """given: what a row says. Raises InvalidRequest."""
        found = {name: value for name, value in self.params.items() if name in CHATS}
        found |= given
        return ChatOptions(**found) if found else NO_OPTIONS

    def wanted(self) -> list[str]:
        """The columns that each row must have, as far as they were named."""
        named = [c for c in (self.prompt, self.messages, self.tokens) if c is not None]
        return list(dict.fromkeys([*named, *self.features, *_names(self.template or ""), *self.param_columns.values()]))

    def check(self, columns: Sequence[str] | None) -> None:
        """Are they there? columns: of the input; None means not known yet. Raises ConfigError."""
        if columns is None:
            return
        if missing := [c for c in self.wanted() if c not in columns]:
            raise ConfigError(f"The input has no column {missing[0]!r}. It has: {_listed(columns)}.")
        if not any((self.prompt, self.messages, self.tokens, self.features, self.template)):
            self.prompt_of_all(columns)

    def only(self, params: Sequence[str], why: str) -> None:
        """Raises ConfigError for other parameters than these, which would mean nothing."""
        if vain := [name for name in (*self.params, *self.param_columns) if name not in params]:
            raise ConfigError(f"{vain[0]} means nothing here: {why}. Expected {' and '.join(params) or 'none'}.")

    def check_types(self, types: Mapping[str, str]) -> None:
        """types: Arrow's, of columns of which they are known, as `Sources.types` gives them. Raises ConfigError."""
        prompt = self.prompt
        if not any((prompt, self.messages, self.tokens, self.features, self.template)):
            prompt = next((name for name in PROMPTS if name in types), None)
        ids = () if self.talks else _LIST
        _check_type(types, prompt, (*_TEXT, *ids), "texts, or lists of token ids" if ids else "texts")
        _check_type(types, self.messages, (*_LIST, *_TEXT), "lists of messages", of=_OBJECTS)
        _check_type(types, self.tools, (*_LIST, *_TEXT), "lists of tools", of=_OBJECTS)
        _check_type(types, self.tokens, (*_LIST, *_TEXT), "lists of tokens")
        for name in self.features:
            _check_type(types, name, (*_NUMBERS, *_TEXT), "numbers")
        for name, column in self.param_columns.items():
            if name not in (*LISTS, *CHATS):
                _check_type(types, column, (*_NUMBERS, *_TEXT), f"values of {name}")

    def prompt_of_all(self, columns: Sequence[str]) -> str:
        """The column of prompts, if none was named. Raises ConfigError."""
        for name in PROMPTS:
            if name in columns:
                return name
        raise ConfigError(
            f"Which column holds the prompts? Expected one that is called {' or '.join(PROMPTS)}; the input has: "
            f"{_listed(columns)}. Name it with --prompt-column, --messages-column, --tokens-column or --template."
        )


@dataclass(slots=True)
class RowRequest:
    """What a row asks for. prompt: a text, token ids (or lists of numbers), or messages, where `talks`."""

    prompt: Any
    params: SamplingParams
    seeded: bool  # the row, or the run for all rows, says which seed
    options: ChatOptions = NO_OPTIONS


class RowReader:
    """Reads rows by `Columns`. defaults: parameters of rows that do not say them; without a limit: NEW_TOKENS. Distinct
    sets of parameters are made once.
    """

    def __init__(self, columns: Columns, defaults: SamplingParams) -> None:
        if defaults.max_tokens is None:
            defaults = defaults.with_(max_tokens=NEW_TOKENS)
        self._columns, self._defaults = columns, defaults.with_(**columns.sampling)
        self._columns_of = {name: c for name, c in columns.param_columns.items() if name not in CHATS}
        self._own = columns.options_of({})
        own = {name: c for name, c in columns.param_columns.items() if name in CHATS}
        self._options_of = own if columns.tools is None else {**own, "tools": columns.tools}
        self._known: dict[str, SamplingParams] = {}
        self._template = None if columns.template is None else _parsed(columns.template)

    def read(self, row: Row) -> RowRequest:
        """Raises InvalidRequest."""
        columns, values = self._columns, row.values
        prompt: Any
        if self._template is not None:
            prompt = _filled(self._template, values)
        elif columns.messages is not None:
            prompt = _decoded(_of(values, columns.messages), columns.messages, "a list of messages")
            if not all(isinstance(message, dict) for message in prompt):
                raise InvalidRequest(f"{columns.messages} must be a list of messages, objects; got {shown(prompt)}.")
            if _structured(row, columns.messages):
                prompt = [_own_fields(message) for message in prompt]
        elif columns.tokens is not None:
            prompt = _decoded(_of(values, columns.tokens), columns.tokens, "a list of tokens")
        elif columns.features:
            prompt = [_number(_of(values, name), name) for name in columns.features]
        else:
            prompt = self._prompt(values)
        if columns.talks and columns.messages is None:
            if not isinstance(prompt, str):
                raise InvalidRequest(f"A prompt for a chat must be a text; got {shown(prompt)}.")
            user = {"role": "user", "content": prompt}
            prompt = [user] if columns.system is None else [{"role": "system", "content": columns.system}, user]
        params, seeded = self._params(row)
        return RowRequest(prompt, params, seeded, self._options(row) if columns.talks else NO_OPTIONS)

    def _options(self, row: Row) -> ChatOptions:
        of = self._options_of
        given = {name: said for name, c in of.items() if (said := _said(row, name, c)) is not None}
        found = self._columns.options_of(given) if given else self._own
        found.check()
        return found

    def _prompt(self, values: Mapping[str, Any]) -> Any:
        name = self._columns.prompt
        if name is None:
            name = next((n for n in PROMPTS if n in values), None)
            if name is None:
                raise InvalidRequest(
                    f"The row has no prompt: expected a column {' or '.join(PROMPTS)}; got {_listed(list(values))}."
                )
        return _of(values, name)

    def _params(self, row: Row) -> tuple[SamplingParams, bool]:
        columns = self._columns_of
        if not columns:
            return self._defaults, self._defaults.seed is not None
        given = {name: said for name, c in columns.items() if (said := _said(row, name, c)) is not None}
        key = repr(given)  # as True, 1 and 1.0 are equal
        known = self._known.get(key)
        if known is None:
            known = self._defaults.with_(**given)
            if len(self._known) >= _KNOWN:
                self._known.clear()
            if len(key) <= _LONGEST:
                self._known[key] = known
        return known, known.seed is not None


class ColumnRows(RowTask):
    """What tasks have in common whose rows are read by their columns."""

    carries, compares = True, False
    _columns: Columns
    _reader: RowReader

    def check(self, columns: Sequence[str] | None) -> None:
        self._columns.check(columns)

    def seen(self, row: Row) -> None:
        pass

    def refused(self, row: Row, message: str) -> dict[str, Any]:
        return {"error": message}

    def _judge(self, row: Row) -> object:
        return self._reader.read(row)

    def _failed(self, number: int, about: Mapping[str, Any], error: HibachiError) -> RowError:
        return RowError(str(error))


def _check_type(
    types: Mapping[str, str], column: str | None, fits: Sequence[str], what: str, of: Sequence[str] = _NUMBERS
) -> None:
    """fits: how a type may begin. of: how that of a list's items may, be they in lists or not."""
    for kind in types.get(column or "", "null").split(" | "):
        kind = kind.removeprefix("dictionary<values=")
        item = kind
        while item.startswith(_LIST):
            item = item.partition(": ")[2]
        item = item if kind.startswith(_LIST) else ""
        if kind != "null" and not (kind.startswith(tuple(fits)) and item.startswith(tuple(of) if item else "")):
            raise ConfigError(f"The column {column!r} must hold {what}; it is of the type {kind}.")


def _of(values: Mapping[str, Any], name: str) -> Any:
    found = values.get(name)
    if found is None:
        raise InvalidRequest(
            f"The row has no {name!r}: expected a value; got none. Its columns: {_listed(list(values))}."
        )
    return found


def _structured(row: Row, column: str) -> bool:
    """Whether the value is one of Arrow's, where all rows have the names that any has, and no JSON in a text."""
    return row.arrow is not None and not isinstance(row.values.get(column), str)


def _own_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of Arrow without what only other rows have. A content of null is a message's own: some templates
    tell it from a missing one."""
    return {name: without_nulls(v) for name, v in message.items() if v is not None or name == "content"}


def _said(row: Row, name: str, column: str) -> Any:
    """What a row says of the parameter `name`; None means nothing."""
    said = value_of(name, row.values.get(column))
    return without_nulls(said) if _structured(row, column) else said


def _decoded(value: Any, name: str, what: str) -> Any:
    """A list; in CSV it is JSON in a text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidRequest(f"{name} must be {what}, in a text as JSON; got {shown(value)}.") from None
    if not isinstance(value, list):
        raise InvalidRequest(f"{name} must be {what}; got {shown(value)}.")
    return value


def _number(value: Any, name: str) -> Any:
    """In CSV it is a text."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        found = _FLAGS.get(value.strip().lower(), value)
    if isinstance(found, Decimal):
        return float(found)
    if not isinstance(found, (int, float)):
        raise InvalidRequest(f"{name} must be a number; got {shown(value)}.")
    return found


def value_of(name: str, given: Any) -> Any:
    """Of the parameter `name`: a text is read as JSON, as CSV knows no numbers; one that must be a text only where it
    is a list. None means there is none."""
    if isinstance(given, str):
        given = _read(name, given)
    if isinstance(given, Decimal):
        given = float(given)
    if isinstance(given, float) and name in _INTEGERS and given.is_integer():
        return int(given)  # a column of integers with gaps is one of floats to many programs
    if name == "logit_bias" and isinstance(given, Mapping):
        return {_token(token): bias for token, bias in given.items() if bias is not None}
    if name in ("structured_outputs", "beams") and isinstance(given, Mapping):
        return {field: said for field, said in given.items() if said is not None}  # a struct has all that any row has
    return given


def _read(name: str, text: str) -> Any:
    if not text or (name not in _TEXTS and not text.strip()):
        return None
    if name in _TEXTS and not text.lstrip().startswith("["):
        return text
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return _FLAGS.get(text.strip().lower(), text)
    return text if name in _TEXTS and not all(isinstance(each, str) for each in found) else found


def _token(key: Any) -> Any:
    """JSON's keys are texts, and ids are integers."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 19 else key


def _listed(columns: Sequence[str]) -> str:
    shown_ = ", ".join(repr(c)[:80] for c in columns[:20])
    return f"{shown_} and {len(columns) - 20} more" if len(columns) > 20 else shown_ or "none"


# ---- templates -------------------------------------------------------------------------------------------------------


def _parsed(template: str) -> list[tuple[str, str | None]]:
    """(text, the column that follows it) Raises ConfigError."""
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as e:
        raise ConfigError(f"The template {shown(template)} cannot be read: {e}. Write {{{{ for a brace.") from e
    for _, name, format_, conversion in parts:
        if name is not None and (not name or format_ or conversion):
            more = ("!" + conversion if conversion else "") + (":" + format_ if format_ else "")
            raise ConfigError(
                f"The template {shown(template)}: expected a column in each pair of braces, such as {{text}}; got "
                f"{{{name}{more}}}. Write {{{{ for a brace."
            )
    return [(text, name) for text, name, _, _ in parts]


def _names(template: str) -> list[str]:
    return [name for _, name in _parsed(template) if name is not None]


def _filled(parts: Sequence[tuple[str, str | None]], values: Mapping[str, Any]) -> str:
    out = []
    for text, name in parts:
        out.append(text)
        if name is not None:
            out.append(_in_words(_of(values, name)))
    return "".join(out)


def _in_words(value: Any) -> str:
    """As a cell of CSV has it: numbers, lists and objects as JSON, times in ISO 8601."""
    if isinstance(value, str):
        return value
    if isinstance(value, (bool, int, float, list, dict)):
        return json.dumps(value, ensure_ascii=False, default=jsonl.plain)
    return str(jsonl.plain(value))
