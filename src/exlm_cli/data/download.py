"""One public file into the cache: resumed where it broke off, whole and with the right SHA-256, or not at all."""

import hashlib
import http.client
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import IO, cast

from exlm_cli.data.corpus.cache import explaining_disk_trouble, locked
from exlm_cli.errors import DataError
from exlm_cli.files import cache_root
from exlm_cli.progress import Progress

_BLOCK_BYTES = 1 << 16
_TIMEOUT_S = 30.0
_WAITS_S = (1.0, 4.0)
"""Pauses before the second and the third attempt."""
_LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class RemoteFile:
    """A file at its public home, known to the byte.

    Attributes:
        url: `https:`, or `http:` on this machine.
        sha256: In hex, of the bytes at `url`.
        size_bytes: How many they are.
    """

    url: str
    sha256: str
    size_bytes: int

    @property
    def name(self) -> str:
        """The last part of the path."""
        return urllib.parse.urlsplit(self.url).path.rpartition("/")[2]


class _BrokenOffError(Exception):
    """The connection ended or stalled; what came is kept, and trying again makes sense."""


_NETWORK_ERRORS = (
    _BrokenOffError,
    urllib.error.URLError,
    http.client.HTTPException,
    ConnectionError,
    TimeoutError,
    ssl.SSLError,
)


def fetch_once(
    remote: RemoteFile,
    folder: str,
    progress: Progress,
    *,
    hint: str = "",
    pause: Callable[[float], None] = time.sleep,
) -> Path:
    """Return a remote file's copy in the cache, fetching it where it is not there yet or not what it should be.

    What has come of an interrupted fetch is kept beside it and asked for no second time, where the server can do that.
    Two processes that need one file fetch it once.

    Args:
        remote: Which.
        folder: Under the cache, one name.
        progress: Shown what is fetched, from where, and how far it is.
        hint: What the user can do instead, for errors.
        pause: Waits so many seconds before the next attempt.

    Raises:
        DataError: No network, no such file, or its size or SHA-256 is not the known one; nothing is left in its place.
    """
    root = cache_root(None)
    # the digest in the name keeps an older version of the list of files apart from this one
    path = root / _plain_name(folder) / f"{remote.sha256[:12]}-{_plain_name(remote.name)}"
    if _is_intact(path, remote):
        return path
    _check_address(remote.url, remote.url)
    with explaining_disk_trouble(root), locked(root, remote.sha256, progress):
        if _is_intact(path, remote):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.part")
        progress.message(f"fetching {remote.url} ({remote.size_bytes:,} bytes) into {path.parent}")
        _fetch(remote, partial, progress, hint, pause)
        found = _sha256(partial)
        if found != remote.sha256:
            partial.unlink()
            raise DataError(
                f"{remote.url}: SHA-256 is {found}, expected {remote.sha256}; the file was thrown away",
                hint or "the file at its home has changed, or something on the way changes it",
            )
        partial.replace(path)
    return path


def _fetch(remote: RemoteFile, partial: Path, progress: Progress, hint: str, pause: Callable[[float], None]) -> None:
    """Bring `partial` to the file's size, in as many attempts as there are waits, and one."""
    for wait_s in (*_WAITS_S, None):
        try:
            return _fetch_rest(remote, partial, progress)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code < 500 or wait_s is None:
                raise DataError(f"{remote.url}: the server answers {error.code} {error.reason}", hint) from error
            reason = f"the server answers {error.code} {error.reason}"
        except _NETWORK_ERRORS as error:
            reason = str(getattr(error, "reason", None) or error)
            if wait_s is None:
                raise DataError(f"{remote.url}: cannot be fetched: {reason}", hint) from error
        progress.message(f"{reason}; trying again in {wait_s:g} s")
        pause(wait_s)


def _fetch_rest(remote: RemoteFile, partial: Path, progress: Progress) -> None:
    done = partial.stat().st_size if partial.is_file() else 0
    if done > remote.size_bytes:
        partial.unlink()
        done = 0
    if done == remote.size_bytes:
        return
    request = urllib.request.Request(remote.url, headers={"User-Agent": "exlm", "Accept-Encoding": "identity"})  # noqa: S310 (its scheme was checked)
    if done:
        request.add_header("Range", f"bytes={done}-")
    opener = urllib.request.build_opener(_CheckedRedirects)
    with opener.open(request, timeout=_TIMEOUT_S) as answer:
        if done and not _continues_at(answer, done):
            done = 0  # the server sends all of it again
        with (
            partial.open("ab" if done else "wb") as file,
            progress.bar(remote.name, remote.size_bytes, done=done) as bar,
        ):
            while block := answer.read(_BLOCK_BYTES):
                done += len(block)
                if done > remote.size_bytes:
                    partial.unlink()
                    raise DataError(
                        f"{remote.url}: the server sends more than the expected {remote.size_bytes:,} bytes",
                        "the file at its home has changed, or something on the way changes it",
                    )
                file.write(block)
                bar.update(done)
    if done < remote.size_bytes:
        raise _BrokenOffError(f"the connection ended after {done:,} of {remote.size_bytes:,} bytes")


def _continues_at(answer: http.client.HTTPResponse, start: int) -> bool:
    given = answer.headers.get("Content-Range") or ""
    return answer.status == http.client.PARTIAL_CONTENT and given.startswith(f"bytes {start}-")


class _CheckedRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to addresses that are accepted as the first one was."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> urllib.request.Request | None:
        """Refuse what `_check_address` does."""
        try:
            _check_address(req.full_url, newurl)
        except DataError:
            fp.close()
            raise
        return super().redirect_request(req, fp, code, msg, cast(http.client.HTTPMessage, headers), newurl)


def _check_address(url: str, target: str) -> None:
    parts = urllib.parse.urlsplit(target)
    if parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOCAL_HOSTS):
        return
    leads = "" if url == target else f" leads to {target}, which"
    raise DataError(f"{url}:{leads} is not an https address")


def _plain_name(name: str) -> str:
    """Return a file name that can only be one inside its folder.

    Raises:
        DataError: It holds a path, or is hidden or empty.
    """
    if not name or name.startswith(".") or "/" in name or "\\" in name or "\0" in name:
        raise DataError(f"{name!r} is not a file name")
    return name


def _is_intact(path: Path, remote: RemoteFile) -> bool:
    return path.is_file() and path.stat().st_size == remote.size_bytes and _sha256(path) == remote.sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
