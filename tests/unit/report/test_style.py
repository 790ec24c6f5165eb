"""Colours against the formulas of WCAG 2, written out here once more; titles that stay inside the figure."""

import pytest

from exlm_cli.report.style import (
    CORRUPTION_RAMP,
    END_COLOUR,
    MASK_COLOURS,
    corruption_colour,
    drawing,
    fade,
    ink_on,
    legend_label,
    new_figure,
    new_panels,
)


def _luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(one, other):
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("colour", [*MASK_COLOURS, END_COLOUR, *(fade(c, 0.25) for c in MASK_COLOURS)])
def test_words_on_every_colour_can_be_read(colour):
    assert _contrast(ink_on(colour), colour) >= 4.5


def test_groups_of_equal_corruption_go_along_the_whole_ramp():
    assert [corruption_colour(group, 5) for group in range(5)] == [*CORRUPTION_RAMP]
    assert corruption_colour(0, 1) == CORRUPTION_RAMP[2]
    # a tenth of the way: 4/10 between the first two
    red, green, blue = (0xFC - 0.4 * (0xFC - 0xE1), 0xA6 - 0.4 * (0xA6 - 0x64), 0x36 + 0.4 * (0x62 - 0x36))
    assert corruption_colour(1, 11) == f"#{round(red):02X}{round(green):02X}{round(blue):02X}"


def test_a_label_that_begins_with_an_underscore_is_in_the_legend():
    with drawing():
        _, (axes,) = new_panels(1, 1, (3, 3))
        for name in ("_active", "plain"):
            axes.plot([0, 1], [0, 1], label=legend_label(name))
        assert [label.strip() for label in axes.get_legend_handles_labels()[1]] == ["_active", "plain"]


def test_a_long_title_is_broken_into_lines_that_stay_inside_the_figure():
    figure = new_figure(3.4, 2.0, "wide words " * 12, ["a caption that goes on " * 8])
    figure.subplots()
    renderer = figure.canvas
    renderer.draw()
    outer = figure.bbox
    for text in figure.texts:
        box = text.get_window_extent()
        assert outer.x0 <= box.x0
        assert box.x1 <= outer.x1
        assert box.y1 <= outer.y1
    (axes,) = figure.axes
    assert axes.get_tightbbox().y1 <= min(text.get_window_extent().y0 for text in figure.texts)
