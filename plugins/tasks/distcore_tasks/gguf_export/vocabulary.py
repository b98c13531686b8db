"""Tokenizers of transformers as llama.cpp holds them: byte-level pairs,
and pieces of SentencePiece.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcore import ConfigError

if TYPE_CHECKING:
    from gguf import GGUFWriter, SpecialVocab

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    _WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _WORDS + r"\p{N}" + _REST: "qwen2",
}
"""How texts are split before pairs are merged: the pattern, to llama.cpp's name of it."""
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""A piece that stands for a byte."""
SPACE = "\u2581"
"""What SentencePiece writes for a space."""
_PREPEND = {"type": "Prepend", "prepend": SPACE}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
NORMALIZERS: tuple[list[dict[str, Any]], ...] = ([], [_REPLACE], [_PREPEND, _REPLACE])
"""Steps that llama.cpp has for pieces: each space is a piece's, and one may be
put before a text.
"""
ADDED_FLAGS = ("lstrip", "rstrip", "single_word")
"""What a token may say of the text around it, and llama.cpp does not read."""
MORE_ENDS = ("eot", "eom")
"""Roles, besides that of eos_token, in which a token ends a text in llama.cpp."""
COMPOSES = {"type": "NFC"}
"""The normalizer of Qwen's models, which llama.cpp does not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """Tokens by number, and how a text is cut into them."""

    model: str
    """The kind, as llama.cpp names it."""
    pre: str
    """How a text is split first, as llama.cpp names it."""
    tokens: list[str]
    """As long as the embedding."""
    types: list[int]
    """gguf's ``TokenType`` of each."""
    scores: list[float] | None
    """Of pieces: the highest pair is merged first."""
    adds_space: bool
    """Whether a space is put before a text."""
    special: SpecialVocab
    """Tokens with a role, merges, and the chat template."""

    def describe(self, writer: GGUFWriter) -> None:
        """Write all of it."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(self.adds_space)
        self.special.add_to_gguf(writer, quiet=True)


def vocabulary_of(folder: Path, size: int, ends: Sequence[int] = ()) -> Vocabulary:
    """Return the vocabulary of a folder with tokenizer and config, padded to ``size`` tokens.

    ``ends`` are the numbers of all tokens at which the model ends a text. Raises ConfigError for a
    tokenizer that llama.cpp would not cut texts as, and for more ends than a file has roles for.
    """
    from gguf import SpecialVocab
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            "--format gguf: the task has no tokenizer.json, which llama.cpp's tokenizer is made"
            " from"
        )
    known = json.loads(file.read_text(encoding="utf-8"))
    pieces = _is_pieces(known)
    if pieces:
        _check_pieces(known)
    pre = "default" if pieces else _pre_of(known)
    _check_model(known["model"])
    _check_flags(known["added_tokens"])
    tokenizer = Tokenizer.from_file(str(file))
    _check_normalized(known["added_tokens"], tokenizer.normalizer)
    special = SpecialVocab(folder, load_merges=not pieces, n_vocab=size)
    special.add_special_token = _adds(tokenizer, special.special_token_ids)
    special.special_token_ids |= _roles_of(ends, special.special_token_ids)
    tokens, types = _tokens_of(known, size)
    return Vocabulary(
        model="llama" if pieces else "gpt2",
        pre=pre,
        tokens=tokens,
        types=types,
        scores=[-float(number) for number in range(size)] if pieces else None,
        adds_space=pieces
        and tokenizer.encode("a", add_special_tokens=False).tokens[0].startswith(SPACE),
        special=special,
    )


def _is_pieces(known: Mapping[str, Any]) -> bool:
    """Return True for SentencePiece, False for byte-level pairs; raises
    ConfigError for another kind.
    """
    model = known["model"]
    if model["type"] != "BPE":
        raise _refused(f"a model {model['type']}")
    if not model.get("byte_fallback"):
        return False
    # llama.cpp merges the pair of the lowest number: the same only if numbers are in the
    # order of merges.
    merges = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    numbers = [model["vocab"]["".join(merge)] for merge in merges]
    if any(after < before for before, after in pairwise(numbers)):
        raise _refused("pieces whose numbers are not in the order of their merges")
    return True


def _check_pieces(known: Mapping[str, Any]) -> None:
    """Raise ConfigError for pieces that are made of another text than llama.cpp makes them of."""
    steps = _steps(known["normalizer"], "normalizers")
    if steps not in NORMALIZERS:
        others = [step["type"] for step in steps if step not in (_PREPEND, _REPLACE)]
        raise _refused(f"a normalizer {', '.join(others or ['of other steps'])}")
    splits = _steps(known["pre_tokenizer"], "pretokenizers")
    if [split["type"] for split in splits] not in ([], ["Metaspace"]):
        raise _refused(f"a split of texts by {', '.join(split['type'] for split in splits)}")
    if not splits:
        return
    if splits[0].get("prepend_scheme") == "first":
        # llama.cpp puts a space behind each special token, too, so that it
        # cuts conversations otherwise.
        raise _refused("a space before the first word only (prepend_scheme: first)")
    if splits[0].get("split", True) and any(
        SPACE in piece[1:] for piece in known["model"]["vocab"]
    ):
        raise _refused("pieces of several words, and a split into words (Metaspace, split: true)")


def _check_model(model: Mapping[str, Any]) -> None:
    """Raise ConfigError for a way of merging that llama.cpp does not have."""
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise _refused(f"a model with {key} = {model[key]!r}")


def _check_flags(added_tokens: Iterable[Mapping[str, Any]]) -> None:
    """Raise ConfigError for an added token that takes spaces around it along, or is found only
    as a whole word.
    """
    for added in added_tokens:
        if flag := next((flag for flag in ADDED_FLAGS if added.get(flag)), None):
            raise _refused(f"an added token {added['content']!r} with {flag} = true")


def _check_normalized(added_tokens: Iterable[Mapping[str, Any]], normalizer: Any) -> None:
    """Raise ConfigError for an added token that is not found as it is written, but
    as ``normalizer`` makes it.
    """
    for added in added_tokens:
        if normalizer is None or not added.get("normalized"):
            continue
        name = added["content"]
        if (looked_for := normalizer.normalize_str(name)) != name:
            raise _refused(
                f"an added token {name!r} that it looks for as {looked_for!r} (normalized = true)"
            )


def _steps(part: Mapping[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or a pre-tokenizer, which may be one, a sequence
    of them, or none.
    """
    if part is None:
        return []
    steps = part[key] if part["type"] == "Sequence" else [part]
    return [dict(step) for step in steps]


