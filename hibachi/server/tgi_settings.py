"""`--compat tgi`: what each flag and variable of text-generation-launcher 3.3.7 becomes here, or why nothing does.

Ours win: --port over HIBACHI_PORT, that over TGI's --port or -p, that over PORT, and that over the TOML file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hibachi.common.settings.kinds import SWITCH, ValueKind, choice, integer, seconds, size, text
from hibachi.engine.speculation.config import MOST
from hibachi.errors import ConfigError
from hibachi.llm.dialects.tgi.limits import TgiLimits
from hibachi.llm.model.hub import parse_name

COMPAT = "tgi"
NAME = "tgi"  # what TGI's clients call any model
# the name that clients send if they were given none: huggingface_hub's chat_completion
NAMELESS = frozenset({"", "dummy"})
DEFAULTS: dict[str, Any] = {
    "host": "0.0.0.0",
    "port": 3000,
    "allowed_origins": ("*",),
    "max_body_size": 2_000_000,
    "drain_timeout": 90.0,
    "metric_names": "tgi",
}
"""The launcher's defaults of our settings."""
RATIO, PATIENCE = 0.3, 20  # of --waiting-served-ratio and --max-waiting-tokens, if one of them is given


@dataclass(frozen=True, slots=True)
class TgiAsked(TgiLimits):
    """What TGI's flags ask for besides settings of ours, by the launcher's names; None means as the model or ours
    say.
    """

    max_batch_total_tokens: int | None = None
    waiting_served_ratio: float | None = None
    max_waiting_tokens: int | None = None
    huggingface_hub_cache: str | None = None

    def gate(self) -> tuple[float, int] | None:
        """Ratio and patience of the policy waiting-served; None means neither was given, and prompts need not wait."""
        ratio, patience = self.waiting_served_ratio, self.max_waiting_tokens
        if ratio is None and patience is None:
            return None
        return RATIO if ratio is None else ratio, PATIENCE if patience is None else patience


@dataclass(frozen=True, slots=True)
class TgiFlag:
    """A flag of the launcher, and the variable of the same name in upper case.

    becomes: keys of our settings and fields of `TgiAsked`; (): nothing. about: what else is to be known, or why
    nothing. same: values for which nothing needs to be said. refused: it cannot be had, and to ignore it would change
    answers. change: the value that is passed on; it may raise ConfigError. short: such as "-p".
    """

    name: str
    kind: ValueKind
    becomes: tuple[str, ...] = ()
    about: str = ""
    same: tuple[Any, ...] = ()
    refused: bool = False
    change: Callable[[Any], Any] | None = None
    short: str = ""

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        return self.key.upper()

    @property
    def dest(self) -> str:
        """Where the command line keeps it."""
        return f"tgi_{self.key}"


def _number(least: float, most: float = 1e9) -> ValueKind:
    def read(given: Any) -> float:
        number = float(given)
        if not least <= number <= most:
            raise ValueError
        return number

    return ValueKind("X", f"a number from {least:g} to {most:g}" if most < 1e9 else f"a number >= {least:g}", read)


def _quantization(given: str) -> str:
    found = {"eetq": "int8", "bitsandbytes": "int8", "bitsandbytes-nf4": "int4", "bitsandbytes-fp4": "int4"}.get(given)
    if found is not None:
        return found
    raise ConfigError(
        f"--quantize {given}: matrices are quantized to eight bits here, by bitsandbytes or eetq (both become "
        f"--quantization int8), or to four, by bitsandbytes-nf4 or -fp4 (int4). Take the model without quantization, "
        f"and one of these, or a .gguf file."
    )


def _template(given: str) -> str | None:
    """The chat template in a tokenizer_config.json; None means it has none."""
    try:
        found = json.loads(Path(given).read_text())
    except (OSError, ValueError) as e:
        raise ConfigError(f"--tokenizer-config-path {given}: expected a tokenizer_config.json; {e}.") from e
    template = found.get("chat_template") if isinstance(found, dict) else None
    if isinstance(template, list):  # named ones, of which TGI takes this
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) and template else None


