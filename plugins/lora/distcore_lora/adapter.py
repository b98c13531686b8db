"""LoRA: small trained matrices next to the frozen linear layers of a transformers model,
by the library peft.

The matrices are injected into the model itself, so that its class, methods and blocks stay as task
and strategies know them. Modules without pretrained weights, such as a new classifier head, are
fully trained.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distcore import ConfigError, Origin, RunConfig
from distcore.model import meta_tensors, silence_transformers
from distcore_lora import nf4
from distcore_lora.stored_base import store, widen
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
    """Return peft's settings for a model without an adapter; raises ConfigError if
    it cannot have one.
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
    ends = (kind for end, kind in TASK_TYPES.items() if type(module).__name__.endswith(end))
    settings: LoraConfig = build(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) if isinstance(lora.targets, tuple) else lora.targets,
        modules_to_save=whole or None,
        task_type=next(ends, None),
    )
    return settings


def fully_trained_in(module: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield the fully trained modules of an adapted model: name, trained copy, original."""
    from peft.utils import ModulesToSaveWrapper

    for path, wrapper in module.named_modules():
        if isinstance(wrapper, ModulesToSaveWrapper):
            yield path, wrapper.modules_to_save[ADAPTER], wrapper.original_module


def take_out(module: Any, merge: bool) -> Any:
    """Remove the adapter from ``module``, in place, or merge it into plain
    layers; return the module.

    A merged layer that shared its weight with another one, as a tied head does, has a
    weight of its own then.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    [adapter] = module.peft_config
    layers = [
        (path, layer) for path, layer in module.named_modules() if isinstance(layer, LoraLayer)
    ]
    if merge:
        for _, layer in layers:
            _own_weights(module, layer.get_base_layer())
            layer.merge()
    taken_out: list[str] = []
    for path, layer in list(module.named_modules()):
        if any(path.startswith(f"{outer}.") for outer in taken_out):
            # such as the second of two matrices of experts, around which the first is wrapped
            continue
        if isinstance(layer, ModulesToSaveWrapper):  # a module that was trained whole
            _replace(
                module, path, layer.modules_to_save[adapter] if merge else layer.original_module
            )
        elif isinstance(layer, LoraLayer):
            _replace(module, path, layer.get_base_layer())
            taken_out.append(path)
    del module.peft_config
    if merge:
        _describe_ties(module)
    return module


def _own_weights(module: nn.Module, layer: nn.Module) -> None:
    """Give ``layer`` of ``module`` copies of the parameters that another layer has,
    too: a merge changes them.
    """
    users = Counter(
        id(value) for part in module.modules() for value in part.parameters(recurse=False)
    )
    for name, value in list(layer.named_parameters(recurse=False)):
        if users[id(value)] > 1:
            setattr(
                layer, name, nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad)
            )


def _describe_ties(module: Any) -> None:
    """Have a transformers model, and its config, say that weights that are two after a merge
    are no longer tied.
    """
    ties: dict[str, str] = getattr(module, "all_tied_weights_keys", None) or {}
    for tied, source in list(ties.items()):
        if module.get_parameter(tied) is not module.get_parameter(source):
            del ties[tied]
            log.info("%s and %s are two weights now: lora changed one of them", tied, source)
            if not ties:  # else transformers finds that they differ, as it reads them
                module.config.tie_word_embeddings = False


def _replace(module: nn.Module, path: str, child: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, child)


