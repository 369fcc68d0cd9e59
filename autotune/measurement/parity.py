"""Does it train the same? A configuration's gradients, losses, buffers and updates held against the user's in fp32."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch

from autotune.config import TrainingConfig, settings_text
from autotune.knobs.registry import batch_knob
from autotune.measurement.determinism import (
    HIGHEST,
    Precision,
    batch_norms_evaluated,
    dropout_off,
    follows_the_batch,
    is_batch_norm,
)
from autotune.measurement.floors import LARGEST_REPEAT, MOST_DEPTH, Floors
from autotune.measurement.gradients import first_not_finite
from autotune.measurement.measure import PhaseReport
from autotune.measurement.other_batches import OtherBatches
from autotune.measurement.reference import Reference
from autotune.measurement.runs import (
    Difference,
    ParameterChange,
    Place,
    Run,
    Step,
    advance,
    difference,
    differences,
    drifts,
    frozen_samples,
    optimizer_settings,
    parameter_changes,
    restore,
    run_steps,
)
from autotune.measurement.samples import windows_for_both
from autotune.measurement.seeds import SEEDS, run_seeds
from autotune.measurement.verdict import (
    Allowance,
    allowance,
    drift_fault,
    fault,
    update_fault,
    widened,
    wider,
)
from autotune.records import Conditions, ParityResult, TrialRequest
from autotune.surgery.generators import seed_everything
from autotune.surgery.out_of_memory import is_out_of_memory
from autotune.training.training import Training
from autotune.training.windows import Window
from autotune.workload import UserFunctions

STEPS = 3
"""Windows that are compared. CUDA graphs run the first as it is, record the second and replay the third."""
LARGEST_KEPT_SHARE = 1 / 8
"""Of the device's memory, for what the reference leaves behind."""


def check_parity(functions: UserFunctions, request: TrialRequest, phase: PhaseReport) -> ParityResult:
    """The configuration of the request against the user's program: same weights, same samples, its own accumulation.

    Gradients, losses and buffers are compared over some windows, each at the reference's weights: after each window the
    candidate's optimizer is given the reference's gradients. So rounding has no steps to grow over, and its updates can
    be held to where the reference's lead, and to a ten-thousandth of that.

    The reference takes the samples of a step in one piece, as the user does. A model with BatchNorm, which sees the
    micro-batch, with InstanceNorm whose running statistics each micro-batch moves, or with random numbers of its own, which
    are drawn by the micro-batch, is compared in two parts: at the candidate's micro-batches, and, with BatchNorm in
    evaluation, the accumulation alone. Where a step is split, the reference is also held against itself in smaller parts
    than the candidate's. Where the reference does not fit, both are made smaller. Where the user's program fits at no
    batch, the reference takes the values with which it does (`request.reference`), and memory holds one of the two at a
    time.

    Where rounding alone turns the gradient of a network with BatchNorm around, gradients are compared with BatchNorm in
    evaluation (`Floors.with_norms_evaluated`).

    Dropout is off. Other random numbers are drawn from the same seed, and only a candidate that cannot but draw others
    (it is compiled, or draws in another type) is compared by means over several seeds, and allowed what those spread.
    """
    config, conditions = request.config, request.conditions
    notes = own_notes = _reference_notes(request.reference)
    thrifty = bool(request.reference)
    while True:
        try:
            return _Check(functions, request, config, conditions, phase, notes, thrifty).result()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            # The first way is quick and holds more on the device; what fits there is not to depend on it.
            if thrifty:
                smaller = _smaller(config, conditions)
                if smaller is None:
                    raise
                config, conditions = smaller
                size = config[batch_knob().name]
                told = f"compared at micro-batch {size}: the fp32 reference does not fit at the full size"
                notes = (*own_notes, told)
            thrifty = True
        _release(conditions)


def _reference_notes(reference: TrainingConfig) -> tuple[str, ...]:
    if not reference:
        return ()
    return (f"your step was run with {settings_text(reference)}, without which it fits at no batch",)


