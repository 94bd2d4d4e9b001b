"""pocket-tts: speech as frames of real values, drawn by a flow from a transformer: the rung between levels 1 and 2.

In the checkout, in an environment of its own:

    pip install ".[torch,serve]" "pocket-tts>=4.0.1"
    python examples/gallery/pocket_speech.py
    hibachi serve examples/gallery/pocket_speech.py:Speech
    python examples/gallery/pocket_speech.py --show  # bodies of requests for /v1/generate

A request brings its text as ids, and as `voice` the keys and values that the library keeps of a voice; `encode` adds
those of the text. The prompt is one frame, which stands for the beginning. The last value of a frame is how many are
left: from where the network hears the end, `after` more, and the last of them ends the stream. The library has one
length for all rows of a call; `Kept` is its cache with places for each row. Its own loop is given the normal numbers
that the engine draws from.
"""

import logging
import tempfile
from copy import deepcopy
from functools import partial
from pathlib import Path
from queue import Queue
from threading import Event
from unittest.mock import patch

import torch
import yaml
from pocket_tts import TTSModel
from pocket_tts.models.flow_lm import pointwise_decode
from pocket_tts.modules.rope import apply_rope
from pocket_tts.utils.config import CONFIGS_DIR
from side_by_side import WORK, arguments, compare, normals
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import hibachi

LATENT, LONGEST, ENDLESS = 32, 256, 1e6  # ENDLESS: frames left where no end was heard yet
BEGIN = [[0.0] * LATENT + [ENDLESS]]
SIZES = {"tiny": 2, "real": 8}  # layers; all else is as the library's smallest model has it


class Speech:
    backend, vocab_size, draws, max_model_len, past = "torch", None, LATENT, LONGEST, hibachi.OwnCache()
    example_prompts, stop_rule = [BEGIN], hibachi.StopRule(where=lambda frames: frames[:, -1] <= 1)

    def __init__(self, tts=None):
        self.tts = placed(deepcopy(tts or network("tiny")))
        self.lm, voice = self.tts.flow_lm, hibachi.Input((None, *shape_of_voice(self.tts.flow_lm)))
        self.inputs = {"voice": voice, "text": hibachi.Input((None,), "int64"), "after": hibachi.Input(())}

    def encode(self, voice, text):
        place, voice = torch.arange(voice.shape[1] + text.shape[1])[None], [each.unbind(2) for each in voice.unbind(2)]
        _, kept = seen(self.lm, self.lm.conditioner(text), place[:, -text.shape[1] :], place, [voice])
        return kept, torch.ones_like(place)

    def step(self, tokens, lengths, past, encoded, after, normal):
        (kept, real), new = encoded, tokens.shape[1]
        place, keys = places(real, lengths, new + (past[0][0].shape[1] if past else 0))
        x = torch.where((lengths[:, None] - new + torch.arange(new) == 0)[..., None], self.lm.bos_emb, tokens[..., :-1])
        x, now = seen(self.lm, self.lm.input_linear(x), place[:, -new:], keys, [kept, past] if past else [kept])
        heard = (self.lm.out_eos(x)[:, 0] > self.tts.eos_threshold) & (lengths > self.tts._MIN_FRAMES_BEFORE_EOS)
        left = torch.minimum(tokens[:, -1, -1] - 1, torch.where(heard, after, ENDLESS))
        drawn = pointwise_decode(partial(self.lm.flow_net, x), normal * self.tts.temp**0.5)
        return torch.cat([drawn, left[:, None]], dim=1), [[each[:, real.shape[1] :] for each in pair] for pair in now]


class Kept:
    """The cache of a layer, as the library's attention asks for it."""

    def rope_offset(self, state, *_):
        return state["place"]

    def append_and_get(self, keys, values, state):
        state["now"] = [torch.cat(parts, dim=1) for parts in zip(*state["before"], (keys, values), strict=True)]
        return *(each.transpose(1, 2) for each in state["now"]), state["keys"], state["place"][:, 0]


def places(real, lengths, width):
    """(rows, width) and (rows, known + width): of frames in their rows, behind what is known, and of all; below 0 for
    padding.
    """
    place = torch.arange(width) - (width - lengths[:, None])
    place = torch.where(place < 0, -1, place + real.sum(1, keepdim=True))
    return place, torch.cat([real.cumsum(1) * real - 1, place], dim=1)


