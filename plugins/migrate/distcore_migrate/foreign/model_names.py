"""Names of distcore's model for the weights and the numbered parameters of another trainer."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from distcore import ConfigError

WITHOUT_DECAY = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""Parameters without weight decay in the Trainer of transformers,
beside those of ``nn.LayerNorm``.
"""
USUAL_WITHOUT_DECAY = ("bias", "LayerNorm.weight", "layer_norm.weight")
"""The same in the scripts of transformers and Accelerate that have a loop of their own."""


class ModelNames:
    """The names of a model's tensors, whose values are not needed."""

    def __init__(self, model: nn.Module, where: str) -> None:
        """``where`` names the checkpoint in errors."""
        self.model, self._where = model, where
        self.parameters = dict(model.named_parameters())
        first = {parameter: name for name, parameter in self.parameters.items()}
        every = dict(model.named_parameters(remove_duplicate=False))
        self._first = {name: first[parameter] for name, parameter in every.items()}
        buffers = dict(model.named_buffers(remove_duplicate=False))
        self._buffers = {
            name: buffer for name, buffer in buffers.items() if name in model.state_dict()
        }
        self._known = every.keys() | buffers.keys()

    def renamed(self, given: Collection[str]) -> dict[str, str]:
        """Return the model's name for each given one: without a common prefix, such as ``module.``.

        Raises ConfigError for another architecture.
        """
        one = next(iter(self.parameters))
        same = {name for name, first in self._first.items() if first == one}
        ends = {
            key[: -len(name)]
            for key in given
            for name in same
            if key == name or key.endswith(f".{name}")
        }
        inside = {
            prefix: {key[len(prefix) :] for key in given if key.startswith(prefix)}
            for prefix in ends
        }
        prefix = max(inside, key=lambda prefix: len(inside[prefix] & self._known), default="")
        names = {key: key[len(prefix) :] for key in given if key.startswith(prefix)}
        there = {self._first.get(name, name) for name in names.values()}
        missing = next(
            (name for name in (*self.parameters, *self._buffers) if name not in there), None
        )
        foreign = next((name for name in names.values() if name not in self._known), None)
        if missing or foreign:
            what = (
                f"holds no {missing!r}"
                if missing
                else f"holds {foreign!r}, which the model has not"
            )
            more = f" (it holds {foreign!r})" if missing and foreign else ""
            raise ConfigError(
                f"checkpoint {self._where}: {what}{more}: it is of another model than the config's"
            )
        return {key: self._first.get(name, name) for key, name in names.items()}

    def weights(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters, in fp32, and persistent buffers by the
        model's names; raises ConfigError.
        """
        wanted: dict[str, Tensor] = {**self.parameters, **self._buffers}
        named = {name: given[key] for key, name in self.renamed(given).items() if name in wanted}
        for name, tensor in named.items():
            self.check_shape(name, tensor)
        return {name: tensor.to(wanted[name].dtype) for name, tensor in named.items()}

    def check_shape(self, name: str, tensor: object, part: str = "") -> None:
        """Raise ConfigError for what is no tensor of the shape that the model's has."""
        wanted = self.parameters[name] if name in self.parameters else self._buffers[name]
        shape = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        if shape != list(wanted.shape):
            what = f"{part} of {name!r}" if part else repr(name)
            raise ConfigError(
                f"checkpoint {self._where}: {what} is {shape}, and {list(wanted.shape)} in the"
                " config's model"
            )

    def by_name(self, optimizer: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the state of a torch optimizer by parameter, where it is by number.

        A number is a place in the groups, whose parameters are in the model's order. Raises
        ConfigError unless exactly one usual division into groups fits all shapes.
        """
        state, groups = optimizer["state"], [group["params"] for group in optimizer["param_groups"]]
        if any(isinstance(key, str) for key in state):
            names = self.renamed(state)
            return {names[key]: dict(value) for key, value in state.items()}
        numbers = [number for group in groups for number in group]
        given = (name for group in self.in_groups(optimizer) for name in group)
        return {
            name: dict(state[number])
            for number, name in zip(numbers, given, strict=True)
            if number in state
        }

    def in_groups(self, optimizer: Mapping[str, Any]) -> list[list[str]]:
        """Return the parameters in each group of a torch optimizer; raises
        ConfigError as ``by_name`` does.
        """
        state, groups = optimizer["state"], [group["params"] for group in optimizer["param_groups"]]
        if any(isinstance(key, str) for key in state):
            names = self.renamed(state)
            return [[names[key] for key in group if key in names] for group in groups]
        fitting = [names for names in self._divisions() if self._fits(names, groups, state)]
        if not fitting or any(names != fitting[0] for names in fitting):
            sizes, mine = " + ".join(str(len(group)) for group in groups), len(self._trained())
            why = (
                "no usual division of its parameters into groups fits"
                if sum(map(len, groups)) == mine
                else (f"the config's model trains {mine}")
            )
            raise ConfigError(
                f"checkpoint {self._where}: its optimizer has {sizes} parameters: {why}"
            )
        return fitting[0]

    def decays(self, optimizer: Optimizer) -> dict[str, float]:
        """Return the weight decay of each parameter in an optimizer of the model."""
        names = {parameter: name for name, parameter in self.parameters.items()}
        groups = optimizer.param_groups
        return {
            names[each]: group.get("weight_decay", 0.0)
            for group in groups
            for each in group["params"]
        }

    def _fits(
        self, names: list[list[str]], groups: Sequence[Sequence[int]], state: Mapping[int, Any]
    ) -> bool:
        if [len(group) for group in names] != [len(group) for group in groups]:
            return False
        pairs = [
            pair
            for own, group in zip(names, groups, strict=True)
            for pair in zip(own, group, strict=True)
        ]
        return all(
            value.shape == self.parameters[name].shape
            for name, number in pairs
            for value in state.get(number, {}).values()
            if isinstance(value, Tensor) and value.dim()
        )

    def _trained(self) -> list[str]:
        return [name for name, parameter in self.parameters.items() if parameter.requires_grad]

    def _divisions(self) -> list[list[list[str]]]:
        names, divisions = self._trained(), []
        norms = [
            name for name, part in self.model.named_modules() if isinstance(part, nn.LayerNorm)
        ]
        no_decay = (
            {
                n
                for n in names
                if n.rpartition(".")[0] in norms
                or any(re.search(p, n.lower()) for p in WITHOUT_DECAY)
            },
            {n for n in names if any(part in n for part in USUAL_WITHOUT_DECAY)},
            {n for n in names if self.parameters[n].dim() < 2},
        )
        for exempt in no_decay:
            decayed, rest = [n for n in names if n not in exempt], [n for n in names if n in exempt]
            divisions += [[decayed, rest], [rest, decayed]]
        return [[names], *divisions]
