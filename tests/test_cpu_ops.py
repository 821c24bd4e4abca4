"""The CPU kernels: the op contract on every instruction set, and what is particular to this backend."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from engine.config import ModelConfig
from engine.execution.batch import ForwardBatch
from engine.models.decoder import rope_table
from engine.models.hub import resolve_model
from engine.ops import VOCAB_CHUNK
from engine.ops.cpu import ISA_VARIABLE, ISAS, CpuOps, IsaError, choose_isa, cpu_flags, missing
from engine.ops.tree import tree_sum
from tests import test_ops_contract as contract
from tests.test_ops_contract import MANY, Paged, normal, relative_error, same_bits

BF16, FLOAT, CPU = torch.bfloat16, torch.float32, torch.device("cpu")
CELLS = [(isa, dtype) for isa in ("avx512", "avx512-emulated", "avx2", "portable") for dtype in (FLOAT, BF16)]
CELLS += [(isa, BF16) for isa in ("amx", "amx-emulated", "avx512_bf16", "avx512_bf16-emulated")]  # float32: as above


def cpu_ops(isa: str, dtype: torch.dtype) -> CpuOps:
    reason = missing(ISAS[isa], cpu_flags())
    if reason is not None:
        pytest.skip(reason)
    return CpuOps(dtype, CPU, isa)


@pytest.fixture(scope="module", params=CELLS, ids=lambda p: f"{p[0]}-{str(p[1]).removeprefix('torch.')}")
def ops(request: pytest.FixtureRequest) -> CpuOps:
    return cpu_ops(*request.param)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# The contract, as every backend obeys it. Attention's accuracy is judged below, against torch's own fused op.
test_rows = contract.test_a_rows_bits_do_not_depend_on_its_batch
test_linear_accuracy = contract.test_linear_is_at_least_as_accurate_as_torch
test_linear_outliers = contract.test_linear_survives_outliers
test_elementwise = contract.test_elementwise_ops_against_float64
test_greedy = contract.test_greedy_takes_the_lowest_index_of_a_tie
test_attention_bits = contract.test_attention_bits_do_not_depend_on_chunks_placement_or_strangers


@MANY
@given(
    m=st.integers(1, 600),
    n=st.sampled_from([1, 17, 250, 272]),
    k=st.sampled_from([5, 127, 385, 640]),
    count=st.sampled_from([1, 2, 3]),
)
def test_linear_rows_over_every_blocking(ops: CpuOps, m: int, n: int, k: int, count: int) -> None:
    """Shapes that fill no panel, pair or tile; several chains of k and several blocks of rows."""
    weight = ops.pack_linear(normal(1, n, k), normal(2, n))
    x = normal(3, 600, k).to(ops.dtype)
    whole = ops.linear_f32(x, weight)
    expected = x.double() @ normal(1, n, k).to(ops.dtype).double().T + normal(2, n).to(ops.dtype).double()
    assert relative_error(whole, expected) < 1e-5
    first = (7 * m) % (601 - m)
    with threads(count):
        part = ops.linear_f32(x[first : first + m], weight)
    assert same_bits(part, whole[first : first + m])


@pytest.mark.parametrize("leaves", [2, 3, 5, 7, 8, 12])
def test_leaves_are_added_in_the_shard_tree(ops: CpuOps, leaves: int) -> None:
    """One packed weight with leaves = its leaves packed apart, added by ``tree_sum``: what tensor parallelism needs."""
    width = 160
    weight, x = normal(1, 40, leaves * width), normal(2, 9, leaves * width).to(ops.dtype)
    apart = [
        ops.linear_f32(x_leaf, ops.pack_linear(w_leaf))
        for x_leaf, w_leaf in zip(x.split(width, 1), weight.split(width, 1), strict=True)
    ]
    packed = ops.pack_linear(weight, num_leaves=leaves)
    assert same_bits(ops.linear_f32(x, packed), tree_sum(apart))
    assert same_bits(ops.linear(x, packed), tree_sum(apart).to(ops.dtype))


def test_emulated_tiles_follow_the_documented_arithmetic() -> None:
    """TDPBF16PS: even and odd k in two chains from zero, their sum added to C; denormals are zero, in and out."""
    ops = cpu_ops("amx-emulated", BF16)
    x, weight = normal(0, 20, 64).to(BF16), normal(1, 24, 64).to(BF16)
    x[3] *= 2.0**-90  # products underflow one by one
    weight[5] *= 2.0**-40
    x[4], weight[6] = 1e-39, 1e30  # a denormal input, which would matter if it were not flushed

    def flush(v: np.ndarray) -> np.ndarray:
        return np.where(np.abs(v) < np.finfo(np.float32).tiny, np.float32(0), v.astype(np.float32))

    a, b = flush(x.float().numpy()), flush(weight.float().numpy())
    c = np.zeros((20, 24), dtype=np.float32)
    for tile in (slice(0, 32), slice(32, 64)):
        sums = np.zeros((2, 20, 24), dtype=np.float32)
        for k in range(32):
            product = np.outer(a[:, tile][:, k].astype(np.float64), b[:, tile][:, k])  # exact
            sums[k % 2] = flush((sums[k % 2] + product).astype(np.float32))
        c = flush(c + flush(sums[0] + sums[1]))
    result = ops.linear_f32(x, ops.pack_linear(weight))
    assert np.count_nonzero(c[3]) < 24  # the case does reach what is flushed
    assert torch.equal(result, torch.from_numpy(c))


def long_paged(ops: CpuOps, shape: tuple[int, int, int], block_size: int = 16, num_blocks: int = 96) -> Paged:
    paged = Paged(ops, *shape, block_size, num_blocks)
    hf = dict(resolve_model("random:tiny").hf_config, head_dim=shape[2])
    paged.rope = rope_table(ModelConfig.from_hf(hf, "test"), 2048, CPU)
    return paged


@pytest.mark.parametrize("chunk", [7, 16, 100, 512])
@pytest.mark.parametrize(("length", "block_size"), [(520, 16), (640, 48), (1100, 32), (1300, 16)])
def test_long_contexts_in_chunks_and_sections(ops: CpuOps, length: int, block_size: int, chunk: int) -> None:
    """Past one softmax step (128 keys) and one section (512): a few rows split over sections = many that do not."""
    shape = (4, 2, 16)
    paged = long_paged(ops, shape, block_size)
    qkv, stranger = paged.qkv(7, length), paged.qkv(90, 40)
    blocks = range(-(-length // block_size))
    with threads(1):
        whole = long_paged(ops, shape, block_size).run([(qkv, list(blocks), 0, length)])[0]
    assert bool(whole.isfinite().all())
    table = [95 - block for block in blocks]
    decodes = length - 4
    edges = sorted({0, max(decodes - chunk, 0), decodes, *range(decodes, length + 1)})
    with threads(3):
        for low, high in itertools.pairwise(edges):
            assert same_bits(paged.run([(qkv, table, low, high - low)])[0], whole[low:high])
        with_stranger = paged.run([(stranger, [0, 1, 2], 0, 40), (qkv, table, length - 1, 1)])[1]
    assert same_bits(with_stranger, whole[-1:])


@pytest.mark.parametrize("shape", [(6, 3, 16), (9, 3, 64), (2, 2, 128)])
def test_attention_is_as_accurate_as_torchs_fused_op(ops: CpuOps, shape: tuple[int, int, int]) -> None:
    paged = long_paged(ops, shape)
    length, group = 600, shape[0] // shape[1]
    q, k, v = paged.qkv(3, length)
    result = paged.run([((q, k, v), list(range(38)), 0, length)])[0].unflatten(1, shape[::2])
    cos, sin = (part[:length, None].double() for part in paged.rope.chunk(2, 1))

    def rotate(x: Tensor) -> Tensor:
        a, b = x.double().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(ops.dtype)

    def heads_first(x: Tensor, repeat: int) -> Tensor:
        return x.repeat_interleave(repeat, 1).transpose(0, 1)[None].contiguous()

    wide = [heads_first(rotate(q), 1), heads_first(rotate(k), group), heads_first(v, group)]
    attention = torch.nn.functional.scaled_dot_product_attention
    expected = attention(*(x.double() for x in wide), is_causal=True)[0].transpose(0, 1)
    library = attention(*wide, is_causal=True)[0].transpose(0, 1)
    assert relative_error(result, expected) <= max(relative_error(library, expected) * 1.01, 3e-7)


def test_heads_of_one_projection_need_no_copy(ops: CpuOps) -> None:
    """q, k and v as views into one [M, q + k + v] tensor give the bits of separate ones."""
    paged, apart = Paged(ops, 4, 2, 32), Paged(ops, 4, 2, 32)
    qkv = normal(5, 21, 8 * 32).to(ops.dtype)
    q, k, v = (part.unflatten(1, (-1, 32)) for part in qkv.split((128, 64, 64), 1))
    batch = batch_of([0, 21], [21], [[3, 4]])
    weight = normal(6, 32).to(ops.dtype)
    assert same_bits(ops.rms_norm(q, weight, 1e-5), ops.rms_norm(q.contiguous(), weight, 1e-5))
    views = ops.rope_and_store(q, k, v, paged.rope, paged.kv, batch)
    copies = ops.rope_and_store(q.contiguous(), k.contiguous(), v.contiguous(), apart.rope, apart.kv, batch)
    assert same_bits(views, copies)
    assert same_bits(paged.kv.tensor, apart.kv.tensor)


def batch_of(query_start: list[int], contexts: list[int], tables: Sequence[Sequence[int]]) -> ForwardBatch:
    """A batch by hand; sequences with a context of 0 are padding, which has no slot."""
    counts = np.diff(query_start)
    positions = np.concatenate([np.arange(c - n, c) for c, n in zip(contexts, counts, strict=True)])
    rows = np.repeat(np.arange(len(counts)), counts)
    slots = [int(tables[row][p // 16] * 16 + p % 16) if p >= 0 else -1 for row, p in zip(rows, positions, strict=True)]
    values = {
        "positions": torch.from_numpy(positions.clip(0)),
        "slot_mapping": torch.tensor(slots),
        "query_start": torch.tensor(query_start),
        "context_lens": torch.tensor(contexts),
        "block_tables": torch.tensor(tables, dtype=torch.int32),
    }
    return ForwardBatch(**{field.name: values.get(field.name) for field in dataclasses.fields(ForwardBatch)})  # type: ignore[arg-type]


def test_padding_writes_nowhere_and_attends_to_nothing(ops: CpuOps) -> None:
    paged = Paged(ops, 4, 2, 32)
    before = paged.kv.tensor.clone()
    q, k, v = paged.qkv(1, 3)
    batch = batch_of([0, 1, 3], [0, 2], [[9], [5]])
    rotated = ops.rope_and_store(q, k, v, paged.rope, paged.kv, batch)
    touched = (paged.kv.tensor.float().nan_to_num(1e6) != before.float().nan_to_num(1e6)).any(1)
    assert touched.nonzero().flatten().tolist() == [5]
    out = ops.paged_attention(rotated, paged.kv, batch, 32**-0.5)
    assert not out[0].any()
    assert bool(out[1:].isfinite().all())


def test_a_block_is_one_contiguous_region(ops: CpuOps) -> None:
    """Copying rows of ``kv.tensor`` moves keys and values: what a transfer between instances sends."""
    paged = Paged(ops, 6, 3, 16)
    q, k, v = paged.qkv(2, 40)
    first = paged.run([((q, k, v), [0, 1, 2], 0, 40)])[0]
    assert paged.kv.tensor[0].nbytes == ops.kv_bytes_per_block(16, 3, 16)
    for source, target in ((0, 40), (1, 7), (2, 63)):
        paged.kv.tensor[target] = paged.kv.tensor[source]
    assert same_bits(paged.run([((q, k, v), [40, 7, 63], 39, 1)])[0], first[-1:])


@pytest.mark.parametrize("vocab", [1, 15, VOCAB_CHUNK - 1, VOCAB_CHUNK + 1, 7 * VOCAB_CHUNK + 40])
def test_greedy_over_chunks(ops: CpuOps, vocab: int) -> None:
    logits = normal(1, 5, vocab) * 8
    ids, logprobs = ops.greedy(logits)
    expected, index = torch.log_softmax(logits.double(), -1).max(-1)
    assert ids.tolist() == index.tolist()
    assert torch.allclose(logprobs.double(), expected, rtol=1e-6, atol=1e-6)
    for row in range(5):
        assert same_bits(ops.greedy(logits[row : row + 1])[1], logprobs[row : row + 1])


def test_exp_within_softmax_range(ops: CpuOps) -> None:
    """Through silu: gate / (1 + exp(-gate)), as far as exp stays finite."""
    gate = torch.linspace(-86, 86, 20001).reshape(1, -1)
    result = ops.silu_mul(torch.cat((gate, torch.ones_like(gate)), 1).to(ops.dtype)).double()
    expected = torch.nn.functional.silu(gate.to(ops.dtype).double())
    error = ((result - expected).abs() / expected.abs().clamp_min(1e-30)).max().item()
    assert error < (2.0**-8 if ops.dtype == BF16 else 4e-7)


def test_no_rows_give_no_rows(ops: CpuOps) -> None:
    """A step that samples nothing has no logits."""
    x = torch.zeros(0, 96, dtype=ops.dtype)
    weight = ops.pack_linear(normal(1, 40, 96), num_leaves=3)
    assert ops.linear(x, weight).shape == ops.linear_f32(x, weight).shape == (0, 40)
    assert all(result.shape == (0, 96) for result in ops.add_rms_norm(x, x, x.new_ones(96), 1e-5))
    assert ops.silu_mul(x).shape == (0, 48)
    assert [result.shape for result in ops.greedy(x.float())] == [(0,), (0,)]
    assert ops.embedding(torch.zeros(0, dtype=torch.int64), x.new_zeros(7, 4)).shape == (0, 4)


def test_calls_from_many_python_threads_give_the_same_bits(ops: CpuOps) -> None:
    weight, x = ops.pack_linear(normal(1, 512, 256)), normal(2, 64, 256).to(ops.dtype)
    expected = ops.linear(x, weight)
    with threads(4), ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: ops.linear(x, weight), range(200)))
    assert all(same_bits(result, expected) for result in results)


# ---- choice of the instruction set, and errors


AVX2 = {"avx2", "fma"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}


def test_the_best_instruction_set_is_chosen() -> None:
    assert choose_isa(environ={}, flags=()).name == "portable"
    assert choose_isa(environ={}, flags=AVX2).name == "avx2"
    assert choose_isa(environ={}, flags=AVX512).name == "avx512"
    assert choose_isa(environ={}, flags=AVX512 | {"avx512_bf16"}).name == "avx512_bf16"
    assert choose_isa(environ={ISA_VARIABLE: "portable"}, flags=AVX2).name == "portable"
    assert choose_isa("avx2", {ISA_VARIABLE: "portable"}, AVX2).name == "avx2"
    assert choose_isa(environ={ISA_VARIABLE: ""}, flags=AVX2).name == "avx2"


def test_wrong_instruction_sets_are_refused_by_name() -> None:
    names = "amx, avx512_bf16, avx512, avx2, portable"
    with pytest.raises(IsaError, match=rf"unknown instruction set 'sse9'.*choose one of {names}"):
        choose_isa("sse9")
    with pytest.raises(IsaError, match=rf"'neon'.*{ISA_VARIABLE}"):
        choose_isa(environ={ISA_VARIABLE: "neon"})
    with pytest.raises(IsaError, match=r"'avx512' cannot run here: this CPU lacks avx512f, avx512bw"):
        choose_isa("avx512", flags=AVX2)


def test_cpu_flags_of_a_machine_without_them(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: x\n")
    assert cpu_flags(tmp_path / "cpuinfo") == frozenset() == cpu_flags(tmp_path / "absent")


def test_shapes_and_types_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"float16 is not one of the CPU ops'; choose float32 or bfloat16"):
        CpuOps(torch.float16, CPU)
    with pytest.raises(ValueError, match="device meta is not a CPU"):
        CpuOps(FLOAT, torch.device("meta"))
    ops = CpuOps(FLOAT, CPU)
    with pytest.raises(ValueError, match="block_size=24 is not a multiple of 16"):
        ops.allocate_kv(4, 24, 1, 16)
    with pytest.raises(ValueError, match=r"head_dim=40 is not a multiple of 16 up to 512.*reference"):
        ops.kv_bytes_per_block(16, 1, 40)
    with pytest.raises(ValueError, match="K=10 does not split evenly into num_leaves=3"):
        ops.pack_linear(torch.zeros(4, 10), num_leaves=3)
    with pytest.raises(ValueError, match=r"x is \[2, 9\]; the weight takes \[M, 10\]"):
        ops.linear(torch.zeros(2, 9), ops.pack_linear(torch.zeros(4, 10)))
    with pytest.raises(ValueError, match="x is BFloat16, the weight is Float"):
        ops.linear(torch.zeros(2, 10, dtype=BF16), ops.pack_linear(torch.zeros(4, 10)))
    with pytest.raises(IndexError, match=r"token id 7 is outside 0 \.\. 6"):
        ops.embedding(torch.tensor([0, 7]), torch.zeros(7, 4))


def run_python(code: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environ}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_without_a_compiler_the_reason_is_told(tmp_path: Path) -> None:
    code = "from engine.ops.cpu import unavailable_reason; print(unavailable_reason())"
    reason = run_python(code, PAGED_ATTENTION_LAB_CACHE=str(tmp_path), CXX="no-such-compiler")
    assert reason == "no C++ compiler: 'no-such-compiler' is not on the PATH; install g++ (or set CXX)"


def test_the_kernels_bring_no_openmp_runtime_and_survive_a_fork() -> None:
    code = """
