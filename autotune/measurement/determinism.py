"""Contexts in which two runs of one step can be compared: no dropout, full precision, eager."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autotune.surgery.batches import map_tensors, tensors

_FUNCTIONAL_DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)

HALVES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass
class DropoutSeen:
    """What dropout a model has, as it shows while that is off and the model runs eagerly."""

    ran: bool = False
    """Some would have drawn."""
    held: bool = False
    """Modules hold a share to drop, which others may read."""


@contextmanager
def dropout_off(model: nn.Module, seen: DropoutSeen | None = None) -> Iterator[None]:
    """Dropout with p = 0, in modules and in the functional forms; training mode stays.

    Compilation and micro-batches redraw the masks, which alone changes a gradient by more than any rounding does.
    """
    functional = nn.functional
    with ExitStack() as stack:
        for module in model.modules():
            for attribute in _dropout_attributes(module):
                if seen is not None and getattr(module, attribute):
                    seen.held = True
                    stack.callback(module.register_forward_pre_hook(_noting_module(seen)).remove)
                stack.enter_context(_replaced(module, attribute, 0.0))
        for name in _FUNCTIONAL_DROPOUTS:
            replacement = _without_dropout(getattr(functional, name))
            stack.enter_context(
                _replaced(functional, name, replacement if seen is None else _noting(replacement, seen))
            )
        attention = _attention_without_dropout(functional.scaled_dot_product_attention)
        if seen is not None:
            attention = _noting_attention(attention, seen)
        stack.enter_context(_replaced(functional, "scaled_dot_product_attention", attention))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _noting_module(seen: DropoutSeen) -> Callable[[nn.Module, Any], None]:
    def note(module: nn.Module, args: Any) -> None:
        seen.ran = seen.ran or module.training

    return note


def _noting(function: Callable[..., torch.Tensor], seen: DropoutSeen) -> Callable[..., torch.Tensor]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        seen.ran = seen.ran or bool(given.arguments["p"] and given.arguments["training"])
        return function(*args, **kwargs)

    return noting


def _noting_attention(function: Callable[..., torch.Tensor], seen: DropoutSeen) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> torch.Tensor:
        position = _ATTENTION_DROPOUT_POSITION
        seen.ran = seen.ran or bool(args[position] if len(args) > position else kwargs.get("dropout_p"))
        return function(*args, **kwargs)

    return noting


def _dropout_attributes(module: nn.Module) -> tuple[str, ...]:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return ("p",)
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
        return ("dropout",)
    return ()


def _without_dropout(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    position = list(inspect.signature(original).parameters).index("p")

    @functools.wraps(original)
    def same_without_dropout(*args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) > position:
            return original(*args[:position], 0.0, *args[position + 1 :], **kwargs)
        kwargs["p"] = 0.0
        return original(*args, **kwargs)

    return same_without_dropout


_ATTENTION_DROPOUT_POSITION = 4
"""scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, ...)"""


def _attention_without_dropout(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def same_without_dropout(*args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) > _ATTENTION_DROPOUT_POSITION:
            args = (*args[:_ATTENTION_DROPOUT_POSITION], 0.0, *args[_ATTENTION_DROPOUT_POSITION + 1 :])
        else:
            kwargs["dropout_p"] = 0.0
        return original(*args, **kwargs)

    return same_without_dropout


@dataclass(frozen=True)
class Precision:
    """How exact fp32 matrix products and convolutions are, as torch's global settings say it."""

    matmul: str
    cudnn_tf32: bool

    @classmethod
    def now(cls) -> Precision:
        """The settings in force."""
        return cls(torch.get_float32_matmul_precision(), bool(torch.backends.cudnn.allow_tf32))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """These settings, and afterwards those from before."""
        before = Precision.now()
        self._set()
        try:
            yield
        finally:
            before._set()

    def _set(self) -> None:
        # Only what differs is set: setting even the value in force changes what the compiler's cache is keyed by.
        if torch.get_float32_matmul_precision() != self.matmul:
            torch.set_float32_matmul_precision(self.matmul)
        if torch.backends.cudnn.allow_tf32 != self.cudnn_tf32:
            torch.backends.cudnn.allow_tf32 = self.cudnn_tf32

    def matters_to(self, gradients: dict[str, torch.Tensor | None]) -> bool:
        """Whether a model with such parameters may compute in less than fp32: convolutions have weights of 3 dimensions
        and more, and take TF32 unless told otherwise."""
        convolutions = any(gradient is not None and gradient.dim() >= 3 for gradient in gradients.values())
        return self.matmul != HIGHEST.matmul or (self.cudnn_tf32 and convolutions)


