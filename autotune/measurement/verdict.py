"""Whether two runs trained the same: what may differ, and the sentence that says what does. Numbers in, words out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autotune.measurement.gradients import Comparison, compare, compare_buffers
from autotune.measurement.runs import SCALER_TRIES, Mean, Means, Run

SMALLEST_TOLERANCE = 1e-3
FLOORS = 3.0
"""The gate: at most the largest of 1e-3, three times the floor, and a few units of the type's rounding."""
ROUNDINGS = 4.0
UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "tf32": 2.0**-11}
"""At least so many units in the last place of the candidate's type: the floor rounds weights and inputs only, while an
honest candidate rounds outputs and gradients too. One linear layer in bf16 shows 0.0036 over a floor of 0.0008 (CPU)."""
SMALLEST_TENSOR_TOLERANCE = 1e-2
TENSOR_FLOORS = 5.0
"""For one tensor of many: the worst of sixty in an honest small ResNet is off by up to four of its floors (CPU)."""
LARGEST_TOLERANCE = 0.9
"""A gradient that is gone has a relative error of 1: no floor of rounding allows that."""
LARGEST_BUFFER_TOLERANCE = 0.5
"""A running average updated twice at a momentum of 0.1 is off by 0.9."""


@dataclass(frozen=True)
class Allowance:
    """How far a candidate may be from the reference: a floor seen between two honest runs, and its type's rounding."""

    relative_error: float
    """Of all gradients together."""
    errors: Mapping[str, float]
    """Of each parameter's gradient."""
    buffer_errors: Mapping[str, float]
    unit_roundoff: float
    largest: float
    """No more than this is allowed for all gradients together."""

    @property
    def tolerance(self) -> float:
        """Of all gradients together."""
        wanted = max(SMALLEST_TOLERANCE, FLOORS * self.relative_error, ROUNDINGS * self.unit_roundoff)
        return min(wanted, self.largest)

    def of_gradient(self, name: str) -> float:
        """Of one parameter's gradient. Not limited: in honest bf16 that of a small bias may be off by more than itself."""
        floor = max(self.relative_error, self.errors.get(name, 0.0))
        return max(SMALLEST_TENSOR_TOLERANCE, TENSOR_FLOORS * floor, self.tolerance)

    def of_buffer(self, name: str) -> float:
        """Of one buffer."""
        wanted = max(SMALLEST_TENSOR_TOLERANCE, TENSOR_FLOORS * self.buffer_errors.get(name, 0.0), self.tolerance)
        return min(wanted, LARGEST_BUFFER_TOLERANCE)


def allowance(
    reference: Run, honest_runs: Iterable[Run], output_roundings: Iterable[Run], roundings: Iterable[str]
) -> Allowance:
    """What honest runs differ from the reference by, the largest of each. One that is not finite says nothing.

    Runs that round every module's output are more like the candidate, and count for single tensors only: all gradients
    together are held to the rounding of weights and inputs, which no faulty arithmetic inside the model enlarges.
    """
    relative_error = 0.0
    errors: dict[str, float] = {}
    buffer_errors: dict[str, float] = {}
    for run, counts_for_all in (*((run, True) for run in honest_runs), *((run, False) for run in output_roundings)):
        found = compare(reference.gradients, run.gradients)
        if not math.isfinite(found.relative_error):
            continue
        if counts_for_all:
            relative_error = max(relative_error, found.relative_error)
        _raise_to(errors, found.errors)
        _raise_to(buffer_errors, compare_buffers(reference.buffers, run.buffers))
    units = max((UNIT_ROUNDOFF[kind] for kind in roundings), default=0.0)
    return Allowance(relative_error, errors, buffer_errors, units, LARGEST_TOLERANCE)


def widened(allowed: Allowance, reference: Means) -> Allowance:
    """As much more as two means over other random numbers differ by; a small gradient in much noise may differ by any."""
    errors, buffer_errors = dict(allowed.errors), dict(allowed.buffer_errors)
    _raise_to(errors, _relative_spreads(reference.gradients))
    _raise_to(buffer_errors, _relative_spreads(reference.buffers))
    size = math.hypot(*(_norm(mean) for mean in reference.gradients.values()))
    spread = math.hypot(*(mean.spread for mean in reference.gradients.values()))
    relative_error = max(allowed.relative_error, spread / size if size else 0.0)
    return Allowance(relative_error, errors, buffer_errors, allowed.unit_roundoff, math.inf)


