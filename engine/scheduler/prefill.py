"""Prefill: how many of a request's uncomputed tokens one step takes."""

from __future__ import annotations

from typing import Protocol

from engine.config import EngineConfig


class Prefill(Protocol):
    """Policy of the scheduler loop.

    Attributes:
        splits: Whether a prompt may be split; if not, a step may exceed its budget by the one prompt that it holds.
    """

    splits: bool

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

    splits = False

    def share(self, num_uncomputed: int, budget: int, num_prefills: int) -> int:
        return num_uncomputed if num_uncomputed <= budget or num_prefills == 0 else 0


class ChunkedPrefill:
    """Split prompts: a step computes as much of one as its budget leaves (Sarathi-Serve, Agrawal et al., OSDI 2024).

    Running requests come first, oldest first, and at most the newest of them is in mid-prefill: so decodes never wait,
    and what they leave goes to the unfinished prompt, then to the waiting queue.
    """

    splits = True

    def share(self, num_uncomputed: int, budget: int, num_prefills: int) -> int:
        return min(num_uncomputed, budget)


def make_prefill(config: EngineConfig) -> Prefill:
    """The policy that ``config.enable_chunked_prefill`` chooses."""
    return ChunkedPrefill() if config.enable_chunked_prefill else WholePrompt()
