"""Figures show the data they are given, all of it, and say so where they pool it. Their looks are judged by eye."""

import json
import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import plotly.io as pio
import pytest

from lab import figures

Frames = tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]
PROMPT, OUTPUT, SEATS, BLOCKS = 20, 5, 4, 64


def run(count: int, *, aborted: int = 0) -> Frames:
    """Serve `count` requests, one arriving every 0.1 s, each step 0.05 s long; the last `aborted` never get in."""
    requests = [
        {"request_id": f"r{i}", "arrival": 0.1 * i, "admitted": math.nan, "first_token": math.nan, "finish": math.nan,
         "num_prompt_tokens": PROMPT + i, "num_output_tokens": 0, "finish_reason": "abort", "token_times": [],
         "num_cached_tokens": i % 3}
        for i in range(count)
    ]  # fmt: skip
    steps, scheduled, running, waiting, now = [], [], [], list(range(count - aborted)), 0.0
    while running or waiting:
        joining = [i for i in waiting if requests[i]["arrival"] <= now][: SEATS - len(running)]
        if not running and not joining:
            now = requests[waiting[0]]["arrival"]
            continue
        waiting = [i for i in waiting if i not in joining]
        for i in running:
            scheduled.append((len(steps), f"r{i}", 1, PROMPT + requests[i]["num_output_tokens"], "decode"))
        for i in joining:
            requests[i]["admitted"] = now
            scheduled.append((len(steps), f"r{i}", PROMPT + i, 0, "prefill"))
        running += joining
        start, now = now, now + 0.05
        tokens = sum(entry[2] for entry in scheduled if entry[0] == len(steps))
        held = 2 * len(running) + len(steps) % 3
        steps.append((len(steps), start, now, tokens, len(running), len(running), len(waiting), held, BLOCKS - held, 0))
        for i in list(running):
            request = requests[i]
            request["token_times"].append(now)
            request["num_output_tokens"] += 1
            request["first_token"] = request["token_times"][0]
            if request["num_output_tokens"] == OUTPUT:
                request.update(finish=now, finish_reason="length")
                running.remove(i)
    step_names = ["step", "start", "end", "num_tokens", "num_seqs", "running", "waiting", "blocks_held", "blocks_free",
                  "blocks_cached"]  # fmt: skip
    scheduled_names = ["step", "request_id", "num_tokens", "num_computed_before", "phase"]
    return (
        pd.DataFrame(requests),
        pd.DataFrame(steps, columns=step_names),
        pd.DataFrame(scheduled, columns=scheduled_names),
    )


def repeated(frames: Frames, times: int) -> Frames:
    """The same steps again and again, as a long run."""
    requests, steps, scheduled = frames
    length = steps["end"].max()
    shift = {"step": len(steps), "start": length, "end": length}
    many_steps = pd.concat([steps.assign(**{k: steps[k] + i * v for k, v in shift.items()}) for i in range(times)])
    many_scheduled = pd.concat([scheduled.assign(step=scheduled["step"] + i * len(steps)) for i in range(times)])
    return requests, many_steps.reset_index(drop=True), many_scheduled.reset_index(drop=True)


def comparison(**changes: Any) -> pd.DataFrame:
    rows = pd.DataFrame(
        {
            "metric": ["TTFT p50", "throughput", "jitter"],
            "unit": ["ms", "tokens/s", ""],
            "ratio": [0.5, 0.9, 1.01],
            "low": [0.45, 0.88, 0.97],
            "high": [0.55, 0.92, 1.05],
            "noise_low": [0.98, 0.97, 0.95],
            "noise_high": [1.02, 1.03, 1.06],
            "verdict": ["better", "worse", "~"],
            "trials": [[0.48, 0.5, 0.52], [0.9, 0.9], [1.0, 1.02, 1.01]],
        }
    )
    return rows.assign(**changes)


