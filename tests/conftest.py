"""What tests of several floors share: copies of the shipped model, whole or damaged."""

import ctypes
import gc
import itertools
import json
import os
import signal
import sys
from pathlib import Path

import pytest

import hibachi

# Whoever is started in the background of a shell ignores Ctrl-C, and so do its children; tests send it to theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # likewise below nohup, and tests send it to routers
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Which kernels are used is settled, unless a test asks for others: nothing is timed, nothing compiled on the side.
os.environ.setdefault("HIBACHI_AUTOTUNE", "off")

# Models from files are computed by NumPy, unless a test names another library: it starts fastest.
os.environ.setdefault("HIBACHI_DEFAULT_BACKEND", "numpy")

# Threads that have nothing to do sleep instead of spinning, which costs the cores that others test on.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

SHIPPED = Path(hibachi.__file__).parent / "llm" / "data" / "tiny"


def pytest_collection_modifyitems(items):
    long, slow = (set(Path(__file__).with_name(name).read_text().splitlines()) for name in ("long.txt", "slow.txt"))
    for item in items:
        if item.nodeid in slow:  # cases that take seconds, whose siblings take less
            item.add_marker(pytest.mark.slow)
        if item.nodeid.partition("[")[0] in long:
            item.add_marker(pytest.mark.long)


def pytest_collection_finish():
    """What is there now stays, and need not be looked at in each of many collections: 0.3 s each."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish():
    gc.unfreeze()  # hypothesis, loaded for its summary at the latest, asks the collector who refers to what


modules = itertools.count()
LOOK_AGAIN = 15  # modules until everything is looked at again


@pytest.fixture(scope="module", autouse=True)
def memory_goes_back():
    """JAX keeps its programs, and what compilers free stays with the process unless the C library is told.

    What a module leaves behind is mostly libraries that it loaded, which stay: 0.6 s a collection once all are there.
    """
    yield
    if jax := sys.modules.get("jax"):
        jax.clear_caches()
    if next(modules) % LOOK_AGAIN == 0:
        gc.unfreeze()
    gc.collect()
    gc.freeze()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


@pytest.fixture(scope="session")
def model_copy(tmp_path_factory):
    """model_copy({name: change}): a folder with the shipped model; change(bytes) -> bytes, or None: leave it out."""

    def make(changes):
        folder = tmp_path_factory.mktemp("model")
        for file in SHIPPED.iterdir():
            change = changes.get(file.name, "as it is")
            if change == "as it is":
                (folder / file.name).symlink_to(file)
            elif change is not None:
                (folder / file.name).write_bytes(change(file.read_bytes()))
        for name in changes.keys() - {file.name for file in SHIPPED.iterdir()}:
            (folder / name).write_bytes(changes[name](b""))
        return folder

    return make


def other_tokenizer(data):
    """A tokenizer of a model with more tokens."""
    tokenizer = json.loads(data)
    tokenizer["model"]["vocab"]["of another model"] = 10**6
    return json.dumps(tokenizer).encode()


DAMAGES = {
    "no config": {"config.json": None},
    "config is no JSON": {"config.json": lambda data: data[:50]},
    "unknown architecture": {"config.json": lambda data: data.replace(b'"LlamaFor', b'"LamaFor')},
    "no weights": {"model.safetensors": None},
    "truncated weights": {"model.safetensors": lambda data: data[: len(data) // 2]},
    "weights of another shape": {"config.json": lambda data: data.replace(b'_layers": ', b'_layers": 1')},
    "no tokenizer": {"tokenizer.json": None},
    "other tokenizer": {"tokenizer.json": other_tokenizer},
}


@pytest.fixture(scope="session")
def damaged_models(model_copy):
    """{what is wrong: folder}."""
    return {what: model_copy(changes) for what, changes in DAMAGES.items()}
