"""LoRA: small trained matrices next to frozen linear layers of a transformers model, by peft.

The matrices are injected into the model itself, so that its class, methods and blocks stay as task
and strategies know them. Modules without pretrained weights, such as a new classifier head, are
fully trained.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distcore import ConfigError, Origin, RunConfig
from distcore.model import meta_tensors, silence_transformers
from distcore_lora import nf4
from distcore_lora.stored_base import store, users_by_parameter, widen
from distcore_lora.stored_layers import QuantizedLinear

if TYPE_CHECKING:
    from peft import LoraConfig

__all__ = ["adapted_kinds", "inject", "off", "recipe", "resolve", "take_out", "widen"]

log = logging.getLogger("distcore")

ADAPTER = "default"
"""peft's name of the adapter, which is also part of its parameters' names."""
ALL_LINEAR = "all-linear"
"""Targets: every linear layer but the head."""
TASK_TYPES = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSeq2SeqLM": "SEQ_2_SEQ_LM",
}
"""peft's task type by the end of a transformers class name; other classes have none."""


def resolve(config: RunConfig) -> dict[str, Any]:
    """Return ``lora.alpha``, with 'auto' resolved.

    Raises ConfigError if LoRA cannot be used as the config has it.
    """
    lora = config.lora
    if not lora.targets:
        raise ConfigError("lora.targets = []: names no layer; leave it out for every linear layer")
    if isinstance(lora.targets, str) and lora.targets != ALL_LINEAR:
        try:
            re.compile(lora.targets)
        except re.error as error:
            raise ConfigError(
                f"lora.targets = {lora.targets!r}: not a regular expression: {error}"
            ) from None
    assert lora.rank is not None  # there is no adapter without it
    return {"lora.alpha": 2.0 * lora.rank if lora.alpha == "auto" else lora.alpha}


def inject(config: RunConfig, module: nn.Module, folder: Path | None) -> dict[str, Origin]:
    """Inject the adapter of ``config`` into ``module``, in place, and freeze the other parameters.

    ``module`` is whole or a meta model; the adapter has values in both. ``folder`` has the model's
    weights, if any. Returns, by the new name, where each of these has its values from, and each
    trained copy. Raises ConfigError if the model has nothing to adapt.
    """
    settings = peft_config(config, module, folder)
    before = {id(parameter): name for name, parameter in module.named_parameters()}
    from peft import inject_adapter_in_model

    with _explain_targets(config, module):
        inject_adapter_in_model(settings, module, adapter_name=ADAPTER)
    _initialize(module, config.seed)
    store(config, module, folder)
    return _origins(module, before)


def peft_config(config: RunConfig, module: nn.Module, folder: Path | None) -> LoraConfig:
    """Return peft's settings for a model without an adapter.

    Raises ConfigError if the model cannot have one.
    """
    from transformers import PreTrainedModel

    lora = config.lora
    if not isinstance(module, PreTrainedModel):
        kind = type(module).__name__
        raise ConfigError(
            f"lora.rank = {lora.rank}: the model of task {config.task!r} is a {kind}, not one of"
            " transformers; train it without LoRA, or take another --model"
        )
    _check_targets(config, module)
    whole = _fully_trained(config, module, folder)
    _check_whole(config, module, whole)
    import peft

    build: Any = peft.LoraConfig  # typed for an integer alpha, but takes a float
    class_name = type(module).__name__
    task_types = [kind for end, kind in TASK_TYPES.items() if class_name.endswith(end)]
    settings: LoraConfig = build(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) if isinstance(lora.targets, tuple) else lora.targets,
        modules_to_save=whole or None,
        task_type=task_types[0] if task_types else None,
    )
    return settings


