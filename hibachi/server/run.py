"""The life of a server: bind the address, load the model, serve requests, shut down in order."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Sequence
from contextlib import closing

from hibachi.errors import ConfigError
from hibachi.llm.holding import about
from hibachi.llm.remote.opening import is_follower, open_settled
from hibachi.server.load_model import opened
from hibachi.server.settings import ServeSettings
from hibachi.server.web.address import bound
from hibachi.server.web.certificate import certificate_of
from hibachi.server.web.cors import origins_of
from hibachi.server.web.hosts import hosts_for
from hibachi.server.web.keys import tenants_of
from hibachi.server.web.logs import log_to_stderr
from hibachi.server.web.rooted import root_of
from hibachi.server.web.signals import ending

log: logging.Logger = logging.getLogger("hibachi.serve")


def serve(settings: ServeSettings, remarks: Sequence[str] = ()) -> int:
    """Serve until a signal comes. Returns the exit status: 0 means an orderly end, 1 that the engine was lost.

    Raises ConfigError for an address or settings that cannot be used, and what making the model raises.
    """
    log_to_stderr(settings.log_level, settings.log_format)
    for remark in remarks:
        log.warning("%s", remark)
    if settings.tgi is not None and settings.tgi.huggingface_hub_cache is not None:
        os.environ["HF_HUB_CACHE"] = settings.tgi.huggingface_hub_cache  # which the engine's process inherits
    if is_follower(settings):
        open_settled(settings)
    tenants, certificate = tenants_of(settings), certificate_of(settings)
    origins = origins_of(settings.allowed_origins, "--allowed-origins")
    root_of(settings.root_path)
    with bound(settings) as (listeners, url, public), ending():
        if public and not tenants.keys:
            log.warning("any client that reaches %s may use it, as there is no --api-key", url)
        importing = threading.Thread(target=importlib.import_module, args=("hibachi.server.server",), daemon=True)
        importing.start()  # while the engine's process loads the model
        served = opened(settings, tenants)
        with closing(served.what):
            importing.join()
            from hibachi.server.server import Application
            from hibachi.server.web.server import HttpServer

            app = Application(settings)
            app.begin(served, hosts_for(settings, origins, public))
            arrival = settings.arrival_timeout or None
            server = HttpServer(app.config(certificate), app, settings.drain_timeout, arrival)
            server.tidings = f"serving {', '.join(served.names)} on {url} ({about(served.what)})"
            try:
                server.run(listeners)
            except OSError as e:
                raise ConfigError(f"Cannot listen on {url}: {e.strerror or e}.") from e
    return server.status
