"""What the processes of a disaggregated engine tell each other: JSON over a connection, one object a message.

No message is unpickled: whoever reaches a port can send data, not code. Floats survive JSON bit for bit (float64).
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from engine.core import StepStats
from engine.kv.prefix_cache import CacheEvent, CacheStats
from engine.kv.transfer import Transfer
from engine.request import Request, SamplingParams
from engine.scheduler.loop import ScheduledRequest

Message = dict[str, Any]


class Wire:
    """One end of a connection between two processes."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def send(self, kind: str, **content: Any) -> None:
        """Send a message; one that nobody is left to receive is lost, and the next ``receive`` says so."""
        try:
            self.connection.send_bytes(json.dumps({"kind": kind, **content}).encode())
        except (BrokenPipeError, ConnectionResetError):
            return

    def receive(self) -> Message:
        """The next message.

        Raises:
            EOFError: The other end is gone.
        """
        try:
            message: Message = json.loads(self.connection.recv_bytes())
        except OSError as error:
            raise EOFError(str(error)) from error
        return message


def ready(wires: Sequence[Wire], timeout: float | None) -> list[Wire]:
    """Those that have a message, or whose other end is gone, in the order given; none after ``timeout`` seconds."""
    ready_now = wait([wire.connection for wire in wires], timeout)
    return [wire for wire in wires if wire.connection in ready_now]


def request_to_wire(request: Request) -> Message:
    """A request as it was asked."""
    return {
        "id": request.request_id,
        "prompt": request.prompt_token_ids,
        "params": dataclasses.asdict(request.params),
        "seed": request.seed,
    }


def request_from_wire(message: Message) -> Request:
    """The request whose ``request_to_wire`` this is; its clock starts now."""
    request = Request(message["id"], tuple(message["prompt"]), SamplingParams(**message["params"]), time.perf_counter())
    request.seed = message["seed"]
    return request


def stats_to_wire(stats: StepStats) -> Message:
    """A step's statistics. The requests are named."""
    fields = {field.name: getattr(stats, field.name) for field in dataclasses.fields(stats)}
    fields["scheduled"] = [(item.request.request_id, item.start, item.num_tokens) for item in stats.scheduled]
    events = [(event.kind, event.request_id, event.index, event.block) for event in stats.cache.events]
    fields["cache"] = (events, stats.cache.seconds)
    del fields["transfers"]
    return fields


def stats_from_wire(
    message: Message,
    requests: Mapping[str, Request],
    transfers: Iterable[Transfer],
    on_this_clock: Callable[[float], float],
) -> StepStats:
    """The statistics whose ``stats_to_wire`` this is, without requests that are not known any more."""
    events, seconds = message["cache"]
    known = [item for item in message["scheduled"] if item[0] in requests]
    fields = message | {
        "start": on_this_clock(message["start"]),
        "end": on_this_clock(message["end"]),
        "scheduled": tuple(ScheduledRequest(requests[name], start, count) for name, start, count in known),
        "cache": CacheStats(tuple(CacheEvent(*event) for event in events), seconds),
    }
    return StepStats(**fields, transfers=tuple(transfers))


def transfer_from_wire(message: Message, on_this_clock: Callable[[float], float]) -> Transfer:
    """The transfer whose ``dataclasses.asdict`` this is."""
    return Transfer(**message | {name: on_this_clock(message[name]) for name in ("offered", "begun", "ended")})
