import pytest
import torch

from autotune.knobs.base import CodeLines
from autotune.knobs.batch_size import BatchSize, micro_batches_per_step
from tests.knobs.programs import BATCH_SIZE, assert_equal_tensors, baseline_config, gradients, train
from tests.knobs.search_facts import cpu_facts

KNOB = BatchSize()


@pytest.mark.parametrize(
    ("micro", "total", "count"), [(8, None, 1), (8, 32, 4), (32, 32, 1), (33, 32, 1), (64, 32, 1), (1, 7, 7)]
)
def test_micro_batches_add_up_to_the_global_batch(micro: int, total: int | None, count: int) -> None:
    assert micro_batches_per_step(micro, total) == count


def test_a_smaller_batch_that_does_not_divide_the_global_batch_is_refused() -> None:
    message = "micro-batches of 12 do not add up to the global batch of 32; use a divisor of 32"
    with pytest.raises(ValueError, match=message):
        micro_batches_per_step(12, 32)
    assert KNOB.conflict(12, {}, cpu_facts(global_batch_size=32)) == message


def test_choices_with_a_free_batch_are_powers_of_two_and_halfway_and_the_users_own() -> None:
    assert KNOB.choices(cpu_facts(batch_size=20, largest_batch_size=50)) == (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48)


def test_choices_with_a_held_batch_are_its_divisors_and_larger_ones() -> None:
    facts = cpu_facts(global_batch_size=20, batch_size=20, largest_batch_size=50)
    assert KNOB.choices(facts) == (1, 2, 4, 5, 10, 20, 24, 32, 48)
    assert all(KNOB.conflict(value, {}, facts) is None for value in KNOB.choices(facts))


def test_the_baseline_with_a_held_batch_is_the_largest_divisor_below_the_users_batch() -> None:
    assert KNOB.baseline(cpu_facts(global_batch_size=96, batch_size=40)) == 32
    assert KNOB.baseline(cpu_facts(global_batch_size=16, batch_size=40)) == 16
    assert KNOB.baseline(cpu_facts(batch_size=40)) == 40


def test_a_global_batch_with_hundreds_of_divisors_keeps_the_plain_ones() -> None:
    facts = cpu_facts(global_batch_size=7_207_200, batch_size=7, largest_batch_size=8_000_000, dataset_length=None)
    choices = KNOB.choices(facts)
    assert len(choices) == 40
    assert {1, 2, 3, 4, 6, 7, 8, 12, 16, 24, 32, 48, 96, 7_207_200} <= set(choices)


def test_a_fixed_batch_offers_the_baseline_alone_and_says_why() -> None:
    facts = cpu_facts(batch_fixed_reason="the loader has a batch_sampler of its own")
    assert KNOB.choices(facts) == (32,)
    assert KNOB.conflict(16, {}, facts) == "the batch cannot be changed: the loader has a batch_sampler of its own"


def test_a_batch_above_the_data_set_is_refused() -> None:
    facts = cpu_facts(dataset_length=40, largest_batch_size=64)
    assert KNOB.conflict(40, {}, facts) is None
    assert "larger than the data set of 40 samples: no batch would be full" in str(KNOB.conflict(48, {}, facts))
    dropping = cpu_facts(dataset_length=40, drop_last=True)
    assert "drop_last then leaves no batch at all" in str(KNOB.conflict(48, {}, dropping))


def test_a_batch_above_the_largest_tried_is_refused() -> None:
    assert (
        KNOB.conflict(65, {}, cpu_facts(largest_batch_size=64))
        == "a batch of 65 is above the largest that is tried, 64"
    )


def test_rank_counts_doublings() -> None:
    facts = cpu_facts(batch_size=32)
    assert [KNOB.rank(value, facts) for value in (8, 32, 64)] == [2, 0, 1]


def test_parse_refuses_what_is_no_batch() -> None:
    with pytest.raises(ValueError, match="batch_size must be at least 1, not 0"):
        KNOB.parse("0")


def test_export_names_what_changes() -> None:
    facts = cpu_facts(global_batch_size=32)
    assert KNOB.export(8, baseline_config(), facts) == CodeLines(
        loader_arguments={"batch_size": "8"}, micro_batches_per_step="4"
    )


def test_applied_the_loader_draws_batches_of_that_size() -> None:
    training = train(batch_size=6)
    window = next(iter(training.loader))
    assert training.loader.loader.batch_size == 6
    assert [len(micro_batch.data[0]) for micro_batch in window] == [6]


def test_applied_a_held_batch_becomes_windows_with_the_same_gradient() -> None:
    training = train(norm=False, batch_size=2, global_batch_size=BATCH_SIZE)
    window = next(iter(training.loader))
    assert [micro_batch.samples for micro_batch in window] == [2, 2]
    expected = gradients(train(norm=False, global_batch_size=BATCH_SIZE))
    assert_equal_tensors(gradients(training), expected, tolerance=1e-5)
    assert any(bool(gradient.abs().max() > 1e-3) for gradient in expected.values())
    assert torch.cat([micro_batch.data[0] for micro_batch in window]).shape[0] == BATCH_SIZE
