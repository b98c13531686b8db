"""DeepSpeed's own JSON config: read it, fill in "auto", and compare it with distcore's config."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import hjson

from distcore import ConfigError

Tree = dict[str, Any]
AUTO = "auto"
ZERO = "zero_optimization"

TEXT = frozenset(
    {"nvme_path", "output_path", "output_file", "job_name", "type", "team", "group", "project"}
)
"""Keys whose value is text, even if it looks like a number."""
SECTIONS_READ = frozenset({ZERO, "fp16", "bf16", "optimizer", "scheduler"})
"""Sections whose keys distcore reads: each must be an object."""
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""Keys that say the rows of an optimizer step."""
TRUTH = {"true": True, "yes": True, "on": True, "y": True, "t": True}
TRUTH |= {"false": False, "no": False, "off": False, "n": False, "f": False}
"""Words that DeepSpeed's sections read as a truth value."""
SPELLING = {"adam": "Adam", "adamw": "AdamW", "lamb": "Lamb"}
"""Types of an optimizer, which DeepSpeed reads in any case, as ``optimizers`` compares them."""
TRAINING_ONLY = frozenset({*BATCH, "gradient_clipping", "optimizer", "scheduler"})
"""Top-level keys without a meaning for evaluation."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The value that a run needs for one key of DeepSpeed's config.

    ``must``: set it; a different value in the JSON is a contradiction. ``match``: the same, but
    only if the JSON has the key. ``default``: set it unless the JSON has a value. ``auto``: only
    replace "auto".
    """

    path: str
    """The key with its sections, separated by dots: ``zero_optimization.stage``."""
    value: Any
    """The value for the key."""
    source: str
    """The origin of the value, such as a key of distcore's config; for messages."""
    kind: Literal["must", "match", "default", "auto"] = "must"
    """The rule that combines ``value`` with the JSON; see above."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UserConfig:
    """A user's settings of DeepSpeed: its own JSON, and options that set keys of it."""

    tree: Tree
    """The JSON, in which the user may have written ``"auto"``."""
    source: str
    """The origin of the JSON, for messages: a path, or the name of an option."""
    options: tuple[Setting, ...] = ()
    """Keys that options set. They override the JSON."""
    is_given: bool = False
    """True if the user gave a JSON: keys that it omits have DeepSpeed's defaults."""
    default_stage: int = 2
    """The ZeRO stage where neither the JSON nor an option names one."""

    def get(self, path: str) -> Any:
        """Return the value of a key in an option or else the JSON; ``None`` if neither has it."""
        for option in self.options:
            if option.path == path:
                return option.value
        return get(self.tree, path)

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        stage = self.get(f"{ZERO}.stage")
        return self.default_stage if stage in (None, AUTO) else int(stage)

    @property
    def gradients(self) -> Literal["mean", "sum"]:
        """How ranks' gradients are combined: added where possible, since a mean of 3 rounds."""
        is_given = self.get("gradient_allreduce_op") is not None
        has_only_means = (
            self.stage == 3
            or self.get(f"{ZERO}.zenflow") is not None
            or self.get("compile.deepcompile")
        )
        return "mean" if is_given or has_only_means else "sum"

    @property
    def forward_cost(self) -> float:
        """The overhead of one more micro-batch at this stage, for ``Capabilities.forward_cost``."""
        # Stage 2 reduces gradients in every micro-batch: measured on a CPU with bert-mini, two
        # ranks. Stage 3 also gathers parameters: the value is the one measured for FSDP.
        return {2: 2.5, 3: 3.5}.get(self.stage, 1.0)

    @property
    def scheduler(self) -> str | None:
        """The type of DeepSpeed's rate scheduler; ``None``: distcore's schedule is used."""
        return get(self.tree, "scheduler.type") or None

    def offload(self, section: str) -> str:
        """Return the device of ``offload_optimizer`` or ``offload_param``: none, cpu or nvme."""
        return str(self.get(f"{ZERO}.{section}.device") or "none")

    @property
    def keeps_masters(self) -> bool:
        """True if master weights stay in memory between steps, not on NVMe."""
        return "nvme" not in (self.offload("offload_optimizer"), self.offload("offload_param"))

    @property
    def exact(self) -> frozenset[str]:
        """The precisions that keep the bits of ``--exact``: fp32, where masters are the weights.

        A JSON may set what was not measured.
        """
        is_measured = not self.is_given and self.offload("offload_optimizer") == "none"
        return frozenset({"fp32"} if self.stage in (1, 2) and is_measured else ())

    @property
    def compiles(self) -> frozenset[str]:
        """The modes of ``compile`` that work: none at stage 3."""
        return frozenset() if self.stage == 3 else frozenset({"on", "regions"})

    def for_evaluation(self) -> UserConfig:
        """Return the settings without the keys that only training reads."""
        tree = {key: value for key, value in self.tree.items() if key not in TRAINING_ONLY}
        return replace(self, tree=tree)


