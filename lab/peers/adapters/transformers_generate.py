"""transformers ``generate``: static batches, padded on the left, each run to the end of its longest answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from lab.peers.adapter import Adapter, Settings, Token


class _Watch(StoppingCriteria):
    """Sees every token as ``generate`` appends it, and ends each row at its own limit or stop token."""

    def __init__(self, limits: Sequence[int], stops: Sequence[frozenset[int]], prompt_length: int) -> None:
        self._limits, self._stops, self._prompt_length = limits, stops, prompt_length
        self.rows: list[list[tuple[int, float]]] = [[] for _ in limits]
        self._ended = [False] * len(limits)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        now = time.perf_counter()
        for row, token_id in enumerate(input_ids[:, -1].tolist()):
            if self._ended[row]:
                continue
            self.rows[row].append((token_id, now))
            self._ended[row] = len(self.rows[row]) == self._limits[row] or token_id in self._stops[row]
        return torch.tensor(self._ended)


class TransformersGenerate(Adapter):
    """The model's own attention (``sdpa``), eager, as ``from_pretrained`` sets it up."""

    def start(self, settings: Settings) -> dict[str, str]:
        torch.set_num_threads(settings.threads)
        dtype = getattr(torch, settings.dtype)
        self._model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype).eval()
        self._seats, self._stops = settings.max_num_seqs, frozenset(settings.stop_token_ids)
        self._waiting: list[tuple[str, Sequence[int], int, bool]] = []
        return {
            "versions": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "attention": str(self._model.config._attn_implementation),
        }

    def submit(self, request_id: str, prompt: Sequence[int], max_tokens: int, ignore_eos: bool) -> None:
        self._waiting.append((request_id, prompt, max_tokens, ignore_eos))

    @torch.inference_mode()
    def step(self) -> list[Token]:
        batch, self._waiting = self._waiting[: self._seats], self._waiting[self._seats :]
        longest = max(len(prompt) for _, prompt, _, _ in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, (_, prompt, _, _) in enumerate(batch):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        stops = [frozenset() if ignore_eos else self._stops for _, _, _, ignore_eos in batch]
        watch = _Watch([limit for _, _, limit, _ in batch], stops, longest)
        self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max(limit for _, _, limit, _ in batch),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([watch]),
        )
        return [
            Token(request_id, token_id, when, index == len(answer) - 1)
            for (request_id, _, _, _), answer in zip(batch, watch.rows, strict=True)
            for index, (token_id, when) in enumerate(answer)
        ]

    def reset(self) -> None:
        """Nothing outlives a batch."""
