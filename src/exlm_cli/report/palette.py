"""Colours of masks, in figures, HTML and terminals alike: first yellow, second brown, as in Figures 7 and 10."""

MASK_COLOURS = ("#F4C542", "#A86B3C", "#56B4E9", "#147A5C", "#D08CC0", "#3B6FB6", "#E07A5F", "#6E6B3A")
"""Neighbours differ in lightness as well as in hue, so they stay apart for colour-blind readers and in print."""

END_COLOUR = "#C9CED6"
"""BOS and EOS."""

INK = "#1F2933"
"""Words and numbers."""

FAINT_INK = "#67727E"
"""Captions."""

RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#A86B3C", "#56B4E9", "#E69F00", "#333333")
"""Curves of several runs (Okabe and Ito)."""

CORRUPTION_RAMP = ("#FCA636", "#E16462", "#B12A90", "#6A00A8", "#0D0887")
"""Cells of a Repeated-MLM grid from the smallest p^k to the largest: the darker, the more semantics are lost."""


def corruption_colour(group: int, num_groups: int) -> str:
    """Return the colour of a group of equal p^k, from 0 for the smallest, by its place on `CORRUPTION_RAMP`."""
    place = (len(CORRUPTION_RAMP) - 1) * (group / (num_groups - 1) if num_groups > 1 else 0.5)
    below = min(int(place), len(CORRUPTION_RAMP) - 2)
    pairs = zip(_channels(CORRUPTION_RAMP[below]), _channels(CORRUPTION_RAMP[below + 1]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (place - below)):02X}" for a, b in pairs)


def mask_colour(mask: int) -> str:
    """Return the colour of a mask, from 0; -1 is BOS or EOS. Colours repeat after eight masks."""
    return END_COLOUR if mask < 0 else MASK_COLOURS[mask % len(MASK_COLOURS)]


def ink_on(colour: str) -> str:
    """Return black or white, whichever reads better on a colour (WCAG contrast)."""
    luminance = _luminance(colour)
    return "#000000" if (luminance + 0.05) / 0.05 >= 1.05 / (luminance + 0.05) else "#FFFFFF"


def fade(colour: str, strength: float) -> str:
    """Mix a colour with white: 1 is the colour, 0 white."""
    mixed = [round(255 + (c - 255) * strength) for c in _channels(colour)]
    return "#" + "".join(f"{c:02X}" for c in mixed)


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _luminance(colour: str) -> float:
    """Relative luminance of sRGB, WCAG 2."""
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in _channels(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
