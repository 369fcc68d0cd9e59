"""GPT-2 124M of `examples/gpt2.py`, at a batch of 32 that is held."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from benchmarks.rival_workloads.parts import TINY, Tokens, default_loader

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gpt2.py"


def loaded(name: str, path: Path) -> ModuleType:
    """The module of a file, by a name that no installed package has."""
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


example = loaded("autotune_example_gpt2", EXAMPLE)
BATCH_SIZE = 4 if TINY else 32
LARGEST_GUESS = 4 * BATCH_SIZE if TINY else 128
"""The batch from which accelerate's search comes down."""
LEARNING_RATE = 3e-4
CONFIG = example.GPTConfig(layers=2, heads=2, width=32, context=16, vocabulary=128) if TINY else example.GPTConfig()


def dataset() -> Dataset[Any]:
    return Tokens(256 if TINY else 4096, CONFIG.context, CONFIG.vocabulary)


def model_fn() -> nn.Module:
    return example.GPT(CONFIG)


def data_fn() -> DataLoader[Any]:
    return default_loader(dataset(), BATCH_SIZE)


def criterion(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return criterion(model(batch[0]), batch[1])


def optimizer_fn(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
