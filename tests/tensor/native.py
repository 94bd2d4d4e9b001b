"""hibachi's kernels in tests: what they compute, on any library; and small ones, compiled in a moment, that do nothing.

`python -m tests.tensor.native jax` prints a digest for each dtype of what they compute on JAX.
"""

import hashlib
import json
import sys
from ctypes import sizeof
from functools import cache

import numpy as np
import pytest

import hibachi
from hibachi import Paged, StepInputs
from hibachi.backend.kernels import abi, build, library
from hibachi.backend.kernels.library import SWITCH, NativeUnavailable, why_missing
from hibachi.engine.scheduler.lower import lower
from hibachi.request import DRAWN

from ..lib.filters import DEFAULTS, TRIED

DTYPES = ("float32", "bfloat16")


def skip_without():
    """Skip a whole file where there are no kernels. Kernels that a compiler refuses are a failure, not a lack."""
    why = why_missing()
    assert why is None or "do not compile" not in why, why
    if why:
        pytest.skip(why, allow_module_level=True)


def other_variants():
    """The names of the variants that this processor can use, but does not."""
    used, there = library.library().variant, build.variants()
    return [v.name for v in there if v.level <= used.level and v.name != used.name]


def every_variant(make, monkeypatch):
    """An object of make() for each variant that this processor can use, its own first."""
    made = [make()]
    for name in other_variants():
        with monkeypatch.context() as patch:
            patch.setenv(SWITCH, name)
            made.append(make())
        assert made[-1].library.variant.name == name
    return made


# ---- looking for kernels anew ----------------------------------------------------------------------------------------


def forget(monkeypatch, tmp_path):
    """Kernels are looked for as in a process that has just begun, of a user who has none yet."""
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(library, "INSTALLED", tmp_path / "lib")
    begin_anew(monkeypatch)


def begin_anew(monkeypatch):
    """What was found is found again, as in another process."""
    monkeypatch.setattr(library, "_library", cache(library._library.__wrapped__))
    monkeypatch.setattr(build, "_said_by", cache(build._said_by.__wrapped__))
    monkeypatch.setattr(library, "_said", set())


def without_compiler(monkeypatch, tmp_path):
    """The same where nothing can be compiled."""
    forget(monkeypatch, tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)


EXPORT = 'extern "C" __attribute__((visibility("default"))) long long'


def small_source(interface=abi.ABI, wrong=0):
    """A file with all functions of the interface. All return 0 but `panel`, which returns what `two` does, plus 1.

    wrong: bytes that the struct Op has too many.
    """
    sizes = {twin.__name__: sizeof(twin) + (wrong if twin is abi.Op else 0) for twin in abi.STRUCTS}
    found = {"abi": interface} | {f"sizeof_{name}": size for name, size in sizes.items()}
    found |= dict.fromkeys(abi.FUNCTIONS, 0) | {"panel": "1 + two() + much[99999]"}
    functions = [f"{EXPORT} hibachi_{name}() {{ return {value}; }}" for name, value in found.items()]
    return "\n".join(["int two(); volatile char much[100000] = {1};", *functions])


def small_kernels(monkeypatch, tmp_path):
    """The folder of two small files that are compiled in place of the kernels; their panel is 3."""
    try:
        build.compiler()
    except build.BuildFailed as e:
        pytest.skip(str(e))
    if not build.variants():
        pytest.skip("there are no kernels for this processor")
    forget(monkeypatch, tmp_path)
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "probe.c").write_bytes((build.SOURCES / "probe.c").read_bytes())
    (sources / "one.cpp").write_text(small_source())
    (sources / "two.cpp").write_text("int two() { return 2; }")
    monkeypatch.setattr(build, "SOURCES", sources)
    try:
        library.library()
    except NativeUnavailable as e:
        if "none of the sets of instructions" in str(e):
            pytest.skip(str(e))
        raise
    for path in (tmp_path / "cache" / "hibachi" / "kernels").iterdir():
        path.unlink()
    begin_anew(monkeypatch)
    return sources


def far_off(bias, distance):
    """What a bias [heads, n] adds at distances [...], in float64: [heads, ...]. Zeros for distances below 0."""
    bias, last = np.asarray(bias, np.float64), bias.shape[1] - 1
    line = (bias[:, last] - bias[:, last - 1]).reshape(-1, *[1] * distance.ndim) * np.maximum(distance - last, 0)
    return np.where(distance < 0, 0, bias[:, np.clip(distance, 0, last)] + line)


# ---- what they compute -----------------------------------------------------------------------------------------------


