"""One rule says whose arrays a model gets: backend=, its own, its parameters, buffers, what it holds, the prompt."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import hibachi
from hibachi import AutoregressiveBatchInference, ConfigError, FeedforwardBatchInference, NumpyBackend
from hibachi.backend.infer import backend_of, leaves, prompt_backend
from hibachi.backend.nine import NineBackend


class Model:
    def __init__(self, **own):
        self.__dict__.update(own)

    def forward(self, tokens):
        return tokens[:, -1] + 1


class Buffers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(3))


def name(*args):
    found = backend_of(*args)
    return found and found.name


@pytest.mark.parametrize(
    "model, library",
    [
        (Model(), None),
        (Model(table=np.zeros(2), n=3, words=["a"], f=len), None),  # models of all libraries hold NumPy's
        (Model(backend="torch", w=jnp.zeros(2)), "torch"),
        (torch.nn.GRU(2, 2), "torch"),
        (Buffers(), "torch"),
        (Model(table=np.zeros(2), net=torch.nn.Linear(2, 2)), "torch"),
        (Model(layers=[{"w": (jnp.zeros(2),)}]), "jax"),
        (Model(params={"w": jnp.zeros(2)}), "jax"),
        (Model(inner=Model(inner=Model(w=torch.zeros(1)))), "torch"),
        (Model(step=torch.nn.Linear(2, 2).forward), "torch"),
    ],
)
def test_the_model_tells(model, library):
    assert name(None, model) == library


def test_what_is_passed_comes_first_and_the_prompt_last():
    assert name("numpy", Model(backend="torch", w=jnp.zeros(2))) == "numpy"
    assert name(None, Model(), torch.zeros(1)) == "torch"
    assert name(None, Model(w=jnp.zeros(1)), torch.zeros(1)) == "jax"
    assert prompt_backend(torch.zeros(2), Model()).name == "torch"
    assert prompt_backend([1, 2], Model()).name == "numpy"


def test_a_circle_and_a_property_do_no_harm():
    class Proud:
        @property
        def weight(self):
            raise AssertionError("it was asked")

    model = Model(proud=Proud())
    model.me = [model]
    assert name(None, model) is None


def test_weights_without_data_are_refused():
    with pytest.raises(ConfigError, match="must have its weights on a device; got arrays without data"):
        AutoregressiveBatchInference(torch.nn.Linear(2, 2, device="meta"), max_model_len=8)


def test_an_object_with_nine_operations_needs_no_base_class():
    class Nine:
        name = "nine"

    for operation in ("shape", "cat", "eq", "vectorize_dim", "slice", "idx_where_all_true", "repeat", "unsqueeze"):
        setattr(Nine, operation, getattr(NumpyBackend(), operation))
    for make in (AutoregressiveBatchInference, FeedforwardBatchInference):
        with pytest.raises(ConfigError, match="Nine with 8 of the nine operations: it lacks pop"):
            make(Model(max_model_len=8), backend=Nine())
    Nine.pop = NumpyBackend().pop
    assert isinstance(backend_of(Nine(), Model()), NineBackend)
    Nine.name = None
    with pytest.raises(ConfigError, match="without a name"):
        backend_of(Nine(), Model())


def test_a_module_of_torch_gets_tensors_whatever_the_prompt_is():
    class Net(torch.nn.Module):
        vocab_size, max_model_len = 20, 64

        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.head = torch.nn.Embedding(20, 8), torch.nn.GRU(8, 8), torch.nn.Linear(8, 20)

        def logits(self, tokens, lengths):
            return self.head(self.rnn(self.embed(tokens))[0][:, -1])

    greedy = hibachi.SamplingParams(temperature=0, max_tokens=3)
    with AutoregressiveBatchInference(Net(), deterministic=False) as engine:
        prompts = [1, 2, 3], np.array([1, 2, 3]), torch.tensor([1, 2, 3])
        answers = [engine.run(prompt, greedy).collect() for prompt in prompts]
    assert answers[0] == answers[1] == answers[2]


def test_leaves_stand_in_lists_and_dictionaries_however_deep():
    assert leaves({"a": [1, (2, {"b": 3})], "c": 4}) == [1, 2, 3, 4]
    assert leaves(5) == [5] and leaves([]) == []


def test_a_method_of_another_meaning_and_a_class_tell_nothing():
    class Named:
        def parameters(self, of):
            raise AssertionError("is not called")

    assert name(None, Named()) is None
    assert name(None, torch.nn.GRU) is None
