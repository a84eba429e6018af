"""Plots as inline SVG: drawn 360 wide, so that their text is readable on a phone too.

What is drawn takes its colours from the page's classes. All text is escaped here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from ntx_batch.report.scale import ticks
from ntx_batch.report.words import number

WIDTH, HEIGHT = 360.0, 190.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 8.0, 22.0, 34.0
BASE = HEIGHT - BOTTOM
NAME_Y = 10.0  # of the words above the plot
_UNITS = (("G", 1e9), ("M", 1e6), ("k", 1e3))


class Frame:
    """A plot with both axes from 0: maps values to places and collects what is drawn.

    label: what the plot shows, for those who do not see it
    x_max, y_max: greatest values
    x_name, y_name: of the axes, with units
    """

    def __init__(self, label: str, *, x_max: float, y_max: float, x_name: str, y_name: str) -> None:
        self._label = label
        self._x_ticks, self._y_ticks = ticks(x_max), ticks(y_max, 4)
        self._x_max, self._y_max = x_max, self._y_ticks[-1]
        self._pieces: list[str] = []
        self._draw_axes(x_name, y_name)

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / self._x_max

    def y(self, value: float) -> float:
        return BASE - (BASE - TOP) * min(value, self._y_max) / self._y_max

    def add(self, piece: str) -> None:
        self._pieces.append(piece)

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "start", kind: str = "label"
    ) -> None:
        self.add(
            f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
            f"{escape(words)}</text>"
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str, title: str = "") -> None:
        inner = f"><title>{escape(title)}</title></line>" if title else "/>"
        self.add(
            f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"{inner}'
        )

    def done(self, kind: str) -> str:
        """The plot as text. kind: class that gives its colour"""
        return (
            f'<svg class="plot {kind}" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" '
            f'aria-label="{escape(self._label)}">{"".join(self._pieces)}</svg>'
        )

    def _draw_axes(self, x_name: str, y_name: str) -> None:
        for value, words in zip(self._y_ticks, tick_texts(self._y_ticks), strict=True):
            self.line(LEFT, self.y(value), WIDTH - RIGHT, self.y(value), "rule")
            self.text(LEFT - 6, self.y(value) + 3.5, words, anchor="end")
        for value, words in zip(self._x_ticks, tick_texts(self._x_ticks), strict=True):
            if value <= self._x_max * 1.001:
                self.line(self.x(value), BASE, self.x(value), BASE + 4, "tick")
                # The last one would be cut off where it stands at the very end.
                anchor = "end" if self.x(value) > WIDTH - RIGHT - 8 else "middle"
                self.text(self.x(value), BASE + 15, words, anchor=anchor)
        self.line(LEFT, BASE, WIDTH - RIGHT, BASE, "axis")
        self.text(0, NAME_Y, y_name, kind="name")
        self.text(WIDTH - RIGHT, HEIGHT - 3, x_name, anchor="end", kind="name")


def tick_texts(values: Sequence[float]) -> list[str]:
    """Ticks in few characters and one unit: 0, 0.5, 1; 0, 5k, 10k."""
    letter, unit = next((each for each in _UNITS if values[-1] >= 10 * each[1]), ("", 1.0))
    return [number(value / unit) + letter if value else "0" for value in values]


def steps(
    frame: Frame, spans: Sequence[tuple[float, float, float]], title: Callable[[float], str]
) -> None:
    """A line that is level over each span, and the area below. spans: begin, end, value"""
    places = [(frame.x(begin), frame.x(end), frame.y(value)) for begin, end, value in spans]
    path = "L".join(f"{x1:.1f},{y:.1f}L{x2:.1f},{y:.1f}" for x1, x2, y in places)
    if not path:
        return
    first, last = places[0][0], places[-1][1]
    frame.add(f'<path class="area" d="M{first:.1f},{BASE}L{path}L{last:.1f},{BASE}Z"/>')
    frame.add(f'<path class="line" d="M{path}"/>')
    for (x1, x2, _), (_, _, value) in zip(places, spans, strict=True):
        frame.add(
            f'<rect class="hit" x="{x1:.1f}" y="{TOP}" width="{x2 - x1:.2f}" '
            f'height="{BASE - TOP}"><title>{escape(title(value))}</title></rect>'
        )


def bar(frame: Frame, begin: float, end: float, value: float, title: str) -> None:
    """An upright bar over [begin, end), with a gap beside it."""
    left, right = frame.x(begin), frame.x(end)
    gap = min(1.0, (right - left) / 5)
    height = max(BASE - frame.y(value), 1.0 if value else 0.0)
    frame.add(
        f'<rect class="bar" x="{left + gap / 2:.2f}" y="{BASE - height:.2f}" '
        f'width="{right - left - gap:.2f}" height="{height:.2f}">'
        f"<title>{escape(title)}</title></rect>"
    )
