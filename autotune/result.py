"""`TuningResult`: what a search returns. Printed, saved, loaded, and built into a `Training`."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from autotune.config import TrainingConfig, value_text
from autotune.errors import UserError
from autotune.knobs.registry import KNOBS
from autotune.knobs.registry import knob as find_knob
from autotune.records import SCHEMA_VERSION, Answer, Conditions, Ratio, Recommendation
from autotune.workload import UserFunctions

if TYPE_CHECKING:
    from autotune.training.training import Training

LARGEST_FILE_BYTES = 32 * 2**20
"""A recommendation is some 20 KiB."""


@dataclass(frozen=True, repr=False)
class TuningResult:
    """A recommendation with what a person does with it."""

    recommendation: Recommendation

    @property
    def config(self) -> TrainingConfig:
        """Every knob with its recommended value, those at the baseline too."""
        return self.best.config

    @property
    def baseline(self) -> Answer:
        """The user's program as it stands, with its evidence."""
        return self.recommendation.baseline

    @property
    def best(self) -> Answer:
        """What is recommended, with its evidence and its price; the baseline itself where `keep` is true."""
        return self.recommendation.best

    @property
    def speedup(self) -> Ratio:
        """How many times faster than the baseline, with its 95 % interval."""
        return self.best.speedup

    @property
    def free_batch(self) -> Answer | None:
        """The second answer, with the batch free; None where there is none."""
        return self.recommendation.free_batch

    @property
    def keep(self) -> bool:
        """True: nothing measured is better than what the user has."""
        return self.recommendation.keep

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the recommendation as JSON, under a temporary name that is then renamed.

        Whoever reads `path` meanwhile sees the old file or the new one. Raises OSError where that cannot be written.
        """
        target = Path(path)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self.recommendation.model_dump_json(indent=2) + "\n")
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise

    def build(
        self,
        model_fn: Callable[[], Any],
        data_fn: Callable[[], Any],
        *,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        optimizer_fn: Callable[[Any], Any] | None = None,
        scheduler_fn: Callable[[Any], Any] | None = None,
        config: TrainingConfig | None = None,
    ) -> Training:
        """Model, optimizer, loader and step, set up by the code that was measured.

        `config` is the recommended one unless given; `result.free_batch.config` is the other that was confirmed.
        Raises ValueError where a function that was measured is left out, where the device is missing, and where an
        environment variable must be set before torch is imported (the text has the line to export).
        """
        chosen = self.config if config is None else config
        functions = UserFunctions(model_fn, data_fn, loss_fn, optimizer_fn, scheduler_fn)
        self._refuse_missing_functions(functions)
        _refuse_missing_environment(chosen)
        import torch

        from autotune.training.training import Training

        conditions = self.recommendation.settings.conditions
        if conditions.device == "cuda" and not torch.cuda.is_available():
            raise UserError("the result was measured on a GPU (device cuda), and torch finds none here")
        return Training(functions, chosen, conditions, blocks=self.recommendation.workload.blocks)

    def _refuse_missing_functions(self, functions: UserFunctions) -> None:
        """Training without the user's own loss or optimizer would be another training than the measured one."""
        for role in self.recommendation.reference.names:
            if getattr(functions, role) is None:
                raise UserError(f"the search ran with {role}; give it to build too: build(..., {role}={role})")

    def __repr__(self) -> str:
        """The answer alone, as at the end of a notebook's cell; `print` tells the rest."""
        return f"<TuningResult: {self.recommendation.verdict}>"

    def __str__(self) -> str:
        from autotune.report.text import describe

        return describe(self.recommendation)


def _refuse_missing_environment(config: TrainingConfig) -> None:
    needed: dict[str, str] = {}
    for knob in KNOBS:
        needed.update(knob.environment(config[knob.name]))
    lines = [f"export {name}={value}" for name, value in needed.items() if os.environ.get(name) != value]
    if lines:
        raise UserError(
            "this configuration was measured with environment variables that must be set before torch is imported; "
            "start Python after\n    " + "\n    ".join(lines)
        )


def load(path: str | os.PathLike[str]) -> TuningResult:
    """What `save` wrote, or the `best.json` of a study. Reads data only: nothing in the file is ever run.

    Raises ValueError for no such file, for what is no JSON, for another record, for another schema version, and for
    values that no search can have found.
    """
    content = _read_json(Path(path))
    if not isinstance(content, dict) or not {"schema_version", "verdict", "best"} <= content.keys():
        raise UserError(f"{path} is not a recommendation; give the best.json of a study, or what save() wrote")
    version = content["schema_version"]
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{path} has schema version {str(version)[:20]}, and this autotune reads version {SCHEMA_VERSION}; use autotune "
            f"{str(content.get('autotune_version', 'of that version'))[:20]}, which wrote it, or search again"
        )
    try:
        recommendation = Recommendation.model_validate_json(json.dumps(content))
        for answer in (recommendation.baseline, recommendation.best, recommendation.free_batch):
            if answer is not None:
                _refuse_unknown_values(answer.config)
                _refuse_impossible_numbers(answer)
        _refuse_impossible_conditions(recommendation.settings.conditions)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the record"
        raise UserError(f"{path} is not a whole recommendation: {place}: {first['msg']}") from None
    except ValueError as error:
        raise UserError(f"{path} is not a whole recommendation: {error}") from None
    return TuningResult(recommendation)


def _read_json(path: Path) -> Any:
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is no file; give the best.json of a study, or what save() wrote")
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise UserError(f"{path} is not a recommendation: it is larger than {LARGEST_FILE_BYTES // 2**20} MiB")
        content = json.loads(path.read_bytes())
        json.dumps(content, allow_nan=False)  # Python reads NaN and Infinity, which JSON does not have
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}; give the best.json of a study, or what save() wrote") from None
    return content


def _refuse_impossible_numbers(answer: Answer) -> None:
    """An answer that was measured has rates above 0 within their intervals, counts from 1 and bytes from 0."""
    for what, value, (low, high) in (
        ("samples_per_second", answer.samples_per_second, answer.interval),
        ("speedup", answer.speedup.value, answer.speedup.interval),
    ):
        if not 0 <= low <= value <= high or value == 0:
            raise ValueError(f"{what} is {value:g} with the interval {low:g} to {high:g}")
    counts = (answer.effective_batch_size, answer.micro_batch_size, answer.micro_batches_per_step)
    if min(counts) < 1 or answer.confirmed_rounds < 0 or answer.peak_allocated_bytes < 0:
        raise ValueError("a batch, a number of rounds or a number of bytes is negative")


def _refuse_impossible_conditions(conditions: Conditions) -> None:
    """What a search would not have been given, and `build` does not check again."""
    for what in ("global_batch_size", "clip_grad_norm", "memory_limit_bytes"):
        number = getattr(conditions, what)
        if number is not None and not number > 0:
            raise ValueError(f"{what} must be above 0, not {number}")


def _refuse_unknown_values(config: TrainingConfig) -> None:
    """A configuration that was read has a value for every knob, and one that the knob knows."""
    for name in config:
        find_knob(name)
    for knob in KNOBS:
        if knob.name not in config:
            raise ValueError(f"a configuration has no {knob.name}")
        value = config[knob.name]
        if knob.parse(value_text(value)) != value:
            raise ValueError(f"{knob.name} has no value {value!r}")
