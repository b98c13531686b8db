"""Load transformers models and tokenizers from local folders or the hub.

Every error is one line.
"""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcore import ConfigError, ModelError, nearest
from distcore.files import is_git_lfs_pointer
from distcore.model import silence_transformers
from distcore_tasks.shared.converted_weights import safetensors_folder
from distcore_tasks.shared.matched_weights import check_matched

if TYPE_CHECKING:
    from torch import nn

WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
GENERATION = "generation_config.json"
TOKENIZERS = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
)
"""Usual vocabulary files. Without any, the tokenizer's class must need others, or none."""
DESCRIPTIONS = (
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "*.spm",
    "*.codes",
    "*.tokenizer",
    "*.tiktoken",
)
"""Files of a model folder besides weights and pages, a tokenizer's of any class among them."""
TEMPLATES = "additional_chat_templates/*.jinja"
"""Further chat templates of a tokenizer."""
IMAGE_PROCESSORS = ("preprocessor_config.json",)
"""Preprocessing files. The folder of an image model must have at least one of them."""
DEFAULT_PADDING = 8
"""More than the padding token, plus 1, of any type of model whose config.json leaves it out."""
ADAPTER = "adapter_config.json"
"""The settings of an adapter, as peft calls the file."""
LONG_ROTATIONS = ("longrope", "su")
"""Rotary positions with other frequencies for long rows, by their name and by an older one."""
BESIDE = {TOKENIZERS: "tokenizer", IMAGE_PROCESSORS: "preprocessor"}
"""Names, in error messages, of the files besides config and weights."""


def model_folder(
    name: str, built_in: Collection[str], beside: tuple[str, ...] = TOKENIZERS
) -> Path:
    """Return the local folder of a model that is not one of the ``built_in``.

    The folder has config, weights and one of the files ``beside``, a key of ``BESIDE``. Downloads a
    hub model that is not cached yet. Raises ModelError, one line.
    """
    folder = Path(name).expanduser()
    if not folder.exists():
        return _hub_folder(name, built_in, beside)
    if not folder.is_dir():
        expected = f"config.json, weights and {BESIDE[beside]}"
        raise ModelError(f"model {name}: is a file, expected a folder with {expected}")
    _check_folder(name, folder, beside)
    return folder


def read_config(name: str, folder: Path) -> dict[str, Any]:
    """Return the folder's config.json.

    Raises ModelError if it is not a JSON object with a ``model_type``.
    """
    try:
        tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"model {name}: config.json cannot be read: {error}") from None
    if not isinstance(tree, dict) or "model_type" not in tree:
        raise ModelError(
            f"model {name}: config.json has no 'model_type', so it is not a transformers model"
        )
    return tree


def own_code_problem(tree: dict[str, Any], file: str, loader: str, is_known: bool) -> str:
    """Return why a folder's ``file`` cannot be used: it names Python code. Empty if it can.

    ``loader``: what the code is for, such as ``AutoConfig``. ``is_known``: transformers has a class
    of its own for it.
    """
    code = tree.get("auto_map") or {}
    # Older files have the tokenizer's alone.
    names = code if isinstance(code, dict) else {"AutoTokenizer": code}
    if is_known or loader not in names:
        return ""
    return (
        f"{file} names code of its own ({loader}: {_code_name(names[loader])}), which is not run;"
        " take a folder of a type that transformers has, or build the model in a task of your own:"
        " --task FILE.py:CLASS"
    )


def own_code_warning(name: str, folder: Path) -> Iterator[str]:
    """Yield a line if a folder's code for its model is not run: transformers has that type."""
    config = read_config(name, folder)
    code = config.get("auto_map") or {}
    loaders = []
    if isinstance(code, dict):
        loaders = sorted(key for key in code if key.startswith("AutoModel"))
    if loaders:
        loader = loaders[0]
        yield (
            f"model {name}: config.json names code of its own ({loader}:"
            f" {_code_name(code[loader])}), which is not run: the model is the"
            f" {config['model_type']} of transformers"
        )


