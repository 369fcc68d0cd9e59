"""Means over several seeds, for programs that cannot be made to draw the same random numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from autotune.measurement.runs import Place, State, Step, kept, restore, run_steps
from autotune.training.training import Training
from autotune.training.windows import Window

SEEDS = 8
"""Where a run cannot but draw other random numbers, means over so many are compared."""


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
    def size(self) -> float:
        """Norm of the mean."""
        return 0.0 if self.value is None else float(self.value.float().square().sum()) ** 0.5

    @property
    def spread(self) -> float:
        """Norm of the difference that two honest means of so many seeds are expected to show."""
        if self.total is None:
            return 0.0
        variance = (self.squares - float(self.total.float().square().sum()) / self.count) / (self.count - 1)
        return math.sqrt(max(0.0, 2 * variance / self.count))


@dataclass
class Means:
    """Gradients, buffers and loss of one window, each as its mean over several seeds."""

    gradients: dict[str, Mean] = field(default_factory=dict)
    buffers: dict[str, Mean] = field(default_factory=dict)
    loss: Mean = field(default_factory=Mean)

    def step(self) -> Step:
        """The means as if one step had given them."""
        assert self.loss.value is not None
        return Step(
            gradients={name: mean.value for name, mean in self.gradients.items()},
            buffers={name: mean.value for name, mean in self.buffers.items() if mean.value is not None},
            loss=float(self.loss.value),
            skipped=0,
            drew=frozenset(),
        )


def run_seeds(training: Training, weights: State, window: Window, place: Place) -> Means:
    """The window's gradients from `weights` with seeds 1, 2, ...; the scaler, if there is one, has found its scale.

    The means are kept in `place`.
    """
    means = Means()
    for seed in range(1, SEEDS + 1):
        restore(training, weights)
        (step,) = (kept(step, place) for step in run_steps(training, [window], seed))
        for name, gradient in step.gradients.items():
            means.gradients.setdefault(name, Mean()).add(gradient)
        for name, buffer in step.buffers.items():
            means.buffers.setdefault(name, Mean()).add(buffer)
        means.loss.add(torch.tensor(step.loss, dtype=torch.float64))
    return means
