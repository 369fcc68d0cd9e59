import pytest

from autotune.knobs.base import CodeLines
from autotune.knobs.prefetch_factor import PrefetchFactor
from tests.knobs.programs import baseline_config, train
from tests.knobs.search_facts import cpu_facts, cuda_facts

KNOB = PrefetchFactor()


def test_powers_of_two_and_the_users_own_number_are_offered() -> None:
    assert KNOB.choices(cpu_facts()) == (2, 4, 8)
    assert KNOB.choices(cpu_facts(prefetch_factor=3, num_workers=2)) == (2, 3, 4, 8)
    assert KNOB.baseline(cpu_facts(prefetch_factor=3, num_workers=2)) == 3
    assert KNOB.choices(cpu_facts(workers_fixed_reason="no sharding")) == (2,)


def test_nothing_is_loaded_in_advance_without_workers() -> None:
    assert KNOB.conflict(4, {"num_workers": 0}, cpu_facts()) == "nothing is loaded in advance without workers"
    assert KNOB.conflict(4, {"num_workers": 2}, cpu_facts()) is None
    assert KNOB.conflict(2, {"num_workers": 0}, cpu_facts()) is None
    reason = KNOB.conflict(4, {"num_workers": 2}, cpu_facts(workers_fixed_reason="no sharding"))
    assert reason == "the workers cannot be changed: no sharding"


def test_the_users_own_workers_with_more_batches_must_find_room_too() -> None:
    facts = cpu_facts(num_workers=2, machine_changes={"shared_memory_bytes": 4 * 32 * 1024})
    assert KNOB.conflict(2, {"num_workers": 2}, facts) is None
    reason = str(KNOB.conflict(8, {"num_workers": 2}, facts))
    assert "2 workers keep 16 batches of 32 samples ready" in reason
    few_files = cpu_facts(num_workers=2, machine_changes={"open_files_limit": 70})
    assert "open files" in str(KNOB.conflict(8, {"num_workers": 2}, few_files))


def test_export_names_the_argument() -> None:
    config = baseline_config(num_workers=2, prefetch_factor=8)
    assert KNOB.export(8, config, cuda_facts()) == CodeLines(loader_arguments={"prefetch_factor": "8"})


@pytest.mark.parametrize(("workers", "expected"), [(2, 8), (0, None)])
def test_applied_the_loader_prefetches_so_many_where_it_has_workers(workers: int, expected: int | None) -> None:
    training = train(num_workers=workers, prefetch_factor=8)
    assert training.loader.loader.prefetch_factor == expected