def adapted_kinds(module: nn.Module) -> str:
    """Return which kinds of modules of an adapted model have an adapter, are trained whole, and are
    left as they are.

    A kind is the last part of a module's name, with its class. Norms, which no adapter is
    for, are not named.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    adapted, whole, left = Counter[str](), Counter[str](), Counter[str]()
    done: list[str] = []
    for path, part in module.named_modules():
        if any(path.startswith(f"{outer}.") for outer in done):
            continue
        name = path.rpartition(".")[2]
        if isinstance(part, LoraLayer):
            adapted[f"{name} ({type(part.get_base_layer()).__name__})"] += 1
        elif isinstance(part, ModulesToSaveWrapper):
            whole[f"{name} ({type(part.original_module).__name__})"] += 1
        else:
            matrices = [value for value in part.parameters(recurse=False) if value.ndim > 1]
            if matrices:
                left[f"{name} ({type(part).__name__})"] += 1
            continue
        done.append(path)
    words = {"adapted": adapted, "trained whole": whole, "not adapted": left}
    return "; ".join(
        f"{word}: {', '.join(sorted(kinds))}" for word, kinds in words.items() if kinds
    )


def recipe(config: RunConfig) -> str:
    """Return how the frozen layers are made of the files' weights, in a few words; '' if
    they are the same.
    """
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
        # enable_adapters() would freeze their parameters, too, which strategies saw
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _check_targets(config: RunConfig, module: nn.Module) -> None:
    lora = config.lora
    names = [name for name, _ in module.named_modules()]
    if isinstance(lora.targets, str):
        if lora.targets != ALL_LINEAR and not any(
            re.fullmatch(lora.targets, name) for name in names
        ):
            raise ConfigError(
                f"lora.targets = {lora.targets!r}: matches no layer's whole name;"
                f" {_such_as(module)}"
            )
        return
    for target in lora.targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ConfigError(
                f"lora.targets: {target!r} ends the name of no layer; {_such_as(module)}"
            )


def _check_whole(config: RunConfig, module: nn.Module, whole: list[str]) -> None:
    """Raise ConfigError for a target that names nothing but modules that are trained whole,
    such as a new head.
    """
    targets = config.lora.targets
    names = [name for name, _ in module.named_modules()]
    for target in (targets,) if isinstance(targets, str) else targets:
        if target == ALL_LINEAR:
            continue
        if isinstance(targets, str):
            matched = [name for name in names if re.fullmatch(target, name)]
        else:
            matched = [name for name in names if name == target or name.endswith(f".{target}")]
        owners = {
            next((each for each in whole if f"{name}.".startswith(f"{each}.")), None)
            for name in matched
        }
        if None not in owners:
            raise ConfigError(
                f"lora.targets: {target!r} names no layer but"
                f" {', '.join(sorted(filter(None, owners)))}, which is trained whole, since its"
                " weights are new; leave that target out"
            )


def _such_as(module: nn.Module) -> str:
    names = [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]
    return f"names are such as {', '.join(names[:: max(1, len(names) // 5)][:5])}"


def _fully_trained(config: RunConfig, module: Any, folder: Path | None) -> list[str]:
    """Return the names of the modules that LoRA would leave at random values: a classifier's
    head, a new pooler.

    Raises ConfigError for a language model whose files lack weights: its head is not to be trained.
    """
    made = _missing_from(module, folder)
    owners = {name.rpartition(".")[0] for name in made}
    is_language_model = module.get_output_embeddings() is not None
    if is_language_model or "" in owners:
        if made:
            raise ConfigError(
                f"lora.rank = {config.lora.rank}: {folder} lacks {min(made)} of a"
                f" {type(module).__name__}, which would stay random; train it without LoRA first,"
                " or take a model that has it"
            )
        return []
    base = module.base_model_prefix
    children = dict(module.named_children())
    heads = [
        name
        for name, child in children.items()
        if name != base and any(True for _ in child.parameters())
    ]
    heads = heads if base in children else []
    return heads + sorted(owner for owner in owners if owner.partition(".")[0] not in heads)


def _missing_from(module: Any, folder: Path | None) -> set[str]:
    """Return the names of the parameters that ``folder`` lacks or has in another
    shape, without reading weights.

    transformers reports them, because it knows the older names of parameters in files.
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
    names = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    return names & {name for name, _ in module.named_parameters(remove_duplicate=False)}


@contextmanager
def _explain_targets(config: RunConfig, module: nn.Module) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ValueError as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise ConfigError(
            f"lora.targets = {config.lora.targets!r}: {reason}; {_such_as(module)}"
        ) from None


def _initialize(module: nn.Module, seed: int) -> None:
    """Give the adapter peft's initial values; they depend on ``seed`` and the order of layers only.

    The values are on the CPU, also in a meta model.
    """
    from peft.tuners.lora import LoraLayer

    torch.manual_seed(seed)
    for child in module.modules():
        if isinstance(child, LoraLayer):
            layer: Any = child
            for part in (layer.lora_A, layer.lora_B):
                if ADAPTER in part and any(parameter.is_meta for parameter in part.parameters()):
                    part[ADAPTER].to_empty(device="cpu")
            for embedding in (layer.lora_embedding_A, layer.lora_embedding_B):
                if ADAPTER in embedding and embedding[ADAPTER].is_meta:
                    embedding[ADAPTER] = nn.Parameter(
                        torch.empty_like(embedding[ADAPTER], device="cpu")
                    )
            layer.reset_lora_parameters(ADAPTER, True)


def _origins(module: nn.Module, before: Mapping[int, str]) -> dict[str, Origin]:
    quantized = {id(part.weight) for part in module.modules() if isinstance(part, QuantizedLinear)}
    origins = {
        name: Origin(before[id(parameter)], nf4.quantize if id(parameter) in quantized else None)
        for name, parameter in module.named_parameters()
        if id(parameter) in before
    }
    for path, copy, original in fully_trained_in(module):
        began = dict(original.named_parameters())
        for rest, _ in copy.named_parameters():
            origins[f"{path}.modules_to_save.{ADAPTER}.{rest}"] = Origin(before[id(began[rest])])
    return origins
