"""Whose answers depend on their company: the same prompts alone, in several batches, in chunks, and from the cache."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pandas as pd
from tqdm.auto import tqdm

from lab.peers.contest import Entrant, Field, first_differing_token
from lab.peers.environments import PeerError

Prompts = Mapping[str, Sequence[int]]
Answers = Mapping[str, tuple[int, ...]]


class Ledger:
    """One engine's answers by piece of work, written as they come: a count that was ended can go on from there.

    The file is JSON lines, the first of which says what the answers depend on.

    Args:
        path: The file; its folder is made.
        settled_by: What the answers depend on. A file that says otherwise is begun anew.
        resume: Go on with what the file holds; else it is begun anew in any case.
        patience_s: After so many seconds from now nothing new is asked: the count ends as far as it came.
    """

    def __init__(
        self, path: Path, settled_by: Mapping[str, object], resume: bool = False, patience_s: float = math.inf
    ) -> None:
        self._path = path
        self.patience_s = patience_s
        self._end = time.monotonic() + patience_s
        self._pieces: dict[str, dict[str, tuple[int, ...]]] = {}
        about = json.loads(json.dumps(settled_by))
        lines: list[str] = []
        if resume and path.exists():
            text = path.read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]  # a run that was killed may have left half a line
            path.write_text(whole, encoding="utf-8")
            lines = whole.splitlines()
        head = json.loads(lines[0]) if lines else {}
        if head.get("settled_by") == about:
            for line in lines[1:]:
                piece = json.loads(line)
                self._pieces[piece["piece"]] = {name: tuple(answer) for name, answer in piece["answers"].items()}
        else:
            head = {"settled_by": about, "begun": datetime.now(UTC).isoformat(timespec="minutes")}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(head) + "\n", encoding="utf-8")
        self.begun: str = head["begun"]

    def answers(self, piece: str, work: Callable[[], Answers]) -> Answers | None:
        """What the piece was answered, or what ``work`` answers now; None after the time given."""
        if piece not in self._pieces:
            if time.monotonic() >= self._end:
                return None
            self._pieces[piece] = dict(work())
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"piece": piece, "answers": self._pieces[piece]}) + "\n")
        return self._pieces[piece]


def alone(entrant: Entrant, prompts: Prompts, max_tokens: int, ledger: Ledger) -> dict[str, tuple[int, ...]]:
    """Each prompt's answer when it is the only one, with nothing known from before.

    Raises:
        PeerError: The ledger's time was over before the last.
    """

    def ask(name: str) -> Answers:
        entrant.reset()
        return entrant.answer({name: prompts[name]}, max_tokens)

    answers: dict[str, tuple[int, ...]] = {}
    for name in tqdm(prompts, desc=f"{entrant.name}, alone", unit="prompt"):
        answer = ledger.answers(f"alone, {name}", partial(ask, name))
        if answer is None:
            raise PeerError(f"only {len(answers)} of {len(prompts)} prompts alone {_in_time(ledger)}")
        answers |= answer
    return answers


def in_company(
    entrant: Entrant,
    prompts: Prompts,
    expected: Answers,
    max_tokens: int,
    compositions: int,
    seed: int,
    ledger: Ledger,
) -> pd.DataFrame:
    """All prompts at once, in as many orders as there are compositions: every order puts other prompts side by side.

    Raises:
        PeerError: The ledger's time was over before the first.

    Returns:
        A row for each prompt and composition: engine, composition, prompt, equal, and differs_at (the place of the
        first token that is not as alone; NaN where all are). Compositions for which the ledger's time was too short
        are missing.
    """

    def ask(order: Sequence[str]) -> Answers:
        entrant.reset()
        return entrant.answer({name: prompts[name] for name in order}, max_tokens)

    rows: list[dict[str, object]] = []
    for number in tqdm(range(compositions), desc=f"{entrant.name}, in company", unit="order"):
        order = list(prompts)
        random.Random(f"{seed} {number}").shuffle(order)
        composition = f"batch {number + 1}"
        answers = ledger.answers(composition, partial(ask, order))
        if answers is None:
            break
        rows += _rows(entrant, composition, answers, expected)
    if not rows:
        raise PeerError(f"none of {compositions} batches {_in_time(ledger)}")
    return pd.DataFrame(rows)


def in_chunks_and_cached(
    entrant: Entrant, prompts: Prompts, expected: Answers, max_tokens: int, ledger: Ledger
) -> pd.DataFrame:
    """Each prompt by itself on an engine that cuts prompts into chunks, then again while it still knows the prompt.

    Args:
        entrant: The engine under its ``chunked`` options.
        prompts: The prompts.
        expected: The answers of the same engine without them, alone.
        max_tokens: As for those.
        ledger: Keeps the two answers of a prompt as one piece: the second depends on what the first left behind.
    """
    columns = ("in chunks", "cached")

    def ask(name: str) -> Answers:
        entrant.reset()
        return {column: entrant.answer({name: prompts[name]}, max_tokens)[name] for column in columns}

    rows: list[dict[str, object]] = []
    for name in tqdm(prompts, desc=f"{entrant.name}, in chunks and cached", unit="prompt"):
        both = ledger.answers(f"in chunks and cached, {name}", partial(ask, name))
        if both is None:
            break
        for column in columns:
            rows += _rows(entrant, column, {name: both[column]}, {name: expected[name]})
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


def _in_time(ledger: Ledger) -> str:
    return f"within {ledger.patience_s / 60:g} minutes; give it more, and let it go on with what is kept"


def extent(frame: pd.DataFrame, num_prompts: int) -> str:
    """How far one engine's count came: the compositions of all prompts, and those that time cut short."""
    prompts = counts(frame)["prompts"]
    whole = int((prompts == num_prompts).sum())
    return f"{whole}, {len(prompts) - whole} in part" if whole < len(prompts) else str(whole)


def counts(frame: pd.DataFrame) -> pd.DataFrame:
    """A row for each engine and composition: engine, composition, equal (prompts whose answer is as alone), prompts."""
    grouped = frame.groupby(["engine", "composition"], sort=False)["equal"].agg(["sum", "size"])
    return grouped.rename(columns={"sum": "equal", "size": "prompts"}).reset_index()


def everywhere(frame: pd.DataFrame) -> pd.Series:
    """By engine, the prompts whose answer is the same in every composition that was run."""
    return frame.groupby(["engine", "prompt"], sort=False)["equal"].all().groupby("engine", sort=False).sum()
