"""Continuous batching for any autoregressive model, on any array library."""

import os as _os
import sys as _sys

# `python -m hibachi` puts the working directory first on the path, where a json.py of the user's would hide Python's.
# It goes to the end, unless we lie there ourselves. Here, as Python runs this file before __main__.py, while sys.argv
# is still ["-m", *arguments].
if (
    _sys.argv[:1] == ["-m"]
    and not _sys.flags.safe_path
    and _sys.orig_argv[-len(_sys.argv)].removeprefix("-m").partition(".")[0] == "hibachi"
    and _sys.path[0] != _os.path.dirname(__path__[0])
):
    _sys.path.append(_sys.path.pop(0))

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from hibachi.backend.array_backend import ArrayBackend as ArrayBackend
    from hibachi.backend.candidates import Candidate as Candidate
    from hibachi.backend.discover import available_backends as available_backends
    from hibachi.backend.discover import backend_for as backend_for
    from hibachi.backend.discover import load_backend as load_backend
    from hibachi.backend.layout import CacheSpec as CacheSpec
    from hibachi.backend.layout import Input as Input
    from hibachi.backend.layout import OwnCache as OwnCache
    from hibachi.backend.layout import Paged as Paged
    from hibachi.backend.layout import State as State
    from hibachi.backend.layout import StepInputs as StepInputs
    from hibachi.backend.numpy_backend import NumpyBackend as NumpyBackend
    from hibachi.backend.protocol import Backend as Backend
    from hibachi.backend.protocol import Unsqueezable as Unsqueezable
    from hibachi.engine.autoregressive import AutoregressiveBatchInference as AutoregressiveBatchInference
    from hibachi.engine.feedforward import FeedforwardBatchInference as FeedforwardBatchInference
    from hibachi.engine.health import Health as Health
    from hibachi.engine.ladder import Autoregressive as Autoregressive
    from hibachi.engine.ladder import CachedModel as CachedModel
    from hibachi.engine.ladder import Feedforward as Feedforward
    from hibachi.engine.ladder import LanguageModel as LanguageModel
    from hibachi.engine.ladder import LogitsModel as LogitsModel
    from hibachi.engine.ladder import OwnCacheModel as OwnCacheModel
    from hibachi.engine.ladder import PaddedAutoregressive as PaddedAutoregressive
    from hibachi.engine.runners.meters import Meters as Meters
    from hibachi.engine.scheduler.policy import Fair as Fair
    from hibachi.engine.scheduler.policy import Fcfs as Fcfs
    from hibachi.engine.scheduler.policy import Policy as Policy
    from hibachi.engine.scheduler.policy import Priority as Priority
    from hibachi.engine.scheduler.policy import Shares as Shares
    from hibachi.engine.scheduler.policy import WaitingServed as WaitingServed
    from hibachi.engine.stats import Stats as Stats
    from hibachi.engine.streams.batcher import AutoregressiveBatcher as AutoregressiveBatcher
    from hibachi.engine.streams.batcher import FeedforwardBatcher as FeedforwardBatcher
    from hibachi.engine.streams.stream import Item as Item
    from hibachi.engine.streams.stream import ItemStream as ItemStream
    from hibachi.engine.tiers.config import KVTiers as KVTiers
    from hibachi.engine.trie import Trie as Trie
    from hibachi.errors import BackendError as BackendError
    from hibachi.errors import BackendNotFound as BackendNotFound
    from hibachi.errors import BackendNotInstalled as BackendNotInstalled
    from hibachi.errors import ConfigError as ConfigError
    from hibachi.errors import DeadlineExceeded as DeadlineExceeded
    from hibachi.errors import EngineClosed as EngineClosed
    from hibachi.errors import EngineError as EngineError
    from hibachi.errors import EngineFailed as EngineFailed
    from hibachi.errors import HibachiError as HibachiError
    from hibachi.errors import InternalError as InternalError
    from hibachi.errors import InvalidCall as InvalidCall
    from hibachi.errors import InvalidModelFiles as InvalidModelFiles
    from hibachi.errors import InvalidModelOutput as InvalidModelOutput
    from hibachi.errors import InvalidRequest as InvalidRequest
    from hibachi.errors import InvalidTensorOperation as InvalidTensorOperation
    from hibachi.errors import KVStoreError as KVStoreError
    from hibachi.errors import MissingExtra as MissingExtra
    from hibachi.errors import ModelError as ModelError
    from hibachi.errors import ModelFault as ModelFault
    from hibachi.errors import NonFiniteOutput as NonFiniteOutput
    from hibachi.errors import NotDeterministic as NotDeterministic
    from hibachi.errors import OutOfCapacity as OutOfCapacity
    from hibachi.errors import PromptTooLong as PromptTooLong
    from hibachi.errors import QueueFull as QueueFull
    from hibachi.errors import RequestError as RequestError
    from hibachi.errors import UnknownArchitecture as UnknownArchitecture
    from hibachi.errors import UnsupportedOperation as UnsupportedOperation
    from hibachi.llm.llm import LLM as LLM
    from hibachi.llm.model.families import Family as Family
    from hibachi.llm.model.files import ModelFiles as ModelFiles
    from hibachi.llm.model.registry import load_model as load_model
    from hibachi.llm.model.registry import register_model as register_model
    from hibachi.llm.scores import Embedding as Embedding
    from hibachi.llm.scores import Score as Score
    from hibachi.llm.textstream import Choice as Choice
    from hibachi.llm.textstream import Completion as Completion
    from hibachi.llm.textstream import Piece as Piece
    from hibachi.llm.textstream import Stopped as Stopped
    from hibachi.llm.textstream import TextStream as TextStream
    from hibachi.request import Beams as Beams
    from hibachi.request import Finish as Finish
    from hibachi.request import Guidance as Guidance
    from hibachi.request import SamplingParams as SamplingParams
    from hibachi.request import StopRule as StopRule
    from hibachi.request import Terms as Terms
    from hibachi.structured import StructuredOutputs as StructuredOutputs

