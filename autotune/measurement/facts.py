"""Reads `WorkloadFacts`: one look at the user's program, and one step of it as it stands."""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import re
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from autotune.caller_settings import settings_of_this_process
from autotune.config import TrainingConfig, Value
from autotune.errors import WorkloadError
from autotune.failure import TrialFailure
from autotune.measurement.clock import endless, synchronize
from autotune.measurement.determinism import is_batch_norm, is_tracking_instance_norm
from autotune.measurement.loss_scales import ASKED, DIVIDES, scaler_calls, scales_halved
from autotune.measurement.marks import after_each_forward
from autotune.measurement.measure import PhaseReport
from autotune.records import TrialRequest, WorkloadFacts
from autotune.surgery.batches import byte_count, describe, to_device
from autotune.surgery.blocks import NO_BLOCKS, Blocks, find_blocks, named_blocks
from autotune.surgery.generators import seed_everything
from autotune.surgery.loaders import (
    DEFAULT_PREFETCH_FACTOR,
    as_loader,
    batch_fixed_reason,
    counted,
    dataset_length,
    rebuilt,
    workers_fixed_reason,
)
from autotune.surgery.optimizers import fixed_reason, variants
from autotune.training.losses import describe_convention
from autotune.training.training import Training, tell_call
from autotune.training.windows import Window, WindowLoader, fresh
from autotune.workload import ROLES, UserFunctions

ARGUMENTS = {"loss_fn": ("model", "batch"), "optimizer_fn": ("model",), "scheduler_fn": ("optimizer",)}
"""What the optional functions are called with."""
LONGEST_STEP_SECONDS = 20.0
"""A first step slower than this is not run twice to see a warm one."""
LARGEST_WEIGHT_ROUNDING = 1e-5
"""Relative, between two sums of the same weights: a GPU may add in another order."""
HALVED_CLOSELY = 1e-2
"""Relative: what is added to a scaled loss without being scaled is small beside it."""
BACKWARD_AND_UPDATE = 3
"""A step takes about so many times as long as its forward pass."""
NO_STEP_FITS = (
    "no step of your program fits, not even at a batch of 1: this was seen in forward passes, and the time of a step is "
    "three times that of one"
)

TRAINED_ALL_THE_SAME = (
    "model_fn returns the model in evaluation mode, as from_pretrained does; it is trained in training mode, as a loop does "
    "that begins with model.train()"
)
IN_DOUBLE = (
    "all parameters of the model are float64, so nothing that computes in less is tried: autocast and TF32 leave float64 "
    "as it is"
)


