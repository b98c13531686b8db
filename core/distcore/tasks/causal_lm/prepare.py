"""From options to tokenised data sets: read, check, split and tokenise rows, and cache the result by content."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from distcore.data.cache import cached_folder
from distcore.data.files import digest
from distcore.errors import DataError
from distcore.plugin.task import Datasets
from distcore.tasks.causal_lm import embedded
from distcore.tasks.causal_lm.encode import Part, encode
from distcore.tasks.causal_lm.models import PUBLISHED, from_scratch, model_folder, packs
from distcore.tasks.causal_lm.options import CausalOptions
from distcore.tasks.causal_lm.rows import Rows, read_rows
from distcore.tasks.causal_lm.sequences import COUNTED, Arrays, no_sequences, open_sequences, write_arrays
from distcore.tasks.pretrained import check_length, check_vocabulary, load_tokenizer, pad_token, tokenizer_files
from distcore.tasks.sources import source_file

FORMAT = 1
"""Version of the files in a cache entry, part of its key: raise it when their layout or meaning changes."""


@dataclass(frozen=True, kw_only=True)
class CausalDatasets(Datasets):
    """Tokenised rows, and the tokenizer that made the tokens."""

    vocab_size: int
    """Tokens in the tokenizer's vocabulary."""
    pad: int
    """Token that pads."""
    end: int | None
    """Token that ends an answer."""
    tokenizer: Path
    """Folder that ``AutoTokenizer`` reads."""


def prepare_rows(options: CausalOptions, seed: int) -> CausalDatasets:
    """Return the tokenised data sets of a run; prepared once, then taken from the cache.

    The key of a cache entry is a digest of the files' content. Raises DataError, ModelError or ConfigError.
    """
    packs(options)  # what cannot be packed is refused before any file is read
    if not from_scratch(options):
        check_length(options.model, model_folder(options.model), options.max_seq_len + options.max_new_tokens)
    folder = cached_folder("sequences", _key(options, seed), lambda folder: _build(folder, options, seed))
    return _open(folder, options)


def without_rows(folder: Path) -> CausalDatasets:
    """Return data sets with a tokenizer but no rows: enough to build a model and to write with it."""
    tokenizer = load_tokenizer(str(folder), folder)
    pad = pad_token(tokenizer)
    rows = no_sequences(pad)
    return CausalDatasets(
        train=rows,
        evaluation=rows,
        test=rows,
        vocab_size=len(tokenizer),
        pad=pad,
        end=tokenizer.eos_token_id,
        tokenizer=folder,
    )


def _key(options: CausalOptions, seed: int) -> str:
    """Return the key of the cache entry: a digest of everything that its content depends on."""
    facts = [
        FORMAT,
        [_source_digest(source) for source in (options.data, options.eval_data, options.test_data)],
        [options.form, asdict(options.columns)],
        None if options.eval_data else [seed, options.eval_fraction],  # what the split depends on
        [options.max_seq_len, options.split_documents],
        _tokenizer_digest(options),
        [version("tokenizers"), version("transformers")],  # a new release may write conversations differently
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:40]


def _source_digest(source: str | None) -> str | None:
    if source is None:
        return None
    if source in embedded.EMBEDDED:
        return embedded.fingerprint(source)
    return digest(source_file(source, embedded.EMBEDDED))


def _tokenizer_digest(options: CausalOptions) -> list[Any]:
    if from_scratch(options):
        return ["byte-level", options.tokenizer.vocab_size]
    folder = model_folder(options.model)
    files = [folder / "config.json", *tokenizer_files(folder)]
    return [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files if path.is_file()]


def _build(folder: Path, options: CausalOptions, seed: int) -> None:
    """Fill a new cache entry: one folder per data set, the tokenizer's folder, and ``entry.json``."""
    parts = _parts(options, seed)
    tokenizer = _tokenizer(options, parts["train"])  # a vocabulary must not see the evaluation rows
    size = max(tokenizer.get_vocab().values()) + 1  # numbers may have gaps
    facts: dict[str, dict[str, object]] = {}
    common = None
    for name, part in parts.items():
        arrays, cut = encode(part, tokenizer, options)
        if not from_scratch(options):
            check_vocabulary(options.model, model_folder(options.model), int(arrays.tokens.max(initial=0)))
        write_arrays(folder / name, arrays)
        common = _frequencies(arrays, size) if common is None else common
        facts[name] = _facts(part, arrays, cut, common)
    tokenizer.save_pretrained(folder / "tokenizer")
    entry = {"facts": facts, "form": parts["train"].rows.form, "vocab_size": len(tokenizer)}
    entry |= {"pad": pad_token(tokenizer), "end": tokenizer.eos_token_id}
    (folder / "entry.json").write_text(json.dumps(entry), encoding="utf-8")


