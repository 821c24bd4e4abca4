"""Builds C++ extensions on first use and loads them: once per machine, compiler and version of the code.

The library lies in the user's cache, in a folder named after a hash of everything that went into it. Needs a C++20
compiler; ninja comes with the package.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from filelock import FileLock

from engine.models.hub import cache_root


class BuildError(RuntimeError):
    """An extension could not be built or loaded; the message says why and what to do."""


def compiler() -> str:
    """The C++ compiler that torch's extension builder uses: ``$CXX``, else c++."""
    return os.environ.get("CXX", "c++")


@functools.cache
def load_extension(name: str, sources: tuple[Path, ...], cflags: tuple[str, ...], what: str) -> ModuleType:
    """A Python extension, built first if this machine has not built it yet.

    Args:
        name: Its module name.
        sources: C++ files. A header beside any of them counts as part of the code.
        cflags: The compiler's flags.
        what: What messages call it.

    Raises:
        BuildError: No compiler, or the build or its loading failed.
    """
    folder = cache_root() / "extensions" / f"{name}-{_fingerprint(sources, cflags)}"
    library = folder / f"{name}.so"
    if not library.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not library.exists():
                _build(name, sources, cflags, what, library)
    spec = importlib.util.spec_from_file_location(name, library)
    if spec is None or spec.loader is None:
        raise BuildError(f"{library} is not a Python extension; remove the folder {folder} to build it again")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"{library} does not load: {error}; remove the folder {folder} to build it again") from error
    return module


def _fingerprint(sources: tuple[Path, ...], cflags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    headers = {header for source in sources for header in source.parent.glob("*.h")}
    for path in sorted((*headers, *sources)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for part in (torch.__version__, sys.version, compiler(), *cflags):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def _build(name: str, sources: tuple[Path, ...], cflags: tuple[str, ...], what: str, library: Path) -> None:
    if shutil.which(compiler()) is None:
        raise BuildError(f"no C++ compiler: {compiler()!r} is not on the PATH; install g++ (or set CXX)")
    from torch.utils import cpp_extension

    _say(f"building {what} with {compiler()}, once for this machine: about a minute ...")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=library.parent.parent) as scratch, _ninja_on_path():
        try:
            cpp_extension.load(
                name,
                [str(path) for path in sources],
                extra_cflags=list(cflags),
                build_directory=scratch,
                is_python_module=False,
            )
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            raise BuildError(
                f"{what} did not build with {compiler()}; the end of the log:\n{str(error)[-2000:]}"
            ) from error
        library.parent.mkdir(exist_ok=True)
        os.replace(Path(scratch) / f"{name}.so", library)
    _say(f"built in {time.perf_counter() - start:.0f} s: {library.parent}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _ninja_on_path() -> Iterator[None]:
    """Torch runs ``ninja`` by name; the package's copy is not on the PATH when the environment is not activated."""
    import ninja

    before = os.environ.get("PATH", "")
    os.environ["PATH"] = f"{before}{os.pathsep}{ninja.BIN_DIR}"
    try:
        yield
    finally:
        os.environ["PATH"] = before