HIGHEST = Precision("highest", False)


@contextmanager
def eager() -> Iterator[None]:
    """Nothing runs compiled, the user's own compile included."""
    with torch.compiler.set_stance("force_eager"):
        yield


def round_to(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """The tensor with its fp32 values rounded to `bfloat16`, `float16` or `tf32` (10 bits of mantissa), still in fp32."""
    if tensor.dtype != torch.float32:
        return tensor
    if kind == "tf32":
        bits = tensor.view(torch.int32)
        return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return tensor.to(getattr(torch, kind)).to(torch.float32)


def shaken(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """The tensor with its values moved by chance, as far as rounding to `kind` may move them.

    What is in that type already, or will be rounded to it anyway, shows by this what its rounding does; in fp32, what
    adding in another order may do.
    """
    if tensor.dtype not in (torch.float32, getattr(torch, kind)) or tensor.is_nested or tensor.layout != torch.strided:
        return tensor
    epsilon = torch.finfo(getattr(torch, kind)).eps
    # By no less than what fp32 can hold.
    distance = max(torch.finfo(torch.float32).eps, epsilon / (4 if tensor.dtype == torch.float32 else 2))
    generator = torch.Generator().manual_seed(tensor.numel())
    noise = (2 * torch.rand(tensor.shape, generator=generator) - 1).to(tensor.device)
    return (tensor.float() * (1 + distance * noise)).to(tensor.dtype)


class _Rounding(torch.autograd.Function):
    """Rounds on the way forward and the gradient on the way back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.kind = kind
        return round_to(tensor, kind)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return round_to(gradient, ctx.kind), None


def _innermost(model: nn.Module) -> list[nn.Module]:
    """Those that hold no others and take hooks, as scripted ones do not."""
    hookable = (module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule))
    return [module for module in hookable if not any(True for _ in module.children())]


@contextmanager
def outputs_rounded(model: nn.Module, kind: str) -> Iterator[None]:
    """What each innermost module returns is rounded, as it is when it is computed in that type, and its gradient too."""

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        result: torch.Tensor = _Rounding.apply(tensor, kind)  # type: ignore[no-untyped-call]
        return result

    handles = [
        module.register_forward_hook(lambda module, args, output: map_tensors(output, rounded))
        for module in _innermost(model)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def types_watched(model: nn.Module) -> Iterator[set[str]]:
    """The types of half the size of fp32 that parameters are in and innermost modules return, by name, as they are seen."""
    seen: set[str] = set()

    def note(found: Any) -> None:
        seen.update(HALVES[tensor.dtype] for tensor in tensors(found) if tensor.dtype in HALVES)

    note(list(model.parameters()))
    handles = [module.register_forward_hook(lambda module, args, output: note(output)) for module in _innermost(model)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def is_batch_norm(module: nn.Module) -> bool:
    """Whether it normalises by the batch, synchronised or not."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def is_tracking_instance_norm(module: nn.Module) -> bool:
    """Whether it normalises each sample by itself, but keeps running statistics, which each micro-batch moves once."""
    return isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.running_mean is not None


def follows_the_batch(module: nn.Module) -> bool:
    """Whether a norm leaves something else behind for a batch than for its parts."""
    return is_batch_norm(module) or is_tracking_instance_norm(module)


@contextmanager
def batch_norms_evaluated(model: nn.Module) -> Iterator[None]:
    """BatchNorm by its running statistics, so that no sample depends on the others of its batch, and whatever else keeps
    such by these, so that they do not move.

    One that keeps none uses those that it would begin with, mean 0 and variance 1.
    """
    norms: list[Any] = [module for module in model.modules() if follows_the_batch(module) and module.training]
    without_statistics = [norm for norm in norms if norm.running_mean is None]
    for norm in without_statistics:
        reference = next(model.parameters())
        norm.running_mean = torch.zeros(norm.num_features, device=reference.device)
        norm.running_var = torch.ones(norm.num_features, device=reference.device)
    for norm in norms:
        norm.eval()
    try:
        yield
    finally:
        for norm in norms:
            norm.train()
        for norm in without_statistics:
            norm.running_mean = norm.running_var = None
