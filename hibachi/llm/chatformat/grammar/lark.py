"""Grammars in Lark's notation, as llguidance reads it: rules that are made once, texts with special tokens, schemas.

Two ways of the library's matter here. Its lexer takes the longest match, and never goes back: where "any text" may go
on, it does. And a rule that is `lazy` ends with the first match, before any other. So a text "up to" a marker is lazy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

from hibachi.engine.guide.worker import GBNF, Refused, json_part, own_name, read_schema
from hibachi.llm.chatformat.errors import BadField
from hibachi.structured import MOST_BYTES

Special: TypeAlias = Callable[[str], Sequence[str | int]]
"""Cuts a text as a tokenizer does: into texts, and ids of special tokens."""
ANY = "/(?s:.*)/"
LINES = "(?s:.*)"
QUOTING = " | ".join(
    [f"/({LINES}\\n)?([^\\n{sign}]*{sign}[^\\n{sign}]*{sign})*[^\\n{sign}]*{sign}/" for sign in '`"']
    + [f"/{LINES}[“‘«„]/"]
)
"""A text that ends with a quote sign that opens: the first, third or so of its kind in the line. What depends on blanks
makes masks ten times as dear.
"""
BLANKS = "/[ \\t\\r\\n]{1,4}/"
EMPTY = '""'
OURS = re.compile(
    r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/|<[^<>\s]+>'
    r"|(?<![\w-])(?:(?P<start>start)|(?P<like>\w+_[0-9]+))(?![\w-])"
)
"""In a caller's grammar, outside of texts, expressions and tokens: where it begins, and names that look like ours."""


