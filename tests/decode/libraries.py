"""The libraries that these tests compare, and draws with arrays of the host."""

from functools import cache, partial

import array_api_strict
import numpy as np
import pytest

from hibachi.backend.array_backend import ArrayBackend
from hibachi.backend.numpy_backend import NumpyBackend
from hibachi.engine.sampling.draw import How, sample, sample_near
from hibachi.request import FILTERS
from hibachi_jax import JaxBackend
from hibachi_torch import TorchBackend

from ..lib.filters import DEFAULTS

NUMPY = NumpyBackend()
LIBRARIES = {
    "numpy": NUMPY,
    "torch": TorchBackend("cpu"),
    "jax": JaxBackend("cpu"),
    "array_api_strict": ArrayBackend(array_api_strict),
}
INF = float("inf")

every_library = pytest.mark.parametrize("library", LIBRARIES.values(), ids=LIBRARIES)


@cache
def compiled(library, function, **options):
    """A function of this floor with its library and its options given, compiled once for all tests."""
    return library.compile(partial(function, library, **options))


def how(n, library, *, u, **params):
    """The parameters of n rows, as `SamplingParams` has them by default; scalars hold for all of them."""
    columns = [np.broadcast_to(np.asarray(params.get(f.name, DEFAULTS[f.name])), n) for f in FILTERS if f.draws]
    kinds = [np.int32 if f.integer else np.float32 for f in FILTERS if f.draws]
    arrays = (column.astype(kind) for column, kind in zip(columns, kinds, strict=True))
    return How(*map(library.put, arrays), library.put(np.broadcast_to(np.asarray(u, np.float32), n).copy()))


def draw(logits, *, u, filtered=True, library=NUMPY, **params):
    """`sample` on host arrays."""
    logits = np.asarray(logits, np.float32)
    run = compiled(library, sample, filtered=filtered)
    return library.get(run(library.put(logits), how(len(logits), library, u=u, **params)))


def draw_near(logits, k, *, u, mass=False, library=NUMPY, **params):
    """`sample_near` on host arrays: tokens, and which of them are right."""
    logits = np.asarray(logits, np.float32)
    run = compiled(library, sample_near, k=k, mass=mass)
    ids, inside = run(library.put(logits), how(len(logits), library, u=u, **params))
    return library.get(ids), library.get(inside)


def host(library, function, *arrays, **options):
    """The results of a function of this floor, on the host: `function(library, *arrays, **options)`, compiled."""
    run = compiled(library, function, **options)
    out = run(*(library.put(np.array(a)) for a in arrays))
    if not isinstance(out, tuple):
        return library.get(out)
    return type(out)(map(library.get, out)) if type(out) is tuple else type(out)(*map(library.get, out))
