"""The argument sets of the published example scripts become configs: what each key is, and that
no flag is dropped.
"""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml

from distcore.config import flatten
from distcore_migrate import migrate

GLUE_MRPC = (
    "run_glue.py --model_name_or_path bert-base-cased --task_name mrpc --do_train --do_eval"
    " --max_seq_length 128 --per_device_train_batch_size 32 --learning_rate 2e-5 --num_train_epochs"
    " 3 --output_dir /tmp/mrpc/"
)
NLP = {
    "task_options.data": "nyu-mll/glue:mrpc@train",
    "task_options.model": "google-bert/bert-base-cased",
    "lr": 2e-5,
    "schedule.warmup_steps": 100,
    "optimizer.weight_decay": 0.01,
    "clip.norm": None,
}
"""The settings of Accelerate's first example, by its source."""
COMMANDS: dict[str, tuple[str, dict[str, Any]]] = {
    "glue on one GPU": (
        f"python {GLUE_MRPC}",
        {
            "task": "text-classification",
            "strategy": "single",
            "task_options.model": "google-bert/bert-base-cased",
            "task_options.data": "nyu-mll/glue:mrpc@train",
            "task_options.eval_data": "nyu-mll/glue:mrpc@validation",
            "task_options.columns.text": "sentence1",
            "task_options.columns.text_pair": "sentence2",
            "task_options.max_seq_len": 128,
            "global_batch_size": 32,
            "micro_batch_size": 32,
            "lr": 2e-5,
            "epochs": 3,
            "out": "/tmp/mrpc/",
            "optimizer.weight_decay": 0.0,
            "seed": 42,
            "save_every": 500,
            "log_every": 500,
        },
    ),
    "glue by torchrun, in 16 bits": (
        (
            "torchrun --nproc_per_node 8 run_glue.py --model_name_or_path"
            " bert-large-uncased-whole-word-masking --task_name mnli --do_train --do_eval"
            " --max_seq_length 128 --per_device_train_batch_size 8 --learning_rate 2e-5"
            " --num_train_epochs 3.0 --output_dir /tmp/mnli_output/ --fp16"
        ),
        {
            "strategy": "ddp",
            "nproc": 8,
            "global_batch_size": 64,
            "micro_batch_size": 8,
            "precision": "fp16",
            "task_options.eval_data": "nyu-mll/glue:mnli@validation_matched",
            "task_options.model": "google-bert/bert-large-uncased-whole-word-masking",
        },
    ),
    "glue of numbers": (
        (
            "python run_glue.py --model_name_or_path bert-base-cased --task_name stsb --do_train"
            " --output_dir out"
        ),
        {"task_options.problem_type": "regression", "task_options.columns.text_pair": "sentence2"},
    ),
    "glue without the Trainer": (
        (
            "accelerate launch run_glue_no_trainer.py --model_name_or_path"
            " google-bert/bert-base-cased --task_name mrpc --max_length 96"
            " --per_device_train_batch_size 32 --learning_rate 2e-5 --num_train_epochs 3"
            " --output_dir out"
        ),
        {
            "task_options.max_seq_len": 96,
            "clip.norm": None,
            "epochs": 3,
            "save_every": 0,
            "optimizer.weight_decay": 0.0,
            "schedule.name": "linear",
        },
    ),
    "gpt-2 on wikitext": (
        (
            "python run_clm.py --model_name_or_path openai-community/gpt2 --dataset_name wikitext"
            " --dataset_config_name wikitext-2-raw-v1 --per_device_train_batch_size 8"
            " --per_device_eval_batch_size 8 --do_train --do_eval --output_dir /tmp/test-clm"
        ),
        {
            "task": "causal-lm",
            "task_options.data": "Salesforce/wikitext:wikitext-2-raw-v1@train",
            "task_options.eval_data": "Salesforce/wikitext:wikitext-2-raw-v1@validation",
            "task_options.max_seq_len": 1024,
            "global_batch_size": 8,
        },
    ),
    "gpt-2 from scratch": (
        (
            "python run_clm.py --model_type gpt2 --tokenizer_name gpt2 --train_file train.jsonl"
            " --validation_file val.jsonl --block_size 512 --gradient_accumulation_steps 4"
            " --warmup_ratio 0.03 --lr_scheduler_type cosine --do_train --output_dir out"
            " --adam_beta2 0.95 --max_grad_norm 0.5 --save_strategy no --logging_steps 20"
        ),
        {
            "task_options.model": "gpt2-base",
            "task_options.max_seq_len": 512,
            "global_batch_size": 32,
            "micro_batch_size": 8,
            "schedule.name": "cosine",
            "schedule.warmup_ratio": 0.03,
            "optimizer.betas": [0.9, 0.95],
            "clip.norm": 0.5,
            "save_every": 0,
            "log_every": 20,
        },
    ),
    "roberta, line by line": (
        (
            "python run_mlm.py --model_name_or_path FacebookAI/roberta-base --train_file path.jsonl"
            " --validation_file held.jsonl --per_device_train_batch_size 8 --line_by_line"
            " --mlm_probability 0.2 --do_train --do_eval --output_dir /tmp/test-mlm"
            " --max_seq_length 256"
        ),
        {
            "task": "masked-lm",
            "task_options.split_texts": False,
            "task_options.mask_probability": 0.2,
            "task_options.max_seq_len": 256,
            "task_options.eval_data": "held.jsonl",
        },
    ),
    "names of conll": (
        (
            "python run_ner.py --model_name_or_path google-bert/bert-base-uncased --dataset_name"
            " conll2003 --output_dir /tmp/test-ner --do_train --do_eval"
        ),
        {
            "task": "token-classification",
            "task_options.data": "eriktks/conll2003@train",
            "task_options.columns.tokens": "tokens",
            "task_options.columns.tags": "ner_tags",
        },
    ),
    "summaries": (
        (
            "python run_summarization.py --model_name_or_path google-t5/t5-small --do_train"
            " --do_eval --dataset_name cnn_dailymail --dataset_config 3.0.0 --source_prefix"
            " 'summarize: ' --output_dir /tmp/tst-summarization --per_device_train_batch_size=4"
            " --per_device_eval_batch_size=4 --overwrite_output_dir --predict_with_generate"
            " --label_smoothing_factor 0.1"
        ),
        {
            "task": "seq2seq",
            "task_options.data": "abisee/cnn_dailymail:3.0.0@train",
            "task_options.prefix": "summarize: ",
            "task_options.columns.source": "article",
            "task_options.columns.target": "highlights",
            "task_options.max_seq_len": 1024,
            "task_options.max_target_len": 128,
            "task_options.max_new_tokens": 128,
            "task_options.label_smoothing": 0.1,
            "global_batch_size": 4,
        },
    ),
    "translation": (
        (
            "python run_translation.py --model_name_or_path google-t5/t5-small --do_train --do_eval"
            " --source_lang en --target_lang ro --source_prefix 'translate English to Romanian: '"
            " --dataset_name wmt16 --dataset_config_name ro-en --output_dir /tmp/tst-translation"
            " --per_device_train_batch_size=4"
        ),
        {
            "task_options.data": "wmt/wmt16:ro-en@train",
            "task_options.columns.source": "translation.en",
            "task_options.columns.target": "translation.ro",
            "task_options.prefix": "translate English to Romanian: ",
        },
    ),
    "translation by a multilingual model": (
        (
            "python run_translation.py --model_name_or_path facebook/mbart-large-en-ro --do_train"
            " --do_eval --source_lang en_XX --target_lang ro_RO --dataset_name wmt16"
            " --dataset_config_name ro-en --forced_bos_token ro_RO --output_dir"
            " /tmp/tst-translation --per_device_train_batch_size=4"
        ),
        {
            "task_options.columns.source": "translation.en",
            "task_options.columns.target": "translation.ro",
            "task_options.source_lang": "en_XX",
            "task_options.target_lang": "ro_RO",
        },
    ),
    "images": (
        (
            "python run_image_classification.py --dataset_name beans --output_dir ./beans_outputs/"
            " --remove_unused_columns False --label_column_name labels --do_train --do_eval"
            " --push_to_hub --push_to_hub_model_id vit-base-beans --learning_rate 2e-5"
            " --num_train_epochs 5 --per_device_train_batch_size 8 --per_device_eval_batch_size 8"
            " --logging_strategy steps --logging_steps 10 --eval_strategy epoch --save_strategy"
            " epoch --load_best_model_at_end True --save_total_limit 3 --seed 1337"
        ),
        {
            "task": "image-classification",
            "task_options.data": "AI-Lab-Makerere/beans@train",
            "task_options.model": "google/vit-base-patch16-224-in21k",
            "task_options.columns.label": "labels",
            "log_every": 10,
            "eval_every": 0,
            "save_every": 0,
            "checkpoints.keep_last": 3,
            "seed": 1337,
            "epochs": 5,
        },
    ),
    "accelerate's first example": (
        "accelerate launch --multi_gpu --num_processes 2 nlp_example.py --mixed_precision bf16",
        NLP
        | {
            "strategy": "ddp",
            "nproc": 2,
            "global_batch_size": 32,
            "micro_batch_size": 16,
            "precision": "bf16",
        },
    ),
    "the same on the CPU": (
        "python nlp_example.py --cpu",
        NLP | {"device": "cpu", "global_batch_size": 16},
    ),
    "sharded by the Trainer": (
        (
            "torchrun --nproc-per-node=4 run_clm.py --model_name_or_path openai-community/gpt2"
            " --train_file t.jsonl --do_train --bf16 --fsdp 'full_shard auto_wrap' --output_dir out"
            " --fsdp_transformer_layer_cls_to_wrap GPT2Block"
        ),
        {
            "strategy": "fsdp",
            "nproc": 4,
            "strategy_options.sharding": "full",
            "strategy_options.wrap": ["GPT2Block"],
            "strategy_options.param_dtype": "precision",
            "precision": "bf16",
        },
    ),
    "sharded by accelerate launch": (
        (
            "accelerate launch --use_fsdp --num_processes 2 --fsdp_version 2"
            " --fsdp_reshard_after_forward false --fsdp_offload_params true --fsdp_auto_wrap_policy"
            " SIZE_BASED_WRAP --fsdp_min_num_params 2000 run_clm_no_trainer.py --model_name_or_path"
            " openai-community/gpt2 --train_file t.jsonl --checkpointing_steps 100"
        ),
        {
            "strategy": "fsdp",
            "strategy_options.sharding": "grad",
            "strategy_options.cpu_offload": True,
            "strategy_options.wrap": 2000,
            "save_every": 100,
        },
    ),
    "two machines": (
        (
            "python -m torch.distributed.run --nproc_per_node 4 --nnodes 2 --rdzv_backend c10d"
            f" --rdzv_endpoint host:29400 {GLUE_MRPC}"
        ),
        {"strategy": "ddp", "nproc": "auto", "global_batch_size": 256},
    ),
    "parts of a run": (
        (
            "python run_glue.py --model_name_or_path bert-base-cased --task_name rte --do_train"
            " --max_steps 200 --eval_strategy steps --eval_steps 0.25 --save_steps 0.5 --output_dir"
            " out --lr_scheduler_type warmup_stable_decay --lr_scheduler_kwargs"
            " '{\"num_decay_steps\": 50}' --metric_for_best_model eval_accuracy --group_by_length"
            " --optim adamw_torch --report_to tensorboard --early_stopping_patience 3"
        ),
        {
            "max_steps": 200,
            "eval_every": 50,
            "save_every": 100,
            "schedule.decay_ratio": 0.25,
            "checkpoints.best": "accuracy",
            "loader.length_grouping": "window",
            "optimizer.name": "adamw",
            "extensions.tensorboard": True,
            "patience": 3,
        },
    ),
}


