"""The golden matrix of each stage: which configurations run, and what each must prove about itself."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lab.acted import Acted
from lab.paths import repository_root

if TYPE_CHECKING:
    import pandas as pd

    from engine import LLM
    from lab.golden import Cell, Outputs, TokenPrompts

TENSOR_PARALLEL_SIZES = (1, 2)
PADDED_SIZES = (1, 2, 4)
"""Sizes of graphs in the matrices, beside the largest batch."""


@dataclass(frozen=True)
class Mode:
    """A column of every matrix: tensor-parallel size, and eager or graph execution."""

    size: int
    graph: bool

    def __str__(self) -> str:
        return f"TP {self.size}, {'graph' if self.graph else 'eager'}"

    @contextlib.contextmanager
    def engine(self, llm: LLM, options: Mapping[str, Any] = MappingProxyType({})) -> Iterator[LLM]:
        """``llm`` in this mode, with ``options``: itself where it is, else another engine of its model meanwhile."""
        from engine import LLM

        most = options.get("max_num_seqs", llm.config.max_num_seqs)
        mode: dict[str, Any] = {
            "tensor_parallel_size": self.size,
            "enforce_eager": not self.graph,
            # Few sizes, so that steps are padded with any ops.
            "graph_capture_sizes": tuple(size for size in PADDED_SIZES if size <= most) if self.graph else None,
        }
        config = dataclasses.replace(llm.config, **mode, **options)
        if config == llm.config:
            yield llm
            return
        with LLM(llm.source.name, config) as other:
            yield other

    def proof(self, llm: LLM) -> str:
        """What an engine that has run shows for having run in this mode.

        Raises:
            AssertionError: It had another number of ranks, or no padded graph was replayed (with one seat: no graph at
                all), or one in eager mode.
        """
        padded = sum(graph.num_padded for graph in llm.graph_replays)
        assert llm.world_size == self.size, f"{self}: {llm.world_size} ranks ran"
        if llm.config.max_num_seqs == 1 and self.graph:
            count = sum(graph.count for graph in llm.graph_replays)
            assert count > 0, f"{self}: no graph was replayed"
            return f"{self.size} rank{'s' if self.size > 1 else ''}, {count} graphs replayed, none padded: one seat"
        assert (padded > 0) == self.graph, f"{self}: {padded} padded graphs were replayed"
        ranks = f"{self.size} rank{'s' if self.size > 1 else ''}"
        return f"{ranks}, {padded} padded graphs replayed" if self.graph else f"{ranks}, no graphs"


REFERENCE = Mode(1, graph=False)


def modes(sizes: Sequence[int] = TENSOR_PARALLEL_SIZES) -> tuple[Mode, ...]:
    """The columns for some tensor-parallel sizes, the reference first."""
    return tuple(Mode(size, graph) for size in sorted({1, *sizes}) for graph in (False, True))


def _nothing_to_show(acted: Acted) -> str:
    return ""


@dataclass(frozen=True)
class Variant:
    """A row of a matrix: how the engine differs from the one given, how the prompts are put to it, and what it proves.

    Attributes:
        name: The row's label.
        options: Engine options of the row.
        runner: The name of the function of ``lab.golden`` that puts the prompts to the engine.
        acted: From what the steps show, a sentence that says how the feature acted. Raises AssertionError where it did
            not: the cell could not have failed.
    """

    name: str
    options: Mapping[str, Any]
    runner: str = "run_cell"
    acted: Callable[[Acted], str] = _nothing_to_show


@dataclass(frozen=True)
class StageMatrix:
    """The rows of a stage's matrix; ``reference`` in the reference mode defines the answers."""

    reference: Variant
    variants: tuple[Variant, ...]


UNCACHED = {"enable_prefix_caching": False}
CACHED = {"enable_prefix_caching": True}
WHOLE = {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048} | UNCACHED
STATIC = {"batching": "static"} | WHOLE
CONTINUOUS = {"batching": "continuous"} | WHOLE
CHUNKED = {"batching": "continuous", "enable_chunked_prefill": True} | UNCACHED
PREFIX = CHUNKED | CACHED
NIXL: dict[str, object] = {"disaggregated": True, "kv_channel": "nixl"}
DISTRIBUTED: dict[str, object] = {"disaggregated": True, "kv_channel": "distributed"}
CHUNK_SIZES = (7, 16, 17, 33, 256, 2048)


def _joined(acted: Acted) -> str:
    assert acted.joined > 0, "no request joined a batch that another had left"
    return f"{acted.joined} requests joined mid-batch in {acted.steps} steps"


def _split(acted: Acted) -> str:
    assert acted.split > 0, "no prompt was split"
    assert acted.mid_block > 0, "no chunk ended in the middle of a block"
    assert acted.mixed > 0, "no step mixed a chunk with decodes"
    return (
        f"{acted.split} prompts split, {acted.mid_block} chunks ended mid-block, {acted.mixed} steps mixed with decodes"
    )


