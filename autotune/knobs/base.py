"""What a knob is: one class that declares its values and applies the one chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

from autotune.config import TrainingConfig, Value
from autotune.records import Bottleneck, SearchFacts

if TYPE_CHECKING:
    import torch
    from torch import nn

Effect = Literal["exact", "rounding", "training"]
KnobStage = Literal["process", "batch", "compute", "loader"]
MemoryEffect = Literal["none", "constant", "slope", "class"]

AS_IS = "as_is"
"""The value that leaves the user's program as it stands."""
LONGEST_COMPILE_SECONDS = 300.0
"""Where a model takes longer to compile, no search of minutes can wait for it."""


@dataclass
class CompileTarget:
    """A callable attribute that can be replaced by its compiled form."""

    owner: Any
    attribute: str


@dataclass
class TrainingParts:
    """What `Training` builds, stage by stage. Hooks read it and change it in place."""

    config: TrainingConfig
    device: torch.device
    global_batch_size: int | None
    model: nn.Module
    compute_loss: Callable[[nn.Module, Any], Any]
    """(model, batch) -> (loss, weight or None), the loss convention of the user already understood."""
    optimizer: torch.optim.Optimizer | None = None
    blocks: tuple[str, ...] = ()
    """Module names of the repeated blocks."""
    compile_targets: list[CompileTarget] = field(default_factory=list)
    """What `compile_mode` compiles; empty means the model's forward."""
    expects_compiled_graphs: bool = False
    """Something is to be compiled: a first step that compiled nothing is an error, not a speed-up."""
    scaler: torch.amp.GradScaler | None = None
    non_blocking: bool = False
    """Copies to the device do not wait."""
    micro_batches_per_step: int = 1


@dataclass(frozen=True)
class CodeLines:
    """Plain PyTorch that does what a knob's value does, by the place in a script where it belongs.

    In scope are `device`; from `model` on, `model`; from `optimizer` on, `optimizer`; in `wrap`, also
    `compute_loss`, a function of (model, batch).
    """

    imports: tuple[str, ...] = ()
    process: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()
    wrap: tuple[str, ...] = ()
    loader_arguments: Mapping[str, str] = field(default_factory=dict)
    """DataLoader keyword to the source of its value."""
    micro_step: tuple[str, ...] = ()
    """Before the forward of each micro-batch."""
    context: str | None = None
    """Expression of a context manager around the forward and the loss."""
    scaler: str | None = None
    """Expression that makes a gradient scaler."""
    non_blocking: bool = False
    micro_batches_per_step: str | None = None


