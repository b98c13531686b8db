"""Names of distcore's model for the weights and the numbered parameters of another trainer."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from distcore import ConfigError

WITHOUT_DECAY = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""Patterns of parameters that the Trainer of transformers does not decay.

Those of ``nn.LayerNorm`` have none either, whatever their names.
"""
USUAL_WITHOUT_DECAY = ("bias", "LayerNorm.weight", "layer_norm.weight")
"""The same in the scripts of transformers and Accelerate that have a loop of their own."""


class ModelNames:
    """The names of a model's tensors, whose values are not needed."""

    def __init__(self, model: nn.Module, where: str) -> None:
        """``where`` names the checkpoint in errors."""
        self.model = model
        self._where = where
        self.parameters = dict(model.named_parameters())
        first_name = {parameter: name for name, parameter in self.parameters.items()}
        # A tied parameter has several names; a checkpoint may hold it by any of them.
        with_duplicates = dict(model.named_parameters(remove_duplicate=False))
        self._first = {name: first_name[parameter] for name, parameter in with_duplicates.items()}
        buffers = dict(model.named_buffers(remove_duplicate=False))
        state = model.state_dict()
        self._buffers = {name: buffer for name, buffer in buffers.items() if name in state}
        self._known = with_duplicates.keys() | buffers.keys()

    def renamed(self, given: Collection[str]) -> dict[str, str]:
        """Return the model's name for each given one: without a common prefix, such as ``module.``.

        Raises ConfigError for another architecture.
        """
        prefix = self._prefix_of(given)
        names = {key: key[len(prefix) :] for key in given if key.startswith(prefix)}
        first_names = {key: self._first.get(name, name) for key, name in names.items()}
        there = set(first_names.values())
        missing = [name for name in (*self.parameters, *self._buffers) if name not in there]
        foreign = [name for name in names.values() if name not in self._known]
        if missing:
            difference = f"holds no {missing[0]!r}"
            if foreign:
                difference += f" (it holds {foreign[0]!r})"
        elif foreign:
            difference = f"holds {foreign[0]!r}, which the model has not"
        else:
            return first_names
        raise ConfigError(
            f"checkpoint {self._where}: {difference}: it is of another model than the config's"
        )

    def _prefix_of(self, given: Collection[str]) -> str:
        """Return the prefix of the given names with which most of them are names of the model."""
        first_parameter = next(iter(self.parameters))
        its_names = [name for name, first in self._first.items() if first == first_parameter]
        prefixes = set()
        for key in given:
            for name in its_names:
                if key == name or key.endswith(f".{name}"):
                    prefixes.add(key[: -len(name)])

        def names_of_model(prefix: str) -> int:
            names = {key[len(prefix) :] for key in given if key.startswith(prefix)}
            return len(names & self._known)

        return max(prefixes, key=names_of_model, default="")

    def weights(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters, in fp32, and persistent buffers by the model's names.

        Raises ConfigError.
        """
        tensors_of_model: dict[str, Tensor] = {**self.parameters, **self._buffers}
        weights = {}
        for key, name in self.renamed(given).items():
            if name in tensors_of_model:
                weights[name] = given[key]
        for name, tensor in weights.items():
            self.check_shape(name, tensor)
        return {name: tensor.to(tensors_of_model[name].dtype) for name, tensor in weights.items()}

    def check_shape(self, name: str, tensor: object, part: str = "") -> None:
        """Raise ConfigError unless ``tensor`` is one of the shape that the model's has."""
        expected = self.parameters[name] if name in self.parameters else self._buffers[name]
        shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        if shape != list(expected.shape):
            subject = f"{part} of {name!r}" if part else repr(name)
            raise ConfigError(
                f"checkpoint {self._where}: {subject} is {shape}, and {list(expected.shape)} in the"
                " config's model"
            )

    def by_name(self, optimizer: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the state of a torch optimizer by parameter, where it is by number.

        A number is a position in the groups, whose parameters are in the model's order. Raises
        ConfigError unless exactly one usual division into groups fits all shapes.
        """
        state = optimizer["state"]
        if any(isinstance(key, str) for key in state):
            names = self.renamed(state)
            return {names[key]: dict(value) for key, value in state.items()}
        states_by_name = {}
        groups = [group["params"] for group in optimizer["param_groups"]]
        for names_of_group, group in zip(self.in_groups(optimizer), groups, strict=True):
            for name, number in zip(names_of_group, group, strict=True):
                # A parameter that never had a gradient has no state.
                if number in state:
                    states_by_name[name] = dict(state[number])
        return states_by_name

    def in_groups(self, optimizer: Mapping[str, Any]) -> list[list[str]]:
        """Return the parameters in each group of a torch optimizer.

        Raises ConfigError as ``by_name`` does.
        """
        state = optimizer["state"]
        groups = [group["params"] for group in optimizer["param_groups"]]
        if any(isinstance(key, str) for key in state):
            names = self.renamed(state)
            return [[names[key] for key in group if key in names] for group in groups]
        fitting = [names for names in self._divisions() if self._fits(names, groups, state)]
        # Of two that fit, the wrong one would give parameters each other's moments.
        is_only_one = bool(fitting) and all(names == fitting[0] for names in fitting)
        if is_only_one:
            return fitting[0]
        group_sizes = [len(group) for group in groups]
        trained = len(self._trained())
        if sum(group_sizes) == trained:
            why = "no usual division of its parameters into groups fits"
        else:
            why = f"the config's model trains {trained}"
        sizes = " + ".join(map(str, group_sizes))
        raise ConfigError(f"checkpoint {self._where}: its optimizer has {sizes} parameters: {why}")

    def decays(self, optimizer: Optimizer) -> dict[str, float]:
        """Return the weight decay of each parameter in an optimizer of the model."""
        names = {parameter: name for name, parameter in self.parameters.items()}
        decays = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                decays[names[parameter]] = group.get("weight_decay", 0.0)
        return decays

    def _fits(
        self, names: list[list[str]], groups: Sequence[Sequence[int]], state: Mapping[int, Any]
    ) -> bool:
        """Return True if groups of numbers may be those of ``names``, by sizes and shapes."""
        if [len(group) for group in names] != [len(group) for group in groups]:
            return False
        for names_of_group, group in zip(names, groups, strict=True):
            for name, number in zip(names_of_group, group, strict=True):
                for value in state.get(number, {}).values():
                    # Scalars, such as the step, are of no parameter's shape.
                    is_of_shape = isinstance(value, Tensor) and value.dim() > 0
                    if is_of_shape and value.shape != self.parameters[name].shape:
                        return False
        return True

    def _trained(self) -> list[str]:
        """Return the names of the parameters that are trained, in the model's order."""
        return [name for name, parameter in self.parameters.items() if parameter.requires_grad]

    def _divisions(self) -> list[list[list[str]]]:
        """Return the usual divisions of the trained parameters into groups.

        All are one group, or those with weight decay are one, and those without the other; which
        these are depends on the trainer.
        """
        names = self._trained()
        divisions = [[names]]
        for is_exempt in (self._has_no_decay, _has_usually_no_decay, self._is_vector):
            exempt = [name for name in names if is_exempt(name)]
            decayed = [name for name in names if not is_exempt(name)]
            divisions += [[decayed, exempt], [exempt, decayed]]
        return divisions

    def _has_no_decay(self, name: str) -> bool:
        """Return True if the Trainer of transformers does not decay the parameter."""
        module = self.model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, nn.LayerNorm):
            return True
        return any(re.search(pattern, name.lower()) for pattern in WITHOUT_DECAY)

    def _is_vector(self, name: str) -> bool:
        """Return True for a parameter of fewer than two dimensions."""
        return self.parameters[name].dim() < 2


def _has_usually_no_decay(name: str) -> bool:
    """Return True if scripts with a loop of their own do not decay the parameter."""
    return any(part in name for part in USUAL_WITHOUT_DECAY)
