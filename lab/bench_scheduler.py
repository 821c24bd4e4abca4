"""What the scheduler alone costs a step, without a model: ``make bench-scheduler``.

Decode steps of 16 to 4,096 running requests: ``schedule`` and ``update`` together, and laying out the batch's tensors
beside it. The scheduler loop is linear in the running requests by construction; this shows the constant. Then a soak of
10,000 short requests through 64 seats: the time of a step must not grow with history.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from engine.config import EngineConfig
from engine.execution.batch import ForwardBatch
from engine.kv.block_pool import BlockPool
from engine.request import Request, SamplingParams
from engine.scheduler.loop import Scheduler

SOAK_REQUESTS, SOAK_SEATS = 10_000, 64
SIZES = (16, 64, 256, 1024, 4096)
PROMPT, OUTPUT = 32, 4096


def measure(num_seqs: int, num_steps: int) -> dict[str, float]:
    """Median and 95th percentile of a decode step's scheduler time at ``num_seqs`` running requests, in ms."""
    config = EngineConfig(max_num_seqs=num_seqs, max_num_batched_tokens=max(num_seqs, PROMPT) * PROMPT)
    blocks = num_seqs * -(-(PROMPT + OUTPUT) // config.block_size)
    scheduler = Scheduler.from_config(config, BlockPool(blocks), 1 << 20, eos_token_ids=())
    for i in range(num_seqs):
        params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True)
        scheduler.add(Request(str(i), tuple(range(PROMPT)), params, 0.0))
    scheduler_s, batch_s = [], []
    for step in range(num_steps + 1):
        start = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        ForwardBatch.from_plan(plan.scheduled, config.block_size, torch.device("cpu"))
        laid_out = time.perf_counter()
        samples = {item.request.request_id: (1, -1.0) for item in plan.scheduled}
        before_update = time.perf_counter()
        scheduler.update(plan, samples)
        scheduler.drain_cache()
        if step > 0:  # the first step is the prefill
            scheduler_s.append(scheduled - start + time.perf_counter() - before_update)
            batch_s.append(laid_out - scheduled)
    return {
        "running requests": num_seqs,
        "scheduler, ms a step (median)": float(np.median(scheduler_s) * 1e3),
        "scheduler, ms (p95)": float(np.percentile(scheduler_s, 95) * 1e3),
        "per request, µs": float(np.median(scheduler_s) * 1e6 / num_seqs),
        "batch layout, ms (median)": float(np.median(batch_s) * 1e3),
    }


def soak() -> pd.DataFrame:
    """Median scheduler time of a step, in ms, in each tenth of the soak's steps."""
    config = EngineConfig(max_num_seqs=SOAK_SEATS, max_num_batched_tokens=SOAK_SEATS * PROMPT)
    scheduler = Scheduler.from_config(config, BlockPool(SOAK_SEATS * 8), 1 << 20, eos_token_ids=())
    random = np.random.default_rng(0)
    for i in range(SOAK_REQUESTS):
        prompt = tuple(random.integers(1000, size=PROMPT).tolist())
        params = SamplingParams(max_tokens=int(random.integers(1, 32)), ignore_eos=True)
        scheduler.add(Request(str(i), prompt, params, 0.0))
    times = []
    while scheduler.has_unfinished:
        start = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        samples = {item.request.request_id: (1, -1.0) for item in plan.scheduled}
        before_update = time.perf_counter()
        scheduler.update(plan, samples)
        scheduler.drain_cache()
        times.append(scheduled - start + time.perf_counter() - before_update)
    tenths = [float(np.median(part) * 1e3) for part in np.array_split(times, 10)]
    return pd.DataFrame({"tenth of the steps": range(1, 11), "scheduler, ms a step (median)": tenths})


def main() -> None:
    """Measure every size and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="decode steps at each size (%(default)s)")
    steps = parser.parse_args().steps
    frame = pd.DataFrame([measure(size, steps) for size in tqdm(SIZES, desc="sizes")])
    print(frame.to_string(index=False, float_format="{:.3f}".format))
    times, sizes = frame["scheduler, ms a step (median)"], frame["running requests"]
    slope = np.polyfit(np.log(sizes), np.log(times), 1)[0]
    print(f"growth: time ~ requests^{slope:.2f}; at 256 running requests {times[sizes == 256].iloc[0]:.3f} ms")
    print(f"\nsoak: {SOAK_REQUESTS:,} requests through {SOAK_SEATS} seats, with a prefix cache")
    print(soak().to_string(index=False, float_format="{:.3f}".format))


if __name__ == "__main__":
    main()