def fully_trained_in(module: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield the fully trained modules of an adapted model: name, trained copy, original."""
    from peft.utils import ModulesToSaveWrapper

    for path, wrapper in module.named_modules():
        if isinstance(wrapper, ModulesToSaveWrapper):
            yield path, wrapper.modules_to_save[ADAPTER], wrapper.original_module


def take_out(module: Any, merge: bool) -> Any:
    """Remove the adapter from ``module``, in place, or merge it into plain layers.

    Returns the module. A merged layer that shared its weight with another one, as a tied head does,
    then has a weight of its own.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    [adapter] = module.peft_config
    if merge:
        layers = [layer for layer in module.modules() if isinstance(layer, LoraLayer)]
        for layer in layers:
            _copy_shared_weights(module, layer.get_base_layer())
            layer.merge()
    taken_out: list[str] = []
    for path, layer in list(module.named_modules()):
        if any(path.startswith(f"{outer}.") for outer in taken_out):
            # Such as the second of two matrices of experts, around which the first is wrapped.
            continue
        if isinstance(layer, ModulesToSaveWrapper):  # a module that was trained whole
            trained = layer.modules_to_save[adapter]
            _replace(module, path, trained if merge else layer.original_module)
        elif isinstance(layer, LoraLayer):
            _replace(module, path, layer.get_base_layer())
            taken_out.append(path)
    del module.peft_config
    if merge:
        _describe_ties(module)
    return module


def _copy_shared_weights(module: nn.Module, layer: nn.Module) -> None:
    """Give ``layer`` of ``module`` copies of the parameters that another layer also has.

    A merge changes the layer's weight, which would change the other layer.
    """
    users = users_by_parameter(module)
    for name, shared in list(layer.named_parameters(recurse=False)):
        if users[id(shared)] > 1:
            copy = shared.detach().clone()
            setattr(layer, name, nn.Parameter(copy, requires_grad=shared.requires_grad))


def _describe_ties(module: Any) -> None:
    """Remove the ties of weights that a merge made two from a transformers model and its config."""
    ties: dict[str, str] = getattr(module, "all_tied_weights_keys", None) or {}
    for tied, source in list(ties.items()):
        if module.get_parameter(tied) is not module.get_parameter(source):
            del ties[tied]
            log.info("%s and %s are two weights now: lora changed one of them", tied, source)
            # With ties left, transformers itself finds which weights differ, as it reads them.
            if not ties:
                module.config.tie_word_embeddings = False


def _replace(module: nn.Module, path: str, child: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, child)


def adapted_kinds(module: nn.Module) -> str:
    """Return which kinds of modules have an adapter, are trained whole, or are left as they are.

    A kind is the last part of a module's name, with its class. Norms, which no adapter is for, are
    not named.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    adapted: set[str] = set()
    whole: set[str] = set()
    left: set[str] = set()
    done: list[str] = []
    for path, part in module.named_modules():
        if any(path.startswith(f"{outer}.") for outer in done):
            continue
        name = path.rpartition(".")[2]
        if isinstance(part, LoraLayer):
            adapted.add(f"{name} ({type(part.get_base_layer()).__name__})")
        elif isinstance(part, ModulesToSaveWrapper):
            whole.add(f"{name} ({type(part.original_module).__name__})")
        else:
            if any(parameter.ndim > 1 for parameter in part.parameters(recurse=False)):
                left.add(f"{name} ({type(part).__name__})")
            continue
        done.append(path)
    phrases = []
    kinds_by_label = {"adapted": adapted, "trained whole": whole, "not adapted": left}
    for label, kinds in kinds_by_label.items():
        if kinds:
            phrases.append(f"{label}: {', '.join(sorted(kinds))}")
    return "; ".join(phrases)


def recipe(config: RunConfig) -> str:
    """Return in a few words how frozen layers are made from the files' weights; '' if as is."""
    return nf4.RECIPE if config.lora.base == "nf4" else ""


@contextmanager
def off(module: nn.Module) -> Iterator[None]:
    """Return a context in which ``module`` answers as its base does."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    layers: list[Any] = [
        part for part in module.modules() if isinstance(part, BaseTunerLayer | ModulesToSaveWrapper)
    ]
    for layer in layers:
        # enable_adapters() would also freeze their parameters, which strategies saw as trained.
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _check_targets(config: RunConfig, module: nn.Module) -> None:
    """Raise ConfigError for a target that names no module."""
    targets = config.lora.targets
    if targets == ALL_LINEAR:
        return
    if isinstance(targets, str):
        if not _names_of_target(targets, module, is_pattern=True):
            raise ConfigError(
                f"lora.targets = {targets!r}: matches no layer's whole name;"
                f" {_example_names(module)}"
            )
        return
    for target in targets:
        if not _names_of_target(target, module, is_pattern=False):
            raise ConfigError(
                f"lora.targets: {target!r} ends the name of no layer; {_example_names(module)}"
            )


def _names_of_target(target: str, module: nn.Module, is_pattern: bool) -> list[str]:
    """Return the names of the modules that ``target`` matches whole, or whose end it is."""
    names = [name for name, _ in module.named_modules()]
    if is_pattern:
        return [name for name in names if re.fullmatch(target, name)]
    return [name for name in names if name == target or name.endswith(f".{target}")]


def _check_whole(config: RunConfig, module: nn.Module, whole: list[str]) -> None:
    """Raise ConfigError for a target that names only modules that are trained whole.

    Such a module is a new head. ``whole`` has their names.
    """
    targets = config.lora.targets
    is_pattern = isinstance(targets, str)
    for target in (targets,) if isinstance(targets, str) else targets:
        if target == ALL_LINEAR:
            continue
        owners: set[str] = set()
        is_adapted = False
        for name in _names_of_target(target, module, is_pattern):
            outer = [path for path in whole if f"{name}.".startswith(f"{path}.")]
            owners.update(outer[:1])
            is_adapted = is_adapted or not outer
        if not is_adapted:
            raise ConfigError(
                f"lora.targets: {target!r} names no layer but"
                f" {', '.join(sorted(owners))}, which is trained whole, since its"
                " weights are new; leave that target out"
            )


def _example_names(module: nn.Module) -> str:
    """Return a phrase with the names of up to five linear layers, from all over the model."""
    names = [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]
    interval = max(1, len(names) // 5)
    return f"names are such as {', '.join(names[::interval][:5])}"


def _fully_trained(config: RunConfig, module: Any, folder: Path | None) -> list[str]:
    """Return the names of the modules that LoRA would leave at random values.

    These are a classifier's head or a new pooler. Raises ConfigError for a language model whose
    files lack weights: its head is not to be trained.
    """
    missing = _missing_from(module, folder)
    owners = {name.rpartition(".")[0] for name in missing}
    is_language_model = module.get_output_embeddings() is not None
    if is_language_model or "" in owners:
        if missing:
            raise ConfigError(
                f"lora.rank = {config.lora.rank}: {folder} lacks {min(missing)} of a"
                f" {type(module).__name__}, which would stay random; train it without LoRA first,"
                " or take a model that has it"
            )
        return []
    base = module.base_model_prefix
    children = dict(module.named_children())
    heads: list[str] = []
    if base in children:
        for name, child in children.items():
            has_parameters = any(True for _ in child.parameters())
            if name != base and has_parameters:
                heads.append(name)
    new_inside_base = [owner for owner in owners if owner.partition(".")[0] not in heads]
    return heads + sorted(new_inside_base)


def _missing_from(module: Any, folder: Path | None) -> set[str]:
    """Return the names of the parameters that ``folder`` lacks or has in another shape.

    No weights are read. transformers reports the names, because it knows the older names of
    parameters in files.
    """
    if folder is None:
        return set()
    headers = meta_tensors(folder)
    with silence_transformers():
        _, report = type(module).from_pretrained(
            None if headers else folder,
            config=module.config,
            state_dict=headers or None,
            device_map="meta",
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    missing = set(report["missing_keys"])
    mismatched = {name for name, *_ in report["mismatched_keys"]}
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return (missing | mismatched) & parameters


@contextmanager
def _explain_targets(config: RunConfig, module: nn.Module) -> Iterator[None]:
    """Silence peft's warnings, and turn its ValueError into a ConfigError of one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ValueError as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise ConfigError(
            f"lora.targets = {config.lora.targets!r}: {reason}; {_example_names(module)}"
        ) from None


