"""What `benchmarks/rivals.py` does in processes of their own: search, take reference gradients, compare and time.

    python -m benchmarks.rival_clock search TOOL WORKLOAD DIRECTORY SECONDS
    python -m benchmarks.rival_clock reference BATCH MICRO_BATCH WORKLOAD FILE
    python -m benchmarks.rival_clock time TOOL WORKLOAD DIRECTORY SECONDS FINDING [REFERENCE]

The last line that each prints is its answer, as JSON. Nothing of autotune's measuring is used here: the reference is the
workload in fp32, eager, without TF32; gradients are read by a hook before the tool's own optimizer steps.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rival_tools import DEVICE, Setup, autocast, search
from benchmarks.rival_workloads.parts import TINY

WARM_SECONDS = 0.5 if TINY else 3.0
FEWEST_WARM_STEPS = 10
RESIDENT_BATCHES = 4
COMPARED_STEPS = 3
"""Under CUDA graphs the first is run as it is, the second recorded, the third replayed."""
MOST_STEPS = 40
"""For an fp16 scaler that has to come down first."""

Gradients = dict[str, Tensor]


def main() -> None:
    """Does the one thing and prints its answer."""
    action, *arguments = sys.argv[1:]
    answer = {"search": searched, "reference": referenced, "time": timed}[action](*arguments)
    print(json.dumps(answer))


def workload_named(name: str) -> ModuleType:
    """The workload's module."""
    return importlib.import_module(f"benchmarks.rival_workloads.{name}")


def searched(tool: str, workload: str, directory: str, seconds: str) -> dict[str, Any]:
    """What the tool found."""
    return search(tool, workload_named(workload), Path(directory), float(seconds))


# --- gradients --------------------------------------------------------------------------------------------------------


def checked_batch(workload: Any, batch_size: int) -> tuple[Tensor, Tensor]:
    """The first samples of the data set, on the CPU. Raises IndexError where it has fewer."""
    inputs, targets = zip(*(workload.dataset()[index] for index in range(batch_size)), strict=True)
    return torch.stack(inputs), torch.stack([torch.as_tensor(target) for target in targets])


