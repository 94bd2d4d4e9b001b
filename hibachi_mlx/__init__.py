"""Apple's MLX, as a hibachi backend."""

from hibachi_mlx.backend import MlxBackend as MlxBackend
