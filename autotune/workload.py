"""`Workload`: what the user handed over, by reference, and how a child process turns it into functions."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import io
import os
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

import cloudpickle

from autotune.caller_settings import put_in_force, settings_of_this_process
from autotune.config import Value
from autotune.errors import WorkloadError
from autotune.records import WorkloadReference
from autotune.sources import file_text, sources

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

ROLES = ("model_fn", "data_fn", "loss_fn", "optimizer_fn", "scheduler_fn")
REQUIRED_ROLES = ("model_fn", "data_fn")
MAXIMUM_PICKLE_BYTES = 64 * 2**20
"""Functions that travel by value with everything they close over; more than this is a data set in a global."""


@dataclass(frozen=True)
class UserFunctions:
    """The functions themselves, as `Training` uses them."""

    model_fn: Callable[[], Any]
    data_fn: Callable[[], Any]
    loss_fn: Callable[[Any, Any], Any] | None = None
    optimizer_fn: Callable[[Any], Any] | None = None
    scheduler_fn: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Workload:
    """References to the user's functions. Nothing of theirs is imported in this process.

    `form` is `file` (a path and names), `module` (names as `module:qualified.name`) or `value` (a cloudpickle of a
    dictionary of functions, only ever sent to our own child).
    """

    form: str
    location: str
    names: dict[str, str] = field(default_factory=dict)
    payload: bytes | None = None
    search_path: tuple[str, ...] = ()
    source_hash: str = ""
    settings: Mapping[str, Value] = field(default_factory=dict)
    """What the process that handed over the functions has set in torch; none for a file or module, which sets its own."""
    directory: str | None = None
    """Where that process stood, and where its functions run: what importing them again goes to need not be that. None: where
    importing the file or module goes."""

    def reference(self) -> WorkloadReference:
        """The part that a result keeps."""
        return WorkloadReference(
            form=self.form,
            location=self.location,
            names=self.names,
            source_hash=self.source_hash,
        )


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def workload_from_target(target: str) -> Workload:
    """A workload from the command line's FILE.py or package.module.

    Reads the file's text, to find out which functions it defines, but does not run it. Raises `WorkloadError`.
    """
    if any("\ud800" <= letter <= "\udfff" for letter in target):  # how Python reads bytes that it cannot decode
        raise WorkloadError(
            f"{target!a} is no text in this locale's encoding ({sys.getfilesystemencoding()}); set LC_ALL=C.UTF-8, or "
            "rename the file"
        )
    is_file = target.endswith(".py") or os.sep in target
    path = Path(target) if is_file else _module_file(target)
    search_path = (str(path.resolve().parent),) if is_file else (os.getcwd(),)
    source = _read(path, target)
    names = _names_in_source(source, str(target), path.resolve().parent)
    if is_file:
        return Workload("file", str(_where_named(path)), names, None, search_path, _hash_text(source))
    return Workload(
        "module",
        target,
        {role: f"{target}:{name}" for role, name in names.items()},
        None,
        search_path,
        _hash_text(source),
    )


def _where_named(path: Path) -> Path:
    """As Python has it in a script's `__file__`: what lies beside a link is looked for there, and not where that leads."""
    return path.parent.resolve() / path.name if ".." in path.parts else path.absolute()


def workload_from_reference(reference: WorkloadReference) -> Workload:
    """The workload that a result says it was made with, read from the place that the result names.

    Imports nothing. Raises `WorkloadError` where the functions are not there any more, and where the result does not
    say where they are, since they were handed over by value and not by a script that can be imported.
    """
    if reference.form == "value":
        path = Path(reference.location)
        if is_importable_script(path, reference.names.values()):
            if found := module_in_package(path):
                return _of_module(*found, path, reference.names)
            return _renamed(reference.model_copy(update={"form": "file"}))
        raise WorkloadError(
            f"the result does not say where its functions can be imported from (they were handed over by value, in "
            f"{reference.location}): give TARGET, a file or module that defines {' and '.join(reference.names)}, or "
            "call autotune.verify in the program that has them"
        )
    place = f"{reference.location}:" if reference.form == "module" else ""
    try:
        if all(name == f"{place}{role}" for role, name in reference.names.items()):
            return workload_from_target(reference.location)
        return _renamed(reference)
    except WorkloadError as error:
        message = f"the program that the result names: {error}; give TARGET if it lies elsewhere now"
        raise WorkloadError(message, error.detail) from None


