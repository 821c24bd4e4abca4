"""Transfers: what every rank of an instance does for the KV that comes from, or goes to, another instance.

Rank 0 tells the others through the group, between steps, what it does itself; each rank moves its own heads' part.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.execution.communicator import Communicator
from engine.kv.transfer import KVChannel, PullOutcome

Int64s = NDArray[np.int64]
_ADDRESS_BYTES = 1 << 16
_STATES = ("busy", "done", "failed")


class Operation(IntEnum):
    """What the ranks are told to do."""

    OPEN = 1
    CONNECT = 2
    PULL = 3
    OUTCOMES = 4
    SERVE = 5
    CLOSE = 6


class Transfers:
    """One rank's channel; rank 0's methods act on every rank.

    Args:
        make: Makes this rank's end of a channel on a host whose address it is given.
        group: The ranks of this instance.
        tell: Sends a message to the other ranks and performs it here; the ranks' ``perform`` gets it.
    """

    def __init__(self, make: Callable[[str], KVChannel], group: Communicator, tell: Callable[[Int64s], Int64s]) -> None:
        self._make, self._group, self._tell = make, group, tell
        self._channel: KVChannel | None = None

    def open(self, host: str) -> list[bytes]:
        """A new channel on every rank; their addresses, for the other instance to ``connect`` to.

        ``host`` is this host's address on which the other instance can reach it.
        """
        rows = self._everywhere(Operation.OPEN, _pack({"host": host}))
        return [row[1:].tobytes()[: row[0]] for row in rows]

    def connect(self, host: str, addresses: Sequence[bytes]) -> bool:
        """A new channel on every rank, connected to the other instance's; False, and none, where one cannot be."""
        encoded = [base64.b64encode(address).decode() for address in addresses]
        rows = self._everywhere(Operation.CONNECT, _pack({"host": host, "addresses": encoded}))
        connected = all(row[0] for row in rows)
        if not connected:
            self.close()
        return connected

    def pull(self, transfer_id: int, source: Sequence[int], target: Sequence[int]) -> None:
        """Begin to copy the other instance's blocks ``source`` into this one's ``target``."""
        self._everywhere(Operation.PULL, [transfer_id, len(source), *source, *target])

    def outcomes(self, transfer_ids: Sequence[int]) -> list[PullOutcome]:
        """How pulls stand: done once they are on every rank, failed once they are on one; bytes of all ranks."""
        if not transfer_ids:
            return []
        rows = self._everywhere(Operation.OUTCOMES, transfer_ids)
        by_rank = np.stack([row.reshape(-1, 3) for row in rows])  # [ranks, transfers, 3]
        outcomes = []
        for i in range(len(transfer_ids)):
            states = {_STATES[state] for state in by_rank[:, i, 0]}
            if "failed" in states:
                outcomes.append(PullOutcome("failed"))
            elif "busy" in states:
                outcomes.append(PullOutcome("busy"))
            else:
                nanoseconds = int(by_rank[:, i, 2].max())
                outcomes.append(PullOutcome("done", int(by_rank[:, i, 1].sum()), nanoseconds * 1e-9))
        return outcomes

    def serve(self, active: bool) -> None:
        """Whether the other instance may want blocks now."""
        self._everywhere(Operation.SERVE, [int(active)])

    def close(self) -> None:
        """Cut the connection on every rank."""
        self._everywhere(Operation.CLOSE, [])

    def perform(self, message: Int64s) -> Int64s:
        """On every rank: do what rank 0's message says. Every rank's results on rank 0, one behind the other."""
        operation, payload = Operation(int(message[0])), message[1:].tolist()
        width = {Operation.OPEN: 1 + _ADDRESS_BYTES // 8, Operation.OUTCOMES: 3 * len(payload)}.get(operation, 1)
        result = np.zeros(width, np.int64)
        if operation is Operation.OPEN:
            self._renew(_unpack(payload)["host"])
            address = self._open_channel.address()
            if len(address) > _ADDRESS_BYTES:
                raise RuntimeError(f"a channel's address of {len(address)} bytes exceeds {_ADDRESS_BYTES}")
            result[0] = len(address)
            result[1:].view(np.uint8)[: len(address)] = np.frombuffer(address, np.uint8)
        elif operation is Operation.CONNECT:
            told = _unpack(payload)
            self._renew(told["host"])
            result[0] = self._connect(base64.b64decode(told["addresses"][self._group.rank]))
        elif operation is Operation.PULL:
            transfer_id, count = payload[:2]
            self._open_channel.pull(transfer_id, payload[2 : 2 + count], payload[2 + count :])
        elif operation is Operation.OUTCOMES:
            for i, one in enumerate(self._open_channel.outcomes(payload)):
                result[3 * i : 3 * i + 3] = _STATES.index(one.state), one.num_bytes, int(one.seconds * 1e9)
        elif operation is Operation.SERVE:
            self._open_channel.serve(bool(payload[0]))
        else:
            self._close()
        columns = torch.from_numpy(result.view(np.float32)).unsqueeze(0)
        gathered = self._group.gather(columns, (columns.shape[1],) * self._group.size)
        return np.ascontiguousarray(gathered.numpy()[0]).view(np.int64)

    @property
    def _open_channel(self) -> KVChannel:
        assert self._channel is not None, "there is no channel to the other instance"
        return self._channel

    def _connect(self, address: bytes) -> bool:
        try:
            self._open_channel.connect(address)
        except ConnectionError as error:
            print(f"rank {self._group.rank} cannot reach the other instance: {error}", file=sys.stderr, flush=True)
            return False
        return True

    def _renew(self, host: str) -> None:
        self._close()
        self._channel = self._make(host)

    def _close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _everywhere(self, operation: Operation, payload: Sequence[int]) -> list[Int64s]:
        results = self._tell(np.array([operation, *payload], np.int64))
        return list(results.reshape(self._group.size, -1))


def _pack(value: Any) -> list[int]:
    """What JSON can hold, as whole numbers; blanks behind JSON mean nothing."""
    text = json.dumps(value).encode()
    packed: list[int] = np.frombuffer(text + b" " * (-len(text) % 8), np.int64).tolist()
    return packed


def _unpack(payload: list[int]) -> Any:
    return json.loads(np.array(payload, np.int64).tobytes())
