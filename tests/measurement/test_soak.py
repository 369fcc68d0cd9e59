from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from autotune.failure import TrialFailure
from autotune.measurement.clock import BlockClock
from autotune.measurement.soak import _Course, soak
from autotune.records import Phase, SoakResult
from autotune.surgery.out_of_memory import is_out_of_memory
from autotune.workload import UserFunctions
from tests.measurement.programs import (
    WIDTH,
    agrees,
    held_bytes,
    holds,
    mse,
    no_phase,
    pause,
    program,
    regression_data,
    request,
    slowly_compiled,
)

Caught = Callable[..., BaseException]


@pytest.fixture
def caught() -> Caught:
    """Soaks a program that fails, and gives what it raised."""

    def run(functions: UserFunctions, **changes: Any) -> BaseException:
        with pytest.raises(Exception) as caught:  # noqa: PT011  # each test looks at it
            soaked(functions, **changes)
        return caught.value

    return run


class Steady(nn.Module):
    """Notes what it is asked to do; 4 ms for each."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, 1)
        self.modes: list[tuple[bool, bool, int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.modes.append((self.training, torch.is_grad_enabled(), len(x)))
        pause(self.seconds())
        return self.net(x)

    def seconds(self) -> float:
        return 0.004


class Slows(Steady):
    def seconds(self) -> float:
        return 0.002 + 0.0005 * len(self.modes)


class Leaks(Steady):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.append(held_bytes(2**22))
        return super().forward(x)


class StopsLearning(Steady):
    """NaN from its hundredth step on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = super().forward(x)
        return scores * float("nan") if len(self.modes) > 100 else scores

    def seconds(self) -> float:
        return 0.0005


class TrainsOnly(Steady):
    """As models that find objects: another kind of output in evaluation."""

    def forward(self, x: torch.Tensor) -> Any:
        scores = super().forward(x)
        return scores if self.training else {"scores": scores}