def referenced(batch_size: str, micro_batch_size: str, name: str, path: str) -> dict[str, Any]:
    """Saves weights, and the gradients of one batch in fp32; tells how far honest bf16 is from them."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return save_reference(workload_named(name), int(batch_size), int(micro_batch_size), Path(path))


def save_reference(workload: Any, batch_size: int, micro_batch_size: int, path: Path) -> dict[str, Any]:
    """The same for a workload itself, in the precision that torch is set to."""
    torch.manual_seed(0)
    model = workload.model_fn().to(DEVICE)
    batch = checked_batch(workload, batch_size)
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        micro_batch_size = min(micro_batch_size, workload.BATCH_SIZE)  # the same gradients, and fp32 fits
    gradients = accumulated(workload, model, batch, micro_batch_size, torch.enable_grad)
    rounded = accumulated(workload, model, batch, micro_batch_size, autocast)
    weights = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    torch.save({"weights": weights, "gradients": gradients, "bf16_error": distance(rounded, gradients)}, path)
    return {"bf16_error": distance(rounded, gradients)}


def accumulated(
    workload: Any, model: Any, batch: tuple[Tensor, Tensor], micro_batch_size: int, context: Any
) -> Gradients:
    """Gradients of the mean loss over the batch, micro-batch by micro-batch, on the CPU."""
    model.zero_grad()
    for inputs, targets in zip(*(part.split(micro_batch_size) for part in batch), strict=True):
        with context():
            loss = workload.criterion(model(inputs.to(DEVICE)), targets.to(DEVICE))
        (loss * (len(inputs) / len(batch[0]))).backward()
    return {n: p.grad.float().cpu() for n, p in model.named_parameters() if p.grad is not None}


def distance(gradients: Gradients, reference: Gradients) -> float:
    """Norm of the difference over the norm of the reference, all parameters together."""
    off = sum(float((gradients[name] - one).double().square().sum()) for name, one in reference.items())
    size = sum(float(one.double().square().sum()) for one in reference.values())
    return (off / size) ** 0.5


def compared(setup: Setup, workload: Any, batch_size: int, path: Path) -> dict[str, Any]:
    """How far the setup's gradients are from the reference's: the worst of some steps, each from the same weights."""
    saved = torch.load(path)
    reference: Gradients = saved["gradients"]
    data = setup.packed(*checked_batch(workload, batch_size))
    parameters = dict(setup.model.named_parameters())
    seen: list[Gradients] = []

    def read(optimizer: torch.optim.Optimizer, arguments: Any, keywords: Any) -> None:
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer is given the scale with the gradients
        divisor = 1.0 if scale is None else float(scale)
        seen.append({n: p.grad.detach().float().cpu() / divisor for n, p in parameters.items() if p.grad is not None})

    handle = setup.optimizer.register_step_pre_hook(read)
    steps = 0
    while len(seen) < COMPARED_STEPS and steps < MOST_STEPS:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(saved["weights"][name])
        setup.step(data)
        steps += 1
    handle.remove()
    missing = sorted(set(reference) - set.intersection(*(set(one) for one in seen))) if seen else sorted(reference)
    errors = [] if missing else [distance(one, reference) for one in seen]
    return {"errors": errors, "bf16_error": saved["bf16_error"], "missing": missing, "skipped_steps": steps - len(seen)}


# --- time -------------------------------------------------------------------------------------------------------------


def timed(
    tool: str, name: str, directory: str, seconds: str, finding: str, reference: str | None = None
) -> dict[str, Any]:
    """Samples per second end to end, then on batches that lie on the device."""
    from benchmarks.rival_tools import TOOLS

    workload, found = workload_named(name), json.loads(Path(finding).read_text())
    began = time.perf_counter()
    torch.manual_seed(0)
    setup = TOOLS[tool].setup(workload, found, Path(directory))
    answer: dict[str, Any] = {"batch_size": found["batch_size"]}
    if reference is not None:
        answer["gradients"] = compared(setup, workload, found["batch_size"], Path(reference))
    setup.step(next(setup.batches)[1])
    synchronize()
    answer["ready_seconds"] = time.perf_counter() - began

    def end_to_end() -> int:
        samples, data = next(setup.batches)
        setup.step(data)
        return samples

    answer["samples"], answer["seconds"] = rate_of(end_to_end, WARM_SECONDS, float(seconds))
    batches = [(n, setup.resident(data)) for (n, data), _ in zip(setup.batches, range(RESIDENT_BATCHES), strict=False)]
    turn = iter(range(sys.maxsize))

    def resident() -> int:
        samples, data = batches[next(turn) % len(batches)]
        setup.step(data)
        return samples

    answer["resident_samples"], answer["resident_seconds"] = rate_of(resident, WARM_SECONDS / 6, float(seconds) / 2)
    answer["peak_bytes"] = torch.cuda.max_memory_reserved() if DEVICE.type == "cuda" else None
    return answer


def rate_of(step: Callable[[], int], warm_seconds: float, seconds: float) -> tuple[int, float]:
    """Samples and seconds of whole steps, after a warm-up, with the device waited for at both ends only."""
    steps, begin = 0, time.perf_counter()
    while steps < FEWEST_WARM_STEPS or time.perf_counter() - begin < warm_seconds:
        step()
        steps += 1
        if steps % FEWEST_WARM_STEPS == 0:
            synchronize()
    synchronize()
    begin = time.perf_counter()
    for _ in range(FEWEST_WARM_STEPS):
        step()
    synchronize()
    pace = (time.perf_counter() - begin) / FEWEST_WARM_STEPS
    samples, count = 0, max(3, round(seconds / pace))
    begin = time.perf_counter()
    for _ in range(count):
        samples += step()
    synchronize()
    return samples, time.perf_counter() - begin


def synchronize() -> None:
    """Waits for the device."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
