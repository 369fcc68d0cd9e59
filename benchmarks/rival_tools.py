"""The tools that `benchmarks/rivals.py` compares, each as its own documentation recommends it.

A tool has a `search`, which says what it found as plain data, and a `setup`, which builds in another process what a
user would then train with. What a tool does not tune is its user's best guess: bf16 and `torch.compile` for those that
only find a batch, and a loader of four workers with pinned memory for those that leave the loader alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.rival_workloads.parts import TINY

Finding = dict[str, Any]
"""Plain data; always has `batch_size` (samples of an optimizer step), `micro_batch_size` and `chose`, in words."""

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WORKERS = min(4, len(os.sched_getaffinity(0)))
GUESSED_LOADER: dict[str, Any] = {
    "num_workers": WORKERS,
    "pin_memory": DEVICE.type == "cuda",
    "persistent_workers": True,
}
BUDGET: str | int = 30 if TINY else "balanced"
"""Of pytorch-autotune: what its README uses."""
LOADTUNE_STEPS = "10" if TINY else "100"
"""Its default."""
LOADTUNE_ROUNDS = 3
"""loadtune tries compile and mixed precision only once it has found workers: one round, its default, never gets there."""


@dataclass
class Setup:
    """What one trains with, as the outside loop sees it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[tuple[int, Any]]
    """Samples and data of each optimizer step, without end, from the tool's own loader."""
    step: Callable[[Any], Any]
    """Trains on such data, from wherever it lies."""
    packed: Callable[[Tensor, Tensor], Any] = lambda inputs, targets: (inputs, targets)
    """Makes such data of a batch on the CPU."""
    resident: Callable[[Any], Any] = lambda data: tuple(part.to(DEVICE) for part in data)
    """Moves such data to the device."""


@dataclass(frozen=True)
class Tool:
    """One line of the table. `search` gets the workload and a directory of its own that is kept."""

    name: str
    search: Callable[[ModuleType, Path, float], Finding]
    setup: Callable[[ModuleType, Finding, Path], Setup]
    needs: str = ""
    """The package that it is, where that is not ours."""


def endless(loader: Any) -> Iterator[tuple[int, Any]]:
    """Batches of an ordinary loader, pass after pass."""
    while True:
        for batch in loader:
            yield len(batch[0]), batch


def moved(batch: Any) -> tuple[Tensor, Tensor]:
    """A batch on the device."""
    return batch[0].to(DEVICE, non_blocking=True), batch[1].to(DEVICE, non_blocking=True)


def held(workload: ModuleType, chose: str, **more: Any) -> Finding:
    """A finding that keeps the batch."""
    return {"batch_size": workload.BATCH_SIZE, "micro_batch_size": workload.BATCH_SIZE, "chose": chose, **more}


def found_batch(batch_size: int, chose: str, **more: Any) -> Finding:
    """A finding that changes it."""
    return {"batch_size": batch_size, "micro_batch_size": batch_size, "chose": chose, **more}


# --- PyTorch's defaults -----------------------------------------------------------------------------------------------


def defaults_setup(workload: ModuleType, finding: Finding, directory: Path) -> Setup:
    """The workload as it is written, and with TF32 where the finding says so."""
    if finding["tf32"]:
        torch.set_float32_matmul_precision("high")
    model = workload.model_fn().to(DEVICE)
    return plain_setup(workload, model, model, workload.data_fn(), contextlib.nullcontext)


