from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest

from autotune import workload as workload_module
from autotune.errors import WorkloadError
from autotune.records import WorkloadReference
from autotune.workload import (
    UserFunctions,
    Workload,
    load_functions,
    workload_from_functions,
    workload_from_reference,
    workload_from_target,
)

PLAIN = """
def model_fn():
    return "model"


def data_fn():
    return "data"
"""


def written(directory: Path, text: str, name: str = "train.py") -> str:
    path = directory / name
    path.write_text(text)
    return str(path)


# --- from a file or a module ---


def test_a_file_is_read_and_not_run(tmp_path: Path) -> None:
    text = PLAIN + "\ndef loss_fn(model, batch):\n    return 0\n\nraise SystemExit('it was run')\n"
    workload = workload_from_target(written(tmp_path, text))
    assert workload.form == "file"
    assert workload.location == str(tmp_path / "train.py")
    assert workload.names == {role: role for role in ("model_fn", "data_fn", "loss_fn")}
    assert workload.search_path == (str(tmp_path),)
    assert workload.payload is None


def test_a_files_functions_are_loaded_with_what_lies_beside_it(tmp_path: Path) -> None:
    written(tmp_path, "NAME = 'from beside'\n", "beside_the_workload.py")
    text = "from beside_the_workload import NAME\n" + PLAIN.replace('"model"', "NAME")
    path_before = list(sys.path)
    try:
        functions = load_functions(workload_from_target(written(tmp_path, text)))
    finally:
        sys.path[:] = path_before
    assert functions.model_fn() == "from beside"
    assert functions.data_fn() == "data"
    assert (functions.loss_fn, functions.optimizer_fn, functions.scheduler_fn) == (None, None, None)
    assert not (tmp_path / "__pycache__" / "train.cpython-311.pyc").exists()


def test_a_file_of_a_name_that_is_taken_or_is_none_is_loaded_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "another.py", raising=False)
    for name in ("json.py", "my-train.py"):
        assert load_functions(workload_from_target(written(tmp_path, PLAIN, name))).model_fn() == "model"
    assert sys.modules["json"].__file__ != str(tmp_path / "json.py")


@pytest.mark.parametrize("name", ["train.py", "my-train.py", "train.v2.py", "json.py", "linked.py"])
def test_a_worker_that_is_no_fork_finds_what_the_file_defines(tmp_path: Path, name: str) -> None:
    file = written(tmp_path, PLAIN, name)
    if name == "linked.py":
        file = str(tmp_path / "train.py")
        os.symlink(name, file)
    script = (
        "import json, multiprocessing, autotune.workload as w\n"
        f"target = w.load_functions(w.workload_from_target({file!r})).data_fn\n"
        "worker = multiprocessing.get_context('spawn').Process(target=target)\n"
        "worker.start(), worker.join()\n"
        "raise SystemExit(worker.exitcode)"
    )
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    finished = subprocess.run(
        [sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=False
    )
    assert (finished.returncode, finished.stderr) == (0, "")
    assert {*os.listdir(tmp_path)} == {name, os.path.basename(file)}


def test_what_lies_beside_a_link_is_found_and_modules_where_it_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "another.py", raising=False)
    for name in ("code", "run"):
        (tmp_path / name).mkdir()
    written(tmp_path / "code", "WORD = 'beside the file'\n", "beside_the_file.py")
    (tmp_path / "run" / "settings.txt").write_text("beside the link")
    source = "from beside_the_file import WORD\nfrom pathlib import Path\n" + PLAIN.replace(
        '"data"', "WORD, (Path(__file__).parent / 'settings.txt').read_text()"
    )
    (tmp_path / "run" / "train.py").symlink_to(written(tmp_path / "code", source))
    monkeypatch.chdir(tmp_path / "code")
    workload = workload_from_target(os.path.join("..", "run", "train.py"))
    assert workload.location == str(tmp_path / "run" / "train.py")
    assert load_functions(workload).data_fn() == ("beside the file", "beside the link")


def test_a_module_is_found_where_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "a_package_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(PLAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    workload = workload_from_target("a_package_of_mine.train")
    assert workload.form == "module"
    assert workload.names["model_fn"] == "a_package_of_mine.train:model_fn"
    assert load_functions(workload).data_fn() == "data"


