"""Score and sample an exported tiny model and write its model card; train.py calls it."""

import collections
import json
import textwrap

import torch
from model import Llama, bits_per_character, encode, read
from safetensors.torch import load_file
from texts import PARTS, SOURCES, works
from tokenizers import Tokenizer

CONTEXT, STRIDE = 512, 128  # of the score
# The settings of a training, as the card repeats them.
SETTINGS = ("steps", "batch_tokens", "lr", "decay", "share", "last_share", "dropout", "weight_decay", "threads", "seed")
TEMPERATURE, TOP_P, SAMPLE_TOKENS = 0.8, 0.95, 120
PROMPTS = (  # written down before the model was trained; the seed of a sample is its prompt's index
    "It was a fine morning in October, and",
    "She could not help thinking that",
    '"My dear sister,"',
    "The carriage stopped at the door, and",
    "Mr. Harcourt was a man of",
    "When they were alone together,",
    '"I have never in my life',
    "The letter was as follows:",
    "No one could have supposed",
    "After dinner the conversation turned",
)


def load(folder):
    """The tokenizer and the model (fp16 weights, computed with in fp32) of a folder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = Llama(config)
    model.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
    return Tokenizer.from_file(str(folder / "tokenizer.json")), model.eval()


def score(tokenizer, model, held_out):
    """Bits per character of a whole file, the number of its tokens and that of its characters."""
    text = read(held_out)
    ids = encode(tokenizer, [text])
    return bits_per_character(model, ids, len(text), CONTEXT, STRIDE), len(ids) - 1, len(text)


@torch.no_grad()
def generate(tokenizer, model, prompt, seed):
    """Up to SAMPLE_TOKENS tokens after a prompt, drawn from the nucleus TOP_P at TEMPERATURE."""
    generator = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode(prompt).ids
    start = len(ids)
    while len(ids) - start < SAMPLE_TOKENS:
        probabilities = (model(torch.tensor([ids]))[0, -1].float() / TEMPERATURE).softmax(-1)
        ordered, order = probabilities.sort(descending=True, stable=True)
        ordered[ordered.cumsum(-1) - ordered >= TOP_P] = 0.0
        token = order[torch.multinomial(ordered, 1, generator=generator)].item()
        if token == 0:  # end of text
            break
        ids.append(token)
    return tokenizer.decode(ids)[len(prompt) :]


def samples(tokenizer, model):
    for seed, prompt in enumerate(PROMPTS):
        yield seed, prompt, generate(tokenizer, model, prompt, seed)


CARD = """\
---
language: en
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---

# hibachi tiny

A Llama-architecture language model of {parameters} parameters that writes English in the manner of Jane
Austen. It ships with hibachi so that examples, tests and benchmarks have a real model to run without a
download. It was trained by `examples/tiny_model/train.py` of the hibachi repository and uses no weights,
text or output of any other model.

| | |
|---|---|
| Architecture | Llama: {num_hidden_layers} layers, width {hidden_size}, feed-forward {intermediate_size}, \
{num_attention_heads} heads of {head_dim} over {num_key_value_heads} key-value heads, tied embeddings |
| Context | {max_position_embeddings} tokens |
| Tokenizer | byte-level BPE, {vocab_size} entries, trained on the training text |
| Weights | fp16, {megabytes:.2f} MB |
| Licence | model: Apache-2.0; text: public domain |
| Held-out score | **{bits:.4f} bits per character** on `{held_out}` |

## Data

Novels by Jane Austen (1775-1817), in the public domain, as Debian's package `r-cran-janeaustenr` has them:
{texts}; {characters} characters, {tokens} tokens. Held out whole, never trained on: `{held_out}`. No novel
is split between the two.

Beside them, {works} other texts in the public domain, {more_characters} characters: English prose and old
translations (the year is the translation's), from the packages named (`texts.csv` and `texts.py` beside the training
script unpack them). Those that seemed nearest to Austen count twice, which makes {more_tokens} tokens.

| Author | Text | Year | Characters | Counted | Package |
|---|---|---:|---:|---:|---|
{more}

{shared}

The text is cleaned first (`clean` in `model.py`): the hard-wrapped lines of a paragraph are joined, runs of
blanks become one blank, underscores (italics) go, paragraphs are separated by an empty line.

## Training

{steps} steps of {batch_tokens} tokens on {threads} thread(s) of a CPU: {novel_passes:.1f} passes over the novels,
{more_passes:.1f} over the other texts, {cpu:.0f} minutes of CPU time, {wall:.0f} minutes by the clock (other work
shared the machine). Windows of {short} tokens for the first {short_part:.0%} of the steps, of {context} tokens after.
Muon for the matrices, weight decay {weight_decay}; AdamW for the embedding and the norms; learning rate {lr},
constant at first and falling linearly to zero over the last {decay:.0%} of the steps; dropout {dropout} while it
falls; bf16 autocast; seed {seed}. The novels have {share:.0%} of every batch while the rate is constant; their part
rises linearly to {last_share:.0%} while it falls.{note}

| Step | Training loss (nats per token, with dropout) | Held-out probe (bits per character) |
|---:|---:|---:|
{log}

The probe is the first {probe} tokens of the held-out novel in windows that do not overlap, so that most of
its tokens see less context than in the score below. Settings of earlier, shorter runs on the novels alone were
picked after looking at it; nothing else was fitted to the held-out novel.

## Score

