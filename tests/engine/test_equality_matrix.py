"""Who shares your batch never changes your bits: every bit of every request equals its solo run.

The conditions of a run: who else is there, how prompts are cut, whether prefixes are shared, whether requests are
preempted, in which order and rows they run. Each run holds requests of four kinds: greedy, sampled with a seed, greedy
with log-probabilities, of which all digits are compared, and guided by a grammar. By default every pair of a library,
a model and conditions occurs in some run; the full product is slow.
"""

import itertools
from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
import transformers

from hibachi import AutoregressiveBatchInference, SamplingParams, load_model
from hibachi.backend.numpy_backend import NumpyBackend
from hibachi.engine import build
from hibachi.engine.recording.recorder import RecordedScheduler
from hibachi.engine.speculation.drafting import Direct, Drafting
from hibachi.llm.model.files import TINY
from hibachi_jax import JaxBackend
from hibachi_torch import TorchBackend

from ..guide.toyguides import rule, toy_guides

LIBRARIES = {
    "numpy": (NumpyBackend, "float32"),
    "numpy-plain": (lambda: NumpyBackend(native=False), "float32"),
    "torch": (TorchBackend, "float32"),
    "torch-bf16": (TorchBackend, "bfloat16"),
    "torch-plain": (lambda: TorchBackend("cpu", native=False), "float32"),
    "torch-plain-bf16": (lambda: TorchBackend("cpu", native=False), "bfloat16"),
    "torch-int8": (lambda: TorchBackend("cpu").quantized("int8"), "bfloat16"),
    "jax": (JaxBackend, "float32"),
    "jax-plain": (lambda: JaxBackend(native=False), "float32"),
}
SMALL = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
MODELS = {  # what each brings: the shipped Llama; windows and soft caps; experts; a recurrent state
    "shipped": None,
    "gemma2": ("Gemma2", SMALL | dict(head_dim=16, query_pre_attn_scalar=24, sliding_window=6)),
    "mixtral": ("Mixtral", SMALL | dict(num_experts_per_tok=2, num_local_experts=5)),
    "mamba": ("Mamba", dict(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=8)),
}
CONDITIONS = {
    "company": ("solo", "batch", "staggered"),
    "chunk": (1, 7, 24, None),
    "cache": (False, True),
    "memory": ("ample", "preempted"),
    "order": ("as it is", "shuffled"),
    "proposals": ("none", "some"),
}
NEW, CHECKED, COMPANY = 10, 6, 32


def all_pairs(factors):
    """Few combinations such that each pair of values of two factors is in one of them; chosen greedily."""
    bits, everything = {}, []  # pairs as bits of a number, which are counted fast
    for values in itertools.product(*factors.values()):
        choice = dict(zip(factors, values, strict=True))
        pairs = (1 << bits.setdefault(pair, len(bits)) for pair in itertools.combinations(choice.items(), 2))
        everything.append((sum(pairs), choice))
    wanted = (1 << len(bits)) - 1
    while wanted:
        covers, best = max(everything, key=lambda each: (each[0] & wanted).bit_count())
        wanted &= ~covers
        yield best


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Models with random weights, in Hugging Face's layout."""
    made = {"shipped": TINY}
    for name, given in MODELS.items():
        if given is not None:
            torch.manual_seed(0)
            kind, settings = given
            config = getattr(transformers, f"{kind}Config")(**settings)
            model = getattr(transformers, f"{kind}ForCausalLM")(config)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(3)  # so that tokens depend on what was before
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
    return made


@pytest.fixture(scope="session")
def models(folders):
    """(library, model) -> the model, and what its checked requests answer alone: the oracle."""

    @cache
    def get(library, name):
        make, dtype = LIBRARIES[library]
        model = load_model(folders[name], make().invariant(), dtype=dtype, max_model_len=128)
        return model, run(model, **ALONE)[0]

    return get


def prompts(model):
    """CHECKED of different lengths that begin alike, and others."""
    rng = np.random.default_rng(0)
    common = rng.integers(3, 97, 40)
    own = [np.concatenate([common, rng.integers(3, 97, n)]) for n in (1, 3, 9, 17, 24, 40)]
    return own + [rng.integers(3, 97, rng.integers(1, 70)) for _ in range(COMPANY - CHECKED)]


def kind(i):
    guided = rule(range(3, 60), range(20, 97), [5, 6, 7], most=NEW - 1)
    kinds = [
        dict(temperature=0),
        dict(temperature=0.9, top_p=0.95, seed=i),
        dict(temperature=0, logprobs=5),
        dict(temperature=0.9, seed=i, frequency_penalty=0.5, logprobs=1, structured_outputs=guided),
    ]
    return SamplingParams(max_tokens=NEW, **kinds[i % 4])