@pytest.mark.parametrize(("command", "expected"), COMMANDS.values(), ids=COMMANDS)
def test_a_published_command_becomes_a_config(command: str, expected: dict[str, Any]) -> None:
    words = shlex.split(command)
    made = migrate([], words)
    tree = made.config.model_dump(mode="json")
    flat = tree | flatten(tree)
    assert {key: flat.get(key, "nothing") for key in expected} == expected
    flags = [
        word.lstrip("-").partition("=")[0].replace("-", "_")
        for word in words
        if word.startswith("--")
    ]
    assert not [flag for flag in flags if flag not in made.text]


def test_an_argument_without_an_equal_is_named_with_a_remedy() -> None:
    made = migrate(
        [],
        shlex.split(
            f"python {GLUE_MRPC} --neftune_noise_alpha 5 --optim paged_adamw_8bit --fast 1"
        ),
    )
    assert made.no_equal == ("neftune_noise_alpha = 5", "fast = 1")
    assert made.instead == ("optim = paged_adamw_8bit",)
    assert "# - neftune_noise_alpha = 5: the loss of a task of your own may do it" in made.text
    assert "# - fast = 1: no key of the script or of TrainingArguments" in made.text


def test_the_rows_of_a_step_are_those_of_all_processes() -> None:
    command = shlex.split(
        f"torchrun --nproc_per_node 2 {GLUE_MRPC} --gradient_accumulation_steps 4"
    )
    made = migrate([], command)
    assert (made.config.global_batch_size, made.config.micro_batch_size, made.config.nproc) == (
        256,
        32,
        2,
    )
    assert "256 = 32 rows of a device * 2 process(es) * 4 accumulation step(s)" in " ".join(
        made.text.split("\n# ")
    )


