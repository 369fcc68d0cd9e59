"""What changed between the search that a recommendation comes from and today: machine, versions, the user's program."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autotune.records import MachineFacts, Recommendation, SearchFacts, WorkloadFacts, WorkloadReference


def changes_since(
    then: Recommendation, facts: SearchFacts, reference: WorkloadReference, autotune_version: str
) -> tuple[str, ...]:
    """One sentence for each thing that differs, such as `torch: 2.11.0 then, 2.12.0 now`; empty where nothing does."""
    machine = differences(_machine(then.machine), _machine(facts.machine))
    if not machine and then.machine.identity != facts.machine.identity:
        machine = ("machine: another one of the same kind",)
    workload = differences(_workload(then.workload), _workload(facts.workload))
    if not workload and then.workload.fingerprint != facts.workload.fingerprint:
        workload = ("model: names or shapes of its parameters, or its blocks",)
    return (
        *machine,
        *differences({"autotune": then.autotune_version}, {"autotune": autotune_version}),
        *workload,
        *_source(then.reference, reference),
    )


def _machine(machine: MachineFacts) -> dict[str, object]:
    return {
        "GPU": ", ".join(gpu.name for gpu in machine.gpus) or None,
        "GPU driver": machine.driver_version,
        "torch": machine.torch_version,
        "Python": machine.python_version,
        "processor": machine.cpu_name,
        "usable cores": machine.usable_cores,
    }


def _workload(workload: WorkloadFacts) -> dict[str, object]:
    return {
        "model": f"{workload.model_class} with {workload.parameter_count:,} parameters",
        "batch": workload.batch_structure,
        "samples in the data set": workload.dataset_length,
        "loader workers": workload.num_workers,
        "batches that a worker holds ready": workload.prefetch_factor,
        "page-locked memory": workload.pin_memory,
        "optimizer": workload.optimizer_class,
        "scheduler": workload.has_scheduler,
        "loss": workload.loss_convention,
        **{f"setting {name}": value for name, value in workload.process_settings.items()},
    }


def differences(then: Mapping[str, object], now: Mapping[str, object]) -> tuple[str, ...]:
    """Such as `seed: 0 then, 1 now`, one for each name whose values differ."""
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return tuple(f"{name}: {_shown(then.get(name))} then, {_shown(now.get(name))} now" for name in names)


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


def _source(then: WorkloadReference, now: WorkloadReference) -> tuple[str, ...]:
    module = Path(then.location).with_suffix("").as_posix().endswith(f"/{now.location.replace('.', '/')}")
    if then.form == "value" and (then.location == now.location or (now.form == "module" and module)):
        return ()  # of functions alone, and now of their whole file: no difference can be seen
    if (then.form, then.location) != (now.form, now.location):
        return (f"program: {then.location} then, {now.location} now",)
    return () if then.source_hash == now.source_hash else (f"the source of {now.location}",)
