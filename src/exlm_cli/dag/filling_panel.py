"""The list of fillings beside the graph."""

from dataclasses import dataclass

import numpy as np

from exlm_cli.dag.canvas import Canvas
from exlm_cli.dag.fillings import Filling
from exlm_cli.dag.inspect import Inspection
from exlm_cli.dag.words import counted_fillings, filled_words
from exlm_cli.format import format_percent
from exlm_cli.report.style import FAINT_INK
from exlm_cli.report.text_metrics import fit_word, text_width

_FONT, _PITCH = 9.0, 19.0
_TOP, _BAR_LEFT, _BAR_WIDTH, _WORDS_LEFT = 22.0, 46.0, 46.0, 98.0
_WIDEST_WORD = 84.0


@dataclass(frozen=True)
class FillingPanel:
    """Shares, bars and words in columns by mask, and below them the independent guess.

    Attributes:
        words: Of every filling, cut to fit, one a mask.
        guessed: Of the independent guess.
        columns: Left edge of each mask's words; the last one is where the panel's marks stand.
    """

    words: list[list[str]]
    guessed: list[str]
    columns: list[float]

    @classmethod
    def of(cls, inspection: Inspection) -> "FillingPanel":
        """Measure what there is to show."""

        def cut(filling: Filling) -> list[str]:
            return [fit_word(word, _FONT, _WIDEST_WORD) for word in filled_words(inspection, filling)]

        words, guessed = [cut(filling) for filling in inspection.n_best.fillings], cut(inspection.guess.filling)
        columns = [_WORDS_LEFT]
        for in_mask in zip(guessed, *words, strict=True):
            columns.append(columns[-1] + max(text_width(word, _FONT) for word in in_mask) + 12.0)
        return cls(words, guessed, columns)

    @property
    def width(self) -> float:
        """Points, the margin on the right included."""
        return max(self.columns[-1] + 30.0, 262.0)

    @property
    def height(self) -> float:
        """Points, margins included."""
        return _TOP + 36.0 + _PITCH * len(self.words) + 56.0

    def draw(self, canvas: Canvas, inspection: Inspection, left: float) -> None:
        """Draw it with its left edge at `left`."""
        n_best = inspection.n_best
        canvas.text(left, _TOP, "Most probable joint fillings", 10.0, align="left", is_bold=True)
        canvas.text(left, _TOP + 14, f"share {counted_fillings(inspection)}", 8.0, FAINT_INK, align="left")
        y = _TOP + 36.0
        shares = np.exp([filling.log_prob - n_best.log_prob_length for filling in n_best.fillings]).tolist()
        for filling, words, share in zip(n_best.fillings, self.words, shares, strict=True):
            canvas.text(left + _BAR_LEFT - 6, y, format_percent(share), _FONT, align="right")
            # not from the shares, which may be too small for a number
            bar = max(_BAR_WIDTH * float(np.exp(filling.log_prob - n_best.fillings[0].log_prob)), 0.5)
            canvas.box(left + _BAR_LEFT + bar / 2, y, bar, 9, "#B8C4D0")
            self._draw_words(canvas, words, left, y)
            if filling.is_valid_smiles is False:
                canvas.text(left + self.columns[-1] + 6, y, "\N{BALLOT X}", _FONT)
            y += _PITCH
        guess = inspection.guess
        together = format_percent(float(np.exp(guess.filling.log_prob - n_best.log_prob_length)))
        alone = format_percent(float(np.exp(guess.log_prob_independent)))
        canvas.text(left, y + 8, "Each [MASK] guessed on its own", 10.0, align="left", is_bold=True)
        note = f"{alone} if masks were independent; {together} in the DAG"
        canvas.text(left, y + 22, note, 8.0, FAINT_INK, align="left")
        self._draw_words(canvas, self.guessed, left, y + 42)

    def _draw_words(self, canvas: Canvas, words: list[str], left: float, y: float) -> None:
        for mask, (word, x) in enumerate(zip(words, self.columns, strict=False)):
            canvas.chip(left + x, y, word, _FONT, mask, align="left")
