"""The backend of Accelerate with FSDP2 (``fully_shard``), for GPUs only: on a CPU Accelerate
falls back to DDP.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method

from distcore import (
    Capabilities,
    ConfigError,
    OptimizerFactory,
    PreparedModel,
    Run,
    RunConfig,
    StrategyError,
    World,
    dtensors,
    nearest,
)
from distcore_accelerate.backend import Backend
from distcore_accelerate.options import AccelerateOptions
from distcore_accelerate.precision import DTYPES, mixed_precision, move_unsharded, results_in_fp32
from distcore_accelerate.settings import Settings, Tree
from distcore_accelerate.sharded_state import ShardedState
from distcore_accelerate.tracing import TracedShards
from distcore_accelerate.wrapping import choose_layers

_NOTHING = nullcontext()
ARGUMENTS = {
    "reshard_after_forward": "reshard_after_forward",
    "offload_params": "cpu_offload",
    "auto_wrap_policy": "auto_wrap_policy",
    "transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
    "min_num_params": "min_num_params",
    "activation_checkpointing": "activation_checkpointing",
}
"""Map keys of ``fsdp_config``, without their prefix, to arguments of Accelerate's plugin."""
FSDP1: dict[str, tuple[tuple[Any, ...], str]] = {
    "sharding_strategy": (
        ("FULL_SHARD", 1),
        "use fsdp_reshard_after_forward: false for SHARD_GRAD_OP",
    ),
    "backward_prefetch": (("BACKWARD_PRE", 1), "FSDP2 gathers the next layer ahead"),
    "forward_prefetch": ((False,), "Accelerate has it for FSDP1 only; use --strategy fsdp"),
    "use_orig_params": ((True, False), ""),
    "sync_module_states": ((True, False), ""),
    "ignored_modules": ((), "their gradients would be summed over no ranks; leave them in"),
    "activation_checkpointing_offload": ((False,), "use --set extensions.activation_offload=true"),
}
"""Map keys that are not handed on to the values that FSDP2 has anyway, and what to
do instead of others.
"""
OF_CHECKPOINTS = frozenset({"version", "state_dict_type", "cpu_ram_efficient_loading"})
"""Keys about saving and loading, which are ignored, because distcore does both itself."""


def plugin_arguments(options: AccelerateOptions, settings: Settings) -> Tree:
    """Return ``fsdp_config`` and options as arguments of Accelerate's plugin.

    Raises ConfigError, one line.
    """
    section, source = settings.fsdp, settings.source
    if settings.distributed_type and int(section.get("version") or 1) != 2:
        raise ConfigError(
            f"{source}: fsdp_config.fsdp_version = {section.get('version', 1)}: only FSDP2; convert"
            " the file with `accelerate to-fsdp2`"
        )
    known_keys = {*ARGUMENTS, *FSDP1, *OF_CHECKPOINTS}
    for key in section:
        if key not in known_keys:
            raise ConfigError(
                f"{source}: unknown key 'fsdp_config.fsdp_{key}'{nearest(key, known_keys)}"
            )
        if key in FSDP1:
            _check_is_so_anyway(key, section[key], source)
    chosen: Tree = {
        "reshard_after_forward": options.reshard_after_forward,
        "cpu_offload": options.cpu_offload,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_cls_names_to_wrap": list(options.wrap_classes) or None,
    }
    from_file = {
        ARGUMENTS[key]: _names(key, section[key])
        for key in ARGUMENTS
        if section.get(key) not in (None, "")
    }
    _check_agreement(options, from_file, source)
    together = chosen | from_file
    _check_policy(together, source)
    return together


def _check_is_so_anyway(key: str, value: Any, source: str) -> None:
    """Raise ConfigError for a key that asks for what FSDP2, or Accelerate's use of
    it, does not do.
    """
    as_it_is, instead = FSDP1[key]
    word = value.upper() if isinstance(value, str) else value
    if value is not None and word not in as_it_is:
        raise ConfigError(
            f"{source}: fsdp_config.fsdp_{key} = {value!r}: has no effect here: {instead}; take"
            " it out"
        )


def _check_agreement(options: AccelerateOptions, from_file: Tree, source: str) -> None:
    """Raise ConfigError for an option that the file contradicts."""
    arguments = {
        "reshard_after_forward": "reshard_after_forward",
        "cpu_offload": "cpu_offload",
        "wrap_classes": "transformer_cls_names_to_wrap",
    }
    for option, argument in arguments.items():
        value = getattr(options, option)
        is_default = value == getattr(AccelerateOptions, option)
        value = list(value) if option == "wrap_classes" else value
        value_in_file = from_file.get(argument, value)
        if value_in_file != value and not is_default:
            raise ConfigError(
                f"strategy_options.{option} = {value!r}, but {source}: fsdp_config says"
                f" {value_in_file!r}; leave one of them out"
            )


