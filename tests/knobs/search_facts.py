"""Facts of machines and workloads that the tests of knobs decide on."""

from __future__ import annotations

from typing import Any

from autotune.records import GpuFacts, MachineFacts, SearchFacts, WorkloadFacts

H200 = GpuFacts(
    index=0,
    name="NVIDIA H200",
    uuid="GPU-1",
    total_bytes=139 * 2**30,
    used_bytes=0,
    compute_capability=(9, 0),
    processes=0,
)
T4 = H200.model_copy(update={"name": "Tesla T4", "compute_capability": (7, 5), "total_bytes": 15 * 2**30})


def machine(*gpus: GpuFacts, **changes: Any) -> MachineFacts:
    """A machine with 16 usable cores, plenty of shared memory and open files."""
    facts = MachineFacts(
        gpus=gpus,
        driver_version=None,
        cpu_name="a processor",
        usable_cores=16,
        memory_total_bytes=64 * 2**30,
        memory_available_bytes=60 * 2**30,
        shared_memory_bytes=32 * 2**30,
        open_files_limit=4096,
        platform="Linux",
        python_version="3.11",
        torch_version="2.13",
        identity="0" * 12,
    )
    return facts.model_copy(update=changes)


def workload(**changes: Any) -> WorkloadFacts:
    """A model of four blocks under AdamW, batch 32 of 1000 samples of 1 KiB, loaded in the training process."""
    facts = WorkloadFacts(
        batch_structure="tuple of 2: float32 [32, 255], int64 [32]",
        sample_bytes=1024,
        batch_size=32,
        batch_held=True,
        batch_fixed_reason=None,
        workers_fixed_reason=None,
        num_workers=0,
        pin_memory=False,
        drop_last=False,
        dataset_kind="map",
        dataset_length=1000,
        model_class="Net",
        parameter_count=10,
        trainable_parameter_count=10,
        parameter_bytes=40,
        block_class="Block",
        blocks=("blocks.0", "blocks.1", "blocks.2", "blocks.3"),
        optimizer_class="AdamW",
        optimizer_variants=("foreach", "fused"),
        optimizer_fixed_reason=None,
        has_scheduler=False,
        has_batch_norm=True,
        has_dropout=False,
        model_is_compiled=False,
        loss_convention="loss_fn(model, batch) returns a scalar mean",
        loss_weighted=False,
        first_loss=1.0,
        process_settings={},
        step_seconds=0.1,
        fingerprint="0" * 12,
    )
    return facts.model_copy(update=changes)


def cpu_facts(*, machine_changes: dict[str, Any] | None = None, **changes: Any) -> SearchFacts:
    """A CPU machine; `global_batch_size` and `largest_batch_size` may be given beside the workload's own facts."""
    return _facts(machine(**(machine_changes or {})), "cpu", changes)


def cuda_facts(*, gpu: GpuFacts = H200, **changes: Any) -> SearchFacts:
    """A machine with one GPU; otherwise like `cpu_facts`."""
    return _facts(machine(gpu), "cuda", changes)


def _facts(machine_facts: MachineFacts, device: Any, changes: dict[str, Any]) -> SearchFacts:
    global_batch_size = changes.pop("global_batch_size", None)
    largest_batch_size = changes.pop("largest_batch_size", 1000)
    return SearchFacts(
        machine=machine_facts,
        workload=workload(**changes),
        device=device,
        global_batch_size=global_batch_size,
        largest_batch_size=largest_batch_size,
    )


FACTS = {
    "cpu": cpu_facts(),
    "h200": cuda_facts(),
    "h200, held batch": cuda_facts(global_batch_size=32),
    "t4, pinned": cuda_facts(gpu=T4, pin_memory=True, num_workers=5),
    "held batch of 96": cpu_facts(global_batch_size=96, batch_size=40),
    "held batch with many divisors": cpu_facts(
        global_batch_size=7_207_200, batch_size=7, dataset_length=None, largest_batch_size=10_000_000
    ),
    "everything fixed": cpu_facts(batch_fixed_reason="a batch_sampler of its own", workers_fixed_reason="no sharding"),
    "no blocks": cuda_facts(blocks=(), block_class=None, has_batch_norm=False),
    "own optimizer": cpu_facts(optimizer_variants=(), optimizer_fixed_reason="SignStep takes no foreach/fused"),
    "compiled already": cuda_facts(model_is_compiled=True),
    "in double": cuda_facts(parameters_are_double=True),
    "data set below the batch": cpu_facts(dataset_length=20, largest_batch_size=20),
    "one core": cpu_facts(machine_changes={"usable_cores": 1, "open_files_limit": 64, "shared_memory_bytes": 0}),
}
"""Name to facts: what every knob must cope with."""
