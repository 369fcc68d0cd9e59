from __future__ import annotations

import weakref
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.surgery.batches import byte_count, describe, independent, leading_size, map_tensors, tensors, to_device

META = torch.device("meta")


class Pair(NamedTuple):
    inputs: Any
    targets: Any


@dataclass
class Sample:
    inputs: Any
    names: list[str]
    derived: str = field(default="", init=False)


@dataclass(frozen=True)
class Frozen:
    inputs: Any


class OwnMapping(UserDict[str, Any]):
    pass


class MovesItself(OwnMapping):
    """As the batches of tokenizers do."""

    def to(self, device: torch.device) -> MovesItself:
        self.data = {name: item.to(device) for name, item in self.data.items()}
        return self


class TakesNothing(dict[str, Any]):
    """A mapping class that cannot be made of a mapping."""

    tag = ""

    def __init__(self) -> None:
        super().__init__()


class Movable:
    def __init__(self) -> None:
        self.moved_to: list[torch.device] = []

    def to(self, device: torch.device) -> Movable:
        self.moved_to.append(device)
        return self


LEAVES = st.one_of(
    st.integers(1, 4).map(lambda size: torch.zeros(size, 2)), st.text(max_size=3), st.integers(), st.none()
)
BATCHES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OwnMapping),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
        inner.map(lambda item: Sample(item, ["a"])),
        inner.map(Frozen),
    ),
    max_leaves=8,
)


def skeleton(batch: Any) -> Any:
    """Types and everything but the tensors."""
    if isinstance(batch, torch.Tensor):
        return ("tensor", tuple(batch.shape))
    if isinstance(batch, (dict, UserDict)):
        return (type(batch), [(key, skeleton(item)) for key, item in batch.items()])
    if isinstance(batch, (tuple, list)):
        return (type(batch), [skeleton(item) for item in batch])
    if isinstance(batch, (Sample, Frozen)):
        return (type(batch), [skeleton(item) for item in vars(batch).values()])
    return batch


@settings(max_examples=100, deadline=None)
@given(BATCHES)
def test_structure_stays_and_every_tensor_is_mapped_once(batch: Any) -> None:
    before = list(tensors(batch))
    mapped = map_tensors(batch, lambda tensor: tensor + 1)
    assert skeleton(mapped) == skeleton(batch)
    after = list(tensors(mapped))
    assert len(after) == len(before)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new, old + 1)


@settings(max_examples=50, deadline=None)
@given(BATCHES)
def test_to_device_moves_every_tensor_and_keeps_the_structure(batch: Any) -> None:
    moved = to_device(batch, META)
    assert skeleton(moved) == skeleton(batch)
    assert all(tensor.device == META for tensor in tensors(moved))


@settings(max_examples=50, deadline=None)
@given(BATCHES)
def test_where_nothing_moves_the_tensors_are_the_same(batch: Any) -> None:
    moved = to_device(batch, torch.device("cpu"))
    assert skeleton(moved) == skeleton(batch)
    assert [id(tensor) for tensor in tensors(moved)] == [id(tensor) for tensor in tensors(batch)]


@pytest.mark.parametrize("device", [torch.device("cpu"), META])
def test_a_batch_that_is_taken_apart_can_be_used_again(device: torch.device) -> None:
    x, y = torch.zeros(2), torch.ones(2)
    batch = ({"x": x, "y": y}, [x, y], OwnMapping(x=x, y=y), MovesItself(x=x, y=y), Sample([x, y], []))
    for _ in range(2):
        mapping, listed, own, itself, sample = to_device(batch, device)
        for item in (mapping.pop("y"), listed.pop(), own.pop("y"), itself.pop("y"), sample.inputs.pop()):
            assert item.device == device
    assert batch[3]["x"].device.type == "cpu"


def test_an_object_with_a_move_of_its_own_is_asked() -> None:
    batch = Movable()
    assert to_device(batch, META) is batch
    assert batch.moved_to == [META]


def test_inside_a_container_it_is_asked_too() -> None:
    batch = (torch.zeros(2), [Movable()])
    moved = to_device(batch, META)
    assert moved[1][0].moved_to == [META]


def test_a_packed_sequence_keeps_its_lengths_where_they_must_lie() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.zeros(3, 2), torch.zeros(1, 2)])
    moved = to_device({"x": packed, "y": torch.zeros(2)}, META)
    assert moved["x"].data.device == META
    assert moved["x"].batch_sizes.device.type == "cpu"


