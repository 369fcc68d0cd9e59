"""Everything that autotune writes down: frozen pydantic records, data only."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from autotune.config import TrainingConfig, Value

SCHEMA_VERSION = 1

FailureKind = Literal[
    "device_oom",
    "host_oom",
    "shared_memory",
    "file_limit",
    "timeout",
    "crash",
    "cuda_error",
    "compile_error",
    "numerics",
    "launch_limit",
    "user_error",
    "conflict",
    "memory_not_returned",
]
"""Every way in which a trial can end without a measurement. A closed set: search and reports may enumerate it."""

OUT_OF_MEMORY: frozenset[FailureKind] = frozenset({"device_oom", "host_oom"})
"""The kinds that say: this configuration is too large, a smaller batch may do."""

LONGEST_SOAK_SHARE = 1.25
"""Of the time that a soak is asked to run, where the end of a pass over the data set lies beyond it."""

Phase = Literal["start", "build", "compile", "warm-up", "measure", "loader", "parity", "soak", "finish"]
"""Where in its life a trial is. `compile` is the first step, whether or not anything is compiled."""

Bottleneck = Literal["loader", "host", "launch", "compute", "memory"]
"""What holds a training step back. `host` is CPU work inside the step, `launch` the cost of starting many small kernels."""
OF_STARTING: frozenset[Bottleneck] = frozenset({"launch", "host"})
"""What holds a step back whose device waits for its next kernel."""


class Record(BaseModel):
    """Frozen data; unknown fields are an error, so that a file of another version is noticed."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# --- the machine and the workload -------------------------------------------------------------------------------------


class GpuFacts(Record):
    """One GPU as NVML describes it."""

    index: int
    name: str
    uuid: str
    total_bytes: int
    used_bytes: int
    """In use when the facts were read, by whichever process."""
    compute_capability: tuple[int, int] | None
    processes: int | None
    """Other processes that hold memory on it; None where NVML does not say."""


class MachineFacts(Record):
    """What the search needs to know of the machine. `notes` says what could not be seen, one sentence each."""

    schema_version: int = SCHEMA_VERSION
    gpus: tuple[GpuFacts, ...]
    driver_version: str | None
    cpu_name: str
    usable_cores: int
    """Cores this process may use: the affinity mask, lowered by a cgroup quota."""
    memory_total_bytes: int
    """The machine's memory or the cgroup's limit, whichever is lower."""
    memory_available_bytes: int
    shared_memory_bytes: int
    """Free space in /dev/shm, through which loader workers hand over tensors."""
    open_files_limit: int
    platform: str
    python_version: str
    torch_version: str
    identity: str
    """Twelve hexadecimal digits: equal for two readings of one machine, different for another GPU or processor."""
    notes: tuple[str, ...] = ()


class WorkloadFacts(Record):
    """What a child process saw of the user's program in one step of it."""

    schema_version: int = SCHEMA_VERSION
    batch_structure: str
    """Such as `tuple of 2: float32 [32, 3, 224, 224], int64 [32]`."""
    sample_bytes: int
    """Bytes of tensors in a batch, divided by its samples."""
    batch_size: int
    """The user's own micro-batch; min(32, length) where data_fn returned a bare data set."""
    batch_held: bool
    """True where the user chose the batch (a DataLoader): it is then the global batch that training must keep."""
    batch_fixed_reason: str | None
    """Why the batch cannot be changed, or None."""
    workers_fixed_reason: str | None
    """Why the number of workers cannot be changed, or None."""
    num_workers: int
    pin_memory: bool
    prefetch_factor: int = 2
    """Batches that each worker holds ready; DataLoader's own number where the user's loader has no workers."""
    drop_last: bool
    dataset_kind: Literal["map", "iterable"]
    dataset_length: int | None
    model_class: str
    parameter_count: int
    trainable_parameter_count: int
    parameter_bytes: int
    block_class: str | None
    blocks: tuple[str, ...]
    """Module names of the repeated blocks, empty where none were found."""
    optimizer_class: str
    optimizer_variants: tuple[str, ...]
    """Of `for_loop`, `foreach`, `fused`: what the user's optimizer can be switched to on this device."""
    optimizer_fixed_reason: str | None
    has_scheduler: bool
    has_batch_norm: bool
    has_tracking_instance_norm: bool = False
    """InstanceNorm that keeps running statistics, which each micro-batch moves once."""
    convolution_ranks: tuple[int, ...] = ()
    """Ranks of the weights of the model's convolutions, each once: 4 for 2-D ones."""
    has_dropout: bool
    comes_in_evaluation: bool = False
    """Whether `model_fn` returns the model in evaluation mode: it is trained in training mode all the same."""
    parameters_are_double: bool = False
    """Whether all of them are float64, or complex numbers of two."""
    model_is_compiled: bool
    """The user's model_fn compiles already."""
    loss_convention: str
    """How the loss is obtained, in words, such as `loss_fn(model, batch) returns a scalar mean`."""
    loss_weighted: bool
    """True where the loss comes as (loss_sum, weight)."""
    first_loss: float
    process_settings: dict[str, Value]
    """What the user's file set globally: matmul precision, cudnn flags, thread count."""
    step_seconds: float
    """One warm step of the user's program, a first idea of what a search costs."""
    fingerprint: str
    """Twelve hexadecimal digits of parameter names and shapes, batch structure, optimizer class and loss convention."""
    step_fits: bool = True
    """False: no step of the program fits as it is, and what stands here was seen in forward passes alone."""
    notes: tuple[str, ...] = ()


