"""One finder of batch sizes, or the checks of a size that was found; `batch_finders.py` runs it, and says what is promised.

    python benchmarks/batch_finder_child.py WHAT TARGET --memory-limit BYTES --report FILE

Every line of FILE is written at once, so that what was tried is known however this process ends: `tried` before a size
runs, `ran` after it, `found` in the end; of a check its `outcome`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch._dynamo  # what the first optimizer imports: a fork has it then
from torch.utils.data import DataLoader, RandomSampler

from autotune.machine import read_machine_facts
from autotune.options import SearchOptions
from autotune.processes.child import limit_memory
from autotune.processes.failures import classify
from autotune.records import Conditions
from autotune.scratch import scratch
from autotune.search.memory import find_ceiling
from autotune.search.study import stored_records
from autotune.search.watcher import QuietWatcher
from autotune.sessions import LARGEST_BATCH, open_session
from autotune.surgery.batches import to_device
from autotune.training.losses import loss_function
from autotune.workload import UserFunctions, load_functions, workload_from_target

STEPS = 3
"""Of a size that is tried, by every finder: the default of Lightning, and what a probe of autotune runs. Checks too."""
ACCELERATE_START = 128
"""The default of `find_executable_batch_size`."""


def main() -> int:
    """Runs what is asked for; an error of a finder is its own, and ends this process with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*FINDERS, "check"])
    parser.add_argument("target")
    parser.add_argument("--memory-limit", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--checks", type=int)
    arguments = parser.parse_args()
    report = Report(arguments.report)
    limits = Limits("cuda" if read_machine_facts().gpus else "cpu", arguments.memory_limit)
    if arguments.what == "check":
        check(arguments.target, limits, arguments.batch_size, arguments.checks, report)
    else:
        FINDERS[arguments.what](arguments.target, limits, report)
    return 0


@dataclass(frozen=True)
class Report:
    """A file of JSON lines."""

    path: Path

    def add(self, **entry: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


@dataclass(frozen=True)
class Limits:
    """The device, and how much of it may be used."""

    device: Literal["cuda", "cpu"]
    memory_bytes: int

    def impose(self) -> None:
        """As a trial of autotune is limited: to be called when everything is imported and nothing is built."""
        limit_memory(Conditions(device=self.device, global_batch_size=None, memory_limit_bytes=self.memory_bytes))


# --- the program, in plain PyTorch --------------------------------------------------------------------------------------


def loader_of(data: Any, batch_size: int) -> DataLoader[Any]:
    """The program's own loader, or one over its data set, with this batch size; the data set is made once."""
    if not isinstance(data, DataLoader):
        return DataLoader(data, batch_size=batch_size, shuffle=True)
    return DataLoader(
        data.dataset,
        batch_size=batch_size,
        shuffle=isinstance(data.sampler, RandomSampler),
        num_workers=data.num_workers,
        pin_memory=data.pin_memory,
        collate_fn=data.collate_fn,
        drop_last=data.drop_last,
    )


def optimizer_of(functions: UserFunctions, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The program's own, or AdamW."""
    if functions.optimizer_fn is not None:
        return functions.optimizer_fn(model)
    return torch.optim.AdamW(model.parameters())


def mean_loss(functions: UserFunctions, model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """A scalar to propagate."""
    loss, weight = loss_function(functions.loss_fn)(model, batch)
    return loss if weight is None else loss / weight


def batches(loader: Any, count: int) -> Iterator[Any]:
    """So many, over as many passes as they take."""
    return itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), count)


# --- the finders --------------------------------------------------------------------------------------------------------


def find_with_autotune(target: str, limits: Limits, report: Report) -> None:
    """The ceiling of the program as it is. What it tries runs in processes of its own, which it limits itself.

    The first step of the program, with its own batch, is no probe of a size; its seconds count.
    """
    options = SearchOptions(free_batch=True, memory_limit_bytes=limits.memory_bytes, budget_seconds=600.0)
    with scratch(options) as own, open_session(workload_from_target(target), own, QuietWatcher()) as opened:
        session = opened.session
        session.baseline = session.space.baseline
        ceiling = find_ceiling(session, session.baseline)
        for probe in stored_records(opened.directory)[1]:
            size = probe.config[session.space.batch_name]
            report.add(tried=size)
            if probe.answer.failure is None:
                report.add(ran=size)
        report.add(found=ceiling.largest_batch_size)


def find_with_lightning(mode: str, target: str, limits: Limits, report: Report) -> None:
    """`Tuner.scale_batch_size` with its defaults, on a module that makes its loader from `self.batch_size`."""
    import lightning.pytorch as lightning
    from lightning.pytorch.tuner import Tuner

    functions = load_functions(workload_from_target(target))

    class Module(lightning.LightningModule):
        """The program as Lightning's documentation has it."""

        def __init__(self) -> None:
            super().__init__()
            self.model = functions.model_fn()
            self.data = functions.data_fn()
            self.batch_size = 1

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return mean_loss(functions, self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(functions, self.model)

        def train_dataloader(self) -> DataLoader[Any]:
            return loader_of(self.data, self.batch_size)

        def on_train_start(self) -> None:
            report.add(tried=self.batch_size)

        def on_train_end(self) -> None:
            report.add(ran=self.batch_size)

    with tempfile.TemporaryDirectory() as directory:
        trainer = lightning.Trainer(
            accelerator=limits.device,
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=directory,
        )
        limits.impose()
        report.add(found=Tuner(trainer).scale_batch_size(Module(), mode=mode, steps_per_trial=STEPS))


def find_with_accelerate(start: int | None, target: str, limits: Limits, report: Report) -> None:
    """`find_executable_batch_size` around a training of a few steps; `start` None: the largest that autotune may try."""
    from accelerate import Accelerator, find_executable_batch_size

    functions = load_functions(workload_from_target(target))
    accelerator = Accelerator(cpu=limits.device == "cpu")
    limits.impose()
    data = functions.data_fn()

    @find_executable_batch_size(starting_batch_size=start or largest_to_try(data, limits))
    def train(batch_size: int) -> int:
        report.add(tried=batch_size)
        accelerator.free_memory()
        model = functions.model_fn().to(accelerator.device)
        model, optimizer, loader = accelerator.prepare(
            model, optimizer_of(functions, model), loader_of(data, batch_size)
        )
        for batch in batches(loader, STEPS):
            accelerator.backward(mean_loss(functions, model, batch))
            optimizer.step()
            optimizer.zero_grad()
        report.add(ran=batch_size)
        return batch_size

    report.add(found=train())


def largest_to_try(data: Any, limits: Limits) -> int:
    """As many samples as autotune would try at most."""
    own = data.batch_size if isinstance(data, DataLoader) else 32
    times, least = LARGEST_BATCH[limits.device]
    return min(max(times * (own or 1), least), len(data.dataset if isinstance(data, DataLoader) else data))


FINDERS = {
    "autotune": find_with_autotune,
    "power": lambda *arguments: find_with_lightning("power", *arguments),
    "binsearch": lambda *arguments: find_with_lightning("binsearch", *arguments),
    "accelerate": lambda *arguments: find_with_accelerate(ACCELERATE_START, *arguments),
    "accelerate_from_top": lambda *arguments: find_with_accelerate(None, *arguments),
}


# --- the checks ---------------------------------------------------------------------------------------------------------


def check(target: str, limits: Limits, batch_size: int, times: int, report: Report) -> None:
    """Trains in so many forks of this process, one after the other."""
    for _ in range(times):
        child = os.fork()
        if child == 0:
            train_once(target, limits, batch_size, report)
        _, status = os.waitpid(child, 0)
        if status != 0:
            report.add(outcome=f"died with exit status {os.waitstatus_to_exitcode(status)}", allocator_retries=0)


def train_once(target: str, limits: Limits, batch_size: int, report: Report) -> None:
    """Trains for a few steps, reports what came of it, and ends this process."""
    try:
        functions = load_functions(workload_from_target(target))
        limits.impose()
        model = functions.model_fn().to(limits.device)
        optimizer = optimizer_of(functions, model)
        for batch in batches(loader_of(functions.data_fn(), batch_size), STEPS):
            mean_loss(functions, model, to_device(batch, torch.device(limits.device))).backward()
            optimizer.step()
            optimizer.zero_grad()
        outcome: dict[str, Any] = {"outcome": "ran", "allocator_retries": 0}
        if limits.device == "cuda":
            torch.cuda.synchronize()
            outcome["allocator_retries"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
            outcome["reserved_bytes"] = torch.cuda.max_memory_reserved()
    except Exception as error:  # the program's own, and every way to run out of memory
        traceback.print_exc()
        failure = classify(error, "measure")
        outcome = {"outcome": failure.kind, "message": failure.message[:200], "allocator_retries": 0}
    report.add(**outcome)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
