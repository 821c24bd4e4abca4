"""The two instances of a disaggregated engine (1P1D): each an ordinary engine that takes its requests from a wire.

A request's life: the front end asks the prefill instance, which computes the prompt, samples the first token and
delivers it at once, then *offers* the request to the decode instance and keeps the prompt's blocks. That one admits
offers first come first served, pulls the blocks that its prefix cache lacks into blocks of its own while its decode
steps go on, says that the transfer has ended, and decodes to the end. Separating the phases: Splitwise (Patel et al.,
ISCA 2024) and DistServe (Zhong et al., OSDI 2024).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import pickle
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from engine.config import ConfigError, EngineConfig, ModelConfig
from engine.core import ENGINE, EngineCore, StepOutput
from engine.execution.launch import start_engine
from engine.execution.runner import ModelRunner
from engine.execution.workers import end_with_the_pipe
from engine.kv.block_pool import BlockPool
from engine.kv.prefix_cache import HASH_SCHEME
from engine.kv.transfer import KVTransfers, Offer, PinningAdmission, ReceivedKV
from engine.models.hub import ModelSource
from engine.ops import kernels_version
from engine.request import Request, RequestError
from engine.wire import Message, Wire, ready, request_from_wire, request_to_wire, stats_to_wire

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")
_POLL_S = 0.001
_GONE = "the {} instance is gone; make a new engine"
_UNREACHED = (
    "the decode instance cannot reach the prefill instance's KV memory (its own messages say why); ask again, the "
    "connection is made anew"
)


@dataclass(frozen=True)
class Links:
    """Whom an instance talks to, and this host's address on which the other instance can reach it."""

    front: Wire
    peer: Wire
    host: str


class HandshakeError(RuntimeError):
    """Two instances that would not give the bits of one; the message names what differs."""


@dataclass(frozen=True)
class InstanceSetup:
    """What an instance is told.

    Attributes:
        front: File descriptor of the connection to the front end; None where it comes through the network.
        peer: The same for the other instance.
    """

    role: Role
    source: ModelSource
    model: ModelConfig
    config: EngineConfig
    max_model_len: int
    front: int | None = None
    peer: int | None = None


def describe(setup: InstanceSetup, core: EngineCore) -> dict[str, str]:
    """Everything that two instances must have in common for the KV of one to mean the same to the other."""
    model, config, runner = setup.model, setup.config, _runner_of(core)
    return {
        "model": setup.source.fingerprint,
        "dtype": str(runner.ops.dtype).removeprefix("torch."),
        "ops": runner.ops.name,
        "instruction set": runner.ops.isa,
        "kernels and cache layout": kernels_version(),
        "block_size": str(config.block_size),
        "layers": str(model.num_layers),
        "KV heads": str(model.num_kv_heads),
        "head_dim": str(model.head_dim),
        "tensor_parallel_size": str(config.tensor_parallel_size),
        "kv_channel": runner.channel_name,
        "hash scheme": HASH_SCHEME,
        "max_model_len": str(setup.max_model_len),
    }


def check_match(prefill: dict[str, str], decode: dict[str, str]) -> None:
    """Refuse two instances that differ.

    Raises:
        HandshakeError: Names each difference with both sides' values.
    """
    differ = [name for name in {**prefill, **decode} if prefill.get(name) != decode.get(name)]
    if differ:
        said = "; ".join(f"{name}: prefill has {prefill.get(name)}, decode has {decode.get(name)}" for name in differ)
        raise HandshakeError(f"the prefill and the decode instance do not match: {said}; start both alike")


def _runner_of(core: EngineCore) -> ModelRunner:
    assert isinstance(core.runner, ModelRunner)
    return core.runner


