"""Any causal language model of `transformers`, as it is, in our engine: its layers, our batching and paged cache.

For architectures that hibachi has no description of. transformers gets the contents of config.json and the tensors of
the safetensors files, never the folder: so nothing in a folder can make it run code, unpickle or fetch anything.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from hibachi.backend.array_backend import ArrayBackend, LayerCache
from hibachi.backend.layout import CacheSpec, StepInputs
from hibachi.common.installed import need
from hibachi.errors import ConfigError, HibachiError, InvalidModelFiles, UnknownArchitecture
from hibachi.llm.model.fields import Fields, read_json
from hibachi.llm.model.files import open_files
from hibachi.llm.model.weights import OWN_HEAD, Checkpoint, refuse_quantized
from hibachi_torch.transformers_attention import (
    LOOK,
    PAGED,
    AttentionCall,
    CannotRun,
    Sight,
    looking,
    register,
    running,
)
from hibachi_torch.transformers_check import check, some_tokens
from hibachi_torch.transformers_own import OwnModel, own

log: logging.Logger = logging.getLogger("hibachi.engine")

NO_LIMIT = 2**20  # tokens of a model that keeps states only, as hibachi's own Mamba has it
_DTYPES = ("float32", "float16", "bfloat16", "float64")
_PLAIN = {"use_cache": False, "return_dict": True, "output_attentions": False, "output_hidden_states": False}
_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
"""Kinds of layers that attend() may serve, and the mask tells whether it does. Others are recurrent or choose keys."""


class TransformersModel:
    """A `CachedModel` around a module of transformers, made by `load`.

    params: the module's own parameters by name, for those who count them; `step` uses the module. arch_name: its
    class. max_model_len: the longest sequence. eos_ids, bos_ids: from the files (`hibachi.llm.model.files`).
    """

    def __init__(
        self,
        module: Any,
        backend: ArrayBackend,
        *,
        dtype: str,
        max_model_len: int,
        eos_ids: tuple[int, ...],
        bos_ids: tuple[int, ...],
    ) -> None:
        self.module, self.backend, self.dtype, self.max_model_len = module, backend, dtype, max_model_len
        self.arch_name = type(module).__name__
        self.eos_ids, self.bos_ids = eos_ids, bos_ids
        self.params = dict(module.named_parameters())
        for name, value in _PLAIN.items():
            setattr(module.config, name, value)
        self._accepted = inspect.signature(module.forward).parameters
        self._keeps = "logits_to_keep" in self._accepted
        self._fixed = {"use_cache": False} if "use_cache" in self._accepted else {}
        register()
        self._calls, self.vocab_size = self._look()
        _attend_by(module, PAGED)

    def cache_spec(self) -> CacheSpec:
        """Keys and values of each call of attention; layers that share them have a copy each."""
        return [call.memory for call in self._calls]

    def step(self, params: Any, cache: list[LayerCache], x: StepInputs[Any]) -> tuple[Any, list[LayerCache]]:
        """Logits [n_out, vocab], float32, after the tokens at `x.last`, and the new cache."""
        with running(self.backend, self._calls, cache, x) as new:
            logits = self._forward(x.tok, x.pos, x.last)
        return logits, new

    def alone(self, tokens: Any) -> Any:
        """Logits [T, vocab] after each of tokens [T] from the module's own forward pass, without us; for checks."""
        _attend_by(self.module, "eager")
        try:
            return self.module(input_ids=tokens.long()[None], **self._fixed).logits[0].float()
        finally:
            _attend_by(self.module, PAGED)

    def _forward(self, tokens: Any, positions: Any, last: Any) -> Any:
        keep = {"logits_to_keep": last.long()} if self._keeps else {}
        out = self.module(input_ids=tokens.long()[None], position_ids=positions.long()[None], **keep, **self._fixed)
        return (out.logits[0] if self._keeps else out.logits[0, last]).float()

    def _look(self) -> tuple[list[AttentionCall], int]:
        """The calls of attention in a forward pass, and the size of the logits."""
        config = self.module.config
        if config.is_encoder_decoder:
            raise CannotRun("it has an encoder")
        if getattr(config, "alibi", False):
            raise CannotRun("its attention has an ALiBi bias, which transformers hands over as a mask")
        kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
        if odd := sorted(kinds - _LAYERS):
            raise CannotRun(f"it has layers of another kind than attention ({', '.join(odd)})")
        _attend_by(self.module, LOOK)
        if config._attn_implementation != LOOK:
            raise CannotRun("its attention does not go through transformers' attention interface")
        if "position_ids" not in self._accepted:
            raise CannotRun("it takes no positions, but counts them by itself")
        tokens = self.backend.put(some_tokens(min(8, self.max_model_len), config.get_text_config().vocab_size, seed=0))
        with looking(self.max_model_len) as calls:
            positions = torch.arange(len(tokens), device=tokens.device)
            logits = self._forward(tokens, positions, positions)
        layers = config.get_text_config().num_hidden_layers
        if len(calls) < layers:
            raise CannotRun(
                f"only {len(calls)} of its {layers} layers attend through transformers' attention interface"
                if calls
                else "its attention does not go through transformers' attention interface"
            )
        return calls, int(logits.shape[-1])