def cells() -> pd.DataFrame:
    rows = [
        ("off", "TP 1", "reference", "itself"),
        ("off", "TP 2", "equal", "64 of 64"),
        ("on", "TP 1", "different", "p03 at 7"),
        ("on", "TP 2", "absent", ""),
    ]
    return pd.DataFrame(rows, columns=["row", "column", "status", "detail"])


def lengths(count: int) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {"num_prompt_tokens": rng.integers(1, 4000, count), "num_output_tokens": rng.integers(1, 300, count)}
    )


def settings() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "label": ["whole", "64", "256"],
            "ttft_s": [2.0, 2.6, 2.2],
            "jitter_ms": [900.0, 40.0, 150.0],
            "throughput": [80.0, 70.0, 76.0],
        }
    )


def tree() -> pd.DataFrame:
    rows = [(0, -1, 0, 256, 12, 9), (1, 0, 256, 32, 4, 3), (2, -1, 0, 128, 3, 0)]
    return pd.DataFrame(rows, columns=["node", "parent", "depth", "tokens", "requests", "hits"])


EXAMPLES: dict[str, Callable[[], go.Figure]] = {
    "timeline": lambda: figures.timeline(*run(6, aborted=1)),
    "timelines": lambda: figures.timelines({"off": run(6), "on": run(50)}),
    "batch_composition": lambda: figures.batch_composition(*run(6)[1:]),
    "kv_occupancy": lambda: figures.kv_occupancy(run(6)[1]),
    "ecdf": lambda: figures.ecdf({"off": [1.0, 2.0], "on": [0.5, math.nan]}, "TTFT", "s"),
    "paired_bars": lambda: figures.paired_bars(comparison()),
    "length_scatter": lambda: figures.length_scatter(lengths(30)),
    "length_density": lambda: figures.length_scatter(lengths(3000), log=True),
    "golden_heatmap": lambda: figures.golden_heatmap(cells()),
    "victim_timeline": lambda: figures.victim_timeline({"off": run(6), "on": run(9)}, "r2"),
    "tradeoff": lambda: figures.tradeoff(settings()),
    "hits_over_time": lambda: figures.hits_over_time({"off": run(6)[0], "on": run(9)[0]}),
    "prefix_tree": lambda: figures.prefix_tree(tree()),
}


@cache
def example(name: str) -> go.Figure:
    return EXAMPLES[name]()


def named(figure: go.Figure, name: str) -> list[Any]:
    return [trace for trace in figure.data if trace.name == name]


def area(trace: Any) -> float:
    """Integral of a staircase."""
    return float(np.sum(np.diff(np.array(trace.x, dtype=float)) * np.array(trace.y[:-1], dtype=float)))


# ---------------------------------------------------------------------------------------------------- every figure


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_figure_suits_light_and_dark_pages(name: str) -> None:
    figure = example(name)
    assert figure.layout.title.text
    assert 150 <= figure.layout.height <= 1400
    assert figure.layout.width is None
    assert figure.layout.template.layout.paper_bgcolor == "rgba(0,0,0,0)"
    assert figure.layout.template.layout.plot_bgcolor == "rgba(0,0,0,0)"
    texts = [*figure.layout.annotations, *(trace for trace in figure.data if trace.type == "scatter")]
    colors = {font.color for text in texts if (font := getattr(text, "font", None) or text.textfont)}
    assert not colors & {"black", "white", "#000", "#fff", "#000000", "#ffffff"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_axis_that_shows_numbers_is_titled(name: str) -> None:
    figure = example(name)
    titles = [axis.title.text for axis in (*figure.select_xaxes(), *figure.select_yaxes())]
    if name in ("golden_heatmap", "prefix_tree"):  # labels that speak for themselves, or no axes at all
        return
    assert sum(bool(title) for title in titles) >= (1 if name == "paired_bars" else 2)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_figure_is_valid_json_without_nan_and_with_plain_arrays(name: str) -> None:
    text = example(name).to_json()
    json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} in the figure"))
    assert "bdata" not in text, "the page offers the data as CSV, so arrays stay readable"
    assert not re.search(r"\d\.\d{9}", text.split('"template"')[0]), "numbers are rounded"