class Knob(ABC):
    """One thing about a training step that can be set without touching the user's code.

    The first half declares: pure, no torch, usable in the orchestrator. The second half applies, in the trial process
    and in `build`; every hook does nothing unless a knob overrides it. Hooks that act in the step are asked once, while
    the training is built, and return the function to call, or None.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line of help."""
    effect: ClassVar[Effect]
    """`exact`: the same up to the order of additions. `rounding`: parity decides. `training`: changes what is trained."""
    stage: ClassVar[KnobStage]
    """When the search moves it."""
    memory: ClassVar[MemoryEffect]
    """How it changes the peak: not, by a constant, by the slope over the batch, or so much that each value needs a
    ceiling of its own."""
    cures: ClassVar[frozenset[Bottleneck]]
    in_update_only: ClassVar[bool] = False
    """Whether it acts in the optimizer's update alone, so that it can gain no more than the update's share of a step."""
    adds_up: ClassVar[bool] = False
    """Whether its values count things of which each adds its own pace, so that one predicts how many are needed."""

    # --- declare ---

    @abstractmethod
    def baseline(self, facts: SearchFacts) -> Value:
        """The value that leaves the user's program alone."""

    @abstractmethod
    def choices(self, facts: SearchFacts) -> tuple[Value, ...]:
        """Values worth trying here, distinct, baseline included; the same for the whole study."""

    def refused(self, facts: SearchFacts) -> Mapping[Value | None, str]:
        """What is not among the choices here, each with its reason in one sentence; None: all but the baseline."""
        return {}

    def prior(self, facts: SearchFacts) -> tuple[Value, ...]:
        """The choices, those expected to be best first."""
        return self.choices(facts)

    def best_against(self, cause: Bottleneck, facts: SearchFacts) -> tuple[Value, ...]:
        """The choices that come before the order of `prior` where this holds the step back, best first."""
        return ()

    @final
    def expected_to_beat(
        self, own: Value, facts: SearchFacts, *, at_first: Bottleneck | None, now: Bottleneck | None
    ) -> tuple[Value, ...]:
        """The choices before `own`, best first: those against what holds the step back `now`, then those of `prior`. What
        was best against that which held the user's step back `at_first` is still judged by it, for it has cured it."""
        cured = at_first is not None and own in self.best_against(at_first, facts)
        cause = at_first if cured else now
        against = () if cause is None else self.best_against(cause, facts)
        order = tuple(dict.fromkeys([*against, *self.prior(facts)]))
        return order[: order.index(own)] if own in order else order

    def companions(self, value: Value, facts: SearchFacts) -> Mapping[str, Value]:
        """Values of other knobs beside which this one is expected to be best: tried with them first, and alone only
        where it does not run with them."""
        return {}

    def saving(self, facts: SearchFacts) -> tuple[Value, ...]:
        """Values that need less memory than the baseline, of those with `memory` among the `cures`: what a program that
        does not fit is tried with. The lightest change first, the one that saves most last."""
        return ()

    @property
    def only_saves_memory(self) -> bool:
        """Whether less memory is all that can be had of it."""
        return self.cures == {"memory"}

    @abstractmethod
    def rank(self, value: Value, facts: SearchFacts) -> float:
        """How simple a value is: lower is simpler, the baseline is 0. Decides ties."""

    def conflict(self, value: Value, others: Mapping[str, Value], facts: SearchFacts) -> str | None:
        """Why this value cannot be used beside these values of the other knobs, in one sentence; None where it can.

        `others` may hold a value of this knob as well, which says nothing.
        """
        return None

    @abstractmethod
    def parse(self, text: str) -> Value:
        """The value that a command line names. Raises ValueError with one sentence for what is no value of it."""

    @abstractmethod
    def export(self, value: Value, config: TrainingConfig, facts: SearchFacts) -> CodeLines:
        """The lines of plain PyTorch that do the same; none at the baseline."""

    def credit(self, value: Value, facts: SearchFacts) -> float:
        """What a rate that was seen with this value counts for beside others, at most 1: less where a gain is likely to
        be chance, or not to last."""
        return 1.0

    def first_step_limit_seconds(self, value: Value) -> float | None:
        """How long the first step may take at most, where something is compiled or tuned in it; None where nothing is."""
        return None

    def compiles_in_evaluation(self, value: Value, config: TrainingConfig) -> bool:
        """Whether an evaluation without gradients, which computes the user's own loss, goes through what is compiled: that
        is another graph than the step's."""
        return False

    def rounds_to(self, value: Value) -> Literal["bfloat16", "float16", "tf32"] | None:
        """The type that this value rounds to, for the parity check's floor; None where it rounds nothing."""
        return None

    # --- apply ---

    def environment(self, value: Value) -> Mapping[str, str]:
        """Variables that must stand before torch is imported."""
        return {}

    def configure_process(self, value: Value, device: torch.device) -> None:
        """Global settings of torch, before the model is made."""

    def loader_kwargs(self, value: Value, parts: TrainingParts) -> Mapping[str, Any]:
        """Arguments of the rebuilt DataLoader that differ from the user's."""
        return {}

    def transform_model(self, value: Value, parts: TrainingParts) -> None:
        """The model lies on its device; the optimizer is not made yet."""

    def set_optimizer(self, value: Value, parts: TrainingParts) -> None:
        """The optimizer exists and has not stepped."""

    def wrap_model(self, value: Value, parts: TrainingParts) -> None:
        """The optimizer holds the parameters: replace forwards, never modules, so that names stay."""

    def transform_batch(self, value: Value, parts: TrainingParts) -> Callable[[Any], Any] | None:
        """A function of each batch that lies on the device."""
        return None

    def step_context(self, value: Value, parts: TrainingParts) -> Callable[[], AbstractContextManager[Any]] | None:
        """A maker of contexts for the forward and the loss of each micro-batch."""
        return None

    def backward(self, value: Value, parts: TrainingParts) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """A function of the loss that gives what is propagated."""
        return None


def parse_choice(knob_name: str, text: str, values: tuple[str, ...]) -> str:
    """`text` if it is one of `values`; ValueError that lists them otherwise."""
    if text not in values:
        raise ValueError(f"{knob_name} has no value {text!r}; known are {', '.join(values)}")
    return text


def parse_count(knob_name: str, text: str, minimum: int, maximum: int) -> int:
    """A whole number from `minimum` to `maximum`; ValueError otherwise."""
    try:
        count = int(text)
    except ValueError:
        raise ValueError(f"{knob_name} takes a whole number, not {text[:40]!r}") from None
    if count < minimum:
        raise ValueError(f"{knob_name} must be at least {minimum}, not {count}")
    if count > maximum:
        raise ValueError(f"{knob_name} must be at most {maximum:,}, not {count:,}")
    return count