def load(
    path: Path, backend: ArrayBackend, *, dtype: str, max_model_len: int | None
) -> TransformersModel | OwnModel | None:
    """The model in the folder `path`: config.json and safetensors; None if transformers does not know its kind.
    With its own cache if the paged engine cannot run it, which the log says.

    dtype: to compute in. max_model_len: the longest sequence to be ready for; None means what the model was trained
    for. Raises UnknownArchitecture for one that would not compute here what it computes by itself, InvalidModelFiles,
    ConfigError, UnsupportedOperation for a dtype that torch lacks, MissingExtra without transformers.
    """
    contents = read_json(path / "config.json")
    kind = contents.get("model_type")
    library = need("transformers", f"Running the architecture {kind!r}, which hibachi does not describe,", "hf")
    auto = importlib.import_module("transformers.models.auto")
    known = isinstance(kind, str) and kind in auto.CONFIG_MAPPING
    make = auto.CONFIG_MAPPING[kind] if known else None
    if make is None or make not in auto.MODEL_FOR_CAUSAL_LM_MAPPING:
        if contents.get("auto_map"):
            raise UnknownArchitecture(
                f"config.json: model_type {kind!r} is known neither to hibachi nor as a causal language model to "
                f"transformers {library.__version__}, and auto_map says that its code lies in the folder. hibachi runs "
                f"no code from a model's folder: use a version of transformers that has it, or write the model as a "
                f"hibachi.CachedModel."
            )
        return None
    cls = auto.MODEL_FOR_CAUSAL_LM_MAPPING[make]
    _check_config(contents, cls.__name__)
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(_DTYPES)}; got {dtype!r}.")
    files = Checkpoint(path)  # checks the files, so that transformers meets none that is damaged or lies elsewhere
    refuse_quantized(files, contents)
    with _quiet(), torch.device("cpu"):  # also where the caller's is "meta"
        config = _config(make, contents)
        max_model_len = _max_len(config, max_model_len)
        said, rows = Fields(open_files(path).config), config.get_text_config().vocab_size
        eos_ids, bos_ids = (said.ids(name, rows) for name in ("eos_token_id", "bos_token_id"))
        module = _module(cls, config, files, backend.dtype(dtype)).to(backend.device)
        facts: Any = {"dtype": dtype, "max_model_len": max_model_len, "eos_ids": eos_ids, "bos_ids": bos_ids}
        with backend.guard():
            try:
                model = TransformersModel(module, backend, **facts)
                check(model)
                return model
            except CannotRun as e:
                why = str(e)
            except (HibachiError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as e:
                why = f"its forward pass failed on packed tokens ({type(e).__name__}: {e})"
                if Sight.__name__ in str(e):  # it took one for an array
                    why = "it works on its attention masks by itself"
            try:
                found = own(module, backend, **facts)
            except CannotRun as e:
                raise UnknownArchitecture(
                    f"transformers' {cls.__name__} can run neither in the paged engine: {why}; nor with a cache of its "
                    f"own: {e}. Use a model of another architecture, or write this one as a "
                    f"hibachi.CachedModel and pass the object to the engine."
                ) from e
    log.warning("%s runs with a cache of its own, as the paged engine cannot run it: %s", cls.__name__, why)
    return found


def _check_config(contents: Mapping[str, Any], name: str) -> None:
    classes = contents.get("architectures")
    if classes and name not in classes:
        raise UnknownArchitecture(
            f"config.json: architectures is {classes!r}; supported for this model_type: {[name]!r}. Use the variant "
            f"that generates text."
        )
    if contents.get("is_causal") is False:  # its layers would see tokens that are not there yet
        raise Fields(contents).unknown("is_causal", False, [True])


_OURS_TO_SAY = {"auto_map", "attn_implementation", "experts_implementation", "fusion_config", "distributed_config"}
_OURS_TO_SAY |= {"quantization_config"}  # a left-over here: `refuse_quantized` has seen the weights


def _config(make: Any, contents: Mapping[str, Any]) -> Any:
    try:
        return make.from_dict({k: _decoded(v) for k, v in contents.items() if k.lstrip("_") not in _OURS_TO_SAY})
    except Exception as e:  # the library raises what it likes
        raise InvalidModelFiles(
            f"config.json: transformers' {make.__name__} refuses it ({type(e).__name__}: {e}). Take the config.json "
            f"that came with these weights."
        ) from e


def _decoded(value: Any) -> Any:
    """The value with infinities where transformers wrote them as objects."""
    if isinstance(value, Mapping):
        return (
            float(value["__float__"]) if value.keys() == {"__float__"} else {k: _decoded(v) for k, v in value.items()}
        )
    return [_decoded(v) for v in value] if isinstance(value, list) else value


def _max_len(config: Any, wanted: int | None) -> int:
    """The longest sequence: `wanted`, or the trained length. Longrope changes all angles beyond its first length."""
    text = config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "max_target_positions")
    trained = next((n for name in names if isinstance(n := getattr(text, name, None), int)), None)
    for rope in _ropes(getattr(text, "rope_parameters", None)):
        if rope.get("rope_type") == "longrope" and trained is not None:
            trained = min(trained, rope.get("original_max_position_embeddings") or trained)
    kinds = set(getattr(text, "layer_types", None) or ())
    if trained is None and kinds and not kinds & _LAYERS:  # states only
        trained = NO_LIMIT
    limit = wanted if trained is None else trained
    if limit is None:
        raise ConfigError("config.json does not say how long a sequence may be. Pass max_model_len=N.")
    if wanted is not None and not 1 <= wanted <= limit:
        raise ConfigError(f"max_model_len must be between 1 and {limit} (what this model can do); got {wanted}.")
    return limit if wanted is None else wanted


