"""Programs and machines as they are met: what limits them, and what cures that."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autotune.records import SearchFacts
from tests.knobs.search_facts import cpu_facts, cuda_facts
from tests.search.simulated_machine import Program

GIB, MIB = 2**30, 2**20
TWO_CORES = {"usable_cores": 2}


@dataclass(frozen=True)
class Scenario:
    """A program on a machine, with the time that a person would give the search."""

    program: Program
    facts: SearchFacts
    budget_seconds: float
    memory_limit_bytes: int | None = None

    @property
    def usable_bytes(self) -> int | None:
        """The limit that was asked for, or the card's memory."""
        if self.memory_limit_bytes is not None or self.facts.device == "cpu":
            return self.memory_limit_bytes
        return self.facts.machine.gpus[0].total_bytes


RECOMPUTATION = {("activation_checkpointing", "all"): 0.75, ("activation_checkpointing", "alternate"): 0.86}

LANGUAGE_MODEL = Program(
    sample_seconds=0.018, launch_seconds=0.02, update_seconds=0.012, load_seconds=2e-5, copy_seconds=2e-6,
    sample_speedups={
        ("precision", "tf32"): 3.0, ("precision", "bf16"): 7.6, ("precision", "fp16"): 7.0,
        ("compile_mode", "default"): 1.13, ("compile_mode", "reduce-overhead"): 1.14,
        ("compile_scope", "step"): 1.13, ("compile_scope", "blocks"): 0.98, **RECOMPUTATION,
    },
    launch_speedups={("compile_mode", "default"): 2.0, ("compile_mode", "reduce-overhead"): 5.0},
    update_speedups={("optimizer_impl", "fused"): 2.5, ("optimizer_impl", "for_loop"): 0.4},
    constant_bytes=2 * GIB, sample_bytes=int(1.6 * GIB),
    memory_shares={
        ("precision", "bf16"): 0.55, ("precision", "fp16"): 0.55, ("compile_mode", "default"): 0.85,
        ("compile_mode", "reduce-overhead"): 0.9, ("compile_scope", "step"): 0.6,
        ("activation_checkpointing", "all"): 0.3, ("activation_checkpointing", "alternate"): 0.6,
    },
    process_spread=0.005, block_spread=0.004,
)  # fmt: skip
"""A GPT-2 on an H200: limited by computing, much of it by a precision that is higher than needed."""

AS_TIMED = replace(
    LANGUAGE_MODEL, start_seconds=5.0, check_seconds=15.0, compile_seconds=24.0, cached_share=0.1, state_seconds=3.8
)
"""The same with the seconds that its trials took there."""

GPT2_AS_TIMED = replace(
    AS_TIMED, sample_seconds=0.0183, launch_seconds=0.02, update_seconds=0.0078,
    sample_speedups={
        **LANGUAGE_MODEL.sample_speedups, ("precision", "bf16"): 7.76, ("compile_mode", "default"): 1.14,
    },
    update_speedups={("optimizer_impl", "fused"): 1.27, ("optimizer_impl", "for_loop"): 0.4},
    hidden_update_seconds={("optimizer_impl", "as_is"): 0.0012},
    start_seconds=3.5, compile_seconds=28.0, process_spread=0.006, block_spread=0.012,
)  # fmt: skip
"""With its rates and their noise too: a fused update gains 2.0 % of the eager step in bf16, 1.4 % of the compiled one."""

SMALL_MODEL = Program(
    sample_seconds=2e-5, launch_seconds=0.006, update_seconds=0.003, load_seconds=3e-6, copy_seconds=1e-7,
    sample_speedups={
        ("precision", "tf32"): 2.0, ("precision", "bf16"): 4.0, ("precision", "fp16"): 4.0,
        ("compile_mode", "default"): 1.2, ("compile_mode", "reduce-overhead"): 1.2,
    },
    launch_speedups={
        ("precision", "bf16"): 0.85, ("precision", "fp16"): 0.8, ("compile_mode", "default"): 2.2,
        ("compile_mode", "reduce-overhead"): 6.0, **RECOMPUTATION,
    },
    update_speedups={("optimizer_impl", "fused"): 4.0, ("optimizer_impl", "for_loop"): 0.2},
    constant_bytes=GIB, sample_bytes=4 * MIB, process_spread=0.02, block_spread=0.02,
)  # fmt: skip
"""Limited by starting kernels, until the batch is large."""

