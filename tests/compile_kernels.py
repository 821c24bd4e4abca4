"""Compiles every Triton kernel for a GPU that need not be there, and prints a line for each.

A process of its own: where Triton's interpreter is on, kernels cannot be compiled.
"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.ops.triton import kernels

# The kernel, the types of its arguments in order ("*": the model's dtype), and its constants, as Llama 3.1 8B's.
KERNELS = {
    "linear": (
        "* * *fp32 * i32 i32 i32 i32 i32",
        {"HAS_BIAS": True, "ROWS": 64, "OUTPUTS": 64, "INPUTS": 32},
    ),
    "rms_norm": ("* * * * * i32 fp32", {"ADD": True, "WIDTH": 4096}),
    "silu_mul": ("* * i32", {"ELEMENTS": 1024}),
    "rope_and_store": (
        "* * * *fp32 *i64 *i64 * * * i32 i32 i32",
        {"NUM_HEADS": 32, "HEADS_PADDED": 32, "NUM_KV_HEADS": 8, "KV_HEADS_PADDED": 8, "HALF": 64, "HALF_PADDED": 64},
    ),
    "attention": (
        "* * * *i64 *i64 *i64 *i64 *i64 *fp32 *fp32 *fp32 fp32 i32 i32",
        {
            "BLOCK_SIZE": 16, "NUM_KV_HEADS": 8, "GROUP": 4, "GROUP_PADDED": 4, "ROWS": 64,
            "HEAD_DIM": 128, "DIM_PADDED": 128, "KEYS": 64, "SPLIT": 512,
        },
    ),
    "combine": (
        "*fp32 *fp32 *fp32 * i32",
        {"NUM_HEADS": 32, "HEADS_PADDED": 32, "HEAD_DIM": 128, "DIM_PADDED": 128},
    ),
    "choose": ("*fp32 *i64 *fp32 i32", {"GREEDY": True, "CHUNK": 2048}),
}  # fmt: skip


def main() -> None:
    """Raises what the compiler raises."""
    for name, (types, constants) in KERNELS.items():
        kernel = getattr(kernels, name)
        for dtype in ("bf16", "fp32"):
            given = [f"*{dtype}" if one == "*" else one for one in types.split()]
            signature = dict.fromkeys(kernel.arg_names, "constexpr") | dict(zip(kernel.arg_names, given, strict=False))
            compiled = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32))
            print(name, dtype, compiled.metadata.shared, "bytes of shared memory", flush=True)


if __name__ == "__main__":
    main()
