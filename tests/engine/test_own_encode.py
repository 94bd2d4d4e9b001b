"""Encoders beside a cache of the model's own: `encode` is called once for each request, which keeps its output."""

import threading
import weakref

import numpy as np
import pytest

from hibachi import (
    Beams,
    ConfigError,
    Input,
    InvalidModelOutput,
    InvalidRequest,
    ModelError,
    OwnCache,
    SamplingParams,
    Terms,
)
from hibachi.backend.discover import resolve

from .models import until

V, H = 10, 4
RNG = np.random.default_rng(2)
EMBED = np.eye(V, H, dtype=np.float32) + np.arange(V)[:, None].astype(np.float32)
GREEDY = SamplingParams(temperature=0, max_tokens=6)
SOURCES = [RNG.integers(0, V, n) for n in (3, 9, 5, 1, 7, 4)]
PROMPTS = [RNG.integers(0, V, n).tolist() for n in (1, 2, 5, 1, 3, 8)]


class Translator:
    """The next token is the sum of the source and of all tokens so far, modulo 10: exact in any company."""

    past, vocab_size, max_model_len = OwnCache(), V, 100
    inputs = {"source": Input((None,), "int32")}  # noqa: RUF012

    def __init__(self, backend="numpy"):
        self.library = resolve(backend)
        self.backend, self.encoded = self.library.name, []

    def encode(self, source):
        xp = self.library.xp
        self.encoded.append(tuple(source.shape))
        return {"values": xp.astype(source, xp.float32)[:, :, None], "mask": xp.astype(xp.ones_like(source), xp.int8)}

    def step(self, tokens, lengths, past, encoded):
        xp = self.library.xp
        new = xp.astype(tokens, xp.float32)[:, :, None]
        whole = new if past is None else xp.concat([past, new], axis=1)
        width = whole.shape[1]
        place = xp.arange(width, device=self.library.device)[None, :]
        real = xp.astype(place >= width - lengths[:, None], xp.float32)
        mask = xp.astype(encoded["mask"], xp.float32)
        total = xp.sum(whole[:, :, 0] * real, axis=1) + xp.sum(encoded["values"][:, :, 0] * mask, axis=1)
        ids = xp.arange(V, dtype=xp.float32, device=self.library.device)
        return -xp.abs(ids[None, :] - (total - V * xp.floor(total / V))[:, None]) * 8, new


def right(source, prompt, n=6):
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(sum(source) + sum(tokens)) % V)
    return tokens[len(prompt) :]


def answers(engine, n=6):
    params = SamplingParams(temperature=0, max_tokens=n)
    streams = [engine.run(p, params, inputs={"source": s}) for p, s in zip(PROMPTS, SOURCES, strict=True)]
    return [stream.collect() for stream in streams]


ALL = [right(s, p) for s, p in zip(SOURCES, PROMPTS, strict=True)]


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_each_request_has_its_own_source_on_every_library(library, serve):
    engine = serve(Translator(library), backend=library, max_num_seqs=4)
    assert answers(engine) == ALL


def test_an_input_of_the_step_is_none_of_the_encoder(serve):
    class Louder(Translator):
        inputs = Translator.inputs | {"add": Input((), "int32")}

        def step(self, tokens, lengths, past, encoded, add):
            values = encoded["values"] + add[:, None, None] * encoded["mask"][:, :, None]
            return super().step(tokens, lengths, past, {**encoded, "values": values})

    engine = serve(Louder(), max_num_seqs=3)
    streams = [engine.run(p, GREEDY, inputs={"source": s, "add": 1}) for p, s in zip(PROMPTS, SOURCES, strict=True)]
    assert [s.collect() for s in streams] == [right(s + 1, p) for s, p in zip(SOURCES, PROMPTS, strict=True)]


def test_a_source_is_encoded_once(serve):
    model = Translator()
    engine = serve(model, max_num_seqs=3)
    model.encoded.clear()
    assert answers(engine) == ALL
    assert sorted(n for _, n in model.encoded) == sorted(map(len, SOURCES))


def test_chunks_and_preemption_change_nothing(serve):
    model = Translator()
    engine = serve(model, max_num_seqs=4, max_num_batched_tokens=4, cache_tokens=20, block_size=4, max_model_len=20)
    for _ in range(20):  # requests come one by one, and may be over before others need their memory
        assert answers(engine) == ALL
        if engine.stats().preemptions:
            break
    assert engine.stats().preemptions > 0


class Exemplary(Translator):
    """Sources of trials are of several lengths, and none of zeros."""

    inputs = {"source": Input((None,), "int32", example=np.arange(1, 9))}  # noqa: RUF012


