"""The op contract, for every backend and dtype: row purity in bits, and accuracy against float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from engine.config import EngineConfig, ModelConfig
from engine.execution.batch import ForwardBatch
from engine.models.decoder import rope_table
from engine.models.hub import resolve_model
from engine.ops import Ops, exact, select_ops
from engine.ops.tree import split_point, tree_sum
from engine.request import Request, SamplingParams
from engine.scheduler.loop import ScheduledRequest

BACKENDS = [("reference", torch.float32), ("reference", torch.bfloat16)]
MANY = settings(max_examples=25, deadline=None)


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda p: f"{p[0]}-{str(p[1]).removeprefix('torch.')}")
def ops(request: pytest.FixtureRequest) -> Ops:
    name, dtype = request.param
    return select_ops(EngineConfig(ops=name), dtype, torch.device("cpu"))


def tolerance(ops: Ops) -> float:
    return 1e-2 if ops.dtype == torch.bfloat16 else 2e-6


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative_error(result: Tensor, expected: Tensor) -> float:
    return ((result.double() - expected).norm() / expected.norm()).item()


def same_bits(a: Tensor, b: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


LINEAR_OPS = {"linear": ("linear", 1), "linear_f32": ("linear_f32", 1)}
LINEAR_OPS |= {"linear, 3 leaves": ("linear", 3), "linear_f32, 3 leaves": ("linear_f32", 3)}
ROW_OPS = (*LINEAR_OPS, "rms_norm", "add_rms_norm", "silu_mul", "greedy")


def run_row_op(ops: Ops, name: str, x: Tensor, n: int, k: int) -> list[Tensor]:
    """Apply one op whose rows are independent to x [M, k]; parameters are fixed by seed."""
    if name in LINEAR_OPS:
        op, leaves = LINEAR_OPS[name]
        weight = ops.pack_linear(normal(1, n, k), normal(2, n) if leaves == 1 else None, leaves)
        return [getattr(ops, op)(x, weight)]
    if name == "rms_norm":
        return [ops.rms_norm(x, normal(3, k).to(ops.dtype), 1e-5)]
    if name == "add_rms_norm":
        return list(ops.add_rms_norm(x, x.flip(1), normal(3, k).to(ops.dtype), 1e-5))
    if name == "silu_mul":
        return [ops.silu_mul(x)]
    return list(ops.greedy(x.float()))


@pytest.mark.parametrize("name", ROW_OPS)
@MANY
@given(
    m=st.integers(1, 600),
    keep=st.lists(st.integers(0, 599), min_size=1, max_size=6),
    n=st.sampled_from([32, 96]),
    k=st.sampled_from([96, 192]),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 9),
)
def test_a_rows_bits_do_not_depend_on_its_batch(
    ops: Ops, name: str, m: int, keep: list[int], n: int, k: int, threads: int, seed: int
) -> None:
    """Any M, any position, strangers (NaN rows too) beside it, any number of threads: equal bits."""
    rows = normal(seed, 6, k).to(ops.dtype)
    rows[3, :5] *= 1000  # outliers, as activations have them
    alone = [run_row_op(ops, name, row.unsqueeze(0), n, k) for row in rows]
    batch = normal(seed + 100, m, k).to(ops.dtype)
    batch[::7] = float("nan")
    places = {position % m: i for i, position in enumerate(keep)}
    for position, i in places.items():
        batch[position] = rows[i]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = run_row_op(ops, name, batch, n, k)
    finally:
        torch.set_num_threads(before)
    for position, i in places.items():
        for one, many in zip(alone[i], together, strict=True):
            assert same_bits(one[0], many[position])


@pytest.mark.parametrize("name", LINEAR_OPS)
def test_linear_is_at_least_as_accurate_as_torch(ops: Ops, name: str) -> None:
    x, weight = normal(0, 37, 576).to(ops.dtype), normal(1, 960, 576).to(ops.dtype)
    expected = x.double() @ weight.double().T
    op, leaves = LINEAR_OPS[name]
    result = getattr(ops, op)(x, ops.pack_linear(weight, num_leaves=leaves))
    library = torch.nn.functional.linear(x, weight)
    assert relative_error(result, expected) <= relative_error(library, expected) * 1.01


def test_linear_survives_outliers(ops: Ops) -> None:
    x, weight = normal(0, 8, 576), normal(1, 64, 576)
    x[:, 7] *= 3000
    x, weight = x.to(ops.dtype), weight.to(ops.dtype)
    expected = x.double() @ weight.double().T
    result = ops.linear(x, ops.pack_linear(weight))
    library = torch.nn.functional.linear(x, weight)
    assert relative_error(result, expected) <= relative_error(library, expected) * 1.01


def test_elementwise_ops_against_float64(ops: Ops) -> None:
    x, residual = normal(0, 9, 576).to(ops.dtype), normal(1, 9, 576).to(ops.dtype)
    weight = normal(2, 576).to(ops.dtype)

    def norm(v: Tensor) -> Tensor:
        return v.double() / (v.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    assert relative_error(ops.rms_norm(x, weight, 1e-5), norm(x)) < tolerance(ops)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert same_bits(total, x + residual)
    assert relative_error(normed, norm(total)) < tolerance(ops)
    gate, up = x.double().chunk(2, -1)
    assert relative_error(ops.silu_mul(x), torch.nn.functional.silu(gate) * up) < tolerance(ops)
    table = normal(3, 50, 8).to(ops.dtype)
    assert same_bits(ops.embedding(torch.tensor([7, 0, 49]), table), table[[7, 0, 49]])


def test_greedy_takes_the_lowest_index_of_a_tie(ops: Ops) -> None:
    check_ties(ops, torch.device("cpu"))


def check_ties(ops: Ops, device: torch.device) -> None:
    logits = normal(0, 4, 5000).to(device)
    logits[0, [4999, 3000, 2100]] = logits[1, [0, 4999]] = 9.0
    logits[2] = 0.0
    token_ids, logprobs = ops.greedy(logits)
    assert token_ids.tolist()[:3] == [2100, 0, 0]
    expected = torch.log_softmax(logits.double(), -1).gather(1, token_ids.unsqueeze(1)).squeeze(1)
    assert torch.allclose(logprobs.double(), expected, atol=1e-6)
    assert same_bits(ops.logprobs_of(logits, token_ids), logprobs)


class Paged:
    """KV memory of one layer with sequences written into scattered blocks; every unwritten slot is NaN."""

    def __init__(
        self, ops: Ops, heads: int, kv_heads: int, dim: int, block_size: int = 16, num_blocks: int = 64
    ) -> None:
        self.ops, self.block_size, self.dim = ops, block_size, dim
        self.heads, self.kv_heads = heads, kv_heads
        self.kv = ops.allocate_kv(num_blocks, block_size, kv_heads, dim)
        for block in range(num_blocks):
            ops.poison_kv(self.kv, block)
        hf = dict(resolve_model("random:tiny").hf_config, head_dim=dim)
        self.rope = rope_table(ModelConfig.from_hf(hf, "test"), 1024, torch.device("cpu"))

    def qkv(self, seed: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        q, kv = normal(seed, length, self.heads, self.dim), normal(seed + 1, 2, length, self.kv_heads, self.dim)
        return q.to(self.ops.dtype), kv[0].to(self.ops.dtype), kv[1].to(self.ops.dtype)

    def run(self, parts: Sequence[tuple[tuple[Tensor, Tensor, Tensor], list[int], int, int]]) -> list[Tensor]:
        """Each part is ((q, k, v) of a sequence, its block table, start, count); one result for each."""
        scheduled = []
        for i, (_, table, start, count) in enumerate(parts):
            request = Request(str(i), (0,) * (start + count), SamplingParams(), 0.0)
            request.block_table = table
            scheduled.append(ScheduledRequest(request, start, count))
        batch = ForwardBatch.from_plan(scheduled, self.block_size, self.ops.device)
        rows = [torch.cat([part[0][j][part[2] : part[2] + part[3]] for part in parts]) for j in range(3)]
        rotated = self.ops.rope_and_store(rows[0], rows[1], rows[2], self.rope, self.kv, batch)
        out = self.ops.paged_attention(rotated, self.kv, batch, self.dim**-0.5)
        return list(out.split([part[3] for part in parts]))


@MANY
@given(
    length=st.integers(1, 200),
    cuts=st.lists(st.integers(1, 199), max_size=5),
    strangers=st.lists(st.tuples(st.integers(1, 90), st.booleans()), max_size=3),
    placement=st.randoms(use_true_random=False),
    shape=st.sampled_from([(6, 3, 16), (4, 1, 64), (2, 2, 128)]),
    block_size=st.sampled_from([16, 32]),
)
def test_attention_bits_do_not_depend_on_chunks_placement_or_strangers(
    ops: Ops,
    length: int,
    cuts: list[int],
    strangers: list[tuple[int, bool]],
    placement: random.Random,
    shape: tuple[int, int, int],
    block_size: int,
) -> None:
    """Whole prompt alone = any chunking, decodes included, in any blocks, with strangers in the step and NaN around."""
    qkv = Paged(ops, *shape, block_size).qkv(7, length)
    blocks = list(range(64))
    placement.shuffle(blocks)
    num = -(-length // block_size)
    whole = Paged(ops, *shape, block_size).run([(qkv, list(range(num)), 0, length)])[0]
    assert bool(whole.isfinite().all())
    paged, table, rest = Paged(ops, *shape, block_size), blocks[:num], blocks[num:]
    edges = sorted({0, length, *(cut for cut in cuts if cut < length)})
    parts = []
    for i, (low, high) in enumerate(itertools.pairwise(edges)):
        others = []
        for j, (size, after) in enumerate(strangers):
            own = rest[j * 6 : j * 6 + 6]
            others.append((after, (paged.qkv(50 + 10 * j + i, size), own, 0, size)))
        mine = (qkv, table[: -(-high // block_size)], low, high - low)
        step = [part for after, part in others if not after] + [mine] + [part for after, part in others if after]
        parts.append(paged.run(step)[sum(not after for after, _ in others)])
    assert same_bits(torch.cat(parts), whole)


@pytest.mark.parametrize("shape", [(6, 3, 16), (9, 3, 64), (2, 2, 128)])
def test_attention_against_float64(ops: Ops, shape: tuple[int, int, int]) -> None:
    paged = Paged(ops, *shape)
    length, group = 150, shape[0] // shape[1]
    q, k, v = paged.qkv(3, length)
    result = paged.run([((q, k, v), list(range(10)), 0, length)])[0].unflatten(1, shape[::2])
    cos, sin = (part[:length, None].double() for part in paged.rope.chunk(2, 1))

    def rotate(x: Tensor) -> Tensor:
        a, b = x.double().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(ops.dtype)

    def heads_first(x: Tensor, repeat: int) -> Tensor:
        return x.repeat_interleave(repeat, 1).transpose(0, 1)

    wide = [heads_first(rotate(q), 1), heads_first(rotate(k), group), heads_first(v, group)]
    attention = torch.nn.functional.scaled_dot_product_attention
    expected = attention(*(x.double() for x in wide), is_causal=True).transpose(0, 1)
    library = attention(*wide, is_causal=True).transpose(0, 1)
    assert relative_error(result, expected) <= max(relative_error(library, expected) * 1.05, 3e-7)


def test_exact_functions_match_numpy() -> None:
    x = torch.linspace(-600, 600, 20001, dtype=torch.float64)
    assert torch.allclose(exact.exp(x), torch.from_numpy(np.exp(x.numpy())), rtol=1e-14, atol=0)
    positive = torch.logspace(-30, 30, 20001, dtype=torch.float64)
    assert torch.allclose(exact.log(positive), torch.from_numpy(np.log(positive.numpy())), rtol=1e-14, atol=1e-15)
    assert exact.exp(torch.tensor([float("nan")])).isnan().all()


@given(st.integers(1, 70), st.integers(1, 40))
def test_row_sum_adds_every_element(rows: int, width: int) -> None:
    x = torch.arange(rows * width, dtype=torch.float64).reshape(rows, width)
    assert torch.equal(exact.row_sum(x).squeeze(-1), x.sum(-1))


@given(st.integers(1, 40), st.data())
def test_shard_tree_is_the_same_however_leaves_are_split(count: int, data: st.DataObject) -> None:
    """Adding any aligned subtree first leaves the bits as they are."""
    leaves = normal(count, count, 3)

    def add(low: int, high: int) -> Tensor:
        if high - low == 1:
            return leaves[low]
        if data.draw(st.booleans()):
            return tree_sum(leaves[low:high])
        middle = split_point(low, high)
        assert low < middle < high and (middle - low).bit_count() == 1
        return add(low, middle) + add(middle, high)

    assert same_bits(add(0, count), tree_sum(leaves))


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=40))
def test_two_slices_keep_float32_to_its_last_bits(values: list[float]) -> None:
    x = torch.tensor([values], dtype=torch.float64)
    slices, scale = exact.fixed_point(x, 20, 2)
    assert bool((slices.abs() <= 2.0**20).all()) and torch.equal(slices, slices.round())
    back = scale * (slices[0] + slices[1] * 2.0**-20)
    assert bool(((back - x).abs() <= x.abs().amax() * 2.0**-39).all())