def test_a_difference_of_the_logged_loss_is_said() -> None:
    made = migrate([], shlex.split(f"python {GLUE_MRPC} --gradient_accumulation_steps 4"))
    assert "logged loss and gradient norm are 4 times those here" in " ".join(
        made.text.split("\n#   ")
    )
    made = migrate(
        [], shlex.split("python run_clm.py --model_name_or_path gpt2 --train_file a.txt --do_train")
    )
    assert made.config.task_options["end_documents"] is False
    assert "the script drops what fills no block" in " ".join(made.text.split("\n#   "))
    made = migrate(
        [], shlex.split("python run_mlm.py --model_name_or_path gpt2 --train_file a.txt --do_train")
    )
    assert "each evaluation of the script draws other masks" in made.text


def test_the_number_of_processes_may_be_said_beside() -> None:
    made = migrate([], shlex.split(f"python {GLUE_MRPC}"), nproc=4)
    assert (made.config.global_batch_size, made.config.nproc, made.config.strategy) == (
        128,
        4,
        "ddp",
    )
    assert "number of processes" in migrate([], shlex.split(f"python {GLUE_MRPC}")).text


def test_a_command_may_begin_with_variables_and_read_its_arguments_from_a_file(tmp_path) -> None:
    (tmp_path / "args.json").write_text(
        '{"model_name_or_path": "bert-base-cased", "learning_rate": 1e-5, "bf16": true}'
    )
    made = migrate(
        [], ["CUDA_VISIBLE_DEVICES=0,1", "python", "run_glue.py", str(tmp_path / "args.json")]
    )
    assert (made.config.lr, made.config.precision) == (1e-5, "bf16")
    assert "# - CUDA_VISIBLE_DEVICES = 0,1: set it again" in made.text