def _split_alone(acted: Acted) -> str:
    assert acted.split > 0 and acted.mid_block > 0, "no prompt was split in the middle of a block"
    return f"{acted.split} prompts split, {acted.mid_block} chunks ended mid-block"


def _chunks(size: int) -> Variant:
    """Chunks of ``size`` tokens; one that no prompt exceeds splits none, and is there to show just that."""
    acted = _split if size <= 256 else _whole
    options = CHUNKED | {"max_num_batched_tokens": size}
    return Variant(f"chunks of {size}", options | {"max_num_seqs": min(size, 8)}, acted=acted)


def _whole(acted: Acted) -> str:
    assert acted.split == 0, f"{acted.split} prompts were split"
    return "no prompt is as long"


def _hit(acted: Acted) -> str:
    assert acted.hit_tokens > 0, "no prompt token was found in the cache"
    return f"{acted.hit_tokens} prompt tokens were hits"


def _hit_beside_misses(acted: Acted) -> str:
    assert acted.hits_beside_misses > 0, "no step admitted a hit beside a miss"
    return f"{_hit(acted)}; {acted.hits_beside_misses} steps admitted hits beside misses"


def _moved(acted: Acted) -> str:
    assert acted.moved_blocks > 0, "no KV block travelled"
    return f"{acted.moved_blocks} KV blocks travelled, {acted.kept_blocks} were there already"


def _kept(acted: Acted) -> str:
    assert acted.kept_blocks > 0, "no block of a prompt was there already"
    return _moved(acted)


def _apart(channel: str, options: dict[str, object]) -> tuple[Variant, ...]:
    """Prefill and decode in two instances, over one channel, with every combination of the earlier features."""
    return (
        Variant(f"1P1D, {channel}", PREFIX | options, acted=_moved),
        Variant(f"1P1D, {channel}, no cache", CHUNKED | options, acted=_moved),
        Variant(f"1P1D, {channel}, whole prompts", CONTINUOUS | CACHED | options, acted=_moved),
        Variant(f"1P1D, {channel}, whole prompts, no cache", CONTINUOUS | options, acted=_moved),
        Variant(f"1P1D, {channel}, sent twice", PREFIX | options, "run_warm", _kept),
        Variant(f"1P1D, {channel}, random arrivals and aborts", PREFIX | options, "run_among_aborts", _moved),
    )


STAGES: Mapping[int, StageMatrix] = {
    0: StageMatrix(Variant("alone", STATIC, "run_alone"), (Variant("static batches", STATIC),)),
    1: StageMatrix(
        Variant("static", STATIC),
        (
            Variant("static", STATIC),
            Variant("continuous", CONTINUOUS, acted=_joined),
            Variant("continuous, random arrivals and aborts", CONTINUOUS, "run_among_aborts", _joined),
        ),
    ),
    2: StageMatrix(
        Variant("whole prompts", CONTINUOUS),
        (
            Variant("whole prompts", CONTINUOUS),
            Variant("chunks of 1", CHUNKED | {"max_num_batched_tokens": 1, "max_num_seqs": 1}, acted=_split_alone),
            *(_chunks(size) for size in CHUNK_SIZES),
        ),
    ),
    3: StageMatrix(
        Variant("no cache", CHUNKED),
        (
            Variant("no cache", CHUNKED),
            Variant("no cache, whole prompts", CONTINUOUS),
            Variant("cold", PREFIX, acted=_hit),
            Variant("cold, whole prompts", CONTINUOUS | CACHED, acted=_hit),
            Variant("warm", PREFIX, "run_warm", _hit),
            Variant("warm, whole prompts", CONTINUOUS | CACHED, "run_warm", _hit),
            Variant(
                "hits beside misses", PREFIX | {"max_num_batched_tokens": 512}, "run_half_warm", _hit_beside_misses
            ),
            Variant("random arrivals and aborts", PREFIX, "run_among_aborts", _hit),
        ),
    ),
    4: StageMatrix(
        Variant("one engine", PREFIX),
        (Variant("one engine", PREFIX), *_apart("NIXL", NIXL), *_apart("gloo", DISTRIBUTED)),
    ),
}


