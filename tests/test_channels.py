"""One rank's end of a channel over NIXL, on an agent that does what the test says: its thread hears of everything."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.execution import channels
from engine.execution.channels import NixlChannel
from engine.execution.transfers import Transfers
from engine.kv.transfer import KVChannel

SOON_S = 5.0


class Agent:
    """NIXL's agent: a transfer is done when it is first looked at, and looking takes a while."""

    def __init__(self, name: str, config: Any) -> None:
        self.looking, self.looked_for_notifs = threading.Event(), threading.Event()
        self.is_reachable = True

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        if not self.is_reachable:
            raise OSError("connection refused")
        return b"peer"

    def transfer(self, handle: Any) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        self.looking.set()
        time.sleep(0.2)
        return "DONE"

    def get_new_notifs(self) -> None:
        self.looked_for_notifs.set()

    def __getattr__(self, name: str) -> Any:  # what has no say in the matter
        return lambda *arguments: None


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    one = Agent("", None)
    api = SimpleNamespace(nixl_agent=lambda *_: one, nixl_agent_config=lambda **_: None)
    monkeypatch.setattr(channels, "_nixl", lambda: api)
    return one


def connected() -> NixlChannel:
    channel = NixlChannel([torch.zeros(4, 2)])
    channel.connect(channel.address())
    return channel


def closes(channel: NixlChannel) -> bool:
    closing = threading.Thread(target=channel.close, daemon=True)
    closing.start()
    closing.join(SOON_S)
    return not closing.is_alive()


def while_the_thread_looks(agent: Agent, channel: NixlChannel) -> None:
    channel.pull(1, [0], [1])
    assert agent.looking.wait(SOON_S)


def test_closing_while_the_last_transfer_ends_is_noticed(agent: Agent) -> None:
    channel = connected()
    while_the_thread_looks(agent, channel)
    assert closes(channel), "the thread sleeps on what it was told"


def test_serving_while_the_last_transfer_ends_is_noticed(agent: Agent) -> None:
    channel = connected()
    while_the_thread_looks(agent, channel)
    channel.serve(True)
    assert agent.looked_for_notifs.wait(SOON_S), "the other end would wait for ever"
    channel.serve(False)
    assert closes(channel)


def test_pulling_while_the_last_transfer_ends_is_noticed(agent: Agent) -> None:
    channel = connected()
    while_the_thread_looks(agent, channel)
    channel.pull(2, [0], [1])
    deadline = time.monotonic() + SOON_S
    while channel.outcomes([2])[0].state == "busy":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert channel.outcomes([2])[0].state == "done" and closes(channel)


def test_one_rank_that_cannot_connect_leaves_no_channel_on_any(agent: Agent, capfd: pytest.CaptureFixture[str]) -> None:
    made: list[NixlChannel] = []

    def make(host: str) -> KVChannel:
        made.append(NixlChannel([torch.zeros(4, 2)]))
        return made[-1]

    group = SimpleNamespace(rank=0, size=1, gather=lambda columns, widths: columns)
    transfers: Any = Transfers(make, group, lambda message: transfers.perform(message).reshape(1, -1))  # type: ignore[arg-type]
    (address,) = transfers.open("host")
    agent.is_reachable = False
    assert transfers.connect("host", [address]) is False
    assert "rank 0 cannot reach the other instance: NIXL: OSError: connection refused" in capfd.readouterr().err
    assert len(made) == 2 and not any(one._thread.is_alive() for one in made)
    agent.is_reachable = True
    assert transfers.connect("host", [address]) is True
    transfers.pull(1, [0], [1])
    assert agent.looking.wait(SOON_S)
    transfers.close()
    assert np.all([not one._thread.is_alive() for one in made])
