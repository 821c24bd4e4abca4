"""Ranks: which part each holds, what they exchange, and that every way to share a model gives one process's bits."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from engine import LLM, ConfigError, SamplingParams
from engine.config import ModelConfig
from engine.execution import launch
from engine.execution.batch import StepLayout
from engine.execution.communicator import SLOT_BYTES, SharedMemoryGroup
from engine.execution.parallel import make_shard, split_evenly
from engine.execution.worker import Setup, serve
from engine.execution.workers import GroupWorkers, WorkerError
from engine.models.hub import resolve_model
from engine.models.shapes import SHAPE_NAMES
from engine.ops import VOCAB_CHUNK
from engine.ops.tree import SplitSum, combine, tree_sum
from lab.golden import Outputs, differences, run_cell
from lab.matrix import random_prompts
from tests.test_ops_contract import normal, same_bits


def model_config(shape: str) -> ModelConfig:
    return ModelConfig.from_hf(resolve_model(f"random:{shape}").hf_config, shape)


@st.composite
def split_sums(draw: st.DrawFn) -> SplitSum:
    num_leaves = draw(st.integers(1, 40))
    inner = draw(st.sets(st.integers(1, num_leaves - 1), max_size=6)) if num_leaves > 1 else set()
    ends = [0, *sorted(inner), num_leaves]
    return SplitSum(num_leaves, tuple(range(low, high) for low, high in itertools.pairwise(ends)))


@given(split_sums())
def test_every_split_of_a_sum_gives_the_bits_of_the_whole_tree(total: SplitSum) -> None:
    leaves = normal(total.num_leaves, total.num_leaves, 5)
    parts = [tree_sum(leaves[low:high]) for held in total.held for low, high in held]
    assert same_bits(combine(parts, total.order), tree_sum(leaves))
    for held, run in zip(total.held, total.runs, strict=True):
        assert [leaf for low, high in held for leaf in range(low, high)] == list(run)
        assert len(held) <= 2 * total.num_leaves.bit_length(), "maximal subtrees are few"


@pytest.mark.parametrize("shape", SHAPE_NAMES)
def test_shards_are_contiguous_and_cover_the_model(shape: str) -> None:
    config = model_config(shape)
    for size in range(1, 4):
        if size > config.num_kv_heads:
            continue
        shards = [make_shard(config, rank, size) for rank in range(size)]
        for runs, count in ((shards[0].attention.runs, config.num_kv_heads), (shards[0].vocab, config.vocab_size)):
            assert [item for run in runs for item in run] == list(range(count))
            assert list(map(len, runs)) == sorted(map(len, runs), reverse=True)
        assert all(run.start % VOCAB_CHUNK == 0 for run in shards[0].vocab if run)
        assert sum(shard.num_kv_heads for shard in shards) == config.num_kv_heads
    assert split_evenly(3, 2) == (range(2), range(2, 3))


@pytest.mark.parametrize(("size", "most"), [(4, 3), (7, 3)])
def test_a_size_that_cannot_be_split_names_those_that_can(size: int, most: int) -> None:
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size={size} .* 3 KV heads .* choose 1 \.\. {most}"):
        LLM("random:tiny", tensor_parallel_size=size)


class Ranks:
    """Shared-memory groups of one process, a thread each."""

    def __init__(self, size: int) -> None:
        self.check: Callable[[], None] = lambda: None
        memory = os.memfd_create("test")
        os.ftruncate(memory, SharedMemoryGroup.memory_bytes(size))
        self.groups = [SharedMemoryGroup(memory, rank, size, lambda: self.check()) for rank in range(size)]
        os.close(memory)

    def each(self, act: Callable[[SharedMemoryGroup], Any]) -> list[Any]:
        results: list[Any] = [None] * len(self.groups)

        def run(rank: int) -> None:
            try:
                results[rank] = act(self.groups[rank])
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.groups))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return Ranks(request.param)


@settings(max_examples=30, deadline=None)
@given(
    num_leaves=st.integers(3, 12),
    shape=st.sampled_from([(1, 7), (16, 576), (1, 0), (300, 576)]),  # the last exceeds a slot
    seed=st.integers(0, 99),
)
def test_ranks_add_in_tree_order(ranks: Ranks, num_leaves: int, shape: tuple[int, int], seed: int) -> None:
    total = SplitSum(num_leaves, split_evenly(num_leaves, len(ranks.groups)))
    leaves = normal(seed, num_leaves, *shape)

    def act(group: SharedMemoryGroup) -> torch.Tensor:
        return group.add([tree_sum(leaves[low:high]) for low, high in total.held[group.rank]], total)

    for result in ranks.each(act):
        assert same_bits(result, tree_sum(leaves))


@settings(max_examples=30, deadline=None)
@given(rows=st.sampled_from([0, 1, 3, 40]), widths=st.lists(st.sampled_from([0, 1, 96, 5000]), min_size=3, max_size=3))
def test_columns_are_gathered_on_rank_0(ranks: Ranks, rows: int, widths: list[int]) -> None:
    widths = widths[: len(ranks.groups)]
    parts = [normal(rank, rows, width) for rank, width in enumerate(widths)]
    whole, *others = ranks.each(lambda group: group.gather(parts[group.rank], widths))
    assert same_bits(whole, torch.cat(parts, 1))
    assert all(other.shape == (rows, 0) for other in others)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from([0, 1, 1000, SLOT_BYTES // 8 - 1, SLOT_BYTES // 8, 3 * SLOT_BYTES // 8 + 5]))
def test_messages_of_any_length_reach_every_rank(ranks: Ranks, length: int) -> None:
    message = np.arange(length, dtype=np.int64) * 7
    for received in ranks.each(lambda group: group.broadcast(message if group.rank == 0 else None)):
        assert np.array_equal(received, message)


def test_a_rank_that_waits_in_vain_gives_up_when_told() -> None:
    ranks = Ranks(2)

    def lost() -> None:
        raise RuntimeError("the other rank is gone")

    ranks.check = lost
    with pytest.raises(RuntimeError, match="the other rank is gone"):
        ranks.groups[1].broadcast(None)


def test_a_layout_survives_its_message() -> None:
    layout = StepLayout(*(np.arange(n) for n in (5, 3, 2)), np.arange(6).reshape(2, 3), *(np.arange(n) for n in (0, 2)))
    parsed = StepLayout.parse(layout.message())
    for name in StepLayout.__dataclass_fields__:
        assert np.array_equal(getattr(parsed, name), getattr(layout, name)), name


class ThreadWorkers(GroupWorkers):
    """The ranks above 0 as threads of this process: the same code and the same exchanges, without starting Python."""

    def __init__(self, workers: Sequence[tuple[str, Setup, Sequence[int]]]) -> None:
        super().__init__()
        groups = [SharedMemoryGroup(fds[0], setup.rank, setup.size, self._give_up) for _, setup, fds in workers]
        setups = [setup for _, setup, _ in workers]
        self.threads = [threading.Thread(target=self._serve, args=pair) for pair in zip(setups, groups, strict=True)]
        for thread in self.threads:
            thread.start()

    def _serve(self, setup: Setup, group: SharedMemoryGroup) -> None:
        with contextlib.suppress(WorkerError):
            serve(setup, group)

    def _give_up(self) -> None:
        if self._why_over is not None and "closed" not in self._why_over:
            raise WorkerError(self._why_over)

    def close(self, group: Any) -> None:
        super().close(group)
        for thread in self.threads:
            thread.join()


MODEL_OPTIONS: dict[str, Any] = {"num_kv_blocks": 64, "max_num_seqs": 6, "check_invariants": True, "num_threads": 1}
PROMPTS = random_prompts(5000, 9)  # 6, then 3: padded to 4
PARAMS = SamplingParams(max_tokens=7)
COMBINATIONS = [(ops, dtype) for ops in ("reference", "cpu") for dtype in ("float32", "bfloat16")]


@pytest.fixture(scope="module", params=COMBINATIONS, ids="-".join)
def expected(request: pytest.FixtureRequest) -> tuple[dict[str, Any], Outputs]:
    ops, dtype = request.param
    options = {**MODEL_OPTIONS, "ops": ops, "dtype": dtype}
    outputs = run_cell(LLM("random:tiny-vocab", enforce_eager=True, **options), PROMPTS, PARAMS)
    assert len({output.token_ids for output in outputs.values()}) == len(PROMPTS)
    return options, outputs


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graph"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_size_and_mode_gives_the_bits_of_one_eager_process(
    expected: tuple[dict[str, Any], Outputs], size: int, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, outputs = expected
    monkeypatch.setattr(launch, "LocalWorkers", ThreadWorkers)
    sizes = None if eager else (1, 2, 4)
    with LLM(
        "random:tiny-vocab", tensor_parallel_size=size, enforce_eager=eager, graph_capture_sizes=sizes, **options
    ) as llm:
        assert llm.world_size == size
        assert differences(outputs, run_cell(llm, PROMPTS, PARAMS)) == []
        assert bool(sum(graph.num_padded for graph in llm.graph_replays)) == (not eager)
        assert (llm.communication_s > 0) == (size > 1)


def test_a_plan_that_differs_between_ranks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "LocalWorkers", ThreadWorkers)
    llm = LLM("random:tiny", tensor_parallel_size=2, **MODEL_OPTIONS)
    genuine = StepLayout.parse

    def wrong_in_threads(message: np.ndarray) -> StepLayout:
        if threading.current_thread() is not threading.main_thread():
            message = message.copy()
            message[len(StepLayout.__dataclass_fields__)] ^= 1  # another token
        return genuine(message)

    monkeypatch.setattr(StepLayout, "parse", wrong_in_threads)
    with pytest.raises(AssertionError, match="the ranks' plans differ"):
        llm.generate([[5, 6, 7]], use_tqdm=False)
