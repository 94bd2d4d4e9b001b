"""Kernels compute in the standard mode, whatever mode of arithmetic others have set, and leave that as it was."""

from __future__ import annotations

import ctypes
import platform
import subprocess

import numpy as np
import pytest
import torch

from hibachi.backend.kernels import build

from ..tensor.native import computed, digest, skip_without
from .test_odd_numbers import COMPUTED, SMALL, planted

skip_without()
from hibachi.backend.numpy_backend import NativeNumpyBackend  # noqa: E402

HELPER = """
#include "registers.h"
extern "C" uint64_t get() { return hibachi::mode() & ~decltype(hibachi::mode()){hibachi::HAPPENED}; }
extern "C" void set(uint64_t m) { hibachi::set_mode(m); }
extern "C" uint64_t flushed() { return hibachi::STANDARD | hibachi::FLUSHED; }
"""
UPWARD = 0x5F80 if platform.machine() in ("x86_64", "AMD64") else 1 << 22


@pytest.fixture(scope="module")
def thread(tmp_path_factory):
    """get(), set(mode) and flushed(): the mode of the thread that calls, without what has happened."""
    made = tmp_path_factory.mktemp("mode") / "helper.so"
    try:
        cxx = build.compiler()
    except build.BuildFailed as e:
        pytest.skip(str(e))
    command = [cxx, "-x", "c++", "-std=c++20", "-w", "-fPIC", "-shared", f"-I{build.SOURCES}", "-", "-o", str(made)]
    subprocess.run(command, input=HELPER, text=True, check=True, timeout=60)
    helper = ctypes.CDLL(str(made))
    helper.get.restype = helper.flushed.restype = ctypes.c_uint64
    helper.set.argtypes = [ctypes.c_uint64]
    return helper


class Told:
    """A backend each of whose operations is called in a mode, and must leave it."""

    def __init__(self, backend, thread, mode):
        self.backend, self.thread, self.mode = backend, thread, mode

    def __getattr__(self, name):
        operation = getattr(self.backend, name)
        if not callable(operation) or name in ("put", "get"):
            return operation

        def called(*arguments, **named):
            before = self.thread.get()
            self.thread.set(self.mode)
            try:
                return operation(*arguments, **named)
            finally:
                after = self.thread.get()
                self.thread.set(before)
                assert after == self.mode, name

        return called


def odd(backend):
    return computed(backend, "float32", lambda x: planted(x, SMALL, 20, seed=1))


def test_flushed_denormals_are_those_that_are_written_down(thread):
    told = Told(NativeNumpyBackend(), thread, thread.flushed())
    assert digest(odd(told))[:8] == COMPUTED["float32"][:8]


def test_numbers_are_rounded_to_the_nearest(thread):
    expected, got = odd(NativeNumpyBackend()), odd(Told(NativeNumpyBackend(), thread, UPWARD))
    for name in expected:
        if not name.startswith("attention"):  # whose scale is rounded by who calls
            assert got[name].tobytes() == expected[name].tobytes(), name


def test_the_threads_of_the_team_compute_as_the_one_that_calls(thread):
    backend, random = NativeNumpyBackend(), np.random.default_rng(0)
    x = backend.put((random.normal(size=(64, 64)) * 1e-20).astype(np.float32))
    w = backend.put_weight((random.normal(size=(4800, 64)) * 1e-20).astype(np.float32), "float32")
    kernels = backend.library.kernels
    before = kernels.threads()
    kernels.set_threads(1)
    y = backend.get(backend.linear(x, w))
    assert (np.abs(y) < 2.0**-126).all() and (y != 0).mean() > 0.9
    told = Told(backend, thread, thread.flushed())
    try:
        for n in (1, 3, 3, 3, 3):
            kernels.set_threads(n)
            assert (backend.get(told.linear(x, w)) == y).all()
    finally:
        kernels.set_threads(before)


def test_torch_goes_on_flushing_where_it_was_told_to():
    small, expected = torch.tensor([1e-39]), COMPUTED["float32"][:8]
    if not torch.set_flush_denormal(True):
        pytest.skip("torch cannot flush denormals on this processor")
    try:
        assert digest(odd(NativeNumpyBackend()))[:8] == expected
        assert (small * 1).item() == 0
    finally:
        torch.set_flush_denormal(False)
    assert (small * 1).item() > 0
