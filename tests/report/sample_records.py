"""Records of an invented search, for tests of what is said about one."""

from __future__ import annotations

from typing import Any

from autotune.config import TrainingConfig, Value
from autotune.options import VerifyReport
from autotune.records import (
    Answer,
    Blocks,
    Ceiling,
    Conditions,
    Failure,
    GpuFacts,
    MachineFacts,
    Measurement,
    MemoryMarks,
    ParityResult,
    Ratio,
    Recommendation,
    SearchFacts,
    Settings,
    Stage,
    Trial,
    WorkloadFacts,
    WorkloadReference,
)

GIB = 2**30
BASELINE = TrainingConfig({"batch_size": 32, "compile_mode": "as_is", "pin_memory": False, "precision": "as_is"})
FASTEST = BASELINE.replace({"batch_size": 64, "compile_mode": "default", "precision": "bf16"})


def machine(**changes: Any) -> MachineFacts:
    gpu = GpuFacts(
        index=0, name="NVIDIA H200", uuid="GPU-1", total_bytes=141 * GIB, used_bytes=GIB, compute_capability=(9, 0),
        processes=0,
    )  # fmt: skip
    facts: dict[str, Any] = {
        "gpus": (gpu,),
        "driver_version": "570",
        "cpu_name": "Xeon",
        "usable_cores": 16,
        "memory_total_bytes": 128 * GIB,
        "memory_available_bytes": 100 * GIB,
        "shared_memory_bytes": 8 * GIB,
        "open_files_limit": 1024,
        "platform": "Linux",
        "python_version": "3.12.1",
        "torch_version": "2.11.0",
        "identity": "0123456789ab",
    }
    return MachineFacts(**{**facts, **changes})


def workload(**changes: Any) -> WorkloadFacts:
    facts: dict[str, Any] = {
        "batch_structure": "tuple of 2: float32 [32, 3, 32, 32], int64 [32]", "sample_bytes": 12296, "batch_size": 32,
        "batch_held": True, "batch_fixed_reason": None, "workers_fixed_reason": None, "num_workers": 2,
        "pin_memory": False, "drop_last": False, "dataset_kind": "map", "dataset_length": 50_000,
        "model_class": "ResNet", "parameter_count": 11_000_000, "trainable_parameter_count": 10_000_000,
        "parameter_bytes": 44_000_000, "block_class": "BasicBlock", "blocks": ("layer1.0", "layer1.1", "layer2.0"),
        "optimizer_class": "AdamW", "optimizer_variants": ("for_loop", "foreach", "fused"),
        "optimizer_fixed_reason": None, "has_scheduler": True, "has_batch_norm": True, "has_dropout": False,
        "model_is_compiled": False, "loss_convention": "loss_fn(model, batch) returns a scalar mean",
        "loss_weighted": False, "first_loss": 2.3026, "process_settings": {"matmul_precision": "high"},
        "step_seconds": 0.12, "fingerprint": "ba9876543210",
    }  # fmt: skip
    return WorkloadFacts(**{**facts, **changes})


def search_facts(**changes: Any) -> SearchFacts:
    facts: dict[str, Any] = {
        "machine": machine(), "workload": workload(), "device": "cuda", "global_batch_size": 32,
        "largest_batch_size": 4096,
    }  # fmt: skip
    return SearchFacts(**{**facts, **changes})


def parity(**changes: Any) -> ParityResult:
    result: dict[str, Any] = {
        "passed": True, "reason": "within three times of what rounding alone gives", "relative_error": 0.0021,
        "cosine": 0.99999, "floor": 0.0018, "tolerance": 0.0054, "worst_parameter": "layer4.0.conv1.weight",
        "worst_parameter_error": 0.013, "worst_parameter_tolerance": 0.09,
        "worst_buffer": "bn1.running_var", "buffer_error": 0.0004,
        "reference_losses": (2.3026, 2.2511), "candidate_losses": (2.3031, 2.2520), "micro_batch_size": 16,
        "micro_batches_per_step": 2,
    }  # fmt: skip
    return ParityResult(**{**result, **changes})


def answer(config: TrainingConfig, **changes: Any) -> Answer:
    fields: dict[str, Any] = {
        "config": config, "effective_batch_size": 32, "micro_batch_size": 32, "micro_batches_per_step": 1,
        "samples_per_second": 1000.0, "interval": (990.0, 1010.0),
        "speedup": Ratio(value=1.0, interval=(1.0, 1.0)), "confirmed_rounds": 3,
        "peak_allocated_bytes": 10 * GIB, "reserved_bytes": 12 * GIB, "compile_seconds": 0.0,
        "compile_pays_after_steps": None,
    }  # fmt: skip
    return Answer(**{**fields, **changes})


