"""A stage's results: what its notebook's last cell writes, and what every verdict is read from.

The file is the judge. A run whose notebook "completed" without writing it has failed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from lab.paths import ReportPaths, write_atomic
from lab.provenance import Provenance

Kind = Literal["exactness", "count", "timing"]
Verdict = Literal["better", "worse", "~", "not judged"]
Scalar = str | int | float | bool | None
NOT_JUDGED_IN_QUICK_MODE = "not judged in quick mode"


@dataclass(frozen=True)
class Gate:
    """One condition the stage must meet. ``passed`` None means "not judged", and ``note`` then says why."""

    name: str
    observed: Scalar
    bound: str
    passed: bool | None
    kind: Kind
    note: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"gate {self.name!r}: kind {self.kind!r} is none of {', '.join(get_args(Kind))}")
        if self.passed is None and not self.note:
            raise ValueError(f"gate {self.name!r} is not judged; say why in its note")
        object.__setattr__(self, "observed", plain(self.observed))
        object.__setattr__(self, "passed", plain(self.passed))

    @property
    def verdict(self) -> str:
        return "not judged" if self.passed is None else "passed" if self.passed else "FAILED"


@dataclass(frozen=True)
class Headline:
    """One number that the report leads with."""

    name: str
    value: Scalar
    unit: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", plain(self.value))

    @property
    def text(self) -> str:
        return f"{readable(self.value)} {self.unit}".strip()


@dataclass(frozen=True)
class Loss:
    """A metric that got worse by more than its noise, and the reason written for it ("" when there is none)."""

    metric: str
    change: str
    reason: str


@dataclass(frozen=True)
class StageResults:
    """Everything a stage claims.

    ``summary`` holds the rows of the one table of every metric: each row names its ``metric`` and may carry a
    ``verdict`` (better, worse, ~ or not judged), a ``change`` (text) and a ``reason`` (why it got worse).
    ``noise_floor`` maps metrics to the relative half-width of their A/A band. In quick mode timing gates become "not
    judged": a quick run is too short to judge a time, whatever it measured.
    """

    stage: int | str
    title: str
    gates: Sequence[Gate]
    provenance: Provenance
    quick: bool = False
    headline: Sequence[Headline] = ()
    summary: Sequence[Mapping[str, Scalar]] = ()
    noise_floor: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.gates:
            raise ValueError(f"{self.title!r} has no gates: a stage that cannot fail proves nothing")
        names = [gate.name for gate in self.gates]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"gates named twice: {', '.join(sorted(twice))}")
        rows = tuple(_plain_row(row) for row in self.summary)
        for row in rows:
            if not row.get("metric"):
                raise ValueError(f"summary row {row} has no 'metric'")
            if row.get("verdict", "~") not in get_args(Verdict):
                raise ValueError(
                    f"verdict {row['verdict']!r} of {row['metric']!r} is none of {', '.join(get_args(Verdict))}"
                )
        gates = tuple(self.gates)
        if self.quick:
            gates = tuple(
                replace(gate, passed=None, note=NOT_JUDGED_IN_QUICK_MODE) if gate.kind == "timing" else gate
                for gate in gates
            )
        object.__setattr__(self, "gates", gates)
        object.__setattr__(self, "summary", rows)
        object.__setattr__(self, "headline", tuple(self.headline))
        object.__setattr__(self, "noise_floor", {key: float(value) for key, value in self.noise_floor.items()})

    @property
    def losses(self) -> tuple[Loss, ...]:
        return tuple(
            Loss(str(row["metric"]), readable(row.get("change")), str(row.get("reason") or "").strip())
            for row in self.summary
            if row.get("verdict") == "worse"
        )

    @property
    def failures(self) -> tuple[str, ...]:
        """Why the stage fails, one line each; empty when it passes."""
        gates = [
            f"gate failed: {gate.name} (observed {readable(gate.observed)}, bound {gate.bound})"
            for gate in self.gates
            if gate.passed is False
        ]
        losses = [
            f"{loss.metric} got worse by more than its noise ({loss.change}) and no reason is written"
            for loss in self.losses
            if not loss.reason
        ]
        return (*gates, *losses)

    @property
    def status(self) -> Literal["passed", "failed"]:
        return "failed" if self.failures else "passed"

    def to_dict(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "title": self.title,
            "status": self.status,
            "quick": self.quick,
            "gates": [asdict(gate) for gate in self.gates],
            "headline": [asdict(number) for number in self.headline],
            "summary": [dict(row) for row in self.summary],
            "losses": [asdict(loss) for loss in self.losses],
            "noise_floor": dict(self.noise_floor),
            "provenance": self.provenance.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StageResults:
        """Raises ``ValueError`` where fields are missing or the written status is not what the gates say."""
        try:
            results = cls(
                stage=data["stage"],
                title=data["title"],
                quick=data["quick"],
                gates=tuple(Gate(**gate) for gate in data["gates"]),
                headline=tuple(Headline(**number) for number in data["headline"]),
                summary=tuple(data["summary"]),
                noise_floor=data["noise_floor"],
                provenance=Provenance.from_dict(data["provenance"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a stage's results: {error}; run the stage's notebook again") from error
        if results.status != data["status"]:
            raise ValueError(f"status is written as {data['status']!r} but the gates say {results.status!r}")
        return results

    def save(self, paths: ReportPaths | None = None) -> None:
        """Writes ``results.json`` and ``report.md`` where ``lab report`` looks for them (atomically; the JSON last)."""
        paths = paths or ReportPaths.of(self.stage, self.quick)
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        write_atomic(paths.summary, self.markdown())
        write_atomic(paths.results, text + "\n")

    @classmethod
    def load(cls, path: Path) -> StageResults:
        """Raises ``ValueError`` naming ``path`` when it is no valid results file; ``OSError`` when unreadable."""
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def markdown(self) -> str:
        """The short report that is committed beside the JSON."""
        mode = " (quick run: timing is not judged)" if self.quick else ""
        parts = [f"# {self.title}\n\n**{self.status.upper()}**{mode}\n"]
        parts += [f"- {failure}\n" for failure in self.failures]
        if self.headline:
            rows = [(number.name, number.text, number.note) for number in self.headline]
            parts.append("## Headline\n\n" + markdown_table(("Number", "Value", "Note"), rows))
        gates = [(g.name, readable(g.observed), g.bound, g.verdict, g.kind, g.note) for g in self.gates]
        parts.append("## Gates\n\n" + markdown_table(("Gate", "Observed", "Bound", "Verdict", "Kind", "Note"), gates))
        if self.losses:
            rows = [(loss.metric, loss.change, loss.reason or "**none written**") for loss in self.losses]
            parts.append("## Got worse\n\n" + markdown_table(("Metric", "Change", "Reason"), rows))
        if self.summary:
            columns = list(dict.fromkeys(key for row in self.summary for key in row))
            cells = [tuple(readable(row.get(column)) for column in columns) for row in self.summary]
            parts.append("## Every metric\n\n" + markdown_table(columns, cells))
        parts.append("## Provenance\n\n" + markdown_table(("What", "Value"), self.provenance.rows()))
        return "\n".join(parts)


def plain(value: Any) -> Any:
    """A numpy scalar as Python's own; a NaN (no value) as None. Raises ``ValueError`` for infinities and objects."""
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and math.isnan(value):
        return None
    if not isinstance(value, str | int | float | bool | None) or value in (math.inf, -math.inf):
        raise ValueError(f"{value!r} ({type(value).__name__}) is no finite number, text, truth value or None")
    return value


def _plain_row(row: Mapping[str, Any]) -> dict[str, Scalar]:
    plain_row: dict[str, Scalar] = {}
    for key, value in row.items():
        try:
            plain_row[str(key)] = plain(value)
        except ValueError as error:
            raise ValueError(f"summary of {row.get('metric')!r}, column {key!r}: {error}; leave it out") from error
    return plain_row


def readable(value: Scalar) -> str:
    """For people: four significant digits, thousands apart, an en dash for nothing."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) >= 1000):
        return f"{int(value):,}"
    if value != 0 and abs(value) < 1e-3:
        return f"{value:.3g}"
    digits = max(0, 3 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A GitHub-flavoured table; pipes and line ends inside cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    escaped = (" | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in line) for line in lines)
    return "".join(f"| {line} |\n" for line in escaped)
