"""Admission: when a waiting request may join the running ones, and when a finished one's blocks go back."""

from __future__ import annotations

from typing import Protocol

from engine.config import EngineConfig
from engine.kv.block_pool import BlockPool
from engine.request import Request


def give_back(request: Request, pool: BlockPool) -> None:
    """Return a request's blocks, tail first (a prefix's head is worth more), and what is left of its promise."""
    pool.release(reversed(request.block_table))
    pool.withdraw(request.num_promised_blocks)
    request.block_table = []
    request.num_promised_blocks = 0


class Admission(Protocol):
    """Policy of the scheduler loop; the loop itself enforces seats (``max_num_seqs``), blocks and FCFS order."""

    def may_join(self, num_running: int) -> bool:
        """Whether the oldest waiting request may join beside ``num_running`` running ones, seats and blocks aside."""

    def joined(self) -> None:
        """A request has joined."""

    def end_schedule(self, num_admitted: int, num_running: int) -> None:
        """The step's plan is complete: it admitted ``num_admitted``, and ``num_running`` are running now."""

    def release(self, request: Request) -> None:
        """``request`` has finished: its blocks go back, now or later."""

    def drained(self) -> None:
        """Nothing is running any more."""

    def held(self) -> tuple[Request, ...]:
        """Finished requests whose blocks have not gone back yet."""


class StaticAdmission:
    """The baseline: a batch forms when nothing is running, and its blocks go back when its last row ends.

    The batch stays open until a step admits nobody, so prompts that do not fit one step's budget still join. Rows that
    finish are no longer computed, but nobody takes their seat and none of their blocks is freed before the batch ends.
    """

    def __init__(self, pool: BlockPool, max_num_seqs: int) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._open = True
        self._num_joined = 0
        self._held: list[Request] = []

    def may_join(self, num_running: int) -> bool:
        return self._open and self._num_joined < self._max_num_seqs

    def joined(self) -> None:
        self._num_joined += 1

    def end_schedule(self, num_admitted: int, num_running: int) -> None:
        if num_admitted == 0 and num_running > 0:
            self._open = False

    def release(self, request: Request) -> None:
        self._held.append(request)

    def drained(self) -> None:
        for finished in self._held:
            give_back(finished, self._pool)
        self._held.clear()
        self._open, self._num_joined = True, 0

    def held(self) -> tuple[Request, ...]:
        return tuple(self._held)


class ContinuousAdmission:
    """Requests join at every step while seats and blocks last, and a finished one's blocks go back at once.

    Iteration-level scheduling (Orca, Yu et al., OSDI 2022).
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def may_join(self, num_running: int) -> bool:
        return True

    def joined(self) -> None:
        return None

    def end_schedule(self, num_admitted: int, num_running: int) -> None:
        return None

    def release(self, request: Request) -> None:
        give_back(request, self._pool)

    def drained(self) -> None:
        return None

    def held(self) -> tuple[Request, ...]:
        return ()


def make_admission(config: EngineConfig, pool: BlockPool) -> Admission:
    """The policy that ``config.batching`` names."""
    return ContinuousAdmission(pool) if config.batching == "continuous" else StaticAdmission(pool, config.max_num_seqs)
