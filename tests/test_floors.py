"""The house has storeys: a file imports from its own and from those below. This test reads every import.

One rule per folder or file; the rule of the longest path counts. `ours`: the parts of hibachi it may import.
`not_std`: standard modules it may not.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import hibachi

ROOT = Path(__file__).parents[1]
GROUND = "errors structured request common"
ENGINE = f"{GROUND} backend engine"
LLM = f"{ENGINE} llm"
# What a room for backends stands on: what they implement, how tokens are drawn, how models look.
BACKEND = (
    "errors common.shapes common.phases common.cachefolder common.installed "
    "backend engine.sampling engine.ladder llm.model"
)
SOCKETS = "socket socketserver ssl http urllib"
CLOCKS = "asyncio threading queue time datetime random secrets logging"
# The core follows entry points instead.
LIBRARIES = {"torch", "jax", "jaxlib", "mlx", "hibachi_torch", "hibachi_jax", "hibachi_mlx"}


class Rule(NamedTuple):
    ours: str
    third_party: str = "numpy"
    not_std: str = SOCKETS


RULES = {
    # ---- the ground: no arrays, no engine
    "hibachi/errors.py": Rule("", third_party=""),
    "hibachi/structured.py": Rule("errors common.options", third_party=""),
    "hibachi/request.py": Rule("errors common.options structured", third_party=""),
    "hibachi/common": Rule("errors common", third_party=""),
    # ---- what an array library must do
    "hibachi/backend": Rule("errors common backend", third_party="numpy array_api_compat typing_extensions"),
    "hibachi/backend/kernels": Rule("errors common backend.kernels"),
    # ---- the batch
    "hibachi/engine": Rule(ENGINE, third_party="numpy typing_extensions"),
    "hibachi/engine/ladder.py": Rule("backend.layout", third_party="numpy typing_extensions"),
    "hibachi/engine/scheduler": Rule(
        "errors request common.installed common.shapes engine.scheduler", not_std=f"{SOCKETS} {CLOCKS}"
    ),
    "hibachi/engine/recording": Rule(
        "errors request engine.scheduler engine.recording", third_party="numpy typing_extensions"
    ),
    "hibachi/engine/simulator": Rule(
        "errors request common.settings engine.scheduler engine.simulator engine.tiers",
        third_party="numpy typing_extensions",
    ),
    "hibachi/engine/sampling": Rule("errors request backend engine.sampling"),
    "hibachi/engine/guide": Rule("errors structured common.installed engine.guide", third_party="numpy llguidance"),
    "hibachi/engine/streams": Rule("errors request engine.streams", third_party=""),
    "hibachi/engine/tiers": Rule("errors common engine.scheduler engine.tiers", third_party=""),
    "hibachi/engine/group": Rule(ENGINE, third_party="numpy typing_extensions", not_std="socketserver ssl http urllib"),
    # ---- language models
    "hibachi/llm": Rule(LLM),
    "hibachi/llm/model": Rule(
        "errors request common backend engine.ladder llm.model llm.tokenizers", third_party="numpy typing_extensions"
    ),
    "hibachi/llm/tokenizers": Rule("errors request common llm.model llm.tokenizers"),
    "hibachi/llm/chatformat": Rule("errors structured request engine.guide llm.chatformat", third_party=""),
    "hibachi/llm/dialects": Rule(
        "errors structured request engine.streams llm.textstream llm.tokenizers llm.chatformat llm.dialects",
        third_party="msgspec",
    ),
    # The router reads and writes the shapes of dialects too, and has no NumPy: only these may have it.
    "hibachi/llm/dialects/vectors.py": Rule("llm.dialects"),
    "hibachi/llm/dialects/ranking.py": Rule("errors backend llm.dialects", third_party="numpy msgspec"),
    "hibachi/llm/dialects/tokens": Rule("errors structured request backend llm.dialects", third_party="numpy msgspec"),
    "hibachi/__init__.py": Rule(LLM),
    "hibachi/prefix.py": Rule(LLM),
    # ---- products
    "hibachi/server": Rule(
        f"{LLM} server prefix", third_party="numpy msgspec starlette uvicorn prometheus_client", not_std=""
    ),
    "hibachi/server/web": Rule("errors common llm.dialects server.web", third_party="aiohttp uvicorn yarl", not_std=""),
    "hibachi/router": Rule(
        "errors common llm.dialects server.web router",
        third_party="aiohttp msgspec prometheus_client uvicorn yarl",
        not_std="",
    ),
    "hibachi/offline": Rule(f"{LLM} server.web offline", third_party="numpy msgspec typing_extensions", not_std=""),
    "hibachi/ray.py": Rule(f"{LLM} server offline", not_std=""),
    # ---- for tests and judges
    "hibachi/testing": Rule("errors common backend testing", third_party="numpy pytest"),
    "hibachi/testing/verify": Rule(f"{LLM} testing.verify", third_party="numpy typing_extensions"),
    "hibachi/verify.py": Rule("testing.verify"),
    "hibachi/testing/bench": Rule(f"{LLM} server.web testing.bench", third_party="numpy uvloop"),
    "hibachi/cli": Rule(f"{LLM} server router offline testing cli"),
    "hibachi/__main__.py": Rule("cli"),
    # ---- beside
    "hibachi_torch": Rule(
        BACKEND,
        third_party="numpy torch array_api_compat typing_extensions hibachi_torch",
    ),
    "hibachi_jax": Rule(
        BACKEND,
        third_party="numpy jax jaxlib array_api_compat typing_extensions hibachi_jax",
    ),
    "hibachi_mlx": Rule("errors backend", third_party="numpy mlx typing_extensions hibachi_mlx"),
    "conformance": Rule("testing public", third_party="numpy pytest"),
}
BUILD_FILES = {"hatch_build.py"}


def imports(source: str) -> Iterator[tuple[str, str]]:
    """(module, name) of every import, wherever it stands; name is "" for `import module`.

    A module that is named in a call such as `import_module("torch")` counts as well. Relative imports do not: they
    cannot leave their folder.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in ("import_module", "__import__", "need"):
                yield str(node.args[0].value), ""