def read_facts(functions: UserFunctions, request: TrialRequest, phase: PhaseReport) -> WorkloadFacts:
    """What the search needs to know of the user's program.

    Raises `WorkloadError` for what is not understood, with what to write instead; `TrialFailure` for a loss that is not
    finite. The user's program runs as it stands: an empty configuration. Where no step of it fits, `facts_forward_only`
    asks for what a forward pass shows that keeps nothing for a backward pass.
    """
    phase("build")
    _check_kinds(functions)
    for role in ("model_fn", "data_fn"):
        _check_no_arguments(role, getattr(functions, role))
    for role, arguments in ARGUMENTS.items():
        _check_arguments(role, getattr(functions, role), arguments)
    seed_everything(request.conditions.seed)
    conditions = request.conditions.model_copy(update={"global_batch_size": None})
    training = Training(functions, TrainingConfig({}), conditions)
    model = training.model
    if not torch.is_grad_enabled():
        raise WorkloadError(
            "gradients are turned off for good where the program is imported, or its model or data is made; put what calls "
            "torch.set_grad_enabled(False), or enters torch.no_grad() or torch.inference_mode(), into a `with` block"
        )
    phase("compile")
    window = _first_window(training, request.facts_batch_size)
    made_before = {name for name, _ in model.named_parameters()}
    run = _timed_forward if request.facts_forward_only else _timed_step
    with scaler_calls() as calls:
        loss, first_seconds = _first_run(run, training, window, functions.loss_fn)
    if calls & ASKED and not calls & DIVIDES:
        _refuse_scaled_loss(training, window, steps=not request.facts_forward_only)
    _refuse_later_parameters(model, made_before)
    if not math.isfinite(loss):
        raise TrialFailure(
            "numerics",
            f"the user's own step gives a loss of {loss} at its first step, in fp32 and eager, before anything is tuned; "
            "look for a division by zero or an infinite value in the data",
        )
    phase("measure")
    step_seconds = first_seconds
    if first_seconds < LONGEST_STEP_SECONDS:
        _, step_seconds = run(training, window)
    optimizer_variants, optimizer_fixed_reason = _optimizer_options(training, window, request.facts_forward_only)
    batch = to_device(fresh(window)[0].data, training.parts.device)
    weight = training.last_weight
    if weight is not None:
        _refuse_metric(training, window, float(weight), steps=not request.facts_forward_only)
    settings = process_settings()  # before user code is asked to set up a worker here
    _check_second_model(functions, training)
    named = named_blocks(model, request.blocks) if request.blocks else None
    blocks = named or _found_blocks(training, batch, request.facts_forward_only)
    loader, held = as_loader(functions.data_fn())
    datasets = (
        (as_loader(functions.data_fn())[0].dataset, as_loader(functions.data_fn())[0].dataset)
        if isinstance(loader.dataset, IterableDataset)
        else None
    )
    parameters = list(model.parameters())
    are_double = _are_double(parameters)
    structure = describe(window[0].data)
    convention = describe_convention(functions.loss_fn, weight, batch)
    return WorkloadFacts(
        batch_structure=structure,
        sample_bytes=byte_count(window[0].data) // max(1, window[0].samples),
        batch_size=loader.batch_size or window[0].samples,
        batch_held=held,
        batch_fixed_reason=batch_fixed_reason(loader),
        workers_fixed_reason=workers_fixed_reason(loader, datasets),
        num_workers=loader.num_workers,
        pin_memory=bool(loader.pin_memory),
        prefetch_factor=loader.prefetch_factor or DEFAULT_PREFETCH_FACTOR,
        drop_last=bool(loader.drop_last),
        dataset_kind="iterable" if datasets else "map",
        dataset_length=dataset_length(loader),
        model_class=type(model).__name__,
        parameter_count=sum(parameter.numel() for parameter in parameters),
        trainable_parameter_count=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        parameter_bytes=sum(parameter.nbytes for parameter in parameters),
        block_class=blocks.class_name or None,
        blocks=blocks.names,
        optimizer_class=type(training.optimizer).__name__,
        optimizer_variants=optimizer_variants,
        optimizer_fixed_reason=optimizer_fixed_reason,
        has_scheduler=training.scheduler is not None,
        has_batch_norm=any(map(is_batch_norm, model.modules())),
        has_tracking_instance_norm=any(map(is_tracking_instance_norm, model.modules())),
        convolution_ranks=_convolution_ranks(model),
        has_dropout=any(
            isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in model.modules()
        ),
        comes_in_evaluation=training.came_in_evaluation,
        parameters_are_double=are_double,
        model_is_compiled=_is_compiled(model),
        loss_convention=convention,
        loss_weighted=weight is not None,
        first_loss=loss,
        process_settings=settings,
        step_seconds=step_seconds * (loader.batch_size or window[0].samples) / window[0].samples,
        fingerprint=_fingerprint(model, structure, type(training.optimizer).__name__, convention, *request.blocks),
        step_fits=not request.facts_forward_only,
        notes=_notes(training, request, are_double),
    )


