"""The house has floors: a file imports from its own floor and from those below it. This test reads every import.

One rule per folder or file. `ours`: the parts of hibachi it may import. `not_std`: standard modules it may not.
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
BELOW_ENGINE = (
    "errors structured request options installed named shapes phases tensor plan decode draft guide tools model streams"
)
BATCH = f"{BELOW_ENGINE} recording runners engine"
BACKEND = "errors shapes tensor decode model"
SOCKETS = "socket socketserver ssl http urllib"
# The core follows entry points instead.
LIBRARIES = {"torch", "jax", "jaxlib", "mlx", "hibachi_torch", "hibachi_jax", "hibachi_mlx"}


class Rule(NamedTuple):
    ours: str
    third_party: str = "numpy"
    not_std: str = SOCKETS


RULES = {
    "hibachi/errors.py": Rule("", third_party=""),
    "hibachi/structured.py": Rule("errors options", third_party=""),
    "hibachi/request.py": Rule("errors options structured", third_party=""),
    "hibachi/guide": Rule("errors structured installed guide", third_party="numpy llguidance"),
    "hibachi/draft": Rule("errors installed draft"),
    "hibachi/tools": Rule("errors structured guide tools", third_party=""),  # of guide, how schemas are written
    "hibachi/options.py": Rule("errors", third_party=""),
    "hibachi/installed.py": Rule("", third_party=""),
    "hibachi/shapes.py": Rule("errors", third_party=""),
    "hibachi/named.py": Rule("errors", third_party=""),
    "hibachi/cachefolder.py": Rule("", third_party=""),
    "hibachi/settings": Rule("errors options settings", third_party=""),
    "hibachi/phases.py": Rule("", third_party=""),
    "hibachi/progress.py": Rule("phases", third_party=""),
    "hibachi/kernels": Rule("errors cachefolder phases kernels"),
    "hibachi/tensor": Rule(
        "errors installed named shapes kernels tensor", third_party="numpy array_api_compat typing_extensions"
    ),
    "hibachi/plan": Rule(
        "errors request installed shapes plan",
        not_std=f"{SOCKETS} asyncio threading queue time datetime random secrets logging",
    ),
    "hibachi/decode": Rule("errors request tensor decode"),
    "hibachi/model": Rule("errors request installed phases tensor model", third_party="numpy typing_extensions"),
    "hibachi/streams": Rule("errors request tools streams", third_party=""),
    "hibachi/tune": Rule("errors installed cachefolder shapes phases tensor plan decode model tune"),
    "hibachi/recording": Rule("errors request plan recording"),
    "hibachi/runners": Rule(f"{BELOW_ENGINE} runners", third_party="numpy typing_extensions"),
    "hibachi/engine": Rule(BATCH, third_party="numpy typing_extensions"),
    "hibachi/lm": Rule(f"{BATCH} tune lm progress"),
    "hibachi/remote": Rule(f"{BATCH} settings tune lm remote"),
    "hibachi/__init__.py": Rule(f"{BATCH} lm"),
    "hibachi/testing": Rule("errors installed tensor testing", third_party="numpy pytest"),
    "hibachi/verify": Rule(f"{BATCH} lm verify", third_party="numpy typing_extensions"),
    "hibachi/sim": Rule("errors request plan sim"),
    "hibachi/api": Rule("errors structured request streams model tools api", third_party="msgspec"),
    # The router reads and writes shapes of api too, and has no NumPy: only these may have it.
    "hibachi/api/vectors.py": Rule("api"),
    "hibachi/api/ranking.py": Rule("errors tensor api", third_party="numpy msgspec"),
    "hibachi/api/tokens": Rule("errors structured request tensor api", third_party="numpy msgspec"),
    "hibachi/web": Rule("errors settings api web", third_party="uvicorn", not_std=""),
    "hibachi/serve": Rule(
        f"{BATCH} settings lm remote prefix api web serve",
        third_party="numpy starlette uvicorn prometheus_client",
        not_std="",
    ),
    "hibachi/prefix.py": Rule(f"{BATCH} lm remote"),
    "hibachi/offline": Rule(
        f"{BATCH} progress settings lm remote api web sim offline", third_party="numpy msgspec", not_std=""
    ),
    "hibachi/router": Rule(
        "errors installed settings api web router",
        third_party="aiohttp msgspec prometheus_client uvicorn yarl",
        not_std="",
    ),
    "hibachi/bench": Rule(f"{BATCH} tune lm remote web sim bench", third_party="numpy uvloop"),
    # One script for each engine, in a process of its own that has it.
    "hibachi/bench/engines/peers": Rule(
        "public streams engine lm bench", third_party="numpy torch vllm openvino openvino_genai", not_std=""
    ),
    "hibachi/cli": Rule(
        f"{BATCH} settings tune lm remote api web serve offline router sim bench testing verify progress cli"
    ),
    "hibachi/__main__.py": Rule("cli"),
    "hibachi_torch": Rule(
        "errors shapes kernels tensor decode model",
        third_party="numpy torch array_api_compat typing_extensions hibachi_torch",
    ),
    "hibachi_jax": Rule(
        "errors cachefolder shapes phases kernels tensor decode model",
        third_party="numpy jax jaxlib array_api_compat typing_extensions hibachi_jax",
    ),
    "hibachi_mlx": Rule("errors tensor", third_party="numpy mlx typing_extensions hibachi_mlx"),
    "conformance": Rule("testing public", third_party="numpy pytest"),
}
BUILD_FILES = {"hatch_build.py"}


def imports(source: str) -> Iterator[tuple[str, str]]:
    """(module, name) of every import, wherever it stands; name is "" for `import module`.

    A module that is named in a call such as `import_module("torch")` counts as well. Relative imports do not: they
    cannot leave their floor.
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


