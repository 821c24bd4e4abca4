"""The ways in which KV blocks travel between two instances, rank by rank, from pool to pool.

Both copy straight from the other instance's KV memory into this one's: nothing is gathered into a buffer on the way.
"""

from __future__ import annotations

import base64
import itertools
import json
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from engine.config import ConfigError
from engine.kv.transfer import KVChannel, PullOutcome

_POLL_S = 0.0005
_MEET_TIMEOUT = timedelta(seconds=60)
_FOREVER = timedelta(days=365)
_BUSY = PullOutcome("busy")
_FAILED = PullOutcome("failed")


def resolve_channel(name: str) -> str:
    """The channel that ``kv_channel`` names: ``auto`` is NIXL where it is installed.

    Raises:
        ConfigError: ``nixl`` is asked for and cannot be loaded.
    """
    if name == "distributed":
        return name
    try:
        _nixl()
    except ImportError as error:
        if name == "nixl":
            raise ConfigError(
                f"kv_channel='nixl' is not available: {error}; install nixl-cu12 (Linux), or choose 'distributed'"
            ) from error
        return "distributed"
    return "nixl"


def make_channel(name: str, memory: Sequence[Tensor], host: str, timeout_s: float) -> KVChannel:
    """One rank's end of a channel.

    Args:
        name: ``nixl`` or ``distributed``.
        memory: The rank's KV memory: contiguous tensors [num_blocks, ...], one or two for each layer.
        host: Address of this host on which the other can reach it.
        timeout_s: How long a pull may take.
    """
    return NixlChannel(memory) if name == "nixl" else DistributedChannel(memory, host, timeout_s)


class NixlChannel:
    """NIXL over UCX: one-sided reads of the other rank's memory, whatever transport UCX finds best.

    NIXL's own progress thread would spin on a core all the time. So a thread of this class makes progress, on the
    pulling side while pulls are in flight, and on the other while ``serve`` says that there may be some.
    """

    def __init__(self, memory: Sequence[Tensor]) -> None:
        api = _nixl()
        self._memory = memory
        self._lock = threading.Condition()  # the agent is not thread-safe; notified when there may be work
        self._agent: Any = api.nixl_agent(
            uuid.uuid4().hex, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        )
        self._registered = self._agent.register_memory(list(memory))
        self._peer: str | None = None
        self._lists: list[Any] = []
        self._handles: dict[int, tuple[Any, int, float]] = {}
        self._outcomes: dict[int, PullOutcome] = {}
        self._serving = self._closed = False
        self._thread = threading.Thread(target=self._progress, name="nixl", daemon=True)
        self._thread.start()

    def address(self) -> bytes:
        metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        return json.dumps({"agent": metadata, "regions": self._regions(), "device": self._device()}).encode()

    def connect(self, address: bytes) -> None:
        other = json.loads(address)
        with self._lock:
            try:
                name = self._agent.add_remote_agent(base64.b64decode(other["agent"]))
            except Exception as error:  # nixl's errors have no common base
                raise ConnectionError(f"NIXL: {type(error).__name__}: {error}") from error
            self._peer = name.decode() if isinstance(name, bytes) else name
            ends = (("", self._regions(), self._device()), (self._peer, other["regions"], other["device"]))
            self._lists = [
                self._agent.prep_xfer_dlist(agent, self._agent.get_xfer_descs(_blocks_of(parts, index), kind))
                for agent, parts, (kind, index) in ends
            ]
            self._num_blocks = len(self._memory[0]), other["regions"][0][2]

    def pull(self, transfer_id: int, source: Sequence[int], target: Sequence[int]) -> None:
        mine, theirs = (
            [region * count + block for region in range(len(self._memory)) for block in blocks]
            for count, blocks in zip(self._num_blocks, (target, source), strict=True)
        )
        num_bytes = len(source) * sum(map(_block_bytes, self._memory))
        with self._lock:
            began = time.perf_counter()
            try:
                handle = self._agent.make_prepped_xfer("READ", self._lists[0], mine, self._lists[1], theirs)
                self._handles[transfer_id] = (handle, num_bytes, began)
                self._see(transfer_id, self._agent.transfer(handle))
            except Exception as error:
                _say_failed(transfer_id, error)
                self._outcomes[transfer_id] = _FAILED
            self._lock.notify()

    def outcomes(self, transfer_ids: Sequence[int]) -> list[PullOutcome]:
        return _asked_for(self._outcomes, transfer_ids)

    def serve(self, active: bool) -> None:
        with self._lock:
            self._serving = active
            self._lock.notify()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify()
        self._thread.join()
        for transfer_id, (handle, _, _) in self._handles.items():
            _quietly(lambda handle=handle: self._agent.release_xfer_handle(handle))  # type: ignore[misc]
            self._outcomes[transfer_id] = _FAILED
        self._handles.clear()
        for part in self._lists:
            _quietly(lambda part=part: self._agent.release_dlist_handle(part))  # type: ignore[misc]
        if self._peer is not None:
            _quietly(lambda: self._agent.remove_remote_agent(self._peer))
        _quietly(lambda: self._agent.deregister_memory(self._registered))
        self._agent = None  # ends the agent, and with it whatever could still write

    def _regions(self) -> list[tuple[int, int, int]]:
        """Address, bytes of a block, and blocks of each tensor."""
        return [(tensor.data_ptr(), _block_bytes(tensor), len(tensor)) for tensor in self._memory]

    def _device(self) -> tuple[str, int]:
        device = self._memory[0].device
        return device.type, device.index or 0

    def _progress(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._closed or self._serving or self._handles)
                if self._closed:
                    return
                if self._serving:
                    self._agent.get_new_notifs()
                for transfer_id, (handle, _, _) in tuple(self._handles.items()):
                    try:
                        self._see(transfer_id, self._agent.check_xfer_state(handle))
                    except Exception as error:
                        _say_failed(transfer_id, error)
                        self._see(transfer_id, "ERR")
            time.sleep(_POLL_S)

    def _see(self, transfer_id: int, state: str) -> None:
        if state == "PROC":
            return
        handle, num_bytes, began = self._handles.pop(transfer_id)
        done = state == "DONE"
        if done:
            self._agent.release_xfer_handle(handle)
        self._outcomes[transfer_id] = PullOutcome("done", num_bytes, time.perf_counter() - began) if done else _FAILED


