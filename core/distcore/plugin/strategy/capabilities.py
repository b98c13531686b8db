"""The declarations of a strategy: the core refuses an unsupported config
before any process starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import nn

    from distcore.config import RunConfig

SPEC_VERSION = 3
"""Version of the hook specs. It increases when a hook is called at another time, or an
answer means something else.
"""
OLDEST_SPEC_VERSION = 2
"""The oldest version whose strategies still work unchanged: all later fields have defaults."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Capabilities:
    """The features that a strategy supports. The core refuses any other
    config before processes start.
    """

    spec_version: int
    """The hook-spec version that the strategy was written for.

    Write the number itself: ``SPEC_VERSION`` would claim support for every later version, too.
    """
    processes: Literal["one", "many"] = "many"
    """``one``: it runs in a single process (``--nproc 1``). ``many``: one process per rank."""
    devices: frozenset[str] | None = None
    """Kinds of device (``torch.device.type``) that it runs on; ``None``: any that torch
    has a backend for.
    """
    precisions: frozenset[str] = frozenset({"fp32", "bf16", "fp16"})
    """Values of ``--precision`` that it supports."""
    optimizers: frozenset[str] = frozenset({"adamw"})
    """Accepted values of ``optimizer.name``, whatever the optimizer needs.

    A name that is no entry point of ``distcore.optimizers`` is the strategy's own optimizer, with
    the options of adamw. Its ``wrap_model`` takes the parameter groups from the optimizer of the
    factory.
    """
    other_optimizers: Literal["none", "elementwise", "all"] = "none"
    """Other accepted optimizers: none, those declared to step each element by itself, or all."""
    launchers: frozenset[str] | None = None
    """Names of the launchers that can start its processes; ``None``: any."""
    gradients: Literal["mean", "sum"] = "mean"
    """``mean`` or ``sum``: the gradients after a step's last ``backward``, over ranks."""
    ranks_per_shard: int = 1
    """Number of ranks that train on the same rows, such as a tensor- or pipeline-parallel group."""
    row_masks: bool = False
    """True if ranks of one data shard tell ``RowMasks`` which parts of a row they compute, so
    that masks are whole.
    """
    shards_parameters: bool = False
    """True if parameters are sharded over ranks, so that every rank must run the same
    number of forward passes.
    """
    calls_any_time: bool = True
    """False where only ``train_step`` can call the model, as in a pipeline.

    Tasks with frozen models or a loss over the global batch are refused then.
    """
    phases: bool = False
    """True if a step leaves parameters without a gradient as they are, so that a task
    can train in phases.

    Its backward pass must also accept that other parameters have a gradient each time.
    """
    why_not_phases: str = ""
    """Why ``phases`` is false, for the line that refuses such a
    task: ``needs strategy_options.find_unused=true``.
    """
    own_steps: bool = False
    """True if a task may make a step itself: several passes, and parameters that
    it moves between them.

    After the last backward pass ``grad`` of each parameter must be that of the global batch,
    whole or a DTensor.
    """
    inner_gradients: Literal["all", "first", "none"] = "all"
    """Gradients that a task's loss or metric may take itself, by ``torch.autograd.grad``.

    ``first``: those without a gradient of their own, so no ``create_graph=True``. A run that takes
    others is refused in its first pass, with one line.
    """
    lacks: frozenset[
        Literal["sparse gradients", "complex parameters", "parameters without elements"]
    ] = frozenset()
    """Kinds of trained parameters that its backend cannot take; a model that has
    one is refused by name.
    """
    hides_gradients: bool = False
    """True if no parameter has the gradient of the global batch in ``grad`` between the
    last ``backward`` and ``step``.

    An extension that wraps ``step`` could not change it, and is refused unless it
    says ``only_looks = True``.
    """
    forward_cost: float = 1.0
    """The overhead of one extra micro-batch, as a multiple of its overhead in one process.

    More than 1 if ranks communicate in every micro-batch, not only in the last of a step. The core
    then cuts a step into fewer micro-batches.
    """
    owns: frozenset[str] = frozenset()
    """Duties that the strategy takes over from the core:
    ``precision``, ``schedule``, ``optimizer``.

    ``optimizer``: it always steps the optimizer from its ``wrap_model``; an extension
    must not replace it.
    """
    own_values: Mapping[str, Any] = field(default_factory=dict)
    """What it trains with in place of the config's ``schedule`` or ``optimizer``, by
    these keys: JSON values.

    They belong to the job: checkpoints keep them, a resume under a strategy with others is refused,
    and ``distcore compare`` compares them. Without an entry the config's values are trained with.
    """
    ema: bool = False
    """True if the core can keep a moving average of the weights by
    ``save_checkpoint`` and ``load_checkpoint``.

    The first then returns the same tensors in every step, quickly, and a rank holds all that the
    second asks it for.
    """
    saves_alone: bool = False
    """True if ranks that are left may hold the whole state, and ``save_checkpoint``
    returns it without a collective.

    Ranks whose peers are gone then save the last whole step. The strategy changes weights in
    ``step`` alone, and by the optimizer.
    """
    compiles: frozenset[str] = frozenset()
    """Accepted values of ``--compile``: ``on`` for the whole model, ``regions``
    for each repeated block.

    Without ``on`` a run with ``--compile on`` compiles the blocks. The core compiles the
    ``forward`` of modules before ``wrap_model``, so a strategy's module hooks are not compiled.
    """
    why_not_compiled: str = ""
    """Why ``compiles`` is empty, for the one line that refuses a run:
    ``replicates modules over devices``.
    """
    collectives_per_step: int | None = None
    """Collectives per optimizer step for a model that fits in one gradient bucket;
    ``None`` if not constant.
    """
    deterministic: bool = True
    """False if two runs of one config may round differently, for example because timing decides
    the order of sums.
    """
    exact: frozenset[str] = frozenset()
    """Values of ``--precision`` in which it keeps the bits of ``--exact``.

    ``step`` then finds in ``grad`` the whole summed gradient of each parameter, which neither
    ``accumulate`` nor ``backward`` was called for, and may only clip it and step the optimizer.
    With ``shards_parameters`` both are called, for each block: units of torch's ``fully_shard`` add
    gradients up in fp64, in which the core has them arrive, and ``step`` finds the rank's shards.
    It says nothing where several ranks share a data shard: see ``keeps_bits``.
    """
    limits: tuple[str, ...] = ()
    """Known limits, one sentence each; ``distcore strategies NAME`` shows them."""
    exempt: Mapping[str, str] = field(default_factory=dict)
    """Laws (``gradient``) or single cases (``unused-parameters``) that it does not keep,
    mapped to the reason.

    ``distcore check`` shows the reason; a case that holds all the same, and a law without a case
    that fails, are errors. If they depend on the strategy's options, make ``capabilities`` a
    property.
    """

    def takes_optimizer(self, name: str, elementwise: bool) -> bool:
        """Return True if it accepts the optimizer ``name``, which declares ``elementwise``."""
        others = {"none": False, "elementwise": elementwise, "all": True}[self.other_optimizers]
        return name in self.optimizers or others

    def keeps_bits(self, precision: str) -> bool:
        """Return True if ``--exact`` keeps the bits of a run in ``precision``.

        Ranks that share a data shard add up parts of one gradient, in an order of their own.
        """
        return precision in self.exact and self.ranks_per_shard == 1


