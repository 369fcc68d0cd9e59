"""The exported script trains exactly as `Training` does, without autotune."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import defaultdict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.config import TrainingConfig, Value
from autotune.export.python import export
from autotune.knobs.registry import KNOBS
from autotune.measurement.facts import read_facts
from autotune.records import Conditions, Recommendation, SearchFacts, TrialRequest, WorkloadReference
from autotune.training.training import Training
from autotune.workload import load_functions, workload_from_target
from tests.report import sample_records

PROGRAMS = Path(__file__).parent / "programs"
STEPS = 6
"""More than one pass over each program's data, so that partial windows and their weights are in it."""

THREADS = 1
"""In both processes: sums depend on it by a bit, and a normalisation of two samples makes a tenth of a loss of that."""

DRIVER = """
import importlib.util, json, os, sys
import torch, torch._dynamo

torch.set_num_threads(THREADS)

def losses_of(path):
    spec = importlib.util.spec_from_file_location("script", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    torch.manual_seed(7)
    losses = [float(loss) for _, loss in zip(range(STEPS), script.train())]
    assert not [name for name in sys.modules if name.split(".")[0] == "autotune"]
    return losses

for path in map(json.loads, sys.stdin):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.chdir(os.path.dirname(path))
            with open("losses.json", "w") as file:
                json.dump(losses_of(path), file)
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
""".replace("STEPS", str(STEPS)).replace("THREADS", str(THREADS))
"""Has imported torch, which takes longer than any script, and runs each one in a process of its own."""


@pytest.fixture(autouse=True)
def as_many_threads_as_the_script() -> Iterator[None]:
    before = torch.get_num_threads()  # which other tests may have changed
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, "-c", DRIVER], cwd=tmp_path_factory.mktemp("driver"), stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with started:
        yield started


def recommendation_for(program: Path, conditions: Conditions) -> tuple[Recommendation, SearchFacts]:
    """A recommendation whose facts are those that a child would have read of the program."""
    workload = workload_from_target(str(program))
    request = TrialRequest(kind="facts", config=TrainingConfig({}), conditions=conditions)
    facts = read_facts(load_functions(workload), request, lambda phase: None)
    machine = sample_records.machine(gpus=())
    search_facts = SearchFacts(
        machine=machine,
        workload=facts,
        device="cpu",
        global_batch_size=conditions.global_batch_size,
        largest_batch_size=64,
    )
    config = TrainingConfig({knob.name: knob.baseline(search_facts) for knob in KNOBS})
    sample = sample_records.recommendation()
    recommendation = sample.model_copy(
        update={
            "machine": machine,
            "workload": facts,
            "reference": workload.reference(),
            "settings": sample.settings.model_copy(update={"conditions": conditions}),
            "baseline": sample.baseline.model_copy(update={"config": config}),
            "best": sample.best.model_copy(update={"config": config}),
        }
    )
    return recommendation, search_facts


def losses_of_training(program: Path, recommendation: Recommendation, config: TrainingConfig) -> list[float]:
    functions = load_functions(workload_from_target(str(program)))
    torch.manual_seed(7)
    training = Training(functions, config, recommendation.settings.conditions, blocks=recommendation.workload.blocks)
    losses: list[float] = []
    while len(losses) < STEPS:
        losses += [float(training.step(window)) for window, _ in zip(training.loader, range(STEPS - len(losses)))]  # noqa: B905
    return losses


def losses_of_script(script: str, folder: Path, driver: subprocess.Popen[str]) -> list[float]:
    assert driver.stdin is not None and driver.stdout is not None
    folder.mkdir()
    (folder / "script.py").write_text(script)
    print(json.dumps(str(folder / "script.py")), file=driver.stdin, flush=True)
    assert driver.stdout.readline() == "0\n", "stderr says why"
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    return losses


