"""The golden test: the same prompts through two configurations must give the same bits, token for token.

A *cell* is one configuration run over a prompt set. The reference cell defines the answers; every other cell of the
matrix must equal it in every token and in every bit of every float32 logprob. Where it does not, the first difference
of each prompt is explained: position, both tokens, and the margin between the two most likely tokens there.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from tqdm.auto import tqdm

from engine import LLM, RequestOutput, SamplingParams
from engine.core import StepStats

TokenPrompts = Mapping[str, tuple[int, ...]]
Outputs = dict[str, "GoldenOutput"]
CellStatus = Literal["reference", "equal", "different", "absent"]
Observe = Callable[[StepStats], Any]


def _ignore(stats: StepStats) -> None:
    """What observes a run that needs no observer."""


@dataclass(frozen=True)
class GoldenPrompt:
    """One entry of a prompt file."""

    prompt_id: str
    kind: str
    messages: tuple[dict[str, str], ...]


@dataclass(frozen=True)
class GoldenOutput:
    """What one prompt produced. Logprobs are float32 values, compared by their bits."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str

    @classmethod
    def of(cls, output: RequestOutput) -> GoldenOutput:
        return cls(output.token_ids, output.logprobs, output.finish_reason)

    @property
    def digest(self) -> str:
        """SHA-256 over tokens, logprob bits and finish reason."""
        count = len(self.token_ids)
        packed = struct.pack(f"<{count}q{count}f", *self.token_ids, *self.logprobs)
        return hashlib.sha256(packed + self.finish_reason.encode()).hexdigest()


@dataclass(frozen=True)
class Difference:
    """The first place where one prompt's output leaves the reference.

    ``expected`` and ``actual`` are token ids, None past the end of an output. ``margin`` is the gap in logits between
    the two most likely tokens at that position, once ``explain`` has computed it.
    """

    prompt_id: str
    position: int
    expected: int | None
    actual: int | None
    expected_logprob: float | None
    actual_logprob: float | None
    margin: float | None = None

    def __str__(self) -> str:
        what = f"token {self.expected} became {self.actual}"
        if self.expected == self.actual:
            what = (
                f"the logprob of token {self.expected} is {self.actual_logprob!r} instead of {self.expected_logprob!r}"
            )
        gap = "" if self.margin is None else f"; the top two logits lie {self.margin:.3g} apart"
        return f"{self.prompt_id}, output position {self.position}: {what}{gap}"


def load_prompts(path: Path) -> tuple[GoldenPrompt, ...]:
    """Read a prompt file: one JSON object a line with ``id``, ``kind`` and ``messages``.

    Raises:
        ValueError: A line is not such an object, or an id occurs twice.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            prompts.append(GoldenPrompt(entry["id"], entry["kind"], tuple(entry["messages"])))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: not an object with id, kind and messages ({error!r})") from error
    ids = [prompt.prompt_id for prompt in prompts]
    if len(set(ids)) != len(ids):
        raise ValueError(f"{path}: the ids {sorted({i for i in ids if ids.count(i) > 1})} occur more than once")
    return tuple(prompts)


def encode(llm: LLM, prompts: Sequence[GoldenPrompt]) -> dict[str, tuple[int, ...]]:
    """Token ids of each prompt under the model's chat template."""
    if llm.tokenizer is None:
        raise ValueError("the model has no tokenizer; give token ids to run_cell directly")
    return {prompt.prompt_id: llm.tokenizer.encode_chat(prompt.messages) for prompt in prompts}


def run_cell(
    llm: LLM, prompts: TokenPrompts, params: SamplingParams, desc: str | None = None, observe: Observe = _ignore
) -> Outputs:
    """Run every prompt, all added at once, in the mapping's order; ``observe`` sees every step's statistics."""
    pending = {llm.add_request(ids, params, f"golden:{name}"): name for name, ids in prompts.items()}
    done: Outputs = {}
    with tqdm(total=len(pending), desc=desc, unit="prompt", disable=desc is None) as bar:
        while len(done) < len(prompts):
            done |= (ended := _step(llm, pending, observe))
            bar.update(len(ended))
    return {name: done[name] for name in prompts}


def _step(llm: LLM, pending: Mapping[str, str], observe: Observe) -> Outputs:
    """One step: the outputs of the prompts (request_id to name) that ended in it."""
    _, outputs, stats = llm.step()
    if stats is not None:
        observe(stats)
    return {pending[output.request_id]: GoldenOutput.of(output) for output in outputs if output.request_id in pending}


def run_alone(
    llm: LLM, prompts: TokenPrompts, params: SamplingParams, desc: str | None = None, observe: Observe = _ignore
) -> Outputs:
    """Run every prompt by itself, one after the other."""
    names = tqdm(prompts, desc=desc, unit="prompt", disable=desc is None)
    return {name: run_cell(llm, {name: prompts[name]}, params, observe=observe)[name] for name in names}


def run_among_aborts(
    llm: LLM,
    prompts: TokenPrompts,
    params: SamplingParams,
    desc: str | None = None,
    observe: Observe = _ignore,
    seed: int = 0,
) -> Outputs:
    """Run every prompt, arriving in random order a few at a time, beside other requests that are aborted at random."""
    generator = random.Random(seed)
    arriving = generator.sample(list(prompts), len(prompts))
    pending: dict[str, str] = {}
    strangers: list[str] = []
    done: Outputs = {}
    with tqdm(total=len(prompts), desc=desc, unit="prompt", disable=desc is None) as bar:
        while len(done) < len(prompts):
            for _ in range(min(generator.randint(0, 3), len(arriving))):
                name = arriving.pop()
                pending[llm.add_request(prompts[name], params, f"golden:{name}")] = name
                if generator.random() < 0.5:
                    stranger = prompts[generator.choice(list(prompts))][::-1]
                    strangers.append(llm.add_request(stranger, params))
            if strangers and generator.random() < 0.2:
                llm.abort(strangers.pop(generator.randrange(len(strangers))))
            done |= (ended := _step(llm, pending, observe))
            bar.update(len(ended))
    for request_id in strangers:
        llm.abort(request_id)
    return {name: done[name] for name in prompts}


