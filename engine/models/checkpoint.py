"""Checkpoint tensors by Hugging Face name: read from safetensors, or made from a seed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from engine.models.hub import ModelError, ModelSource

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_DTYPES = ("F64", "F32", "F16", "BF16")
_SHOWN = 4
_CHUNK = 1 << 20
_DOUBLED = tuple(f"{part}.weight" for part in ("q_proj", "k_proj", "q_norm", "k_norm", "o_proj"))


class Checkpoint(Protocol):
    """The tensors of one model."""

    def read(self, name: str) -> torch.Tensor:
        """One tensor in its expected shape, in the dtype it is stored in, on the CPU.

        Raises:
            ModelError: ``name`` is not among the expected tensors.
        """
        ...


def open_checkpoint(source: ModelSource, expected: Mapping[str, tuple[int, ...]]) -> Checkpoint:
    """Open a model's weights and check them against what the model needs; no weight is read yet.

    Args:
        source: Folder or seed.
        expected: Hugging Face name to shape of every tensor that will be read.

    Raises:
        ModelError: A file is missing, damaged or of another format, or tensors are missing, left over, or of another
            shape or type. ``lm_head.weight`` beside tied embeddings and rotary ``inv_freq`` buffers may be left over.
    """
    if source.folder is None:
        assert source.random_seed is not None, "ModelSource has a folder or a seed"
        return _RandomCheckpoint(source.random_seed, expected)
    return _FolderCheckpoint(source.folder, expected)


class _FolderCheckpoint:
    """Memory-mapped safetensors, one file or many; a tensor's pages are read when the tensor is used."""

    def __init__(self, folder: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
        self._folder = folder
        stored = {name: file for file in map(_open, _weight_files(folder)) for name in file.keys()}  # noqa: SIM118
        _check_names(folder, expected, stored)
        _check_forms(folder, expected, stored)
        self._file_of = {name: stored[name] for name in expected}

    def read(self, name: str) -> torch.Tensor:
        if name not in self._file_of:
            raise ModelError(f"{self._folder}: tensor {name!r} was not among the expected ones when it was opened")
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor


class _RandomCheckpoint:
    """Seeded normal weights; a tensor is a function of seed, name and shape alone, in every process."""

    def __init__(self, seed: int, expected: Mapping[str, tuple[int, ...]]) -> None:
        self._seed, self._shapes = seed, dict(expected)

    def read(self, name: str) -> torch.Tensor:
        """Values that bfloat16 holds exactly, as float32, so that both dtypes run the same model.

        Projections and embeddings have standard deviation 1 / sqrt(fan in), which keeps every layer's output near unit
        size and the logits near standard normal. Queries, keys and attention outputs are twice that: attention then
        picks single positions and weighs as much as the MLP, and greedy text follows its context; without it small
        models fall into loops, which hide errors. Norm weights scatter around 1 (2 for queries and keys), biases
        around 0.
        """
        if name not in self._shapes:
            raise ModelError(f"random weights: tensor {name!r} was not among the expected ones when they were opened")
        shape = self._shapes[name]
        values = torch.from_numpy(_normals(f"{self._seed}:{name}:{shape}", int(np.prod(shape)))).view(shape)
        gain = 2.0 if name.endswith(_DOUBLED) else 1.0
        if name.endswith("norm.weight"):
            values.mul_(0.1).add_(1.0).mul_(gain)
        elif name.endswith(".bias"):
            values.mul_(0.1)
        else:
            values.mul_(gain * shape[-1] ** -0.5)
        return values.bfloat16().float()


def _normals(key: str, count: int) -> NDArray[np.float32]:
    """[count] standard normals from fixed chunks, each with its own stream, so that threads cannot change them."""
    words = np.frombuffer(hashlib.sha256(key.encode()).digest(), np.uint32).tolist()
    values = np.empty(count, np.float32)

    def fill(chunk: int) -> None:
        part = values[chunk * _CHUNK : (chunk + 1) * _CHUNK]
        np.random.Generator(np.random.PCG64([*words, chunk])).standard_normal(dtype=np.float32, out=part)

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        list(pool.map(fill, range(-(-count // _CHUNK))))
    return values


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those of its index, or its only one."""
    if (folder / _INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{folder / _INDEX} is not a readable index ({error!r}); fetch it again") from error
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise ModelError(f"{folder}: {_some('files', absent)} of {_INDEX} not there; fetch them again")
        return [folder / name for name in names]
    found = sorted(folder.glob("*.safetensors"))
    if folder / _SINGLE in found:
        return [folder / _SINGLE]
    if len(found) == 1:
        return found
    if found:
        names = [path.name for path in found]
        raise ModelError(f"{folder}: {_some('safetensors files', names)} but no {_INDEX}; fetch the index too")
    others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
    has = f"only {_some('files', others)}" if others else "no weights"
    raise ModelError(
        f"{folder} has {has}, but weights are read from safetensors alone; fetch the model's *.safetensors, or convert "
        "it with transformers: `AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)`"
    )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} ({path.stat().st_size} bytes) is not a whole safetensors file ({error}); fetch it again"
        ) from error


def _check_names(folder: Path, expected: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    missing = [name for name in expected if name not in stored]
    extra = [name for name in sorted(stored) if name not in expected and not _ignorable(name)]
    problems = [_some(what, names) for what, names in (("missing tensors", missing), ("extra tensors", extra)) if names]
    if problems:
        raise ModelError(
            f"{folder}: {' and '.join(problems)}; config.json and weights are not of one supported model: fetch both "
            "again from one place, unquantised and with adapters merged"
        )


def _ignorable(name: str) -> bool:
    """Left-overs that change nothing: a stored copy of a tied head, and rotary tables that are computed anyway."""
    return name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")


def _check_forms(folder: Path, expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, Any]) -> None:
    wrong = []
    for name, shape in expected.items():
        view = stored[name].get_slice(name)
        if tuple(view.get_shape()) != shape:
            wrong.append(f"{name} is {view.get_shape()}, expected {list(shape)}")
        elif view.get_dtype() not in _DTYPES:
            wrong.append(f"{name} is {view.get_dtype()}, expected one of {', '.join(_DTYPES)}")
    if wrong:
        raise ModelError(
            f"{folder}: {_some('tensors of another form', wrong)}; config.json and weights are not of one supported "
            "model: fetch both again from one place, unquantised"
        )


def _some(what: str, names: list[str]) -> str:
    """``3 tensors (a, b, c)``, with the first few names."""
    return f"{len(names)} {what} ({', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''})"