def floor(module: str, name: str) -> str:
    """The part of hibachi that is imported: "tensor", "errors", ...; "public" for a public name of the package."""
    if module != "hibachi":
        return module.split(".")[1]
    if not name.startswith("_") and not isinstance(getattr(hibachi, name, hibachi), ModuleType):
        return "public"
    return name or "hibachi itself"


def violation(rule: Rule, core: bool, module: str, name: str) -> str | None:
    """What is wrong with an import, or None."""
    top = module.split(".")[0]
    if core and not LIBRARIES.isdisjoint(module.split(".")):
        return "the core never imports an array library or its backend by name: it follows entry points"
    if top == "hibachi":
        if floor(module, name) not in rule.ours.split():
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
}


def violations(path: str, source: str) -> list[str]:
    """One line for each import of the file that its floor does not allow: file, import, rule."""
    place = next((p for p in (path, *map(str, Path(path).parents)) if p in RULES), None)
    if place is None:
        return [f"{path} stands on no floor: give it a rule in {Path(__file__).name}"]
    out = []
    for module, name in imports(source):
        core = path.startswith("hibachi/") and place != "hibachi/bench/engines/peers"
        why = violation(RULES[place], core, module, name)
        if why is not None:
            wrote = f"from {module} import {name}" if name else f"import {module}"
            out.append(f"{path}: `{wrote}`. Rule of {place}: {why}.")
    return out


def files() -> list[str]:
    tops = ("hibachi", "hibachi_torch", "hibachi_jax", "hibachi_mlx", "conformance")
    found = [p for top in tops for p in (ROOT / top).rglob("*.py")]
    return sorted(str(p.relative_to(ROOT)) for p in found if p.name not in BUILD_FILES and "build" not in p.parts)


def test_every_file_imports_only_from_its_floor_and_below():
    wrong = [line for path in files() for line in violations(path, (ROOT / path).read_text())]
    assert not wrong, "\n" + "\n".join(wrong)


def test_every_rule_is_about_files_that_exist():
    for place in RULES:
        assert any(path == place or path.startswith(f"{place}/") for path in files()), place


@pytest.mark.parametrize(
    "path, source",
    [
        ("hibachi/errors.py", "import numpy"),
        ("hibachi/request.py", "from hibachi.plan.scheduler import Seq"),
        ("hibachi/tensor/x.py", "from hibachi.plan.blocks import BlockPool"),
        ("hibachi/tensor/x.py", "def f():\n    import torch"),
        ("hibachi/tensor/x.py", "import array_api_compat.torch as xp"),
        ("hibachi/tensor/x.py", "importlib.import_module('hibachi_torch')"),
        ("hibachi/plan/x.py", "import time"),
        ("hibachi/plan/x.py", "from hibachi.tensor.layout import Paged"),
        ("hibachi/plan/x.py", "if TYPE_CHECKING:\n    from hibachi.runners.job import Job"),
        ("hibachi/decode/x.py", "from hibachi.model.ladder import LogitsModel"),
        ("hibachi/model/x.py", "from hibachi.decode import sampling"),
        ("hibachi/model/x.py", "from hibachi import engine"),
        ("hibachi/model/x.py", "import hibachi"),
        ("hibachi/engine/x.py", "from hibachi.cli import main"),
        ("hibachi/engine/x.py", "from http import server"),
        ("hibachi/engine/x.py", "import jax.numpy as jnp"),
        ("hibachi/cli/x.py", "from hibachi_jax import JaxBackend"),
        ("hibachi_torch/x.py", "from hibachi.engine.engine import Engine"),
        ("hibachi_torch/x.py", "from hibachi import Paged"),
        ("hibachi_torch/x.py", "import jax"),
        ("hibachi_jax/x.py", "import hibachi_torch"),
        ("hibachi_mlx/x.py", "import jax"),
        ("hibachi/tensor/x.py", "import mlx.core as mx"),
        ("conformance/x.py", "from hibachi.tensor.layout import Paged"),
        ("conformance/x.py", "from hibachi import _logging"),
        ("conformance/x.py", "from hibachi import engine"),
        ("conformance/x.py", "import torch"),
        ("hibachi/new_floor/x.py", "import os"),
    ],
)
def test_a_bad_import_is_found(path, source):
    [line] = violations(path, source)
    assert line.startswith(path)


def test_the_message_names_file_import_and_rule():
    [line] = violations("hibachi/plan/x.py", "from hibachi.tensor.layout import Paged")
    assert line == (
        "hibachi/plan/x.py: `from hibachi.tensor.layout import Paged`. "
        "Rule of hibachi/plan: of hibachi it may import errors request installed shapes plan."
    )


def test_good_imports_pass():
    assert not violations("hibachi/plan/x.py", "import numpy as np\nfrom hibachi.errors import PromptTooLong")
    assert not violations("conformance/x.py", "from hibachi import Paged\nfrom .cases import sample\nimport pytest")
    assert not violations("hibachi_jax/x.py", "import jax\nfrom hibachi.tensor.layout import StepInputs")
