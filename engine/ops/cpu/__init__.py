"""The op set in C++ for CPUs: rows that do not depend on their batch, at the speed of the machine.

``csrc/`` holds the kernels; ``isa`` chooses the instruction set, ``build`` compiles for it on first use.
"""

from engine.extension import BuildError
from engine.ops.cpu.build import unavailable_reason
from engine.ops.cpu.isa import ISA_VARIABLE, ISAS, IsaError, choose_isa, cpu_flags, missing
from engine.ops.cpu.ops import CpuOps, PackedLinear, PagedKV

__all__ = [
    "ISAS",
    "ISA_VARIABLE",
    "BuildError",
    "CpuOps",
    "IsaError",
    "PackedLinear",
    "PagedKV",
    "choose_isa",
    "cpu_flags",
    "missing",
    "unavailable_reason",
]