def plain_setup(workload: ModuleType, model: nn.Module, called: Any, loader: Any, context: Callable[[], Any]) -> Setup:
    """A loop as in PyTorch's own tutorials; `called` is the model, or what was compiled of it."""
    optimizer = workload.optimizer_fn(model)

    def step(batch: Any) -> Tensor:
        inputs, targets = moved(batch)
        optimizer.zero_grad()
        with context():
            loss = workload.criterion(called(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Setup(model, optimizer, endless(loader), step)


def autocast() -> Any:
    """bf16, as a user's best guess."""
    return torch.autocast(DEVICE.type, torch.bfloat16)


# --- pytorch-autotune -------------------------------------------------------------------------------------------------


def pytorch_autotune(workload: ModuleType, directory: Path, cache: Any) -> Any:
    """Its one call, with the optimizer by name, so that it can try the fused one."""
    os.environ["PYTORCH_AUTOTUNE_CACHE"] = str(directory / "cache.json")
    from pytorch_autotune import autotune

    return autotune(
        workload.model_fn(),
        tuple(next(iter(workload.data_fn()))),
        loss_fn=workload.criterion,
        optimizer="adamw",
        lr=workload.LEARNING_RATE,
        budget=BUDGET,
        device=DEVICE.type,
        cache=cache,
    )


def pytorch_autotune_search(workload: ModuleType, directory: Path, seconds: float) -> Finding:
    result = pytorch_autotune(workload, directory, "refresh")
    return held(workload, result.config.label, report=result.report.to_dict())


def pytorch_autotune_setup(workload: ModuleType, finding: Finding, directory: Path) -> Setup:
    result = pytorch_autotune(workload, directory, True)
    assert not result.report.trials, "it searched again: its cache did not know this GPU, torch or model"
    model = getattr(result.model, "_orig_mod", result.model)
    loader = DataLoader(
        workload.dataset(), batch_size=workload.BATCH_SIZE, shuffle=True, drop_last=True, **GUESSED_LOADER
    )
    return Setup(model, result.optimizer, endless(loader), lambda batch: result.step(*moved(batch)))


# --- loadtune ---------------------------------------------------------------------------------------------------------

LOADTUNE_FILE = """
from loadtune import Workload

import benchmarks.rival_workloads.{name} as workload


def train_step(model, optimizer, batch, device):
    inputs, targets = batch[0].to(device), batch[1].to(device)
    optimizer.zero_grad()
    loss = workload.criterion(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss


def get_workload():
    return Workload(
        name="{name}",
        make_dataset=workload.dataset,
        make_model=workload.model_fn,
        train_step=train_step,
        make_optimizer=workload.optimizer_fn,
        default_batch_size=workload.BATCH_SIZE,
    )
"""


def loadtune_search(workload: ModuleType, directory: Path, seconds: float) -> Finding:
    from loadtune.cli import main
    from loadtune.experiment import Trial, best_trial
    from loadtune.knobs import Knobs

    path, raw = directory / "loadtune_workload.py", directory / "raw.json"
    path.write_text(LOADTUNE_FILE.format(name=workload.__name__.rpartition(".")[2]))
    options = ["--no-plots", "--out", str(directory / "report.md"), "--save-raw", str(raw)]
    rounds = ["--max-rounds", str(LOADTUNE_ROUNDS), "--steps", LOADTUNE_STEPS]
    status = main(["tune", str(path), *rounds, *options])
    assert status == 0, f"loadtune ended with status {status}"
    content = json.loads(raw.read_text())
    trials = [Trial(Knobs.from_dict(t["knobs"]), t["reason"], t["result"]) for t in content["trials"]]
    best = best_trial(trials)
    beats = best is not None and best.throughput > content["baseline"]["throughput"]
    knobs = best.knobs if best is not None and beats else Knobs()
    return held(workload, knobs.label(), knobs=knobs.to_dict(), trials=content["trials"])


def loadtune_setup(workload: ModuleType, finding: Finding, directory: Path) -> Setup:
    """What its `--apply` writes down, done: no gradient scaler with fp16, as it says nothing of one."""
    from loadtune.knobs import Knobs

    knobs = Knobs.from_dict(finding["knobs"])
    if knobs.num_threads is not None:
        torch.set_num_threads(knobs.num_threads)
    loader = DataLoader(
        workload.dataset(), batch_size=workload.BATCH_SIZE, shuffle=True, drop_last=True, **knobs.loader_kwargs()
    )
    model = workload.model_fn().to(DEVICE)
    called = torch.compile(model) if knobs.compile else model
    context = (lambda: torch.autocast(device_type=DEVICE.type)) if knobs.amp else contextlib.nullcontext
    return plain_setup(workload, model, called, loader, context)


# --- Lightning's BatchSizeFinder --------------------------------------------------------------------------------------


def lightning_search(workload: ModuleType, directory: Path, seconds: float) -> Finding:
    import lightning.pytorch as lightning
    from lightning.pytorch.callbacks import BatchSizeFinder

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.compile(workload.model_fn())
            self.batch_size = workload.BATCH_SIZE

        def train_dataloader(self) -> DataLoader[Any]:
            return guessed_loader(workload, self.batch_size)

        def training_step(self, batch: Any, number: int) -> Tensor:
            return workload.criterion(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return workload.optimizer_fn(self.model)

    finder = BatchSizeFinder()
    trainer = lightning.Trainer(
        precision="bf16-mixed",
        accelerator=DEVICE.type,
        devices=1,
        max_steps=1,
        callbacks=[finder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=directory,
    )
    trainer.fit(Module())
    assert finder.optimal_batch_size is not None
    return found_batch(finder.optimal_batch_size, "bf16, compile (guessed)")


def guessed_loader(workload: ModuleType, batch_size: int) -> DataLoader[Any]:
    """A loader with the user's best guess of everything but the batch."""
    return DataLoader(workload.dataset(), batch_size=batch_size, shuffle=True, drop_last=True, **GUESSED_LOADER)


def lightning_setup(workload: ModuleType, finding: Finding, directory: Path) -> Setup:
    """The same in a plain loop, which costs no less than nothing of what a Trainer does."""
    model = workload.model_fn().to(DEVICE)
    loader = guessed_loader(workload, finding["batch_size"])
    return plain_setup(workload, model, torch.compile(model), loader, autocast)


# --- accelerate's find_executable_batch_size --------------------------------------------------------------------------


def accelerate_search(workload: ModuleType, directory: Path, seconds: float) -> Finding:
    from accelerate.utils import find_executable_batch_size

    tried = []

    def train(batch_size: int) -> int:
        tried.append(batch_size)
        setup = accelerated(workload, batch_size)
        for _ in range(3):
            setup.step(next(setup.batches)[1])
        return batch_size

    found = find_executable_batch_size(train, starting_batch_size=workload.LARGEST_GUESS)()
    return found_batch(found, "bf16, compile (guessed)", tried=tried)


def accelerated(workload: ModuleType, batch_size: int) -> Setup:
    """Model, optimizer and loader as an Accelerator prepares them."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", dynamo_backend="inductor", cpu=DEVICE.type == "cpu")
    accelerator.free_memory()
    model = workload.model_fn()
    prepared, optimizer, loader = accelerator.prepare(
        model, workload.optimizer_fn(model), guessed_loader(workload, batch_size)
    )

    def step(batch: Any) -> Tensor:
        inputs, targets = moved(batch)
        optimizer.zero_grad()
        loss = workload.criterion(prepared(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        return loss.detach()

    return Setup(model, optimizer.optimizer, endless(loader), step)


def accelerate_setup(workload: ModuleType, finding: Finding, directory: Path) -> Setup:
    return accelerated(workload, finding["batch_size"])


# --- autotune ---------------------------------------------------------------------------------------------------------


def autotune_search(workload: ModuleType, directory: Path, seconds: float) -> Finding:
    return autotune_finding(autotune_result(workload, directory, seconds), "best")


def autotune_free_search(workload: ModuleType, directory: Path, seconds: float) -> Finding:
    result = autotune_result(workload, directory, seconds)
    return autotune_finding(result, "free_batch" if result.free_batch is not None else "best")


def autotune_result(workload: ModuleType, directory: Path, seconds: float) -> Any:
    """One search gives both answers; whoever asks second reads what the first has saved."""
    import autotune

    path = directory / "best.json"
    if not path.exists():
        result = autotune.fit(
            workload.model_fn,
            workload.data_fn,
            loss_fn=workload.loss_fn,
            optimizer_fn=workload.optimizer_fn,
            budget=seconds,
            study=directory / "study",
        )
        print(result)
        result.save(path)
    return autotune.load(path)


def autotune_finding(result: Any, which: str) -> Finding:
    """What is recommended, where it differs from the program as it stands."""
    answer, before = getattr(result, which), result.baseline.config
    changes = ", ".join(f"{name}={value}" for name, value in answer.config.items() if before[name] != value)
    return {
        "batch_size": answer.effective_batch_size,
        "micro_batch_size": min(answer.micro_batch_size, answer.effective_batch_size),
        "chose": changes or "to keep everything",
        "config": dict(answer.config),
        "samples_per_second": answer.samples_per_second,
        "interval": answer.interval,
    }


def autotune_setup(workload: ModuleType, finding: Finding, directory: Path) -> Setup:
    import autotune
    from autotune.config import TrainingConfig
    from autotune.surgery.batches import to_device
    from autotune.training.windows import MicroBatch, samples_in

    training = autotune.load(directory / "best.json").build(
        workload.model_fn,
        workload.data_fn,
        loss_fn=workload.loss_fn,
        optimizer_fn=workload.optimizer_fn,
        config=TrainingConfig(finding["config"]),
    )

    def windows() -> Iterator[tuple[int, Any]]:
        while True:
            for window in training.loader:
                yield samples_in(window), window

    def packed(inputs: Tensor, targets: Tensor) -> Any:
        pieces = zip(*(part.split(finding["micro_batch_size"]) for part in (inputs, targets)), strict=True)
        return [MicroBatch(len(piece[0]), piece) for piece in pieces]

    def resident(window: Any) -> Any:
        return [MicroBatch(one.samples, to_device(one.data, DEVICE)) for one in window]

    return Setup(training.model, training.optimizer, windows(), training.step, packed, resident)


TOOLS = {
    tool.name: tool
    for tool in (
        Tool("pytorch", lambda w, d, s: held(w, "nothing", tf32=False), defaults_setup),
        Tool("pytorch-tf32", lambda w, d, s: held(w, "TF32", tf32=True), defaults_setup),
        Tool("pytorch-autotune", pytorch_autotune_search, pytorch_autotune_setup, "pytorch-autotune"),
        Tool("loadtune", loadtune_search, loadtune_setup, "loadtune"),
        Tool("autotune", autotune_search, autotune_setup),
        Tool("lightning", lightning_search, lightning_setup, "lightning"),
        Tool("accelerate", accelerate_search, accelerate_setup, "accelerate"),
        Tool("autotune-free", autotune_free_search, autotune_setup),
    )
}
"""In the order of the table: first those that hold the batch."""


def search(tool: str, workload: ModuleType, directory: Path, seconds: float) -> Finding:
    """Runs a tool's search in this process; its finding has the seconds that it took and the tool's version."""
    from importlib.metadata import version

    began = time.monotonic()
    finding = TOOLS[tool].search(workload, directory, seconds)
    finding["search_seconds"] = time.monotonic() - began
    finding["version"] = version(TOOLS[tool].needs) if TOOLS[tool].needs else ""
    sys.stdout.flush()
    return finding
