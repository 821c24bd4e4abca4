"""From logits to tokens: greedy in the op set, seeded draws here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.ops import Ops
from engine.request import Request


def sample(logits: Tensor, requests: Sequence[Request], ops: Ops) -> list[tuple[int, float]]:
    """One (token id, float32 logprob) for each row of ``logits`` [len(requests), vocab] float32.

    A draw depends on the row's logits, the request's seed and the position alone: never on the batch, nor on how many
    draws were made before.
    """
    token_ids, logprobs = ops.greedy(logits)
    drawn = [i for i, request in enumerate(requests) if request.params.temperature > 0]
    if drawn:
        for i in drawn:
            token_ids[i] = _draw(logits[i].cpu().numpy(), requests[i])
        rows = torch.tensor(drawn, device=logits.device)
        logprobs[rows] = ops.logprobs_of(logits[rows], token_ids[rows])
    return list(zip(token_ids.tolist(), logprobs.tolist(), strict=True))


def _draw(logits: np.ndarray, request: Request) -> int:
    """Nucleus sampling by inversion: one uniform number from a counter-based generator keyed (seed, position)."""
    params = request.params
    scaled = logits.astype(np.float64) / params.temperature
    order = np.argsort(-scaled, kind="stable")
    cumulative = np.cumsum(np.exp(scaled[order] - scaled[order[0]]))
    kept = int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1
    cumulative = cumulative[:kept]
    generator = np.random.Generator(np.random.Philox(key=request.seed, counter=request.num_tokens))
    return int(order[min(np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right"), kept - 1)])
