"""A complete training script in plain PyTorch that does what a configuration does, and imports no autotune.

The knobs give their lines; this module knows only the places where lines go, and the rules of `Training`'s step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from textwrap import indent

from autotune.config import TrainingConfig
from autotune.errors import UserError
from autotune.export import _script_pieces as pieces
from autotune.knobs.base import CodeLines
from autotune.knobs.batch_size import micro_batches_per_step
from autotune.knobs.registry import KNOBS, batch_knob
from autotune.records import Answer, Recommendation, SearchFacts, WorkloadReference
from autotune.workload import is_importable_script, module_in_package


def export(recommendation: Recommendation, config: TrainingConfig | None = None) -> str:
    """The script as text: iterating over `train()` in it trains, and gives the mean loss of every optimizer step.

    `config` is the recommended one unless given. The user's functions are imported from where the search found them;
    those of a notebook cannot be, and the script says where to paste them.
    """
    return _Script(recommendation, recommendation.best.config if config is None else config).text()


def missing_functions(recommendation: Recommendation) -> tuple[str, ...]:
    """The roles of the functions that the script asks for, since they cannot be imported from where `fit` was given them."""
    return _missing(recommendation.reference)


class _Script:
    """One script, section by section."""

    def __init__(self, recommendation: Recommendation, config: TrainingConfig) -> None:
        conditions = recommendation.settings.conditions
        self.recommendation = recommendation
        self.workload = recommendation.workload
        self.config = config
        self.device = conditions.device
        self.clip_grad_norm = conditions.clip_grad_norm
        self.roles = recommendation.reference.names.keys()
        self.facts = SearchFacts(
            machine=recommendation.machine,
            workload=self.workload,
            device=conditions.device,
            global_batch_size=conditions.global_batch_size,
            largest_batch_size=self.workload.dataset_length or recommendation.best.micro_batch_size,
        )
        self.lines: list[CodeLines] = [knob.export(config[knob.name], config, self.facts) for knob in KNOBS]
        micro_batch_size = int(config[batch_knob().name])
        self.micro_batches = micro_batches_per_step(micro_batch_size, conditions.global_batch_size)
        self.counts_samples = self.micro_batches > 1 and not self.workload.loss_weighted

    def text(self) -> str:
        functions = [*pieces.OWN_ARGUMENTS, *_user_functions(self.recommendation.reference)]
        body = [
            *self._setup(),
            *self._loader(),
            "",
            "while True:",
            *_indented(self._steps()),
        ]
        train = ["def train():", f'    """{pieces.TRAIN_SUMMARY}"""', *_indented(body)]
        top = f"{self._header()}\n\n{self._imports(functions)}"
        sections = [top, *self._helpers(), "\n".join(train), pieces.MAIN]
        return "\n\n\n".join(section.strip("\n") for section in sections if section.strip()) + "\n"

    # --- the top of the script ---

    def _header(self) -> str:
        changed = [
            f"    {knob.name} = {self.config[knob.name]}"
            for knob in KNOBS
            if self.config[knob.name] != knob.baseline(self.facts)
        ]
        machine = self.recommendation.machine
        where = machine.gpus[0].name if self.device == "cuda" and machine.gpus else machine.cpu_name
        text = [
            '"""Trains as autotune measured it, in plain PyTorch. Usage: python THIS_FILE.py [STEPS]',
            "",
            f"Measured with autotune {_as_prose(self.recommendation.autotune_version)} on {_as_prose(where)}"
            f"{self._evidence()}",
            *(
                ["What differs from the program as it stood:", *changed]
                if changed
                else ["It is the program as it stood."]
            ),
            '"""',
        ]
        return "\n".join(text)

    def _evidence(self) -> str:
        recommendation = self.recommendation
        candidates: Iterable[Answer | None] = (recommendation.best, recommendation.free_batch, recommendation.baseline)
        for answer in candidates:
            if answer is not None and answer.config == self.config:
                rate = f": {answer.samples_per_second:.4g} samples/s"
                if recommendation.baseline is not None and answer.config == recommendation.baseline.config:
                    return f"{rate}."  # beside itself it is 1.00 times as fast
                low, high = answer.speedup.interval
                beside = (
                    "reference, with which alone the program fits" if recommendation.reference_settings else "baseline"
                )
                return f"{rate}, {answer.speedup.value:.2f} times the {beside} (95 % interval {low:.2f} to {high:.2f})."
        return "."

    def _imports(self, functions: list[str]) -> str:
        environment: dict[str, str] = {}
        for knob in KNOBS:
            environment.update(knob.environment(self.config[knob.name]))
        found = {line for lines in self.lines for line in lines.imports}
        found |= {"import sys", "import torch", "from torch.utils.data import DataLoader"}
        if self.device == "cuda":
            found |= {"import copy", "import dataclasses", "from collections.abc import Mapping"}
        if "loss_fn" not in self.roles or self._ready_batches():
            found.add("from collections.abc import Mapping")
        if any(line.startswith("spec = importlib") for line in functions):
            found.add("import importlib.util")
        ordered = sorted(found, key=lambda line: (line.startswith("from "), line))
        first = ["import os", *(f"os.environ[{name!r}] = {value!r}" for name, value in environment.items())]
        return "\n".join(
            [
                *([*first, "# That must stand before torch is imported.", ""] if environment else []),
                *(line for line in ordered if "torch" not in line),
                "",
                *(line for line in ordered if "torch" in line),
                "",
                *functions,
            ]
        )

    def _ready_batches(self) -> bool:
        """The data set makes the batches, so that samples are not counted where they are collated."""
        return self.counts_samples and self.workload.batch_fixed_reason is not None

    def _helpers(self) -> list[str]:
        return [
            "" if "loss_fn" in self.roles else pieces.LOSS_OF_MODEL,
            pieces.TO_DEVICE if self.device == "cuda" else "",
            pieces.SAMPLES_IN if self._ready_batches() else "",
            "" if not self.counts_samples else (pieces.COUNTED_READY if self._ready_batches() else pieces.COUNTED),
            pieces.WINDOWS.replace("SIZE", str(self.micro_batches)) if self.micro_batches > 1 else "",
        ]

    # --- the body of train() ---

    def _setup(self) -> list[str]:
        scalers = [lines.scaler for lines in self.lines if lines.scaler]
        made_optimizer = (
            "optimizer_fn(model)" if "optimizer_fn" in self.roles else "torch.optim.AdamW(model.parameters())"
        )
        self.has_scaler = bool(scalers)
        self.needs_parameters = self.workload.loss_weighted or self.clip_grad_norm is not None
        return [
            f'device = torch.device("{self.device}")',
            *(line for lines in self.lines for line in lines.process),
            "model = model_fn()",
            "model.to(device)",
            *(["model.train()"] if self.workload.comes_in_evaluation else []),
            *(line for lines in self.lines for line in lines.model),
            f"optimizer = {made_optimizer}",
            *(["scheduler = scheduler_fn(optimizer)"] if "scheduler_fn" in self.roles else []),
            *(line for lines in self.lines for line in lines.optimizer),
            *(f"scaler = {scaler}" for scaler in scalers),
            f"compute_loss = {'loss_fn' if 'loss_fn' in self.roles else 'loss_of_model'}",
            *self._wrapping(),
            *([pieces.PARAMETERS] if self.needs_parameters else []),
        ]

    def _wrapping(self) -> list[str]:
        """The lines that replace forwards; functions among them stand apart by one empty line."""
        lines = [line for lines in self.lines for line in lines.wrap]
        starts_function = bool(lines) and lines[0].startswith(("def ", "@"))
        apart = ["", *lines] if starts_function else lines
        return [line for line, before in zip(apart, [None, *apart], strict=False) if line or before != ""]

    def _loader(self) -> list[str]:
        changes: dict[str, str] = {}
        for lines in self.lines:
            changes.update(lines.loader_arguments)
        if not self.workload.batch_held:
            own = {"batch_size": str(self.workload.batch_size)}
            if self.workload.dataset_kind == "map":
                own["shuffle"] = "True"
            made = _call("loader = DataLoader", ["data_fn()", *_keywords({**own, **changes})])
        elif changes:
            made = self._rebuilt(changes)
        else:
            made = ["loader = data_fn()"]
        if self.counts_samples:
            batched = ", loader" if self._ready_batches() else ""
            made.append(f"loader.collate_fn = Counted(loader.collate_fn{batched})")
        return made

    def _rebuilt(self, changes: dict[str, str]) -> list[str]:
        """The user's loader again, with some arguments changed: the rest is taken from the one that they made."""
        fixed, streamed = self.workload.batch_fixed_reason is not None, self.workload.dataset_kind == "iterable"
        kept = [] if fixed else ["batch_size", "drop_last", *([] if streamed else ["sampler"])]
        arguments = {name: f"given.{name}" for name in kept}
        if fixed and streamed:
            arguments["batch_size"] = "None"
        ready = fixed and not streamed
        first = ["given = data_fn()", *(pieces.READY_BATCHES if ready else ())]
        spread = ["**batches"] if ready else []
        arguments |= {
            name: f"given.{name}"
            for name in ("num_workers", "collate_fn", "pin_memory", "worker_init_fn", "generator", "in_order")
        }
        if changes.get("num_workers", str(self.workload.num_workers)) != "0":
            arguments |= {name: f"given.{name}" for name in pieces.WORKER_ONLY}
        return [*first, *_call("loader = DataLoader", ["given.dataset", *spread, *_keywords({**arguments, **changes})])]

    def _steps(self) -> list[str]:
        """One pass over the loader."""
        weighted = self.workload.loss_weighted
        if self.micro_batches == 1:
            loop = ["for batch in loader:", *_indented(self._micro_batch())]
            outcome = "loss.detach() / weight" if weighted else "loss.detach().clone()"
            divisor = "weight"
        else:
            pairs = "samples, batch" if self.counts_samples else "batch"
            add = ["total = total + loss.detach()", *(["total_weight = total_weight + weight"] if weighted else [])]
            loop = [
                "for window in windows(loader):",
                "    total = 0.0",
                "    total_weight = 0.0" if weighted else "    window_samples = sum(samples for samples, _ in window)",
                f"    for {pairs} in window:",
                *_indented(_indented([*self._micro_batch(), *add])),
            ]
            outcome = "total / total_weight" if weighted else "total"
            divisor = "total_weight"
        tail = [
            *(line.replace("DIVISOR", divisor) for line in (pieces.DIVIDE if weighted else ())),
            *self._update(),
            f"yield {outcome}",
        ]
        return [*loop, *_indented(tail)]

    def _micro_batch(self) -> list[str]:
        contexts = [lines.context for lines in self.lines if lines.context]
        wait = ", non_blocking=True" if any(lines.non_blocking for lines in self.lines) else ""
        forward = f"{'loss, weight' if self.workload.loss_weighted else 'loss'} = compute_loss(model, batch)"
        return [
            *([f"batch = to_device(batch, device{wait})"] if self.device == "cuda" else []),
            *(line for lines in self.lines for line in lines.micro_step),
            *([f"with {', '.join(contexts)}:", f"    {forward}"] if contexts else [forward]),
            *(["loss = loss * (samples / window_samples)"] if self.counts_samples else []),
            "scaler.scale(loss).backward()" if self.has_scaler else "loss.backward()",
        ]

    def _update(self) -> list[str]:
        clip = [f"torch.nn.utils.clip_grad_norm_(parameters, {self.clip_grad_norm!r})"]
        if self.has_scaler:
            clip.insert(0, "scaler.unscale_(optimizer)")
        return [
            *(clip if self.clip_grad_norm is not None else []),
            *(["scaler.step(optimizer)", "scaler.update()"] if self.has_scaler else ["optimizer.step()"]),
            *(["scheduler.step()"] if "scheduler_fn" in self.roles else []),
            "optimizer.zero_grad()",
        ]