def test_use_template_registers_it_and_keeps_figures_as_mime_output() -> None:
    template, renderer = pio.templates.default, pio.renderers.default
    try:
        figures.use_template()
        assert pio.templates.default == "lab"
        assert pio.renderers.default == "plotly_mimetype"
        assert go.Figure().layout.template.layout.paper_bgcolor == "rgba(0,0,0,0)"
    finally:
        pio.templates.default, pio.renderers.default = template, renderer
        del pio.templates["lab"]


# ---------------------------------------------------------------------------------------------------- timelines


def test_timeline_has_a_bar_per_request_and_phase_it_reached() -> None:
    requests, steps, scheduled = run(7, aborted=2)
    figure = figures.timeline(requests, steps, scheduled)
    (queued,), (prefill,), (decode,) = (
        [bar for bar in named(figure, phase) if bar.type == "bar"] for phase in ("queued", "prefill", "decode")
    )
    assert (len(queued.x), len(prefill.x), len(decode.x)) == (7, 5, 5)
    served = requests.iloc[:5]
    assert queued.base == pytest.approx(requests["arrival"])
    assert np.add(queued.base, queued.x)[:5] == pytest.approx(served["admitted"])
    assert np.add(prefill.base, prefill.x) == pytest.approx(served["first_token"])
    assert np.add(decode.base, decode.x) == pytest.approx(served["finish"])
    assert list(decode.y) == [1, 2, 3, 4, 5]
    assert [entry[0] for entry in decode.customdata] == served["request_id"].tolist()
    (failed,) = named(figure, "not completed")
    assert list(failed.y) == [6, 7]
    assert [reason for _, reason in failed.customdata] == ["abort", "abort"]


def test_timeline_rows_are_in_order_of_arrival() -> None:
    requests, steps, scheduled = run(5)
    bars = figures.timeline(requests.iloc[::-1], steps, scheduled).data[0]
    assert list(bars.base) == sorted(bars.base)
    assert [entry[0] for entry in bars.customdata] == requests["request_id"].tolist()


def test_a_request_that_arrives_after_an_interrupted_run_has_no_negative_bar() -> None:
    requests, steps, scheduled = run(4, aborted=1)
    requests.loc[3, "arrival"] = steps["end"].max() + 1
    figure = figures.timeline(requests, steps, scheduled)
    assert min(figure.data[0].x) >= 0
    assert named(figure, "not completed")[0].x[0] >= requests["arrival"].max()


def test_timeline_marks_each_token_where_there_is_room() -> None:
    requests, steps, scheduled = run(7)
    (ticks,) = named(figures.timeline(requests, steps, scheduled), "output token")
    assert len(ticks.x) == requests["num_output_tokens"].sum() == 7 * OUTPUT
    assert list(ticks.y) == [row for row in range(1, 8) for _ in range(OUTPUT)]
    assert not named(figures.timeline(*run(41)), "output token")
    assert not named(figures.timeline(*repeated((requests, steps, scheduled), 60)), "output token")


def test_the_steps_beneath_hold_all_tokens_and_sequences_of_the_run() -> None:
    requests, steps, scheduled = run(7)
    seconds = scheduled["step"].map((steps["end"] - steps["start"]).round(4))
    figure = figures.timeline(requests, steps, scheduled)
    for phase in ("prefill", "decode"):
        _, tokens, sequences = named(figure, phase)
        chosen = scheduled["phase"] == phase
        assert area(tokens) == pytest.approx((scheduled["num_tokens"] * seconds)[chosen].sum())
        assert area(sequences) == pytest.approx(seconds[chosen].sum())
        assert tokens.xaxis == "x2"
        assert sequences.xaxis == "x3"
        assert tokens.y[-1] == 0, "the staircase ends with the last step"