def part(module: str, name: str) -> str:
    """What of hibachi is imported: "errors", "engine.scheduler.blocks", ...; "public" for a public name of the
    package."""
    if module != "hibachi":
        return f"{module.removeprefix('hibachi.')}.{name}"
    if not name.startswith("_") and not isinstance(getattr(hibachi, name, hibachi), ModuleType):
        return "public"
    return name or "hibachi itself"


def violation(rule: Rule, core: bool, module: str, name: str) -> str | None:
    """What is wrong with an import, or None."""
    top = module.split(".")[0]
    if core and not LIBRARIES.isdisjoint(module.split(".")):
        return "the core never imports an array library or its backend by name: it follows entry points"
    if top == "hibachi":
        if not any(f"{part(module, name)}.".startswith(f"{ours}.") for ours in rule.ours.split()):
            return f"of hibachi it may import {rule.ours or 'nothing'}"
    elif top in sys.stdlib_module_names:
        if top in rule.not_std.split():
            return f"it may not import {rule.not_std}"
    elif top not in rule.third_party.split() and top not in OPTIONAL:
        return f"of other packages it may import {rule.third_party or 'nothing'}"
    return None


# Through `need`, which says how to install them.
OPTIONAL = {
    "safetensors",
    "tokenizers",
    "minijinja",
    "gguf",
    "transformers",
    "huggingface_hub",
    "matplotlib",
    "pyarrow",
    "tqdm",
    "aiohttp",
    "redis",
    "fsspec",
    "ray",
}


