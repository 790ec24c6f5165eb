"""One public file in the cache, by `pooch`: whole and with the known SHA-256, or not at all."""

import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from exlm_cli.data.corpus.cache import explaining_disk_trouble, locked
from exlm_cli.errors import DataError
from exlm_cli.files import cache_root
from exlm_cli.progress import Bar, Progress

_BLOCK_BYTES = 1 << 16
_TIMEOUT_S = 30.0
_NUM_RETRIES = 2
_LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
_CHANGED_HINT = "the file at its home has changed, or something on the way changes it"


@dataclass(frozen=True)
class RemoteFile:
    """A file at its public home, known to the byte.

    Attributes:
        url: `https:`, or `http:` on this machine.
        sha256: SHA-256 of the bytes at `url`, in hex.
        size_bytes: Number of bytes.
    """

    url: str
    sha256: str
    size_bytes: int

    @property
    def name(self) -> str:
        """The last part of the path."""
        return urllib.parse.urlsplit(self.url).path.rpartition("/")[2]


def fetch_once(remote: RemoteFile, folder: str, progress: Progress, *, hint: str = "") -> Path:
    """Return a remote file's copy in the cache; download it if there is none, or if it is altered.

    Two processes that need one file download it once. A broken connection is retried twice.

    Args:
        remote: The file.
        folder: Folder in the cache.
        progress: Gets a message and a bar.
        hint: What the user can do instead, for errors.

    Raises:
        DataError: No network, no such file, or its size or SHA-256 is not the known one; nothing is left in its place.
    """
    import pooch
    from requests import RequestException

    pooch.get_logger().setLevel("ERROR")
    root = cache_root(None)
    # the digest in the name keeps versions of a file apart
    name = f"{remote.sha256[:12]}-{remote.name}"
    path = root / folder / name
    if path.is_file() and pooch.file_hash(path) == remote.sha256:
        return path
    files = pooch.create(
        root / folder,
        base_url="",
        registry={name: remote.sha256},
        urls={name: remote.url},
        retry_if_failed=_NUM_RETRIES,
    )
    with explaining_disk_trouble(root), locked(root, remote.sha256, progress):
        try:
            files.fetch(name, downloader=_Download(remote, progress, hint))
        except RequestException as error:
            raise DataError(f"{remote.url}: cannot be fetched: {error}", hint) from error
        except ValueError as error:
            raise DataError(f"{remote.url}: the SHA-256 is not {remote.sha256}", hint or _CHANGED_HINT) from error
    return path


@final
class _Download:
    """A downloader of `pooch` that takes https only, no more than the known bytes, and shows a bar."""

    def __init__(self, remote: RemoteFile, progress: Progress, hint: str) -> None:
        self._remote, self._progress, self._hint = remote, progress, hint

    def __call__(self, url: str, output_file: str, pooch: Any) -> None:
        from pooch import HTTPDownloader

        remote = self._remote
        _refuse_insecure(url, url)
        self._progress.message(f"fetching {url} ({remote.size_bytes:,} bytes)")
        with self._progress.bar(remote.name, remote.size_bytes) as bar:
            HTTPDownloader(
                progressbar=_LimitedBar(bar, remote),
                chunk_size=_BLOCK_BYTES,
                timeout=_TIMEOUT_S,
                headers={"User-Agent": "exlm", "Accept-Encoding": "identity"},
                hooks={"response": self._check_response},
            )(url, output_file, pooch)

    def _check_response(self, response: Any, **_: object) -> None:
        url = self._remote.url
        if response.is_redirect:
            _refuse_insecure(url, urllib.parse.urljoin(response.url, response.headers["Location"]))
        elif 400 <= response.status_code < 500:
            raise DataError(f"{url}: the server answers {response.status_code} {response.reason}", self._hint)


@final
class _LimitedBar:
    """The bar that `pooch` updates after each block."""

    total = 0

    def __init__(self, bar: Bar, remote: RemoteFile) -> None:
        self._bar, self._remote = bar, remote
        self._done = 0

    def update(self, num_bytes: int) -> None:
        """Count a block; the last one may be shorter than it says.

        Raises:
            DataError: The blocks before it were the whole file already.
        """
        if self._done >= self._remote.size_bytes:
            raise DataError(
                f"{self._remote.url}: the server sends more than the expected {self._remote.size_bytes:,} bytes",
                _CHANGED_HINT,
            )
        self._done += num_bytes
        self._bar.update(min(self._done, self._remote.size_bytes))

    def reset(self) -> None:
        """Begin the last update, which gives the total."""
        self._done = 0

    def close(self) -> None:
        """Do nothing: the bar's context ends it."""


def _refuse_insecure(url: str, target: str) -> None:
    parts = urllib.parse.urlsplit(target)
    if parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOCAL_HOSTS):
        return
    leads = "" if url == target else f" leads to {target}, which"
    raise DataError(f"{url}:{leads} is not an https address")
