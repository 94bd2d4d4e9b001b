"""A decode step on a device asks nothing of the host: no copy, no wait, no shape that depends on data.

So PyTorch can record it. The stand-in for a device is torch's `meta`, which has shapes and no numbers; what needs these
raises there. This is the way without PyTorch's varlen kernel, which older versions lack.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

from hibachi_torch.cuda import CudaTorchBackend  # noqa: E402

from .arches import APART, FUSED, inputs, made  # noqa: E402

KINDS = FUSED | APART


class NoCopy(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        devices = {t.device.type for t in tree_leaves((args, kwargs, found)) if isinstance(t, torch.Tensor)}
        assert len(devices) < 2, f"{func} copies between the host and the device"
        return found


class NoNumbers(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.asarray, torch.tensor, torch.as_tensor), f"{func.__name__} copies a number"
        return func(*args, **(kwargs or {}))


def on_device(x):
    return tree_map(lambda t: t.to("meta") if isinstance(t, torch.Tensor) else t, x)


@pytest.fixture
def device():
    backend = CudaTorchBackend("meta")
    backend.varlen = None
    return backend


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_asks_nothing_of_the_host(device, kind, dtype):
    host = CudaTorchBackend("cpu")
    model = made(host, dtype, **KINDS[kind])
    model.params, model.backend = on_device(model.params), device
    cache = [device.make_cache(s, blocks=64, block_size=8, rows=5, dtype=dtype) for s in model.cache_spec()]
    x = inputs(host, [2, 18, 35], [1, 1, 1], [True, True, True])
    x = type(x)(**{name: on_device(getattr(x, name)) for name in x.__slots__})
    with NoCopy(), NoNumbers():
        if "expert" in kind:  # it asks which experts were chosen
            with pytest.raises(NotImplementedError, match="Cannot copy out of meta"):
                model.step(model.params, cache, x)
            return
        logits, _ = model.step(model.params, cache, x)
    assert logits.is_meta and logits.shape == (3, 130)


def test_attention_with_a_bias_and_sinks_asks_nothing_of_the_host(device):
    host = CudaTorchBackend("cpu")
    x = inputs(host, [2, 18], [1, 1], [True, True])
    x = type(x)(**{name: on_device(getattr(x, name)) for name in x.__slots__})
    q, k = (torch.zeros(2, heads, 16, device="meta") for heads in (4, 2))
    cache = tuple(torch.zeros(9, 8, 2, 16, device="meta") for _ in range(2))
    bias, sinks = torch.zeros(4, 3, device="meta"), torch.zeros(4, device="meta")
    with NoCopy(), NoNumbers():
        out, _ = device.attend(q, k, k, cache, x, bias=bias, sinks=sinks, window=3, softcap=5.0)
    assert out.shape == (2, 4, 16)


@pytest.mark.parametrize(
    "asks",
    (
        lambda t: t + torch.asarray(1.0, device="meta"),
        lambda t: t[torch.tensor([0])],
        lambda t: t[torch.from_numpy(np.array([0, 1]))],
        lambda t: t.cpu(),
        lambda t: t.sum().item(),
        lambda t: t[t > 0],
    ),
)
def test_what_asks_is_seen(asks):
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), NoCopy(), NoNumbers():
        asks(torch.zeros(3, device="meta"))


# ---- what a caller has switched --------------------------------------------------------------------------------------

SWITCHED = """
import sys
import numpy as np, torch
from hibachi import LLM, AutoregressiveBatchInference, SamplingParams
from hibachi_torch import TorchBackend

class Own(torch.nn.Module):
    vocab_size, max_model_len = 50, 64

    def __init__(self):
        super().__init__()
        self.embed, self.lstm = torch.nn.Embedding(50, 16), torch.nn.LSTM(16, 16, batch_first=True)

    def logits(self, tokens, lengths):
        x, _ = self.lstm(self.embed(tokens))
        return x[torch.arange(len(tokens), device=tokens.device), lengths - 1] @ self.embed.weight.T

def compute():
    backend, w = TorchBackend("cpu"), np.eye(24, 32, dtype=np.float32)
    backend.weight_rows(backend.put_weight(w, "float32"), backend.put(np.array([3, 1])))
    with LLM(sys.argv[1], backend="torch") as llm, AutoregressiveBatchInference(own) as engine:
        runs = [each.run([5, 6, 7], params) for each in (llm.engine, engine)]
        return [(list(map(int, run)), str(run.logprobs)) for run in runs]

own, params = Own().eval(), SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True)
want = compute()
for context in (torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
    with context:
        assert compute() == want, context
for switch, value in ((torch.set_default_dtype, torch.float64), (torch.set_default_dtype, torch.float16),
                      (torch.set_default_dtype, torch.float32), (torch.set_default_device, "meta")):
    switch(value)
    assert compute() == want, value
"""


@pytest.mark.parametrize("what", ["fast", pytest.param("fallback", marks=pytest.mark.slow)])
def test_what_a_caller_has_switched_changes_no_bit(tmp_path, what):
    """Default devices and dtypes, inference mode and autocast, around models from files and of one's own. In a process
    of its own: an array without memory, where one is expected, ends it."""
    if what == "fallback":
        transformers = pytest.importorskip("transformers")
        sizes = dict(vocab_size=97, hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=64)
        kinds = dict(attention_types=[[["global", "local"], 1]], window_size=8, bos_token_id=1, eos_token_id=2)
        transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(**sizes, **kinds)).save_pretrained(tmp_path)
    command = [sys.executable, "-c", SWITCHED, "tiny" if what == "fast" else str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.returncode, done.stderr)
