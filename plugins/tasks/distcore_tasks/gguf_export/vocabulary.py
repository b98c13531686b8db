"""Tokenizers of transformers in the form of llama.cpp.

There are two kinds: byte-level pairs, as of GPT-2, and pieces of SentencePiece, as of Llama 2. A
tokenizer is refused if llama.cpp would cut some text otherwise.
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
"""Map the pattern by which texts are split before pairs are merged to llama.cpp's name of it."""
BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""A piece that stands for a byte."""
SPACE = "\u2581"
"""What SentencePiece writes for a space."""
_PREPEND = {"type": "Prepend", "prepend": SPACE}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
NORMALIZERS: tuple[list[dict[str, Any]], ...] = ([], [_REPLACE], [_PREPEND, _REPLACE])
"""Normalizers of pieces that llama.cpp has: none; spaces become ``SPACE``; and one is put before
the text, too.
"""
ADDED_FLAGS = ("lstrip", "rstrip", "single_word")
"""Settings by which an added token depends on the text around it; llama.cpp does not have them."""
MORE_ENDS = ("eot", "eom")
"""Roles, besides that of eos_token, in which a token ends a text in llama.cpp."""
COMPOSES = {"type": "NFC"}
"""The normalizer of Qwen's models, which llama.cpp does not have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """The tokens, and how llama.cpp cuts a text into them."""

    model: str
    """llama.cpp's name of the kind of tokenizer."""
    pre: str
    """llama.cpp's name of the pattern by which a text is split first."""
    tokens: list[str]
    """The tokens by number, as many as the embedding has rows."""
    types: list[int]
    """gguf's ``TokenType`` of each token."""
    scores: list[float] | None
    """Score of each piece: the pair of the highest score is merged first. ``None`` for byte-level
    pairs.
    """
    adds_space: bool
    """Whether a space is put before a text."""
    special: SpecialVocab
    """Tokens with a role, merges, and the chat template."""

    def describe(self, writer: GGUFWriter) -> None:
        """Write the vocabulary to a GGUF file."""
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
    tokenizer that cuts texts otherwise than llama.cpp would, and for more ends than a file has
    roles for.
    """
    from gguf import SpecialVocab
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            "--format gguf: the task has no tokenizer.json, which llama.cpp's tokenizer is made"
            " from"
        )
    tokenizer_json = json.loads(file.read_text(encoding="utf-8"))
    has_pieces = _is_pieces(tokenizer_json)
    if has_pieces:
        _check_pieces(tokenizer_json)
        pre = "default"
    else:
        pre = _pre_of(tokenizer_json)
    _check_model(tokenizer_json["model"])
    _check_flags(tokenizer_json["added_tokens"])
    tokenizer = Tokenizer.from_file(str(file))
    _check_normalized(tokenizer_json["added_tokens"], tokenizer.normalizer)
    special = SpecialVocab(folder, load_merges=not has_pieces, n_vocab=size)
    special.add_special_token = _adds(tokenizer, special.special_token_ids)
    special.special_token_ids |= _roles_of(ends, special.special_token_ids)
    tokens, types = _tokens_of(tokenizer_json, size)
    scores = None
    adds_space = False
    if has_pieces:
        # Pieces are numbered in the order of their merges: the lower, the earlier.
        scores = [-float(number) for number in range(size)]
        first_token = tokenizer.encode("a", add_special_tokens=False).tokens[0]
        adds_space = first_token.startswith(SPACE)
    return Vocabulary(
        model="llama" if has_pieces else "gpt2",
        pre=pre,
        tokens=tokens,
        types=types,
        scores=scores,
        adds_space=adds_space,
        special=special,
    )


def _is_pieces(tokenizer_json: Mapping[str, Any]) -> bool:
    """Return True for SentencePiece, False for byte-level pairs; raises
    ConfigError for another kind.
    """
    model = tokenizer_json["model"]
    if model["type"] != "BPE":
        raise _refused(f"a model {model['type']}")
    if not model.get("byte_fallback"):
        return False
    # llama.cpp merges the pair with the lowest number first: that is the same only if numbers are
    # in the order of merges.
    numbers = []
    for merge in model["merges"]:
        # Older files have "left right" for ["left", "right"].
        pair = merge.split(" ") if isinstance(merge, str) else merge
        numbers.append(model["vocab"]["".join(pair)])
    if any(after < before for before, after in pairwise(numbers)):
        raise _refused("pieces whose numbers are not in the order of their merges")
    return True


def _check_pieces(tokenizer_json: Mapping[str, Any]) -> None:
    """Raise ConfigError if a text is changed or split, before it is cut into pieces, in a way that
    llama.cpp does not have.
    """
    steps = _steps(tokenizer_json["normalizer"], "normalizers")
    if steps not in NORMALIZERS:
        other_steps = [step["type"] for step in steps if step not in (_PREPEND, _REPLACE)]
        # Without any, the known steps are in another order, or one of them is missing.
        names = ", ".join(other_steps) or "of other steps"
        raise _refused(f"a normalizer {names}")
    splits = _steps(tokenizer_json["pre_tokenizer"], "pretokenizers")
    if not splits:
        return
    kinds = [split["type"] for split in splits]
    if kinds != ["Metaspace"]:
        raise _refused(f"a split of texts by {', '.join(kinds)}")
    [metaspace] = splits
    if metaspace.get("prepend_scheme") == "first":
        # llama.cpp puts a space behind each special token, too, and so would cut conversations
        # otherwise.
        raise _refused("a space before the first word only (prepend_scheme: first)")
    splits_at_spaces = metaspace.get("split", True)
    has_space_inside = any(SPACE in piece[1:] for piece in tokenizer_json["model"]["vocab"])
    if splits_at_spaces and has_space_inside:
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
        for flag in ADDED_FLAGS:
            if added.get(flag):
                raise _refused(f"an added token {added['content']!r} with {flag} = true")


def _check_normalized(added_tokens: Iterable[Mapping[str, Any]], normalizer: Any) -> None:
    """Raise ConfigError for an added token that is searched for in another form than the one in
    which it is written: in that to which ``normalizer`` brings it.
    """
    if normalizer is None:
        return
    for added in added_tokens:
        if not added.get("normalized"):
            continue
        name = added["content"]
        searched_for = normalizer.normalize_str(name)
        if searched_for != name:
            raise _refused(
                f"an added token {name!r} that it looks for as {searched_for!r} (normalized = true)"
            )


def _steps(part: Mapping[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or a pre-tokenizer: none, one, or those of a sequence.

    A sequence has them under ``key``.
    """
    if part is None:
        return []
    steps = part[key] if part["type"] == "Sequence" else [part]
    return [dict(step) for step in steps]


