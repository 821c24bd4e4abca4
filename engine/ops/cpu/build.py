"""Builds the kernels on first use and loads them: once per machine, instruction set, compiler and version of the code.

The library lies in the user's cache, in a folder named after a hash of everything that went into it. Needs a C++20
compiler; ninja comes with the package.

OpenMP: the library is compiled with ``-fopenmp`` but not linked with it. Its OpenMP symbols resolve to the runtime
that libtorch brings, so the process has one runtime and one pool of threads, whatever the compiler would have added.
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

import ninja
import torch
from filelock import FileLock

from engine.models.hub import cache_root
from engine.ops.cpu.isa import Isa, choose_isa, cpu_flags

_SOURCES = Path(__file__).parent / "csrc"
_CFLAGS = (
    "-O3",
    "-fopenmp",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # what is fused is written so: main loops and tails give the same bits
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)


class BuildError(RuntimeError):
    """The kernels could not be built or loaded; the message says why and what to do."""


def compiler() -> str:
    """The C++ compiler that torch's extension builder uses: ``$CXX``, else c++."""
    return os.environ.get("CXX", "c++")


@functools.cache
def load_kernels(isa: Isa) -> ModuleType:
    """The kernels for one instruction set, built first if this machine has not built them yet.

    Raises:
        BuildError: No compiler, or the build or its loading failed.
    """
    name = f"cpu_ops_{isa.name.replace('-', '_')}"
    folder = cache_root() / "cpu-ops" / f"{isa.name}-{_fingerprint(isa)}"
    library = folder / f"{name}.so"
    if not library.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not library.exists():
                _build(isa, name, library)
    spec = importlib.util.spec_from_file_location(name, library)
    if spec is None or spec.loader is None:
        raise BuildError(f"{library} is not a Python extension; remove the folder {folder} to build it again")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"{library} does not load: {error}; remove the folder {folder} to build it again") from error
    return module


def unavailable_reason(isa: str | None = None) -> str | None:
    """Why the CPU ops cannot be used here, or None when they can; builds them if need be.

    Raises:
        IsaError: ``isa``, or the environment, names an instruction set that is unknown or not this CPU's.
    """
    try:
        load_kernels(choose_isa(isa))
    except BuildError as error:
        return str(error)
    return None


def _compile_flags(isa: Isa) -> tuple[str, ...]:
    emulated_on = choose_isa("avx2").cflags if isa.name == "amx-emulated" and {"avx2", "fma"} <= cpu_flags() else ()
    return (*_CFLAGS, *isa.cflags, *emulated_on)


def _source_files(isa: Isa) -> list[Path]:
    return [path for path in sorted(_SOURCES.glob("*.cpp")) if isa.matrix_unit or not path.stem.endswith("_amx")]


def _fingerprint(isa: Isa) -> str:
    digest = hashlib.sha256()
    for path in sorted((*_SOURCES.glob("*.h"), *_source_files(isa))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for part in (torch.__version__, sys.version, compiler(), *_compile_flags(isa)):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


def _build(isa: Isa, name: str, library: Path) -> None:
    if shutil.which(compiler()) is None:
        raise BuildError(f"no C++ compiler: {compiler()!r} is not on the PATH; install g++ (or set CXX)")
    from torch.utils import cpp_extension

    _say(f"building the CPU kernels for {isa.name} with {compiler()}, once for this machine: about a minute ...")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=library.parent.parent) as scratch, _ninja_on_path():
        try:
            cpp_extension.load(
                name,
                [str(path) for path in _source_files(isa)],
                extra_cflags=list(_compile_flags(isa)),
                build_directory=scratch,
                is_python_module=False,
            )
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            raise BuildError(
                f"the CPU kernels for {isa.name} did not build with {compiler()}; the end of its log:\n{str(error)[-2000:]}"
            ) from error
        library.parent.mkdir(exist_ok=True)
        os.replace(Path(scratch) / f"{name}.so", library)
    _say(f"built in {time.perf_counter() - start:.0f} s: {library.parent}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _ninja_on_path() -> Iterator[None]:
    """Torch runs ``ninja`` by name; the package's copy is not on the PATH when the environment is not activated."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = f"{before}{os.pathsep}{ninja.BIN_DIR}"
    try:
        yield
    finally:
        os.environ["PATH"] = before