CASES: list[tuple[str, dict[str, Any], list[dict[str, Value]]]] = [
    (
        "held",
        {"global_batch_size": 8, "clip_grad_norm": 0.5},
        [
            {},
            {"batch_size": 4},
            {"batch_size": 2, "activation_checkpointing": "all", "num_workers": 2},
            {"precision": "bf16", "optimizer_impl": "fused", "activation_checkpointing": "alternate"},
        ],
    ),
    (
        "weighted",
        {"global_batch_size": 4, "clip_grad_norm": 0.1},
        [{}, {"batch_size": 2}, {"optimizer_impl": "foreach"}],
    ),
    ("bare", {"global_batch_size": None}, [{}, {"batch_size": 8, "num_workers": 1}]),
    ("bare", {"global_batch_size": 32}, [{"batch_size": 16, "compile_mode": "default", "compile_scope": "step"}]),
    ("streamed", {"global_batch_size": 8}, [{}, {"num_workers": 1, "optimizer_impl": "fused"}]),
    ("images", {"global_batch_size": 4}, [{"memory_format": "channels_last", "num_workers": 1, "prefetch_factor": 4}]),
    ("sampled", {"global_batch_size": 6}, [{}, {"num_workers": 1}]),
]


@pytest.mark.parametrize(
    ("name", "conditions", "changes"), CASES, ids=[f"{c[0]}-{c[1]['global_batch_size']}" for c in CASES]
)
def test_the_script_gives_the_losses_of_training(
    name: str,
    conditions: dict[str, Any],
    changes: list[dict[str, Value]],
    tmp_path: Path,
    driver: subprocess.Popen[str],
) -> None:
    program = PROGRAMS / f"{name}.py"
    recommendation, _ = recommendation_for(program, Conditions(device="cpu", **conditions))
    for number, change in enumerate(changes):
        config = recommendation.best.config.replace(change)
        expected = losses_of_training(program, recommendation, config)
        assert losses_of_script(export(recommendation, config), tmp_path / str(number), driver) == expected


def test_a_script_for_a_gpu_moves_batches_of_any_nesting() -> None:
    """Written for cuda and loaded without running it; the meta device stands for the GPU that is not here."""
    recommendation, config = gpu_recommendation()
    script: dict[str, Any] = {}
    exec(export(recommendation, config), script)
    Pair = namedtuple("Pair", ["first", "second"])

    @dataclass
    class Item:
        values: torch.Tensor
        name: str

        def __post_init__(self) -> None:
            self.name += "!"

    batch = defaultdict(list, pair=Pair(torch.ones(2), [torch.ones(3)]), item=Item(torch.ones(1), "one"), text="kept")
    moved = script["to_device"](batch, torch.device("meta"), non_blocking=True)
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].first.is_meta
    assert moved["pair"].second[0].is_meta
    assert (moved["item"].values.is_meta, moved["item"].name, moved["text"]) == (True, "one!", "kept")
    assert (type(moved), batch["item"].values.is_meta) == (defaultdict, False)


def test_a_script_for_a_gpu_has_every_part_of_the_step_in_order() -> None:
    recommendation, config = gpu_recommendation()
    script = export(recommendation, config)
    ast.parse(script)
    in_order = [
        'device = torch.device("cuda")',
        "model = model_fn()",
        "model.to(device)",
        "optimizer = torch.optim.AdamW(model.parameters())",
        "scaler = torch.amp.GradScaler(device.type)",
        "torch.compile(compute_loss",
        "loader = DataLoader(",
        "batch = to_device(batch, device, non_blocking=True)",
        "cudagraph_mark_step_begin()",
        "with torch.autocast(device.type, dtype=torch.float16):",
        "scaler.scale(loss).backward()",
        "scaler.unscale_(optimizer)",
        "clip_grad_norm_(parameters, 1.0)",
        "scaler.step(optimizer)",
        "optimizer.zero_grad()",
    ]
    places = [script.find(piece) for piece in in_order]
    assert -1 not in places
    assert places == sorted(places)


def test_a_script_trains_a_model_that_comes_in_evaluation() -> None:
    recommendation, config = gpu_recommendation()
    assert "model.train()" not in export(recommendation, config), "parts may be in evaluation mode on purpose"
    workload = recommendation.workload.model_copy(update={"comes_in_evaluation": True})
    script = export(recommendation.model_copy(update={"workload": workload}), config)
    assert script.index("model.to(device)") < script.index("model.train()") < script.index("optimizer = ")


