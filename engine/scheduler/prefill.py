"""Prefill: how many of a request's uncomputed tokens one step takes."""

from __future__ import annotations

from typing import Protocol


class Prefill(Protocol):
    """Policy of the scheduler loop."""

    def share(self, num_uncomputed: int, budget: int, num_prefills: int) -> int:
        """Tokens of one request that this step computes.

        Args:
            num_uncomputed: Tokens the request still has to compute (1 when it decodes).
            budget: Tokens the step can still hold; at least 1 unless earlier prefills have used it up.
            num_prefills: Requests in prefill that the step holds already.

        Returns:
            A count in 0 .. num_uncomputed; 0 leaves the request to a later step.
        """


class WholePrompt:
    """Never split a prompt: it runs whole where it fits the step, and as the step's first prefill however long."""

    def share(self, num_uncomputed: int, budget: int, num_prefills: int) -> int:
        return num_uncomputed if num_uncomputed <= budget or num_prefills == 0 else 0
