"""``distcore checkpoint``: list, check, compare and export checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path

from distcore.cli.flags import add_choice

SUMMARY = "list (ls), verify, diff and export checkpoints"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.usage = "distcore checkpoint ls RUN | verify RUN | diff A B | export RUN --to DIR"
    parser.add_argument("action", choices=["ls", "verify", "diff", "export"], help="what to do")
    parser.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="run folder, or checkpoint step-NNNNNNNN",
    )
    parser.add_argument(
        "--all", action="store_true", help="diff: every tensor that differs (default: the worst 5)"
    )
    parser.add_argument("--to", type=Path, metavar="DIR", help="export: the folder to make")
    parser.add_argument(
        "--format", metavar="NAME", help="export: an exporter, such as onnx (default: huggingface)"
    )
    parser.add_argument(
        "--dtype", choices=["fp32", "bf16", "fp16"], help="export: of the weights (default: fp32)"
    )
    parser.add_argument(
        "--merged",
        action="store_true",
        help="export: a whole model of a --lora run (default: for peft)",
    )
    add_choice(parser, "export: ")
    parser.add_argument(
        "--task",
        metavar="NAME",
        help="export: file.py:Class of a task that train() got as an object",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the action and return its exit code."""
    from distcore.cli import inspection

    return inspection.run(arguments)