@pytest.mark.parametrize("model", [Translator, Exemplary])
def test_bits_do_not_depend_on_the_company(serve, model):
    engine = serve(model(), deterministic=None, max_num_seqs=4)
    assert engine.deterministic and engine.selfcheck() > 0
    assert answers(engine) == ALL


def test_what_was_encoded_is_freed_with_its_request(serve):
    held = []

    class Looks(Translator):
        def step(self, tokens, lengths, past, encoded):
            held.append(weakref.ref(encoded["values"]))
            return super().step(tokens, lengths, past, encoded)

    engine = serve(Looks(), max_num_seqs=2)
    held.clear()  # of trials, which keep their examples
    answers(engine)
    assert held
    until(lambda: not any(array() is not None for array in held))


class Together(Translator):
    """Takes sources of several requests at once."""

    def encode(self, source, lengths):
        xp = self.library.xp
        self.encoded.append(tuple(source.shape))
        width = source.shape[1]
        real = xp.arange(width, device=self.library.device)[None, :] >= width - lengths[:, None]
        assert bool(xp.all(xp.where(real, 0, source) <= 1))  # zeros in front; ones, where it is tried
        return {"values": xp.astype(source, xp.float32)[:, :, None], "mask": xp.astype(xp.ones_like(source), xp.int8)}


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("deterministic", [False, None])
def test_sources_are_encoded_together_where_that_may_change_bits(library, deterministic, serve, monkeypatch):
    monkeypatch.setattr("hibachi.engine.runners.owncache.encoder.MOST", 21)
    free = threading.Event()
    free.set()

    class Waits(Together):
        def step(self, tokens, lengths, past, encoded):
            free.wait(30)
            return super().step(tokens, lengths, past, encoded)

    model = Waits(library)
    engine = serve(model, backend=library, max_num_seqs=7, deterministic=deterministic)
    model.encoded.clear()
    free.clear()
    first = engine.run([1], GREEDY, inputs={"source": [1, 2]})
    until(lambda: model.encoded)
    streams = [engine.run([1], GREEDY, inputs={"source": s}) for s in SOURCES]  # all of these begin in the next step
    free.set()
    assert [stream.collect() for stream in [first, *streams]] == [right(s, [1]) for s in ([1, 2], *SOURCES)]
    one_by_one = deterministic is None or library == "jax"  # JAX compiles each shape
    want = [(1, len(s)) for s in SOURCES] if one_by_one else [(4, 5), (2, 9)]
    assert sorted(model.encoded[1:]) == sorted(want)


def test_a_source_that_fails_fails_alone(serve):
    class Fails(Together):
        def encode(self, source, lengths):
            if (source == 9).any():
                raise ValueError("nine")
            return super().encode(source, lengths)

    engine = serve(Fails(), max_num_seqs=6, deterministic=False)
    streams = [engine.run([1], GREEDY, inputs={"source": s}) for s in ([1, 2], [9], [3], [4, 5, 6])]
    with pytest.raises(ModelError, match="nine"):
        streams.pop(1).collect()
    assert [stream.collect() for stream in streams] == [right(s, [1]) for s in ([1, 2], [3], [4, 5, 6])]


class SeesPadding(Together):
    def encode(self, source, lengths):
        return {"values": source[:, :, None] + source.sum(1)[:, None, None].astype(np.float32)}


class Halves(Together):
    def encode(self, source, lengths):
        return {"values": source[:, ::2, None].astype(np.float32)}


class CountsFromTheLeft(Together):
    def encode(self, source, lengths):
        found = super().encode(source, lengths)
        return found | {"values": found["values"] + np.arange(source.shape[1])[None, :, None]}


class Two(Together):
    inputs = Translator.inputs | {"other": Input((None,), "int32")}

    def encode(self, source, other, lengths):
        return super().encode(source, lengths)


@pytest.mark.parametrize(
    "model, why",
    [
        (SeesPadding, "expected the same .* beside a longer request"),
        (Halves, "expected arrays as long as the input, or longer by the same number; got .* for inputs of"),
        (CountsFromTheLeft, "expected the same .* beside a longer request"),
        (Two, r"expected one input hibachi.Input\(\(None, ...\)\) whose they are; got other, source"),
    ],
)
def test_an_encoder_that_cannot_take_several_at_once_is_refused(model, why, serve):
    with pytest.raises(ConfigError, match=why):
        serve(model())


def test_beams_of_a_request_do_not_copy_what_it_encoded(serve):
    seen = []

    class Looks(Translator):
        def step(self, tokens, lengths, past, encoded):
            seen.append(encoded["values"])
            return super().step(tokens, lengths, past, encoded)

    engine, params = serve(Looks(), max_num_seqs=4), SamplingParams(beams=Beams(4), max_tokens=6)
    seen.clear()  # of trials
    best, *_ = engine.run_many(PROMPTS[2], params, 4, inputs={"source": SOURCES[0]})
    assert best.collect() == right(SOURCES[0], PROMPTS[2])
    prompt, *later = seen
    assert len(prompt) == 1 and len(later) == 5 and all(each is later[0] for each in later)


