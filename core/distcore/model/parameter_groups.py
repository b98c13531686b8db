"""Groups of parameters with equal settings: by weight decay, patterns, and depth in the model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import nn

from distcore.config import GroupRule, RunConfig
from distcore.errors import ConfigError
from distcore.hints import samples_of
from distcore.model.blocks import depths_from_top
from distcore.plugin.optimizer import ParameterGroup
from distcore.plugin.task.phases import Phase, parameters_by_phase, settings_of

NO_PHASES: Mapping[str, Phase] = {}


def parameter_groups(
    config: RunConfig,
    module: nn.Module,
    weight_decay: float | None,
    phases: Mapping[str, Phase] = NO_PHASES,
) -> list[ParameterGroup]:
    """Return the trainable parameters in groups of equal settings; the peak rate comes first.

    Biases and normalization weights have no weight decay. Names and module classes identify them,
    because a sharding strategy may have changed shapes. ``weight_decay=None``: the optimizer has
    none. Raises ConfigError for a pattern that matches no trained parameter, or ``layer_decay``
    without repeated blocks, TaskError for wrong ``phases``.
    """
    assert not isinstance(config.lr, str)  # 'auto' was resolved before any rank started
    trained = {
        name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }
    rules = _rules(config, list(trained), weight_decay)
    parameters_by_phase(phases, trained)
    depths = _depths(config, module)
    factor = config.optimizer.layer_decay or 1.0
    exempt = set(_exempt(module))
    groups: dict[tuple[bool, bool, str], ParameterGroup] = {}
    for name, parameter in trained.items():
        rule = rules.get(name)
        settings = settings_of(phases, name)
        peak = settings.pop("lr", config.lr * settings.pop("lr_scale", 1.0))
        scale_of_rule = rule.lr_scale if rule and rule.lr_scale else 1.0
        scale = scale_of_rule * factor ** depths.get(name, 0)
        rate = rule.lr if rule and rule.lr else peak * scale
        group: ParameterGroup = {"params": [], "lr": rate, **settings}
        if weight_decay is not None:
            decay = settings.get("weight_decay", weight_decay)
            if rule is not None and rule.weight_decay is not None:
                decay = rule.weight_decay
            group["weight_decay"] = 0.0 if name in exempt else decay
        settings_of_group = repr(group | {"params": []})
        key = (rate != config.lr, name in exempt, settings_of_group)
        groups.setdefault(key, group)["params"].append(parameter)

    # Groups at the peak rate first: where others read the rate of a run, they read that of
    # the first group.
    def by_rate_and_decay(item: tuple[tuple[bool, bool, str], ParameterGroup]) -> tuple[bool, bool]:
        (is_off_peak, is_exempt, _), _ = item
        return is_off_peak, is_exempt

    return [group for _, group in sorted(groups.items(), key=by_rate_and_decay)]


def _rules(config: RunConfig, names: list[str], weight_decay: float | None) -> dict[str, GroupRule]:
    """Return the config's first rule for each name; raises ConfigError for one without a use."""
    rules: dict[str, GroupRule] = {}
    for index, group in enumerate(config.optimizer.groups):
        where = f"optimizer.groups.{index}"
        if group.weight_decay is not None and weight_decay is None:
            raise ConfigError(
                f"{where}.weight_decay: {config.optimizer.name} has no weight decay; leave it out"
            )
        matched = [name for name in names if re.search(group.match, name)]
        if not matched:
            samples = ", ".join(samples_of(names))
            raise ConfigError(
                f"{where}.match = {group.match!r}: matches no trained parameter's name; names are"
                f" such as {samples}"
            )
        rules = dict.fromkeys(matched, group) | rules
    return rules


def _depths(config: RunConfig, module: nn.Module) -> dict[str, int]:
    """Return the depth of each parameter for ``layer_decay``; empty without it."""
    if config.optimizer.layer_decay is None:
        return {}
    depths = depths_from_top(module)
    if not depths:
        raise ConfigError(
            f"optimizer.layer_decay = {config.optimizer.layer_decay}: {type(module).__name__} has"
            " no repeated blocks (numbered modules of one class) to go by; use optimizer.groups"
            " with lr_scale"
        )
    return depths


def _exempt(module: nn.Module) -> Iterator[str]:
    """Yield the names of parameters that never decay: of normalizations, and biases.

    A table of biases, as of T5's and Swin's relative positions, is one,
    too, as in transformers' Trainer.
    """
    for path, child in module.named_modules():
        is_norm = "norm" in type(child).__name__.lower()
        for name, _ in child.named_parameters(recurse=False):
            full_name = f"{path}.{name}" if path else name
            if is_norm or "bias" in full_name:
                yield full_name
