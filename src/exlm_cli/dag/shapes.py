"""The nodes and edges of a drawn DAG, in points with y downwards; drawn by figures and HTML alike."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Points = NDArray[np.float64]

GRAPH_CAPTION = (
    "Each box is one state of a [MASK] with its most probable word; the more of its colour it shows, the more paths "
    "visit it. Edges are as wide as their transition probability and as dark as they are used."
)
LABEL_FONT_SHARE, HEADING_FONT_SHARE = 0.74, 0.85


@dataclass(frozen=True)
class NodeBox:
    """A node: its centre, size, word and how often paths visit it."""

    node: int
    mask: int
    x: float
    y: float
    width: float
    height: float
    word: str
    occupancy: float

    @property
    def strength(self) -> float:
        """How much of its colour it shows: a quarter where no path visits it, all of it where every path does."""
        return 0.25 + 0.75 * math.sqrt(min(1.0, self.occupancy))


@dataclass(frozen=True)
class EdgeCurve:
    """An edge: the four control points of its curve, its probability, and where that is written, if anywhere."""

    source: int
    target: int
    probability: float
    use: float
    control: Points
    label_at: tuple[float, float] | None

    @property
    def label(self) -> str:
        """What is written on it."""
        return f"{self.probability:.2f}"

    @property
    def width(self) -> float:
        """Of the line, by the transition probability."""
        return 0.6 + 3.4 * self.probability

    @property
    def opacity(self) -> float:
        """Of the line, by the share of paths that take it."""
        return 0.16 + 0.7 * math.sqrt(min(1.0, self.use))

    def arrow_head(self) -> Points:
        """Corners (3, 2) of the triangle at its end."""
        tip = self.control[3]
        along = tip - self.control[2]
        along = along / np.linalg.norm(along) * (4.0 + 1.4 * self.width)
        across = 0.42 * np.array([-along[1], along[0]])
        return np.stack([tip, tip - along + across, tip - along - across])

    def shaft(self) -> Points:
        """Points of its line, which ends inside the head, so that a wide line does not blunt the tip."""
        points = curve_points(self.control, 200)
        head = self.arrow_head()
        to_tip = np.linalg.norm(points - points[-1], axis=1)
        shaft: Points = points[to_tip > 0.8 * np.linalg.norm(head[1] - head[0])]
        return shaft


@dataclass(frozen=True)
class GraphLayout:
    """A whole drawing; `headings` stand above the columns and belong to no node (-1)."""

    width: float
    height: float
    font: float
    nodes: tuple[NodeBox, ...]
    edges: tuple[EdgeCurve, ...]
    headings: tuple[NodeBox, ...]

    @property
    def heading_font(self) -> float:
        """Size of the masks' names."""
        return self.font * HEADING_FONT_SHARE

    @property
    def label_font(self) -> float:
        """Size of the numbers on edges."""
        return self.font * LABEL_FONT_SHARE


def curve_points(control: Points, num_points: int) -> Points:
    """Points (P, 2) along a cubic curve, ends included."""
    t = np.linspace(0.0, 1.0, num_points)[:, None]
    a, b, c, d = control
    return np.asarray((1 - t) ** 3 * a + 3 * (1 - t) ** 2 * t * b + 3 * (1 - t) * t**2 * c + t**3 * d)
