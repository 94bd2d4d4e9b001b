"""Train the draft model that ships beside the tiny one: a tenth of its size, taught by it.

Needs torch, numpy, tokenizers, safetensors and hibachi, no accelerator; about a quarter of an hour of one core:

    python examples/tiny_model/train_draft.py --text NOVELS... --work WORK --out OUT

NOVELS are those that the tiny model was trained on. It goes on with pieces of them, greedily, at temperature 0.7 and
at 1. The draft model learns, on these texts and on the novels, what the tiny model makes of each next token: not the
text, but the 32 most likely tokens and their probabilities. WORK keeps both, so that a second training begins at once.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from card import load
from model import CONFIG, Llama, encode, read
from safetensors.torch import save_file
from torch import nn

import hibachi
from hibachi.llm.model.files import TINY

WINDOW, PROMPT, TOP = 256, 64, 32  # tokens of a piece of text; of these, given when one is written; tokens learned
SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def written(ids, count, seed):
    """[count, WINDOW + 1] ids: pieces of the novels, and how the tiny model goes on from there."""
    random = np.random.default_rng(seed)
    starts = random.integers(0, len(ids) - PROMPT, count)
    prompts = [ids[s : s + PROMPT].tolist() for s in starts]
    params = [
        hibachi.SamplingParams(
            temperature=(0.0, 0.7, 1.0)[i % 3], seed=i, max_tokens=WINDOW + 1 - PROMPT, ignore_eos=True
        )
        for i in range(count)
    ]
    with hibachi.LLM("tiny", backend="numpy", max_num_seqs=64) as llm:
        answers = llm.generate(prompts, params)
    return np.array([p + list(a.token_ids) for p, a in zip(prompts, answers, strict=True)])


@torch.no_grad()
def taught(teacher, windows, rows=16):
    """What the teacher makes of each next token: ids int16 and probabilities float16, [windows, WINDOW, TOP]."""
    ids, probabilities = [], []
    for at in range(0, len(windows), rows):
        logits = teacher(torch.from_numpy(windows[at : at + rows, :-1]))
        most, which = logits.softmax(-1).topk(TOP)
        ids.append(which.to(torch.int16))
        probabilities.append(most.half())
    return torch.cat(ids), torch.cat(probabilities)


def lessons(args):
    """The windows [n, WINDOW + 1], and what the teacher makes of them; kept in --work."""
    file = args.work / "lessons.pt"
    if file.exists():
        return torch.load(file, weights_only=True)
    args.work.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    tokenizer, teacher = load(TINY)
    ids = encode(tokenizer, [read(path) for path in args.text])
    novels = ids[: (len(ids) - 1) // WINDOW * WINDOW + 1]
    novels = np.stack([novels[s : s + WINDOW + 1] for s in range(0, len(novels) - 1, WINDOW)])
    own = written(ids, args.written, args.seed)
    print(f"{len(own)} pieces written in {time.monotonic() - began:.0f} s", flush=True)
    windows = np.concatenate([novels, own])
    found = (torch.from_numpy(windows), *taught(teacher, windows))
    torch.save(found, file)
    print(f"{len(windows)} pieces of {WINDOW} tokens taught after {time.monotonic() - began:.0f} s", flush=True)
    return found


def train(args):
    windows, ids, probabilities = lessons(args)
    config = CONFIG | SHAPE
    torch.manual_seed(args.seed)
    model = Llama(config)
    parameters = sum(p.numel() for p in model.parameters())
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    rows, began, losses = args.batch_tokens // WINDOW, time.monotonic(), []
    order, pass_ = np.zeros(0, np.int64), 0
    print(f"{parameters} parameters, {len(windows) * WINDOW} tokens", flush=True)
    for step in range(args.steps):
        if len(order) < rows:
            order = np.concatenate([order, np.random.default_rng((args.seed, pass_)).permutation(len(windows))])
            pass_ += 1
        at, order = torch.from_numpy(order[:rows]), order[rows:]
        lr = args.lr * min(1.0, (step + 1) / 100, (args.steps - step) / (0.7 * args.steps))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        model.train()
        logits = model(windows[at, :-1])
        p = probabilities[at].float()
        loss = -(p * F.log_softmax(logits, -1).gather(-1, ids[at].long())).sum(-1).mean() / p.sum(-1).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % 100 == 0 or step + 1 == args.steps:
            print(f"step {step + 1}: {np.mean(losses):.4f} nats, {time.monotonic() - began:.0f} s", flush=True)
            losses = []
            export(model, config, args.out)
    assert math.isfinite(loss.item())


def export(model, config, out):
    """Write the model in the Hugging Face layout, weights in fp16, with the tiny model's tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: p.detach().half().contiguous() for name, p in model.named_parameters()},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    (out / "model.safetensors").chmod(0o644)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in COPIED:
        (out / name).write_bytes((TINY / name).read_bytes())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", type=Path, metavar="FILE", help="the novels", required=True)
    parser.add_argument("--work", type=Path, metavar="DIR", required=True)
    parser.add_argument("--out", type=Path, metavar="DIR", required=True)
    parser.add_argument("--written", type=int, default=1500, help="pieces that the tiny model writes")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train(args)


if __name__ == "__main__":
    main()
