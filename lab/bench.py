"""Replays on the real engine: one run of a workload, or a paired experiment of two configurations.

``python -m lab bench WORKLOAD`` prints every metric of one run; with ``--feature`` options it runs the baseline and the
feature in pairs and prints the one table of every metric.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.matrix import REFERENCE, Mode
from lab.record import RunRecord

if TYPE_CHECKING:
    from engine import LLM
    from lab.experiment import Arm, Experiment, Golden
    from lab.workload import Workload, WorkloadSpec


class Replays:
    """A workload file's requests for each seed, built once for one model.

    Args:
        spec: The workload file.
        llm: Whose vocabulary, length limit and tokenizer the requests are built for.
        traces: Folder of the traces; None takes the one that LAB_TRACES names.
    """

    def __init__(self, spec: WorkloadSpec, llm: LLM, traces: Path | None = None) -> None:
        self._spec, self._llm, self._traces = spec, llm, traces
        self._built: dict[int, Workload] = {}

    def of(self, seed: int) -> Workload:
        """The requests of one seed."""
        if seed not in self._built:
            vocab_size, limit = self._llm.model_config.vocab_size, self._llm.max_model_len
            self._built[seed] = self._spec.build(vocab_size, limit, seed, self._traces)
        return self._built[seed]

    def drive(self, llm: LLM, seed: int, **options: Any) -> RunRecord:
        """Replay one seed's requests through ``llm``; ``options`` as for ``lab.drive.drive``."""
        from lab.drive import drive

        return drive(llm.core, self.of(seed), llm.encode, **options)

    def golden(self, llm: LLM, seeds: Sequence[int], desc: str | None = None) -> Golden:
        """The golden answers: a seed's requests together, whatever their arrivals; alone where ``llm`` has one seat."""
        from tqdm.auto import tqdm

        from engine import SamplingParams
        from lab.record import hash_tokens

        answers: dict[int, dict[str, str]] = {}
        for seed in tqdm(seeds, desc=desc, unit="seed", disable=desc is None):
            requests = self.of(seed).requests
            params = [SamplingParams(max_tokens=one.max_tokens, ignore_eos=one.ignore_eos) for one in requests]
            outputs = llm.generate([llm.encode(one.prompt) for one in requests], params, use_tqdm=False)
            answers[seed] = {
                one.request_id: hash_tokens(output.token_ids) for one, output in zip(requests, outputs, strict=True)
            }
        return answers


def engine_arm(
    name: str, llm: LLM, replays: Replays, slow_down: Callable[[], None] | None = None, warm: bool = False
) -> Arm:
    """An arm that replays a workload through an engine.

    A prefix cache, where the engine has one, is emptied before every trial; with ``warm`` the workload then runs once,
    untimed. ``slow_down`` is called once in every step: an arm that is known to be slower, to test an experiment with.
    """
    from lab.experiment import Arm, CacheState

    def run(seed: int) -> RunRecord:
        if slow_down is None:
            return replays.drive(llm, seed)
        with _Slowed(llm, slow_down):
            return replays.drive(llm, seed)

    def observe() -> CacheState:
        if not llm.config.enable_prefix_caching:
            return CacheState.NONE
        return CacheState.WARM if any(pool.num_cached for pool in llm.kv_pools.values()) else CacheState.COLD

    def prepare(seed: int) -> None:
        llm.reset_prefix_cache()
        if warm:
            replays.drive(llm, seed)

    expected = CacheState.WARM if warm else CacheState.COLD
    return Arm(name, run, expected if llm.config.enable_prefix_caching else CacheState.NONE, observe, prepare)


@dataclass(frozen=True)
class Configuration:
    """A name for some engine options."""

    name: str
    options: Mapping[str, Any]


def option_experiment(
    llm: LLM,
    replays: Replays,
    baseline: Configuration,
    feature: Configuration,
    golden: Golden,
    *,
    mode: Mode = REFERENCE,
    **experiment: Any,
) -> Experiment:
    """``run_experiment`` of two configurations of ``llm``'s model, both in one mode; both engines live side by side."""
    from lab.experiment import run_experiment

    with mode.engine(llm, baseline.options) as off, mode.engine(llm, feature.options) as on:
        return run_experiment(
            engine_arm(baseline.name, off, replays), engine_arm(feature.name, on, replays), golden, **experiment
        )


class _Slowed:
    """While entered, every step of an engine of one process also calls ``pause``."""

    def __init__(self, llm: LLM, pause: Callable[[], None]) -> None:
        self._runner: Any = getattr(llm.core, "runner")  # noqa: B009 - not every core has one
        self._pause = pause

    def __enter__(self) -> None:
        execute, pause = self._runner.execute, self._pause

        def slow(scheduled: Any) -> Any:
            pause()
            return execute(scheduled)

        self._runner.execute = slow

    def __exit__(self, *_: object) -> None:
        del self._runner.execute


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Registers ``bench``."""
    parser = subparsers.add_parser(
        "bench", description="Replays a workload through the engine; with --feature, two configurations in pairs."
    )
    parser.add_argument(
        "workload",
        type=Path,
        metavar="FILE",
        help="workload, as in workloads/quick_mix.yaml, or a trace (.jsonl Mooncake, .csv Azure) to replay scaled down",
    )
    parser.add_argument("--model", default="smollm2-135m", help="name, folder or random:<shape> (%(default)s)")
    parser.add_argument("--options", nargs="*", default=[], metavar="OPTION=VALUE", help="engine options of every arm")
    parser.add_argument("--baseline", nargs="*", default=[], metavar="OPTION=VALUE", help="engine options of the run")
    parser.add_argument(
        "--feature", nargs="*", metavar="OPTION=VALUE", help="engine options of the arm held against it"
    )
    parser.add_argument("--pairs", type=int, default=10, help="pairs of each contrast, even (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the workload (%(default)s)")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder of the traces (default: $LAB_TRACES)")
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep the raw records here")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the benchmark, prints its table and returns the exit status."""
    import sys

    try:
        print(_table(arguments))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; records until then are kept where --save says", file=sys.stderr)
        return 130
    return 0


def _table(arguments: argparse.Namespace) -> str:
    from engine import LLM
    from engine.config import parse_options
    from lab.experiment import run_experiment
    from lab.metrics import summarise
    from lab.workload import load_workload

    baseline = LLM(arguments.model, **parse_options([*arguments.options, *arguments.baseline]))
    replays = Replays(load_workload(arguments.workload), baseline, arguments.traces)
    if arguments.feature is None:
        record = replays.drive(baseline, arguments.seeds[0], save_to=arguments.save, desc="requests")
        return summarise(record)[["metric", "value", "unit", "n", "note"]].to_string(index=False)
    feature = LLM(arguments.model, **parse_options([*arguments.options, *arguments.feature]))
    experiment = run_experiment(
        engine_arm("baseline", baseline, replays),
        engine_arm("feature", feature, replays),
        replays.golden(baseline, arguments.seeds, desc="golden answers, by the baseline"),
        pairs=arguments.pairs,
        seeds=arguments.seeds,
        keep=arguments.save,
    )
    columns = ["metric", "unit", "baseline", "feature", "change", "low", "high", "noise_high", "verdict", "note"]
    return experiment.compare()[columns].to_string(index=False, float_format="{:.4g}".format)