def computed(backend, dtype, changed=lambda x: x):
    """{name: array} of what a backend's kernels compute, the same numbers on any library.

    changed(x) takes the place of each input x.
    """
    random = np.random.default_rng(0)

    def put(*shape, scale=1.0):
        return backend.put(changed(rounded(scale * random.normal(size=shape))), dtype)

    x, vectors, out = put(11, 66, scale=3), [put(66) for _ in range(2)], {}
    weight, bias = backend.put_weight(rounded(random.normal(size=(70, 66))), dtype), put(70)
    out |= {"linear": backend.linear(x, weight), "linear with bias": backend.linear(x, weight, bias)}
    out |= {"logits": backend.logits(x, weight), "one row": backend.linear(x[3:4], weight)}
    out["rows"] = backend.weight_rows(weight, backend.put(np.array([[0, 69], [48, 1]], np.int32)))
    out["rms_norm"] = backend.rms_norm(x, vectors[0], 1e-5)
    out["layer_norm"] = backend.layer_norm(x, *vectors, 1e-5)
    out["softmax"] = backend.softmax(x)
    out["rope"] = backend.rope(put(9, 3, 16), put(9, 1, 8), put(9, 1, 8))
    for name in ("silu", "gelu", "gelu_tanh"):
        out[name], out[f"gated {name}"] = getattr(backend, name)(x), backend.gated(x, name)
    out |= _attended(backend, dtype, put)
    out |= _of_experts(backend, dtype, random, put)
    out |= _of_states(backend, put)
    out |= _drawn(backend, random)
    return {name: np.asarray(backend.get(t), np.float32) for name, t in out.items()}


def biased(backend, dtype):
    """{name: array} of attention with a bias and sinks, the same numbers on any library."""
    random = np.random.default_rng(0)

    def put(*shape, scale=1.0):
        return backend.put(rounded(scale * random.normal(size=shape)), dtype)

    bias, short, sinks = (backend.put(rounded(random.normal(size=s))) for s in ((6, 40), (6, 2), (6,)))
    found = _attended(
        backend, dtype, put, (dict(bias=bias), dict(bias=short, sinks=sinks, window=70), dict(sinks=sinks))
    )
    return {name: np.asarray(backend.get(t), np.float32) for name, t in found.items()}


SHAPES = [(1, 1, 1), (2, 47, 3), (7, 49, 65), (8, 48, 64), (9, 200, 127), (70, 130, 96), (3, 1, 577), (5, 96, 192)]
"""Rows, outputs and inputs of products: less and more than a panel of 48 outputs, a group of 64 inputs and a tile."""


