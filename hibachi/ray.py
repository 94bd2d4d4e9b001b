"""hibachi on a cluster of Ray: `Generate` puts the rows of a Dataset through a model, `app` serves one. See
docs/scale.md.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hibachi.common.installed import need
from hibachi.errors import ConfigError, EngineFailed
from hibachi.offline.blocks import BlockRunner
from hibachi.server import asgi


class Generate(BlockRunner):
    """A model for `Dataset.map_batches`, of which Ray makes one in each of its actors. Rows of all blocks in flight are
    in one engine.

    model, options: as for `BlockRunner`. Raises ConfigError and what loading the model raises.
    """

    def __init__(self, model: str | Path = "tiny", **options: Any) -> None:
        super().__init__(model, **options)
        self.open()

    async def __call__(self, block: Any) -> Any:
        """block: as for `ask`. Returns it as `answered` does. Raises ConfigError and EngineFailed."""
        return self.answered(block, await asyncio.gather(*[asyncio.wrap_future(row) for row in self.ask(block)]))


# ---- Ray Serve -------------------------------------------------------------------------------------------------------

OLDEST = (2, 60)  # 2.54 starts no asynchronous actor beside uvloop 0.22, and 2.55 no deployment beside protobuf 7
CLOSING = 5.0  # seconds to close an engine when its requests have ended


def app(settings: Mapping[str, Any] | None = None) -> Any:
    """A model as an application of Ray Serve, with all routes of `hibachi serve`, for `serve.run`. In Serve's own files
    it is `import_path: hibachi.ray:app`, with the settings as `args`.

    settings: as of `hibachi.server.asgi`, and besides options of `serve.deployment` by their names, such as
    num_replicas and ray_actor_options. A replica has all processes of its model on its node: unless ray_actor_options
    say so, it asks for as many CPUs.

    Raises MissingExtra, and ConfigError for an old Ray and for settings that cannot be used.
    """
    serve = _serve()
    given = dict(settings or {})
    known = [*inspect.signature(serve.deployment).parameters][1:]
    options = {name: given.pop(name) for name in known if name in given}
    made = asgi(given)
    if not isinstance(ranks := made.settings.tensor_parallel_size, int):
        raise ConfigError("tensor_parallel_size auto: Ray must know before how many processes there are. Say a number.")

    def ingress() -> Any:
        made.open()  # here, as Ray tells of what the constructor raises
        return made

    class Replica:
        app: Any  # Serve's: what `ingress` made

        def check_health(self) -> None:
            if (why := self.app.served.why_not_live()) is not None:
                raise EngineFailed(why)

    defaults = {
        "name": "hibachi",
        "max_ongoing_requests": 2 * (made.settings.max_num_seqs + made.settings.max_num_queued_reqs),  # it says 429
        "graceful_shutdown_timeout_s": made.settings.drain_timeout + CLOSING,
        "max_constructor_retry_count": 1,
        "ray_actor_options": {"num_cpus": ranks * made.settings.pipeline_parallel_size},
    }
    return serve.deployment(**{**defaults, **options})(serve.ingress(ingress)(Replica)).bind()


def _serve() -> Any:
    """Ray Serve. Raises MissingExtra, ConfigError."""
    version = need("ray", "hibachi.ray.app", "ray").__version__
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(f"hibachi.ray.app needs Ray {oldest} or later; got {version}. pip install -U 'ray[serve]'.")
    return need("ray.serve", "hibachi.ray.app", "ray")
