"""`Training`: model, optimizer, loader and step, set up by a configuration. What is measured is what the user runs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import nn

from autotune.config import TrainingConfig, Value
from autotune.errors import WorkloadError
from autotune.knobs.base import Knob, TrainingParts
from autotune.knobs.registry import KNOBS
from autotune.records import Conditions
from autotune.surgery.batches import to_device
from autotune.surgery.loaders import as_loader, counted, rebuilt
from autotune.training.losses import Loss, LossFunction, explain_failed_call, loss_function
from autotune.training.windows import Window, WindowLoader, samples_in
from autotune.workload import UserFunctions

Hook = TypeVar("Hook")


class Training:
    """The user's training step under one configuration.

    `loader` yields windows (the micro-batches of one optimizer step); `step(window)` trains on one and returns its mean
    loss, detached, on the device. `model` keeps the names of its parameters, so its `state_dict()` loads into the plain
    model. An empty configuration is the user's program as it stands.

    Built in stage order: process settings, `model_fn()`, device, `optimizer_fn(model)`, `scheduler_fn(optimizer)`,
    optimizer flags, recomputation, compile, loader. Raises `WorkloadError` where a function of the user's returns
    something else than it must.
    """

    def __init__(
        self,
        functions: UserFunctions,
        config: TrainingConfig,
        conditions: Conditions,
        *,
        blocks: tuple[str, ...] = (),
    ) -> None:
        device = torch.device(conditions.device)
        settings = [(knob, config[knob.name]) for knob in KNOBS if knob.name in config]
        for knob, value in settings:
            knob.configure_process(value, device)
        self._uses_loss_fn = functions.loss_fn is not None
        self._own_loss = loss_function(functions.loss_fn)
        self._clip_grad_norm = conditions.clip_grad_norm
        self.own_num_workers = 0
        """Of the loader that `data_fn` made."""
        self.own_batch_size: int | None = None
        """Likewise; None where the loader has none."""
        self.came_in_evaluation = False
        """Whether `model_fn` returned the model in evaluation mode."""
        self.outlives_schedule = False
        """Whether steps go on at the last learning rate where a schedule ends by raising: a trial may be longer than the
        training that was planned."""
        self._schedule_ended = False
        self.last_weight: Any = None
        """Sum of the last window's loss weights; None where the loss is a mean."""
        self.parts = TrainingParts(
            config=config,
            device=device,
            global_batch_size=conditions.global_batch_size,
            model=_made_model(functions, device),
            compute_loss=self._own_loss,
            blocks=blocks,
        )
        if not self.model.training:
            # As `from_pretrained` returns it, and a loop begins with this. Where a part alone is in that mode, it is meant.
            self.came_in_evaluation = True
            self.model.train()
        self._apply_to_model(settings, functions)
        self.loader = self._made_loader(settings, functions)
        self._contexts = _present(knob.step_context(value, self.parts) for knob, value in settings)
        self._batch_transforms = _present(knob.transform_batch(value, self.parts) for knob, value in settings)
        self._loss_transforms = _present(knob.backward(value, self.parts) for knob, value in settings)

    @property
    def model(self) -> nn.Module:
        """The user's model, on its device; forwards may be replaced, names never."""
        return self.parts.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The very object that `optimizer_fn` made."""
        assert self.parts.optimizer is not None
        return self.parts.optimizer

    @property
    def _parameters(self) -> list[torch.Tensor]:
        """All that the optimizer holds by now: some may be unfrozen, or come to it, while the training goes on."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler, where the precision needs one."""
        return self.parts.scaler

    def _apply_to_model(self, settings: list[tuple[Knob, Value]], functions: UserFunctions) -> None:
        for knob, value in settings:
            knob.transform_model(value, self.parts)
        self.parts.optimizer = _made_optimizer(functions, self.parts.model)
        self.scheduler = _made_scheduler(functions, self.parts.optimizer)
        for knob, value in settings:
            knob.set_optimizer(value, self.parts)
        for knob, value in settings:
            knob.wrap_model(value, self.parts)

    def _made_loader(self, settings: list[tuple[Knob, Value]], functions: UserFunctions) -> WindowLoader:
        user_loader, _ = as_loader(functions.data_fn())
        self.own_num_workers, self.own_batch_size = user_loader.num_workers, user_loader.batch_size
        changes: dict[str, Any] = {}
        for knob, value in settings:
            changes.update(knob.loader_kwargs(value, self.parts))
        return WindowLoader(counted(rebuilt(user_loader, changes)), self.parts.micro_batches_per_step)

    def step(self, window: Window) -> torch.Tensor:
        """Trains on one window and returns its mean loss (a scalar, detached, on the device; not synchronised)."""
        loss = self.accumulate(window)
        self.update()
        return loss

    def evaluate(self, window: Window) -> torch.Tensor:
        """The loss that `forward_only` gives, in evaluation mode.

        Every module is then in the mode that it was in before.
        """
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            return self.forward_only(window)[0]
        finally:
            for module, training in modes:
                module.training = training

    def forward_only(self, window: Window) -> tuple[torch.Tensor, Any]:
        """The window's mean loss (a scalar, on the device) without gradients; and the sum of its weights, None where the
        loss is a mean. Through the model as it is and the user's own loss, as their code would have it: where the step
        computes its loss in compiled form, that form belongs to the step alone."""
        with torch.no_grad():
            total, total_weight = self._summed(window, self._own_loss, lambda loss: None)
        return (total if total_weight is None else total / total_weight), total_weight

    def accumulate(self, window: Window) -> torch.Tensor:
        """Forward and backward of every micro-batch: leaves the gradient of the window's mean loss in the parameters."""
        total, total_weight = self._summed(window, self.parts.compute_loss, self._backward)
        self.last_weight = total_weight
        if total_weight is not None:
            self._divide_gradients(total_weight)
            total = total / total_weight
        return total

    def _summed(
        self, window: Window, compute_loss: LossFunction, use: Callable[[torch.Tensor], None]
    ) -> tuple[torch.Tensor, Any]:
        """The loss of every micro-batch, handed to `use` in turn; their weighted sum, and the sum of their weights."""
        samples = samples_in(window)
        total: torch.Tensor | None = None
        total_weight: Any = None
        for micro_batch in window:
            batch = to_device(micro_batch.data, self.parts.device, non_blocking=self.parts.non_blocking)
            for transform in self._batch_transforms:
                batch = transform(batch)
            loss, weight = self._forward(batch, compute_loss)
            share = micro_batch.samples / samples if weight is None else 1.0
            if share != 1.0:
                loss = loss * share
            use(loss)
            # Copies: under CUDA graphs both are overwritten by the next replay.
            part = loss.detach().clone()
            total = part if total is None else total + part
            if weight is not None:
                part_weight = weight.detach().clone() if isinstance(weight, torch.Tensor) else weight
                total_weight = part_weight if total_weight is None else total_weight + part_weight
        assert total is not None
        return total, total_weight

    def _backward(self, loss: torch.Tensor) -> None:
        for transform in self._loss_transforms:
            loss = transform(loss)
        loss.backward()

    def _forward(self, batch: Any, compute_loss: LossFunction) -> Loss:
        if not self._contexts:
            return self._loss(batch, compute_loss)
        with ExitStack() as stack:
            for make_context in self._contexts:
                stack.enter_context(make_context())
            return self._loss(batch, compute_loss)

    def _loss(self, batch: Any, compute_loss: LossFunction) -> Loss:
        try:
            return compute_loss(self.parts.model, batch)
        except (TypeError, NotImplementedError) as error:
            if self._uses_loss_fn or (isinstance(error, NotImplementedError) and _has_forward(self.parts.model)):
                raise
            raise explain_failed_call(batch, error) from error

    def _divide_gradients(self, weight: Any) -> None:
        """Sums were propagated: the division comes once, before clipping. Scaled gradients stay scaled."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if isinstance(weight, torch.Tensor):
            weight = weight.to(self.parts.device)
        for gradient in gradients:
            gradient.div_(weight)

    def update(self) -> None:
        """The optimizer's step with clipping, scaler and scheduler; clears the gradients after it."""
        scaler = self.parts.scaler
        if self._clip_grad_norm is not None:
            if scaler is not None:
                scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self._parameters, self._clip_grad_norm)
        if scaler is not None:
            scaler.step(self.optimizer)
            scaler.update()
        else:
            self.optimizer.step()
        self._step_scheduler()
        self.optimizer.zero_grad()  # one of the user's own need not take torch's argument

    def _step_scheduler(self) -> None:
        if self.scheduler is None or self._schedule_ended:
            return
        try:
            self.scheduler.step()
        except Exception:  # a OneCycleLR that is stepped beyond its end, a table of rates that is used up
            if not self.outlives_schedule:
                raise
            self._schedule_ended = True

    def state_dict(self) -> dict[str, Any]:
        """Everything that training goes on from: model, optimizer, scheduler and scaler."""
        state: dict[str, Any] = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        # One of the user's own needs no more than a `step`.
        if self.scheduler is not None and all(
            hasattr(self.scheduler, name) for name in ("state_dict", "load_state_dict")
        ):
            state["scheduler"] = self.scheduler.state_dict()
        if self.scaler is not None:
            state["scaler"] = self.scaler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up a state that `state_dict` gave, also one from another configuration."""
        self.model.load_state_dict(state["model"])
        flags = [{name: group.get(name) for name in ("foreach", "fused")} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        # The saved groups bring the other configuration's implementation along; this one's stays.
        for group, own in zip(self.optimizer.param_groups, flags, strict=True):
            group.update({name: value for name, value in own.items() if name in group})
        if self.scheduler is not None and "scheduler" in state:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler is not None and "scaler" in state:
            self.scaler.load_state_dict(state["scaler"])


def tell_call(error: Exception, role: str, function: Callable[..., Any], *arguments: str) -> None:
    """Adds to an error of the user's function how that is called, where its first argument has another name."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return
    if names and arguments[0] not in names[0]:
        called = f"{role}({', '.join(arguments)})"
        error.add_note(f"{role} is called as {called}, and is defined as {role}({', '.join(names)})")


