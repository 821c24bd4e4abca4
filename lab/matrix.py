"""The golden matrix of each stage: which configurations run, and what each must prove about itself."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.paths import repository_root

if TYPE_CHECKING:
    import pandas as pd

    from engine import LLM
    from lab.golden import Cell, Outputs, TokenPrompts

TENSOR_PARALLEL_SIZES = (1, 2)


@dataclass(frozen=True)
class Mode:
    """A column of every matrix: tensor-parallel size, and eager or graph execution."""

    size: int
    graph: bool

    def __str__(self) -> str:
        return f"TP {self.size}, {'graph' if self.graph else 'eager'}"

    @contextlib.contextmanager
    def engine(self, llm: LLM) -> Iterator[LLM]:
        """``llm`` in this mode: itself where it is, else another engine of its model for the while."""
        from engine import LLM

        config = dataclasses.replace(llm.config, tensor_parallel_size=self.size, enforce_eager=not self.graph)
        if config == llm.config:
            yield llm
            return
        with LLM(llm.source.name, config) as other:
            yield other

    def proof(self, llm: LLM) -> str:
        """What an engine that has run shows for having run in this mode.

        Raises:
            AssertionError: It had another number of ranks, or no padded graph was replayed, or one in eager mode.
        """
        padded = sum(graph.num_padded for graph in llm.graph_replays)
        assert llm.world_size == self.size, f"{self}: {llm.world_size} ranks ran"
        assert (padded > 0) == self.graph, f"{self}: {padded} padded graphs were replayed"
        ranks = f"{self.size} rank{'s' if self.size > 1 else ''}"
        return f"{ranks}, {padded} padded graphs replayed" if self.graph else f"{ranks}, no graphs"


REFERENCE = Mode(1, graph=False)


def modes(sizes: Sequence[int] = TENSOR_PARALLEL_SIZES) -> tuple[Mode, ...]:
    """The columns for some tensor-parallel sizes, the reference first."""
    return tuple(Mode(size, graph) for size in sorted({1, *sizes}) for graph in (False, True))


def golden_matrix(
    stage: int,
    llm: LLM,
    num_prompts: int,
    max_tokens: int,
    progress: bool = False,
    sizes: Sequence[int] = TENSOR_PARALLEL_SIZES,
) -> tuple[pd.DataFrame, Outputs]:
    """Run a stage's matrix.

    Args:
        stage: 0 holds static batches, in every mode, against every prompt alone in the reference mode.
        llm: An idle engine: the model, dtype and limits; modes that it is not in run in engines of their own. One with
            a tokenizer takes the chat prompts of ``workloads/prompts.jsonl``, one without seeded token ids.
        num_prompts: Prompts, from the first.
        max_tokens: Longest answer, tokens.
        progress: Show progress bars.
        sizes: Tensor-parallel sizes; one that the model cannot be split into has no cell.

    Returns:
        ``lab.golden.run_matrix``'s frame (differences explained), and the reference outputs.

    Raises:
        ValueError: The stage has no matrix.
    """
    from engine import SamplingParams
    from engine.execution.parallel import largest_size
    from lab.golden import Cell, explain, run_alone, run_cell, run_matrix

    if stage != 0:
        raise ValueError(f"stage {stage} has no golden matrix; the stages that do: 0")
    prompts, params = golden_prompts(llm, num_prompts), SamplingParams(max_tokens=max_tokens)

    def alone() -> Outputs:
        with REFERENCE.engine(llm) as engine:
            return run_alone(engine, prompts, params, "each prompt alone" if progress else None)

    def batched(mode: Mode) -> Cell:
        def run() -> Outputs:
            with mode.engine(llm) as engine:
                outputs = run_cell(engine, prompts, params, f"static batches, {mode}" if progress else None)
                seen.append(mode.proof(engine))
            return outputs

        seen: list[str] = []
        return Cell("static batches", str(mode), run, lambda: f"batches of up to {most} of {len(prompts)}; {seen[-1]}")

    most = llm.config.max_num_seqs
    columns = [mode for mode in modes(sizes) if mode.size <= largest_size(llm.model_config)]
    return run_matrix(
        Cell("alone", str(REFERENCE), alone),
        [batched(mode) for mode in columns],
        lambda expected, found: explain(llm, prompts, expected, found),
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
    parser.add_argument(
        "--tp", nargs="+", type=int, default=list(TENSOR_PARALLEL_SIZES), help="tensor-parallel sizes (%(default)s)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the matrices, prints them and returns the exit status."""
    from engine import LLM

    different = 0
    try:
        for dtype in arguments.dtype:
            llm = LLM(arguments.model, dtype=dtype, max_num_seqs=16, num_kv_blocks=1024, enforce_eager=True)
            frame, _ = golden_matrix(
                arguments.stage, llm, arguments.prompts, arguments.max_tokens, progress=True, sizes=arguments.tp
            )
            print(f"\nstage {arguments.stage}, {arguments.model}, {dtype}\n{frame.to_string(index=False)}")
            different += int((frame["status"] == "different").sum())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if different else 0