_PLACE = "processes meet by themselves, or as torchrun says"
_TRACES = "no traces are sent"
_TUNNEL = "no tunnel is opened"
_WATERMARK = "texts are not watermarked"
_ROPE = "the model's config.json says it: write rope_scaling there"


def _speculate(n: int) -> str:
    return json.dumps({"num_speculative_tokens": n, "prompt_lookup_min": 2, "auto": True}) if n else "off"


FLAGS = (
    # ---- the model ----
    TgiFlag("model-id", text("MODEL"), ("model",)),
    TgiFlag("revision", text("NAME"), ("model",), "org/name becomes org/name@REVISION; not for files"),
    TgiFlag("tokenizer-config-path", text("FILE"), ("chat_template",), "its chat_template, if it has one",
            change=_template),
    TgiFlag("dtype", choice("float16", "bfloat16"), ("dtype",), "ours takes float32 as well"),
    TgiFlag("quantize", choice("awq", "compressed-tensors", "eetq", "exl2", "gptq", "marlin", "bitsandbytes",
            "bitsandbytes-nf4", "bitsandbytes-fp4", "fp8"), ("quantization",),
            "eetq and bitsandbytes become int8, bitsandbytes-nf4 and -fp4 int4; the others are refused",
            change=_quantization),
    TgiFlag("kv-cache-dtype", choice("fp8_e4m3fn", "fp8_e5m2"), (), "keys and values are kept as the model has them",
            refused=True),
    TgiFlag("rope-scaling", choice("linear", "dynamic"), (), _ROPE, refused=True),
    TgiFlag("rope-factor", _number(0), (), _ROPE, same=(1.0,), refused=True),
    TgiFlag("lora-adapters", text("NAMES"), (), "adapters are not served; merge one into the model's weights",
            refused=True),
    TgiFlag("weights-cache-override", text("PATH"), (), "name the folder of the weights as --model-id", refused=True),
    TgiFlag("huggingface-hub-cache", text("PATH"), ("huggingface_hub_cache",), "as HF_HUB_CACHE says it"),
    TgiFlag("trust-remote-code", SWITCH, (), "no code of a model's repository is run", same=(False,)),
    # ---- limits ----
    TgiFlag("max-concurrent-requests", integer(1), ("max_concurrent_requests",), "one more gets 429 at once"),
    TgiFlag("max-best-of", integer(1), ("max_best_of",), "of TGI's routes"),
    TgiFlag("max-stop-sequences", integer(0), ("max_stop_sequences",), "of TGI's routes"),
    TgiFlag("max-top-n-tokens", integer(0), ("max_top_n_tokens",), "of TGI's routes"),
    TgiFlag("max-client-batch-size", integer(1), ("max_client_batch_size",), "prompts and inputs of a request"),
    TgiFlag("max-input-tokens", integer(1), ("max_input_tokens",), "less than max-total-tokens"),
    TgiFlag("max-input-length", integer(1), ("max_input_tokens",), "the older name of max-input-tokens"),
    TgiFlag("max-total-tokens", integer(2), ("max_model_len", "max_total_tokens"), "at most what the model holds"),
    TgiFlag("payload-limit", size(), ("max_body_size",)),
    TgiFlag("disable-grammar-support", SWITCH, ("disable_grammar_support",),
            "whatever field says the form of an answer is refused"),
    TgiFlag("max-image-fetch-size", size(), (), "images are not read"),
    # ---- the batch ----
    TgiFlag("max-batch-prefill-tokens", integer(1), ("max_num_batched_tokens",),
            "tokens of prompts and new ones alike; longer prompts are computed in parts"),
    TgiFlag("max-batch-total-tokens", integer(1), ("max_batch_total_tokens",), "what the cache holds"),
    TgiFlag("max-batch-size", integer(1), ("max_num_seqs",)),
    TgiFlag("waiting-served-ratio", _number(0), ("waiting_served_ratio",),
            f"with the policy waiting-served, which it turns on (else prompts never wait); {RATIO} with the next"),
    TgiFlag("max-waiting-tokens", integer(0), ("max_waiting_tokens",), f"likewise; {PATIENCE} with the one before"),
    TgiFlag("speculate", integer(0, MOST), ("speculative_config",), "n-grams of 2 tokens, where they pay",
            change=_speculate),
    # ---- the server ----
    TgiFlag("hostname", text("NAME"), ("host",), "the variable HOSTNAME is the name of a pod, and ignored"),
    TgiFlag("port", integer(0, 65535), ("port",), short="-p"),
    TgiFlag("api-key", text("KEY"), ("api_key",), "upper and lower case differ", change=lambda key: (key,)),
    TgiFlag("cors-allow-origin", text("ORIGIN"), ("allowed_origins",), "* if there is none, as with TGI"),
    TgiFlag("graceful-termination-timeout", seconds(), ("drain_timeout",), short="-g"),
    TgiFlag("json-output", SWITCH, ("log_format",), change=lambda on: "json" if on else "text"),
    # ---- what has no effect ----
    TgiFlag("prometheus-port", integer(0, 65535), (), "/metrics is on the port of everything else"),
    TgiFlag("validation-workers", integer(1), (), "long texts are read in threads, as many as are of use"),
    TgiFlag("sharded", SWITCH, (), "--num-shard says it", same=(False, True)),
    TgiFlag("num-shard", integer(1), ("tensor_parallel_size",)),
    TgiFlag("shard-uds-path", text("PATH"), (), _PLACE),
    TgiFlag("master-addr", text("NAME"), (), _PLACE),
    TgiFlag("master-port", integer(0, 65535), (), _PLACE),
    TgiFlag("cuda-graphs", text("N,N"), (), "the backend decides"),
    TgiFlag("cuda-memory-fraction", _number(0, 1), (), "--kv-cache-memory-bytes says how large the cache is", (1.0,)),
    TgiFlag("disable-custom-kernels", SWITCH, (), "--kernels and --autotune say which kernels are taken", (False,)),
    TgiFlag("enable-prefill-logprobs", SWITCH, (), "a request that asks for them gets them", same=(False, True)),
    TgiFlag("watermark-gamma", _number(-1e9), (), _WATERMARK),
    TgiFlag("watermark-delta", _number(-1e9), (), _WATERMARK),
    TgiFlag("otlp-endpoint", text("URL"), (), _TRACES),
    TgiFlag("otlp-service-name", text("NAME"), (), _TRACES),
    TgiFlag("ngrok", SWITCH, (), _TUNNEL, same=(False,)),
    TgiFlag("ngrok-authtoken", text("TOKEN"), (), _TUNNEL),
    TgiFlag("ngrok-edge", text("NAME"), (), _TUNNEL),
    TgiFlag("usage-stats", choice("on", "off", "no-stack"), (), "no statistics are sent", same=("off",)),
    TgiFlag("env", SWITCH, (), "`hibachi doctor` tells of the machine", same=(False,), short="-e"),
)  # fmt: skip
BY_KEY = {flag.key: flag for flag in FLAGS}
_NO_VARIABLE = ("hostname", "env")  # the first is always there, and the second is no variable of TGI's either


