"""DeepSpeed's config: from a JSON file, an Accelerate file or options, compared with distcore's and filled in."""

from __future__ import annotations

import copy
import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcore import ConfigError, RunConfig, nearest
from distcore_accelerate.settings import Settings, Tree

if TYPE_CHECKING:
    from distcore_accelerate.strategy import AccelerateStrategy

ZERO = "zero_optimization"
SECTION = {
    "zero_stage": f"{ZERO}.stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": f"{ZERO}.offload_optimizer.device",
    "offload_param_device": f"{ZERO}.offload_param.device",
    "offload_optimizer_nvme_path": f"{ZERO}.offload_optimizer.nvme_path",
    "offload_param_nvme_path": f"{ZERO}.offload_param.nvme_path",
    "zero3_save_16bit_model": f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
}
"""Keys of ``deepspeed_config`` in an Accelerate file, by what they are called in DeepSpeed's own config."""
LAUNCHING = frozenset(
    {"deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_exclusion_filter", "deepspeed_inclusion_filter"}
    | {"deepspeed_config_file", "deepspeed_moe_layer_cls_names", "zero3_init_flag", "zero3_init"}
)
"""Keys that are read elsewhere, or that only matter to who starts the processes."""
OPTIMIZERS = ("AdamW", "Adam")
AUTO = "auto"


def given(options: AccelerateStrategy, settings: Settings) -> Tree:
    """What the user says in DeepSpeed's terms: the JSON file, or the section of the Accelerate file, or options.

    Raises ConfigError, one line: unreadable, or an Accelerate file that sets beside a JSON file what belongs in it.
    """
    section = settings.deepspeed
    for key in section:
        if key not in SECTION and key not in LAUNCHING:
            hint = nearest(key, [*SECTION, *LAUNCHING])
            raise ConfigError(f"{settings.source}: unknown key 'deepspeed_config.{key}'{hint}")
    file = section.get("deepspeed_config_file")
    named = options.deepspeed_config if options.deepspeed_config is not None else file
    if named is not None and (beside := sorted(section.keys() & SECTION.keys())):
        raise ConfigError(
            f"{settings.source}: deepspeed_config.{beside[0]} beside a DeepSpeed JSON file: Accelerate would ignore "
            "it; put it into the JSON"
        )
    tree = _read(named) if named is not None else {}
    for key, path in SECTION.items():
        if key in section and not (key.endswith("nvme_path") and section[key] in (None, "none")):
            _put(tree, path, section[key])
    if options.zero_stage is not None:
        _claim(tree, f"{ZERO}.stage", options.zero_stage, "strategy_options.zero_stage", origin(options, settings))
    if _get(tree, f"{ZERO}.stage") in (None, AUTO):
        _put(tree, f"{ZERO}.stage", 2)
    return tree


def stage_of(tree: Tree) -> int:
    """The ZeRO stage of a config that ``given`` returned."""
    return int(tree[ZERO]["stage"])


def offloads(tree: Tree) -> bool:
    """True if the optimizer is to work in host memory or on NVMe."""
    return _get(tree, f"{ZERO}.offload_optimizer.device") not in (None, "none")


def has_scheduler(tree: Tree) -> bool:
    """True if DeepSpeed is to step a schedule of its own."""
    return bool(_get(tree, "scheduler.type"))


def check(options: AccelerateStrategy, settings: Settings, config: RunConfig) -> None:
    """Raise ConfigError, one line, for what can be known to go wrong before ranks start, whatever they do."""
    if find_spec("deepspeed") is None:
        raise ConfigError(
            "backend = 'deepspeed': deepspeed is not installed; pip install 'distcore-accelerate[deepspeed]'"
        )
    tree = given(options, settings)
    if stage_of(tree) not in range(4):
        raise ConfigError(f"{ZERO}.stage = {stage_of(tree)}: expected 0, 1, 2 or 3")
    if config.precision == "fp16" and config.device == "cpu":
        raise ConfigError("precision = 'fp16': DeepSpeed has no fp16 on a CPU; use --precision bf16 or fp32")


def check_training(options: AccelerateStrategy, settings: Settings, config: RunConfig) -> None:
    """Raise ConfigError, one line, for what cannot be trained, and for what contradicts distcore's config."""
    tree = given(options, settings)
    if config.precision != "fp32" and stage_of(tree) == 0:
        raise ConfigError(
            f"{ZERO}.stage = 0 with precision = {config.precision!r}: DeepSpeed's optimizer is a step ahead there and "
            "the result is wrong; use stage 1, which is as fast"
        )
    kind = _get(tree, "optimizer.type")
    if kind is not None and kind not in OPTIMIZERS:
        raise ConfigError(f"optimizer.type = {kind!r} in DeepSpeed's config: not supported ({', '.join(OPTIMIZERS)})")
    ranks = config.nproc if isinstance(config.nproc, int) else 1
    filled(tree, config, ranks, None, origin(options, settings))


