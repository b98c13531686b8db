"""LoRA: small trained matrices beside the frozen linear layers of a transformers model, by the library peft.

They are put into the model itself, so that it stays what the task and the strategies know: its class, its methods, its
blocks. What the model begins without a trained value for, such as the new head of a classifier, is trained whole.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from distcore.config import LoRA, RunConfig
from distcore.errors import ConfigError
from distcore.model.transformers_log import silence_transformers

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER = "default"
"""What peft calls the adapter, in the names of its parameters, too."""
ALL_LINEAR = "all-linear"
"""The targets that are every linear layer but the head."""
TASK_TYPES = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSeq2SeqLM": "SEQ_2_SEQ_LM",
}
"""How the name of a transformers class ends, to the name of peft for what it does; peft has none for the others."""


def resolve_alpha(config: RunConfig) -> float | str:
    """Return ``lora.alpha``, without 'auto' where there is an adapter.

    Raises ConfigError if LoRA cannot be used as the config has it, or peft is missing.
    """
    lora = config.lora
    if lora.rank is None:
        if changed := sorted(name for name, value in lora if value != getattr(LoRA(), name)):
            value = getattr(lora, changed[0])
            raise ConfigError(f"lora.{changed[0]} = {value!r}: does nothing without a rank; give --lora RANK")
        return lora.alpha
    if find_spec("peft") is None:
        raise ConfigError(f"lora.rank = {lora.rank}: needs peft, which is not installed: pip install 'distcore[lora]'")
    if not lora.targets:
        raise ConfigError("lora.targets = []: names no layer; leave it out for every linear layer")
    if isinstance(lora.targets, str) and lora.targets != ALL_LINEAR:
        try:
            re.compile(lora.targets)
        except re.error as error:
            raise ConfigError(f"lora.targets = {lora.targets!r}: not a regular expression: {error}") from None
    return 2.0 * lora.rank if lora.alpha == "auto" else lora.alpha


def adapt(config: RunConfig, module: nn.Module, folder: Path | None) -> dict[str, str]:
    """Put the adapter of ``config`` into ``module``, in place, and freeze all else.

    ``module`` is whole or a meta model, in which the adapter has its values all the same; ``folder`` is that of its
    weights, if there is one. Returns the name of each parameter that is not the adapter's own, to its name before; that
    of a copy that is trained, to the name of what it began as. Raises ConfigError where there is nothing to adapt.
    """
    settings = peft_config(config, module, folder)
    before = {id(parameter): name for name, parameter in module.named_parameters()}
    from peft import inject_adapter_in_model

    with _one_line(config, module):
        inject_adapter_in_model(settings, module, adapter_name=ADAPTER)
    _initialise(module, config.seed)
    return _names_before(module, before)


def peft_config(config: RunConfig, module: nn.Module, folder: Path | None) -> LoraConfig:
    """Return peft's settings for a model that has no adapter yet; raises ConfigError for one that can have none."""
    from transformers import PreTrainedModel

    lora = config.lora
    if not isinstance(module, PreTrainedModel):
        kind = type(module).__name__
        raise ConfigError(
            f"lora.rank = {lora.rank}: the model of task {config.task!r} is a {kind}, not one of transformers; train "
            "it without LoRA, or take another --model"
        )
    _check_targets(lora, module)
    import peft

    build: Any = peft.LoraConfig  # it takes an alpha that is no whole number, too
    ends = (kind for end, kind in TASK_TYPES.items() if type(module).__name__.endswith(end))
    settings: LoraConfig = build(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) if isinstance(lora.targets, tuple) else lora.targets,
        modules_to_save=_trained_whole(config, module, folder) or None,
        task_type=next(ends, None),
    )
    return settings


def trained_whole_in(module: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield the parts of an adapted model that are trained whole: name, the trained copy, what it began as."""
    from peft.utils import ModulesToSaveWrapper

    for path, wrapper in module.named_modules():
        if isinstance(wrapper, ModulesToSaveWrapper):
            yield path, wrapper.modules_to_save[ADAPTER], wrapper.original_module


def _check_targets(lora: LoRA, module: nn.Module) -> None:
    """Raise ConfigError for a pattern that matches no layer of the model, or the end of a name that no layer has."""
    names = [name for name, _ in module.named_modules()]
    if isinstance(lora.targets, str):
        if lora.targets != ALL_LINEAR and not any(re.fullmatch(lora.targets, name) for name in names):
            raise ConfigError(f"lora.targets = {lora.targets!r}: matches no layer's whole name; {_such_as(module)}")
        return
    for target in lora.targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ConfigError(f"lora.targets: {target!r} ends the name of no layer; {_such_as(module)}")


def _such_as(module: nn.Module) -> str:
    names = [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]
    return f"names are such as {', '.join(names[:: max(1, len(names) // 5)][:5])}"


def _trained_whole(config: RunConfig, module: Any, folder: Path | None) -> list[str]:
    """Return the names of the modules that LoRA would leave at random values: a classifier's head, a new pooler.

    Raises ConfigError for a language model whose files lack weights: its head is not to be trained.
    """
    made = _made(module, folder)
    owners = {name.rpartition(".")[0] for name in made}
    is_language_model = module.get_output_embeddings() is not None
    if is_language_model or "" in owners:
        if made:
            raise ConfigError(
                f"lora.rank = {config.lora.rank}: {folder} lacks {min(made)} of a {type(module).__name__}, which would "
                "stay random; train it without LoRA first, or take a model that has it"
            )
        return []
    base = module.base_model_prefix
    children = dict(module.named_children())
    heads = [name for name, child in children.items() if name != base and any(True for _ in child.parameters())]
    heads = heads if base in children else []
    return heads + sorted(owner for owner in owners if owner.partition(".")[0] not in heads)


def _made(module: Any, folder: Path | None) -> set[str]:
    """Return the names of the parameters that ``folder`` lacks, or has in another shape; reads none.

    transformers says so, because it knows under which other names a file may have them.
    """
    if folder is None:
        return set()
    with silence_transformers():
        _, report = type(module).from_pretrained(
            folder,
            config=module.config,
            device_map="meta",
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    names = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    return names & {name for name, _ in module.named_parameters(remove_duplicate=False)}


@contextmanager
def _one_line(config: RunConfig, module: nn.Module) -> Iterator[None]:
    """Turn what peft says of targets that it cannot adapt into a ConfigError, and silence its advice."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ValueError as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise ConfigError(f"lora.targets = {config.lora.targets!r}: {reason}; {_such_as(module)}") from None


def _initialise(module: nn.Module, seed: int) -> None:
    """Give the adapter the values with which peft begins, as a function of ``seed`` and the order of layers alone.

    They are on the CPU, in a meta model, too.
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
                    embedding[ADAPTER] = nn.Parameter(torch.empty_like(embedding[ADAPTER], device="cpu"))
            layer.reset_lora_parameters(ADAPTER, True)


def _names_before(module: nn.Module, before: Mapping[int, str]) -> dict[str, str]:
    """Return the names that ``adapt`` promises; ``before`` has the old names by the identity of the parameters."""
    now = dict(module.named_parameters())
    names = {name: before[id(parameter)] for name, parameter in now.items() if id(parameter) in before}
    for path, copy, original in trained_whole_in(module):
        began = dict(original.named_parameters())
        for rest, _ in copy.named_parameters():
            names[f"{path}.modules_to_save.{ADAPTER}.{rest}"] = before[id(began[rest])]
    return names
