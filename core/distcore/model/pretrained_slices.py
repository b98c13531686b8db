"""Read a model slice by slice from safetensors files, so that no rank ever holds the whole model.

The model starts on the meta device, without storage. The result equals an ordinary load bit for
bit. If that cannot be promised, ``find_weights`` raises NotSliceable with the reason, and every
rank builds the whole model instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from distcore.errors import MetaModelError, ModelError
from distcore.plugin.strategy.contract import LocalRange, WeightStream
from distcore.rounding import ceil_div

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
OLD_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""Map each current name to its name in old files."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
}
"""The dtypes that weights and buffers can have, by their names in the safetensors format."""

COMPARED_AT_ONCE = 2**24
"""Elements of each of two tensors that are in memory while they are compared."""

COMPARED_OF_EACH = 4096
"""Elements of each parameter that are compared after a whole load."""


class NotSliceable(MetaModelError):
    """The model cannot be read slice by slice; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The sources of a model's tensors, by the tensors' names in the model."""

    files: dict[str, tuple[Path, str]]
    """The file, and the tensor's name in it."""
    initialized: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that no file holds, such as a new head or an unsaved buffer; whole, on the CPU."""

    def read(self, name: str, start: int, count: int, shape: tuple[int, ...]) -> Tensor:
        """Return the elements ``start`` to ``start + count`` of a flattened tensor of ``shape``.

        Only the rows that have these elements are read from a file.
        """
        if name in self.initialized:
            return self.initialized[name].reshape(-1)[start : start + count]
        # A tensor without elements may have rows of none, by which nothing can be divided below.
        if not count:
            return torch.empty(0)
        path, key = self.files[name]
        end = start + count
        elements_of_row = prod(shape[1:])
        first_row = start // elements_of_row
        end_row = ceil_div(end, elements_of_row)
        # Closed at once, because mapped pages count as this process's memory.
        with safe_open(path, "pt") as file:
            if shape:
                rows: Tensor = file.get_slice(key)[first_row:end_row]
            else:
                rows = file.get_tensor(key)  # a scalar has no rows to slice
        start_in_rows = start - first_row * elements_of_row
        return rows.reshape(-1)[start_in_rows : start_in_rows + count]


def replay_files(meta_model: nn.Module, folder: Path, seed: int) -> tuple[nn.Module, WeightStream]:
    """Give ``meta_model`` the buffers of a whole load; return it, and a stream of its parameters.

    The files are in ``folder``. ``seed`` initializes what they lack. Raises NotSliceable.
    """
    weights = find_weights(meta_model, folder, seed)
    for name, buffer in list(meta_model.named_buffers()):
        flat = weights.read(name, 0, buffer.numel(), tuple(buffer.shape))
        loaded = flat.view(buffer.shape).to(buffer.dtype)
        # In place: a buffer may have several names, of which ``named_buffers`` yields the first.
        torch.utils.swap_tensors(buffer, loaded)  # type: ignore[no-untyped-call]
    shapes = {name: tuple(parameter.shape) for name, parameter in meta_model.named_parameters()}

    def values(wanted: LocalRange) -> Iterator[tuple[str, Tensor]]:
        for name, shape in shapes.items():
            start, count = wanted(name)
            yield name, weights.read(name, start, count, shape)

    return meta_model, values


def find_weights(meta_model: nn.Module, folder: Path, seed: int) -> Weights:
    """Return the source of each tensor of ``meta_model``; raises NotSliceable.

    Initializes a head that is missing from the files, or has another shape there, as transformers
    does, with the same random numbers from ``seed``. Converts the meta model to fp32.
    """
    index = _index(folder)
    files = dict(_match(meta_model, index))
    aliases = _aliases(meta_model)
    missing = [name for name in aliases if name not in files]
    # All copies of a tied weight count as read: ``_match`` compared them with the one that is.
    keys_read: set[str] = set()
    for name, keys in _keys_in_files(meta_model, index):
        if name in files:
            keys_read.update(keys)
    unread = set(index) - keys_read
    _check_unread(meta_model, missing, unread, index)
    # ``aliases`` has saved tensors only.
    unsaved = [name for name, _ in meta_model.named_buffers() if name not in aliases]
    not_in_files = [*missing, *unsaved]
    initialized: dict[str, Tensor] = {}
    if not_in_files:
        initialized = _initialize(meta_model, aliases, not_in_files, seed)
    meta_model.float()
    return Weights(files=files, initialized=initialized)


def check_values(module: nn.Module, folder: Path) -> None:
    """Raise ModelError if ``module``, built whole, has other weights than the files in ``folder``.

    A strategy that reads slices takes them from the files, and would train another model. The first
    elements of each parameter are compared; a model whose files nobody could read in slices is not.
    """
    try:
        index = _index(folder)
        keys = {name: keys[0] for name, keys in _keys_in_files(module, index)}
        missing = [name for name in _aliases(module) if name not in keys]
        unread = set(index) - set(keys.values())
        _check_unread(module, missing, unread, index)
    except NotSliceable:
        return
    paths = {index[key] for key in keys.values()}
    for path in sorted(paths):
        with safe_open(path, "pt") as file:
            for name, parameter in module.named_parameters():
                if name not in keys or index[keys[name]] != path:
                    continue
                if not _begins_as(parameter, file, keys[name]):
                    raise ModelError(
                        f"the model's {name} has other values than {keys[name]} in {path}: read the"
                        " weights where the model is built, or name no folder for them"
                    )


def _begins_as(parameter: Tensor, file: Any, key: str) -> bool:
    """Return True if a tensor of the file begins as ``parameter``, in whatever precision.

    Also True if they cannot be compared: the tensor in the file has another shape, a dtype that is
    not read here, or no rows.
    """
    stored = file.get_slice(key)
    shape = tuple(stored.get_shape())
    has_rows = bool(shape)
    if shape != tuple(parameter.shape) or stored.get_dtype() not in DTYPES or not has_rows:
        return True
    elements_of_row = max(1, prod(shape[1:]))
    rows = max(1, COMPARED_OF_EACH // elements_of_row)
    expected = stored[:rows].float()
    actual = parameter.detach()[:rows].float().cpu()
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    # Some loads round to the dtype of the config; bf16 has 8 bits.
    rounding = 2**-7
    return torch.allclose(actual, expected, rtol=rounding, atol=rounding * largest, equal_nan=True)


def meta_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of the folder's safetensors files by name, without values.

    Empty if it has no such files. transformers takes them as a ``state_dict``; by itself it would
    map all files at once, which is memory of this process.
    """
    if not any((folder / name).is_file() for name in (FILE, INDEX)):
        return {}
    tensors = {}
    for path in sorted(set(_index(folder).values())):
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118  # the file itself cannot be iterated over
                tensors[name] = torch.empty(file.get_slice(name).get_shape(), device="meta")
    return tensors