@pytest.mark.parametrize(
    "text",
    [
        "from elsewhere import model_fn, data_fn",
        "from elsewhere import make as model_fn, read as data_fn",
        "model_fn = data_fn = print",
        "(model_fn, data_fn) = print, print",
        "model_fn: object = print\ndata_fn: object = print",
        "from elsewhere import *",
        "if True:\n    def model_fn(): ...\n    def data_fn(): ...",
        "try:\n    from fast import model_fn\nexcept ImportError:\n    from slow import model_fn\ndata_fn = print",
        "class model_fn: ...\nasync def data_fn(): ...",
    ],
)
def test_names_may_be_bound_in_any_way_at_the_top(tmp_path: Path, text: str) -> None:
    assert set(workload_from_target(written(tmp_path, text)).names) == {"model_fn", "data_fn"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "def model_fn(): ...\ndef get_data(): ...\ndef loss_fn(m, b): ...\ndef _own(): ...\n",
            "train.py does not define data_fn; it defines model_fn, get_data, loss_fn. Rename the function, or add a line "
            "such as `data_fn = your_function`",
        ),
        (
            "x = 1\n",
            "train.py does not define model_fn and data_fn; it defines no functions. Put what makes the model into `def "
            "model_fn(): return ...`, what makes the Dataset or DataLoader into `def data_fn(): return ...`, and the "
            "training itself under `if __name__",
        ),
        (
            "class Setup:\n    def model_fn(self): ...\n    def data_fn(self): ...\n",
            "does not define model_fn and data_fn",
        ),
        ("def main():\n    def model_fn(): ...\n    data_fn = print\n", "it defines main. Put what makes the model"),
    ],
)
def test_a_missing_function_is_an_error_that_lists_what_there_is(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        workload_from_target(written(tmp_path, text))
    assert message in str(caught.value)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(b"\xef\xbb\xbf" + PLAIN.encode())
    assert load_functions(workload_from_target(str(tmp_path / "train.py"))).model_fn() == "model"


def test_a_syntax_error_is_shown_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="train.py has a syntax error in line 2: ") as caught:
        workload_from_target(written(tmp_path, "x = 1\ndef model_fn(:\n    pass\n"))
    assert "def model_fn(:" in caught.value.detail


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_file.py", "no such file: no_such_file.py"),
        ("no/such/file", "no such file: no/such/file"),
        ("no_such_module_anywhere", "no module named 'no_such_module_anywhere' here; give a path that ends in .py"),
        ("no_such_package_anywhere.module", "no module named 'no_such_package_anywhere.module' here"),
        ("sys", "no module named 'sys' here"),
        (
            "tr\udce4in.py",
            "'tr\\udce4in.py' is no text in this locale's encoding (utf-8); set LC_ALL=C.UTF-8, or rename",
        ),
    ],
)
def test_a_target_that_is_not_there_is_an_error(target: str, message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        workload_from_target(target)
    assert message in str(caught.value)


def test_a_change_of_the_source_is_noticed(tmp_path: Path) -> None:
    first = workload_from_target(written(tmp_path, PLAIN))
    same = workload_from_target(written(tmp_path, PLAIN))
    changed = workload_from_target(written(tmp_path, PLAIN + "# more\n"))
    assert first.reference() == same.reference()
    assert changed.source_hash != first.source_hash
    assert len(first.source_hash) == 12


def test_a_name_that_a_star_import_does_not_bring_is_an_error_when_it_is_loaded(tmp_path: Path) -> None:
    workload = workload_from_target(written(tmp_path, "from os.path import *\n"))
    with pytest.raises(WorkloadError, match="train.py does not define model_fn"):
        load_functions(workload)


def test_what_the_users_module_raises_passes_through(tmp_path: Path) -> None:
    workload = workload_from_target(written(tmp_path, PLAIN + "1 / 0\n", "divides.py"))
    with pytest.raises(ZeroDivisionError):
        load_functions(workload)


# --- from functions ---


def model_fn() -> str:
    return "model"


def data_fn() -> str:
    return "data"


def test_functions_that_can_be_imported_travel_by_name() -> None:
    workload = workload_from_functions({"model_fn": model_fn, "data_fn": data_fn})
    assert workload.form == "module"
    assert workload.payload is None
    assert workload.names == {"model_fn": f"{__name__}:model_fn", "data_fn": f"{__name__}:data_fn"}
    assert load_functions(workload) == UserFunctions(model_fn, data_fn)


def test_a_module_is_found_where_it_was_imported_from_by_a_notebook_that_went_elsewhere(tmp_path: Path) -> None:
    """`import`, then `%cd`: the entry '' of its path means another directory by then."""
    (tmp_path / "package").mkdir()
    for name in ("alone.py", "package/inner.py", "package/__init__.py"):
        written(tmp_path, PLAIN, name)
    (tmp_path / "data").mkdir()
    code = (
        "import os, pickle, sys\n"
        "import alone, package.inner\n"
        "os.chdir('data')\n"
        "from autotune.workload import workload_from_functions\n"
        "given = {'model_fn': alone.model_fn, 'data_fn': package.inner.data_fn}\n"
        "sys.stdout.buffer.write(pickle.dumps(workload_from_functions(given)))\n"
    )
    there = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    made = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=there, stdout=subprocess.PIPE, check=True)
    load = "import pickle, sys\nfrom autotune.workload import load_functions\n"
    load += "print(load_functions(pickle.load(sys.stdin.buffer)).model_fn())"
    command = [sys.executable, "-c", load]
    done = subprocess.run(
        command, cwd=tmp_path / "data", env=there, input=made.stdout, stdout=subprocess.PIPE, check=True
    )
    assert done.stdout == b"model\n"