def violations(path: str, source: str) -> list[str]:
    """One line for each import of the file that its storey does not allow: file, import, rule."""
    place = next((p for p in (path, *map(str, Path(path).parents)) if p in RULES), None)
    if place is None:
        return [f"{path} stands on no storey: give it a rule in {Path(__file__).name}"]
    out = []
    for module, name in imports(source):
        core = path.startswith("hibachi/")
        why = violation(RULES[place], core, module, name)
        if why is not None:
            wrote = f"from {module} import {name}" if name else f"import {module}"
            out.append(f"{path}: `{wrote}`. Rule of {place}: {why}.")
    return out


def files() -> list[str]:
    tops = ("hibachi", "hibachi_torch", "hibachi_jax", "hibachi_mlx", "conformance")
    found = [p for top in tops for p in (ROOT / top).rglob("*.py")]
    return sorted(str(p.relative_to(ROOT)) for p in found if p.name not in BUILD_FILES and "build" not in p.parts)


def test_every_file_imports_only_from_its_storey_and_below():
    wrong = [line for path in files() for line in violations(path, (ROOT / path).read_text())]
    assert not wrong, "\n" + "\n".join(wrong)


def test_every_rule_is_about_files_that_exist():
    for place in RULES:
        assert any(path == place or path.startswith(f"{place}/") for path in files()), place


@pytest.mark.parametrize(
    "path, source",
    [
        ("hibachi/errors.py", "import numpy"),
        ("hibachi/request.py", "from hibachi.engine.scheduler.scheduler import Seq"),
        ("hibachi/backend/x.py", "from hibachi.engine.scheduler.blocks import BlockPool"),
        ("hibachi/backend/x.py", "def f():\n    import torch"),
        ("hibachi/backend/x.py", "import array_api_compat.torch as xp"),
        ("hibachi/backend/x.py", "importlib.import_module('hibachi_torch')"),
        ("hibachi/engine/scheduler/x.py", "import time"),
        ("hibachi/engine/scheduler/x.py", "from hibachi.backend.layout import Paged"),
        ("hibachi/engine/scheduler/x.py", "if TYPE_CHECKING:\n    from hibachi.engine.runners.job import Job"),
        ("hibachi/engine/sampling/x.py", "from hibachi.engine.ladder import LogitsModel"),
        ("hibachi/llm/model/x.py", "from hibachi.engine.sampling import sampling"),
        ("hibachi/llm/model/x.py", "from hibachi import engine"),
        ("hibachi/llm/model/x.py", "import hibachi"),
        ("hibachi/engine/x.py", "from hibachi.cli import main"),
        ("hibachi/engine/x.py", "from http import server"),
        ("hibachi/engine/x.py", "import jax.numpy as jnp"),
        ("hibachi/cli/x.py", "from hibachi_jax import JaxBackend"),
        ("hibachi_torch/x.py", "from hibachi.engine.engine import Engine"),
        ("hibachi_torch/x.py", "from hibachi import Paged"),
        ("hibachi_torch/x.py", "import jax"),
        ("hibachi_jax/x.py", "import hibachi_torch"),
        ("hibachi_mlx/x.py", "import jax"),
        ("hibachi/backend/x.py", "import mlx.core as mx"),
        ("conformance/x.py", "from hibachi.backend.layout import Paged"),
        ("conformance/x.py", "from hibachi import _logging"),
        ("conformance/x.py", "from hibachi import engine"),
        ("conformance/x.py", "import torch"),
        ("hibachi/new_floor/x.py", "import os"),
    ],
)
def test_a_bad_import_is_found(path, source):
    [line] = violations(path, source)
    assert line.startswith(path)


def test_good_imports_pass():
    assert not violations(
        "hibachi/engine/scheduler/x.py", "import numpy as np\nfrom hibachi.errors import PromptTooLong"
    )
    assert not violations("conformance/x.py", "from hibachi import Paged\nfrom .cases import sample\nimport pytest")
    assert not violations("hibachi_jax/x.py", "import jax\nfrom hibachi.backend.layout import StepInputs")
