from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from autotune.failure import TrialFailure
from autotune.measurement.compilation import compile_counts
from autotune.measurement.measure import measure, started
from autotune.measurement.passes import BlockPlan, block_plan
from autotune.records import Measurement, Phase, TrialRequest
from autotune.workload import UserFunctions
from tests.measurement.programs import (
    WIDTH,
    Features,
    agrees,
    held_bytes,
    holds,
    mse,
    no_phase,
    pause,
    perceptron,
    program,
    regression_data,
    request,
    slowly_compiled,
)


def measured(functions: UserFunctions, **changes: Any) -> Measurement:
    return measure(functions, request("measure", **changes), no_phase)


# --- the number is right ---


class Slow(Dataset[Any]):
    """Takes so many seconds to load a sample."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Any:
        pause(self.seconds)
        x = torch.full((WIDTH,), (index % 97) / 97)
        return x, x[:1]


class Timed(nn.Module):
    """Takes so many seconds for a micro-batch and for each sample in it, and notes when it began."""

    def __init__(self, batch_seconds: float, sample_seconds: float) -> None:
        super().__init__()
        self.batch_seconds, self.sample_seconds = batch_seconds, sample_seconds
        self.net = nn.Linear(WIDTH, 1)
        self.begun: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.begun.append(time.perf_counter())
        pause(self.seconds(len(x)))
        return self.net(x)

    def seconds(self, samples: int) -> float:
        return self.batch_seconds + self.sample_seconds * samples


def against_the_model(model_fn: Callable[[], Timed], data_fn: Callable[[], Any], **changes: Any) -> float:
    """Seconds a sample by the clock that the model keeps itself, over those that are measured."""
    made: list[Timed] = []

    def noted() -> nn.Module:
        made.append(model_fn())
        return made[-1]

    result = measured(program(noted, data_fn), block_seconds=0.1, maximum_blocks=4, **changes)
    low, high = result.interval
    assert low <= result.samples_per_second <= high
    assert result.micro_batch_size == changes.get("batch_size", 8)
    assert result.micro_batches_per_step == changes.get("global_batch_size", 8) // changes.get("batch_size", 8)
    forwards = sum(result.blocks.steps) * result.micro_batches_per_step
    seconds = made[-1].begun[-1] - made[-1].begun[-1 - forwards]
    return seconds / (forwards * result.micro_batch_size) * result.samples_per_second


class Stalling(Timed):
    """Nine batches of ten take 1 ms, the tenth 21 ms."""

    def seconds(self, samples: int) -> float:
        return 0.001 if len(self.begun) % 10 else 0.021


def test_rare_stalls_count_for_what_they_cost() -> None:
    def data_fn() -> DataLoader[Any]:
        return regression_data(8192)

    assert agrees(lambda: against_the_model(lambda: Stalling(0.0, 0.0), data_fn), 0.05)
    result = measured(program(lambda: Stalling(0.0, 0.0), data_fn), block_seconds=0.15, maximum_blocks=4)
    assert 8 / result.samples_per_second > 0.0027  # 3 ms on average, 1 ms at the median


class WarmsUp(nn.Module):
    """The first three steps take long, as where something is compiled or cached."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        pause(0.002 if self.calls > 3 else 0.2)
        return self.net(x)


def test_the_warm_up_is_seen_and_left_out() -> None:
    def left_out() -> bool:
        result = measured(program(WarmsUp), block_seconds=0.05, maximum_blocks=5)
        assert result.first_step_seconds > 0.2
        assert result.warmup_steps > 3
        return max(result.blocks.seconds) < 0.2 and 8 / result.samples_per_second < 0.02

    assert holds(left_out)


def test_batches_prefetched_while_the_first_step_was_slow_are_left_out() -> None:
    functions = program(WarmsUp, lambda: DataLoader(Slow(0.002), batch_size=4))

    def left_out() -> bool:
        result = measured(functions, num_workers=1, block_seconds=0.05, batch_size=4)
        assert result.warmup_steps > 2  # one worker keeps two batches ready
        return 1 / result.samples_per_second > 0.99 * 0.002

    assert holds(left_out)  # where this process waits for a core after its warm-up, the worker goes on


# --- what is kept ---


