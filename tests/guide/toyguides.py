"""Guides for tests that need no library: which ids may come depends on how many have come."""

import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hibachi.engine.guide.protocol import Grammar, GuideFailed, Vocabulary
from hibachi.errors import InvalidRequest


class ToyGuide:
    """sets: the ids that may come, in turns. most: tokens of a complete output. least: from how many on it may end.
    fails: after so many tokens it is too complex. dear: seconds that a mask takes, after `cheap` tokens.
    """

    def __init__(self, rule: dict[str, Any], eos_ids: Sequence[int]) -> None:
        self.rule, self.eos_ids, self.had = rule, eos_ids, list[int]()

    @property
    def complete(self) -> bool:
        return len(self.had) >= self.rule["most"]

    def allowed(self) -> list[int]:
        if len(self.had) == self.rule.get("fails"):
            raise GuideFailed("it is too complex")
        if self.complete:
            return [*self.eos_ids]
        found = list(self.rule["sets"][len(self.had) % len(self.rule["sets"])])
        return [*found, *self.eos_ids] if len(self.had) >= self.rule.get("least", self.rule["most"]) else found

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token not in self.allowed() or token in self.eos_ids:
                raise GuideFailed(f"the token {token} may not come")
            self.had.append(token)

    def take_back(self, n: int) -> None:
        assert 0 < n <= len(self.had)
        del self.had[-n:]

    def forced(self, most: int) -> tuple[list[int], int]:
        found: list[int] = []
        while len(found) < most and len(only := self.allowed()) == 1 and only[0] not in self.eos_ids:
            self.advance(only)
            found += only
        if found:
            self.take_back(len(found))
        sure = len(found)
        return found + self.rule.get("likely", [])[: most - sure], sure

    def fork(self) -> "ToyGuide":
        new = ToyGuide(self.rule, self.eos_ids)
        new.advance(self.had)
        return new


class ToyGuides:
    """A `grammar` is JSON: see `ToyGuide`. slow: seconds that `compile` takes. gate: it waits for this event."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.size, self.eos_ids = len(vocabulary.tokens), tuple(vocabulary.eos_ids)
        self.compiled = 0
        self.gate: threading.Event | None = None
        self.calls = list[float]()  # seconds of dear masks in each call that the engine has waited for

    def check(self, form: Any) -> Grammar:
        rule = json.loads(form.text)
        if "bad" in rule:
            raise InvalidRequest.at(("structured_outputs", "grammar"), ": the keyword `bad` is not supported.")
        return Grammar(form.text)

    def knows(self, form: Any) -> bool:
        return True

    def compile(self, grammar: Grammar) -> ToyGuide:
        rule = json.loads(grammar.source)
        if self.gate is not None and rule.get("waits"):
            assert self.gate.wait(30)
        time.sleep(rule.get("slow", 0))
        if rule.get("breaks"):
            raise GuideFailed("it cannot be compiled")
        self.compiled += 1
        return ToyGuide(rule, self.eos_ids)

    def masks(self, guides: Sequence[ToyGuide], bits: Any) -> list[GuideFailed | None]:
        out: list[GuideFailed | None] = []
        began = time.perf_counter()
        dear = sum(g.rule.get("dear", 0) for g in guides if len(g.had) >= g.rule.get("cheap", 0))
        if dear:
            time.sleep(dear)
        if threading.current_thread().name != "hibachi-grammars":
            self.calls.append(time.perf_counter() - began if dear else 0.0)
        for i, guide in enumerate(guides):
            kept = np.zeros(bits.shape[1] * 32, bool)
            try:
                kept[guide.allowed()] = True
                out.append(None)
            except GuideFailed as e:
                out.append(e)
            bits[i] = np.packbits(kept, bitorder="little").view(np.uint32)
        return out

    def close(self) -> None:
        pass


def rule(*sets: Sequence[int], most: int, **more: Any) -> dict[str, str]:
    return {"grammar": json.dumps({"sets": [list(s) for s in sets], "most": most, **more})}


def toy_guides(engine: Any) -> None:
    """Give an engine these guides."""
    engine.forms._guides = ToyGuides(engine.forms.vocabulary())