class OwnBatchOnly(Steady):
    """Written for batches of 8 and of 4."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = super().forward(x)
        return scores.view(8, 1) if len(x) > 4 else scores


class Forgets(torch.optim.SGD):
    """Takes ten times larger steps once its state was loaded."""

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        for group in self.param_groups:
            group["lr"] = 0.1


class NotLoadable(Steady):
    def get_extra_state(self) -> Any:
        return {"steps": len(self.modes)}

    def set_extra_state(self, state: Any) -> None:
        raise KeyError("version")


class RunsDry(Dataset[Any]):
    """Its samples come later and later, as from storage whose credit is used up."""

    def __init__(self) -> None:
        self.drawn = 0

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Any:
        self.drawn += 1
        time.sleep(0.002 * self.drawn)
        return torch.zeros(WIDTH), torch.zeros(1)


def soaked(functions: UserFunctions, maximum_blocks: int = 8, **changes: Any) -> SoakResult:
    return soak(functions, request("soak", block_seconds=0.05, maximum_blocks=maximum_blocks, **changes), no_phase)


def showing(shown: Callable[[SoakResult], bool], functions: UserFunctions, **changes: Any) -> SoakResult:
    """The first soak that shows something: another program on this machine may hide it, or leave time for few blocks."""
    results: list[SoakResult] = []

    def shows() -> bool:
        results.append(soaked(functions, **changes))
        return shown(results[-1])

    assert holds(shows), results[-1]
    return results[-1]


def test_a_steady_program_has_no_findings_and_sees_an_evaluation_and_the_end_of_the_data() -> None:
    made: list[Steady] = []

    def model_fn() -> nn.Module:
        made.append(Steady())
        return made[-1]

    phases: list[Phase] = []
    functions = program(model_fn, lambda: regression_data(samples=20))

    def held() -> bool:
        phases.clear()
        results.append(soak(functions, request("soak", block_seconds=0.05, maximum_blocks=8), phases.append))
        return not results[-1].findings and results[-1].steps >= 8

    results: list[SoakResult] = []
    assert holds(held)  # on a busy machine throughput does fall at times
    result = results[-1]
    assert (result.growth_bytes_per_step, result.allocator_retries) == (0.0, 0)
    assert result.samples_per_second < 20 / 3 / 0.004
    assert phases == ["build", "compile", *["soak"] * 4]
    # One evaluation without gradients, a step, a save, and four steps around the load.
    assert made[-1].modes.count((False, False, 8)) == 1
    assert made[-1].modes[-6:] == [(False, False, 8), *[(True, True, 8)] * 5]
    assert {samples for _, _, samples in made[-1].modes} == {8, 4}


def test_a_short_soak_reaches_the_end_of_a_pass_where_it_is_near() -> None:
    made: list[Steady] = []

    def model_fn() -> nn.Module:
        made.append(Steady())
        return made[-1]

    functions = program(model_fn, lambda: regression_data(samples=8 * 20 + 1))

    def reached() -> float:
        soak(functions, request("soak", block_seconds=0.01, maximum_blocks=6), no_phase)
        return float(sum(samples == 1 for _, _, samples in made[-1].modes))

    # 21 steps of 4 ms take longer than the 60 ms asked for and, where nothing else runs, not twice as long.
    assert agrees(reached, 0.0)


@pytest.mark.parametrize(("samples", "last"), [(8 * 400 + 3, {8, 3}), (8 * 400, {8})])
def test_the_last_batch_of_a_pass_that_is_too_long_is_tried_all_the_same(samples: int, last: set[int]) -> None:
    made: list[Steady] = []

    def model_fn() -> nn.Module:
        made.append(Steady())
        return made[-1]

    soaked(program(model_fn, lambda: regression_data(samples=samples)), maximum_blocks=2)
    assert {size for _, _, size in made[-1].modes} == last


def test_a_model_that_cannot_take_the_last_batch_says_what_it_was(caught: Caught) -> None:
    error = caught(program(OwnBatchOnly, lambda: regression_data(samples=8 * 400 + 5)))
    assert str(error) == "shape '[8, 1]' is invalid for input of size 5"
    assert error.__notes__ == ["at the last batch of a pass, of 5 samples; drop_last=True leaves it out"]


def test_throughput_that_falls_is_found() -> None:
    result = showing(lambda result: bool(result.findings), program(Slows, loss_fn=mse))
    (finding,) = result.findings
    assert finding.startswith("throughput fell from ")
    assert finding.endswith(" samples/s while it ran")
    assert result.last_samples_per_second is not None
    assert result.last_samples_per_second < result.samples_per_second


def test_a_loader_that_does_not_keep_up_is_named() -> None:
    def named(result: SoakResult) -> bool:
        return any(line.endswith("while it ran: the loader did not keep up") for line in result.findings)

    showing(named, program(data_fn=lambda: DataLoader(RunsDry(), batch_size=8)), maximum_blocks=20)


def test_a_leak_is_found_with_its_bytes_per_step() -> None:
    result = showing(lambda result: result.growth_bytes_per_step > 0, program(Leaks))
    assert result.growth_bytes_per_step == pytest.approx(2**22, rel=0.3)
    assert any(
        "MiB with every step: something keeps tensors of past steps (a leak)" in line for line in result.findings
    )


class LeavesOutLater(nn.Module):
    """Its trunk under autocast after three steps, with `rarely` in three steps of four."""

    def __init__(self, rarely: bool) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.steps, self.rarely = 0, rarely

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += torch.is_autocast_enabled("cpu")
        leaves_out = self.steps > 3 and not (self.rarely and self.steps % 4 == 0)
        return self.head(x if leaves_out else x + self.trunk(x))


def test_a_part_that_is_left_out_after_some_steps_is_found_unless_it_is_taken_at_times() -> None:
    result = soaked(program(lambda: LeavesOutLater(rarely=False)), precision="bf16")
    assert result.lost_gradients == ("trunk.weight", "trunk.bias")
    assert any("trunk.weight had a gradient at first, and has none after" in finding for finding in result.findings)
    assert soaked(program(lambda: LeavesOutLater(rarely=False))).lost_gradients == ()
    assert soaked(program(lambda: LeavesOutLater(rarely=True)), precision="bf16").lost_gradients == ()


class ChoosesAnother(nn.Module):
    """The first of its experts until another is better, which takes some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)
        self.choice = nn.Parameter(torch.tensor([0.05, 0.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        expert = self.other if self.choice[1] > self.choice[0] else self.first
        return expert(x) + self.choice[0] + 10


class FreezesLater(Steady):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.trunk.requires_grad_(len(self.modes) < 4)
        return super().forward(x + self.trunk(x))


@pytest.mark.parametrize("model_fn", [ChoosesAnother, FreezesLater])
def test_a_part_that_is_chosen_no_more_or_frozen_is_not_left_out(model_fn: Callable[[], nn.Module]) -> None:
    result = soaked(program(model_fn, optimizer_fn=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3)))
    assert result.lost_gradients == ()
    assert not [finding for finding in result.findings if "gradient" in finding]


def test_a_loss_that_stops_being_finite_ends_it(caught: Caught) -> None:
    error = caught(program(StopsLearning), maximum_blocks=200)  # so many on a busy machine only
    assert isinstance(error, TrialFailure)
    assert error.kind == "numerics"
    steps = int(error.message.removeprefix("the loss was nan after ").removesuffix(" steps"))
    assert 100 < steps < 250


def test_an_evaluation_that_the_users_program_cannot_do_either_is_told_and_not_held_against_it() -> None:
    result = soaked(program(TrainsOnly))
    told = [line for line in result.findings if "evaluation" in line]
    assert len(told) == 1
    assert told[0].startswith("an evaluation without gradients fails with your own settings too (AttributeError: ")
    assert told[0].endswith("so that it was not tried")


def test_an_evaluation_that_only_the_configuration_fails_at_is_its_failure(caught: Caught) -> None:
    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        if not model.training and torch.is_autocast_enabled("cpu"):
            raise RuntimeError("mat1 and mat2 must have the same dtype")
        return mse(model, batch)

    error = caught(program(Steady, loss_fn=loss_fn), precision="bf16")
    assert error.__notes__ == ["in an evaluation without gradients, which your own settings get through"]


def test_memory_that_an_evaluation_runs_out_of_is_told_and_no_fault() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():
            torch.empty(2**50)
        return mse(model, batch)

    result = soaked(program(Steady, loss_fn=loss_fn), precision="bf16")
    told = "an evaluation of 8 samples at once runs out of memory: evaluate in smaller batches"
    assert told in result.findings


def test_memory_that_runs_out_in_the_step_after_an_evaluation_is_told_as_that(caught: Caught) -> None:
    evaluated = False

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal evaluated
        evaluated |= not torch.is_grad_enabled()
        if evaluated and torch.is_grad_enabled():
            torch.empty(2**50)
        return mse(model, batch)

    error = caught(program(Steady, loss_fn=loss_fn))
    assert is_out_of_memory(error)
    assert not hasattr(error, "__notes__")


def test_memory_that_runs_out_beside_the_configuration_says_nothing_of_the_users_program(caught: Caught) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():
            if torch.is_autocast_enabled("cpu"):
                raise ValueError("not in bf16")
            torch.empty(2**50)
        return mse(model, batch)

    error = caught(program(Steady, loss_fn=loss_fn), precision="bf16")
    assert str(error) == "not in bf16"
    assert error.__notes__ == ["in an evaluation without gradients"]


def test_modules_that_the_user_keeps_in_evaluation_stay_there() -> None:
    class Frozen(Steady):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH).eval()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not self.norm.training
            return super().forward(self.norm(x))

    assert not [line for line in soaked(program(Frozen)).findings if "fell" not in line]


def test_a_state_that_does_not_hold_all_is_found() -> None:
    functions = program(Steady, optimizer_fn=lambda model: Forgets(model.parameters(), lr=0.001))
    (finding,) = [line for line in soaked(functions).findings if "fell" not in line]
    assert finding.startswith("after its state was loaded, the loss of a step was ")
    assert finding.endswith("state_dict() does not hold all that training depends on")


def test_a_state_that_no_settings_can_load_is_told() -> None:
    (finding,) = [line for line in soaked(program(NotLoadable)).findings if "fell" not in line]
    assert finding == (
        "a save and load of the state fails with your own settings too (KeyError: 'version'), so that it was not tried"
    )


def test_a_shorter_last_batch_that_is_compiled_for_again_is_told() -> None:
    functions = program(lambda: nn.Linear(WIDTH, 1), lambda: regression_data(samples=8 * 400 + 3))
    findings = soaked(functions, maximum_blocks=2, compile_mode="default", compile_scope="model").findings
    assert any("1 graph was compiled while it ran on" in line for line in findings)


def test_a_model_that_tells_its_own_loss_is_evaluated_too() -> None:
    class Own(Steady):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            scores = super().forward(x)
            return scores, nn.functional.mse_loss(scores, y)

    assert soaked(program(Own, loss_fn=None)).steps >= 1


def test_modules_that_the_user_keeps_in_evaluation_stay_in_it() -> None:
    made: list[nn.Module] = []

    def model_fn() -> nn.Module:
        made.append(nn.Sequential(nn.BatchNorm1d(WIDTH).eval(), nn.Dropout(0.5), nn.Linear(WIDTH, 1)))
        return made[-1]

    soaked(program(model_fn))
    assert [module.training for module in made[-1].modules()] == [True, False, True, True]


def test_fp16_and_schedulers_are_saved_and_loaded() -> None:
    functions = program(
        Steady, loss_fn=mse, scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)
    )
    assert soaked(functions, precision="fp16", optimizer_impl="fused").steps >= 1


