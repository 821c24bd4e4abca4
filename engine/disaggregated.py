"""1P1D: a prefill instance and a decode instance behind the engine's usual interface.

On one host the two are processes that the front end starts. On two hosts each is started by hand, and the front end
is told where they listen::

    ENGINE_SECRET=... python -m engine.disaggregated --role prefill --listen 10.0.0.1:7001
    ENGINE_SECRET=... python -m engine.disaggregated --role decode --listen 10.0.0.2:7002 --connect 10.0.0.1:7001
    LLM(disaggregated=True, prefill_address="10.0.0.1:7001", decode_address="10.0.0.2:7002")
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import queue
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import torch

from engine.config import ConfigError, EngineConfig, ModelConfig, parse_address, parse_options
from engine.core import PoolUse, StepOutput, refuse_malformed
from engine.execution.results import GraphReplay, RunnerFacts
from engine.execution.workers import Children, WorkerError
from engine.instance import ROLES, HandshakeError, InstanceSetup, Links, serve_instance
from engine.kv.transfer import Transfer
from engine.models.hub import ModelSource, resolve_model
from engine.request import Request
from engine.scheduler.loop import refuse_oversized
from engine.wire import Message, Wire, ready, request_to_wire, stats_from_wire, transfer_from_wire

SECRET_VARIABLE = "ENGINE_SECRET"
"""Environment variable with the secret that the processes of one engine on several hosts share."""

INSTANCE_MODULE = "engine.instance"
_MEET_S = 120.0
_STATUS_S = 5.0
_Event = tuple[float, str, Message]


class DisaggregatedCore:
    """``engine.core.Core`` over two instances: mirrors of the requests, kept up to date by what the instances report.

    Token times are those at which the tokens reach this process.
    """

    def __init__(
        self,
        wires: Mapping[str, Wire],
        children: Children | None,
        source: ModelSource,
        model: ModelConfig,
        config: EngineConfig,
        max_model_len: int,
    ) -> None:
        self._wires, self._children = dict(wires), children
        self._vocab_size, self._block_size, self._max_model_len = model.vocab_size, config.block_size, max_model_len
        self._live: dict[str, Request] = {}
        self._known: dict[str, Request] = {}  # aborted ones too, until their instance has let go of them
        self._transfers: list[Transfer] = []
        self._events: deque[_Event] = deque()  # taken from the inbox, not yet dealt with
        self._inbox: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._why_over: str | None = None
        # The thread knows the wires and the inbox, not this object: that can be collected, which ends the instances.
        threading.Thread(target=_read, args=(self._wires, self._inbox), daemon=True).start()
        self._offsets: dict[str, float] = dict.fromkeys(ROLES, 0.0)
        self._num_blocks: dict[str, int] = {}
        try:
            self._meet(source)
        except BaseException:
            self.close()
            raise

    @classmethod
    def start(
        cls, source: ModelSource, model: ModelConfig, config: EngineConfig, max_model_len: int
    ) -> DisaggregatedCore:
        """Start both instances on this host, or reach them where ``config`` says that they listen.

        Raises:
            ConfigError: torchrun runs this process, or an address without a secret.
            WorkerError: An instance could not start, be reached, or refuses the other.
        """
        if "TORCHELASTIC_RUN_ID" in os.environ:
            raise ConfigError("disaggregated=True starts its own processes; run it without torchrun")
        if config.prefill_address is not None and config.decode_address is not None:
            addresses = {"prefill": config.prefill_address, "decode": config.decode_address}
            wires = {role: _reach(address, "front", role) for role, address in addresses.items()}
            return cls(wires, None, source, model, config, max_model_len)
        wires, children = _start_children(source, model, config, max_model_len)
        return cls(wires, children, source, model, config, max_model_len)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live)

    def validate(self, request: Request) -> None:
        """Refuse what either instance could not run, before anything is queued.

        Raises:
            RequestError: As an engine's; the prompt's blocks must fit the prefill instance, and all that the request
                can need the decode instance.
        """
        refuse_malformed(request, self._vocab_size, self._live)
        limits = {"prefill": 1, "decode": request.params.max_tokens}
        for role, max_tokens in limits.items():
            refuse_oversized(request, max_tokens, self._block_size, self._num_blocks[role], self._max_model_len)

    def add(self, request: Request) -> None:
        """Queue a request; raises like ``validate``."""
        self._check()
        self.validate(request)
        while request.request_id in self._known:  # one of this name was aborted, and its instance still has it
            self._events.append(self._receive())
        self._live[request.request_id] = self._known[request.request_id] = request
        self._wires["prefill"].send("add", request=request_to_wire(request))

    def abort(self, request_id: str) -> Request | None:
        request = self._live.pop(request_id, None)
        if request is not None:
            request.finish_reason = "abort"
            request.finish_time = time.perf_counter()
            self._wires["prefill"].send("abort", id=request_id)
        return request

    def step(self, until: float | None = None) -> StepOutput | None:
        """Wait for the next step of either instance, or the next failure, and account for it.

        Raises:
            WorkerError: An instance has ended; also from every later call.
        """
        self._check()
        while self._live:
            event = self._next(until)
            if event is None:
                return None
            output = self._deal_with(event)
            if output is not None:
                return output
        return None

    def logits(self, request: Request) -> Any:
        self.validate(request)
        reply = self._ask("prefill", "logits", "logits", request=request_to_wire(request))
        return torch.tensor(reply["logits"], dtype=torch.float32)

    def forget_prefixes(self) -> None:
        for role in ROLES:
            self._ask(role, "forget", "forgotten")

    def pools(self) -> Mapping[str, PoolUse]:
        return {role: PoolUse(*self.status(role)["pool"]) for role in ROLES}

    def facts(self) -> RunnerFacts:
        each = [self.status(role)["facts"] for role in ROLES]
        replays: dict[int, list[int]] = {}
        for facts in each:
            for replay in facts["graph_replays"]:
                counts = replays.setdefault(replay["bucket"], [0, 0])
                counts[0] += replay["count"]
                counts[1] += replay["num_padded"]
        return RunnerFacts(
            each[0]["ops"],
            each[0]["world_size"],
            sum(facts["communication_s"] for facts in each),
            tuple(GraphReplay(bucket, *counts) for bucket, counts in sorted(replays.items())),
        )

    def status(self, role: str) -> Message:
        """What an instance says of itself: pool (all, held, cached), facts, unfinished, in_flight (transfers)."""
        return self._ask(role, "status", "status")

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the instances that were started here, by role."""
        return {} if self._children is None else self._children.pids

    def close(self) -> None:
        """End both instances."""
        self._why_over = self._why_over or "the engine is closed; make a new one"
        for wire in self._wires.values():
            wire.send("close")
        if self._children is not None:
            self._children.wait()

    def _meet(self, source: ModelSource) -> None:
        for role in ROLES:
            came, _, hello = self._wait_for(role, "hello")
            self._num_blocks[role] = hello["num_kv_blocks"]
            if self._children is None:  # another host's clock: as far off as it was when its greeting came
                self._offsets[role] = came - hello["clock"]
            theirs = hello["of"]["model"]
            if theirs != source.fingerprint:
                raise ConfigError(
                    f"the {role} instance has model {theirs}, this process {source.fingerprint} ({source.name}); give "
                    "both the same"
                )

    def _ask(self, role: str, kind: str, reply: str, **content: Any) -> Message:
        self._check()
        self._wires[role].send(kind, **content)
        return self._wait_for(role, reply)[2]

    def _wait_for(self, role: str, kind: str) -> _Event:
        """The next message of a kind; what comes before it is dealt with later."""
        for index, event in enumerate(self._events):
            if event[1] == role and event[2]["kind"] == kind:
                del self._events[index]
                return event
        while True:
            event = self._receive()
            _, sender, message = event
            if sender == role and message["kind"] == kind:
                return event
            self._events.append(event)

    def _receive(self, timeout: float | None = None) -> _Event:
        """The next event that is not merely that an instance has let go of an aborted request.

        Raises:
            queue.Empty: None came in ``timeout`` seconds.
            WorkerError: An instance has ended, or refuses the other.
        """
        while True:
            event = self._inbox.get(timeout=timeout)
            _, sender, message = event
            if message["kind"] == "gone":
                self._known.pop(message["id"], None)
            elif message["kind"] == "lost":
                self._over(sender)
            elif message["kind"] == "refused":
                self._end(message["error"])
            else:
                return event

    def _next(self, until: float | None) -> _Event | None:
        """The next event that can be dealt with; None when none came in time."""
        while True:
            for index, event in enumerate(self._events):
                if self._is_due(event):
                    del self._events[index]
                    return event
            try:
                timeout = None if until is None else max(0.0, until - time.perf_counter())
                self._events.append(self._receive(timeout))
            except queue.Empty:
                return None

    def _is_due(self, event: _Event) -> bool:
        """Whether the first tokens are known of all requests that go on here: two wires have no order between them."""
        _, sender, message = event
        if sender != "decode" or message["kind"] != "step":
            return True
        names = (name for name, *_ in message["samples"])
        return all(self._live[name].num_output_tokens > 0 for name in names if name in self._live)

    def _deal_with(self, event: _Event) -> StepOutput | None:
        stamp, sender, message = event
        kind = message["kind"]
        if kind == "step":
            return self._account(stamp, sender, message)
        if kind == "transfer":
            self._transfers.append(transfer_from_wire(message["transfer"], self._clock(sender)))
        elif kind == "failed":
            return self._fail(stamp, message["id"], message["error"])
        else:
            raise AssertionError(f"the {sender} instance says {message}")
        return None

    def _account(self, stamp: float, sender: str, message: Message) -> StepOutput:
        transfers, self._transfers = self._transfers, []
        stats = stats_from_wire(message["stats"], self._known, transfers, self._clock(sender))
        for item in stats.scheduled:
            if item.request.admitted_time is None:
                item.request.admitted_time = max(item.request.arrival_time, stats.start)
                item.request.num_cached_tokens = item.start
        sampled = []
        for name, token_id, logprob, reason in message["samples"]:
            request = self._live.get(name)
            if request is None:  # aborted meanwhile
                if reason is not None:
                    self._known.pop(name, None)
                continue
            request.token_ids.append(token_id)
            request.logprobs.append(logprob)
            request.token_times.append(stamp)
            request.num_computed_tokens = request.num_tokens - 1
            if reason is not None:
                request.finish_reason, request.finish_time = reason, stamp
                del self._live[name], self._known[name]
            sampled.append(request)
        return StepOutput(tuple(sampled), stats)

    def _fail(self, stamp: float, name: str, error: str) -> StepOutput | None:
        self._known.pop(name, None)
        request = self._live.pop(name, None)
        if request is None:
            return None
        request.finish_reason, request.finish_time = "error", stamp
        return StepOutput((), None, ((request, error),))

    def _clock(self, role: str) -> Any:
        offset = self._offsets[role]
        return lambda seconds: seconds + offset

    def _check(self) -> None:
        if self._why_over is not None:
            raise WorkerError(self._why_over)

    def _over(self, lost: str) -> None:
        """An instance is gone: find out why, and how the other one is left."""
        why = f"the {lost} instance has closed its connection; make a new engine"
        if self._children is not None:
            why = self._children.what_ended(wait_s=_STATUS_S) or why
        other = next(role for role in ROLES if role != lost)
        self._end(f"{why}{self._how_is(other)}")

    def _how_is(self, role: str) -> str:
        """A sentence on an instance that is left alone, once it has let go of what it waited for."""
        deadline = time.perf_counter() + _STATUS_S
        said = ""
        while time.perf_counter() < deadline:
            self._wires[role].send("status")
            with contextlib.suppress(queue.Empty):
                while True:
                    _, sender, message = self._inbox.get(timeout=max(0.0, deadline - time.perf_counter()))
                    if sender == role and message["kind"] in ("status", "lost"):
                        break
                if message["kind"] == "lost":
                    return said
                num_blocks, num_held, _ = message["pool"]
                said = f"\nThe {role} instance is left with {num_held} of {num_blocks} KV blocks held."
                if num_held == 0:
                    return said
            time.sleep(0.02)
        return said

    def _end(self, why: str) -> None:
        self._why_over = why
        if self._children is not None:
            self._children.kill()
        for wire in self._wires.values():
            wire.send("close")
        raise WorkerError(why)