def test_a_mapping_keeps_its_class_and_what_it_carries() -> None:
    batch = TakesNothing()
    batch["x"], batch.tag = torch.zeros(2), "kept"
    by_default = defaultdict(list, x=torch.zeros(2))
    moved = to_device((batch, by_default), META)
    assert [(type(item), item["x"].device) for item in moved] == [(TakesNothing, META), (defaultdict, META)]
    assert (moved[0].tag, moved[1]["new"]) == ("kept", [])
    assert batch["x"].device.type == by_default["x"].device.type == "cpu", "the user's own batch stays"


def test_a_mapping_that_cannot_be_changed_is_made_anew() -> None:
    moved = to_device(MappingProxyType({"x": torch.zeros(2)}), META)
    assert (type(moved), moved["x"].device) == (MappingProxyType, META)


def test_a_list_class_keeps_its_class_and_what_it_carries() -> None:
    class Boxes(list[Any]):
        size = (0, 0)

    batch = Boxes([torch.zeros(2)])
    batch.size = (4, 3)
    moved = to_device(batch, META)
    assert (type(moved), moved.size, moved[0].device) == (Boxes, (4, 3), META)


def test_what_a_data_class_does_when_it_is_made_is_not_done_again() -> None:
    @dataclass
    class Scaled:
        inputs: torch.Tensor
        factor: InitVar[float]
        squared: torch.Tensor = field(init=False)
        later: torch.Tensor = field(init=False)
        """Not set yet."""

        def __post_init__(self, factor: float) -> None:
            self.inputs = self.inputs * factor
            self.squared = self.inputs.square()

    batch = Scaled(torch.ones(2), 0.5)
    mapped = map_tensors(batch, lambda tensor: tensor + 1)
    assert (mapped.inputs.tolist(), mapped.squared.tolist()) == ([1.5, 1.5], [1.25, 1.25])
    assert batch.inputs.tolist() == [0.5, 0.5]
    moved = to_device(batch, META)
    assert moved.inputs.device == moved.squared.device == META


def test_sparse_and_nested_tensors() -> None:
    coordinates = torch.eye(3).to_sparse()
    nested = torch.nested.nested_tensor([torch.zeros(3, 2), torch.zeros(1, 2)], layout=torch.jagged)
    batch = {"graph": coordinates, "rows": nested, "label": torch.tensor(1)}
    assert byte_count(batch) == 3 * 2 * 8 + 3 * 4 + 4 * 2 * 4 + 8
    text = "mapping with graph: float32 [3, 3], rows: nested float32 [2, ...], label: int64 []"
    assert describe(batch) == text
    another = torch.nested.nested_tensor([torch.zeros(1, 2), torch.zeros(2, 2)], layout=torch.jagged)
    assert describe({**batch, "rows": another}) == text, "the study of a program is found again by its structure"
    moved = to_device(batch, META)
    assert moved["graph"].is_sparse and moved["rows"].is_nested
    assert {tensor.device for tensor in moved.values()} == {META}


def test_byte_count_and_leading_size() -> None:
    batch = {"ids": torch.zeros(3, 5, dtype=torch.int64), "names": ["a", "b", "c"], "deep": (torch.zeros(3),)}
    assert byte_count(batch) == 3 * 5 * 8 + 3 * 4
    assert leading_size(batch) == 3
    assert leading_size(torch.tensor(1.0)) == 1
    assert leading_size(["a", "b"]) == 2
    assert leading_size(object()) == 1


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ({"x": np.zeros((5, 2)), "y": torch.zeros(5)}, 5),
        (torch.nn.utils.rnn.pack_sequence([torch.zeros(3, 2), torch.zeros(1, 2)]), 2),
        ([torch.nn.utils.rnn.pack_sequence([torch.zeros(3, 2), torch.zeros(1, 2)]), torch.zeros(2)], 2),
        (torch.nested.nested_tensor([torch.zeros(3, 2), torch.zeros(1, 2)], layout=torch.jagged), 2),
        ([{"boxes": torch.zeros(3, 4)}, {"boxes": torch.zeros(1, 4)}, {"boxes": torch.zeros(7, 4)}], 3),
        (([torch.zeros(3, 8, 8)] * 4, [{"boxes": torch.zeros(1, 4)}] * 4), 4),
        ([torch.zeros(4, 2), torch.zeros(4)], 4),
        ([{"x": torch.zeros(4, 2)}, {"y": torch.zeros(4)}], 4),
        (Sample(torch.zeros(6, 2), ["a"]), 6),
    ],
)
def test_samples_in_a_ready_batch(batch: Any, samples: int) -> None:
    assert leading_size(batch) == samples


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (torch.zeros(2, 3), "float32 [2, 3]"),
        ((torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)), "tuple of 2: float32 [2, 3], int64 [2]"),
        ({"x": torch.zeros(2)}, "mapping with x: float32 [2]"),
        (OwnMapping(x=torch.zeros(2)), "OwnMapping with x: float32 [2]"),
        ({}, "empty mapping"),
        (Pair(torch.zeros(2), "a"), "Pair with inputs: float32 [2], targets: str"),
        (Sample(torch.zeros(2), ["a"]), "Sample with inputs: float32 [2], names: list of 1 str, derived: str"),
        (["a", "b"], "list of 2 str"),
        ([torch.zeros(1)] * 9, "list of 9 float32 [1]"),
        ([torch.zeros(size) for size in range(9)], "list of 9 Tensor"),
        (({"y": torch.zeros(1), "z": 1},) * 4, "tuple of 4 (mapping with y: float32 [1], z: int)"),
        (
            (torch.zeros(2), {"y": torch.zeros(1), "z": 1}),
            "tuple of 2: float32 [2], (mapping with y: float32 [1], z: int)",
        ),
        (None, "NoneType"),
    ],
)
def test_a_batch_in_words(batch: Any, text: str) -> None:
    assert describe(batch) == text


