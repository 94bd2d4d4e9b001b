"""`hibachi.offline.generate`: an engine a process. Frames, Dask and Spark: tests/install/test_recipes.py."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from hibachi.errors import EngineFailed, InvalidModelFiles
from hibachi.offline import blocks, generate

from .test_ray import COLUMNS, SETTINGS, block, objects


@pytest.fixture
def made(monkeypatch):
    """The engines that it makes."""
    found = []

    class Kept(blocks.BlockRunner):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            found.append(self)

    monkeypatch.setattr(blocks, "BlockRunner", Kept)
    yield found
    for each in found:
        each.close()


def computed(numbers, **more):
    """The results of rows, with arguments that are equal to those of other calls and not the same."""
    given = {"settings": {**SETTINGS}, "columns": replace(COLUMNS), **more}
    done = generate(block(numbers), **given)
    return [*zip(*[done[name] for name in ("id", "output", "completion_tokens", "error")], strict=True)]


def test_equal_calls_of_all_threads_share_an_engine_and_answer_alike_however_rows_are_cut(made):
    cuts = [[0, 1, 2], [3], [], [4, 5, 6, 7, 8], [9, 3], [*range(10, 20)]]
    with ThreadPoolExecutor(len(cuts)) as pool:
        cut = [*pool.map(computed, cuts)]
    assert len(made) == 1
    whole = computed(range(20), settings={**SETTINGS, "max_num_seqs": 3})
    assert len(made) == 2
    assert cut == [[whole[n] for n in numbers] for numbers in cuts]


def test_a_model_is_loaded_for_rows_only_and_tried_by_each_call_and_a_lost_engine_is_made_anew(made):
    assert "output" in generate({"text": objects([])}, "/no/such")
    for _ in range(2):
        with pytest.raises(InvalidModelFiles, match="/no/such"):
            generate({"text": objects(["a"])}, "/no/such")
    assert len(made) == 1
    whole = computed(range(8))
    ending = threading.Timer(0.1, made[-1].close)
    ending.start()
    with pytest.raises(EngineFailed):
        computed(range(400))
    ending.join()
    assert computed(range(8)) == whole and len(made) == 3


FORKED = """
import os, signal
import numpy as np
from hibachi.offline import generate
def answer():
    block = {"text": np.array(["She was", "Chapter 1."], object)}
    return generate(block, settings={"backend": "numpy"})["output"].tolist()
want = answer()
if (child := os.fork()) == 0:
    fine = False
    signal.alarm(40)
    try:
        fine = answer() == want
    finally:
        os._exit(0 if fine else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert answer() == want
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_has_an_engine_of_its_own():
    """In a process of its own: this one may hold libraries that no fork survives."""
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=60)