class Rules:
    """The rules of one grammar.

    special: see `Special`. ids: special tokens that may stand in free text. ends: tokens that end an answer. named:
    special tokens that rules name by themselves.
    """

    def __init__(
        self,
        special: Special,
        ids: Iterable[int] = (),
        ends: Collection[int] = (),
        named: Collection[int] = (),
    ) -> None:
        self._special, self._ends = special, frozenset(ends)
        self._named_ids = frozenset(named) - self._ends
        self._ids = frozenset(ids) - self._ends - self._named_ids
        self._named: dict[str, str] = {}
        self._size = 0
        self._texts: dict[str, list[str | int]] = {}

    def source(self, start: str) -> str:
        """The whole grammar. start: the body of the rule at which it begins."""
        return "".join(f"{line}\n" for line in (f"start: {start}", *self._named.values()))

    # ---- parts -----------------------------------------------------------------------------------------------------

    def rule(self, body: str, hint: str = "r", options: str = "") -> str:
        """The name of a rule; one with the same body is made once."""
        return self._name(hint, f"{options}: {body}")

    def terminal(self, body: str, hint: str = "T") -> str:
        """The name of a terminal: a regular expression of texts and expressions, which is much cheaper than a rule."""
        return self._name(hint.upper(), f": {body}")

    def _name(self, hint: str, body: str) -> str:
        key = f"{hint[0].isupper()}{body}"
        if key not in self._named:
            name = f"{hint}_{len(self._named)}"
            self._named[key] = name + body
            self._count(name, body)
            return name
        return self._named[key].partition(":")[0].partition("[")[0]

    def _count(self, *texts: str) -> None:
        self._size += sum(map(len, texts))
        if self._size > MOST_BYTES:
            raise BadField.at(
                ("tools",),
                f": their names and schemas make a grammar that is too large: expected at most {MOST_BYTES} "
                f"bytes. Send fewer tools, or smaller schemas.",
            )

    def reserve(self, hint: str) -> str:
        """A name for a rule that `define` gives a body; for rules that hold themselves."""
        name = f"{hint}_{len(self._named)}"
        self._named[f"reserved {name}"] = ""
        return name

    def define(self, name: str, body: str) -> None:
        self._named[f"reserved {name}"] = f"{name}: {body}"
        self._count(name, body)

    def cut(self, text: str) -> list[str | int]:
        """Texts and ids of special tokens, none empty and no two texts in a row."""
        if text not in self._texts:
            found: list[str | int] = []
            for part in self._special(text) if text else ():
                if isinstance(part, str) and found and isinstance(found[-1], str):
                    found[-1] += part
                elif part != "":
                    found.append(part)
            self._texts[text] = found
        return self._texts[text]

    def ended(self, text: str) -> tuple[list[str | int], bool]:
        """`cut`, but no further than a token that ends the answer; and whether there is one."""
        parts = self.cut(text)
        end = next((i for i, part in enumerate(parts) if part in self._ends), None)
        return (parts, False) if end is None else (parts[:end], True)

    def fixed(self, text: str) -> str:
        """Exactly this text, its special tokens as such."""
        return joined(self.cut(text))

    def spaced(self, text: str, before: str = BLANKS) -> str:
        """A text behind some blanks or none. before: an expression for those that may come.

        Both are one terminal, as the lexer never goes back: else blanks that another text may have in front as well
        would be taken for that one's.
        """
        parts = self.cut(text)
        if not parts or not isinstance(parts[0], str):
            return f"({before})? {joined(parts)}"
        first = self.terminal(f"({before})? {quoted(parts[0])}", "LEAD")
        return f"{first} {joined(parts[1:])}" if parts[1:] else first

    def either(self, texts: Sequence[str]) -> str:
        """One of some texts, as the body of a terminal."""
        return " | ".join(map(quoted, texts))

    def json(self, schema: dict[str, Any], between: str | None = None, *, any_of: bool = True) -> str:
        """A value of a schema. between, any_of: see `json_part`. Raises Refused."""
        try:
            text = json.dumps(schema, ensure_ascii=False)
        except RecursionError:
            raise Refused("it is nested too deep. Make it flatter") from None
        return self.rule(json_part(read_schema(text), between, any_of=any_of), "json")

    def embed(self, grammar: str) -> str:
        """A caller's own grammar in Lark's notation or in GBNF; the name of the rule at which it begins."""
        if GBNF.search(grammar):  # it is translated where it may take long
            return self.rule(f"%gbnf {json.dumps(grammar)}", "answer")
        if grammar.lstrip().startswith("{"):
            raise Refused("it must be in Lark's notation or in GBNF; got JSON")
        name = self.reserve("answer")

        def ours(found: re.Match[str]) -> str:
            return name if found["start"] else own_name("own_", found["like"]) if found["like"] else found[0]

        self._named[f"reserved {name}"] = OURS.sub(ours, grammar)
        return name

    # ---- free text -------------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """Any text without special tokens."""
        return self.terminal(ANY, "TEXT")

    def free(self, without: Collection[int] = ()) -> str:
        """Any text, with special tokens but these."""
        others = self._others(without)
        return self.rule(f"{self.text} ({others} {self.text})*" if others else self.text, "free")

    def _others(self, without: Collection[int]) -> str:
        """Any special token but these. Of several sets that hold a token the library takes the first and forgets the
        others, so each that is named elsewhere stands by itself.
        """
        sets = [f"<[{ranges(self._ids)}]>"] if self._ids else []
        sets += [f"<[{i}]>" for i in sorted(self._named_ids - frozenset(without))]
        return self.rule(" | ".join(sets), "other") if sets else ""

    def upto(self, marker: str, without: Collection[int] = ()) -> str:
        """Any text up to the first marker, and the marker. Blanks in front of it are a part of the text.

        A marker with special tokens ends it also where it is written out in other tokens, as the parser sees no
        difference. without: special tokens that the text cannot hold.
        """
        marker = marker.lstrip()
        written = self.rule(f"{self.text} {quoted(marker)}", "upto", "[lazy]")
        parts = self.cut(marker)
        first = next((part for part in parts if isinstance(part, int)), None)
        barred = {*without, *self.barred(marker)}
        others = self._others(barred)
        before = f"({self.text} {others})* " if others else ""
        if first is None:
            return self.rule(before + written, "until")
        marked = self.lazily(parts[parts.index(first) :])
        return self.rule(f"{before}({written} | {self.text} {marked})", "until")

    def until(self, marker: str, without: Collection[int] = ()) -> tuple[str, str, str]:
        """Any text up to a marker that begins a call for sure, and the marker; text up to one, and that, behind which
        the call may come or any text; text without a marker.

        Any text may come behind one that is written out behind something else in its line. A marker right behind a
        quote sign that opens is a part of the text. without: as for `upto`.
        """
        marker = marker.lstrip()
        parts = self.cut(marker)
        at = next((i for i, part in enumerate(parts) if isinstance(part, int)), None)
        marked = self.lazily(parts[at:]) if at is not None else ""
        others = self._others({*without, *self.barred(marker)})
        text, quoting = self.text, self.terminal(QUOTING, "QUOTING") if marked else ""
        if marked:
            text = self.terminal(f"{ANY} & ~({QUOTING})", "PLAIN")
        either = f"({text} | {quoting})" if marked else text
        passed = [f"{either} {others}"] * bool(others) + [f"{quoting} {marked}"] * bool(marked)
        before = self.rule(f"({' | '.join(passed)})*", "before") if passed else ""
        sure, prose = [], []
        for lines in (f"/({LINES}\\n)?[ \\t\\r]*/", f"/{LINES}\\n[ \\t\\r]*/"):  # at the beginning, behind a marker
            begun = self.rule(f"{self.terminal(lines, 'LINES')} {quoted(marker)}", "upto", "[lazy]")
            sure.append(f"{before} ({begun} | {text} {marked})" if marked else f"{before} {begun}")
            later = self.terminal(f"{ANY} & ~{lines} & ~({QUOTING})", "LATER")
            prose.append(f"{before} {self.rule(f'{later} {quoted(marker)}', 'prose', '[lazy]')}")
        may = self.rule(f"{prose[0]} ({prose[1]})*", "may")
        free = self.rule(f"{before} {either}", "free")
        return self.rule(f"{sure[0]} | {may} {sure[1]}", "until"), may, free

    def lazily(self, parts: Sequence[str | int]) -> str:
        """Texts and special tokens that nothing else can be where they have come, though any text might go on."""
        return " ".join(
            self.rule(quoted(part), "then", "[lazy]") if isinstance(part, str) else f"<[{part}]>" for part in parts
        )

    def barred(self, marker: str) -> set[int]:
        """The special token that says by itself that the marker has come. If text follows, it may be another's too."""
        parts = self.cut(marker.lstrip())
        ids = [part for part in parts if isinstance(part, int)]
        return {ids[0]} if ids and parts[-1] == ids[0] else set()

    def before(self, marker: str, body: str, end: str, barred: Sequence[str] = ()) -> str:
        """A text of a terminal's body, and the text that ends it, which comes first there. marker: its core. barred:
        further texts that do not come in it.
        """
        parts = self.cut(end)
        inner = self.terminal(f"({body}) & ~({ANY} ({self.either([marker, *barred])}) {ANY})", "RAW")
        first = next((i for i, part in enumerate(parts) if isinstance(part, int)), None)
        if first is None:
            return self.rule(f"{inner} {quoted(end)}", "raw", "[lazy]")
        lead = joined(parts[:first])
        begun = inner if first == 0 else self.terminal(f"{inner} {lead}", "RAW")
        return self.rule(f"{begun} {joined(parts[first:])}", "raw")


