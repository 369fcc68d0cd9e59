"""What the gate rejects although it runs, and is fast: each is a way to train something else unseen."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from autotune.knobs.activation_checkpointing import ActivationCheckpointing
from autotune.knobs.compile_mode import CompileMode
from autotune.training.training import Training
from autotune.training.windows import Window
from tests.measurement.parity_programs import (
    BLOCKS,
    SPLIT,
    Net,
    NormNet,
    Sensitive,
    assert_passed,
    assert_rejected,
    contrastive,
    in_autocast,
    norm_net,
    parity,
    sum_loss,
    wide,
)
from tests.measurement.programs import WIDTH, perceptron, program, regression_data

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.*")


class SkipsNetwork(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) if in_autocast() else super().forward(x)


class SkipsSmallPart(Net):
    """A branch that is so weak that leaving it out moves the whole gradient by a millionth."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(WIDTH, WIDTH)
        self.strength = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not in_autocast():
            x = x + self.strength * self.small(x)
        return super().forward(x)


class DampsPart(Net):
    """Half of the gradient of one layer is lost under autocast: no parameter is without one."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = 0.05 * self.small(x)
        if in_autocast():
            branch = 0.5 * branch + 0.5 * branch.detach()
        return super().forward(x + branch)


@pytest.mark.parametrize(
    ("model_fn", "text"),
    [
        (SkipsNetwork, "blocks.0.inner.weight has a gradient in the user's program and none here"),
        (SkipsSmallPart, "small.weight has a gradient in the user's program and none here"),
        (DampsPart, "the gradient of small.(weight|bias) differs by 0.5, of 0.0.* allowed"),
    ],
)
def test_what_autocast_leaves_out_is_rejected(model_fn: Callable[[], nn.Module], text: str) -> None:
    assert_passed(parity(program(model_fn)))
    assert_rejected(parity(program(model_fn), precision="bf16"), text)


class OverflowsInHalf(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y - y * float("nan") if in_autocast() else y


class GradientOverflows(Net):
    """The loss stays finite; what is propagated does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if in_autocast() and y.requires_grad:
            y.register_hook(lambda gradient: gradient * float("inf"))
        return y


def test_a_loss_that_is_not_a_number_under_reduced_precision_alone_is_rejected() -> None:
    assert_passed(parity(program(OverflowsInHalf)))
    result = parity(program(OverflowsInHalf), precision="bf16")
    assert_rejected(result, r"the loss of step 1 is nan here and \d\S* in the user's program")


def test_gradients_that_are_not_finite_are_rejected() -> None:
    assert_rejected(parity(program(GradientOverflows), precision="bf16"), "the gradient of .* is not finite")


def test_fp16_whose_steps_are_all_skipped_is_rejected() -> None:
    result = parity(program(GradientOverflows), precision="fp16")
    assert_rejected(
        result, "every one of 25 steps was skipped: the scaled gradients are never finite; what overflows in fp16"
    )
    assert result.skipped_steps == 25


def test_a_loss_that_is_never_finite_is_the_users_own_fault() -> None:
    def nan_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).mean() * float("nan")

    assert_rejected(parity(program(loss_fn=nan_loss)), "the user's own step gives a loss that is not finite in fp32")


class Balance(nn.Module):
    """A small difference of large numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(0.05 * x + 300.0) - self.scale(torch.full_like(x, 300.0))


def test_numerical_cancellation_is_rejected() -> None:
    assert_passed(parity(program(Balance)))
    assert_rejected(parity(program(Balance), precision="bf16"), "gradients differ by")


# --- accumulation ---


def sum_and_count(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return sum_loss(model, batch), batch[1].numel()


class Ragged(Dataset[torch.Tensor]):
    """Sequences of 1 to 20 tokens, in no order."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return (torch.arange(2 + index * 37 % 19) + index) % 20


def padded(sequences: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(sequences, True, -1)


def ragged_data() -> DataLoader[Any]:
    return DataLoader(Ragged(), batch_size=8, collate_fn=padded)


def reader() -> nn.Module:
    return nn.Sequential(nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20))


