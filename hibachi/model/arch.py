"""What config.json says about a model, as one description that the decoder is built from.

Two generations of files are in use: `rope_theta` and `rope_scaling` at the top level (transformers 4), or both inside
`rope_parameters` (transformers 5).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from hibachi.errors import InvalidModelFiles, UnknownArchitecture

Config: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Rotary frequencies divided by one factor (position interpolation, Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Rotary frequencies as Llama 3.1 stretches them: low ones are divided by `factor`, high ones kept.

    A frequency is high if its wavelength is below original_context / high_freq_factor, and low if it is above
    original_context / low_freq_factor; between the two it is interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class Arch:
    """A decoder in numbers."""

    hidden_size: int
    """Width of the residual stream."""
    heads: int
    """Query heads of a layer."""
    kv_heads: int
    """Heads of keys and values; a divisor of `heads`, each serves heads / kv_heads query heads."""
    head_dim: int
    """Width of one head, even; heads * head_dim need not be hidden_size."""
    layers: int
    """Number of blocks."""
    intermediate: int
    """Width inside the feed-forward part of a block."""
    vocab_size: int
    """Number of token ids, which is the number of logits."""
    rms_eps: float
    """What RMSNorm adds to the mean square."""
    rope_theta: float
    """Base of the rotary frequencies."""
    rope_scaling: LinearScaling | Llama3Scaling | None
    """How the rotary frequencies are stretched beyond the context that the model was first trained with."""
    max_positions: int
    """The longest context that the model was trained for."""
    tied: bool
    """The output head is the embedding matrix."""
    attention_bias: bool | None
    """The four attention projections have biases; None: the file does not say, so those in the weights count."""
    mlp_bias: bool | None
    """The three feed-forward projections have biases; None: the file does not say, so those in the weights count."""
    bos_ids: tuple[int, ...]
    """Ids that begin a text, usually one; empty if the model has none."""
    eos_ids: tuple[int, ...]
    """Ids that end a text; empty if the model has none."""


def load_arch(path: str | Path) -> Arch:
    """`read_arch` of config.json in the directory `path`.

    The bos and eos ids of generation_config.json win, as in transformers: chat models name the end of a turn there.
    """
    path = Path(path)
    arch = read_arch(read_json(path / "config.json"))
    if not (path / "generation_config.json").exists():
        return arch
    generation = read_json(path / "generation_config.json")
    return replace(
        arch,
        bos_ids=_ids(generation, "bos_token_id", arch.vocab_size) or arch.bos_ids,
        eos_ids=_ids(generation, "eos_token_id", arch.vocab_size) or arch.eos_ids,
    )


def read_arch(config: Config) -> Arch:
    """The description in the contents of a config.json.

    Raises UnknownArchitecture for a model of another kind, InvalidModelFiles for a field that is missing, of the wrong
    type or in contradiction to another.
    """
    kind, classes = config.get("model_type"), config.get("architectures")
    if kind not in _FAMILIES:
        raise _unknown("model_type", kind, sorted(_FAMILIES), "Use a model of this type")
    supported, read = _FAMILIES[kind]
    if classes is not None and classes != [supported]:
        raise _unknown("architectures", classes, [[supported]], "Use the variant that generates text")
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "unknown")
        raise UnknownArchitecture(
            f"config.json: the weights are quantized (quant_method {method!r}); expected float32, float16 or bfloat16 "
            f"weights. Use the original, unquantized model."
        )
    return read(config)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises InvalidModelFiles."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidModelFiles(
            f"{path} is missing. Expected a directory in Hugging Face layout: "
            f"config.json, model.safetensors and, for text, tokenizer.json."
        ) from None
    except (OSError, ValueError) as e:
        raise InvalidModelFiles(f"{path} cannot be read as JSON: {e}. Copy or download the file again.") from e
    if not isinstance(value, dict):
        raise InvalidModelFiles(f"{path}: expected a JSON object; got {type(value).__name__}. Download it again.")
    return value


# ---- the Llama family ----------------------------------------------------------------------------------------------


def _llama(config: Config) -> Arch:
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise _unknown("hidden_act", act, ["silu"], "Use a model with this activation")
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise _contradiction(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
    if config.get("head_dim") is None and hidden % heads:
        raise _contradiction(
            f"without head_dim, hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads})"
        )
    head_dim = _count(config, "head_dim", hidden // heads)
    if head_dim % 2:
        raise _contradiction(f"the size of a head ({head_dim}) must be even, as rotary embeddings pair its halves")
    theta, scaling = _rope(config)
    vocab_size = _count(config, "vocab_size")
    return Arch(
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=_count(config, "num_hidden_layers"),
        intermediate=_count(config, "intermediate_size"),
        vocab_size=vocab_size,
        rms_eps=_number(config, "rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=_count(config, "max_position_embeddings"),
        tied=bool(_flag(config, "tie_word_embeddings")),
        attention_bias=_flag(config, "attention_bias"),
        mlp_bias=_flag(config, "mlp_bias"),
        bos_ids=_ids(config, "bos_token_id", vocab_size),
        eos_ids=_ids(config, "eos_token_id", vocab_size),
    )


_FAMILIES: dict[Any, tuple[str, Callable[[Config], Arch]]] = {"llama": ("LlamaForCausalLM", _llama)}
"""model_type -> the class that `architectures` names, and how its config.json is read."""


def _rope(config: Config) -> tuple[float, LinearScaling | Llama3Scaling | None]:
    """Base and stretching of the rotary frequencies, from either generation of the file."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(value, Mapping):
            raise _wrong(name, "an object", value)
    theta = _number(config, "rope_theta", 10000.0)
    if "rope_theta" in new:
        theta = _number(new, "rope_theta", where="rope_parameters.")
        if config.get("rope_theta") not in (None, theta):
            raise _contradiction(
                f"rope_theta ({config['rope_theta']}) differs from rope_parameters.rope_theta ({theta})"
            )
    if (share := new.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise _unknown("partial_rotary_factor", share, [1.0], "Use a model that rotates whole heads")
    scalings = [
        scaling
        for where, p in (("rope_parameters.", new), ("rope_scaling.", old))
        if (scaling := _scaling(p, where)) is not None
    ]
    if len(set(scalings)) > 1:
        raise _contradiction(f"rope_parameters ({scalings[0]}) differs from rope_scaling ({scalings[1]})")
    return theta, scalings[0] if scalings else None


def _scaling(p: Config, where: str) -> LinearScaling | Llama3Scaling | None:
    kind = p.get("rope_type", p.get("type", "default"))  # `type` is the older spelling
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(_number(p, "factor", where=where))
    if kind == "llama3":
        low, high = (_number(p, name, where=where) for name in ("low_freq_factor", "high_freq_factor"))
        if low >= high:
            raise _contradiction(f"{where}low_freq_factor ({low}) must be below {where}high_freq_factor ({high})")
        return Llama3Scaling(
            factor=_number(p, "factor", where=where),
            low_freq_factor=low,
            high_freq_factor=high,
            original_context=_count(p, "original_max_position_embeddings", where=where),
        )
    raise _unknown(f"{where}rope_type", kind, ["default", "linear", "llama3"], "Use a model with one of these")


# ---- fields --------------------------------------------------------------------------------------------------------


def _count(config: Config, name: str, default: int | None = None, where: str = "") -> int:
    """A positive integer; null counts as missing, as transformers writes it for a default."""
    value = config.get(name)
    value = default if value is None else value
    if not _is_int(value) or value < 1:
        raise _wrong(where + name, "an integer >= 1", value)
    return value


def _number(config: Config, name: str, default: float | None = None, where: str = "") -> float:
    """A positive number."""
    value = config.get(name)
    value = default if value is None else value
    if not (_is_int(value) or isinstance(value, float)) or not 0 < value < math.inf:
        raise _wrong(where + name, "a number > 0", value)
    return float(value)


def _flag(config: Config, name: str) -> bool | None:
    value = config.get(name)
    if value not in (None, True, False):
        raise _wrong(name, "true or false", value)
    return value


def _ids(config: Config, name: str, vocab_size: int) -> tuple[int, ...]:
    """Token ids, written as null, one integer or a list."""
    value = config.get(name)
    ids = tuple(value) if isinstance(value, list) else () if value is None else (value,)
    if not all(_is_int(i) and i < vocab_size for i in ids):
        raise _wrong(name, f"integers below vocab_size ({vocab_size})", value)
    return tuple(i for i in ids if i >= 0)  # some files write -1 for "none"


def _is_int(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _wrong(field: str, expected: str, got: Any) -> InvalidModelFiles:
    got = "no such field" if got is None else repr(got)
    return InvalidModelFiles(
        f"config.json: {field} must be {expected}; got {got}. Take the config.json that came with these weights."
    )


def _contradiction(what: str) -> InvalidModelFiles:
    return InvalidModelFiles(f"config.json contradicts itself: {what}. Take the one that came with these weights.")


def _unknown(field: str, found: Any, supported: list[Any], mend: str) -> UnknownArchitecture:
    got = "is missing" if found is None else f"is {found!r}"
    return UnknownArchitecture(
        f"config.json: {field} {got}; supported: {', '.join(map(repr, supported))}. {mend}, or write the model as a "
        f"hibachi.model.ladder.CachedModel and pass the object to the engine."
    )
