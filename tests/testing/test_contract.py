"""What docs/backends.md says of those who call a backend: what they take from its namespace, and from which thread."""

import importlib.util
import json
import threading
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from hibachi import AutoregressiveBatchInference, FeedforwardBatchInference, NumpyBackend
from hibachi.testing.toys import Count, SumLogits, SumPaged

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("namespace", ROOT / "tools" / "namespace.py")
namespace = importlib.util.module_from_spec(spec)
spec.loader.exec_module(namespace)


# ---- the namespace ---------------------------------------------------------------------------------------------------


def test_the_tables_of_functions_and_methods_are_those_of_the_code_and_of_what_each_level_calls():
    """If this fails: `python tools/namespace.py` writes the tables anew."""
    assert "\n".join(namespace.lines()) in (ROOT / "docs" / "backends.md").read_text()
    found = namespace.recorded()
    assert all(functions <= namespace.table().keys() for functions, _ in found.values())
    needed, methods = zip(*(found[level] for level in ("0", "1", "2 `Paged`")), strict=True)
    assert "cumulative_sum" in needed[1] - needed[0] and "matmul" in needed[2] - needed[1]
    assert {"attend", "make_cache"} <= methods[2] - methods[1]


@pytest.mark.parametrize(
    "source, found",
    [
        ("xp.all(t, axis=1)", {"all": {"axis"}}),
        ("def f(self):\n    return self.xp.exp(x) + backend.xp.exp(x, where=y)", {"exp": {"where"}}),
        ("act = b.xp.tanh", {"tanh": set()}),
        ("xp.full((), 1, **how)", {"full": {"**"}}),
        ("np.exp(t); other.all(t)", {}),
    ],
)
def test_what_is_taken_from_a_namespace_is_found(source, found):
    assert namespace.used(source) == found


SPY = f"""
import atexit, json, sys
sys.path.insert(0, {str(ROOT / "tools")!r})
from namespace import ArrayBackend, Spy

seen = Spy()

def spy():
    return ArrayBackend(seen, name="spy")

atexit.register(lambda: open("calls", "w").write(json.dumps({{name: [*words] for name, words in seen.calls.items()}})))
"""


@pytest.mark.slow
def test_what_the_kit_calls_is_in_the_table(conformance, tmp_path):
    (tmp_path / "spying.py").write_text(SPY)
    status, said = conformance("--backend", "spying:spy")
    assert status == 0, said
    called = json.loads((tmp_path / "calls").read_text())
    table, kit = namespace.table(), namespace.table(namespace.KIT)
    assert called.keys() - {*table, *namespace.DTYPES} <= kit.keys()
    for name, keywords in called.items():
        if name in table:
            assert {*keywords} <= table[name][0] | kit.get(name, (set(), set()))[0], name
    assert len(called.keys() & table.keys()) > 0.9 * len(table)


# ---- threads ---------------------------------------------------------------------------------------------------------

WATCHED = [
    *("owns", "get", "put", "put_all", "copy", "take", "scatter_rows", "attend", "make_cache", "write_cache"),
    *("compile", "program", "guard", "fetch", "memory", "versions", "fingerprint"),
]


class Watched(NumpyBackend):
    """Notes which thread calls what."""

    def __init__(self):
        self.calls = defaultdict(set)
        super().__init__()

    def threads(self):
        """{thread: its calls} since the last time."""
        found, self.calls = dict(self.calls), defaultdict(set)
        return found


def _watched(name):
    honest = getattr(NumpyBackend, name)

    def call(self, *args, **options):
        self.calls[threading.current_thread().name].add(name)
        return honest(self, *args, **options)

    return call


for name in WATCHED:
    setattr(Watched, name, _watched(name))


@pytest.mark.parametrize("kind", [Count, SumLogits, SumPaged])
def test_prompts_are_read_by_the_caller_and_all_else_is_done_by_the_engine(kind):
    backend = Watched()
    here, engines = threading.current_thread().name, "hibachi-engine"
    prompt = backend.put(np.array([1, 2], "int32"))
    backend.threads()
    with AutoregressiveBatchInference(kind(backend), max_model_len=64, max_num_seqs=2) as engine:
        engine.run(prompt, max_tokens=2).collect()  # at level 0, this builds the engine
        built = backend.threads()
        assert {"fingerprint", "versions"} <= built[here] and not built[here] & {"put_all", "attend", "fetch"}
        assert kind is not SumPaged or {"make_cache", "compile"} <= built[here]

        engine.run(prompt, max_tokens=3, stop_rule=lambda tokens: tokens == 77).collect()
        served = backend.threads()
        assert served.keys() == {here, engines}
        assert served[here] == {"owns", "get"}
        assert {"guard", "put"} <= served[engines] and not served[engines] & {"make_cache", "versions"}
        assert kind is not SumPaged or {"put_all", "attend", "write_cache", "fetch"} <= served[engines]

        asked = threading.Thread(target=engine.meters, name="somebody")
        asked.start()
        asked.join()
        assert backend.threads().get("somebody", {"memory"}) == {"memory"}


def test_a_feed_forward_model_runs_in_the_thread_of_its_engine():
    backend, seen = Watched(), set()

    class Twice:
        def forward(self, x):
            seen.add(threading.current_thread().name)
            return x + x

    with FeedforwardBatchInference(Twice(), backend=backend) as engine:
        assert engine.run(np.ones(2)).result(60).tolist() == [2, 2]
    calls = backend.threads()
    assert seen == {"hibachi-engine"}
    assert {"put", "copy", "guard"} <= calls["hibachi-engine"] and calls[threading.current_thread().name] == {
        "owns",
        "get",
    }
