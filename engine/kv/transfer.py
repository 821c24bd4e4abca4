"""KV that comes from another instance: who waits for it, who keeps it until it has gone, and the way between the two.

The prefill instance *pins* the blocks of a prompt that it has handed over; the decode instance *receives* them into
blocks of its own. On both sides a block goes back to its pool only when its transfer is terminal: completed, failed, or
the connection closed. Transfers carry ids, and an id that is not in flight any more is ignored, so a late confirmation
changes nothing and a late write never lands in a block that is used again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from engine.kv.block_pool import BlockPool
from engine.request import Request
from engine.scheduler.admission import ContinuousAdmission, give_back

Pull = Callable[[int, Sequence[int], Sequence[int]], None]
"""Begin a transfer: its id, the other instance's blocks, and as many of one's own."""


@dataclass(frozen=True, slots=True)
class PullOutcome:
    """How a pull stands on one rank. ``num_bytes`` have been moved once it is done."""

    state: Literal["busy", "done", "failed"]
    num_bytes: int = 0
    seconds: float = 0.0


class KVChannel(Protocol):
    """One rank's end of the way between the KV memories of two instances; rank r talks to rank r."""

    def address(self) -> bytes:
        """What the other end needs to ``connect`` to this one."""

    def connect(self, address: bytes) -> None:
        """Reach the end whose ``address`` this is; only the side that pulls does.

        Raises:
            ConnectionError: It cannot be reached; it may just have ended.
        """

    def pull(self, transfer_id: int, source: Sequence[int], target: Sequence[int]) -> None:
        """Begin to copy the other end's blocks ``source`` into this one's blocks ``target``, in every layer."""

    def outcomes(self, transfer_ids: Sequence[int]) -> list[PullOutcome]:
        """How pulls that have begun stand; those that are not asked for any more are forgotten."""

    def serve(self, active: bool) -> None:
        """Whether the other end may want blocks of this one now."""

    def close(self) -> None:
        """Cut the connection: when this returns, nothing writes to the memory any more, and pulls in flight failed."""


class KVTransfers(Protocol):
    """What an instance asks of all its ranks' channels together."""

    def open(self, host: str) -> list[bytes]:
        """New channels; their addresses by rank."""

    def connect(self, host: str, addresses: Sequence[bytes]) -> bool:
        """New channels, connected to the other instance's, by rank; False, and none, where one cannot be."""

    def pull(self, transfer_id: int, source: Sequence[int], target: Sequence[int]) -> None:
        """Begin a transfer on every rank."""

    def outcomes(self, transfer_ids: Sequence[int]) -> list[PullOutcome]:
        """How transfers stand: done once they are on every rank, failed once they are on one; bytes of all ranks."""

    def serve(self, active: bool) -> None:
        """Whether the other instance may want blocks now."""

    def close(self) -> None:
        """Cut the connection on every rank: nothing writes to the memory any more."""


class KVSource(Protocol):
    """Policy of the scheduler loop: where the KV of a prompt comes from, and when its request may run."""

    @property
    def num_receiving(self) -> int:
        """Admitted requests, each with a seat, that may not run yet."""

    def may_begin(self) -> bool:
        """Whether a request could be begun now."""

    def num_to_compute(self, request: Request, num_cached: int) -> int:
        """Tokens that are to be computed here, at the start, when ``num_cached`` of the prompt were found here."""

    def begin(self, request: Request, grow: Callable[[Request, int], None]) -> None:
        """``request`` has been admitted; ``grow`` allocates its blocks up to a number of tokens."""

    def arrived(self) -> Sequence[Request]:
        """Requests whose KV is here up to their ``num_computed_tokens``, in the order of arrival, each once."""

    def cancel(self, request: Request) -> bool:
        """An admitted request is aborted. True: it was waiting for its KV, and its blocks go back later."""

    def held(self) -> tuple[Request, ...]:
        """Requests whose blocks a transfer may still write to."""


class LocalKV:
    """Every prompt is computed here: it may run at once."""

    num_receiving = 0

    def __init__(self) -> None:
        self._ready: list[Request] = []

    def may_begin(self) -> bool:
        return True

    def num_to_compute(self, request: Request, num_cached: int) -> int:
        return request.num_tokens - num_cached

    def begin(self, request: Request, grow: Callable[[Request, int], None]) -> None:
        self._ready.append(request)

    def arrived(self) -> Sequence[Request]:
        ready, self._ready = self._ready, []
        return ready

    def cancel(self, request: Request) -> bool:
        return False

    def held(self) -> tuple[Request, ...]:
        return ()


