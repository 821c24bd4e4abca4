"""What the engine asks of an executor, and what it gets back. No torch here: fakes implement it too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.scheduler.loop import ScheduledRequest


@dataclass(frozen=True)
class StepResult:
    """Samples by request id, as (token id, logprob), and how long the parts of the step took, in seconds."""

    samples: dict[str, tuple[int, float]]
    forward_s: float
    sample_s: float


@dataclass(frozen=True)
class GraphReplay:
    """How often the graph of ``bucket`` rows was replayed, and in how many of these some rows were padding."""

    bucket: int
    count: int
    num_padded: int


@dataclass(frozen=True)
class RunnerFacts:
    """What runs, and what it has done so far.

    Attributes:
        ops: The op set.
        world_size: Ranks at work, as their group counts them.
        communication_s: Seconds that rank 0 has spent in exchanges between ranks, waiting for the others included.
        graph_replays: Nothing where ``enforce_eager`` turned graphs off.
    """

    ops: str
    world_size: int
    communication_s: float
    graph_replays: tuple[GraphReplay, ...]


class Runner(Protocol):
    """Executes planned steps."""

    num_kv_blocks: int

    def execute(self, scheduled: Sequence[ScheduledRequest]) -> StepResult:
        """Compute a plan's tokens, write their KV, and sample where the plan says so."""

    def logits(self, scheduled: Sequence[ScheduledRequest]) -> Any:
        """Compute a plan's tokens, write their KV, and give the logits [samples, vocab] without sampling."""

    def poison(self, block: int) -> None:
        """Overwrite a free block with NaN (for tests)."""

    def facts(self) -> RunnerFacts:
        """What runs, and what it has done so far."""

    def close(self) -> None:
        """End what runs; nothing is executed afterwards."""
