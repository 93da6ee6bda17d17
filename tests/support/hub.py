"""A loopback server that speaks as much of the hub's file API as loading a checkpoint needs."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
OLD = "0ddba11" + "0" * 33


class _Handler(BaseHTTPRequestHandler):
    """Serves ``server.repos``: {repo id: {commit: folder}}; ``main`` and ``v1`` are revisions; ids
    with "gated" refuse."""

    def _refuse(self, status: int, code: str, message: str) -> None:
        body = json.dumps({"error": message}).encode()
        self._send(body, {"X-Error-Code": code, "X-Error-Message": message}, status)

    def _reply(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._api(parts[2:])
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._refuse(404, "RepoNotFound", "Repository not found")

    do_GET = do_HEAD = _reply

    def _folder(self, repo: str, revision: str) -> tuple[str, Path] | None:
        if repo not in self.server.repos:
            self._refuse(404, "RepoNotFound", "Repository not found")
        else:
            commits = self.server.repos[repo]
            commit = {"main": COMMIT, "v1": OLD}.get(revision, revision)
            if commit in commits:
                return commit, commits[commit]
            self._refuse(404, "RevisionNotFound", "Revision not found")
        return None

    def _api(self, parts: list[str]) -> None:
        repo, rest = "/".join(parts[:2]), parts[2:]
        revision = rest[1] if len(rest) > 1 else "main"
        found = self._folder(repo, revision)
        if found is None:
            return
        commit, folder = found
        files = [
            {"type": "file", "path": f.name, "oid": "0" * 40, "size": f.stat().st_size}
            for f in sorted(folder.iterdir())
        ]
        siblings = [{"rfilename": f["path"]} for f in files]
        whole = {"id": repo, "sha": commit, "siblings": siblings}
        answer = json.dumps(files if rest[:1] == ["tree"] else whole)
        self._send(answer.encode(), {"Content-Type": "application/json"})

    def _file(self, repo: str, revision: str, name: str) -> None:
        found = self._folder(repo, revision)
        if found is None:
            return
        commit, folder = found
        if "gated" in repo:  # metadata are public, files are not
            self._refuse(403, "GatedRepo", "Access to this model is restricted")
            return
        file = folder / name
        if not file.is_file():
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        body = file.read_bytes()
        headers = {"X-Repo-Commit": commit, "Content-Type": "application/octet-stream"}
        self._send(body, headers | {"ETag": f'"{hashlib.sha1(body).hexdigest()}"'})

    def _send(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serve(repos: dict[str, dict[str, Path]]) -> Iterator[ThreadingHTTPServer]:
    """The server on a free port of the loopback interface; ``requests`` lists what it was asked."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.repos, server.requests = repos, []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


SCRIPT = """
import json, sys
from lipbound.models.loading import load_checkpoint
from lipbound.errors import CheckpointError
for line in sys.stdin:
    answers = {}
    for name, file in json.loads(line):
        said = name if file is None else f"{name} {file}"
        try:
            checkpoint = load_checkpoint(name, gguf_file=file)
            answers[said] = [checkpoint.commit, checkpoint.revision, checkpoint.tokenizer()("the ferry").input_ids]
        except CheckpointError as error:
            answers[said] = str(error)
    print("ANSWERS", json.dumps(answers), flush=True)
"""  # noqa: E501


class Asking:
    """A process that loads models from a hub, in which nothing is known of it but its address and a
    cache."""

    def __init__(self, cache: Path, endpoint: str, **env: str):
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(cache)}
        environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", **env}
        words = [sys.executable, "-c", SCRIPT]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def __enter__(self) -> "Asking":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._process.communicate(timeout=60)
        finally:
            self._process.kill()

    def ask(self, *names: str | tuple[str, str]) -> dict:
        """Commit, revision and two words' tokens of each model, or the sentence that refuses it; a
        name may come with a GGUF file's."""
        asked = [(name, None) if isinstance(name, str) else name for name in names]
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("ANSWERS "):
                return json.loads(line.removeprefix("ANSWERS "))
        raise AssertionError("the process that was asked has ended")
