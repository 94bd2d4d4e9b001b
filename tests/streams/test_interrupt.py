"""Ctrl-C while a stream is being read ends the program, promptly and without noise from us."""

import signal
import subprocess
import sys

import pytest

from ..engine.models import PATIENCE

PROGRAM = """
import hibachi, time
class Slow:
    def forward(self, tokens):
        time.sleep(0.005)
        return tokens[:, -1] + 1
engine = hibachi.AutoregressiveBatchInference(Slow(), max_model_len=10**6)
stream = engine.run([1])
def begun(): print("begun", flush=True)
"""
WAYS = {
    "for": """
for i, _ in enumerate(stream):
    if i == 3: begun()
""",
    "collect": "begun(); stream.collect()",
    "asyncio": """
import asyncio
async def main():
    async with engine:
        await anext(stream)
        begun()
        await stream.acollect()
asyncio.run(main())
""",
    "trio": """
import trio
async def main():
    async with engine:
        await anext(stream)
        begun()
        await stream.acollect()
trio.run(main)
""",
}


@pytest.mark.parametrize("way", WAYS)
def test_an_interrupt_ends_the_program(way):
    # Python warns of a coroutine when the signal comes just between its call and its `await`, in any program.
    warnings = ["-W", "error", "-W", "ignore:coroutine:RuntimeWarning"]
    command = [sys.executable, *warnings, "-c", PROGRAM + WAYS[way]]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert program.stdout.readline() == "begun\n", program.communicate()
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=PATIENCE)
    finally:
        program.kill()
        program.communicate()
    assert err.strip().endswith("KeyboardInterrupt") and "Exception ignored" not in err, err
