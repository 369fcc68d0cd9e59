"""One training run over given windows: the gradients, buffers and losses that it leaves, to be held against another's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autotune.measurement.determinism import random_state
from autotune.measurement.gradients import Gradients
from autotune.measurement.measure import seed_everything
from autotune.training.training import Training
from autotune.training.windows import Window

SCALER_TRIES = 25
"""Halvings of the loss scale that fp16 is given to reach a step that is not skipped."""

Buffers = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Run:
    """What one training left after its windows."""

    gradients: Gradients
    """Of the first window, unscaled."""
    buffers: Buffers
    """After the first window."""
    losses: list[float]
    moved: float
    """Norm of the change of the parameters over all windows."""
    skipped_all: bool
    """No loss scale gave finite gradients."""
    drew: frozenset[str]
    """The generators that the first window drew from, such as `torch`."""


def run_windows(training: Training, windows: list[Window], seed: int) -> Run:
    """Trains on the windows in turn, all random numbers drawn from `seed`."""
    seed_everything(seed)
    before = {name: parameter.detach().clone() for name, parameter in training.model.named_parameters()}
    seeded = random_state()
    loss, skipped_all = _first_gradients(training, windows[0])
    drawn = random_state()
    gradients, buffers = _gradients(training), copied(dict(training.model.named_buffers()))
    losses = [float(loss)]
    training.update()
    losses += [float(training.step(window)) for window in windows[1:]]
    moved = sum(
        float((parameter.detach() - before[name]).float().square().sum())
        for name, parameter in training.model.named_parameters()
    )
    drew = frozenset(name for name in drawn if drawn[name] != seeded.get(name))
    return Run(gradients, buffers, losses, math.sqrt(moved), skipped_all, drew)


def _first_gradients(training: Training, window: Window) -> tuple[torch.Tensor, bool]:
    """The window's loss, its gradients left in the parameters, and whether every loss scale overflowed.

    A scale that starts too high skips its first steps and halves; that is the scaler's work, not an error.
    """
    if training.scaler is None:
        return training.accumulate(window), False
    buffers = copied(dict(training.model.named_buffers()))
    for _ in range(SCALER_TRIES):
        loss = training.accumulate(window)
        if all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in training.model.parameters()):
            return loss, False
        training.update()
        for name, buffer in training.model.named_buffers():
            buffer.copy_(buffers[name])
    return training.accumulate(window), True


@dataclass
class Mean:
    """The mean of a tensor over several seeds, and how far two such means are expected to lie apart."""

    count: int = 0
    total: torch.Tensor | None = None
    squares: float = 0.0

    def add(self, tensor: torch.Tensor | None) -> None:
        """One seed's tensor; None counts as zero."""
        self.count += 1
        if tensor is not None:
            self.total = tensor if self.total is None else self.total + tensor
            self.squares += float(tensor.float().square().sum())

    @property
    def value(self) -> torch.Tensor | None:
        """The mean; None where every seed gave None."""
        return None if self.total is None else self.total / self.count

    @property
    def spread(self) -> float:
        """Norm of the difference that two honest means of so many seeds are expected to show."""
        if self.total is None:
            return 0.0
        variance = (self.squares - float(self.total.float().square().sum()) / self.count) / (self.count - 1)
        return math.sqrt(max(0.0, 2 * variance / self.count))


@dataclass
class Means:
    """Gradients and buffers after one window, each as its mean over several seeds."""

    gradients: dict[str, Mean] = field(default_factory=dict)
    buffers: dict[str, Mean] = field(default_factory=dict)


def run_seeds(training: Training, weights: Mapping[str, Any], window: Window, seeds: int) -> Means:
    """The window's gradients from `weights` with seeds 1, 2, ...; the scaler, if there is one, has found its scale."""
    means = Means()
    for seed in range(1, seeds + 1):
        training.model.load_state_dict(weights)
        training.optimizer.zero_grad(set_to_none=True)
        seed_everything(seed)
        training.accumulate(window)
        for name, gradient in _gradients(training).items():
            means.gradients.setdefault(name, Mean()).add(gradient)
        for name, buffer in copied(dict(training.model.named_buffers())).items():
            means.buffers.setdefault(name, Mean()).add(buffer)
    return means


def _gradients(training: Training) -> Gradients:
    scale = training.scaler.get_scale() if training.scaler is not None else 1.0
    return {
        name: None if parameter.grad is None else parameter.grad.detach().to_dense().float().cpu() / scale
        for name, parameter in training.model.named_parameters()
    }


def copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a state, copied to the CPU; what else lies in it as it is."""
    return {
        name: tensor.detach().cpu().clone() if isinstance(tensor, torch.Tensor) else tensor
        for name, tensor in state.items()
    }
