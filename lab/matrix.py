"""The golden matrix of each stage: which configurations run, and what each must prove about itself."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lab.paths import repository_root

if TYPE_CHECKING:
    import pandas as pd

    from engine import LLM
    from lab.golden import Outputs, TokenPrompts

MODES = ("TP 1, eager", "TP 1, graph", "TP 2, eager", "TP 2, graph")
"""The columns of every matrix: tensor-parallel size and execution mode."""

_EXISTING = ("TP 1, eager",)


def golden_matrix(
    stage: int, llm: LLM, num_prompts: int, max_tokens: int, progress: bool = False
) -> tuple[pd.DataFrame, Outputs]:
    """Run a stage's matrix.

    Args:
        stage: 0 holds static batches against every prompt alone.
        llm: An idle engine: the model and dtype. One with a tokenizer takes the chat prompts of
            ``workloads/prompts.jsonl``, one without seeded token ids.
        num_prompts: Prompts, from the first.
        max_tokens: Longest answer, tokens.
        progress: Show progress bars.

    Returns:
        ``lab.golden.run_matrix``'s frame (differences explained), and the reference outputs.

    Raises:
        ValueError: The stage has no matrix.
    """
    from engine import SamplingParams
    from lab.golden import Cell, explain, run_alone, run_cell, run_matrix

    if stage != 0:
        raise ValueError(f"stage {stage} has no golden matrix; the stages that do: 0")
    prompts, params = golden_prompts(llm, num_prompts), SamplingParams(max_tokens=max_tokens)

    def alone() -> Outputs:
        return run_alone(llm, prompts, params, "each prompt alone" if progress else None)

    def batched() -> Outputs:
        return run_cell(llm, prompts, params, "static batches" if progress else None)

    def proof() -> str:
        return f"batches of up to {llm.config.max_num_seqs} of {len(prompts)} prompts"

    cells = [Cell("alone", mode, None) for mode in MODES[1:]]
    cells += [Cell("static batches", mode, batched if mode in _EXISTING else None, proof) for mode in MODES]
    return run_matrix(
        Cell("alone", MODES[0], alone), cells, lambda expected, found: explain(llm, prompts, expected, found)
    )


def golden_prompts(llm: LLM, count: int) -> TokenPrompts:
    """The first ``count`` chat prompts, or seeded random ones for a model without a tokenizer."""
    from lab.golden import encode, load_prompts

    if llm.tokenizer is None:
        return random_prompts(llm.model_config.vocab_size, count)
    return encode(llm, load_prompts(repository_root() / "workloads" / "prompts.jsonl")[:count])


def random_prompts(vocab_size: int, count: int, seed: int = 0) -> Mapping[str, tuple[int, ...]]:
    """Random prompts of 1 to 100 tokens; block-aligned lengths (k * 16 - 1, k * 16, k * 16 + 1) come first."""
    generator = random.Random(seed)
    lengths = [1, 15, 16, 17, 31, 32, 33, 47, 48, 49] + [generator.randint(1, 100) for _ in range(count)]
    return {
        f"r{i:02d}": tuple(generator.randrange(3, vocab_size) for _ in range(length))
        for i, length in enumerate(lengths[:count])
    }


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers ``golden``."""
    parser = subparsers.add_parser(
        "golden", description="Runs a stage's golden matrix. Exit status: 0 all cells equal, 1 a difference, 2 usage."
    )
    parser.add_argument("--stage", type=int, default=0, help="stage whose matrix runs (%(default)s)")
    parser.add_argument("--model", default="smollm2-135m", help="name, folder or random:<shape> (%(default)s)")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], help="one matrix each (%(default)s)")
    parser.add_argument("--prompts", type=int, default=64, help="how many prompts (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer, tokens (%(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the matrices, prints them and returns the exit status."""
    from engine import LLM

    different = 0
    try:
        for dtype in arguments.dtype:
            llm = LLM(arguments.model, dtype=dtype, max_num_seqs=16, num_kv_blocks=1024)
            frame, _ = golden_matrix(arguments.stage, llm, arguments.prompts, arguments.max_tokens, progress=True)
            print(f"\nstage {arguments.stage}, {arguments.model}, {dtype}\n{frame.to_string(index=False)}")
            different += int((frame["status"] == "different").sum())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if different else 0