class DistributedChannel:
    """torch.distributed point to point (gloo): the other rank sends what it is asked for, in the order of asking.

    Blocks that lie side by side on both sides travel as one message for each tensor.
    """

    def __init__(self, memory: Sequence[Tensor], host: str, timeout_s: float) -> None:
        self._memory, self._host, self._timeout = memory, host, timedelta(seconds=timeout_s)
        self._group: Any = None
        self._store: dist.Store | None = None
        self._asked: queue.SimpleQueue[tuple[int, list[tuple[int, int, int]]] | None] = queue.SimpleQueue()
        self._outcomes: dict[int, PullOutcome] = {}
        self._thread: threading.Thread | None = None

    def address(self) -> bytes:
        store = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        self._store = store
        self._run(self._send_what_is_asked)
        return json.dumps([self._host, store.port]).encode()

    def connect(self, address: bytes) -> None:
        host, port = json.loads(address)
        try:
            self._store = dist.TCPStore(host, port, timeout=_MEET_TIMEOUT)
            self._group = self._meet(1)
        except RuntimeError as error:
            raise ConnectionError(f"torch.distributed: {error}") from error
        self._run(self._receive)

    def pull(self, transfer_id: int, source: Sequence[int], target: Sequence[int]) -> None:
        self._asked.put((transfer_id, list(_runs(source, target))))

    def outcomes(self, transfer_ids: Sequence[int]) -> list[PullOutcome]:
        return _asked_for(self._outcomes, transfer_ids)

    def serve(self, active: bool) -> None:
        pass  # gloo's own thread wakes when there is something to do

    def close(self) -> None:
        self._asked.put(None)
        if self._thread is not None and self._group is not None:
            self._thread.join(self._timeout.total_seconds() + 1)
        self._group = self._store = None

    def _meet(self, rank: int) -> Any:
        options: Any = getattr(dist.ProcessGroupGloo, "_Options")()  # noqa: B009 - torch's stubs lack it
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        options._timeout = _FOREVER
        assert self._store is not None
        return dist.ProcessGroupGloo(self._store, rank, 2, options)

    def _run(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work, name="kv-channel", daemon=True)
        self._thread.start()

    def _receive(self) -> None:
        group = self._group
        while (asked := self._asked.get()) is not None:
            transfer_id, runs = asked
            began = time.perf_counter()
            try:
                header = torch.tensor([transfer_id, len(runs)])
                wanted = torch.tensor([(source, count) for source, _, count in runs])
                sends = [group.send([header], 0, 0), group.send([wanted], 0, 0)]
                places = [tensor[target : target + count] for _, target, count in runs for tensor in self._memory]
                landed = [_reachable(place) for place in places]
                receives = [group.recv([there], 0, 1) for there in landed]
                for work in (*sends, *receives):
                    work.wait(max(timedelta(milliseconds=1), self._timeout - _since(began)))
                for place, there in zip(places, landed, strict=True):
                    if there is not place:
                        place.copy_(there)
            except RuntimeError as error:  # the connection is closed, after a timeout too
                _say_failed(transfer_id, error)
                self._outcomes[transfer_id] = _FAILED
                continue
            num_bytes = sum(count for _, _, count in runs) * sum(map(_block_bytes, self._memory))
            self._outcomes[transfer_id] = PullOutcome("done", num_bytes, time.perf_counter() - began)

    def _send_what_is_asked(self) -> None:
        try:
            group = self._group = self._meet(0)
            header = torch.empty(2, dtype=torch.int64)
            while True:
                group.recv([header], 1, 0).wait(_FOREVER)
                wanted = torch.empty((int(header[1]), 2), dtype=torch.int64)
                group.recv([wanted], 1, 0).wait(_FOREVER)
                works = [
                    group.send([tensor[first : first + count].cpu()], 1, 1)
                    for first, count in wanted.tolist()
                    for tensor in self._memory
                ]
                for work in works:
                    work.wait(_FOREVER)
        except RuntimeError:
            return  # the other end has gone; what it did not get, it knows