def quoted(text: str) -> str:
    return json.dumps(text).replace("\x7f", "\\u007f")


def joined(parts: Sequence[str | int]) -> str:
    return " ".join(quoted(part) if isinstance(part, str) else f"<[{part}]>" for part in parts) or EMPTY


def ranges(ids: Iterable[int]) -> str:
    """Ids as the library writes sets of them: 3,7-9."""
    found: list[list[int]] = []
    for i in sorted(ids):
        if found and found[-1][1] == i - 1:
            found[-1][1] = i
        else:
            found.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def chain(rules: Rules, parts: Sequence[tuple[str, str, bool]]) -> str:
    """Parts in their order; those that are not needed may be left out. parts: each as it is where it is the first, as
    it is behind another, and whether it is needed.
    """
    if all(alone == later for alone, later, _ in parts):
        return " ".join(part if needed else f"({part})?" for part, _, needed in parts) or EMPTY
    first = more = EMPTY
    for alone, later, needed in reversed(parts):
        begun, going = f"{alone} {more}", f"{later} {more}"
        if not needed:
            begun, going = f"{begun} | {first}", f"{going} | {more}"
        first, more = rules.rule(begun, "first"), rules.rule(going, "more")
    return first


def trie(entries: Sequence[tuple[str, str]]) -> str:
    """One of many texts, each with what follows it. Beginnings that are the same are written once: of a thousand
    alternatives the library would try all at each token. entries: texts, and parts of rules.
    """
    least, most = min(text for text, _ in entries), max(text for text, _ in entries)
    same = least[: next((i for i, (a, b) in enumerate(zip(least, most, strict=False)) if a != b), len(least))]
    groups: dict[str, list[tuple[str, str]]] = {}
    for text, behind in entries:
        rest = text[len(same) :]
        groups.setdefault(rest[:1], []).append((rest, behind))
    if len(groups) > 1:
        options = [trie(group) for group in groups.values()]
    else:  # the same text
        options = list(dict.fromkeys(behind or EMPTY for _, behind in entries))
    found = options[0] if len(options) == 1 else f"({' | '.join(options)})"
    return f"{quoted(same)} {found}" if same else found


def repeated(each: str, later: str, least: Any, most: Any) -> str:
    """From `least` to `most` of the same ("" means any number). later: as it is behind another. Raises Refused."""
    if not isinstance(least, int) or not (most == "" or isinstance(most, int)) or (most != "" and most < least):
        raise Refused("the keyword `minItems` or `maxItems` has a value that is not supported", "minItems")
    if most == 0:
        return EMPTY
    further = "" if most == 1 else f"({later}){{{max(0, least - 1)},{'' if most == '' else most - 1}}}"
    return f"{each} {further}" if least else f"({each} {further})?"
