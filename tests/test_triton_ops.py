"""The Triton kernels, on the CPU through Triton's interpreter where there is no GPU: accuracy, and the op contract.

Sizes are small, since the interpreter runs each program of a kernel in Python.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.config import ConfigError
from engine.ops import Ops
from engine.ops.reference import ReferenceOps
from lab import gpu_check
from lab.golden import differences, run_alone, run_cell
from lab.matrix import Mode, random_prompts
from tests.test_ops_contract import (
    LINEAR_OPS,
    ROW_OPS,
    Paged,
    check_ties,
    normal,
    relative_error,
    run_row_op,
    same_bits,
)

pytest.importorskip("triton")

from engine.ops.triton import TritonOps

ROOT = Path(__file__).parents[1]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def ops(request: pytest.FixtureRequest) -> Ops:
    return TritonOps(request.param, DEVICE)


def reference(ops: Ops) -> Ops:
    return ReferenceOps(ops.dtype, DEVICE)


def tolerance(ops: Ops) -> float:
    return 1e-2 if ops.dtype == torch.bfloat16 else 3e-6


@pytest.mark.parametrize("name", ROW_OPS)
def test_a_rows_bits_do_not_depend_on_its_batch(ops: Ops, name: str) -> None:
    """Alone, first, last, in the middle of two tiles and beside NaN rows: equal bits."""
    n, k = 96, 96
    rows = normal(3, 4, k).to(DEVICE, ops.dtype)
    rows[1, :5] *= 1000
    alone = [run_row_op(ops, name, row.unsqueeze(0), n, k) for row in rows]
    for m in (4, 64, 65, 130):
        batch = normal(m, m, k).to(DEVICE, ops.dtype)
        batch[::7] = float("nan")
        places = {0: 0, m - 1: 1, m // 2: 2, m // 3: 3}
        for position, i in places.items():
            batch[position] = rows[i]
        together = run_row_op(ops, name, batch, n, k)
        for position, i in places.items():
            for one, many in zip(alone[i], together, strict=True):
                assert same_bits(one[0], many[position]), (m, position)


@pytest.mark.parametrize("name", LINEAR_OPS)
@pytest.mark.parametrize("shape", [(5, 100, 96), (70, 64, 192)])
def test_linear_is_as_accurate_as_torch(ops: Ops, name: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    x, weight = normal(0, m, k).to(DEVICE, ops.dtype), normal(1, n, k).to(DEVICE, ops.dtype)
    expected = x.double() @ weight.double().T
    op, leaves = LINEAR_OPS[name]
    result = getattr(ops, op)(x, ops.pack_linear(weight, num_leaves=leaves))
    library = relative_error(torch.nn.functional.linear(x, weight), expected)
    assert relative_error(result, expected) <= max(2 * library, tolerance(ops) / 10)
    strided = torch.cat((x, x), 1)[:, :k]  # a rank's columns of a wider matrix
    assert same_bits(getattr(ops, op)(strided, ops.pack_linear(weight, num_leaves=leaves)), result)


def test_a_bias_is_added_once(ops: Ops) -> None:
    x, weight, bias = (normal(i, *shape).to(DEVICE) for i, shape in enumerate([(3, 64), (40, 64), (40,)]))
    packed = ops.pack_linear(weight, bias)
    expected = x.to(ops.dtype).double() @ weight.to(ops.dtype).double().T + bias.to(ops.dtype).double()
    assert relative_error(ops.linear_f32(x.to(ops.dtype), packed), expected) < 1e-5
    with pytest.raises(ValueError, match="a bias with num_leaves=2"):
        ops.pack_linear(weight, bias, 2)


@pytest.mark.parametrize("width", [96, 576])
def test_elementwise_ops_against_the_reference(ops: Ops, width: int) -> None:
    exact = reference(ops)
    x, residual = (normal(i, 7, width).to(DEVICE, ops.dtype) for i in (0, 1))
    weight = normal(2, width).to(DEVICE, ops.dtype)
    assert relative_error(ops.rms_norm(x, weight, 1e-5), exact.rms_norm(x, weight, 1e-5).double()) < tolerance(ops)
    for mine, theirs in zip(
        ops.add_rms_norm(x, residual, weight, 1e-5), exact.add_rms_norm(x, residual, weight, 1e-5), strict=True
    ):
        assert relative_error(mine, theirs.double()) < tolerance(ops)
    assert same_bits(ops.add_rms_norm(x, residual, weight, 1e-5)[1], x + residual)
    assert relative_error(ops.silu_mul(x), exact.silu_mul(x).double()) < tolerance(ops)
    heads = x.unflatten(1, (-1, 32))[:, :2]  # as the norms of q and k see them: not contiguous
    assert relative_error(
        ops.rms_norm(heads, weight[:32], 1e-5), exact.rms_norm(heads, weight[:32], 1e-5).double()
    ) < tolerance(ops)


def test_greedy_takes_the_lowest_index_of_a_tie(ops: Ops) -> None:
    check_ties(ops, DEVICE)


@pytest.mark.parametrize("shape", [(6, 3, 16), (9, 3, 64), (2, 2, 128), (4, 1, 32)])
def test_attention_is_as_accurate_as_the_reference(ops: Ops, shape: tuple[int, int, int]) -> None:
    length = 83
    mine, exact = Paged(ops, *shape), Paged(reference(ops), *shape)
    qkv = mine.qkv(3, length)
    result, expected = (paged.run([(qkv, list(range(6)), 0, length)])[0] for paged in (mine, exact))
    assert relative_error(result, expected.double()) < tolerance(ops)


@pytest.mark.parametrize("cuts", [[], [1], [16, 17], [7, 30, 49]])
def test_attention_bits_do_not_depend_on_chunks_placement_or_strangers(ops: Ops, cuts: list[int]) -> None:
    length, shape = 50, (4, 2, 16)
    qkv = Paged(ops, *shape).qkv(7, length)
    whole = Paged(ops, *shape).run([(qkv, list(range(4)), 0, length)])[0]
    assert bool(whole.isfinite().all())
    paged, table = Paged(ops, *shape), [31, 5, 60, 2, 17, 9]
    parts = []
    edges = [0, *cuts, length]
    for i, (low, high) in enumerate(itertools.pairwise(edges)):
        before, after = paged.qkv(50 + i, 20), paged.qkv(80 + i, 1)
        step = [(before, [40, 41], 0, 20), (qkv, table[: -(-high // 16)], low, high - low), (after, [50], 0, 1)]
        parts.append(paged.run(step)[1])
    assert same_bits(torch.cat(parts), whole)


def test_attention_over_several_splits_of_the_keys(ops: Ops) -> None:
    """A context longer than a split: decodes alone and beside a short one, against the whole prompt's rows."""
    length, shape = 530, (2, 1, 16)
    mine, exact = Paged(ops, *shape), Paged(reference(ops), *shape)
    qkv = mine.qkv(5, length)
    table = list(range(34))
    exact.run([(qkv, table, 0, length - 2)])
    for ours, theirs in zip(ops.kv_tensors(mine.kv), exact.ops.kv_tensors(exact.kv), strict=True):
        ours.copy_(theirs)  # both lay out a block alike, and the interpreter would take its time
    (alone,) = mine.run([(qkv, table, length - 2, 1)])
    (wanted,) = exact.run([(qkv, table, length - 2, 1)])
    assert relative_error(alone, wanted.double()) < tolerance(ops)
    beside, _ = mine.run([(qkv, table, length - 2, 1), (mine.qkv(9, 3), [40], 0, 3)])
    assert same_bits(alone, beside)
    (chunk,) = mine.run([(qkv, table, length - 2, 2)])
    assert same_bits(chunk[:1], alone)