def filled(tree: Tree, config: RunConfig, ranks: int, total_steps: int | None, where: str) -> Tree:
    """Return DeepSpeed's config with what follows from the run; raises ConfigError, one line, for a contradiction."""
    tree = copy.deepcopy(tree)
    micro = int(config.micro_batch_size)
    claims = {
        "train_batch_size": (config.global_batch_size, "global_batch_size"),
        "train_micro_batch_size_per_gpu": (micro, "micro_batch_size"),
        "gradient_accumulation_steps": (
            max(1, config.global_batch_size // (micro * ranks)),
            "global_batch_size / (micro_batch_size * ranks)",
        ),
        "gradient_clipping": (config.clip.norm or 0.0, "clip.norm"),  # DeepSpeed clips at 1.0 if nothing is said
        "bf16.enabled": (config.precision == "bf16", "precision"),
        "fp16.enabled": (config.precision == "fp16", "precision"),
        **_optimizer_claims(tree, config),
        **_scheduler_claims(tree, config, total_steps),
    }
    for path, (value, source) in claims.items():
        _claim(tree, path, value, source, where)
    if config.precision == "bf16":
        tree.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
    return tree


def _optimizer_claims(tree: Tree, config: RunConfig) -> dict[str, tuple[Any, str]]:
    if "optimizer" not in tree:
        return {}
    claims: dict[str, tuple[Any, str]] = {"optimizer.params.lr": (config.lr, "lr")}
    for name in ("betas", "eps", "weight_decay"):
        value = getattr(config.optimizer, name)
        claims[f"optimizer.params.{name}"] = (list(value) if name == "betas" else value, f"optimizer.{name}")
    if config.device == "cpu" and not offloads(tree):
        claims["optimizer.params.torch_adam"] = (True, "device (DeepSpeed would compile a kernel for minutes)")
    return claims


def _scheduler_claims(tree: Tree, config: RunConfig, total_steps: int | None) -> dict[str, tuple[Any, str]]:
    kind = _get(tree, "scheduler.type")
    if kind is None:
        return {}
    if kind not in ("WarmupLR", "WarmupDecayLR"):
        raise ConfigError(f"scheduler.type = {kind!r} in DeepSpeed's config: not supported (WarmupLR, WarmupDecayLR)")
    claims: dict[str, tuple[Any, str]] = {"warmup_max_lr": (config.lr, "lr")}
    if _get(tree, "scheduler.params.warmup_min_lr") in (None, AUTO):
        claims["warmup_min_lr"] = (0.0, "lr")
    if total_steps is not None:  # by then the steps of warm-up are a number; DeepSpeed takes none below 1
        claims["warmup_num_steps"] = (max(1, int(config.schedule.warmup_steps)), "schedule.warmup_steps")
    if total_steps is not None and kind == "WarmupDecayLR":
        claims["total_num_steps"] = (total_steps, "the steps of the run")
    return {f"scheduler.params.{name}": claim for name, claim in claims.items()}


def origin(options: AccelerateStrategy, settings: Settings) -> str:
    """Say where DeepSpeed's config comes from."""
    if options.deepspeed_config is not None:
        return options.deepspeed_config if isinstance(options.deepspeed_config, str) else "deepspeed_config"
    return str(settings.deepspeed.get("deepspeed_config_file") or settings.source)


def _read(config: str | Tree) -> Tree:
    if not isinstance(config, str):
        return copy.deepcopy(config)
    try:
        tree = json.loads(Path(config).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"deepspeed_config_file = {config!r}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"deepspeed_config_file = {config!r}: not valid JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"deepspeed_config_file = {config!r}: expected an object, found {type(tree).__name__}")
    return tree


def _claim(tree: Tree, path: str, value: Any, source: str, where: str) -> None:
    """Put ``value`` at ``path``; ConfigError if something else stands there."""
    found = _get(tree, path)
    if found not in (None, AUTO) and found != value:
        raise ConfigError(f'{where}: {path} = {found!r}, but {source} = {value!r}; make them equal, or write "auto"')
    _put(tree, path, value)


def _get(tree: Tree, path: str) -> Any:
    value: Any = tree
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _put(tree: Tree, path: str, value: Any) -> None:
    *parents, leaf = path.split(".")
    for part in parents:
        tree = tree.setdefault(part, {})
    tree[leaf] = value
