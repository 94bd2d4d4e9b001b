"""Train, export, score and sample the tiny Llama-architecture model that ships with hibachi.

Needs torch, numpy, tokenizers and safetensors, no accelerator. One novel is held out whole; a file
given with --text or --more is trained on whole. Train (with the defaults, about an hour of one core),
then write the model card:

    python examples/tiny_model/train.py --text NOVELS... --more TEXTS... --held-out NOVEL --work WORK --out OUT
    python examples/tiny_model/train.py --held-out NOVEL --work WORK --out OUT --card

The model is to write like the novels of --text. The texts of --more teach it English first: they have
most of every batch while the learning rate is constant and ever less of it while the rate falls
(--share, --last-share). A file that is named twice counts twice. texts.py unpacks such texts.

WORK keeps the tokenizer and, every two minutes, a checkpoint: the same command takes up an interrupted
training where the checkpoint stands, with the same batches and the same dropout that an uninterrupted
one would have had. --steps may still be changed while the rate is constant. OUT gets the model in the
Hugging Face layout when the training ends; --export writes it from the checkpoint at any time before.
--eval and --samples print what they find in OUT.
"""

import argparse
import collections
import functools
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from card import SETTINGS, load, samples, score, write_card
from model import CONFIG, END_OF_TEXT, Llama, bits_per_character, encode, overlap, read, train_tokenizer
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

WARMUP, REPORT_STEPS, CHECKPOINT_SECONDS = 100, 100, 120
CONTEXT, SHORT_CONTEXT, SHORT_PART = 512, 256, 0.7  # short (cheaper) windows for the first part of the steps
NOVELS_WEIGH = 3  # times that the tokenizer sees the novels of --text
PROBE_TOKENS = 64 * 512  # of the held-out novel, scored at every report