# Few and short: a row of the tiny model costs the interpreter more than 20 ms. Three on four seats: a padded graph.
PROMPTS = {
    name: prompt[:length] for (name, prompt), length in zip(random_prompts(512, 6).items(), (1, 9, 17), strict=False)
}
PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)
SHAPE: dict[str, Any] = {"ops": "triton", "dtype": "bfloat16", "num_kv_blocks": 24, "num_threads": 1}


@pytest.fixture(scope="module")
def answers_alone() -> Any:
    llm = LLM("random:tiny", **SHAPE, max_num_seqs=1, enable_prefix_caching=False, enforce_eager=True)
    return run_alone(llm, PROMPTS, PARAMS)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 4, "max_num_batched_tokens": 7},
        {"max_num_seqs": 4, "enforce_eager": False, "enable_chunked_prefill": False, "max_num_batched_tokens": 256},
        {"max_num_seqs": 4, "tensor_parallel_size": 2},
        {"max_num_seqs": 4, "disaggregated": True},
    ],
    ids=["chunks of 7", "padded graphs", "TP 2", "1P1D"],
)
def test_the_engine_gives_the_same_bits_whatever_the_scheduler_does(
    answers_alone: Any, options: dict[str, Any]
) -> None:
    with LLM("random:tiny", **SHAPE, **options) as llm:
        assert llm.ops_name == "triton"
        assert differences(answers_alone, run_cell(llm, PROMPTS, PARAMS)) == []
        Mode(options.get("tensor_parallel_size", 1), graph="enforce_eager" in options).proof(llm)


def test_what_needs_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cuda":
        pytest.skip("there is one")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="ops='triton' is not available: triton runs on a GPU, or with TRITON_INT"):
        LLM("random:tiny", ops="triton")
    with pytest.raises(ConfigError, match="device='cuda' is not available"):
        LLM("random:tiny", device="cuda")
    with pytest.raises(ConfigError, match="ops='cpu' cannot run on device='cuda'"):
        LLM("random:tiny", device="cuda", ops="cpu")


def test_every_kernel_compiles_for_a_gpu() -> None:
    """The interpreter accepts what the compiler does not. A GPU is not needed to compile for one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.compile_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 7 * 2


NOT_ON_A_GPU_MACHINE = "gguf jupyterlab nbclient nbconvert nbformat ninja nixl papermill plotly psutil pyarrow scipy"


def test_the_gpu_check_runs_to_its_end_with_few_packages(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({NOT_ON_A_GPU_MACHINE.split()}))\n"
        f"from lab import gpu_check; sys.exit(gpu_check.main(['--tiny', '--output', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all checks held" in done.stdout
    results = json.loads((tmp_path / "check.json").read_text())
    assert [check["passed"] for check in results["checks"]] == [True] * 9
    assert {row["steps"] for row in results["steps"]} == {"eager", "graph"}
    assert len(results["headlines"]) == len(results["bars"]) == 4 and len(results["roofline"]) == 6 * 3 + 2 + 2
    assert "## Roofline" in (tmp_path / "report.md").read_text()


def test_the_gpu_check_says_when_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    if DEVICE.type == "cuda":
        pytest.skip("there is one")
    assert gpu_check.main([]) == 2
    assert "not run on a GPU yet" in capsys.readouterr().err
