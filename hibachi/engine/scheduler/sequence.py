"""The record of a sequence that the scheduler and its policy share."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from hibachi.request import Finish


@dataclass(slots=True, eq=False)
class Seq:
    """One sequence. Fields that a caller sets come first, with `owner` for the caller's own data."""

    prompt_len: int
    max_new: int | None  # None means up to the end of the context
    owner: Any = None
    priority: int = 0  # smaller is served first
    tenant: Hashable = ""  # its tenant, for policies that are fair to tenants
    deadline: float | None = None  # time at which it must have ended
    start_by: float | None = None  # time at which it must have started
    arrival: float = 0.0
    # What it may share with other sequences: the key of each full block of its tokens, such as their bytes, and below
    # it the salt that they must have in common. None means nothing. The list grows with the generated tokens.
    keys: list[Hashable] | None = None
    salt: Hashable = None
    # Begun elsewhere: the contents of its prompt's blocks are given, and its first new token is known.
    begun: bool = False
    # It waits for something else than a row, such as its grammar, and does not start before `Scheduler.free`.
    held: bool = False

    # Number of tokens that somebody proposes to come next. A caller sets it, and the next step takes it.
    draft: int = 0

    # The rest belongs to the scheduler and its policy.
    number: int = 0  # in order of arrival
    rank: Any = None  # its place in the order of service
    end: int = 0  # length at which it finishes
    length: int = 0  # tokens when it got its row: the prompt, and what it generated before it was preempted
    row: int = -1
    started: bool = False  # has had a row before
    paused: bool = False
    most: int = 0  # tokens in a step; 0 means that it has no limit of its own
    blocks: list[int] = field(default_factory=list)
    published: int = 0  # number of its first blocks that are in the trie
    node: Hashable = None  # trie node of the last of them
    reused: int = 0  # tokens that it found computed when it got its row
    finish: Finish | None = None