def gpu_recommendation() -> tuple[Recommendation, TrainingConfig]:
    conditions = Conditions(device="cuda", global_batch_size=32, clip_grad_norm=1.0)
    sample = sample_records.recommendation()
    reference = WorkloadReference(
        form="module",
        location="json",
        names={"model_fn": "json:dumps", "data_fn": "json:JSONDecoder.decode"},
        source_hash="",
    )
    changes = {
        "settings": sample.settings.model_copy(update={"conditions": conditions}),
        "reference": reference,
        "workload": sample.workload.model_copy(update={"has_scheduler": False, "loss_weighted": False}),
    }
    config = TrainingConfig(
        {
            "batch_size": 32,
            "num_workers": 4,
            "prefetch_factor": 2,
            "pin_memory": True,
            "precision": "fp16",
            "memory_format": "as_is",
            "cudnn_benchmark": "as_is",
            "optimizer_impl": "fused",
            "activation_checkpointing": "as_is",
            "compile_scope": "step",
            "compile_mode": "reduce-overhead",
        }
    )
    return sample.model_copy(update=changes), config


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        (
            WorkloadReference(form="file", location="/a/train.py", names={"model_fn": "model_fn"}, source_hash=""),
            ["sys.path.insert(0, '/a')", "from train import model_fn"],
        ),
        (
            WorkloadReference(
                form="module", location="lib.nets", names={"model_fn": "lib.nets:Net.make"}, source_hash=""
            ),
            ["from lib.nets import Net", "model_fn = Net.make"],
        ),
        (
            WorkloadReference(form="module", location="lib.nets", names={"data_fn": "lib.data:load"}, source_hash=""),
            ["from lib.data import load as data_fn"],
        ),
        (
            WorkloadReference(form="value", location="notebook", names={"model_fn": "make"}, source_hash=""),
            ["# PASTE HERE the definitions of model_fn."],
        ),
    ],
)
def test_functions_come_from_where_the_search_found_them(reference: WorkloadReference, expected: list[str]) -> None:
    recommendation, config = gpu_recommendation()
    lines = export(recommendation.model_copy(update={"reference": reference}), config).splitlines()
    assert [line for line in lines if line in expected] == expected


@pytest.mark.parametrize("linked", [False, True])
def test_a_file_whose_name_cannot_be_imported_is_loaded_by_its_path(
    tmp_path: Path, driver: subprocess.Popen[str], linked: bool
) -> None:
    program = tmp_path / "my-program.py"
    (tmp_path / f"beside_{linked}.py").write_text("")
    program.write_text(f"import beside_{linked}\n{(PROGRAMS / 'bare.py').read_text()}")
    if linked:
        (tmp_path / "links").mkdir()
        link = tmp_path / "links" / "program.py"
        link.symlink_to(program)
        program = link
    recommendation, _ = recommendation_for(program, Conditions(device="cpu", global_batch_size=None))
    expected = losses_of_training(program, recommendation, recommendation.best.config)
    assert losses_of_script(export(recommendation), tmp_path / "elsewhere", driver) == expected


def test_a_program_that_reads_arguments_is_not_given_those_of_the_script(tmp_path: Path) -> None:
    program = tmp_path / "reads.py"
    reading = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr')\nparser.parse_args()\n"
    program.write_text((PROGRAMS / "bare.py").read_text())
    recommendation, _ = recommendation_for(program, Conditions(device="cpu", global_batch_size=None))
    program.write_text(reading + program.read_text())
    script = tmp_path / "plain.py"
    script.write_text(export(recommendation))
    ran = subprocess.run([sys.executable, str(script), "3"], capture_output=True, text=True, check=False)
    assert ran.stdout.startswith("step 3: loss "), ran.stderr


