"""The config: one typed tree, from YAML, flags and ``--set``. Importing it does not import torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
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

from distcore.errors import ConfigError, nearest

Auto = Literal["auto"]


class _Tree(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, protected_namespaces=()
    )


class Optimizer(_Tree):
    """AdamW; biases and normalisation weights get no weight decay."""

    name: str = Field("adamw", description="optimizer; a strategy may offer its own")
    weight_decay: float = Field(0.01, ge=0, description="decoupled weight decay, per unit of learning rate")
    betas: tuple[float, float] = Field(
        (0.9, 0.999), description="decay rates of the running means of the gradient and of its square"
    )
    eps: float = Field(1e-8, gt=0, description="added to the denominator of the step, against division by zero")


class Schedule(_Tree):
    """Learning rate over the run, by the names of ``transformers.get_scheduler``."""

    name: str = Field("linear", description="linear, cosine, constant, constant_with_warmup, polynomial …")
    warmup_steps: Annotated[int, Field(ge=0)] | Auto = Field(
        "auto", description="optimizer steps in which the rate rises to its peak; auto: warmup_ratio of the run"
    )
    warmup_ratio: float = Field(0.0, ge=0, le=1, description="warm-up as a part of the run's optimizer steps, 0 to 1")


class Clip(_Tree):
    """Gradient clipping on the whole gradient, as one process would do it."""

    norm: float | None = Field(1.0, gt=0, description="global L2 norm; null: off")
    value: float | None = Field(None, gt=0, description="absolute value of each element; null: off")


class Loader(_Tree):
    """How rows become batches."""

    workers: int = Field(0, ge=0, description="processes that collate; 0: in the rank itself")
    length_grouping: Literal["batch", "window"] = Field(
        "batch", description="batch: rows of like length share a micro-batch; window: also sort across batches"
    )
    window: int = Field(50, ge=2, description="global batches that length_grouping: window sorts together")


class Checkpoints(_Tree):
    """Which checkpoints a run writes, beside the one at its end."""

    best: str | None = Field(
        "auto", description="metric of the task whose best evaluation is kept too; auto: loss, or its first; null: off"
    )
    keep_last: int = Field(2, ge=1, description="newest checkpoints to keep")
    asynchronous: bool = Field(False, description="write while training goes on, from a copy in main memory")


DEFAULT_TASK = "text-classification"
"""The task of a config that names none."""
GIVEN = "object:"
"""Begins the name of a task that was given to ``train`` as an object and has no other name."""


EXTENSIONS_ON: dict[str, Any] = {"progress": True, "metrics": True, "watchdog": True}
"""What a run has without being asked; naming another extension does not switch these off."""


PRESETS: dict[str, dict[str, Any]] = {"fast": {"loader": {"length_grouping": "window"}, "precision": "auto"}}
"""Values by the name of ``--preset``; what the user sets goes before them."""


class RunConfig(_Tree):
    """Everything that defines a run. Every field is a flag or reachable by ``--set a.b=c``.

    Frozen. A key that there is not, or a value that cannot be, raises ConfigError, one line with the dotted key.
    """

    preset: Literal["fast"] | None = Field(None, description="values to start from, under all others")
    strategy: str = Field("single", description="how the model is spread over ranks")
    strategy_options: dict[str, Any] = Field(default_factory=dict, description="options of the strategy")
    nproc: int | Auto = Field(
        "auto", description="processes to start on this machine; auto: one per GPU, or one where there is none"
    )
    max_restarts: int = Field(0, ge=0, description="times to start afresh, from the newest checkpoint, a job that died")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="type of device; auto: cuda where torch sees a GPU"
    )
    task: str = Field(DEFAULT_TASK, description="what is trained: a name, or file.py:Class")
    task_options: dict[str, Any] = Field(
        default_factory=dict, description="options of the task; distcore tasks lists them"
    )
    epochs: int = Field(1, ge=1, description="times over the training rows")
    max_steps: int | None = Field(None, ge=1, description="optimizer steps; overrides --epochs")
    global_batch_size: int = Field(32, ge=1, description="rows of one optimizer step, over all ranks")
    micro_batch_size: int | Auto = Field("auto", description="rows of one forward pass on one rank")
    lr: float | Auto = Field("auto", description="peak learning rate; auto: what the task suggests")
    optimizer: Optimizer = Field(Optimizer(), description="the optimizer and its settings")
    schedule: Schedule = Field(Schedule(), description="learning rate over the run")
    clip: Clip = Field(Clip(), description="gradient clipping")
    precision: Literal["fp32", "bf16", "fp16", "auto"] = Field(
        "fp32", description="of the forward pass; auto: bf16 where the device has its arithmetic, else fp32"
    )
    gradient_checkpointing: bool = Field(
        False,
        description="compute activations again in the backward pass, instead of keeping them: less memory, more time",
    )
    loader: Loader = Field(Loader(), description="how rows become batches")
    seed: int = Field(
        0, ge=0, lt=2**32, description="of the weights, the order of the rows and dropout: same seed, same run"
    )
    out: str | None = Field(None, description="run folder; default: a new one under runs/")
    resume: str | None = Field(None, description="auto, or the path of a checkpoint")
    resume_changed: list[str] | None = Field(
        None, description="keys that may differ from those of the checkpoint that is resumed"
    )
    save_every: int = Field(0, ge=0, description="optimizer steps between checkpoints; 0: at the end only")
    eval_every: int = Field(0, ge=0, description="optimizer steps between evaluations; 0: at epoch ends")
    log_every: int = Field(10, ge=1, description="optimizer steps between log lines")
    checkpoints: Checkpoints = Field(Checkpoints(), description="which checkpoints are kept")
    extensions: dict[str, bool | dict[str, Any]] = Field(
        default_factory=dict,
        description="name, or file.py:Class, to true, false or its options",
    )
    data_guard_steps: int = Field(
        2, ge=0, description="first steps in which ranks compare rows and weights, and collate again"
    )
    timeout: int = Field(600, ge=1, description="seconds that a rank waits for the others")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least level of messages of rank 0"
    )
    log_level_replica: Literal["debug", "info", "warning", "error"] = Field(
        "warning", description="least level of messages of the other ranks"
    )

    @model_validator(mode="wrap")
    @classmethod
    def _in_one_line(cls, given: Any, validate: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """Raise ConfigError in place of pydantic's ValidationError; the context says where ``given`` is from."""
        try:
            return validate(given)
        except ValidationError as error:
            where: dict[str, Any] = info.context or {"source": "RunConfig", "changes": ()}
            raise ConfigError(_explain(error, **where)) from None

    @model_validator(mode="before")
    @classmethod
    def _aliases_to_task_options(cls, given: object) -> object:
        return with_task_options(given) if isinstance(given, dict) else given

    @field_validator("resume_changed", mode="before")
    @classmethod
    def _with_commas(cls, given: object) -> object:
        return [key.strip() for key in given.split(",") if key.strip()] if isinstance(given, str) else given

    @field_validator("extensions", mode="before")
    @classmethod
    def _on_unless_switched_off(cls, given: object) -> object:
        return EXTENSIONS_ON | given if isinstance(given, dict) else given


