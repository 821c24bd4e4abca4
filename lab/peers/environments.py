"""The peers' virtual environments, built where they are missing: ``.venv-peers/<name>``, needed by nothing else."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path

from lab.peers.catalogue import Peer

FOLDER = ".venv-peers"
_STAMP = "installed"


class PeerError(RuntimeError):
    """A peer that cannot be installed, started, or used; the message is what the report says of it."""


def python_of(peer: Peer, root: Path) -> Path:
    """The interpreter of a peer's environment, which is built first where it is missing or of other requirements.

    Raises:
        PeerError: pip failed; its last words are in the message, all of them in ``.venv-peers/<name>.log``.
    """
    if not peer.environment:
        return Path(sys.executable)
    folder = root / FOLDER / peer.environment
    python, stamp = folder / "bin" / "python", folder / _STAMP
    asked = hashlib.sha256(repr((peer.requirements, peer.unwanted, sys.version)).encode()).hexdigest()
    if stamp.exists() and stamp.read_text(encoding="utf-8") == asked:
        return python
    print(f"building {folder.relative_to(root)}: {' '.join(peer.requirements)} (minutes)", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    log = folder.with_suffix(".log")
    log.unlink(missing_ok=True)
    variables = os.environ | dict(peer.build_variables)
    _pip(python, log, variables, "install", "--disable-pip-version-check", *peer.requirements)
    if peer.unwanted:
        _pip(python, log, variables, "uninstall", "--yes", *peer.unwanted)
    stamp.write_text(asked, encoding="utf-8")
    return python


def preloaded(peer: Peer, root: Path) -> list[Path]:
    """The libraries of ``peer.preload`` that are there."""
    folder = root / FOLDER / peer.environment
    places = [(Path("/"), one[1:]) if one.startswith("/") else (folder, one) for one in peer.preload]
    return [path for place, pattern in places for path in sorted(place.glob(pattern))[:1]]


def _pip(python: Path, log: Path, variables: Mapping[str, str], *arguments: str) -> None:
    with log.open("a", encoding="utf-8") as output:
        status = subprocess.run(
            [python, "-m", "pip", *arguments], stdout=output, stderr=subprocess.STDOUT, env=variables, check=False
        ).returncode
    if status:
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
        errors = [line for line in lines if "error" in line.lower()] or lines[-1:]
        raise PeerError(f"pip {arguments[0]} failed: {' '.join(errors[-2:])[:300]} (see {log})")