SMALL_AS_TIMED = Program(
    sample_seconds=2.5e-6, launch_seconds=0.0104, update_seconds=0.003, load_seconds=1 / 65_000, copy_seconds=1e-7,
    sample_speedups={
        ("precision", "tf32"): 1.2, ("precision", "bf16"): 1.5, ("precision", "fp16"): 1.5,
        ("compile_mode", "default"): 2.0, ("compile_mode", "reduce-overhead"): 2.0, **RECOMPUTATION,
    },
    launch_speedups={
        ("precision", "bf16"): 0.8, ("precision", "fp16"): 0.75, ("compile_mode", "default"): 1.05,
        ("compile_mode", "reduce-overhead"): 4.0, **RECOMPUTATION,
    },
    update_speedups={("optimizer_impl", "fused"): 2.7, ("optimizer_impl", "for_loop"): 0.3},
    constant_bytes=64 * MIB, sample_bytes=MIB // 16, process_spread=0.08, block_spread=0.1,
    start_seconds=0.8, compile_seconds=19.0, cached_share=0.07, check_seconds=0.7,
)  # fmt: skip
"""`examples/small.py` with the seconds and the noise of an H200: 24 narrow layers, whose kernels the device waits for."""

IMAGE_MODEL = Program(
    sample_seconds=0.0012, launch_seconds=0.01, update_seconds=0.004, load_seconds=0.005, copy_seconds=5e-5,
    sample_speedups={
        ("precision", "tf32"): 1.8, ("precision", "bf16"): 2.6, ("precision", "fp16"): 2.5,
        ("compile_mode", "default"): 1.15, ("compile_mode", "reduce-overhead"): 1.15, **RECOMPUTATION,
    },
    launch_speedups={("compile_mode", "default"): 1.5, ("compile_mode", "reduce-overhead"): 3.0},
    update_speedups={("optimizer_impl", "fused"): 2.0, ("optimizer_impl", "for_loop"): 0.3},
    constant_bytes=GIB, sample_bytes=80 * MIB,
    memory_shares={("precision", "bf16"): 0.6, ("precision", "fp16"): 0.6},
)  # fmt: skip
"""Limited by a loader that decodes images."""

RESNET_AS_TIMED = Program(
    sample_seconds=5.0e-4, launch_seconds=0.021, update_seconds=0.0015, load_seconds=3.4e-4, copy_seconds=3e-5,
    sample_speedups={
        ("precision", "bf16"): 1.1, ("precision", "fp16"): 1.1, ("memory_format", "channels_last"): 1.8,
        ("cudnn_benchmark", "on"): 1.03, ("compile_mode", "default"): 1.25, ("compile_mode", "reduce-overhead"): 1.25,
        **RECOMPUTATION,
    },
    launch_speedups={
        ("precision", "bf16"): 0.87, ("precision", "fp16"): 0.83, ("memory_format", "channels_last"): 0.85,
        ("compile_mode", "default"): 0.95, ("compile_mode", "reduce-overhead"): 4.0, **RECOMPUTATION,
    },
    update_speedups={("optimizer_impl", "fused"): 1.5, ("optimizer_impl", "for_loop"): 0.3},
    constant_bytes=GIB, sample_bytes=84 * MIB, process_spread=0.05, block_spread=0.05,
    start_seconds=3.0, compile_seconds=50.0, cached_share=0.15, check_seconds=8.0, tuning_seconds=17.0,
)  # fmt: skip
"""`examples/resnet50.py` with the seconds and about the noise of an H200, and a guess of what graphs give: in bf16 the host
starts kernels for nearly as long as the device computes, so that a device made faster by channels last shows nothing."""