# --- the user's functions ---------------------------------------------------------------------------------------------


def _user_functions(reference: WorkloadReference) -> list[str]:
    """Lines that bring the user's functions into scope under the names of their roles.

    Raises ValueError for what is no name: the record may come from a file that somebody else wrote.
    """
    for name in (*reference.names, *(reference.names.values() if reference.form != "value" else ())):
        if not all(part.isidentifier() for part in name.replace(":", ".", 1).split(".")):
            raise UserError(f"the result names {name!r} among its functions, and that is no name of a function")
    if reference.form == "module":
        return ['sys.path.insert(0, "")  # run this where the module can be found', *_from_modules(reference.names)]
    path = Path(reference.location)
    if lacking := _missing(reference):
        roles = ", ".join(lacking)
        return [
            f"# PASTE HERE the definitions of {roles}.",
            f"# They were handed over by value ({_as_prose(reference.location)}), so there is nothing to import them from.",
        ]
    names = ", ".join(sorted(name if name == role else f"{name} as {role}" for role, name in reference.names.items()))
    stem = path.stem
    if found := module_in_package(path):
        module, folder = found
        return [f"sys.path.insert(0, {folder!r})", f"from {module} import {names}"]
    beside = f"sys.path.insert(0, {str(path.resolve().parent)!r})"  # as of a script that is named by a link
    if stem.isidentifier() and stem not in sys.stdlib_module_names and not path.is_symlink():
        return [beside, f"from {stem} import {names}"]
    return [
        beside,
        f"spec = importlib.util.spec_from_file_location('user_program', {str(path)!r})",
        "user_program = sys.modules['user_program'] = importlib.util.module_from_spec(spec)",
        "spec.loader.exec_module(user_program)",
        *(f"{role} = user_program.{name}" for role, name in reference.names.items()),
    ]


