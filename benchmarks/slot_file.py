"""llama.cpp's saved sequences, as its server's slot files are, for benchmarks/tiers.py.

It is run by an interpreter that has llama-cpp-python: `PYTHON slot_file.py save|load MODEL.gguf FOLDER THREADS`, with
prompts (lists of ids) as JSON on stdin. Prints the seconds to each first token, and how many positions its file had.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path

import llama_cpp


def main() -> None:
    what, model, folder, threads = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])
    prompts = json.load(sys.stdin)
    room = max(map(len, prompts)) + 64
    llm = llama_cpp.Llama(model, n_ctx=room, n_batch=2048, n_threads=threads, n_threads_batch=threads, verbose=False)
    memory = llama_cpp.llama_get_memory(llm.ctx)
    llm.eval([5, 6, 7])
    took, found = [], []
    for i, prompt in enumerate(prompts):
        llama_cpp.llama_memory_clear(memory, True)
        llm.n_tokens = 0
        file, ids, n = str(folder / f"{i}.bin").encode(), (llama_cpp.llama_token * room)(*prompt), ctypes.c_size_t(0)
        began = time.perf_counter()
        if what == "load":
            if not llama_cpp.llama_state_seq_load_file(llm.ctx, file, 0, ids, room, ctypes.byref(n)):
                raise RuntimeError(f"llama.cpp did not read {file.decode()}")
            llm.n_tokens = n.value - 1  # it needs the logits of the last one, which is not in the file
            llama_cpp.llama_memory_seq_rm(memory, 0, llm.n_tokens, -1)
        llm.eval(prompt[llm.n_tokens :])
        first = llm.sample(temp=0.0)
        took.append(time.perf_counter() - began)
        found.append(n.value)
        (folder / f"{i}.{what}").write_text(str(first))
        if what == "save":
            llama_cpp.llama_state_seq_save_file(llm.ctx, file, 0, ids, len(prompt))
    print(json.dumps({"seconds": took, "found": found}))


if __name__ == "__main__":
    main()