def _pre_of(known: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of how texts are split into words."""
    parts = known["pre_tokenizer"] or {}
    parts = parts.get("pretokenizers", [parts])
    kinds = [part.get("type") for part in parts]
    if (
        kinds == ["ByteLevel"]
        and parts[0].get("use_regex", True)
        and not parts[0]["add_prefix_space"]
    ):
        name: str | None = "gpt-2"
    elif kinds == ["Split", "ByteLevel"] and not parts[1].get("use_regex", True):
        name = SPLITS.get(parts[0]["pattern"].get("Regex", ""))
    else:
        name = None
    if name is None:
        raise _refused("another pattern that splits texts than GPT-2's, Llama 3's and Qwen's")
    steps = _steps(known["normalizer"], "normalizers")
    if others := [step["type"] for step in steps if step != COMPOSES]:
        raise _refused(f"a normalizer {', '.join(others)}")
    if steps:
        raise ConfigError(
            "--format gguf: the tokenizer has a normalizer NFC, which llama.cpp lacks, so that it"
            " would cut a letter with a combining accent otherwise; if all texts are in that form"
            " already, export without --format, and convert that folder with llama.cpp's"
            " convert_hf_to_gguf.py, which leaves the normalizer out"
        )
    return name


def _adds(tokenizer: Any, roles: Mapping[str, int]) -> dict[str, bool]:
    """Return whether the tokenizer puts its token for the beginning before a text, and that for
    the end behind it.
    """
    text, whole = (
        tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True)
    )
    for begins, ends in product((False, True), repeat=2):
        if whole == [roles.get("bos")] * begins + text + [roles.get("eos")] * ends:
            return {"bos": begins, "eos": ends}
    raise _refused("other tokens around a text than bos_token and eos_token")


def _roles_of(ends: Sequence[int], roles: Mapping[str, int]) -> dict[str, int]:
    """Return a role for each token that ends a text and is not the eos_token, by llama.cpp's
    name of the role.
    """
    others = [end for end in ends if end != roles.get("eos")]
    if len(others) > len(MORE_ENDS):
        raise ConfigError(
            f"--format gguf: eos_token_id of generation_config.json has {len(ends)} tokens,"
            f" {[*ends]}; a file has room for the tokenizer's eos_token and {len(MORE_ENDS)} more:"
            " leave some out"
        )
    return dict(zip(MORE_ENDS, others, strict=False))


def _tokens_of(known: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Return each token and its type; numbers without a token are unused."""
    from gguf import TokenType

    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [int(TokenType.UNUSED)] * size
    for token, number in known["model"]["vocab"].items():
        tokens[number] = token
        types[number] = int(TokenType.BYTE if BYTE.fullmatch(token) else TokenType.NORMAL)
    for added in known["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = int(TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED)
    unknown = known["model"].get("unk_token")
    if unknown in known["model"]["vocab"]:
        types[known["model"]["vocab"][unknown]] = int(TokenType.UNKNOWN)
    return tokens, types


def _refused(why: str) -> ConfigError:
    return ConfigError(
        f"--format gguf: the tokenizer has {why}, which llama.cpp would read otherwise; export"
        " without --format, and convert that folder with llama.cpp's convert_hf_to_gguf.py"
    )
