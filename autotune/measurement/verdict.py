"""Whether two runs trained the same: what may differ, and the sentence that says what does. Numbers in, words out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.measurement.gradients import Comparison, Move
from autotune.measurement.runs import SCALER_TRIES, Difference, Drift, ParameterChange, Settings
from autotune.measurement.seeds import Mean, Means

SMALLEST_TOLERANCE = 1e-3
FLOORS = 3.0
"""The gate: at most the largest of 1e-3, three times the floor, and a few units of the type's rounding."""
ROUNDINGS = 4.0
UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "tf32": 2.0**-11}
"""At least so many units in the last place of the candidate's type: the floor rounds weights and inputs only, while an
honest candidate rounds outputs and gradients too. One linear layer in bf16 shows 0.0036 over a floor of 0.0008 (CPU)."""
OUTPUT_FLOORS = 2.0
OUTPUT_ROUNDINGS = 16.0
"""Or twice what rounding every module's output does, which is most like the candidate, but no more than so many units: where
gradients cancel over the batch (a critic's loss is a difference of means) honest bf16 shows 0.033 over a floor of 0.004, and
where numbers cancel inside the model it shows 1.0 (CPU). A single tensor may differ by so many units in any case: an
attention rounds much that no module returns, 0.037 for a bias of a small ViT where the floor is 0.003 (CPU)."""
SMALLEST_TENSOR_TOLERANCE = 1e-2
TENSOR_FLOORS = 5.0
"""For one tensor of many: the worst of sixty in an honest small ResNet is off by up to four of its floors (CPU). For a
loss too, which is one number: that a floor came out small is chance."""
SMALLEST_FINER_TOLERANCE = 1e-2
"""For micro-batches smaller than a candidate's: a small term that couples the samples of a batch grows as they shrink."""
LARGEST_TOLERANCE = 0.9
"""A gradient that is gone has a relative error of 1: no floor of rounding allows that."""
LARGEST_IN_ONE_STEP = 0.9
"""A sample that lies at a kink (ReLU) goes the other way by the least rounding, and moves the gradient of a small batch by a
tenth (fp16, CPU). So most of the steps must be within the gate, and each within this."""
LARGEST_IN_ONE_EXACT_STEP = 0.2
"""Within this where nothing is rounded to less than fp32: few samples lie so near a kink."""
LOSS_IN_ONE_STEP = 3.0
"""So many times of what is allowed for a loss, likewise: one that is a small difference may be much off by chance."""
LARGEST_BUFFER_TOLERANCE = 0.5
"""A running average updated twice at a momentum of 0.1 is off by 0.9. In a network so sensitive that rounding moves the
averages of its last layers by more, those of its first layers and the count of updates tell."""
UPDATE_TOLERANCE = 1e-4
"""Of what the updates moved a parameter by, given the same gradients: implementations of one optimizer differ by the
order of a few operations in fp32, 1e-6; a weight decay of 0.01 that is lost makes 1e-3 of weights of 0.1."""
LARGEST_DRIFT = 1.5
"""So many times as far, or as near, may a parameter or buffer be moved that the model itself moves: twice a step is twice
as far."""
SMALLEST_MOVE = 1e-4
"""A buffer that moves by less, of its size, does not move; nor one by a hundredth of that for each of its elements: behind a
norm, means are zero but for rounding."""
UPDATE_RESOLUTIONS = 4.0
"""And so many distances of neighbouring numbers, for each update rounds the parameter that it is added to."""


