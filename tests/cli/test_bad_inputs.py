"""A user's error exits with code 2 and one line (what, where, what to do),
and leaves nothing behind.

Every case runs the command line on a folder of prepared files; a few run as a real process too.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import psutil
import pytest
from first_line import after_first_line
from work_folder import enter, install

from distcore.cli.main import main

pytestmark = pytest.mark.needs("distcore-tasks", "distcore-ddp")

GOOD = [
    ["good morning", 0],
    ["good evening", 0],
    ["bad luck", 1],
    ["bad news", 1],
    ["good day", 0],
    ["bad day", 1],
]
JOB = "train --data good.json --model bert-tiny --out run"

NEWER = '{"format": 99}'
TEXT_FILES = {
    "good.json": json.dumps(GOOD),
    "not_json.json": '[["a", 0],\n ["b" 1]]',
    "object.json": '{"text": "a"}',
    "no_rows.json": "[]",
    "empty.json": "",
    "three.json": json.dumps([*GOOD, ["a", 1, 2]]),
    "number.json": json.dumps([*GOOD, [7, 1]]),
    "blank_label.json": json.dumps([["a", "yes"], ["b", " "]]),
    "blank.json": json.dumps([*GOOD, ["  ", 1]]),
    "float_label.json": json.dumps([*GOOD, ["a", 0.5]]),
    "null_label.json": json.dumps([*GOOD, ["a", None]]),
    "mixed.json": json.dumps([*GOOD, ["a", "yes"]]),
    "negative.json": json.dumps([*GOOD, ["a", -1]]),
    "one_class.json": json.dumps([["a", 3], ["b", 3]]),
    "singletons.json": json.dumps([["a", 0], ["b", 1]]),
    "other_labels.json": json.dumps([["a", 0], ["b", 9]]),
    "broken.jsonl": '{"text": "a", "label": 0}\n{"text": "b", "label"',
    "no_label.jsonl": '{"text": "a", "label": 0}\n{"text": "b", "lable": 1}',
    "scalar.jsonl": '{"text": "a", "label": 0}\n3',
    "twice.yaml": "model: bert-tiny\ntask_options: {model: bert-mini}\n",
    "columns.csv": "review,label\na,0\nb,1\n",
    "ragged.csv": "text,label\na,0\nb\n",
    "quote.csv": 'text,label\nb,1\n"a,0\nc,1\n',
    "header.csv": "text,label\n",
    "not.parquet": "PAR0",
    "table.xlsx": "a",
    "broken.yaml": "lr: 1e-3\nepochs: [1\n",
    "thing.py": "import os\n\nmake = len\n",
    "same_key.yaml": "optimizer:\n  eps: 1e-8\n  eps: 1e-7\n",
    "list.yaml": "- lr\n",
    "typo.yaml": "global_batch_sise: 8\n",
    "typos.yaml": "sedd: 3\nloger: 1\nclip: {nrom: 1}\n",
    "options.yaml": "sedd: 3\ntask_options: {modle: x, data: rows.json, txt: y}\n",
    "nested_typo.yaml": "schedule:\n  warmup_stepz: 3\n",
    "foreign.yaml": "compute_environment: LOCAL\nfp16: true\nnum_machines: 1\n",
    "type.yaml": "epochs: many\n",
    "two.jsonl": '{"text": "a"}\n{"text": "b"}\n',
    "two.csv": "text,label\na,b\n",
    "scalar_tree.yaml": "clip: norm\n",
    "extensions.yaml": "extensions: [progress]\n",
    "taken/config.yaml": "lr: 0.1\n",
    "finished/config.yaml": "lr: 0.1\n",
    "finished/checkpoints/step-00000001/manifest.json": "{}",
    "no_config/weights.txt": "",
    "bad_config/config.json": "{",
    "no_type/config.json": "{}",
    "no_weights/config.json": '{"model_type": "bert"}',
    "no_tokenizer/config.json": '{"model_type": "bert"}',
    "no_tokenizer/model.safetensors": "",
    "short/config.json": '{"model_type": "bert", "max_position_embeddings": 64}',
    "short/model.safetensors": "",
    "short/tokenizer.json": "{}",
    "damaged/manifest.json": "{",
    "damaged/manifest.json.sha256": "0" * 64,
    "newer/manifest.json": NEWER,
    "newer/manifest.json.sha256": f"{sha256(NEWER.encode()).hexdigest()}  manifest.json\n",
    "no_guard.py": (
        "import distcore\nclass Mine(distcore.Simple): ...\ndistcore.train(distcore.RunConfig(),"
        " Mine())\n"
    ),
    "syntax.py": "class Watch(\n",
    "raises.py": "raise RuntimeError('not\\ntoday')\n",
    "plain.py": "class Watch:\n    def on_log(self, record): ...\n",
    "misspelled.py": (
        "from distcore import hookimpl\nclass Watch:\n    @hookimpl\n    def on_logg(self): ...\n"
    ),
    "argument.py": (
        "from distcore import hookimpl\nclass Watch:\n    @hookimpl\n    def on_log(self, stp):"
        " ...\n"
    ),
}

COMMAND_LINE = {
    "trian": r"no command named 'trian' \(did you mean 'train'\?\)",
    "--quiet train": r"unknown flag '--quiet'; distcore --help",
    "-p ddp train": r"-p ddp: expected no:NAME, such as -p no:ddp",
    "train -p no:": r"-p no:: expected no:NAME",
    "train -p": r"-p: expected one argument",
    "strategies --jsom": r"unknown flag '--jsom' \(did you mean '--json'\?\)",
    f"{JOB} --global-batch-sise 8": (
        r"unknown flag '--global-batch-sise' \(did you mean '--global-batch-size'\?\)"
    ),
    f"{JOB} --sedd 8 --epoch=2": (
        r"unknown flag '--sedd' \(did you mean '--seed'\?\), '--epoch' .*'--epochs'\?\);"
    ),
    f"{JOB} --global-batch 8": r"unknown flag '--global-batch'",
    f"{JOB} --learning-rate 1": r"unknown flag '--learning-rate' \(here it is --lr\);",
    f"{JOB} --batch-size=8": r"unknown flag '--batch-size' \(here it is --global-batch-size\);",
    f"{JOB} --per_device_train_batch_size 8": (
        r"\(here it is --micro-batch-size; the rows .*--global-batch-size\);"
    ),
    f"{JOB} --warmup-ratio 0.1": r"\(here it is --warmup, with a number below 1\);",
    "eval run --batch-size 8": r"unknown flag '--batch-size'; distcore eval --help",
    f"{JOB} --epochs": r"--epochs: expected one argument \(distcore train --help",
    f"{JOB} a.yaml b.yaml": r"unexpected argument 'b.yaml'",
}

VALUES = {
    "--nproc two": r"--nproc 'two': .*valid integer",
    "--nproc 0": r"--nproc '0': must be greater than or equal to 1 or 'auto'",
    "--nproc -3": r"--nproc '-3': must be greater than or equal to 1 or 'auto'",
    "--nproc 2": (
        r"nproc = 2: strategy 'single' runs in one process; use --nproc 1, or a --strategy of"
        r" several: .*ddp"
    ),
    "--epochs 0": r"--epochs '0': .*greater than or equal to 1",
    "--epochs 1.5": r"--epochs '1.5': .*integer",
    "--max-steps 0": r"--max-steps '0': .*greater than or equal to 1",
    "--global-batch-size 0": r"--global-batch-size '0'",
    "--global-batch-size many": r"--global-batch-size 'many'.*integer",
    "--micro-batch-size 0": r"--micro-batch-size '0': must be greater than or equal to 1",
    "--micro-batch-tokens 0": r"--micro-batch-tokens '0': must be greater than or equal to 1",
    "--micro-batch-size 5": (
        r"--micro-batch-size 5: the 32 rows of a step \(--global-batch-size\) cannot be shared"
        r" equally by 1 rank in "
        rf"pieces of 5; nearest: distcore {JOB} --micro-batch-size 5 --global-batch-size 30 or: "
        rf"distcore {JOB} --micro-batch-size 4$"
    ),
    "--micro-batch-size 64": (
        r" --micro-batch-size 64 --global-batch-size 64 or: distcore .* --micro-batch-size 32$"
    ),
    "--strategy ddp --nproc 2 --global-batch-size 30 --micro-batch-size 4": (
        r"by 2 ranks in pieces of 4; nearest: .* --micro-batch-size 4 --global-batch-size 32 or: .*"
        r"--nproc 2 --global-batch-size 30 --micro-batch-size 3$"
    ),
    "--strategy ddp --nproc 3": (
        r"--nproc 3: the 32 rows of a step \(--global-batch-size\) cannot be shared equally by 3"
        r" ranks; nearest: "
        rf"distcore {JOB} --strategy ddp --nproc 3 --global-batch-size 33 or: distcore {JOB}"
        r" --strategy ddp --nproc 2$"
    ),
    "--strategy ddp --nproc=64 --set device=cpu": (
        r"--nproc 64: .*--nproc=64 --set device=cpu --global-batch-size 64 or: .*ddp --set"
        r" device=cpu --nproc 32$"
    ),
    "--strategy ddp --nproc 16 --micro-batch-size 4": (
        r" 4 --global-batch-size 64 or: .* --nproc 16 --micro-batch-size 2$"
    ),
    "--lr 0": r"--lr '0': must be greater than 0 or 'auto'",
    "--set lr=yes": r"lr = True: expected neither true nor false \(yes, no, on and off .*",
    "--set save_every=on": r"save_every = True: expected neither true nor false",
    "--set task_options.max_seq_len=yes": r"max_seq_len = True: expected neither true nor false",
    "--lr -1": r"--lr '-1': must be greater than 0 or 'auto'",
    "--lr fast": r"--lr 'fast': expected a valid number or 'auto'",
    "--lr nan": r"--lr 'nan': .*finite",
    "--lr inf": r"--lr 'inf': .*finite",
    "--precision fp8": r"--precision 'fp8': .*'fp32', 'bf16', 'fp16' or 'auto'",
    "--dropout 1": r"--dropout '1': .*less than 1",
    "--dropout -0.1": r"--dropout '-0.1': .*greater than or equal to 0",
    "--max-seq-len 2": r"--max-seq-len '2': .*greater than or equal to 4",
    "--seed -1": r"--seed '-1'",
    "--seed 4294967296": r"--seed '4294967296': .*less than 4294967296",
    "--eval-fraction 0": r"--eval-fraction '0': .*greater than 0",
    "--eval-fraction 1": r"--eval-fraction '1': .*less than 1",
    "--save-every -1": r"--save-every '-1'",
    "--eval-every often": r"--eval-every 'often': .*integer",
    "--log-every 0": r"--log-every '0'",
    "--log-level loud": r"--log-level 'loud': .*'debug', 'info', 'warning' or 'error'",
    "--length-grouping random": r"--length-grouping 'random': .*'batch', 'window' or 'auto'",
    "--task text-clasification": (
        r"no task named 'text-clasification'.*did you mean 'text-classification'"
    ),
    "--set lr": r"--set lr: expected KEY=VALUE",
    "--set =3": r"--set : expected a dotted key",
    "--set optimizer.=3": r"--set optimizer.: expected a dotted key",
    "--set optimiser.eps=1": r"unknown key 'optimiser' \(did you mean 'optimizer'\?\)",
    "--set optimizer.epz=1": r"unknown key 'optimizer.epz' \(did you mean 'eps'\?\)",
    "--set optimizer=3": r"optimizer = 3: expected optimizer.name or optimizer.weight_decay",
    "--lr 1 --set lr.peak=3": r"--set lr.peak: lr has a value of its own and no keys below it",
    "--set optimizer.weight_decai=1": (
        r"unknown key 'optimizer.weight_decai' \(did you mean 'weight_decay'\?\)"
    ),
    "--set optimizer.betas=[0.9]": r"optimizer 'adamw': betas.*required",
    "--set optimizer.betas=[0.9,high]": r"optimizer 'adamw': betas.1 = 'high': .*number",
    "--optimizer sgb": (
        r"optimizer.name = 'sgb': strategy 'single' takes .*sgd \(did you mean 'sgd'\?\)"
    ),
    "--optimizer sgd --set optimizer.betas=[0.9,0.9]": (
        r"unknown key 'optimizer.betas': sgd has weight_decay, "
    ),
    "--set 'optimizer.groups=[{match: head}]'": r"optimizer.groups.0 = .*: expected lr or lr_scale",
    "--set 'optimizer.groups=[{match: haed, lr: 0.1}]' --strategy ddp --nproc 2": (
        r"optimizer.groups.0.match = 'haed': matches no trained parameter's name; names are such as"
        r" bert"
    ),
    "--set optimizer.layer_decay=2": r"optimizer.layer_decay = 2: .*less than or equal to 1",
    "--set optimizer.weight_decay=-1": r"optimizer.weight_decay = -1",
    "--set clip.norm=0": r"clip.norm = 0: .*greater than 0",
    "--set schedule.name=linaer": (
        r"schedule.name = 'linaer': no such schedule \(did you mean 'linear'\?\)"
    ),
    "--set schedule.warmup_ratio=2": r"schedule.warmup_ratio = 2: .*less than or equal to 1",
    "--set schedule.warmup_steps=-5": r"schedule.warmup_steps = -5",
    "--device tpu": r"device = 'tpu': torch knows no such device type \(here: cpu",
    "--device meta": r"device = 'meta': torch sees no such device here",
    "--device cpu:1": r"device = 'cpu:1': expected a device type, 'cpu'; each rank takes its own",
    "--set loader.workers=-1": r"loader.workers = -1",
    "--set tokenizer.vocab_size=1": r"tokenizer.vocab_size = 1: .*64",
    "--set task_options.modle=x": (
        r"task 'text-classification': unknown option 'modle' \(did you mean 'model'\?\)"
    ),
    "--set task_options.modle=x --set task_options.dat=x --set columns.texts=x": (
        r"unknown option 'modle' \(did you mean 'model'\?\); unknown option 'dat'"
        r" .*'data'.*'columns.texts' .*'columns"
    ),
    "--set columns.texts=x": r"unknown option 'columns.texts' \(did you mean 'columns.text'\?\)",
    "--set task_options=3": r"task_options = 3: .*dictionary",
    "--set modle=x": r"unknown key 'modle' \(did you mean 'model'\?\)",
    "--set checkpoints.best=acuracy": (
        r"checkpoints.best = 'acuracy': no metric of task 'text-classification' \(did you mean"
        r" 'accuracy'\?\)"
    ),
    "--task none.py:Mine": r"task 'none.py:Mine': no file none.py",
    "--task thing.py:make": r"task 'thing.py:make': make in thing.py is not a class",
    "--task none:Mine": r"a task of a file is named by both: --task none.py:Mine",
    "--set timeout=0": r"timeout = 0",
    "--set": r"--set: expected one argument",
    "--set model=3": r"task 'text-classification': model = 3: .*string",
    "--set strategy_options=3": r"strategy_options = 3: .*dictionary",
    "--set 'lr=[1'": r"lr = '\[1'",
}

CONFIG_FILES = {
    "train nowhere.yaml": r"config file nowhere.yaml: cannot be read: No such file",
    "train taken": (
        r"config file taken: cannot be read: Is a directory; its config is taken/config.yaml$"
    ),
    "train broken.yaml": r"config file broken.yaml, line 3: not valid YAML",
    "train same_key.yaml": (
        r"config file same_key.yaml, line 3: not valid YAML: the key 'eps' stands twice"
    ),
    "train list.yaml": r"config file list.yaml: expected keys and values, found a list",
    "train two.jsonl": r"not valid YAML: .*; rows to train on are named by --data two.jsonl$",
    "train two.csv": (
        r"expected keys and values, found a str; rows to train on are named by --data two.csv$"
    ),
    "train binary.yaml": r"config file binary.yaml: cannot be read: not UTF-8",
    "train typo.yaml": (
        r"typo.yaml: unknown key 'global_batch_sise' \(did you mean 'global_batch_size'\?\)"
    ),
    "train foreign.yaml": (
        r"unknown key 'compute_environment' .*; unknown .*; .*: distcore migrate foreign.yaml"
    ),
    "train typos.yaml --set clip.nrom=1": (
        r"unknown key 'clip.nrom' .*'norm'.*; typos.yaml: unknown key 'sedd' .*'seed'.*; unknown"
        r" key 'loger' .*'loader'"
    ),
    "train options.yaml --set task_options.lables=x": (
        r"options.yaml: unknown key 'sedd' .*'seed'\?\); unknown key 'task_options.modle'"
        r" .*'model'\?\); "
        r"unknown key 'task_options.txt'.*; command line: unknown key 'task_options.lables'"
    ),
    "train nested_typo.yaml": (
        r"nested_typo.yaml: unknown key 'schedule.warmup_stepz' \(did you mean 'warmup_steps'"
    ),
    "train twice.yaml": (
        r"twice.yaml: 'model' is short for 'task_options.model', which is set too; keep one"
    ),
    "train type.yaml": r"type.yaml: epochs = 'many': .*integer",
    "train type.yaml --epochs few": r"--epochs 'few': .*valid integer",
    "train scalar_tree.yaml": (
        r"scalar_tree.yaml: clip = 'norm': expected clip\.norm or clip\.value$"
    ),
    "train extensions.yaml": r"extensions.yaml: extensions = \['progress'\]: .*dictionary",
}

DATA = {
    "--data nowhere.json": r"data file nowhere.json: no such file",
    "--data stdlib-dogs": (
        r"neither a file nor an embedded dataset \(did you mean 'stdlib-docs'\?\)"
    ),
    "--data taken": r"data file taken: is a folder",
    "--data table.xlsx": (
        r"unknown extension '.xlsx' \(known: .arrow, .csv, .json, .jsonl, .parquet, "
        r".tar, .txt, .tsv, .list, also with .gz, .zst, .bz2 or .xz\)"
    ),
    "--data empty.json": r"data file empty.json: is empty",
    "--data no_rows.json": r"data file no_rows.json: holds no rows",
    "--data header.csv": r"data file header.csv: holds no rows",
    "--data not_json.json": r"data file not_json.json, line 2, column 7: not valid JSON",
    "--data object.json": r"data file object.json: expected a list of \[text, label\] rows",
    "--data three.json": r"three.json, row 7: expected \[text, label\].*list of 3",
    "--data number.json": r"number.json, row 7: text is an integer \(7\), expected a string",
    "--data blank.json": r"blank.json, row 7: text is empty: fill it in or remove the row",
    "--data blank_label.json": (
        r"blank_label.json, row 2: label is empty: fill it in or remove the row"
    ),
    "--data float_label.json": r"float_label.json, row 7: label is a float \(0.5\)",
    "--data null_label.json": r"null_label.json, row 7: label is missing",
    "--data mixed.json": r"mixed.json, row 7: label is a string .* row 1 has an integer",
    "--data negative.json": r"negative.json, row 7: label -1 is out of range",
    "--data one_class.json": (
        r"one_class.json: all 2 rows have the label 3: a classifier needs at least 2"
    ),
    "--data singletons.json": (
        r"singletons.json: each of the 2 rows is the only one of its class.*--eval-data"
    ),
    "--data broken.jsonl": r"broken.jsonl, line 2, column \d+: not valid JSON",
    "--data no_label.jsonl": r"no_label.jsonl, row 2: no column 'label' \(did you mean 'lable'\?\)",
    "--data scalar.jsonl": r"scalar.jsonl, row 2: expected",
    "--data columns.csv": (
        r"columns.csv: no column 'text' \(?.*found: review, label.*name it with --text-column NAME"
    ),
    "--data columns.csv --text-column reviews": r"no column 'reviews' \(did you mean 'review'\?\)",
    "--data good.csv --label-column topic": (
        r"good.csv: no column 'topic' .*name it with --label-column NAME"
    ),
    "--data ragged.csv": r"ragged.csv, row 2: expected 2 values as in the header, found 1",
    "--data quote.csv": r"quote.csv, line 3: not valid CSV: a quote opens here and never closes",
    "--data latin.csv": r"latin.csv: not UTF-8 text \(byte 0xe9",
    "--data not.parquet": r"not.parquet: not a readable Parquet file",
    "--eval-data nowhere.json": r"data file nowhere.json: no such file",
    "--eval-data other_labels.json": r"other_labels.json, row 2: label 9 is out of range",
    "--test-data other_labels.json": r"other_labels.json, row 2: label 9 is out of range",
    "--test-data empty.json": r"data file empty.json: is empty",
}

MODELS = {
    "--model bert-tinny": r"model 'bert-tinny': .*did you mean 'bert-tiny'",
    "--model ./nowhere": r"model ./nowhere: no such folder",
    "--model good.json": r"model good.json: is a file, expected a folder",
    "--model no_config": r"model no_config: the folder has no config.json",
    "--model finished": (
        r"model finished: is a run folder; .* distcore checkpoint export finished --to DIR"
    ),
    "--model bad_config": r"model bad_config: config.json cannot be read",
    "--model no_type": r"model no_type: config.json has no 'model_type'",
    "--model no_weights": r"model no_weights: the folder has no weights",
    "--model no_tokenizer": r"model no_tokenizer: the folder has no tokenizer",
    "--strategy ddp --nproc 2 --model no_config": r"model no_config: the folder has no config.json",
    "--model short": (
        r"max_seq_len = 128: model short has positions for 64 tokens; use --max-seq-len 64"
    ),
}

FOLDERS = {
    "--out good.json": r"out = 'good.json': is a file, not a folder",
    "--out good.json/run": r"--out good.json/run: cannot be created: good.json: Not a directory",
    "--out finished": (
        r"out = 'finished': holds another run; choose another, set it aside with --overwrite,"
        r" or go on with --resume auto"
    ),
    "--resume nowhere": r"resume = 'nowhere': no checkpoint there",
    "--resume good.json": r"resume = 'good.json': no checkpoint there",
    "--resume damaged": r"damaged/manifest.json: damaged",
    "--resume newer": r"newer/manifest.json: checkpoint format 99, this distcore reads 1",
}

EXTENSIONS = {
    "--set extensions.progres=true": r"no extension named 'progres' .*did you mean 'progress'",
    "--set extensions.progress.bar=3": (
        r"extension 'progress': unknown option 'bar'.*options: bar_width"
    ),
    "--set extensions.progress.bar_width=wide": (
        r"extension 'progress': bar_width = 'wide': .*integer"
    ),
    "--set extensions.nan_guard=maybe": r"extensions.nan_guard = 'maybe'",
    "--set extensions.nowhere.py:Watch=true": r"extension 'nowhere.py:Watch': no file nowhere.py",
    "--set extensions.plain.py:Wotch=true": (
        r"'plain.py:Wotch': no class Wotch in plain.py .did you mean 'Watch'"
    ),
    "--task no_guard.py:Mine": (
        r"no_guard.py: starts a run as it is imported; put that below if __name__ == "
    ),
    "--set extensions.syntax.py:Watch=true": (
        r"extension 'syntax.py:Watch' does not import: SyntaxError"
    ),
    "--set extensions.raises.py:Watch=true": (
        r"'raises.py:Watch' does not import: RuntimeError: not today; .*:1"
    ),
    "--set extensions.plain.py:Watch=true": (
        r"extension 'plain.py:Watch': on_log\(\) has no @hookimpl mark"
    ),
    "--set extensions.plain.py:Watch.every=2": (
        r"extension 'plain.py:Watch': unknown option 'every' \(options: none\)"
    ),
    "--set extensions.misspelled.py:Watch=true": (
        r"on_logg\(\) is marked @hookimpl but is no hook .*'on_log'"
    ),
    "--set extensions.argument.py:Watch=true": r"extension 'argument.py:Watch': .*'stp'",
}

STRATEGIES = {
    "--strategy singel": (
        r"no strategy named 'singel' \(installed: .*\) \(did you mean 'single'\?\)"
    ),
    "--strategy dpp": r"no strategy named 'dpp' .*\(did you mean 'ddp'\?\)",
    "--strategy galaxy": r"no strategy named 'galaxy' \(installed: .*\)$",
    "--strategy ddp -p no:ddp": r"strategy 'ddp' is installed but blocked \(by -p no:ddp",
    "--strategy ddp -p no:distcore-ddp": r"strategy 'ddp' is installed but blocked",
    "--strategy ddp --set strategy_options.bucket=3": (
        r"strategy 'ddp': unknown option 'bucket' .*'bucket_mb'"
    ),
    "--strategy ddp --set strategy_options.bucket_mb=big": (
        r"strategy 'ddp': bucket_mb = 'big': .*integer"
    ),
    "--set strategy_options.stage=3": (
        r"strategy 'single': unknown option 'stage' \(options: none\)"
    ),
    "--strategy broken": (
        r"strategy 'broken' is installed \(strange-plugins 1.0\) but does not import: .*no parts"
    ),
    "--strategy twice": (
        r"strategy 'twice' is provided twice: by (more|strange)-plugins 1.0 and by .*uninstall one"
    ),
    "--strategy mute": r"strategy 'mute': declares no capabilities",
    "--strategy future": r"strategy 'future': written for hook-spec version 99.*upgrade distcore",
    "--strategy narrow --precision bf16": (
        r"precision = 'bf16': strategy 'narrow' supports fp32.*; .*single.* could"
    ),
    "--strategy narrow --precision fp16": r"precision = 'fp16': strategy 'narrow' supports fp32",
    "--strategy unmarked": r"strategy 'unmarked': step\(\) has no @hookimpl mark",
}

CASES = (
    COMMAND_LINE
    | CONFIG_FILES
    | {
        f"{JOB.replace('--data good.json ', '') if '--data ' in arguments else JOB} {arguments}": (
            line
        )
        for table in (VALUES, DATA, MODELS, FOLDERS, EXTENSIONS, STRATEGIES)
        for arguments, line in table.items()
    }
    | {"train --resume auto": r"resume = 'auto': needs --out"}
)

PLUGINS = """
from distcore import Capabilities
class Mute: ...
class Future:
    capabilities = Capabilities(spec_version=99)
