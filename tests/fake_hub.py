"""A Hub on this machine, over HTTP, in memory: the requests that `huggingface_hub` makes to push and to fetch."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.servers import serving

TOKEN = "hf_" + "secret" * 5


class FakeHub:
    """Repositories by name: commits, the newest last, each with its files.

    Attributes:
        private: Names of those that are private.
        refuses: Status with which every request is answered, its message, and the Hub's code if it has one; None: it
            works.
        cut: Bytes after which a download breaks off; None: it does not.
    """

    def __init__(self) -> None:
        self.repos: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.private: set[str] = set()
        self.refuses: tuple[int, str] | tuple[int, str, str] | None = None
        self.cut: int | None = None
        self.url = ""

    def commit(self, repo: str, files: dict[str, bytes]) -> str:
        """Add a commit with exactly these files, and return its name.

        The name follows from the files, as on the Hub: the client keeps what it knows of a commit by name.
        """
        commits = self.repos.setdefault(repo, [])
        sha = hashlib.sha1(repr((repo, len(commits), sorted(files.items()))).encode()).hexdigest()
        commits.append((sha, files))
        return sha

    def find(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return a commit of a repository by its name, or the newest for `main`."""
        commits = self.repos[repo]
        return commits[-1] if revision == "main" and commits else {c[0]: c for c in commits}.get(revision)


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.hub.refuses:
            return self._refuse(*self.hub.refuses)
        path = self.path.partition("?")[0]
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            repo, revision = match[1], match[2] or "main"
            if repo not in self.hub.repos:
                return self._refuse(404, "Repository not found", "RepoNotFound")
            found = self.hub.find(repo, revision)
            if found is None:
                return self._refuse(404, "Invalid rev id", "RevisionNotFound")
            siblings = [{"rfilename": name} for name in found[1]]
            is_private = repo in self.hub.private
            return self._answer({"id": repo, "sha": found[0], "siblings": siblings, "private": is_private, "tags": []})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            found = self.hub.find(match[1], match[2])
            listed = found[1] if found else {}
            entries = [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in listed.items()]
            return self._answer(entries)
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            found = self.hub.find(match[1], match[2])
            if found is None or match[3] not in found[1]:
                return self._refuse(404, "Entry not found", "EntryNotFound")
            return self._send_file(found[0], found[1][match[3]])
        self._refuse(404, f"the fake Hub does not know {path}")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(401, "Invalid username or password.")
        if self.hub.refuses:
            return self._refuse(*self.hub.refuses)
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            wanted = json.loads(body)
            repo = "/".join(filter(None, (wanted.get("organization"), wanted["name"])))
            if repo not in self.hub.repos:
                self.hub.commit(repo, {".gitattributes": b""})
                if "private" in (wanted.get("visibility"), *wanted):  # older clients send `private`
                    self.hub.private.add(repo)
            return self._answer({"url": f"{self.hub.url}/{repo}", "name": repo, "id": repo})
        if path.startswith("/api/models/") and "/preupload/" in path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for file in json.loads(body)["files"]
            ]
            return self._answer({"files": files})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            files = dict(self.hub.repos[match[1]][-1][1])
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                elif entry["key"] == "deletedFile":
                    del files[entry["value"]["path"]]
            sha = self.hub.commit(match[1], files)
            return self._answer({"commitUrl": f"{self.hub.url}/{match[1]}/commit/{sha}", "commitOid": sha})
        if path == "/api/validate-yaml":
            licence = re.search("^license: (.*)$", json.loads(body)["content"], re.MULTILINE)
            if licence and licence[1] != licence[1].lower():
                wrong = {"message": '"license" must be one of [apache-2.0, mit]'}
                return self._answer({"errors": [wrong], "warnings": []}, status=400)
            return self._answer({"errors": [], "warnings": []})
        self._refuse(404, f"the fake Hub does not know {path}")

    def _answer(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self._head(status, {"Content-Type": "application/json", "Content-Length": str(len(data))})
        self.wfile.write(data)

    def _send_file(self, sha: str, data: bytes) -> None:
        etag = hashlib.sha256(data).hexdigest()
        self._head(200, {"X-Repo-Commit": sha, "ETag": f'"{etag}"', "Content-Length": str(len(data))})
        if self.command == "GET":
            self.wfile.write(data if self.hub.cut is None else data[: self.hub.cut])
            self.close_connection = True

    def _refuse(self, status: int, message: str, code: str = "") -> None:
        self._head(status, {"X-Error-Message": message, "X-Error-Code": code, "Content-Length": "0"})

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()


@contextmanager
def running_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[FakeHub]:
    """Serve a Hub on this machine, and let its client ask it with a token, without waiting between attempts.

    What the client downloads goes to `cache`.
    """
    hub = FakeHub()
    with serving(type("Handler", (_Handler,), {"hub": hub})) as hub.url:
        of_files = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        constants = {"ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": of_files, "HF_HUB_DISABLE_XET": True}
        constants["HF_HUB_CACHE"] = str(cache)
        for name, value in constants.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        yield hub
