"""DeepSpeed's JSON and the options, as they are checked before any rank starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from distcore import ConfigError, load_config
from distcore.plugin.strategy.contract import Run, World
from distcore.resolve import strategies
from distcore.resolve.resolve import resolve
from distcore.testing.problem import Problem
from distcore_deepspeed import resolve as resolve_tree
from distcore_deepspeed.strategy import DeepSpeedStrategy


def checked(options: dict[str, Any], **changes: Any) -> Any:
    """The config of a run on two ranks, accepted."""
    job = {
        "nproc": 2,
        "device": "cpu",
        "global_batch_size": 32,
        "micro_batch_size": 8,
        "lr": 1e-3,
        "out": "unused",
    }
    config = load_config(
        None, {"strategy": "deepspeed", "strategy_options": options} | job | changes
    )
    return resolve(config, task=Problem()).config


def tree(options: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The config that DeepSpeed gets, with a model of hidden size 128 and 100 steps."""
    import torch

    config = checked(options, **changes)
    config = config.model_copy(
        update={"schedule": config.schedule.model_copy(update={"warmup_steps": 10})}
    )
    model = nn.Linear(2, 2)
    model.config = type("Config", (), {"hidden_size": 128})()
    strategy = strategies.load_strategy(config).plugin
    assert isinstance(strategy, DeepSpeedStrategy)
    world = World(rank=0, size=2, local_rank=0, device=torch.device("cpu"))
    run = Run(
        config=config,
        world=world,
        capabilities=strategy.capabilities,
        module=model,
        model=model,
        total_steps=100,
    )
    return resolve_tree(strategy.user_config, run, model)


def test_the_plain_config_states_what_deepspeed_would_guess() -> None:
    resolved = tree({"stage": 2})
    assert (resolved["train_batch_size"], resolved["gradient_accumulation_steps"]) == (32, 2)
    assert resolved["gradient_clipping"] == 1.0
    assert resolved["bf16"] == resolved["fp16"] == {"enabled": False}


def test_the_strategy_clips_at_stage_0_and_deepspeed_does_not() -> None:
    assert tree({"stage": 0}, **{"clip.norm": 0.5})["gradient_clipping"] == 0.0
    assert tree({"stage": 1}, **{"clip.norm": 0.5})["gradient_clipping"] == 0.5


def test_a_number_of_the_json_may_be_rounded_otherwise() -> None:
    rate = 0.1 + 0.2
    assert rate != 0.3
    given = {"optimizer": {"type": "AdamW", "params": {"lr": rate}}}
    assert tree({"config": given}, lr=0.3)["optimizer"]["params"]["lr"] == pytest.approx(0.3)


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16")])
def test_precision_auto_takes_bf16_only_where_deepspeed_gets_it_right(
    stage: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distcore.resolve.resolve.has_fast_bf16", lambda: True)
    assert checked({"stage": stage}, precision="auto").precision == precision


def test_clipping_that_is_off_is_said_to_be_off() -> None:
    assert tree({"stage": 1}, **{"clip.norm": None})["gradient_clipping"] == 0.0


def test_every_auto_is_filled_in(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(AUTOS))
    resolved = tree({"config": str(file)}, **{"schedule.name": "constant"})
    assert resolved["optimizer"]["params"] == {
        "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "torch_adam": True
    }  # fmt: skip
    assert resolved["scheduler"]["params"] == {
        "warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10, "total_num_steps": 100
    }  # fmt: skip
    zero = resolved["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["reduce_bucket_size"] == 128 * 128
    assert zero["stage3_prefetch_bucket_size"] == int(0.9 * 128 * 128)
    assert zero["stage3_param_persistence_threshold"] == 1280
    assert "auto" not in json.dumps(resolved)


AUTOS = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(
            ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"
        ),
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}


def test_strings_mean_what_they_say() -> None:
    given = {"train_batch_size": "32", "zero_optimization": {"stage": "1", "overlap_comm": "false"}}
    resolved = tree({"config": given})
    assert resolved["train_batch_size"] == 32
    assert resolved["zero_optimization"] == {"stage": 1, "overlap_comm": False}


def test_contradictions_are_listed_in_one_line_with_both_values() -> None:
    given = {"train_batch_size": 64, "gradient_clipping": 0.5, "zero_optimization": {"stage": 3}}
    with pytest.raises(ConfigError) as caught:
        checked({"config": given, "stage": 2}, **{"clip.norm": 1.0})
    line = str(caught.value)
    assert "train_batch_size = 64 (strategy_options.config) but global_batch_size = 32" in line
    assert "gradient_clipping = 0.5 (strategy_options.config) but clip.norm = 1.0" in line
    assert (
        "zero_optimization.stage = 3 (strategy_options.config) but strategy_options.stage = 2"
        in line
    )
    assert "\n" not in line


def test_keys_that_deepspeed_refuses_are_listed_in_one_line() -> None:
    given = {
        "fp16": {"loss_scal": 0},
        "bf16": {"enable": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "beta": [0.9, 0.95]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"devise": "cpu"}},
    }
    with pytest.raises(ConfigError) as caught:
        checked({"config": given})
    line = str(caught.value)
    names = [
        "fp16.loss_scal",
        "bf16.enable",
        "optimizer.params.beta",
        "scheduler.params.warmup_steps",
    ]
    for name in (*names, "zero_optimization.offload_optimizer.devise"):
        assert f"unknown key '{name}'" in line
    assert "(did you mean 'betas'?)" in line
    assert "\n" not in line