class SearchFacts(Record):
    """What knobs may look at to decide which of their values are worth trying."""

    machine: MachineFacts
    workload: WorkloadFacts
    device: Literal["cuda", "cpu"]
    global_batch_size: int | None
    """Samples of one optimizer step that training must keep, or None where the batch is free."""
    largest_batch_size: int
    """No micro-batch above this is tried: the data set's length, or a cap."""


# --- asking a trial process ------------------------------------------------------------------------------------------


class Conditions(Record):
    """What is the same in every trial of a study."""

    device: Literal["cuda", "cpu"]
    global_batch_size: int | None
    clip_grad_norm: float | None = None
    memory_limit_bytes: int | None = None
    """Makes the card (or, on CPU, the process) smaller than it is."""
    memory_margin: float = 0.05
    """Share of the memory that must stay unreserved for a configuration to count as feasible."""
    seed: int = 0


class PhaseTimeouts(Record):
    """Seconds that each phase may take before the trial is ended as a timeout."""

    build_seconds: float = 120.0
    compile_seconds: float = 300.0
    measure_seconds: float = 120.0
    """Each of warm-up, measure, loader, parity and soak."""


TrialKind = Literal["facts", "measure", "memory", "loader", "parity", "soak"]


class TrialRequest(Record):
    """What the orchestrator asks of one trial process."""

    kind: TrialKind
    config: TrainingConfig
    """Empty for `facts`, which runs the user's program as it stands."""
    trial: int | None = None
    """The trial's number in its study, after which the file of its output is named; None for what is no trial there."""
    conditions: Conditions
    blocks: tuple[str, ...] = ()
    """Module names of the repeated blocks, from the facts; for `facts` itself, module or class names from the user."""
    facts_batch_size: int | None = None
    """For `facts`: read them in a step of so many samples, where the user's own batch does not fit."""
    facts_forward_only: bool = False
    """For `facts`: read them in forward passes that keep nothing, where no step fits."""
    reference: TrainingConfig = TrainingConfig({})
    """Values without which the user's program fits at no batch: it is compared with as it is but for these."""
    block_seconds: float = 0.3
    minimum_blocks: int = 3
    maximum_blocks: int = 12
    relative_precision: float = 0.01
    """Blocks are added until the 95 % interval is this narrow (half-width over rate), or `maximum_blocks` is reached."""
    measure_resident: bool = True
    """Also time steps on batches that already lie on the device."""
    rate_to_beat: float | None = None
    """Samples per second, end to end. A trial that clearly stays below is out of the race, and measured no longer than it
    takes to see that. None: there is no race."""
    resident_rate_to_beat: float | None = None
    """The same on resident batches, for who judges by those: a trial is then out of the race only where it stays clearly
    below both."""
    timeouts: PhaseTimeouts = PhaseTimeouts()


# --- what a trial process answers -------------------------------------------------------------------------------------


class Failure(Record):
    """A trial that ended without a measurement, as a value."""

    kind: FailureKind
    phase: Phase
    message: str
    """One sentence: what happened, with which value, what to change."""
    detail: str = ""
    """The user's own frames of the traceback, where there is one."""
    signal: str | None = None
    """Such as SIGSEGV, for `crash`."""
    output_path: str | None = None
    """File with what the trial printed."""


