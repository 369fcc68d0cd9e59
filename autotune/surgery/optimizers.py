"""Which implementations the user's optimizer can be switched to, and the switch, made in place.

Nothing is constructed anew: a new optimizer would lose hooks, schedulers that refer to the old one, state that exists
before the first step (Adagrad's accumulator) and the user's own subclass.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

Variant = Literal["for_loop", "foreach", "fused"]

FLAGS: dict[Variant, dict[str, bool]] = {
    "for_loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}


def fixed_reason(optimizer: torch.optim.Optimizer) -> str | None:
    """Why the optimizer's implementation cannot be switched, in one sentence, or None.

    Sparse gradients are seen only once a backward pass has left them in `.grad`: ask after one.
    """
    name = type(optimizer).__name__
    groups = optimizer.param_groups
    if not any("foreach" in group or "fused" in group for group in groups):
        return f"{name} takes no foreach/fused"
    # Optimizer.__init__ wraps the class's step, and functools.wraps keeps the module of the function that was written.
    if not type(optimizer).step.__module__.startswith("torch.optim."):
        return f"{name} has a step of its own, which need not heed foreach/fused"
    if any(isinstance(group.get("lr"), torch.Tensor) for group in groups):
        return f"{name} has a tensor as learning rate, which foreach and fused refuse late"
    if any(group.get("differentiable") for group in groups):
        return f"{name} is differentiable, which foreach and fused cannot be"
    if any(p.grad is not None and p.grad.layout != torch.strided for group in groups for p in group["params"]):
        return f"{name} gets sparse gradients, which fused kernels refuse"
    return None


def variants(optimizer: torch.optim.Optimizer, device: torch.device) -> tuple[Variant, ...]:
    """The implementations that the optimizer can be switched to on `device`, other than the one it uses already."""
    if fixed_reason(optimizer) is not None:
        return ()
    current = current_variant(optimizer, device)
    return tuple(v for v in get_args(Variant) if v != current and _supports(optimizer, v, device))


def current_variant(optimizer: torch.optim.Optimizer, device: torch.device) -> Variant:
    """The implementation that the first parameter group uses on `device` as its flags stand."""
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return "fused"
    if group.get("foreach"):
        return "foreach"
    # Only where both flags are left open does torch choose, and it takes foreach on CUDA.
    undecided = group.get("foreach") is None and group.get("fused") is None
    return "foreach" if undecided and device.type == "cuda" else "for_loop"


def set_variant(optimizer: torch.optim.Optimizer, variant: Variant) -> None:
    """Makes the optimizer step by `variant`, in place, before its first step.

    Raises ValueError where a parameter group has no flag for it.
    """
    for settings in (*optimizer.param_groups, optimizer.defaults):
        if variant != "for_loop" and variant not in settings:
            raise ValueError(f"{type(optimizer).__name__} takes no {variant}")
        settings.update({flag: value for flag, value in FLAGS[variant].items() if flag in settings})
    # A gradient scaler asks for this attribute to learn whether step() unscales by itself, as fused kernels do.
    optimizer._step_supports_amp_scaling = variant == "fused"  # type: ignore[attr-defined]
    for group in optimizer.param_groups:
        on_device = variant == "fused" or bool(group.get("capturable"))
        for parameter in group["params"]:
            _place_step(optimizer.state.get(parameter, {}), parameter.device if on_device else torch.device("cpu"))


def _place_step(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Moves a step count that exists before the first step (Adagrad) to where the implementation wants it."""
    if isinstance(state.get("step"), torch.Tensor):
        state["step"] = state["step"].to(device)


def _supports(optimizer: torch.optim.Optimizer, variant: Variant, device: torch.device) -> bool:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if variant == "for_loop":
        return True
    if not all(variant in group for group in optimizer.param_groups):
        return False
    if not all(type(p) in (torch.Tensor, torch.nn.Parameter) for p in parameters):
        return False
    if variant == "foreach":
        return True
    return all(p.is_floating_point() for p in parameters) and _has_fused_kernel(optimizer, device)


def _has_fused_kernel(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Steps a fused optimizer of torch's class on one element: releases differ in which kernels a device has."""
    own_class = next(cls for cls in type(optimizer).__mro__ if cls.__module__.startswith("torch.optim."))
    parameter = torch.zeros(1, device=device, requires_grad=True)
    parameter.grad = torch.zeros(1, device=device)
    try:
        own_class([parameter], lr=0.0, fused=True).step()
    except (RuntimeError, NotImplementedError):
        return False
    return True