def test_prefixes_are_shared_between_equal_sources_only(serve):
    engine = serve(Translator(), block_size=4, max_num_seqs=2)
    prompt = [1, 2, 3, 4] * 4

    def ask(source, salt=None):
        stream = engine.run(prompt, GREEDY, inputs={"source": source}, terms=Terms(cache_salt=salt))
        assert stream.collect() == right(source, prompt)
        return stream.reused

    assert ask([1, 2]) == 0
    assert ask([2, 1, 3]) == 0
    assert ask([1, 2]) >= 12
    assert ask([1, 2], "other") == 0


def test_a_source_on_which_the_encoder_fails_harms_nobody(serve):
    class Fails(Translator):
        def encode(self, source):
            if (source == 9).all() and source.shape[1] == 2:
                raise ValueError("nines")
            return super().encode(source)

    engine = serve(Fails(), max_num_seqs=8)
    bad = engine.run([1], GREEDY, inputs={"source": [9, 9]})
    assert answers(engine) == ALL
    with pytest.raises(ModelError, match="nines"):
        bad.collect()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (lambda out: {**out, "mask": out["mask"][:, :, None]}, r"array \['mask'\] of shape|at .*mask"),
        (lambda out: {**out, "values": out["values"].astype(np.float64)}, "dtype float32"),
        (lambda out: {**out, "mask": out["mask"][:, 1:]}, "of shape"),
        (lambda out: {**out, "values": np.concatenate([out["values"]] * 2)}, "of shape"),
        (lambda out: {"values": out["values"]}, "must return arrays at"),
        (lambda out: None, "must return arrays at"),
    ],
    ids=["rank", "dtype", "length", "rows", "fewer", "none"],
)
def test_an_encoder_that_returns_something_else_for_one_source(what, words, serve):
    class Changes(Translator):
        def encode(self, source):
            out = super().encode(source)
            return what(out) if source.shape[1] == 2 else out

    engine = serve(Changes(), max_num_seqs=8)
    bad = engine.run([1], GREEDY, inputs={"source": [9, 9]})
    assert answers(engine) == ALL
    with pytest.raises(InvalidModelOutput, match=words):
        bad.collect()


def test_a_step_that_fails_computes_its_rows_again_with_their_sources(serve):
    class Once(Translator):
        armed = False

        def step(self, tokens, lengths, past, encoded):
            if self.armed and past is not None:
                self.armed = False
                past[:] = 7  # it has written into its past before
                raise RuntimeError("once")
            return super().step(tokens, lengths, past, encoded)

    model = Once()
    engine = serve(model, max_num_seqs=8)
    model.armed = True
    assert answers(engine) == ALL


class Pooled(Translator):
    """An encoder whose output has one size, whatever the source."""

    def encode(self, source):
        return super().encode(source)["values"].sum(axis=1)

    def step(self, tokens, lengths, past, encoded):
        values = {"values": encoded[:, None, :], "mask": np.ones((len(encoded), 1), np.int8)}
        return super().step(tokens, lengths, past, values)


def test_an_output_of_one_size(serve):
    assert answers(serve(Pooled(), max_num_seqs=3)) == ALL


def raises(source):
    raise KeyError("x")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inputs": {}}, "must take inputs that the model declares"),
        (
            {"step": lambda self, tokens, lengths, past: None},
            "must take what `encode` makes: expected a parameter `encoded`",
        ),
        ({"encode": lambda self, source: [source, source[:, ::2]]}, "must return arrays that grow alike"),
        ({"encode": lambda self, source: source[:, :, None] * source[:, None, :]}, "at most one other axis that grows"),
        ({"encode": lambda self, source: source[0]}, "must have one row"),
        ({"encode": lambda self, source: 3}, "must return arrays of (NumPy|numpy)"),
        ({"encode": lambda self, source: raises(source)}, "failed when it was tried"),
    ],
    ids=["undeclared", "not taken", "two lengths", "two axes", "no batch", "no array", "raises"],
)
def test_encoders_that_cannot_work_are_refused_when_the_engine_is_made(changes, words, serve):
    with pytest.raises(ConfigError, match=words):
        serve(type("Wrong", (Translator,), changes)())


@pytest.mark.parametrize("inputs", [None, {}, {"source": [[1]]}, {"source": [1.5]}, {"source": 3}], ids=str)
def test_wrong_sources_are_refused_at_the_call(inputs, serve):
    with pytest.raises(InvalidRequest, match="inputs"):
        serve(Translator()).run([1], GREEDY, inputs=inputs)