class MemoryMarks(Record):
    """Bytes at marked points of a step. Device bytes on CUDA; the process's resident growth on CPU."""

    peak_allocated_bytes: int
    allocated_after_forward_bytes: int | None = None
    peak_forward_backward_bytes: int | None = None
    peak_optimizer_step_bytes: int | None = None
    reserved_bytes: int | None = None
    driver_used_bytes: int | None = None
    allocator_retries: int = 0
    growth_bytes_per_step: float = 0.0
    """Live memory that each further step adds once warm: above noise it is a leak."""


class Blocks(Record):
    """Raw timings: each block is a whole number of optimizer steps."""

    seconds: tuple[float, ...]
    samples: tuple[int, ...]
    steps: tuple[int, ...]
    weights: tuple[float, ...] = ()
    """Sum of the loss's own weights (tokens), where it gives them."""


class SpentSeconds(Record):
    """What the parts of a trial took in its process, beside its first step. No two of them overlap, save that
    `process_seconds` holds them all."""

    start_seconds: float
    """From the start of the process until it begins to build: an interpreter and its imports where it was not forked,
    and the memory limit. 0 where the process was not started for the trial."""
    device_seconds: float
    """The first use of the device: on CUDA its context, unless a memory limit or the user's model has made that."""
    model_seconds: float
    """The user's `model_fn`."""
    optimizer_seconds: float
    """The user's `optimizer_fn` and `scheduler_fn`."""
    data_seconds: float
    """The user's `data_fn`."""
    first_batch_seconds: float
    """Until the loader gave its first window."""
    warm_up_seconds: float
    end_to_end_seconds: float
    """The timed blocks, and the marks between them."""
    resident_seconds: float
    """The blocks on batches that lie on the device, and their warm-up."""
    shares_seconds: float
    """Seeing how far the device lags, and what the update takes."""
    process_seconds: float
    """From the start of the process until everything is measured."""


class Measurement(Record):
    """One configuration, measured end to end in one process."""

    samples_per_second: float
    interval: tuple[float, float]
    """95 %."""
    blocks: Blocks
    weight_per_second: float | None = None
    weight_interval: tuple[float, float] | None = None
    """95 %; None where the loss gives no weights, or none in some block."""
    resident_samples_per_second: float | None = None
    resident_interval: tuple[float, float] | None = None
    """95 %."""
    resident_blocks: Blocks | None = None
    memory: MemoryMarks
    micro_batch_size: int
    micro_batches_per_step: int
    warmup_steps: int
    build_seconds: float
    first_step_seconds: float
    """The first optimizer step, compilation and autotuning of kernels included."""
    process_seconds: float
    """From the start of the process to the end of the first step."""
    compiled_graphs: int = 0
    compile_was_cached: bool = False
    """The compiler found its output on disk: `first_step_seconds` is then not what a first run pays."""
    graph_breaks: int = 0
    recompiles: int = 0
    skipped_steps: int = 0
    """Optimizer steps that a gradient scaler left out."""
    losses: tuple[float, ...] = ()
    device_lag_share: float | None = None
    """Share of a resident step in which the device still works after the CPU has queued all of it. Near 0: the CPU
    holds the step back (launches, or work of its own). None on CPU."""
    update_share: float | None = None
    """Share of a resident step spent in the optimizer's update."""
    start_method: Literal["fork", "fresh"] = "fork"
    gpu_notes: tuple[str, ...] = ()
    """Throttling, other processes: what NVML showed meanwhile."""
    stopped_early: bool = False
    """It was clearly out of the race after the fewest blocks, so that what it would have taken to know more was saved."""
    spent: SpentSeconds | None = None


class MemoryProbe(Record):
    """A configuration run for a few steps to see what it takes."""

    micro_batch_size: int
    memory: MemoryMarks
    limit_bytes: int | None
    """What the process was allowed."""
    fits: bool
    """It ran, without allocator retries, and left the margin."""
    reason: str = ""
    """Why it does not count as fitting although it ran."""
    step_seconds: float


class LoaderProbe(Record):
    """The loader alone, nothing trained."""

    num_workers: int
    micro_batch_size: int
    samples_per_second: float
    interval: tuple[float, float] | None = None
    """95 %."""
    blocks: Blocks