def _read(wires: Mapping[str, Wire], inbox: queue.SimpleQueue[_Event]) -> None:
    """Put every message into the inbox with the time at which it came, until both instances are gone."""
    names = {wire: role for role, wire in wires.items()}
    while names:
        for wire in ready(list(names), None):
            try:
                message = wire.receive()
            except EOFError:
                message = {"kind": "lost"}
            inbox.put((time.perf_counter(), names[wire], message))
            if message["kind"] == "lost":
                del names[wire]


def _start_children(
    source: ModelSource, model: ModelConfig, config: EngineConfig, max_model_len: int
) -> tuple[dict[str, Wire], Children]:
    if config.num_threads is None:
        share = torch.get_num_threads() // (len(ROLES) * config.tensor_parallel_size)
        config = dataclasses.replace(config, num_threads=max(1, share))
    fronts = {role: socket.socketpair() for role in ROLES}
    peers = dict(zip(ROLES, socket.socketpair(), strict=True))
    children = []
    for role in ROLES:
        front, peer = fronts[role][1].fileno(), peers[role].fileno()
        setup = InstanceSetup(role, source, model, config, max_model_len, front, peer)
        children.append((f"the {role} instance", setup, (front, peer)))
    try:
        started = Children(INSTANCE_MODULE, children)
    finally:
        for end in (*peers.values(), *(theirs for _, theirs in fronts.values())):
            end.close()
    return {role: Wire(Connection(mine.detach())) for role, (mine, _) in fronts.items()}, started


