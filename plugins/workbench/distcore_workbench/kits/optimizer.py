"""The laws of an optimizer: ``distcore check --optimizer NAME``."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from distcore import launch
from distcore.checkpoint import difference
from distcore.testing import FP32, Measured, Suite, change_random_state, needs, none_of
from distcore_workbench.kits.optimizer_lab import (
    STEPS,
    OptimizerLab,
    Stepped,
    differing,
    new_model,
    optimizer_lab,
    random_gradient,
)
from distcore_workbench.kits.plugin_checks import drawn, needs_two_ranks, unchecked_options
from distcore_workbench.kits.session_runs import tensors_of

SUITE = Suite("optimizer", optimizer_lab)
HALF = STEPS // 2
DECAY = 0.3
SPARSE = "embedding"
"""The parameter that gets no gradient."""


@SUITE.law("gradient")
def goes_down(lab: OptimizerLab) -> Measured:
    """Steps along the gradient of a distance make the distance smaller."""
    stepped = lab.begin()
    target: dict[str, Tensor] = {}
    for name, value in new_model().state_dict().items():
        target[name] = value + 1

    def gradient(name: str, parameter: Tensor, step: int) -> Tensor:
        # Of half the squared distance.
        return parameter.detach() - target[name]

    lab.step(stepped, range(5 * STEPS), gradient)
    left = _distance(stepped.weights, target) / _distance(stepped.before, target)
    note = (
        f"{left:.4f} of the distance is left after {5 * STEPS} steps; the sign or the size of a"
        " step is wrong"
    )
    return Measured(error=left, bound=0.999, note=note)


@SUITE.law("gradient")
def rate_of_each_step(lab: OptimizerLab) -> Measured:
    """A step reads the learning rate from its group: at a rate of 0 no weight moves."""
    stepped = lab.step(lab.begin(), range(HALF))
    before = copy.deepcopy(stepped.weights)
    _set_rates(stepped, ".")
    lab.step(stepped, range(HALF, STEPS))
    moved = differing(stepped.weights, before)
    return none_of(
        moved, "moved at a rate of 0", "read group['lr'] in step(), since a schedule changes it"
    )


@SUITE.law("gradient")
def rate_of_each_group(lab: OptimizerLab) -> Measured:
    """Each group has its own learning rate: one at 0 stays, and the others step as without it."""
    # The scale makes the head a group of its own.
    changes = {"optimizer.groups": [{"match": "head", "lr_scale": 0.5}]}
    usual = lab.step(lab.begin(changes))
    mixed = lab.begin(changes)
    _set_rates(mixed, "head")
    lab.step(mixed)
    wrong = [name for name in mixed.changed() if name.startswith("head")]
    for name in differing(mixed.weights, usual.weights):
        if not name.startswith("head"):
            wrong.append(name)
    return none_of(
        wrong, "stepped at the rate of another group", "read lr from the group of the parameter"
    )


@SUITE.law("gradient")
def decay_of_each_group(lab: OptimizerLab) -> Measured:
    """Each group has its own weight decay: a group without it steps as in a run without it."""
    needs("weight_decay" in lab.options, "the optimizer has no option weight_decay")
    without = {"optimizer.weight_decay": 0.0}
    everywhere = {"optimizer.weight_decay": DECAY}
    but_head = everywhere | {"optimizer.groups": [{"match": "head", "weight_decay": 0.0}]}
    none = lab.step(lab.begin(without)).weights
    full = lab.step(lab.begin(everywhere)).weights
    mixed = lab.step(lab.begin(but_head)).weights
    not_decayed = []
    decayed = []
    for name in full:
        is_decayed = not torch.equal(full[name], none[name])
        if _decays(name) and not is_decayed:
            not_decayed.append(f"{name} is not decayed")
        elif is_decayed and not _decays(name):
            decayed.append(f"{name} is decayed")
    wrong = [*not_decayed, *decayed]
    for name in differing(mixed, none):
        if name.startswith("head"):
            wrong.append(f"{name} in a group without")
    for name in differing(mixed, full):
        if not name.startswith("head"):
            wrong.append(f"{name} in a group with")
    return none_of(
        wrong, "weight decay of another group", "read weight_decay from the group of the parameter"
    )


@SUITE.law("gradient")
def parameters_apart(lab: OptimizerLab) -> Measured:
    """The step of a parameter does not depend on the gradients of others.

    Another rank or phase may hold those.
    """

    def gradient_of_head(name: str, parameter: Tensor, step: int) -> Tensor | None:
        return random_gradient(name, parameter, step) if name.startswith("head") else None

    together = lab.step(lab.begin())
    alone = lab.step(lab.begin(), gradient=gradient_of_head)
    changed = differing(together.weights, alone.weights)
    wrong = [name for name in changed if name.startswith("head")]
    return none_of(
        wrong,
        "depend on the gradients of others",
        "compute norms and scales of each parameter by itself",
    )


@SUITE.law("gradient")
def unused_stay(lab: OptimizerLab) -> Measured:
    """A parameter without a gradient keeps its weights, and has no state."""

    def gradient_of_others(name: str, parameter: Tensor, step: int) -> Tensor | None:
        return None if name.startswith(SPARSE) else random_gradient(name, parameter, step)

    stepped = lab.step(lab.begin(), gradient=gradient_of_others)
    moved = stepped.changed()
    wrong = []
    for name, parameter in stepped.module.named_parameters():
        if not name.startswith(SPARSE):
            continue
        if name in moved:
            wrong.append(f"{name} moved")
        if stepped.state(parameter):
            wrong.append(f"{name} has state")
    return none_of(wrong, "parameters without a gradient", "skip those whose grad is None")


@SUITE.law("gradient")
def finite_without_gradient(lab: OptimizerLab) -> Measured:
    """A gradient of zeros, as that of words which no row has, leaves all weights finite."""

    def zeros(name: str, parameter: Tensor, step: int) -> Tensor:
        return torch.zeros_like(parameter)

    stepped = lab.step(lab.begin(), gradient=zeros)
    wrong = []
    for name, value in stepped.weights.items():
        if not value.isfinite().all():
            wrong.append(name)
    return none_of(wrong, "not finite after gradients of zeros", "add an eps to what you divide by")


@SUITE.law("gradient")
def slices_alike(lab: OptimizerLab) -> Measured:
    """What declares elementwise = True steps slices as the whole: ranks may shard it."""
    needs(
        bool(lab.plugin.elementwise),
        "declares elementwise = False, so strategies that shard refuse it",
    )
    whole = lab.step(lab.begin()).weights
    module = nn.ModuleDict({"first": _sliced(0), "second": _sliced(1)})
    halves = lab.step(lab.begin(module=module), gradient=_gradient_of_slice)
    errors = {}
    for name, weight in whole.items():
        joined = _joined(halves.weights, name)
        errors[name] = difference(joined, weight.flatten()).relative
    worst = max(errors, key=lambda name: errors[name])
    note = (
        f"worst parameter {worst}; where a step depends on the whole parameter, declare elementwise"
        " = False"
    )
    return Measured(error=errors[worst], bound=FP32, note=note)


@SUITE.law("gradient")
def two_ranks(lab: OptimizerLab) -> Measured:
    """Two ranks under ddp train what one process trains."""
    needs_two_ranks()
    lab.train("alone")
    train = partial(lab.train, "two ranks", changes={"strategy": "ddp", "nproc": 2})
    launch(train, nproc=2, timeout=60)
    alone = tensors_of(lab.folder / "alone")
    together = tensors_of(lab.folder / "two ranks")
    # Without a name there is nothing to compare a tensor with.
    in_one_run = sorted(alone.keys() ^ together.keys())
    if in_one_run:
        return none_of(in_one_run, "tensors of one run alone", "keep the same state on ranks")
    errors = {name: difference(together[name], alone[name]).relative for name in alone}
    worst = max(errors, key=lambda name: errors[name])
    note = (
        f"worst tensor {worst}; a step may depend on gradients and their number alone, not on the"
        " rank"
    )
    return Measured(error=errors[worst], bound=FP32, note=note)


@SUITE.law("resume")
def same_again(lab: OptimizerLab) -> Measured:
    """Two equal runs are equal bit for bit, whatever the random state, and draw no numbers."""
    with change_random_state(1):
        expected = drawn()
    # The same state again: numbers differ if a step has drawn some.
    with change_random_state(1):
        first = lab.step(lab.begin()).weights
        wrong = [] if drawn() == expected else ["the random state after a step"]
    with change_random_state(2):
        wrong += differing(lab.step(lab.begin()).weights, first)
    return none_of(
        wrong, "differ in equal runs", "draw from a torch.Generator of your own, seeded by the step"
    )


@SUITE.law("resume")
def continues(lab: OptimizerLab) -> Measured:
    """A run that was resumed half-way saves the tensors of one that was not, bit for bit."""
    lab.train("whole")
    for until in (HALF, STEPS):
        lab.train("in two parts", until)
    wrong = differing(tensors_of(lab.folder / "in two parts"), tensors_of(lab.folder / "whole"))
    problem = "differ from those of a run without a stop"
    return none_of(wrong, problem, "keep all values as tensors in self.state[parameter]")


@SUITE.law("resume")
def state_of_one_size(lab: OptimizerLab) -> Measured:
    """The state has the size after many steps that it has after two."""
    early_sizes = _state_sizes(lab.step(lab.begin(), range(2)))
    late_sizes = _state_sizes(lab.step(lab.begin(), range(4 * STEPS)))
    grown = []
    for name, size in early_sizes.items():
        if late_sizes[name] != size:
            grown.append(f"{name} from {size} to {late_sizes[name]}")
    return none_of(grown, "elements of state", "a checkpoint and a plan need a state of one size")


@SUITE.law("surprise")
def options_are_checked(lab: OptimizerLab) -> Measured:
    """A value that does not fit an option is one line that names it, before any step."""

    def build(options: dict[str, Any]) -> object:
        return lab.build(
            new_model(), {f"optimizer.{name}": value for name, value in options.items()}
        )

    unchecked = unchecked_options(lab.plugin, build)
    return none_of(
        unchecked,
        "options that take anything",
        "give fields types with bounds, or raise ValueError",
    )


def _set_rates(stepped: Stepped, match: str) -> None:
    """Set the rate of the groups to 0 whose parameters' names begin with ``match``; ``.``: all."""
    names = {parameter: name for name, parameter in stepped.module.named_parameters()}
    for group in stepped.optimizer.param_groups:
        first_name = names[group["params"][0]]
        if match == "." or first_name.startswith(match):
            group["lr"] = 0.0


