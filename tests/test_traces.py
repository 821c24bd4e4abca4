import csv
import itertools
import json
import os
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from lab.traces import (
    MOONCAKE_BLOCK_TOKENS,
    TraceError,
    TraceFormat,
    find_trace,
    prompts_from_hash_ids,
    read_trace,
    scale_block,
    scale_length,
)

MOONCAKE_ROWS = [
    {"timestamp": 500, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 2]},
    {"timestamp": 500, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]},
    {"timestamp": 3500.5, "input_length": 513, "output_length": 30, "hash_ids": [0, 3]},
    {"timestamp": 9000, "input_length": 2, "output_length": 4, "hash_ids": [4]},
]
MOONCAKE = "".join(json.dumps(row) + "\n" for row in MOONCAKE_ROWS)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 23:59:59.9799600,4808,10\r\n"
    "2023-11-16 23:59:59.9799601,3180,8\r\n"
    "2023-11-17 00:00:01,110,27"
)


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, newline="")
    return path


def test_a_mooncake_trace_is_read_as_it_stands(tmp_path: Path) -> None:
    requests = read_trace(written(tmp_path, MOONCAKE), TraceFormat.MOONCAKE)
    assert [r.arrival_s for r in requests] == pytest.approx([0, 0, 3.0005, 8.5])
    assert [r.num_prompt_tokens for r in requests] == [1100, 1024, 513, 2]
    assert [r.num_output_tokens for r in requests] == [7, 1, 30, 4]
    assert [r.hash_ids for r in requests] == [(0, 1, 2), (0, 1), (0, 3), (4,)]


def test_an_azure_trace_is_read_to_its_last_digit_and_over_midnight(tmp_path: Path) -> None:
    requests = read_trace(written(tmp_path, AZURE), TraceFormat.AZURE)
    assert [r.arrival_s for r in requests] == pytest.approx([0, 1e-7, 1.02004], abs=1e-12)
    assert [(r.num_prompt_tokens, r.num_output_tokens) for r in requests] == [(4808, 10), (3180, 8), (110, 27)]
    assert all(r.hash_ids is None for r in requests)


def test_the_first_rows_are_read_without_looking_at_the_rest(tmp_path: Path) -> None:
    path = written(tmp_path, MOONCAKE + "broken")
    assert len(read_trace(path, TraceFormat.MOONCAKE, first=4)) == 4
    with pytest.raises(TraceError, match="line 5"):
        read_trace(path, TraceFormat.MOONCAKE)


@pytest.mark.parametrize("cut", range(1, len(MOONCAKE.splitlines()[-1])))
def test_a_mooncake_trace_cut_anywhere_in_its_last_line_is_refused(cut: int, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"line 4: the file ends in the middle of this line"):
        read_trace(written(tmp_path, MOONCAKE[: -1 - cut]), TraceFormat.MOONCAKE)


@pytest.mark.parametrize(
    "tail", ["2023-11-17 00:0", "2023-11-17 00:00:01.5", "2023-11-17 00:00:01.5,", "2023-11-17 00:00:01.5,1,"]
)
def test_an_azure_trace_cut_in_its_last_line_is_refused(tail: str, tmp_path: Path) -> None:
    lines = AZURE.splitlines(keepends=True)[:-1]
    with pytest.raises(TraceError, match=r"line 4: the file ends in the middle of this line"):
        read_trace(written(tmp_path, "".join(lines) + tail), TraceFormat.AZURE)


def mooncake(**change: object) -> str:
    return MOONCAKE + json.dumps({**MOONCAKE_ROWS[-1], **change}) + "\n"


