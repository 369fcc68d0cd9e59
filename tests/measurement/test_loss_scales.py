"""A `GradScaler` of the user's own: refused where what is trained on is scaled, and left alone where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.amp import GradScaler

from autotune.errors import WorkloadError
from autotune.measurement.facts import read_facts
from autotune.measurement.loss_scales import ASKED, DIVIDES, scaler_calls, scales_halved
from autotune.workload import UserFunctions
from tests.measurement.programs import mse, no_phase, program, request

CPU = torch.device("cpu")
KEPT = GradScaler("cpu")
Loss = Callable[[Any, Any], torch.Tensor]


def by_one_that_is_kept(model: Any, batch: Any) -> torch.Tensor:
    return KEPT.scale(mse(model, batch))  # type: ignore[no-any-return, call-overload]


def by_one_made_anew(model: Any, batch: Any) -> torch.Tensor:
    return GradScaler("cpu", init_scale=128.0).scale(mse(model, batch)) + 0.01  # type: ignore[no-any-return, call-overload]


def by_hand(model: Any, batch: Any) -> torch.Tensor:
    return mse(model, batch) * KEPT.get_scale()


def in_half(model: Any, batch: Any) -> torch.Tensor:
    """By more than half of the largest number of fp16."""
    loss = mse(model, batch)
    return (loss * (1.5 / loss.detach())).half() * GradScaler("cpu", init_scale=2.0**15).get_scale()


def by_one_turned_off(model: Any, batch: Any) -> torch.Tensor:
    return GradScaler("cpu", enabled=False).scale(mse(model, batch))  # type: ignore[no-any-return, call-overload]


def with_a_penalty(model: Any, batch: Any) -> torch.Tensor:
    """As torch's documentation scales a gradient penalty."""
    loss = mse(model, batch)
    scaled = torch.autograd.grad(KEPT.scale(loss), list(model.parameters()), create_graph=True)
    return loss + sum(((gradient / KEPT.get_scale()) ** 2).sum() for gradient in scaled)


def told_only(model: Any, batch: Any) -> torch.Tensor:
    assert KEPT.get_scale() > 0
    return mse(model, batch)


class Unscales(torch.optim.SGD):
    """What the user's own loop would do, in the step of the optimizer."""

    def step(self, closure: Any = None) -> Any:
        KEPT.unscale_(self)
        KEPT.update(KEPT.get_scale())
        return super().step(closure)


@pytest.mark.parametrize("loss_fn", [by_one_that_is_kept, by_one_made_anew, by_hand, in_half])
@pytest.mark.parametrize("forward_only", [False, True])
def test_a_loss_that_is_scaled_is_refused(loss_fn: Loss, forward_only: bool) -> None:
    asked = request("facts").model_copy(update={"facts_forward_only": forward_only})
    with pytest.raises(WorkloadError, match=r"scale of a torch\.amp\.GradScaler, .* leave the scaler out of loss_fn"):
        read_facts(program(loss_fn=loss_fn), asked, no_phase)


@pytest.mark.parametrize(
    "functions",
    [
        program(loss_fn=by_one_turned_off),
        program(loss_fn=with_a_penalty),
        program(loss_fn=told_only),
        program(loss_fn=by_one_that_is_kept, optimizer_fn=lambda model: Unscales(model.parameters(), 0.1)),
    ],
    ids=["turned off", "penalty", "told only", "unscaled"],
)
def test_a_scaler_that_leaves_the_training_as_it_is_passes(functions: UserFunctions) -> None:
    read_facts(functions, request("facts"), no_phase)


def test_calls_are_seen_and_scales_halved_only_meanwhile() -> None:
    originals = {name: getattr(GradScaler, name) for name in ASKED | DIVIDES}
    scaler, one = GradScaler("cpu", init_scale=8.0), torch.ones(())
    with scaler_calls() as calls:
        assert not calls
        assert float(scaler.scale(one)) == 8
        assert calls == {"scale"}
    with scales_halved(CPU):
        assert scaler.get_scale() == 4
        assert float(scaler.scale(one)) == 4
        assert float(GradScaler("cpu", init_scale=2.0).scale(one)) == 1
    assert scaler.get_scale() == 8
    assert {name: getattr(GradScaler, name) for name in originals} == originals
