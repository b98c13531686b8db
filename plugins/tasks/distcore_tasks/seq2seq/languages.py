"""Languages of a multilingual model: those that its tokenizer writes, and how a
text in one begins.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcore import ConfigError, nearest
from distcore_tasks.seq2seq.options import Seq2SeqOptions
from distcore_tasks.shared.generation.settings import change_settings
from distcore_tasks.shared.pretrained import load_tokenizer, read_config

if TYPE_CHECKING:
    from torch import nn

WRAPPING = ("mbart", "plbart")
"""Types of models whose decoder begins with the last token of a target, and not with
one of the config.
"""
SHOWN = 8
"""Languages in a message, of those of the tokenizer."""


def load_translator(options: Seq2SeqOptions) -> Any:
    """Return the model's tokenizer, which writes sources and targets in the languages of the run.

    Both are set on it, so that its folder, and that of an export, say them. Raises ConfigError for
    languages that it does not have.
    """
    folder = options.model_folder()
    tokenizer = load_tokenizer(options.model, folder)
    languages = {"source_lang": options.source_lang, "target_lang": options.target_lang}
    if not is_multilingual(tokenizer):
        for name, language in languages.items():
            if language:
                problem = f"the tokenizer of model {options.model} has no languages; leave it out"
                hint = (
                    "a model that reads its language in the source takes it by task_options.prefix"
                )
                raise ConfigError(f"{name} = {language!r}: {problem} ({hint})")
        return tokenizer
    source = options.source_lang or tokenizer.src_lang
    target = (
        options.target_lang or tokenizer.tgt_lang or _written_language(options, tokenizer) or source
    )
    for name, language in (("source_lang", source), ("target_lang", target)):
        _check_language(name, language, tokenizer, options.model)
    return load_tokenizer(options.model, folder, src_lang=source, tgt_lang=target)


def is_multilingual(tokenizer: Any) -> bool:
    """Return True for a tokenizer that writes the code of a language beside each text."""
    return hasattr(tokenizer, "set_tgt_lang_special_tokens")


def languages_of(tokenizer: Any) -> list[str]:
    """Return the languages of sources and targets of a multilingual tokenizer; an
    empty list for another.
    """
    return [tokenizer.src_lang, tokenizer.tgt_lang] if is_multilingual(tokenizer) else []


def say_languages(options: Seq2SeqOptions, languages: list[str]) -> list[str]:
    """Return a line about the languages that were taken without a choice."""
    if not languages or (options.source_lang and options.target_lang):
        return []
    source, target = languages
    taken = f"sources are in {source}, targets in {target}"
    return [
        f"model {options.model}: {taken}, as its folder says; --source-lang and --target-lang"
        " choose others"
    ]


def begin_in_language(model: nn.Module, tokenizer: Path) -> None:
    """Let generation begin as targets do in training, in the language of the
    tokenizer in this folder.
    """
    from distcore.model import silence_transformers

    file = tokenizer / "tokenizer_config.json"
    if not file.is_file():
        return
    settings = json.loads(file.read_text(encoding="utf-8"))
    # The tokenizer is loaded for a multilingual model only; of the others most have a
    # large vocabulary, too.
    if not settings.get("tgt_lang"):
        return
    loaded = load_tokenizer(str(tokenizer), tokenizer)
    if not is_multilingual(loaded):
        return
    owner: Any = model
    with silence_transformers():
        target = special_tokens_of(loaded, targets=True)
    is_wrapping = owner.config.model_type in WRAPPING
    start = target[-1] if is_wrapping else owner.config.decoder_start_token_id
    # A target that begins with its language has it as its first token, and else as
    # the decoder's start.
    has_language_first = target[0] != loaded.eos_token_id
    owner.config.decoder_start_token_id = start
    forced = target[0] if has_language_first else None
    change_settings(model, {"decoder_start_token_id": start, "forced_bos_token_id": forced})


def special_tokens_of(tokenizer: Any, *, targets: bool) -> list[int]:
    """Return the tokens that the tokenizer writes around an empty text."""
    tokens: list[int] = tokenizer(**{"text_target" if targets else "text": ""})["input_ids"]
    return tokens


def _written_language(options: Seq2SeqOptions, tokenizer: Any) -> str | None:
    """Return the language in which the folder's model writes, by its config; ``None``
    if it says none.
    """
    folder = options.model_folder()
    config = read_config(options.model, folder)
    file = folder / "generation_config.json"
    settings = dict(config)
    if file.is_file():
        # Newer folders have its keys there alone.
        settings |= json.loads(file.read_text(encoding="utf-8"))
    code_of_token = {}
    for code in _codes(tokenizer):
        token = tokenizer.convert_tokens_to_ids(_token(tokenizer, code))
        code_of_token[token] = code
    for key in ("forced_bos_token_id", "decoder_start_token_id"):
        language = code_of_token.get(settings.get(key))
        if language is not None:
            return language
    return None


def _codes(tokenizer: Any) -> list[str]:
    """Return the languages of a multilingual tokenizer."""
    codes: dict[str, int] = getattr(tokenizer, "lang_code_to_id", {})
    if codes:
        return [
            code
            for code in codes
            if tokenizer.convert_tokens_to_ids(_token(tokenizer, code)) is not None
        ]
    roles = {*tokenizer.special_tokens_map.values()} if not codes else set()
    names = {str(token) for token in roles if isinstance(token, str)}
    return [str(token) for token in tokenizer.all_special_tokens if str(token) not in names]


def _token(tokenizer: Any, code: str) -> str:
    """Return the token of a language: for some tokenizers it has underscores around its code."""
    tokens: dict[str, str] = getattr(tokenizer, "lang_code_to_token", {})
    return tokens.get(code, code)


def _check_language(name: str, language: str | None, tokenizer: Any, model: str) -> None:
    """Raise ConfigError for a language that the tokenizer does not have."""
    codes = _codes(tokenizer)
    if language in codes or f"__{language}__" in codes:
        return
    flag = f"--{name.replace('_', '-')}"
    shown = ", ".join(codes[:SHOWN])
    if len(codes) > SHOWN:
        shown += f", … ({len(codes)})"
    if not language:
        raise ConfigError(f"model {model}: its folder says no {name}; name one by {flag} ({shown})")
    hint = nearest(language, codes)
    raise ConfigError(
        f"{name} = {language!r}: model {model} has no such language{hint}; it has {shown}; use"
        f" {flag}"
    )
