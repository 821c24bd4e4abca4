"""Whose answers depend on their company: the same prompts alone, in several batches, in chunks, and from the cache."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import pandas as pd
from tqdm.auto import tqdm

from lab.peers.contest import Entrant, Field, first_differing_token
from lab.peers.environments import PeerError

Prompts = Mapping[str, Sequence[int]]
Answers = Mapping[str, tuple[int, ...]]


def alone(entrant: Entrant, prompts: Prompts, max_tokens: int) -> dict[str, tuple[int, ...]]:
    """Each prompt's answer when it is the only one, with nothing known from before."""
    answers: dict[str, tuple[int, ...]] = {}
    for name, prompt in tqdm(prompts.items(), desc=f"{entrant.name}, alone", unit="prompt"):
        entrant.reset()
        answers |= entrant.answer({name: prompt}, max_tokens)
    return answers


def in_company(
    entrant: Entrant,
    prompts: Prompts,
    expected: Answers,
    max_tokens: int,
    compositions: int,
    seed: int,
) -> pd.DataFrame:
    """All prompts at once, in as many orders as there are compositions: every order puts other prompts side by side.

    Returns:
        A row for each prompt and composition: engine, composition, prompt, equal, and differs_at (the place of the
        first token that is not as alone; NaN where all are).
    """
    rows: list[dict[str, object]] = []
    for number in tqdm(range(compositions), desc=f"{entrant.name}, in company", unit="order"):
        order = list(prompts)
        random.Random(f"{seed} {number}").shuffle(order)
        entrant.reset()
        answers = entrant.answer({name: prompts[name] for name in order}, max_tokens)
        rows += _rows(entrant, f"batch {number + 1}", answers, expected)
    return pd.DataFrame(rows)


def in_chunks_and_cached(entrant: Entrant, prompts: Prompts, expected: Answers, max_tokens: int) -> pd.DataFrame:
    """Each prompt by itself on an engine that cuts prompts into chunks, then again while it still knows the prompt.

    Args:
        entrant: The engine under its ``chunked`` options.
        prompts: The prompts.
        expected: The answers of the same engine without them, alone.
        max_tokens: As for those.
    """
    rows: list[dict[str, object]] = []
    for name, prompt in tqdm(prompts.items(), desc=f"{entrant.name}, in chunks and cached", unit="prompt"):
        entrant.reset()
        for column in ("in chunks", "cached"):
            rows += _rows(entrant, column, entrant.answer({name: prompt}, max_tokens), {name: expected[name]})
    return pd.DataFrame(rows)


def survivors(field: Field, failed: dict[str, str], run: Callable[[Entrant], None]) -> None:
    """``run`` for every engine that is present; ``failed`` takes why the others, or those that fail in it, are not."""
    for entrant in list(field.present()):
        try:
            run(entrant)
        except PeerError as error:
            failed[entrant.name] = str(error)
            field.retire(entrant)
    failed |= field.absent


def _rows(entrant: Entrant, composition: str, answers: Answers, expected: Answers) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, answer in expected.items():
        place = first_differing_token(answers[name], answer)
        rows.append(
            {
                "engine": entrant.name,
                "composition": composition,
                "prompt": name,
                "equal": place is None,
                "differs_at": math.nan if place is None else place,
            }
        )
    return rows


def counts(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each engine and composition: engine, composition, equal (prompts whose answer is as alone), prompts."""
    grouped = frame.groupby(["engine", "composition"], sort=False)["equal"].agg(["sum", "size"])
    return grouped.rename(columns={"sum": "equal", "size": "prompts"}).reset_index()


def everywhere(frame: pd.DataFrame) -> pd.Series:
    """By engine, the prompts whose answer is the same in every composition that was run."""
    return frame.groupby(["engine", "prompt"], sort=False)["equal"].all().groupby("engine", sort=False).sum()
