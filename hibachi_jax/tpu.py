"""Ragged paged attention on a TPU, by JAX's own Pallas kernel. It has not been run on one."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import jax.numpy as jnp

from hibachi.backend.array_backend import Array
from hibachi.backend.layout import Paged, StepInputs
from hibachi_jax.attention import Scoring

MODULE = "jax.experimental.pallas.ops.tpu.ragged_paged_attention"
LANES = 128  # the kernel's head sizes are multiples of this
_log = logging.getLogger("hibachi.jax")
_said: set[str] = set()


def kernel() -> Any:
    """The kernel. Raises ImportError, AttributeError where this JAX has none."""
    return importlib.import_module(MODULE).ragged_paged_attention


def why_not(platform: str, spec: Paged) -> str | None:
    """Why such a layer does without the kernel; None means it has it. On a TPU the log says so, once for each
    reason.
    """
    if platform != "tpu":
        return f"ragged paged attention is for TPUs, this is {platform}"
    why = None
    if spec.k_dim != spec.v_dim or spec.k_dim % LANES:
        why = f"ragged paged attention takes heads of multiples of {LANES}, not {spec.k_dim} and {spec.v_dim}"
    else:
        try:
            kernel()
        except (ImportError, AttributeError) as e:
            why = f"this JAX has no ragged paged attention ({e})"
    if why is not None and why not in _said:
        _said.add(why)
        _log.warning("Attention copies the cache's blocks: %s.", why)
    return why


def write(pages: Array, slot: Array, k: Array, v: Array) -> Array:
    """Keys and values [T, kv_heads, dim] into pages [blocks, block_size, 2 * kv_heads, dim], where they alternate."""
    both = jnp.stack([k, v], axis=2).reshape(len(k), -1, k.shape[-1])
    size = pages.shape[1]
    return pages.at[slot // size, slot % size].set(both)


def halves(pages: Array) -> tuple[Array, Array]:
    """Keys and values [blocks, block_size, kv_heads, dim] of pages: copies, for what the kernel does not compute."""
    return pages[:, :, 0::2], pages[:, :, 1::2]


def attend(q: Array, pages: Array, x: StepInputs[Array], how: Scoring) -> Array:
    """q [T, heads, dim] over what the pages hold: [T, heads, dim]. Padding rows have no tokens and come last.

    The kernel takes what lies from x.kv_len on for zeros. To scores that are hidden within a chunk it adds a large
    number instead of replacing them, so a NaN key makes NaN of its row's earlier tokens of that chunk as well.
    """
    rows = jnp.sum(x.cu_q[1:] > x.cu_q[:-1], dtype=jnp.int32)[None]
    options = {"sm_scale": how.scale, "sliding_window": how.window, "soft_cap": how.softcap}
    return kernel()(q, pages, x.kv_len, x.block_table, x.cu_q, rows, **options)