def token_losses(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = batch[:, :-1].clamp_min(0), batch[:, 1:]
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
    return loss, (targets >= 0).sum()


def token_mean(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss, count = token_losses(model, batch)
    return loss / count


def test_a_sum_that_is_taken_for_a_mean_is_rejected_and_the_pair_passes() -> None:
    assert_passed(parity(program(loss_fn=sum_loss)))
    result = parity(program(loss_fn=sum_loss), **SPLIT)
    assert_rejected(result, r"with 4 micro-batches a step they point the same way .* Return \(loss_sum, weight\)")
    assert result.cosine == pytest.approx(1.0)
    assert result.micro_batch_size == 2
    assert result.micro_batches_per_step == 4
    assert_passed(parity(program(loss_fn=sum_and_count), **SPLIT))


def test_a_mean_over_tokens_of_ragged_batches_is_rejected_and_the_pair_passes() -> None:
    assert_passed(parity(program(reader, ragged_data, token_mean)))
    result = parity(program(reader, ragged_data, token_mean), **SPLIT)
    assert_rejected(result, r"a mean over tokens of ragged batches must return \(loss_sum, weight\) from loss_fn")
    assert_passed(parity(program(reader, ragged_data, token_losses), **SPLIT))


def test_a_mean_over_what_a_micro_batch_has_none_of_says_what_to_return() -> None:
    def over_a_few(model: nn.Module, batch: Any) -> torch.Tensor:
        counts = batch[0][:, 0] > 0
        return nn.functional.mse_loss(model(batch[0])[counts], batch[1][counts])

    result = parity(program(loss_fn=over_a_few), **{**SPLIT, "batch_size": 1})
    assert_rejected(
        result, r"is nan here .* one of 8 micro-batches may have none, must be returned as \(loss_sum, weight\)"
    )


def test_a_loss_that_couples_the_samples_is_rejected_where_they_are_split() -> None:
    assert_passed(parity(program(wide, loss_fn=contrastive)))
    assert_rejected(parity(program(wide, loss_fn=contrastive), **SPLIT), "couples the samples of a batch")


class Followed(nn.Module):
    """A second layer that is not trained follows the first at each forward pass, as a momentum encoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.slow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.slow.load_state_dict(self.inner.state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for slow, quick in zip(self.slow.parameters(), self.inner.parameters(), strict=True):
                slow.lerp_(quick, 0.01)
        return x + torch.tanh(self.inner(x) - 0.1 * self.slow(x))


class FollowedAndNormalised(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Followed(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))


class FollowedAndNoisy(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Followed(), nn.Linear(WIDTH, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.3 * torch.randn_like(x))


class KeepsAQueue(Net):
    """As momentum contrast does: each batch is held against those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.ones(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        seen = self.queue.clone()
        self.queue.copy_(torch.cat([y.detach(), seen])[:16])
        return y * (1 + seen.mean())


def test_a_step_that_uses_what_the_one_before_it_left_is_told_of_that() -> None:
    result = parity(program(KeepsAQueue), **SPLIT)
    assert_rejected(result, r"gradients differ by .*; the model changes its buffer queue by itself, .*cannot be split")


def test_what_the_model_moves_by_itself_is_rejected_where_it_moves_more_often() -> None:
    recomputed: dict[str, Any] = {"blocks": BLOCKS, "activation_checkpointing": "all"}
    functions = program(lambda: Net(Followed))
    assert_passed(parity(functions, precision="bf16"))
    assert_rejected(
        parity(functions, **SPLIT),
        "slow.weight, which is not trained, is moved (4|3.9) times .* at each of the 4 micro-",
    )
    assert_rejected(parity(functions, **recomputed), "slow.weight, which is not trained, is moved (2|1.9) times as far")


@pytest.mark.parametrize("model_fn", [FollowedAndNormalised, FollowedAndNoisy])
def test_neither_norms_nor_noise_hide_what_the_model_moves_at_each_micro_batch(
    model_fn: Callable[[], nn.Module],
) -> None:
    assert_passed(parity(program(model_fn), precision="bf16"))
    assert_rejected(
        parity(program(model_fn), **SPLIT), "0.slow.weight, which is not trained, is moved [345].* times as far"
    )


class FollowsFeatures(nn.Module):
    """A buffer that is large already follows the means of features slowly, as a codebook or an observer does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("centre", torch.linspace(2, 3, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        with torch.no_grad():
            self.centre.lerp_(y.mean(0).float(), 0.002)
        return x + torch.tanh(y)


def test_a_buffer_that_moves_slowly_is_rejected_where_it_moves_more_often() -> None:
    recomputed: dict[str, Any] = {"blocks": BLOCKS, "activation_checkpointing": "all"}
    functions = program(lambda: Net(FollowsFeatures))
    assert_passed(parity(functions))
    assert_passed(parity(functions, precision="bf16"))
    assert_rejected(
        parity(functions, **SPLIT), "buffer blocks.*centre is moved 4 times as far .* of the 4 micro-batches"
    )
    assert_rejected(parity(functions, **recomputed), "buffer blocks.*centre is moved 2 times as far in step 2")
    assert_rejected(parity(functions, **recomputed, precision="bf16"), "buffer blocks.*centre is moved 2 times as far")


class CountsForwards(Net):
    """A count that weighs a term of the loss more and more, beside noise that hides what it does in the first steps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x + 0.3 * torch.randn_like(x)) * (1 + self.count / 10_000)


def test_noise_does_not_hide_a_buffer_that_counts_micro_batches() -> None:
    assert_passed(parity(program(CountsForwards), precision="bf16"))
    assert_rejected(parity(program(CountsForwards), **SPLIT), "buffer count differs by 3 after step 1")


def test_honest_accumulation_passes_with_a_shorter_last_window() -> None:
    def twenty() -> DataLoader[Any]:
        return regression_data(samples=20)

    assert_passed(parity(program(data_fn=twenty), **SPLIT))


Accumulate = Callable[[Training, Window], torch.Tensor]


def _repeats(original: Accumulate) -> Accumulate:
    return lambda training, window: original(training, [window[0]] * len(window))


def _forgets_to_divide(original: Accumulate) -> Accumulate:
    def accumulate(training: Training, window: Window) -> torch.Tensor:
        return torch.stack([original(training, [micro_batch]) for micro_batch in window]).sum()

    return accumulate


def _clears(original: Accumulate) -> Accumulate:
    def accumulate(training: Training, window: Window) -> torch.Tensor:
        for micro_batch in window[:-1]:
            original(training, [micro_batch])
        training.optimizer.zero_grad()
        return original(training, window[-1:])

    return accumulate


def _loses_everything(original: Accumulate) -> Accumulate:
    def accumulate(training: Training, window: Window) -> torch.Tensor:
        loss = original(training, window)
        training.optimizer.zero_grad()
        return loss

    return accumulate


def broken_in_candidates(monkeypatch: pytest.MonkeyPatch, break_it: Callable[[Accumulate], Accumulate]) -> None:
    """Breaks the accumulation of every training but the reference's, which has an empty configuration."""
    whole = Training.accumulate
    broken = break_it(whole)
    monkeypatch.setattr(
        Training,
        "accumulate",
        lambda training, window: (broken if training.parts.config else whole)(training, window),
    )


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize(
    ("break_it", "text"),
    [
        (_repeats, "gradients differ by"),
        (_forgets_to_divide, "they point the same way with another length"),
        (_clears, "gradients differ by"),
        (_loses_everything, "has a gradient in the user's program and none here"),
    ],
)
def test_broken_accumulation_is_rejected(
    monkeypatch: pytest.MonkeyPatch, break_it: Callable[[Accumulate], Accumulate], text: str, batch_norm: bool
) -> None:
    broken_in_candidates(monkeypatch, break_it)
    functions = program(NormNet if batch_norm else perceptron)
    assert_rejected(parity(functions, **SPLIT), text)


# --- recomputation ---


def checkpointed_by(wrap: Callable[[nn.Module], Callable[..., Any]]) -> Callable[..., None]:
    """A knob's hook that recomputes blocks in its own, wrong, way."""

    def wrap_model(self: Any, value: Any, parts: Any) -> None:
        for name in parts.blocks if value == "all" else ():
            block = parts.model.get_submodule(name)
            block.forward = wrap(block)

    return wrap_model


def _reentrant(block: nn.Module) -> Callable[..., Any]:
    forward = block.forward
    return lambda x: checkpoint(forward, x, use_reentrant=True)


def _plainly(block: nn.Module) -> Callable[..., Any]:
    forward = block.forward
    return lambda x: checkpoint(forward, x, use_reentrant=False)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_recomputation_that_loses_the_gradients_of_the_first_block_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ActivationCheckpointing, "wrap_model", checkpointed_by(_reentrant))
    result = parity(program(Net), blocks=BLOCKS, activation_checkpointing="all")
    assert_rejected(result, "blocks.0.inner.weight has a gradient in the user's program and none here")


def test_recomputation_that_updates_running_statistics_twice_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    recomputing: dict[str, Any] = {"blocks": BLOCKS, "activation_checkpointing": "all"}
    assert_passed(parity(program(norm_net), **recomputing))
    monkeypatch.setattr(ActivationCheckpointing, "wrap_model", checkpointed_by(_plainly))
    result = parity(program(norm_net), **recomputing)
    assert_rejected(result, "buffer blocks.*norm.* differs by 1 after step 1, of 0.01 allowed: updated twice")
    assert_rejected(parity(program(norm_net), **recomputing, precision="bf16"), "buffer blocks")


class CountingBlock(nn.Module):
    """Its strength depends on how often it was called: recomputation takes the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + torch.tanh(self.inner(x * (2.0 if self.calls % 2 else 0.2)))


class Strength(nn.Module):
    """As strong as Python's generator says; torch's checkpointing does not put that one back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x * random.choice((2.0, 0.2))))


