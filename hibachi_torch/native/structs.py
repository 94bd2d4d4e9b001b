"""The structs that Python hands to the kernels. Their sizes are compared with C++'s when the kernels are loaded."""

from __future__ import annotations

import ctypes

_i32, _i64, _f32, _p = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Sizes(ctypes.Structure):
    """As in attention.h."""

    _fields_ = [
        *((n, _i64) for n in ("tokens", "rows", "heads", "kv_heads", "k_dim", "v_dim", "blocks", "block_size")),
        *((n, _i64) for n in ("q_stride", "k_stride", "v_stride", "window")),
        *((n, _f32) for n in ("scale", "softcap")),
    ]


class Op(ctypes.Structure):
    """As in step.cpp."""

    _fields_ = [
        *((n, _i32) for n in ("kind", "outputs", "from_", "to", "added", "which", "gated", "groups")),
        *((n, _i64) for n in ("from_at", "to_at", "n", "k", "window")),
        *((n, _f32) for n in ("scale", "number")),
        *((n, _p) for n in ("w", "b", "scales")),
    ]


class Step(ctypes.Structure):
    """As in step.cpp."""

    _fields_ = [
        *((n, _i64) for n in ("tokens", "outputs", "rows", "blocks", "block_size", "heads", "kv_heads", "head_dim")),
        ("cascade", _i64),
        *((n, _p) for n in ("slot", "pos", "cu_q", "table", "last")),
        *((n, _p) for n in ("buffers", "widths", "turns", "caches", "seconds")),
    ]
