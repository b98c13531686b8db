"""Checkpoints that do not depend on strategy or world size (format: docs/checkpoint-format.md).

A folder ``step-NNNNNNNN/`` has safetensors files that the ranks wrote in parallel, ``state.json``,
and a manifest with size and SHA-256 of every file. It appears complete, by one rename, or not at
all. Nothing is ever unpickled.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distcore.checkpoint.commit import begin, clean_up, commit, discard
from distcore.checkpoint.distance import difference
from distcore.checkpoint.files import Files
from distcore.checkpoint.job_state import (
    changed_masks,
    check_base,
    check_frozen,
    check_job,
    check_progress,
    collect_job_state,
    keeps_rows,
    other_data,
    restore,
    saved_progress,
)
from distcore.checkpoint.manifest import MANIFEST
from distcore.checkpoint.provenance import provenance_of
from distcore.checkpoint.read_back import check_is_model
from distcore.checkpoint.reader import Checkpoint, Evaluated, weights_of
from distcore.checkpoint.retention import checkpoints_in, newest_whole, remove_newer
from distcore.checkpoint.row_content import RowContent
from distcore.checkpoint.writer import (
    FILE_BYTES,
    STATE_KINDS,
    blocks_to_write,
    state_to_save,
    write_share,
)
from distcore.distributed.agreement import broadcast_from_main, on_all_ranks
from distcore.errors import CheckpointError, DamagedError
from distcore.model import averages
from distcore.plugin.strategy.contract import Progress, Run, World
from distcore.plugin.strategy.extra_state import extra_state_names
from distcore.plugin.strategy.hooks import Hooks
from distcore.plugin.task.task import OnResume

log = logging.getLogger("distcore")
# For a task without on_resume: none of its options may change.
NO_RULES: Mapping[str, OnResume] = {}
__all__ = ["Checkpoint", "checkpoints_in", "difference", "find", "provenance_of"]
"""The names that any distribution may import, for tools that read checkpoints."""


def save(
    run: Run,
    hooks: Hooks,
    progress: Progress,
    folder: Path,
    facts: dict[str, Any],
    files: Files | None = None,
    limit: int = FILE_BYTES,
    proves: bool = False,
) -> Path:
    """Commit ``folder/step-NNNNNNNN`` and return its path; every rank calls.

    ``facts`` are JSON values that are added to state.json, ``limit`` bounds a tensor file, in
    bytes. With ``proves`` the state is compared with the module, and the files are read back, see
    ``read_back``. Raises CheckpointError on all ranks if it fails on one, for example on a full
    disk, or if the ranks' pieces leave gaps or overlap; then no new checkpoint exists.
    """
    files = files or Files()
    final = folder / f"step-{progress.step:08d}"
    rank, size = run.world.rank, run.world.size
    failure = f"checkpoint {final} could not be written"
    state = state_to_save(run, hooks)
    if proves:
        prove = partial(check_is_model, run, state, hooks.computed_weights)
        on_all_ranks(run, hooks, failure, prove)
    blocks = blocks_to_write(state, rank, size, limit)
    job_state = collect_job_state(run, progress) | facts

    write = partial(write_share, files, final, blocks, rank, limit, proves)
    start = None
    finish = None
    if run.world.is_main:
        start = partial(begin, files, final)
        finish = partial(commit, files, final, range(size), job_state)

    try:
        # Each of the three also is a barrier: no rank continues before all are done.
        on_all_ranks(run, hooks, failure, start)
        on_all_ranks(run, hooks, failure, write)
        on_all_ranks(run, hooks, failure, finish)
    except CheckpointError:
        if run.world.is_main:
            discard(files, final)
        raise
    return final


def write_checkpoint(path: Path, tensors: Mapping[str, Tensor], job_state: dict[str, Any]) -> None:
    """Commit the checkpoint ``path`` from this process alone.

    ``tensors`` has whole tensors by name, ``job_state`` the contents of state.json. Raises
    CheckpointError if that fails, or for a name or dtype that a checkpoint cannot have; then there
    is no checkpoint.
    """
    files = Files()
    try:
        begin(files, path)
        blocks = blocks_to_write({**tensors}, rank=0, size=1)
        write_share(files, path, blocks, rank=0)
        commit(files, path, [0], job_state)
    except (OSError, CheckpointError) as error:
        discard(files, path)
        raise CheckpointError(f"checkpoint {path} could not be written: {error}") from None


def find(resume: str, out: Path) -> Path | None:
    """Return the checkpoint that ``--resume`` means; ``None`` if ``auto`` finds none in ``out``.

    ``auto`` is the newest checkpoint with a valid manifest whose files exist in full size. Raises
    CheckpointError if there are checkpoints and all are damaged, or if ``resume`` is a path without
    a checkpoint.
    """
    if resume == "auto":
        return newest_whole(out / "checkpoints")
    path = Path(resume)
    if not (path / MANIFEST).is_file():
        wanted = "name a folder checkpoints/step-NNNNNNNN of a run, or use --out RUN --resume auto"
        raise CheckpointError(f"resume = {resume!r}: no checkpoint there; {wanted}")
    return path


def resume(
    run: Run,
    hooks: Hooks,
    asked: str | None,
    data: str | None = None,
    on_resume: Mapping[str, OnResume] = NO_RULES,
    content: RowContent | None = None,
) -> tuple[Path, Progress, dict[str, Any]] | None:
    """Resume from ``asked``, which is ``auto`` or a path; return path, progress and state.json.

    The result is ``None`` for a new run.

    Every rank calls. First removes the unfinished checkpoints of a killed process. If a checkpoint
    turns out to be damaged during the load, ``auto`` falls back to an earlier one; a path does not.
    For the other arguments see ``load``.
    """
    out = Path(str(run.config.out))
    if run.world.is_main:
        clean_up(Files(), out / "checkpoints")
    wanted = asked if run.world.is_main else None
    newest = on_all_ranks(run, hooks, "resume", lambda: find(wanted, out) if wanted else None)
    shared = broadcast_from_main(run, hooks, str(newest or ""))
    if not shared:
        if wanted:
            log.info("no checkpoint in %s: starting at step 0", out)
        return None
    path = Path(shared)
    earlier: list[Path] = []
    if asked == "auto":
        earlier = [other for other in checkpoints_in(path.parent) if other < path]
    while True:
        try:
            progress, job_state = load(run, hooks, path, data, on_resume, content)
            break
        except DamagedError as error:
            if not earlier:
                raise
            log.warning("skipped: %s", error)
            path = earlier.pop(0)
    tidy = partial(remove_newer, out / "checkpoints", path, Files())
    on_all_ranks(run, hooks, "resume", tidy if run.world.is_main else None)
    return path, progress, job_state


def load(
    run: Run,
    hooks: Hooks,
    path: Path,
    data: str | None = None,
    on_resume: Mapping[str, OnResume] = NO_RULES,
    content: RowContent | None = None,
) -> tuple[Progress, dict[str, Any]]:
    """Load the checkpoint at ``path`` into the run; return its progress and its state.json.

    Every file is hashed first, each by one rank. ``data`` is the fingerprint of the run's training
    rows and ``content`` their digest; each is compared if the checkpoint has one, too.
    ``on_resume`` has the task's rules for its options. Raises CheckpointError on all ranks: for a
    damaged file (DamagedError, with its name), or if the checkpoint belongs to another job (with
    the difference).
    """
    open_verified = partial(_open_verified, path, run.world)
    checkpoint = on_all_ranks(run, hooks, f"{path}: damaged", open_verified)
    job_state = checkpoint.job_state()
    check_job(run, job_state, path, data, on_resume)
    if content and keeps_rows(run.config, on_resume) and not content.matches(job_state):
        raise other_data(path)
    check_base(run.base, job_state, path)
    check_frozen(run.frozen, job_state, path)
    progress = saved_progress(job_state, path)
    check_progress(run, job_state, progress, path)
    _check_names(run, hooks, checkpoint)
    hooks.load_checkpoint(run, checkpoint, progress)
    averages.load(run, hooks, checkpoint)
    restore(run, job_state, progress, path)
    if run.world.is_main and (changes := changed_masks(run, job_state, path)):
        log.info(
            "resume: %s: dropout masks change from here on, as they follow from ranks and"
            " micro-batches",
            changes,
        )
    return progress, job_state


def load_weights(run: Run, hooks: Hooks, path: Path) -> str:
    """Load the weights of the checkpoint at ``path``, or their average, for a run without training.

    Returns ``raw`` or ``ema``. Raises CheckpointError.
    """
    open_verified = partial(_open_verified, path, run.world)
    try:
        checkpoint = on_all_ranks(run, hooks, f"{path}: damaged", open_verified)
    except DamagedError as error:
        others = f"distcore checkpoint verify {path.parents[1]} names whole ones, for --step"
        raise DamagedError(f"{error}; {others}") from None
    job_state = checkpoint.job_state()
    check_base(run.base, job_state, path)
    check_frozen(run.frozen, job_state, path)
    _check_names(run, hooks, checkpoint)
    hooks.load_checkpoint(run, Evaluated(checkpoint), saved_progress(job_state, path))
    return weights_of(checkpoint)


def _check_names(run: Run, hooks: Hooks, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError if a tensor of the checkpoint belongs to nothing in the model.

    Loading would leave it out without a word, and the run would go on as another model.
    """
    parameters = {name for name, _ in run.module.named_parameters(remove_duplicate=False)}
    buffers = {name for name, _ in run.module.named_buffers(remove_duplicate=False)}
    model_names = parameters | buffers | set(extra_state_names(run.module))
    names = list(checkpoint)
    is_foreign = []
    for name in names:
        kind, _, rest = name.partition("/")
        # The state of an optimizer is optimizer/PARAMETER/KEY.
        is_optimizer_state = kind == "optimizer" and rest.rpartition("/")[0] in parameters
        is_foreign.append(rest not in model_names and not is_optimizer_state)
    foreign = torch.tensor(is_foreign, dtype=torch.uint8)
    if run.capabilities.ranks_per_shard > 1:
        # A rank may have a part of the model only: foreign is what none of them has.
        mine = {"foreign": foreign[None].to(run.world.device)}
        of_all_ranks = hooks.gather_outputs(run, mine)["foreign"]
        foreign = of_all_ranks.cpu().amin(0)
    if foreign.any():
        name = names[int(foreign.argmax())]
        raise CheckpointError(
            f"{checkpoint.path}: {name!r} belongs to nothing in the model; it is another model's"
        )


def _open_verified(path: Path, world: World) -> Checkpoint:
    """Return the checkpoint at ``path``, after this rank's share of its files was hashed."""
    checkpoint = Checkpoint(path)
    checkpoint.verify(world.rank, world.size)
    return checkpoint


class Tensors(dict[str, Tensor]):
    """Whole tensors in memory, by name; implements ``distcore.SavedState``."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return tuple(self[name].shape)

    def piece(self, name: str, start: int, count: int) -> Tensor:
        """Return elements ``start`` to ``start + count``, flat: shape ``(count,)``."""
        return self[name].reshape(-1)[start : start + count]

    def box(self, name: str, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Return ``size`` elements of the tensor from index ``offset`` on, in each dimension."""
        ranges = zip(offset, size, strict=True)
        slices = tuple(slice(first, first + count) for first, count in ranges)
        return self[name][slices]


def read_tensors(path: Path, kinds: tuple[str, ...] = STATE_KINDS) -> Tensors:
    """Read into memory every tensor whose name starts with one of ``kinds``."""
    checkpoint = Checkpoint(path)
    names = [name for name in checkpoint if name.partition("/")[0] in kinds]
    return Tensors({name: checkpoint[name] for name in names})
