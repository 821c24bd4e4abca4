"""An instance whose transfers are slow, or never seen to end: ``engine.instance`` over a channel that dawdles.

``SLOW_PULLS`` says by how many seconds, one number for each pull in turn; the last one holds for all that follow.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from engine import instance
from engine.execution import runner
from engine.kv.transfer import KVChannel, PullOutcome

DELAYS = [float(part) for part in os.environ.get("SLOW_PULLS", "0").split()]
_make_channel = runner.make_channel
_begun = 0


class SlowChannel:
    """A channel that owns up to a transfer's end only later."""

    def __init__(self, channel: KVChannel) -> None:
        self._channel = channel
        self._due: dict[int, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def pull(self, transfer_id: int, source: Sequence[int], target: Sequence[int]) -> None:
        global _begun
        self._due[transfer_id] = time.perf_counter() + DELAYS[min(_begun, len(DELAYS) - 1)]
        _begun += 1
        self._channel.pull(transfer_id, source, target)

    def outcomes(self, transfer_ids: Sequence[int]) -> list[PullOutcome]:
        now = time.perf_counter()
        found = self._channel.outcomes(transfer_ids)
        return [
            PullOutcome("busy") if now < self._due[one] else outcome
            for one, outcome in zip(transfer_ids, found, strict=True)
        ]


def _slow(*arguments: Any) -> Any:
    return SlowChannel(_make_channel(*arguments))


runner.make_channel = _slow  # type: ignore[assignment]

if __name__ == "__main__":
    instance.main()
