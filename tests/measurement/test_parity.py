"""What the gate rejects although it runs and is fast, and what it must let pass although it is not the same to the bit."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

from autotune.knobs.activation_checkpointing import ActivationCheckpointing
from autotune.measurement.parity import check_parity
from autotune.records import ParityResult
from autotune.training.training import Training
from autotune.training.windows import Window
from autotune.workload import UserFunctions
from tests.measurement.programs import WIDTH, no_phase, perceptron, program, regression_data, request
from tests.surgery.models import Gpt, ResNet

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.*")


def parity(functions: UserFunctions, **changes: Any) -> ParityResult:
    return check_parity(functions, request("parity", **changes), no_phase)


def assert_rejected(result: ParityResult, text: str) -> None:
    assert not result.passed, result
    assert re.search(text, result.reason), result.reason


def assert_passed(result: ParityResult) -> None:
    assert result.passed, result


# --- models ---


class Residual(nn.Module):
    """A block with a branch that can be left out."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.inner(self.dropout(x))))


class Net(nn.Module):
    """Four blocks and a head."""

    def __init__(self, make_block: Callable[[], nn.Module] = Residual) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([make_block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BLOCKS = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")


def in_autocast() -> bool:
    return torch.is_autocast_enabled("cpu")


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
    assert_rejected(result, "every one of 25 steps was skipped: the scaled gradients are never finite")


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


def sum_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1], reduction="sum")


def sum_and_count(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    return sum_loss(model, batch), batch[1].numel()


def contrastive(model: nn.Module, batch: Any) -> torch.Tensor:
    y = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(y @ y.t() / 0.2, torch.arange(len(y)).roll(1))


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


SPLIT: dict[str, Any] = {"batch_size": 2, "global_batch_size": 8}


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


def test_a_loss_that_couples_the_samples_is_rejected_where_they_are_split() -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, WIDTH))

    assert_passed(parity(program(wide, loss_fn=contrastive)))
    assert_rejected(parity(program(wide, loss_fn=contrastive), **SPLIT), "couples the samples of a batch")


class NormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


class NormNetWithoutStatistics(NormNet):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=False)


@pytest.mark.parametrize("model_fn", [NormNet, NormNetWithoutStatistics])
def test_batch_norm_with_another_micro_batch_passes_and_is_explained(model_fn: Callable[[], nn.Module]) -> None:
    result = parity(program(model_fn), **SPLIT)
    assert_passed(result)
    assert result.notes == ("BatchNorm sees the micro-batch: both sides were compared at the same one",)


@pytest.mark.parametrize("model_fn", [NormNet, NormNetWithoutStatistics])
def test_batch_norm_does_not_hide_a_sum_that_is_taken_for_a_mean(model_fn: Callable[[], nn.Module]) -> None:
    assert_rejected(parity(program(model_fn, loss_fn=sum_loss), **SPLIT), r"Return \(loss_sum, weight\)")


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
    whole = Training.accumulate
    broken = break_it(whole)
    # The reference stands: it is recognised by its empty configuration.
    monkeypatch.setattr(
        Training,
        "accumulate",
        lambda training, window: (broken if training.parts.config else whole)(training, window),
    )
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


class NormBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.inner(x)))


def norm_net() -> nn.Module:
    return Net(NormBlock)


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


# --- what must pass ---

VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "compiled": {"compile_mode": "default", "compile_scope": "step"},
    "recomputed": {"activation_checkpointing": "all"},
    "split": SPLIT,
    "fp16": {"precision": "fp16"},
    "fused": {"optimizer_impl": "fused"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_heavy_dropout_is_no_reason_to_reject(variant: str) -> None:
    result = parity(program(lambda: Net(lambda: Residual(0.6))), blocks=BLOCKS, **VARIANTS[variant])
    assert_passed(result)
    assert result.tolerance < 0.1


class FunctionalDropouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.first(x), 0.6, self.training).unsqueeze(0)
        return self.last(F.scaled_dot_product_attention(x, x, x, dropout_p=0.6)[0])


@pytest.mark.parametrize("variant", ["bf16", "compiled", "split"])
def test_functional_dropout_is_no_reason_to_reject(variant: str) -> None:
    def no_attention_over_samples(model: nn.Module, batch: Any) -> torch.Tensor:
        return torch.stack([mse_of_one(model, x, y) for x, y in zip(*batch, strict=True)]).mean()

    def mse_of_one(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x[None])[0].float(), y)

    result = parity(program(FunctionalDropouts, loss_fn=no_attention_over_samples), **VARIANTS[variant])
    assert_passed(result)
    assert result.tolerance < 0.1


def images(samples: int = 32) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 3, 8, 8, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(10, (samples,), generator=generator)), batch_size=8)


def token_data() -> DataLoader[Any]:
    tokens = torch.randint(0, 50, (64, 13), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(tokens), batch_size=8)


def classify(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def next_token(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0][:, :-1]).flatten(0, 1).float(), batch[0][:, 1:].flatten())


