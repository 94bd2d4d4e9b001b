"""CUDA graphs: a decode step is recorded once for each shape, and then launched as a whole.

Launching a kernel costs the host microseconds, and a decode step launches hundreds that run no longer than that. A
graph launches all of them at once. It reads and writes the memory that it was recorded with, so a step's inputs are
copied into arrays of the graph's own first, and its output is copied out afterwards.

What does the recording is behind `GraphRecorder`, so that all of this file but `CudaRecorder` runs on the CPU as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeAlias

import torch

from hibachi.backend.array_backend import Array, LayerCache
from hibachi.backend.layout import StepInputs

_log = logging.getLogger("hibachi.torch")

Step: TypeAlias = "Callable[[Any, list[LayerCache], StepInputs[Array]], tuple[Array, list[LayerCache]]]"

MOST = 64  # graphs; there are few shapes, if the engine pads
CLOSE = 0.05  # of the largest output: by how much a replay may differ from the same step, run kernel by kernel


class GraphRecorder(Protocol):
    def record(self, launch: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        """What `launch()` returns, and a function that launches the same again, into the same memory."""
        ...


class CudaRecorder:
    """Recordings that share one pool of memory, as they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: Any = None

    def record(self, launch: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                launch()  # libraries make their workspaces now, and not while we record
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads may use the device meanwhile: only our own must not do what cannot be recorded.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                    out = launch()
            finally:
                torch.cuda.set_stream(current)  # PyTorch leaves a recording that failed on the other stream
            return out, graph.replay


@dataclass(slots=True, eq=False)
class _Graph:
    inputs: list[Array]  # of the recorded step, to be overwritten
    out: Array  # is overwritten by `replay`
    replay: Callable[[], None]
    checked: bool = False


class StepGraphs:
    """`step(params, cache, x)` of a `CachedModel` that writes its cache in place, with decode steps recorded.

    The first step of a shape runs kernel by kernel, the second is recorded after it has run, and the third is run both
    ways and compared. Shapes that cannot be recorded, and steps with prompts, run kernel by kernel; why is logged
    once, and no request notices. If a replay comes to something else, it may have written anywhere: `spoiled(cache)`
    is called, and RuntimeError raised.
    """

    def __init__(
        self, step: Step, recorder: Callable[[], GraphRecorder], spoiled: Callable[[Sequence[LayerCache]], None]
    ) -> None:
        self._step, self._make_recorder, self._spoiled = step, recorder, spoiled
        self._recorder = recorder()
        self._seen: set[Any] = set()
        self._graphs: dict[Any, _Graph] = {}
        self._params: Any = None
        self._cache: list[LayerCache] = []
        self._left: set[Any] = set()  # shapes that are not recorded
        self.why: list[str] = []
        """Why shapes are not recorded."""
        self._off = False  # nothing is recorded any more

    def __len__(self) -> int:
        return len(self._graphs)

    def __call__(self, params: Any, cache: list[LayerCache], x: StepInputs[Array]) -> tuple[Array, list[LayerCache]]:
        if self._off or not _decodes(x):
            return self._step(params, cache, x)
        if not self._same_memory(params, cache):
            self._forget(params, cache)
        inputs = list(_leaves(x))
        key = tuple((t.shape, t.dtype) for t in inputs)
        graph = self._graphs.get(key)
        if graph is None:
            return self._run(key, params, cache, x)
        torch._foreach_copy_(graph.inputs, inputs)
        graph.replay()
        out = graph.out.clone()  # the next step of this shape overwrites it
        if not graph.checked:
            self._check(out, params, cache, x)
            graph.checked = True
        return out, cache

    def _run(
        self, key: Any, params: Any, cache: list[LayerCache], x: StepInputs[Array]
    ) -> tuple[Array, list[LayerCache]]:
        out, new = self._step(params, cache, x)  # what is wrong with a request is raised here, as without us
        if key not in self._seen:
            self._seen.add(key)
        elif len(self._graphs) == MOST:
            self._leave(key, f"there are more than {MOST} shapes of steps")
        elif key not in self._left:
            try:
                self._record(key, params, cache, x)
            except Exception as e:
                self._leave(key, f"recording a step failed with {type(e).__name__}: {e}")
        return out, new

    def _record(self, key: Any, params: Any, cache: list[LayerCache], x: StepInputs[Array]) -> None:
        own = _map(x, torch.clone)

        def launch() -> tuple[Array, list[LayerCache]]:
            return self._step(params, cache, replace(own))  # an object of its own: nothing kept for `x` fits it

        (out, new), replay = self._recorder.record(launch)
        if not isinstance(out, torch.Tensor):
            self._leave(key, f"a step returns {type(out).__qualname__}, not an array")
        elif _pointers(new) != _pointers(cache):
            self._leave(key, "a step returns another cache than the one it was given")
        else:
            self._graphs[key] = _Graph(list(_leaves(own)), out, replay)

    def _check(self, out: Array, params: Any, cache: list[LayerCache], x: StepInputs[Array]) -> None:
        expected, _ = self._step(params, cache, x)  # steps write at fixed positions, so one may be run again
        got, expected = (torch.nan_to_num(t.float()) for t in (out, expected))
        if bool((got - expected).abs().max() <= CLOSE * expected.abs().max()):
            return
        why = "a recorded step came to something else than the step itself"
        self._off = True
        self._graphs.clear()
        self._tell(why)
        self._spoiled(cache)
        raise RuntimeError(f"{why}; its cache is lost")

    def _leave(self, key: Any, why: str) -> None:
        self._left.add(key)
        self._tell(why)

    def _tell(self, why: str) -> None:
        if why not in self.why:
            self.why.append(why)
            which = "Steps" if self._off else "Some shapes of steps"
            _log.warning("%s are launched kernel by kernel, without CUDA graphs: %s.", which, why)

    def _same_memory(self, params: Any, cache: list[LayerCache]) -> bool:
        if params is not self._params or len(cache) != len(self._cache):
            return False
        if all(a is b for a, b in zip(cache, self._cache, strict=True)):
            return True
        if _pointers(cache) != _pointers(self._cache):
            return False
        self._cache = list(cache)
        return True

    def _forget(self, params: Any, cache: list[LayerCache]) -> None:
        self._params, self._cache = params, list(cache)
        self._seen.clear()
        self._left.clear()
        if self._graphs:
            self._graphs.clear()
            self._recorder = self._make_recorder()  # its memory goes with the graphs


def _decodes(x: StepInputs[Array]) -> bool:
    """Does every row compute one token, and is nothing given but tokens?"""
    return x.tile_q.shape[1] == 1 and x.tok.shape[0] == x.row.shape[0] and x.embeds is None


def _map(x: StepInputs[Array], f: Callable[[Array], Array]) -> StepInputs[Array]:
    given = {field.name: getattr(x, field.name) for field in fields(x)}
    return StepInputs(**{name: None if t is None else f(t) for name, t in given.items()})


def _leaves(x: StepInputs[Array]) -> Iterator[Array]:
    return (t for field in _FIELDS if (t := getattr(x, field)) is not None)


_FIELDS = [field.name for field in fields(StepInputs)]


def _pointers(cache: Any) -> Any:
    """Where the arrays of a cache lie."""
    if isinstance(cache, torch.Tensor):
        return cache.data_ptr()
    return [_pointers(part) for part in cache] if isinstance(cache, (list, tuple)) else cache
