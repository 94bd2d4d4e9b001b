"""Threads as ranks, and a small model that several can share."""

import json
import queue
import threading

import numpy as np

from hibachi import AutoregressiveBatchInference, NumpyBackend
from hibachi.backend.group import GroupLost, place_of, tree
from hibachi.llm.model.arch import Arch, Layer, shapes
from hibachi.llm.model.decoder import Decoder
from hibachi.llm.model.rope import Rope

OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "max_model_len": 96, "block_size": 16}


def arch_of(heads=8, kv_heads=8, **more):
    known = {
        "layers": (Layer(),) * 2,
        "hidden_size": 64,
        "head_dim": 64,
        "intermediate": 64 * heads,
        "vocab_size": 97,
        "max_positions": 96,
    }
    return Arch(
        heads=heads,
        kv_heads=kv_heads,
        norm_eps=1e-5,
        ropes=(Rope(10000.0, 64),),
        **known | more,
    )


def weights_of(arch, biases=()):
    rng, (required, optional) = np.random.default_rng(0), shapes(arch)
    named = required | {name: shape for name, shape in optional.items() if name.endswith(biases or ("nothing",))}
    return {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in named.items()}


class Threads:
    """A group of threads, in so many stages."""

    def __init__(self, size, stages=1):
        self.size, self.stages, self.said, self.lock = size, stages, {}, threading.Condition()
        self.made, self.held, self.patience = {}, [None] * size, 20.0  # seconds that one may be late
        self.ranks = [Rank(self, rank) for rank in range(size)]

    def shared(self, key, make):
        """One for all ranks that name it."""
        with self.lock:
            return self.made.setdefault(key, make())


class Rank:
    host = "127.0.0.1"

    def __init__(self, threads, rank):
        self.threads, self.rank, self.size, self.sums = threads, rank, threads.size, 0
        self.place = place_of(rank, threads.size, threads.stages)
        self.mine = slice(rank - self.place.tp_rank, rank - self.place.tp_rank + self.place.tp_size)
        self.gathers, self.sent, self.harm, self.facts = 0, 0, lambda: None, {}
        self.renew(0)

    def exchanged(self, x, found, which=None):
        which = which or self.mine
        barrier = self.barrier(which)
        try:
            self.threads.held[self.rank] = x
            barrier.wait(self.threads.patience)
            out = found(self.threads.held[which])
            barrier.wait(self.threads.patience)
        except threading.BrokenBarrierError:
            raise GroupLost("the barrier is broken") from None
        return out

    def barrier(self, which):
        key = self.epoch, which.start, which.stop
        return self.threads.shared(key, lambda: threading.Barrier(which.stop - which.start))

    def channel(self, stage):
        """From a stage to the next one."""
        return self.threads.shared((self.epoch, self.place.of_stage(stage)), queue.Queue)

    def send(self, x):
        self.harm()
        self.sent += 1
        self.channel(self.place.stage).put(np.array(x))

    def receive(self, shape, dtype):
        channel = self.channel(self.place.stage - 1)
        try:
            x = channel.get(timeout=self.threads.patience)
        except queue.Empty:
            x = None
        if x is None:
            channel.put(None)
            raise GroupLost("nothing has come")
        assert x.shape == shape and x.dtype == dtype
        return x

    def sum(self, x):
        self.sums += 1
        self.harm()
        x[...] = self.exchanged(x.copy(), tree)
        return x

    def gather(self, x, columns):
        self.gathers += 1
        whole = self.exchanged(x, lambda parts: np.concatenate(parts, 1))
        return whole if self.place.tp_rank == 0 else x

    def collect(self, x):
        whole = self.exchanged(x, lambda parts: np.hstack(np.stack(parts)), slice(0, self.size))  # of one shape
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

    def cancel(self):
        pass

    def abort(self):
        for which in (self.mine, slice(0, self.size)):
            self.barrier(which).abort()
        self.channel(self.place.stage).put(None)

    def renew(self, epoch):
        if epoch:
            self.abort()
        self.epoch = epoch
        if epoch:
            met = self.threads.shared((epoch, "all have come"), lambda: threading.Barrier(self.size))
            met.wait(self.threads.patience)

    def close(self):
        pass


class Together:
    """An engine of so many ranks in each of so many stages. make: a model of a backend; None means a decoder. harms: by
    rank, before its sums, and before it sends.
    """

    def __init__(
        self,
        size,
        leaves,
        arch=None,
        weights=None,
        *,
        stages=1,
        make=None,
        backend=None,
        dtype="float32",
        harms=None,
        **options,
    ):
        size *= stages
        self.group, self.threads, self.errors = Threads(size, stages), [], []
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