def seen(lm, x, place, keys, before):
    """What the network makes of the last of new positions x (rows, new, width), and the keys and values of all, for
    each layer. place, keys: places in their rows of those that are new, and of all, below 0 for padding. before: lists
    of keys and values of each layer, side by side.
    """
    names = [layer.self_attn._module_absolute_name for layer in lm.transformer.layers]
    given = zip(*before, strict=True)
    states = {name: {"place": place, "keys": keys, "before": each} for name, each in zip(names, given, strict=True)}
    return lm.backbone(x, x[:, :0], x, states)[:, -1], [state["now"] for state in states.values()]


def placed(tts):
    """The model with a cache that has places for each row. It would count one number for all of them."""
    for layer in tts.flow_lm.transformer.layers:
        layer.self_attn._cache_backend = Kept()

    def rotate(q, k, offset):  # (rows, new): places
        at = offset.flatten() - torch.arange(offset.numel())  # the library adds the numbers again
        return [each.reshape(q.shape[:2] + each.shape[2:]) for each in apply_rope(flat(q), flat(k), at)]

    tts.flow_lm.transformer.rope.forward = rotate
    return tts


def flat(rows):  # (rows, new, heads, width) to (1, rows * new, heads, width)
    return rows.flatten(0, 1)[None]


def shape_of_voice(lm):
    attention = lm.transformer.layers[0].self_attn
    return len(lm.transformer.layers), 2, attention.num_kv_heads, attention.dim_per_head


def network(size):
    """The library's english_2m with random weights, and words that are numbers."""
    torch.manual_seed(0)
    config = yaml.safe_load((CONFIGS_DIR / "english_2m_2026-10.yaml").read_text())
    config |= {"weights_path": None, "weights_path_without_voice_cloning": None, "default_eos_threshold": 0.35}
    config["flow_lm"]["transformer"]["num_layers"] = SIZES[size]
    words = {str(i): i for i in range(config["flow_lm"]["lookup_table"]["n_bins"])}
    with tempfile.TemporaryDirectory() as folder:
        file, tokenizer = Path(folder, "config.yaml"), Path(folder, "tokenizer.json")
        Tokenizer(WordLevel(words, "0")).save(str(tokenizer))
        config["flow_lm"]["lookup_table"] |= {"tokenizer": "tokenizers", "tokenizer_path": str(tokenizer)}
        file.write_text(yaml.dump(config))
        tts = TTSModel.load_model(config=file)
    torch.nn.init.normal_(tts.flow_lm.speaker_proj_weight)
    return tts.eval()


def main():
    asked = arguments(__doc__)
    logging.disable()
    (longest, new), tts = WORK[asked.size], network(asked.size)
    random, numbers = torch.Generator().manual_seed(0), normals(LATENT, new)
    voices = [tts.get_state_for_audio_prompt(torch.randn(1, 24000, generator=random)) for _ in range(16)]
    texts = [torch.randint(4000, (1, n), generator=random) for n in range(longest - 15, longest + 1)]

    speech, heard = Speech(tts), []  # logits of the end
    tts.flow_lm.out_eos.register_forward_hook(lambda module, given, out: heard.append(out.item()))

    @torch.inference_mode()
    def own(prompt, voice, text, after, seed):
        state, frames, given = deepcopy(voices[seed]), Queue(), iter(numbers[seed])
        tts._expand_kv_cache(state, sequence_length=voice.shape[0] + text.shape[0] + new)
        tts._run_flow_lm_and_increment_step(model_state=state, text_tokens=texts[seed])
        heard.clear()
        with patch.object(torch.nn.init, "normal_", lambda noise, mean, std: noise.copy_(std * next(given))):
            tts._autoregressive_generation(state, new, int(after), frames, Event())
        found = torch.cat([*iter(frames.get, None)], dim=1)[0]
        end = next(
            (i for i, logit in enumerate(heard) if i >= tts._MIN_FRAMES_BEFORE_EOS and logit > tts.eos_threshold), new
        )
        left = [after - i + end if i >= end else ENDLESS - 1 - i for i in range(len(found))]
        return torch.cat([found, torch.tensor(left)[:, None]], dim=1).tolist()

    inputs = [
        {
            "voice": torch.stack([each["cache"][:, 0] for each in voice.values()]).permute(2, 0, 1, 3, 4).numpy(),
            "text": text[0].numpy(),
            "after": 1.0 + i % 3,
        }
        for i, (voice, text) in enumerate(zip(voices, texts, strict=True))
    ]
    compare(speech, own, [BEGIN] * 16, new, asked, inputs, draws=True)


if __name__ == "__main__":
    main()
