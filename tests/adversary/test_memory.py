"""Memory goes back when what needed it has ended: programs, token tables, and tables of positions."""

import copy
import gc
import weakref

import numpy as np
import pytest

from hibachi import LLM, NumpyBackend, SamplingParams

from ..engine.models import until


def native_torch():
    torch_backends = pytest.importorskip("hibachi_torch")
    from hibachi_torch.native.build import compiled

    if why := compiled.why_missing():
        pytest.skip(why)
    return torch_backends.TorchBackend("cpu", native=True)


@pytest.mark.parametrize("make", [NumpyBackend, native_torch], ids=["numpy", "torch native"])
def test_m7_a_backend_is_freed_with_the_last_engine_on_it(make):
    """All that is compiled once for a backend was asked for: plain and filtered draws, log-probabilities, changes."""
    made = []
    for seed in range(3):
        llm = LLM("tiny", backend=make(), max_batch_size=2)
        made.append(weakref.ref(llm.backend))
        plain = SamplingParams(max_tokens=2, seed=seed)
        llm.generate(["She was", "He"], [plain, plain.with_(top_k=5, logprobs=2, repetition_penalty=1.2)])
        llm.close()
        del llm
    until(lambda: gc.collect() is not None and all(b() is None for b in made))  # a thread may be ending just now


def test_m7_engines_on_one_backend_share_their_programs(monkeypatch):
    backend, compiled = NumpyBackend(), []
    monkeypatch.setattr(backend, "compile", lambda fn, donate=(): compiled.append(fn) or fn)
    first, second = (backend.program(np.add, 3) for _ in range(2))
    assert first is second and len(compiled) == 1
    assert backend.program(np.add, 4) is not first and backend.program(np.multiply, 3) is not first


def test_m7_a_copy_of_a_backend_makes_its_own_programs():
    backend = NumpyBackend()
    other = copy.copy(backend)
    assert other.program(np.add).args == (other,) and backend.program(np.add).args == (backend,)
