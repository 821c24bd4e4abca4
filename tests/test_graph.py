"""GraphRunner: which steps it pads, that padding reaches no request, and that nothing a buffer held before matters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.config import ConfigError
from engine.execution.graph import bucket_sizes
from engine.ops.cpu import CpuOps
from lab.golden import differences, run_alone, run_cell
from lab.matrix import random_prompts

PROMPTS = random_prompts(512, 10)  # 7, then 3: padded to 4
PARAMS = SamplingParams(max_tokens=20)


def padded(llm: LLM) -> dict[int, int]:
    return {graph.bucket: graph.num_padded for graph in llm.graph_replays if graph.num_padded}


@pytest.mark.parametrize(
    ("max_num_seqs", "unpadded_rows", "sizes"),
    [
        (1, 1, (1,)),
        (2, 1, (1, 2)),
        (3, 1, (1, 2, 3)),
        (8, 1, (1, 2, 4, 8)),
        (20, 1, (1, 2, 4, 8, 16, 20)),
        (32, 1, (1, 2, 4, 8, 16, 24, 32)),
        (1, 8, (1,)),
        (6, 8, (1, 2, 3, 4, 5, 6)),
        (20, 8, (1, 2, 3, 4, 5, 6, 7, 8, 16, 20)),
        (20, 10, (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 16, 20)),
    ],
)
def test_buckets_always_include_the_largest_batch(
    max_num_seqs: int, unpadded_rows: int, sizes: tuple[int, ...]
) -> None:
    assert bucket_sizes(max_num_seqs, unpadded_rows) == sizes


def test_no_decode_step_of_up_to_8_rows_is_padded_on_a_cpu() -> None:
    llm = LLM("random:tiny", ops="cpu", enforce_eager=False, max_num_seqs=10, num_kv_blocks=64)
    answers = [SamplingParams(max_tokens=tokens, ignore_eos=True) for tokens in range(2, 12)]
    llm.generate([[5 + i, 7] for i in range(10)], answers, use_tqdm=False)
    assert {graph.bucket: (graph.count, graph.num_padded) for graph in llm.graph_replays} == {
        **dict.fromkeys(range(1, 9), (1, 0)),
        10: (2, 1),  # of 10 and of 9 rows
    }


@pytest.mark.parametrize("ops", ["reference", "cpu"])
def test_sizes_of_graphs_can_be_chosen(ops: str) -> None:
    options: dict[str, Any] = {"ops": ops, "enforce_eager": False, "max_num_seqs": 6, "num_kv_blocks": 64}
    llm = LLM("random:tiny", graph_capture_sizes=[2, 3], **options)
    assert llm.config.graph_capture_sizes == (2, 3)
    assert [graph.bucket for graph in llm.graph_replays] == [2, 3, 6]
    for sizes in ((0, 1), (2, 1), (1, 1), (1, 7), (1, 2.0), (True,), 4, "12", {1: 2}):
        with pytest.raises(ConfigError, match=r"graph_capture_sizes=.*(integers|max_num_seqs=6)"):
            LLM("random:tiny", graph_capture_sizes=sizes, **options)
    with pytest.raises(ConfigError, match=r"graph_capture_sizes=\(1, 2\) needs graphs, which enforce_eager=True"):
        LLM("random:tiny", graph_capture_sizes=(1, 2), **options | {"enforce_eager": True})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ops", ["reference", "cpu"])
def test_padding_reaches_no_request(ops: str, dtype: str) -> None:
    """NaN in the padding block before every step, where rows of the batch write and read; the pool nearly full."""
    options: dict[str, Any] = {
        "ops": ops,
        "dtype": dtype,
        "max_num_seqs": 7,
        "num_kv_blocks": 40,
        "check_invariants": True,
    }
    with_graphs = LLM("random:tiny", enforce_eager=False, graph_capture_sizes=(1, 2, 4), **options)
    eager = LLM("random:tiny", enforce_eager=True, **options)
    runner = with_graphs.core.runner
    execute, padding_block = runner.execute, runner.num_kv_blocks

    def poisoned(scheduled: Any) -> Any:
        runner.poison(padding_block)
        return execute(scheduled)

    runner.execute = poisoned
    assert padding_block == with_graphs.core.scheduler.pool.num_blocks, "one more than the pool's own blocks"
    expected = run_alone(eager, PROMPTS, PARAMS)
    assert differences(expected, run_cell(with_graphs, PROMPTS, PARAMS)) == []
    assert set(padded(with_graphs)) >= {4} and eager.graph_replays == ()
    # Buffers are dirty from the batches before.
    assert differences(expected, run_alone(with_graphs, PROMPTS, PARAMS)) == []


def test_prefills_and_mixed_steps_run_as_they_come() -> None:
    llm = LLM("random:tiny", enforce_eager=False, graph_capture_sizes=(4,), max_num_seqs=4, num_kv_blocks=64)
    llm.generate([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=1), use_tqdm=False)
    assert sum(graph.count for graph in llm.graph_replays) == 0
    llm.generate([[5, 6, 7], [8, 9], [3] * 20], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert {graph.bucket: (graph.count, graph.num_padded) for graph in llm.graph_replays if graph.count} == {4: (3, 3)}


def test_a_replay_on_the_cpu_calls_no_op_from_python() -> None:
    llm, eager = (LLM("random:tiny", enforce_eager=eager, max_num_seqs=2, num_kv_blocks=64) for eager in (False, True))
    params = SamplingParams(max_tokens=1), SamplingParams(max_tokens=9, ignore_eos=True)
    expected = [one.token_ids for one in eager.generate([[5, 6, 7], [8] * 40], params[1], use_tqdm=False)]
    ops, called = llm.core.runner.ops, []
    for name in ("linear", "paged_attention", "silu_mul"):
        kernel = getattr(ops, name)
        setattr(ops, name, lambda *given, kernel=kernel, name=name: called.append(name) or kernel(*given))
    llm.generate([[5, 6, 7], [8] * 40], params[0], use_tqdm=False)
    in_prefill = len(called)
    assert in_prefill > 0
    llm.reset_prefix_cache()
    called.clear()
    assert [one.token_ids for one in llm.generate([[5, 6, 7], [8] * 40], params[1], use_tqdm=False)] == expected
    assert len(called) == in_prefill, "8 decode steps added nothing"


def test_logits_stay_when_the_next_step_overwrites_a_graphs() -> None:
    llm = LLM("random:tiny", enforce_eager=False, max_num_seqs=2, num_kv_blocks=64)
    llm.generate([[7] * 32], SamplingParams(max_tokens=1), use_tqdm=False)  # a prompt that is known but for its end
    first = llm.next_token_logits([7] * 33)
    kept = first.clone()
    assert not torch.equal(llm.next_token_logits([9]), kept)
    assert torch.equal(first, kept)


def test_a_cpu_graph_reads_its_tensors_anew_and_keeps_them() -> None:
    ops = CpuOps(torch.float32, torch.device("cpu"))
    x = torch.randn(3, 32)
    weights = [torch.randn(32, 32) for _ in range(2)]

    def run() -> torch.Tensor:
        return ops.linear(ops.linear(x, ops.pack_linear(weights[0])), ops.pack_linear(weights[1]))

    replay = ops.capture(run)  # the packed weights and the first result belong to nobody else
    for _ in range(3):
        x.normal_()
        junk = [torch.full((3, 32), float("nan")) for _ in range(50)]
        assert torch.equal(replay(), run())
        del junk


def test_a_cpu_graph_refuses_what_it_cannot_hold() -> None:
    ops = CpuOps(torch.float32, torch.device("cpu"))
    column_major = torch.randn(8, 4).t()
    with pytest.raises(RuntimeError, match="not contiguous"):
        ops.capture(lambda: ops.silu_mul(column_major))
    with pytest.raises(RuntimeError, match="another graph"):
        ops.capture(lambda: ops.capture(lambda: ops.silu_mul(torch.zeros(2, 4)))())
    assert torch.equal(ops.capture(lambda: ops.silu_mul(torch.zeros(2, 4)))(), torch.zeros(2, 2))  # and goes on
    table, ids = torch.zeros(7, 4), torch.tensor([0, 6])
    replay = ops.capture(lambda: ops.embedding(ids, table))
    ids[1] = 7
    with pytest.raises(IndexError, match="token id 7"):
        replay()
