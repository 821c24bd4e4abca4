"""Every op of the CPU backend against torch's own, in one run: ``make bench-ops`` (``ARGS=--quick`` for a short one).

Arms alternate in ABBA order on the same inputs, so that a noisy neighbour hits both; a ratio is the median over rounds
of torch's time / ours (above 1 is faster). Weights and KV of small models rotate through copies larger than any cache:
a decode step finds them in memory, not in L3. Reading is measured in the same rounds as what it is compared with.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional
from tqdm.auto import tqdm

from engine.config import ModelConfig
from engine.execution.batch import ForwardBatch
from engine.execution.parallel import ffn_leaves
from engine.models.decoder import rope_table
from engine.models.shapes import shape_config
from engine.ops.cpu import CpuOps
from engine.request import Request, SamplingParams
from engine.scheduler.loop import ScheduledRequest
from lab.paths import write_atomic
from lab.provenance import Provenance, collect
from lab.results import markdown_table

MODELS = ("smollm2-135m", "llama-3.1-8b")
SMALL_M, LARGE_M = (1, 4, 16, 32), (64, 256, 1000, 4000)
DECODES = ((1, 256), (1, 4096), (16, 256), (16, 1024), (64, 512))  # sequences, context
PREFILL = 2000
COLD_BYTES = 192 << 20
CACHED_BYTES = 8 << 20
BLOCK = 16
_LONG_CALL_S = 0.05
CPU = torch.device("cpu")
HOW_TO_READ = """A ratio is torch's time over ours, of the same round (above 1 is faster). "times read" is our time over
the time that reading the same bytes from memory takes; "cached" is the same call over KV that lies in the last-level
cache, so what it takes beyond that is waiting for memory."""
Arm = Callable[[], object]
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """What to measure, and how long.

    Attributes:
        seconds: Time to spend on one comparison, after its first round.
        longest_call: Calls expected to take more seconds than this are left out, and said to be.
    """

    models: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    threads: tuple[int, ...]
    rows: tuple[int, ...]
    isa: str | None
    seconds: float
    longest_call: float


def alternate(arms: Sequence[Arm], seconds: float) -> list[list[float]]:
    """Seconds a call of each arm in each round: at least three rounds, ABBA, then as many as fit ``seconds``.

    An arm's turn is as many calls as take about 2 ms, so that what the other arm left in the caches matters little. A
    pause before each lets the other arm's idle threads go to sleep: libgomp's spin for milliseconds, on a core. One
    untimed call, unless calls are so long that it matters little, then wakes this arm's own threads, as a step's
    earlier ops do: that can take most of a millisecond.
    """
    calls, wakes = [], []
    for arm in arms:
        arm()
        start = time.perf_counter()
        arm()
        once = time.perf_counter() - start
        calls.append(max(1, round(0.002 / once)))
        wakes.append(once < _LONG_CALL_S)
    rounds: list[list[float]] = []
    end = time.perf_counter() + seconds
    while len(rounds) < 3 or (time.perf_counter() < end and len(rounds) < 200):
        taken = [0.0] * len(arms)
        for index in range(len(arms)) if len(rounds) % 2 == 0 else reversed(range(len(arms))):
            if torch.get_num_threads() > 1:
                time.sleep(0.01)
            if wakes[index]:
                arms[index]()
            start = time.perf_counter()
            for _ in range(calls[index]):
                arms[index]()
            taken[index] = (time.perf_counter() - start) / calls[index]
        rounds.append(taken)
    return rounds


def rotating(call: Callable[[T], object], turns: Sequence[T]) -> Arm:
    """Call with the next of ``turns`` each time."""
    endless = itertools.cycle(turns)
    return lambda: call(next(endless))


def median_ratio(rounds: Sequence[Sequence[float]], over: int, under: int) -> float:
    """Of one arm's time over another's, in the same round."""
    return statistics.median(times[over] / times[under] for times in rounds)


def median_time(rounds: Sequence[Sequence[float]], arm: int) -> float:
    """Seconds of one arm."""
    return statistics.median(times[arm] for times in rounds)


class Reader:
    """Reads 256 MiB: the measure of the machine's bandwidth, in bytes per second."""

    def __init__(self) -> None:
        self._memory = torch.ones(1 << 26)

    def __call__(self) -> Tensor:
        return self._memory.sum()

    def seconds_for(self, num_bytes: int, seconds: float) -> float:
        return seconds * num_bytes / self._memory.nbytes


