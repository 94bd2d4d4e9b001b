"""The reference of the site: which public name stands on which page, and docstrings as Markdown.

Our docstrings are plain prose. What Markdown needs besides is added here: "name: what it is" becomes a list, names of
errors and of pages become links, and the comment behind a field becomes its text.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Any

import griffe

import hibachi

PAGES: dict[str, tuple[str, str, list[str]]] = {  # file: (title, introduction, public names)
    "engines": (
        "Engines",
        "Requests in, streams out, one batch for all. [Models](../docs/models.md) explains what a model may look like.",
        [
            "AutoregressiveBatchInference",
            "FeedforwardBatchInference",
            "AutoregressiveBatcher",
            "FeedforwardBatcher",
            "Health",
            "Stats",
            "Meters",
        ],
    ),
    "llm": (
        "Language models",
        "A language model from its files, with its tokenizer, and what it answers.",
        ["KVTiers", "LLM", "Completion", "Choice", "TextStream", "Piece", "Stopped", "Embedding", "Score"],
    ),
    "sampling": (
        "Sampling and requests",
        "What a request may ask for. [Sampling](../docs/sampling.md) explains each parameter.",
        ["SamplingParams", "Beams", "Guidance", "StructuredOutputs", "StopRule", "Terms", "Trie", "Finish"],
    ),
    "policies": (
        "Scheduling policies",
        "The order in which requests are served. [Scheduling](../docs/scheduling.md) compares them.",
        ["Policy", "Fcfs", "Priority", "Fair", "Shares", "WaitingServed"],
    ),
    "streams": ("Streams", "What a request answers, token by token.", ["ItemStream", "Item"]),
    "models": (
        "Models",
        "The methods that a model has on each rung; it inherits from none of these. See [Models](../docs/models.md).",
        [
            "Autoregressive",
            "OwnCacheModel",
            "PaddedAutoregressive",
            "LogitsModel",
            "CachedModel",
            "LanguageModel",
            "Feedforward",
            "CacheSpec",
            "Input",
            "OwnCache",
            "Paged",
            "State",
            "StepInputs",
            "load_model",
            "register_model",
            "Family",
            "ModelFiles",
        ],
    ),
    "backends": (
        "Backends",
        "Array libraries. [Backends](../docs/backends.md) explains how to write one.",
        [
            "available_backends",
            "backend_for",
            "load_backend",
            "Backend",
            "ArrayBackend",
            "NumpyBackend",
            "Unsqueezable",
            "Candidate",
        ],
    ),
}
MODULES = {  # file: (title, module), all of whose public names are shown
    "offline": ("Offline runs: hibachi.offline", "hibachi.offline"),
    "prefix": ("Shared prefixes: hibachi.prefix", "hibachi.prefix"),
    "verify": ("Safe to batch? hibachi.verify", "hibachi.verify"),
}
OPTIONS = "    options:\n      show_root_heading: false\n      show_root_toc_entry: false\n"


def pages() -> dict[str, str]:
    """The pages of the reference: file, text. Raises SystemExit if a public name stands on none or is not there."""
    errors = [name for name, place in places().items() if place == "hibachi.errors"]
    told = {name for _, _, names in PAGES.values() for name in names}
    if wrong := told ^ (set(hibachi.__all__) - set(errors)):
        raise SystemExit(f"tools/docs/reference.py: PAGES and hibachi.__all__ differ in {', '.join(sorted(wrong))}")
    found = {}
    for file, (title, introduction, names) in PAGES.items():
        shown = "\n\n".join(f"::: hibachi.{name}" for name in names)
        found[f"{file}.md"] = f"# {title}\n\n{introduction}\n\n{shown}\n"
    for file, (title, module) in MODULES.items():
        found[f"{file}.md"] = f"# {title}\n\n::: {module}\n{OPTIONS}"
    shown = "\n\n".join(f"::: hibachi.{name}" for name in sorted(errors))
    found["errors.md"] = f"# Errors\n\n{as_markdown(module_docstring('errors'), set())}\n\n{shown}\n"
    return found


def places() -> dict[str, str]:
    """Public names of hibachi, and the modules that they come from."""
    return {
        name: member.target_path.rpartition(".")[0] for name, member in package().members.items() if member.is_alias
    }


_loaded: list[Any] = []


def package() -> Any:
    """hibachi as Griffe reads it, which runs no code."""
    if not _loaded:
        _loaded.append(griffe.load("hibachi", submodules=False))
    return _loaded[0]


def module_docstring(name: str) -> str:
    loaded = griffe.load(f"hibachi.{name}")
    return loaded.docstring.value if loaded.docstring else ""


def as_markdown(text: str, names: set[str]) -> str:
    """A docstring as Markdown. names: of parameters and fields, whose explanations become a list."""
    return "\n\n".join(_paragraph(p, names) for p in re.split(r"\n\s*\n", textwrap.dedent(text).strip("\n")))


def _paragraph(text: str, names: set[str]) -> str:
    if "├" in text or "└" in text:
        return f"```text\n{text}\n```"
    if all(line.startswith("    ") for line in text.splitlines()):
        return text  # code, in Markdown too
    if not names:
        return _prose(text)
    name = f"(?:{'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})"
    # At the beginning, or where a sentence or an explanation has ended.
    start = re.compile(rf"(?:(?<=^)|(?<=[.;]) )(?=`?{name}`?(?:, `?{name}`?)*: )")
    head, *items = _split(start, " ".join(text.split()))
    lines = [_prose(head)] if head else []
    for item in items:
        which, _, what = item.partition(": ")
        lines.append(f"- {', '.join(f'`{n.strip(chr(96))}`' for n in which.split(', '))}: {_prose(what.rstrip(';'))}")
    return "\n\n".join(lines[: 1 if head else 0]) + ("\n\n" if head and items else "") + "\n".join(lines[bool(head) :])


def _split(start: re.Pattern[str], text: str) -> list[str]:
    """What stands before the first place, and what begins at each."""
    ends = [m.end() for m in start.finditer(text)]
    return [text[a:b].strip() for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


ERRORS = re.compile(r"\b[A-Z]\w+\b")


def _prose(text: str) -> str:
    """What is outside of backticks says nothing to Markdown, but for names of errors and pages, which are linked."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(part if i % 2 else _linked(re.sub(r"([*_<\[\]])", r"\\\1", part)) for i, part in enumerate(parts))


