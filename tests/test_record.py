import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from lab.record import REQUESTS, SCHEDULED, STEPS, RecordError, RunRecord, hash_tokens
from tests.simulated import fail, simulate


def empty() -> RunRecord:
    return RunRecord(
        *(pd.DataFrame(columns=schema.names) for schema in (REQUESTS, STEPS, SCHEDULED)), {"partial": True}
    )


def changed(frame: str, column: str, row: int, value: object) -> RunRecord:
    record = simulate()
    table = getattr(record, frame).copy()
    table.at[row, column] = value
    return dataclasses.replace(record, **{frame: table})


def test_a_sound_run_has_no_contradictions() -> None:
    assert simulate().check() == []
    assert fail(simulate(), "r003").check() == []
    assert empty().check() == []


def test_a_partial_run_may_hold_unfinished_requests_and_a_whole_one_may_not() -> None:
    record = changed("requests", "finish_reason", 11, None)
    assert record.check() == ["1 requests are unfinished, but the run is not marked partial"]
    assert dataclasses.replace(record, meta={"partial": True}).check() == []


@pytest.mark.parametrize("record", [simulate(), fail(simulate(), "r003"), empty()], ids=["whole", "refused", "empty"])
def test_saved_records_come_back_equal(record: RunRecord, tmp_path: Path) -> None:
    loaded = RunRecord.load(record.save(tmp_path / "run"))
    for name in ("requests", "steps", "scheduled"):
        pd.testing.assert_frame_equal(getattr(loaded, name), getattr(record, name))
    assert loaded.meta == record.meta


def test_saving_again_replaces_the_old_run(tmp_path: Path) -> None:
    simulate(seed=1).save(tmp_path)
    simulate(seed=2).save(tmp_path)
    assert RunRecord.load(tmp_path).meta == {"seed": 2}


def test_saving_does_not_leave_old_meta_beside_new_frames(tmp_path: Path) -> None:
    simulate().save(tmp_path)
    (tmp_path / "steps.parquet").unlink()
    (tmp_path / "steps.parquet").mkdir()  # writing the second frame fails
    with pytest.raises(OSError, match=r"steps\.parquet"):
        simulate(seed=1).save(tmp_path)
    with pytest.raises(RecordError, match="missing, so the run was not saved whole"):
        RunRecord.load(tmp_path)


def test_meta_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        dataclasses.replace(simulate(), meta={"load": float("nan")}).save(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def broken_parquet(folder: Path) -> None:
    path = folder / "requests.parquet"
    path.write_bytes(path.read_bytes()[:-50])


def other_columns(folder: Path) -> None:
    table = pq.read_table(folder / "requests.parquet")
    pq.write_table(table.drop_columns("num_cached_tokens"), folder / "requests.parquet")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "steps.parquet").unlink(), "steps.parquet.*missing"),
        (lambda folder: (folder / "meta.json").unlink(), "meta.json.*missing"),
        (lambda folder: (folder / "meta.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "meta.json").write_text("[]"), "holds list, must be an object"),
        (broken_parquet, "cannot be read"),
        (other_columns, "They are from another version"),
    ],
)
def test_broken_folders_are_refused(spoil: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    simulate().save(tmp_path)
    spoil(tmp_path)
    with pytest.raises(RecordError, match=message):
        RunRecord.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda frame: frame.drop(columns="arrival"), r"missing columns \['arrival'\]"),
        (lambda frame: frame.assign(colour=1), r"unknown columns \['colour'\]"),
        (lambda frame: frame.assign(arrival="soon"), "requests frame does not follow its schema"),
        (lambda frame: frame.assign(num_prompt_tokens=1.5), "requests frame does not follow its schema"),
        (lambda frame: frame.assign(arrival=np.nan), "arrival is missing in 12 rows"),
    ],
)
def test_frames_of_another_shape_are_refused(change: Callable[[pd.DataFrame], pd.DataFrame], message: str) -> None:
    record = simulate()
    with pytest.raises(RecordError, match=message):
        RunRecord(change(record.requests), record.steps, record.scheduled)