import os, torch
from engine.ops.cpu import CpuOps
def runtimes():
    return {line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line.rpartition('/')[2]}
before = runtimes()
torch.set_num_threads(2)
ops = CpuOps(torch.float32, torch.device('cpu'))
weight, x = ops.pack_linear(torch.ones(4096, 256)), torch.ones(64, 256)
def right(): return ops.linear(x, weight)[:, 5].tolist() == [256.0] * 64  # torch's own threads do not survive a fork
assert right() and runtimes() == before
child = os.fork()
if child == 0:
    os._exit(0 if right() else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_python(code) == "0"


@pytest.mark.skipif(os.cpu_count() == 1, reason="nowhere to keep apart")
def test_workers_keep_off_their_callers_cpu() -> None:
    """Some kernels wake a thread beside its waker rather than on an idle CPU: the two would then take turns."""
    code = """
import os, torch
from engine.ops.cpu import CpuOps
torch.set_num_threads(2)
ops = CpuOps(torch.float32, torch.device('cpu'))
cpus = os.sched_getaffinity(0)
def tasks(): return {int(task) for task in os.listdir('/proc/self/task')}
x = torch.ones(1000, 64)
def call(): ops.silu_mul(x)
before = tasks()
call()
[worker] = tasks() - before
for cpu in [*cpus, *cpus]:
    os.sched_setaffinity(0, {cpu})
    call()
    assert os.sched_getaffinity(worker) == cpus - {cpu} or len(cpus) == 1
print('apart')
"""
    assert run_python(code) == "apart"
