"""What the promises about the nine operations alone are tried with."""

import threading
import time
from collections import Counter

import numpy as np

OPERATIONS = ("shape", "cat", "eq", "vectorize_dim", "slice", "idx_where_all_true", "pop", "repeat", "unsqueeze")


class Only:
    """The nine operations of a backend, counted, and its name."""

    def __init__(self, backend):
        self.name, self.calls = backend.name, Counter[str]()
        for name in OPERATIONS:
            setattr(self, name, self._counted(name, getattr(backend, name)))

    def _counted(self, name, operation):
        def call(*args):
            self.calls[name] += 1
            return operation(*args)

        return call


class Host:
    """A model that computes on the host. step: (host tokens) -> host output."""

    def __init__(self, backend, step):
        self.backend, self.step = backend, step
        self.shown = []

    def forward(self, tokens):
        host = np.array(self.backend.get(tokens))
        self.shown.append(host.shape)
        with np.errstate(invalid="ignore"):
            return self.backend.put(self.step(host).astype(host.dtype))


class Nine:
    def __init__(self, serving):
        self.serving, self.backend, self.ops = serving, serving.backend, Only(serving.backend)

    def engine(self, step, **options):
        """options: tokens among them are numbers or lists."""
        options = {n: self.put(v) if n.endswith("token") else v for n, v in options.items()}
        self.model = Host(self.backend, step)
        return self.serving(self.model, **{"backend": self.ops} | options)

    def put(self, tokens, dtype=None):
        return self.backend.put(np.array(tokens, dtype or ("float32" if "." in str(tokens) else "int32")))

    def run(self, engine, *prompts, **options):
        """Streams of prompts that are queued while the engine is held, so that all are in its next step."""
        reached, held = threading.Event(), threading.Event()

        def hold(tokens):
            reached.set()
            held.wait(self.serving.patience)
            return [False]

        first = engine.run(self.put([3]), max_tokens=1, stop_rule=hold)
        until = time.monotonic() + self.serving.patience
        while not reached.wait(0.05):
            if first.error is not None:
                raise first.error
            assert time.monotonic() < until, "the engine took no step"
        streams = [engine.run(self.put(p) if isinstance(p, list) else p, **options) for p in prompts]
        held.set()
        self.serving.read(first)
        return streams

    def read(self, streams):
        return [self.serving.read(s) for s in streams]