TASK_ALIASES = (
    "model", "data", "eval_data", "test_data", "eval_fraction", "columns", "tokenizer", "max_seq_len", "dropout",
)  # fmt: skip
"""Keys at the top of a config that are short for the option of the task of the same name."""


NOT_THE_JOB = {"out", "resume", "resume_changed", "max_restarts"}
"""Keys that say where a run lives, not what it is: left out of a run folder's config.yaml, so that the file
trains the same job again without colliding with the folder that it came from."""


def load_config(file: str | None, changes: dict[str, Any]) -> RunConfig:
    """Build the config from a YAML file (or none) and dotted changes such as ``{"optimizer.eps": 1e-6}``.

    Raises ConfigError: one line with the dotted key, the value and the rule.
    """
    tree = with_task_options(_read_yaml(Path(file)), file) if file else {}
    source = file or "command line"
    for dotted, value in changes.items():
        _put(tree, canonical(dotted), value)
    _put_under(tree, PRESETS.get(str(tree.get("preset")), {}))
    return RunConfig.model_validate(tree, context={"source": source, "changes": changes})


def parse_settings(given: Iterable[str]) -> dict[str, Any]:
    """Read the values of ``--set KEY=VALUE``, by dotted key."""
    changes = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text}: expected KEY=VALUE, such as --set optimizer.weight_decay=0.1")
        changes[key] = parse_value(value)
    return changes


def parse_value(text: str) -> Any:
    """Read the value of ``--set key=value`` as YAML does, and ``1e-4`` as a number."""
    try:
        return _number_if(yaml.safe_load(text))
    except yaml.YAMLError:
        return text


def parse_values(text: str) -> list[Any]:
    """Read values separated by commas, each as ``parse_value`` does; a comma in brackets separates none."""
    try:
        found = yaml.safe_load(f"[{text}]")
    except yaml.YAMLError:
        found = text.split(",")
    return [_number_if(value) for value in found]


