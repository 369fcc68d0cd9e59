from __future__ import annotations

from autotune.options import CheckReport, MemoryReport, RefusedValue
from autotune.records import Ceiling
from autotune.report.listings import KnobLine, check_document, knobs_document, memory_document, spaces_document
from autotune.report.text import render
from tests.report.sample_records import BASELINE, GIB, ceiling, machine, search_facts, workload


def check_text(**changes: object) -> str:
    fields: dict[str, object] = {
        "facts": search_facts(),
        "offered": {"precision": ("as_is", "tf32", "bf16"), "pin_memory": (False, True), "num_workers": (0,)},
        "refused": (
            RefusedValue(knob="num_workers", value=None, reason="the data set does not shard"),
            RefusedValue(knob="batch_size", value=4096, reason="larger than the data set"),
        ),
        "estimated_search_seconds": 480.0,
        "budget_seconds": 600.0,
        "warnings": ("another process uses the GPU",),
    }
    report = CheckReport.model_validate({**fields, **changes})
    return " ".join(render(check_document(report)).split())


def memory_text(*ceilings: Ceiling, limit_bytes: int | None = 24 * GIB) -> str:
    report = MemoryReport(facts=search_facts(), baseline=BASELINE, ceilings=ceilings, limit_bytes=limit_bytes)
    return " ".join(render(memory_document(report)).split())


OWN_CLASS = {"precision": "as_is", "compile_mode": "as_is"}


def test_check_tells_what_was_understood() -> None:
    text = check_text()
    for fact in (
        "ResNet, 11,000,000 parameters, 10,000,000 trained, 42.0 MiB; 3 blocks of BasicBlock, layer1.0 to layer2.0",
        "batch: 32 samples, tuple of 2: float32 [32, 3, 32, 32], int64 [32], 12.0 KiB a sample",
        "held: every optimizer step takes 32 samples",
        "map data set, 50,000 samples, 2 workers",
        "AdamW, with a scheduler",
        "loss_fn(model, batch) returns a scalar mean; the first is 2.303",
        "one warm step takes 0.12 s on cuda",
        "settings in force: matmul_precision=high",
        "GPU 0: NVIDIA H200, 141 GiB, 1.0 GiB in use",
        "16 usable cores",
    ):
        assert fact in text


def test_check_lists_what_is_offered_and_what_is_refused_with_the_reason() -> None:
    text = check_text()
    assert "precision as_is, tf32, bf16" in text
    assert "pin_memory false, true" in text
    assert "What it would leave alone - num_workers=0 Not tried here" in text
    assert "num_workers: the data set does not shard" in text
    assert "batch_size=4096: larger than the data set" in text
    assert "another process uses the GPU" in text
    assert "A search of this takes about 8 min. Its budget of 10 min (--budget) is the most that it takes" in text
    short = check_text(budget_seconds=45.0)
    assert (
        "A search of all this takes about 8 min, and gets 45 s (--budget): it tries first what promises most" in short
    )


def test_check_of_a_program_with_less_to_tell() -> None:
    facts = search_facts(
        global_batch_size=None,
        device="cpu",
        machine=machine(gpus=(), notes=("NVML is not there",)),
        workload=workload(
            blocks=(), block_class=None, dataset_length=None, dataset_kind="iterable", has_scheduler=False,
            process_settings={}, pin_memory=True, drop_last=True, notes=("weights are tied",),
        ),
    )  # fmt: skip
    text = check_text(facts=facts, refused=(), warnings=())
    assert "no repeated blocks found" in text
    assert "the batch is free" in text
    assert "iterable data set, no length, 2 workers, pinned memory, the last batch is dropped" in text
    assert "no GPU seen" in text
    assert "NVML is not there" in text
    assert "weights are tied" in text
    for absent in ("settings in force", "Not tried here", "Warnings", "scheduler"):
        assert absent not in text


def test_memory_answers_the_question_first() -> None:
    own = ceiling(memory_class=OWN_CLASS, largest_batch_size=48, smallest_failed_batch_size=64)
    text = memory_text(own, ceiling())
    assert text.startswith("It fits within 24.0 GiB: your batch is 32, and with your settings up to 48 ran.")
    assert "your settings 48 140 GiB 64 (device_oom)" in text
    assert "precision=bf16: 819 MiB more for each sample" in text


def test_memory_says_what_makes_room_where_the_users_settings_do_not_fit() -> None:
    own = ceiling(memory_class=OWN_CLASS, largest_batch_size=24, smallest_failed_batch_size=32)
    assert memory_text(own, ceiling(), limit_bytes=None).startswith(
        "A batch of 32 does not fit with your settings; the largest that ran is 24. "
        "It fits with precision=bf16 (up to 176 ran)."
    )


def test_memory_says_when_nothing_makes_room() -> None:
    nothing = {"largest_batch_size": None, "peak_allocated_bytes": None, "smallest_failed_batch_size": 1}
    text = memory_text(ceiling(memory_class=OWN_CLASS, **nothing), ceiling(**nothing))
    assert text.startswith(
        "A batch of 32 does not fit within 24.0 GiB with your settings. "
        "No other setting that was tried makes room for it."
    )


def test_knobs_and_spaces_are_listed_with_what_they_are_for() -> None:
    knobs = " ".join(
        render(knobs_document([KnobLine("precision", "type of products", "rounding", ("compute",))])).split()
    )
    assert "precision: type of products (rounds differently, which is checked; helps against compute)" in knobs
    assert "autotune check FILE.py" in knobs
    spaces = render(spaces_document({"quick": "nothing that compiles", "default": "most"}))
    assert spaces.splitlines()[1:3] == ["  - quick: nothing that compiles", "  - default: most"]


def test_check_says_where_no_step_of_the_program_fits() -> None:
    lean = workload(step_fits=False, notes=("seen in forward passes",))
    text = check_text(facts=search_facts().model_copy(update={"workload": lean}), warnings=lean.notes)
    assert text.startswith(
        "Your program is understood: no training step of it fits, and a search begins with what makes"
    )
    assert text.count("seen in forward passes") == 1