def products(backend, dtype):
    """{name: array} of products of all `SHAPES`, of operations on rows of odd widths and of tokens that are masked."""
    random, found = np.random.default_rng(1), {}

    def put(*shape):
        return backend.put(rounded(random.normal(size=shape)), dtype)

    for m, n, k in SHAPES:
        weight = backend.put_weight(rounded(random.normal(size=(n, k))), dtype)
        x, bias, idx = put(m, k), put(n), backend.put(np.array([[0, n - 1]], np.int32))
        found[f"linear {m} {n} {k}"] = backend.linear(x, weight, bias)
        found[f"logits {m} {n} {k}"] = backend.logits(x, weight)
        found[f"rows {m} {n} {k}"] = backend.weight_rows(weight, idx)
    for dim in (2, 34, 577):
        x, w, b = put(40, dim), put(dim), put(dim)
        found[f"rms_norm {dim}"] = backend.rms_norm(x, w, 1e-5)
        found[f"layer_norm {dim}"] = backend.layer_norm(x, w, b, 1e-5)
        found[f"layer_norm {dim}, no bias"] = backend.layer_norm(x, w, None, 1e-5)
        found[f"softmax {dim}"] = backend.softmax(x)
        bits = random.integers(0, 2**32, (3, -(-dim // 32)), dtype=np.uint32)
        for name, given in (("all", None), ("masked, spoiled", bits)):
            rows, finite = backend.kept_rows(x, np.array([3, 0, 39], np.int32), given)
            found[f"kept rows {dim}, {name}"], found[f"finite rows {dim}, {name}"] = rows, finite
    return {name: np.asarray(backend.get(t), np.float32) for name, t in found.items()}


def far(backend, dtype):
    """{name: array} of attention over several pieces (attention.h), of prompts and of tokens after them."""
    random = np.random.default_rng(0)
    table, found = np.arange(1, 301, dtype=np.int32).reshape(2, 150), {}
    cache = backend.make_cache(Paged(2, 20, 12), blocks=301, block_size=16, rows=2, dtype=dtype)
    for i, (start, each) in enumerate((([0, 0], [2100, 1020]), ([2100, 1020], [1, 1]), ([2101, 1021], [3, 20]))):
        packed = lower(np.arange(2), np.int32(start), np.int32(each), np.ones(2, bool), table, 16)
        inputs = StepInputs(tok=None, **{name: backend.put(getattr(packed, name)) for name in packed.__slots__})
        new = (rounded(random.normal(size=(len(packed.pos), *s))) for s in ((6, 20), (2, 20), (2, 12)))
        for special in ({}, dict(window=1500)):
            y, cache = backend.attend(*(backend.put(t, dtype) for t in new), cache, inputs, **special)
            found[f"{i} {special}"] = np.asarray(backend.get(y), np.float32)
            new = (rounded(random.normal(size=(len(packed.pos), *s))) for s in ((6, 20), (2, 20), (2, 12)))
    return found


def _attended(backend, dtype, put, how=({}, dict(window=70), dict(softcap=3.0))):
    table, out = np.arange(1, 31, dtype=np.int32).reshape(3, 10), {}
    cache = backend.make_cache(Paged(2, 20, 12), blocks=31, block_size=16, rows=3, dtype=dtype)
    steps = ([0, 0, 0], [90, 7, 150]), ([90, 7, 150], [1, 1, 1]), ([91, 8, 151], [5, 1, 3])
    for i, ((start, each), special) in enumerate(zip(steps, how, strict=True)):
        start, each = np.array(start, np.int32), np.array(each, np.int32)
        packed = lower(np.arange(3), start, each, np.ones(3, bool), table, 16, tiles=backend.shapes.choices)
        inputs = StepInputs(tok=None, **{name: backend.put(getattr(packed, name)) for name in packed.__slots__})
        tokens = len(packed.pos)
        new = put(tokens, 6, 20, scale=2), put(tokens, 2, 20), put(tokens, 2, 12)
        out[f"attention {i}"], cache = backend.attend(*new, cache, inputs, **special)
    return out


def _of_experts(backend, dtype, random, put):
    weights, chosen = backend.route(put(33, 7), 2, normalised=True)
    into, out = ([backend.put_weight(rounded(random.normal(size=s) / 5), dtype) for _ in range(7)] for s in SIZES)
    mixed = backend.experts(put(33, 48), chosen, weights, into, out, "silu", gated=True)
    return {"weights of experts": weights, "experts": mixed}


SIZES = (52, 48), (48, 26)


def _of_states(backend, put):
    rows, tokens, dim, size = 3, 5, 42, 9
    x, last = backend.convolve(put(rows, 3, dim), put(rows, tokens, dim), put(4, dim), put(dim))
    dt, gate, write, read = (put(rows, tokens, n, scale=2) for n in (dim, dim, size, size))
    decay = backend.put(-(2.0 ** np.random.default_rng(1).integers(-3, 4, (size, dim))).astype(np.float32))
    zeros = backend.put(np.zeros((rows, size, dim), np.float32))
    skip = backend.put(np.linspace(-1, 1, dim, dtype=np.float32))
    y, state = backend.selective_scan(zeros, x, dt, gate, write, read, decay, skip)
    return {"convolved": x, "last of the convolution": last, "scanned": y, "state": state}


def rounded(x):
    """float32 without the digits that machines disagree about when they draw."""
    return (np.round(np.asarray(x) * 1024) / 1024).astype(np.float32)


def _drawn(backend, random):
    logits = backend.put(rounded(4 * random.normal(size=(40, 1000))))
    out = dict(zip(("place", "largest"), backend.best(logits), strict=True))
    out |= dict(zip(("mass's largest", "mass"), backend.mass(logits), strict=True))
    out["token"], out["drawn's largest"] = backend.draw(logits, [backend.put(t) for t in parameters(40, names=WRITTEN)])
    return out


KEPT = {"top_k": [1, 3, 40, 5000], "top_p": [0.1, 0.5, 0.95], "min_p": [0.01, 0.3], "typical_p": [0.2, 0.9]}
WRITTEN = ("temperature", "top_k", "top_p", "min_p", "typical_p")  # what has parameters of draws with digests


def parameters(rows, seed=1, names=DRAWN):
    """`How` rows are drawn, host arrays: temperatures, and filters of all kinds, each by itself and all together.

    names: of DRAWN, in its order; the others do nothing.
    """
    random = np.random.default_rng(seed)
    how = {name: np.full(rows, DEFAULTS[name]) for name in DRAWN}
    how["temperature"] = random.choice(np.float32([0, 0.3, 1, 1.7]), rows)
    some = {name: random.random(rows) < 0.4 for name in names[1:]}
    for name in names[1:]:
        how[name] = np.where(some[name], random.choice(KEPT.get(name, TRIED[name].some), rows), how[name])
    how["u"] = random.uniform(0.001, 0.999, rows)
    return tuple(each.astype(np.int32 if name == "top_k" else np.float32) for name, each in how.items())


def same_arrays(got, want):
    """Both are {name: array}; all bits are equal."""
    assert got.keys() == want.keys()
    for name in got:
        np.testing.assert_array_equal(got[name].view(np.uint32), want[name].view(np.uint32), err_msg=name, strict=True)


def digest(arrays):
    whole = hashlib.sha256()
    for name, t in sorted(arrays.items()):
        whole.update(name.encode() + np.ascontiguousarray(t).tobytes())
    return whole.hexdigest()


if __name__ == "__main__":
    loaded = hibachi.load_backend(sys.argv[1])
    with loaded.guard():
        print(json.dumps({dtype: digest(computed(loaded, dtype)) for dtype in DTYPES}))
