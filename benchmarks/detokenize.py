"""Detokenising 256 streams, one token to each in turn: tokens a second on one core, in CPU time. Target: 500,000.

Expected before it was measured: 1.5 million with a table (a look-up and two calls in Python), and two thirds of that
with two stop strings. "general" decodes the last few ids with the library for every token, as for unusual decoders.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from time import process_time

import hibachi
from hibachi.llm.tokenizers import Detokenizer, Tokenizer
from hibachi.llm.tokenizers.pieces import AnyText

TINY = Path(hibachi.__file__).parent / "llm" / "data" / "tiny"
STREAMS, LENGTH = 256, 40
STOP = ("\n\nUser:", "</answer>")


def streams(tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of this repository's pages, cut into pieces; the pages again and again if they are too short."""
    pages = "\n".join(page.read_text() for page in sorted(Path(__file__).parents[1].glob("docs/*.md")))
    ids = tokenizer.encode(pages, add_special_tokens=False)
    ids *= -(-STREAMS * LENGTH // len(ids))
    return [ids[i * LENGTH : (i + 1) * LENGTH] for i in range(STREAMS)]


def measure(tokenizer: Tokenizer, ids: Sequence[Sequence[int]], stop: Sequence[str], table: bool, runs: int) -> float:
    """Tokens a second, the median of some runs. Checks that the pieces are the text."""
    seconds = []
    spoken = {i: "" for i in range(tokenizer.vocab_size) if not tokenizer.is_silent(i)}
    for _ in range(runs):
        detokenizers = [Detokenizer(tokenizer, stop) for _ in ids]
        for d in detokenizers if not table else ():
            d._text = AnyText(tokenizer.decode, spoken)
        texts = [[] for _ in ids]
        started = process_time()
        for step in zip(*ids, strict=True):
            for d, text, token in zip(detokenizers, texts, step, strict=True):
                text.append(d.push(token))
        seconds.append(process_time() - started)
        for d, text, own in zip(detokenizers, texts, ids, strict=True):
            assert "".join(text) + d.flush() == tokenizer.decode(own) or d.stopped
    return STREAMS * LENGTH / sorted(seconds)[runs // 2]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY, help="a folder with a tokenizer (the shipped model's)")
    parser.add_argument("--runs", type=int, default=9)
    args = parser.parse_args()
    tokenizer = Tokenizer.load(args.model)
    tokenizer.text_after(())  # makes the table
    ids = streams(tokenizer)
    print("| | no stop strings | two stop strings |\n|---|---|---|")
    for name, table in (("table", True), ("general", False)):
        plain, stopping = (measure(tokenizer, ids, stop, table, args.runs if table else 3) for stop in ((), STOP))
        print(f"| {name} | **{plain:,.0f}** tokens/s | {stopping:,.0f} tokens/s |")