def _parts(options: CausalOptions, seed: int) -> dict[str, Part]:
    """Return the data sets by name. Without ``--test-data`` there is no ``test``: the evaluation rows serve as test."""
    rows = _rows(options.data, options)
    if options.eval_data is None:
        parts = dict(zip(("train", "evaluation"), _split(rows, options.eval_fraction, seed), strict=True))
    else:
        parts = {"train": _whole(rows), "evaluation": _whole(_rows(options.eval_data, options))}
    if options.test_data is not None:
        parts["test"] = _whole(_rows(options.test_data, options))
    for name, part in parts.items():
        if part.rows.form != rows.form:
            found = f"has {part.rows.form}, but {rows.name} has {rows.form}"
            raise DataError(f"{part.rows.name}, for {name}: {found}: use one form for all")
    return parts


def _rows(source: str, options: CausalOptions) -> Rows:
    reader = embedded.EMBEDDED.get(source)
    return reader() if reader else read_rows(source_file(source, embedded.EMBEDDED), options)


def _whole(rows: Rows) -> Part:
    return Part(rows, np.arange(len(rows)))


def _split(rows: Rows, fraction: float, seed: int) -> Iterator[Part]:
    """Yield the rows to train on and those to evaluate on, which depend on seed and number of rows alone."""
    if len(rows) < 2:
        raise DataError(f"{rows.name}: holds one row, so none is left for evaluation; give --eval-data a file")
    order = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed))).permutation(len(rows))
    evaluated = min(max(1, round(fraction * len(rows))), len(rows) - 1)
    yield Part(rows, np.sort(order[evaluated:]))
    yield Part(rows, np.sort(order[:evaluated]))


def _tokenizer(options: CausalOptions, train: Part) -> Any:
    if not from_scratch(options):
        return load_tokenizer(options.model, model_folder(options.model))
    from distcore.tasks.causal_lm.vocabulary import train_tokenizer

    texts = Rows(train.rows.name, train.rows.form, train.values()).texts()
    return train_tokenizer(list(texts), options.tokenizer.vocab_size)


def _frequencies(arrays: Arrays, size: int) -> np.ndarray:
    """Return the log probability of each token, float64 ``(size,)``, from how often it is a target, plus one."""
    targets = arrays.tokens[(arrays.flags & COUNTED) > 0]
    counts = np.bincount(targets, minlength=size) + 1.0
    found: np.ndarray = np.log(counts / counts.sum())
    return found


def _facts(part: Part, arrays: Arrays, cut: int, common: np.ndarray) -> dict[str, object]:
    """Return what the report states of one data set; ``common``: log probability of each token of the training rows."""
    targets = arrays.tokens[(arrays.flags & COUNTED) > 0]
    return {
        "documents" if part.rows.form == "documents" else "conversations": len(part.numbers),
        "rows": len(arrays.lengths),
        "tokens": int(arrays.lengths.sum()),
        "targets": int(arrays.items().sum()),
        "rows_cut": cut,
        "unigram_perplexity": round(math.exp(-common[targets].mean()), 1),
    }


def _open(folder: Path, options: CausalOptions) -> CausalDatasets:
    """Open a cache entry that ``_build`` has filled."""
    entry = json.loads((folder / "entry.json").read_text(encoding="utf-8"))
    pad, packed = int(entry["pad"]), packs(options)
    prompts = {"train": False, "evaluation": options.max_new_tokens > 0, "test": options.max_new_tokens > 0}
    sets = {name: open_sequences(folder / name, pad, packed=packed, prompts=prompts[name]) for name in entry["facts"]}
    facts = {"data": options.data, "form": entry["form"], "packing": packed, **entry["facts"]}
    return CausalDatasets(
        train=sets["train"],
        evaluation=sets["evaluation"],
        test=sets.get("test", sets["evaluation"]),
        facts=facts,
        warnings=tuple(_warnings(entry["facts"], options)),
        vocab_size=entry["vocab_size"],
        pad=pad,
        end=entry["end"],
        tokenizer=folder / "tokenizer",
    )


def _warnings(facts: dict[str, dict[str, int]], options: CausalOptions) -> Iterator[str]:
    cut, rows = (sum(part[name] for part in facts.values()) for name in ("rows_cut", "rows"))
    if cut:
        length = options.max_seq_len
        yield f"{cut} of {rows} rows have more than {length} tokens and are cut; --max-seq-len sets another length"
    if options.model in PUBLISHED:
        where = f"--model openai-community/{options.model} takes the published ones"
        yield f"model {options.model}: built in, begins with random weights; {where}"
