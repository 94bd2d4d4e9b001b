"""Connections between rank 0 and the others: messages one way, reports the other. A closed one tells of a death."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hibachi.backend.group import GroupLost, RankGroup
from hibachi.errors import ConfigError, text_of

_LENGTH = struct.Struct("<I")
BEAT = 1.0  # seconds from one report of a rank to the next
MEET = 600.0  # seconds in which all must have loaded the model
INTRODUCED = 5.0, 1 << 16  # seconds in which one that connects says who it is, and bytes


class Connection:
    """Messages of any length over a socket, each whole. Several threads may send, one may receive."""

    def __init__(self, socket_: socket.socket) -> None:
        self._socket, self._lock = socket_, threading.Lock()
        socket_.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes) -> None:
        """Raises OSError."""
        with self._lock:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, within: float | None = None, most: int = 1 << 32) -> bytes | None:
        """The next message; None means that the other side has ended, or sends nothing for so many seconds, or more
        bytes than these.
        """
        try:
            self._socket.settimeout(within)
            head = self._read(_LENGTH.size)
            size = _LENGTH.unpack(head)[0] if head else most
            return self._read(size) if size < most else None
        except OSError:
            return None

    def _read(self, n: int) -> bytes | None:
        parts, left = list[bytes](), n
        while left:
            if not (piece := self._socket.recv(left)):
                return None
            parts.append(piece)
            left -= len(piece)
        return b"".join(parts)

    def close(self) -> None:
        with suppress(OSError):  # it may be closed by the other side
            self._socket.shutdown(socket.SHUT_RDWR)  # else a thread that receives keeps it open
        self._socket.close()


def connected(group: RankGroup, facts: dict[str, str], timeout: float = MEET) -> dict[int, Connection]:
    """On rank 0 the connections to the others by rank, on others that to rank 0. The address and a secret word come by
    what the ranks meet by. facts: must be the same on all ranks, with those of the group. Raises GroupLost for ranks
    that do not come, ConfigError for one that has others.
    """
    facts = group.facts | facts
    if group.rank:
        host, port, word = json.loads(group.meet("hibachi", None, timeout))
        one = socket.create_connection((host, port), timeout)
        connection = Connection(one)
        connection.send(json.dumps([word, group.rank, facts]).encode())
        return {0: connection}
    word, until, found = secrets.token_hex(16), time.monotonic() + timeout, dict[int, Connection]()
    with socket.create_server((group.host, 0)) as server:
        group.meet("hibachi", json.dumps([group.host, server.getsockname()[1], word]).encode(), timeout)
        while len(found) < group.size - 1:
            server.settimeout(BEAT)
            try:
                one, _ = server.accept()
            except TimeoutError:
                group.check()
                if time.monotonic() < until:
                    continue
                late = [rank for rank in range(1, group.size) if rank not in found]
                raise GroupLost(f"Expected {group.size} ranks within {timeout:g} s; missing: {late}.") from None
            connection = Connection(one)
            said, rank, theirs = _introduced(connection.receive(*INTRODUCED))
            if not hmac.compare_digest(said.encode(), word.encode()):  # somebody else
                connection.close()
                continue
            found[rank] = connection
            for name, here in facts.items():
                if (there := theirs.get(name)) != here:
                    for each in found.values():
                        each.close()
                    raise ConfigError(
                        f"All ranks must have the same {name}; rank {rank} has {there}, and rank 0 {here}. Start them "
                        f"with the same files, versions and options."
                    )
    return found


def _introduced(data: bytes | None) -> tuple[str, int, dict[str, str]]:
    try:
        word, rank, facts = json.loads(data or b"")
        return str(word), int(rank), dict(facts)
    except (ValueError, TypeError):
        return "", 0, {}


class RankWatch:
    """What the other ranks report to rank 0. told: called, from other threads, when one has ended."""

    def __init__(self, connections: dict[int, Connection], told: Callable[[], object]) -> None:
        self._connections, self._told = connections, told
        self._changed = threading.Condition()
        self.ended: str | None = None
        self._failures: dict[int, dict[str, Any]] = {}  # the last one of each
        # What each has done, and when it last said so.
        self._at: dict[int, tuple[int, float]] = dict.fromkeys(connections, (0, time.monotonic()))
        self._closing = False
        self.asked: Callable[[], object] = end_all
        """Called when a rank was asked to end."""
        for rank in connections:
            threading.Thread(target=self._listen, args=(rank,), name=f"hibachi-rank-{rank}", daemon=True).start()

    def failure(self, within: float, epoch: int) -> dict[str, Any] | None:
        """What a rank says has failed there in an epoch of the group; waits for it. None: nobody says so."""

        def found() -> dict[str, Any] | None:
            return next((said for said in self._failures.values() if said["epoch"] == epoch), None)

        with self._changed:
            self._changed.wait_for(lambda: found() or self.ended, within)
            return found()

    def slowest(self) -> str:
        """The rank that has done least, for a message about one that hangs."""
        with self._changed:
            rank, (done, heard) = min(self._at.items(), key=lambda one: one[1])
        ago = time.monotonic() - heard
        at = f", when it had added up {done} sums" if done else ""
        return f"Rank {rank} does not answer: it was last heard {ago:.0f} s ago{at}"

    def close(self) -> None:
        self._closing = True
        for connection in self._connections.values():
            connection.close()

    def _listen(self, rank: int) -> None:
        while (data := self._connections[rank].receive()) is not None:
            said = json.loads(data)
            with self._changed:
                self._at[rank] = said.pop("sums", self._at[rank][0]), time.monotonic()
                if said.pop("end", False):
                    self.asked()
                if said:
                    self._failures[rank] = said | {"rank": rank}
                    self._changed.notify_all()
        if not self._closing:
            with self._changed:
                self.ended = self.ended or f"Rank {rank} has ended."
                self._changed.notify_all()
            self._told()


def end_all() -> None:
    """End this process in its order: what serves may be its parent, which decides for it. A server takes SIGUSR1 for
    that: SIGTERM may have come to all ranks, and a second one ends it at once.
    """
    of_parent = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    serves = of_parent or callable(signal.getsignal(signal.SIGUSR1))
    os.kill(os.getppid() if of_parent else os.getpid(), signal.SIGUSR1 if serves else signal.SIGTERM)


class Reports:
    """What a rank tells rank 0."""

    def __init__(self, connection: Connection, sums: Callable[[], int]) -> None:
        self._connection, self._sums = connection, sums
        self.asked_to_end = False  # set by a handler of signals, which must not wait for who is sending
        threading.Thread(target=self._beat, name="hibachi-reports", daemon=True).start()

    def failed(self, error: BaseException, epoch: int, *, memory: bool = False, fatal: bool = False) -> None:
        text = str(error) if fatal else text_of(error)
        self._send({"failed": text, "epoch": epoch, "memory": memory, "fatal": fatal})

    def _beat(self) -> None:
        asked = False
        while self._send({"sums": self._sums(), "end": asked}):
            time.sleep(BEAT)
            asked, self.asked_to_end = self.asked_to_end, False

    def _send(self, said: dict[str, Any]) -> bool:
        try:
            self._connection.send(json.dumps(said).encode())
        except OSError:  # rank 0 has ended, as the thread that reads finds as well
            return False
        return True
