"""The laws of an extension, such as a tracker: ``distcore check --extension NAME``."""

from __future__ import annotations

import json
from functools import partial
from itertools import count
from typing import Any

from distcore import dump_config
from distcore.testing import Measured, Suite, needs, none_of
from distcore_workbench.kits.extension_lab import HALF, ExtensionLab, Trained, extension_lab
from distcore_workbench.kits.missing import packages_of_extras, train_without
from distcore_workbench.kits.optimizer_lab import differing
from distcore_workbench.kits.plugin_checks import needs_two_ranks, unchecked_options

SUITE = Suite("extension", extension_lab)


@SUITE.law("surprise")
def changes_no_weight(lab: ExtensionLab) -> Measured:
    """A run with the extension trains the same weights, to the bit."""
    return _same_weights(*lab.pair)


@SUITE.law("evaluation")
def changes_no_answer(lab: ExtensionLab) -> Measured:
    """A run with the extension has the same evaluation."""
    off, on = lab.pair
    wrong = []
    for name, expected in off.evaluation.items():
        value = on.evaluation.get(name)
        if value != expected:
            wrong.append(f"{name}: {value} for {expected}")
    return none_of(wrong, "differ with the extension", "return what the wrapped hook returned")


@SUITE.law("resume")
def draws_nothing(lab: ExtensionLab) -> Measured:
    """The extension leaves the random states of Python, numpy and torch as they are."""
    off, on = lab.pair
    names = zip(("random", "numpy", "torch"), off.numbers, on.numbers, strict=True)
    moved = [name for name, expected, number in names if number != expected]
    return none_of(
        moved, "random states that differ after the run", "draw from a generator of your own"
    )


@SUITE.law("surprise")
def leaves_nothing(lab: ExtensionLab) -> Measured:
    """After on_run_end nothing is left in the process, and nothing outside of the run folder.

    In the process are threads, child processes, open files and signal handlers.
    """
    off, on = lab.pair
    return none_of(
        sorted(on.left - off.left),
        "left after the run",
        "close it in on_run_end; write below run.config.out",
    )


@SUITE.law("resume")
def continues(lab: ExtensionLab) -> Measured:
    """A resumed run has the weights, and the extension's state, of an uninterrupted one."""
    whole, resumed = lab.elsewhere(partial(_in_two_parts, lab))
    # As JSON, in which a checkpoint has it: a tuple comes back as a list.
    expected = json.dumps(whole.state, sort_keys=True)
    state = json.dumps(resumed.state, sort_keys=True)
    if state != expected:
        remedy = "load_state() must take over what state() returned"
        return none_of([f"{state} for {expected}"], "state after a resume", remedy)
    return _same_weights(whole, resumed)


@SUITE.law("agreement")
def two_ranks(lab: ExtensionLab) -> Measured:
    """Two ranks train with the extension as without it."""
    needs_two_ranks()
    return _same_weights(*lab.two_ranks)


@SUITE.law("surprise")
def no_collective(lab: ExtensionLab) -> Measured:
    """The extension adds no collective to a run of two ranks.

    Values of run.log are reduced with the loss.
    """
    needs_two_ranks()
    off, on = (trained.collectives for trained in lab.two_ranks)
    wrong = [f"{count} of {name}" for name, count in (on - off).items()]
    return none_of(
        wrong, f"collectives beside {sum(off.values())}", "log by run.log, with the name in logs"
    )


@SUITE.law("agreement")
def hides_no_error(lab: ExtensionLab) -> Measured:
    """A run that fails says the same with the extension."""
    off, on = lab.elsewhere(partial(_errors, lab))
    wrong = [] if on == off else [f"{on!r} for {off!r}"]
    return none_of(wrong, "error with the extension", "let exceptions pass in wrappers")


@SUITE.law("surprise")
def options_are_checked(lab: ExtensionLab) -> Measured:
    """A value that does not fit an option is one line that names it, before any step."""
    unchecked = lab.elsewhere(partial(_unchecked, lab))
    return none_of(unchecked, "options that take anything", "give fields types with bounds")


@SUITE.law("surprise")
def says_what_is_missing(lab: ExtensionLab) -> Measured:
    """Without the packages of its extras a run goes on, or one line says what to install."""
    packages = packages_of_extras("extensions", lab.name)
    needs(bool(packages), "its distribution has no extras")
    file = lab.folder / "missing.yaml"
    file.write_text(dump_config(lab.config("missing", on=True)))
    wrong = train_without(packages, file)
    then = "raise ConfigError with the command that installs it"
    return none_of([wrong] if wrong else [], f"said without {', '.join(packages)}", then)


def _same_weights(expected: Trained, trained: Trained) -> Measured:
    """Return the tensors of checkpoints that are not equal bit for bit."""
    return none_of(
        differing(expected.tensors, trained.tensors),
        "differ with the extension",
        "a listener must not change the run; declare it in exempt if it is to",
    )


def _in_two_parts(lab: ExtensionLab) -> tuple[Trained, Trained]:
    """Train without a stop, and again from the checkpoint half-way."""
    whole = lab.train("whole", on=True)
    half = lab.folder / f"whole/checkpoints/step-{HALF:08d}"
    return whole, lab.train("resumed", on=True, changes={"resume": str(half)})


def _errors(lab: ExtensionLab) -> tuple[str, str]:
    """Return the errors of a failing run without the extension, and of one with it."""
    return lab.error("error-off", on=False), lab.error("error-on", on=True)


def _unchecked(lab: ExtensionLab) -> list[str]:
    numbers = count()

    def build(options: dict[str, Any]) -> object:
        return lab.train(f"options-{next(numbers)}", on=True, options=options)

    return unchecked_options(lab.cls, build)