RESNET = program(lambda: ResNet(width=4), images, classify)
GPT = program(lambda: Gpt(depth=2), token_data, next_token)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("functions", [RESNET, GPT], ids=["resnet", "gpt"])
def test_honest_bf16_passes(functions: UserFunctions, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "manual_seed", _shifted(torch.manual_seed, seed))
    assert_passed(parity(functions, precision="bf16"))


def _shifted(seed_with: Callable[[int], Any], by: int) -> Callable[[int], Any]:
    """Other weights: the parity check seeds them by numbers of its own."""
    return lambda seed: seed_with(seed + 1000 * by)


def test_a_resnets_floor_is_measured_and_a_gpt_is_held_to_a_tenth_of_it() -> None:
    resnet, gpt = parity(RESNET, precision="bf16"), parity(GPT, precision="bf16")
    assert resnet.tolerance > 5 * gpt.tolerance
    assert gpt.tolerance < 0.05


def test_everything_at_once_passes_on_a_resnet_and_on_a_gpt() -> None:
    stages = tuple(f"layer{stage}.{index}" for stage in (1, 2, 3) for index in range(3))
    everything: dict[str, Any] = {"precision": "bf16", "activation_checkpointing": "all", "optimizer_impl": "fused"}
    assert_passed(parity(RESNET, blocks=stages, **everything, batch_size=4, global_batch_size=8))
    assert_passed(parity(GPT, blocks=("h.0", "h.1"), **everything, **SPLIT, compile_mode="default"))


class Partly(Net):
    """A frozen layer, a parameter that is never used, and a branch that few batches take."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.unused = nn.Parameter(torch.zeros(3))
        self.rare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] > 100:
            x = self.rare(x)
        return super().forward(x)


@pytest.mark.parametrize("variant", ["bf16", "recomputed", "split", "fused"])
def test_frozen_unused_and_rarely_used_parameters_pass(variant: str) -> None:
    result = parity(program(Partly), blocks=BLOCKS, **VARIANTS[variant])
    assert_passed(result)
    assert result.missing_gradients == ()


class DropsLayers(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if random.random() < 0.5:
                x = block(x)
        return self.head(x)


class DropsLayersAndSkips(DropsLayers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if in_autocast():
            x = 0.5 * x
        return super().forward(x)


def test_layers_dropped_at_random_pass_and_are_no_excuse_for_another_network() -> None:
    result = parity(program(DropsLayers), precision="bf16")
    assert_passed(result)
    assert result.tolerance < 0.1
    assert_rejected(parity(program(DropsLayersAndSkips), precision="bf16"), "gradients differ by")


class Noisy(Net):
    """Noise of its own on the input, as in diffusion or a variational autoencoder."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.3 * torch.randn_like(x))


class NoisyAndSkips(Noisy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y - 0.9 * (y - y.detach()) if in_autocast() else y


def test_noise_drawn_by_the_model_is_drawn_alike_and_held_to_the_same_gate() -> None:
    for changes in (VARIANTS["recomputed"], SPLIT, VARIANTS["bf16"]):
        result = parity(program(Noisy), blocks=BLOCKS, **changes)
        assert_passed(result)
        assert result.tolerance < 0.1
    assert_rejected(parity(program(NoisyAndSkips), precision="bf16"), "gradients differ by 0.9, of ")


def test_a_compiled_model_that_draws_from_the_compilers_generator_is_compared_by_means_over_seeds() -> None:
    result = parity(program(Noisy), compile_mode="default")
    assert_passed(result)
    assert result.notes == ("it draws random numbers of its own: means over 8 seeds were compared",)


class Masked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))


def test_a_mask_of_infinities_is_no_difference() -> None:
    result = parity(program(Masked), precision="bf16")
    assert_passed(result)
    assert result.buffer_error == 0.0


def test_the_users_own_compile_is_compared_with_the_eager_step() -> None:
    def compiled() -> nn.Module:
        model = Net()
        model.forward = torch.compile(model.forward)  # type: ignore[method-assign]
        return model

    assert_passed(parity(program(compiled), optimizer_impl="fused"))


def test_the_record_tells_losses_errors_and_where() -> None:
    result = parity(program(Net), precision="bf16")
    assert len(result.reference_losses) == len(result.candidate_losses) == 3
    assert result.reference_losses[0] == pytest.approx(result.candidate_losses[0], rel=0.02)
    assert 0 < result.relative_error < result.tolerance
    assert 0.99 < result.cosine <= 1.0
    assert 0 < result.floor < 0.05
    assert result.worst_parameter in dict(Net().named_parameters())
    assert result.reason == f"gradients differ by {result.relative_error:.2g}, of {result.tolerance:.2g} allowed"


def test_a_reference_that_does_not_fit_is_compared_at_a_smaller_micro_batch() -> None:
    class Hungry(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 4:
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(x)

    result = parity(program(Hungry), precision="bf16", batch_size=8)
    assert_passed(result)
    assert result.micro_batch_size == 4
    assert result.notes == ("compared at micro-batch 4: the fp32 reference does not fit at the full size",)