def _has_forward(model: nn.Module) -> bool:
    """A module that only trains by a method of its own has none."""
    return getattr(type(model), "forward", None) is not nn.Module.forward


def _present(hooks: Iterable[Hook | None]) -> list[Hook]:
    return [hook for hook in hooks if hook is not None]


def _made_model(functions: UserFunctions, device: torch.device) -> nn.Module:
    model = functions.model_fn()
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise WorkloadError(f"model_fn returned {what}; it must return a torch.nn.Module")
    parameters = list(model.parameters())
    lazy = [name for name, module in model.named_modules() if isinstance(module, nn.modules.lazy.LazyModuleMixin)]
    if lazy and any(nn.parameter.is_lazy(parameter) for parameter in parameters):
        raise WorkloadError(
            f"model_fn returned a model with a lazy layer ({lazy[0]}) whose parameters have no shape yet; run one batch "
            "through the model inside model_fn before returning it"
        )
    if any(parameter.is_meta for parameter in parameters):
        raise WorkloadError(
            "model_fn returned a model with parameters on the meta device, which have no values: call its to_empty(device="
            '"cpu") and initialise them, or make it without torch.device("meta")'
        )
    if not any(parameter.requires_grad for parameter in parameters):
        raise WorkloadError("model_fn returned a model with no parameter that requires a gradient; nothing to train")
    model.to(device)  # in place: a `to` of the user's own need not return the model
    return model


