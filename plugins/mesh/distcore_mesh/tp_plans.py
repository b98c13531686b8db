"""Tensor-parallel plans: the layers of a model that are split, and the style of each split.

A plan maps names to styles. ``*`` matches one part of a name, such as the number of a layer. A
prefix of the model's own, such as ``bert.``, is left out. The styles are those of transformers'
plans, and two more.

``colwise``
    a linear layer computes some of its outputs, such as some attention heads
``qkv_colwise``
    the same in a layer of three equal parts, query, key and value
``colwise_gather_output``
    the same as ``colwise``, and its outputs are gathered
``rowwise``
    a linear layer takes some of its inputs; the results are summed over ranks
``rowwise_split_input``
    the same, for an input that is whole on every rank
``embedding_rowwise``
    an embedding holds the vectors of some tokens; the results are summed over ranks
``embedding_colwise``
    an embedding holds a part of each vector, such as one number for some heads
``replicated_with_grad_allreduce``
    whole on every rank, but used on a part of the heads: gradients are summed over ranks
``divided``
    a number, such as a layer's number of heads, divided by the number of ranks
``replicate``
    whole on every rank, like all modules that the plan does not name
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from torch import nn

from distcore import ConfigError, StrategyError, nearest
from distcore_mesh.adapters import styles_inside
from distcore_mesh.experts import find_experts

STYLES = (
    "colwise",
    "qkv_colwise",
    "colwise_gather_output",
    "rowwise",
    "rowwise_split_input",
    "embedding_rowwise",
    "embedding_colwise",
    "replicated_with_grad_allreduce",
    "divided",
    "replicate",
)
GATHERED = "colwise_gather_output"
"""Style of a head whose outputs are gathered."""
OTHER_NAMES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
"""Map transformers' older names to the current ones."""
FAMILIES: dict[tuple[str, ...], dict[str, str]] = {
    ("bert", "roberta", "xlm-roberta", "camembert", "electra"): {
        "layer.*.attention.self.query": "colwise",
        "layer.*.attention.self.key": "colwise",
        "layer.*.attention.self.value": "colwise",
        "layer.*.attention.output.dense": "rowwise",
        "layer.*.intermediate.dense": "colwise",
        "layer.*.output.dense": "rowwise",
    },
    ("distilbert",): {
        "layer.*.attention.q_lin": "colwise",
        "layer.*.attention.k_lin": "colwise",
        "layer.*.attention.v_lin": "colwise",
        "layer.*.attention.out_lin": "rowwise",
        "layer.*.ffn.lin1": "colwise",
        "layer.*.ffn.lin2": "rowwise",
    },
    ("gpt2",): {
        "h.*.attn.c_attn": "qkv_colwise",
        "h.*.attn.split_size": "divided",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    ("t5", "mt5"): {
        "block.*.layer.*.*.q": "colwise",
        "block.*.layer.*.*.k": "colwise",
        "block.*.layer.*.*.v": "colwise",
        "block.*.layer.*.*.n_heads": "divided",
        "block.*.layer.*.*.inner_dim": "divided",
        "block.*.layer.*.*.relative_attention_bias": "embedding_colwise",
        "block.*.layer.*.*.o": "rowwise",
        "block.*.layer.*.DenseReluDense.wi": "colwise",
        "block.*.layer.*.DenseReluDense.wi_0": "colwise",
        "block.*.layer.*.DenseReluDense.wi_1": "colwise",
        "block.*.layer.*.DenseReluDense.wo": "rowwise",
    },
    ("vit", "deit"): {
        "attention.q_proj": "colwise",
        "attention.k_proj": "colwise",
        "attention.v_proj": "colwise",
        "attention.o_proj": "rowwise",
        "mlp.fc1": "colwise",
        "mlp.fc2": "rowwise",
    },
}
"""Plans for the model types of transformers that have no plan of their own."""
OPTIONAL = frozenset({"block.*.layer.*.DenseReluDense.wi", "block.*.layer.*.DenseReluDense.wi_0",
                      "block.*.layer.*.DenseReluDense.wi_1"})  # fmt: skip
"""Entries of ``FAMILIES`` that only some models of the family have."""


@dataclass(frozen=True)
class TPPlan:
    """The styles of a model's modules."""

    styles: dict[str, str]
    """The style of each split module, by name in the model; replicated ones are left out."""
    source: str
    """The origin of the plan, for the log and for errors."""


def plan_for(model: nn.Module, file: str | None) -> TPPlan:
    """Return the plan of ``model``: of ``file``, ours for its type, or its own ``tp_plan``.

    Raises StrategyError, one line, for a model without a plan, a name that the model lacks,
    or an unknown style.
    """
    kind = model_type(model)
    entries: Mapping[str, str]
    ours = next((plan for kinds, plan in FAMILIES.items() if kind in kinds), None)
    if file is not None:
        entries, source = read_plan(file), f"strategy_options.plan = {file!r}"
    elif ours is not None:
        entries, source = ours, f"distcore's plan for {kind!r}"
    else:
        entries, source = _model_plan(model), f"the plan of {type(model).__name__}"
    if not entries:
        raise StrategyError(_advice(model, kind))
    styles: dict[str, str] = {}
    # They are shared whole, whatever a plan says of their matrices.
    experts = find_experts(model)
    for pattern, style in entries.items():
        current_style = OTHER_NAMES.get(style, style)
        matching = _matching_names(model, pattern, current_style)
        names = [name for name in matching if name not in experts]
        # The model's own plan may name modules that this model lacks.
        is_required = pattern not in OPTIONAL and (file is not None or ours is not None)
        if not names and is_required:
            raise StrategyError(f"{source}: the model has no {pattern!r}")
        if names and current_style not in STYLES:
            raise StrategyError(
                f"{source}: {pattern!r} has the style {style!r}, which this strategy cannot do;"
                f" give a plan by strategy_options.plan (styles: {', '.join(STYLES)})"
            )
        if current_style != "replicate":
            styles |= dict.fromkeys(names, current_style)
    if not styles:
        raise StrategyError(f"{source}: names nothing that the model has")
    return TPPlan(styles_inside(model, styles), source)


def read_plan(file: str) -> dict[str, str]:
    """Return the entries of a plan file, YAML or JSON.

    Raises ConfigError, one line, if the file is not a plan.
    """
    where = f"strategy_options.plan = {file!r}"
    try:
        entries = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{where}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(entries, dict) or not entries:
        raise ConfigError(f"{where}: expected lines 'NAME: STYLE', such as 'layers.*.up: colwise'")
    for name, style in entries.items():
        are_texts = isinstance(name, str) and isinstance(style, str)
        if not are_texts or OTHER_NAMES.get(style, style) not in STYLES:
            hint = nearest(str(style), STYLES)
            raise ConfigError(
                f"{where}: {name}: {style}: no such style{hint} (styles: {', '.join(STYLES)})"
            )
    return entries


def _model_plan(model: nn.Module) -> Mapping[str, str]:
    plan: Mapping[str, str] | None = getattr(model, "tp_plan", None)
    return plan or {}


def model_type(model: nn.Module) -> str | None:
    """Return the transformers model type of ``model``; ``None`` if it has none."""
    for module in model.modules():
        config = getattr(module, "config", None)
        name = getattr(config, "model_type", None)
        if name:
            return str(name)
    return None


def _matching_names(model: nn.Module, pattern: str, style: str) -> list[str]:
    """Return the names in ``model`` that match a pattern.

    They are names of modules or, for ``divided``, of numbers that are attributes of modules.
    """
    path, attribute = pattern, ""
    if style == "divided":
        path, _, attribute = pattern.rpartition(".")
    parts = [r"[^.]+" if part == "*" else re.escape(part) for part in path.split(".")]
    expression = re.compile(r"(?:.+\.)?" + r"\.".join(parts))
    names = []
    for name, module in model.named_modules():
        if not expression.fullmatch(name):
            continue
        if style != "divided":
            names.append(name)
        elif hasattr(module, attribute):
            names.append(f"{name}.{attribute}")
    return names


def _advice(model: nn.Module, kind: str | None) -> str:
    """Return the error line for a model without a plan: the layers that a plan could name."""
    shapes: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            pattern = re.sub(r"(?<=\.)\d+\.", "*.", name)
            # Only the first of repeated blocks is kept.
            shapes.setdefault(pattern, f"{module.in_features} to {module.out_features}")
    listed = ", ".join(f"{name} ({sizes})" for name, sizes in shapes.items())
    model_types = ", ".join(name for kinds in FAMILIES for name in kinds)
    name = type(model).__name__ + (f" (model type {kind!r})" if kind else "")
    return (
        f"strategy 'mesh': {name} has no plan for tp: give one by strategy_options.plan, a file"
        " with lines 'NAME: STYLE', colwise for what begins a split part and rowwise for what ends"
        f" it; it has {listed or 'no linear layers'} (with a plan: {model_types}, and models with a"
        " tp_plan of their own)"
    )
