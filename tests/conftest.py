"""Shared fixtures: the real model, where a test needs it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

from hypothesis import settings

import engine  # noqa: F401 - before torch: it sets how OpenMP's threads wait
from engine.models.hub import resolve_model
from engine.tokenizer import Tokenizer

# Tiny tensors: a second thread costs more in barriers than it computes, most of all where others use the machine.
torch.set_num_threads(1)
# A shell starts what runs in its background with SIGINT ignored, and children inherit that: the tests need Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Never judge a time: a busy machine would fail a correct program.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's folder; `make setup` has fetched it."""
    folder = resolve_model("smollm2-135m").folder
    assert folder is not None
    return folder


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer(smollm2)