def course(seconds: list[float], starved: list[float]) -> _Course:
    """Blocks of a hundred samples each."""
    clock = BlockClock(torch.device("cpu"), seconds=seconds, samples=[100] * len(seconds))
    return _Course(clock, waited_seconds=[0.0] * len(seconds), starved_seconds=starved)


def test_a_fall_in_which_other_work_had_the_cores_is_told_as_that() -> None:
    seconds = [0.1, *[0.1] * 3, *[0.2] * 6]
    fell = "throughput fell from 1,000 to 500 samples/s while it ran"
    by_itself = course(seconds, [0.0] * 10)
    assert by_itself.fall() == fell
    assert 1 / by_itself.unhindered_thirds()[1] == pytest.approx(500)
    crowded = course(seconds, [0.0] * 4 + [0.1] * 6)
    assert crowded.fall() == f"{fell}: other work on this machine had its cores"
    assert 1 / crowded.unhindered_thirds()[1] == pytest.approx(1000)
    slower_too = course(seconds, [0.05] * 4 + [0.1] * 6)
    assert slower_too.fall() == fell, "half of the time is others' all along, and it got slower all the same"


def slow_mse(model: nn.Module, batch: Any) -> torch.Tensor:
    pause(0.02)
    return mse(model, batch)


def test_what_is_compiled_at_the_end_of_a_pass_has_its_own_time_and_is_no_fall_of_the_rate() -> None:
    functions = program(slowly_compiled(1.0), lambda: regression_data(samples=8 * 25 + 6), slow_mse)

    def held() -> bool:
        phases: list[Phase] = []
        result = soak(functions, request("soak", block_seconds=0.1, maximum_blocks=4), phases.append)
        assert any("compiled while it ran on" in finding for finding in result.findings)
        # On a busy machine the soak may end before the pass does, and the rate may fall for another reason.
        came_there = phases[2:5] == ["soak", "compile", "soak"]
        return came_there and not any("fell" in finding for finding in result.findings)

    assert holds(held)


def test_the_end_of_a_pass_that_is_far_away_has_the_time_of_a_compilation_too() -> None:
    phases: list[Phase] = []
    functions = program(slowly_compiled(0.0), lambda: regression_data(samples=8 * 1000 + 6), slow_mse)
    soak(functions, request("soak", block_seconds=0.02, maximum_blocks=2), phases.append)
    assert phases[2:4] == ["soak", "compile"]


def test_a_soak_in_which_the_only_block_is_dropped_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is still busy with the step that was queued when the block ended, for longer than the soak was to last."""
    drop_last = _Course.drop_last

    def waiting(course: _Course) -> None:
        drop_last(course)
        pause(0.1)

    monkeypatch.setattr(_Course, "drop_last", waiting)
    losses = itertools.count()

    def another_shape(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0] if next(losses) < 2 else batch[0].unsqueeze(1)  # after what comes before the blocks
        return model(x).square().mean()

    result = soak(
        program(slowly_compiled(0.1), regression_data, another_shape),
        request("soak", block_seconds=0.02, maximum_blocks=2),
        no_phase,
    )
    assert result.block_count >= 1
