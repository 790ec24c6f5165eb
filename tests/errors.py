"""Errors that tell a user what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from exlm_cli.errors import ExlmError


@contextmanager
def refused(kind: type[ExlmError], match: str, hint: str) -> Iterator[None]:
    """Expect an error of a kind whose message matches and whose hint holds a text."""
    with pytest.raises(kind, match=match) as caught:
        yield
    assert hint in caught.value.hint
