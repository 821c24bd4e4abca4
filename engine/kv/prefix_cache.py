"""Prefix cache: which blocks are known to hold the KV of a prompt's beginning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.request import Request


class PrefixCacheLike(Protocol):
    """What the scheduler loop asks of a cache."""

    def match(self, request: Request) -> Sequence[int]:
        """Blocks, in order, that hold the KV of the request's first full blocks; never its last prompt token."""

    def publish(self, request: Request, num_computed_before: int) -> None:
        """A step has moved the request's computed tokens on: blocks that became full and computed may be shared."""


class NoPrefixCache:
    """Nothing is ever known."""

    def match(self, request: Request) -> Sequence[int]:
        return ()

    def publish(self, request: Request, num_computed_before: int) -> None:
        return None