def said(stream):
    """All bits of an answer."""
    tokens = stream.collect()
    return tokens, [{t: float(v).hex() for t, v in p.items()} if p else p for p in stream.logprobs]


class Preempting(RecordedScheduler):
    """Every few steps somebody loses its row and must begin again, each request twice at most."""

    def schedule(self, now=0.0):
        self.times = getattr(self, "times", Counter())
        running = [seq for seq in self.order if seq.row >= 0 and self.times[seq] < 2]
        if running and self.steps % 3 == 2:
            seq = running[self.steps % len(running)]
            self.times[seq] += 1
            tables = self._key_of.args[0]
            for sent, row in self._preempt([seq]):
                tables.at(row).leave(
                    row, sent.owner.history, sent.length
                )  # as the engine does with those it is told of
        return super().schedule(now)


class Proposing:
    """Proposes what the row said before, and anything."""

    def __init__(self):
        self.random = np.random.default_rng(3)

    def propose(self, keys, tokens, most):
        return [
            own[-3:] if self.random.random() < 0.5 else self.random.integers(3, 97, self.random.integers(0, k + 1))
            for own, k in zip(tokens, most, strict=True)
        ]


def engine(model, *, chunk, cache, memory, deterministic, proposals):
    with pytest.MonkeyPatch.context() as patch:
        if memory == "preempted":
            patch.setattr(build, "RecordedScheduler", Preempting)
        made = AutoregressiveBatchInference(
            model,
            max_num_seqs=COMPANY,
            max_model_len=128,
            block_size=8,
            dtype=model.dtype,
            deterministic=deterministic,
            enable_prefix_caching=cache,
            max_prefill_tokens=chunk,
        )
    toy_guides(made)
    if proposals == "some":
        made.core.drafting = Drafting(Direct(Proposing(), 97), 4)
    return made


def run(model, *, company, chunk, cache, memory, order, proposals, deterministic=True):
    """What the checked requests answer under these conditions, and the engine's figures."""
    given = prompts(model)
    places = list(range(CHECKED if company == "solo" else COMPANY))
    if order == "shuffled":
        np.random.default_rng(1).shuffle(places)
    answers = {}
    options = dict(chunk=chunk, cache=cache, memory=memory, deterministic=deterministic, proposals=proposals)
    with engine(model, **options) as e:
        if company == "solo":
            for i in places:
                answers[i] = said(e.run(given[i], kind(i)))
        else:
            streams = {}
            for n, i in enumerate(places):
                streams[i] = e.run(given[i], kind(i))
                if company == "staggered" and n % 3 == 2:
                    streams[places[n - 2]].channel.wait(60)  # until it has a token
            answers = {i: said(s) for i, s in streams.items()}
        return [answers[i] for i in range(CHECKED)], e.stats()


ALONE = dict(company="solo", chunk=None, cache=False, memory="ample", order="as it is", proposals="none")


def compare(model, alone, conditions):
    """Returns how many requests are not what they are alone, and the engine's figures."""
    got, stats = run(model, **conditions)
    return sum(mine != theirs for mine, theirs in zip(got, alone, strict=True)), stats


PAIRS = list(all_pairs({"library": tuple(LIBRARIES), "model": tuple(MODELS), **CONDITIONS}))


@pytest.mark.parametrize("choice", PAIRS, ids=lambda choice: "-".join(map(str, choice.values())))
def test_every_pair_of_conditions(models, choice):
    conditions = {name: choice[name] for name in CONDITIONS}
    different, stats = compare(*models(choice["library"], choice["model"]), conditions)
    assert not different, f"{different} of {CHECKED} requests are not what they are alone"
    assert bool(stats.preemptions) == (conditions["memory"] == "preempted")
    if conditions["cache"] and conditions["company"] != "solo":
        assert stats.prefix_hits, "nothing was shared"


def test_ordinary_kernels_do_not_keep_the_promise(folders):
    """The test can fail: with NumPy's own products, company changes bits."""
    model = load_model(folders["shipped"], NumpyBackend(native=False), max_model_len=128)
    alone = run(model, **ALONE, deterministic=False)[0]
    assert run(model, **ALONE | {"company": "batch"}, deterministic=False)[0] != alone


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_combination_of_conditions(models, library, name):
    model, alone = models(library, name)
    for values in itertools.product(*CONDITIONS.values()):
        conditions = dict(zip(CONDITIONS, values, strict=True))
        different, _ = compare(model, alone, conditions)
        assert not different, f"{different} of {CHECKED} requests are not what they are alone, under {conditions}"
