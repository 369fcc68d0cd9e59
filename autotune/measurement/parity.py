"""Does it train the same? A configuration's gradients, buffers and losses held against the user's step in fp32, eager."""

from __future__ import annotations

import gc
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from autotune.config import TrainingConfig
from autotune.knobs.registry import KNOBS, batch_knob
from autotune.measurement.clock import endless
from autotune.measurement.determinism import HIGHEST, Precision, dropout_off, eager, random_state, round_to
from autotune.measurement.gradients import Comparison, Gradients, compare
from autotune.measurement.measure import PhaseReport, seed_everything
from autotune.records import Conditions, ParityResult, TrialRequest
from autotune.surgery.batches import map_tensors
from autotune.surgery.loaders import as_loader, batch_fixed_reason, counted, rebuilt
from autotune.training.training import Training
from autotune.training.windows import MicroBatch, Window, WindowLoader
from autotune.workload import UserFunctions

SMALLEST_TOLERANCE = 1e-3
FLOORS = 3.0
"""The gate: at most the largest of 1e-3, three times the floor, and a few units of the type's rounding."""
ROUNDINGS = 4.0
UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "tf32": 2.0**-11}
"""At least so many units in the last place of the candidate's type: the floor rounds weights and inputs only, while an
honest candidate rounds outputs and gradients too. One linear layer in bf16 shows 0.0036 over a floor of 0.0008 (CPU)."""
SMALLEST_TENSOR_TOLERANCE = 1e-2
LARGEST_TENSOR_TOLERANCE = 0.9
"""A tensor whose gradient is gone has a relative error of 1, whatever the floor."""
STEPS = 3
"""Windows: gradients and buffers are compared after the first, losses over all."""
SCALER_TRIES = 25
"""Halvings of the loss scale that fp16 is given to reach a step that is not skipped."""
NO_DIFFERENCE = Comparison(0.0, 1.0, None, 0.0)


@dataclass
class Run:
    """What one training left after the same windows."""

    gradients: Gradients
    buffers: dict[str, torch.Tensor]
    losses: list[float]
    moved: float
    """Norm of the change of the parameters over the losses' steps."""
    skipped_all: bool = False
    drew_random_numbers: bool = False
    """In the first window, with dropout off."""


def check_parity(functions: UserFunctions, request: TrialRequest, phase: PhaseReport) -> ParityResult:
    """The configuration of the request against the user's program: same weights, same samples, its own accumulation.

    The reference takes the samples of a step in one piece, as the user does; where the model has BatchNorm, which sees
    the micro-batch, both take the candidate's micro-batches. Where the reference does not fit, both are made smaller.
    """
    config, conditions = request.config, request.conditions
    notes: list[str] = []
    while True:
        try:
            return _Check(functions, request, config, conditions, phase, tuple(notes)).result()
        except torch.OutOfMemoryError:
            smaller = _smaller(config, conditions)
            if smaller is None:
                raise
            config, conditions = smaller
            notes = [
                f"compared at micro-batch {config[batch_knob().name]}: the fp32 reference does not fit at the full size"
            ]
        gc.collect()
        if conditions.device == "cuda":
            torch.cuda.empty_cache()