def test_an_idle_engine_shows_as_zero() -> None:
    requests, steps, scheduled = run(2)
    steps = steps.assign(start=[0, 1, 2, 7, 8, 9, 10][: len(steps)], end=[1, 2, 3, 8, 9, 10, 11][: len(steps)])
    tokens = named(figures.timeline(requests, steps, scheduled), "decode")[1]
    prefill = named(figures.timeline(requests, steps, scheduled), "prefill")[1]
    at = list(tokens.x).index(3.0)
    assert (tokens.y[at], prefill.y[at]) == (0, 0)
    assert tokens.x[at + 1] == 7.0


def test_pooled_steps_keep_the_area_and_say_so() -> None:
    frames = repeated(run(7), 200)
    _, steps, scheduled = frames
    figure = figures.timeline(*frames)
    tokens = named(figure, "prefill")[1]
    assert len(steps) == 3600
    assert len(tokens.x) == 1201
    seconds = scheduled["step"].map((steps["end"] - steps["start"]).round(4))
    expected = (scheduled["num_tokens"] * seconds)[scheduled["phase"] == "prefill"].sum()
    assert area(tokens) == pytest.approx(expected, rel=0.01)
    assert "mean of" in figure.layout.yaxis2.title.text
    assert "mean of" not in figures.timeline(*run(7)).layout.yaxis2.title.text


def test_two_runs_share_the_time_axis_and_one_legend() -> None:
    figure = figures.timelines({"static": run(7, aborted=1), "continuous": run(9, aborted=2)})
    assert [annotation.text for annotation in figure.layout.annotations if annotation.text] == [
        "<b>static</b>",
        "<b>continuous</b>",
    ]
    axes = list(figure.select_xaxes())
    assert len(axes) == 6
    assert len({axis.matches or "x6" for axis in axes}) == 1
    legend = [trace.name for trace in figure.data if trace.showlegend]
    assert sorted(legend) == ["decode", "not completed", "prefill", "queued"]
    assert [len(bar.x) for bar in named(figure, "queued")] == [7, 9]


def test_500_requests_stay_modest_in_size() -> None:
    frames = run(500)
    assert len(figures.timeline(*frames).to_json()) < 200_000
    assert len(figures.batch_composition(*frames[1:]).to_json()) < 120_000
    assert len(figures.kv_occupancy(frames[1]).to_json()) < 60_000


# ---------------------------------------------------------------------------------------------------- steps


def test_batch_composition_shows_each_step() -> None:
    _, steps, scheduled = run(7)
    figure = figures.batch_composition(steps, scheduled)
    tokens = [named(figure, phase)[0] for phase in ("decode", "prefill")]
    sequences = [named(figure, phase)[1] for phase in ("decode", "prefill")]
    assert np.sum([trace.y for trace in tokens], axis=0)[:-1].tolist() == steps["num_tokens"].tolist()
    assert np.sum([trace.y for trace in sequences], axis=0)[:-1].tolist() == steps["num_seqs"].tolist()
    assert list(tokens[0].x) == [*steps["step"], len(steps)]
    assert list(named(figure, "waiting requests")[0].y[:-1]) == steps["waiting"].tolist()


def test_the_distributions_beside_it_count_every_step_even_when_pooled() -> None:
    for frames in (run(7), repeated(run(7), 200)):
        figure = figures.batch_composition(*frames[1:])
        marginals = [trace for trace in figure.data if trace.xaxis in ("x2", "x4")]
        assert [sum(trace.x) for trace in marginals] == [len(frames[1])] * 2


