"""Data as other trainers name it: LLaMA-Factory's dataset_info.json, folders of TRL; and
data that nothing names.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from distcore import ConfigError
from distcore.cli.main import main
from distcore_migrate import migrate

JOB = (
    "model_name_or_path: x/y\nfinetuning_type: full\ncutoff_len: 64\nstage: {stage}\ndataset:"
    " {dataset}\n"
)
ALPACA = [
    {"instruction": f"say {n}", "input": "twice" if n % 2 else "", "output": str(n)}
    for n in range(8)
]
SHAREGPT = [
    {
        "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}],
        "sys": "be kind",
    },
    {
        "conversations": [
            {"from": "system", "value": "short"},
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "two"},
        ],
        "sys": None,
    },
    {"conversations": [{"from": "gpt", "value": "nobody asked"}], "sys": None},
]
OPENAI = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
PAIRS = [
    {
        "conversations": [{"from": "human", "value": "hi"}],
        "chosen": {"from": "gpt", "value": "a"},
        "rejected": {"from": "gpt", "value": "b"},
    }
]
RANKED = [{"question": "hi", "good": "a", "bad": "b"}]
INFO: dict[str, dict[str, Any]] = {
    "alpaca": {"file_name": "alpaca.json"},
    "renamed": {
        "file_name": "renamed.json",
        "columns": {"prompt": "q", "response": "a", "history": "before"},
    },
    "sharegpt": {
        "file_name": "sharegpt.json",
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "system": "sys"},
    },
    "openai": {
        "file_name": "openai.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {
            "role_tag": "role",
            "content_tag": "content",
            "user_tag": "user",
            "assistant_tag": "assistant",
        },
    },
    "pairs": {
        "file_name": "pairs.json",
        "formatting": "sharegpt",
        "ranking": True,
        "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
    },
    "ranked": {
        "file_name": "ranked.json",
        "ranking": True,
        "columns": {"prompt": "question", "chosen": "good", "rejected": "bad"},
    },
    "texts": {"file_name": "texts.jsonl", "columns": {"prompt": "body"}},
    "hub": {
        "hf_hub_url": "owner/chats",
        "formatting": "openai",
        "columns": {"messages": "messages"},
    },
    "images": {
        "file_name": "alpaca.json",
        "columns": {"prompt": "instruction", "images": "pictures"},
    },
    "lost": {"file_name": "lost.json"},
}
INFO["openai"]["tags"]["system_tag"] = "system"
RENAMED = [{"q": "now", "a": "yes", "before": [["first", "one"]]}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = {
        "alpaca": ALPACA,
        "sharegpt": SHAREGPT,
        "openai": OPENAI,
        "pairs": PAIRS,
        "ranked": RANKED,
    }
    for name, some in (rows | {"renamed": RENAMED}).items():
        Path(f"{name}.json").write_text(json.dumps(some))
    Path("texts.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n')
    Path("dataset_info.json").write_text(json.dumps(INFO))
    return tmp_path


def made(dataset: str, stage: str = "sft", more: str = "") -> Any:
    """The migration of a YAML with ``dataset_info.json`` beside it."""
    Path("job.yaml").write_text(JOB.format(stage=stage, dataset=dataset) + more)
    return migrate(["job.yaml"], [], out=Path("new.yaml"))


def written_rows(migration: Any) -> list[dict[str, Any]]:
    [(file, rows)] = migration.rows.items()
    assert migration.config.task_options["data"] == str(file) == "new.data.jsonl"
    return list(rows)


def turns(*contents: str) -> list[dict[str, str]]:
    return [
        {"role": ("user", "assistant")[n % 2], "content": content}
        for n, content in enumerate(contents)
    ]


def test_rows_of_alpaca_become_conversations(folder: Path) -> None:
    rows = written_rows(made("alpaca"))
    assert [row["messages"] for row in rows[:2]] == [
        turns("say 0", "0"),
        turns("say 1\ntwice", "1"),
    ]
    [row] = written_rows(made("renamed"))
    assert row["messages"] == turns("first", "one", "now", "yes")


def test_rows_of_sharegpt_become_conversations_and_broken_ones_are_counted(folder: Path) -> None:
    migration = made("sharegpt")
    first, second = written_rows(migration)
    assert first["messages"] == [{"role": "system", "content": "be kind"}, *turns("hi", "hello")]
    call = {"function": {"name": "f", "arguments": {}}}
    assert second["messages"] == [
        {"role": "system", "content": "short"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    assert "data: 1 rows: have no text, or turns that do not alternate" in migration.text


def test_several_datasets_of_any_form_are_one_file(folder: Path) -> None:
    rows = written_rows(made("alpaca, sharegpt,openai", more="max_samples: 3\n"))
    assert len(rows) == 3 + 2 + 1


@pytest.mark.parametrize(
    ("dataset", "stage", "options"),
    [
        (
            "openai",
            "sft",
            {"data": "openai.json", "form": "messages", "columns": {"messages": "messages"}},
        ),
        ("texts", "pt", {"data": "texts.jsonl", "columns": {"text": "body"}}),
        (
            "ranked",
            "dpo",
            {
                "data": "ranked.json",
                "columns": {"prompt": "question", "chosen": "good", "rejected": "bad"},
            },
        ),
        ("hub", "sft", {"data": "owner/chats@train", "columns": {"messages": "messages"}}),
    ],
)
def test_files_that_a_task_reads_are_taken_as_they_are(
    dataset: str, stage: str, options: dict[str, Any], folder: Path
) -> None:
    migration = made(dataset, stage)
    assert {key: migration.config.task_options[key] for key in options} == options
    assert not migration.rows
    assert not migration.choices


def test_pairs_of_conversations_become_texts_and_evaluation_has_its_own_file(folder: Path) -> None:
    assert written_rows(made("pairs", "rm")) == [{"prompt": "hi", "chosen": "a", "rejected": "b"}]
    migration = made("openai", more="eval_dataset: alpaca\n")
    assert list(migration.rows) == [Path("new.eval_data.jsonl")]
    assert migration.config.task_options["eval_data"] == "new.eval_data.jsonl"


def test_a_config_with_its_rows_trains(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "yaml").mkdir()
    (folder / "yaml/job.yaml").write_text(
        JOB.format(stage="dpo", dataset="pairs") + "dataset_dir: ..\n"
    )
    Path("pairs.json").write_text(json.dumps(PAIRS * 20))
    assert main(["migrate", "yaml/job.yaml", "--out", "new.yaml"]) == 0
    assert len(Path("new.data.jsonl").read_text().splitlines()) == 20
    assert main(["train", "new.yaml", "--model", "gpt2-tiny", "--dry-run"]) == 0
    assert "no source" not in capsys.readouterr().err
    assert main(["migrate", "yaml/job.yaml", "--out", "new.yaml"]) == 2
    assert main(["migrate", "yaml/job.yaml"]) == 0  # to stdout, with nothing written
    said = capsys.readouterr()
    assert "data: CHOOSE" in said.out
    assert "with --out FILE they are written beside the config" in said.out
    assert "said by no source: task_options.data; the config does not train before" in said.err


@pytest.mark.parametrize(
    ("dataset", "stage", "why"),
    [
        ("images", "sft", "images: has images, which no shipped task reads beside texts"),
        ("lost", "sft", "lost.json: no such file"),
        (
            "alpaca",
            "dpo",
            "alpaca: rows of dpo have two answers, but dataset_info.json does not say ranking",
        ),
        ("pairs", "sft", "pairs: rows have two answers (ranking); sft learns one"),
        ("alpaca", "kto", "alpaca: a row of kto has one answer and its tag"),
    ],
)
def test_a_dataset_that_cannot_be_taken_leaves_the_data_open(
    dataset: str, stage: str, why: str, folder: Path
) -> None:
    migration = made(dataset, stage)
    assert migration.config.task_options["data"] == "CHOOSE"
    assert migration.choices == ("task_options.data",)
    assert f"data = CHOOSE: {why}" in " ".join(migration.text.replace("\n#  ", " ").split())


def test_a_name_that_nothing_describes_is_refused_and_a_file_that_is_not_here_is_open(
    folder: Path,
) -> None:
    with pytest.raises(
        ConfigError, match=r"dataset alpacca: .* does not describe it \(did you mean 'alpaca'\?\)"
    ):
        made("alpacca")
    Path("alpaca.json").write_text('[{"instruction": "a", "output": 1},')
    with pytest.raises(ConfigError, match=r"^file alpaca\.json: cannot be read: "):
        made("alpaca")
    Path("dataset_info.json").unlink()
    assert made("alpaca").config.task_options["data"] == "CHOOSE"


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (
            {"conversations": [{"from": "hummany", "value": "q"}]},
            "the role 'hummany' is none of its tags (human, gpt, ",
        ),
        (
            {"conversation": []},
            "no column 'conversations' (did you mean 'conversation'?) (found: conversation); name",
        ),
    ],
)
def test_a_dataset_that_does_not_fit_its_description_is_one_line(
    row: Any, line: str, folder: Path
) -> None:
    """Each row of it is dropped by LLaMA-Factory."""
    Path("sharegpt.json").write_text(json.dumps([row] * 3))
    with pytest.raises(ConfigError) as caught:
        made("sharegpt")
    assert str(caught.value).startswith(f"dataset sharegpt: {line}")


def test_no_config_trains_on_rows_that_nobody_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of these once trained on rows that come with distcore."""
    jobs = {
        "arguments.json": {
            "learning_rate": 1e-3,
            "per_device_train_batch_size": 2,
            "num_train_epochs": 1,
        },
        "zero.json": {"train_batch_size": 8, "gradient_clipping": 1.0},
    }
    for name, job in jobs.items():
        Path(name).write_text(json.dumps(job))
        Path("new.yaml").unlink(missing_ok=True)
        assert main(["migrate", name, "--out", "new.yaml"]) == 0
        assert "said by no source: task_options.data" in capsys.readouterr().err
        assert main(["train", "new.yaml", "--dry-run"]) == 2
        assert (
            "data = CHOOSE: this config leaves the rows open; name files there, or by"
            in capsys.readouterr().err
        )


