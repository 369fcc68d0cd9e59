from __future__ import annotations

import re
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from autotune.errors import WorkloadError
from autotune.training.losses import describe_convention, explain_failed_call, loss_function


class Returns(nn.Module):
    """Makes the given output of a scalar that has a gradient."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.make = make

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.make(self.weight * 1.0)


class Output(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


LOGITS = torch.zeros(4, 3)
OUTPUTS: dict[str, Any] = {
    "scalar": lambda loss: loss,
    "one element": lambda loss: loss.reshape(1),
    "mapping": lambda loss: {"logits": LOGITS, "loss": loss},
    "ordered mapping": lambda loss: OrderedDict(loss=loss, other=loss * 2),
    "object": lambda loss: SimpleNamespace(loss=loss),
    "named tuple": lambda loss: Output(loss, LOGITS),
    "logits, loss": lambda loss: (LOGITS, loss),
    "loss, logits": lambda loss: (loss, LOGITS),
    "loss, number": lambda loss: (loss, 3.0),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_loss_is_found_in_what_the_model_returns(name: str) -> None:
    loss, weight = loss_function(None)(Returns(OUTPUTS[name]), (LOGITS,))
    assert float(loss) == 2.0
    assert loss.requires_grad
    assert weight is None


def test_the_batch_becomes_the_models_arguments() -> None:
    class Takes(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            seen.append((args, kwargs))
            return torch.ones((), requires_grad=True)

    seen: list[Any] = []
    for batch in ((1, 2), [1, 2], {"x": 1, "y": 2}, "text"):
        loss_function(None)(Takes(), batch)
    assert seen == [((1, 2), {}), ((1, 2), {}), ((), {"x": 1, "y": 2}), (("text",), {})]


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda loss: loss * LOGITS, r"the model returned a Tensor with no loss in it"),
        (lambda loss: loss.detach(), r"the model returned a Tensor with no loss in it"),
        (
            lambda loss: (loss, loss),
            r"the model returned a tuple of 2 \(a scalar tensor, a scalar tensor\) with no loss",
        ),
        (lambda loss: (LOGITS, 1), r"a tuple of 2 \(a tensor of shape \[4, 3\], a int\) with no loss in it"),
        (lambda loss: {"logits": LOGITS}, r"the model returned a dict of 1 \(logits\) with no loss in it"),
        (lambda loss: {"box": loss, "class": loss}, r"a dict of 2 \(box, class\) with no loss in it"),
        (lambda loss: None, r"the model returned None \(is a return missing\?\) with no loss in it"),
    ],
)
def test_an_output_without_a_clear_loss_is_an_error_with_the_lines_to_write(make: Any, shown: str) -> None:
    with pytest.raises(WorkloadError, match=shown) as caught:
        loss_function(None)(Returns(make), (torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)))
    text = str(caught.value)
    assert text.startswith(
        "no loss_fn is given and the batch (tuple of 2: float32 [2, 5], int64 [2]) does not tell how"
    )
    assert "def loss_fn(model, batch):\n        inputs, targets = batch\n        return ..." in text


def test_a_mapping_that_the_model_takes_as_keywords_is_unpacked_so_in_the_lines_to_write() -> None:
    with pytest.raises(WorkloadError, match="with no loss in it") as caught:
        loss_function(None)(Returns(lambda loss: LOGITS), {"x": LOGITS})
    assert "def loss_fn(model, batch):\n        output = model(**batch)\n        return ..." in str(caught.value)


@pytest.mark.parametrize(
    ("batch", "line"),
    [
        ({"x": LOGITS, "y": LOGITS}, "output = model(batch['x'])  # or model(batch): as your own loop calls it"),
        ((LOGITS,), "(inputs,) = batch"),
        ((LOGITS,) * 3, "part_0, part_1, part_2 = batch"),
        (LOGITS, "output = model(batch)"),
    ],
)
def test_the_lines_to_write_unpack_the_users_own_batch(batch: Any, line: str) -> None:
    error = explain_failed_call(batch, TypeError("forward() takes 1 positional argument"))
    assert f"    def loss_fn(model, batch):\n        {line}\n        return" in str(error)
    assert "raised TypeError: forward() takes 1 positional argument. Write" in str(error)


@pytest.mark.parametrize("weight", [3, 3.0, torch.tensor(3), torch.tensor([3.0])])
def test_a_pair_of_sum_and_weight_is_understood(weight: Any) -> None:
    loss, found = loss_function(lambda model, batch: (torch.ones((), requires_grad=True), weight))(nn.Identity(), None)
    assert float(loss) == 1.0
    assert found is weight


def scalar() -> torch.Tensor:
    return torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (torch.ones(16, requires_grad=True), "a tensor of shape [16] where a scalar is expected; return its .mean()"),
        (1.5, "loss_fn returned a float; it must return the tensor itself, so leave out .item()"),
        (2, "loss_fn returned a int; it must return the tensor itself, so leave out .item()"),
        (torch.ones(()), "loss_fn returned a scalar without a gradient; compute it from the model's output without"),
        (
            None,
            "loss_fn returned None (is a return missing?); it must return a scalar tensor (the mean loss), or the pair",
        ),
        ((scalar(), {"accuracy": 1.0}), "tokens or samples; return the loss alone"),
        ({"box": scalar(), "class": scalar()}, "several losses that one optimizer trains on are returned as their sum"),
        (
            (scalar(), scalar()),
            "several losses that one optimizer trains on are returned as their sum, and others are not",
        ),
        ({"loss": scalar(), "dice": scalar()}, "; return its ['loss'] alone"),
        ((scalar(), {"accuracy": 1.0}), "loss_fn returned a tuple of 2 (a scalar tensor, a dict); it must return"),
        ((scalar(), scalar()), "loss_fn returned a tuple of 2 (a scalar tensor, a scalar tensor); it must return"),
        ((scalar(), True), "loss_fn returned a tuple of 2 (a scalar tensor, a bool); it must return"),
        ({"loss": scalar(), "dice": 1.0}, "loss_fn returned a dict of 2 (loss, dice); it must return a scalar tensor"),
        ([scalar(), 2], "loss_fn returned a list of 2 (a scalar tensor, a int); it must return"),
        ((torch.ones(4, requires_grad=True), 4), "a tensor of shape [4] where a scalar is expected"),
        ((1.0, 4), "loss_fn returned a tuple of 2 (a float, a int); it must return a scalar tensor"),
    ],
)
def test_what_is_no_loss_is_an_error_that_shows_it(result: Any, text: str) -> None:
    with pytest.raises(WorkloadError, match=re.escape(text)):
        loss_function(lambda model, batch: result)(nn.Identity(), None)


def test_in_evaluation_a_loss_needs_no_gradient() -> None:
    with torch.no_grad():
        loss, _ = loss_function(lambda model, batch: torch.ones(()))(nn.Identity(), None)
    assert float(loss) == 1.0


def test_without_a_loss_fn_an_evaluation_needs_no_gradient_either() -> None:
    model = Returns(OUTPUTS["logits, loss"])
    with torch.no_grad():
        loss, _ = loss_function(None)(model, (LOGITS,))
    assert float(loss) == 2.0


def test_the_convention_in_words() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        return None

    assert describe_convention(loss_fn, None, None) == (
        "loss_fn(model, batch) returns a scalar, taken as the mean over the samples"
    )
    assert describe_convention(loss_fn, 3, None).startswith("loss_fn(model, batch) returns (loss_sum, weight)")
    assert describe_convention(None, None, {"x": 1}).startswith("model(**batch) gives the loss")
    assert describe_convention(None, None, (1, 2)).startswith("model(*batch) gives the loss")
    assert describe_convention(None, None, LOGITS).startswith("model(batch) gives the loss")


def test_a_weight_may_be_a_number_of_numpys() -> None:
    loss = torch.ones(1, requires_grad=True).sum()
    assert loss_function(lambda model, batch: (loss, np.int64(3)))(torch.nn.Identity(), None) == (loss, 3)