def test_kv_occupancy_shows_blocks_and_their_peak() -> None:
    steps = run(7)[1]
    figure = figures.kv_occupancy(steps)
    held, free = figure.data
    assert list(held.y[:-1]) == steps["blocks_held"].tolist()
    assert np.add(held.y, free.y).tolist() == [BLOCKS] * (len(steps) + 1)
    peak = steps["blocks_held"].max()
    assert figure.layout.annotations[0].text == f"peak {peak / BLOCKS:.0%}: {peak} of {BLOCKS} blocks"
    pooled = figures.kv_occupancy(repeated(run(7), 200)[1])
    assert "highest of" in pooled.layout.yaxis.title.text
    assert max(pooled.data[0].y) == peak
    held, known, free = figures.kv_occupancy(steps.assign(blocks_cached=3)).data
    assert set(known.y) == {3} and np.add(np.add(held.y, known.y), free.y).tolist() == [BLOCKS] * (len(steps) + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda steps, scheduled: (steps.drop(columns="end"), scheduled), "steps frame lacks end"),
        (lambda steps, scheduled: (steps.iloc[:0], scheduled), "steps frame has no rows"),
        (lambda steps, scheduled: (steps, scheduled.assign(phase="warm-up")), "unknown phase 'warm-up'"),
        (lambda steps, scheduled: (steps.iloc[:-1], scheduled), "names step 17, which the steps frame lacks"),
    ],
)
def test_frames_that_do_not_fit_are_refused(change: Callable[..., Any], message: str) -> None:
    requests, steps, scheduled = run(7)
    steps, scheduled = change(steps, scheduled)
    with pytest.raises(ValueError, match=message):
        figures.timeline(requests, steps, scheduled)
    with pytest.raises(ValueError, match=message):
        figures.batch_composition(steps, scheduled)


# ---------------------------------------------------------------------------------------------------- comparisons


def test_ecdf_is_the_empirical_distribution() -> None:
    figure = figures.ecdf({"static": [3.0, 1.0, 2.0, 2.0], "continuous": [0.5, math.nan]}, "TTFT", "s")
    static, continuous = figure.data
    assert list(static.x[1:-1]) == [1.0, 2.0, 2.0, 3.0]
    assert list(static.y) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert static.line.color == figures.style.BASELINE
    assert continuous.line.color == figures.style.FEATURE
    assert static.name == "static (n = 4, median 2 s)"
    assert continuous.name == "continuous (n = 1, 1 missing, median 0.5 s)"


@pytest.mark.parametrize("count", [1500, 1501, 40_000])
def test_a_thinned_ecdf_keeps_ranks_and_tail(count: int) -> None:
    values = np.arange(1, count + 1)
    (curve,) = figures.ecdf({"itl": values}, "ITL", "ms", log_x=True).data
    x, y = np.array(curve.x[1:-1]), np.array(curve.y[1:-1])
    assert len(x) == 1500
    assert y == pytest.approx(x / count, abs=1e-4)
    assert x[-200:].tolist() == values[-200:].tolist()


@pytest.mark.parametrize(
    ("samples", "log_x", "message"),
    [
        ({}, False, "no samples"),
        ({"a": [math.nan]}, False, "'a' has no finite value"),
        ({"a": [0.0, 1.0]}, True, "'a' has the value 0"),
    ],
)
def test_an_ecdf_of_nothing_is_refused(samples: dict[str, list[float]], log_x: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        figures.ecdf(samples, "TTFT", "s", log_x=log_x)


def test_paired_bars_show_every_trial_interval_band_and_verdict() -> None:
    data = comparison()
    figure = figures.paired_bars(data)
    band, trials, means = figure.data
    assert sorted(trials.x) == sorted(value for values in data["trials"] for value in values)
    assert [math.floor(y) for y in trials.y] == [1, 1, 1, 2, 2, 3, 3, 3]
    assert np.subtract(means.x, means.error_x.arrayminus) == pytest.approx(data["low"])
    assert np.add(means.x, means.error_x.array) == pytest.approx(data["high"])
    assert band.base == pytest.approx(data["noise_low"])
    assert np.add(band.base, band.x) == pytest.approx(data["noise_high"])
    assert list(figure.layout.yaxis.ticktext) == ["TTFT p50, ms", "throughput, tokens/s", "jitter"]
    texts = [annotation.text for annotation in figure.layout.annotations]
    assert [("better" in text, "worse" in text, "undecided" in text) for text in texts] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]


