"""``make gpu-check``: on one GPU, whether the kernels keep the promise, and how fast they are; one script, no network.

It needs torch, triton, transformers, pandas and this repository. With ``--tiny`` it runs on the CPU, to test the script
itself: single kernels in Triton's interpreter, whole engines with the reference ops. Those numbers mean nothing.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPORT = Path(__file__).parents[1] / "reports" / "gpu"


@dataclass(frozen=True)
class Sizes:
    """How much is run.

    Attributes:
        shape: hidden size, FFN size, vocabulary, query heads, KV heads, head_dim of the roofline's model.
        batches: Batch sizes of the roofline.
        context: Tokens before each decode; also the prompt of the prefill.
        ops: Op set of the engines.
        golden: Model of the goldens, prompts, tokens each.
        steps: Model whose steps are timed.
        repeats: Timed calls of each kernel.
        copy_mb: Size of the copy that measures the bandwidth.
        cache_mb: More than what a GPU caches: copies of a weight are read in turn, so that it comes from memory.
        matmul: Size of the product that measures the rate.
    """

    shape: tuple[int, int, int, int, int, int]
    batches: tuple[int, ...]
    context: int
    ops: str
    golden: tuple[str, int, int]
    steps: str
    repeats: int
    copy_mb: int
    cache_mb: int
    matmul: int


FULL = Sizes((4096, 14336, 128256, 32, 8, 128), (1, 16, 64, 256), 2048, "triton", ("random:smollm2-135m", 20, 12),
             "random:llama-3.1-8b-4-layers", 30, 4096, 256, 8192)  # fmt: skip
TINY = Sizes((64, 128, 512, 4, 2, 16), (1, 3), 40, "reference", ("random:tiny", 20, 12), "random:tiny", 1, 1, 1, 64)
GOLDEN_ROWS: Mapping[int, tuple[str, ...]] = {
    0: ("static batches",),
    1: ("continuous, random arrivals and aborts",),
    2: ("chunks of 17",),
    3: ("warm",),
    4: ("1P1D, gloo",),
}


class Bench:
    """Times calls on the device."""

    def __init__(self, device: Any, repeats: int) -> None:
        import torch

        self._torch, self.device, self._repeats = torch, device, repeats

    def seconds(self, *calls: Callable[[], Any], captured: bool = True) -> float:
        """Seconds of a call: the median over several rounds, each of all calls in order, after two that do not count.

        Calls on copies of a weight keep it from staying in the cache. On a GPU a round is replayed as a CUDA graph, if
        ``captured``, which leaves out the time that Python takes to launch.
        """
        on_gpu = self.device.type == "cuda"
        calls *= -(-10 // len(calls)) if on_gpu else 1

        def run() -> None:
            for call in calls:
                call()

        run()
        run()
        replay: Callable[[], None] = run
        if on_gpu and captured:
            graph = self._torch.cuda.CUDAGraph()
            with self._torch.cuda.graph(graph):
                run()
            replay = graph.replay
        times = []
        for _ in range(self._repeats):
            self.wait()
            start = time.perf_counter()
            replay()
            self.wait()
            times.append((time.perf_counter() - start) / len(calls))
        return statistics.median(times)

    def wait(self) -> None:
        if self.device.type == "cuda":
            self._torch.cuda.synchronize(self.device)


def machine(bench: Bench, sizes: Sizes) -> dict[str, Any]:
    """What runs here, and the bounds that the roofline is drawn from."""
    import torch
    import triton

    source = torch.empty(sizes.copy_mb << 20, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    a = torch.randn(sizes.matmul, sizes.matmul, device=bench.device).to(torch.bfloat16)
    copied, multiplied = bench.seconds(lambda: target.copy_(source)), bench.seconds(lambda: a @ a)
    driver = "none"
    if bench.device.type == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().split("\n")[0]
    return {
        "device": torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else "Triton's interpreter",
        "driver": driver,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "copy_gb_per_s": 2 * source.numel() / copied / 1e9,
        "matmul_tflop_per_s": 2 * sizes.matmul**3 / multiplied / 1e12,
    }


def check_rows(device: Any, sizes: Sizes) -> list[dict[str, Any]]:
    """Every op on rows: alone against in a batch, bit for bit, and against the reference ops."""
    import torch

    from engine.ops.reference import ReferenceOps
    from engine.ops.triton import TritonOps

    hidden, ffn, *_ = sizes.shape
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(max(sizes.batches) + 1, hidden, generator=generator).to(device, dtype)
        plain = torch.randn(ffn, hidden, generator=generator).to(device, dtype)
        scale = torch.randn(hidden, generator=generator).to(device, dtype)

        def ops_of(backend: Any, weight: Any = plain, scale: Any = scale) -> Mapping[str, Callable[[Any], Any]]:
            packed = backend.pack_linear(weight)
            return {
                "linear": lambda rows: backend.linear(rows, packed),
                "rms_norm": lambda rows: backend.rms_norm(rows, scale, 1e-5),
                "add_rms_norm": lambda rows: backend.add_rms_norm(rows, rows, scale, 1e-5)[0],
                "silu_mul": lambda rows: backend.silu_mul(rows),
                "greedy": lambda rows: backend.greedy(rows.float())[1],
            }

        exact = ops_of(ReferenceOps(dtype, device))
        some = sorted({0, 1, len(x) // 2, len(x) - 1})
        differ, errors = 0, {"torch's linear": _error(x @ plain.T, exact["linear"](x))}
        for name, op in ops_of(TritonOps(dtype, device)).items():
            together = op(x)
            differ += sum(not torch.equal(op(x[row : row + 1])[0], together[row]) for row in some)
            errors[name] = _error(together, exact[name](x))
        is_accurate = errors["linear"] <= 2 * errors["torch's linear"] + 1e-7
        found.append(_exactness("rows", dtype, differ, 5 * len(some), errors, is_accurate))
    return found


def check_attention(device: Any, sizes: Sizes) -> list[dict[str, Any]]:
    """RoPE, the KV store and attention: two prompts whole in one step, then the first one's last rows alone."""
    import torch

    from engine.ops.reference import ReferenceOps
    from engine.ops.triton import TritonOps

    *_, heads, kv_heads, dim = sizes.shape
    context, found = sizes.context, []
    for dtype in (torch.bfloat16, torch.float32):
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(2 * context, count, dim, generator=generator).to(device, dtype)
            for count in (heads, kv_heads, kv_heads)
        )
        angles = 6 * torch.rand(context, dim // 2, generator=generator).to(device)
        rope = torch.cat((angles.cos(), angles.sin()), 1)

        def whole(ops: Any, q: Any = q, k: Any = k, v: Any = v, rope: Any = rope) -> tuple[Any, Any, Any]:
            kv, layout = _paged(ops, 2, context, context, kv_heads, dim)
            rotated = ops.rope_and_store(q, k, v, rope, kv, layout)
            return kv, rotated, ops.paged_attention(rotated, kv, layout, dim**-0.5)

        ops = TritonOps(dtype, device)
        kv, rotated, together = whole(ops)
        differ, chunks = 0, (1, 17)
        for rows in chunks:
            _, layout = _paged(ops, 1, context, rows, kv_heads, dim)
            alone = ops.paged_attention(rotated[context - rows : context], kv, layout, dim**-0.5)
            differ += int((alone != together[context - rows : context]).any(1).sum())
        errors = {"attention": _error(together, whole(ReferenceOps(dtype, device))[2])}
        found.append(_exactness("attention's rows", dtype, differ, sum(chunks), errors))
    return found


def _error(found: Any, wanted: Any) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def _exactness(
    what: str, dtype: Any, differ: int, count: int, errors: Mapping[str, float], passed: bool = True
) -> dict[str, Any]:
    name = str(dtype).removeprefix("torch.")
    bound = 1e-2 if name == "bfloat16" else 3e-6
    said = ", ".join(f"{op} {error:.1e}" for op, error in errors.items())
    return {
        "check": f"{what} alone = in a batch, {name}",
        "observed": f"{differ} of {count} differ; errors against the reference ops, at most {bound:g}: {said}",
        "passed": passed and differ == 0 and max(errors.values()) <= bound,
    }


def check_goldens(device: str, sizes: Sizes) -> list[dict[str, Any]]:
    """Every stage's feature on and off, eager and graph; TP 2 where it needs no second GPU; 1P1D on the one GPU."""
    from engine import LLM
    from lab.matrix import golden_matrix

    model, num_prompts, max_tokens = sizes.golden
    found = []
    for stage, rows in GOLDEN_ROWS.items():
        began = time.perf_counter()
        llm = LLM(model, dtype="bfloat16", ops=sizes.ops, device=device, num_kv_blocks=512, max_num_seqs=7,
                  enforce_eager=True)  # fmt: skip
        try:
            frame, _ = golden_matrix(stage, llm, num_prompts, max_tokens, sizes=(1, 2) if stage == 1 else (1,),
                                     rows=rows)  # fmt: skip
        except AssertionError as error:
            found.append({"check": f"golden, stage {stage}", "observed": str(error), "passed": False})
            continue
        differ = int((frame["status"] == "different").sum())
        observed = f"{differ} of {len(frame)} cells differ ({time.perf_counter() - began:.0f} s)"
        found.append({"check": f"golden, stage {stage}: {rows[0]}", "observed": observed, "passed": differ == 0})
    return found


def roofline(bench: Bench, sizes: Sizes, bounds: Mapping[str, float]) -> list[dict[str, Any]]:
    """Each kernel against the least time that its bytes or its operations take, and against torch's own."""
    import torch
    from torch.nn.functional import linear, scaled_dot_product_attention

    from engine.ops.triton import TritonOps

    hidden, ffn, vocab, heads, kv_heads, dim = sizes.shape
    device, dtype = bench.device, torch.bfloat16
    ops = TritonOps(dtype, device)
    shapes = {"qkv": ((heads + 2 * kv_heads) * dim, hidden), "output": (hidden, heads * dim),
              "gate_up": (2 * ffn, hidden), "down": (hidden, ffn), "down in shards' leaves": (hidden, ffn),
              "head": (vocab, hidden)}  # fmt: skip
    rows = []

    def add(what: str, batch: int, num_bytes: float, flops: float, mine: float, theirs: float) -> None:
        least = max(num_bytes / bounds["copy_gb_per_s"] / 1e9, flops / bounds["matmul_tflop_per_s"] / 1e12)
        rows.append({"kernel": what, "batch": batch, "us": mine * 1e6, "times the roofline": mine / least,
                     "torch us": theirs * 1e6, "torch / ours": theirs / mine})  # fmt: skip

    for name, (outputs, inputs) in shapes.items():
        leaves = kv_heads if "leaves" in name else 1
        copies = -(-(sizes.cache_mb << 20) // (2 * outputs * inputs)) if device.type == "cuda" else 1
        plain = [torch.randn(outputs, inputs, device=device).to(dtype) for _ in range(copies)]
        packed = [ops.pack_linear(weight, num_leaves=leaves) for weight in plain]
        for batch in (*sizes.batches, 2 * sizes.context):
            x = torch.randn(batch, inputs, device=device).to(dtype)
            num_bytes = 2 * (outputs * inputs + batch * (inputs + outputs))
            add(f"linear, {name}", batch, num_bytes, 2 * batch * outputs * inputs,
                bench.seconds(*(functools.partial(ops.linear, x, weight) for weight in packed)),
                bench.seconds(*(functools.partial(linear, x, weight) for weight in plain)))  # fmt: skip
        del plain, packed
    context = sizes.context
    decodes, prefills = [(batch, 1) for batch in sizes.batches], [(batch, context) for batch in sizes.batches[:2]]
    for what, counts in (("decode", decodes), ("prefill", prefills)):
        for batch, num_rows in counts:
            kv, layout = _paged(ops, batch, context, num_rows, kv_heads, dim)
            q = torch.randn(batch * num_rows, heads, dim, device=device).to(dtype)
            k, v = (torch.randn(batch, kv_heads, context, dim, device=device).to(dtype) for _ in range(2))
            query = q.view(batch, num_rows, heads, dim).transpose(1, 2)
            library = functools.partial(scaled_dot_product_attention, query, k, v, is_causal=num_rows > 1,
                                        enable_gqa=True)  # fmt: skip
            ours = functools.partial(ops.paged_attention, q, kv, layout, dim**-0.5)
            pairs = batch * (context if num_rows == 1 else context * (context + 1) / 2)
            # The tiles of a prefill are counted on the CPU: no graph can hold that.
            seconds = bench.seconds(ours, captured=num_rows == 1)
            add(f"attention, {what} at {context}", batch, 2 * 2 * batch * context * kv_heads * dim,
                4 * pairs * heads * dim, seconds, bench.seconds(library))  # fmt: skip
    return rows


def _paged(ops: Any, batch: int, context: int, num_rows: int, kv_heads: int, dim: int) -> tuple[Any, Any]:
    """Random KV of ``batch`` sequences of ``context`` tokens, and a step that computes each one's last ``num_rows``."""
    from engine.execution.batch import ForwardBatch
    from engine.request import Request, SamplingParams
    from engine.scheduler.loop import ScheduledRequest

    blocks = -(-context // 16)
    kv = ops.allocate_kv(batch * blocks, 16, kv_heads, dim)
    for tensor in ops.kv_tensors(kv):
        tensor.normal_()
    scheduled = []
    for i in range(batch):
        request = Request(str(i), (0,) * context, SamplingParams(), 0.0)
        request.block_table = list(range(i * blocks, (i + 1) * blocks))
        scheduled.append(ScheduledRequest(request, context - num_rows, num_rows))
    return kv, ForwardBatch.from_plan(scheduled, 16, ops.device)


def time_steps(device: str, sizes: Sizes, bounds: Mapping[str, float]) -> list[dict[str, Any]]:
    """Decode steps of a whole model, eager and through graphs, against the least time that reading its weights takes.

    Contexts are short, so that the KV is next to nothing.
    """
    from engine import LLM, SamplingParams

    rows = []
    for eager in (True, False):
        llm = LLM(sizes.steps, dtype="bfloat16", ops=sizes.ops, device=device, num_kv_blocks=4096, enforce_eager=eager,
                  max_num_seqs=max(sizes.batches), max_num_batched_tokens=max(2048, max(sizes.batches)),
                  max_model_len=512)  # fmt: skip
        model = llm.model_config
        layer = model.hidden_size * (2 * model.q_size + 2 * model.kv_size + 3 * model.intermediate_size)
        weights = model.num_layers * layer + model.vocab_size * model.hidden_size
        for batch in sizes.batches:
            for i in range(batch):
                llm.add_request([5 + i % 200, 7, 9], SamplingParams(max_tokens=sizes.repeats + 4, ignore_eos=True))
            times = []
            while llm.has_unfinished_requests:
                _, _, stats = llm.step()
                if stats is not None and stats.num_tokens == batch:
                    times.append(stats.end - stats.start)
            read, multiplied = 2 * weights / bounds["copy_gb_per_s"] / 1e9, 2 * batch * weights
            least = max(read, multiplied / bounds["matmul_tflop_per_s"] / 1e12)
            seconds = statistics.median(times)
            rows.append({"steps": "eager" if eager else "graph", "batch": batch, "ms": seconds * 1e3,
                         "times the roofline": seconds / least})  # fmt: skip
    return rows


def judge_bars(results: Mapping[str, Any], sizes: Sizes) -> list[dict[str, Any]]:
    """What the kernels should reach. A bar that is missed is shown, and does not fail the check: exactness does."""
    kernels, rows = results["roofline"], 2 * sizes.context
    some = sizes.batches[-2]
    steps = [row for row in results["steps"] if (row["steps"], row["batch"]) == ("graph", some)]
    linears = [row for row in kernels if row["kernel"].startswith("linear") and "leaves" not in row["kernel"]]
    bars = [
        (f"decode step, graph, batch {some}: of the roofline", 0.6, [1 / row["times the roofline"] for row in steps]),
        (f"linear at M = {some}: of torch's", 0.7, [row["torch / ours"] for row in linears if row["batch"] == some]),
        (f"linear at M = {rows}: of torch's", 0.7, [row["torch / ours"] for row in linears if row["batch"] == rows]),
        ("prefill attention: of torch's", 0.6,
         [row["torch / ours"] for row in kernels if row["kernel"].startswith("attention, prefill")]),
    ]  # fmt: skip
    return [{"bar": name, "least of all shapes": min(values), "bound": f"at least {bound}",
             "verdict": "held" if min(values) >= bound else "MISSED"} for name, bound, values in bars]  # fmt: skip


def headlines(device: str, sizes: Sizes) -> list[dict[str, Any]]:
    """Each stage's headline, once, on a made workload: one run each, so a hint and no verdict."""
    from engine import LLM
    from lab.matrix import CHUNKED, CONTINUOUS, PREFIX, STATIC

    scale = 1 if sizes is TINY else 16
    shape: dict[str, Any] = {"dtype": "bfloat16", "ops": sizes.ops, "device": device, "max_num_seqs": 8,
                             "num_kv_blocks": 1024, "enforce_eager": device != "cuda"}  # fmt: skip

    def engine(options: Mapping[str, Any]) -> LLM:
        return LLM(sizes.steps, **(dict(options) | shape))

    def throughput(llm: LLM) -> float:
        mixed = [((3 + i, 5, 7), (4, 16)[i % 4 == 0] * scale) for i in range(16)]
        return _run(llm, mixed).throughput

    def longest_gap(llm: LLM) -> float:
        return _run(llm, [((3, 5, 7), 8 * scale), (tuple(range(3, 3 + 60 * scale)), 2)]).longest_gap_ms

    def second_ttft(llm: LLM) -> float:
        prompt = tuple(range(3, 3 + 60 * scale))
        _run(llm, [(prompt, 2)])
        return _run(llm, [((*prompt, 9), 2)]).ttft_ms

    pairs: Sequence[tuple[str, Callable[[LLM], float], Mapping[str, Any], Mapping[str, Any]]] = (
        ("stage 1: output tokens/s", throughput, STATIC, CONTINUOUS),
        ("stage 2: longest gap of a decode, ms", longest_gap, CONTINUOUS, CHUNKED),
        ("stage 3: TTFT of a prompt that is known, ms", second_ttft, CHUNKED, PREFIX),
        ("stage 4: longest gap of a decode, ms", longest_gap, CHUNKED,
         CHUNKED | {"disaggregated": True, "kv_channel": "distributed"}),
    )  # fmt: skip
    rows = []
    for name, measure, off, on in pairs:
        values = []
        for options in (off, on):
            with engine(options) as llm:
                measure(llm)  # compiles what is missing
                values.append(measure(llm))
        rows.append({"headline": name, "off": values[0], "on": values[1], "on / off": values[1] / values[0]})
    return rows


@dataclass(frozen=True)
class _Run:
    throughput: float
    longest_gap_ms: float
    ttft_ms: float


def _run(llm: Any, asked: Sequence[tuple[tuple[int, ...], int]]) -> _Run:
    """Run requests that all arrive at once: the throughput, the first one's longest gap, the last one's TTFT."""
    from engine import SamplingParams

    vocab = llm.model_config.vocab_size
    prompts = [tuple(token % vocab for token in prompt) for prompt, _ in asked]
    params = [SamplingParams(max_tokens=count, ignore_eos=True) for _, count in asked]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    times = outputs[0].timing.token_times
    gaps = [b - a for a, b in itertools.pairwise(times)]
    last = outputs[-1].timing
    return _Run(
        sum(len(output.token_ids) for output in outputs) / seconds,
        1e3 * max(gaps, default=0.0),
        1e3 * ((last.first_token or start) - last.arrival),
    )


def markdown(results: Mapping[str, Any]) -> str:
    """The report: what ran, what held, how fast."""
    import pandas as pd

    lines = ["# GPU check", "", f"{results['when']}, commit {results['commit']}", ""]
    lines += [f"- {name}: {value:.1f}" if isinstance(value, float) else f"- {name}: {value}"
              for name, value in results["machine"].items()]  # fmt: skip
    for title in ("checks", "bars", "headlines", "steps", "roofline"):
        frame = pd.DataFrame(results[title])
        if frame.empty:
            continue
        body = [[f"{value:.3g}" if isinstance(value, float) else str(value) for value in row] for row in frame.values]
        lines += ["", f"## {title.capitalize()}", "", "| " + " | ".join(frame.columns) + " |"]
        lines += ["|" + "---|" * len(frame.columns), *("| " + " | ".join(row) + " |" for row in body)]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run it all; returns the exit status (0 held, 1 something did not, 2 no GPU)."""
    parser = argparse.ArgumentParser(prog="python -m lab.gpu_check", description="Checks the kernels on a GPU.")
    parser.add_argument("--tiny", action="store_true", help="in Triton's interpreter, to test this script")
    parser.add_argument("--output", type=Path, default=REPORT, help="folder of the report (%(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.tiny:
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if not arguments.tiny and not torch.cuda.is_available():
        print("not run on a GPU yet: torch sees none here (--tiny tests the script without one)", file=sys.stderr)
        return 2
    sizes, name = (TINY, "cpu") if arguments.tiny else (FULL, "cuda")
    bench = Bench(torch.device(name, 0) if name == "cuda" else torch.device(name), sizes.repeats)
    began = time.perf_counter()
    results: dict[str, Any] = {"when": time.strftime("%Y-%m-%d %H:%M"), "commit": _commit(), "sizes": asdict(sizes)}
    results["machine"] = machine(bench, sizes)
    exact = check_rows(bench.device, sizes) + check_attention(bench.device, sizes)
    results["checks"] = exact + check_goldens(name, sizes)
    results["roofline"] = roofline(bench, sizes, results["machine"])
    results["steps"] = time_steps(name, sizes, results["machine"])
    results["bars"] = judge_bars(results, sizes)
    results["headlines"] = headlines(name, sizes)
    results["seconds"] = time.perf_counter() - began
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "check.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    text = markdown(results)
    (arguments.output / "report.md").write_text(text, encoding="utf-8")
    print(text)
    failed = [check["check"] for check in results["checks"] if not check["passed"]]
    print(f"{'FAILED: ' + ', '.join(failed) if failed else 'all checks held'} after {results['seconds']:.0f} s")
    return 1 if failed else 0


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False,
                           cwd=Path(__file__).parent)  # fmt: skip
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
