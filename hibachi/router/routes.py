"""Routing rules of paths: which pass, which may be sent twice, and which belong to the upstream that made the object
they name.
"""

from __future__ import annotations

import re
from enum import Enum
from posixpath import normpath


class RouteKind(Enum):
    """GENERATES: the same request may be tried again elsewhere. OBJECT: it concerns what one upstream keeps."""

    GENERATES = "generates"
    OBJECT = "object"
    OTHER = "other"


TGI = frozenset({"/", "/generate", "/generate_stream", "/chat_tokenize", "/info"})
TOKENS = "/v1/generate"  # routes whose bodies may be arrays, with the model in the query
_GENERATE = frozenset(
    {
        TOKENS,
        "/v1/warm",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/rerank",
        "/v1/score",
        "/v1/moderations",
        "/v1/images/generations",
        "/v1/images/edits",
        "/v1/images/variations",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/audio/speech",
        "/v1/classify",
        "/v1/pooling",
        "/v1/tokenize",
        "/v1/detokenize",
        "/v2/rerank",
        "/tokenize",
        "/detokenize",
        "/pooling",
        "/classify",
        "/score",
        "/rerank",
        "/embed",
        "/invocations",
        "/vertex",
        "/inference/v1/generate",
        *(TGI - {"/info"}),
    }
)
STORED = frozenset({"/v1/responses"})  # what they generate is kept, and may be asked for again
_RESPONSES = re.compile(r"/v1/responses/([^/]+)(?:/.*)?")
_ENGINES = re.compile(r"/v1/engines/.+/(completions|embeddings)")
_OBJECTS = re.compile(
    r"/v1/(files|uploads|batches|responses/|threads|assistants|fine_tuning|fine-tunes|vector_stores|conversations"
    r"|containers|evals|videos|chat/completions/|messages/batches)"
)
_BESIDES = frozenset({"/info", "/version", "/ping"})
# What only the operator of an upstream may do, also where --pass would let it through.
_NEVER = re.compile(
    r"(/v1)?/(metrics|debug|reset_\w+|sleep|wake_up|is_sleeping|collective_rpc|start_profile|stop_profile|pause|resume"
    r"|load_lora_adapter|server_info|unload_lora_adapter)(/.*)?"
)


def response_of_path(path: str) -> str:
    """The id of a response that a path (decoded) names; "" means none."""
    found = _RESPONSES.fullmatch(path)
    return found[1] if found else ""


class Routes:
    """more: paths that pass besides; with a * at the end, all that begin so."""

    def __init__(self, more: tuple[str, ...] = ()) -> None:
        self._more = frozenset(path for path in more if not path.endswith("*"))
        self._beginnings = tuple(path[:-1] for path in more if path.endswith("*"))

    def kind(self, method: str, path: str) -> RouteKind | None:
        """None means it does not pass."""
        plain = normpath(path) if "//" in path or "/." in path else path  # as an upstream may understand it
        if "\\" in path or _NEVER.fullmatch(plain) or (plain is not path and not plain.startswith("/v1/")):
            return None
        if path in _GENERATE:
            return RouteKind.GENERATES if method == "POST" else RouteKind.OTHER
        if path in self._more or (self._beginnings and path.startswith(self._beginnings)):
            return RouteKind.OTHER
        if path.startswith("/v1/"):
            if method == "POST" and _ENGINES.fullmatch(path):
                return RouteKind.GENERATES
            return RouteKind.OBJECT if _OBJECTS.match(plain) else RouteKind.OTHER
        return RouteKind.OTHER if path in _BESIDES else None
