"""The text, the model and the score of the tiny model; train.py and card.py are built on it."""

import math
import re
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

END_OF_TEXT = "<|endoftext|>"  # id 0; stands before every text, and is both bos and eos

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float16",
}


# ---------------------------------------------------------------------------------------------- text
def clean(text):
    """Unwrap a hard-wrapped text: one line a paragraph, one empty line between paragraphs.

    A line indented by four blanks or more (verse, signatures) stays a line of its own, runs of blanks
    become one blank, and the underscores that stand for italics go.
    """
    text = text.replace("\r\n", "\n").replace("_", "")
    paragraphs = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        joined = ""
        for line in block.split("\n"):
            joined += ("\n" if line.startswith("    ") else " ") + line.strip()
        joined = re.sub(r" +", " ", joined).strip()
        if joined:
            paragraphs.append(joined)
    return "\n\n".join(paragraphs) + "\n"


def read(path):
    return clean(Path(path).read_text(encoding="utf-8"))


def train_tokenizer(texts):
    """A byte-level BPE in GPT-2's manner: any text can be encoded, no unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer, texts):
    """One stream of ids: every text preceded by the end-of-text token."""
    return np.array([i for text in texts for i in (0, *tokenizer.encode(text).ids)], np.int64)


def overlap(text, held_out, window=60):
    """How many windows of so many letters (and blanks between words) stand in a text and in the held-out one."""
    text, held_out = (re.sub("[^a-z]+", " ", t.lower()) for t in (text, held_out))
    known = {held_out[i : i + window] for i in range(len(held_out) - window)}
    return sum(text[i : i + window] in known for i in range(len(text) - window))


# --------------------------------------------------------------------------------------------- model
def rotate(x, cos, sin):
    """Rotary position embedding, the two halves of a head paired (as in Hugging Face's Llama)."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def attend(q, k, v, chunk=128):
    """Causal attention, a chunk of queries at a time against the keys up to its end.

    On a CPU this takes half the time of PyTorch's own attention, forwards and backwards.
    """
    length, chunks = q.shape[-2], []
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        future = torch.full((end - start, end), -torch.inf, dtype=q.dtype).triu(start + 1)
        weights = (q[..., start:end, :] @ k[..., :end, :].transpose(-1, -2) + future).softmax(-1)
        chunks.append(weights @ v[..., :end, :])
    return torch.cat(chunks, -2)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads, self.dim = (
            c["num_attention_heads"],
            c["num_key_value_heads"],
            c["head_dim"],
        )
        self.q_proj = nn.Linear(c["hidden_size"], self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(c["hidden_size"], self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(c["hidden_size"], self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, c["hidden_size"], bias=False)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.kv_heads, self.dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.dim).transpose(1, 2)
        q, k = rotate(q, cos, sin).mul(self.dim**-0.5).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, dim=1) for y in (k, v))
        y = attend(q, k, v)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm = nn.RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])
        self.post_attention_layernorm = nn.RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])

    def forward(self, x, cos, sin, dropout):
        x = x + F.dropout(self.self_attn(self.input_layernorm(x), cos, sin), dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), dropout, self.training)


class Llama(nn.Module):
    """Llama with tied embeddings; the parameters bear Hugging Face's names."""

    def __init__(self, c, dropout=0.0):
        super().__init__()
        self.dropout = dropout
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.model.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.model.norm = nn.RMSNorm(c["hidden_size"], eps=c["rms_norm_eps"])
        frequencies = c["rope_theta"] ** (-torch.arange(0, c["head_dim"], 2) / c["head_dim"])
        angles = torch.outer(torch.arange(c["max_position_embeddings"]), torch.cat((frequencies, frequencies)))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:  # small where a matrix writes to the residual stream
                gain = 0.1 if "o_proj" in name or "down_proj" in name else 0.5
                std = 0.02 if "embed" in name else gain * parameter.shape[1] ** -0.5
                nn.init.normal_(parameter, std=std)

    def forward(self, ids):
        """The logits [batch, length, vocabulary] of ids [batch, length]."""
        x = F.dropout(self.model.embed_tokens(ids), self.dropout, self.training)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.model.layers:
            x = layer(x, cos, sin, self.dropout)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


# --------------------------------------------------------------------------------------------- score
@torch.no_grad()
def bits_per_character(model, ids, characters, context, stride, rows=16):
    """Score every id but the first exactly once and divide the bits by the number of characters.

    Windows of `context` ids start every `stride` ids. The first scores all its targets, a later one
    only the last `stride`, so that each of those is predicted from more than `context - stride` ids.
    """
    model.eval()
    ids, targets = torch.from_numpy(ids), len(ids) - 1
    starts = range(0, max(1, targets - context + stride), stride)
    nats, scored = 0.0, 0
    for first in range(0, len(starts), rows):
        group = starts[first : first + rows]
        x = torch.zeros(len(group), context, dtype=torch.long)
        y = torch.full((len(group), context), -1)
        for row, start in enumerate(group):
            length = min(context, targets - start)
            fresh = 0 if start == 0 else context - stride
            x[row, :length] = ids[start : start + length]
            y[row, fresh:length] = ids[start + fresh + 1 : start + length + 1]
        logits = model(x).float().flatten(0, 1)
        nats += F.cross_entropy(logits, y.flatten(), ignore_index=-1, reduction="sum").item()
        scored += int((y >= 0).sum())
    assert scored == targets, (scored, targets)
    return nats / math.log(2) / characters