def _missing(reference: WorkloadReference) -> tuple[str, ...]:
    if reference.form != "value" or is_importable_script(Path(reference.location), reference.names.values()):
        return ()
    return tuple(reference.names)


def _from_modules(names: dict[str, str]) -> list[str]:
    lines: list[str] = []
    for role, full_name in names.items():
        module, _, qualified = full_name.partition(":")
        first, _, rest = qualified.partition(".")
        if rest:
            lines += [f"from {module} import {first}", f"{role} = {qualified}"]
        else:
            lines.append(f"from {module} import {first}" + ("" if first == role else f" as {role}"))
    return lines


# --- small pieces -----------------------------------------------------------------------------------------------------


def _as_prose(text: str) -> str:
    """Words of the record for a comment or a docstring: one line that ends neither, whoever wrote the record."""
    return "".join(letter if letter.isprintable() and letter not in '\\"' else "/" for letter in text)


def _indented(lines: Iterable[str]) -> list[str]:
    return indent("\n".join(lines), "    ").split("\n")


def _keywords(arguments: dict[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in arguments.items()]


def _call(start: str, arguments: list[str]) -> list[str]:
    one_line = f"{start}({', '.join(arguments)})"
    return [one_line] if len(one_line) <= 100 else [f"{start}(", *(f"    {argument}," for argument in arguments), ")"]