def _check_policy(arguments: Tree, source: str) -> None:
    """Raise ConfigError for names of layers, or a number of parameters, that the policy of
    wrapping does not read.
    """
    policy = str(arguments["auto_wrap_policy"]).upper()
    readers = {
        "transformer_cls_names_to_wrap": "TRANSFORMER_BASED_WRAP",
        "min_num_params": "SIZE_BASED_WRAP",
    }
    for name, reader in readers.items():
        if arguments.get(name) and policy != reader:
            raise ConfigError(
                f"{source}: fsdp_auto_wrap_policy = {policy!r} ignores {name} ="
                f" {arguments[name]!r}; it is for {reader}"
            )


class Sharded(Backend):
    """Shard parameters, gradients and optimizer state over the ranks; save
    checkpoints shard by shard.
    """

    def capabilities(self) -> Capabilities:
        """Declare sharded parameters and the strategy's own precision; no fp16."""
        return Capabilities(
            spec_version=3,
            gradients="sum",
            devices=frozenset({"cpu", "cuda"}),
            precisions=frozenset({"fp32", "bf16"}),
            optimizers=frozenset({"adamw", "adamw8bit", "muon"}),
            other_optimizers="elementwise",
            shards_parameters=True,
            phases=True,
            own_steps=True,
            ema=True,
            compiles=frozenset({"regions"}),
            # as the strategy fsdp declares: parameters are gathered in every pass
            forward_cost=3.5,
            lacks=frozenset(
                {"sparse gradients", "complex parameters", "parameters without elements"}
            ),
            inner_gradients="first",
            owns=frozenset({"precision"}),
            limits=("fsdp2 needs GPUs: on a CPU Accelerate falls back to DDP",),
        )

    def check_evaluation(self, config: RunConfig) -> None:
        """Raise ConfigError, one line, for an ``fsdp_config`` of FSDP1 or with an unknown key."""
        plugin_arguments(self.options, self.settings)

    def traced(self) -> object:
        """Return a stand-in that shards as on GPUs."""
        return TracedShards(self)

    def plugins(self, config: RunConfig, world: World) -> dict[str, Any]:
        """Return Accelerate's FSDP2 plugin, with gradients averaged in fp32."""
        # Accelerate's own policy would average gradients in bf16, and round their sum.
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[config.precision], reduce_dtype=torch.float32
        )
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            cpu_ram_efficient_loading=False,
            mixed_precision_policy=policy,
            **plugin_arguments(self.options, self.settings),
        )
        return {"fsdp_plugin": plugin, "mixed_precision": mixed_precision(config)}

    def prepare(
        self, accelerator: Accelerator, run: Run, model: nn.Module, make_optimizer: OptimizerFactory
    ) -> PreparedModel:
        """Shard the model in place.

        Accelerate requires an optimizer; the real one is built over the shards.
        """
        if scalar := next(
            (name for name, parameter in model.named_parameters() if parameter.dim() == 0), None
        ):
            raise StrategyError(
                f"parameter {scalar!r} has no dimension that could be sharded: give it the shape"
                " (1,)"
            )
        model = model.to(run.world.device)
        choose_layers(accelerator.state.fsdp_plugin, model)
        sharded, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        if not isinstance(sharded, FSDPModule):
            raise StrategyError(
                "accelerate fell back: fsdp2 was asked for, the model is a"
                f" {type(sharded).__name__}"
            )
        # transformers' generate() calls parts of the model, which must be gathered
        if hasattr(model, "generate"):
            register_fsdp_forward_method(model, "generate")
        state = ShardedState.of_training(sharded)
        return PreparedModel(
            model=results_in_fp32(run, model), optimizer=make_optimizer(model), state=state
        )

    def for_evaluation(self, run: Run, model: nn.Module) -> nn.Module:
        """Return the unsharded model in the precision of the run."""
        return move_unsharded(run, model)

    def accumulate(self, run: Run, last: bool) -> AbstractContextManager[object]:
        """Average gradients after the last micro-batch only."""
        state: ShardedState = run.strategy_state
        state.sync.tell(last)
        if run.accumulation > 1:
            state.calls.begin(last)
        return _NOTHING

    def gathering_modules(self, run: Run) -> Mapping[str, nn.Module]:
        """Return the sharded layers, and the model."""
        return dtensors.sharded_units(run.module)

    def backward(self, run: Run, loss: Tensor) -> Tensor:
        """Add the gradients of the scalar ``loss``, after which none is left
        unsent; return it detached.
        """
        share = super().backward(run, loss)
        state: ShardedState = run.strategy_state
        state.calls.finish()
        return share


def _names(key: str, value: Any) -> Any:
    """Return the value of a key; names of layers as a list, also from a string with commas."""
    return (
        value.split(",")
        if key == "transformer_layer_cls_to_wrap" and isinstance(value, str)
        else value
    )
