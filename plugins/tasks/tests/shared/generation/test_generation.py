"""Texts that a model writes in a batch are those it writes for one prompt alone, under every
setting of its folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, GenerationConfig

from distcore.config import RunConfig
from distcore.errors import ConfigError, ModelError
from distcore_tasks.causal_lm.task import CausalLM
from distcore_tasks.causal_lm.vocabulary import train_tokenizer
from distcore_tasks.shared.generation import settings
from distcore_tasks.shared.generation.rows import answer_sources, continue_prompts, write_rows
from distcore_tasks.shared.generation.settings import add_ends, check_settings, ends_of

VOCABULARY, NEW = 60, 9
LENGTHS = (2, 7, 4, 7, 0, 5)
TOKENS: dict[str, Any] = {
    "vocab_size": VOCABULARY, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
RECURRENT = {
    "num_key_value_heads": 1, "head_dim": 8, "lru_width": 32, "attention_window_size": 4,
    "block_types": ["recurrent", "attention"],
}  # fmt: skip
BART = {
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 1,
}
EXPERTS = {
    "num_experts": 4,
    "num_decoder_layers": 2,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
}
LLAMA = ("Llama", SMALL)
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": LLAMA,
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "recurrent gemma": ("RecurrentGemma", SMALL | RECURRENT),
    "rwkv": ("Rwkv", {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32}),
    "mamba": ("Mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("Bart", BART),
    "switch": ("SwitchTransformers", T5 | EXPERTS),
    "nllb-moe": (
        "NllbMoe",
        BART | {"num_experts": 4, "encoder_sparse_step": 1, "decoder_sparse_step": 1},
    ),
    "fsmt": (
        "FSMT",
        BART | {"langs": ["en", "de"], "src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY},
    ),
}
PROMPT_SETTINGS: list[dict[str, Any]] = [
    {},
    {"min_length": 12},
    {"repetition_penalty": 1.8},
    {"no_repeat_ngram_size": 1},
    {"bad_words_ids": [[5], [7, 8]]},
    {"encoder_no_repeat_ngram_size": 1},
    {"encoder_repetition_penalty": 3.0},
    {"num_beams": 3, "length_penalty": 0.5},
    {"exponential_decay_length_penalty": [2, 1.5]},
    {"return_dict_in_generate": True, "output_scores": True},
    {"prompt_lookup_num_tokens": 3},
    {"cache_implementation": "offloaded"},
]
SOURCE_SETTINGS: list[dict[str, Any]] = [
    {},
    {"min_length": 5},
    {"encoder_no_repeat_ngram_size": 2},
    {"encoder_repetition_penalty": 2.5},
    {"num_beams": 2},
    {"forced_bos_token_id": 7},
]


def made(name: str, fields: dict[str, Any], *, encoder: bool) -> Any:
    """A model with large random weights, so that scores differ much from token to token."""
    torch.manual_seed(1)
    plain = {key: value for key, value in TOKENS.items() if name != "FSMT" or key != "vocab_size"}
    config = getattr(transformers, f"{name}Config")(**plain, **fields)
    auto: Any = AutoModelForSeq2SeqLM if encoder else AutoModelForCausalLM
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model


def rows(*, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of unlike lengths, one of them empty, padded to the longest."""
    torch.manual_seed(2)
    tokens, mask = (
        torch.ones(len(LENGTHS), max(LENGTHS), dtype=torch.long),
        torch.zeros(len(LENGTHS), max(LENGTHS)),
    )
    for row, length in enumerate(LENGTHS):
        columns = slice(max(LENGTHS) - length, None) if left else slice(length)
        tokens[row, columns] = torch.randint(3, VOCABULARY, (length,))
        mask[row, columns] = 1
    return tokens, mask.long()


def text(tokens: list[int], ends: list[int]) -> list[int]:
    """The tokens before the first end."""
    return tokens[: next((place for place, token in enumerate(tokens) if token in ends), None)]


def alone(model: Any, row: torch.Tensor, said: dict[str, Any], skip: int) -> list[int]:
    """What transformers writes for one row, without padding: the text before its first end."""
    # These change speed or form: transformers refuses some of them beside others, and gives
    # the same text.
    said = {key: value for key, value in said.items() if key not in settings.SPEED | settings.FORM}
    made = model.generate(
        row, attention_mask=torch.ones_like(row), max_new_tokens=NEW, do_sample=False, **said
    )
    return text(made[0, skip:].tolist(), ends_of(vars(model.generation_config)))