def _initialize(module: nn.Module, seed: int) -> None:
    """Give the adapter peft's initial values, on the CPU, also in a meta model.

    They depend on ``seed`` and the order of layers only.
    """
    from peft.tuners.lora import LoraLayer

    torch.manual_seed(seed)
    layers: list[Any] = [part for part in module.modules() if isinstance(part, LoraLayer)]
    for layer in layers:
        for matrices in (layer.lora_A, layer.lora_B):
            is_meta = any(parameter.is_meta for parameter in matrices.parameters())
            if ADAPTER in matrices and is_meta:
                matrices[ADAPTER].to_empty(device="cpu")
        for vectors in (layer.lora_embedding_A, layer.lora_embedding_B):
            if ADAPTER in vectors and vectors[ADAPTER].is_meta:
                empty = torch.empty_like(vectors[ADAPTER], device="cpu")
                vectors[ADAPTER] = nn.Parameter(empty)
        layer.reset_lora_parameters(ADAPTER, True)


def _origins(module: nn.Module, before: Mapping[int, str]) -> dict[str, Origin]:
    """Return the origins of an adapted model's parameters, by name.

    ``before`` has the names that parameters had in the model without an adapter, by their ids.
    """
    quantized = set()
    for part in module.modules():
        if isinstance(part, QuantizedLinear):
            quantized.add(id(part.weight))
    origins: dict[str, Origin] = {}
    for name, parameter in module.named_parameters():
        if id(parameter) in before:
            transform = nf4.quantize if id(parameter) in quantized else None
            origins[name] = Origin(before[id(parameter)], transform)
    for path, copy, original in fully_trained_in(module):
        originals = dict(original.named_parameters())
        for name, _ in copy.named_parameters():
            source = before[id(originals[name])]
            origins[f"{path}.modules_to_save.{ADAPTER}.{name}"] = Origin(source)
    return origins