def test_parameters_are_those_of_the_optimizer_that_deepspeed_builds() -> None:
    sections = {
        "optimizer": {"type": "AdamW", "params": {"amsgrad": True}},
        "scheduler": {"type": "WarmupLR"},
    }
    assert tree({"config": sections})["optimizer"]["params"]["amsgrad"] is True
    with pytest.raises(ConfigError, match=r"unknown key 'optimizer.params.bias_correction'"):
        # FusedAdam's, not torch's
        checked({"config": sections, "optimizer_params": {"bias_correction": False}})


ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}, "scheduler": {"type": "WarmupLR"}}
OPTIONS_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown zero key": (
        {"config": {"zero_optimization": {"stag": 2}}},
        r"'zero_optimization.stag' \(did you mean",
    ),
    "unknown option": ({"stages": 2}, r"unknown option 'stages' \(did you mean 'stage'"),
    "stage out of range": ({"stage": 4}, "stage = 4"),
    "wrong type": (
        {"config": {"zero_optimization": {"overlap_comm": "maybe"}}},
        "overlap_comm = 'maybe'",
    ),
    "no such file": ({"config": "no/such.json"}, "no/such.json': cannot be read: No such file"),
    "auto without an answer": (
        {"config": {"zero_optimization": {"sub_group_size": "auto"}}},
        "nothing to fill in",
    ),
    "another rate": ({"config": ADAMW}, r"optimizer.params.lr = 3e-05 .* but lr = 0.001"),
    "offload at stage 0": (
        {"stage": 0, "offload_optimizer": "cpu"},
        "ignores it at stage 0; use stage=1",
    ),
    "parameters offloaded at stage 2": (
        {"stage": 2, "offload_param": "cpu"},
        "ignores it at stage 2; use stage=3",
    ),
    "nvme at stage 2": (
        {"offload_optimizer": "nvme", "nvme_path": "/tmp"},
        "at stage 2; use stage=3",
    ),
    "nvme without a path": ({"stage": 3, "offload_param": "nvme"}, "needs nvme_path"),
    "unknown scheduler": (
        {"config": {"scheduler": {"type": "WarmLR"}}},
        r"'WarmLR': not supported \(did you mean",
    ),
    "its parameter": (
        {"scheduler": "WarmupLR", "scheduler_params": {"steps": 3}},
        "key 'scheduler.params.steps'",
    ),
    "no such stage": (
        {"config": {"zero_optimization": {"stage": "two"}}},
        r"stage = 'two': expected 0, 1, 2 or 3",
    ),
    "not a section": ({"config": {"fp16": True}}, "fp16 = True: expected keys and values"),
    "out of range": (
        {"config": {"fp16": {"loss_scale": -1}}},
        r"fp16.loss_scale = -1: .*must be >= 0",
    ),
    "unknown optimizer": (
        {"config": {"optimizer": {"type": "Adamm"}}},
        r"'Adamm' .*did you mean 'AdamW'",
    ),
    "1-bit Adam": (
        {"config": {"optimizer": {"type": "OneBitAdam"}}},
        r"OneBitAdam: DeepSpeed dropped its 1-bit .* in 0\.19\.7; here is 0\.19\.\d+; use",
    ),
    "0/1 Adam": (
        {"config": {"optimizer": {"type": "ZeroOneAdam"}}},
        "ZeroOneAdam: .* use deepspeed-adamw or adamw",
    ),
    "1-bit LAMB": (
        {"config": {"optimizer": {"type": "OneBitLamb"}}},
        "OneBitLamb: DeepSpeed dropped its 1-bit optimizers in 0.19.7; here is 0",
    ),
    "sparse attention": (
        {"config": {"sparse_attention": {"mode": "fixed"}}},
        "sparse_attention: DeepSpeed dropped it in 0.19.7; here is 0",
    ),
    "a sum for the mean": (
        {"config": {"gradient_allreduce_op": "sum"}},
        "gradient_allreduce_op = 'sum'",
    ),
    "autocast beside": (
        {"config": {"torch_autocast": {"enabled": True}}},
        "torch_autocast.enabled = True",
    ),
    "a factor of gradients": (
        {"config": {"gradient_predivide_factor": 2.0}},
        r"predivide_factor = 2.0: .*; take it out",
    ),
    "scaled before": (
        {"stage": 2, "config": {"prescale_gradients": True}},
        "prescale_gradients = True: .*reduce_scatter",
    ),
    "DeepCompile": (
        {"config": {"compile": {"deepcompile": True}}},
        "deepcompile = True: .* use --compile on",
    ),
}
ZERO_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a part of the offload": (
        {"offload_optimizer": {"device": "cpu", "ratio": 0.3}},
        "offload_optimizer.ratio = 0.3: ",
    ),
    "superchips": (
        {"offload_optimizer": {"device": "cpu", "super_offload": True}},
        "super_offload = True: no checkpoint",
    ),
    "ZenFlow": (
        {"zenflow": {"topk_ratio": 0.1}},
        r"zero_optimization\.zenflow = .*: it delays updates",
    ),
    "MiCS": (
        {"mics_shard_size": 2},
        r"mics_shard_size = 2: DeepSpeed .* dropped MiCS; take it out",
    ),
    "the first stage 1": ({"legacy_stage1": True}, "legacy_stage1 = True: DeepSpeed dropped it"),
    "weights in bytes": (
        {"zero_quantized_weights": True},
        "zero_quantized_weights = True: .* there is no GPU",
    ),
    "gradients in bytes": (
        {"zero_quantized_gradients": True},
        "zero_quantized_gradients = True: .* there is no GPU",
    ),
    "frozen weights in bytes": (
        {"zero_quantized_nontrainable_weights": True},
        "frozen weights lose their values",
    ),
    "secondary partitions": (
        {"zero_hpz_partition_size": 3},
        "zero_hpz_partition_size = 3: must divide the number of",
    ),
    "no norm": (
        {"stage": 2, "compute_grad_norm": False},
        "compute_grad_norm = False: clipping needs the norm",
    ),
}
OPTIONS_REFUSED |= {
    name: ({"config": {"zero_optimization": {"stage": 3} | section}}, message)
    for name, (section, message) in ZERO_REFUSED.items()
}
IDLE: dict[str, tuple[dict[str, Any], str]] = {
    "round_robin_gradients": (
        {"stage": 3, "round_robin_gradients": True},
        "without stages 1 and 2",
    ),
    "allgather_bucket_size": (
        {"stage": 3, "allgather_bucket_size": 1000},
        "without stages 1 and 2",
    ),
    "overlap_comm": ({"stage": 0, "overlap_comm": True}, "without stages 1 to 3"),
    "reduce_bucket_size": ({"stage": 0, "reduce_bucket_size": "auto"}, "without stages 1 to 3"),
    "sub_group_size": ({"sub_group_size": 1000}, "without stage 3"),
    "stage3_prefetch_bucket_size": ({"stage3_prefetch_bucket_size": "auto"}, "without stage 3"),
    "stage3_max_live_parameters": ({"stage3_max_live_parameters": 10}, "without stage 3"),
    "hysteresis": ({"hysteresis": 3}, "without precision=fp16"),
    "cpu_checkpointing": (
        {"cpu_checkpointing": True},
        "without strategy_options.activation_checkpointing=true",
    ),
    "nvme_path": ({"stage": 3, "nvme_path": "/tmp"}, "without an offload to nvme"),
    "scheduler_params": (
        {"scheduler_params": {"warmup_num_steps": 3}},
        "without strategy_options.scheduler",
    ),
    "optimizer_params": (
        {"optimizer_params": {"torch_adam": True}},
        "without an optimizer of DeepSpeed",
    ),
}
OPTIONS_REFUSED |= {
    f"idle {name}": (options, f"strategy_options.{name}: has no effect {message}")
    for name, (options, message) in IDLE.items()
}


