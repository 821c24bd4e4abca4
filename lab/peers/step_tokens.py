"""How many tokens a step of this engine may have: README's rule for the chunk size, applied to the machine at hand."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from engine import LLM, SamplingParams

CHOICES = (32, 64, 128, 256)
_TRIALS = 3


def step_tokens(gap_s: float, model: str, **options: Any) -> int:
    """The largest of ``CHOICES`` whose step takes at most ``gap_s`` seconds here; the smallest where none does.

    Args:
        gap_s: The longest gap between two tokens of a request that is to be borne.
        model: As for ``LLM``.
        options: Of the engine, without ``max_num_batched_tokens``.
    """
    with LLM(model, **options, max_num_batched_tokens=CHOICES[-1], enable_prefix_caching=False) as llm:
        generator = random.Random(0)
        for tokens in reversed(CHOICES[1:]):
            taken = []
            for _ in range(1 + _TRIALS):  # the first warms up
                prompt = generator.choices(range(llm.model_config.vocab_size), k=tokens)
                start = time.perf_counter()
                llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
                taken.append(time.perf_counter() - start)
            if statistics.median(taken[1:]) <= gap_s:
                return tokens
    return CHOICES[0]
