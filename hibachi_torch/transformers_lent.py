"""A causal language model of `transformers` that its owner lends to the paged engine for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hibachi.backend.array_backend import ArrayBackend
from hibachi.errors import UnsupportedOperation
from hibachi_torch.transformers_attention import CannotRun
from hibachi_torch.transformers_check import check
from hibachi_torch.transformers_model import TransformersModel


@contextmanager
def lent(module: Any, backend: ArrayBackend, max_model_len: int) -> Iterator[TransformersModel]:
    """The module's layers over our cache; behind the context, attention and configuration are as before. Raises
    UnsupportedOperation for one that the paged engine cannot run.
    """
    eos = module.generation_config.eos_token_id
    ids = [
        i for i in (eos if isinstance(eos, list) else [eos]) if i in range(module.config.get_text_config().vocab_size)
    ]
    facts: Any = {"dtype": str(module.dtype).removeprefix("torch."), "eos_ids": tuple(ids), "bos_ids": ()}
    configs = {id(m.config): m.config for m in module.modules() if hasattr(m, "config")}
    before = [(config, dict(vars(config))) for config in configs.values()]
    try:
        with backend.guard():
            named: Any = type(type(module).__name__, (TransformersModel,), {})  # as which messages are to name it
            model = named(module, backend, max_model_len=max_model_len, **facts)
            check(model)
        yield model
    except CannotRun as e:
        raise UnsupportedOperation(
            f"transformers' {type(module).__name__} cannot run in the paged engine: {e}. Keys and values from "
            f"elsewhere are taken by models that can (docs/transformers.md)."
        ) from e
    finally:
        for config, values in before:
            vars(config).clear()
            vars(config).update(values)
