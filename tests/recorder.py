"""A progress that keeps what is said."""

from exlm_cli.progress import SilentProgress


class Recorder(SilentProgress):
    """Keeps what is said, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def message(self, text: str) -> None:
        self.said.append(text)
