"""The exporter ``dcp``: model and optimizer as ``torch.distributed.checkpoint`` loads them, on
any number of ranks.
"""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict

from distcore import ConfigError, TrainedModel
from distcore.checkpoint import Checkpoint
from distcore.model import freeze, optimizer_factory

exempt = {
    "has-the-task-files": "it is for trainers that have the task's files",
    "says-where-it-is-from": "torch.distributed.checkpoint has no place for it",
    "same-again": "torch writes a random number into .metadata",
}
"""Laws of exporters that do not hold, with reasons."""


def export(trained: TrainedModel, to: Path, merged: bool) -> None:
    """Write ``model`` and ``optimizer``, as ``get_state_dict`` of torch names them, to
    the new folder ``to``.

    The weights are those that were trained, not their moving average. Raises ConfigError for a run
    with LoRA, whose checkpoint has no whole model, and OSError.
    """
    if trained.config.lora.rank is not None:
        raise ConfigError(
            "--format dcp: not of a run with --lora, which trained no whole model; leave out"
            " --format"
        )
    module, checkpoint = trained.module, Checkpoint(trained.checkpoint)
    freeze(trained.config, module)
    optimizer = optimizer_factory(trained.config)(module)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            value = checkpoint[f"model/{name}"]
            parameter.copy_(value)
            if bool(parameter.isinf().any()) and not bool(value.isinf().any()):
                raise ConfigError(
                    f"--dtype: {name} has values that would become infinite; leave out --dtype for"
                    " fp32"
                )
            prefix = f"optimizer/{name}/"
            own = {
                key.removeprefix(prefix): checkpoint[key]
                for key in checkpoint
                if key.startswith(prefix)
            }
            if own:
                optimizer.state[parameter] = own
    rates = checkpoint.job_state()["learning_rates"]
    for group, rate in zip(optimizer.param_groups, rates, strict=False):
        group["initial_lr"], group["lr"] = group["lr"], rate  # as torch's schedules keep the peak
    weights, state = get_state_dict(module, optimizer)
    try:
        with warnings.catch_warnings():
            # one process saves, as asked
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            state_dict_saver.save(
                {"model": weights, "optimizer": state}, checkpoint_id=to, no_dist=True
            )
    except CheckpointException as error:
        # no Exception, so that nothing else would make a line of it
        ((reason, _),) = error.failures.values()
        raise OSError(str(reason)) from error
    if trained.is_average:
        return  # the card of the run has the loss of the average, and this has what was trained
    trained.prove("torch.distributed.checkpoint", partial(_load, to, module))


def _load(to: Path, module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` with the weights in the folder ``to``."""
    again = copy.deepcopy(module)
    weights, _ = get_state_dict(again, ())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        state_dict_loader.load({"model": weights}, checkpoint_id=to, no_dist=True)
    again.load_state_dict(weights)
    return again.float()
