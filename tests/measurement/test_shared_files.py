"""A file that lies open in the data set when its workers are started, as users write it."""

import gc
import time
from io import FileIO

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from autotune.failure import TrialFailure
from autotune.measurement.measure import measure
from autotune.measurement.shared_files import refuse_shared_positions
from autotune.measurement.soak import soak
from autotune.training.training import Training
from tests.measurement.programs import WIDTH, program, request


@pytest.fixture(autouse=True)
def _closed_afterwards():
    """What was raised refers to the data set, and so to its open file, which other tests in this process would find."""
    yield
    gc.collect()


class InOneFile(Dataset):
    """Rows of numbers in a file, which lies open from the start or from the first row that is read."""

    def __init__(self, path, opened):
        self.path, self.file = path, FileIO(path) if opened else None

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.file = self.file or FileIO(self.path)
        self.file.seek(4 * WIDTH * index)
        return torch.frombuffer(bytearray(self.file.read(4 * WIDTH)), dtype=torch.float32), torch.ones(1)


class InOrder(IterableDataset):
    """The same, each worker its part."""

    def __init__(self, path, opened):
        self.rows = InOneFile(path, opened)

    def __iter__(self):
        worker = get_worker_info()
        first, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (self.rows[index] for index in range(first, 64, count))


class InOneFileAndSlow(InOneFile):
    def __getitem__(self, index):
        self.file.seek(4 * WIDTH * index)
        time.sleep(0.002)
        return torch.frombuffer(bytearray(self.file.read(4 * WIDTH)), dtype=torch.float32), torch.ones(1)


def test_one_worker_that_reads_on_beside_a_check_of_its_samples_is_no_fault(tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(torch.randn(64, WIDTH).numpy().tobytes())
    functions = program(data_fn=lambda: DataLoader(InOneFileAndSlow(path, True), batch_size=4))
    assert soak(functions, request("soak", num_workers=1, batch_size=4, maximum_blocks=2), lambda phase: None).steps


@pytest.mark.parametrize("dataset", [InOneFile, InOrder])
def test_several_workers_may_not_share_the_position_in_a_file(dataset, tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(torch.randn(64, WIDTH).numpy().tobytes())

    phases = []

    def run(workers, opened=True, own_workers=0):
        functions = program(data_fn=lambda: DataLoader(dataset(path, opened), batch_size=4, num_workers=own_workers))
        asked = request("measure", num_workers=workers, batch_size=4, minimum_blocks=1, maximum_blocks=1)
        return measure(functions, asked, phases.append).micro_batch_size

    with pytest.raises(TrialFailure, match=f"several loader workers would share one position in {path}") as raised:
        run(2)
    assert (raised.value.kind, phases[-1]) == ("numerics", "loader")
    assert [run(1), run(2, opened=False), run(2, own_workers=2)] == [4, 4, 4]


@pytest.mark.parametrize(("method", "asks_a_worker"), [("fork", True), ("spawn", False)])
def test_workers_that_are_no_forks_share_no_file(method, asks_a_worker, tmp_path):
    path = tmp_path / "rows"
    path.write_bytes(bytes(4 * WIDTH))

    def data_fn():
        return DataLoader([torch.ones(WIDTH)] * 8, batch_size=4, num_workers=1, multiprocessing_context=method)

    asked = request("measure", num_workers=2, batch_size=4)
    phases = []
    with path.open("rb"):
        refuse_shared_positions(Training(program(data_fn=data_fn), asked.config, asked.conditions), phases.append)
    assert (phases == ["loader"]) == asks_a_worker
