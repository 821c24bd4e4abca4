"""Where Triton's interpreter computes otherwise than a GPU, what a GPU does.

The interpreter of Triton 3.7 multiplies tiles with numpy's matmul, whose BLAS orders a row's sum by the row's place in
the tile, and which takes bfloat16 for the integers that store it; and it cuts float32 to bfloat16 instead of rounding.
With these in their place, what a test finds is the kernels' own: their masks, tiles, splits and orders.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_cast_as_shipped = interpreter.InterpreterBuilder.cast_impl


def compute_as_a_gpu() -> None:
    """Substitute the interpreter's dot product and its casts of bfloat16, in this process."""
    interpreter.InterpreterBuilder.create_dot = _ordered_dot
    interpreter.InterpreterBuilder.cast_impl = _rounding_cast


def _ordered_dot(builder: Any, a: Any, b: Any, total: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """``total + a @ b`` in float32, in ascending order of the inner dimension: a column of ``a`` at a time."""
    left, right, result = _float32(a), _float32(b), total.data.astype(np.float32)
    with np.errstate(all="ignore"):
        for inner in range(left.shape[1]):
            result += left[:, inner, None] * right[None, inner]
    return interpreter.TensorHandle(result, total.dtype.scalar)


def _rounding_cast(builder: Any, source: Any, dtype: Any) -> Any:
    """float32 to bfloat16 rounds to the nearest, ties to even; bfloat16 to float32 is exact."""
    types = source.dtype.scalar, dtype.scalar
    if types == (tl.float32, tl.bfloat16):
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
        return interpreter.TensorHandle(rounded.view(torch.uint16).numpy(), dtype.scalar)
    if types == (tl.bfloat16, tl.float32):
        return interpreter.TensorHandle(_float32(source), dtype.scalar)
    return _cast_as_shipped(builder, source, dtype)


def _float32(tile: Any) -> Any:
    if tile.dtype.scalar == tl.bfloat16:
        return (tile.data.astype(np.uint32) << 16).view(np.float32)
    return tile.data.astype(np.float32)