def run_warm(
    llm: LLM, prompts: TokenPrompts, params: SamplingParams, desc: str | None = None, observe: Observe = _ignore
) -> Outputs:
    """Run every prompt twice: the outputs and the steps of the second time, when the prefix cache knows them."""
    run_cell(llm, prompts, params, desc and f"{desc} (to warm the cache)")
    return run_cell(llm, prompts, params, desc, observe)


def run_half_warm(
    llm: LLM, prompts: TokenPrompts, params: SamplingParams, desc: str | None = None, observe: Observe = _ignore
) -> Outputs:
    """Run every second prompt, then all of them: some are known to the prefix cache and some are not."""
    run_cell(llm, {name: prompts[name] for name in list(prompts)[::2]}, params, desc and f"{desc} (to warm the cache)")
    return run_cell(llm, prompts, params, desc, observe)


def first_difference(name: str, expected: GoldenOutput, actual: GoldenOutput) -> Difference | None:
    """Where two outputs of one prompt part, in tokens or logprob bits; None when they are equal."""
    if expected.digest == actual.digest:
        return None
    longest = max(len(expected.token_ids), len(actual.token_ids))
    for position in range(longest + 1):
        mine, other = _at(expected, position), _at(actual, position)
        if mine is None or other is None or mine[0] != other[0] or _bits(mine[1]) != _bits(other[1]):
            return Difference(
                name,
                position,
                None if mine is None else mine[0],
                None if other is None else other[0],
                None if mine is None else mine[1],
                None if other is None else other[1],
            )
    raise AssertionError("unequal digests with equal tokens and logprobs")


def differences(expected: Outputs, actual: Outputs) -> list[Difference]:
    """The first difference of every prompt that differs; a prompt missing on one side is an error."""
    if expected.keys() != actual.keys():
        raise ValueError(f"the cells ran different prompts: {sorted(expected.keys() ^ actual.keys())}")
    found = (first_difference(name, expected[name], actual[name]) for name in expected)
    return [difference for difference in found if difference is not None]


def explain(llm: LLM, prompts: TokenPrompts, expected: Outputs, found: Sequence[Difference]) -> list[Difference]:
    """Add to each difference the margin of the two most likely tokens where it happened, computed by ``llm``."""
    explained = []
    for difference in found:
        prefix = prompts[difference.prompt_id] + expected[difference.prompt_id].token_ids[: difference.position]
        top = llm.next_token_logits(prefix).topk(2).values
        explained.append(Difference(**{**difference.__dict__, "margin": float(top[0] - top[1])}))
    return explained


def random_compositions(prompts: TokenPrompts, count: int, size: int, seed: int) -> list[dict[str, tuple[int, ...]]]:
    """``count`` random batches of up to ``size`` prompts each, every prompt in at least one where count allows."""
    generator = random.Random(seed)
    names = list(prompts)
    deck: list[str] = []
    batches = []
    for _ in range(count):
        while len(deck) < size:
            deck += generator.sample(names, len(names))
        batch = list(dict.fromkeys(deck[:size]))
        deck = deck[size:]
        batches.append({name: prompts[name] for name in batch})
    return batches


@dataclass(frozen=True)
class Cell:
    """One configuration of the matrix. ``run`` is None where the configuration does not exist yet: marked, not passed.

    ``proof`` checks, from what the cell recorded, that the feature acted; it returns what it saw, or raises.
    """

    row: str
    column: str
    run: Callable[[], Outputs] | None
    proof: Callable[[], str] | None = None


def run_matrix(
    reference: Cell,
    cells: Sequence[Cell],
    explainer: Callable[[Outputs, list[Difference]], list[Difference]] | None = None,
) -> tuple[pd.DataFrame, Outputs]:
    """Run the reference cell and hold every other one against it.

    Args:
        reference: The cell that defines the answers.
        cells: The others.
        explainer: Adds to the differences of a cell what can be found out about them, as ``explain`` does.

    Returns:
        A frame with the columns row, column, status (reference, equal, different, absent), num_equal, num_prompts and
        detail; and the reference outputs.

    Raises:
        AssertionError: A cell's proof found that the feature did not act, so the cell could not have failed.
    """
    if reference.run is None:
        raise ValueError("the reference cell must exist")
    expected = reference.run()
    rows: list[dict[str, Any]] = []
    for cell in (reference, *cells):
        entry: dict[str, Any] = {"row": cell.row, "column": cell.column, "num_prompts": len(expected)}
        if cell.run is None:
            rows.append(entry | {"status": "absent", "num_equal": 0, "detail": "does not exist yet"})
            continue
        found = [] if cell is reference else differences(expected, cell.run())
        if found and explainer is not None:
            found = explainer(expected, found)
        status: CellStatus = "reference" if cell is reference else "different" if found else "equal"
        detail = "; ".join(map(str, found[:3])) if found else (cell.proof() if cell.proof else "")
        rows.append(entry | {"status": status, "num_equal": len(expected) - len(found), "detail": detail})
    return pd.DataFrame(rows), expected


def _at(output: GoldenOutput, position: int) -> tuple[int, float] | None:
    return (output.token_ids[position], output.logprobs[position]) if position < len(output.token_ids) else None


def _bits(value: float) -> bytes:
    return struct.pack("<f", value)
