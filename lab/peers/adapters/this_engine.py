"""This project's engine, behind the same adapter and in the same kind of process as the others."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from engine import LLM, SamplingParams
from lab.peers.adapter import Adapter, Settings, Token


class ThisEngine(Adapter):
    """``engine.LLM``, stepped by hand."""

    def start(self, settings: Settings) -> dict[str, str]:
        self._llm = LLM(
            settings.model,
            dtype=settings.dtype,
            device="cpu",
            num_threads=settings.threads,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
            num_kv_blocks=settings.kv_tokens // 16,
            **settings.options,
        )
        config = self._llm.config
        return {
            "versions": f"torch {torch.__version__}",
            "max_num_batched_tokens": str(config.max_num_batched_tokens),
            "prefix caching": "on" if config.enable_prefix_caching else "off",
            "decode steps": "eager" if config.enforce_eager is not False else "graphs",
        }

    def submit(self, request_id: str, prompt: Sequence[int], max_tokens: int, ignore_eos: bool) -> None:
        self._llm.add_request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos), request_id)

    def step(self) -> list[Token]:
        tokens, _, _ = self._llm.step()
        now = time.perf_counter()
        return [Token(one.request_id, one.token_id, now, one.finish_reason is not None) for one in tokens]

    def reset(self) -> None:
        self._llm.reset_prefix_cache()

    def stop(self) -> None:
        self._llm.close()