def test_raw_blocks_are_kept_and_are_whole_steps_of_the_least_length() -> None:
    functions = program(lambda: Timed(0.002, 0.0), lambda: regression_data(8192))
    result = measured(functions, minimum_blocks=3, maximum_blocks=4, block_seconds=0.02)
    blocks = result.blocks
    assert 3 <= len(blocks.seconds) <= 4
    assert len(blocks.samples) == len(blocks.steps) == len(blocks.seconds)
    assert min(blocks.seconds) >= 0.02
    assert blocks.samples == tuple(8 * steps for steps in blocks.steps)
    assert result.samples_per_second == pytest.approx(sum(blocks.samples) / sum(blocks.seconds))
    assert blocks.weights == ()
    assert result.weight_per_second is None
    assert len(result.losses) == 1 + len(blocks.seconds)
    assert all(math.isfinite(loss) for loss in result.losses)


def test_blocks_are_added_until_the_interval_is_narrow_or_no_more_are_allowed() -> None:
    functions = program(lambda: Timed(0.003, 0.0), lambda: regression_data(8192))
    sure = measured(functions, minimum_blocks=2, maximum_blocks=10, relative_precision=1e6)
    unsure = measured(functions, minimum_blocks=2, maximum_blocks=5, relative_precision=1e-9)
    assert len(sure.blocks.seconds) == 2
    assert len(unsure.blocks.seconds) == 5