def read_config(config: str | Mapping[str, Any] | None, option: str) -> UserConfig:
    """Read DeepSpeed's JSON from a path, or take an inline tree.

    Strings such as "true" and "8" become values.

    ``option`` is the name of the option that holds ``config``, for messages. Raises ConfigError,
    one line, if the file cannot be read, is no JSON, or a section is no object.
    """
    if isinstance(config, str):
        source = config
        raw: Mapping[str, Any] = _read_file(config, option)
    else:
        source = option
        raw = config or {}
    tree: Tree = _convert(raw)
    if "bfloat16" in tree:
        tree.setdefault("bf16", tree.pop("bfloat16"))
    # The form of DeepSpeed's first versions, which it still reads.
    if isinstance(tree.get(ZERO), bool):
        tree[ZERO] = {"stage": int(tree[ZERO])}
        if "allgather_size" in tree:
            tree[ZERO]["allgather_bucket_size"] = tree.pop("allgather_size")
    for key in sorted(SECTIONS_READ & tree.keys()):
        if not isinstance(tree[key], dict):
            raise ConfigError(f"{source}: {key} = {tree[key]!r}: expected keys and values")
    kind = str(get(tree, "optimizer.type")).lower()
    if kind in SPELLING:
        put(tree, "optimizer.type", SPELLING[kind])
    for key in BATCH:
        if key in tree:
            tree[key] = _rows(source, key, tree[key])
    stage = get(tree, f"{ZERO}.stage")
    if stage not in (None, AUTO) and stage not in range(4):
        raise ConfigError(f"{source}: {ZERO}.stage = {stage!r}: expected 0, 1, 2 or 3")
    # For a JSON without a stage DeepSpeed takes 0. Stage 1 does the same work, and does it
    # in every precision.
    default_stage = 2 if config is None or stage == AUTO else 1
    return UserConfig(
        tree=tree, source=source, is_given=config is not None, default_stage=default_stage
    )


def _rows(source: str, key: str, value: Any) -> Any:
    """Return a number of rows or steps as an integer; "auto" and null stay."""
    if value in (None, AUTO):
        return value
    if not _is_number(value) or value < 1 or value != int(value):
        raise ConfigError(f"{source}: {key} = {value!r}: expected a whole number, 1 or more")
    return int(value)


def fill(user: UserConfig, settings: Iterable[Setting], later: Iterable[str] = ()) -> Tree:
    """Return a copy of the JSON with all settings applied and every "auto" replaced.

    An "auto" at a path in ``later`` stays. Raises ConfigError, one line, that lists all
    contradictions, each with both values and their sources.
    """
    filled = copy.deepcopy(user.tree)
    wrong = []
    for setting in settings:
        present = get(filled, setting.path)
        is_open = present is None and setting.kind in ("must", "default")
        if present == AUTO or is_open:
            put(filled, setting.path, setting.value)
            continue
        is_compared = present is not None and setting.kind in ("must", "match")
        if is_compared and not _is_same(present, setting.value):
            wrong.append(
                f"{setting.path} = {present!r} ({user.source}) but {setting.source} ="
                f" {setting.value!r}"
            )
    if wrong:
        raise ConfigError(
            f'{user.source}: contradictions, make them equal or write "auto": {"; ".join(wrong)}'
        )
    left = sorted(set(_autos(filled)) - set(later))
    if left:
        raise ConfigError(
            f'{user.source}: nothing to fill in for "auto" of {", ".join(left)}; give a value'
        )
    return filled


def get(tree: Tree, path: str) -> Any:
    """Return the value at a dotted path; ``None`` if it is absent."""
    value: Any = tree
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def put(tree: Tree, path: str, value: Any) -> None:
    """Set the value at a dotted path of ``tree``, in place. Missing sections are added."""
    *parents, leaf = path.split(".")
    for part in parents:
        tree = tree.setdefault(part, {})
    tree[leaf] = value


def _read_file(path: str, option: str) -> Tree:
    """Return the tree of a file; raises ConfigError if it has none."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        tree = hjson.loads(text, object_pairs_hook=_no_duplicates)
    except OSError as error:
        raise ConfigError(f"{option} = {path!r}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{option} = {path!r}: not valid JSON: {reason}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{option} = {path!r}: expected an object, found {type(tree).__name__}")
    return dict(tree)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> Tree:
    """Return the pairs as an object; raises ValueError for a key that is given twice."""
    tree = dict(pairs)
    if len(tree) < len(pairs):
        names = [name for name, _ in pairs]
        duplicates = [name for name in names if names.count(name) > 1]
        raise ValueError(f"key {duplicates[0]!r} is given twice")
    return tree


def _convert(value: Any, key: str = "") -> Any:
    """Return a value with its texts converted to numbers and truth values, as DeepSpeed does."""
    if isinstance(value, Mapping):
        return {name: _convert(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_convert(inner) for inner in value]
    if not isinstance(value, str) or key in TEXT:
        return value
    word = value.lower()
    # Elsewhere "yes" and "on" may be names.
    is_switch = key == "enabled" and word in TRUTH
    if is_switch or word in ("true", "false"):
        return TRUTH[word]
    if re.fullmatch(r"[+-]?\d+", value):
        return int(value)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", value, re.IGNORECASE):
        return float(value)
    return value


def _is_same(present: Any, wanted: Any) -> bool:
    """Return True for equal values; numbers may differ by a rounding error."""
    if isinstance(wanted, list | tuple) and isinstance(present, list | tuple):
        return len(present) == len(wanted) and all(map(_is_same, present, wanted))
    if _is_number(present) and _is_number(wanted):
        return bool(abs(present - wanted) <= 1e-12 * max(abs(present), abs(wanted)))
    return bool(present == wanted)


def _is_number(value: Any) -> bool:
    """Return True for a number, and False for a truth value, which Python counts among them."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _autos(tree: Tree, prefix: str = "") -> Iterator[str]:
    """Yield the paths of the keys with the value "auto"."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _autos(value, f"{prefix}{key}.")
        elif value == AUTO:
            yield f"{prefix}{key}"