@dataclass
class SettingsReader:
    """The result of reading the launcher's flags and variables.

    others: settings of ours, each with its value and where it was given; variables before flags, as the last one
    counts. asked: fields of `TgiAsked`. where: by the flag's key, where its value was given. remarks: lines for the
    log.
    """

    others: list[tuple[str, Any, str]] = field(default_factory=list)
    asked: dict[str, Any] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    revision: str | None = None

    def done(self, step: int) -> TgiAsked:
        """Check the flags against each other and the tokens of a step. Raises ConfigError for contradictions."""
        asked = TgiAsked(**self.asked)
        longest, most, total = asked.max_input_tokens, asked.max_total_tokens, asked.max_batch_total_tokens
        if longest is not None and most is not None and longest >= most:
            raise ConfigError(
                f"max-input-tokens must be less than max-total-tokens, as at least one token is new; got {longest} and "
                f"{most}."
            )
        if total is not None and most is not None and most > total:
            raise ConfigError(
                f"max-total-tokens must be at most max-batch-total-tokens, or no such request could run; got {most} "
                f"and {total}."
            )
        if total is not None and "max_batch_prefill_tokens" in self.where and step > total:
            raise ConfigError(
                f"max-batch-prefill-tokens must be at most max-batch-total-tokens; got {step} and {total}."
            )
        return asked


