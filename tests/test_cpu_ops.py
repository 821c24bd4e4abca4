"""The CPU kernels: the op contract on every instruction set, and what is particular to this backend."""

from __future__ import annotations

import pytest
import torch

from engine.ops.cpu import ISAS, CpuOps, cpu_flags, missing
from tests import test_ops_contract as contract

BF16, FLOAT = torch.bfloat16, torch.float32
CELLS = [(isa, dtype) for isa in ("avx512", "avx2", "portable") for dtype in (FLOAT, BF16)]
CELLS += [(isa, BF16) for isa in ("amx", "amx-emulated")]  # float32 takes the vector kernels there too


@pytest.fixture(scope="module", params=CELLS, ids=lambda p: f"{p[0]}-{str(p[1]).removeprefix('torch.')}")
def ops(request: pytest.FixtureRequest) -> CpuOps:
    isa, dtype = request.param
    reason = missing(ISAS[isa], cpu_flags())
    if reason is not None:
        pytest.skip(reason)
    return CpuOps(dtype, torch.device("cpu"), isa)


test_rows = contract.test_a_rows_bits_do_not_depend_on_its_batch
test_linear_accuracy = contract.test_linear_is_at_least_as_accurate_as_torch
test_linear_outliers = contract.test_linear_survives_outliers
test_elementwise = contract.test_elementwise_ops_against_float64
test_greedy = contract.test_greedy_takes_the_lowest_index_of_a_tie
test_attention_bits = contract.test_attention_bits_do_not_depend_on_chunks_placement_or_strangers


@pytest.mark.parametrize("shape", [(6, 3, 16), (9, 3, 64), (2, 2, 128)])
def test_attention_is_as_accurate_as_torchs_fused_op(ops: CpuOps, shape: tuple[int, int, int]) -> None:
    pass
