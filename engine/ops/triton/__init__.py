"""The op set as Triton kernels, for a GPU; on a CPU through Triton's interpreter (TRITON_INTERPRET=1), for tests."""

from engine.ops.triton.ops import TritonOps, unavailable_reason

__all__ = ["TritonOps", "unavailable_reason"]
