"""Fixtures of the tests of tuning."""

from __future__ import annotations

import pytest
from text_task import TEXTS

from distcore.config import RunConfig, load_config
from distcore.resolve.resolve import resolve


@pytest.fixture
def resolved() -> RunConfig:
    """A job of 32 rows a step on one CPU process."""
    return resolve(load_config(None, {"device": "cpu", "out": "run", "task": TEXTS})).config
