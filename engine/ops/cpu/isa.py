"""Which instruction set the kernels are built for: what exists, what this CPU has, what was asked for."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

ISA_VARIABLE = "PAGED_ATTENTION_LAB_ISA"
"""Environment variable that names the instruction set; unset means the best that the CPU has."""

_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_AVX512_FLAGS = ("avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq")


@dataclass(frozen=True)
class Isa:
    """An instruction set: its name, the CPU flags it needs (as /proc/cpuinfo spells them) and the compiler's flags."""

    name: str
    needs: tuple[str, ...]
    cflags: tuple[str, ...]
    matrix_unit: bool = False


class IsaError(ValueError):
    """An instruction set that does not exist, or that this CPU does not have."""


ISAS: Mapping[str, Isa] = {
    isa.name: isa
    for isa in (
        Isa("amx", (*_AVX512_FLAGS, "amx_tile", "amx_bf16"), (*_AVX512, "-DWITH_AMX"), matrix_unit=True),
        Isa("avx512_bf16", (*_AVX512_FLAGS, "avx512_bf16"), (*_AVX512, "-mavx512bf16")),
        Isa("avx512", _AVX512_FLAGS, _AVX512),
        Isa("avx2", ("avx2", "fma"), _AVX2),
        Isa("portable", (), ()),
        # The AVX-512 kernels with each vector in two halves, so that they can be tested without it; for tests.
        Isa("avx512_bf16-emulated", ("avx2", "fma"), (*_AVX2, "-DEMULATE_AVX512", "-DEMULATE_BF16_DOT")),
        Isa("avx512-emulated", ("avx2", "fma"), (*_AVX2, "-DEMULATE_AVX512")),
        # The tile instructions in plain C++, so that the AMX kernels can be tested anywhere; for tests, slow.
        Isa("amx-emulated", (), ("-DWITH_AMX", "-DEMULATE_AMX"), matrix_unit=True),
    )
}
_BEST_FIRST = ("amx", "avx512_bf16", "avx512", "avx2", "portable")


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The CPU's feature flags; empty where the kernel lists none (then only portable code runs)."""
    if platform.machine() not in ("x86_64", "AMD64") or not cpuinfo.exists():
        return frozenset()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def request_amx_permission() -> bool:
    """Ask the Linux kernel for the tile registers' state (arch_prctl ARCH_REQ_XCOMP_PERM); for this whole process."""
    sys_arch_prctl, arch_req_xcomp_perm, xfeature_xtiledata = 158, 0x1023, 18
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(sys_arch_prctl, arch_req_xcomp_perm, xfeature_xtiledata)) == 0


def missing(isa: Isa, flags: Collection[str]) -> str | None:
    """Why this CPU cannot run ``isa``, or None when it can."""
    absent = [flag for flag in isa.needs if flag not in flags]
    if absent:
        return f"this CPU lacks {', '.join(absent)}"
    if "amx_tile" in isa.needs and not request_amx_permission():
        return "the kernel refused the tile registers (arch_prctl ARCH_REQ_XCOMP_PERM)"
    return None


def choose_isa(
    name: str | None = None, environ: Mapping[str, str] = os.environ, flags: Collection[str] | None = None
) -> Isa:
    """The instruction set called ``name``, else the one that the environment names, else the best the CPU has.

    Raises:
        IsaError: The name is unknown, or the CPU cannot run it.
    """
    flags = cpu_flags() if flags is None else flags
    asked = name or environ.get(ISA_VARIABLE)
    if not asked:
        return next(ISAS[best] for best in _BEST_FIRST if missing(ISAS[best], flags) is None)
    if asked not in ISAS:
        raise IsaError(
            f"unknown instruction set {asked!r} (isa=... or {ISA_VARIABLE}); choose one of {', '.join(ISAS)}"
        )
    reason = missing(ISAS[asked], flags)
    if reason is not None:
        raise IsaError(f"instruction set {asked!r} cannot run here: {reason}; choose another or unset {ISA_VARIABLE}")
    return ISAS[asked]
