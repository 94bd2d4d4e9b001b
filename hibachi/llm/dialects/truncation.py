"""Truncation of prompts that are too long."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Truncation:
    """How to truncate. most: tokens that are kept; None means as many as leave room for the answer. first: keep the
    first of them, not the last. new: tokens of the answer for which there must be room.
    """

    most: int | None
    first: bool = False
    new: int = 1

    def cut(self, ids: list[int], context: int, longest: int | None = None) -> list[int]:
        """The kept part of a prompt's tokens, at least one. context: most tokens of a request; longest: of a prompt."""
        room = min(context - self.new, context if longest is None else longest)
        most = max(1, room if self.most is None else self.most)
        if len(ids) <= most:
            return ids
        return ids[:most] if self.first else ids[-most:]
