"""JSON schemas as guides: how long until one is ready, what is refused, what is accepted, what a mask costs.

Expected before it was measured: half of the schemas ready in 5 ms, no invalid instance accepted, and 99 of 100 valid
ones; a mask in 50 microseconds.

A folder has files of MaskBench's shape, {"schema": ..., "tests": [{"valid": true, "data": ...}]}, or lists of it, as
the JSON Schema Test Suite has. An instance is written with one blank after commas and colons. One that is refused is
tried again with its properties in the order of the schema, which is the only one that answers come in.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any, Protocol

import numpy as np

import hibachi
from hibachi.engine.guide.protocol import Guide, GuideFailed, Vocabulary
from hibachi.errors import InvalidRequest
from hibachi.llm.tokenizers import Tokenizer
from hibachi.structured import StructuredOutputs

ROOT = Path(__file__).parents[1]
OWN = ROOT / "tests" / "guide" / "schemas"
TINY = Path(hibachi.__file__).parent / "llm" / "data" / "tiny"
ORDERS = 64  # orders of properties that are tried


# ---- cases -----------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    name: str
    schema: Any
    tests: list[dict[str, Any]]


def read_cases(folder: Path) -> Iterator[Case]:
    for path in sorted(folder.rglob("*.json")):
        content = json.loads(path.read_text())
        for i, each in enumerate(content if isinstance(content, list) else [content]):
            if isinstance(each, dict) and "schema" in each:
                yield Case(f"{path.stem} {i}", each["schema"], each.get("tests", []))


def written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class Ordered:
    """Puts properties into the order of a schema. choice: which alternative is followed, where there are any."""

    def __init__(self, root: Any, choice: int) -> None:
        self._root, self._choice = root, choice

    def order(self, value: Any, schema: Any, depth: int = 0) -> Any:
        if depth > 60 or not isinstance(value, (dict, list)):
            return value
        parts = list(self._parts(schema, 0))
        if isinstance(value, list):
            return [self.order(v, self._item(parts, i), depth + 1) for i, v in enumerate(value)]
        names = [n for p in parts for n in p.get("properties", {})] + [n for p in parts for n in p.get("required", [])]
        first = {n: value[n] for n in names if n in value}
        return {n: self.order(v, self._property(parts, n), depth + 1) for n, v in {**first, **value}.items()}

    def _parts(self, schema: Any, depth: int) -> Iterator[dict[str, Any]]:
        """Schemas that all hold, in the order in which they are written."""
        if not isinstance(schema, dict) or depth > 20:
            return
        yield {k: v for k, v in schema.items() if k not in ("properties", "required")}
        for name, each in schema.items():
            if name in ("properties", "required"):
                yield {name: each}
            elif name == "$ref":
                yield from self._parts(self._found(each), depth + 1)
            elif name == "allOf":
                for part in each:
                    yield from self._parts(part, depth + 1)
            elif name in ("anyOf", "oneOf") and each:
                yield from self._parts(each[self._choice % len(each)], depth + 1)

    def _found(self, ref: Any) -> Any:
        found = self._root
        for part in str(ref).partition("#")[2].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            found = found.get(part) if isinstance(found, dict) else None
        return found

    def _item(self, parts: list[dict[str, Any]], i: int) -> Any:
        for part in parts:
            first = part.get("prefixItems") or (part["items"] if isinstance(part.get("items"), list) else [])
            if i < len(first):
                return first[i]
            if isinstance(part.get("items"), dict):
                return part["items"]
        return None

    def _property(self, parts: list[dict[str, Any]], name: str) -> Any:
        found = [p["properties"][name] for p in parts if name in p.get("properties", {})]
        found = found or [p["additionalProperties"] for p in parts if "additionalProperties" in p]
        return {"allOf": found} if found else None


def orders(value: Any, schema: Any) -> Iterator[str]:
    """The instance in several orders of its properties, as texts."""
    seen = set()
    for choice in range(ORDERS):
        text = written(Ordered(schema, choice).order(value, schema))
        if text not in seen:
            seen.add(text)
            yield text


# ---- engines ---------------------------------------------------------------------------------------------------------


class Walk(Protocol):
    """One answer: a mask, then a token, and so on."""

    def mask(self) -> np.ndarray: ...
    def take(self, token: int) -> bool: ...


class Engine(Protocol):
    """What turns schemas into walks."""

    def ready(self, schema: str) -> Walk | str:
        """A walk, or the keyword that is refused."""
        ...

    def again(self) -> Walk: ...


class Hibachi:
    def __init__(self, vocabulary: Vocabulary, **limits: int) -> None:
        from hibachi.engine.guide import llg

        llg.LIMITS.update(limits)
        self._guides = llg.LlguidanceGuides(vocabulary)
        self.bits = np.zeros((1, -(-len(vocabulary.tokens) // 32)), np.uint32)
        self.ready('{"type": "integer"}')  # starts the process and makes the tokenizer

    def ready(self, schema: str) -> Walk | str:
        try:
            self._grammar = self._guides.check(StructuredOutputs(json=schema))
            return HibachiWalk(self, self._guides.compile(self._grammar))
        except InvalidRequest as e:
            return getattr(e, "keyword", None) or str(e)

    def again(self) -> Walk:
        return HibachiWalk(self, self._guides.compile(self._grammar))

    def fill(self, guide: Guide) -> np.ndarray:
        (failure,) = self._guides.masks([guide], self.bits)
        if failure is not None:
            raise failure
        return self.bits[0]


class HibachiWalk:
    def __init__(self, engine: Hibachi, guide: Guide) -> None:
        self._engine, self._guide = engine, guide

    def mask(self) -> np.ndarray:
        return self._engine.fill(self._guide)

    def take(self, token: int) -> bool:
        try:
            self._guide.advance([token])
            return True
        except GuideFailed:
            return False


class XGrammar:
    """The library xgrammar, in this process, with its own defaults for JSON but the same blanks."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import torch
        import xgrammar

        self._library = xgrammar
        tokens = [b"" if i in vocabulary.special else t for i, t in enumerate(vocabulary.tokens)]
        info = xgrammar.TokenizerInfo(
            tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=list(vocabulary.eos_ids)
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self.bits = torch.full((1, -(-len(tokens) // 32)), -1, dtype=torch.int32)
        self.ready('{"type": "integer"}')

    def ready(self, schema: str) -> Walk | str:
        try:
            self._compiled = self._compiler.compile_json_schema(schema, any_whitespace=False, strict_mode=False)
        except Exception as e:
            return str(e).strip().splitlines()[-1][:100]
        return self.again()

    def again(self) -> Walk:
        return XGrammarWalk(self._library.GrammarMatcher(self._compiled), self.bits)


class XGrammarWalk:
    def __init__(self, matcher: Any, bits: Any) -> None:
        self._matcher, self._bits = matcher, bits

    def mask(self) -> np.ndarray:
        if self._matcher.is_terminated():
            return np.zeros(self._bits.shape[1], np.uint32)
        self._matcher.fill_next_token_bitmask(self._bits)
        return self._bits[0].numpy().view(np.uint32)

    def take(self, token: int) -> bool:
        return not self._matcher.is_terminated() and self._matcher.accept_token(token)


# ---- measuring -------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    ready: list[float] = field(default_factory=list)  # seconds
    masks: list[float] = field(default_factory=list)
    takes: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    odd: list[str] = field(default_factory=list)


def accepts(walk: Walk, tokens: list[int], ends: tuple[int, ...], found: Found) -> str:
    """ "yes", "no", or "failed" midway."""
    try:
        for token in [*tokens, None]:
            began = thread_time()
            bits = walk.mask()
            found.masks.append(thread_time() - began)
            wanted = ends if token is None else (token,)
            if not any(int(bits[t // 32]) >> t % 32 & 1 for t in wanted):
                return "no"
            if token is not None:
                began = thread_time()
                taken = walk.take(token)
                found.takes.append(thread_time() - began)
                if not taken:
                    return "no"
        return "yes"
    except GuideFailed as e:
        return "failed" if "complex" in str(e) else "no"


def measure(engine: Engine, tokenizer: Tokenizer, ends: tuple[int, ...], cases: list[Case]) -> Found:
    found = Found()
    for case in cases:
        began = perf_counter()
        ready = engine.ready(written(case.schema))
        took = perf_counter() - began
        if isinstance(ready, str):
            found.refused[ready] += 1
            continue
        found.ready.append(took)
        for test in case.tests:
            texts = [written(test["data"]), *orders(test["data"], case.schema)]
            verdict = text = ""
            for text in dict.fromkeys(texts):
                ids = tokenizer.encode(text, add_special_tokens=False)
                verdict = accepts(engine.again(), ids, ends, found)
                if verdict != "no":
                    break
            kind = "valid" if test["valid"] else "invalid"
            moved = verdict == "yes" and text != texts[0]
            found.counts[f"{kind} {verdict}{' in order' if moved else ''}"] += 1
            if (verdict == "yes") != test["valid"]:
                found.odd.append(f"{case.name}: {kind}, {verdict}: {written(test['data'])}")
    return found


def report(name: str, found: Found, show: int) -> None:
    taken, refused = len(found.ready), sum(found.refused.values())
    counts = found.counts
    valid = sum(n for k, n in counts.items() if k.startswith("valid"))
    accepted = counts["valid yes"] + counts["valid yes in order"]
    print(f"\n## {name}\n")
    print(f"schemas: {taken} taken, {refused} refused ({refused / (taken + refused):.1%})")
    print("refused:", ", ".join(f"{k} {n}" for k, n in found.refused.most_common(15)))
    print(f"ready, ms: {percentiles(found.ready, 1e3)}")
    print(
        f"masks, us of CPU: mean {np.mean(found.masks) * 1e6:.0f}, {percentiles(found.masks, 1e6)} ({len(found.masks)})"
    )
    print(f"taking a token, us of CPU: mean {np.mean(found.takes) * 1e6:.0f}, {percentiles(found.takes, 1e6)}")
    print(f"valid instances: {valid}, accepted {accepted} ({accepted / max(valid, 1):.2%}), of these", end=" ")
    print(f"{counts['valid yes in order']} in the order of the schema; failed midway {counts['valid failed']}")
    print(f"invalid instances accepted: {counts['invalid yes'] + counts['invalid yes in order']}", end=" ")
    print(f"of {sum(n for k, n in counts.items() if k.startswith('invalid'))}")
    for line in found.odd[:show]:
        print("  ", line[:300])


def percentiles(values: list[float], scale: float) -> str:
    points = {"p50": 50, "p90": 90, "p99": 99, "p99.9": 99.9, "max": 100}
    return ", ".join(f"{name} {np.percentile(values, q) * scale:.3g}" for name, q in points.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=OWN, help="of schemas (those of the tests)")
    parser.add_argument("--tokenizer", type=Path, default=TINY, help="a folder with a tokenizer (the shipped model's)")
    parser.add_argument("--sample", type=int, help="schemas that are picked")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=["hibachi", "xgrammar"], default="hibachi")
    parser.add_argument("--limit", action="append", default=[], help="of the library: step_max_items=10000")
    parser.add_argument("--show", type=int, default=0, help="instances that are shown, of those with the wrong answer")
    args = parser.parse_args()
    tokenizer = Tokenizer.load(args.tokenizer)
    ids = range(tokenizer.vocab_size)
    special = frozenset(i for i in ids if tokenizer.is_silent(i))
    tokens = [tokenizer.token_bytes(i) for i in ids]
    ends = tuple(i for i in special if tokens[i] == tokenizer.special.get("eos_token", "").encode())
    vocabulary = Vocabulary(tokens, special, ends)
    cases = list(read_cases(args.folder))
    if args.sample is not None and args.sample < len(cases):
        cases = random.Random(args.seed).sample(cases, args.sample)
    limits = {name: int(value) for name, value in (each.split("=") for each in args.limit)}
    engine: Engine = Hibachi(vocabulary, **limits) if args.engine == "hibachi" else XGrammar(vocabulary)
    report(args.engine, measure(engine, tokenizer, ends, cases), args.show)


if __name__ == "__main__":
    sys.exit(main())