def _linked(text: str) -> str:
    errors = {name for name, place in places().items() if place == "hibachi.errors"}
    text = ERRORS.sub(lambda m: f"[{m[0]}][hibachi.{m[0]}]" if m[0] in errors else m[0], text)
    return re.sub(r"\bdocs/([\w-]+)\.md\b", r"[docs/\1.md](../docs/\1.md)", text)


class Prose(griffe.Extension):
    """What mkdocstrings shows of our docstrings."""

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        for thing in _all(pkg):
            if thing.is_function:
                _spell_out(thing)
        for thing in _all(pkg):
            if thing.is_attribute and thing.docstring is None and (comment := _comment(thing)):
                thing.docstring = griffe.Docstring(comment, parent=thing)
            if thing.docstring is not None:
                thing.docstring.value = as_markdown(thing.docstring.value, _names(thing))


def _all(thing: Any) -> Iterator[Any]:
    yield thing
    for member in thing.members.values():
        if not member.is_alias:
            yield from _all(member)


def _spell_out(function: Any) -> None:
    """Of a function that `takes` a record of options, the fields of the record, in the place of `**options`."""
    records = [d.value for d in function.decorators if str(d.value).startswith("takes(")]
    if not records:
        return
    record = function.modules_collection[records[0].arguments[0].canonical_path]
    fields = {}
    for one in [*reversed(record.mro()), record]:
        fields |= {name: a for name, a in one.attributes.items() if a.value is not None}
    *others, _ = function.parameters
    function.parameters = griffe.Parameters(
        *others, *(_option(name, field.annotation, field.value) for name, field in fields.items())
    )


def _option(name: str, annotation: Any, default: Any) -> griffe.Parameter:
    if isinstance(default, griffe.ExprCall) and str(default.function) == "option":
        default = default.arguments[0]
    return griffe.Parameter(name, annotation=annotation, kind=griffe.ParameterKind.keyword_only, default=str(default))


def _names(thing: Any) -> set[str]:
    """Of what its docstring may explain: parameters, and fields of a class."""
    if thing.is_function:
        return {p.name for p in thing.parameters}
    if thing.is_class:
        fields = {name for name, member in {**thing.inherited_members, **thing.members}.items() if member.is_attribute}
        return fields | (_names(thing.members["__init__"]) if "__init__" in thing.members else set())
    return set()


def _comment(field: Any) -> str:
    """Behind a field of a class."""
    if not (field.parent and field.parent.is_class and field.endlineno):
        return ""
    found = re.search(r"\s# (?!type:|noqa)(.+)$", field.filepath.read_text().splitlines()[field.endlineno - 1])
    return found[1] if found else ""
