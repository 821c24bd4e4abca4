"""llama.cpp through llama-cpp-python's low-level interface, with the slots of llama.cpp's own server around it.

llama-cpp-python itself runs one sequence at a time. As ``llama-server`` does, a step takes one token of every slot that
decodes and fills what is left of ``n_batch`` with prompts; a new request takes the idle slot whose last contents begin
most like it, and keeps that part of its KV.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import llama_cpp
import numpy as np

from lab.peers.adapter import Adapter, Settings, Token


@dataclass
class _Slot:
    """A sequence of the context: what its KV holds, and the request that it serves, if any."""

    sequence: int
    known: list[int] = field(default_factory=list)
    request_id: str | None = None
    tokens: list[int] = field(default_factory=list)
    num_prompt: int = 0
    max_tokens: int = 0
    ignore_eos: bool = False

    @property
    def missing(self) -> list[int]:
        return self.tokens[len(self.known) :]

    def shared_with(self, prompt: Sequence[int]) -> int:
        """Tokens of the prompt, its last one apart, that the KV holds already."""
        limit = min(len(self.known), len(prompt) - 1)
        return next((i for i in range(limit) if self.known[i] != prompt[i]), limit)


class LlamaCpp(Adapter):
    """The C interface's defaults, but for threads, slots and context."""

    def start(self, settings: Settings) -> dict[str, str]:
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(settings.gguf.encode(), model_params)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {settings.gguf}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = settings.max_num_seqs * settings.max_model_len
        params.n_seq_max = settings.max_num_seqs
        params.n_threads = params.n_threads_batch = settings.threads
        for name, value in settings.options.items():
            setattr(params, name, value)
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp makes no context; see its log")
        self._n_batch = int(llama_cpp.llama_n_batch(self._context))
        self._batch = llama_cpp.llama_batch_init(self._n_batch, 0, 1)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._slots = [_Slot(index) for index in range(settings.max_num_seqs)]
        self._waiting: deque[tuple[str, Sequence[int], int, bool]] = deque()
        self._stops = frozenset(settings.stop_token_ids)
        system = llama_cpp.llama_print_system_info().decode()
        return {
            "versions": f"llama-cpp-python {llama_cpp.__version__}",
            "n_batch": str(self._n_batch),
            "n_ubatch": str(llama_cpp.llama_n_ubatch(self._context)),
            "KV": "float16",
            "built with": " ".join(part.strip() for part in system.split("|") if part.strip().endswith("= 1")),
        }

    def submit(self, request_id: str, prompt: Sequence[int], max_tokens: int, ignore_eos: bool) -> None:
        self._waiting.append((request_id, prompt, max_tokens, ignore_eos))

    def step(self) -> list[Token]:
        self._seat()
        running = [slot for slot in self._slots if slot.request_id is not None]
        # Decodes first: one token each; prompts take what is left, in order of arrival.
        running.sort(key=lambda slot: len(slot.missing) > 1)
        self._batch.n_tokens = 0
        sampling: list[tuple[_Slot, int]] = []
        for slot in running:
            share = slot.missing[: self._n_batch - self._batch.n_tokens]
            for offset, token_id in enumerate(share):
                catches_up = offset == len(slot.missing) - 1
                row = self._append(token_id, len(slot.known) + offset, slot.sequence, catches_up)
                if catches_up:
                    sampling.append((slot, row))
            slot.known += share
        if status := llama_cpp.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode returned {status}")
        return [self._sample(slot, row) for slot, row in sampling]

    def reset(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, True)
        for slot in self._slots:
            slot.known = []

    def _seat(self) -> None:
        while self._waiting and (idle := [slot for slot in self._slots if slot.request_id is None]):
            request_id, prompt, max_tokens, ignore_eos = self._waiting.popleft()
            slot = max(idle, key=lambda one: one.shared_with(prompt))
            shared = slot.shared_with(prompt)
            llama_cpp.llama_memory_seq_rm(self._memory, slot.sequence, shared, -1)
            slot.known, slot.tokens = slot.known[:shared], list(prompt)
            slot.request_id, slot.num_prompt = request_id, len(prompt)
            slot.max_tokens, slot.ignore_eos = max_tokens, ignore_eos

    def _append(self, token_id: int, position: int, sequence: int, sampled: bool) -> int:
        batch, row = self._batch, self._batch.n_tokens
        batch.token[row], batch.pos[row], batch.n_seq_id[row] = token_id, position, 1
        batch.seq_id[row][0], batch.logits[row] = sequence, sampled
        batch.n_tokens = row + 1
        return row

    def _sample(self, slot: _Slot, row: int) -> Token:
        pointer = ctypes.cast(llama_cpp.llama_get_logits_ith(self._context, row), ctypes.POINTER(ctypes.c_float))
        token_id = int(np.ctypeslib.as_array(pointer, (self._vocab,)).argmax())
        slot.tokens.append(token_id)
        assert slot.request_id is not None
        full = len(slot.tokens) - slot.num_prompt == slot.max_tokens
        is_last = full or (token_id in self._stops and not slot.ignore_eos)
        token = Token(slot.request_id, token_id, time.perf_counter(), is_last)
        if is_last:
            slot.request_id = None
        return token