def _code_name(value: Any) -> str:
    """Return the class that an entry of ``auto_map`` names.

    The entry is a string, or for tokenizers a pair, slow and fast, of which one may be null.
    """
    if isinstance(value, str):
        return value
    names = [name for name in value or () if name]
    return str(names[0] if names else value)


def tokenizer_files(folder: Path, tokenizer: Any) -> tuple[str, ...]:
    """Return the names, relative to ``folder``, of a transformers ``tokenizer``'s files there.

    They are those that its class names, and those of every tokenizer.
    """
    names = {"tokenizer.json", "chat_template.jinja", *type(tokenizer).vocab_files_names.values()}
    files = {folder / name for name in names}
    files.update(folder.glob("*token*.json"), folder.glob(TEMPLATES))
    present = [file.relative_to(folder).as_posix() for file in files if file.is_file()]
    return tuple(sorted(present))


def tokenizer_digest(folder: Path) -> list[tuple[str, str]]:
    """Return name and digest of each file in ``folder`` that tokens may depend on, for a cache key.

    That is every file that is no weights: which of them a tokenizer reads is known only
    when it is loaded.
    """
    files: set[Path] = set()
    for pattern in (*DESCRIPTIONS, TEMPLATES):
        files.update(folder.glob(pattern))
    digests = []
    for file in sorted(files):
        # Neither says how texts become tokens.
        is_of_model = file.name == GENERATION or file.name.endswith(".index.json")
        if file.is_file() and not is_of_model:
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            digests.append((file.relative_to(folder).as_posix(), digest))
    return digests


def positions(name: str, folder: Path) -> int | None:
    """Return the largest number of tokens of a row of the model; ``None`` if it is unbounded."""
    tree = read_config(name, folder)
    declared = _declared_positions(tree)
    if declared is None or not _behind_padding(tree, declared):
        return declared
    from distcore_tasks.shared.position_table import measure_positions

    measured = measure_positions(folder)
    if measured is None:
        first = int(tree.get("pad_token_id") or 0) + 1
        return declared - (first if "roberta" in tree["model_type"] else 0)
    return min(declared, measured)


def _declared_positions(tree: Mapping[str, Any]) -> int | None:
    """Return the number of positions in a config.json; ``None`` if it says none that is a limit."""
    # T5 and its relatives have relative positions; the number of positions in their config
    # is no limit.
    counted = None if "relative_attention_num_buckets" in tree else tree.get("n_positions")
    declared = tree.get("max_position_embeddings", counted)
    return declared if isinstance(declared, int) else None


def _behind_padding(tree: Mapping[str, Any], declared: int) -> int:
    """Return how many positions the model may leave out, numbering them after its padding token.

    RoBERTa and its relatives do, so fewer are usable than their config says.
    """
    # Angles are computed for any position: there is no table with a first entry.
    if any("rope" in key or "rotary" in key for key in tree):
        return 0
    pad = tree.get("pad_token_id")
    if pad is None:
        return DEFAULT_PADDING
    return int(pad) + 1 if 0 <= int(pad) < declared else 0


def check_length(name: str, folder: Path, tokens: int, option: str = "max_seq_len") -> None:
    """Raise ConfigError if ``tokens``, the value of ``option``, exceeds the model's positions.

    Measures the model in ``folder`` only where its config leaves that open.
    """
    tree = read_config(name, folder)
    declared = _declared_positions(tree)
    if declared is None or tokens <= declared - _behind_padding(tree, declared):
        return
    most = positions(name, folder)
    if most is not None and tokens > most:
        change = "--max-seq-len " if option == "max_seq_len" else f"--set task_options.{option}="
        raise ConfigError(
            f"{option} = {tokens}: model {name} has positions for {most} tokens; use {change}{most}"
        )