@pytest.mark.parametrize("block", [CountingBlock, Strength])
def test_recomputation_that_takes_another_path_is_rejected(block: Callable[[], nn.Module]) -> None:
    functions = program(lambda: Net(block))
    assert_passed(parity(functions))
    assert_rejected(parity(functions, blocks=BLOCKS, activation_checkpointing="all"), "gradients differ by|gradient of")


# --- compiled steps that are replayed ---


def replayed_by(replay: Callable[[nn.Module], None]) -> Callable[..., None]:
    """A knob's hook that "compiles" the model into something that is recorded once and then replayed."""

    def wrap_model(self: Any, value: Any, parts: Any) -> None:
        if value != "as_is":
            replay(parts.model)

    return wrap_model


def _into_one_gradient_buffer(model: nn.Module) -> None:
    """Every backward writes its gradient into the same memory, as a CUDA graph does; what lay there is gone."""
    for parameter in model.parameters():
        buffer = torch.zeros_like(parameter)
        parameter.register_hook(lambda gradient, buffer=buffer: buffer.copy_(gradient))
        parameter.register_post_accumulate_grad_hook(lambda owner, buffer=buffer: setattr(owner, "grad", buffer))


def _on_stale_inputs(model: nn.Module) -> None:
    """The first call runs, the second is recorded, the third and all later ones replay it: on the second's inputs."""
    forward, calls = model.forward, []

    def replaying(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return forward(calls[min(len(calls), 2) - 1])

    model.forward = replaying  # type: ignore[method-assign]


def test_a_replay_that_overwrites_accumulated_gradients_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompileMode, "wrap_model", replayed_by(_into_one_gradient_buffer))
    assert_passed(parity(program(Net), compile_mode="reduce-overhead"))
    result = parity(program(Net), compile_mode="reduce-overhead", **SPLIT)
    assert_rejected(result, "gradients differ by .* allowed, most in .*; with 4 micro-batches a step")


