"""Paths with `~` and where the cache is. What `~` stands for is said by HOME and the user database, as in a shell."""

import pwd
import re
from pathlib import Path
from typing import NoReturn

import pytest

from exlm_cli.errors import DataError
from exlm_cli.files import cache_root, expand_path


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without HOME whose user number is in no database, as in many containers."""

    def unknown(_: int) -> NoReturn:
        raise KeyError

    for name in ("HOME", "EXLM_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


def test_only_a_tilde_at_the_beginning_is_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert expand_path("~") == Path("/home/me")
    assert expand_path("~/a/*.txt") == Path("/home/me/a/*.txt")
    assert expand_path("~root/a") == Path(pwd.getpwnam("root").pw_dir) / "a"
    for given in ("a/~", "./~nosuchuser/a", "/~", "a", ""):
        assert expand_path(given) == Path(given)


def test_the_home_of_an_unknown_user_is_refused() -> None:
    message = "~nosuchuser/x.txt: there is no home folder that `~nosuchuser` could stand for"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$") as caught:
        expand_path("~nosuchuser/x.txt")
    assert (
        caught.value.hint == "write the path in full, or as ./~nosuchuser/x.txt where the name itself begins with `~`"
    )


@pytest.mark.usefixtures("no_home")
def test_a_process_without_a_home_is_told_so() -> None:
    with pytest.raises(DataError, match=r"^~/x: there is no home folder that `~` could stand for$"):
        expand_path("~/x")
    with pytest.raises(DataError, match=r"^there is no home folder to keep a cache in$") as caught:
        cache_root(None)
    assert caught.value.hint == "set EXLM_CACHE_DIR to a folder"


def test_the_cache_is_where_the_first_of_four_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("EXLM_CACHE_DIR", "~/own")
    assert cache_root("~/given") == Path("/home/me/given")
    assert cache_root(None) == Path("/home/me/own")
    monkeypatch.delenv("EXLM_CACHE_DIR")
    assert cache_root(None) == Path("/xdg/exlm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root(None) == Path("/home/me/.cache/exlm")


@pytest.mark.parametrize("configured", ["~nosuchuser/c", None])
def test_a_cache_below_an_unknown_home_is_refused(configured: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXLM_CACHE_DIR", "~nosuchuser/c")
    with pytest.raises(DataError, match=r"^~nosuchuser/c: there is no home folder that `~nosuchuser` could stand for$"):
        cache_root(configured)