class Narrow:
    capabilities = Capabilities(spec_version=3, precisions=frozenset({"fp32"}))
class Unmarked:
    capabilities = Capabilities(spec_version=3)
    def step(self, run, clip): ...
"""
ENTRY_POINTS = """[distcore.strategies]
broken = strange_missing:Broken
twice = strange:Mute
mute = strange:Mute
future = strange:Future
narrow = strange:Narrow
unmarked = strange:Unmarked
"""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two installed distributions of strange plugins."""
    site = tmp_path_factory.mktemp("site")
    (site / "strange.py").write_text(PLUGINS)
    (site / "strange_missing.py").write_text("raise ImportError('no parts')")
    install(site, "strange-plugins", ENTRY_POINTS)
    install(site, "more-plugins", "[distcore.strategies]\ntwice = strange:Mute\n")
    return site


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder full of bad files, which no test changes."""
    work = tmp_path_factory.mktemp("work")
    for name, text in TEXT_FILES.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    (work / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (work / "latin.csv").write_bytes(b"text,label\ncaf\xe9,0\n")
    (work / "good.csv").write_text(
        "text,label\n" + "".join(f"{text},{label}\n" for text, label in GOOD)
    )
    return work


@pytest.fixture
def folder(work: Path, tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, full of bad files; plugins installed; no launcher, no network."""
    enter(work, monkeypatch)
    monkeypatch.setenv("DISTCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.syspath_prepend(str(site))
    return work


def files_in(folder: Path) -> list[Path]:
    """All files and folders but what Python compiled."""
    return sorted(path for path in folder.rglob("*") if "__pycache__" not in path.parts)


@pytest.mark.parametrize(("command", "line"), CASES.items(), ids=CASES)
def test_bad_input_is_one_line_and_leaves_nothing(
    command: str, line: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_in(folder)
    assert main(shlex.split(command)) == 2
    out, err = capsys.readouterr()
    assert re.fullmatch(rf"error: .*{line}.*\n", err), err
    assert not out
    assert files_in(folder) == before
    children = psutil.Process().children()
    started = [
        " ".join(child.cmdline()) for child in children if child.status() != psutil.STATUS_ZOMBIE
    ]
    # Python's own, of an earlier test, and those that start programs of tests
    others = ("resource_tracker", "warm_process.py")
    assert not [command for command in started if not any(name in command for name in others)]


def test_bad_inputs_are_sixty_or_more() -> None:
    assert len(CASES) >= 60


def test_cuda_where_there_is_none_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main([*JOB.split(), "--device", "cuda"]) == 2
    said = (
        "device = 'cuda': torch sees no such device here (here: cpu); use --device cpu, or leave"
        " it out"
    )
    assert said in capsys.readouterr().err


def test_allowing_other_plugins_blocks_the_strategy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISTCORE_LOAD_PLUGINS", "distcore-tasks")
    assert main([*JOB.split(), "--strategy", "ddp"]) == 2
    assert "strategy 'ddp' is installed but blocked" in capsys.readouterr().err


@pytest.mark.programs
@pytest.mark.parametrize(
    "command",
    [
        "trian",
        f"{JOB} --nproc 0",
        "train --model bert-tiny --out run --data three.json",
        f"{JOB} --strategy ddp --nproc 2 --global-batch-size 30 --micro-batch-size 4",
        f"{JOB} --strategy ddp --nproc 2 --model no_config",
    ],
)
def test_a_real_process_shows_one_line_and_exits_with_2(command: str, folder: Path) -> None:
    line = CASES[command]
    arguments = [sys.executable, "-m", "distcore", *shlex.split(command)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert re.fullmatch(rf"error: .*{line}.*\n", after_first_line(done.stderr)), done.stderr
    assert not done.stdout