TABLE_MODEL = Program(
    sample_seconds=0.0006, launch_seconds=0.004, update_seconds=0.002, load_seconds=0.0011,
    sample_speedups={
        ("precision", "bf16"): 0.45, ("compile_mode", "default"): 1.5, ("compile_scope", "step"): 1.02,
        ("compile_scope", "blocks"): 0.95, **RECOMPUTATION,
    },
    launch_speedups={("compile_mode", "default"): 1.8},
    update_speedups={("optimizer_impl", "fused"): 3.0, ("optimizer_impl", "foreach"): 0.9},
    sample_bytes=MIB // 2, process_spread=0.03, block_spread=0.03, compile_seconds=12.0,
)  # fmt: skip
"""On two noisy cores, where bf16 is slower and workers take from the step."""

FLAT = Program(sample_seconds=0.002, update_seconds=0.0012, process_spread=0.02, block_spread=0.03, compile_seconds=8.0)
"""Nothing helps but a larger batch, and that by less than 2 %."""

WORKERS_AND_PRECISION = Program(
    sample_seconds=0.005, launch_seconds=0.0012, load_seconds=0.00375, sample_speedups={("precision", "bf16"): 4.0}
)
"""More workers alone give nothing, precision alone a third more, both together almost four times as much."""

SCENARIOS = {
    "language model": Scenario(
        LANGUAGE_MODEL,
        cuda_facts(global_batch_size=32, dataset_length=100_000, largest_batch_size=4096, num_workers=2),
        540.0,
    ),
    "language model in 16 GiB": Scenario(
        LANGUAGE_MODEL,
        cuda_facts(global_batch_size=32, dataset_length=100_000, largest_batch_size=4096, num_workers=2),
        540.0,
        memory_limit_bytes=16 * GIB,
    ),
    "small model, batch free": Scenario(
        SMALL_MODEL, cuda_facts(batch_held=False, dataset_length=200_000, largest_batch_size=8192), 600.0
    ),
    "small model": Scenario(
        SMALL_MODEL,
        cuda_facts(global_batch_size=256, batch_size=256, dataset_length=200_000, largest_batch_size=8192),
        600.0,
    ),
    "images": Scenario(
        IMAGE_MODEL,
        cuda_facts(
            global_batch_size=64, batch_size=64, num_workers=2, dataset_length=100_000, largest_batch_size=4096
        ),
        600.0,
    ),
    "tables on a CPU": Scenario(
        TABLE_MODEL,
        cpu_facts(
            global_batch_size=16, batch_size=16, dataset_length=4000, largest_batch_size=512,
            machine_changes=TWO_CORES,
        ),
        100.0,
    ),
}  # fmt: skip
SMALL_IN_TWO_MINUTES = Scenario(
    SMALL_AS_TIMED,
    cuda_facts(
        global_batch_size=128, batch_size=128, num_workers=0, dataset_length=65_536, largest_batch_size=8192,
        machine_changes={"usable_cores": 16},
    ),
    120.0,
)  # fmt: skip
RESNET_IN_FIVE_MINUTES = Scenario(
    RESNET_AS_TIMED,
    cuda_facts(
        global_batch_size=64, batch_size=64, num_workers=0, dataset_length=4096, largest_batch_size=1024,
        convolution_ranks=(4,), machine_changes={"usable_cores": 16},
    ),
    290.0,
)  # fmt: skip
GPT2_IN_THREE_MINUTES = Scenario(
    GPT2_AS_TIMED, cuda_facts(batch_held=False, batch_size=32, dataset_length=100_000, largest_batch_size=4096), 180.0
)
FLAT_ON_A_CPU = Scenario(
    FLAT,
    cpu_facts(global_batch_size=32, dataset_length=4000, largest_batch_size=1000, machine_changes=TWO_CORES),
    60.0,
)