def _index(folder: Path) -> dict[str, Path]:
    """Map the name of each tensor in the folder's files to its file."""
    if (folder / FILE).is_file():
        with safe_open(folder / FILE, "pt") as file:
            return dict.fromkeys(file.keys(), folder / FILE)
    if not (folder / INDEX).is_file():
        raise NotSliceable(f"{folder} has no safetensors files")
    tree = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    weight_map: dict[str, str] = tree["weight_map"]
    return {name: folder / file for name, file in weight_map.items()}


def _match(meta_model: nn.Module, index: dict[str, Path]) -> Iterator[tuple[str, tuple[Path, str]]]:
    """Yield name, file and name in the file of each tensor that the files hold in its shape."""
    state = meta_model.state_dict()
    for name, keys in _keys_in_files(meta_model, index):
        key, *copies = keys
        path = index[key]
        if not _fits(name, state[name], path, key):
            continue
        for copy in copies:
            # A whole load may keep both, or take the other one.
            if not _are_equal((path, key), (index[copy], copy)):
                raise NotSliceable(
                    f"{key} and {copy} differ in the files, and are one weight of the model"
                )
        yield name, (path, key)


def _keys_in_files(model: nn.Module, index: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each saved tensor that is in the files, and its names there.

    A tied weight may have several.
    """
    prefix = _prefix(model)
    names_in_files = set(index)
    for name, aliases in _aliases(model).items():
        keys: dict[str, None] = {}  # an ordered set
        for alias in aliases:
            for spelling in _spellings(alias, prefix):
                if spelling in names_in_files:
                    keys[spelling] = None
        if keys:
            yield name, list(keys)


def _are_equal(source: tuple[Path, str], other: tuple[Path, str]) -> bool:
    """Compare two tensors of files, each given by file and name, some rows at a time."""
    path, key = source
    other_path, other_key = other
    with safe_open(path, "pt") as file, safe_open(other_path, "pt") as other_file:
        stored, other_stored = file.get_slice(key), other_file.get_slice(other_key)
        shape = tuple(stored.get_shape())
        if shape != tuple(other_stored.get_shape()):
            return False
        if stored.get_dtype() != other_stored.get_dtype():
            return False
        if not shape:
            return torch.equal(file.get_tensor(key), other_file.get_tensor(other_key))
        elements_of_row = max(1, prod(shape[1:]))
        rows = max(1, COMPARED_AT_ONCE // elements_of_row)
        for start in range(0, shape[0], rows):
            end = start + rows
            if not torch.equal(stored[start:end], other_stored[start:end]):
                return False
        return True


def _fits(name: str, tensor: Tensor, path: Path, key: str) -> bool:
    """Return True if the file's tensor has the model's shape; another dtype raises NotSliceable."""
    with safe_open(path, "pt") as file:
        stored = file.get_slice(key)
        shape = tuple(stored.get_shape())
        dtype = DTYPES.get(stored.get_dtype())
    # An ordinary load would round it.
    if dtype is not tensor.dtype:
        raise NotSliceable(
            f"{name} is {tensor.dtype} in the model and {stored.get_dtype()} in the file"
        )
    return shape == tuple(tensor.shape)


def _spellings(name: str, prefix: str) -> Iterator[str]:
    """Yield the names that ``name`` may have in a file.

    They are with or without the base model's prefix, and new or old.
    """
    for spelling in (name, name.removeprefix(prefix), prefix + name):
        yield spelling
        for new, old in OLD_NAMES.items():
            if spelling.endswith(new):
                yield spelling.removesuffix(new) + old


def _aliases(meta_model: nn.Module) -> dict[str, list[str]]:
    """Map the first name of each saved tensor to all its names; a tied weight has several."""
    names: dict[int, list[str]] = {}
    for name, tensor in meta_model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return {aliases[0]: aliases for aliases in names.values()}


def _check_unread(
    meta_model: nn.Module, missing: list[str], unread: set[str], index: Collection[str]
) -> None:
    """Raise NotSliceable for a key of the files that nothing reads, unless an old head has it.

    The key may be another name of a weight that the model lacks. Or the model was changed after it
    was built, for example cut to every second layer, so its names no longer match the weights of
    the files.
    """
    prefix = _prefix(meta_model)
    base = _in_base(prefix, meta_model.state_dict())
    unread_of_base = unread & _in_base(prefix, index)
    lacking = [name for name in missing if name in base]
    if lacking and unread_of_base:
        raise NotSliceable(f"{lacking[0]} is not in the files under that name and shape")
    parts_of_base = {_first_part(prefix, name) for name in base}
    old_buffers = _no_longer_saved(meta_model)
    for key in sorted(unread_of_base):
        # A part that the base model lacks, such as a pooler, belonged to the old head.
        is_of_base = _first_part(prefix, key) in parts_of_base
        if is_of_base and not old_buffers.search(key):
            raise NotSliceable(f"{key} of the files is not in the model under that name and shape")


def _in_base(prefix: str, names: Collection[str]) -> set[str]:
    """Return the names of the base model: those under ``prefix``, or all if none has it.

    No name has the prefix in a base model without a head, or in a wrapper such as PEFT's.
    """
    names_with_prefix = {name for name in names if name.startswith(prefix)}
    return names_with_prefix or set(names)


def _first_part(prefix: str, name: str) -> str:
    """Return the first part of a dotted name, without the prefix of the base model."""
    return name.removeprefix(prefix).partition(".")[0]


def _no_longer_saved(meta_model: nn.Module) -> re.Pattern[str]:
    """Return a pattern for the buffers in old files that transformers does not read."""
    ignored: Iterable[str] = getattr(meta_model, "_keys_to_ignore_on_load_unexpected", None) or ()
    patterns = [r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", *sorted(ignored)]
    return re.compile("|".join(patterns))


def _initialize(
    meta_model: nn.Module, aliases: dict[str, list[str]], names: list[str], seed: int
) -> dict[str, Tensor]:
    """Initialize the tensors ``names``, as transformers' own loading does.

    The order and the random numbers are the same, too.
    """
    model: Any = meta_model
    is_of_transformers = hasattr(model, "initialize_weights")
    # An older transformers, without that module, initializes marked tensors, too.
    if not is_of_transformers or find_spec("transformers.initialization") is None:
        raise NotSliceable(
            f"{names[0]} is not in the files, and the model cannot initialize it by itself"
        )
    for tensor in meta_model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # so that transformers does not initialize it
    for name in names:
        names_of_tensor = aliases.get(name, [name])  # an unsaved buffer has no aliases
        for alias in names_of_tensor:
            _make_empty(meta_model, alias, name)
    torch.manual_seed(seed)
    model.initialize_weights()
    return {name: _get(meta_model, name).detach().clone() for name in names}


def _make_empty(meta_model: nn.Module, alias: str, name: str) -> None:
    """Replace the tensor ``alias`` by an empty one on the CPU.

    ``name`` is the first of the tensor's names, and is replaced first: the others get the same one.
    """
    replaced = _get(meta_model, alias)
    empty = _get(meta_model, name)
    if empty.is_meta:
        empty = torch.empty_like(replaced, device="cpu")
        if isinstance(replaced, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=replaced.requires_grad)
    path, _, attribute = alias.rpartition(".")
    setattr(meta_model.get_submodule(path), attribute, empty)


def _get(meta_model: nn.Module, name: str) -> Tensor:
    """Return the parameter or buffer of a dotted name."""
    path, _, attribute = name.rpartition(".")
    tensor: Tensor = getattr(meta_model.get_submodule(path), attribute)
    return tensor


def _prefix(meta_model: nn.Module) -> str:
    """Return the prefix of the base model's names, with its dot; empty if there is none."""
    prefix = getattr(meta_model, "base_model_prefix", "")
    return f"{prefix}." if prefix else ""