def rotation_warning(name: str, folder: Path, tokens: int) -> Iterator[str]:
    """Yield a line if rows of up to ``tokens`` tokens may change the positions of other rows.

    transformers has one set of rotary frequencies for all rows of a call: that for long rows, if
    the longest one is beyond the positions that the model was first trained with.
    """
    tree = read_config(name, folder)
    rope = tree.get("rope_parameters") or tree.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type"))
    key = "original_max_position_embeddings"
    usual = rope.get(key, tree.get(key))
    if kind in LONG_ROTATIONS and usual is not None and tokens > usual:
        yield (
            f"model {name}: a row of more than {usual} tokens has rotary frequencies of its own"
            f" ('{kind}' in config.json), and gives them to the rows of its micro-batch: results"
            f" depend on micro-batches; use --max-seq-len {usual}, or --micro-batch-size 1 with"
            " --padding-free off"
        )


def check_kind(name: str, folder: Path, kind: str, otherwise: str) -> Any:
    """Return the config of the model; raises ModelError for a type without the task's head.

    ``kind``: transformers' mapping of the types with that head, such as ``MASKED_LM``.
    ``otherwise``: the message for other types, with the remedy.
    """
    with silence_transformers(), one_line_errors(f"model {name}: cannot be loaded"):
        from transformers import AutoConfig
        from transformers.models.auto import modeling_auto

        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        model_types = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES")
    if config.model_type not in model_types:
        raise ModelError(f"model {name}: {config.model_type} {otherwise}, or another --task")
    return config


def set_length(folder: Path, tokens: int) -> None:
    """Set the default length to which the tokenizer in ``folder`` truncates texts."""
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    text = json.dumps(settings | {"model_max_length": tokens}, ensure_ascii=False, indent=2)
    file.write_text(text + "\n", encoding="utf-8")


def load_tokenizer(name: str, folder: Path, **settings: Any) -> Any:
    """Load the folder's tokenizer under these ``settings``; raises ModelError, one line."""
    missing = ""
    if not (folder / "tokenizer.json").is_file():
        missing = f" from {folder}, which has no tokenizer.json"
    failure = f"model {name}: tokenizer cannot be loaded{missing}"
    with silence_transformers(), one_line_errors(failure):
        from transformers import AutoTokenizer

        settings = {"local_files_only": True, "trust_remote_code": False} | settings
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, **settings)
        except ValueError:  # it would ask on the terminal, or say how to run the code
            file = "tokenizer_config.json"
            tree = _read_json(folder / file)
            problem = own_code_problem(tree, file, "AutoTokenizer", is_known=False)
            if problem:
                raise ModelError(f"model {name}: {problem}") from None
            raise
    if (folder / "config.json").is_file():
        _check_padding_token(name, folder, tokenizer)
    return tokenizer


def _check_padding_token(name: str, folder: Path, tokenizer: Any) -> None:
    """Raise ModelError for a padding token that the tokenizer has and the embedding has not."""
    size = read_config(name, folder).get("vocab_size")
    pad = tokenizer.pad_token_id
    if pad is None or not isinstance(size, int) or pad < size:
        return
    end = tokenizer.eos_token
    inside = f", such as its end token {end!r}" if end and tokenizer.eos_token_id < size else ""
    raise ModelError(
        f"model {name}: its tokenizer's padding token {tokenizer.pad_token!r} is token {pad}, but"
        f" config.json has a vocabulary of {size} (0 to {size - 1}); set pad_token in"
        f" tokenizer_config.json to one of these{inside}"
    )


def cuts_at_begin(folder: Path) -> bool:
    """Return True if the tokenizer's settings cut long texts at their begin."""
    return _read_json(folder / "tokenizer_config.json").get("truncation_side") == "left"


def pad_token(tokenizer: Any) -> int:
    """Return the padding token.

    Many decoder models have none; then any token will do, because padding is masked.
    """
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, *tokenizer.all_special_ids, 0)
    return next(int(token) for token in candidates if token is not None)