@pytest.mark.parametrize("case", OPTIONS_REFUSED)
def test_options_that_cannot_work_are_one_line(case: str) -> None:
    options, message = OPTIONS_REFUSED[case]
    with pytest.raises(Exception, match=message) as caught:
        checked(options)
    assert "\n" not in str(caught.value)


def test_low_precision_masters_and_scaling_where_it_is_right() -> None:
    for section, key in (
        ("bf16", "bf16_master_weights_and_grads"),
        ("fp16", "fp16_master_weights_and_grads"),
    ):
        with pytest.raises(
            ConfigError, match=f"{section}.{key} = True: master weights and gradients are fp32"
        ):
            checked({"stage": 2, "config": {section: {key: True}}})
    checked({"stage": 1, "config": {"prescale_gradients": True, "gradient_predivide_factor": 1.0}})


CONFIGS_REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "bf16 at stage 0": ({"stage": 0}, {"precision": "bf16"}, "use stage=1"),
    "their optimizer, our schedule": (
        {},
        {"optimizer.name": "deepspeed-adamw"},
        "'linear' with DeepSpeed's optimizer",
    ),
    "Lamb on a CPU": ({}, {"optimizer.name": "deepspeed-lamb"}, "there is no GPU"),
    "OneBitAdam": (
        {},
        {"optimizer.name": "deepspeed-onebitadam"},
        "DeepSpeed dropped its 1-bit optimizers in 0.19.7",
    ),
    "not a name of ours": (
        {},
        {"optimizer.name": "deepspeed-adamm"},
        "did you mean 'deepspeed-adam",
    ),
    "whole matrices": (
        {"stage": 0},
        {"optimizer.name": "muon"},
        "'muon': strategy 'deepspeed' takes adam, adamw, ",
    ),
    "two optimizers": (
        {"config": {"optimizer": {"type": "AdamW"}}},
        {"optimizer.name": "sgd"},
        "optimizer.name = 'sgd', but DeepSpeed's config asks for its own AdamW; leave",
    ),
    "an untested one": (
        {"config": {"zero_allow_untested_optimizer": False}},
        {"optimizer.name": "lion"},
        r"zero_allow_untested_optimizer = False .* but optimizer.name \(built by distcore\) = True",
    ),
    "rates by depth": (
        {"scheduler": "WarmupLR"},
        {"optimizer.layer_decay": 0.9},
        (
            "optimizer.layer_decay: DeepSpeed's scheduler WarmupLR gives all parameters one rate;"
            " use schedule.name"
        ),
    ),
    "rates by pattern": (
        {"scheduler": "WarmupLR"},
        {"optimizer.groups": [{"match": "a", "weight_decay": 0}, {"match": "b", "lr_scale": 2}]},
        "optimizer.groups.1: DeepSpeed's scheduler",
    ),
}


