"""What the engine asks of an executor, and what it gets back. No torch here: fakes implement it too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.scheduler.loop import ScheduledRequest


@dataclass(frozen=True)
class StepResult:
    """Samples by request id, as (token id, logprob), and how long the parts of the step took, in seconds."""

    samples: dict[str, tuple[int, float]]
    forward_s: float
    sample_s: float


class Runner(Protocol):
    """Executes planned steps."""

    num_kv_blocks: int

    def execute(self, scheduled: Sequence[ScheduledRequest]) -> StepResult:
        """Compute a plan's tokens, write their KV, and sample where the plan says so."""

    def poison(self, block: int) -> None:
        """Overwrite a free block with NaN (for tests)."""
