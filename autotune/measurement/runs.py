"""A training run over given windows, step by step, and how far its steps are from another run's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from autotune.measurement.gradients import (
    Comparison,
    Gradients,
    Move,
    compare,
    compare_buffers,
    compare_moves,
    first_not_finite,
)
from autotune.measurement.sums import parts, plain, products, read_products
from autotune.surgery.batches import independent
from autotune.surgery.generators import random_state, seed_everything
from autotune.training.training import Training
from autotune.training.windows import Window, fresh

SCALER_TRIES = 25
"""Halvings of the loss scale that fp16 is given to reach a step that is not skipped."""
SEEDS_A_STEP = 100
"""Each window and each update draws from a seed of its own, so that what one draws does not move the next."""

FROZEN_SAMPLE = 1024
"""Elements that are looked at in a parameter that is not trained: what moves one by itself moves all of it."""
FROZEN_RESOLUTIONS = 8.0
"""Distances of neighbouring numbers that rounding may move it by, where it follows what it equals already."""

Place = torch.device | None
"""Where copies are kept; None: each tensor's on the tensor's own device."""
Buffers = dict[str, torch.Tensor]
Settings = tuple[Mapping[str, float], ...]
"""Learning rate, weight decay and the like of each parameter group."""


@dataclass(frozen=True)
class Step:
    """What one window left behind, before the optimizer steps: the training's own tensors, unless it is `kept`."""

    gradients: Gradients
    buffers: Buffers
    loss: float
    skipped: int
    """Loss scales that overflowed before one did not; `SCALER_TRIES` where all did."""
    drew: frozenset[str]
    """The generators that it drew from, such as `torch`."""
    scale: float = 1.0
    """What the gradients are multiplied by."""


class State(NamedTuple):
    """What runs start from."""

    held: Mapping[str, Any]
    """The model's `state_dict()`."""
    beside: Mapping[str, torch.Tensor]
    """What that leaves out, such as buffers that are not persistent, and the parameters outside the model, which two
    trainings may share."""


class Drift(NamedTuple):
    """How far the model itself moved a parameter that is not trained, as a momentum encoder follows in the forward."""

    moved: float
    """Norm of the change of a sample of its elements."""
    rounding: float
    """A move no longer than that is none."""


@dataclass(frozen=True)
class Run:
    """The user's own training over some windows, to hold others against."""

    steps: list[Step]
    parameters: dict[str, torch.Tensor]
    """Those that are trained, after the last update."""
    moved: dict[str, float]
    """Norm of the change of each of them over all updates."""
    settings: Settings
    """After the last update."""
    drifts: Mapping[str, Drift]
    """Of each parameter that no optimizer trains."""
    states: list[State]
    """Of the training before each window but the first."""

    @property
    def drew(self) -> frozenset[str]:
        """The generators that any of its windows drew from."""
        return frozenset().union(*(step.drew for step in self.steps))


def run_windows(training: Training, windows: list[Window], seed: int, place: Place = None) -> Run:
    """Trains on the windows in turn, all random numbers drawn from `seed`. What is kept of it is kept in `place`."""
    before, frozen = copied(_trained(training), place), frozen_samples(training)
    states: list[State] = []

    def keep_state() -> None:
        states.append(state(training, place))

    # Not in a loop, whose variable would hold a window's gradients while the next one runs.
    steps = list(map(partial(kept, place=place), run_steps(training, windows, seed, advanced=keep_state)))
    advance(training, None, seed, len(windows))
    # Without those that came while it ran, which no optimizer has.
    after = {name: parameter for name, parameter in _trained(training).items() if name in before}
    changes = read_products({name: products(before[name], after[name]) for name in after})
    moved = {name: math.sqrt(change.apart) for name, change in changes.items()}
    return Run(steps, copied(after, place), moved, optimizer_settings(training), drifts(frozen, training), states)


