"""vLLM on the CPU: ``LLMEngine`` stepped in this process, so that no other process takes a core from its threads."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import vllm
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind

from lab.peers.adapter import Adapter, Settings, Token


class VllmEngine(Adapter):
    """vLLM's V1 engine with its defaults; threads and KV space come from the environment (see the catalogue)."""

    def start(self, settings: Settings) -> dict[str, str]:
        arguments = EngineArgs(
            model=settings.model,
            dtype=settings.dtype,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=settings.max_model_len,
            disable_log_stats=True,
            **settings.options,
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        config = self._engine.vllm_config
        return {
            "versions": f"vllm {vllm.__version__}, torch {torch.__version__}",
            "max_num_batched_tokens": str(config.scheduler_config.max_num_batched_tokens),
            "block_size": str(config.cache_config.block_size),
            "prefix caching": "on" if config.cache_config.enable_prefix_caching else "off",
            "compilation": str(getattr(config.compilation_config, "mode", "unknown")),
        }

    def submit(self, request_id: str, prompt: Sequence[int], max_tokens: int, ignore_eos: bool) -> None:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(request_id, TokensPrompt(prompt_token_ids=list(prompt)), params)

    def step(self) -> list[Token]:
        outputs = self._engine.step()
        now = time.perf_counter()
        return [
            Token(output.request_id, token_id, now, output.finished and index == len(output.outputs[0].token_ids) - 1)
            for output in outputs
            for index, token_id in enumerate(output.outputs[0].token_ids)
        ]

    def reset(self) -> None:
        self._engine.reset_prefix_cache()