@pytest.mark.parametrize("scale", [0.002, 0.05, 0.4, 3.0])
def test_the_ratio_axis_has_room_for_everything_and_a_tick_at_1(scale: float) -> None:
    names = ["ratio", "low", "high", "noise_low", "noise_high"]
    data = comparison()
    data = data.assign(
        **{name: data[name] ** scale for name in names}, trials=[[v**scale for v in t] for t in data["trials"]]
    )
    axis = figures.paired_bars(data).layout.xaxis
    low, high = (10**end for end in axis.range)
    assert low < min(data["low"]) <= max(data["noise_high"]) < high
    assert 1 in axis.tickvals
    assert all(low <= tick <= high for tick in axis.tickvals)
    assert len(axis.tickvals) <= 12


def test_paired_bars_without_an_interval_still_show_the_trials() -> None:
    figure = figures.paired_bars(comparison(low=math.nan, high=math.nan, verdict="not judged"))
    assert figure.data[2].error_x.array == (None, None, None)
    assert len(figure.data[1].x) == 8
    assert "not judged" in figure.layout.annotations[0].text


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_ratio_that_no_axis_can_show_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=f"TTFT p50 has the ratio {value}"):
        figures.paired_bars(comparison(ratio=[value, 1.0, 1.0]))
    with pytest.raises(ValueError, match=f"jitter has the ratio {value}"):
        figures.paired_bars(comparison(trials=[[1.0], [1.0], [1.0, value]]))


# ---------------------------------------------------------------------------------------------------- workload, golden


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("count", [1, 30, 1500])
def test_length_scatter_has_a_dot_per_request_and_both_marginals(count: int, log: bool) -> None:
    data = lengths(count)
    dots, above, beside = figures.length_scatter(data, log=log).data
    assert list(dots.x) == data["num_prompt_tokens"].tolist()
    assert list(dots.y) == data["num_output_tokens"].tolist()
    assert sum(above.y) == sum(beside.x) == count


@pytest.mark.parametrize("log", [False, True])
def test_many_lengths_become_a_density_that_counts_them_all(log: bool) -> None:
    density, above, beside = figures.length_scatter(lengths(5000), log=log).data
    assert density.type == "heatmap"
    assert np.sum(density.text) == sum(above.y) == sum(beside.x) == 5000
    assert (np.array(density.text) > 0).tolist() == np.isfinite(np.array(density.z, dtype=float)).tolist()


def test_a_zero_length_on_a_logarithmic_axis_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shortest length is 0.*use log=False"):
        figures.length_scatter(lengths(3).assign(num_output_tokens=0), log=True)


def test_golden_heatmap_shows_every_cell_with_a_mark_of_its_own() -> None:
    figure = figures.golden_heatmap(cells())
    squares, marks, *legend = figure.data
    assert list(squares.x) == ["TP 1", "TP 2"]
    assert list(squares.y) == ["off", "on"]
    assert len({code for row in squares.z for code in row}) == 4
    assert squares.customdata[1][0] == "different<br>p03 at 7"
    assert list(marks.text) == ["ref", "=", "≠", "–"]
    assert [entry.name for entry in legend] == ["equal (1)", "different (1)", "reference (1)", "does not exist yet (1)"]


