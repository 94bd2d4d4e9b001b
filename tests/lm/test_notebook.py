"""A notebook has an event loop that runs already: streams and items work there in every way."""

import nbformat
from nbclient import NotebookClient

CELLS = [
    """
import asyncio
import numpy as np
import hibachi

class Next:
    def forward(self, tokens): return tokens[:, -1] + 1

class Double:
    def forward(self, x): return x * 2

asyncio.get_running_loop()  # raises if there is none
engine = hibachi.AutoregressiveBatchInference(Next(), stop_token=9)
doubler = hibachi.FeedforwardBatchInference(Double())
""",
    "print([int(t) for t in engine.run([5])], engine.run([7]).collect())",
    """
got = []
async for token in engine.run([5]):
    got.append(int(token))
print(got, [int(t) async for t in engine.run([7])])
""",
    "print(await doubler.run(np.ones(2)), doubler.run(np.ones(2)).result())",
    "print(*await asyncio.gather(*[engine.run([i]).acollect() for i in (7, 8)]))",
    """
async with engine, doubler:
    stream = engine.run([100])  # never comes to 9
print(stream.finish_reason)
""",
]
PRINTED = [
    "",
    "[6, 7, 8, 9] [array(8), array(9)]",
    "[6, 7, 8, 9] [8, 9]",
    "[2. 2.] [2. 2.]",
    "[array(8), array(9)] [array(9)]",
    "closed",
]


def test_a_notebook(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in CELLS])
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    outputs = ["".join(o.get("text", "") for o in cell.outputs).strip() for cell in notebook.cells]
    assert outputs == PRINTED