@runtime_checkable
class ChecksConfig(Protocol):
    """A strategy or extension with reasons to refuse a config that
    ``Capabilities`` cannot express.
    """

    def check_config(self, config: RunConfig) -> None:
        """Raise DistcoreError, one line, for a config that cannot work; called
        before any process starts.

        In ``config`` every 'auto' is already replaced, except those that need the data.
        """


@runtime_checkable
class ChecksEvaluation(Protocol):
    """A strategy with a check of its own for runs that only evaluate,
    called instead of ``check_config``.
    """

    def check_evaluation(self, config: RunConfig) -> None:
        """Raise DistcoreError, one line, for a config that cannot be evaluated."""


@runtime_checkable
class ChecksModel(Protocol):
    """A strategy that works with some models only."""

    def check_model(self, config: RunConfig, meta_model: nn.Module) -> None:
        """Raise DistcoreError, one line, for a model that it cannot train; called
        before any process starts.

        ``meta_model`` is the model on the meta device. The ranks must check a model that
        cannot be built there.
        """


@runtime_checkable
class FillsConfig(Protocol):
    """A strategy whose own config file also sets values of distcore's config."""

    def fill_config(self, config: RunConfig) -> Mapping[str, Any]:
        """Return values by dotted key of ``RunConfig``; each is used if the user did
        not set that key.

        Called twice: with the config as the user gave it, and with its device, ``nproc`` and
        precision known. If the user set a key and the file contradicts, ``check_config`` should
        raise.
        """
