"""Paired experiments: a feature against its baseline, and the baseline against itself, judged by one rule.

Each round runs four trials: baseline and feature (the feature's pair), then baseline and baseline (the noise's pair).
The order within a pair is AB, BA, AB, ..., so that a drift of the machine cancels over two rounds, which share a
workload seed. A metric is *better* or *worse* where the interval of its ratio lies outside its A/A band, else `~`;
`lab.intervals` says how both are made. Quick mode judges no time, so it runs the feature's pairs alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from tqdm.auto import tqdm

from lab.comparison import MIN_PAIRS, Contrast, Experiment, Place, Trial, Verdict, unexplained_losses
from lab.metrics import SLO, summarise
from lab.record import RunRecord

__all__ = [
    "Arm",
    "CacheState",
    "Experiment",
    "ExperimentError",
    "GoldenMismatchError",
    "Verdict",
    "kept_runs",
    "run_experiment",
    "unexplained_losses",
]

DEFAULT_PAIRS = 20
DEFAULT_SEEDS = (0, 1, 2)

Golden = Mapping[int, Mapping[str, str]]
"""The golden answers: seed to request_id to `hash_tokens` of the output."""


class ExperimentError(RuntimeError):
    """A trial that proves nothing: its records, its cache or its requests are not what the experiment says."""


class GoldenMismatchError(ExperimentError):
    """A timed trial whose output is not the golden one. No speed is shown for wrong output."""


class CacheState(StrEnum):
    """What the prefix cache holds when a trial starts. Cold and warm trials are never compared with each other."""

    NONE = "none"  # there is no prefix cache
    COLD = "cold"
    WARM = "warm"


def _nothing(seed: int) -> None:
    """The preparation of an arm that needs none."""


@dataclass(frozen=True)
class Arm:
    """One side of an experiment.

    run: replays the workload of the given seed and returns its records.
    cache: the state in which every trial must start; `observe_cache` looks at the engine's, just before each.
    prepare: brings the arm into that state, outside of the timed run.
    """

    name: str
    run: Callable[[int], RunRecord]
    cache: CacheState
    observe_cache: Callable[[], CacheState]
    prepare: Callable[[int], None] = _nothing


def run_experiment(
    baseline: Arm,
    feature: Arm,
    golden: Golden,
    *,
    pairs: int = DEFAULT_PAIRS,
    seeds: Sequence[int] = DEFAULT_SEEDS,
    slo: SLO | None = None,
    quick: bool = False,
    exempt: Mapping[str, str] | None = None,
    keep: Path | None = None,
    progress: bool = True,
) -> Experiment:
    """Runs the warm-up (each arm on each seed's workload) and `4 * pairs` timed trials.

    If quick, the feature's `2 * pairs` trials alone.

    Args:
        baseline, feature: the two arms; their cache states must agree, except that an arm may have no cache at all.
        golden: the expected output of every request, for every seed.
        pairs: of each contrast; even, and at least `MIN_PAIRS` unless quick. On the simulated shared machine of the
            tests, 20 pairs call a slowdown by 10% in 99 experiments of 100, 16 pairs in 95, 12 in 79, 10 in 57.
        seeds: of the workload; two rounds share one, and the rounds go through them in turn.
        slo: objectives for the goodput.
        quick: too short to judge a time; exactness and counts are judged all the same.
        exempt: names of arms whose output need not be the golden one, each with the reason, which the table shows.
        keep: folder that gets every trial's records as soon as it ends, so that an interrupted experiment keeps them.
        progress: show a progress bar.

    Raises:
        ValueError: the experiment could not be judged as it is set up.
        GoldenMismatchError: an arm's output differs from the golden one.
        ExperimentError: a trial starts in the wrong cache state, is unfinished, or contradicts itself.
    """
    exempt = dict(exempt or {})
    _validate(baseline, feature, golden, pairs, seeds, quick, exempt)
    trials: list[Trial] = []
    contrasts = [(Contrast.FEATURE, feature)] if quick else [(Contrast.FEATURE, feature), (Contrast.NOISE, baseline)]
    warm_up = () if quick else seeds
    total = 2 * len(warm_up) + 2 * len(contrasts) * pairs
    with tqdm(total=total, desc=f"{baseline.name} / {feature.name}", disable=not progress) as bar:
        for arm in (baseline, feature):
            for seed in warm_up:
                bar.set_postfix_str(f"warm-up, {arm.name}")
                _run_checked(arm, seed, golden, exempt)
                bar.update()
        for pair in range(pairs):
            seed = seeds[pair // 2 % len(seeds)]
            for contrast, other in contrasts:
                sides = list(enumerate((baseline, other)))
                for position, (side, arm) in enumerate(sides if pair % 2 == 0 else reversed(sides)):
                    bar.set_postfix_str(f"pair {pair + 1} of {pairs}, {arm.name}")
                    record = _run_checked(arm, seed, golden, exempt)
                    place = Place(contrast, pair, side, position, arm.name, seed)
                    if keep is not None:
                        meta = {**record.meta, "experiment": asdict(place)}
                        replace(record, meta=meta).save(keep / f"{len(trials):03d}_{contrast}_{arm.name}")
                    completed = frozenset(record.completed["request_id"])
                    compared = 0 if arm.name in exempt else len(completed)
                    trials.append(Trial(place, summarise(record, slo), completed, compared))
                    bar.update()
    return Experiment(baseline.name, feature.name, tuple(trials), quick, exempt)


def kept_runs(folder: Path, contrast: Contrast = Contrast.FEATURE) -> dict[str, list[RunRecord]]:
    """The records that `run_experiment` kept in `folder`: arm's name to its trials of one contrast, in order."""
    runs: dict[str, list[RunRecord]] = {}
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        record = RunRecord.load(path)
        place = record.meta["experiment"]
        if place["contrast"] == contrast:
            runs.setdefault(place["arm"], []).append(record)
    return dict(sorted(runs.items(), key=lambda item: item[1][0].meta["experiment"]["side"]))


def _validate(
    baseline: Arm,
    feature: Arm,
    golden: Golden,
    pairs: int,
    seeds: Sequence[int],
    quick: bool,
    exempt: Mapping[str, str],
) -> None:
    names = (baseline.name, feature.name)
    if baseline.name == feature.name:
        raise ValueError(f"both arms are called {baseline.name!r}; give each its own name")
    if len({baseline.cache, feature.cache} - {CacheState.NONE}) > 1:
        raise ValueError(
            f"{baseline.name} starts {baseline.cache}, {feature.name} {feature.cache}; compare arms of one cache state"
        )
    least = 2 if quick else MIN_PAIRS
    if pairs < least or pairs % 2:
        raise ValueError(f"pairs={pairs}: must be even and at least {least}; raise it, or use quick=True for fewer")
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds={tuple(seeds)}: needs at least one, and each only once")
    if missing := [seed for seed in seeds if seed not in golden]:
        raise ValueError(f"no golden outputs for the seeds {missing}; make them before the timed runs")
    if unknown := sorted(set(exempt) - set(names)):
        raise ValueError(f"exempt names {unknown}; the arms are {', '.join(names)}")


def _run_checked(arm: Arm, seed: int, golden: Golden, exempt: Mapping[str, str]) -> RunRecord:
    arm.prepare(seed)
    if (found := arm.observe_cache()) != arm.cache:
        raise ExperimentError(
            f"{arm.name}: the cache is {found}, must be {arm.cache} when a trial starts; see its prepare"
        )
    record = arm.run(seed)
    if record.partial:
        raise ExperimentError(f"{arm.name}, seed {seed}: the run was cut short, so it cannot be compared; run it again")
    if problems := record.check():
        raise ExperimentError(
            "\n".join([f"{arm.name}, seed {seed}: the records contradict themselves:", *problems[:10]])
        )
    if record.completed.empty:
        raise ExperimentError(f"{arm.name}, seed {seed}: none of {len(record.requests)} requests completed")
    if arm.name not in exempt:
        _check_golden(arm, seed, record, golden[seed])
    return record


def _check_golden(arm: Arm, seed: int, record: RunRecord, expected: Mapping[str, str]) -> None:
    found = record.completed.set_index("request_id")["output_hash"].to_dict()
    wrong = [name for name, output_hash in found.items() if expected.get(str(name)) != output_hash]
    if wrong:
        name = str(wrong[0])
        golden = f"must be {expected[name][:12]}" if name in expected else "has no golden output"
        raise GoldenMismatchError(
            f"{arm.name}, seed {seed}: {len(wrong)} of {len(found)} outputs are not the golden ones. First: {name} "
            f"hashes to {found[name][:12]}, {golden}. No times are shown; run the golden test to see where it differs."
        )
