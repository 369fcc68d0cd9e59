"""Probes: memory on the largest batch that a pass holds, and the loader alone."""

import math
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, get_worker_info

from autotune.config import TrainingConfig
from autotune.failure import TrialFailure
from autotune.measurement.marks import MemoryMeter
from autotune.measurement.probes import probe_loader, probe_memory
from autotune.measurement.samples import check_workers
from autotune.measurement.soak import soak
from autotune.records import Conditions, TrialRequest
from autotune.training.training import Training
from autotune.workload import UserFunctions
from tests.measurement.programs import WIDTH, agrees, pause, program, request


class Texts(Dataset):
    """All are short, but for one that comes late."""

    def __len__(self):
        return 129

    def __getitem__(self, index):
        return torch.ones(64 if index == 100 else 4)


class Reader(nn.Module):
    def __init__(self, seen):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen = seen

    def forward(self, rows):
        self.seen.append(rows.shape[1])
        return (rows * self.weight).mean()


def test_the_longest_batch_of_a_pass_is_stepped_on(monkeypatch):
    monkeypatch.setattr("autotune.measurement.probes.UNIFORM_SECONDS", 100.0)
    seen = []
    functions = UserFunctions(
        model_fn=lambda: Reader(seen),
        data_fn=lambda: DataLoader(
            Texts(), batch_size=2, collate_fn=lambda rows: (pad_sequence(rows, batch_first=True),)
        ),
    )
    conditions = Conditions(device="cpu", global_batch_size=None)
    asked = TrialRequest(kind="memory", config=TrainingConfig({}), conditions=conditions)
    probe = probe_memory(functions, asked, lambda phase: None)
    assert 64 in seen
    assert len(seen) < 10, "the others are only looked at"
    assert probe.fits


class Sleepy(Dataset):
    """Takes 2 ms to load a sample."""

    def __len__(self):
        return 2048

    def __getitem__(self, index):
        pause(0.002)
        return torch.ones(WIDTH), torch.ones(1)


def sleepy_data():
    return DataLoader(Sleepy(), batch_size=4)


@pytest.mark.parametrize(("workers", "seconds_per_sample"), [(0, 0.002), (1, 0.002), (2, 0.001)])
def test_the_loader_alone_gives_what_its_workers_can(workers, seconds_per_sample):
    asked = request("loader", num_workers=workers, batch_size=4, block_seconds=0.1, maximum_blocks=3)
    phases = []

    def against_a_stopwatch():
        phases.clear()
        probe = probe_loader(program(data_fn=sleepy_data), asked, phases.append)
        assert (probe.num_workers, probe.micro_batch_size) == (workers, 4)
        if 1 / probe.samples_per_second <= 0.97 * seconds_per_sample:
            assert workers, "the data set was waited for, and that was not counted"
            return math.nan  # workers went on while this process waited for a core
        assert sum(probe.blocks.samples) / sum(probe.blocks.seconds) == pytest.approx(probe.samples_per_second)
        batches = iter(DataLoader(Sleepy(), batch_size=4, num_workers=workers))
        for _ in range(6):  # those that workers have ready
            next(batches)
        begin = time.perf_counter()
        for _ in range(30):
            next(batches)
        return 4 * 30 / (time.perf_counter() - begin) / probe.samples_per_second

    assert agrees(against_a_stopwatch, 0.2)
    assert list(dict.fromkeys(phases)) == ["build", "loader"]


class MissesInWorkers(Sleepy):
    """What it opened is not there in a worker, and it goes on without."""

    def __getitem__(self, index):
        return torch.full((WIDTH,), float(index) if get_worker_info() is None else 0.0), torch.ones(1)


class Drawn(Sleepy):
    def __getitem__(self, index):
        return torch.randn(WIDTH), torch.ones(1)


class SeededByWorker(Sleepy):
    """Drawn anew at each start of a worker, and fixed without one."""

    def __getitem__(self, index):
        worker = get_worker_info()
        generator = torch.Generator().manual_seed(0 if worker is None else worker.seed)
        return torch.randn(WIDTH, generator=generator), torch.ones(1)


class Image:
    """Shown by where it lies, as those of PIL are."""

    def __init__(self, number, source=None):
        self.pixels, self.source = torch.full((WIDTH,), float(number)), source


class Images(Sleepy):
    def __getitem__(self, index):
        return Image(index)


class Unpicklable(Sleepy):
    """What its collate function leaves out cannot be sent."""

    def __getitem__(self, index):
        return Image(index, source=lambda: index)


def pixels(images):
    return torch.stack([image.pixels for image in images]), torch.ones(len(images), 1)