def _decays(name: str) -> bool:
    """Return True for a parameter that distcore's groups decay: no bias, and none of a norm."""
    return not name.endswith("bias") and ".norm." not in name


def _distance(weights: dict[str, Tensor], target: dict[str, Tensor]) -> float:
    """Return the distance of all weights from the target."""
    squares = [(weights[name] - target[name]).square().sum() for name in weights]
    return float(torch.stack(squares).sum().sqrt())


def _sliced(half: int) -> nn.Module:
    """Return the model with one half of each parameter, flat, under the names of the whole."""
    module = new_model()
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False)):
            halves = parameter.detach().flatten().tensor_split(2)
            setattr(child, name, nn.Parameter(halves[half].clone()))
    return module


def _gradient_of_slice(name: str, parameter: Tensor, step: int) -> Tensor:
    """Return the slice of the gradient that the whole parameter has in the same step."""
    half, _, whole_name = name.partition(".")
    whole = random_gradient(whole_name, new_model().get_parameter(whole_name), step)
    first, second = whole.flatten().tensor_split(2)
    return second if half == "second" else first


def _joined(halves: dict[str, Tensor], name: str) -> Tensor:
    """Return a parameter's weights from its two halves, flat."""
    return torch.cat([halves[f"first.{name}"], halves[f"second.{name}"]])


def _state_sizes(stepped: Stepped) -> dict[str, int]:
    """Return the number of elements in the state of each parameter."""
    sizes = {}
    for name, parameter in stepped.module.named_parameters():
        tensors = [v for v in stepped.state(parameter).values() if isinstance(v, Tensor)]
        sizes[name] = sum(tensor.numel() for tensor in tensors)
    return sizes
