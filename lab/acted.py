"""What the steps of a run show for the features: a golden cell whose feature did not act could not have failed."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core import StepStats


@dataclass
class Acted:
    """Counts over the steps that it has seen; ``see`` takes them in order.

    Attributes:
        steps: Steps.
        joined: Requests that joined a batch which others had already left: continuous batching.
    """

    steps: int = 0
    joined: int = 0
    _running: set[str] = field(default_factory=set)
    _left: bool = False

    def see(self, stats: StepStats) -> None:
        """Take in one step, after it ran."""
        self.steps += 1
        names = {item.request.request_id for item in stats.scheduled}
        if self._running.isdisjoint(names):  # a new batch, whoever ran before
            self._left = False
        if self._left:
            self.joined += len(names - self._running)
        self._running = names
        self._left |= any(item.request.finish_reason is not None for item in stats.scheduled)
