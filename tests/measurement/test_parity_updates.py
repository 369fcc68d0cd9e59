"""The optimizer's own work: an update that is not the user's is rejected, and what is off with it is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autotune.training.training import Training
from autotune.workload import UserFunctions
from tests.measurement.parity_programs import SPLIT, Net, assert_passed, assert_rejected, parity
from tests.measurement.programs import program

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.*")


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.01)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def groups(model: nn.Module) -> torch.optim.Optimizer:
    blocks, head = model.get_submodule("blocks"), model.get_submodule("head")
    return torch.optim.SGD([{"params": blocks.parameters()}, {"params": head.parameters(), "lr": 0.1}], 0.01)


def hooked(model: nn.Module) -> torch.optim.Optimizer:
    """Gradients are shortened by a hook, as some clip them."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def shorten(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.01)

    optimizer.register_step_pre_hook(shorten)
    return optimizer


def warming_up(optimizer: torch.optim.Optimizer) -> Any:
    """From nothing, so that the first step does not move."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 1000)


Update = Callable[[Training], None]


def _without_decay(original: Update) -> Update:
    """As a kernel that forgets an argument would."""

    def update(training: Training) -> None:
        group = training.optimizer.param_groups[0]
        decay, group["weight_decay"] = group["weight_decay"], 0.0
        original(training)
        group["weight_decay"] = decay

    return update


def _at_another_rate(original: Update) -> Update:
    def update(training: Training) -> None:
        training.optimizer.param_groups[0]["lr"] = 1.02e-3
        original(training)

    return update


def _scheduled_twice(original: Update) -> Update:
    def update(training: Training) -> None:
        original(training)
        training.scheduler.step()

    return update


def _without_hooks(original: Update) -> Update:
    def update(training: Training) -> None:
        training.optimizer._optimizer_step_pre_hooks.clear()
        original(training)

    return update


def _without_state(original: Update) -> Update:
    def update(training: Training) -> None:
        training.optimizer.state.clear()
        original(training)

    return update


def _without_the_last_group(original: Update) -> Update:
    def update(training: Training) -> None:
        for parameter in training.optimizer.param_groups[-1]["params"]:
            parameter.grad = None
        original(training)

    return update


def _never_clearing(original: Update) -> Update:
    def update(training: Training) -> None:
        kept = {parameter: parameter.grad for parameter in training.model.parameters()}
        original(training)
        for parameter, gradient in kept.items():
            parameter.grad = gradient

    return update


def _clipping_scaled_gradients(original: Update) -> Update:
    """As if `unscale_` were not called before clipping."""

    def update(training: Training) -> None:
        assert training.scaler is not None
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
        original(training)

    return update


def _skipping(original: Update) -> Update:
    def update(training: Training) -> None:
        if training.optimizer.state:
            training.optimizer.zero_grad()
        else:
            original(training)

    return update


ANOTHER_UPDATE = r"from the same gradients, 3 steps of the optimizer leave .* the update itself is another one"


def broken(monkeypatch: pytest.MonkeyPatch, break_it: Callable[[Update], Update]) -> None:
    """Breaks the update of every training but the reference's, which has an empty configuration."""
    whole = Training.update
    wrong = break_it(whole)
    monkeypatch.setattr(Training, "update", lambda training: (wrong if training.parts.config else whole)(training))


@pytest.mark.parametrize(
    ("break_it", "functions", "changes", "text"),
    [
        (_without_decay, program(Net, optimizer_fn=decayed), {}, ANOTHER_UPDATE),
        (
            _at_another_rate,
            program(Net, optimizer_fn=decayed),
            {},
            r"lr of the optimizer's parameter group 0 is 0.00102",
        ),
        (
            _scheduled_twice,
            program(Net, optimizer_fn=decayed, scheduler_fn=warming_up),
            {},
            "after 3 steps lr of the optimizer's parameter group 0 is 6e-06 here and 3e-06 in the user's program",
        ),
        (_without_hooks, program(Net, optimizer_fn=hooked), {}, ANOTHER_UPDATE),
        (_without_state, program(Net, optimizer_fn=momentum), {}, ANOTHER_UPDATE),
        (
            _without_the_last_group,
            program(Net, optimizer_fn=groups),
            {},
            ANOTHER_UPDATE.replace("leave .*", "leave head.*"),
        ),
        (_skipping, program(Net, optimizer_fn=decayed), {}, ANOTHER_UPDATE),
        (_never_clearing, program(Net), {}, "gradients differ by .* in step 2"),
        (_clipping_scaled_gradients, program(Net), {"precision": "fp16", "clip_grad_norm": 1.0}, ANOTHER_UPDATE),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else None,
)
def test_another_update_is_rejected(
    break_it: Callable[[Update], Update],
    functions: UserFunctions,
    changes: dict[str, Any],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert_passed(parity(functions, **changes))
    broken(monkeypatch, break_it)
    assert_rejected(parity(functions, **changes), text)


@pytest.mark.parametrize("optimizer_fn", [decayed, momentum, groups, hooked])
def test_the_users_optimizer_by_any_implementation_in_any_precision_passes(
    optimizer_fn: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    functions = program(Net, optimizer_fn=optimizer_fn, scheduler_fn=warming_up)
    for changes in (
        {"optimizer_impl": "fused"},
        {"optimizer_impl": "foreach", "precision": "bf16", "clip_grad_norm": 0.1},
        {"optimizer_impl": "fused", "precision": "fp16", "clip_grad_norm": 0.1, **SPLIT},
        {"optimizer_impl": "for_loop", "precision": "fp16"},
    ):
        result = parity(functions, **changes)
        assert_passed(result)
        assert result.update_error < 1e-4


class PartlyUsed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))


def test_weight_decay_on_what_has_no_gradient_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros in place of no gradient are no difference of gradients, and shrink a parameter that the user leaves alone."""

    def zeros_for_none(original: Update) -> Update:
        def update(training: Training) -> None:
            for parameter in training.model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            original(training)

        return update

    functions = program(PartlyUsed, optimizer_fn=decayed)
    assert_passed(parity(functions, precision="bf16"))
    broken(monkeypatch, zeros_for_none)
    assert_rejected(parity(functions, precision="bf16"), ANOTHER_UPDATE.replace("leave .*", "leave unused.*"))


def test_an_optimizer_that_draws_random_numbers_draws_the_same_on_both_sides_and_passes() -> None:
    def noisy(model: nn.Module) -> torch.optim.Optimizer:
        """As Langevin dynamics: each update also goes where chance leads it."""
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)

        def stray(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1e-3 * torch.randn_like(parameter))

        optimizer.register_step_post_hook(stray)
        return optimizer

    assert_passed(parity(program(Net, optimizer_fn=noisy), precision="bf16"))


def test_a_rate_of_zero_moves_nothing_on_either_side_and_passes() -> None:
    def still(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)

    result = parity(program(Net, scheduler_fn=still), precision="bf16")
    assert_passed(result)
    assert (result.update_error, result.worst_update) == (0.0, None)


def test_sparse_gradients_pass() -> None:
    def reader() -> nn.Module:
        return nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Flatten(0, 1), nn.Linear(8, 1))

    def tokens() -> torch.utils.data.DataLoader[Any]:
        rows = torch.randint(20, (64, 1), generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows, rows.float()), batch_size=8)

    functions = program(reader, tokens, optimizer_fn=lambda model: torch.optim.Adagrad(model.parameters(), 0.1))
    assert_passed(parity(functions, precision="bf16"))