@dataclass(frozen=True)
class Allowance:
    """How far a candidate may be from the reference: a floor seen between two honest runs, and its type's rounding."""

    relative_error: float
    """Of all gradients together."""
    errors: Mapping[str, float]
    """Of each parameter's gradient."""
    buffer_errors: Mapping[str, float]
    loss_error: float
    """Absolute, of the loss."""
    unit_roundoff: float
    largest: float
    """No more than this is allowed for all gradients together."""
    output_error: float = 0.0
    """Of all gradients together, where every module's output is rounded."""
    largest_of_buffer: float = LARGEST_BUFFER_TOLERANCE
    is_exact: bool = False
    """Whether neither the candidate nor the user's program rounds anything to less than fp32."""

    @property
    def tolerance(self) -> float:
        """Of all gradients together."""
        outputs = min(OUTPUT_FLOORS * self.output_error, OUTPUT_ROUNDINGS * self.unit_roundoff)
        wanted = max(SMALLEST_TOLERANCE, FLOORS * self.relative_error, ROUNDINGS * self.unit_roundoff, outputs)
        return min(wanted, self.largest)

    @property
    def is_blind(self) -> bool:
        """Whether rounding alone moves all gradients so far that what is allowed for it would hide anything."""
        return FLOORS * self.relative_error > LARGEST_TOLERANCE

    def of_gradient(self, name: str) -> float:
        """Of one parameter's gradient. Not limited: in honest bf16 that of a small bias may be off by more than itself."""
        floor = TENSOR_FLOORS * max(self.relative_error, self.errors.get(name, 0.0))
        return max(SMALLEST_TENSOR_TOLERANCE, floor, OUTPUT_ROUNDINGS * self.unit_roundoff, self.tolerance)

    def of_buffer(self, name: str) -> float:
        """Of one buffer."""
        wanted = max(SMALLEST_TENSOR_TOLERANCE, TENSOR_FLOORS * self.buffer_errors.get(name, 0.0), self.tolerance)
        return min(wanted, self.largest_of_buffer)

    def of_loss(self, losses: Iterable[float]) -> float:
        """Absolute, of the losses of a run whose reference has these."""
        size = max((abs(loss) for loss in losses if math.isfinite(loss)), default=0.0)
        return TENSOR_FLOORS * self.loss_error + (SMALLEST_TOLERANCE + ROUNDINGS * self.unit_roundoff) * size


def allowance(
    honest_runs: Iterable[Sequence[Difference]] = (),
    output_roundings: Iterable[Sequence[Difference]] = (),
    roundings: Iterable[str] = (),
) -> Allowance:
    """What honest runs differ from the reference by, the largest of each. A step that is not finite says nothing.

    Runs that round every module's output are more like the candidate, and count in full for single tensors and the loss
    only: all gradients together are held to the rounding of weights and inputs, which no faulty arithmetic inside the
    model enlarges.
    """
    relative_error = output_error = loss_error = 0.0
    errors: dict[str, float] = {}
    buffer_errors: dict[str, float] = {}
    for run, counts_for_all in (*((run, True) for run in honest_runs), *((run, False) for run in output_roundings)):
        for step in run:
            if not math.isfinite(step.gradients.relative_error + step.loss):
                continue
            if counts_for_all:
                relative_error = max(relative_error, step.gradients.relative_error)
            else:
                output_error = max(output_error, step.gradients.relative_error)
            loss_error = max(loss_error, abs(step.loss - step.expected_loss))
            _raise_to(errors, step.gradients.errors)
            _raise_to(buffer_errors, step.buffers)
    units = max((UNIT_ROUNDOFF[kind] for kind in roundings), default=0.0)
    return Allowance(relative_error, errors, buffer_errors, loss_error, units, LARGEST_TOLERANCE, output_error)


def wider(allowed: Allowance, other: Allowance) -> Allowance:
    """The same with the larger of each error that either saw."""
    errors, buffer_errors = dict(allowed.errors), dict(allowed.buffer_errors)
    _raise_to(errors, other.errors)
    _raise_to(buffer_errors, other.buffer_errors)
    return replace(
        allowed,
        relative_error=max(allowed.relative_error, other.relative_error),
        errors=errors,
        buffer_errors=buffer_errors,
        loss_error=max(allowed.loss_error, other.loss_error),
        output_error=max(allowed.output_error, other.output_error),
    )


def widened(allowed: Allowance, reference: Means) -> Allowance:
    """As much more as two means over other random numbers differ by; a small gradient in much noise may differ by any."""
    errors, buffer_errors = dict(allowed.errors), dict(allowed.buffer_errors)
    _raise_to(errors, _relative_spreads(reference.gradients))
    _raise_to(buffer_errors, _relative_spreads(reference.buffers))
    size = math.hypot(*(mean.size for mean in reference.gradients.values()))
    spread = math.hypot(*(mean.spread for mean in reference.gradients.values()))
    relative_error = max(allowed.relative_error, spread / size if size else 0.0)
    loss_error = max(allowed.loss_error, reference.loss.spread)
    return replace(
        allowed,
        relative_error=relative_error,
        errors=errors,
        buffer_errors=buffer_errors,
        loss_error=loss_error,
        largest=math.inf,
        largest_of_buffer=math.inf,
    )