def _made_optimizer(functions: UserFunctions, model: nn.Module) -> torch.optim.Optimizer:
    if functions.optimizer_fn is None:
        return torch.optim.AdamW(model.parameters())
    _refuse_an_optimizers_class(functions.optimizer_fn)
    try:
        optimizer = functions.optimizer_fn(model)
    except (TypeError, AttributeError) as error:
        tell_call(error, "optimizer_fn", functions.optimizer_fn, "model")
        raise
    if isinstance(optimizer, torch.optim.LBFGS) or _steps_with_arguments(optimizer):
        name = type(optimizer).__name__
        raise WorkloadError(f"optimizer_fn returned {name}, whose step needs a closure; that is not supported")
    if isinstance(optimizer, torch.optim.Optimizer):
        own = {id(parameter) for parameter in model.parameters()}
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            raise WorkloadError(
                "optimizer_fn returned an optimizer that holds no parameter of the model; make it of the model that it is "
                "given, as in optimizer_fn(model)"
            )
        return optimizer
    what = type(optimizer).__name__
    if isinstance(optimizer, (list, tuple)):
        what = f"a {what} of {len(optimizer)} ({', '.join(type(item).__name__ for item in optimizer)})"
        if any(isinstance(item, torch.optim.lr_scheduler.LRScheduler) for item in optimizer):
            raise WorkloadError(
                f"optimizer_fn returned {what}; return the optimizer alone, and the scheduler from scheduler_fn(optimizer)"
            )
    inner = [
        name for name, held in getattr(optimizer, "__dict__", {}).items() if isinstance(held, torch.optim.Optimizer)
    ]
    if len(inner) == 1:
        raise WorkloadError(
            f"optimizer_fn returned {what}, which is no torch.optim.Optimizer but holds one; return that (its "
            f".{inner[0]}), and a scheduler that sets the learning rate as {what} does from scheduler_fn(optimizer)"
        )
    raise WorkloadError(
        f"optimizer_fn returned {what}; it must return one torch.optim.Optimizer (parameter groups can hold several "
        "learning rates; several optimizers in one step are not supported)"
    )


def _refuse_an_optimizers_class(optimizer_fn: Callable[..., Any]) -> None:
    """`optimizer_fn = torch.optim.AdamW` would be called with the model."""
    made = optimizer_fn.func if isinstance(optimizer_fn, functools.partial) else optimizer_fn
    if isinstance(made, type) and issubclass(made, torch.optim.Optimizer) and made.__module__.startswith("torch.optim"):
        raise WorkloadError(
            f"optimizer_fn is the class {made.__name__}, which takes parameters, but it is called with the model; write "
            f"`def optimizer_fn(model): return torch.optim.{made.__name__}(model.parameters())`"
        )


def _steps_with_arguments(stepped: Any) -> bool:
    """Whether its `step` needs an argument. The class is asked: a scheduler wraps the method of its optimizer."""
    method = getattr(type(stepped), "step", None)
    try:
        inspect.signature(method).bind(stepped)  # type: ignore[arg-type]  # what is no method raises
    except TypeError:  # it does, or there is none
        return callable(method)
    except ValueError:  # of native code
        return False
    return False


def _made_scheduler(functions: UserFunctions, optimizer: torch.optim.Optimizer) -> Any:
    if functions.scheduler_fn is None:
        return None
    scheduler = functions.scheduler_fn(optimizer)
    if not hasattr(scheduler, "step") or _steps_with_arguments(scheduler):
        raise WorkloadError(
            f"scheduler_fn returned {type(scheduler).__name__}; it must return a learning rate scheduler that is stepped "
            "once per optimizer step without a metric or other arguments"
        )
    return scheduler
