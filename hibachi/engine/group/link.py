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


class Connection:
    """Messages of any length over a socket, each whole. Several threads may send, one may receive."""

    def __init__(self, socket_: socket.socket) -> None:
        self._socket, self._lock = socket_, threading.Lock()
        socket_.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        socket_.settimeout(None)

    def send(self, data: bytes) -> None:
        """Raises OSError."""
        with self._lock:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> bytes | None:
        """The next message; None means that the other side has ended."""
        try:
            head = self._read(_LENGTH.size)
            return head and self._read(_LENGTH.unpack(head)[0])
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
            said, rank, theirs = _introduced(connection.receive())
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
        self._failures: dict[int, dict[str, Any]] = {}
        self._at: dict[int, tuple[int, float]] = {}  # what each has done, and when it last said so
        self._closing = False
        self.asked: Callable[[], object] = end_all
        """Called when a rank was asked to end."""
        for rank in connections:
            threading.Thread(target=self._listen, args=(rank,), name=f"hibachi-rank-{rank}", daemon=True).start()

    def failure(self, within: float) -> dict[str, Any] | None:
        """What a rank says has failed there; waits for it. None: nobody says so."""
        with self._changed:
            self._changed.wait_for(lambda: self._failures or self.ended, within)
            return self._failures.popitem()[1] if self._failures else None

    def slowest(self) -> str:
        """The rank that has done least, for a message about one that hangs."""
        with self._changed:
            rank, (done, heard) = min(self._at.items(), key=lambda one: one[1], default=(0, (0, time.monotonic())))
        ago = time.monotonic() - heard
        return f"Rank {rank} does not answer: it was last heard {ago:.0f} s ago, when it had added up {done} sums"

    def close(self) -> None:
        self._closing = True
        for connection in self._connections.values():
            connection.close()

    def _listen(self, rank: int) -> None:
        while (data := self._connections[rank].receive()) is not None:
            said = json.loads(data)
            with self._changed:
                self._at[rank] = said.pop("sums", self._at.get(rank, (0, 0.0))[0]), time.monotonic()
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
    """End this process in its order: what serves may be its parent, which decides for it."""
    of_parent = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    os.kill(os.getppid() if of_parent else os.getpid(), signal.SIGTERM)


class Reports:
    """What a rank tells rank 0."""

    def __init__(self, connection: Connection, sums: Callable[[], int]) -> None:
        self._connection, self._sums = connection, sums
        threading.Thread(target=self._beat, name="hibachi-reports", daemon=True).start()

    def failed(self, error: BaseException, *, memory: bool = False, fatal: bool = False) -> None:
        self._send({"failed": str(error) if fatal else text_of(error), "memory": memory, "fatal": fatal})

    def asked_to_end(self) -> None:
        self._send({"end": True})

    def _beat(self) -> None:
        while self._send({"sums": self._sums()}):
            time.sleep(BEAT)

    def _send(self, said: dict[str, Any]) -> bool:
        try:
            self._connection.send(json.dumps(said).encode())
        except OSError:  # rank 0 has ended, as the thread that reads finds as well
            return False
        return True
