"""How a setting is named in hints. Goes once every hint writes `` `key=VALUE` `` itself."""


def how_to_set(key: str, value: str, option: str | None = None) -> str:
    """Return a setting as an override; `cli/hints.py` turns it into an option."""
    del option
    return f"`{key}={value}`"