@pytest.mark.parametrize("kind", DECODERS)
def test_a_prompt_gets_in_a_batch_what_it_gets_alone(kind: str) -> None:
    model = made(*DECODERS[kind], encoder=False)
    tokens, mask = rows(left=True)
    texts = continue_prompts(model, tokens, mask, NEW, {}, in_step=False)
    for row, new in enumerate(texts):
        length = LENGTHS[row]
        expected = alone(model, tokens[row : row + 1, -length:], {}, length) if length else []
        assert new.tolist() == expected


def test_a_model_that_reads_padding_is_found_by_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    """No attribute says so: it leaves out the mask of prompts."""
    model = made(*LLAMA, encoder=False)
    masked = model.forward
    monkeypatch.setattr(
        model, "forward", lambda *given, attention_mask=None, **named: masked(*given, **named)
    )
    tokens, mask = rows(left=True)
    for row, new in enumerate(continue_prompts(model, tokens, mask, NEW, {}, in_step=False)):
        length = LENGTHS[row]
        expected = alone(model, tokens[row : row + 1, -length:], {}, length) if length else []
        assert new.tolist() == expected


@pytest.mark.parametrize("said", PROMPT_SETTINGS, ids=lambda said: next(iter(said), "none"))
def test_each_setting_gives_a_prompt_what_it_gives_it_alone(said: dict[str, Any]) -> None:
    model = made(*LLAMA, encoder=False)
    model.generation_config.update(eos_token_id=[2, 9, 11], **said)
    tokens, mask = rows(left=True)
    texts = continue_prompts(model, tokens, mask, NEW, {}, in_step=False)
    assert any(0 < len(new) < NEW for new in texts) or said  # some text ends
    for row, new in enumerate(texts):
        length = LENGTHS[row]
        if length:
            reference = made(*LLAMA, encoder=False)
            reference.generation_config.eos_token_id = [2, 9, 11]
            assert new.tolist() == alone(reference, tokens[row : row + 1, -length:], said, length)


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("said", SOURCE_SETTINGS, ids=lambda said: next(iter(said), "none"))
def test_each_setting_gives_a_source_what_it_gives_it_alone(
    said: dict[str, Any], kind: str
) -> None:
    model = made(*ENCODERS[kind], encoder=True)
    tokens, mask = rows(left=False)
    texts = answer_sources(model, tokens, mask, NEW, said, in_step=False)
    for row, new in enumerate(texts):
        length = LENGTHS[row]
        expected = alone(model, tokens[row : row + 1, :length], said, 1) if length else []
        assert new.tolist() == expected


