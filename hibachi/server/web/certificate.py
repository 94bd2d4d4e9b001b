"""The server's TLS certificate and the check of clients' certificates; files are read again when they change."""

from __future__ import annotations

import logging
import os
import ssl
import time
from pathlib import Path
from typing import NamedTuple

from hibachi.errors import ConfigError
from hibachi.server.web.settings import AddressSettings

log: logging.Logger = logging.getLogger("hibachi.serve")
EVERY = 1.0  # seconds from one look at the files to the next
_State = tuple[tuple[int, int, int] | None, ...]  # of each file: mtime, size, inode


class Files(NamedTuple):
    """Files in PEM. key: None means it is in `cert`. authorities: signers of the clients' certificates; None means
    clients need none.
    """

    cert: str
    key: str | None
    authorities: str | None

    def state(self) -> _State:
        found = []
        for file in self:
            try:
                told = os.stat(file) if file is not None else None
            except OSError:
                told = None
            found.append(told and (told.st_mtime_ns, told.st_size, told.st_ino))
        return tuple(found)

    def context(self) -> ssl.SSLContext:
        """Raises ConfigError for files that cannot be used."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            made.load_cert_chain(self.cert, self.key, password=lambda: "")
        except (OSError, ValueError) as e:  # ssl.SSLError is an OSError
            raise ConfigError(f"--ssl-certfile {self.cert}, --ssl-keyfile {self.key}: {self._why(e)}.") from e
        if self.authorities is not None:
            made.verify_mode = ssl.CERT_REQUIRED
            try:
                made.load_verify_locations(self.authorities)
            except (OSError, ValueError) as e:
                raise ConfigError(f"--ssl-ca-certs {self.authorities}: {e}.") from e
        return made

    def _why(self, e: Exception) -> object:
        """What is wrong with the files, in words: TLS libraries say no more than "PEM lib" of what is missing."""
        for file, what in ((self.cert, "CERTIFICATE"), (self.key or self.cert, "PRIVATE KEY")):
            if isinstance(e, ssl.SSLError) and f"{what}-----".encode() not in Path(file).read_bytes():
                return f"expected a {what.lower()} in PEM; {file} holds none. Name the file that does"
        return e


class Certificate(ssl.SSLContext):
    """Gives each new connection the files as they are now, all of them from one reading.

    Each reading makes a new TLS context: one that is loaded again would keep removed authorities and accept session
    tickets of clients that these had signed. Open connections go on.
    """

    def __new__(cls, files: Files) -> Certificate:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, files: Files) -> None:
        """Raises ConfigError."""
        super().__init__()
        self._files = files
        self._read = self._seen = files.state()
        self._context = files.context()
        self._looked = time.monotonic()
        self._complaint = ""

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        """Where asyncio begins a connection."""
        return self._context.wrap_bio(incoming, outgoing, server_side, server_hostname, session)

    def look(self) -> None:
        """Read the files again if they have changed and did not change since the last look, as they may be half
        written. Called often; looks once a second.
        """
        if (now := time.monotonic()) - self._looked < EVERY:
            return
        self._looked = now
        before, self._seen = self._seen, self._files.state()
        if self._seen == self._read or self._seen != before:
            return
        self._read = self._seen
        try:
            self._context = self._files.context()
        except (ConfigError, OSError) as e:  # the latter of a file that is gone meanwhile
            if str(e) != self._complaint:
                log.error("the certificate was not read again, and the one before is kept: %s", e)
            self._complaint = str(e)
        else:
            self._complaint = ""
            log.info("the certificate was read again: %s", self._files.cert)


def certificate_of(settings: AddressSettings) -> Certificate | None:
    """The certificate from the settings; None means no TLS. Raises ConfigError for files that cannot be used."""
    if settings.ssl_certfile is not None:
        return Certificate(Files(settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs))
    if settings.ssl_keyfile is not None:
        raise ConfigError("--ssl-keyfile is the key of --ssl-certfile, which is missing.")
    if settings.ssl_ca_certs is not None:
        raise ConfigError("--ssl-ca-certs checks the certificates of clients over TLS, so it needs --ssl-certfile.")
    return None