def test_a_loss_with_weights_is_told_in_them_too() -> None:
    def tokens(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return nn.functional.mse_loss(model(batch[0]), batch[1], reduction="sum"), 3 * len(batch[1])

    result = measured(program(loss_fn=tokens), batch_size=4, global_batch_size=8)
    assert result.blocks.weights == tuple(3.0 * samples for samples in result.blocks.samples)
    assert result.weight_per_second == pytest.approx(3 * result.samples_per_second)
    assert result.weight_interval == pytest.approx([3 * end for end in result.interval])


def test_a_weight_of_nothing_has_no_interval() -> None:
    def nothing_counts(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        return mse(model, batch), 0

    result = measured(program(loss_fn=nothing_counts), precision="fp16", maximum_blocks=3)
    assert (result.weight_per_second, result.weight_interval) == (0.0, None)


def test_short_last_windows_count_with_the_samples_they_have() -> None:
    result = measured(program(data_fn=lambda: regression_data(samples=20)), maximum_blocks=3)
    for samples, steps in zip(result.blocks.samples, result.blocks.steps, strict=True):
        assert samples < 8 * steps or steps < 3


def test_phases_are_told_in_their_order() -> None:
    phases: list[Phase] = []
    measure(program(), request("measure"), phases.append)
    assert phases == ["build", "compile", "warm-up", "measure"]


def test_a_shorter_window_that_follows_the_first_one_is_compiled_in_a_phase_of_its_own() -> None:
    told: list[tuple[Phase, int]] = []
    functions = program(slowly_compiled(0.0), lambda: regression_data(samples=14))
    measure(functions, request("measure"), lambda phase: told.append((phase, compile_counts().graphs)))
    phases, graphs = zip(*told, strict=True)
    assert phases == ("build", "compile", "warm-up", "compile", "warm-up", "measure")
    assert [later - earlier for earlier, later in pairwise(graphs)] == [0, 1, 0, 1, 0]


def within(measure_seconds: float, **changes: Any) -> TrialRequest:
    asked = request("measure", **changes)
    timeouts = asked.timeouts.model_copy(update={"measure_seconds": measure_seconds})
    return asked.model_copy(update={"timeouts": timeouts})


def test_the_blocks_of_a_pass_are_planned_by_its_pace_and_not_by_what_was_compiled_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned: list[float] = []

    def planning(**known: Any) -> BlockPlan:
        planned.append(known["seconds_per_step"])
        return block_plan(**known)

    monkeypatch.setattr("autotune.measurement.measure.block_plan", planning)
    functions = program(slowly_compiled(1.0), lambda: regression_data(samples=8 * 5 + 6))

    def held() -> bool:
        measure(functions, within(1.5), no_phase)
        return planned[-1] < 0.05

    assert holds(held), planned


def test_what_is_compiled_for_other_shapes_leaves_the_blocks_within_the_limit_of_their_phase() -> None:
    def held() -> bool:
        begins: list[float] = []
        calls = itertools.count()

        def of_three_shapes(model: nn.Module, batch: Any) -> torch.Tensor:
            pause(0.01)
            x = batch[0]
            for _ in range(min(2, next(calls) // 30)):
                x = x.unsqueeze(1)
            return model(x).square().mean()

        measure(
            program(slowly_compiled(0.5), loss_fn=of_three_shapes),
            within(2.0, block_seconds=0.1, maximum_blocks=100, relative_precision=1e-9),
            lambda phase: begins.append(time.perf_counter()),
        )
        return time.perf_counter() - begins[-1] < 2.0

    assert holds(held)


# --- out of the race ---


def raced(rate_to_beat: float, **changes: Any) -> Measurement:
    """Steps of 8 samples that take 4 ms and a little, measured to the last block where nothing stops it."""
    return measured(
        program(lambda: Timed(0.004, 0.0), lambda: regression_data(8192)),
        maximum_blocks=6,
        relative_precision=1e-9,
        measure_resident=True,
        rate_to_beat=rate_to_beat,
        **changes,
    )


def test_a_trial_that_is_clearly_beaten_is_stopped_after_the_fewest_blocks() -> None:
    result = raced(rate_to_beat=1e6)
    assert result.stopped_early
    assert len(result.blocks.seconds) == 3
    assert result.resident_samples_per_second is None
    assert result.interval[0] <= result.samples_per_second <= result.interval[1] < 1e6


def test_a_trial_that_is_as_fast_as_the_best_or_a_little_slower_is_measured_to_the_end() -> None:
    result = raced(rate_to_beat=8 / 4.0)  # a thousandth, so that no machine is too busy for it
    assert not result.stopped_early
    assert len(result.blocks.seconds) == 6
    assert result.resident_samples_per_second is not None


def test_what_is_slow_for_its_loader_alone_is_still_a_rival_by_its_step() -> None:
    rival = raced(rate_to_beat=1e6, resident_rate_to_beat=8 / 4.0)
    assert not rival.stopped_early
    assert rival.resident_samples_per_second is not None
    assert rival.update_share is not None
    beaten = raced(rate_to_beat=1e6, resident_rate_to_beat=1e6)
    assert beaten.stopped_early
    assert beaten.resident_samples_per_second is not None
    assert beaten.update_share is None


# --- resident steps ---


def test_resident_steps_leave_the_loader_out() -> None:
    functions = program(lambda: Timed(0.004, 0.0), lambda: DataLoader(Slow(0.003), batch_size=8))

    def left_out() -> bool:
        result = measured(functions, measure_resident=True, minimum_blocks=2, maximum_blocks=2)
        assert 8 / result.samples_per_second > 0.028
        assert result.resident_samples_per_second is not None
        assert 8 / result.resident_samples_per_second > 0.004
        assert result.resident_blocks is not None
        assert len(result.resident_blocks.seconds) >= 2
        told = sum(result.resident_blocks.samples) / sum(result.resident_blocks.seconds)
        assert told == pytest.approx(result.resident_samples_per_second)
        assert result.device_lag_share is None  # there is none on a CPU
        return 8 / result.resident_samples_per_second < 0.024

    assert holds(left_out)
    assert measured(program()).resident_samples_per_second is None


def test_resident_steps_are_given_their_batches_as_they_were() -> None:
    def in_place(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        assert float(x.max()) > 0.1, "the batch is what an earlier step made of it"
        x.div_(100)
        return nn.functional.mse_loss(model(x), y)

    assert measured(program(loss_fn=in_place), measure_resident=True, maximum_blocks=3).resident_blocks is not None


def test_resident_batches_with_a_graph_of_their_own_are_trained_on_many_times() -> None:
    functions = program(data_fn=lambda: DataLoader(Features(), batch_size=8))
    assert measured(functions, measure_resident=True, maximum_blocks=3).resident_blocks is not None


def test_a_schedule_that_ends_before_the_trial_does_not_end_it() -> None:
    def scheduler_fn(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)

    result = measured(program(scheduler_fn=scheduler_fn), minimum_blocks=3, maximum_blocks=3)
    assert result.warmup_steps + sum(result.blocks.steps) > 4


class SlowSgd(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        pause(0.006)
        super().step(closure)


def test_the_updates_share_of_a_step_is_told() -> None:
    def share(optimizer_fn: Callable[[Any], Any] | None) -> float:
        result = measured(
            program(lambda: Timed(0.002, 0.0), optimizer_fn=optimizer_fn), measure_resident=True, maximum_blocks=3
        )
        assert result.update_share is not None
        return result.update_share

    assert holds(lambda: share(lambda model: SlowSgd(model.parameters(), lr=0.1)) > 0.5)
    assert holds(lambda: share(None) < 0.5)


# --- failures ---


class TurnsNan(nn.Module):
    """Fine for the first steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.net(x) * (1.0 if self.calls < 20 else float("nan"))


def test_a_loss_that_turns_nan_ends_the_trial_with_how_many_steps_it_took() -> None:
    with pytest.raises(TrialFailure, match=r"the loss was nan after \d+ steps") as caught:
        measured(program(TurnsNan))
    assert caught.value.kind == "numerics"


def test_compiled_without_a_graph_is_an_error_not_a_speed_up() -> None:
    class NeverCompiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(WIDTH, 1)

        @torch.compiler.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    with pytest.raises(TrialFailure, match="torch.compile made no graph: nothing of this step was compiled") as caught:
        measured(program(NeverCompiled), compile_mode="default")
    assert caught.value.kind == "compile_error"


# --- compiling and scaling are counted ---


def test_graphs_breaks_and_recompiles_are_counted() -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 2
            torch._dynamo.graph_break()
            return self.net(x)

    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    # Batches of 8 and a last one of 4: the second shape is compiled while it runs.
    result = measured(program(Breaks, lambda: regression_data(samples=20)), compile_mode="default", maximum_blocks=3)
    assert result.graph_breaks >= 1
    assert result.compiled_graphs >= 4
    assert result.recompiles >= 2
    assert measured(program()).recompiles == 0


def test_what_is_compiled_for_the_end_of_a_pass_is_no_part_of_the_rate() -> None:
    torch.compiler.reset()
    # A last batch of 4 after 300 of 8, for which a second graph is made: that takes longer than all of them.
    short_pass = program(data_fn=lambda: regression_data(samples=2404))
    with torch._inductor.config.patch(force_disable_caches=True):
        # So many blocks may be timed that a pass is short beside them on the busiest machine too.
        result = measured(
            short_pass, compile_mode="default", block_seconds=0.05, maximum_blocks=200, relative_precision=0.5
        )
    assert result.recompiles >= 1
    assert sum(result.blocks.steps) % 301 == 0, "whole passes"
    assert result.warmup_steps >= 301, (
        "dropped blocks count as these; on a busy machine the warm-up itself may come so far"
    )
    paces = [seconds / steps for seconds, steps in zip(result.blocks.seconds, result.blocks.steps, strict=True)]
    assert max(paces) < 10 * min(paces)


class Overflows(nn.Module):
    """No loss scale makes its gradients finite."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.net(x)
        y.register_hook(lambda gradient: gradient * torch.inf)
        return y


def test_steps_that_the_scaler_skips_are_counted() -> None:
    result = measured(program(Overflows), precision="fp16", maximum_blocks=3)
    assert result.skipped_steps >= sum(result.blocks.steps) // 2
    assert measured(program(), precision="fp16", maximum_blocks=3).skipped_steps == 0


# --- memory ---


class Leaks(nn.Module):
    """Keeps 4 MiB of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, 1)
        self.kept: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.append(held_bytes(2**22))
        pause(0.005)
        return self.net(x)


def test_memory_that_grows_with_every_step_is_seen() -> None:
    def against_what_is_kept() -> float:
        result = measured(program(Leaks), relative_precision=1e-9, maximum_blocks=6)
        return result.memory.growth_bytes_per_step / 2**22

    assert agrees(against_what_is_kept, 0.3)


class Hungry(nn.Module):
    """Takes 64 MiB in each forward and gives them back."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) + torch.ones(2**24).mean() * 0.0


def test_the_peak_holds_what_a_step_takes_for_a_moment() -> None:
    result = measured(program(Hungry), maximum_blocks=3)
    assert 0.95 * 2**26 <= result.memory.peak_allocated_bytes < 2**28
    assert result.memory.reserved_bytes is None


# --- starting ---


def test_the_same_seed_gives_the_same_losses() -> None:
    def data() -> DataLoader[Any]:
        x = torch.randn(64, WIDTH)
        return DataLoader(TensorDataset(x, x[:, :1]), batch_size=8, shuffle=True)

    def first_loss() -> float:
        return started(program(perceptron, data, mse), request("measure"), no_phase).first_loss

    assert first_loss() == first_loss()


def test_the_process_seconds_are_those_since_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_STARTED_AT", str(time.monotonic() - 100))
    assert 100 < started(program(), request("measure"), no_phase).process_seconds < 160
    monkeypatch.delenv("AUTOTUNE_STARTED_AT")
    assert started(program(), request("measure"), no_phase).process_seconds == 0.0
