"""The outside reference: Hugging Face transformers on the same weights, in float32.

The rule: teacher-forced on our tokens, our token lies within ``TIE`` logits of the maximum at every position; and its
own ``generate`` gives the same tokens up to the first such tie. (Greedy search follows the maximum, so the first half
implies the second as far as its cached and batched decoding computes what one whole pass does; it is run to show it.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import torch
from tqdm.auto import tqdm

from lab.golden import Outputs, TokenPrompts

TIE = 1e-3
"""Two tokens whose logits lie this close count as tied: float32 sums in another order differ by less."""

_GENERATE_BATCH = 16


class HuggingFace:
    """A transformers model in float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True)
        self._model.eval()

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[len(token_ids), vocab] float32: row i is the distribution after token i."""
        return self._model(torch.tensor([list(token_ids)])).logits[0]

    @torch.inference_mode()
    def generate(
        self, prompts: TokenPrompts, max_tokens: int, expected: Outputs, desc: str | None = None
    ) -> dict[str, tuple[int, ...]]:
        """Greedy ``generate`` in left-padded batches; tokens up to and including the end-of-sequence token.

        A batch takes as long as its longest answer, so those that are expected to be alike run together.
        """
        by_length = sorted(prompts, key=lambda name: len(prompts[name]), reverse=True)
        rest = sorted(by_length[_GENERATE_BATCH:], key=lambda name: len(expected[name].token_ids))
        order = by_length[:_GENERATE_BATCH] + rest  # the longest prompts by themselves: padding is computed too
        batches = [order[i : i + _GENERATE_BATCH] for i in range(0, len(order), _GENERATE_BATCH)]
        pad, ends = self._padding()
        result: dict[str, tuple[int, ...]] = {}
        for batch in tqdm(batches, desc=desc, unit="batch", disable=desc is None):
            width = max(len(prompts[name]) for name in batch)
            ids = torch.tensor([[pad] * (width - len(prompts[name])) + list(prompts[name]) for name in batch])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in (prompts[name] for name in batch)])
            out = self._model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=pad
            )
            for name, row in zip(batch, out[:, width:].tolist(), strict=True):
                end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
                result[name] = tuple(row[:end])
        return result

    def _padding(self) -> tuple[int, tuple[int, ...]]:
        """A padding token, and the tokens that end an answer."""
        config = self._model.generation_config
        eos = config.eos_token_id
        ends = tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,))
        pad = config.pad_token_id if config.pad_token_id is not None else (ends[0] if ends else 0)
        return int(pad), ends


def teacher_forced(hf: HuggingFace, prompts: TokenPrompts, outputs: Outputs, desc: str | None = None) -> pd.DataFrame:
    """How far our token's logit lies below the maximum, under Hugging Face, at every output position.

    Returns:
        One row for each token: prompt_id, position, token, margin (0 where our token is the maximum), gap (between
        Hugging Face's two largest logits), logprob (ours) and hf_logprob.
    """
    rows = []
    for name in tqdm(outputs, desc=desc, unit="prompt", disable=desc is None):
        output = outputs[name]
        logits = hf.logits(prompts[name] + output.token_ids)[len(prompts[name]) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output.token_ids).unsqueeze(1)).squeeze(1)
        top = logits.topk(2, dim=1).values
        margins, gaps = (top[:, 0] - chosen).tolist(), (top[:, 0] - top[:, 1]).tolist()
        logprobs = torch.log_softmax(logits.double(), 1).gather(1, torch.tensor(output.token_ids).unsqueeze(1))
        for position, (token, margin) in enumerate(zip(output.token_ids, margins, strict=True)):
            own, other = output.logprobs[position], float(logprobs[position])
            rows.append((name, position, token, margin, gaps[position], own, other))
    return pd.DataFrame(rows, columns=["prompt_id", "position", "token", "margin", "gap", "logprob", "hf_logprob"])


def judge(forced: pd.DataFrame, outputs: Outputs, generated: Mapping[str, tuple[int, ...]]) -> pd.DataFrame:
    """The rule, prompt by prompt; its second half for the prompts that were ``generated``.

    Returns:
        One row a prompt: prompt_id, tokens, worst_margin, first_tie (the first position where Hugging Face's two
        largest logits lie within ``TIE``, or None), same_until_tie (None where not generated), passed.
    """
    rows = []
    for name, group in forced.groupby("prompt_id", sort=False):
        ties = group.loc[group["gap"] <= TIE, "position"]
        first_tie = int(ties.iloc[0]) if len(ties) else None
        mine, other = outputs[str(name)].token_ids, generated.get(str(name))
        same = None if other is None else mine[:first_tie] == other[:first_tie]
        worst = float(group["margin"].max())
        rows.append((name, len(mine), worst, first_tie, same, same is not False and worst <= TIE))
    columns = ["prompt_id", "tokens", "worst_margin", "first_tie", "same_until_tie", "passed"]
    return pd.DataFrame(rows, columns=columns)
