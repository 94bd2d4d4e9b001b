"""JAX's own ways: programs are counted and kept, parameters may lie on several devices, the TPU's kernel is chosen."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hibachi import NumpyBackend, Paged, StepInputs
from hibachi.engine.scheduler.lower import lower

from ..lib.inside import core

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from hibachi import LLM, SamplingParams  # noqa: E402
from hibachi_jax import JaxBackend, programs, tpu  # noqa: E402
from hibachi_jax.backend import Turned  # noqa: E402


def run(code, **env):
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "HIBACHI_"))} | env
    done = subprocess.run([sys.executable, "-c", code], env=settings, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# ---- programs ------------------------------------------------------------------------------------------------------


def test_a_load_like_one_that_came_before_compiles_nothing():
    """In a second run of a varied load there is no program that the first did not make."""
    random = np.random.default_rng(0)
    sizes = dict(max_model_len=128, max_num_seqs=2, max_num_batched_tokens=64)  # so that the load meets all shapes
    with LLM("tiny", backend="jax", enable_prefix_caching=False, **sizes) as llm:

        def load(lengths):
            for some in ([n] for n in lengths), zip(lengths, reversed(lengths), strict=True), [lengths]:
                for together in some:
                    prompts = [random.integers(3, 200, n).tolist() for n in together]
                    params = [
                        SamplingParams(temperature=0, max_tokens=9 + i, ignore_eos=True) for i in range(len(prompts))
                    ]
                    streams = [llm.engine.run(p, each) for p, each in zip(prompts, params, strict=True)]
                    assert [len(list(s)) for s in streams] == [9 + i for i in range(len(prompts))]
            return llm.backend.compilations

        before = llm.backend.compilations
        first = load([3, 40, 17, 90, 5, 33])
        assert first > before  # the counter does count
        assert load([7, 61, 2, 100, 24, 12]) == first


MODELS = """
from hibachi import AutoregressiveBatchInference, SamplingParams, load_backend, load_model
from hibachi.testing.toys import TinyDecoder, tiny_weights

backend = load_backend("jax")

def made(which):
    return load_model("tiny", backend) if which == "tiny" else TinyDecoder(backend, tiny_weights())

def answers(model, prompts, n):
    options = dict(max_model_len=64 if model.vocab_size > 32 else 16, max_num_seqs=2, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
    with AutoregressiveBatchInference(model, backend=backend, **options) as engine:
        return [list(map(int, s)) for s in [engine.run(p, params) for p in prompts]]
"""
EITHER = pytest.mark.parametrize("model", ["toy", pytest.param("tiny", marks=pytest.mark.slow)])
START = (
    MODELS
    + """
import json, sys, jax
found = []
jax.monitoring.register_event_listener(lambda event, **about: found.append(event))
said = answers(made(WHICH), [[5, 6, 7]], 8)
hits = sum(e == "/jax/compilation_cache/cache_hits" for e in found)
print(json.dumps([said, hits, str(jax.config.jax_compilation_cache_dir)]))
"""
)


@pytest.mark.parametrize("variant", ["none", "auto"])
@EITHER
@pytest.mark.slow
def test_a_second_process_reads_what_the_first_has_compiled(tmp_path, model, variant):
    code = START.replace("WHICH", repr(model))
    cold, warm = (run(code, XDG_CACHE_HOME=str(tmp_path), HIBACHI_VARIANT=variant) for _ in range(2))
    assert cold[0] == warm[0] and cold[1] == 0 and warm[1] >= 2
    assert cold[2].startswith(str(tmp_path / "hibachi" / "jax"))


@pytest.mark.slow
def test_a_cache_of_the_users_own_is_left_alone_and_ours_can_be_switched_off(tmp_path):
    code = (
        "import jax, json; from hibachi_jax import JaxBackend; remarks = JaxBackend().remarks(); c = jax.config;"
        "print(json.dumps([c.jax_compilation_cache_dir, c.jax_persistent_cache_min_compile_time_secs, remarks[0]]))"
    )
    ours = str(tmp_path / "ours")
    folder, least, remark = run(code, XDG_CACHE_HOME=ours)
    assert folder.startswith(ours) and least < 1 and ours in remark
    assert run(code, XDG_CACHE_HOME=ours, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "theirs"))[0].endswith("theirs")
    assert run(code, XDG_CACHE_HOME=ours, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="7")[1] == 7
    off = run(code, XDG_CACHE_HOME=ours, HIBACHI_JAX_CACHE="0")
    assert off[0] is None and off[1] == 1 and "nowhere" in off[2]


def test_the_doctor_says_which_dtype_is_fast_on_a_cpu():
    assert any("bfloat16" in line for line in JaxBackend("cpu", native=False).remarks())


# ---- parameters ----------------------------------------------------------------------------------------------------

SHARDED = (
    MODELS
    + """
import json, numpy as np, jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("model",))
assert mesh.size == 2
def spread(a):
    whole = next((i for i in range(a.ndim - 1, -1, -1) if a.ndim > 1 and a.shape[i] % 2 == 0), None)
    return jax.device_put(a, NamedSharding(mesh, P(*("model" if i == whole else None for i in range(a.ndim)))))
