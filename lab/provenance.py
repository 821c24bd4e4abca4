"""Where a result comes from: enough to run it again, and to see why a second run may differ."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from lab.paths import repository_root

LIBRARIES = ("torch", "triton", "transformers", "tokenizers", "numpy", "pandas", "pyarrow", "plotly", "papermill")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
NO_GPU_CHECK = "not run on a GPU yet (make gpu-check)"
_CPU_FEATURES = ("avx", "fma", "f16c", "amx", "asimd", "bf16", "sve", "i8mm")


@dataclass(frozen=True)
class Provenance:
    """One run's origin, ready for JSON.

    ``commit`` is a hash or "unknown (why)"; ``dirty`` is None when git could not tell. ``threads`` holds counts by
    source; ``workloads`` content hashes by workload; ``memory_gib`` is physical memory in GiB.
    """

    created: str
    command: str
    commit: str
    dirty: bool | None
    parameters: Mapping[str, Any]
    seeds: Sequence[int]
    workloads: Mapping[str, str]
    model: str
    model_fingerprint: str
    cpu: str
    cores: int
    memory_gib: float
    cpu_features: Sequence[str]
    accelerators: Sequence[str]
    operating_system: str
    threads: Mapping[str, str]
    versions: Mapping[str, str] = field(default_factory=dict)
    gpu_check: str = NO_GPU_CHECK

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Provenance:
        return cls(**data)

    @property
    def revision(self) -> str:
        """The commit for people: shortened, and marked when the tree had changes."""
        short = self.commit[:12] if not self.commit.startswith(("unknown", "none")) else self.commit
        return f"{short} (with uncommitted changes)" if self.dirty else short

    def rows(self) -> list[tuple[str, str]]:
        """(label, text) pairs in reading order, for the report's box and ``report.md``."""
        return [
            ("Command", self.command),
            ("Parameters", _pairs(self.parameters) or "defaults"),
            ("Seeds", ", ".join(map(str, self.seeds)) or "none"),
            ("Commit", self.revision),
            ("Created", self.created),
            ("Workloads", _pairs(self.workloads) or "none"),
            ("Model", f"{self.model or 'none'}, fingerprint {self.model_fingerprint or 'none'}"),
            ("Machine", f"{self.cpu}, {self.cores} cores, {self.memory_gib:.1f} GiB, {self.operating_system}"),
            ("CPU features", " ".join(self.cpu_features) or "unknown"),
            ("Accelerators", ", ".join(self.accelerators) or "none"),
            ("GPU kernels", self.gpu_check),
            ("Threads", _pairs(self.threads)),
            ("Versions", ", ".join(f"{name} {version}" for name, version in self.versions.items())),
        ]


def collect(
    *,
    parameters: Mapping[str, Any] | None = None,
    seeds: Sequence[int] = (),
    workloads: Mapping[str, str] | None = None,
    model: str = "",
    model_fingerprint: str = "",
    root: Path | None = None,
) -> Provenance:
    """Reads commit, machine and versions now; the caller gives what only it knows (``workloads``: name to hash)."""
    commit, dirty = git_state(root or repository_root())
    return Provenance(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command_line(),
        commit=commit,
        dirty=dirty,
        parameters=dict(parameters or {}),
        seeds=tuple(seeds),
        workloads=dict(workloads or {}),
        model=model,
        model_fingerprint=model_fingerprint,
        cpu=_cpu_model(),
        cores=_usable_cores(),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        cpu_features=_cpu_features(),
        accelerators=_accelerators(),
        operating_system=platform.platform(terse=True),
        threads=_threads(),
        versions=_versions(),
        gpu_check=_gpu_check(root or repository_root()),
    )


def _gpu_check(root: Path) -> str:
    """What the committed run of ``make gpu-check`` ran on."""
    path = root / "reports" / "gpu" / "check.json"
    if not path.exists():
        return NO_GPU_CHECK
    found = json.loads(path.read_text(encoding="utf-8"))
    return f"checked on {found['machine']['device']}, driver {found['machine']['driver']}, {found['when']}"


def git_state(root: Path) -> tuple[str, bool | None]:
    """(commit, dirty) of the repository at ``root``; "unknown (why)" and None where git cannot tell.

    ``reports/`` does not count as dirt: a run replaces its own evidence before it reads the state.
    """
    try:
        head = _git(root, "rev-parse", "HEAD")
        changes = _git(root, "status", "--porcelain", "--", ".", ":(exclude)reports")
    except FileNotFoundError:
        return "unknown (git not found)", None
    if changes.returncode:
        return "unknown (not a git repository)", None
    if head.returncode:
        return "none (no commit yet)", True
    return head.stdout.strip(), bool(changes.stdout.strip())


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)


def command_line() -> str:
    """The command that started this work. In a notebook that is the kernel's parent (papermill, JupyterLab, lab)."""
    process = psutil.Process()
    arguments = process.cmdline()
    if any("ipykernel" in argument for argument in arguments):
        parent = process.parent()
        arguments = parent.cmdline() if parent else arguments
    arguments = arguments or sys.orig_argv
    interpreter = Path(arguments[0]).name.startswith("python")
    if interpreter and len(arguments) > 1 and Path(arguments[1]).parent.name == "bin":
        arguments = arguments[1:]  # a console script: `papermill ...`, not `python /somewhere/bin/papermill ...`
    return shlex.join([Path(arguments[0]).name, *arguments[1:]])


def _cpuinfo() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text(encoding="utf-8", errors="replace").split("\n\n")[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _cpu_model() -> str:
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def _cpu_features() -> tuple[str, ...]:
    info = _cpuinfo()
    flags = (info.get("flags") or info.get("Features") or "").split()
    return tuple(sorted(flag for flag in set(flags) if flag.startswith(_CPU_FEATURES)))


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _accelerators() -> tuple[str, ...]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return ()
    return tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _threads() -> dict[str, str]:
    counts = {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}
    torch = sys.modules.get("torch")
    if torch is not None:
        counts["torch"] = str(torch.get_num_threads())
    return {"usable cores": str(_usable_cores()), **counts}


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items())
