"""Stage 4: prefill and decode in two instances. Laws and lives of requests on the fake model, in one process."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.config import ConfigError, EngineConfig
from engine.instance import HandshakeError, check_match
from engine.request import Request, SamplingParams
from tests.fakes import EOS, VOCAB, expected_tokens
from tests.pair import Pair
from tests.schedules import machine

MAX_MODEL_LEN = 40


def request(name: str, num_prompt: int, max_tokens: int, seed: str | None = None, **params: Any) -> Request:
    prompt = tuple(random.Random(seed or name).choices(range(1, VOCAB), k=num_prompt))
    return Request(name, prompt, SamplingParams(max_tokens, **({"ignore_eos": True} | params)), 0.0)


def expected(one: Request, max_model_len: int = 64) -> list[int]:
    return expected_tokens(one.prompt_token_ids, one.params, max_model_len)


def all_is_free(pair: Pair) -> bool:
    pools = [core.scheduler.pool for core in pair.cores.values()]
    return all(pool.num_held == 0 and pool.num_promised == 0 for pool in pools)


class Pairs(RuleBasedStateMachine):
    """Random arrivals, aborts, turns of either instance, transfers that complete or fail at any moment."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        options = {
            "num_kv_blocks": data.draw(st.integers(10, 30), label="blocks"),
            "block_size": data.draw(st.sampled_from([1, 2, 4, 16]), label="block_size"),
            "max_num_seqs": data.draw(st.integers(1, 4), label="seats"),
            "max_num_batched_tokens": data.draw(st.integers(6, 48), label="budget"),
            "enable_chunked_prefill": data.draw(st.booleans(), label="chunked"),
            "enable_prefix_caching": data.draw(st.booleans(), label="cached"),
        }
        self.blocks = {"prefill": options["num_kv_blocks"], "decode": data.draw(st.integers(10, 30), label="decode's")}
        self.pair = Pair(MAX_MODEL_LEN, {"num_kv_blocks": self.blocks["decode"]}, **options)
        self.block_size = options["block_size"]
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.failing: set[str] = set()
        self.num_moved = 0

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=MAX_MODEL_LEN + 2),
        max_tokens=st.integers(1, 8),
        ignore_eos=st.booleans(),
        stops=st.lists(st.integers(0, VOCAB - 1), max_size=4),
    )
    def add(self, prompt: list[int], max_tokens: int, ignore_eos: bool, stops: list[int]) -> None:
        params = SamplingParams(max_tokens, ignore_eos=ignore_eos, stop_token_ids=tuple(stops))
        one = Request(str(len(self.requests)), tuple(prompt), params, 0.0)
        self.requests[one.request_id] = one
        self.pair.add(one)

    @rule(role=st.sampled_from(["prefill", "decode"]), turns=st.integers(1, 4))
    def turn(self, role: str, turns: int) -> None:
        for _ in range(turns):
            self.pair.turn(role)

    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        if self.pair.channel.in_flight:
            self.pair.channel.complete(data.draw(st.sampled_from(sorted(self.pair.channel.in_flight)), label="done"))

    @rule(data=st.data(), lucky=st.integers(0, 3))
    def fail(self, data: st.DataObject, lucky: int) -> None:
        if lucky == 0 and self.pair.channel.in_flight:  # and with it, every one that is in flight
            self.failing |= {one.request_id for one in self.pair.decode._source.held()}
            self.pair.channel.fail(data.draw(st.sampled_from(sorted(self.pair.channel.in_flight)), label="failed"))

    @rule(reachable=st.booleans())
    def reach(self, reachable: bool) -> None:
        """Whether the next connection, at the start or after a failure, can be made."""
        self.pair.channel.is_reachable = reachable

    @rule(transfer_id=st.integers(0, 20))
    def confirm_late(self, transfer_id: int) -> None:
        """A confirmation of a transfer that is not in flight changes nothing."""
        source = self.pair.decode._source
        if transfer_id not in source.in_flight:
            assert source.finish(transfer_id, True, 5) is None

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = sorted(set(self.requests) - set(self.pair.reasons) - set(self.pair.errors) - self.aborted)
        if live:
            name = data.draw(st.sampled_from(live), label="abort")
            self.aborted.add(name)
            self.pair.abort(name)

    @invariant()
    def conserved(self) -> None:
        if hasattr(self, "pair"):
            for core in self.pair.cores.values():
                core.scheduler.check()
            for name, tokens in self.pair.tokens.items():
                want = expected(self.requests[name], MAX_MODEL_LEN) if tokens else []
                assert tokens == want[: len(tokens)]

    def teardown(self) -> None:
        if not hasattr(self, "pair"):
            return
        self.pair.settle()
        assert all_is_free(self.pair), "blocks are held at rest"
        assert not any(core.has_unfinished for core in self.pair.cores.values())
        assert not self.pair.channel.serving or not self.pair.prefill._pinned
        for name, one in self.requests.items():
            if name in self.aborted or name in self.pair.errors:
                continue
            assert name in self.pair.reasons, f"request {name} never ended"
            assert self.pair.tokens[name] == expected(one, MAX_MODEL_LEN)
        for name, error in self.pair.errors.items():
            known = ("leaves no room", "can need", "cannot reach")
            assert name in self.failing or any(words in error for words in known), error
        moved = sum(one["num_blocks"] for one in self.pair.transfers if one["completed"])
        assert moved == self.pair.channel.num_blocks_moved
        assert sum(one["num_bytes"] for one in self.pair.transfers) == 10 * moved