def _reach(address: str, who: str, whom: str) -> Wire:
    """A wire to an instance that listens at ``address``; it may not do so yet."""
    deadline = time.monotonic() + _MEET_S
    while True:
        try:
            wire = Wire(Client(parse_address(address), authkey=_secret()))
        except (OSError, EOFError) as error:
            if time.monotonic() > deadline:
                raise WorkerError(f"the {whom} instance cannot be reached at {address}: {error}; start it") from error
            time.sleep(0.1)
        except AuthenticationError as error:
            raise WorkerError(f"the {whom} instance at {address} has another {SECRET_VARIABLE}") from error
        else:
            wire.send("i_am", who=who)
            return wire


def _secret() -> bytes:
    secret = os.environ.get(SECRET_VARIABLE)
    if not secret:
        raise ConfigError(f"{SECRET_VARIABLE} is not set; give every process of the engine the same secret in it")
    return secret.encode()


def _accept(address: str, expected: Sequence[str]) -> dict[str, Wire]:
    """Listen until each of ``expected`` has connected."""
    found: dict[str, Wire] = {}
    with Listener(parse_address(address), authkey=_secret(), backlog=4) as listener:
        while set(expected) - set(found):
            try:
                wire = Wire(listener.accept())
                who = wire.receive()["who"]
            except (AuthenticationError, EOFError, OSError) as error:
                print(f"refused a connection: {error or type(error).__name__}", file=sys.stderr, flush=True)
                continue
            found[who] = wire
    return found