def run_steps(
    training: Training,
    windows: list[Window],
    seed: int,
    teacher: Sequence[Step] = (),
    inexact: Callable[[torch.Tensor], torch.Tensor] | None = None,
    advanced: Callable[[], None] = lambda: None,
) -> Iterator[Step]:
    """Each window's step in turn; the last one's update is left to the caller (`advance`). `advanced` is called after each
    of the others.

    A step lies in the training's own memory and is gone when the next one is asked for, unless it is `kept`.

    With the steps of a teacher, the training goes on from the teacher's gradients and buffers instead of its own. So
    every window is compared at the same weights, where nothing but its own rounding tells them apart, and what the
    optimizer makes of a gradient is seen apart from how the gradient came about. `inexact` is what each window's gradient
    is computed at in place of the weights; what is updated is the weights.
    """
    for parameter in named_parameters(training).values():
        parameter.grad = None
    for number, window in enumerate(windows):
        if number:
            advance(training, teacher[number - 1] if teacher else None, seed, number)
            advanced()
        seed_everything(seed + number * SEEDS_A_STEP)
        # Not by a variable, which would hold this window's gradients while the next one runs.
        if inexact is None:
            yield _step(training, window)
        else:
            yield _inexact_step(training, window, inexact, goes_on=number < len(windows) - 1)


