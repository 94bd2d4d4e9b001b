"""Threads as ranks, and a small model that several can share."""

import json
import threading

import numpy as np

from hibachi import AutoregressiveBatchInference, NumpyBackend
from hibachi.backend.group import GroupLost, tree
from hibachi.llm.model.arch import Arch, Layer, shapes
from hibachi.llm.model.decoder import Decoder
from hibachi.llm.model.rope import Rope

OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "max_model_len": 96, "block_size": 16}


def arch_of(heads=8, kv_heads=8, **more):
    known = {"hidden_size": 64, "head_dim": 64, "intermediate": 64 * heads, "vocab_size": 97, "max_positions": 96}
    return Arch(
        heads=heads,
        kv_heads=kv_heads,
        layers=(Layer(),) * 2,
        norm_eps=1e-5,
        ropes=(Rope(10000.0, 64),),
        **known | more,
    )


def weights_of(arch, biases=()):
    rng, (required, optional) = np.random.default_rng(0), shapes(arch)
    named = required | {name: shape for name, shape in optional.items() if name.endswith(biases or ("nothing",))}
    return {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in named.items()}


class Threads:
    """A group of threads."""

    def __init__(self, size):
        self.size, self.said, self.lock = size, {}, threading.Condition()
        self.barriers, self.held, self.patience = {}, [None] * size, 20.0  # seconds that one may be late
        self.ranks = [Rank(self, rank) for rank in range(size)]

    def barrier(self, epoch):
        with self.lock:
            return self.barriers.setdefault(epoch, threading.Barrier(self.size))


class Rank:
    host = "127.0.0.1"

    def __init__(self, threads, rank):
        self.threads, self.rank, self.size, self.sums = threads, rank, threads.size, 0
        self.gathers, self.harm, self.facts = 0, lambda: None, {}
        self.renew(0)

    def exchanged(self, x, found):
        try:
            self.threads.held[self.rank] = x
            self.barrier.wait(self.threads.patience)
            out = found(list(self.threads.held))
            self.barrier.wait(self.threads.patience)
        except threading.BrokenBarrierError:
            raise GroupLost("the barrier is broken") from None
        return out

    def sum(self, x):
        self.sums += 1
        self.harm()
        x[...] = self.exchanged(x.copy(), tree)
        return x

    def gather(self, x, columns):
        self.gathers += 1
        whole = self.exchanged(x, lambda parts: np.concatenate(parts, 1))
        return whole if self.rank == 0 else x

    def meet(self, name, value, timeout):
        with self.threads.lock:
            if value is not None:
                self.threads.said[name] = value
                self.threads.lock.notify_all()
            assert self.threads.lock.wait_for(lambda: name in self.threads.said, 20)
            return self.threads.said[name]

    def check(self):
        pass

    def abort(self):
        self.barrier.abort()

    def renew(self, epoch):
        if epoch:
            self.abort()
        self.barrier = self.threads.barrier(epoch)

    def close(self):
        pass


class Together:
    """An engine of so many ranks. make: a model of a backend; None means a decoder. harms: by rank, before its sums."""

    def __init__(
        self, size, leaves, arch=None, weights=None, *, make=None, backend=None, dtype="float32", harms=None, **options
    ):
        self.group, self.threads, self.errors = Threads(size), [], []
        backend = backend or NumpyBackend()

        def made(rank):
            of = self.group.ranks[rank]
            mine = backend.in_leaves(leaves, of if size > 1 else None)
            model = make(mine) if make else Decoder.build(arch, weights, mine, dtype=dtype)
            if rank in (harms or {}):
                of.harm = lambda: harms[rank](of)
            return AutoregressiveBatchInference(model, backend=mine, **OPTIONS | options)

        def follows(rank):
            try:
                made(rank)
            except SystemExit:
                pass
            except BaseException as e:
                self.errors.append(e)

        for rank in range(1, size):
            self.threads.append(threading.Thread(target=follows, args=(rank,), daemon=True))
            self.threads[-1].start()
        self.engine = made(0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()


def collected(streams):
    """What each stream gave, or its error."""

    def one(stream):
        try:
            return json.dumps([[int(t) for t in stream.collect()], [str(x) for x in stream.logprobs]])
        except Exception as e:
            return e

    return [one(stream) for stream in streams]