def is_importable_script(path: Path, names: Iterable[str]) -> bool:
    """Whether a script defines these functions at its top level and is safe to import: it asks for `__main__` somewhere."""
    tree = _parsed(path)
    if path.suffix != ".py" or tree is None or not _is_guarded(path):
        return False
    return set(names) <= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def module_in_package(path: Path) -> tuple[str, str] | None:
    """The module that a script is which imports from its packages by leading dots, as `python -m package.script` lets it,
    and the folder that it is found from; None where it does not, or where their folders are no names."""
    tree = _parsed(path)
    imports = [] if tree is None else [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    dots = max((node.level for node in imports), default=0)
    folders = path.resolve().parents
    while 0 < dots < len(folders) and (folders[dots] / "__init__.py").is_file():
        dots += 1
    names = (*(folder.name for folder in reversed(folders[:dots])), path.stem)
    return (".".join(names), str(folders[dots])) if dots and all(name.isidentifier() for name in names) else None


def _parsed(path: Path) -> ast.Module | None:
    """The script's syntax tree; None where there is no such file, or it is no Python."""
    try:
        return ast.parse(path.read_text(encoding="utf-8-sig", errors="replace"))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _of_module(module: str, folder: str, path: Path, names: Mapping[str, str]) -> Workload:
    """The functions of a script that `python -m package.script` ran."""
    full_names = {role: f"{module}:{name}" for role, name in names.items()}
    return Workload("module", module, full_names, None, (folder,), _hash_text(_read(path, str(path))))


def _renamed(reference: WorkloadReference) -> Workload:
    """The functions that `fit` was given have other names than their roles, and may lie in several modules."""
    if reference.form == "file":
        path = Path(reference.location)
        source_hash = _hash_text(_read(path, reference.location))
        return Workload("file", str(path), reference.names, None, (str(path.resolve().parent),), source_hash)
    modules = [name.partition(":")[0] for _, name in sorted(reference.names.items())]
    texts = dict.fromkeys(_read(_module_file(module), module) for module in modules)
    source_hash = _hash_text("\n".join(texts))
    return Workload("module", reference.location, reference.names, None, (os.getcwd(),), source_hash)


def _read(path: Path, shown: str) -> str:
    try:
        if not path.is_file():
            raise WorkloadError(f"no such file: {shown}")
        return path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise WorkloadError(f"cannot read {shown}: {error.strerror}") from None


def _module_file(name: str) -> Path:
    """The file of a module that can be imported from here; finding it imports the packages around it."""
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path.pop(0)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise WorkloadError(f"no module named {name!r} here; give a path that ends in .py, or a dotted module name")
    return Path(spec.origin)


def _names_in_source(source: str, shown: str, directory: Path) -> dict[str, str]:
    """Roles that the top level of a file defines or imports, without running it."""
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        line = (error.text or "").rstrip()
        raise WorkloadError(
            f"{shown} has a syntax error in line {error.lineno}: {error.msg}",
            f'  File "{shown}", line {error.lineno}\n    {line.strip()}',
        ) from None
    defined = _bound_names(tree, directory)
    missing = [role for role in REQUIRED_ROLES if role not in defined]
    if missing:
        functions = [
            node.name
            for node in tree.body
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name[0] != "_"
        ]
        found = f"it defines {', '.join(functions)}" if functions else "it defines no functions"
        advice = f"Rename the function, or add a line such as `{missing[0]} = your_function`"
        if missing == list(REQUIRED_ROLES):
            advice = (
                "Put what makes the model into `def model_fn(): return ...`, what makes the Dataset or DataLoader into "
                '`def data_fn(): return ...`, and the training itself under `if __name__ == "__main__":`'
            )
        raise WorkloadError(f"{shown} does not define {' and '.join(missing)}; {found}. {advice}")
    return {role: role for role in ROLES if role in defined}


def _bound_names(tree: ast.Module, directory: Path) -> set[str]:
    """Names that importing the module binds, those of `from other import *` too where `other` lies beside it."""
    bound: set[str] = set()
    for node in _module_level(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, ast.Assign):
            for goal in node.targets:
                bound.update(item.id for item in ast.walk(goal) if isinstance(item, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            bound.add(node.target.id)
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            bound |= _names_of_other(directory, node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound.update(alias.asname or alias.name for alias in node.names)
    return bound


def _names_of_other(directory: Path, star_import: ast.ImportFrom) -> set[str]:
    folder = directory.joinpath(*[".."] * max(0, star_import.level - 1), *(star_import.module or "").split("."))
    for path in (folder.with_suffix(".py"), folder / "__init__.py"):
        if path.is_file():
            try:
                other = ast.parse(path.read_text(encoding="utf-8-sig", errors="replace"))
            except SyntaxError:
                return set()  # importing it will say so
            return _bound_names(other, path.parent)
    return set(REQUIRED_ROLES)  # a package's; whether it brings them shows when it is imported


def _module_level(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement that runs when the module is imported, those inside `if` or `try` too, but no function's body."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _module_level(child)


def workload_from_functions(functions: dict[str, Callable[..., Any]]) -> Workload:
    """A workload from what `autotune.fit` was given.

    Functions that can be imported by name travel by name; those of a script run as `__main__`, of a notebook or of a
    closure travel by value, and where that fails, the script is imported again by its path. They run where the caller
    stands, with what that has set in torch. Raises `WorkloadError`.
    """
    directory = None
    with contextlib.suppress(OSError):  # it is gone
        directory = os.getcwd()
    return replace(_handed_over(functions), settings=settings_of_this_process(), directory=directory)


def _handed_over(functions: dict[str, Callable[..., Any]]) -> Workload:
    for role, function in functions.items():
        if not callable(function):
            raise WorkloadError(f"{role} must be a function, not {type(function).__name__}")
    by_name = all(_importable(function) for function in functions.values())
    texts = [
        text
        for _, function in sorted(functions.items())
        for text in ([file_text(function) or ""] if by_name else sources(function))
    ]
    source_hash = _hash_text("\n".join(dict.fromkeys(texts)))
    search_path = (*(entry or os.getcwd() for entry in sys.path), *_places_of_modules(functions))
    if by_name:
        names = {role: f"{function.__module__}:{function.__qualname__}" for role, function in functions.items()}
        return Workload("module", names["model_fn"].split(":")[0], names, None, search_path, source_hash)
    try:
        payload = _pickled(functions)
    except Exception as error:  # user objects raise anything when they are pickled
        why = f"{type(error).__name__}: {error}"
        return _workload_from_main_script(functions, search_path, source_hash, why)
    if len(payload) > MAXIMUM_PICKLE_BYTES:
        size = f"{len(payload) / 2**20:.0f} MiB, more than {MAXIMUM_PICKLE_BYTES // 2**20} MiB"
        why = f"they and what they refer to take {size}"
        return _workload_from_main_script(functions, search_path, source_hash, why)
    names = {role: getattr(function, "__name__", role) for role, function in functions.items()}
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Workload("value", main_file or "notebook", names, payload, search_path, source_hash)


def _pickled(functions: dict[str, Callable[..., Any]]) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream).dump(functions)
    return stream.getvalue()


def _code_with_its_file(code: CodeType) -> tuple[Any, ...]:
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _made_code, (make, arguments, code.co_filename)


def _made_code(make: Callable[..., CodeType], arguments: tuple[Any, ...], file: str) -> CodeType:
    return make(*arguments).replace(co_filename=file)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # of an untyped package
    """Keeps which file code comes from, which cloudpickle leaves out: an error of the user's is told with its line."""

    dispatch_table = ChainMap({CodeType: _code_with_its_file}, cloudpickle.Pickler.dispatch_table)


def _places_of_modules(functions: dict[str, Callable[..., Any]]) -> list[str]:
    """Where their modules lie: a notebook's `sys.path` has where one stands by now, and may lead to them no more."""
    if "" not in sys.path:
        return []
    places = []
    for name in {str(getattr(function, "__module__", None)).partition(".")[0] for function in functions.values()}:
        module = sys.modules.get(name)
        if file := getattr(module, "__file__", None):
            path = Path(file).absolute().parent
            places.append(str(path.parent if hasattr(module, "__path__") else path))
    return sorted({*places} - {*sys.path})


def _importable(function: Callable[..., Any]) -> bool:
    module_name = getattr(function, "__module__", None)
    qualified = getattr(function, "__qualname__", "")
    return module_name not in (None, "__main__") and _is_named(function, sys.modules.get(str(module_name)), qualified)


def _is_named(function: Callable[..., Any], module: ModuleType | None, qualified: str) -> bool:
    """Whether the module has this very function by that name, and not the plain one of an object's method."""
    found: Any = module
    for part in qualified.split("."):
        found = getattr(found, part, None)
    return found is function or (isinstance(function, MethodType) and found == function)  # of a class


def _workload_from_main_script(
    functions: dict[str, Callable[..., Any]], search_path: tuple[str, ...], source_hash: str, reason: str
) -> Workload:
    main_file = getattr(sys.modules.get("__main__"), "__file__", None)
    simple = all(
        f.__module__ == "__main__" and "<" not in getattr(f, "__qualname__", "<") and not _is_of_object(f)
        for f in functions.values()
    )
    guarded = main_file is not None and _is_guarded(Path(main_file))
    if main_file is None or not simple or not guarded:
        advice = (
            'Put them into a module and import them, or call fit under `if __name__ == "__main__":` so that the script '
            "can be imported again"
        )
        owners = {type(function.__self__).__name__ for function in functions.values() if _is_of_object(function)}
        if owners:
            advice = (
                f"They are methods of an object ({', '.join(sorted(owners))}), which must travel with them: make what "
                "cannot be sent in the method that needs it first, or hand over functions instead"
            )
        raise WorkloadError(f"the functions cannot be sent to a trial process ({reason}). {advice}")
    names = {role: function.__qualname__ for role, function in functions.items()}
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.parent:  # python -m package.script, which may import from its package by leading dots
        full_names = {role: f"{spec.name}:{name}" for role, name in names.items()}
        return Workload("module", spec.name, full_names, None, search_path, source_hash)
    return Workload("file", str(_where_named(Path(main_file))), names, None, search_path, source_hash)


def _is_of_object(function: Callable[..., Any]) -> TypeGuard[MethodType]:
    """Whether it is bound to an object, which importing the script again does not give."""
    return isinstance(function, MethodType) and not isinstance(function.__self__, type)


def _is_guarded(script: Path) -> bool:
    """Whether it may be run again without starting what it starts."""
    return script.is_file() and "__main__" in script.read_text(encoding="utf-8", errors="replace")


def load_functions(workload: Workload) -> UserFunctions:
    """The functions, imported or unpickled in this process, which then stands where their caller did, with what that set in
    torch. Only the server and trials call this.

    Raises `WorkloadError` where the file lacks one; whatever the user's module raises at import passes through.
    """
    functions = _imported(workload)
    if workload.directory is not None:
        with contextlib.suppress(OSError):  # it is gone: then where we are is as good
            os.chdir(workload.directory)
    put_in_force(workload.settings)
    return functions


def _imported(workload: Workload) -> UserFunctions:
    for entry in reversed(workload.search_path):
        if entry not in sys.path:
            sys.path.insert(0, entry)
    if workload.form == "value":
        assert workload.payload is not None
        loaded: dict[str, Callable[..., Any]] = pickle.loads(workload.payload)
        _stand_for_script(workload.location, loaded.values())
        return UserFunctions(**loaded)
    if workload.form == "file":
        module = _import_file(Path(workload.location))
        return UserFunctions(**{role: _attribute(module, name, workload) for role, name in workload.names.items()})
    found: dict[str, Any] = {}
    for role, full_name in workload.names.items():
        module_name, _, qualified = full_name.partition(":")
        found[role] = _attribute(importlib.import_module(module_name), qualified, workload)
    return UserFunctions(**found)


def _stand_for_script(location: str, functions: Iterable[Callable[..., Any]]) -> None:
    """Makes this process's main module the script that they come from, for a loader worker that is no fork: it runs the
    script again, as it would for the user's own process, and is told by name what else it needs, such as a data set."""
    if not location.endswith(".py") or not _is_guarded(Path(location)):
        return
    main = sys.modules["__main__"]
    main.__file__ = location
    for function in functions:
        for name, thing in list(getattr(function, "__globals__", {}).items()):
            if isinstance(thing, (type, FunctionType)) and thing.__module__ == "__main__":
                setattr(main, name, thing)


class _LeavingNothing(SourceFileLoader):
    """Writes no bytecode beside the file, just as `python FILE.py` writes none."""

    def set_data(self, path: str, data: ReadableBuffer, *, _mode: int = 0o666) -> None:
        pass


def _import_file(path: Path) -> ModuleType:
    """Under the name that a loader worker which is no fork finds it by too: its own, or the one that Python gives to the
    script that it runs again there."""
    name = path.stem
    if not name.isidentifier() or name in sys.modules or path.is_symlink():  # modules are looked for where it leads
        name = "__mp_main__"
        sys.modules["__main__"].__file__ = str(path)
    # A worker that imports it by its own name would write bytecode beside it.
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    spec = importlib.util.spec_from_file_location(name, path, loader=_LeavingNothing(name, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _attribute(module: ModuleType, qualified: str, workload: Workload) -> Any:
    found: Any = module
    for part in qualified.split("."):
        if not hasattr(found, part):
            raise WorkloadError(f"{workload.location} does not define {qualified}")
        found = getattr(found, part)
    return found