def _notes(training: Training, request: TrialRequest, are_double: bool) -> tuple[str, ...]:
    notes = {
        NO_STEP_FITS: request.facts_forward_only,
        TRAINED_ALL_THE_SAME: training.came_in_evaluation,
        IN_DOUBLE: are_double,
    }
    return tuple(note for note, holds in notes.items() if holds)


def _refuse_later_parameters(model: nn.Module, made_before: set[str]) -> None:
    """The optimizer was made before them."""
    later = [name for name, _ in model.named_parameters() if name not in made_before]
    if later:
        raise WorkloadError(
            f"the model makes parameters in its first step ({', '.join(later[:3])}), which no optimizer knows, so they are "
            "not trained: make them where the model is made, or run one batch through it inside model_fn"
        )


def _are_double(parameters: list[nn.Parameter]) -> bool:
    types = {one.dtype for one in parameters if one.is_floating_point() or one.is_complex()}
    return bool(types) and types <= {torch.float64, torch.complex128}


def _convolution_ranks(model: nn.Module) -> tuple[int, ...]:
    convolutions = [module for module in model.modules() if isinstance(module, nn.modules.conv._ConvNd)]
    return tuple(sorted({module.weight.dim() for module in convolutions}))


def _check_kinds(functions: UserFunctions) -> None:
    """What is no function of the user's: a model or a loader in the place of what makes one, a criterion of torch's."""
    for role in ROLES:
        given = getattr(functions, role)
        if given is not None and (not callable(given) or (role == "model_fn" and isinstance(given, nn.Module))):
            raise WorkloadError(
                f"{role} is an object ({type(given).__name__}); it must be a function: "
                f"`def {role}({', '.join(ARGUMENTS.get(role, ()))}): return ...`"
            )
    loss_fn = functions.loss_fn
    made = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
    module = type(made).__module__ if isinstance(made, nn.Module) else getattr(made, "__module__", None)
    if module is not None and (module == "torch" or module.startswith("torch.nn.")):
        name = getattr(made, "__name__", type(made).__name__)
        raise WorkloadError(
            f"loss_fn is torch's {name}, which takes an output and a target, but is called as loss_fn(model, batch); write "
            f"`def loss_fn(model, batch): return ...`, with {name} of model(inputs) and the targets, both out of the batch"
        )


def _first_run(
    run: Callable[[Training, Window], tuple[float, float]],
    training: Training,
    window: Window,
    loss_fn: Callable[..., Any] | None,
) -> tuple[float, float]:
    """A loss_fn that fails is told how it is called, where it names its arguments otherwise; and so is an optimizer that
    wants a closure. What is no loss because loss_fn trains by itself is told as that."""
    try:
        return run(training, window)
    except WorkloadError:
        _refuse_gradients_of_the_loss(training)  # nothing else has called backward() yet
        raise
    except Exception as error:  # whatever the user's code raises
        if loss_fn is not None and isinstance(error, (TypeError, AttributeError)):
            tell_call(error, "loss_fn", loss_fn, *ARGUMENTS["loss_fn"])
        if _lacks_closure(error, training.optimizer):
            error.add_note("the optimizer is stepped without a closure, and one that needs it is not supported")
        raise