# What is public, and where it stands: it is imported when it is first asked for, so that what needs no engine (the help
# of a command, a router) starts without NumPy.
_PLACES = {
    name: f"hibachi.{place}"
    for place, names in {
        "backend.array_backend": "ArrayBackend",
        "backend.candidates": "Candidate",
        "backend.discover": "available_backends backend_for load_backend",
        "backend.layout": "CacheSpec Input OwnCache Paged State StepInputs",
        "backend.numpy_backend": "NumpyBackend",
        "backend.protocol": "Backend Unsqueezable",
        "engine.autoregressive": "AutoregressiveBatchInference",
        "engine.feedforward": "FeedforwardBatchInference",
        "engine.trie": "Trie",
        "engine.health": "Health",
        "engine.ladder": "Autoregressive CachedModel Feedforward LanguageModel LogitsModel OwnCacheModel "
        "PaddedAutoregressive",
        "engine.runners.meters": "Meters",
        "engine.scheduler.policy": "Fair Fcfs Policy Priority Shares WaitingServed",
        "engine.stats": "Stats",
        "engine.tiers.config": "KVTiers",
        "engine.streams.batcher": "AutoregressiveBatcher FeedforwardBatcher",
        "engine.streams.stream": "Item ItemStream",
        "errors": "BackendError BackendNotFound BackendNotInstalled ConfigError DeadlineExceeded EngineClosed "
        "EngineError EngineFailed HibachiError InternalError InvalidCall InvalidModelFiles InvalidModelOutput "
        "InvalidRequest InvalidTensorOperation KVStoreError MissingExtra ModelError ModelFault NonFiniteOutput "
        "NotDeterministic OutOfCapacity PromptTooLong QueueFull RequestError UnknownArchitecture "
        "UnsupportedOperation",
        "llm.llm": "LLM",
        "llm.model.families": "Family",
        "llm.model.files": "ModelFiles",
        "llm.model.registry": "load_model register_model",
        "llm.scores": "Embedding Score",
        "llm.textstream": "Choice Completion Piece Stopped TextStream",
        "request": "Beams Finish Guidance SamplingParams StopRule Terms",
        "structured": "StructuredOutputs",
    }.items()
    for name in names.split()
}

__all__ = [*_PLACES]


def __getattr__(name: str) -> object:
    if (place := _PLACES.get(name)) is None:
        raise AttributeError(f"module 'hibachi' has no attribute {name!r}")
    found: object = getattr(_import_module(place), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