class Stream:
    """The ids of some texts, dealt out as windows of `length` inputs and the id after.

    Every pass cuts the ids, from a random offset, into windows and deals them out shuffled: the n-th
    window depends on the arguments only.
    """

    def __init__(self, ids, length, *seed):
        self.ids, self.length, self.seed = ids, length, seed
        self.windows = (len(ids) - length - 1) // length
        self.starts_of = functools.lru_cache(2)(self.starts)

    def starts(self, number):
        rng = np.random.default_rng((*self.seed, self.length, number))
        offset = rng.integers(self.length)
        return offset + self.length * rng.permutation(self.windows)

    def window(self, n):
        start = self.starts_of(n // self.windows)[n % self.windows]
        return self.ids[start : start + self.length + 1]


class Batches:
    """The inputs and targets of every step: rows of the novels of --text and rows of --more.

    The novels have the part `share` of the rows while the learning rate is constant; while it falls,
    their part rises linearly to `last_share`. The windows of the first part of the steps are short.
    """

    def __init__(self, novels, more, args, decay):
        self.streams = [
            {length: Stream(ids, length, args.seed, i) for length in (SHORT_CONTEXT, CONTEXT)}
            for i, ids in enumerate((novels, more))
            if len(ids)
        ]
        self.plan, dealt, due = [], collections.Counter(), 0.0
        for step in range(args.steps):
            length = CONTEXT if step >= args.steps * SHORT_PART else SHORT_CONTEXT
            rows = args.batch_tokens // length
            falling = max(0.0, 1 - (args.steps - step) / decay)
            due += rows * (args.share + (args.last_share - args.share) * falling) if len(more) else rows
            taken = min(rows, round(due))  # of the novels; what rounding leaves is due later
            due -= taken
            self.plan.append((length, (dealt[length, 0], taken), (dealt[length, 1], rows - taken)))
            dealt[length, 0] += taken
            dealt[length, 1] += rows - taken
        self.passes = [
            sum(dealt[length, i] * length for length in streams) / len(streams[CONTEXT].ids)
            for i, streams in enumerate(self.streams)
        ]

    def at(self, step):
        """The inputs and targets of a step, [rows, length] each."""
        length, *parts = self.plan[step]
        windows = [
            self.streams[i][length].window(n)
            for i, (first, rows) in enumerate(parts)
            for n in range(first, first + rows)
        ]
        windows = torch.from_numpy(np.stack(windows))
        return windows[:, :-1], windows[:, 1:]


def rate(step, steps, decay):
    """The learning rate's factor: warm-up, constant, then linear to zero over the last `decay` steps."""
    return min(1.0, (step + 1) / WARMUP, (steps - step) / decay)


def save_atomically(state, path):
    torch.save(state, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def train(args):
    """Train up to --steps, or for --minutes of this run; returns whether the training is complete."""
    args.work.mkdir(parents=True, exist_ok=True)
    texts, more = [read(path) for path in args.text], [read(path) for path in args.more]
    tokenizer_file, checkpoint = args.work / "tokenizer.json", args.work / "checkpoint.pt"
    if not tokenizer_file.exists():
        train_tokenizer(texts * NOVELS_WEIGH + more).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    decay = round(args.steps * args.decay)
    held_out = read(args.held_out)
    shared = [(path, overlap(read(path), held_out)) for path in dict.fromkeys(args.text + args.more)]
    novels, more_ids = encode(tokenizer, texts), encode(tokenizer, more)
    batches = Batches(novels, more_ids, args, decay)
    probe = encode(tokenizer, [held_out])[: PROBE_TOKENS + 1]
    probe_characters = len(tokenizer.decode(probe.tolist()))

    torch.manual_seed(args.seed)
    model = Llama(CONFIG)
    facts = {key: getattr(args, key) for key in SETTINGS} | {
        "parameters": sum(p.numel() for p in model.parameters()),
        "texts": [path.name for path in args.text],
        "characters": sum(map(len, texts)),
        "tokens": len(novels) - len(texts),
        "more": [(path.stem, len(text)) for path, text in zip(args.more, more, strict=True)],
        "more_tokens": len(more_ids) - len(more),
        "shared": {path.name: n for path, n in shared if n},
        "passes": batches.passes,
        "short": SHORT_CONTEXT,
        "short_part": SHORT_PART,
        "probe": PROBE_TOKENS,
    }  # for the model card
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    optimizers = {
        "muon": torch.optim.Muon(matrices, lr=args.lr, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw"),
        "adam": torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0),
    }
    step, wall, cpu, log, losses = 0, 0.0, 0.0, [], []
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for name, optimizer in optimizers.items():
            optimizer.load_state_dict(state[name])
        step, wall, cpu, log, losses = (state[key] for key in ("step", "wall", "cpu", "log", "losses"))
    print(f"{facts['parameters']} parameters, {facts['tokens']} training tokens, from step {step}", flush=True)

    def save():
        state = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
        state |= {"model": model.state_dict(), "step": step, "wall": wall, "cpu": cpu}
        state |= {"log": log, "losses": losses, "facts": facts}
        save_atomically(state, checkpoint)

    began = saved = time.monotonic()
    while step < args.steps and time.monotonic() - began < args.minutes * 60:
        wall_before, cpu_before = time.monotonic(), time.process_time()
        for optimizer in optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = args.lr * rate(step, args.steps, decay)
        x, y = batches.at(step)
        # While the rate is constant the text is new to the model: dropout comes when it begins to repeat.
        model.dropout = args.dropout if step >= args.steps - decay else 0.0
        torch.manual_seed(args.seed * 1_000_003 + step)  # the dropout of this step
        model.train()
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x)
        loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        step += 1
        if step % REPORT_STEPS == 0 or step == args.steps:
            with torch.autocast("cpu", torch.bfloat16):
                bits = bits_per_character(model, probe, probe_characters, x.shape[1], x.shape[1])
            log.append((step, sum(losses) / len(losses), bits))
            losses = []
            print(
                f"step {step}: training loss {log[-1][1]:.4f} nats per token, held-out probe {bits:.4f} bits"
                f" per character, {wall:.0f} s, CPU {cpu:.0f} s",
                flush=True,
            )
        wall += time.monotonic() - wall_before
        cpu += time.process_time() - cpu_before
        if time.monotonic() - saved > CHECKPOINT_SECONDS:
            save()
            saved = time.monotonic()
    save()
    return step == args.steps


def export(work, out):
    """Write the checkpoint of `work` to `out` in the Hugging Face layout, weights in fp16."""
    out.mkdir(parents=True, exist_ok=True)
    state = torch.load(work / "checkpoint.pt", weights_only=True)
    weights = {name: p.half().contiguous() for name, p in state["model"].items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
    }
    generation = {"bos_token_id": 0, "eos_token_id": 0, "do_sample": True, "temperature": 0.8, "top_p": 0.95}
    (out / "model.safetensors").chmod(0o644)
    (out / "tokenizer.json").write_bytes((work / "tokenizer.json").read_bytes())
    for name, value in (
        ("config", CONFIG),
        ("tokenizer_config", tokenizer),
        ("generation_config", generation),
    ):
        (out / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    print(f"{out}: step {state['step']}, {(out / 'model.safetensors').stat().st_size} bytes of weights")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", type=Path, metavar="FILE", help="the novels to train on")
    parser.add_argument(
        "--more", nargs="+", type=Path, metavar="FILE", default=[], help="other texts to train on first"
    )
    parser.add_argument("--held-out", type=Path, metavar="FILE", help="the novel to score on")
    parser.add_argument("--work", type=Path, metavar="DIR", help="tokenizer and checkpoint")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="the exported model")
    parser.add_argument("--export", action="store_true", help="only export the checkpoint")
    parser.add_argument("--eval", action="store_true", help="only score the exported model")
    parser.add_argument("--samples", action="store_true", help="only print samples of the exported model")
    parser.add_argument("--card", action="store_true", help="only write the model card, score and samples in it")
    parser.add_argument("--note", default="", help="a sentence for the card, on the training")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop this run after so long")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.6, help="part of the steps with a falling rate")
    parser.add_argument("--share", type=float, default=0.25, help="part of --text beside --more at first")
    parser.add_argument("--last-share", type=float, default=0.95, help="part of --text at the end")
    parser.add_argument("--dropout", type=float, default=0.1, help="while the rate falls")
    parser.add_argument("--weight-decay", type=float, default=0.5)
    args = parser.parse_args()
    training = not (args.export or args.eval or args.samples or args.card)
    needed = ["text"] * training + ["work"] * (training or args.export or args.card)
    needed += ["held_out"] * (training or args.eval or args.card)
    for name in needed:
        if getattr(args, name) is None:
            parser.error(f"--{name.replace('_', '-')} is needed")
    if training and args.held_out.resolve() in [path.resolve() for path in args.text + args.more]:
        parser.error("the held-out novel is among the training texts")
    torch.set_num_threads(args.threads)
    if (training and train(args)) or args.export:
        export(args.work, args.out)
    if args.eval:
        bits, tokens, characters = score(*load(args.out), args.held_out)
        print(f"{bits:.4f} bits per character ({characters} characters, {tokens} tokens)")
    if args.samples:
        for seed, prompt, text in samples(*load(args.out)):
            print(f"--- seed {seed}\n[{prompt}]{text}\n")
    if args.card:
        write_card(args.work, args.out, args.held_out, args.note)


if __name__ == "__main__":
    main()
