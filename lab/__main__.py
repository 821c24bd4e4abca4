"""``python -m lab COMMAND``: the lab from the shell.

A command's module is imported only when that command is asked for, so ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A subcommand: its name, the module whose ``add_command(subparsers)`` registers it, and one line of help."""

    name: str
    module: str
    help: str


COMMANDS = (
    Command("report", "lab.report", "run the stages' notebooks and write their HTML reports"),
    Command("bench", "lab.bench", "replay a workload through the engine, or two configurations in pairs"),
    Command("golden", "lab.matrix", "run a stage's golden matrix: the same bits in every configuration"),
    Command("workload", "lab.workload", "show what a workload file asks for"),
    Command("trace", "lab.trace", "turn a run's records into a Chrome/Perfetto trace"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status (130 after Ctrl-C)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    asked = next((command for command in COMMANDS if arguments[:1] == [command.name]), None)
    parser = argparse.ArgumentParser(prog="python -m lab", description="Measuring and reporting on the paged engine.")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    if asked:
        importlib.import_module(asked.module).add_command(subparsers)
    else:
        for command in COMMANDS:
            subparsers.add_parser(command.name, help=command.help)
    parsed = parser.parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