@pytest.mark.parametrize("measure", [probe_loader, soak])
def test_other_samples_in_workers_are_a_failure(measure, monkeypatch):
    monkeypatch.setattr("autotune.measurement.samples.SECONDS_TO_COMPARE", 100.0)
    functions = program(data_fn=lambda: DataLoader(MissesInWorkers(), batch_size=4))
    phases = []
    with pytest.raises(TrialFailure, match="another sample 1 in a loader worker than without workers") as raised:
        measure(functions, request("loader", num_workers=1, batch_size=4), phases.append)
    assert (raised.value.kind, phases[-1]) == ("numerics", "loader")
    del raised  # refers to its own frames, and so to the workers: who collects such garbage waits for them in vain, 5 s


class OwnsItsGenerator(Sleepy):
    """Noise from it on what a file holds, which is open all the time, as mapped ones are."""

    def __init__(self, path):
        super().__init__()
        self.generator, self.rows = torch.Generator().manual_seed(0), np.memmap(path, dtype=np.float32, mode="r")

    def __getitem__(self, index):
        return torch.tensor(self.rows[index]) + torch.randn(WIDTH, generator=self.generator), torch.ones(1)


def seed_the_data_sets_own(worker_id):
    get_worker_info().dataset.generator.manual_seed(get_worker_info().seed)


def test_workers_may_not_repeat_the_random_numbers_of_one_generator(tmp_path):
    path = tmp_path / "rows"
    np.arange(2048, dtype=np.float32).tofile(path)

    def run(**own):
        functions = program(data_fn=lambda: DataLoader(OwnsItsGenerator(path), batch_size=4, **own))
        asked = request("loader", num_workers=1, batch_size=4, block_seconds=0.01, minimum_blocks=1, maximum_blocks=1)
        return probe_loader(functions, asked, lambda phase: None).num_workers

    with pytest.raises(TrialFailure, match="the same from every loader worker and in every pass: it has a generator"):
        run()
    assert (run(worker_init_fn=seed_the_data_sets_own), run(num_workers=1)) == (1, 1)


@pytest.mark.parametrize(
    ("dataset", "own_workers", "collate"),
    [
        (Drawn, 0, None),
        (SeededByWorker, 0, None),
        (Images, 0, pixels),
        (Unpicklable, 0, pixels),
        (MissesInWorkers, 2, None),
    ],
)
def test_random_samples_objects_and_the_users_own_workers_are_none(dataset, own_workers, collate):
    functions = program(
        data_fn=lambda: DataLoader(dataset(), batch_size=4, num_workers=own_workers, collate_fn=collate)
    )
    asked = request("loader", num_workers=1, batch_size=4, block_seconds=0.01, minimum_blocks=1, maximum_blocks=1)
    assert probe_loader(functions, asked, lambda phase: None).num_workers == 1


class Turned(Sleepy):
    """Negative or not, as one of several coins falls."""

    def __init__(self, coin):
        super().__init__()
        self.coin = coin

    def __getitem__(self, index):
        return torch.ones(WIDTH) if torch.rand(self.coin + 1)[-1] < 0.5 else -torch.ones(WIDTH), torch.ones(1)


def test_a_coin_that_falls_alike_by_chance_is_not_held_against_workers(monkeypatch):
    monkeypatch.setattr("autotune.measurement.samples.SECONDS_TO_COMPARE", 0.0)  # one sample, as where it takes long
    asked = request("loader", num_workers=1, batch_size=4)
    for coin in range(24):
        functions = program(data_fn=lambda coin=coin: DataLoader(Turned(coin), batch_size=4))
        training = Training(functions, asked.config, asked.conditions)
        check_workers(training, lambda phase: None)


def test_the_loader_alone_trains_nothing():
    seen = []
    probe_loader(program(lambda: Reader(seen)), request("loader"), lambda phase: None)
    assert seen == []


class Activations(nn.Module):
    """Keeps 4 MiB a sample for backward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, rows):
        big = rows[:, :1].repeat(1, 2**20) * self.weight
        return big.square().mean(1, keepdim=True)


def test_a_memory_probe_sees_the_peak_grow_with_the_batch():
    peaks = []
    for batch_size in (2, 10):
        asked = request("memory", batch_size=batch_size)
        MemoryMeter(torch.device("cpu")).reset_peak()  # a trial has a process of its own
        probe = probe_memory(program(Activations), asked, lambda phase: None)
        assert probe.micro_batch_size == batch_size
        assert probe.fits
        assert probe.reason == ""
        assert probe.step_seconds > 0
        peaks.append(probe.memory.peak_allocated_bytes)
    assert peaks[1] - peaks[0] > 8 * 2**22


def test_a_memory_probe_tells_the_limit_that_it_ran_under():
    limited = request("memory", memory_limit_bytes=2**30)
    assert probe_memory(program(), limited, lambda phase: None).limit_bytes == 2**30
    assert probe_memory(program(), request("memory"), lambda phase: None).limit_bytes is None