def fast_answer(**changes: Any) -> Answer:
    fields: dict[str, Any] = {
        "effective_batch_size": 128, "micro_batch_size": 64, "micro_batches_per_step": 2,
        "samples_per_second": 2345.6, "interval": (2300.0, 2390.0), "block_count": 18, "weight_per_second": 537_102.0,
        "weight_interval": (526_000.0, 548_000.0),
        "speedup": Ratio(value=2.346, interval=(2.29, 2.41)), "peak_allocated_bytes": int(28.5 * GIB),
        "reserved_bytes": 31 * GIB, "compile_seconds": 21.3, "compile_pays_after_steps": 1900,
        "training_hours": 3.25, "parity": parity(), "reasons": ("precision=bf16: 1.80x the speed alone (trial 4)",),
        "prices": ("the first step takes 21 s longer",),
    }  # fmt: skip
    return answer(FASTEST, **{**fields, **changes})


def ceiling(**changes: Any) -> Ceiling:
    fields: dict[str, Any] = {
        "memory_class": {"precision": "bf16", "compile_mode": "as_is"}, "largest_batch_size": 176,
        "smallest_failed_batch_size": 184, "failure_kind": "device_oom", "peak_allocated_bytes": 140 * GIB,
        "bytes_per_sample": 0.8 * GIB, "probes": 3, "out_of_memory_count": 1, "stopped_because": "",
    }  # fmt: skip
    return Ceiling(**{**fields, **changes})


def recommendation(**changes: Any) -> Recommendation:
    fields: dict[str, Any] = {
        "machine": machine(), "workload": workload(),
        "reference": WorkloadReference(form="file", location="train.py", names={}, source_hash="aaaabbbbcccc"),
        "settings": Settings(
            budget_seconds=600, space="default", train_samples=10_000_000,
            conditions=Conditions(device="cuda", global_batch_size=32),
        ),
        "keep": False, "verdict": "2.35x faster with batch_size=64, compile_mode=default, precision=bf16.",
        "baseline": answer(BASELINE, training_hours=7.6, weight_per_second=229_000.0), "best": fast_answer(),
        "free_batch": None, "bottleneck": "compute", "ceilings": (ceiling(),), "trial_count": 31,
        "failure_counts": {"timeout": 1, "device_oom": 2}, "rejected": ("fp16 was 1.1x faster and its gradient wrong",),
        "warnings": ("another process used the GPU",), "search_seconds": 500.0,
        "stage_seconds": {"soak": 36.0, "baseline": 11.0, "confirm": 400.0}, "autotune_version": "0.1.0",
    }  # fmt: skip
    return Recommendation(**{**fields, **changes})


def verify_report(**changes: Any) -> VerifyReport:
    fields: dict[str, Any] = {
        "outcome": "holds", "verdict": "It holds: precision=bf16 is 2.30 times the speed of your settings.",
        "changed": ("torch: 2.11 then, 2.12 now",), "baseline_then": answer(BASELINE), "best_then": fast_answer(),
        "baseline": answer(BASELINE, samples_per_second=1010.0),
        "best": fast_answer(samples_per_second=2323.0, speedup=Ratio(value=2.3, interval=(2.2, 2.4))),
        "parity": parity(), "failure": None, "seconds": 61.0,
    }  # fmt: skip
    return VerifyReport(**{**fields, **changes})


def measurement(**changes: Any) -> Measurement:
    fields: dict[str, Any] = {
        "samples_per_second": 1000.0, "interval": (990.0, 1010.0),
        "blocks": Blocks(seconds=(0.3, 0.3), samples=(300, 300), steps=(10, 10)), "resident_samples_per_second": 1005.0,
        "memory": MemoryMarks(peak_allocated_bytes=10 * GIB, reserved_bytes=12 * GIB), "micro_batch_size": 32,
        "micro_batches_per_step": 1, "warmup_steps": 4, "build_seconds": 1.0, "first_step_seconds": 0.4,
        "process_seconds": 2.0,
    }  # fmt: skip
    return Measurement(**{**fields, **changes})


def trial(
    number: int, changes: dict[str, Value], *, rate: float | None = None, failure: Failure | None = None,
    stage: Stage = "compute",
) -> Trial:  # fmt: skip
    return Trial(
        number=number, stage=stage, config=BASELINE.replace(changes), failure=failure,
        measurement=None if rate is None else measurement(samples_per_second=rate, interval=(rate * 0.99, rate * 1.01)),
        started_at=1.8e9, seconds=12.0, machine_identity="0123456789ab",
    )  # fmt: skip
