"""Arithmetic in torch whose result cannot depend on the batch, the machine or the number of threads.

Two facts make it so by construction:

- IEEE 754 fixes the bits of one addition, multiplication, division or square root. Element-wise chains of them give the
  same bits in a vector lane, in a scalar tail or on another thread, and ``exp`` and ``log`` are built from them here.
- A sum of integers that stays below 2**53 is exact in float64 in *any* order. Matrix products are therefore taken over
  fixed-point integers ("slices" of the operands), with whatever library, blocking and thread count: Ozaki, Ogita,
  Oishi & Rump, "Error-free transformations of matrix multiplication", Numerical Algorithms 59 (2012).
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT64_BITS = 53


def power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent in float64 for integer exponents within the normal range, made from bits."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def fixed_point(x: Tensor, bits: int, num_slices: int) -> tuple[Tensor, Tensor]:
    """Split the rows of ``x`` (last dimension) into integer slices over a power-of-two scale of each row.

    Returns:
        ``slices``, float64 [num_slices, *x.shape], integers of magnitude at most 2**bits; and ``scale``, float64
        [*x.shape[:-1], 1], so that ``x`` is ``scale * sum_i slices[i] * 2**(-i * bits)`` within half a unit of the last
        slice. Both are functions of the row alone. A row with NaN or infinity becomes NaN.
    """
    largest = x.abs().amax(-1, keepdim=True).to(torch.float64)
    exponent = torch.frexp(largest).exponent.clamp(-900, 900)
    scale = power_of_two(exponent - bits) * (largest - largest + 1.0)  # keeps NaN and infinity from vanishing
    rest = x / scale
    slices = rest.new_empty((num_slices, *rest.shape))
    for i in range(num_slices - 1):
        torch.round(rest, out=slices[i])
        rest.sub_(slices[i]).mul_(2.0**bits)
    torch.round(rest, out=slices[-1])
    return slices, scale


def bits_left(num_terms: int, bits: int) -> int:
    """Bits for the second operand of ``num_terms`` products whose first has ``bits``, so that they sum exactly."""
    return FLOAT64_BITS - max(num_terms - 1, 1).bit_length() - bits


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, kept, by halving: element-wise additions in one fixed tree."""
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        tail = x[..., half:]
        head = x[..., :half]
        x = torch.cat((head[..., : tail.shape[-1]] + tail, head[..., tail.shape[-1] :]), -1)
    return x


_LN2_HIGH = 0.693147180369123816490  # ln 2 in two parts: n * high is exact for |n| < 2**20
_LN2_LOW = 1.90821492927058770002e-10
_EXP_COEFFICIENTS = [1.0]  # 1 / i!
for _i in range(1, 14):
    _EXP_COEFFICIENTS.append(_EXP_COEFFICIENTS[-1] / _i)


def exp(x: Tensor) -> Tensor:
    """e**x in float64 from additions and multiplications alone; inputs below -700 give about 1e-304, NaN stays NaN."""
    x = x.to(torch.float64).clamp(-700.0, 700.0)
    n = torch.round(x * 1.4426950408889634)
    r = (x - n * _LN2_HIGH).sub_(n * _LN2_LOW)
    result = torch.full_like(r, _EXP_COEFFICIENTS[-1])
    for coefficient in reversed(_EXP_COEFFICIENTS[:-1]):
        result.mul_(r).add_(coefficient)
    return result.mul_(power_of_two(n.nan_to_num()))


def log(x: Tensor) -> Tensor:
    """Natural logarithm in float64 of normal positive inputs, from elementary operations alone.

    ``log(m * 2**e) = e ln 2 + 2 artanh((m - 1) / (m + 1))`` with m in [sqrt(1/2), sqrt(2)), as a series.
    """
    mantissa, exponent = torch.frexp(x.to(torch.float64))
    small = mantissa < 0.7071067811865476
    mantissa = torch.where(small, mantissa * 2.0, mantissa)
    e = (exponent - small.to(exponent.dtype)).to(torch.float64)
    t = (mantissa - 1.0) / (mantissa + 1.0)
    square = t * t
    series = torch.full_like(t, 1.0 / 23)
    for denominator in range(21, 0, -2):
        series = series * square + 1.0 / denominator
    return (e * _LN2_HIGH + 2.0 * t * series) + e * _LN2_LOW