def test_a_cell_that_is_not_listed_stays_empty() -> None:
    squares = figures.golden_heatmap(cells().iloc[:3]).data[0]
    assert squares.z[1][1] is None


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (cells().replace("equal", "fine"), "unknown status 'fine'; use one of equal, different, reference, absent"),
        (pd.concat([cells(), cells().iloc[2:3]]), "'on', 'TP 1' is listed more than once"),
    ],
)
def test_broken_cells_are_refused(broken: pd.DataFrame, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        figures.golden_heatmap(broken)


# ------------------------------------------------------------------------------------------------------------- stalls


def test_a_victims_gaps_and_the_chunks_beneath_are_those_of_the_records() -> None:
    frames = run(6)
    figure = figures.victim_timeline({"on": frames}, "r2")
    times = frames[0].set_index("request_id").loc["r2", "token_times"]
    gap, chunks = figure.data
    assert list(gap.y) == pytest.approx((np.diff(times) * 1e3).tolist(), abs=0.01)
    prefills = frames[2][frames[2]["phase"] == "prefill"]
    assert sum(chunks.y) == prefills["num_tokens"].sum() and len(chunks.y) == len(prefills)
    with pytest.raises(ValueError, match="has no request 'nobody'; choose one"):
        figures.victim_timeline({"on": frames}, "nobody")
    with pytest.raises(ValueError, match="no run given"):
        figures.victim_timeline({}, "r2")


def test_a_tradeoff_sets_the_baseline_apart_and_labels_every_point() -> None:
    baseline, feature = figures.tradeoff(settings()).data
    assert list(baseline.text) == ["whole"] and list(feature.text) == ["64", "256"]
    assert list(feature.x) == [2.6, 2.2] and list(feature.y) == [40.0, 150.0]


# -------------------------------------------------------------------------------------------------------------- cache


def test_hits_over_time_end_at_the_runs_totals() -> None:
    requests = run(7)[0]
    computed, found = figures.hits_over_time({"": requests}).data
    assert found.y[-1] == requests["num_cached_tokens"].sum()
    assert computed.y[-1] == (requests["num_prompt_tokens"] - requests["num_cached_tokens"]).sum()
    assert list(found.x) == sorted(found.x)


def test_the_prefix_tree_shows_each_run_of_blocks_with_its_size_and_hits() -> None:
    icicle = figures.prefix_tree(tree()).data[0]
    assert list(icicle.parents) == ["", "0", ""] and list(icicle.values) == [256 * 12, 32 * 4, 128 * 3]
    assert "256 tokens" in icicle.labels[0] and "12 requests" in icicle.labels[0] and "9 hits" in icicle.labels[0]


def test_the_instances_lanes_hold_every_step_and_an_arrow_for_every_transfer_that_moved_blocks() -> None:
    _, steps, scheduled = run(6)
    prefills = steps["step"].isin(scheduled.loc[scheduled["phase"] == "prefill", "step"])
    apart = steps.assign(instance=np.where(prefills, "prefill", "decode"))
    moved = pd.DataFrame(
        [("a", 3, 300, 0.05, 0.07, True), ("b", 0, 0, 0.1, 0.1, True), ("c", 2, 0, 0.1, 0.2, False)],
        columns=["request_id", "num_blocks", "num_bytes", "offered", "ended", "completed"],
    )
    figure = figures.instance_lanes(
        {"one engine": (steps.assign(instance="engine"), scheduled, moved.iloc[:0]), "1P1D": (apart, scheduled, moved)}
    )
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert sum(len(trace.x) for trace in bars) == 2 * len(steps)
    assert [trace.name for trace in bars if trace.showlegend] == [
        "step that holds prompt tokens",
        "step that decodes only",
    ]
    (arrows,) = [trace for trace in figure.data if trace.type == "scatter" and trace.mode == "lines"]
    assert arrows.x == (0.05, 0.07, None) and arrows.y[0] > arrows.y[1], "from the prefill lane down to the decode lane"
    assert figure.layout.yaxis2.ticktext == ("prefill", "decode")
    with pytest.raises(ValueError, match="no run given"):
        figures.instance_lanes({})
    with pytest.raises(ValueError, match="the steps frame lacks instance"):
        figures.instance_lanes({"one engine": (steps, scheduled, moved)})
