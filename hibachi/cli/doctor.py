"""say what is installed: versions, backends and devices, and why one is missing"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from hibachi.model.extras import need
from hibachi.errors import MissingExtra
from hibachi.tensor.discover import known, load, why_missing


def arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    print(f"hibachi   {version('hibachi')}")
    print(f"python    {sys.version.split()[0]}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores")
    for package in ("numpy", "array-api-compat", "typing-extensions"):
        print(f"          {package} {_version(package)}")
    print("\nbackends")
    for name in known():
        why = why_missing(name)
        if why is None:
            backend = load(name)
            facts = backend.versions()
            memory = backend.memory()
            room = f", {memory[0] / 2**30:.1f} of {memory[1] / 2**30:.1f} GiB free" if memory else ""
            print(f"  {name:8}ready    {facts['library']} on {facts['device']}{room}")
        else:
            print(f"  {name:8}missing  {why}")
    print("\nextras")
    for module in ("tokenizers", "safetensors", "minijinja", "pytest"):
        extra = "test" if module == "pytest" else "text"
        try:
            need(module, module)
            print(f"  {extra:8}ready    {module} {_version(module)}")
        except MissingExtra:
            print(f"  {extra:8}missing  {module}: pip install '.[{extra}]' in the checkout")
    return 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "?"
