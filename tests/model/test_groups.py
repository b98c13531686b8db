"""Parameters with rates and decay of their own: by pattern, by depth, and
those that never decay.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModel, BertConfig, T5Config

from distcore import ConfigError, RunConfig, registry
from distcore.model.blocks import depths_from_top
from distcore.model.optim import learning_rates, logged_rate, optimizer_factory, scheduler_for
from distcore.plugin.task.phases import Phase
from distcore.testing.problem import Classifier

RATE = 0.1
BERT: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip


def settings_of(module: nn.Module, **optimizer: Any) -> dict[str, tuple[float, float | None]]:
    """Learning rate and weight decay of each trained parameter, by name."""
    made = optimizer_factory(RunConfig(lr=RATE, optimizer=optimizer))(module)
    names = {parameter: name for name, parameter in module.named_parameters()}
    return {
        names[parameter]: (round(group["lr"], 9), group.get("weight_decay"))
        for group in made.param_groups
        for parameter in group["params"]
    }


def test_biases_and_normalizations_do_not_decay() -> None:
    settings = settings_of(Classifier(), weight_decay=0.5)
    plain = {name for name, (_, decay) in settings.items() if decay == 0.0}
    assert plain == {name for name in settings if name.endswith("bias") or ".norm." in name}
    assert {decay for name, (_, decay) in settings.items() if name not in plain} == {0.5}


def test_the_parameters_without_decay_are_those_of_transformers_trainer() -> None:
    """Tables of biases, too: T5's relative positions."""
    trainer: Any = pytest.importorskip("transformers.trainer").Trainer
    small: dict[str, Any] = {
        "num_layers": 2,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_heads": 2,
        "vocab_size": 20,
    }
    models = [
        AutoModel.from_config(T5Config(**small)),
        AutoModel.from_config(BertConfig(vocab_size=20, **BERT)),
    ]
    for module in models:
        settings = settings_of(module, weight_decay=0.5)
        decaying = {*trainer.get_decay_parameter_names(None, module)}
        assert {
            name for name, (_, decay) in settings.items() if decay
        } == decaying & settings.keys()


def test_the_first_group_that_fits_counts_and_what_it_leaves_out_stays() -> None:
    groups = [
        {"match": "head", "lr": 0.7},
        {"match": r"head|blocks\.1", "lr_scale": 0.5, "weight_decay": 0.9},
    ]
    settings = settings_of(Classifier(), weight_decay=0.2, groups=groups)
    assert settings["head.weight"] == (0.7, 0.2)
    assert settings["head.bias"] == (0.7, 0.0)
    assert settings["blocks.1.up.weight"] == (0.05, 0.9)
    # a group's weight decay is not for biases either
    assert settings["blocks.1.up.bias"] == (0.05, 0.0)
    assert settings["blocks.0.up.weight"] == (RATE, 0.2)
    assert not [name for name in settings if name.startswith("frozen")]


def test_layer_decay_goes_by_depth_and_leaves_a_rate_that_is_given() -> None:
    groups = [{"match": "embedding", "lr": 0.7}, {"match": "blocks.0.up", "lr_scale": 2.0}]
    settings = settings_of(Classifier(), layer_decay=0.5, groups=groups)
    rates = {name: rate for name, (rate, _) in settings.items()}
    assert rates["head.weight"] == RATE
    assert rates["blocks.1.up.weight"] == RATE * 0.5
    assert rates["blocks.0.down.weight"] == RATE * 0.25
    assert rates["blocks.0.up.weight"] == RATE * 0.25 * 2
    assert rates["embedding.weight"] == 0.7
    assert settings_of(Classifier(), layer_decay=0.5)["embedding.weight"][0] == RATE * 0.125


@pytest.mark.parametrize("name", sorted(registry.offers("optimizers")))
def test_the_rate_that_is_logged_is_the_runs_own_if_some_group_has_it(name: str) -> None:
    config = RunConfig(lr=RATE, optimizer={"name": name, "layer_decay": 0.5}, schedule="linear")
    optimizer = optimizer_factory(config)(Classifier())
    schedule = scheduler_for(config, optimizer, 4)
    assert schedule is not None
    assert logged_rate(optimizer, RATE) == RATE
    optimizer.step()
    schedule.step()
    assert logged_rate(optimizer, RATE) == pytest.approx(RATE * 3 / 4)


def test_the_rate_that_is_logged_trains_something() -> None:
    """An optimizer of one's own may make an empty group, keep rates as tensors, and
    know no peak rate.
    """
    [weight] = nn.Linear(2, 1, bias=False).parameters()
    groups = [
        {"params": [], "lr": torch.tensor(RATE)},
        {"params": [weight], "lr": torch.tensor(0.03)},
    ]
    optimizer = torch.optim.SGD(groups)
    assert logged_rate(optimizer, RATE) == pytest.approx(0.03)
    assert learning_rates(optimizer) == pytest.approx([RATE, 0.03])
    assert type(logged_rate(optimizer, RATE)) is float
    optimizer.param_groups[1]["params"] = []  # as engines have it that keep parameters elsewhere
    assert logged_rate(optimizer, RATE) == pytest.approx(RATE)