class ParityResult(Record):
    """A configuration's gradients and buffers held against the user's program in fp32, eager."""

    passed: bool
    reason: str
    """One sentence; for a failure also what to change, where that is known."""
    relative_error: float
    """Norm of the gradient difference over the norm of the reference gradient, all parameters together."""
    cosine: float
    floor: float
    """The same error for the reference with weights and inputs rounded to the candidate's type, or reseeded."""
    tolerance: float
    worst_parameter: str | None = None
    worst_parameter_error: float | None = None
    worst_parameter_tolerance: float | None = None
    """What this one may differ by, which is more than all together; None in records from before it was kept."""
    missing_gradients: tuple[str, ...] = ()
    buffer_error: float = 0.0
    worst_buffer: str | None = None
    update_error: float = 0.0
    """Largest distance of a parameter from where the reference's updates lead, both given the same gradients, over how
    far these move it."""
    worst_update: str | None = None
    reference_losses: tuple[float, ...]
    candidate_losses: tuple[float, ...]
    """Of the same steps, each at the reference's weights."""
    loss_tolerance: float | None = None
    """How far a loss may be from the reference's, absolute; None in records from before it was held to anything."""
    skipped_steps: int = 0
    """Loss scales that overflowed before one did not; a step is skipped for each."""
    micro_batch_size: int
    micro_batches_per_step: int
    notes: tuple[str, ...] = ()


class SoakResult(Record):
    """The configuration run on for longer, over ends of the data set."""

    steps: int
    samples_per_second: float
    interval: tuple[float, float] | None = None
    """95 %."""
    block_count: int = 0
    growth_bytes_per_step: float
    allocator_retries: int
    last_samples_per_second: float | None = None
    """In the last third of it, what it waited for a core that other work had left out."""
    lost_gradients: tuple[str, ...] = ()
    """Parameters that had a gradient when it began and have none at its end."""
    findings: tuple[str, ...] = ()
    """What went wrong, one sentence each; empty when it held."""


class TrialAnswer(Record):
    """What came back from a trial process. Exactly one of the payloads, or a failure."""

    schema_version: int = SCHEMA_VERSION
    facts: WorkloadFacts | None = None
    measurement: Measurement | None = None
    memory: MemoryProbe | None = None
    loader: LoaderProbe | None = None
    parity: ParityResult | None = None
    soak: SoakResult | None = None
    failure: Failure | None = None
    seconds: float = 0.0
    """From the request to the answer, the process's end included."""
    output_path: str | None = None


# --- what the search keeps -------------------------------------------------------------------------------------------

Stage = Literal["baseline", "memory", "compute", "loader", "explore", "confirm", "parity", "soak"]
"""The stages of a search, in their order."""


class Trial(Record):
    """One configuration and what became of it."""

    schema_version: int = SCHEMA_VERSION
    number: int
    stage: Stage
    config: TrainingConfig
    measurement: Measurement | None = None
    parity: ParityResult | None = None
    failure: Failure | None = None
    """Beside a measurement: it ran and is not usable (trains differently, left no margin, failed when it ran on)."""
    round: int | None = None
    """Which round of the confirmation, counted from 0; None outside it."""
    started_at: float
    """Seconds since the epoch."""
    seconds: float
    machine_identity: str


class Probe(Record):
    """What else a trial process was asked (see `kind`), kept beside the trials and not told to the sampler."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["memory", "loader", "parity", "soak"]
    config: TrainingConfig
    answer: TrialAnswer
    started_at: float
    machine_identity: str


class Ceiling(Record):
    """How far the batch goes in one memory class. Every number in it ran, or failed, on this machine."""

    memory_class: dict[str, Value]
    """The knobs that make the class, with their values."""
    largest_batch_size: int | None
    """The largest micro-batch that ran and left the margin; None where not even the smallest did."""
    smallest_failed_batch_size: int | None
    """None: no size failed, the ceiling is at least `largest_batch_size`."""
    failure_kind: FailureKind | None
    """Of that smallest failed size; None also where it ran without leaving the margin."""
    peak_allocated_bytes: int | None
    bytes_per_sample: float | None
    """Slope of the peak, where two readings showed one."""
    probes: int
    out_of_memory_count: int
    stopped_because: str
    """Why no larger size was tried, in words."""


class Standing(Record):
    """How good the best so far is: as its first measurement says, or its rounds of the confirmation once it has any."""

    samples_per_second: float
    speedup: float
    """How many times the baseline's."""
    beside: str = "your settings"
    """What the baseline is called."""