TestPairs = machine(Pairs, examples=1000)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 11, 12, 13, 30])
@pytest.mark.parametrize("max_tokens", [1, 2, 6])
def test_any_length_gives_the_tokens_of_one_engine(num_prompt: int, max_tokens: int, caching: bool) -> None:
    pair, one = Pair(enable_prefix_caching=caching), request("r", num_prompt, max_tokens)
    pair.add(one)
    pair.settle()
    assert pair.tokens["r"] == expected(one) and pair.reasons["r"] == "length" and all_is_free(pair)
    assert pair.channel.num_blocks_moved == (0 if max_tokens == 1 else -(-num_prompt // 4))


def test_an_end_of_sequence_as_the_first_token_moves_nothing() -> None:
    one = next(r for i in range(1000) if expected(r := request(f"r{i}", 9, 5, ignore_eos=False)) == [EOS])
    pair = Pair()
    pair.add(one)
    pair.settle()
    assert pair.tokens[one.request_id] == [EOS] and pair.reasons[one.request_id] == "stop"
    assert pair.transfers == [] and all_is_free(pair)


def test_the_same_prompt_three_times_travels_once_and_an_aligned_one_is_a_full_hit() -> None:
    for num_prompt, again in ((12, 0), (13, 1)):  # of 13 tokens the tail block travels every time
        pair = Pair()
        for i in range(3):
            pair.add(request(f"r{i}", num_prompt, 4, seed="same"))
            pair.settle()
        assert [one["num_blocks"] for one in pair.transfers] == [3 + again, again, again]
        assert [one["num_blocks_hit"] for one in pair.transfers] == [0, 3, 3]
        assert all(one["completed"] for one in pair.transfers)
        assert len({tuple(tokens) for tokens in pair.tokens.values()}) == 1
        assert pair.tokens["r0"] == expected(request("r0", num_prompt, 4, seed="same")) and all_is_free(pair)


def test_the_first_token_is_delivered_before_anything_travels_and_decodes_go_on_meanwhile() -> None:
    pair = Pair()
    pair.add(request("first", 9, 20))
    pair.turn("prefill")
    assert len(pair.tokens["first"]) == 1 and not pair.channel.in_flight
    pair.turn("decode")
    pair.turn("prefill")  # opens the channel
    pair.turn("decode")
    pair.channel.complete(1)
    pair.turn("decode")
    pair.add(request("second", 9, 20))
    pair.turn("prefill")
    for _ in range(5):  # the second one's KV is under way
        pair.turn("decode")
    assert len(pair.tokens["first"]) == 7 and len(pair.tokens["second"]) == 1
    assert list(pair.channel.in_flight) == [2]
    pair.settle()
    assert all_is_free(pair)


def test_a_transfer_that_lasts_does_not_block_later_offers() -> None:
    pair = Pair(max_num_seqs=3)
    pair.prefill._on_connect({})
    for name in ("slow", "quick"):
        pair.add(request(name, 9, 5))
    for _ in range(3):
        pair.turn("prefill")
        pair.turn("decode")
    assert list(pair.channel.in_flight) == [1, 2]
    pair.channel.complete(2)
    for _ in range(6):
        pair.turn("decode")
    assert pair.reasons == {"quick": "length"} and len(pair.tokens["slow"]) == 1
    pair.settle()
    assert pair.tokens["slow"] == expected(request("slow", 9, 5)) and all_is_free(pair)


def in_flight(**options: Any) -> tuple[Pair, Request]:
    """A pair in which one request's KV is under way."""
    pair, one = Pair(**options), request("r", 9, 5)
    pair.add(one)
    for _ in range(3):
        pair.turn("prefill")
        pair.turn("decode")
    assert pair.channel.in_flight
    return pair, one


def test_blocks_of_both_sides_wait_for_the_transfer_of_an_aborted_request() -> None:
    pair, _ = in_flight()
    pair.abort("r")
    pair.turn("prefill")
    pair.turn("decode")
    held = [core.scheduler.pool.num_held for core in pair.cores.values()]
    assert held == [3, 3] and pair.gone == ["r"], "the late write must find the blocks as they were"
    pair.channel.complete(1)
    pair.turn("decode")
    pair.turn("prefill")
    assert all_is_free(pair) and not pair.errors


def test_a_transfer_that_never_ends_fails_its_request_and_the_next_one_is_right() -> None:
    pair, _ = in_flight()
    pair.decode._timeout = -1.0  # it is over at once
    pair.turn("decode")
    assert not pair.channel.in_flight, "the connection is cut before blocks go back"
    assert "did not arrive within" in pair.errors["r"]
    pair.decode._timeout = 1000.0
    pair.turn("prefill")
    assert all_is_free(pair)
    again = request("again", 9, 5)
    pair.add(again)
    pair.settle()
    assert pair.tokens["again"] == expected(again) and all_is_free(pair)


def test_an_instance_that_cannot_be_reached_fails_what_waits_and_is_tried_anew() -> None:
    pair = Pair()
    pair.channel.is_reachable = False
    for name in ("first", "second"):
        pair.add(request(name, 9, 5))
        pair.settle()
        assert "cannot reach the prefill instance's KV memory" in pair.errors[name] and all_is_free(pair)
        assert len(pair.tokens[name]) == 1
    pair.channel.is_reachable = True
    third = request("third", 9, 5)
    pair.add(third)
    pair.settle()
    assert pair.tokens["third"] == expected(third) and all_is_free(pair) and len(pair.errors) == 2


def test_what_the_cache_did_while_nothing_could_be_computed_goes_to_the_next_step() -> None:
    pair, _ = in_flight(decode_options={"num_kv_blocks": 5})
    pair.add(request("waits", 9, 5))  # for blocks: it is looked up in every turn
    pair.turn("prefill")
    for _ in range(50):
        assert not pair.turn("decode")
    pair.settle()
    steps = [stats for stats in pair.steps if stats["instance"] == "decode"]
    assert all(stats["cache"][1] <= stats["schedule_s"] for stats in steps), "the cache's time is part of its step's"
    events = [event for stats in steps for event in stats["cache"][0]]
    assert [event[1] for event in events if event[0] == "admit"] == ["r", "waits"]


def test_a_request_that_one_side_refuses_is_refused_by_both() -> None:
    pair = Pair(decode_options={"num_kv_blocks": 3})
    pair.add(request("fits", 8, 4))
    pair.add(request("too long to decode", 8, 9))
    pair.settle()
    assert pair.reasons == {"fits": "length"}
    assert "the decode instance: " in pair.errors["too long to decode"] and all_is_free(pair)
    pair = Pair(num_kv_blocks=3, decode_options={"num_kv_blocks": 64})
    pair.add(request("too long to prefill", 13, 2))
    pair.settle()
    assert "the prefill instance: " in pair.errors["too long to prefill"] and all_is_free(pair)


@pytest.mark.parametrize("lost", ["prefill", "decode"])
def test_a_lost_peer_frees_every_block(lost: str) -> None:
    pair, _ = in_flight()
    left = "decode" if lost == "prefill" else "prefill"
    pair.add(request("waits", 9, 5))
    pair.turn("prefill")
    getattr(pair, lost)._peer.connection.close()
    pair.turn(left)
    pair.add(request("after", 9, 5))
    for _ in range(3):
        pair.turn(left)
    pool = pair.cores[left].scheduler.pool
    assert pool.num_held == 0 and not pair.cores[left].has_unfinished
    # Nobody waits for ever, whoever is left: what was under way, what was on offer, and what comes later.
    assert pair.errors.keys() == ({"r", "waits"} if left == "decode" else {"r", "waits", "after"})
    assert all(f"the {lost} instance is gone" in error for error in pair.errors.values())


def test_instances_that_differ_name_both_sides_values() -> None:
    alike = {"model": "m", "block_size": "16"}
    check_match(alike, dict(alike))
    with pytest.raises(HandshakeError, match=r"block_size: prefill has 16, decode has 32; start both alike"):
        check_match(alike, alike | {"block_size": "32"})
    with pytest.raises(HandshakeError, match="hash scheme: prefill has None, decode has x"):
        check_match(alike, alike | {"hash scheme": "x"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disaggregated": 1}, "disaggregated=1 is not a bool"),
        ({"disaggregated": True, "batching": "static"}, "batching='static' cannot be disaggregated"),
        ({"kv_channel": "rdma"}, "kv_channel='rdma' is unknown; choose one of auto, nixl, distributed"),
        ({"kv_transfer_timeout": 0}, "kv_transfer_timeout=0 is not a time"),
        ({"prefill_address": "a:1", "decode_address": "b:2"}, "needs disaggregated=True"),
        ({"disaggregated": True, "prefill_address": "a:1"}, "without the other instance's address"),
        ({"disaggregated": True, "prefill_address": "a", "decode_address": "b:2"}, "'a' is not host:port"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options(options)
