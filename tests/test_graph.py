"""GraphRunner: which steps it pads, that padding reaches no request, and that nothing a buffer held before matters."""

from __future__ import annotations

from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.execution.graph import bucket_sizes
from lab.golden import differences, run_alone, run_cell
from lab.matrix import random_prompts

PROMPTS = random_prompts(512, 10)  # 7, then 3: padded to 4
PARAMS = SamplingParams(max_tokens=20)


def padded(llm: LLM) -> dict[int, int]:
    return {graph.bucket: graph.num_padded for graph in llm.graph_replays if graph.num_padded}


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
    ],
)
def test_buckets_always_include_the_largest_batch(max_num_seqs: int, sizes: tuple[int, ...]) -> None:
    assert bucket_sizes(max_num_seqs) == sizes


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
    with_graphs, eager = (LLM("random:tiny", enforce_eager=eager, **options) for eager in (False, True))
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
    llm = LLM("random:tiny", enforce_eager=False, max_num_seqs=4, num_kv_blocks=64)
    llm.generate([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=1), use_tqdm=False)
    assert sum(graph.count for graph in llm.graph_replays) == 0
    llm.generate([[5, 6, 7], [8, 9], [3] * 20], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert {graph.bucket: (graph.count, graph.num_padded) for graph in llm.graph_replays if graph.count} == {4: (3, 3)}
