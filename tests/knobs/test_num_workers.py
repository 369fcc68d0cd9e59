import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

from autotune.knobs.base import CodeLines
from autotune.knobs.num_workers import NumWorkers, tensors_in_batch
from autotune.surgery.batches import describe
from tests.knobs.programs import baseline_config, train
from tests.knobs.search_facts import cpu_facts

KNOB = NumWorkers()
SENSORS = describe({f"sensor_{number:02d}": torch.zeros(4, 2) for number in range(60)})


def test_choices_go_up_to_the_usable_cores() -> None:
    assert KNOB.choices(cpu_facts()) == (0, 1, 2, 3, 4, 6, 8, 12, 16)


def test_small_machines_are_offered_more_workers_than_cores() -> None:
    assert KNOB.choices(cpu_facts(machine_changes={"usable_cores": 2})) == (0, 1, 2, 3, 4)


def test_the_users_own_number_is_always_a_choice() -> None:
    assert KNOB.choices(cpu_facts(num_workers=21))[-1] == 21


def test_fixed_workers_offer_the_baseline_alone_and_say_why() -> None:
    facts = cpu_facts(workers_fixed_reason="the data set gives every worker the same samples", num_workers=3)
    assert KNOB.choices(facts) == (3,)
    reason = KNOB.conflict(0, {}, facts)
    assert reason == "the number of workers cannot be changed: the data set gives every worker the same samples"


def test_prefetched_batches_must_fit_into_shared_memory() -> None:
    facts = cpu_facts(sample_bytes=2**20, machine_changes={"shared_memory_bytes": 64 * 2**20})
    assert KNOB.conflict(4, {"batch_size": 8}, facts) is None
    assert KNOB.conflict(4, {"batch_size": 9}, facts) == (
        "4 workers keep 8 batches of 9 samples ready, 72.0 MiB, and shared memory has 64.0 MiB; "
        "enlarge /dev/shm or use fewer"
    )


def test_batches_of_many_tensors_must_fit_into_the_limit_of_open_files() -> None:
    low = cpu_facts(batch_structure=SENSORS, machine_changes={"open_files_limit": 128})
    assert KNOB.conflict(0, {}, low) is None
    assert KNOB.conflict(1, {}, low) == (
        "1 workers with 60 tensors a batch need about 232 open files, and the limit is 128; "
        "raise it with `ulimit -n` or use fewer"
    )
    high = cpu_facts(batch_structure=SENSORS, machine_changes={"open_files_limit": 1024})
    assert KNOB.conflict(4, {}, high) is None


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(2), 1),
        ((torch.zeros(2, 3), torch.zeros(2)), 2),
        ({"image": torch.zeros(2, 3), "boxes": (torch.zeros(1), torch.zeros(1))}, 3),
        ([torch.zeros(2) for _ in range(60)], 60),
        ([torch.zeros(size) for size in range(60)], 60),
        (({"boxes": torch.zeros(1), "labels": torch.zeros(1), "name": "a"},) * 5, 10),
        ((torch.zeros(2), [torch.zeros(2)] * 7), 8),
        ((torch.zeros(2), ["a caption"] * 60), 1),
        ("nothing", 1),
    ],
)
def test_tensors_are_counted_from_the_description(batch: object, count: int) -> None:
    assert tensors_in_batch(describe(batch)) == count


def test_the_users_number_is_simplest_then_the_fewest() -> None:
    facts = cpu_facts(num_workers=2)
    assert sorted(KNOB.choices(facts), key=lambda value: KNOB.rank(value, facts))[:3] == [2, 0, 1]


def test_parse_refuses_a_negative_number() -> None:
    with pytest.raises(ValueError, match="num_workers must be at least 0, not -1"):
        KNOB.parse("-1")


def test_export_is_a_loader_argument() -> None:
    assert KNOB.export(4, baseline_config(), cpu_facts()) == CodeLines(loader_arguments={"num_workers": "4"})


class WhoLoads(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Items that say which worker made them, -1 for the training process."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        worker = get_worker_info()
        return torch.zeros(6), torch.tensor([-1.0 if worker is None else float(worker.id)])


@pytest.mark.parametrize(("value", "workers"), [(0, {-1.0}), (2, {0.0, 1.0})])
def test_applied_batches_come_from_that_many_processes(value: int, workers: set[float]) -> None:
    training = train(data=lambda: DataLoader(WhoLoads(), batch_size=4, num_workers=1), num_workers=value)
    assert {float(micro_batch.data[1][0]) for window in training.loader for micro_batch in window} == workers


def test_applied_no_workers_drops_what_only_workers_take() -> None:
    def with_workers() -> DataLoader[tuple[torch.Tensor, ...]]:
        data = torch.zeros(8, 6)
        return DataLoader(
            TensorDataset(data, data[:, :1]), batch_size=4, num_workers=2, prefetch_factor=3, persistent_workers=True
        )

    training = train(data=with_workers, num_workers=0)
    assert training.loader.loader.num_workers == 0
    assert training.loader.loader.prefetch_factor is None


def test_workers_beyond_the_cores_get_less_credit_unless_they_are_the_users() -> None:
    facts = cpu_facts(machine_changes={"usable_cores": 2}, num_workers=0)
    assert [KNOB.credit(count, facts) for count in (0, 1, 2)] == [1.0, 1.0, 1.0]
    assert KNOB.credit(3, facts) == KNOB.credit(4, facts) < 0.98
    assert KNOB.credit(8, cpu_facts(machine_changes={"usable_cores": 2}, num_workers=8)) == 1.0