def _release(conditions: Conditions) -> None:
    """Gives back the memory of what is no longer referred to, models that hold themselves included."""
    gc.collect()
    if conditions.device == "cuda":
        torch.cuda.empty_cache()


def _smaller(config: TrainingConfig, conditions: Conditions) -> tuple[TrainingConfig, Conditions] | None:
    name = batch_knob().name
    size, global_size = int(config[name]), conditions.global_batch_size
    pieces = 1 if global_size is None else max(1, global_size // size)
    if size == 1 and pieces == 1:
        return None
    # The reference takes all micro-batches in one piece, so fewer of them are less memory too.
    size, pieces = (size // 2, pieces) if size > 1 else (size, pieces // 2)
    smaller = None if global_size is None else size * pieces
    return config.replace({name: size}), conditions.model_copy(update={"global_batch_size": smaller})


class _Check:
    """One comparison: windows, reference, candidate, floor, verdict."""

    def __init__(
        self,
        functions: UserFunctions,
        request: TrialRequest,
        config: TrainingConfig,
        conditions: Conditions,
        phase: PhaseReport,
        notes: tuple[str, ...],
        thrifty: bool,
    ) -> None:
        self.functions, self.request, self.config, self.conditions = functions, request, config, conditions
        self.phase, self.notes, self.thrifty = phase, list(notes), thrifty

    def result(self) -> ParityResult:
        self.phase("build")
        seed_everything(0)
        users_precision = Precision.now()
        self.training = self._built()
        self.place = self._place()
        loader = self.training.loader.loader
        # Who is given windows needs no data of its own: a data_fn may read for minutes.
        self.functions = replace(self.functions, data_fn=lambda: loader)
        self.reference = Reference(
            self.functions, self.conditions, self.place, self.request.reference, self.request.blocks
        )
        self.floors = Floors(self.reference, self.config, self.conditions, users_precision, self.notes)
        windows, whole, own_batches, self.collate_keeps_count, finer = windows_for_both(self.training, STEPS)
        self.phase("parity")
        norms = [module for module in self.training.model.modules() if follows_the_batch(module)]
        self.norms_follow = bool(norms)
        self.expects_compiled_graphs = self.training.parts.expects_compiled_graphs
        if self.request.reference:
            self._let_candidate_go()
        taken = windows if whole is None or self.norms_follow else whole
        expected = self.reference.run(taken)
        draws = bool(expected.drew)
        if draws and taken is not windows:
            taken = windows
            expected = self.reference.run(taken)
        if reason := _own_fault(expected.steps):
            return self._record(reason, [_to_itself(step) for step in expected.steps], {}, allowance(), windows)
        other_batches = OtherBatches(self.reference, self.norms_follow, self.phase, self.notes)
        splits_apart = whole is not None and (draws or self.norms_follow)
        if whole is not None or own_batches is not None or self.floors.roundings:
            self.reference.reuse_if_stateless(expected, taken)
        if whole is not None and splits_apart:
            if self.norms_follow:
                followed = "BatchNorm sees" if any(map(is_batch_norm, norms)) else "InstanceNorm's statistics follow"
                self.notes.append(f"{followed} the micro-batch: both sides were compared at the same one")
            reason, found, allowed = other_batches.accumulation_fault(whole, windows, expected, draws)
            if reason:
                return self._record(reason, [found], {}, allowed, windows)
        if own_batches is not None and not draws:  # layers that are dropped at random are left out by chance
            reason = other_batches.larger_batch_fault(expected, windows, own_batches)
            if reason:
                return self._record(reason, [_to_itself(step) for step in expected.steps], {}, allowance(), windows)

        def finer_fault_of(number: int) -> str:
            if whole is None or finer is None:
                return ""
            first = expected.steps[0] if taken is whole else other_batches.whole_step
            return other_batches.finer_cut_fault(whole[number], finer[number], None if number else first, draws)

        finer_fault = finer_fault_of(0)
        other_batches.forget()
        return self._compared(expected, taken, windows, finer_fault, finer_fault_of)

    def _built(self) -> Training:
        return Training(self.functions, self.config, self.conditions, blocks=self.request.blocks)

    def _place(self) -> Place:
        """Where the reference's steps are kept: on the device, where they take up little of it."""
        if self.thrifty:
            return torch.device("cpu")
        if self.conditions.device != "cuda":
            return None
        # Of each window the gradients and the state before it; the parameters before the updates and after them.
        kept_bytes = (2 * STEPS + 2) * sum(p.numel() * p.element_size() for p in self.training.model.parameters())
        limit_bytes = self.conditions.memory_limit_bytes or torch.cuda.mem_get_info()[1]
        return None if kept_bytes <= limit_bytes * LARGEST_KEPT_SHARE else torch.device("cpu")

    # --- the verdict ---

    def _compared(
        self,
        expected: Run,
        taken: list[Window],
        windows: list[Window],
        finer_fault: str,
        finer_fault_of: Callable[[int], str],
    ) -> ParityResult:
        """`taken`: the windows as the reference took them. Floors come from the same, or splitting would count as one.
        `finer_fault`: what is wrong with the split itself where it shows in smaller micro-batches of the first window
        alone; `finer_fault_of` tells it of another, and is asked of one whose gradient is off by more than most may be."""
        draws_others = self._draws_others(expected)
        # More floors allow more and never less: they are measured where a candidate is in doubt without them. Where
        # memory is short, or the candidate is run again, that is before the candidate takes up its memory.
        at_once = self.thrifty or draws_others
        allowed = self.floors.allowance(expected.steps, taken, [0], depth=MOST_DEPTH if at_once else 0)
        steps, updates_fault, changes = self._candidate(expected, windows)
        pieces = len(windows[0])
        if draws_others and fault(steps, allowed, pieces):
            steps, allowed = self._by_means(steps, allowed, windows[0])
        del self.training
        # Where random numbers differ, gradients do, with BatchNorm in evaluation as well.
        may_evaluate = self.norms_follow and not draws_others
        if not at_once:
            allowed = self._as_much_as_it_takes(steps, allowed, expected, taken, pieces)
        if not (allowed.is_blind and may_evaluate) and fault(steps, allowed, pieces):
            self._turn_to_the_reference()
            allowed = self.floors.with_repeat(allowed, expected.steps, taken)
        norms_evaluated = allowed.is_blind and may_evaluate
        if norms_evaluated:
            self._turn_to_the_reference()
            evaluated = partial(self._with_norms_evaluated, windows[:1])
            steps, allowed = self.floors.with_norms_evaluated(expected.steps, steps, allowed, taken, evaluated)
        reason = fault(steps, allowed, pieces)
        if reason and updates_fault and not fault(steps[:1], allowed, pieces):
            reason = updates_fault  # it shows in the gradients that follow it, so it is told before these
        elif reason and not norms_evaluated:
            # How far rounding moves a small tensor is chance: what is rejected was held to more than one throw of the dice.
            allowed = self._with_floors(allowed, expected, taken, range(len(taken)), MOST_DEPTH)
            reason = fault(steps, allowed, pieces)
        if reason and self.floors.unlike_itself > LARGEST_REPEAT:
            reason = (
                f"nothing can be told: the user's own program, run twice from the same weights on the same samples, gives "
                f"gradients that differ by {self.floors.unlike_itself:.2g}, so something that they depend on is in no "
                f"state_dict(), such as numbers that model_fn draws anew ({reason})"
            )
        reason = reason or updates_fault or finer_fault
        if not reason and not expected.drew:
            is_off = [step.gradients.relative_error > allowed.tolerance for step in steps]
            later = [number for number, off in enumerate(is_off) if off and number]  # the first was held to it before
            if later:
                self._turn_to_the_reference()
            reason = next(filter(None, map(finer_fault_of, later)), "")
        return self._record(reason, steps, changes, allowed, windows)

    def _as_much_as_it_takes(
        self, steps: list[Difference], allowed: Allowance, expected: Run, taken: list[Window], pieces: int
    ) -> Allowance:
        """More floors while the steps are in doubt: of the step first that is furthest off, for the gradient of a later one
        may be a smaller one, which the same rounding moves further; and the quick ones first."""
        by_error = sorted(range(len(steps)), key=lambda number: steps[number].gradients.relative_error, reverse=True)
        for depth, number in itertools.product(range(MOST_DEPTH + 1), by_error):
            is_enough = not (fault(steps, allowed, pieces) if depth else _is_in_doubt(steps, allowed, pieces))
            if is_enough or allowed.is_blind:
                break
            allowed = self._with_floors(allowed, expected, taken, [number], depth)
        return allowed

    def _with_floors(
        self, allowed: Allowance, expected: Run, taken: list[Window], numbers: Sequence[int], depth: int
    ) -> Allowance:
        self._turn_to_the_reference()
        return wider(allowed, self.floors.allowance(expected.steps, taken, numbers, depth=depth))

    def _turn_to_the_reference(self) -> None:
        """It gets a time limit of its own, and the memory of the candidate that ran before."""
        _release(self.conditions)
        self.phase("parity")

    def _let_candidate_go(self) -> None:
        """There is no room for it beside the reference. It is built again for its own run."""
        del self.training
        self._turn_to_the_reference()

    def _let_reference_go(self) -> None:
        """The candidate gets its memory."""
        self.reference.let_go()
        if self.conditions.device == "cuda" or self.request.reference:
            _release(self.conditions)

    def _candidate(
        self, expected: Run, windows: list[Window]
    ) -> tuple[list[Difference], str, dict[str, ParameterChange]]:
        """How far each of the candidate's steps is off, what is wrong with its updates, and what these did."""
        self._let_reference_go()
        if self.request.reference:
            self.training = self._built_again()
        self.phase("compile")
        training = self.training
        restore(training, self.reference.weights)
        frozen = frozen_samples(training)
        with self._without_dropout(training):
            steps = differences(expected.steps, run_steps(training, windows, 1, expected.steps))
            advance(training, expected.steps[-1], 1, len(windows))
        changes = parameter_changes(expected, training)
        exact = Precision.now().matmul == HIGHEST.matmul
        settings = optimizer_settings(training)
        reason = update_fault(changes, expected.settings, settings, len(windows), exact)
        if not reason and not any(step.skipped for step in steps):  # a skipped step is run again
            reason = drift_fault(expected.drifts, drifts(frozen, training), len(windows), len(windows[0]))
        return steps, reason, changes

    def _with_norms_evaluated(self, windows: list[Window], expected: Step) -> Difference:
        """How far the candidate's first step is off with BatchNorm in evaluation."""
        self._let_reference_go()
        training = self._built_again()
        self.phase("compile")
        restore(training, self.reference.weights)
        with self._without_dropout(training), batch_norms_evaluated(training.model):
            (found,) = differences([expected], run_steps(training, windows, 1))
        del training
        self._turn_to_the_reference()
        return found

    def _built_again(self) -> Training:
        self.phase("build")
        seed_everything(0)
        return self._built()

    def _without_dropout(self, training: Training) -> AbstractContextManager[None]:
        # Only where there is dropout, for turning it off changes what is traced: elsewhere the compiler finds the graphs
        # that were measured in its cache.
        return dropout_off(training.model) if self.reference.has_dropout else nullcontext()

    def _by_means(
        self, steps: list[Difference], allowed: Allowance, window: Window
    ) -> tuple[list[Difference], Allowance]:
        """The first step by its means over several seeds; of the others, whether their losses are finite."""
        self.notes.append(f"it draws random numbers of its own: means over {SEEDS} seeds were compared")
        if self.request.reference:
            self._let_candidate_go()
        self.phase("parity")
        expected = self.reference.means(window)
        if self.request.reference:
            self._let_reference_go()
            self.training = self._built_again()
        self.phase("compile")
        with self._without_dropout(self.training):
            means = run_seeds(self.training, self.reference.weights, window, self.place)
        first = difference(expected.step(), means.step())
        finite = all(math.isfinite(step.loss) for step in steps)
        return [first] if finite else [first, *steps[1:]], widened(allowed, expected)

    def _draws_others(self, expected: Run) -> bool:
        """Whether the candidate could not but draw other random numbers from the same seed."""
        if not expected.drew:
            return False
        # A compiler has a generator of its own; a CPU's generator gives other numbers in another type. Recomputation is
        # no excuse: it must draw what the forward drew.
        other_type = self.conditions.device == "cpu" and bool(self.floors.own_roundings) and "torch" in expected.drew
        return self.expects_compiled_graphs or other_type

    def _record(
        self,
        reason: str,
        steps: list[Difference],
        changes: dict[str, ParameterChange],
        allowed: Allowance,
        windows: list[Window],
    ) -> ParityResult:
        """The record tells of the step that is furthest off; where that one may be (see `LARGEST_IN_ONE_STEP`), it is
        noted, and the record tells of the next."""
        by_error = sorted((step.gradients for step in steps), key=lambda one: one.relative_error)
        found = by_error[-1]
        if not reason and found.relative_error > allowed.tolerance:
            self.notes.append(
                f"in one of {len(steps)} steps gradients differ by {found.relative_error:.2g}, which rounding can do to one "
                "step: most of the steps decide"
            )
            found = by_error[-2]
        if reason and self.collate_keeps_count:
            reason = (
                "the collate function gives another batch of the same samples at every call, by a count or a generator of "
                "its own, and so others where a step is split: let it draw from torch's, NumPy's or Python's global "
                f"generator ({reason})"
            )
        buffers = {name: max(step.buffers[name] for step in steps) for name in steps[0].buffers}
        worst_buffer = max(buffers, key=lambda name: buffers[name], default=None)
        updates = {name: change.off / change.moved for name, change in changes.items() if change.moved}
        worst_update = max(updates, key=lambda name: updates[name], default=None)
        return ParityResult(
            passed=not reason,
            reason=reason or f"gradients differ by {found.relative_error:.2g}, of {allowed.tolerance:.2g} allowed",
            relative_error=found.relative_error,
            cosine=found.cosine,
            floor=allowed.relative_error,
            tolerance=allowed.tolerance,
            worst_parameter=found.worst_parameter,
            worst_parameter_error=found.worst_error,
            worst_parameter_tolerance=allowed.of_gradient(found.worst_parameter) if found.worst_parameter else None,
            missing_gradients=found.missing,
            buffer_error=buffers[worst_buffer] if worst_buffer else 0.0,
            worst_buffer=worst_buffer if worst_buffer and buffers[worst_buffer] else None,
            update_error=updates[worst_update] if worst_update else 0.0,
            worst_update=worst_update if worst_update and updates[worst_update] else None,
            reference_losses=tuple(step.expected_loss for step in steps),
            candidate_losses=tuple(step.loss for step in steps),
            loss_tolerance=allowed.of_loss(step.expected_loss for step in steps),
            skipped_steps=max(step.skipped for step in steps),
            micro_batch_size=windows[0][0].samples,
            micro_batches_per_step=len(windows[0]),
            notes=tuple(self.notes),
        )


def _is_in_doubt(steps: list[Difference], allowed: Allowance, pieces: int) -> bool:
    """Whether more to be allowed would change anything that is told of the steps."""
    over = any(step.gradients.relative_error > allowed.tolerance for step in steps)
    return over or bool(fault(steps, allowed, pieces))


def _own_fault(steps: list[Step]) -> str:
    """What is not finite in the user's own program; empty where all is."""
    for step in steps:
        if not math.isfinite(step.loss):
            return "the user's own step gives a loss that is not finite in fp32"
        if (name := first_not_finite(step.gradients)) is not None:
            return f"the user's own step gives a gradient of {name} that is not finite in fp32"
    return ""


def _to_itself(step: Step) -> Difference:
    return difference(step, step)
