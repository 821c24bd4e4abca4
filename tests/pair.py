"""A prefill and a decode instance in one process, on fake models, with a channel whose transfers end when told to."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing import Pipe
from typing import Any

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.instance import DecodeInstance, InstanceSetup, Links, PrefillInstance
from engine.kv.block_pool import BlockPool
from engine.kv.transfer import PinningAdmission, PullOutcome, ReceivedKV
from engine.request import Request
from engine.scheduler.loop import Scheduler
from engine.wire import Wire, ready, request_to_wire
from tests.fakes import EOS, VOCAB, FakeRunner


class FakeChannel:
    """Copies slots from one fake model's KV to another's at the moment at which a transfer is told to end."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._source: FakeRunner | None = None
        self._target: FakeRunner | None = None
        self.in_flight: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._outcomes: dict[int, PullOutcome] = {}
        self.serving = False
        self.is_reachable = True
        self.num_blocks_moved = 0

    def between(self, source: FakeRunner, target: FakeRunner) -> None:
        self._source, self._target = source, target

    def open(self, host: str) -> list[bytes]:
        return [b"fake"]

    def connect(self, host: str, addresses: Sequence[bytes]) -> bool:
        assert list(addresses) == [b"fake"]
        return self.is_reachable

    def pull(self, transfer_id: int, source: Sequence[int], target: Sequence[int]) -> None:
        self.in_flight[transfer_id] = (tuple(source), tuple(target))

    def outcomes(self, transfer_ids: Sequence[int]) -> list[PullOutcome]:
        return [self._outcomes.get(one, PullOutcome("busy")) for one in transfer_ids]

    def serve(self, active: bool) -> None:
        self.serving = active

    def close(self) -> None:
        self.in_flight.clear()

    def complete(self, transfer_id: int) -> None:
        assert self._source is not None and self._target is not None
        size = self._block_size
        source, target = self.in_flight.pop(transfer_id)
        for theirs, mine in zip(source, target, strict=True):
            for offset in range(size):
                self._target.slots[mine * size + offset] = self._source.slots.get(theirs * size + offset, "unwritten")
        self.num_blocks_moved += len(source)
        self._outcomes[transfer_id] = PullOutcome("done", 10 * len(source), 0.0)

    def fail(self, transfer_id: int) -> None:
        del self.in_flight[transfer_id]
        self._outcomes[transfer_id] = PullOutcome("failed")


class Pair:
    """Both instances and a front end that only collects.

    Attributes:
        tokens: Of each request, in the order in which they came.
        reasons: Why each request ended.
        errors: Of the failed ones.
        steps: What each step's statistics were, as they travelled.
    """

    def __init__(self, max_model_len: int = 64, decode_options: dict[str, Any] | None = None, **options: Any) -> None:
        small = {"num_kv_blocks": 64, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32}
        common = small | options | {"check_invariants": True, "kv_transfer_timeout": 1000.0}
        configs = {"prefill": common, "decode": common | (decode_options or {})}
        self.channel = FakeChannel(common["block_size"])
        peers = dict(zip(("prefill", "decode"), map(Wire, Pipe()), strict=True))
        self.cores: dict[str, EngineCore] = {}
        self.fronts: dict[str, Wire] = {}
        instances = {}
        runners = {}
        for role, chosen in configs.items():
            config = EngineConfig.from_options(chosen)
            assert config.num_kv_blocks is not None
            runner = FakeRunner(config.num_kv_blocks, config.block_size)
            pool = BlockPool(config.num_kv_blocks, on_free=runner.poison)
            if role == "prefill":
                policy: dict[str, Any] = {"admission": PinningAdmission(pool)}
            else:
                policy = {"source": ReceivedKV(pool, self.channel.pull, lambda: 0.0)}
            scheduler = Scheduler.from_config(config, pool, max_model_len, (EOS,), **policy)
            self.cores[role] = EngineCore(scheduler, runner, VOCAB)
            mine, theirs = map(Wire, Pipe())
            self.fronts[role] = mine
            setup: Any = InstanceSetup(role, None, None, config, max_model_len)  # type: ignore[arg-type]
            kind: Any = PrefillInstance if role == "prefill" else DecodeInstance
            instances[role] = kind(setup, self.cores[role], self.channel, Links(theirs, peers[role], "host"))
            runners[role] = runner
        self.prefill, self.decode = instances["prefill"], instances["decode"]
        self.channel.between(runners["prefill"], runners["decode"])
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.gone: list[str] = []
        self.steps: list[dict[str, Any]] = []
        self.transfers: list[dict[str, Any]] = []

    def add(self, request: Request) -> None:
        self.tokens[request.request_id] = []
        self.fronts["prefill"].send("add", request=request_to_wire(request))

    def abort(self, request_id: str) -> None:
        self.fronts["prefill"].send("abort", id=request_id)

    def turn(self, role: str) -> bool:
        """One turn of an instance, and all that it reports."""
        computed: bool = getattr(self, role).turn(0.0)
        for wire in self.fronts.values():
            while ready([wire], 0):
                self._take(wire.receive())
        return computed

    def settle(self, turns: int = 2000) -> None:
        """Let everything go on, transfers too, until nothing moves any more."""
        still = 0
        for _ in range(turns):
            computed = [self.turn("prefill"), self.turn("decode")]
            for transfer_id in tuple(self.channel.in_flight):
                self.channel.complete(transfer_id)
            still = 0 if any(computed) or self.channel.in_flight else still + 1
            if still == 4:
                return
        raise AssertionError("the instances do not come to rest")

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind == "step":
            self.steps.append(message["stats"])
            for name, token, _, reason in message["samples"]:
                self.tokens[name].append(token)
                if reason is not None:
                    assert name not in self.reasons
                    self.reasons[name] = reason
        elif kind == "failed":
            self.errors[message["id"]] = message["error"]
        elif kind == "gone":
            self.gone.append(message["id"])
        elif kind == "transfer":
            self.transfers.append(message["transfer"])