def test_functions_run_where_their_caller_stands_wherever_importing_them_again_goes(tmp_path: Path) -> None:
    (tmp_path / "inner" / "work").mkdir(parents=True)
    written(tmp_path, PLAIN + "import os\nos.chdir('..')\n", "moving.py")
    give = (
        "import os, pickle, sys\n"
        "import moving\n"
        "assert os.getcwd().endswith('inner')\n"
        "from autotune.workload import workload_from_functions\n"
        "given = {'model_fn': moving.model_fn, 'data_fn': moving.data_fn if sys.argv[1] == 'name' else lambda: None}\n"
        "sys.stdout.buffer.write(pickle.dumps(workload_from_functions(given)))\n"
    )
    load = "import os, pickle, sys\nfrom autotune.workload import load_functions\n"
    load += "load_functions(pickle.load(sys.stdin.buffer))\nprint(os.getcwd())"
    there = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), str(tmp_path)])}
    for travels_by in ("name", "value"):
        command = [sys.executable, "-c", give, travels_by]
        made = subprocess.run(command, cwd=tmp_path / "inner" / "work", env=there, stdout=subprocess.PIPE, check=True)
        command = [sys.executable, "-c", load]
        done = subprocess.run(
            command, cwd=tmp_path / "inner", env=there, input=made.stdout, stdout=subprocess.PIPE, check=True
        )
        assert os.path.samefile(done.stdout.decode().strip(), tmp_path / "inner")


def test_closures_lambdas_and_partials_travel_by_value() -> None:
    width = 7
    functions: dict[str, Any] = {
        "model_fn": lambda: width + 1,
        "data_fn": functools.partial(pow, 2, 3),
        "loss_fn": max,
    }
    workload = workload_from_functions(functions)
    assert workload.form == "value"
    loaded = load_functions(workload)
    assert loaded.model_fn() == 8
    assert loaded.data_fn() == 8
    assert loaded.loss_fn is not None
    assert loaded.loss_fn(1, 2) == 2


def test_an_error_in_a_function_by_value_is_told_with_its_line() -> None:
    def model_fn() -> int:
        return [int(letter) for letter in "x"][0]

    loaded = load_functions(workload_from_functions({"model_fn": model_fn, "data_fn": print}))
    with pytest.raises(ValueError, match="invalid literal") as raised:
        loaded.model_fn()
    own = traceback.extract_tb(raised.value.__traceback__)[1:]
    assert {frame.filename for frame in own} == {__file__}
    assert own[0].line == 'return [int(letter) for letter in "x"][0]'


def test_only_what_can_be_shown_is_kept_of_functions_by_value() -> None:
    reference = workload_from_functions({"model_fn": lambda: 1, "data_fn": data_fn}).reference()
    assert reference.form == "value"
    assert reference.names == {"model_fn": "<lambda>", "data_fn": "data_fn"}
    assert b"payload" not in reference.model_dump_json().encode()


def test_what_is_no_function_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="model_fn must be a function, not int"):
        workload_from_functions({"model_fn": 3, "data_fn": data_fn})  # type: ignore[dict-item]


def test_a_captured_lock_is_an_error_with_what_to_do() -> None:
    lock = threading.Lock()
    text = r"the functions cannot be sent to a trial process \(TypeError: .*lock.*\). Put them into a module and import them"
    with pytest.raises(WorkloadError, match=text):
        workload_from_functions({"model_fn": lambda: lock, "data_fn": data_fn})


def test_a_captured_data_set_is_an_error_that_tells_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload_module, "MAXIMUM_PICKLE_BYTES", 2**20)
    big = bytes(3 * 2**20)
    with pytest.raises(WorkloadError, match="they and what they refer to take 3 MiB, more than 1 MiB"):
        workload_from_functions({"model_fn": lambda: big, "data_fn": data_fn})


