"""Refuse contradictory settings, and requests that Accelerate would not honor,
before any rank starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields

from distcore import ConfigError, RunConfig
from distcore_accelerate.options import AccelerateOptions
from distcore_accelerate.settings import OF_LAUNCHER, Settings

OF_BACKEND: dict[str, tuple[str, ...]] = {
    "ddp": ("find_unused", "bucket_mb"),
    "fsdp2": ("reshard_after_forward", "cpu_offload", "wrap_classes"),
    "deepspeed": ("zero_stage", "deepspeed_config"),
}
"""The options that only one backend reads."""


def check_options(options: AccelerateOptions, backend: str) -> None:
    """Raise ConfigError, one line, for an option that has no effect because
    another backend reads it.
    """
    defaults = {field.name: field.default for field in fields(AccelerateOptions)}
    for owner, names in OF_BACKEND.items():
        for name in names:
            if owner != backend and (value := getattr(options, name)) != defaults[name]:
                raise ConfigError(
                    f"strategy_options.{name} = {value!r}: has no effect on the backend"
                    f" {backend!r}; take it out, or use strategy_options.backend={owner}"
                )


def check_settings(
    settings: Settings, config: RunConfig, environ: Mapping[str, str] = os.environ
) -> None:
    """Raise ConfigError, one line, for a device, number of ranks or precision
    that contradicts the settings.
    """
    _check_machines(settings, environ)
    _check_launcher(settings, environ)
    _check_device(settings, config, environ)
    _check_number(settings, config, environ)
    if settings.precision not in (None, config.precision):
        raise ConfigError(
            f"{settings.source}: mixed_precision says {settings.precision}, but precision ="
            f" {config.precision!r}; use --precision {settings.precision}, or change the file"
        )


def _check_machines(settings: Settings, environ: Mapping[str, str]) -> None:
    """Refuse a file for several machines in a command that would start all its
    ranks on this one.
    """
    if settings.machines == 1 or "RANK" in environ or "OMPI_COMM_WORLD_SIZE" in environ:
        return
    processes, machines = settings.processes, settings.machines
    per_machine = processes // machines if processes and processes % machines == 0 else "N"
    raise ConfigError(
        f"{settings.source}: num_machines = {machines}, but this command starts ranks on one"
        f" machine; run it on each machine with --launcher torchrun:{settings.address} --nodes"
        f" {machines} --nproc {per_machine}, or take it out"
    )


def _check_launcher(settings: Settings, environ: Mapping[str, str]) -> None:
    """Refuse what only ``accelerate launch`` would do, in a command that
    starts its ranks itself.
    """
    if "RANK" in environ or "OMPI_COMM_WORLD_SIZE" in environ:
        return
    for key in settings.of_launcher:
        raise ConfigError(
            f"{settings.source}: {key} is for accelerate launch; here use {OF_LAUNCHER[key]}, or"
            " take it out"
        )


def _check_device(settings: Settings, config: RunConfig, environ: Mapping[str, str]) -> None:
    """Raise ConfigError, one line, if the run's device is another one than the file's."""
    kind = settings.distributed_type
    source = settings.source
    if settings.backend == "fsdp2" and config.device == "cpu":
        setting = "strategy_options.backend = 'fsdp2'"
        if kind:
            setting = f"{source}: distributed_type = 'FSDP'"
        raise ConfigError(
            f"{setting}: on a CPU Accelerate silently gives DDP instead; use --strategy fsdp, which"
            " shards"
        )
    if kind == "MULTI_GPU" and config.device == "cpu" and not settings.use_cpu:
        raise ConfigError(
            f"{source}: distributed_type = 'MULTI_GPU', but the run is on the CPU: there is no GPU,"
            " or device = 'cpu'; change it to MULTI_CPU"
        )
    if (kind == "MULTI_CPU" or settings.use_cpu) and config.device == "cuda":
        setting = "use_cpu = true" if settings.use_cpu else "distributed_type = 'MULTI_CPU'"
        raise ConfigError(
            f"{source}: {setting}, but device = 'cuda'; use --set device=cpu, or change the file"
        )
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if config.device == "cuda" and settings.gpu_ids is not None and visible != settings.gpu_ids:
        raise ConfigError(
            f"{source}: gpu_ids = {settings.gpu_ids!r} is for accelerate launch; here set "
            f"CUDA_VISIBLE_DEVICES={settings.gpu_ids}"
        )


def _check_number(settings: Settings, config: RunConfig, environ: Mapping[str, str]) -> None:
    """Raise ConfigError, one line, if there are not as many ranks as the file or launcher says."""
    processes = settings.processes
    setting = f"num_processes = {processes}"
    if settings.distributed_type == "NO":
        processes = 1
        setting = "distributed_type = 'NO'"
    if processes not in (None, config.nproc):
        raise ConfigError(
            f"{settings.source}: {setting}, but there are {config.nproc} rank(s); use --nproc"
            f" {processes}, or change the file"
        )
    # accelerate launch sets these for several processes on a CPU, but then starts only one.
    alone = config.nproc == 1 and "RANK" not in environ and "OMPI_COMM_WORLD_SIZE" not in environ
    if alone and "ACCELERATE_USE_CPU" in environ and "MASTER_ADDR" in environ:
        raise ConfigError(
            "accelerate launch was told to start several processes and started one, as it does on a"
            " CPU; add --nproc N to distcore train, or use accelerate launch --multi_gpu"
        )
