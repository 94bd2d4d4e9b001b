"""say what is installed and what is missing"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from hibachi.errors import UnsupportedOperation
from hibachi.tensor.array_backend import ArrayBackend
from hibachi.tensor.discover import known, load, why_missing

_EXTRAS = (
    ("tokenizers", "text"),
    ("minijinja", "text"),
    ("gguf", "gguf"),
    ("transformers", "hf"),
    ("huggingface_hub", "hf"),
    ("matplotlib", "plot"),
    ("pytest", "test"),
)


def arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    print(f"hibachi   {version('hibachi')}")
    print(f"python    {sys.version.split()[0]}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores")
    for package in ("numpy", "array-api-compat", "typing-extensions"):
        print(f"          {package} {_version(package)}")
    print("\nbackends")
    width = max(map(len, known()), default=0)
    for name in known():
        print(f"  {name:{width}}  {_backend(name)}")
    print("\nextras")
    for module, extra in _EXTRAS:
        print(f"  {extra:{width}}  {_library(module, extra)}")
    return 0


def _backend(name: str) -> str:
    """A doctor takes whatever comes: one broken library must not hide the state of the others."""
    if (why := why_missing(name)) is not None:
        return f"missing  {why}"
    try:
        backend = load(name)
        facts, memory, remarks = backend.versions(), backend.memory(), backend.remarks()
    except Exception as e:
        return f"broken   {e}"
    room = f", {memory[0] / 2**30:.1f} of {memory[1] / 2**30:.1f} GiB free" if memory else ""
    lines = [f"ready    {facts['library']} on {facts['device']}{room}{_kernels(backend)}", *remarks]
    return "\n           ".join(lines)


def _kernels(backend: ArrayBackend) -> str:
    """The fingerprint of a deterministic run: where it is the same, bits can be expected to be."""
    try:
        found = backend.invariant().fingerprint()
    except UnsupportedOperation:
        return "\n           not deterministic"
    return f"\n           deterministic: {found}"


def _library(module: str, extra: str) -> str:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name == module:
            return f"missing  {module}: pip install '.[{extra}]' in the checkout"
        return f"broken   {module}: {e}"
    except Exception as e:
        return f"broken   {module}: {type(e).__name__}: {e}"
    return f"ready    {module} {_version(module)}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "?"