def _pre_of(tokenizer_json: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of how texts are split into words."""
    name = _split_name(tokenizer_json["pre_tokenizer"] or {})
    if name is None:
        raise _refused("another pattern that splits texts than GPT-2's, Llama 3's and Qwen's")
    steps = _steps(tokenizer_json["normalizer"], "normalizers")
    other_steps = [step["type"] for step in steps if step != COMPOSES]
    if other_steps:
        raise _refused(f"a normalizer {', '.join(other_steps)}")
    if steps:
        raise ConfigError(
            "--format gguf: the tokenizer has a normalizer NFC, which llama.cpp lacks, so that it"
            " would cut a letter with a combining accent otherwise; if all texts are in that form"
            " already, export without --format, and convert that folder with llama.cpp's"
            " convert_hf_to_gguf.py, which leaves the normalizer out"
        )
    return name


def _split_name(pre_tokenizer: Mapping[str, Any]) -> str | None:
    """Return llama.cpp's name of the pattern by which a pre-tokenizer splits texts; ``None`` for
    one that it does not have.
    """
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"]:
        [byte_level] = parts
        # The pattern of GPT-2 is part of the step; use_regex is missing in files of older versions.
        is_gpt2 = byte_level.get("use_regex", True) and not byte_level["add_prefix_space"]
        return "gpt-2" if is_gpt2 else None
    if kinds == ["Split", "ByteLevel"]:
        split, byte_level = parts
        splits_twice = byte_level.get("use_regex", True)
        return None if splits_twice else SPLITS.get(split["pattern"].get("Regex", ""))
    return None


def _adds(tokenizer: Any, roles: Mapping[str, int]) -> dict[str, bool]:
    """Return by role, ``bos`` and ``eos``, whether the tokenizer puts that token around a text."""
    text = tokenizer.encode("a", add_special_tokens=False).ids
    text_with_special = tokenizer.encode("a", add_special_tokens=True).ids
    bos = [roles.get("bos")]
    eos = [roles.get("eos")]
    for adds_bos, adds_eos in product((False, True), repeat=2):
        # A list times False is empty.
        if text_with_special == bos * adds_bos + text + eos * adds_eos:
            return {"bos": adds_bos, "eos": adds_eos}
    raise _refused("other tokens around a text than bos_token and eos_token")


def _roles_of(ends: Sequence[int], roles: Mapping[str, int]) -> dict[str, int]:
    """Return the tokens, besides the eos_token, that end a text, each by llama.cpp's name of a
    role that does so.
    """
    other_ends = [end for end in ends if end != roles.get("eos")]
    if len(other_ends) > len(MORE_ENDS):
        raise ConfigError(
            f"--format gguf: eos_token_id of generation_config.json has {len(ends)} tokens,"
            f" {[*ends]}; a file has room for the tokenizer's eos_token and {len(MORE_ENDS)} more:"
            " leave some out"
        )
    # There may be fewer ends than roles.
    return dict(zip(MORE_ENDS, other_ends, strict=False))


def _tokens_of(tokenizer_json: Mapping[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Return ``size`` tokens by number, and the type of each.

    Numbers without a token, such as those by which the embedding is padded, are unused.
    """
    from gguf import TokenType

    numbers: Mapping[str, int] = tokenizer_json["model"]["vocab"]

    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [int(TokenType.UNUSED)] * size
    for token, number in numbers.items():
        tokens[number] = token
        types[number] = int(TokenType.BYTE if BYTE.fullmatch(token) else TokenType.NORMAL)
    # After those of the model: an added token may be one of them, and its type then counts.
    for added in tokenizer_json["added_tokens"]:
        number = added["id"]
        tokens[number] = added["content"]
        types[number] = int(TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED)
    unknown = tokenizer_json["model"].get("unk_token")
    if unknown in numbers:
        types[numbers[unknown]] = int(TokenType.UNKNOWN)
    return tokens, types


def _refused(why: str) -> ConfigError:
    """Return the error for a tokenizer that llama.cpp cannot follow: it has ``why``."""
    return ConfigError(
        f"--format gguf: the tokenizer has {why}, which llama.cpp would read otherwise; export"
        " without --format, and convert that folder with llama.cpp's convert_hf_to_gguf.py"
    )