@pytest.mark.parametrize(
    ("frame", "column", "row", "value", "message"),
    [
        ("requests", "num_output_tokens", 2, 99, "99 output tokens reported, 12 delivered"),
        ("requests", "request_id", 1, "r000", "recorded more than once"),
        ("requests", "arrival", 0, -1.0, "finite and at least 0"),
        ("requests", "arrival", 0, 9.0, "go back in time"),
        ("requests", "admitted", 0, np.nan, "without a token, an admission or a finish"),
        ("requests", "first_token", 0, 0.0115, "its first token came at"),
        ("requests", "first_token", 0, np.nan, "its first token came at"),
        ("requests", "token_times", 0, [0.2, np.inf], "finite and at least 0"),
        ("requests", "num_cached_tokens", 0, 16, "16 of 16 prompt tokens cached"),
        ("requests", "finish_reason", 0, "bored", "'bored' is none of stop, length, abort"),
        ("requests", "output_hash", 0, None, "without an output hash"),
        ("requests", "finish_reason", 0, "refused", "refused, yet admitted"),
        ("steps", "step", 3, 77, "do not count up by 1"),
        ("steps", "end", 3, 0.0, "ends before it starts"),
        ("steps", "start", 3, 0.0, "starts before the last one ended"),
        ("steps", "forward_s", 3, 1.0, "exceed the step"),
        ("steps", "sample_s", 3, -1e-6, "negative"),
        ("steps", "blocks_free", 3, 7, "blocks_held . blocks_free changes"),
        ("steps", "num_tokens", 3, 77, "num_tokens differs from what was scheduled"),
        ("steps", "num_seqs", 3, 77, "num_seqs differs from what was scheduled"),
        ("scheduled", "request_id", 3, "nobody", r"request_id \['nobody'\] is not recorded elsewhere"),
        ("scheduled", "step", 0, 999, r"step \[999\] is not recorded elsewhere"),
        ("scheduled", "request_id", 1, "r000", "listed twice in one step"),
        ("scheduled", "num_tokens", 3, 0, "listed with no tokens"),
        ("scheduled", "num_computed_before", 5, 3, "does not go on where it stood"),
        ("scheduled", "phase", 0, "decode", "phase unlike its computed tokens"),
        ("scheduled", "phase", 9, "dream", r"phase \['dream'\] is none of prefill, decode"),
        ("requests", "num_prompt_tokens", 0, 17, r"must be prompt \+ output - 1"),
    ],
)
def test_every_contradiction_is_named(frame: str, column: str, row: int, value: object, message: str) -> None:
    problems = "\n".join(changed(frame, column, row, value).check())
    assert pd.Series([problems]).str.contains(message, regex=True).all(), problems


def test_the_hash_of_an_output_depends_on_every_token_and_its_place() -> None:
    hashes = {hash_tokens(tokens) for tokens in ([], [1], [1, 2], [2, 1], [1, 2, 0])}
    assert len(hashes) == 5
    assert hash_tokens(iter([1, 2])) == hash_tokens((1, 2))


def test_meta_is_readable_json(tmp_path: Path) -> None:
    assert json.loads((simulate(seed=5).save(tmp_path) / "meta.json").read_text()) == {"seed": 5}


def test_steps_of_two_instances_may_overlap_and_those_of_one_may_not() -> None:
    record = simulate()
    apart = record.steps.assign(instance="prefill")
    apart.loc[1::2, "instance"] = "decode"
    apart.loc[1, "start"] = apart.loc[0, "start"]
    assert dataclasses.replace(record, steps=apart).check() == []
    apart["instance"] = "decode"
    assert (
        "steps: a step ends before it starts, or starts before the last one ended"
        in dataclasses.replace(record, steps=apart).check()
    )
