"""Warnings reach a program that configured no logging, and one that did gets each of them once, in its own way."""

import subprocess
import sys

import pytest

PROGRAM = """
import logging
{}
import numpy as np
import hibachi


class Clumsy:
    vocab_size, max_model_len = 5, 64

    def logits(self, tokens, lengths):
        if len(tokens) > 1:
            raise ValueError("one row, please")
        return np.zeros((1, 5), np.float32)


with hibachi.AutoregressiveBatchInference(Clumsy(), backend="numpy") as engine:
    for stream in [engine.run([1, 2], max_tokens=2) for _ in range(3)]:
        stream.collect()
"""
SAID = "deterministic=False for Clumsy.logits, as it failed when it was tried: ValueError: one row, please"


@pytest.mark.parametrize(
    ("configured", "before"),
    [
        ("", ""),
        ("logging.basicConfig(format='%(levelname)s %(name)s %(message)s')", "WARNING hibachi.engine "),
    ],
)
def test_a_warning_reaches_standard_error_once(configured, before):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(configured)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines().count(before + SAID) == 1 and done.stderr.count("one row, please") == 2, done.stderr


def test_who_wants_none_gets_none():
    quiet = "logging.getLogger('hibachi').addHandler(logging.NullHandler())"
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(quiet)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