class Ratio(Record):
    """How many times faster than the baseline, with its 95 % interval."""

    value: float
    interval: tuple[float, float]


class Answer(Record):
    """One configuration that a person could run, with its evidence and its price."""

    config: TrainingConfig
    effective_batch_size: int
    micro_batch_size: int
    micro_batches_per_step: int
    samples_per_second: float
    interval: tuple[float, float]
    block_count: int = 0
    """Timed blocks that the rate rests on, over all processes; 0 where that was not kept."""
    weight_per_second: float | None = None
    weight_interval: tuple[float, float] | None = None
    """95 %."""
    speedup: Ratio
    computes_the_same: bool = False
    """Nothing that is computed differs from the baseline: only how batches are loaded."""
    confirmed_rounds: int
    """Fresh processes in which it was measured, interleaved with the baseline; 0 where time ran out."""
    peak_allocated_bytes: int
    reserved_bytes: int | None
    compile_seconds: float
    """Cold first step beyond the baseline's."""
    compile_was_cached: bool = False
    """In every process that ran it: `compile_seconds` is then less than a first run pays."""
    compile_pays_after_steps: int | None
    """Optimizer steps after which the time saved exceeds `compile_seconds`; None where nothing is saved."""
    training_hours: float | None = None
    """For the number of samples that the user gave."""
    parity: ParityResult | None = None
    reasons: tuple[str, ...] = ()
    prices: tuple[str, ...] = ()


Strategy = Literal["staged", "tpe", "gp", "random", "exhaustive"]
"""Which points a search measures: those that its stages lead to; those that one of Optuna's samplers proposes, for
comparison; or all of the space."""


class OtherSearch(Record):
    """A search in the same directory as another one, whose trials do not count for that."""

    last_started_at: float
    """Of its last trial."""
    trial_count: int
    differences: tuple[str, ...]
    """In what it was asked for, such as `seed: 1 then, 0 now`; empty where that is not known."""


class Settings(Record):
    """What the user asked for."""

    objective: Literal["throughput", "memory"] = "throughput"
    budget_seconds: float
    trials: int | None = None
    strategy: Strategy = "staged"
    space: str
    only: tuple[str, ...] = ()
    fixed: dict[str, Value] = Field(default_factory=dict)
    blocks: tuple[str, ...] = ()
    """Modules, or their class, to recompute or compile one by one; empty: they were looked for."""
    free_batch: bool = False
    train_samples: int | None = None
    conditions: Conditions


class WorkloadReference(Record):
    """Where the user's functions are, so that an export can import them. By value: nothing but a name to show."""

    form: Literal["file", "module", "value"]
    location: str
    """A path, a dotted module name, or a description."""
    names: dict[str, str]
    """Function role (model_fn, data_fn, ...) to its name there."""
    source_hash: str
    """Twelve hexadecimal digits of the source text, so that a change of it is noticed."""


class Recommendation(Record):
    """The outcome of a search: a pure function of its trials."""

    schema_version: int = SCHEMA_VERSION
    machine: MachineFacts
    workload: WorkloadFacts
    reference: WorkloadReference
    settings: Settings
    keep: bool
    """True: nothing measured is better than what the user has."""
    verdict: str
    """The answer in one sentence."""
    baseline: Answer
    reference_settings: dict[str, Value] = Field(default_factory=dict)
    """What `baseline` takes beside the user's own settings, since their program fits at no batch without; `keep` is then
    False."""
    best: Answer
    free_batch: Answer | None
    """With the batch free: None where it is already free or nothing else is better."""
    bottleneck: Bottleneck | None
    ceilings: tuple[Ceiling, ...]
    trial_count: int
    """Those of the search proper: one measurement of each configuration."""
    confirmation_count: int = 0
    """Trials that measured again what may be recommended, beside the baseline."""
    earlier_trial_count: int = 0
    """Of both together, those that earlier calls of the same command ran."""
    failure_counts: dict[str, int]
    other_settings: tuple[str, ...] = ()
    """What was tried beside `best` and left out, and what was not tried and why, one sentence each."""
    rejected: tuple[str, ...]
    """What ran and is not recommended because it trains differently or failed later, one sentence each."""
    warnings: tuple[str, ...] = ()
    search_seconds: float
    stage_seconds: dict[Stage, float] = Field(default_factory=dict)
    """Of `search_seconds`, what the trial processes of each stage took; the rest is starting, and our own."""
    autotune_version: str