SCRIPT = """
import threading
from autotune.workload import load_functions, workload_from_functions

LOCK = threading.Lock()

def model_fn():
    return LOCK

def data_fn():
    return "data"

{guard}
    workload = workload_from_functions({{"model_fn": model_fn, "data_fn": data_fn}})
    print(workload.form, workload.location, workload.names)
    print(load_functions(workload).data_fn())
"""


def run_script(directory: Path, text: str) -> subprocess.CompletedProcess[str]:
    path = written(directory, text, "script.py")
    root = str(Path(workload_module.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root}
    return subprocess.run(
        [sys.executable, path], capture_output=True, text=True, env=environment, timeout=400, check=False
    )


def test_functions_of_a_script_travel_by_value(tmp_path: Path) -> None:
    result = run_script(tmp_path, SCRIPT.replace("return LOCK", "return 1").format(guard="if True:"))
    assert result.stdout.splitlines()[0].startswith(f"value {tmp_path / 'script.py'} ")
    assert result.stdout.splitlines()[1] == "data"


def test_a_worker_that_is_no_fork_finds_what_the_script_defines(tmp_path: Path) -> None:
    script = """
import multiprocessing, pickle, subprocess, sys
from autotune.workload import workload_from_functions

class Data:
    def read(self): return 1

def data_fn(): return Data()

TRIAL = '''
import multiprocessing, pickle, sys
from autotune.workload import load_functions
data = load_functions(pickle.load(sys.stdin.buffer)).data_fn()
worker = multiprocessing.get_context("spawn").Process(target=data.read)
worker.start(), worker.join()
sys.exit(worker.exitcode)
'''

if __name__ == "__main__":
    workload = workload_from_functions({"model_fn": lambda: 1, "data_fn": data_fn})
    subprocess.run([sys.executable, "-c", TRIAL], input=pickle.dumps(workload), check=True)
"""
    assert run_script(tmp_path, script).stderr == ""


def test_where_that_fails_a_script_with_a_guard_is_imported_again(tmp_path: Path) -> None:
    result = run_script(tmp_path, SCRIPT.format(guard='if __name__ == "__main__":'))
    assert result.stdout.splitlines() == [
        f"file {tmp_path / 'script.py'} {{'model_fn': 'model_fn', 'data_fn': 'data_fn'}}",
        "data",
    ]


def test_a_script_of_a_package_is_imported_again_as_the_module_that_python_runs(tmp_path: Path) -> None:
    package = tmp_path / "its_package"
    package.mkdir()
    (package / "other.py").write_text("")
    text = SCRIPT.format(guard='if __name__ == "__main__":')
    (package / "script.py").write_text(f"from . import other\n{text}")
    ran = subprocess.run(
        [sys.executable, "-m", "its_package.script"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(workload_module.__file__).parents[1])},
        timeout=400,
        check=False,
    )
    assert ran.stdout.splitlines() == [
        "module its_package.script "
        "{'model_fn': 'its_package.script:model_fn', 'data_fn': 'its_package.script:data_fn'}",
        "data",
    ], ran.stderr


def test_without_a_guard_the_message_says_what_to_write(tmp_path: Path) -> None:
    result = run_script(tmp_path, SCRIPT.format(guard="if True:"))
    assert result.returncode == 1
    assert "lock" in result.stderr
    assert 'call fit under `if __name__ == "__main__":` so that the script can be imported again' in result.stderr


OBJECT_SCRIPT = """
import threading
from autotune.workload import load_functions, workload_from_functions

class Trainer:
    def __init__(self, held):
        self.held, self.width = held, 3
    def model(self):
        return self.width
    @classmethod
    def data(cls):
        return cls.__name__

if __name__ == "__main__":
    for held in (None, threading.Lock()):
        trainer = Trainer(held)
        workload = workload_from_functions({"model_fn": trainer.model, "data_fn": Trainer.data})
        loaded = load_functions(workload)
        print(workload.form, loaded.model_fn(), loaded.data_fn())
"""


def test_methods_of_an_object_travel_with_it_or_not_at_all(tmp_path: Path) -> None:
    result = run_script(tmp_path, OBJECT_SCRIPT)
    assert result.stdout.splitlines() == ["value 3 Trainer"], result.stderr
    assert "lock" in result.stderr
    assert "They are methods of an object (Trainer), which must travel with them: make what" in result.stderr


class Makes:
    @classmethod
    def model(cls) -> str:
        return cls.__name__


def test_a_method_of_a_class_is_imported_by_name() -> None:
    workload = workload_from_functions({"model_fn": Makes.model, "data_fn": data_fn})
    assert workload.form == "module"
    assert load_functions(workload).model_fn() == "Makes"