@pytest.mark.parametrize(
    ("trace_format", "text", "message"),
    [
        ("mooncake", AZURE, "line 1: not the mooncake format.*found 'TIMESTAMP,.*known: mooncake, azure"),
        ("azure", MOONCAKE, "line 1: not the azure format"),
        ("mooncake", MOONCAKE + '{"prompt": "x"}\n', "line 5: not the mooncake format"),
        ("mooncake", MOONCAKE + "[1, 2]\n", "line 5: not the mooncake format"),
        ("mooncake", mooncake(timestamp=float("nan")), "line 5: timestamp is nan, must be a finite"),
        ("mooncake", mooncake(timestamp=-1), "line 5: timestamp is -1, must be"),
        ("mooncake", mooncake(timestamp="0"), "line 5: timestamp is '0', must be"),
        ("mooncake", mooncake(timestamp=8999), "line 5: arrives 0.001 s before the line above it. Sort"),
        ("mooncake", mooncake(input_length=0, hash_ids=[]), "line 5: input_length is 0, must be .* at least 1"),
        ("mooncake", mooncake(output_length=2.5), "line 5: output_length is 2.5"),
        ("mooncake", mooncake(output_length=True), "line 5: output_length is True"),
        ("mooncake", mooncake(hash_ids=[1, 2]), "line 5: 2 hash_ids for input_length 2, must be 1, one per 512 tokens"),
        ("mooncake", mooncake(hash_ids=["a"]), "line 5: hash_ids must be a list of integers"),
        ("mooncake", "", "the trace holds no requests"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "the trace holds no requests"),
        ("azure", AZURE + "\r\n16/11/2023 18:00,1,1\r\n", "line 5: not the azure format"),
        ("azure", AZURE + "\r\n2023-11-17 00:00:02,1\r\n", "line 5: not the azure format"),
        ("azure", AZURE + "\r\n2023-11-17 00:00:02,1,2,3\r\n", "line 5: not the azure format"),
        ("azure", AZURE + "\r\n2023-11-17 00:00:02,many,1\r\n", "line 5: invalid literal"),
        ("azure", AZURE + "\r\n2023-13-17 00:00:02,1,1\r\n", "line 5: month must be in"),
        ("azure", AZURE + "\r\n2023-11-17 00:00:02,1,-1\r\n", "line 5: GeneratedTokens is -1, must be"),
        ("azure", AZURE + "\r\n2023-11-16 00:00:02,1,1\r\n", "line 5: arrives .* s before the line above it"),
    ],
)
def test_bad_traces_are_refused_by_line(trace_format: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(written(tmp_path, text), TraceFormat(trace_format))


def test_a_compressed_trace_is_told_to_be_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(b"\x1f\x8b\x08\x00\xff\xfe")
    with pytest.raises(TraceError, match=r"not a text file.*Unpack it first"):
        read_trace(path, TraceFormat.MOONCAKE)


def test_a_trace_is_found_in_the_given_folder_the_variable_or_by_its_full_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, MOONCAKE)
    monkeypatch.delenv("LAB_TRACES", raising=False)
    with pytest.raises(TraceError, match=r"no folder to look in.*LAB_TRACES"):
        find_trace("trace")
    assert find_trace("trace", tmp_path) == find_trace(str(path)) == path
    monkeypatch.setenv("LAB_TRACES", str(tmp_path))
    assert find_trace("trace") == path
    with pytest.raises(TraceError, match=r"there is no file .*other"):
        find_trace("other")


# ------------------------------------------------------------------------------------------------------ scaling, tokens


@pytest.mark.parametrize("scale", [1.0, 0.5, 1 / 16, 1 / 32, 1 / 512, 2.0, 3 / 512])
def test_scaling_keeps_the_number_of_blocks(scale: float) -> None:
    block = scale_block(scale)
    assert block == MOONCAKE_BLOCK_TOKENS * scale
    for tokens in (1, 511, 512, 513, 1024, 1025, 7322, 126195):
        assert -(-scale_length(tokens, scale) // block) == -(-tokens // MOONCAKE_BLOCK_TOKENS)


def test_a_third_of_a_multiple_of_three_is_whole() -> None:
    assert [scale_length(n, 1 / 3) for n in (3, 6, 7, 300_000)] == [1, 2, 3, 100_000]
    assert scale_length(1, 0.001) == 1


@pytest.mark.parametrize(("scale", "nearest"), [(0.01, 5 / 512), (1 / 1000, 1 / 512), (1 / 3, 171 / 512)])
def test_a_scale_that_splits_a_token_is_refused_with_the_nearest_that_does_not(scale: float, nearest: float) -> None:
    with pytest.raises(TraceError, match=f"The nearest scale is {nearest}"):
        scale_block(scale)
    assert scale_block(nearest) >= 1


def shared(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


def expected_sharing(lengths: tuple[int, int], ids: tuple[tuple[int, ...], tuple[int, ...]], block: int) -> int:
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*ids, strict=False)))
    return min(common * block, *lengths)


@pytest.mark.parametrize("vocab_size", [40, 50_000])
def test_prompts_share_exactly_the_prefixes_that_the_hash_ids_share(vocab_size: int) -> None:
    rng = np.random.default_rng(0)
    ids = [tuple(int(v) for v in rng.integers(0, 4, rng.integers(1, 6))) for _ in range(60)]
    lengths = [int(rng.integers(8 * (len(i) - 1) + 1, 8 * len(i) + 1)) for i in ids]
    prompts = prompts_from_hash_ids(lengths, ids, 8, vocab_size, np.random.default_rng(1))
    assert [len(prompt) for prompt in prompts] == lengths
    assert all(prompt.min() >= 0 and prompt.max() < vocab_size for prompt in prompts)
    pairs = list(itertools.combinations(range(60), 2))
    found = [shared(prompts[a], prompts[b]) for a, b in pairs]
    assert found == [expected_sharing((lengths[a], lengths[b]), (ids[a], ids[b]), 8) for a, b in pairs]
    assert len(set(found)) > 8, "the example must share to many depths"


