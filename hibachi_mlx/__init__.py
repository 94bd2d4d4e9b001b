"""Apple's MLX, as a hibachi backend."""

from importlib.util import find_spec as _find_spec

if _find_spec("hibachi") is None:  # its name on an index is a stranger's
    raise ModuleNotFoundError(
        "hibachi_mlx needs hibachi itself, from the same checkout or the same wheels: pip install '.[mlx]' there.",
        name="hibachi",
    )

from hibachi_mlx.backend import MlxBackend as MlxBackend
