"""A compact paged-attention engine whose outputs are a function of the request alone, bit for bit."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from engine.config import ConfigError, EngineConfig
from engine.request import RequestError, RequestOutput, SamplingParams, TokenOutput

# Threads that wait for the next op must not hold a core for milliseconds: with as many processes as cores that turns
# every barrier into a scheduling quantum. OpenMP reads this once, when torch loads it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

if TYPE_CHECKING:
    from engine.llm import LLM

__all__ = ["LLM", "ConfigError", "EngineConfig", "RequestError", "RequestOutput", "SamplingParams", "TokenOutput"]


def __getattr__(name: str) -> Any:
    # The scheduler and the KV bookkeeping are plain Python: importing them must not wait for torch.
    if name == "LLM":
        from engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'engine' has no attribute {name!r}")
