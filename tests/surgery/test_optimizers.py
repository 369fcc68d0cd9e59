from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autotune.surgery.optimizers import current_variant, fixed_reason, set_variant, variants

CPU = torch.device("cpu")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))


class SignStep(torch.optim.Optimizer):
    """Hand-written, with neither flag."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Moves by the sign of the gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad.sign(), alpha=-group["lr"])


class CarefulAdam(torch.optim.Adam):
    """A step of its own that calls torch's."""

    def step(self, closure: Any = None) -> Any:
        """Adam's."""
        return super().step(closure)


class NamedAdam(torch.optim.Adam):
    """Adam with another name only."""


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), ("foreach", "fused")),
        (lambda p: torch.optim.Adam(p), ("foreach", "fused")),
        (lambda p: torch.optim.AdamW(p, fused=True), ("for_loop", "foreach")),
        (lambda p: torch.optim.AdamW(p, foreach=True), ("for_loop", "fused")),
        (lambda p: torch.optim.Adagrad(p), ("foreach", "fused")),
        (lambda p: torch.optim.RMSprop(p), ("foreach",)),
        (lambda p: NamedAdam(p), ("foreach", "fused")),
    ],
    ids=["sgd", "adam", "adamw fused", "adamw foreach", "adagrad", "rmsprop", "subclass"],
)
def test_what_torchs_optimizers_can_be_switched_to_on_a_cpu(make: Any, expected: tuple[str, ...]) -> None:
    optimizer = make(model().parameters())
    assert fixed_reason(optimizer) is None
    assert variants(optimizer, CPU) == expected


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: SignStep(p), "SignStep takes no foreach/fused"),
        (lambda p: torch.optim.LBFGS(p), "LBFGS takes no foreach/fused"),
        (lambda p: torch.optim.SparseAdam(p), "SparseAdam takes no foreach/fused"),
        (lambda p: CarefulAdam(p), "CarefulAdam has a step of its own, which need not heed foreach/fused"),
        (
            lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
            "Adam has a tensor as learning rate, which foreach and fused refuse late",
        ),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True),
            "SGD is differentiable, which foreach and fused cannot be",
        ),
    ],
)
def test_what_cannot_be_switched_says_why(make: Any, reason: str) -> None:
    optimizer = make(model().parameters())
    assert fixed_reason(optimizer) == reason
    assert variants(optimizer, CPU) == ()


def test_sparse_gradients_are_seen_after_a_backward_pass() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    embedding(torch.tensor([1])).sum().backward()
    assert fixed_reason(optimizer) == "SGD gets sparse gradients, which fused kernels refuse"


def test_complex_parameters_are_not_fused() -> None:
    optimizer = torch.optim.Adam([torch.zeros(2, dtype=torch.complex64, requires_grad=True)])
    assert variants(optimizer, CPU) == ("foreach",)


def test_the_variant_in_use_depends_on_the_device_where_both_flags_are_open() -> None:
    optimizer = torch.optim.AdamW(model().parameters())
    assert current_variant(optimizer, CPU) == "for_loop"
    assert current_variant(optimizer, torch.device("cuda")) == "foreach"
    set_variant(optimizer, "for_loop")
    assert current_variant(optimizer, torch.device("cuda")) == "for_loop"


def train(optimizer: torch.optim.Optimizer, trained: nn.Module) -> list[torch.Tensor]:
    for seed in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        trained(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in trained.parameters()]


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.25),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("variant", ["for_loop", "foreach", "fused"])
def test_a_switched_optimizer_trains_like_one_made_so(name: str, variant: Any) -> None:
    switched, plain = model(), model()
    optimizer = OPTIMIZERS[name](switched.parameters())
    set_variant(optimizer, variant)
    assert current_variant(optimizer, CPU) == variant
    for weight, expected in zip(
        train(optimizer, switched), train(OPTIMIZERS[name](plain.parameters()), plain), strict=True
    ):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", ["fused", "foreach", "for_loop"])
def test_the_optimizer_stays_the_same_object_with_its_hooks_groups_and_early_state(variant: Any) -> None:
    trained = model()
    groups = [{"params": trained[0].parameters(), "lr": 0.5}, {"params": trained[1].parameters()}]  # type: ignore[index]
    optimizer = torch.optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.25)
    stepped: list[bool] = []
    optimizer.register_step_pre_hook(lambda *args: stepped.append(True) and None)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    set_variant(optimizer, variant)
    assert all(bool((state["sum"] == 0.25).all()) for state in optimizer.state.values())
    train(optimizer, trained)
    scheduler.step()
    assert len(stepped) == 3
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.05]


def test_a_group_added_later_gets_the_variant_too() -> None:
    optimizer = torch.optim.AdamW(model().parameters())
    set_variant(optimizer, "fused")
    optimizer.add_param_group({"params": [torch.zeros(2, requires_grad=True)]})
    assert [group["fused"] for group in optimizer.param_groups] == [True, True]


def test_a_scaler_learns_who_unscales() -> None:
    optimizer: Any = torch.optim.AdamW(model().parameters())
    set_variant(optimizer, "fused")
    assert optimizer._step_supports_amp_scaling is True
    set_variant(optimizer, "foreach")
    assert optimizer._step_supports_amp_scaling is False


def test_a_scaled_fused_step_is_the_unscaled_one() -> None:
    scaled, plain = model(), model()
    optimizer = torch.optim.SGD(scaled.parameters(), lr=0.1)
    set_variant(optimizer, "fused")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.randn(8, 4)
    scaler.scale(scaled(x).square().mean()).backward()
    scaler.step(optimizer)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(x).square().mean().backward()
    plain_optimizer.step()
    for weight, expected in zip(scaled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)


def test_a_variant_without_a_flag_is_refused() -> None:
    optimizer = torch.optim.RMSprop(model().parameters())
    with pytest.raises(ValueError, match="RMSprop takes no fused"):
        set_variant(optimizer, "fused")