class _Instance:
    """What both instances have in common: a loop of messages and steps."""

    def __init__(self, setup: InstanceSetup, core: EngineCore, transfers: KVTransfers, links: Links) -> None:
        self._role, self._core, self._transfers = setup.role, core, transfers
        self._front, self._peer, self._host = links.front, links.peer, links.host
        self._max_model_len = setup.max_model_len
        self._peer_is_there = True
        self._ended = False

    def run(self) -> None:
        """Serve until the front end closes or is gone."""
        computed = False
        while not self._ended:
            computed = self.turn(0.0 if computed else self._patience())
        self._core.close()

    def turn(self, timeout: float | None) -> bool:
        """Take the messages that are there, or that come within ``timeout`` seconds, and step; False: nothing to."""
        self._listen(timeout)
        self._before_step()
        output = self._core.step()
        if output is not None:
            self._report(output)
        return output is not None

    def _listen(self, timeout: float | None) -> None:
        """Take every message that is there; wait for the first one up to ``timeout`` seconds, None for ever."""
        while not self._ended:
            wires = [self._front, self._peer] if self._peer_is_there else [self._front]
            found = ready(wires, timeout)
            if not found:
                return
            for wire in found:
                try:
                    message = wire.receive()
                except EOFError:
                    self._lost(wire)
                    continue
                self._act(message)
            timeout = 0.0

    def _lost(self, wire: Wire) -> None:
        if wire is self._front:
            self._ended = True
            return
        self._peer_is_there = False
        self._peer_lost()

    def _act(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "close":
            self._ended = True
        elif kind == "status":
            self._front.send("status", **self._status())
        elif kind == "forget":
            self._core.forget_prefixes()
            self._front.send("forgotten")
        else:
            getattr(self, f"_on_{kind}")(message)

    def _status(self) -> dict[str, Any]:
        pool = self._core.pools()[ENGINE]
        return {
            "pool": dataclasses.astuple(pool),
            "facts": dataclasses.asdict(self._core.facts()),
            "unfinished": self._core.has_unfinished,
            "in_flight": self._num_in_flight(),
        }

    def _send_step(self, output: StepOutput, reasons: dict[str, str | None]) -> None:
        assert output.stats is not None
        stats = dataclasses.replace(output.stats, instance=self._role)
        samples = [
            (one.request_id, one.token_ids[-1], one.logprobs[-1], reasons[one.request_id]) for one in output.sampled
        ]
        self._front.send("step", stats=stats_to_wire(stats), samples=samples)

    def _patience(self) -> float | None:
        """How long to wait for a message while nothing can be computed."""
        return None

    def _before_step(self) -> None:
        """What is looked after between messages and the step."""

    def _report(self, output: StepOutput) -> None:
        raise NotImplementedError

    def _peer_lost(self) -> None:
        raise NotImplementedError

    def _num_in_flight(self) -> int:
        raise NotImplementedError


class PrefillInstance(_Instance):
    """Computes prompts and their first tokens; keeps a prompt's blocks until its transfer is terminal."""

    def __init__(self, setup: InstanceSetup, core: EngineCore, transfers: KVTransfers, links: Links) -> None:
        super().__init__(setup, core, transfers, links)
        assert isinstance(core.scheduler.admission, PinningAdmission)
        self._admission = core.scheduler.admission
        self._asked: dict[str, Request] = {}
        self._pinned: dict[int, str] = {}
        self._ids = itertools.count(1)
        self._is_open = False

    def _on_add(self, message: Message) -> None:
        asked = request_from_wire(message["request"])
        here = Request(
            asked.request_id,
            asked.prompt_token_ids,
            dataclasses.replace(asked.params, max_tokens=1),
            asked.arrival_time,
        )
        here.seed = asked.seed
        try:
            self._core.add(here)
        except RequestError as error:
            self._front.send("failed", id=asked.request_id, error=f"the prefill instance: {error}")
            return
        self._asked[asked.request_id] = asked
        if asked.params.max_tokens > 1 and asked.num_prompt_tokens + 1 < self._max_model_len:  # room for a second token
            self._admission.hand_over(asked.request_id)

    def _on_abort(self, message: Message) -> None:
        request_id = message["id"]
        self._asked.pop(request_id, None)
        if self._core.abort(request_id) is not None:
            self._admission.forget(request_id)
            self._front.send("gone", id=request_id)
        else:  # it was offered, or has ended
            self._peer.send("abort", id=request_id)

    def _on_logits(self, message: Message) -> None:
        logits = self._core.logits(request_from_wire(message["request"]))
        self._front.send("logits", logits=logits.tolist())

    def _on_connect(self, message: Message) -> None:
        addresses = self._transfers.open(self._host)
        self._is_open = True
        self._serve(bool(self._pinned))
        self._peer.send("channel", addresses=[address.decode() for address in addresses])

    def _on_released(self, message: Message) -> None:
        request_id = self._pinned.pop(message["transfer"], None)
        if request_id is None:
            return  # late: the transfer ended otherwise
        self._admission.unpin(request_id)
        if not self._pinned:
            self._serve(False)

    def _report(self, output: StepOutput) -> None:
        reasons: dict[str, str | None] = {}
        offered = []
        for request in output.sampled:
            asked = self._asked.pop(request.request_id)
            pinned = self._admission.is_pinned(request.request_id)
            reasons[request.request_id] = None if pinned else request.finish_reason
            if pinned:
                offered.append((request, asked))
        self._send_step(output, reasons)
        for request, asked in offered:
            self._offer(request, asked)

    def _serve(self, active: bool) -> None:
        if self._is_open:
            self._transfers.serve(active)

    def _offer(self, request: Request, asked: Request) -> None:
        if not self._peer_is_there:
            self._give_up(request.request_id)
            return
        if not self._pinned:
            self._serve(True)
        transfer_id = next(self._ids)
        self._pinned[transfer_id] = request.request_id
        self._peer.send(
            "offer",
            transfer=transfer_id,
            request=request_to_wire(asked),
            token=request.token_ids[-1],
            logprob=request.logprobs[-1],
            blocks=request.block_table,
        )

    def _peer_lost(self) -> None:
        self._is_open = False
        self._transfers.close()
        for request_id in self._pinned.values():  # what became of their offers nobody can tell
            self._give_up(request_id)
        self._pinned.clear()

    def _give_up(self, request_id: str) -> None:
        """There is nobody to hand the request over to."""
        self._admission.unpin(request_id)
        self._front.send("failed", id=request_id, error=_GONE.format("decode"))

    def _num_in_flight(self) -> int:
        return len(self._pinned)


class DecodeInstance(_Instance):
    """Receives prompts' KV and decodes; a request holds a seat from its admission, and runs once its KV is here."""

    def __init__(self, setup: InstanceSetup, core: EngineCore, transfers: KVTransfers, links: Links) -> None:
        super().__init__(setup, core, transfers, links)
        assert isinstance(core.scheduler.source, ReceivedKV)
        self._source = core.scheduler.source
        self._timeout = setup.config.kv_transfer_timeout
        self._connecting = False
        self._connect()

    def _on_offer(self, message: Message) -> None:
        request = request_from_wire(message["request"])
        request.token_ids.append(message["token"])
        request.logprobs.append(message["logprob"])
        try:
            self._core.add(request)
        except RequestError as error:
            self._front.send("failed", id=request.request_id, error=f"the decode instance: {error}")
            self._peer.send("released", transfer=message["transfer"])
            return
        self._source.expect(request, Offer(message["transfer"], tuple(message["blocks"])))
        if not self._source.connected and not self._connecting:
            self._connect()

    def _on_abort(self, message: Message) -> None:
        request = self._core.abort(message["id"])
        if request is not None:
            self._source.withdraw(request)
        self._front.send("gone", id=message["id"])

    def _on_channel(self, message: Message) -> None:
        self._connecting = False
        addresses = [address.encode() for address in message["addresses"]]
        self._source.connected = self._transfers.connect(self._host, addresses)
        if not self._source.connected:
            self._fail_waiting(_UNREACHED)

    def _patience(self) -> float | None:
        return _POLL_S if self._source.in_flight else None

    def _before_step(self) -> None:
        in_flight = self._source.in_flight
        outcomes = self._transfers.outcomes(in_flight)
        for transfer_id, outcome in zip(in_flight, outcomes, strict=True):
            if outcome.state == "done":
                self._source.finish(transfer_id, True, outcome.num_bytes, outcome.seconds)
        if any(outcome.state == "failed" for outcome in outcomes):
            self._disconnect("the transfer of its KV failed; ask again, the connection is made anew")
        elif self._source.in_flight and self._source.longest_wait > self._timeout:
            self._disconnect(
                f"its KV did not arrive within kv_transfer_timeout={self._timeout} s; ask again, or raise it"
            )
        self._tell_ended()

    def _disconnect(self, why: str) -> None:
        """Cut the connection, so that nothing writes to the blocks any more; then they can go back."""
        self._transfers.close()
        self._source.connected = False
        for transfer_id in self._source.in_flight:
            failed = self._source.finish(transfer_id, False)
            if failed is not None:
                self._core.forget(failed.request_id)
                self._front.send("failed", id=failed.request_id, error=why)
        if self._peer_is_there:
            self._connect()

    def _connect(self) -> None:
        self._connecting = True
        self._peer.send("connect")

    def _fail_waiting(self, why: str) -> None:
        """End the requests whose transfers have not begun."""
        for request in self._source.waiting:
            self._core.abort(request.request_id)
            self._source.withdraw(request)
            self._front.send("failed", id=request.request_id, error=why)
        self._tell_ended()

    def _report(self, output: StepOutput) -> None:
        self._tell_ended()  # full hits are begun and ended by the step itself
        self._send_step(output, {one.request_id: one.finish_reason for one in output.sampled})

    def _tell_ended(self) -> None:
        for transfer in self._source.ended():
            self._peer.send("released", transfer=transfer.transfer_id)
            self._front.send("transfer", transfer=dataclasses.asdict(transfer))

    def _peer_lost(self) -> None:
        self._disconnect(_GONE.format("prefill"))
        self._fail_waiting(_GONE.format("prefill"))

    def _num_in_flight(self) -> int:
        return len(self._source.in_flight)


def serve_instance(setup: InstanceSetup, links: Links) -> None:
    """Load the model, agree with the other instance, and serve until the front end closes.

    Args:
        setup: What the instance is.
        links: To the front end and to the other instance.

    Raises:
        HandshakeError: The instances do not match; the front end has been told.
    """
    engine = functools.partial(start_engine, setup.source, setup.model, setup.config, setup.max_model_len)
    core = engine(make_admission=PinningAdmission) if setup.role == "prefill" else engine(make_source=_received)
    mine = describe(setup, core)
    links.peer.send("describe", of=mine)
    try:
        theirs = links.peer.receive()["of"]
    except EOFError as error:
        raise HandshakeError("the other instance is gone; its own messages say why") from error
    try:
        check_match(*((mine, theirs) if setup.role == "prefill" else (theirs, mine)))
    except HandshakeError as error:
        links.front.send("refused", error=str(error))
        raise
    links.front.send("hello", of=mine, num_kv_blocks=core.scheduler.pool.num_blocks, clock=time.perf_counter())
    instance = PrefillInstance if setup.role == "prefill" else DecodeInstance
    instance(setup, core, _runner_of(core).transfers, links).run()


def _received(pool: BlockPool, runner: ModelRunner) -> ReceivedKV:
    return ReceivedKV(pool, runner.transfers.pull, time.perf_counter)


def main() -> None:
    """What an instance's process on the front end's host does: its set-up comes on standard input."""
    setup: InstanceSetup = pickle.load(sys.stdin.buffer)
    end_with_the_pipe()
    assert setup.front is not None and setup.peer is not None
    try:
        serve_instance(setup, Links(Wire(Connection(setup.front)), Wire(Connection(setup.peer)), "127.0.0.1"))
    except (HandshakeError, ConfigError) as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(2)
    os._exit(0)  # there is nothing to tidy up, and torch takes seconds to


if __name__ == "__main__":
    main()