def normal(dtype: torch.dtype, *shape: int) -> Tensor:
    """Normal numbers, the same at each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@dataclass(frozen=True)
class Projection:
    """A weight matrix of a model: inputs, outputs, and the leaves of its shard tree."""

    name: str
    inputs: int
    outputs: int
    leaves: int = 1


def projections(config: ModelConfig) -> list[Projection]:
    """A layer's weight matrices as the decoder packs them."""
    return [
        Projection("qkv", config.hidden_size, config.q_size + 2 * config.kv_size),
        Projection("output", config.q_size, config.hidden_size, config.num_kv_heads),
        Projection("gate_up", config.hidden_size, 2 * config.intermediate_size),
        Projection("down", config.intermediate_size, config.hidden_size, ffn_leaves(config.intermediate_size)),
    ]


def linear_rows(ops: CpuOps, config: ModelConfig, settings: Settings) -> Iterable[dict[str, Any]]:
    """A layer's projections against ``torch.nn.functional.linear``, their weights in memory rather than in a cache."""
    for projection in projections(config):
        weight = normal(ops.dtype, projection.outputs, projection.inputs) * projection.inputs**-0.5
        copies = max(1, COLD_BYTES // weight.nbytes)
        packed = [ops.pack_linear(weight, num_leaves=projection.leaves) for _ in range(copies)]
        weights = [weight.clone() for _ in range(copies)]
        per_row = 0.0
        for m in settings.rows:
            if per_row * m > settings.longest_call:
                yield {"op": projection.name, "M": m, "left out": f"torch would take {per_row * m:.1f} s a call"}
                continue
            x = normal(ops.dtype, m, projection.inputs)
            arms = [rotating(partial(ops.linear, x), packed), rotating(partial(functional.linear, x), weights)]
            rounds = alternate(arms, settings.seconds)
            ours, theirs = median_time(rounds, 0), median_time(rounds, 1)
            per_row = theirs / m
            yield {
                "op": projection.name,
                "M": m,
                "µs": ours * 1e6,
                "torch µs": theirs * 1e6,
                "GFLOP/s": 2 * m * weight.numel() / ours / 1e9,
                "GB/s": weight.nbytes / ours / 1e9,
                "ratio": median_ratio(rounds, 1, 0),
            }


def batch_of(parts: Sequence[tuple[list[int], int, int]]) -> ForwardBatch:
    """A step from (block table, start, count) of each sequence."""
    scheduled = []
    for index, (table, start, count) in enumerate(parts):
        request = Request(str(index), (0,) * (start + count), SamplingParams(), 0.0)
        request.block_table = table
        scheduled.append(ScheduledRequest(request, start, count))
    return ForwardBatch.from_plan(scheduled, BLOCK, CPU)


def attention_rows(ops: CpuOps, config: ModelConfig, settings: Settings, read: Reader) -> Iterable[dict[str, Any]]:
    """A prefill against torch's fused attention (contiguous KV, heads repeated); decodes against reading their KV."""
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    scale, block_bytes = dim**-0.5, ops.kv_bytes_per_block(BLOCK, kv_heads, dim)
    length = PREFILL if settings.longest_call >= 2 else PREFILL // 4
    pool = max(-(-length // BLOCK), (2 * COLD_BYTES) // block_bytes, max(s * -(-c // BLOCK) for s, c in DECODES))
    kv = ops.allocate_kv(pool, BLOCK, kv_heads, dim)
    kv.tensor.copy_(normal(ops.dtype, 1, kv.tensor.shape[1]).expand_as(kv.tensor))
    order = torch.randperm(pool, generator=torch.Generator().manual_seed(0)).tolist()

    q = normal(ops.dtype, length, heads, dim)
    batch = batch_of([(order[: -(-length // BLOCK)], 0, length)])
    wide = normal(ops.dtype, 1, heads, length, dim)
    fused = partial(functional.scaled_dot_product_attention, wide, wide.clone(), wide.clone(), is_causal=True)
    rounds = alternate([partial(ops.paged_attention, q, kv, batch, scale), fused], settings.seconds)
    ours = median_time(rounds, 0)
    yield {
        "op": f"prefill {length}",
        "µs": ours * 1e6,
        "torch µs": median_time(rounds, 1) * 1e6,
        "GFLOP/s": 2 * length * length * heads * dim / ours / 1e9,
        "ratio": median_ratio(rounds, 1, 0),
    }
    for sequences, context in DECODES:
        blocks = -(-context // BLOCK)
        steps = []
        for turn in range(max(1, pool // (sequences * blocks))):
            first = turn * sequences * blocks
            tables = [order[first + i * blocks : first + (i + 1) * blocks] for i in range(sequences)]
            steps.append(batch_of([(table, context - 1, 1) for table in tables]))
        q = normal(ops.dtype, sequences, heads, dim)

        def attend(step: ForwardBatch, q: Tensor = q) -> Tensor:
            return ops.paged_attention(q, kv, step, scale)

        num_bytes = sequences * context * kv_heads * dim * 2 * ops.dtype.itemsize
        cached = partial(attend, steps[0])  # the same KV each time: what is left where memory costs nothing
        arms: list[Arm] = [rotating(attend, steps), read, *([cached] if num_bytes <= CACHED_BYTES else [])]
        rounds = alternate(arms, settings.seconds)
        ours, reading = median_time(rounds, 0), read.seconds_for(num_bytes, median_time(rounds, 1))
        yield {
            "op": f"decode {sequences} x {context}",
            "µs": ours * 1e6,
            "read µs": reading * 1e6,
            "cached µs": median_time(rounds, 2) * 1e6 if len(arms) > 2 else float("nan"),
            "GB/s": num_bytes / ours / 1e9,
            "times read": ours / reading,
        }


def elementwise_rows(ops: CpuOps, config: ModelConfig, settings: Settings) -> Iterable[dict[str, Any]]:
    """The other ops against the same in torch's own calls."""
    hidden, vocab = config.hidden_size, config.vocab_size
    weight = normal(ops.dtype, hidden)
    table = normal(ops.dtype, 1000, hidden)

    def add_norm(x: Tensor, residual: Tensor) -> Tensor:
        return functional.rms_norm(residual + x, (hidden,), weight, 1e-5)

    def silu_mul(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate) * up

    def greedy(logits: Tensor) -> Tensor:
        return torch.log_softmax(logits, -1).max(-1).values

    for m in (1, 32, 1000):
        x, residual, gate_up = (normal(ops.dtype, m, n) for n in (hidden, hidden, 2 * config.intermediate_size))
        ids = torch.arange(m) % 1000
        pairs: dict[str, tuple[Arm, Arm]] = {
            "embedding": (partial(ops.embedding, ids, table), partial(functional.embedding, ids, table)),
            "add_rms_norm": (partial(ops.add_rms_norm, x, residual, weight, 1e-5), partial(add_norm, x, residual)),
            "silu_mul": (partial(ops.silu_mul, gate_up), partial(silu_mul, gate_up)),
        }
        if m <= 32:
            logits = normal(torch.float32, m, vocab)
            pairs["greedy"] = (partial(ops.greedy, logits), partial(greedy, logits))
        for name, arms in pairs.items():
            rounds = alternate(arms, settings.seconds / 4)
            ours, theirs = median_time(rounds, 0), median_time(rounds, 1)
            ratio = median_ratio(rounds, 1, 0)
            yield {"op": name, "M": m, "µs": ours * 1e6, "torch µs": theirs * 1e6, "ratio": ratio}


class DecodeStep:
    """One sequence's decode step as the decoder makes it, over random weights: every op call timed by kind."""

    def __init__(self, ops: CpuOps, config: ModelConfig, context: int = 256) -> None:
        self.ops, self.config = ops, config
        scale = config.hidden_size**-0.5
        self.layers = []
        for _ in range(config.num_layers):
            weights = {}
            for projection in projections(config):
                weight = normal(ops.dtype, projection.outputs, projection.inputs) * scale
                weights[projection.name] = ops.pack_linear(weight, num_leaves=projection.leaves)
            self.layers.append(weights)
        self.table = normal(ops.dtype, config.vocab_size, config.hidden_size)
        self.head = ops.pack_linear(self.table)
        self.norm = torch.ones(config.hidden_size, dtype=ops.dtype)
        blocks = -(-context // BLOCK)
        shape = (BLOCK, config.num_kv_heads, config.head_dim)
        self.kv = [ops.allocate_kv(blocks, *shape) for _ in self.layers]
        for kv in self.kv:
            kv.tensor.zero_()
        self.rope = rope_table(config, context, CPU)
        self.batch = batch_of([(list(range(blocks)), context - 1, 1)])
        packed = [weight.panels.nbytes for layer in self.layers for weight in layer.values()]
        self.weight_bytes = sum(packed) + self.head.panels.nbytes
        self.spent: dict[str, float] = {}
        self.calls = 0

    def _timed(self, kind: str, *args: Any) -> Any:
        start = time.perf_counter()
        result = getattr(self.ops, kind)(*args)
        self.spent[kind] = self.spent.get(kind, 0.0) + time.perf_counter() - start
        return result

    def __call__(self) -> None:
        config, batch, call = self.config, self.batch, self._timed
        self.calls += 1
        residual = call("embedding", batch.token_ids[-1:], self.table)
        hidden = call("rms_norm", residual, self.norm, 1e-5)
        sizes = (config.q_size, config.kv_size, config.kv_size)
        for layer, kv in zip(self.layers, self.kv, strict=True):
            qkv = call("linear", hidden, layer["qkv"]).split(sizes, 1)
            q, k, v = (part.unflatten(1, (-1, config.head_dim)) for part in qkv)
            q = call("rope_and_store", q, k, v, self.rope, kv, batch)
            attended = call("paged_attention", q, kv, batch, config.head_dim**-0.5)
            hidden = call("linear", attended, layer["output"])
            hidden, residual = call("add_rms_norm", hidden, residual, self.norm, 1e-5)
            hidden = call("linear", call("silu_mul", call("linear", hidden, layer["gate_up"])), layer["down"])
            hidden, residual = call("add_rms_norm", hidden, residual, self.norm, 1e-5)
        call("greedy", call("linear_f32", hidden, self.head))


def step_rows(ops: CpuOps, config: ModelConfig, settings: Settings, read: Reader) -> Iterable[dict[str, Any]]:
    """Time of a decode step against reading its weights, and where it goes."""
    step = DecodeStep(ops, config)
    rounds = alternate([step, read], 4 * settings.seconds)
    total, reading = median_time(rounds, 0), read.seconds_for(step.weight_bytes, median_time(rounds, 1))
    yield {"op": "decode step", "µs": total * 1e6, "read µs": reading * 1e6, "times read": total / reading}
    inside = 0.0
    for kind, spent in sorted(step.spent.items(), key=lambda item: -item[1]):
        inside += spent / step.calls
        yield {"op": f"  {kind}", "µs": spent / step.calls * 1e6, "share": spent / step.calls / total}
    yield {"op": "  between ops", "µs": max(total - inside, 0.0) * 1e6, "share": max(1 - inside / total, 0.0)}


def title_of(key: object) -> str:
    """A group's key for people; the number of threads comes last."""
    *names, threads = key if isinstance(key, tuple) else (key,)
    return ", ".join([*names, f"{threads} thread{'s' * (threads > 1)}"])


def summary(frame: pd.DataFrame) -> list[str]:
    """The figures that matter: one line for each dtype and thread count."""
    lines = []
    for key, part in frame.groupby(["dtype", "threads"], sort=False):
        linear = part[(part["section"] == "linear") & part["ratio"].notna()]
        text = []
        for title, chosen in (("M <= 32", linear[linear["M"] <= 32]), ("M >= 64", linear[linear["M"] >= 64])):
            if len(chosen):
                mean = statistics.geometric_mean(chosen["ratio"])
                text.append(f"linear {title}: geometric mean {mean:.2f}x torch, least {chosen['ratio'].min():.2f}x")
        prefill = part[part["op"].str.startswith("prefill")]["ratio"]
        if len(prefill):
            text.append(f"prefill {prefill.min():.2f}x or more")
        decode = part[part["op"].str.startswith("decode ") & (part["section"] == "attention")]["times read"]
        if len(decode):
            text.append(f"decode at most {decode.max():.2f} times reading its KV")
        step = part[part["op"] == "decode step"]["times read"]
        if len(step):
            text.append(f"decode step {step.iloc[0]:.2f} times reading the weights")
        lines.append(f"{title_of(key)}: " + "; ".join(text))
    return lines


def measure(settings: Settings) -> pd.DataFrame:
    """Every section for every dtype, thread count and model."""
    read = Reader()
    rows: list[dict[str, Any]] = []
    cells = list(itertools.product(settings.dtypes, settings.threads, settings.models))
    for dtype, threads, model in tqdm(cells, desc="dtype, threads, model"):
        torch.set_num_threads(threads)
        ops, config = CpuOps(dtype, CPU, settings.isa), ModelConfig.from_hf(shape_config(model), model)
        sections: dict[str, Iterable[dict[str, Any]]] = {
            "linear": linear_rows(ops, config, settings),
            "attention": attention_rows(ops, config, settings, read),
            "elementwise": elementwise_rows(ops, config, settings),
        }
        if model == MODELS[0]:
            sections["decode step"] = step_rows(ops, config, settings, read)
        head = {"dtype": str(dtype).removeprefix("torch."), "threads": threads, "model": model, "isa": ops.isa}
        for section, results in sections.items():
            rows += ({**head, "section": section, **row} for row in results)
    return pd.DataFrame(rows)


def tables(frame: pd.DataFrame) -> str:
    """A table for each section, as text."""
    parts = []
    for key, part in frame.groupby(["section", "dtype", "threads"], sort=False):
        columns = part.drop(columns=["section", "dtype", "threads", "isa"]).dropna(axis=1, how="all")
        if "M" in columns:
            columns["M"] = columns["M"].astype(int)
        text = columns.to_string(index=False, na_rep="", float_format=lambda x: f"{x:.2f}" if x < 100 else f"{x:.0f}")
        parts.append(f"{title_of(key)}, {part['isa'].iloc[0]}\n{text}\n")
    return "\n".join(parts)


def save(frame: pd.DataFrame, lines: Sequence[str], provenance: Provenance, folder: Path) -> None:
    """Write ``bench.json`` and ``report.md``."""
    rows = [{key: value for key, value in row.items() if value == value} for row in frame.to_dict("records")]
    result = {"provenance": provenance.to_dict(), "summary": list(lines), "rows": rows}
    write_atomic(folder / "bench.json", json.dumps(result, indent=1) + "\n")
    summary_text = "".join(f"- {line}\n" for line in lines)
    origin = markdown_table(("What", "Value"), provenance.rows())
    text = f"# Every op against torch's\n\n{HOW_TO_READ}\n\n{summary_text}\n```\n{tables(frame)}```\n\n{origin}"
    write_atomic(folder / "report.md", text)


def main() -> None:
    """Measure, print, and write the rows where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="SmolLM2 alone, fewer rows: about a minute")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="whose shapes (default: both; quick: the first)")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts (%(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", help="rows of the projections (default: 1 to 4000)")
    parser.add_argument("--seconds", type=float, help="time for one comparison (default: 1; quick: 0.15)")
    parser.add_argument("--isa", help="instruction set (default: the best this CPU has)")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write bench.json and report.md here")
    options = parser.parse_args()
    quick = options.quick
    settings = Settings(
        models=tuple(options.models or MODELS[: 1 if quick else 2]),
        dtypes=tuple(getattr(torch, name) for name in options.dtypes),
        threads=tuple(options.threads),
        rows=tuple(options.rows or ((1, 16, 256) if quick else SMALL_M + LARGE_M)),
        isa=options.isa,
        seconds=options.seconds or (0.15 if quick else 1.0),
        longest_call=0.5 if quick else 10.0,
    )
    with torch.inference_mode():
        frame = measure(settings)
    lines = summary(frame)
    print(tables(frame) + "\n" + "\n".join(lines))
    if options.save is not None:
        parameters = {key: str(value) for key, value in asdict(settings).items()}
        save(frame, lines, collect(parameters=parameters), options.save)


if __name__ == "__main__":
    main()
