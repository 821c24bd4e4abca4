"""Which files and flags make the kernels for an instruction set; ``engine.extension`` builds and loads them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from engine.extension import BuildError, load_extension
from engine.ops.cpu.isa import Isa, choose_isa, cpu_flags

_SOURCES = Path(__file__).parent / "csrc"
_CFLAGS = (
    "-O3",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # what is fused is written so: main loops and tails give the same bits
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)


def load_kernels(isa: Isa) -> ModuleType:
    """The kernels for one instruction set, built first if this machine has not built them yet.

    Raises:
        BuildError: No compiler, or the build or its loading failed.
    """
    name = f"cpu_ops_{isa.name.replace('-', '_')}"
    return load_extension(name, _source_files(isa), _compile_flags(isa), f"the CPU kernels for {isa.name}")


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


def _source_files(isa: Isa) -> tuple[Path, ...]:
    return tuple(path for path in sorted(_SOURCES.glob("*.cpp")) if isa.matrix_unit or not path.stem.endswith("_amx"))