def _local_address(wire: Wire) -> str:
    """This host's address on a connection."""
    with socket.socket(fileno=os.dup(wire.connection.fileno())) as copy:
        host: str = copy.getsockname()[0]
    return host


def main(argv: Sequence[str] | None = None) -> int:
    """Run one instance until its front end closes; returns the exit status (0 done, 2 refused)."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.disaggregated",
        description="Runs the prefill or the decode instance of a disaggregated engine on this host. "
        f"{SECRET_VARIABLE} holds the secret that they and the front end share.",
    )
    parser.add_argument("--role", required=True, choices=ROLES)
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="where the front end, and for prefill the "
                        "decode instance, connect")  # fmt: skip
    parser.add_argument("--connect", metavar="HOST:PORT", help="decode: where the prefill instance listens")
    parser.add_argument("--model", default="smollm2-135m", help="name, Hugging Face folder or hub name (%(default)s)")
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE", help="engine options, the same for both")
    arguments = parser.parse_args(argv)
    if (arguments.connect is None) == (arguments.role == "decode"):
        parser.error("--connect is the decode instance's, and it needs one")
    try:
        config = EngineConfig.from_options(parse_options(arguments.options))
        source = resolve_model(arguments.model)
        model = ModelConfig.from_hf(source.hf_config, source.name)
        max_model_len = model.max_position if config.max_model_len is None else config.max_model_len
        setup = InstanceSetup(arguments.role, source, model, config, max_model_len)
        if arguments.role == "prefill":
            wires = _accept(arguments.listen, ("front", "decode"))
            peer = wires["decode"]
        else:
            peer = _reach(arguments.connect, "decode", "prefill")
            wires = _accept(arguments.listen, ("front",))
        serve_instance(setup, Links(wires["front"], peer, _local_address(peer)))
    except (ValueError, HandshakeError, WorkerError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # a channel's thread may still wait in C++, which an ordinary end does not survive