# ---- tokens that the model returns itself ----------------------------------------------------------------------------


class Smooth:
    """Real values with a cache of their own: half the mean of all so far, and what is drawn."""

    past, vocab_size, max_model_len, draws = OwnCache(), None, 60, 1

    def __init__(self, backend="numpy"):
        self.library = resolve(backend)
        self.backend = self.library.name

    def step(self, tokens, lengths, past, normal):
        xp = self.library.xp
        whole = tokens if past is None else xp.concat([past, tokens], axis=1)
        width = whole.shape[1]
        place = xp.arange(width, device=self.library.device)[None, :]
        real = xp.astype(place >= width - lengths[:, None], xp.float32)
        return xp.floor(xp.sum(whole * real, axis=1) / 2) + normal[:, 0] * 0 + xp.floor(4 * normal[:, 0]) / 4, tokens


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_real_values_with_a_cache_of_their_own(library, serve):
    engine = serve(Smooth(library), backend=library, token=np.float32(0), max_num_seqs=3)
    prompts = [np.arange(n, dtype=np.float32) for n in (1, 4, 2, 6)]

    def ask(i):
        return engine.run(prompts[i], SamplingParams(seed=i, max_tokens=5))

    def floats(stream):
        return [float(x) for x in stream.collect()]

    together = [floats(s) for s in [ask(i) for i in range(4)]]
    assert together == [floats(ask(i)) for i in range(4)]
    from hibachi.engine.sampling.uniforms import draws

    for i, got in enumerate(together):
        known, n = prompts[i].tolist(), len(prompts[i])
        normal = draws(np.full(5, i), np.arange(n, n + 5), 1)[1][:, 0].astype(float)
        for t in range(5):
            known.append(np.floor(sum(known) / 2) + np.floor(4 * normal[t]) / 4)
        assert got == known[n:]


def test_their_kind_may_come_from_examples(serve):
    class WithExamples(Smooth):
        example_prompts = [np.arange(5, dtype=np.float32)]  # noqa: RUF012

    engine = serve(WithExamples())
    assert len(engine.run([1.0, 2.0], max_tokens=3).collect()) == 3
    with pytest.raises(InvalidRequest, match="takes prompts of tokens of shape"):
        engine.run([[1.0, 2.0]], max_tokens=3)


class Reusing(Translator):
    """What it returns is the same dict of the same buffers, which the next call writes to."""

    def __init__(self):
        super().__init__()
        self.values, self.mask, self.held = np.zeros((1, 64, 1), np.float32), np.zeros((1, 64), np.int8), {}

    def encode(self, source):
        self.values[...], self.mask[...] = 5, 1
        n, found = source.shape[1], super().encode(source)
        self.values[:, :n], self.mask[:, :n] = found["values"], found["mask"]
        self.held |= {"values": self.values[:, :n], "mask": self.mask[:, :n]}
        return self.held


@pytest.mark.parametrize("rows", [1, 4])
def test_what_encode_returns_may_be_used_again(rows, serve):
    assert answers(serve(Reusing(), max_num_seqs=rows)) == ALL


def test_a_row_alone_gets_what_was_encoded_in_the_same_order_of_memory(serve):
    """Libraries round in another way where it is not."""
    seen = set()

    class Turned(Translator):
        def encode(self, source):
            found = super().encode(source)
            return found | {"wide": np.asfortranarray(np.broadcast_to(found["values"], (1, source.shape[1], 3)))}

        def step(self, tokens, lengths, past, encoded):
            seen.add(encoded["wide"].flags.c_contiguous)
            return super().step(tokens, lengths, past, encoded)

    engine = serve(Turned(), max_num_seqs=4)
    seen.clear()
    assert engine.run(PROMPTS[1], GREEDY, inputs={"source": SOURCES[1]}).collect() == ALL[1]
    assert answers(engine) == ALL and seen == {True}


def test_an_input_per_position_may_be_encoded(serve):
    class Covariates(Translator):
        inputs = {"source": Input((), "int32", per="position")}  # noqa: RUF012

    engine = serve(Covariates(), max_num_seqs=4)
    sources = [RNG.integers(0, V, len(prompt) + 5 + i) for i, prompt in enumerate(PROMPTS)]
    streams = [engine.run(p, GREEDY, inputs={"source": s}) for p, s in zip(PROMPTS, sources, strict=True)]
    assert [stream.collect() for stream in streams] == [right(s, p) for s, p in zip(sources, PROMPTS, strict=True)]


def test_a_source_may_be_an_empty_list(serve):
    stream = serve(Translator(), max_num_seqs=4).run(PROMPTS[1], GREEDY, inputs={"source": []})
    assert stream.collect() == right([], PROMPTS[1])