def tokens(sharded):
    model = made(WHICH)
    if sharded:
        model.params = jax.tree.map(spread, model.params)
        leaves = jax.tree.leaves(model.params)
        assert any(len(a.sharding.device_set) == 2 and not a.is_fully_replicated for a in leaves)
    return answers(model, [[5, 6, 7], [8, 9, 10], [11]][:HOW_MANY], 12)
print(json.dumps([tokens(sharded) for sharded in (False, True)]))
"""
)


@EITHER
@pytest.mark.slow
def test_parameters_on_two_devices_give_the_same_tokens(model):
    code = SHARDED.replace("WHICH", repr(model)).replace("HOW_MANY", "3" if model == "tiny" else "2")
    one, two = run(code, XLA_FLAGS="--xla_force_host_platform_device_count=2", HIBACHI_VARIANT="none")
    assert one == two and len(one[0]) == 12


def test_parameters_are_arguments_of_the_step_and_no_constants():
    with LLM("tiny", backend="jax", max_model_len=64) as llm:
        list(llm.engine.run([5, 6, 7], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)))
        runner = core(llm.engine).runner
        x = runner.inputs.packed(*(np.array([n], np.int32) for n in (0, 3, 1)), np.ones(1, bool))
        text = runner.main.step.lower(llm.model.params, runner.memory.cache, x).as_text()
    weights = {"x".join(map(str, w.shape)) + "xf32" for w in jax.tree.leaves(llm.model.params) if w.ndim == 2}
    constants = [line for line in text.splitlines() if "stablehlo.constant" in line]
    assert constants and not any(f"tensor<{shape}>" in line for line in constants for shape in weights)
    assert "float64" not in text and "xf64" not in text


# ---- 64 bits -------------------------------------------------------------------------------------------------------

LANGUAGE = """
import json, sys
import numpy as np
from hibachi import LLM, AutoregressiveBatchInference, SamplingParams
from hibachi.testing.toys import TinyDecoder, tiny_weights
from hibachi_jax import JaxBackend

greedy = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True)
drawn = SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=5, max_tokens=6, repetition_penalty=1.1,
                       presence_penalty=0.2, logprobs=1, ignore_eos=True)
guided = SamplingParams(temperature=0, max_tokens=9, structured_outputs={"regex": "[a-z]{3,9} [0-9]+"})
guess = {"method": "ngram", "num_speculative_tokens": 3}
found = []
for how in {"fast": [{}], "all": [dict(deterministic=True), dict(speculative_config=guess), dict(dtype="bfloat16"),
                                  dict(quantization="int8")]}[sys.argv[1]]:
    with LLM("tiny", backend=JaxBackend("cpu", native=False), max_model_len=128, max_num_seqs=2, **how) as llm:
        for params in (greedy, drawn, guided):
            [done] = llm.generate(["Emma was not sorry to"], params)
            found.append([done.token_ids, str(done.logprobs), str(done.prompt_logprobs), done.text])
        found.append(llm.embed(["The evening passed off"])[0].embedding.tobytes().hex())
backend = JaxBackend("cpu", native=False)
attend, numbers = backend.attend, dict(scale=np.float64(0.2), window=np.int64(5), softcap=np.float64(9))
backend.attend = lambda *args: attend(*args, **numbers)  # as a model of one's own may have them
with AutoregressiveBatchInference(TinyDecoder(backend, tiny_weights()), backend=backend, max_model_len=16) as engine:
    found.append([int(t) for t in engine.run([5, 9, 2], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))])