def test_a_guarded_script_is_imported_and_an_unguarded_one_is_not(tmp_path: Path) -> None:
    """Importing a script that calls `fit` at its top level would start another search."""
    script = tmp_path / "tune.py"
    names = {"model_fn": "net"}
    reference = WorkloadReference(form="value", location=str(script), names=names, source_hash="")
    recommendation, config = gpu_recommendation()
    recommendation = recommendation.model_copy(update={"reference": reference})
    script.write_text("def net(): ...\n\nif __name__ == '__main__':\n    fit(net)\n")
    assert "from tune import net as model_fn" in export(recommendation, config)
    script.write_text("def net(): ...\n\nfit(net)\n")
    assert "PASTE HERE" in export(recommendation, config)


@pytest.mark.parametrize(
    ("place", "dots", "packages", "expected"),
    [
        ("pack/tune.py", ".", ["pack"], ("", "pack.tune")),
        ("pack/scripts/tune.py", ".", ["pack", "pack/scripts"], ("", "pack.scripts.tune")),
        (
            "pack/scripts/tune.py",
            "..",
            [],
            ("", "pack.scripts.tune"),
        ),  # folders without an __init__.py are packages too
        ("pack/tune.py", "", ["pack"], ("pack", "tune")),  # it was run as `python pack/tune.py`
        ("my-folder/tune.py", ".", [], ("my-folder", "tune")),
    ],
)
def test_a_script_that_imports_by_leading_dots_comes_out_of_its_package(
    tmp_path: Path, place: str, dots: str, packages: list[str], expected: tuple[str, str]
) -> None:
    script = tmp_path / place
    script.parent.mkdir(parents=True)
    for package in packages:
        (tmp_path / package / "__init__.py").write_text("")
    imports = f"from {dots} import nets\n" if dots else ""
    script.write_text(f"{imports}def net(): ...\n\nif __name__ == '__main__':\n    fit(net)\n")
    reference = WorkloadReference(form="value", location=str(script), names={"model_fn": "net"}, source_hash="")
    recommendation, config = gpu_recommendation()
    lines = export(recommendation.model_copy(update={"reference": reference}), config).splitlines()
    folder, module = expected
    assert f"sys.path.insert(0, {str(tmp_path / folder)!r})" in lines
    assert f"from {module} import net as model_fn" in lines


def test_the_speed_up_is_told_where_there_is_one() -> None:
    recommendation, config = gpu_recommendation()
    best = recommendation.best.model_copy(update={"config": config})
    faster = recommendation.model_copy(update={"best": best})
    assert " times the baseline (95 % interval " in export(faster, config)
    baseline = recommendation.baseline.model_copy(update={"config": config})
    kept = recommendation.model_copy(update={"best": baseline, "baseline": baseline})
    script = export(kept, config)
    assert " samples/s.\n" in script
    assert "times the" not in script


HOSTILE = 'x"""\nprint("written by somebody else")\r\n"""\\'


@pytest.mark.parametrize("form", ["module", "value"])
def test_words_of_a_record_that_somebody_else_wrote_stay_words(form: str) -> None:
    recommendation, config = gpu_recommendation()
    reference = recommendation.reference.model_copy(update={"form": form, "location": HOSTILE})
    machine = recommendation.machine.model_copy(update={"gpus": (), "cpu_name": HOSTILE})
    changes = {"reference": reference, "machine": machine, "autotune_version": HOSTILE}
    script = ast.parse(export(recommendation.model_copy(update=changes), config))
    top = [node for node in script.body if isinstance(node, ast.Expr)]
    assert all(isinstance(node.value, ast.Constant) or "sys.path" in ast.unparse(node) for node in top)


@pytest.mark.parametrize("names", [{"model_fn": "json:dumps\nprint(1)"}, {"model_fn\nprint(1)": "json:dumps"}])
def test_what_is_no_name_of_a_function_is_not_written_into_a_script(names: dict[str, str]) -> None:
    recommendation, config = gpu_recommendation()
    reference = recommendation.reference.model_copy(update={"names": names})
    with pytest.raises(ValueError, match="no name of a function"):
        export(recommendation.model_copy(update={"reference": reference}), config)
