"""The program that makes indexes: it reads the names of files from stdin, and answers each
with an empty line.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path

from distcore import DataError
from distcore_data.indexes.entries import file_index

if __name__ == "__main__":
    for line in sys.stdin:
        with suppress(DataError):  # whoever gave the file tries it, too, and says so
            file_index(Path(json.loads(line)))
        print(flush=True)