def test_the_orchestrators_part_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from autotune.workload import workload_from_target\n"
        f"workload_from_target({written(tmp_path, 'import torch' + PLAIN)!r})\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=400)


def test_a_workload_without_a_payload_is_data() -> None:
    workload = Workload("file", "/somewhere/train.py", {"model_fn": "model_fn"})
    assert workload.reference().model_dump() == {
        "form": "file",
        "location": "/somewhere/train.py",
        "names": {"model_fn": "model_fn"},
        "source_hash": "",
    }


def test_functions_that_come_by_a_star_are_found_without_running_anything(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text("raise SystemExit\ndef model_fn(): ...\ndef loss_fn(model, batch): ...\n")
    (tmp_path / "train.py").write_text("from torch.nn import *\nfrom parts import *\ndef data_fn(): ...\n")
    workload = workload_from_target(str(tmp_path / "train.py"))
    assert set(workload.names) == {"model_fn", "data_fn", "loss_fn"}


# --- from a result ---


def test_a_result_leads_back_to_its_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = written(tmp_path, PLAIN, "the_program_of_a_result.py")
    monkeypatch.chdir(tmp_path)
    for target_ in (target, "the_program_of_a_result"):
        workload = workload_from_target(target_)
        assert workload_from_reference(workload.reference()) == workload
        assert workload.reference().source_hash == workload_from_target(target).source_hash


def test_functions_of_other_names_are_found_where_fit_had_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, "def make_data():\n    return 'data'\n", "data_of_a_result.py")
    written(tmp_path, "def make_model():\n    return 'model'\n", "model_of_a_result.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import data_of_a_result
    import model_of_a_result

    given = workload_from_functions(
        {"model_fn": model_of_a_result.make_model, "data_fn": data_of_a_result.make_data}
    )  # fmt: skip
    again = workload_from_reference(given.reference())
    assert (again.form, again.names, again.source_hash) == (given.form, given.names, given.source_hash)
    assert load_functions(again).data_fn() == "data"


@pytest.mark.parametrize(
    ("ending", "is_found"),
    [
        ("if __name__ == '__main__':\n    fit(net, rows)\n", True),
        ("fit(net, rows)\n", False),
        ("def (  # __main__\n", False),
    ],
)
def test_functions_of_a_script_that_ran_are_found_in_it_where_it_can_be_imported(
    ending: str, is_found: bool, tmp_path: Path
) -> None:
    script = written(tmp_path, f"def net(): ...\ndef rows():\n    return 'data'\n\n{ending}", "that_ran.py")
    names = {"model_fn": "net", "data_fn": "rows"}
    reference = WorkloadReference(form="value", location=script, names=names, source_hash="0" * 12)
    if is_found:
        again = workload_from_reference(reference)
        assert (again.form, again.location, again.names) == ("file", script, names)
        assert load_functions(again).data_fn() == "data"
    else:
        with pytest.raises(WorkloadError, match="give TARGET"):
            workload_from_reference(reference)


def test_those_of_a_script_in_a_package_are_found_in_the_module(tmp_path: Path) -> None:
    package = tmp_path / "package_that_ran"
    package.mkdir()
    written(package, "WORD = 'data'\n", "words.py")
    body = "from .words import WORD\ndef net(): ...\ndef rows():\n    return WORD\n\nif __name__ == '__main__':\n    fit()\n"
    script = written(package, body, "train.py")
    names = {"model_fn": "net", "data_fn": "rows"}
    again = workload_from_reference(
        WorkloadReference(form="value", location=script, names=names, source_hash="0" * 12)
    )  # fmt: skip
    assert (again.form, again.location) == ("module", "package_that_ran.train")
    assert load_functions(again).data_fn() == "data"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"form": "value", "location": "notebook"},
            "they were handed over by value, in notebook): give TARGET, a file or module that defines model_fn and "
            "data_fn, or call autotune.verify in the program that has them",
        ),
        ({}, "the program that the result names: no such file: gone.py; give TARGET if it lies elsewhere now"),
        ({"names": {"model_fn": "a.b"}}, "no such file: gone.py; give TARGET"),
        ({"form": "module", "location": "gone.module", "names": {"model_fn": "gone.module:f"}}, "no module named"),
    ],
)
def test_a_result_whose_program_is_not_there_asks_for_it(changes: dict[str, Any], sentence: str) -> None:
    names = {"model_fn": "model_fn", "data_fn": "data_fn"}
    reference = WorkloadReference(form="file", location="gone.py", names=names, source_hash="0" * 12)
    with pytest.raises(WorkloadError) as told:
        workload_from_reference(reference.model_copy(update=changes))
    assert sentence in str(told.value)