def _lacks_closure(error: Exception, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of the user's own, whose signature lets the closure be left out, failed for want of it."""
    if not re.search("closure|NoneType", str(error)):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(
        frame.f_code.co_name == "step"
        and frame.f_locals.get("self") is optimizer
        and frame.f_locals.get("closure", optimizer) is None
        for frame in frames
    )


def _refuse_metric(training: Training, window: Window, weight: float, *, steps: bool) -> None:
    """A loss_fn may return its loss and an accuracy: taken for a weight, gradients would be divided by that.

    Tokens and samples are counted, or weighted by what is known of them: a fraction that a step on the very same batch
    changes, all random numbers alike, is told by the model. `steps`: whether one fits.
    """
    if weight < 1:
        found, advice = "less than 1", "; or both a thousand times as large, if it is a weight"
    elif weight.is_integer() or not steps or _keeps_weight(training, window):
        return
    else:
        found, advice = "another after a step on the same batch", ""
    raise WorkloadError(
        f"loss_fn returned a loss and {weight:.4g}, which is taken for its weight, the tokens or samples that the loss is a "
        f"sum over, and is {found}: if it is a metric, return the loss alone, the mean{advice}"
    )


def _refuse_scaled_loss(training: Training, window: Window, *, steps: bool) -> None:
    """A loss that a `GradScaler` has scaled is half as large at half the scale; what is scaled for a gradient penalty, and
    divided by the same scale, is not. `steps`: whether one fits."""
    once = _loss_of(training, window, steps)
    with scales_halved(training.parts.device):
        halved = _loss_of(training, window, steps)
    if math.isfinite(once) and once and math.isclose(halved, once / 2, rel_tol=HALVED_CLOSELY):
        raise WorkloadError(
            "the loss is multiplied by the scale of a torch.amp.GradScaler, and nothing divides the gradients by that "
            "again, so the scaled loss would be trained on: leave the scaler out of loss_fn and return the loss itself; "
            "where fp16 is tried, the step has a scaler of its own"
        )


def _loss_of(training: Training, window: Window, steps: bool) -> float:
    seed_everything(0)
    if not steps:
        return float(training.forward_only(fresh(window))[0])
    loss = float(training.accumulate(fresh(window)))  # a gradient penalty needs gradients
    training.optimizer.zero_grad()
    return loss


def _keeps_weight(training: Training, window: Window) -> bool:
    before, after = _weight_of(training, window), _weight_of(training, window)
    return math.isclose(before, after, rel_tol=LARGEST_WEIGHT_ROUNDING)


def _weight_of(training: Training, window: Window) -> float:
    """The weight of the window's loss, and then a step on it."""
    seed_everything(0)
    weight = float(training.forward_only(fresh(window))[1])
    training.step(fresh(window))
    return weight


def _check_no_arguments(role: str, function: Callable[..., Any]) -> None:
    if role == "data_fn" and inspect.isgeneratorfunction(function):
        as_loader(function())
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    needed = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        name = getattr(function, "__name__", role)
        raise WorkloadError(
            f"{role} is called without arguments, but {name}{signature} needs {', '.join(needed)}; give it a default, or "
            f"pass functools.partial({name}, {needed[0]}=...)"
        )


def _first_window(training: Training, batch_size: int | None) -> Window:
    """The user's first batch, or one of another size where the loader can make it."""
    loader = training.loader.loader
    if batch_size is None or batch_fixed_reason(loader) is not None:
        return next(endless(training.loader))
    smaller = rebuilt(loader, {"batch_size": batch_size})
    return next(endless(WindowLoader(counted(smaller), 1)))


def _check_arguments(role: str, function: Callable[..., Any] | None, arguments: tuple[str, ...]) -> None:
    if function is None:
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        name = getattr(function, "__name__", role)
        raise WorkloadError(
            f"{role} is called as {role}({', '.join(arguments)}), which {name}{signature} does not take ({error})"
        ) from None


def _timed_step(training: Training, window: Window) -> tuple[float, float]:
    window = fresh(window)
    begin = time.perf_counter()
    loss = training.step(window)
    synchronize(training.parts.device)
    return float(loss), time.perf_counter() - begin


def _timed_forward(training: Training, window: Window) -> tuple[float, float]:
    """The same of a forward pass, and what a step would take by that."""
    window = fresh(window)
    begin = time.perf_counter()
    loss, training.last_weight = training.forward_only(window)
    synchronize(training.parts.device)
    return float(loss), BACKWARD_AND_UPDATE * (time.perf_counter() - begin)


def _optimizer_options(training: Training, window: Window, forward_only: bool) -> tuple[tuple[str, ...], str | None]:
    """What the optimizer can be switched to, seen while the parameters have gradients: sparse ones forbid some."""
    if not forward_only:
        with after_each_forward(training, lambda: _refuse_gradients_of_the_loss(training)):
            training.accumulate(fresh(window))
        _refuse_no_gradient(training.optimizer)
    options = variants(training.optimizer, training.parts.device), fixed_reason(training.optimizer)
    if not forward_only:
        training.update()
    return options


def _refuse_no_gradient(optimizer: torch.optim.Optimizer) -> None:
    """Nothing would be trained, and nothing could be compared."""
    if all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"]):
        raise WorkloadError(
            "the loss gives no gradient to any parameter of the optimizer, so that nothing is trained: compute it from the "
            "output of the model that loss_fn is given, without .detach() or .item() on the way, and let no hook take the "
            "gradients before the optimizer's step"
        )


def _refuse_gradients_of_the_loss(training: Training) -> None:
    """Once a loss is computed: where that leaves gradients in the parameters, the step would add its own to them."""
    optimized = {id(parameter) for group in training.optimizer.param_groups for parameter in group["params"]}
    left = [name for name, p in training.model.named_parameters() if p.grad is not None and id(p) in optimized]
    if left:
        raise WorkloadError(
            f"{left[0]} has a gradient as soon as the loss is computed, to which the step would add its own: loss_fn, "
            "or the model's forward, calls .backward() itself; return the loss alone, and take gradients that it is "
            "made of by torch.autograd.grad(...)"
        )


def _check_second_model(functions: UserFunctions, training: Training) -> None:
    """`model_fn` must return a fresh model at every call: a trial, its parity check and `build` each call it."""
    try:
        second = functions.model_fn()
    except Exception as error:  # whatever the user's function raises
        raise WorkloadError(
            f"model_fn failed at its second call ({type(error).__name__}: {error}); it must return a fresh model at "
            "every call"
        ) from error
    if second is training.model:
        raise WorkloadError("model_fn returned the same model twice; it must make a fresh one at every call")
    own = {id(parameter) for parameter in training.model.parameters()}
    shared = [name for name, parameter in second.named_parameters() if id(parameter) in own]
    if shared:
        raise WorkloadError(
            f"two models from model_fn share parameters ({shared[0]}), so that training one changes the other; make every "
            "part of the model inside model_fn, or copy.deepcopy there what is loaded outside"
        )


def _found_blocks(training: Training, batch: Any, forward_only: bool) -> Blocks:
    if _is_compiled(training.model):
        return NO_BLOCKS

    def run_step() -> None:
        training._loss(batch, training.parts.compute_loss)

    try:
        return find_blocks(training.model, run_step, keep_saved=not forward_only)
    except Exception:  # the step itself ran: what raises is being watched, as in scripted modules or under torch.func
        return NO_BLOCKS


def _is_compiled(model: nn.Module) -> bool:
    """By `torch.compile(module)`, by `module.compile()`, or where its class compiles its forward."""
    return any(
        type(module).__name__ == "OptimizedModule"
        or module._compiled_call_impl is not None
        or _compiles(getattr(module, "forward", None))
        for module in model.modules()
    )


def _compiles(forward: Any) -> bool:
    """`torch.compiler.disable` wraps a function as `torch.compile` does."""
    return hasattr(forward, "_torchdynamo_orig_callable") and not getattr(forward, "_torchdynamo_disable", False)


def process_settings() -> dict[str, Value]:
    """What is set globally in this process and changes how fast or how exact a step is. The default type shows in the
    parameters, which the fingerprint tells apart."""
    return {name: value for name, value in settings_of_this_process().items() if name != "default_dtype"}


def _fingerprint(model: nn.Module, *parts: str) -> str:
    shapes = [f"{name}:{tuple(parameter.shape)}:{parameter.dtype}" for name, parameter in model.named_parameters()]
    return hashlib.sha256("\n".join([*shapes, *parts]).encode()).hexdigest()[:12]