def golden_matrix(
    stage: int,
    llm: LLM,
    num_prompts: int,
    max_tokens: int,
    progress: bool = False,
    sizes: Sequence[int] = TENSOR_PARALLEL_SIZES,
    rows: Sequence[str] | None = None,
) -> tuple[pd.DataFrame, Outputs]:
    """Run a stage's matrix: every row in every mode, held against the reference.

    Args:
        stage: Whose ``STAGES``.
        llm: An idle engine: the model, dtype and limits; what differs from it runs in engines of their own. One with
            a tokenizer takes the chat prompts of ``workloads/prompts.jsonl``, one without seeded token ids.
        num_prompts: Prompts, from the first.
        max_tokens: Longest answer, tokens.
        progress: Show progress bars.
        sizes: Tensor-parallel sizes; one that the model cannot be split into has no cell.
        rows: Names of the rows to run; None runs all of them.

    Returns:
        ``lab.golden.run_matrix``'s frame (differences explained), and the reference outputs.

    Raises:
        ValueError: The stage has no matrix, or no such row.
    """
    from engine import SamplingParams
    from engine.execution.parallel import largest_size
    from lab import golden

    if stage not in STAGES:
        raise ValueError(f"stage {stage} has no golden matrix; the stages that do: {', '.join(map(str, STAGES))}")
    matrix = STAGES[stage]
    names = [variant.name for variant in matrix.variants]
    if unknown := [row for row in rows or () if row not in names]:
        raise ValueError(f"stage {stage} has no rows {unknown}; it has {', '.join(names)}")
    prompts, params = golden_prompts(llm, num_prompts), SamplingParams(max_tokens=max_tokens)

    def cell(variant: Variant, mode: Mode) -> Cell:
        acted, shown = Acted(llm.config.block_size), []

        def run() -> Outputs:
            with mode.engine(llm, variant.options) as engine:
                desc = f"{variant.name}, {mode}" if progress else None
                outputs: Outputs = getattr(golden, variant.runner)(engine, prompts, params, desc, acted.see)
                shown.append(mode.proof(engine))
                _await_rest(engine)
            return outputs

        return golden.Cell(
            variant.name, str(mode), run, lambda: "; ".join(filter(None, (variant.acted(acted), *shown)))
        )

    columns = [mode for mode in modes(sizes) if mode.size <= largest_size(llm.model_config)]
    variants = [variant for variant in matrix.variants if rows is None or variant.name in rows]
    cells = [(variant, mode) for variant in variants for mode in columns]
    return golden.run_matrix(
        cell(matrix.reference, REFERENCE),
        [cell(*place) for place in cells if place != (matrix.reference, REFERENCE)],
        lambda expected, found: golden.explain(llm, prompts, expected, found),
    )


def _await_rest(engine: LLM, patience_s: float = 10.0) -> None:
    """Wait for the transfers of aborted requests; then no block may be held.

    Raises:
        AssertionError: Blocks are still held.
    """
    deadline = time.monotonic() + patience_s
    while any(pool.num_held for pool in engine.kv_pools.values()):
        assert time.monotonic() < deadline, f"KV blocks are held at rest: {engine.kv_pools}"
        time.sleep(0.01)


def golden_prompts(llm: LLM, count: int) -> TokenPrompts:
    """The first ``count`` chat prompts, or seeded random ones for a model without a tokenizer."""
    from lab.golden import encode, load_prompts

    if llm.tokenizer is None:
        return random_prompts(llm.model_config.vocab_size, count)
    return encode(llm, load_prompts(repository_root() / "workloads" / "prompts.jsonl")[:count])


def random_prompts(vocab_size: int, count: int, seed: int = 0) -> Mapping[str, tuple[int, ...]]:
    """Random prompts of 1 to 100 tokens; block-aligned lengths (k * 16 - 1, k * 16, k * 16 + 1) come first.

    After these, of every four the third and fourth begin with the same 40 tokens; the 13th prompt is of 280 tokens.
    """
    generator = random.Random(seed)
    lengths = [1, 15, 16, 17, 31, 32, 33, 47, 48, 49] + [generator.randint(1, 100) for _ in range(count)]
    lengths[12:13] = [280]
    shared = tuple(generator.randrange(3, vocab_size) for _ in range(40))
    prompts = [tuple(generator.randrange(3, vocab_size) for _ in range(length)) for length in lengths[:count]]
    return {
        f"r{i:02d}": shared + prompt[40:] if i >= 10 and i % 4 > 1 and len(prompt) > 40 else prompt
        for i, prompt in enumerate(prompts)
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
            llm = LLM(arguments.model, dtype=dtype, max_num_seqs=8, num_kv_blocks=1024, enforce_eager=True)
            frame, _ = golden_matrix(
                arguments.stage, llm, arguments.prompts, arguments.max_tokens, progress=True, sizes=arguments.tp
            )
            print(f"\nstage {arguments.stage}, {arguments.model}, {dtype}\n{frame.to_string(index=False)}")
            different += int((frame["status"] == "different").sum())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except AssertionError as error:
        print(f"error: a cell could not have failed: {error}; give more --prompts or --max-tokens", file=sys.stderr)
        return 1
    return 1 if different else 0
