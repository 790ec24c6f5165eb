"""Formatting of numbers for messages, tables and figures."""


def format_figure(value: float, *, beside: float | None = None) -> str:
    """Return a score with four decimals, or where these would show none of it or too much, with four digits.

    Args:
        value: Of any magnitude: values to predict come in units of their own.
        beside: The figure whose spread it is, which it is written like.
    """
    magnitude = abs(value if beside is None else beside)
    return f"{value:.4f}" if magnitude == 0 or 1e-3 <= magnitude < 1e6 else f"{value:.4g}"