@pytest.mark.parametrize(
    ("optim", "expected"),
    [
        ("sgd", {"name": "sgd", "weight_decay": 0.1}),
        ("adafactor", {"name": "adafactor", "weight_decay": 0.1}),
        ("lion_32bit", {"name": "lion", "weight_decay": 0.1, "betas": [0.8, 0.999]}),
    ],
)
def test_settings_of_adam_stay_away_from_other_optimizers(
    optim: str, expected: dict[str, Any]
) -> None:
    words = (
        f"python run_glue.py --task_name mrpc --do_train --optim {optim} --adam_beta1 0.8"
        " --adam_epsilon 1e-7"
    )
    made = migrate([], shlex.split(f"{words} --weight_decay 0.1"))
    assert yaml.safe_load(made.text)["optimizer"] == expected
    assert "adam_epsilon" in made.text
    assert ("optim = adafactor" in made.differs) == (optim == "adafactor")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", {"eval_at_epoch_end": False}),  # the Trainer's default is no evaluation
        ("--eval_strategy no", {"eval_at_epoch_end": False}),
        ("--eval_strategy epoch", {"eval_every": 0}),
        ("--eval_strategy steps --eval_steps 5", {"eval_at_epoch_end": False, "eval_every": 5}),
        ("--tf32 true", {"eval_at_epoch_end": False, "tf32": True}),
        ("--bf16_full_eval", {"eval_at_epoch_end": False, "eval_precision": "bf16"}),
        ("--fp16_full_eval", {"eval_at_epoch_end": False, "eval_precision": "fp16"}),
    ],
)
def test_evaluations_are_as_often_and_as_precise_as_the_trainers(
    words: str, expected: dict[str, Any]
) -> None:
    made = yaml.safe_load(
        migrate([], shlex.split(f"python run_glue.py --task_name mrpc --do_train {words}")).text
    )
    assert {
        key: value for key, value in made.items() if key.startswith("eval_") or key == "tf32"
    } == expected


def test_a_script_that_evaluates_at_epoch_ends_goes_on_doing_so() -> None:
    made = yaml.safe_load(
        migrate([], shlex.split("python run_glue_no_trainer.py --task_name mrpc")).text
    )
    assert not made.keys() & {"eval_at_epoch_end", "eval_every"}
