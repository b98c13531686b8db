"""Read DeepSpeed's config from a JSON file, the section of an Accelerate file, or options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from distcore import ConfigError, nearest
from distcore_accelerate.options import AccelerateOptions
from distcore_accelerate.settings import Settings, Tree
from distcore_deepspeed import Setting, UserConfig, read_config

ZERO = "zero_optimization"
KEY_IN_JSON = {
    "zero_stage": f"{ZERO}.stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": f"{ZERO}.offload_optimizer.device",
    "offload_param_device": f"{ZERO}.offload_param.device",
    "offload_optimizer_nvme_path": f"{ZERO}.offload_optimizer.nvme_path",
    "offload_param_nvme_path": f"{ZERO}.offload_param.nvme_path",
    "zero3_save_16bit_model": f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
}
"""Map keys of ``deepspeed_config`` in an Accelerate file to those of DeepSpeed's own config."""
LAUNCHING = frozenset(
    {
        "deepspeed_multinode_launcher",
        "deepspeed_hostfile",
        "deepspeed_exclusion_filter",
        "deepspeed_inclusion_filter",
    }
    | {"deepspeed_config_file", "zero3_init_flag", "zero3_init"}
)
"""Keys that are read elsewhere, or only concern the launcher."""
MOE = frozenset({"deepspeed_moe_layer_cls_names", "moe_layer_cls_names"})
"""Keys, of a file and of ``accelerate launch``, for layers that DeepSpeed's stage 3
must gather as one.
"""
SUPPORTED = {"optimizer": ("AdamW", "Adam"), "scheduler": ("WarmupLR", "WarmupDecayLR")}
"""Types that DeepSpeed can build under Accelerate."""


def user_config(options: AccelerateOptions, settings: Settings) -> UserConfig:
    """Return the user's config of DeepSpeed.

    Raises ConfigError, one line, for an unreadable file, or an Accelerate file that sets keys next
    to a JSON file.
    """
    section = settings.deepspeed
    for key in MOE:
        if section.get(key):
            raise ConfigError(
                f"{settings.source}: deepspeed_config.{key} = {section[key]!r}: has no effect here;"
                " take it out, and train a mixture of experts with --strategy fsdp"
            )
    for key in section.keys() - MOE:
        if key not in KEY_IN_JSON and key not in LAUNCHING:
            hint = nearest(key, [*KEY_IN_JSON, *LAUNCHING])
            raise ConfigError(f"{settings.source}: unknown key 'deepspeed_config.{key}'{hint}")
    user = _json(options, section, settings.source)
    if options.zero_stage is None:
        return user
    stage = Setting(f"{ZERO}.stage", options.zero_stage, "strategy_options.zero_stage")
    return replace(user, options=(stage,))


def check_supported(user: UserConfig) -> None:
    """Raise ConfigError, one line, for an optimizer or a scheduler that DeepSpeed
    cannot build under Accelerate.
    """
    for name, known in SUPPORTED.items():
        kind = user.get(f"{name}.type")
        if kind is not None and kind not in known:
            raise ConfigError(
                f"{name}.type = {kind!r} in DeepSpeed's config: not supported ({', '.join(known)})"
            )


def _json(options: AccelerateOptions, section: Tree, source: str) -> UserConfig:
    """Return the JSON of the option, else that of the Accelerate file, else the
    Accelerate file's own section.
    """
    beside = sorted(section.keys() & KEY_IN_JSON.keys())
    file = section.get("deepspeed_config_file")
    named = options.deepspeed_config if options.deepspeed_config is not None else file
    if named is None:
        # Accelerate's own default
        return replace(read_config(_nested(_values(section)), source), default_stage=2)
    if beside:
        raise ConfigError(
            f"{source}: deepspeed_config.{beside[0]} beside a DeepSpeed JSON file: Accelerate would"
            " ignore it; put it into the JSON"
        )
    return read_config(
        named, "deepspeed_config_file" if named is file else "strategy_options.deepspeed_config"
    )


def _values(section: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield values by key of DeepSpeed's config."""
    for key, path in KEY_IN_JSON.items():
        if key not in section:
            continue
        value = section[key]
        # Accelerate writes "none" for an unused path.
        is_unused_path = key.endswith("nvme_path") and value in (None, "none")
        if not is_unused_path:
            yield path, value


def _nested(values: Iterator[tuple[str, Any]]) -> Tree:
    """Return values by dotted path as a tree."""
    tree: Tree = {}
    for path, value in values:
        *sections, leaf = path.split(".")
        inner = tree
        for name in sections:
            inner = inner.setdefault(name, {})
        inner[leaf] = value
    return tree
