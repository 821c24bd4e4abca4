"""Ranks as processes: the same bits, and a quick end with the failed rank's error, whoever fails and however."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine import LLM, SamplingParams
from engine.execution import launch
from engine.execution.communicator import SharedMemoryGroup
from engine.execution.workers import WorkerError
from engine.extension import BuildError
from tests.namespaces import free_port, two_hosts

ROOT = Path(__file__).parent.parent
PROMPTS = [[5, 9, 200, 31], [7] * 17, list(range(40, 90))]
PARAMS = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (5, 9, 12)]
OPTIONS: dict[str, Any] = {"num_kv_blocks": 64, "max_num_seqs": 4, "num_threads": 1}


def answers(llm: LLM) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    return [(output.token_ids, output.logprobs) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return answers(LLM("random:tiny", enforce_eager=True, **OPTIONS))


def descendants() -> list[psutil.Process]:
    return [
        child for child in psutil.Process().children(recursive=True) if "engine.execution.worker" in child.cmdline()
    ]


def run_dry(llm: LLM) -> None:
    while llm.has_unfinished_requests:
        llm.step()


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()


def ends(process: psutil.Process, seconds: float = 60) -> bool:
    try:
        process.wait(seconds)
    except psutil.TimeoutExpired:
        return False
    return True


def test_a_killed_rank_ends_the_group_and_is_named(expected: list[Any]) -> None:
    before = shared_memory()
    llm = LLM("random:tiny", tensor_parallel_size=3, **OPTIONS)
    assert answers(llm) == expected, "three processes give the bits of one"
    children = descendants()
    assert len(children) == 2
    for prompt in PROMPTS:
        llm.add_request(prompt, SamplingParams(max_tokens=50, ignore_eos=True))
    llm.step()
    children[1].send_signal(signal.SIGKILL)
    with pytest.raises(WorkerError, match=rf"rank 2 \(process {children[1].pid}\) ended with signal SIGKILL"):
        run_dry(llm)
    assert descendants() == [] and shared_memory() == before
    with pytest.raises(WorkerError, match="rank 2"):  # and so does every later call
        llm.step()
    llm.close()
    llm.close()


def test_an_interrupt_waits_for_the_step_and_the_ranks_go_on(expected: list[Any]) -> None:
    with LLM("random:tiny", tensor_parallel_size=2, **OPTIONS) as llm:
        gather, calls = llm.core.runner.group.gather, 0

        def interrupting(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return gather(*arguments)

        llm.core.runner.group.gather = interrupting
        with pytest.raises(KeyboardInterrupt):
            answers(llm)
        assert calls == 3 and answers(llm) == expected
    assert descendants() == []
    with pytest.raises(WorkerError, match="the engine is closed"):
        answers(llm)


def test_a_rank_that_cannot_load_shows_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker finds no weights: they vanish once rank 0 has opened them."""
    model = save_tiny(tmp_path / "model")
    start = launch.LocalWorkers

    def without_weights(started: Any) -> Any:
        workers = start(started)
        (model / "model.safetensors").rename(tmp_path / "elsewhere")
        while workers._children._processes[0].poll() is None:
            time.sleep(0.05)
        (tmp_path / "elsewhere").rename(model / "model.safetensors")
        return workers

    monkeypatch.setattr(launch, "LocalWorkers", without_weights)
    with pytest.raises(WorkerError, match=r"(?s)rank 1 .* ended with status 1.*ModelError: "):
        LLM(str(model), tensor_parallel_size=2, **OPTIONS)
    assert descendants() == []


def save_tiny(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(
        LlamaConfig(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(folder)
    return folder


SCRIPT = """
from tests.test_ranks import OPTIONS, answers
from engine import LLM
llm = LLM("random:tiny", tensor_parallel_size=2, **OPTIONS)
print(answers(llm), flush=True)
{after}
"""


def start(after: str, *command: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command, *(() if command else ("-c", SCRIPT.format(after=after)))],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()


def interrupt(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)


@pytest.mark.parametrize("end", [kill, interrupt])
def test_workers_end_with_rank_0_however_it_ends(
    expected: list[Any], end: Callable[[subprocess.Popen[str]], None]
) -> None:
    with start("import time\nwhile True: llm.generate([[5]], use_tqdm=False)", stderr=subprocess.DEVNULL) as leader:
        try:
            assert leader.stdout is not None and leader.stdout.readline().strip() == repr(expected)
            workers = psutil.Process(leader.pid).children()
            assert len(workers) == 1
            end(leader)
            assert all(ends(worker) for worker in workers)
        finally:
            leader.kill()


def test_torchrun_gives_the_same_bits(expected: list[Any], tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(SCRIPT.format(after="llm.close()"))
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with start("", *command, str(script), env=environment) as torchrun:
        output, _ = torchrun.communicate()
    assert torchrun.returncode == 0
    assert output.strip() == repr(expected), "rank 0 alone goes on after LLM(...)"


def test_torchrun_over_two_hosts_gives_the_same_bits(expected: list[Any], tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(SCRIPT.format(after="llm.close()"))
    with two_hosts() as hosts:
        processes, port = [], free_port()
        for rank, host in enumerate(hosts):
            command = [*host.prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
            command += [f"--node-rank={rank}", f"--master-addr={hosts[0].address}", f"--master-port={port}"]
            environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": host.interface}
            command += [f"--local-addr={host.address}", str(script)]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [output.strip() for output in outputs] == [repr(expected), ""]


def test_without_a_compiler_the_ranks_talk_through_gloo(expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(size: int) -> int:
        raise BuildError("no C++ compiler")

    monkeypatch.setattr(SharedMemoryGroup, "memory_bytes", staticmethod(no_compiler))
    with (
        pytest.warns(UserWarning, match="talk through gloo, several times slower than memory: no C"),
        LLM("random:tiny", tensor_parallel_size=2, **OPTIONS) as llm,
    ):
        assert answers(llm) == expected
    assert descendants() == []
