"""Download of a public file into the cache with `pooch`, checked by its SHA-256."""

import hashlib
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from exlm_cli.data.cache import explaining_disk_trouble, locked
from exlm_cli.errors import DataError
from exlm_cli.paths import cache_root
from exlm_cli.progress import Progress

_BLOCK_BYTES = 1 << 16
_TIMEOUT_S = 30.0
_NUM_RETRIES = 2


@dataclass(frozen=True)
class RemoteFile:
    """A public file whose size and hash are known.

    Attributes:
        sha256: SHA-256 of the bytes at `url`, in hex.
    """

    url: str
    sha256: str
    size_bytes: int

    @property
    def name(self) -> str:
        """The last part of the path."""
        return urllib.parse.urlsplit(self.url).path.rpartition("/")[2]


def fetch_once(remote: RemoteFile, folder: str, progress: Progress, hint: str) -> Path:
    """Return a remote file's copy in the cache; download it if there is none, or if it is altered.

    Two processes that need one file download it once. A broken connection is retried twice. `folder` is relative to
    the cache; `hint` tells what the user can do instead.

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
            files.fetch(name, downloader=lambda _url, target, _pooch: _download(remote, target, progress, hint))
        except RequestException as error:
            raise DataError(f"{remote.url}: cannot be fetched: {_root_of(error)}", hint) from error
    return path


def _download(remote: RemoteFile, target: str, progress: Progress, hint: str) -> None:
    import requests

    progress.message(f"fetching {remote.url} ({remote.size_bytes:,} bytes)")
    Path(target).unlink()  # made by `tempfile`, whose mode is 0600 whatever the umask is
    with (
        requests.get(
            remote.url,
            stream=True,
            timeout=_TIMEOUT_S,
            headers={"User-Agent": "exlm", "Accept-Encoding": "identity"},
        ) as response,
        Path(target).open("wb") as file,
        progress.bar(remote.name, remote.size_bytes) as bar,
    ):
        if 400 <= response.status_code < 500:
            raise DataError(f"{remote.url}: the server answers {response.status_code} {response.reason}", hint)
        response.raise_for_status()
        done, digest = 0, hashlib.sha256()
        for block in response.iter_content(_BLOCK_BYTES):
            file.write(block)
            digest.update(block)
            done += len(block)
            bar.update(done)
            if done > remote.size_bytes:
                break
    # pooch would fetch wrong bytes again, as if the connection had broken
    if digest.hexdigest() != remote.sha256:
        raise DataError(
            f"{remote.url}: the SHA-256 is not {remote.sha256}; the file was replaced, or altered in transit", hint
        )


def _root_of(error: BaseException) -> BaseException:
    """Return what an error began with: the client's own messages hold its whole stack of connections."""
    while (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error
