"""Mixtures of experts of five families, and their training beside one process."""

import os
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from small_models import SMALL
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from distcore import Clip, RankInfo, Run, RunConfig, defaults, dtensors
from distcore_mesh.strategy import MeshStrategy
from distcore_mesh.tensor_layout import TensorLayout

ROWS, LENGTH, STEPS, MICRO_BATCHES = 8, 12, 3, 2
MIXTURE: dict[str, Any] = SMALL | {"num_experts_per_tok": 2}
LATENT: dict[str, Any] = MIXTURE | {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
FAMILIES: dict[str, Any] = {
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**MIXTURE, num_local_experts=4)),
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**MIXTURE, num_experts=8)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**MIXTURE | {"num_experts": 8, "moe_intermediate_size": 24, "head_dim": 8})
    ),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**LATENT)),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**MIXTURE, num_local_experts=4, head_dim=8, sliding_window=4)
    ),
}
Errors = dict[str, float]
"""Relative errors, by what was compared."""
Step = tuple[float, float, dict[str, Tensor]]
"""Loss, norm and gradients of a step."""
STARVED = "gpt_oss, starved"
"""A model whose router never chooses the second half of the experts."""


def mixture(name: str) -> Any:
    """A model whose routers choose unevenly, and whose biases are not zero, as those of a new
    model are.
    """
    torch.manual_seed(0)
    model = FAMILIES[name.partition(",")[0]]()
    tensors = [*model.named_parameters()]
    tensors += [(at, value) for at, value in model.named_buffers() if "correction_bias" in at]
    with torch.no_grad():
        for at, value in tensors:
            if value.dim() > 1:
                value.normal_(std=0.1)
            elif "bias" in at:
                value.normal_(std=0.05)
            if name == STARVED and at.endswith("router.bias"):
                value.copy_(torch.tensor([100.0, 100.0, 0.0, 0.0]))
    return model.train()


def rows_of(step: int) -> Tensor:
    torch.manual_seed(100 + step)
    return torch.randint(3, 64, (ROWS, LENGTH))


def share_of_loss(model: Any, tokens: Tensor) -> Tensor:
    """The share of some rows in the mean loss of a step."""
    logits = model(input_ids=tokens, use_cache=False).logits
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    return loss / (ROWS * (LENGTH - 1))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.1)


def in_one_process(model: Any, clip: float) -> tuple[list[Step], dict[str, Tensor]]:
    """Loss, norm and gradients of each step, and the parameters after the last one."""
    optimizer = adamw(model)
    steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = share_of_loss(model, rows_of(step))
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        steps.append((loss.item(), float(norm), gradients))
    return steps, {name: p.detach().clone() for name, p in model.named_parameters()}


def part_of(layout: TensorLayout, name: str, whole: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's part of a whole tensor, and what it has in its place."""
    if name in layout.splits:
        whole = layout.splits[name].part_of(whole, *layout.place(name))
    local, start = dtensors.local_part(like)
    return whole.reshape(-1)[start : start + local.numel()].view_as(local), local


def compare(
    options: dict[str, Any], names: Iterable[str], clip: float = 0.3
) -> dict[str, tuple[Errors, float]]:
    """In a rank: the errors of each model under ``options``, by what was compared."""
    strategy = MeshStrategy(**options)
    size = int(os.environ["WORLD_SIZE"])
    config = RunConfig(device="cpu", nproc=size)
    world = strategy.setup(config, RankInfo(rank=int(os.environ["RANK"]), size=size))
    by_model = {}
    for name in names:
        whole = mixture(name)
        split = deepcopy(whole)
        held = sum(parameter.numel() for parameter in whole.parameters())
        expected, after = in_one_process(whole, clip)
        run = Run(
            config=config,
            world=world,
            capabilities=strategy.capabilities,
            module=split,
            model=split,
            accumulation=MICRO_BATCHES,
        )
        wrapped = strategy.wrap_model(run, split, adamw)
        run = Run(
            config=config,
            world=world,
            capabilities=strategy.capabilities,
            module=split,
            model=wrapped.model,
            optimizer=wrapped.optimizer,
            strategy_state=wrapped.state,
            accumulation=MICRO_BATCHES,
        )
        errors: Errors = {}
        for step, wanted in enumerate(expected):
            errors |= errors_of_step(strategy, run, step, wanted, clip)
        for at, parameter in split.named_parameters():
            wanted_part, local = part_of(wrapped.state.layout, at, after[at], parameter.detach())
            if local.numel():
                distance = (local - wanted_part).norm() / wanted_part.norm().clamp(min=1e-9)
                errors[f"{at} at the end"] = float(distance)
        here = sum(dtensors.local_part(p)[0].numel() for p in split.parameters())
        by_model[name] = errors, here / held
    defaults.teardown(world)
    return by_model


def errors_of_step(
    strategy: MeshStrategy, run: Run, step: int, wanted: Step, clip: float
) -> Errors:
    """Take a step of several micro-batches, and compare it with that of one process."""
    loss, norm, gradients = wanted
    assert run.optimizer is not None
    layout = run.strategy_state.layout
    mine = rows_of(step)[run.world.shard :: run.world.shards]
    total = torch.zeros(())
    run.optimizer.zero_grad()
    for at, rows in enumerate(mine.chunk(MICRO_BATCHES)):
        with strategy.accumulate(run, at == MICRO_BATCHES - 1):
            share = share_of_loss(run.model, rows)
            strategy.backward(run, share)
        total += share.detach()
    errors: Errors = {}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, parameter in run.module.named_parameters():
        assert parameter.grad is not None, name
        wanted_part, local = part_of(layout, name, gradients[name], parameter.grad)
        if local.numel():
            errors[f"{name} of step {step}"] = float((local - wanted_part).abs().max()) / largest
    dist.all_reduce(total)
    copies = run.world.size // run.world.shards
    errors[f"loss of step {step}"] = abs(float(total) / copies - loss) / loss
    result = strategy.step(run, Clip(norm=clip, value=None))
    assert result.grad_norm is not None
    errors[f"norm of step {step}"] = abs(float(result.grad_norm) - norm) / norm
    return errors