def _number_if(value: Any) -> Any:
    """Return a text that is a number as one: YAML 1.1 takes 1e-4 for a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def dump_config(config: RunConfig) -> str:
    """Return the config as YAML that ``distcore train`` reads back."""
    return yaml.safe_dump(config.model_dump(mode="json", exclude=NOT_THE_JOB), sort_keys=False, allow_unicode=True)


def flatten(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings by dotted key: ``{"clip": {"norm": 1.0}}`` gives ``{"clip.norm": 1.0}``."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flatten(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return leaves


def canonical(dotted: str) -> str:
    """Return the full key that ``dotted`` is short for: ``columns.text`` gives ``task_options.columns.text``."""
    return f"task_options.{dotted}" if dotted.partition(".")[0] in TASK_ALIASES else dotted


def with_task_options(tree: dict[str, Any], source: str = "config") -> dict[str, Any]:
    """Return ``tree`` with the keys of ``TASK_ALIASES`` moved into ``task_options``.

    Raises ConfigError, which names ``source``, if a key stands in both places.
    """
    short = {key: tree[key] for key in TASK_ALIASES if key in tree}
    options = tree.get("task_options") or {}
    if not short or not isinstance(options, dict):
        return tree
    if len(short) == len(TASK_ALIASES) and tree.get("task", DEFAULT_TASK) != DEFAULT_TASK and not options:
        short = {}  # a run of an earlier version: it recorded all these keys whether its task used them or not
    if twice := sorted(short.keys() & options.keys()):
        raise ConfigError(f"{source}: {twice[0]!r} is short for 'task_options.{twice[0]}', which is set too; keep one")
    rest = {key: value for key, value in tree.items() if key not in TASK_ALIASES}
    return rest | {"task_options": short | options}


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"config file {path}: cannot be read: {reason}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"config file {path}{line}: not valid YAML: {getattr(error, 'problem', error)}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"config file {path}: expected keys and values, found a {type(tree).__name__}")
    return tree


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, leaf = _split(dotted)
    if not all((*parents, leaf)):
        raise ConfigError(f"--set {dotted}: expected a dotted key such as optimizer.weight_decay=0.1")
    for parent in parents:
        branch = tree.setdefault(parent, {})
        if not isinstance(branch, dict):
            raise ConfigError(f"--set {dotted}: {parent} has a value of its own and no keys below it")
        tree = branch
    tree[leaf] = value


def _put_under(tree: dict[str, Any], preset: dict[str, Any]) -> None:
    """Fill in what ``tree`` leaves open."""
    for key, value in preset.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _put_under(tree[key], value)
        else:
            tree.setdefault(key, value)


def _split(dotted: str) -> list[str]:
    """Cut a dotted key at its dots, but not inside the ``path/to/file.py:Class`` of an extension."""
    if own := re.fullmatch(r"extensions\.(.+\.py:\w+)(?:\.(\w+))?", dotted):
        return ["extensions", *filter(None, own.groups())]
    return dotted.split(".")


def _explain(error: ValidationError, source: str, changes: Collection[str]) -> str:
    """One line for the first thing that is wrong, and how many more there are."""
    problems = error.errors()
    first = problems[0]
    path = [str(part) for part in first["loc"] if part not in {"int", "float", "bool", "str"}]
    path = [part for part in path if not part.startswith(("literal[", "dict[", "constrained-"))]
    where = ".".join(path)
    source = "command line" if where in changes else source
    more = f" (and {len(problems) - 1} more)" if len({str(p["loc"][: len(path)]) for p in problems}) > 1 else ""
    if first["type"] == "extra_forbidden":
        known = [*_keys_at(path[:-1]), *(TASK_ALIASES if not path[:-1] else ())]
        hint = nearest(path[-1], known) or _deeper(path[-1]) or " (distcore train --help lists the flags)"
        return f"{source}: unknown key {where!r}{hint}{more}"
    here = [p["msg"].lower() for p in problems if [str(part) for part in p["loc"]][: len(path)] == path]
    rules = " or ".join(dict.fromkeys(here))
    return f"{source}: {where} = {first['input']!r}: {rules}{more}"


def _deeper(key: str) -> str:
    """A hint where a tree inside the config has this key."""
    found = [f"{tree}.{key}" for tree in RunConfig.model_fields if key in _keys_at([tree])]
    return f" (did you mean {found[0]!r}?)" if found else ""


def _keys_at(path: list[str]) -> Iterator[str]:
    model: type[BaseModel] = RunConfig
    for part in path:
        annotation = model.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return
        model = annotation
    yield from model.model_fields