def _relative_spreads(means: Mapping[str, Mean]) -> dict[str, float]:
    return {name: mean.spread / size for name, mean in means.items() if (size := _norm(mean))}


def _norm(mean: Mean) -> float:
    return 0.0 if mean.value is None else float(mean.value.float().square().sum()) ** 0.5


def averaged(run: Run, means: Means) -> Run:
    """The run with the means over seeds in place of what one seed gave."""
    buffers = {name: mean.value for name, mean in means.buffers.items() if mean.value is not None}
    return replace(
        run, gradients={name: mean.value for name, mean in means.gradients.items()}, buffers={**run.buffers, **buffers}
    )


def _raise_to(largest: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        largest[name] = max(largest.get(name, 0.0), value)


def fault(reference: Run, candidate: Run, allowed: Allowance, pieces: int) -> str:
    """What is wrong with the candidate, in one sentence; empty where nothing is.

    `pieces`: micro-batches that the candidate's step was made of, for the advice.
    """
    found = compare(reference.gradients, candidate.gradients)
    if candidate.skipped_all:
        return f"every one of {SCALER_TRIES} steps was skipped: the scaled gradients are never finite"
    if found.missing:
        return f"{found.missing[0]} has a gradient in the user's program and none here: a part of the model is left out"
    return (
        _loss_fault(reference, candidate, steps=1)
        or _gradient_fault(found, allowed, pieces)
        or _loss_fault(reference, candidate, steps=len(candidate.losses))
        or _buffer_fault(reference, candidate, allowed)
        or _update_fault(reference, candidate)
    )


def _loss_fault(reference: Run, candidate: Run, steps: int) -> str:
    for step, (expected, loss) in enumerate(zip(reference.losses[:steps], candidate.losses, strict=False), 1):
        if not math.isfinite(loss):
            return f"the loss of step {step} is {loss} here and {expected:.4g} in the user's program"
    return ""


def _gradient_fault(found: Comparison, allowed: Allowance, pieces: int) -> str:
    if not math.isfinite(found.relative_error):
        return f"the gradient of {found.worst_parameter} is not finite"
    if found.relative_error > allowed.tolerance:
        return (
            f"gradients differ by {found.relative_error:.2g}, of {allowed.tolerance:.2g} allowed"
            f"{accumulation_advice(found, pieces)}"
        )
    excess = {name: error / allowed.of_gradient(name) for name, error in found.errors.items()}
    worst = max(excess, key=lambda name: excess[name], default=None)
    if found.vanished:
        return f"the gradient of {found.vanished[0]} is next to nothing here and not in the user's program"
    if worst is not None and excess[worst] > 1:
        return (
            f"the gradient of {worst} differs by {found.errors[worst]:.2g}, of {allowed.of_gradient(worst):.2g} allowed"
        )
    return ""


def accumulation_advice(found: Comparison, pieces: int) -> str:
    """What to change where gradients differ and a step is made of several micro-batches."""
    if pieces == 1:
        return ""
    sideways = math.sqrt(max(0.0, 1 - found.cosine**2))
    if sideways < 0.1 * found.relative_error:
        return (
            f"; with {pieces} micro-batches a step they point the same way with another length: the loss is a sum, or a "
            "mean over something else than samples. Return (loss_sum, weight) from loss_fn"
        )
    return (
        f"; with {pieces} micro-batches a step: a mean over tokens of ragged batches must return (loss_sum, weight) "
        "from loss_fn; a loss that couples the samples of a batch (contrastive) cannot be split"
    )


def _buffer_fault(reference: Run, candidate: Run, allowed: Allowance) -> str:
    excess = {
        name: error / allowed.of_buffer(name)
        for name, error in compare_buffers(reference.buffers, candidate.buffers).items()
    }
    worst = max(excess, key=lambda name: excess[name], default=None)
    if worst is None or excess[worst] <= 1:
        return ""
    error = excess[worst] * allowed.of_buffer(worst)
    return f"buffer {worst} differs by {error:.2g} after one step, such as an average updated twice"


def _update_fault(reference: Run, candidate: Run) -> str:
    if reference.moved == 0 or 0.1 < candidate.moved / reference.moved < 10:
        return ""
    return (
        f"{len(reference.losses)} steps move the parameters by {candidate.moved:.2g} here and by {reference.moved:.2g} "
        "in the user's program"
    )