@dataclass(frozen=True, slots=True)
class Offer:
    """Where the KV of a prompt lies on the instance that computed it."""

    transfer_id: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer that has ended. Times are seconds on ``time.perf_counter``'s clock.

    Attributes:
        num_blocks: Blocks that travelled.
        num_blocks_hit: Blocks of the prompt that did not: the cache had them.
        num_bytes: Of all ranks.
        seconds: For which the channel was at it; ``ended`` is when the instance saw that it was done.
    """

    transfer_id: int
    request_id: str
    num_blocks: int
    num_blocks_hit: int
    num_bytes: int
    seconds: float
    offered: float
    begun: float
    ended: float
    completed: bool


@dataclass(slots=True)
class _InFlight:
    request: Request
    num_blocks: int
    num_hits: int
    offered: float
    begun: float


class ReceivedKV:
    """Prompts were computed by another instance: a request's missing blocks are pulled, and it runs once they are here.

    Args:
        pool: This instance's.
        pull: Begins a transfer.
        now: The clock.
    """

    def __init__(self, pool: BlockPool, pull: Pull, now: Callable[[], float]) -> None:
        self._pool, self._pull, self._now = pool, pull, now
        self._offers: dict[str, tuple[Request, Offer, float]] = {}
        self._in_flight: dict[int, _InFlight] = {}
        self._arrived: list[Request] = []
        self._ended: list[Transfer] = []
        self.connected = False

    @property
    def num_receiving(self) -> int:
        return sum(one.request.finish_reason is None for one in self._in_flight.values()) + len(self._arrived)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Requests whose transfer has not begun."""
        return tuple(request for request, _, _ in self._offers.values())

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Ids of the transfers that have not ended, the oldest first."""
        return tuple(self._in_flight)

    @property
    def longest_wait(self) -> float:
        """Seconds for which the oldest of them has been in flight; 0 where there is none."""
        return next((self._now() - one.begun for one in self._in_flight.values()), 0.0)

    def expect(self, request: Request, offer: Offer) -> None:
        """``request`` joins the queue; its KV is on offer."""
        self._offers[request.request_id] = (request, offer, self._now())

    def withdraw(self, request: Request) -> None:
        """``request`` was aborted: where its transfer has not begun, it ends without."""
        if request.request_id in self._offers:
            _, offer, offered = self._offers.pop(request.request_id)
            self._end(offer.transfer_id, _InFlight(request, 0, 0, offered, self._now()), completed=False)

    def finish(self, transfer_id: int, completed: bool, num_bytes: int = 0, seconds: float = 0.0) -> Request | None:
        """A transfer is terminal. The request that it failed, or None; an id that is not in flight is ignored."""
        flight = self._in_flight.pop(transfer_id, None)
        if flight is None:
            return None
        self._end(transfer_id, flight, completed, num_bytes, seconds)
        request = flight.request
        if request.finish_reason is None and completed:
            self._arrive(request)
            return None
        failed = request if request.finish_reason is None else None
        if failed is not None:
            failed.finish_reason = "error"
        give_back(request, self._pool)
        return failed

    def ended(self) -> tuple[Transfer, ...]:
        """The transfers that have ended since the last call."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def may_begin(self) -> bool:
        return self.connected

    def num_to_compute(self, request: Request, num_cached: int) -> int:
        return request.num_tokens - request.num_prompt_tokens

    def begin(self, request: Request, grow: Callable[[Request, int], None]) -> None:
        _, offer, offered = self._offers.pop(request.request_id)
        hits = len(request.block_table)
        grow(request, request.num_prompt_tokens)
        source, target = offer.blocks[hits:], request.block_table[hits:]
        assert len(source) == len(target), f"{len(source)} blocks on offer for {len(target)}"
        flight = _InFlight(request, len(target), hits, offered, self._now())
        if not target:
            self._end(offer.transfer_id, flight, completed=True)
            self._arrive(request)
            return
        self._in_flight[offer.transfer_id] = flight
        self._pull(offer.transfer_id, source, target)

    def arrived(self) -> Sequence[Request]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def cancel(self, request: Request) -> bool:
        if request in self._arrived:
            self._arrived.remove(request)
            give_back(request, self._pool)
            return True
        return any(flight.request is request for flight in self._in_flight.values())

    def held(self) -> tuple[Request, ...]:
        return (*(flight.request for flight in self._in_flight.values()), *self._arrived)

    def _arrive(self, request: Request) -> None:
        request.num_computed_tokens = request.num_prompt_tokens
        self._arrived.append(request)

    def _end(
        self, transfer_id: int, flight: _InFlight, completed: bool, num_bytes: int = 0, seconds: float = 0.0
    ) -> None:
        self._ended.append(
            Transfer(
                transfer_id,
                flight.request.request_id,
                flight.num_blocks,
                flight.num_hits,
                num_bytes,
                seconds,
                flight.offered,
                flight.begun,
                self._now(),
                completed,
            )
        )


class PinningAdmission(ContinuousAdmission):
    """Continuous admission whose finished requests, where they are to be handed over, keep their blocks: a pin.

    A pin is a holder like a block table, until the transfer is terminal.
    """

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool)
        self._to_hand_over: set[str] = set()
        self._pinned: dict[str, Request] = {}

    def hand_over(self, request_id: str) -> None:
        """Pin this request when it has finished by its length: it goes on elsewhere."""
        self._to_hand_over.add(request_id)

    def release(self, request: Request) -> None:
        wanted = request.request_id in self._to_hand_over
        self._to_hand_over.discard(request.request_id)
        if wanted and request.finish_reason == "length":
            self._pinned[request.request_id] = request
        else:
            super().release(request)

    def is_pinned(self, request_id: str) -> bool:
        """Whether the request has finished here and its blocks wait for another instance."""
        return request_id in self._pinned

    def unpin(self, request_id: str) -> bool:
        """The request's transfer is terminal. False where nothing of it is pinned (any more)."""
        request = self._pinned.pop(request_id, None)
        if request is not None:
            give_back(request, self._pool)
        return request is not None

    def forget(self, request_id: str) -> None:
        """The request was aborted before it finished."""
        self._to_hand_over.discard(request_id)

    def held(self) -> tuple[Request, ...]:
        return tuple(self._pinned.values())