{bits:.4f} bits per character on the whole of `{held_out}`: the shipped fp16 weights, computed with in fp32,
over {held_out_tokens} tokens of {held_out_characters} characters. Windows of {score_context} tokens start
every {score_stride} tokens; every token is scored once, from at least {least} tokens before it (the first
{score_context}: from all there are, an end-of-text token first). Bits per character are the sum of the
negative log-probabilities in nats, divided by ln 2 and by the number of characters of the cleaned text.
The cleaned text is easier than the hard-wrapped file, in which the line breaks would have to be guessed.

## Samples

Ten samples, none left out: the prompts were written down before this model was trained, the seed is the
number, temperature {temperature}, nucleus {top_p}, at most {sample_tokens} tokens. The prompt is in bold.

{samples}

## Limits

It knows five novels by one author and a shelf of other old books, nothing else. Many of its sentences are
grammatical, not all, and they seldom make sense together. It follows no instructions, states no facts, repeats the
views of its period, and can reproduce phrases of its training text. Any text can be encoded, but other than English
prose of the kind it fares badly. It hardly ever ends a text of its own accord, having seen the end of so few: limit
the number of tokens, or stop at an empty line. Positions from {context} on were never trained.

## Making it again

With the novels in the current folder and the other texts unpacked to `TEXTS`:

{command}
    python examples/tiny_model/train.py --held-out {held_out} --work WORK --out OUT --card

Another kind of CPU or version of torch rounds differently, and the score moves a little.
"""


def write_card(work, out, held_out, note=""):
    """Score and sample the model of `out` and write its README.md, with the facts of the checkpoint."""
    tokenizer, model = load(out)
    bits, tokens, characters = score(tokenizer, model, held_out)
    state = torch.load(work / "checkpoint.pt", weights_only=True)
    facts, config = state["facts"], json.loads((out / "config.json").read_text(encoding="utf-8"))
    counted = collections.Counter(name for name, _ in facts["more"])
    known = {work["file"]: work for work in works()}
    lengths = dict(facts["more"])
    numbers = {
        "parameters": f"{facts['parameters']:,}",
        "megabytes": (out / "model.safetensors").stat().st_size / 1e6,
        "bits": bits,
        "held_out": held_out.name,
        "note": f" {note}" if note else "",
        "held_out_tokens": f"{tokens:,}",
        "held_out_characters": f"{characters:,}",
        "texts": ", ".join(f"`{name}`" for name in facts["texts"]),
        "works": len(counted),
        "more": "\n".join(row(known.get(name), name, lengths[name], n) for name, n in counted.items()),
        "more_characters": f"{sum(lengths.values()):,}",
        "more_tokens": f"{facts['more_tokens']:,}",
        "shared": shared(facts["shared"]),
        "command": command(facts, held_out.name),
        "characters": f"{facts['characters']:,}",
        "tokens": f"{facts['tokens']:,}",
        "novel_passes": facts["passes"][0],
        "more_passes": facts["passes"][1],
        "wall": state["wall"] / 60,
        "cpu": state["cpu"] / 60,
        "log": "\n".join(f"| {step} | {loss:.3f} | {probe:.3f} |" for step, loss, probe in thin(state["log"])),
        "context": config["max_position_embeddings"],
        "score_context": CONTEXT,
        "score_stride": STRIDE,
        "least": CONTEXT - STRIDE + 1,
        "temperature": TEMPERATURE,
        "top_p": TOP_P,
        "sample_tokens": SAMPLE_TOKENS,
        "samples": "\n\n".join(quote(*sample) for sample in samples(tokenizer, model)),
    }
    (out / "README.md").write_text(CARD.format(**(config | facts | numbers)), encoding="utf-8")
    print(f"{bits:.4f} bits per character; wrote {out / 'README.md'}")


def row(work, name, characters, times):
    """A row of the table of the other texts."""
    if work is None:
        return f"| | `{name}` | | {characters:,} | {times} | |"
    package, part = SOURCES[work["source"]][0], PARTS.get(work["source"])
    title = work["title"] + (f" ({part})" if part and "federalist" not in name and "chekhov" not in name else "")
    return f"| {work['author']} | {title} | {work['year']} | {characters:,} | {times} | `{package}` |"


def shared(windows):
    """A sentence on what the training texts have in common with the held-out novel."""
    some = ", ".join(f"`{name}` ({n} windows)" for name, n in windows.items())
    return "Windows of 60 letters, one at every letter, that stand in the held-out novel too: " + (
        f"none, but for {some}." if some else "none."
    )


def command(facts, held_out):
    """The command that trains the model, over as many lines as it needs."""
    options = {
        "text": " ".join(facts["texts"]),
        "more": " ".join(f"TEXTS/{name}.txt" for name, _ in facts["more"]),
        "held-out": f"{held_out} --work WORK --out OUT",
    } | {key.replace("_", "-"): facts[key] for key in SETTINGS}
    words = " ".join(f"--{key} {value}" for key, value in options.items())
    lines = textwrap.wrap(words, 100, break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(["    python examples/tiny_model/train.py", *(f"        {line}" for line in lines)])


def thin(log):
    """Every third report, and the last."""
    return [entry for i, entry in enumerate(log) if i % 3 == 2 or i == len(log) - 1]


def quote(seed, prompt, text):
    """A sample as a Markdown quotation under its seed."""
    lines = f"**{prompt}**{text.rstrip()}".split("\n")
    return f"Seed {seed}:\n\n" + "\n".join(f"> {line}".rstrip() for line in lines)