def _smaller(config: TrainingConfig, conditions: Conditions) -> tuple[TrainingConfig, Conditions] | None:
    name = batch_knob().name
    size = int(config[name])
    if size < 2:
        return None
    global_size = conditions.global_batch_size
    return (
        config.replace({name: size // 2}),
        conditions.model_copy(
            update={"global_batch_size": None if global_size is None else _halved(global_size, size)}
        ),
    )


def _halved(global_size: int, micro: int) -> int:
    return max(1, global_size // micro) * (micro // 2)


class _Check:
    """One comparison: windows, reference, floor, candidate, verdict."""

    def __init__(
        self,
        functions: UserFunctions,
        request: TrialRequest,
        config: TrainingConfig,
        conditions: Conditions,
        phase: PhaseReport,
        notes: tuple[str, ...],
    ) -> None:
        self.functions, self.request, self.config, self.conditions = functions, request, config, conditions
        self.phase, self.notes = phase, list(notes)
        self.as_is = conditions.model_copy(update={"global_batch_size": None})
        self.reference_weights: dict[str, torch.Tensor] = {}
        self.random = False

    def result(self) -> ParityResult:
        self.phase("build")
        seed_everything(0)
        self.users_precision = Precision.now()
        candidate_training = Training(self.functions, self.config, self.conditions, blocks=self.request.blocks)
        candidate_windows = self._windows(candidate_training)
        reference_windows = self._reference_windows(candidate_training.model, candidate_windows)
        self.phase("parity")
        # Turning dropout off changes what is traced, so it is left alone where nothing random is drawn: the compiler then
        # finds the graphs that were measured in its cache.
        self.random = self._reference_run(reference_windows[:1], seed=1, precision=HIGHEST).drew_random_numbers
        reference = self._reference_run(reference_windows, seed=1, precision=HIGHEST)
        if not all(math.isfinite(loss) for loss in reference.losses):
            return self._refused(reference, "the user's own step gives a loss that is not finite in fp32")
        floor = self._floor(reference, reference_windows)
        self.phase("compile")
        candidate_training.model.load_state_dict(self.reference_weights)
        with self._without_dropout(candidate_training.model):
            candidate = _run(candidate_training, candidate_windows, 1)
        return self._verdict(reference, candidate, floor, candidate_windows)

    # --- the same samples for both ---

    def _windows(self, training: Training) -> list[Window]:
        """The first windows that the training's loader gives, read in this process so that no worker's seed matters."""
        plain = rebuilt(training.loader.loader, {"num_workers": 0})
        seed_everything(1)
        source = endless(WindowLoader(counted(plain), training.parts.micro_batches_per_step))
        return [next(source) for _ in range(STEPS)]

    def _reference_windows(self, model: nn.Module, candidate_windows: list[Window]) -> list[Window]:
        pieces = len(candidate_windows[0])
        batch_norm = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
        loader, _ = as_loader(self.functions.data_fn())
        if batch_norm and pieces > 1:
            self.notes.append("BatchNorm sees the micro-batch: both sides were compared at the same one")
        if batch_norm or pieces == 1 or batch_fixed_reason(loader) is not None:
            return candidate_windows
        samples = sum(micro_batch.samples for micro_batch in candidate_windows[0])
        plain = rebuilt(loader, {"num_workers": 0, "batch_size": samples})
        seed_everything(1)
        source = endless(WindowLoader(counted(plain), 1))
        return [next(source) for _ in range(STEPS)]

    # --- runs ---

    def _reference_run(
        self, windows: list[Window], *, seed: int, precision: Precision, rounding: str | None = None
    ) -> Run:
        """The user's program on the windows, eager, from the reference's weights, built anew: it may count its calls."""
        seed_everything(0)
        training = Training(self.functions, TrainingConfig({}), self.as_is)
        if not self.reference_weights:
            self.reference_weights = _copied(training.model.state_dict())
        else:
            training.model.load_state_dict(self.reference_weights)
        if rounding is not None:
            with torch.no_grad():
                for parameter in training.model.parameters():
                    parameter.copy_(round_to(parameter, rounding))
            windows = [
                [MicroBatch(item.samples, map_tensors(item.data, lambda t: round_to(t, rounding))) for item in window]
                for window in windows
            ]
        with precision.applied(), eager(), self._without_dropout(training.model):
            return _run(training, windows, seed)

    def _without_dropout(self, model: nn.Module) -> AbstractContextManager[None]:
        return dropout_off(model) if self.random else nullcontext()

    def _floor(self, reference: Run, windows: list[Window]) -> Comparison:
        """The largest error that is no fault: rounding of weights and inputs, the user's own TF32, own random numbers."""
        runs: list[Run] = []
        first = windows[:1]
        if reference.drew_random_numbers:
            self.notes.append("the model draws random numbers of its own: how two seeds differ is part of the floor")
            runs.append(self._reference_run(first, seed=2, precision=HIGHEST))
        runs += [
            self._reference_run(first, seed=1, precision=HIGHEST, rounding=kind) for kind in sorted(self._roundings())
        ]
        if self.conditions.device == "cuda" and self.users_precision.matters_to(reference.gradients):
            runs.append(self._reference_run(first, seed=1, precision=self.users_precision))
        comparisons = [compare(reference.gradients, run.gradients) for run in runs]
        usable = [item for item in comparisons if math.isfinite(item.relative_error)]
        return max(usable, key=lambda item: item.relative_error, default=NO_DIFFERENCE)

    def _roundings(self) -> set[str]:
        """The types that the candidate rounds to."""
        return {kind for knob in KNOBS if (kind := knob.rounds_to(self.config[knob.name])) is not None}

    # --- the verdict ---

    def _verdict(self, reference: Run, candidate: Run, floor: Comparison, windows: list[Window]) -> ParityResult:
        found = compare(reference.gradients, candidate.gradients)
        units = max((UNIT_ROUNDOFF[kind] for kind in self._roundings()), default=0.0)
        tolerance = max(SMALLEST_TOLERANCE, FLOORS * floor.relative_error, ROUNDINGS * units)
        buffer_error, worst_buffer = _buffer_error(reference.buffers, candidate.buffers)
        reason = self._fault(reference, candidate, found, floor, tolerance)
        if not reason and buffer_error > max(1e-2, tolerance):
            reason = (
                f"buffer {worst_buffer} differs by {buffer_error:.2g} after one step, such as an average updated twice"
            )
        return self._record(
            not reason,
            reason or f"gradients differ by {found.relative_error:.2g}, of {tolerance:.2g} allowed",
            reference,
            candidate,
            found,
            floor,
            tolerance,
            buffer_error,
            worst_buffer,
            windows,
        )

    def _fault(self, reference: Run, candidate: Run, found: Comparison, floor: Comparison, tolerance: float) -> str:
        if candidate.skipped_all:
            return f"every one of {SCALER_TRIES} steps was skipped: the scaled gradients are never finite"
        if found.missing:
            return f"{found.missing[0]} has a gradient in the user's program and none here: a part of the model is left out"
        if not all(math.isfinite(loss) for loss in candidate.losses):
            return f"the loss is {candidate.losses[-1]} here and {reference.losses[-1]:.4g} in the user's program"
        if found.relative_error > tolerance:
            return f"gradients differ by {found.relative_error:.2g}, of {tolerance:.2g} allowed{self._hint(found)}"
        for name, error in found.errors.items():
            own_floor = max(floor.errors.get(name, 0.0), floor.relative_error)
            allowed = min(max(SMALLEST_TENSOR_TOLERANCE, FLOORS * own_floor, tolerance), LARGEST_TENSOR_TOLERANCE)
            if error > allowed:
                return f"the gradient of {name} differs by {error:.2g}, of {allowed:.2g} allowed"
        if reference.moved > 0 and not 0.1 < candidate.moved / reference.moved < 10:
            return (
                f"{STEPS} steps move the parameters by {candidate.moved:.2g} here and by {reference.moved:.2g} in the "
                "user's program"
            )
        return ""

    def _hint(self, found: Comparison) -> str:
        pieces = int(self._pieces)
        if pieces == 1:
            return ""
        if abs(found.cosine) > 0.999:
            return (
                f"; with {pieces} micro-batches a step they point the same way with another length: the loss is a sum, or a "
                "mean over something else than samples. Return (loss_sum, weight) from loss_fn"
            )
        return (
            f"; with {pieces} micro-batches a step: a mean over tokens of ragged batches must return (loss_sum, weight) "
            "from loss_fn; a loss that couples the samples of a batch (contrastive) cannot be split"
        )

    def _refused(self, reference: Run, reason: str) -> ParityResult:
        nothing = Comparison(math.inf, 0.0, None, 0.0)
        return self._record(False, reason, reference, reference, nothing, nothing, 0.0, 0.0, None, [])

    def _record(
        self,
        passed: bool,
        reason: str,
        reference: Run,
        candidate: Run,
        found: Comparison,
        floor: Comparison,
        tolerance: float,
        buffer_error: float,
        worst_buffer: str | None,
        windows: list[Window],
    ) -> ParityResult:
        return ParityResult(
            passed=passed,
            reason=reason,
            relative_error=found.relative_error,
            cosine=found.cosine,
            floor=floor.relative_error,
            tolerance=tolerance,
            worst_parameter=found.worst_parameter,
            worst_parameter_error=found.worst_error,
            missing_gradients=found.missing,
            buffer_error=buffer_error,
            worst_buffer=worst_buffer,
            reference_losses=tuple(reference.losses),
            candidate_losses=tuple(candidate.losses),
            micro_batch_size=windows[0][0].samples if windows else 0,
            micro_batches_per_step=self._pieces,
            notes=tuple(self.notes),
        )

    @property
    def _pieces(self) -> int:
        size = int(self.config[batch_knob().name])
        global_size = self.conditions.global_batch_size
        return 1 if global_size is None or size >= global_size else max(1, global_size // size)


def _run(training: Training, windows: list[Window], seed: int) -> Run:
    seed_everything(seed)
    before = {name: parameter.detach().clone() for name, parameter in training.model.named_parameters()}
    losses: list[float] = []
    gradients: Gradients = {}
    buffers: dict[str, torch.Tensor] = {}
    skipped_all = drew = False
    for index, window in enumerate(windows):
        state = random_state()
        loss = training.accumulate(window)
        drew = drew or (index == 0 and random_state() != state)
        if training.scaler is not None and index == 0:
            loss, skipped_all = _past_overflow(training, window, loss)
        if index == 0:
            gradients = _gradients(training)
            buffers = _copied(dict(training.model.named_buffers()))
        losses.append(float(loss))
        training.update()
    moved = sum(
        float((parameter.detach() - before[name]).float().square().sum())
        for name, parameter in training.model.named_parameters()
    )
    return Run(gradients, buffers, losses, math.sqrt(moved), skipped_all, drew)


def _past_overflow(training: Training, window: Window, loss: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """A loss scale that starts too high skips its first steps and halves; that is the scaler's work, not an error."""
    scaler = training.scaler
    assert scaler is not None
    buffers = _copied(dict(training.model.named_buffers()))
    for _ in range(SCALER_TRIES):
        if all(g is None or bool(torch.isfinite(g).all()) for g in _scaled_gradients(training)):
            return loss, False
        training.update()
        for name, buffer in training.model.named_buffers():
            buffer.copy_(buffers[name])
        loss = training.accumulate(window)
    return loss, True


def _scaled_gradients(training: Training) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in training.model.parameters()]


def _gradients(training: Training) -> Gradients:
    scale = training.scaler.get_scale() if training.scaler is not None else 1.0
    return {
        name: None if parameter.grad is None else parameter.grad.detach().to_dense().float().cpu() / scale
        for name, parameter in training.model.named_parameters()
    }


def _copied(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: tensor.detach().cpu().clone() if isinstance(tensor, torch.Tensor) else tensor
        for name, tensor in state.items()
    }


def _buffer_error(reference: dict[str, torch.Tensor], candidate: dict[str, torch.Tensor]) -> tuple[float, str | None]:
    worst, name_of_worst = 0.0, None
    for name, expected in reference.items():
        got = candidate[name]
        if expected.dtype.is_floating_point:
            error = float((got.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-6))
        else:
            error = float(not torch.equal(got, expected))
        if error > worst:
            worst, name_of_worst = error, name
    return worst, name_of_worst