@pytest.mark.parametrize("name", sorted(registry.offers("optimizers")))
def test_every_optimizer_takes_the_rates_and_decay_of_groups(name: str) -> None:
    groups = [{"match": "head", "lr": 0.7, "weight_decay": 0.3}]
    settings = settings_of(
        Classifier(), name=name, weight_decay=0.2, groups=groups, layer_decay=0.5
    )
    assert settings["head.weight"] == (0.7, 0.3)
    assert settings["blocks.1.up.weight"] == (RATE * 0.5, 0.2)
    assert settings["blocks.1.up.bias"] == (RATE * 0.5, 0.0)


@pytest.mark.parametrize("name", sorted({*registry.offers("optimizers")} - {"sgd", "adafactor"}))
def test_every_optimizer_with_moments_takes_those_of_a_phase(name: str) -> None:
    # Lion divides by nothing
    own = {"betas": (0.5, 0.6)} | ({} if name == "lion" else {"eps": 0.1})
    phases = {"all": Phase("", lambda model, batch: model(batch), own)}
    groups = optimizer_factory(RunConfig(lr=RATE, optimizer={"name": name}), phases)(
        Classifier()
    ).param_groups
    with_moments = [group for group in groups if "momentum" not in group]
    assert {(group["betas"], group.get("eps", 0.1)) for group in with_moments} == {
        ((0.5, 0.6), 0.1)
    }
    assert 0.1 not in [group["eps"] for group in groups if "momentum" in group]  # those of Muon


def test_depths_of_models_of_the_hub() -> None:
    bert = AutoModel.from_config(
        BertConfig(
            hidden_size=8,
            num_attention_heads=1,
            intermediate_size=8,
            num_hidden_layers=3,
            vocab_size=9,
        )
    )
    depths = depths_from_top(bert)
    assert depths["embeddings.word_embeddings.weight"] == depths["embeddings.LayerNorm.bias"] == 4
    assert [depths[f"encoder.layer.{index}.output.dense.weight"] for index in range(3)] == [3, 2, 1]
    assert depths["pooler.dense.weight"] == 0
    t5 = AutoModel.from_config(
        T5Config(
            d_model=8, d_kv=8, d_ff=8, num_layers=3, num_decoder_layers=2, num_heads=1, vocab_size=9
        )
    )
    depths = depths_from_top(t5)
    assert depths["shared.weight"] == 4
    assert [depths[f"encoder.block.{index}.layer.1.layer_norm.weight"] for index in range(3)] == [
        3,
        2,
        1,
    ]
    assert [depths[f"decoder.block.{index}.layer.2.layer_norm.weight"] for index in range(2)] == [
        2,
        1,
    ]
    assert (
        depths["encoder.final_layer_norm.weight"] == depths["decoder.final_layer_norm.weight"] == 0
    )


@pytest.mark.parametrize(
    ("optimizer", "line"),
    [
        (
            {"groups": [{"match": "haed", "lr": 0.1}]},
            (
                r"^optimizer.groups.0.match = 'haed': matches no trained parameter's name; names"
                r" are such as embed"
            ),
        ),
        ({"groups": [{"match": "frozen", "lr": 0.1}]}, "matches no trained parameter's name"),
        (
            {"groups": [{"match": "head"}]},
            r"optimizer.groups.0 = .*: expected lr or lr_scale, or weight_decay",
        ),
        (
            {"groups": [{"match": "head", "lr": 1, "lr_scale": 1}]},
            r"optimizer.groups.0 = .*: expected lr or lr_scale",
        ),
        (
            {"groups": [{"match": "(", "lr": 0.1}]},
            r"optimizer.groups.0.match = '\(': not a regular expression: miss",
        ),
        ({"groups": [{"match": "head", "lr": 0}]}, r"optimizer.groups.0.lr = 0: .*greater than 0"),
        ({"groups": [{"match": "head", "rate": 1}]}, r"unknown key 'optimizer.groups.0.rate'"),
        (
            {"groups": [{"match": "head", "weight_decai": 1}]},
            r"weight_decai' \(did you mean 'weight_decay'\?\)",
        ),
        ({"layer_decay": 1.5}, r"optimizer.layer_decay = 1.5: .*less than or equal to 1"),
    ],
)
def test_parameter_groups_that_cannot_be_are_one_line(optimizer: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as raised:
        settings_of(Classifier(), **optimizer)
    assert "\n" not in str(raised.value)


def test_layer_decay_without_blocks_is_one_line() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^optimizer.layer_decay = 0.9: Linear has no repeated blocks .*lr_scale$",
    ):
        settings_of(nn.Linear(2, 2), layer_decay=0.9)
