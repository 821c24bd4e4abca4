"""transformers' continuous batching, the engine of ``generate_batch``: its manager, streaming."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from lab.peers.adapter import Adapter, Settings, Token

_NO_EOS = -1
_PATIENCE_S = 0.02
"""How long ``step`` waits for a token: a request that becomes due meanwhile is late by no more than this."""


class TransformersBatching(Adapter):
    """``ContinuousBatchingManager``, whose thread generates while this one waits for tokens."""

    def start(self, settings: Settings) -> dict[str, str]:
        torch.set_num_threads(settings.threads)
        dtype = getattr(torch, settings.dtype)
        self._model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype).eval()
        self._config = ContinuousBatchingConfig(
            num_blocks=settings.kv_tokens // int(settings.options.get("page_size", 256)),
            max_requests_per_batch=settings.max_num_seqs,
            **{"max_batch_tokens": settings.max_model_len, **settings.options},
        )
        self._stops = list(settings.stop_token_ids) or _NO_EOS
        self._counts: dict[str, int] = {}
        self._open()
        return {
            "versions": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "attention": str(self._model.config._attn_implementation),
            "max_batch_tokens": str(self._config.max_batch_tokens),
        }

    def _open(self) -> None:
        generation = GenerationConfig(do_sample=False, eos_token_id=self._stops, pad_token_id=0)
        self._manager = self._model.init_continuous_batching(generation, self._config)
        self._manager.start()

    def submit(self, request_id: str, prompt: Sequence[int], max_tokens: int, ignore_eos: bool) -> None:
        self._counts[request_id] = 0
        stop = _NO_EOS if ignore_eos else self._stops
        accepted = self._manager.add_request(
            list(prompt), request_id=request_id, max_new_tokens=max_tokens, streaming=True, eos_token_id=stop
        )
        if accepted is None:
            raise RuntimeError(f"the manager refused request {request_id}")

    def step(self) -> list[Token]:
        output = self._manager.get_result(timeout=_PATIENCE_S)
        if output is None:
            if not self._manager.is_running():
                raise RuntimeError(f"the generation thread ended: {self._manager.background_thread_status.fatal_error}")
            return []
        if output.error is not None:
            raise RuntimeError(f"request {output.request_id}: {output.error}")
        now, name = time.perf_counter(), output.request_id
        new = output.generated_tokens[self._counts[name] :]
        self._counts[name] += len(new)
        ended = output.is_finished()
        return [Token(name, token_id, now, ended and index == len(new) - 1) for index, token_id in enumerate(new)]

    def reset(self) -> None:
        self.stop()
        self._open()

    def stop(self) -> None:
        self._manager.stop(block=True)
