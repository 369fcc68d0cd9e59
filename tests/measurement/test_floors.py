"""What a candidate may differ by, seen in the user's own program."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autotune.config import TrainingConfig
from autotune.measurement.determinism import HIGHEST
from autotune.measurement.floors import MOST_DEPTH, Floors
from autotune.measurement.reference import Reference
from autotune.measurement.runs import Difference, Step, difference
from autotune.measurement.samples import windows_for_both
from autotune.measurement.verdict import allowance
from autotune.records import Conditions
from autotune.training.training import Training
from autotune.training.windows import Window
from autotune.workload import UserFunctions
from tests.measurement.parity_programs import Net, Sensitive
from tests.measurement.programs import config, mse, program

CONDITIONS = Conditions(global_batch_size=None, device="cpu")
Loss = Callable[[Any, Any], torch.Tensor]


def asked(functions: UserFunctions, **changes: Any) -> tuple[Floors, list[Step], list[Window], list[str]]:
    """Floors for a candidate with these changes, the reference's steps, their windows, and the notes."""
    reference = Reference(functions, CONDITIONS, None, TrainingConfig({}), ())
    windows = windows_for_both(Training(functions, config(**changes), CONDITIONS), 3).windows
    notes: list[str] = []
    steps = reference.run(windows).steps
    return Floors(reference, config(**changes), CONDITIONS, HIGHEST, notes), steps, windows, notes


def counting() -> Loss:
    """A loss that grows with the number of its calls."""
    calls = itertools.count()
    return lambda model, batch: mse(model, batch) * (1 + next(calls) / 1000)


def test_further_floors_allow_more_for_single_tensors_and_no_less_for_all_together() -> None:
    floors, steps, windows, _ = asked(program(Net), precision="bf16")
    assert floors.own_roundings == floors.roundings == {"bfloat16"}
    few, more, most = (floors.allowance(steps, windows, [0], depth=depth) for depth in range(MOST_DEPTH + 1))
    assert few.relative_error == more.relative_error == most.relative_error > 0
    assert few.output_error == 0 < more.output_error <= most.output_error
    assert not few.is_exact
    for less, deeper in ((few, more), (more, most)):
        assert all(deeper.errors[name] >= error for name, error in less.errors.items())


class OneWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))


def test_weights_are_rounded_anew_in_every_step_so_that_small_updates_are_lost() -> None:
    """Its gradient is the weight: 1, then 0.9995, then 0.999, all of which are 1 in bf16."""
    floors, steps, windows, _ = asked(
        program(
            OneWeight,
            loss_fn=lambda model, batch: model.weight.square().sum() / 2 + 0 * batch[0].sum(),
            optimizer_fn=lambda model: torch.optim.SGD(model.parameters(), lr=0.0005),
        ),
        precision="bf16",
    )
    assert [float(step.gradients["weight"]) for step in steps] == pytest.approx([1, 0.9995, 0.999], abs=1e-6)  # type: ignore[arg-type]
    errors = [floors.allowance(steps, windows, [number], depth=0).relative_error for number in range(3)]
    assert errors == pytest.approx([0, 0.0005, 0.001], rel=0.01)


def test_no_step_is_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    floors, steps, windows, _ = asked(program(Net), precision="bf16")
    asked_for: list[list[int]] = []
    inexact = Reference.inexact

    def counted(self: Reference, windows: list[Window], teacher: Any, numbers: list[int], **options: Any) -> Any:
        asked_for.append(numbers)
        return inexact(self, windows, teacher, numbers, **options)

    monkeypatch.setattr(Reference, "inexact", counted)
    few = floors.allowance(steps, windows, [0], depth=0)
    assert floors.allowance(steps, windows, range(3), depth=2) == floors.allowance(steps, windows, range(3), depth=2)
    assert floors.allowance(steps, windows, [0], depth=0) == few
    assert asked_for == [[0], [1, 2], [0, 1, 2], [0, 1, 2]]


def test_what_rounds_nothing_is_allowed_another_order_of_adding_and_says_nothing() -> None:
    floors, steps, windows, notes = asked(program(Net))
    assert floors.roundings == set()
    assert floors.allowance(steps, windows, [0], depth=0).is_exact
    allowed = floors.with_repeat(allowance(), steps, windows)
    assert 0 < allowed.relative_error < 1e-5
    assert notes == []


def test_what_a_count_outside_the_model_changes_is_allowed_and_said() -> None:
    floors, steps, windows, notes = asked(program(loss_fn=counting()))
    allowed = floors.with_repeat(allowance(), steps, windows)
    assert 1e-3 < allowed.relative_error < 0.1
    assert "differs from itself" in notes[0]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, "DefaultCPUAllocator: not enough memory"])
def test_where_memory_is_left_for_no_repeat_nothing_more_is_allowed(error: type[Exception] | str) -> None:
    full = False

    class Filling(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if full:
                raise RuntimeError(error) if isinstance(error, str) else error("full")
            return super().forward(x)

    floors, steps, windows, _ = asked(program(Filling))
    full = True
    allowed = allowance()
    assert floors.with_repeat(allowed, steps, windows) is allowed


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, "DefaultCPUAllocator: not enough memory"])
def test_where_memory_is_left_for_no_floor_that_is_raised(error: type[Exception] | str) -> None:
    """As where the model refuses hooks it would pass for a floor of nothing, and reject what is honest."""
    calls = 0

    class Filling(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls > 4:  # after the reference and one floor
                raise RuntimeError(error) if isinstance(error, str) else error("full")
            return super().forward(x)

    floors, steps, windows, _ = asked(program(Filling), precision="bf16")
    with pytest.raises((RuntimeError, MemoryError)):
        floors.allowance(steps, windows, [0], depth=MOST_DEPTH)


def test_a_count_outside_the_model_is_allowed_with_its_norms_evaluated_as_well() -> None:
    floors, steps, windows, notes = asked(program(Sensitive, loss_fn=counting()), precision="bf16")
    allowed = floors.allowance(steps, windows, [0], depth=0)
    assert allowed.is_blind

    def candidate(calm: Step) -> Difference:
        other = {name: None if one is None else one * 1.03 for name, one in calm.gradients.items()}
        return difference(calm, Step(other, calm.buffers, calm.loss, 0, frozenset()))

    found, both = floors.with_norms_evaluated(
        steps, [difference(step, step) for step in steps], allowed, windows, candidate
    )
    assert [round(step.gradients.relative_error, 3) for step in found] == [0.03] * 3
    assert 0.001 < both.relative_error < 0.1, "not what rounding does to it in training"
    assert both.loss_error >= allowed.loss_error
    assert any("differs from itself" in note and "in evaluation" in note for note in notes), notes


def test_what_tells_as_little_with_its_norms_evaluated_stays_compared_in_training() -> None:
    class Chaotic(Sensitive):
        """Sensitive with and without its norms."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(1e4 * super().forward(x))

    floors, steps, windows, notes = asked(program(Chaotic), precision="bf16")
    allowed = floors.allowance(steps, windows, [0], depth=0)
    own = [difference(step, step) for step in steps]

    def candidate(calm: Step) -> Difference:
        raise AssertionError("it has nothing to show")

    found, both = floors.with_norms_evaluated(steps, own, allowed, windows, candidate)
    assert found is own
    assert both.relative_error >= allowed.relative_error
    assert notes == []
