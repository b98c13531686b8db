import hashlib
import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from distcore_tasks.text_classification import embedded


def texts_and_labels():
    rows = embedded.stdlib_docs().values
    return [row.texts[0] for row in rows], [row.label for row in rows]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """One cache for the module: collecting takes seconds."""
    folder = tmp_path_factory.getbasetemp() / "embedded-cache"
    monkeypatch.setenv("DISTCORE_CACHE", str(folder))
    return folder


@pytest.mark.programs
def test_stdlib_docs_has_thousands_of_rows_in_balanced_classes():
    _, labels = texts_and_labels()
    rows, counts = len(labels), Counter(labels)
    assert rows > 5000
    assert 6 <= len(counts) <= 8
    assert max(counts.values()) < 0.25 * rows
    # a Python without tkinter has fewer about graphics
    assert min(counts.values()) > 0.03 * rows


@pytest.mark.programs
def test_no_text_has_a_twin_that_differs_only_in_case_or_digits():
    texts, _ = texts_and_labels()
    bare = [
        "".join(character for character in text.lower() if character.isalpha()) for text in texts
    ]
    assert len(set(bare)) == len(bare)


def test_no_module_has_two_subjects():
    modules = [module for modules in embedded.SUBJECTS.values() for module in modules.split()]
    assert len(set(modules)) == len(modules)


def test_a_text_under_two_subjects_is_left_out(tmp_path):
    shared, own = (
        "This sentence stands in both of the modules.",
        "This sentence stands in one module, and only there.",
    )
    (tmp_path / "queue.py").write_text(f'"""{shared}\n\n{own}\n"""')
    (tmp_path / "glob.py").write_text(f'"""{shared.upper()[:4]}{shared[4:]}"""')
    assert embedded.collect(tmp_path) == [(own, "concurrency")]


def test_code_examples_and_tests_are_left_out(tmp_path):
    (tmp_path / "http" / "tests").mkdir(parents=True)
    (tmp_path / "http" / "tests" / "a.py").write_text(
        '"""A sentence about networks that is long enough."""'
    )
    (tmp_path / "http" / "b.py").write_text(
        '"""\n>>> print("code that is long enough, but code it is")\n"""'
    )
    assert embedded.collect(tmp_path) == []


@pytest.mark.programs
def test_the_rows_are_the_same_whatever_the_hash_seed(cache):
    expected = hashlib.sha256(json.dumps(embedded.stdlib_docs().values).encode()).hexdigest()
    code = (
        "import hashlib, json; from distcore_tasks.text_classification.embedded import stdlib_docs;"
        "print(hashlib.sha256(json.dumps(stdlib_docs().values).encode()).hexdigest())"
    )
    environment = os.environ | {"PYTHONHASHSEED": "12345", "DISTCORE_CACHE": str(cache) + "-other"}
    assert (
        subprocess.check_output([sys.executable, "-c", code], text=True, env=environment).strip()
        == expected
    )


@pytest.mark.programs
def test_the_module_documents_its_rows():
    _, labels = texts_and_labels()
    told = " ".join((embedded.__doc__ or "").split())
    assert all(str(label) in told for label in set(labels))
    assert "PSF" in told