@pytest.mark.parametrize("case", CONFIGS_REFUSED)
def test_configs_that_deepspeed_would_get_wrong_are_refused(case: str) -> None:
    options, changes, message = CONFIGS_REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        checked(options, **changes)


def test_fp16_on_a_cpu_is_refused_where_deepspeed_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    # some CPUs multiply in it
    monkeypatch.setattr("distcore_deepspeed.library.fp16_on_cpu", lambda: False)
    with pytest.raises(ConfigError, match="no fp16 on a CPU"):
        checked({}, precision="fp16")


def test_broken_json_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"fp16": ')
    with pytest.raises(ConfigError, match=r"ds.json': not valid JSON"):
        checked({"config": str(file)})
    file.write_text('{"fp16": {}, "fp16": {}}')
    with pytest.raises(ConfigError, match="'fp16' is given twice"):
        checked({"config": str(file)})


def test_options_are_read_without_torch() -> None:
    code = (
        "import sys, distcore_deepspeed.options; print({'torch', 'deepspeed'} & sys.modules.keys())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "set()\n"


def test_an_optimizer_of_ours_that_deepspeed_does_not_know_is_said_to_be_meant() -> None:
    assert tree({"stage": 2}, **{"optimizer.name": "sgd"})["zero_allow_untested_optimizer"] is True
    assert "zero_allow_untested_optimizer" not in tree({"stage": 2})


def test_offload_with_our_optimizer_tells_deepspeed_that_it_is_meant() -> None:
    assert tree({"stage": 2, "offload_optimizer": "cpu"})["zero_force_ds_cpu_optimizer"] is False


OWN_VALUES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "an AdamW as distcore's": (
        {
            "config": {
                "optimizer": {
                    "type": "Adam",
                    "params": {"lr": "auto", "adam_w_mode": True, "torch_adam": True},
                }
            }
        },
        {},
    ),
    "Adam with decay in the gradient": (
        {"config": {"optimizer": {"type": "Adam", "params": {"lr": 0.1, "adam_w_mode": False}}}},
        {"optimizer": {"type": "Adam", "adam_w_mode": False}},
    ),
    "Lamb": ({"config": {"optimizer": {"type": "Lamb"}}}, {"optimizer": {"type": "Lamb"}}),
    "a scheduler": (
        {
            "scheduler": "WarmupLR",
            "scheduler_params": {"warmup_num_steps": 3, "warmup_max_lr": "auto"},
        },
        {"schedule": {"type": "WarmupLR", "warmup_num_steps": 3}},
    ),
}


@pytest.mark.parametrize("case", OWN_VALUES)
def test_values_that_replace_those_of_the_config_are_declared(case: str) -> None:
    options, declared = OWN_VALUES[case]
    assert DeepSpeedStrategy(**options).capabilities.own_values == declared
