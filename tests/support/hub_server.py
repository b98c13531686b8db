"""A hub on loopback, which speaks as much of the Hugging Face hub's protocol as
a download asks for.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

SHA = "0123456789abcdef0123456789abcdef01234567"
"""The only commit of each repository."""


class _Hub(BaseHTTPRequestHandler):
    """Answers for the repositories ``root/datasets/OWNER/NAME`` and
    ``root/models/OWNER/NAME``, folders of files.
    """

    protocol_version = "HTTP/1.1"

    def __init__(self, root: Path, *arguments: Any) -> None:
        self.root = root
        super().__init__(*arguments)

    def do_GET(self) -> None:
        path = urlparse(self.path).path
        if path.startswith("/api/"):
            self._repository(path.removeprefix("/api/").split("/"))
        else:
            self._file(path.strip("/").split("/"))

    do_HEAD = do_GET

    def _repository(self, parts: list[str]) -> None:
        """``KIND/OWNER/NAME`` and what is asked of it: its facts, or the list of its files."""
        folder = self.root.joinpath(*parts[:3])
        if len(parts) < 3 or not folder.is_dir():
            return self._answer(b"{}", 404, X_Error_Code="RepoNotFound")
        files = [
            {
                "type": "file",
                "path": file.name,
                "rfilename": file.name,
                "size": file.stat().st_size,
                "oid": _oid(file),
            }
            for file in sorted(folder.iterdir())
        ]
        tree = parts[3:4] == ["tree"]
        listed = files if len(parts) < 6 else []  # no folders below
        facts = {
            "id": "/".join(parts[1:3]),
            "sha": SHA,
            "private": False,
            "tags": [],
            "siblings": files,
        }
        return self._answer(
            json.dumps(listed if tree else facts).encode(), Content_Type="application/json"
        )

    def _file(self, parts: list[str]) -> None:
        """``datasets/OWNER/NAME/resolve/SHA/FILE``, or the same without
        ``datasets`` for a model.
        """
        kind = parts.pop(0) if parts[0] == "datasets" else "models"
        file = self.root / kind / "/".join(parts[:2]) / parts[-1]
        if parts[2:3] != ["resolve"] or not file.is_file():
            return self._answer(b"", 404, X_Error_Code="EntryNotFound", X_Repo_Commit=SHA)
        return self._answer(file.read_bytes(), X_Repo_Commit=SHA, ETag=f'"{_oid(file)}"')

    def _answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def _oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def hub_server(root: Path) -> Iterator[str]:
    """Serve the repositories below ``root``; gives the address, for ``HF_ENDPOINT``."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Hub, root))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