def _nixl() -> Any:
    """NIXL's Python interface: the wheels for CUDA 12 and 13 have modules of their own names; any of them will do."""
    for name in ("nixl_cu12", "nixl_cu13", "nixl"):
        try:
            module = __import__(f"{name}._api", fromlist=["nixl_agent"])
            logging = __import__(f"{name}.logging", fromlist=["get_logger"])
        except ImportError:
            continue
        logging.get_logger("nixl").setLevel("WARNING")
        return module
    raise ImportError("none of nixl_cu12, nixl_cu13 and nixl can be imported")


def _blocks_of(regions: Sequence[tuple[int, int, int]], device: int) -> NDArray[np.uint64]:
    """[regions * blocks, 3]: address, length and device of every block, region by region."""
    parts = []
    for start, num_bytes, count in regions:
        rows = np.empty((count, 3), np.uint64)
        rows[:, 0] = start + np.arange(count, dtype=np.uint64) * np.uint64(num_bytes)
        rows[:, 1], rows[:, 2] = num_bytes, device
        parts.append(rows)
    return np.concatenate(parts)


def _runs(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(source, target, count) of the blocks that follow each other on both sides."""
    pairs = zip(source, target, strict=True)
    for _, run in itertools.groupby(enumerate(pairs), key=lambda item: (item[1][0] - item[0], item[1][1] - item[0])):
        blocks = [pair for _, pair in run]
        yield (*blocks[0], len(blocks))


def _asked_for(outcomes: dict[int, PullOutcome], transfer_ids: Sequence[int]) -> list[PullOutcome]:
    """What is known of each; the rest is over and forgotten, so that nothing piles up over an engine's life."""
    for transfer_id in outcomes.keys() - set(transfer_ids):
        del outcomes[transfer_id]
    return [outcomes.get(transfer_id, _BUSY) for transfer_id in transfer_ids]


def _block_bytes(tensor: Tensor) -> int:
    return tensor[0].numel() * tensor.element_size()


def _reachable(place: Tensor) -> Tensor:
    """Memory of the CPU that gloo can write to: the place itself, or for a GPU's, as much beside it."""
    return place if place.device.type == "cpu" else torch.empty(place.shape, dtype=place.dtype)


def _since(began: float) -> timedelta:
    return timedelta(seconds=time.perf_counter() - began)


def _say_failed(transfer_id: int, error: Exception) -> None:
    print(f"transfer {transfer_id} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def _quietly(action: Callable[[], Any]) -> None:
    """Tidy up as far as the library lets: what is broken already may refuse."""
    try:
        action()
    except Exception:
        return
