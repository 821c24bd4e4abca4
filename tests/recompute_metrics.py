"""The metrics once more, from raw Parquet records and without the lab: `python recompute_metrics.py RECORDS_DIR`."""

import json
import math
import sys

import pyarrow.parquet as pq


def quantile(values, q):
    ordered = sorted(values)
    place = (len(ordered) - 1) * q
    low = math.floor(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


rows = [
    r for r in pq.read_table(f"{sys.argv[1]}/requests.parquet").to_pylist() if r["finish_reason"] in ("stop", "length")
]
gaps = [b - a for r in rows for a, b in zip(r["token_times"], r["token_times"][1:], strict=False)]
mean = sum(gaps) / len(gaps)
seconds = max(r["finish"] for r in rows) - min(r["arrival"] for r in rows)
samples = {
    "TTFT": [r["token_times"][0] - r["arrival"] for r in rows],
    "ITL": gaps,
    "TPOT": [(t[-1] - t[0]) / (len(t) - 1) for t in (r["token_times"] for r in rows) if len(t) > 1],
    "E2E": [r["token_times"][-1] - r["arrival"] for r in rows],
    "Normalised latency": [(r["token_times"][-1] - r["arrival"]) / len(r["token_times"]) for r in rows],
    "Queue time": [r["admitted"] - r["arrival"] for r in rows],
}
tail = {name: ("p99", 0.99) if len(values) >= 100 else ("max", 1.0) for name, values in samples.items()}
result = {f"{n} {s}": quantile(v, q) for n, v in samples.items() for s, q in (("p50", 0.5), ("p95", 0.95), tail[n])}
result["ITL std"], result["ITL max"] = math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps)), max(gaps)
result[f"Jitter {tail['ITL'][0]} − p50"] = quantile(gaps, tail["ITL"][1]) - quantile(gaps, 0.5)
result["Output throughput"] = sum(len(r["token_times"]) for r in rows) / seconds
result["Total throughput"] = sum(r["num_prompt_tokens"] + len(r["token_times"]) for r in rows) / seconds
slow = [t for r in rows if (t := r["token_times"])[0] - r["arrival"] > 0.3 or t[-1] - t[0] > 0.0105 * (len(t) - 1)]
result["Goodput"] = (len(rows) - len(slow)) / seconds  # TTFT within 0.3 s, TPOT within 10.5 ms
print(json.dumps(result))