def set_pad_token(tokenizer: Any) -> Any:
    """Return the tokenizer with the padding token of training, also for exports.

    A tokenizer without special tokens stays unchanged: an ordinary token would become special, and
    would be split out of every text.
    """
    if tokenizer.pad_token_id is None and tokenizer.all_special_ids:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad_token(tokenizer))
    return tokenizer


def check_vocabulary(name: str, folder: Path, largest: int) -> None:
    """Raise ModelError for a token outside the embedding: the tokenizer is another model's."""
    size = read_config(name, folder).get("vocab_size")
    if isinstance(size, int) and largest >= size:
        problem = f"its tokenizer gives token {largest}, but config.json has a vocabulary of {size}"
        raise ModelError(f"model {name}: {problem}: tokenizer and weights do not belong together")


def set_dropout(shape: Any, dropout: float | None) -> None:
    """Set every dropout probability of a transformers config; the names of the
    fields differ between models.

    0 also disables stochastic depth.
    """
    if dropout is None:
        return
    for name, value in shape.to_dict().items():
        if ("dropout" in name or name.endswith("pdrop")) and (
            value is None or isinstance(value, float | int)
        ):
            setattr(shape, name, dropout)
    if not dropout and hasattr(shape, "drop_path_rate"):  # stochastic depth
        shape.drop_path_rate = 0.0


