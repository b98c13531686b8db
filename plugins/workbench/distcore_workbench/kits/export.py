"""The laws of an exporter of checkpoints: ``distcore check --export NAME``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from distcore import DistcoreError, TrainedModel
from distcore.testing import Measured, Skip, Suite, change_random_state, none_of
from distcore_workbench.kits.export_lab import FACT, TASK_FILE, ExportLab, export_lab
from distcore_workbench.kits.plugin_checks import drawn

SUITE = Suite("export", export_lab)


@SUITE.law("checkpoint")
def has_the_weights(lab: ExportLab) -> Measured:
    """Each weight is in the folder, bit for bit."""
    return _weights_in(lab.exported(), lab.trained())


@SUITE.law("checkpoint")
def keeps_the_dtype(lab: ExportLab) -> Measured:
    """A model in bf16, as of ``--dtype bf16``, is exported in bf16, or refused."""
    trained = lab.trained("bf16")
    try:
        to = lab.exported("bf16")
    except DistcoreError as error:
        raise Skip(str(error)) from None
    return _weights_in(to, trained)


@SUITE.law("checkpoint")
def into_an_empty_folder(lab: ExportLab) -> Measured:
    """A folder that is there and empty is filled like one that is not."""
    usual, to = lab.exported(), lab.new_folder()
    to.mkdir()
    lab.export(lab.trained(), to, False)
    wrong = sorted(_files(usual).keys() ^ _files(to).keys())
    return none_of(wrong, "files of one of both", "make it by to.mkdir(exist_ok=True)")


@SUITE.law("checkpoint")
def has_the_task_files(lab: ExportLab) -> Measured:
    """The task's files, such as a tokenizer, are in the folder."""
    missing = [] if TASK_FILE in _files(lab.exported()) else [TASK_FILE]
    return none_of(missing, "files that are not there", "call trained.save_task_files(to)")


@SUITE.law("checkpoint")
def says_where_it_is_from(lab: ExportLab) -> Measured:
    """The facts about the training are in the folder, and no folder of this machine."""
    texts = _files(lab.exported()).values()
    wrong = []
    if not any(FACT.encode() in text for text in texts):
        wrong.append("no value of trained.provenance")
    if any(str(lab.folder).encode() in text for text in texts):
        wrong.append("the folder of the run")
    return none_of(wrong, "about the training", "write trained.provenance, which has no folders")


@SUITE.law("order")
def same_again(lab: ExportLab) -> Measured:
    """Two exports of a checkpoint have the same files with the same bytes."""
    first, second = (_files(lab.exported()) for _ in range(2))
    differing = _differing(first, second)
    return none_of(differing, "files that differ", "write no times and no random names")


@SUITE.law("agreement")
def says_what_cannot_be_written(lab: ExportLab) -> Measured:
    """A folder that cannot be made is an OSError or a DistcoreError, one line for the user."""
    file = lab.new_folder()
    file.write_text("no folder can be made below a file")
    wrong = ["nothing was raised"]
    try:
        lab.export(lab.trained(), file / "to", False)
    except (OSError, DistcoreError):
        wrong = []
    except BaseException as error:  # of the exporter: torch has some that are no Exception
        wrong = [f"{type(error).__name__}: {str(error).splitlines()[0]}"]
    return none_of(wrong, "error", "raise it as OSError")


@SUITE.law("surprise")
def changes_no_model(lab: ExportLab) -> Measured:
    """The model is as before: its weights, and which parameters are trained."""
    trained = lab.trained()
    before = _facts(trained)
    lab.export(trained, lab.new_folder(), False)
    changed = _differing(before, _facts(trained))
    return none_of(changed, "changed in the model", "work on copy.deepcopy(trained.module)")


@SUITE.law("surprise")
def stays_in_its_folder(lab: ExportLab) -> Measured:
    """Nothing is written beside the folder, and the run is as before."""
    before = _files(lab.run)
    files = lab.exported().parent.iterdir()
    siblings = [path.name for path in files if path.name != "to"]
    changed = _differing(before, _files(lab.run))
    return none_of([*siblings, *changed], "written elsewhere", "write below to")


@SUITE.law("surprise")
def draws_nothing(lab: ExportLab) -> Measured:
    """An export leaves the random states of Python, numpy and torch as they are."""
    lab.exported()  # libraries draw numbers at their import
    trained = lab.trained()
    with change_random_state(1):
        expected = drawn()
    with change_random_state(1):
        lab.export(trained, lab.new_folder(), False)
        numbers = drawn()
    changed = []
    libraries = ("random", "numpy", "torch")
    for library, number, expected_number in zip(libraries, numbers, expected, strict=True):
        if number != expected_number:
            changed.append(library)
    return none_of(changed, "random states", "draw from a generator of your own")


def _weights_in(folder: Path, trained: TrainedModel) -> Measured:
    """Measure the weights whose bytes are in no file of the folder; none may be missing."""
    contents = _files(folder).values()
    missing = []
    for name, weight in trained.module.named_parameters():
        weight_bytes = _bytes_of(weight)
        if not any(weight_bytes in content for content in contents):
            missing.append(name)
    subject = f"weights that are in none of {len(contents)} files"
    return none_of(missing, subject, "write each as it is")


def _bytes_of(value: torch.Tensor) -> bytes:
    """Return the elements of a tensor as they are in memory; numpy has no bf16."""
    elements = value.detach().contiguous()
    return elements.view(torch.uint8).numpy().tobytes()


def _files(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder, by its path in the folder."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _differing(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return the names whose values differ, or that only one of both has, in order."""
    names = sorted(before.keys() | after.keys())
    return [name for name in names if before.get(name) != after.get(name)]


def _facts(trained: TrainedModel) -> dict[str, object]:
    """Return what an export must not change in a model: trained parameters, dtypes, values."""
    facts: dict[str, object] = {}
    for name, weight in trained.module.named_parameters():
        facts[f"whether {name} is trained"] = weight.requires_grad
    for name, value in trained.module.state_dict().items():
        facts[name] = (value.dtype, value.tolist())
    return facts
