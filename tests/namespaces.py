"""Two hosts on one machine: two network namespaces joined by a virtual cable."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Host:
    """One of the two hosts: how to run a command there, its address, and its network interface."""

    prefix: tuple[str, ...]
    address: str
    interface: str


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two namespaces with a cable between them; two loopback addresses where namespaces cannot be made."""
    names = [f"pal{os.getpid()}{side}" for side in "ab"]
    try:
        hosts = _connect(names)
    except (OSError, subprocess.CalledProcessError):
        hosts = (Host((), "127.0.0.1", "lo"), Host((), "127.0.0.2", "lo"))
    try:
        yield hosts
    finally:
        for name in names:
            if shutil.which("ip"):
                subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def _connect(names: list[str]) -> tuple[Host, Host]:
    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    for name in names:
        ip("netns", "add", name)
    ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
    addresses = ("10.99.0.1", "10.99.0.2")
    for name, address in zip(names, addresses, strict=True):
        ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
        ip("-n", name, "link", "set", name, "up")
        ip("-n", name, "link", "set", "lo", "up")
    first, second = (
        Host(("ip", "netns", "exec", name), address, name) for name, address in zip(names, addresses, strict=True)
    )
    return first, second
