"""How a loss is got from a model and a batch: the conventions that are understood, and errors for the rest."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autotune.errors import WorkloadError
from autotune.surgery.batches import describe

Loss = tuple[torch.Tensor, Any]
"""A scalar with a gradient, and its weight: None for a mean, or a number (also as a tensor) for a sum."""

LossFunction = Callable[[nn.Module, Any], Loss]
"""Of a model and a batch."""


def loss_function(loss_fn: Callable[[Any, Any], Any] | None) -> LossFunction:
    """A function of (model, batch) that gives (loss, weight or None) or raises `WorkloadError`."""
    if loss_fn is None:
        return _loss_of_model

    def compute(model: nn.Module, batch: Any) -> Loss:
        return _checked(loss_fn(model, batch))

    return compute


def _checked(result: Any) -> Loss:
    if isinstance(result, torch.Tensor):
        _check_scalar(result)
        return result, None
    if isinstance(result, tuple) and len(result) == 2 and _is_weight(result[1]) and isinstance(result[0], torch.Tensor):
        _check_scalar(result[0])
        return result[0], result[1]
    if isinstance(result, (float, int)):
        raise WorkloadError(
            f"loss_fn returned a {type(result).__name__}; it must return the tensor itself, so leave out .item()"
        )
    raise WorkloadError(
        f"loss_fn returned {_describe_result(result)}; it must return a scalar tensor (the mean loss), or the pair "
        f"(loss_sum, weight) where the loss is a sum over `weight` tokens or samples{_how_to_one(result)}"
    )


def _how_to_one(result: Any) -> str:
    """What to do with several losses, or with one among other things."""
    if isinstance(result, Mapping):
        parts = list(result.values())
        if isinstance(result.get("loss"), torch.Tensor):
            return "; return its ['loss'] alone"
    elif isinstance(result, (tuple, list)):
        parts = list(result)
    else:
        return ""
    losses = [part for part in parts if isinstance(part, torch.Tensor) and part.numel() == 1 and part.requires_grad]
    if len(losses) > 1:
        return "; several losses that one optimizer trains on are returned as their sum, and others are not supported"
    return "; return the loss alone" if losses else ""


def _is_weight(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.requires_grad
    return isinstance(value, numbers.Real) and not isinstance(value, bool)  # NumPy's are such numbers too


def _check_scalar(loss: torch.Tensor) -> None:
    if loss.numel() != 1:
        raise WorkloadError(
            f"loss_fn returned a tensor of shape {list(loss.shape)} where a scalar is expected; return its .mean()"
        )
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise WorkloadError(
            "loss_fn returned a scalar without a gradient; compute it from the model's output without .detach(), "
            ".item() or torch.no_grad()"
        )


def _describe_result(result: Any) -> str:
    if isinstance(result, (tuple, list)):
        return f"a {type(result).__name__} of {len(result)} ({', '.join(_describe_item(item) for item in result)})"
    if isinstance(result, Mapping):
        return f"a {type(result).__name__} of {len(result)} ({', '.join(map(str, result))})"
    return "None (is a return missing?)" if result is None else f"a {type(result).__name__}"


def _describe_item(item: Any) -> str:
    if isinstance(item, torch.Tensor):
        return "a scalar tensor" if item.numel() == 1 else f"a tensor of shape {list(item.shape)}"
    return f"a {type(item).__name__}"


def _loss_of_model(model: nn.Module, batch: Any) -> Loss:
    """No loss_fn: the batch is the model's arguments and the loss is in what it returns."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, (tuple, list)):
        output = model(*batch)
    else:
        output = model(batch)
    loss = _loss_in(output)
    if loss is None:
        raise WorkloadError(
            _no_loss_message(batch, f"the model returned {_describe_result(output)} with no loss in it")
        )
    return loss, None


def _loss_in(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        candidates = [output]
    elif isinstance(output, Mapping) and "loss" in output:
        candidates = [output["loss"]]
    elif isinstance(getattr(output, "loss", None), torch.Tensor):
        candidates = [output.loss]
    elif isinstance(output, (tuple, list)):
        candidates = [item for item in output if isinstance(item, torch.Tensor) and item.numel() == 1]
    else:
        candidates = []
    scalars = [item for item in candidates if isinstance(item, torch.Tensor) and item.numel() == 1]
    if not torch.is_grad_enabled():  # an evaluation: nothing has a gradient, and nothing is trained on what is found
        return scalars[0] if scalars else None
    usable = [item for item in scalars if item.requires_grad]
    return usable[0] if len(usable) == 1 else None


def explain_failed_call(batch: Any, error: Exception) -> WorkloadError:
    """The error to raise where, without a loss_fn, calling the model with the batch failed."""
    called = "model(**batch)" if isinstance(batch, Mapping) else "the model with it"
    return WorkloadError(
        _no_loss_message(batch, f"calling {called} raised {type(error).__name__}: {error}", failed=True)
    )


def _no_loss_message(batch: Any, reason: str, *, failed: bool = False) -> str:
    if isinstance(batch, Mapping) and failed and batch:
        unpack = f"output = model(batch[{next(iter(batch))!r}])  # or model(batch): as your own loop calls it"
    elif isinstance(batch, Mapping):
        unpack = "output = model(**batch)"
    elif isinstance(batch, (tuple, list)):
        names = ["inputs", "targets"] if len(batch) == 2 else [f"part_{n}" for n in range(len(batch))]
        unpack = f"{', '.join(names)} = batch" if len(names) > 1 else "(inputs,) = batch"
    else:
        unpack = "output = model(batch)"
    return (
        f"no loss_fn is given and the batch ({describe(batch)}) does not tell how to get a loss: {reason}. Write\n"
        f"    def loss_fn(model, batch):\n        {unpack}\n"
        "        return ...  # a scalar tensor: the mean loss of the batch"
    )


def describe_convention(loss_fn: Callable[[Any, Any], Any] | None, weight: Any, batch: Any) -> str:
    """How the loss is understood, in words."""
    if loss_fn is not None:
        if weight is not None:
            return "loss_fn(model, batch) returns (loss_sum, weight): gradients are divided by the sum of weights"
        return "loss_fn(model, batch) returns a scalar, taken as the mean over the samples"
    call = "model(**batch)" if isinstance(batch, Mapping) else "model(*batch)"
    if not isinstance(batch, (Mapping, tuple, list)):
        call = "model(batch)"
    return f"{call} gives the loss, taken as the mean over the samples"