def run_one_step(
    training: Training,
    number: int,
    window: Window,
    seed: int,
    start: State,
    inexact: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Iterator[Step]:
    """The step of a window (counted from 0) out of its turn, as `run_steps` runs it, from the state before it."""
    restore(training, start)
    return run_steps(training, [window], seed + number * SEEDS_A_STEP, inexact=inexact)


def _inexact_step(
    training: Training, window: Window, inexact: Callable[[torch.Tensor], torch.Tensor], *, goes_on: bool
) -> Step:
    """At changed weights; where it `goes_on` from the weights, these get back what they lost, save those of layouts that
    do not subtract."""
    lost: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        for parameter in training.model.parameters():
            rounded = inexact(parameter)
            if rounded is parameter or _is_expanded(parameter):
                continue
            if goes_on and parameter.layout == torch.strided:
                lost.append((parameter, parameter - rounded))
            parameter.copy_(rounded)
    step = _step(training, window)
    # To the weights as they are now: the model itself may have moved them meanwhile.
    with torch.no_grad():
        for changed, difference_to_it in lost:
            changed.add_(difference_to_it)
    return step


def advance(training: Training, teacher: Step | None, seed: int, number: int) -> None:
    """The update of a run's step (counted from 1), from the teacher's gradients and buffers where there is one."""
    if teacher is not None:
        _take_up(training, teacher)
    seed_everything(seed + (number - 1) * SEEDS_A_STEP + SEEDS_A_STEP // 2)
    training.update()


def _step(training: Training, window: Window) -> Step:
    seeded = random_state()
    loss, skipped = _finite_gradients(training, window)
    drawn = random_state()
    return Step(
        gradients={name: parameter.grad for name, parameter in named_parameters(training).items()},
        buffers=dict(training.model.named_buffers()),
        loss=float(loss),
        skipped=skipped,
        drew=frozenset(name for name in drawn if drawn[name] != seeded.get(name)),
        scale=_scale(training),
    )


def kept(step: Step, place: Place) -> Step:
    """A copy that lasts, unscaled."""
    gradients = {
        name: None if gradient is None else _copy(plain(gradient), place) for name, gradient in step.gradients.items()
    }
    if step.scale != 1.0:
        gradients = {name: None if gradient is None else gradient / step.scale for name, gradient in gradients.items()}
    return replace(step, gradients=gradients, buffers=copied(step.buffers, place), scale=1.0)


def _finite_gradients(training: Training, window: Window) -> tuple[torch.Tensor, int]:
    """The window's loss, its gradients left in the parameters, and how many loss scales overflowed.

    A scale that starts too high skips its first steps and halves; that is the scaler's work, not an error.
    """
    if training.scaler is None:
        return training.accumulate(fresh(window)), 0
    buffers, parameters = copied(dict(training.model.named_buffers()), None), named_parameters(training)
    for skipped in range(SCALER_TRIES):
        loss = training.accumulate(fresh(window))
        if first_not_finite({name: parameter.grad for name, parameter in parameters.items()}) is None:
            return loss, skipped
        if not math.isfinite(float(loss)):
            return loss, skipped  # the loss comes before the scale: no scale mends it
        # As the scaler itself would, but without a step that a scheduler counts.
        training.scaler.update(training.scaler.get_scale() * training.scaler.get_backoff_factor())
        for parameter in parameters.values():
            parameter.grad = None
        for name, buffer in training.model.named_buffers():
            if name in buffers and buffer.shape != buffers[name].shape:
                buffer.data = buffers[name].clone()  # it grows with each forward
            _put(buffer, buffers.get(name))
    return training.accumulate(fresh(window)), SCALER_TRIES


def _take_up(training: Training, teacher: Step) -> None:
    """The teacher's gradients and buffers in place of the training's own, in the same memory.

    A gradient that only one of them has stays as it is: weight decay acts on zeros and not on None.
    """
    scale = _scale(training)
    for name, parameter in named_parameters(training).items():
        wanted = teacher.gradients[name]
        if wanted is None or parameter.grad is None:
            continue
        if parameter.grad.layout == torch.strided:
            parameter.grad.copy_(torch.view_as_complex(wanted) if parameter.grad.is_complex() else wanted)
        else:
            parameter.grad = wanted.to(parameter.device, parameter.dtype).sparse_mask(parameter.grad.coalesce())
        if scale != 1.0:
            parameter.grad.mul_(scale)
    for name, buffer in training.model.named_buffers():
        _put(buffer, teacher.buffers.get(name))


def _put(tensor: torch.Tensor, wanted: torch.Tensor | None) -> None:
    """Gives it this value in its own memory. One of another shape, as where it holds what a micro-batch left, cannot be
    taken; and one that has it already may be one that nothing can write to."""
    if wanted is None or tensor.shape != wanted.shape:
        return
    wanted = wanted.to(tensor.device)
    if not all(map(torch.equal, parts(tensor), parts(wanted))):
        with torch.no_grad():
            tensor.copy_(wanted)


def _scale(training: Training) -> float:
    return training.scaler.get_scale() if training.scaler is not None else 1.0


def frozen_samples(training: Training) -> dict[str, torch.Tensor]:
    """Copies of some elements of every floating point parameter that is not trained: there may be billions."""
    return {
        name: _sample(parameter)
        for name, parameter in training.model.named_parameters()
        if not parameter.requires_grad and parameter.is_floating_point() and _is_plain(parameter)
    }


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested and not _is_expanded(tensor)


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    elements = parameter.detach().flatten()
    # A mask of an attention is full of infinities, whose difference is no number.
    return elements[:: max(1, elements.numel() // FROZEN_SAMPLE)].double().nan_to_num(0.0, 0.0, 0.0)


def drifts(before: Mapping[str, torch.Tensor], training: Training) -> dict[str, Drift]:
    """How far the samples of parameters that are not trained are from what they were."""
    after = frozen_samples(training)
    same = {name for name in before if name in after and after[name].shape == before[name].shape}
    moves = read_products({name: products(before[name], after[name]) for name in before if name in same})
    types = {name: parameter.dtype for name, parameter in training.model.named_parameters() if name in same}
    return {
        name: Drift(
            moved=math.sqrt(move.apart),
            rounding=FROZEN_RESOLUTIONS * torch.finfo(types[name]).eps * math.sqrt(move.expected),
        )
        for name, move in moves.items()
    }


def optimizer_settings(training: Training) -> Settings:
    """The numbers in each of the optimizer's parameter groups, pairs such as betas one by one."""
    return tuple(
        {
            f"{name}[{index}]" if len(numbers) > 1 else name: float(number)
            for name, value in group.items()
            if name != "params"
            for numbers in [value if isinstance(value, (tuple, list)) else (value,)]
            for index, number in enumerate(numbers)
            if _is_number(number)
        }
        for group in training.optimizer.param_groups
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def named_parameters(training: Training) -> dict[str, torch.Tensor]:
    """Those of the model, and those that the optimizer has beside them: a loss may have parameters of its own."""
    return {**dict(training.model.named_parameters()), **_outside(training)}


def _outside(training: Training) -> dict[str, torch.Tensor]:
    known = {id(parameter) for parameter in training.model.parameters()}
    groups = training.optimizer.param_groups
    outside = [parameter for group in groups for parameter in group["params"] if id(parameter) not in known]
    return {f"parameter {number} outside the model": parameter for number, parameter in enumerate(outside)}


def state(training: Training, place: Place) -> State:
    """A copy of what the next step depends on, kept in `place`."""
    held = training.model.state_dict()
    return State(copied(held, place), copied(_beside(training, held), place))


def restore(training: Training, start: State) -> None:
    """Gives a training what `state` gave of one."""
    for name, tensor in _beside(training, start.held).items():
        _put(tensor, start.beside.get(name))
    # A module may go on to change what it is given as its extra state.
    held = {n: value if isinstance(value, torch.Tensor) else independent(value) for n, value in start.held.items()}
    _load(training.model, held)


def _beside(training: Training, held: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    model = training.model
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {**{name: tensor for name, tensor in named if name not in held}, **_outside(training)}


def _load(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """An expanded tensor, which nothing can write to, stays as `model_fn` made it."""
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    expanded = {name for name, tensor in own.items() if _is_expanded(tensor)}
    writable = {name: value for name, value in weights.items() if name not in expanded}
    model.load_state_dict(writable if expanded else weights, strict=not expanded)


def _is_expanded(tensor: torch.Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.is_nested:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def copied(state: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """The tensors of a state, and what else lies in it, copied."""
    return {
        name: _copy(value, place) if isinstance(value, torch.Tensor) else independent(value)
        for name, value in state.items()
    }


def _copy(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    return tensor.detach().to(place or tensor.device, copy=True)


# --- held against each other ---


@dataclass(frozen=True)
class Difference:
    """How far one step is from the reference's step on the same window."""

    gradients: Comparison
    buffers: Mapping[str, float]
    """Relative error of each."""
    expected_loss: float
    loss: float
    skipped: int = 0
    moves: Mapping[str, Move] = field(default_factory=dict)
    """Of each buffer, where it is known what it was before the step."""


def differences(reference: Sequence[Step], steps: Iterable[Step]) -> list[Difference]:
    """Of each step in turn, which is let go before the next is asked for: its gradients would take up memory."""
    return list(map(difference, reference, steps, (None, *reference)))


def difference(expected: Step, step: Step, before: Step | None = None) -> Difference:
    """Of one step. `before`: the reference's step before it, whose buffers both sides went on from."""
    return Difference(
        compare(expected.gradients, step.gradients, step.scale),
        compare_buffers(expected.buffers, step.buffers),
        expected.loss,
        step.loss,
        step.skipped,
        compare_moves(before.buffers, expected.buffers, step.buffers) if before is not None else {},
    )


@dataclass(frozen=True)
class ParameterChange:
    """What the updates did to one parameter, both sides given the same gradients."""

    off: float
    """Norm of the difference between the parameter here and in the reference."""
    moved: float
    """Norm of the reference's change."""
    size: float
    """Norm of the reference's parameter."""
    resolution: float
    """Relative distance of neighbouring numbers of the parameter's type."""


def _trained(training: Training) -> dict[str, torch.Tensor]:
    """Frozen ones may be large, sparse or of any type, and no update moves them."""
    return {name: parameter for name, parameter in named_parameters(training).items() if parameter.requires_grad}


def parameter_changes(reference: Run, training: Training) -> dict[str, ParameterChange]:
    """How far the training's trained parameters are from where the reference's updates led."""
    sums = {
        name: products(expected, parameter)
        for name, parameter in _trained(training).items()
        if (expected := reference.parameters.get(name)) is not None
    }
    return {
        name: ParameterChange(
            off=math.sqrt(change.apart),
            moved=reference.moved[name],
            size=math.sqrt(change.expected),
            resolution=torch.finfo(reference.parameters[name].dtype).eps,
        )
        for name, change in read_products(sums).items()
    }