def _relative_spreads(means: Mapping[str, Mean]) -> dict[str, float]:
    return {name: mean.spread / mean.size for name, mean in means.items() if mean.size}


def _raise_to(largest: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        largest[name] = max(largest.get(name, 0.0), value)


# --- sentences: what, where, how much of what is allowed, and what to change where that is known ---


def fault(steps: Sequence[Difference], allowed: Allowance, pieces: int) -> str:
    """What is wrong with the candidate's gradients, losses and buffers, in one sentence; empty where nothing is.

    `pieces`: micro-batches that a step was made of, for the advice.
    """
    loss_tolerance = allowed.of_loss(step.expected_loss for step in steps)
    if _of_most([abs(step.loss - step.expected_loss) for step in steps]) <= loss_tolerance:
        loss_tolerance *= LOSS_IN_ONE_STEP
    numbered = list(enumerate(steps, 1))
    return (
        _first(_left_out(step) or _not_finite(step, number, pieces) for number, step in numbered)
        or _gradient_fault(steps, allowed, pieces)
        or _tensor_fault(steps, allowed)
        or _first(
            _loss_fault(step, loss_tolerance, number)
            or buffer_fault(step.buffers, allowed, number)
            or _move_fault(step.moves, allowed, number, pieces)
            for number, step in numbered
        )
    )


def _first(reasons: Iterable[str]) -> str:
    return next(filter(None, reasons), "")


def _of_most(values: Sequence[float]) -> float:
    """What most of the values reach: the middle one, of two the smaller."""
    return sorted(values)[(len(values) - 1) // 2]


def _left_out(step: Difference) -> str:
    if step.skipped == SCALER_TRIES:
        return (
            f"every one of {SCALER_TRIES} steps was skipped: the scaled gradients are never finite; what overflows in "
            "fp16 must be computed in fp32 or bf16"
        )
    missing = step.gradients.missing
    if not missing:
        return ""
    return (
        f"{missing[0]} has a gradient in the user's program and none here: a part of the model is left out, as by a branch "
        "on autocast or by reentrant checkpointing"
    )


def _not_finite(step: Difference, number: int, pieces: int) -> str:
    advice = "; what overflows must be computed in fp32"
    if pieces > 1:
        advice += (
            f"; and a mean over a part of the samples, of which one of {pieces} micro-batches may have none, must be "
            "returned as (loss_sum, weight) from loss_fn"
        )
    if not math.isfinite(step.loss):
        return (
            f"the loss of step {number} is {step.loss} here and {step.expected_loss:.4g} in the user's program{advice}"
        )
    if math.isfinite(step.gradients.relative_error):
        return ""
    where = step.gradients.worst_parameter
    return f"the gradient of {where} is not finite{_when(number)}{advice}"


def _when(number: int) -> str:
    return f" in step {number}" if number > 1 else ""


def _loss_fault(step: Difference, tolerance: float, number: int) -> str:
    if abs(step.loss - step.expected_loss) <= tolerance:
        return ""
    return (
        f"the loss of step {number} is {step.loss:.6g} here and {step.expected_loss:.6g} in the user's program at the same "
        f"weights, {abs(step.loss - step.expected_loss):.2g} apart, of {tolerance:.2g} allowed"
    )


def _gradient_fault(steps: Sequence[Difference], allowed: Allowance, pieces: int) -> str:
    errors = [step.gradients.relative_error for step in steps]
    in_one = LARGEST_IN_ONE_EXACT_STEP if allowed.is_exact else LARGEST_IN_ONE_STEP
    limit = max(allowed.tolerance, in_one)
    if _of_most(errors) <= allowed.tolerance and max(errors) <= limit:
        return ""
    limit = limit if _of_most(errors) <= allowed.tolerance else allowed.tolerance
    number, step = next((number, step) for number, step in enumerate(steps, 1) if step.gradients.relative_error > limit)
    found = step.gradients
    return (
        f"gradients differ by {found.relative_error:.2g}{_when(number)}, of {limit:.2g} allowed"
        f"{_where(found)}{_advice(step, allowed, pieces)}"
    )


def _tensor_fault(steps: Sequence[Difference], allowed: Allowance) -> str:
    """Each parameter's gradient in most of the steps in which it counts."""
    names = dict.fromkeys(name for step in steps for name in step.gradients.errors)
    excess = {
        name: _of_most(
            [
                math.inf if name in step.gradients.vanished else step.gradients.errors[name] / allowed.of_gradient(name)
                for step in steps
                if name in step.gradients.errors
            ]
        )
        for name in names
    }
    worst = max(excess, key=lambda name: excess[name], default=None)
    if worst is None or excess[worst] <= 1:
        return ""
    if math.isinf(excess[worst]):
        return f"the gradient of {worst} is next to nothing here and not in the user's program"
    limit = allowed.of_gradient(worst)
    number, error = next(
        (number, step.gradients.errors[worst])
        for number, step in enumerate(steps, 1)
        if step.gradients.errors.get(worst, 0.0) > limit
    )
    return f"the gradient of {worst} differs by {error:.2g}{_when(number)}, of {limit:.2g} allowed"


def _where(found: Comparison) -> str:
    return "" if found.worst_parameter is None else f", most in {found.worst_parameter} ({found.worst_error:.2g})"


def split_fault(found: Difference, allowed: Allowance, pieces: int) -> str:
    """What a step in several micro-batches does else than the same samples at once, both the user's own program."""
    error, advice = found.gradients.relative_error, _advice(found, allowed, pieces)
    if not error <= allowed.tolerance:
        return f"gradients differ by {error:.2g}, of {allowed.tolerance:.2g} allowed{advice}"
    # It tells where random numbers move the gradient by so much that a wrong length does not show.
    if not abs(found.loss - found.expected_loss) <= allowed.of_loss([found.expected_loss]):
        return (
            f"the loss of {pieces} micro-batches is {found.loss:.6g}, and {found.expected_loss:.6g} of the same samples at "
            f"once{advice}"
        )
    return buffer_fault(found.buffers, allowed, 1)


def finer_fault(found: Difference, allowed: Allowance, pieces: int) -> str:
    """What a step in more and smaller micro-batches than the candidate's does else than the same samples at once, both the
    user's own program: whether the loss is another in kind, so that the candidate's split was right by chance alone."""
    error, limit = found.gradients.relative_error, max(allowed.tolerance, SMALLEST_FINER_TOLERANCE)
    if reason := _not_finite(found, 1, pieces):
        return reason
    if any(moved > limit for moved in found.buffers.values()):
        return ""  # what each forward pass moves, and the next one may use
    if error <= limit:
        return ""
    return (
        f"where the same samples are cut finer, gradients differ by {error:.2g}, of {limit:.2g} allowed"
        f"{accumulation_advice(found.gradients, pieces)}"
    )


def _advice(step: Difference, allowed: Allowance, pieces: int) -> str:
    """What to change; what the model moves at each micro-batch, and may use at the next, comes before what a loss can be."""
    moved = _worst_buffer(step.buffers, allowed)
    if moved is None or pieces == 1 or not allowed.is_exact:  # rounding may be what moves it
        return accumulation_advice(step.gradients, pieces)
    return (
        f"; the model changes its buffer {moved} by itself, {_at_each(pieces)}, and its gradients may follow: such a step "
        "cannot be split"
    )


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
        "from loss_fn, and so must one by weights of classes; a loss that couples the samples of a batch (contrastive), or "
        "clears gradients (zero_grad), cannot be split, nor can the step of a model that keeps a state between batches"
    )


def buffer_fault(errors: Mapping[str, float], allowed: Allowance, number: int) -> str:
    """What is wrong with the buffers after a step; empty where nothing is."""
    worst = _worst_buffer(errors, allowed)
    if worst is None:
        return ""
    return (
        f"buffer {worst} differs by {errors[worst]:.2g} after step {number}, of {allowed.of_buffer(worst):.2g} allowed: "
        "updated twice, or not at all, or from other values"
    )


def _worst_buffer(errors: Mapping[str, float], allowed: Allowance) -> str | None:
    """The one that differs by most of what is allowed; None where all are within."""
    excess = {name: error / allowed.of_buffer(name) for name, error in errors.items()}
    worst = max(excess, key=lambda name: excess[name], default=None)
    return None if worst is None or excess[worst] <= 1 else worst


def update_fault(
    changes: Mapping[str, ParameterChange], expected: Settings, settings: Settings, steps: int, exact: bool
) -> str:
    """What is wrong with the optimizer's steps, which were given the reference's gradients; empty where nothing is.

    `exact`: its matrix products are as exact as the reference's; some optimizers have such.
    """
    return _settings_fault(expected, settings, steps) or _change_fault(changes, steps, exact)


def _settings_fault(expected: Settings, settings: Settings, steps: int) -> str:
    if len(expected) != len(settings):
        return f"the optimizer has {len(settings)} parameter groups here and {len(expected)} in the user's program"
    for number, (theirs, ours) in enumerate(zip(expected, settings, strict=True)):
        for name, value in theirs.items():
            found = ours.get(name, math.nan)
            if found != value and not math.isclose(found, value, rel_tol=UPDATE_TOLERANCE):
                return (
                    f"after {steps} steps {name} of the optimizer's parameter group {number} is {found:.6g} here and "
                    f"{value:.6g} in the user's program: the scheduler is stepped differently, or a setting is lost"
                )
    return ""


def _change_fault(changes: Mapping[str, ParameterChange], steps: int, exact: bool) -> str:
    excess = {name: change.off / (update_tolerance(change, exact) or math.ulp(0.0)) for name, change in changes.items()}
    worst = max(excess, key=lambda name: excess[name], default=None)
    # Not "more than 1": what is not a number is at fault too.
    if worst is None or all(value <= 1 for value in excess.values()):
        return ""
    change = changes[worst]
    return (
        f"from the same gradients, {steps} steps of the optimizer leave {worst} {change.off:.2g} away from where the user's "
        f"program does, which moves it by {change.moved:.2g}; {update_tolerance(change, exact):.2g} is allowed: the update "
        "itself is another one (weight decay, clipping, unscaling, learning rate)"
    )


def drift_fault(expected: Mapping[str, Drift], found: Mapping[str, Drift], steps: int, pieces: int) -> str:
    """What is wrong with parameters that the model moves by itself; empty where nothing is.

    `pieces`: micro-batches that a step was made of: such a model moves them at each, or again where it recomputes.
    """
    for name, reference in expected.items():
        drift = found.get(name, reference)
        if _about_as_far(reference.moved, drift.moved, reference.rounding):
            continue
        times = (
            f"{drift.moved / reference.moved:.2g} times as far" if reference.moved > reference.rounding else "further"
        )
        return (
            f"{name}, which is not trained, is moved {times} in {steps} steps as the user's program moves it: the model "
            f"changes it by itself, {_at_each(pieces)}"
        )
    return ""


def _move_fault(moves: Mapping[str, Move], allowed: Allowance, number: int, pieces: int) -> str:
    """What is wrong with how far buffers were moved in a step: one that moves slowly differs by little of itself."""
    for name, move in moves.items():
        share = SMALLEST_MOVE + TENSOR_FLOORS * allowed.buffer_errors.get(name, 0.0)
        rounding = share * move.size + SMALLEST_MOVE / 100 * move.scale
        if not _about_as_far(move.expected, move.got, rounding):
            times = f"{move.got / move.expected:.2g} times as far" if move.expected > rounding else "further"
            return (
                f"buffer {name} is moved {times} in step {number} as the user's program moves it: the model changes it, "
                f"{_at_each(pieces)}"
            )
    return ""


def _about_as_far(expected: float, moved: float, rounding: float) -> bool:
    return max(expected, moved) <= LARGEST_DRIFT * min(expected, moved) + rounding


def _at_each(pieces: int) -> str:
    return (
        f"at each of the {pieces} micro-batches of a step" if pieces > 1 else "at each forward pass, recomputed or not"
    )


def update_tolerance(change: ParameterChange, exact: bool) -> float:
    """How far a parameter may be from the reference's after the updates, absolute."""
    relative = max(UPDATE_TOLERANCE, UPDATE_RESOLUTIONS * change.resolution)
    if not exact:
        relative = max(relative, ROUNDINGS * UNIT_ROUNDOFF["tf32"])
    return relative * change.moved + UPDATE_RESOLUTIONS * change.resolution * change.size
