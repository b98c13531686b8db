"""The keys of a config: their types, bounds, defaults and descriptions."""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from distcore import registry
from distcore.config.given_rows import with_rows_in_files
from distcore.config.key_help import KeysOnly, described_by_keys
from distcore.config.keys import with_new_names, with_preset
from distcore.config.messages import explain
from distcore.config.short_keys import with_full_keys
from distcore.config.values import check_tree, in_words
from distcore.errors import ConfigError, print_uncaught_on_one_line

Auto = Literal["auto"]
Level = Literal["debug", "info", "warning", "error"]
_OUTERMOST: ContextVar[bool] = ContextVar("_OUTERMOST", default=True)
"""False while the trees inside another one are validated: it is the outermost that
names the dotted key.
"""


class _Tree(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @model_validator(mode="wrap")
    @classmethod
    def _report_in_one_line(
        cls, given: Any, validate: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        """Raise ConfigError in place of pydantic's ValidationError; the context says
        where ``given`` is from.
        """
        if not _OUTERMOST.get():
            return validate(given)
        where: dict[str, Any] = info.context or {"source": cls.__name__, "changes": ()}
        given = cls._without_rows(given)
        check_tree(given, where["source"])
        token = _OUTERMOST.set(False)
        try:
            return validate(given)
        except ValidationError as error:
            print_uncaught_on_one_line()  # in a script this may come before any other call
            raise ConfigError(explain(cls, error, given, **where)) from None
        finally:
            _OUTERMOST.reset(token)

    @classmethod
    def _without_rows(cls, given: Any) -> Any:
        """Return ``given`` without rows of data, which only a whole config may have."""
        return given

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_another(cls, given: object, info: ValidationInfo) -> object:
        return in_words(given, cls.model_fields[str(info.field_name)].annotation)


class GroupRule(_Tree):
    """Parameters that the optimizer steps with settings of their own."""

    match: str = Field(
        description=(
            "regular expression: found in a parameter's name; the first group that fits counts"
        )
    )
    lr: float | None = Field(
        None, gt=0, description="peak learning rate; layer_decay does not change it"
    )
    lr_scale: float | None = Field(None, gt=0, description="factor of the learning rate")
    weight_decay: float | None = Field(
        None, ge=0, description="weight decay; biases and normalizations keep none"
    )

    @field_validator("match")
    @classmethod
    def _is_regex(cls, given: str) -> str:
        try:
            re.compile(given)
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return given

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        given = [
            key for key in ("lr", "lr_scale", "weight_decay") if getattr(self, key) is not None
        ]
        if not given or {"lr", "lr_scale"} <= set(given):
            raise ValueError(
                "expected lr or lr_scale, or weight_decay, or one of the two and weight_decay"
            )
        return self


class Optimizer(_Tree):
    """The optimizer; biases and normalization weights get no weight decay.

    Its options are further keys of this tree, such as `betas` and
    `eps` of adamw: [options](options.md#optimizers).
    """

    model_config = ConfigDict(extra="allow")

    name: str = Field("adamw", description="name, or file.py:Class; a strategy may offer its own")
    weight_decay: Annotated[float, Field(ge=0)] | Auto = Field(
        "auto",
        description="what each step takes away of the weights; auto: the optimizer's own default",
    )
    groups: list[GroupRule] = Field(
        default_factory=list,
        description=(
            "parameters with rates of their own: `match`, a regular expression, with `lr` or"
            " `lr_scale`, `weight_decay`"
        ),
    )
    layer_decay: float | None = Field(
        None,
        gt=0,
        le=1,
        description="factor of the learning rate from each repeated block to the one below it",
    )

    @property
    def options(self) -> dict[str, Any]:
        """The options of the named optimizer; all of them once the config is resolved."""
        decay = {} if self.weight_decay == "auto" else {"weight_decay": self.weight_decay}
        return decay | (self.model_extra or {})


class Schedule(_Tree):
    """Learning rate over the run: [schedules](../schedules.md).

    Options of a schedule are further keys of this tree.
    """

    model_config = ConfigDict(extra="allow")

    name: str = Field(
        "linear",
        description=(
            "linear, cosine, constant, constant_with_warmup, polynomial …, or file.py:function"
        ),
    )
    warmup_steps: Annotated[int, Field(ge=0)] | Auto = Field(
        "auto",
        description=(
            "optimizer steps in which the rate rises to its peak; a number below 1 is a"
            " warmup_ratio; auto: warmup_ratio of the run"
        ),
    )
    warmup_ratio: float = Field(
        0.0, ge=0, le=1, description="warm-up as a part of the run's optimizer steps, 0 to 1"
    )
    interval: Literal["step", "epoch"] = Field(
        "step",
        description=(
            "when the rate changes; epoch: it stays through an epoch as it was at its first step"
        ),
    )
    decay_ratio: float = Field(
        0.1,
        gt=0,
        le=1,
        description="last part of the steps, in which warmup_stable_decay falls to 0",
    )

    @property
    def options(self) -> dict[str, Any]:
        """The options of the named schedule; all of them once the config is resolved."""
        return dict(self.model_extra or {})

    @model_validator(mode="before")
    @classmethod
    def _part_of_the_run(cls, given: Any) -> Any:
        try:
            part = float(given["warmup_steps"])
        except (TypeError, KeyError, ValueError):
            return given
        return {**given, "warmup_steps": "auto", "warmup_ratio": part} if 0 < part < 1 else given


class Clip(_Tree):
    """Gradient clipping on the whole gradient, as one process would do it."""

    norm: float | None = Field(1.0, gt=0, description="global L2 norm; null: off")
    value: float | None = Field(None, gt=0, description="absolute value of each element; null: off")

    @field_validator("norm", "value", mode="before")
    @classmethod
    def _off(cls, given: object) -> object:
        return None if given == "off" or given is False else given  # YAML reads off as false


class LoRA(_Tree):
    """Small trained matrices next to frozen layers (peft); see docs/lora.md."""

    rank: int | None = Field(
        None, ge=1, description="rows of each pair of matrices; null: the whole model is trained"
    )
    alpha: Annotated[float, Field(gt=0)] | Auto = Field(
        "auto",
        description="what the matrices add is multiplied by alpha / rank; auto: twice the rank",
    )
    dropout: float = Field(
        0.0, ge=0, lt=1, description="probability of dropout before the matrices"
    )
    targets: str | tuple[str, ...] = Field(
        "all-linear",
        description=(
            "layers that get them: a regular expression of whole names, or a list of how names end;"
            " all-linear: every linear layer but the head"
        ),
    )
    base: Literal["auto", "file", "fp32", "nf4"] = Field(
        "auto",
        description=(
            "frozen layers: in the dtype of their files, with the results of fp32; in fp32; or in 4"
            " bits; auto: as the files, for model types where it was compared"
        ),
    )


class EMA(_Tree):
    """An exponential moving average of the weights, which is evaluated and
    exported in their place.
    """

    decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description=(
            "part of the average that stays at each optimizer step, such as 0.999; null: off"
        ),
    )
    warmup: bool = Field(
        True,
        description=(
            "at first a smaller decay, (1 + step) / (10 + step), which soon forgets the first"
            " weights"
        ),
    )


class Loader(_Tree):
    """How rows become batches."""

    workers: int = Field(0, ge=0, description="processes that collate; 0: in the rank itself")
    length_grouping: Literal["batch", "window", "auto"] = Field(
        "batch",
        description=(
            "batch: rows of like length share a micro-batch; window: also sort across batches;"
            " auto: window where that is faster, which it is not without padding in fp32 on a CPU"
        ),
    )
    window: int = Field(
        50, ge=2, description="global batches that length_grouping: window sorts together"
    )
    forward_tokens: Annotated[int, Field(ge=0)] | Auto = Field(
        "auto",
        description=(
            "what one more forward pass costs, in tokens, where micro-batches are cut by tokens;"
            " auto: as device and strategy have it"
        ),
    )


class Checkpoints(_Tree):
    """The checkpoints that a run writes, in addition to the one at its end."""

    best: str | None = Field(
        "auto",
        description=(
            "metric of the task whose best evaluation is kept too; SET/METRIC: of one of several"
            " evaluation sets, else of the first; auto: loss, or the task's first; null: off"
        ),
    )
    keep_last: int = Field(2, ge=1, description="newest checkpoints to keep")
    asynchronous: bool = Field(
        True, description="write while training goes on, from a copy in main memory"
    )


EXTENSIONS_ON = ("progress", "metrics")
"""The core's extensions that are on by default, as others are by entry point. Naming
another leaves them on.
"""


@described_by_keys
class RunConfig(_Tree, metaclass=KeysOnly):
    """Everything that defines a run. Every field is a flag or reachable by ``--set a.b=c``.

    Frozen. An unknown key or an invalid value raises ConfigError, one line with the dotted key. A
    flag of ``distcore train``, also one of the task, is a key by its name: ``text_column="body"``.
    """

    preset: Literal["fast"] | None = Field(
        None, description="values to start from, under all others"
    )
    strategy: str = Field("single", description="how the model is spread over ranks")
    strategy_options: dict[str, Any] = Field(
        default_factory=dict, description="options of the strategy"
    )
    nproc: Annotated[int, Field(ge=1)] | Auto = Field(
        "auto",
        description=(
            "processes to start on this machine; auto: one per accelerator, or one where there is"
            " none"
        ),
    )
    max_restarts: int = Field(
        0, ge=0, description="times to start afresh, from the newest checkpoint, a job that died"
    )
    device: str = Field(
        "auto", description="device type, by torch's name; auto: the accelerator, if any, else cpu"
    )
    task: str = Field(
        "auto", description="what is trained: a name, or file.py:Class; auto: the installed default"
    )
    task_options: dict[str, Any] = Field(
        default_factory=dict, description="options, listed by distcore tasks NAME"
    )
    epochs: int = Field(1, ge=1, description="times over the training rows")
    max_steps: int | None = Field(None, ge=1, description="optimizer steps; overrides --epochs")
    global_batch_size: int = Field(
        32, ge=1, description="rows of one optimizer step, over all ranks"
    )
    micro_batch_size: Annotated[int, Field(ge=1)] | Auto = Field(
        "auto",
        description=(
            "most rows of one forward pass on one rank; auto: as many as micro_batch_tokens allows"
        ),
    )
    micro_batch_tokens: int | None = Field(
        None,
        ge=1,
        description=(
            "most tokens of one forward pass on one rank, padding included; null: as suits the"
            " device, or what micro_batch_size says alone"
        ),
    )
    padding_free: Literal["auto", "on", "off"] = Field(
        "auto",
        description=(
            "compute the rows of a micro-batch as one sequence of tokens, without padding; auto:"
            " where that is known to be exact and faster"
        ),
    )
    lr: Annotated[float, Field(gt=0)] | Auto = Field(
        "auto", description="peak learning rate; auto: what the task suggests"
    )
    optimizer: Optimizer = Field(Optimizer(), description="the optimizer and its settings")
    schedule: Schedule = Field(Schedule(), description="learning rate over the run")
    clip: Clip = Field(Clip(), description="gradient clipping")
    ema: EMA = Field(EMA(), description="moving average of the weights")
    precision: Literal["fp32", "bf16", "fp16", "auto"] = Field(
        "fp32",
        description=(
            "of the forward pass; auto: bf16 where the device has its arithmetic, else fp32"
        ),
    )
    eval_precision: Literal["same", "fp32", "bf16", "fp16"] = Field(
        "same",
        description="of the forward pass in evaluations and predictions; same: that of precision",
    )
    tf32: bool = Field(False, description="multiply fp32 matrices in TF32, on GPUs that have it")
    compile: Literal["off", "on", "regions"] = Field(
        "off",
        description=(
            "torch.compile: of the model, or of each of its repeated blocks, which takes less time"
        ),
    )
    dropout_masks: Literal["auto", "row", "rank"] = Field(
        "auto",
        description=(
            "masks follow from the row, and so are equal at any number of ranks and micro-batches,"
            " or from the rank; auto: from the row on a CPU without compile, unless a resumed"
            " checkpoint has the other"
        ),
    )
    gradient_checkpointing: bool = Field(
        False,
        description=(
            "compute activations again in the backward pass, not keep them: less memory, more time"
        ),
    )
    loader: Loader = Field(Loader(), description="how rows become batches")
    freeze: str | None = Field(
        None, description="regular expression in the names of parameters that are not trained"
    )
    lora: LoRA = Field(LoRA(), description="train an adapter instead of the whole model")
    seed: int = Field(
        0,
        ge=0,
        lt=2**32,
        description="of the weights, the order of the rows and dropout: same seed, same run",
    )
    out: str | None = Field(None, description="run folder; default: a new one under runs/")
    overwrite: bool = Field(
        False, description="begin anew in a run folder that is in use: its run is set aside"
    )
    resume: str | None = Field(None, description="auto, or the path of a checkpoint")
    resume_changed: list[str] | None = Field(
        None, description="keys that may differ from the resumed checkpoint's"
    )
    save_every: int = Field(
        0, ge=0, description="optimizer steps between checkpoints; 0: at the end only"
    )
    eval_every: int = Field(
        0, ge=0, description="optimizer steps between evaluations, beside epoch ends; 0: none"
    )
    eval_at_epoch_end: bool = Field(
        True, description="evaluate at epoch ends, too; a run always evaluates at its end"
    )
    patience: int = Field(
        0,
        ge=0,
        description=(
            "evaluations in a row without a better one, by checkpoints.best, that end a run; 0:"
            " never"
        ),
    )
    deterministic: bool = Field(
        False,
        description=(
            "only algorithms that repeat themselves bit for bit; an operation without one ends"
            " the run"
        ),
    )
    exact: int | None = Field(
        None,
        ge=1,
        description=(
            "the same bits at any number of ranks: each step is cut into so many blocks, whatever"
            " the ranks, which are at most as many; null: off"
        ),
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="with exact: computing threads of each rank, which are part of its arithmetic",
    )
    log_every: int = Field(10, ge=1, description="optimizer steps between log lines")
    checkpoints: Checkpoints = Field(Checkpoints(), description="which checkpoints are kept")
    extensions: dict[str, bool | dict[str, Any]] = Field(
        default_factory=dict, description="name, or file.py:Class, to true, false or its options"
    )
    data_guard_steps: int = Field(
        2,
        ge=0,
        description="first steps in which ranks compare rows and weights, and collate again",
    )
    prove: Literal["auto", "on", "off"] = Field(
        "auto",
        description=(
            "compare the first two steps with one plain process, and end the run if they differ;"
            " auto: for tasks without laws of their own, where it is cheap"
        ),
    )
    timeout: int = Field(600, ge=1, description="seconds that a rank waits for the others")
    log_level: Level = Field("info", description="least level of messages of rank 0")
    log_level_replica: Level = Field(
        "warning", description="least level of messages of the other ranks"
    )

    @property
    def pads_rows(self) -> bool:
        """True unless the model computes rows without padding."""
        return self.padding_free != "on"

    @classmethod
    def _without_rows(cls, given: Any) -> Any:
        """Return ``given`` with the path of each table of rows in its place."""
        return with_rows_in_files(given) if isinstance(given, dict) else given

    @model_validator(mode="before")
    @classmethod
    def _aliases_and_preset(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        return with_preset(with_full_keys(with_new_names(given), cls.model_fields))

    @field_validator("resume_changed", mode="before")
    @classmethod
    def _with_commas(cls, given: object) -> object:
        return (
            [key.strip() for key in given.split(",") if key.strip()]
            if isinstance(given, str)
            else given
        )

    @field_validator("extensions", mode="before")
    @classmethod
    def _on_unless_switched_off(cls, given: object) -> object:
        on = dict.fromkeys((*EXTENSIONS_ON, *registry.entries("default_extensions")), True)
        return on | given if isinstance(given, dict) else given