def test_a_copy_of_rows_holds_no_more_than_these_rows() -> None:
    rows = torch.arange(4000.0).view(1000, 4)
    samples = [(rows[number], {"target": rows[number, :1]}) for number in range(2)]
    copies = independent(samples)
    assert sum(tensor.untyped_storage().nbytes() for tensor in tensors(copies)) == 2 * 5 * 4
    assert copies[1][0].tolist() == rows[1].tolist() and copies[1][1]["target"].item() == 4.0
    copies[1][0].zero_()
    assert rows[1].tolist() == [4.0, 5.0, 6.0, 7.0]


def test_a_copy_has_the_strides_of_what_it_is_a_copy_of() -> None:
    tokens = torch.arange(1000).view(100, 10)
    views = [tokens[:4, :-1], tokens[50:54, 1:], tokens[7:9].t(), tokens[3, :1].expand(5, 1), tokens[:0], tokens[2, 3]]
    copies = independent(views)
    assert all(map(torch.equal, copies, views))
    assert [copied.stride() for copied in copies] == [view.stride() for view in views]
    assert max(copied.untyped_storage().nbytes() for copied in copies) == 39 * 8


def test_a_copy_of_what_repeats_its_memory_stays_as_small() -> None:
    repeated = torch.ones(1, 4).expand(1000, 4)
    copied = independent(repeated)
    assert copied.untyped_storage().nbytes() == 16 and copied.data_ptr() != repeated.data_ptr()


class RowsOf(Mapping[int, torch.Tensor]):
    """Makes a view of a table whenever a row is asked for, and other tensors where it is copied."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.rows: list[weakref.ref[torch.Tensor]] = []

    def __getitem__(self, number: int) -> torch.Tensor:
        row = self.table[number]
        self.rows.append(weakref.ref(row))
        return row

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3

    def __reduce__(self) -> Any:
        assert None not in [row() for row in self.rows], "the table's copy may have the id of a row that is gone"
        return RowsOf, (self.table.clone(),)


def test_a_copy_of_a_mapping_that_makes_its_rows_anew_is_one_of_the_mapping() -> None:
    copied = independent(RowsOf(torch.arange(4000.0).view(1000, 4)))
    assert isinstance(copied, RowsOf) and copied.table.shape == (1000, 4)


def test_a_copy_of_a_ragged_tensor_can_be_trained_on() -> None:
    ragged = torch.nested.nested_tensor([torch.ones(3, 2), torch.ones(1, 2)], layout=torch.jagged)
    copied = independent({"x": ragged})["x"]
    assert copied.values().data_ptr() != ragged.values().data_ptr()
    layer = torch.nn.Linear(2, 1)
    layer(copied).values().sum().backward()
    assert layer.weight.grad is not None and layer.weight.grad.tolist() == [[4.0, 4.0]]


def test_a_copy_of_what_a_model_gave_is_cut_off_from_it() -> None:
    given = torch.nn.Linear(2, 1)(torch.ones(1, 2))
    copied = independent({"features": given, "other": object()})["features"]
    assert copied.is_leaf and copied.requires_grad and copied.equal(given)
    assert independent([given, (number for number in range(3))])[0].is_leaf  # what else cannot be copied