def class_fields(classes: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a transformers config that define the classes of a model."""
    return {
        "num_labels": len(classes),
        "id2label": dict(enumerate(classes)),
        "label2id": {name: number for number, name in enumerate(classes)},
    }


def load_model(
    kind: str, name: str, folder: Path, dropout: float | None, **settings: Any
) -> nn.Module:
    """Load the folder's model in fp32; under torch's meta device read no weights.

    On the meta device dtypes are those of the files. ``kind``: the loading class of transformers,
    such as ``AutoModelForCausalLM``. ``settings``: fields of the model's config, such as
    ``class_fields``. Raises ModelError, one line.
    """
    import torch

    from distcore.model import meta_tensors  # with torch
    from distcore_tasks.shared.loading_info import loaded_by_names
    from distcore_tasks.shared.tied_weights import describe_ties, keep_apart  # with torch

    with silence_transformers(), one_line_errors(f"model {name}: cannot be loaded"):
        import transformers

        loader: Any = getattr(transformers, kind)
        saved = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        # A head for another number of classes gets new weights; any other mismatch of shapes
        # stays an error.
        other_head = "num_labels" in settings and saved.num_labels != settings["num_labels"]
        shape = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, **settings)
        set_dropout(shape, dropout)
        # Tasks read outputs by name, also of a folder that has them as a tuple.
        shape.return_dict = True
        # Chunks save memory of some models, and fail for rows of other lengths.
        shape.chunk_size_feed_forward = 0
        settings = {"config": shape, "ignore_mismatched_sizes": other_head}
        if torch.get_default_device().type == "meta":
            meta_model: Any = loader.from_config(shape)
            # The names and shapes in the files alone; transformers does not load under
            # the meta device.
            with torch.device("cpu"):
                headers = meta_tensors(folder)
                loaded, report = loaded_by_names(type(meta_model), folder, headers, **settings)
                check_matched(name, meta_model, report)
                keep_apart(name, meta_model, loaded, folder)
            if not headers:
                meta_model.safetensors_folder = partial(safetensors_folder, folder)
            if (folder / GENERATION).is_file():  # from_config does not read it
                meta_model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
            return meta_model  # type: ignore[no-any-return]  # transformers leaves it untyped
        # In fp32 from the start: transformers would round the weights of the files to the
        # dtype of config.json.
        settings |= {"local_files_only": True, "output_loading_info": True, "dtype": torch.float32}
        model, report = loader.from_pretrained(folder, **settings)
        check_matched(name, model, report)
        describe_ties(name, model, folder)
    # Even if the files hold half precision: these are the master weights.
    in_fp32: nn.Module = model.float()
    return in_fp32


def _check_folder(name: str, folder: Path, beside: tuple[str, ...]) -> None:
    """Raise ModelError for a folder that is no whole model, with the way to get one."""
    is_run = (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir()
    if is_run or (folder / "manifest.json").is_file():
        kind = "run folder" if is_run else "checkpoint"
        export = f"distcore checkpoint export {name} --to DIR"
        raise ModelError(
            f"model {name}: is a {kind}; make a model folder of it: {export}, and name DIR in its"
            " place"
        )
    for file in sorted(folder.iterdir()):
        if is_git_lfs_pointer(file):
            remedy = f"fetch it: git lfs pull, in {name}"
            raise ModelError(
                f"model {name}: {file.name} is a pointer of Git LFS, not the file; {remedy}"
            )
    _check_adapter(name, folder)
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model {name}: the folder has no config.json, so it is not a Hugging Face model folder"
        )
    _check_type(name, folder)
    for files, part in ((WEIGHTS, "weights"), (beside, BESIDE[beside])):
        if any((folder / file).is_file() for file in files):
            continue
        if files is TOKENIZERS and _has_other_tokenizer(str(folder), _stamp(folder)):
            continue
        examples = ", ".join(files[:3]) + " …" * (len(files) > 3)
        raise ModelError(f"model {name}: the folder has no {part} (any of {examples})")
    for file_name in WEIGHTS:
        index = folder / file_name
        if file_name.endswith(".index.json") and index.is_file():
            _check_index(name, index)


@cache
def _has_other_tokenizer(folder: str, _stamp: tuple[int, ...]) -> bool:
    """Return True if the tokenizer's class has other files than usual, such as FSMT, or none.

    Some classes make an empty vocabulary where theirs is missing, so their files must be there.
    """
    try:
        tokenizer = load_tokenizer(folder, Path(folder))
    except ModelError:
        return False
    file_names = dict(type(tokenizer).vocab_files_names)
    # Any tokenizer may have this one; it is among the usual files.
    file_names.pop("tokenizer_file", None)
    if not file_names:
        return (Path(folder) / "tokenizer_config.json").is_file()
    return any((Path(folder) / file).is_file() for file in file_names.values())


def _stamp(folder: Path) -> tuple[int, ...]:
    """Return a value that differs once files of a folder come or go."""
    return folder.stat().st_mtime_ns, len([*folder.iterdir()])


def _check_type(name: str, folder: Path) -> None:
    """Raise ModelError for a type of model that only the folder's own code knows."""
    tree = read_config(name, folder)
    if not tree.get("auto_map"):
        return
    from transformers.models.auto import configuration_auto

    is_known = tree["model_type"] in configuration_auto.CONFIG_MAPPING
    if problem := own_code_problem(tree, "config.json", "AutoConfig", is_known):
        raise ModelError(f"model {name}: {problem}")


def _read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if it cannot be read."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _check_adapter(name: str, folder: Path) -> None:
    """Raise ModelError for a folder with an adapter of peft, alone or beside weights.

    ``from_pretrained`` would add it to the weights, and strategies that read slices
    of files would not.
    """
    if not (folder / ADAPTER).is_file():
        return
    with one_line_errors(f"model {name}: {ADAPTER} cannot be read"):
        settings = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
        kind, base = settings.get("peft_type", "LORA"), settings.get("base_model_name_or_path")
    merge = (
        "merge it (merge_and_unload of peft, or distcore checkpoint export RUN --merged), and name"
        " that folder"
    )
    if any((folder / file).is_file() for file in WEIGHTS):
        raise ModelError(
            f"model {name}: an adapter of peft ({ADAPTER}, {kind}) lies beside the weights, and"
            f" belongs to them for transformers; {merge}; or move the adapter out to train without"
            " it, with --lora RANK for a new one"
        )
    raise ModelError(
        f"model {name}: is an adapter of peft ({ADAPTER}, {kind}) without the weights of its base,"
        f" {base}; {merge}; or name the base, with --lora RANK for a new adapter"
    )


def _check_index(name: str, index: Path) -> None:
    """Raise ModelError for an index of weights that names a file outside of its folder."""
    try:
        files = {
            str(file)
            for file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        }
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(
            f"model {name}: {index.name} cannot be read: {type(error).__name__}: {error}"
        ) from None
    for file in sorted(files):
        if Path(file).name != file or file == "..":
            raise ModelError(
                f"model {name}: {index.name} names {file!r}, which is no file of the folder"
            )


def _hub_folder(name: str, built_in: Collection[str], beside: tuple[str, ...]) -> Path:
    """Return the cached or downloaded folder of a hub model. Raises ModelError, one line."""
    # Hub names have at most one slash, so this is a path.
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"model {name}: no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    hint = nearest(name, built_in)
    names = ", ".join(built_in)
    wanted = [*DESCRIPTIONS, TEMPLATES, "*.safetensors"]
    try:
        # The local cache first, so that a cached model needs no network.
        folder = _snapshot(snapshot_download, name, beside, local_files_only=True)
        # Pickled weights are downloaded only if there are no safetensors.
        for patterns in (wanted, [*wanted, "pytorch_model*.bin"]):
            folder = folder or _snapshot(snapshot_download, name, beside, allow_patterns=patterns)
    except HFValidationError:
        raise ModelError(
            f"model {name!r}: not built in ({names}), not a folder, and not a valid hub name{hint}"
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = _first_line(error)
        where = f"not built in ({names}), not a local folder, and not available from the hub"
        offline = "; check the network, or name a folder" if isinstance(error, OSError) else ""
        raise ModelError(f"model {name!r}: {where}: {reason}{offline}{hint}") from None
    if folder is None:
        files = f"config, weights or {BESIDE[beside]}"
        raise ModelError(f"model {name!r}: its hub repository lacks {files} in a known format")
    return folder


def _snapshot(download: Any, name: str, beside: tuple[str, ...], **options: Any) -> Path | None:
    """Return the snapshot's folder; ``None`` if it lacks a file that the model needs."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        with silence_transformers():
            folder = Path(download(name, **options))
        _check_folder(name, folder, beside)
    except LocalEntryNotFoundError:
        if "local_files_only" in options:
            return None
        raise
    except ModelError:
        return None
    return folder


@contextmanager
def one_line_errors(failure: str) -> Iterator[None]:
    """Turn any exception of a library about a user's files into a one-line ModelError.

    ``failure``: the beginning of the line.
    """
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        reason = _broken_library(error) or f"{type(error).__name__}: {_first_line(error)}"
        raise ModelError(f"{failure}: {reason}") from error


def _broken_library(error: Exception) -> str | None:
    """Return which installed package does not import, if transformers does not because of it.

    The error of transformers names its own module alone. It imports accelerate and others where
    they are installed, also for a model that needs none of them.
    """
    cause = error.__cause__
    if not isinstance(error, ImportError) or not isinstance(cause, Exception):
        return None
    while isinstance(cause.__cause__, Exception):
        cause = cause.__cause__
    for frame, _ in traceback.walk_tb(cause.__traceback__):
        package, _, _ = frame.f_globals.get("__name__", "").partition(".")
        # The first package that transformers imported: what that imports may raise the error.
        if package not in ("transformers", "importlib", "distcore_tasks"):
            reason = f"{type(cause).__name__}: {_first_line(cause)}"
            return (
                f"the installed package {package} does not import ({reason}); install another"
                " release of it, or uninstall it"
            )
    return None


def _first_line(error: Exception) -> str:
    """Return the first line of an error that is not blank, or the name of its class."""
    for line in str(error).splitlines():
        if line.strip():
            return line.strip()
    return type(error).__name__