def _ropes(parameters: Any) -> list[Mapping[str, Any]]:
    """Those of the model, or of each kind of layer."""
    if not isinstance(parameters, Mapping):
        return []
    return [parameters, *(p for p in parameters.values() if isinstance(p, Mapping))]


def _module(cls: Any, config: Any, files: Checkpoint, dtype: Any) -> Any:
    """The module with its weights. Raises one InvalidModelFiles for all that are missing, superfluous or misshapen."""
    safetensors, entries = need("safetensors", "Reading weights"), files.entries
    with ExitStack() as stack:
        shards = {e.file for e in entries.values()}
        opened = {f: stack.enter_context(safetensors.safe_open(str(f), framework="pt")) for f in shards}
        tensors = {name: opened[e.file].get_slice(name) for name, e in entries.items()}
        try:
            module, report = cls.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=dtype,
                attn_implementation="eager",
                local_files_only=True,
                output_loading_info=True,
            )
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as e:
            raise InvalidModelFiles(
                f"The weights in {files.path} do not load into transformers' {cls.__name__} ({type(e).__name__}: {e}). "
                f"Take config.json and the weights from one download."
            ) from e
    faults = [
        f"{what}: {', '.join(map(str, sorted(report[kind])))}"
        for kind, what in (("missing_keys", "missing"), ("unexpected_keys", "not part of this architecture"))
        if report[kind]
    ]
    if faults:
        raise InvalidModelFiles(
            f"The weights in {files.path} do not fit its config.json:\n  " + "\n  ".join(faults) + "\n"
            "Take config.json and the weights from one download."
        )
    find = module.get_parameter_or_buffer
    tied = module.get_expanded_tied_weights_keys(all_submodels=True).items()
    for name in [name for name, source in tied if find(name) is not find(source)]:
        log.warning(OWN_HEAD, name)  # transformers' own warning is silenced
    return module.eval()


def _attend_by(module: Any, name: str) -> None:
    module.set_attn_implementation(name)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and advice, as the user did not call it."""
    log = importlib.import_module("transformers.utils.logging")
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