def test_ranks_that_keep_step_make_equally_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank has seven lengths, this one has five."""
    calls: list[tuple[int, ...]] = []

    def agree(most: torch.Tensor, _: Any) -> None:
        calls.append(())
        most.fill_(7)

    monkeypatch.setattr("torch.distributed.all_reduce", agree)

    def write(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(tokens.shape))
        return tokens

    tokens, mask = rows(left=False)
    write_rows(write, tokens, mask, {}, apart=True, in_step=True)
    assert calls == [(), (1, 2), (1, 4), (1, 5), (2, 7), (1, 1), (1, 1), (1, 1)]
    calls.clear()
    write_rows(write, tokens, torch.zeros_like(mask), {}, apart=False, in_step=True)
    assert calls == [(), *[(1, 1)] * 7]  # a rank with rows would wait in its first call


def test_each_key_of_a_generation_config_has_one_owner() -> None:
    """A key that a new transformers brings stands in no set: read what it does, and
    put it into one.
    """
    sets = (
        settings.SEARCH,
        settings.READS_PROMPT,
        settings.READS_SOURCE,
        settings.SAMPLING,
        settings.LENGTH,
        settings.SPEED,
        settings.FORM,
        settings.UNREAD,
        settings.REFUSED.keys(),
    )
    for key in vars(GenerationConfig()):
        owners = [number for number, keys in enumerate(sets) if key in keys]
        assert len(owners) == 1 or key.startswith("_"), key


def folder_with(folder: Path, said: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / settings.FILE).write_text(json.dumps(said))
    return folder


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (
            {"stop_strings": ["###"]},
            r"stop_strings = \['###'\]: a text ends at the tokens of eos_token_id alone",
        ),
        (
            {"num_beams": 2, "num_return_sequences": 2},
            "num_return_sequences = 2: each row has one text",
        ),
        ({"num_beams": 4, "num_beam_groups": 2}, "num_beam_groups = 2: .* use num_beams"),
        (
            {"penalty_alpha": 0.6, "top_k": 4},
            "penalty_alpha = 0.6: transformers has no contrastive search",
        ),
        ({"guidance_scale": 1.5}, "guidance_scale = 1.5: it needs a second prompt"),
        ({"max_time": 3.0}, "max_time = 3.0: a text would depend on the speed of the machine"),
        (
            {"cache_implementation": "quantized"},
            "cache_implementation = 'quantized': a cache in few bits",
        ),
        (
            {"decoder_start_token_id": [4, 5]},
            r"decoder_start_token_id = \[4, 5\]: all texts begin with one token",
        ),
        ({"num_return_sequences": 2}, "generation_config.json cannot be read: ValueError"),
    ],
)
def test_a_setting_that_cannot_be_honored_is_refused_by_file_and_key(
    said: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    folder = folder_with(tmp_path, said)
    with pytest.raises(
        ModelError, match=f"^model m: {settings.FILE}.* ?{problem}|^model m: {problem}"
    ):
        check_settings("m", folder, {})
    if "cannot be read" not in problem:
        check_settings("m", folder, {problem.split(" =")[0]: None})  # the way out it names


def test_settings_without_effect_pass(tmp_path: Path) -> None:
    said = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "num_beam_groups": 1,
        "guidance_scale": 1.0,
    }
    check_settings("m", folder_with(tmp_path, said), {"num_beams": 4})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_beam": 4}, r"generation.num_beam: is no setting of .*did you mean 'num_beams'"),
        ({"temperature": 0.5}, "generation.temperature = 0.5: generation is greedy"),
        ({"max_new_tokens": 5}, "task_options.max_new_tokens=N"),
        ({"forced_bos_token_id": [4, 5]}, "all texts begin with one token"),
        ({"num_beams": 0}, "a number of beams is 1 or more"),
        ({"stop_strings": "a"}, "generation.stop_strings = 'a': a text ends"),
    ],
)
def test_an_option_that_has_no_effect_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_settings("m", None, changes)


def test_a_run_refuses_them_before_it_reads_a_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(["a b c"] * 20))
    task = CausalLM(data=str(file), max_new_tokens=4, generation={"stop_strings": ["x"]})
    with pytest.raises(ConfigError, match="stop_strings"):
        task.prepare(RunConfig())


def test_the_end_that_training_teaches_ends_texts_of_the_export_too(tmp_path: Path) -> None:
    """As transformers' Trainer does. A temperature without sampling, which many
    folders have, stays saveable.
    """
    model = made(*LLAMA, encoder=False)
    (tmp_path / "before").mkdir()
    model.save_pretrained(tmp_path / "before")
    file = tmp_path / "before" / settings.FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | {"temperature": 0.6, "top_p": 0.9}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "before")
    add_ends(model, [2])
    assert model.generation_config.eos_token_id == 2
    add_ends(model, [7])
    model.save_pretrained(tmp_path / "after")
    said = json.loads((tmp_path / "after" / settings.FILE).read_text())
    assert (said["eos_token_id"], said["temperature"]) == ([7, 2], 0.6)


def test_special_tokens_are_shown_where_asked_for() -> None:
    from distcore import Ragged
    from distcore_tasks.shared.generation.rows import texts_of

    tokenizer = train_tokenizer(["a b c d"], 300)
    special = tokenizer.convert_tokens_to_ids("<|tool|>")
    written = [special, *tokenizer("a b")["input_ids"]]
    ragged = Ragged(torch.tensor(written), torch.tensor([len(written)]))
    assert texts_of(tokenizer, ragged, special=False) == ["a b"]
    assert texts_of(tokenizer, ragged, special=True) == ["<|tool|>a b"]


def test_tokens_that_a_tokenizer_takes_for_words_are_hidden_where_a_task_names_them() -> None:
    from distcore import Ragged
    from distcore_tasks.shared.generation.rows import texts_of

    tokenizer = train_tokenizer(["a b c d"], 300)
    language, *words = tokenizer("c a b")["input_ids"]
    ragged = Ragged(torch.tensor([language, *words]), torch.tensor([1 + len(words)]))
    assert texts_of(tokenizer, ragged, special=False, also=[language]) == [tokenizer.decode(words)]
    assert texts_of(tokenizer, ragged, special=True, also=[language]) == ["c a b"]