print(json.dumps(found))
"""


@pytest.mark.parametrize("which", ["fast", pytest.param("all", marks=pytest.mark.slow)])
def test_x64_changes_no_bit(which):
    """A process that has switched it on makes arrays of 64 bits wherever no dtype is named."""
    code = f"import sys; sys.argv = ['', '{which}']{LANGUAGE}"
    assert run(code, JAX_ENABLE_X64="1") == run(code, JAX_ENABLE_X64="0")


@pytest.mark.slow
def test_the_conformance_suite_holds_with_x64():
    suite = Path(__file__).parents[2] / "conformance"
    command = [sys.executable, "-m", "pytest", suite, "-q", "-p", "no:cacheprovider", "--backend", "jax", "--no-smoke"]
    env = os.environ | {"JAX_ENABLE_X64": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, cwd=suite.parent)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


# ---- weights -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out, size", [(24, 8), (200, 8), (8, 24)])  # one is a vocabulary's
def test_a_weight_is_the_same_whichever_way_it_lies(out, size):
    b, random = JaxBackend("cpu", native=False), np.random.default_rng(0)
    w, x = (random.normal(size=s).astype(np.float32) for s in ((out, size), (3, size)))
    weight = b.put_weight(w, "float32")
    assert isinstance(weight, Turned) == (out < 16 * size)
    np.testing.assert_allclose(b.get(b.linear(b.put(x), weight)), x @ w.T, rtol=1e-4, atol=1e-5)
    for idx in (np.array([1, 0, 7]), np.array([[2], [2]]), np.array(3)):
        np.testing.assert_array_equal(b.get(b.weight_rows(weight, b.put(idx.astype(np.int32)))), w[idx])


# ---- the TPU's kernel ----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch):
    monkeypatch.setattr(tpu, "_said", set())


def test_the_kernel_is_for_tpus_and_heads_that_it_takes(caplog):
    fits, small = Paged(2, 128, 128), Paged(2, 64, 64)
    assert "this is cpu" in tpu.why_not("cpu", fits) and "this is gpu" in tpu.why_not("gpu", fits)
    assert not caplog.records
    assert tpu.why_not("tpu", fits) is None
    assert "multiples of 128" in tpu.why_not("tpu", small) and tpu.why_not("tpu", small)
    assert len(caplog.records) == 1  # said once


def test_where_jax_has_no_such_kernel_the_reason_is_said(monkeypatch, caplog):
    monkeypatch.setattr(tpu, "MODULE", "jax.no_such_module")
    assert "this JAX has no ragged paged attention" in tpu.why_not("tpu", Paged(2, 128, 128))
    assert len(caplog.records) == 1


@pytest.mark.slow
@pytest.mark.parametrize("special", [{}, dict(window=9), dict(softcap=5.0, scale=0.3)], ids=str)
def test_the_kernel_is_given_what_it_wants(monkeypatch, special):
    """By JAX's own reference of the kernel, as there is no TPU here: the same as our attention."""
    reference = pytest.importorskip(tpu.MODULE).ref_ragged_paged_attention
    monkeypatch.setattr(tpu, "kernel", lambda: reference)
    random = np.random.default_rng(0)
    ours, theirs = JaxBackend("cpu", native=False), JaxBackend("cpu", native=False)
    theirs.platform = "tpu"
    table = np.arange(1, 13, dtype=np.int32).reshape(3, 4)
    caches = [
        b.make_cache(Paged(2, 128, 128), blocks=13, block_size=16, rows=3, dtype="float32") for b in (ours, theirs)
    ]
    assert len(caches[1]) == 1
    for start, each in ((np.zeros(3), [5, 20, 33]), (np.array([5, 20, 33]), [1, 1, 7])):
        start, each = start.astype(np.int32), np.array(each, np.int32)
        n = int(each.sum())
        q, k, v = (random.normal(size=(n, heads, 128)).astype(np.float32) for heads in (4, 2, 2))
        packed = lower(np.arange(3), start, each, np.ones(3, bool), table, 16)
        x = StepInputs(tok=None, **{f: jnp.asarray(getattr(packed, f)) for f in packed.__dataclass_fields__})
        outs = []
        for i, b in enumerate((ours, theirs)):
            out, caches[i] = b.attend(*map(b.put, (q, k, v)), caches[i], x, **special)
            outs.append(np.asarray(out))
        np.testing.assert_allclose(*outs, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
def test_a_bias_and_sinks_are_those_of_numpy_also_from_pages_whose_kernel_lacks_them(monkeypatch):
    monkeypatch.setattr(tpu, "kernel", lambda: None)  # an error where it is called
    numpy, loops, paged, gathers = NumpyBackend(native=False), *(JaxBackend("cpu", native=False) for _ in range(3))
    paged.platform = "tpu"
    for b in (paged, gathers):
        monkeypatch.setattr(b, "_loops", False)
    backends = numpy, loops, paged, gathers, loops.invariant()
    spec = dict(blocks=3, block_size=16, rows=1, dtype="float32")
    caches = [b.make_cache(Paged(2, 128, 128), **spec) for b in backends]
    assert len(caches[2]) == 1
    random = np.random.default_rng(0)
    bias, sinks = np.float32([[0, -0.1], [0, 1], [1, 1], [0, 0]]), np.arange(4, dtype=np.float32)
    for at, n, special in ((0, 9, dict(bias=bias, sinks=sinks)), (9, 1, dict(bias=bias)), (10, 8, dict(sinks=sinks))):
        q, k, v = (random.normal(size=(n, heads, 128)).astype(np.float32) for heads in (4, 2, 2))
        outs = []
        for i, b in enumerate(backends):
            one = (np.array([place], np.int32) for place in (0, at, n))
            packed = lower(*one, np.ones(1, bool), np.array([[2, 1]], np.int32), 16, tiles=b.shapes.choices)
            x = StepInputs(tok=None, **{f: b.put(getattr(packed, f)) for f in packed.__dataclass_fields__})
            how = {name: b.put(t) for name, t in special.items()} | dict(window=8, softcap=2.0)
            out, caches[i] = b.attend(*map(b.put, (q, k, v)), caches[i], x, **how)
            outs.append(np.asarray(out))
        for out in outs[1:]:
            np.testing.assert_allclose(out, outs[0], rtol=2e-4, atol=2e-5)


def test_programs_are_counted():
    before = programs.made()
    jax.jit(lambda x: x * 1.2345)(jnp.ones(3))
    assert programs.made() > before