def trl(words: str) -> dict[str, Any]:
    made = migrate([], shlex.split(f"trl sft --model_name_or_path x/y {words}"))
    return dict(made.config.task_options)


def test_a_folder_that_trl_names_is_its_files(folder: Path) -> None:
    rows = folder / "rows"
    rows.mkdir()
    for name in ("a.jsonl", "notes.md", "my-test-1.jsonl"):
        (rows / name).write_text("{}\n")
    assert trl("--dataset_name ./rows")["data"] == "rows/a.jsonl"
    options = trl("--dataset_name ./rows --eval_strategy steps --eval_steps 5")
    assert (options["data"], options["eval_data"]) == ("rows/a.jsonl", "rows/my-test-1.jsonl")
    (rows / "train-0.jsonl").write_text("{}\n")
    assert trl("--dataset_name rows")["data"] == "rows/train-0.jsonl"
    assert trl("--dataset_name ./rows --dataset_train_split test")["data"] == "rows/my-test-1.jsonl"
    (rows / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert trl("--dataset_name ./rows")["data"] == "rows@train"
    assert trl("--dataset_name ./none")["data"] == "none"


def test_trl_has_no_evaluation_rows_where_it_evaluates_nothing(folder: Path) -> None:
    assert "eval_data" not in trl("--dataset_name owner/chats")
    assert (
        trl("--dataset_name owner/chats --eval_strategy epoch")["eval_data"] == "owner/chats@test"
    )


def test_variables_that_deepspeed_sets_on_each_machine_are_flags(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder / "home"))
    Path("hostfile").write_text("one slots=2\ntwo slots=2\n")
    Path(".deepspeed_env").write_text("NCCL_DEBUG=INFO\n# none\nA=b c\n")
    words = [
        "deepspeed",
        "--hostfile",
        "hostfile",
        "run_glue.py",
        "--model_name_or_path",
        "x/y",
        "--task_name",
        "mrpc",
    ]
    flags = (
        "--launcher",
        "ssh",
        "--hostfile",
        "hostfile",
        "--env",
        "NCCL_DEBUG=INFO",
        "--env",
        "A=b c",
    )
    assert migrate([], words).start == flags
    Path("mine").write_text("B=1\n")
    assert migrate([], ["DS_ENV_FILE=mine", *words]).start[-2:] == ("--env", "B=1")
    assert "DS_ENV_FILE = lost: it is not here" in migrate([], ["DS_ENV_FILE=lost", *words]).text
    assert ".deepspeed_env" in migrate([], ["deepspeed", "--num_gpus", "2", *words[3:]]).text


def test_blanks_that_a_script_removes_from_its_texts_are_said() -> None:
    assert "removes all blanks from its texts" in migrate([], ["python", "single-gpu-cls.py"]).text
