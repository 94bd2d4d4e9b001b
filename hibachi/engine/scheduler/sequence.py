"""The record of a sequence that the scheduler and its policy share."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
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
    names: list[bytes] = field(default_factory=list)  # of its first blocks, as far as anybody has asked
    root: bytes = b""  # that these begin from
    # Begun elsewhere: the contents of its prompt's blocks are given, and its first new token is known.
    begun: bool = False
    # It waits for something else than a row, such as its grammar, and does not start before `Scheduler.free`.
    held: bool = False

    # Number of tokens that somebody proposes to come next. A caller sets it, and the next step takes it.
    draft: int = 0

    # What it is linked with. Its ticket stands in the queue for it.
    link: Link | None = None
    # It holds a row, and goes on from what the first of its link computes, from its first new token on.
    vacant: bool = False
    # Its link has parted, and it was sent back to the queue since.
    alone: bool = False

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

    @property
    def bound(self) -> Sequence[Seq]:
        """What starts, pauses and ends with it: itself, or all of its link."""
        return (self,) if self.link is None or self.link.parted else self.link.seqs

    @property
    def ticket(self) -> Seq:
        """What stands in the queue for it."""
        return self if self.link is None or self.link.parted else self.link.ticket


@dataclass(slots=True, eq=False)
class Link:
    """Sequences that start in the same step or not at all.

    ticket: stands for all of them in the queue; a policy sees them as this one. seqs: those that have not ended.
    alike: they have one prompt. The first computes it for all, and with their first new tokens they fork. early: before
    its last token, which each computes by itself. parts: after the fork each is on its own. Otherwise they draw in the
    same steps, for which they wait for one another, are sent back together and end together.
    """

    ticket: Seq
    seqs: list[Seq]
    alike: bool
    parts: bool
    early: bool = False
    forked: bool = False
    tokens: int = 0  # of those that have ended, and the prompts of all

    @property
    def parted(self) -> bool:
        return self.forked and self.parts

    @property
    def together(self) -> bool:
        """Whether they draw in the same steps."""
        return not self.alike or (self.forked and not self.parts)

    @property
    def waits(self) -> bool:
        """Whether their last known tokens wait: for one another, or for the fork."""
        return self.together or (self.early and not self.forked)


def linked(seqs: Sequence[Seq], *, alike: bool, parts: bool, early: bool = False) -> Seq:
    """Link sequences of the same terms; returns their ticket, which is queued for them."""
    first = seqs[0]
    ticket = replace(first, owner=None, keys=None, names=[], blocks=[], held=any(seq.held for seq in seqs))
    link = Link(ticket, [*seqs], alike, parts, early)
    for seq in (ticket, *seqs):
        seq.link = link
    return ticket