def read(flags: Mapping[str, Any], environment: Mapping[str, str]) -> SettingsReader:
    """Read the launcher's flags (by their keys) and variables. Raises ConfigError, which names the flag or the
    variable.
    """
    found = SettingsReader()
    given: dict[str, Any] = {}
    for flag, value, where in _given(flags, environment):
        if flag.key == "max_input_length" and found.where.get("max_input_tokens"):
            raise ConfigError(f"{found.where['max_input_tokens']} and {where} say the same thing. Leave {where} out.")
        given[flag.key] = _value(flag, value, where)
        found.where[flag.key] = where
    for key, value in given.items():
        _take(found, BY_KEY[key], value)
    if environment.get("HOSTNAME"):
        found.remarks.append("HOSTNAME is taken for the name of a pod, and ignored; --host says where to listen")
    return found


def _given(flags: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[tuple[TgiFlag, Any, str]]:
    """The given values in the order of `FLAGS`, the flag before the variable."""
    for flag in FLAGS:
        if (value := flags.get(flag.key)) is not None:
            yield flag, value, flag.flag
        elif flag.key not in _NO_VARIABLE and (value := environment.get(flag.variable, "").strip()):
            yield flag, [value] if flag.key == "cors_allow_origin" else value, flag.variable


def _value(flag: TgiFlag, given: Any, where: str) -> Any:
    if isinstance(given, list):
        return tuple(_value(flag, one, where) for one in given)
    try:
        return flag.kind.read(given)
    except (ValueError, TypeError, AttributeError, LookupError, OverflowError):
        secret = flag.name in ("api-key", "ngrok-authtoken")  # not for logs
        shown = "something else" if secret else repr(given)[:80]
        raise ConfigError(f"{where}: expected {flag.kind.expected}; got {shown}.") from None


def _take(found: SettingsReader, flag: TgiFlag, value: Any) -> None:
    where = found.where[flag.key]
    if flag.refused and value not in flag.same:
        raise ConfigError(f"{where} cannot be followed, and without it answers would be others: {flag.about}.")
    if not flag.becomes:
        if value not in flag.same:
            found.remarks.append(f"{where} has no effect here: {flag.about}")
        return
    if flag.name == "revision":
        found.revision = value
        return
    passed = value if flag.change is None else flag.change(value)
    if passed is None:
        found.remarks.append(f"{where} has no effect here: there is no chat_template in {value}")
        return
    if flag.name == "quantize":
        found.remarks.append(f"{where}={value}: the matrices are kept as --quantization {passed} has them")
    for key in flag.becomes:
        if key in _ASKED:
            found.asked[key] = passed
        else:
            found.others.append((key, passed, where))


_ASKED = frozenset(f.name for f in fields(TgiAsked))


def revised(model: str, revision: str | None) -> tuple[str, str | None]:
    """The model with TGI's revision, and a remark for the log."""
    if revision is None:
        return model, None
    if "@" in model or parse_name(model) is None or Path(model).expanduser().exists():
        return model, f"the revision {revision} has no effect: {model} is no name on the Hub, or says its own"
    return f"{model}@{revision}", None


def table() -> str:
    """All flags, in Markdown, for docs/coming-from-tgi.md."""
    lines = ["| TGI's flag and variable | here | |", "|---|---|---|"]
    for flag in FLAGS:
        ours = [f"`--{key.replace('_', '-')}`" for key in flag.becomes if key not in _ASKED]
        here = ", ".join(ours) or ("as TGI has it" if flag.becomes else "refused" if flag.refused else "no effect")
        names = f"`{flag.flag}`" + (f", `{flag.short}`" if flag.short else "")
        names += "" if flag.key in _NO_VARIABLE else f", `{flag.variable}`"
        lines.append(f"| {names} | {here} | {flag.about} |")
    return "\n".join(lines)