def test_a_replay_of_old_inputs_is_rejected_though_the_first_steps_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompileMode, "wrap_model", replayed_by(_on_stale_inputs))
    assert_rejected(
        parity(program(Net), compile_mode="reduce-overhead"), "gradients differ by .* in step 3, of 0.2 allowed"
    )


# --- what only shows in the loss, in a buffer, or in one type ---


class OverflowsInFp16Alone(Net):
    """Large numbers whose difference is nothing, and no number once they are infinite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        large = 1e5 * y
        return y + (large - large)


def test_a_loss_that_is_not_a_number_under_fp16_alone_is_rejected() -> None:
    functions = program(OverflowsInFp16Alone)
    assert_passed(parity(functions, precision="bf16"))
    assert_rejected(
        parity(functions, precision="fp16"), "the loss of step 1 is nan here and .* must be computed in fp32"
    )


def _told_undivided(original: Accumulate) -> Accumulate:
    """The gradients are right; the loss that is told is that of all micro-batches together."""
    return lambda training, window: original(training, window) * len(window)


def test_a_loss_that_is_told_wrongly_is_rejected_though_the_gradients_are_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken_in_candidates(monkeypatch, _told_undivided)
    result = parity(program(), **SPLIT)
    assert_rejected(result, r"the loss of step 1 is \S+ here and \S+ in the user's program at the same weights")
    assert result.relative_error < 1e-5


class SensitiveAndDamped(Sensitive):
    """Half of the gradient of one layer is lost under autocast, in a network whose gradients tell nothing in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            weight = layer.weight
            if number == 12 and in_autocast():
                weight = (weight + weight.detach()) / 2
            x = torch.tanh(norm(F.linear(x, weight)))
        return self.head(x)


class SensitiveAndCounting(Sensitive):
    """Running statistics are updated twice under autocast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if in_autocast() and self.training:
            with torch.no_grad():
                self.norms[0](self.layers[0](x))
        return super().forward(x)


@pytest.mark.parametrize(
    ("model_fn", "text"),
    [
        (SensitiveAndDamped, "most in layers.12.weight"),
        (SensitiveAndCounting, "buffer norms.0"),
    ],
)
def test_rounding_that_turns_gradients_around_hides_nothing(model_fn: Callable[[], nn.Module], text: str) -> None:
    assert_rejected(parity(program(model_fn), precision="bf16"), text)


class FreezesStatistics(NormNet):
    """After its first step under autocast, BatchNorm's running statistics stay as they are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if in_autocast() and int(self.norm.num_batches_tracked):
            self.norm.momentum = 0.0
        return super().forward(x)


def test_running_statistics_that_stop_after_the_first_step_are_rejected() -> None:
    assert_passed(parity(program(FreezesStatistics)))
    result = parity(program(FreezesStatistics), precision="bf16")
    assert_rejected(result, r"buffer norm.running_\w+ differs by \S+ after step 2, of \S+ allowed")