def test_one_id_after_different_prefixes_is_not_one_block() -> None:
    first, second = prompts_from_hash_ids([8, 8], [(1, 7), (2, 7)], 4, 1000, np.random.default_rng(0))
    assert first[0] != second[0]
    assert (first[4:] != second[4:]).any()


def test_more_sibling_blocks_than_the_vocabulary_can_tell_apart_are_refused() -> None:
    ids = [(i,) for i in range(5)]
    assert len({int(p[0]) for p in prompts_from_hash_ids([3] * 5, ids, 3, 5, np.random.default_rng(0))}) == 5
    with pytest.raises(TraceError, match="over 4 different blocks follow one prefix, but a vocabulary of 4"):
        prompts_from_hash_ids([3] * 5, ids, 3, 4, np.random.default_rng(0))


def test_a_shorter_replay_is_the_beginning_of_a_longer_one() -> None:
    ids = [(0, 1), (0, 2), (3,), (0, 1, 4)]
    lengths = [8, 7, 2, 12]
    whole = prompts_from_hash_ids(lengths, ids, 4, 100, np.random.default_rng(5))
    part = prompts_from_hash_ids(lengths[:2], ids[:2], 4, 100, np.random.default_rng(5))
    assert all(np.array_equal(a, b) for a, b in zip(part, whole, strict=False))


# ------------------------------------------------------------------------------------------------------- the real files

real = pytest.mark.skipif("LAB_TRACES" not in os.environ, reason="LAB_TRACES does not name a folder of traces")
REAL_FOLDER = Path(os.environ.get("LAB_TRACES", ""))
REAL_MOONCAKE = sorted(path.name for path in REAL_FOLDER.glob("mooncake*.jsonl")) if "LAB_TRACES" in os.environ else []
REAL_AZURE = sorted(path.name for path in REAL_FOLDER.glob("azure*2023*.csv")) if "LAB_TRACES" in os.environ else []


@real
@pytest.mark.parametrize("name", REAL_MOONCAKE)
def test_a_real_mooncake_trace_agrees_with_an_independent_read(name: str) -> None:
    requests = read_trace(find_trace(name), TraceFormat.MOONCAKE)
    rows = [json.loads(line) for line in (REAL_FOLDER / name).read_text().splitlines()]
    assert len(requests) == len(rows) > 1000
    assert [r.num_prompt_tokens for r in requests] == [row["input_length"] for row in rows]
    assert [r.num_output_tokens for r in requests] == [row["output_length"] for row in rows]
    assert [list(r.hash_ids or ()) for r in requests] == [row["hash_ids"] for row in rows]
    assert [r.arrival_s for r in requests] == pytest.approx(
        [(r["timestamp"] - rows[0]["timestamp"]) / 1e3 for r in rows]
    )


@real
@pytest.mark.parametrize("name", REAL_MOONCAKE)
def test_a_real_mooncake_trace_keeps_its_sharing_when_scaled(name: str) -> None:
    requests = read_trace(find_trace(name), TraceFormat.MOONCAKE, first=300)
    lengths = [scale_length(r.num_prompt_tokens, 1 / 32) for r in requests]
    ids = [r.hash_ids or () for r in requests]
    prompts = prompts_from_hash_ids(lengths, ids, scale_block(1 / 32), 49152, np.random.default_rng(0))
    pairs = [(a, b) for a, b in itertools.combinations(range(300), 2) if (a + b) % 7 == 0]
    found = [shared(prompts[a], prompts[b]) for a, b in pairs]
    assert found == [expected_sharing((lengths[a], lengths[b]), (ids[a], ids[b]), 16) for a, b in pairs]
    assert max(found) >= 16


@real
@pytest.mark.parametrize("name", REAL_AZURE)
def test_a_real_azure_trace_agrees_with_an_independent_read(name: str) -> None:
    requests = read_trace(find_trace(name), TraceFormat.AZURE)
    with (REAL_FOLDER / name).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(requests) == len(rows) > 1000
    assert [r.num_prompt_tokens for r in requests] == [int(row["ContextTokens"]) for row in rows]
    assert [r.num_output_tokens for r in requests] == [int(row["GeneratedTokens"]) for row in rows]
    stamps = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    assert [r.arrival_s for r in requests] == pytest.approx([(s - stamps[0]).total_seconds() for s in stamps], abs=2e-6)
