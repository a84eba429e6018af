"""Draw what `scripts.bench stream` measured: tokens per second by rows on board, as an SVG.

python -m scripts.plot_stream stream.json docs/results/cpu-stream.svg
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 400, 60, 50, 40, 20
COLOURS = {"measured": "#1f6feb", "bare reads beside computing": "#8b949e", "linear": "#d29922"}

Points = Sequence[tuple[float, float]]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("samples", type=Path, help="of scripts.bench stream --json")
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    found = json.loads(options.samples.read_text())
    options.out.write_text(draw(found["samples"], caption(found)))


def caption(found: Mapping[str, Any]) -> str:
    machine = found["machine"]
    return f"{found['title']}; {machine['processor']}, {machine['cores']} cores, {machine['date']}"


def draw(samples: Mapping[str, Sequence[float]], title: str) -> str:
    """The SVG of the samples of one run, by name."""
    rows = sorted(
        int(found[1]) for name in samples if (found := re.match(r"(\d+) rows: sweep s", name))
    )
    measured = [(n, statistics.median(samples[f"{n} rows: tokens/s"])) for n in rows]
    name = "bare reads beside computing s"
    bare = [(n, n / statistics.median(samples[f"{n} rows: {name}"])) for n in rows]
    first_row, first_rate = measured[0]
    top = 1.1 * max(rate for _, rate in [*measured, *bare])
    linear = [(first_row, first_rate), (top / first_rate * first_row, top)]
    scale = _Scale(max(rows), top)
    body = [
        *_axes(scale, rows, top),
        *_line(scale, linear, "linear", dash="6 4"),
        *_line(scale, bare, "bare reads beside computing"),
        *_line(scale, measured, "measured"),
        *(_spread(scale, n, samples[f"{n} rows: tokens/s"]) for n in rows),
        *_legend(),
        f'<text x="{LEFT}" y="22" font-size="12">{escape(title)}</text>',
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
    font = 'font-family="sans-serif" font-size="11"'
    paper = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    return "\n".join([f"{head} {font}>", paper, *body, "</svg>", ""])


class _Scale:
    """Values to places in the picture."""

    def __init__(self, most_x: float, most_y: float) -> None:
        self._x = (WIDTH - LEFT - RIGHT) / most_x
        self._y = (HEIGHT - TOP - BOTTOM) / most_y

    def x(self, value: float) -> float:
        return round(LEFT + value * self._x, 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - value * self._y, 1)


def _axes(scale: _Scale, rows: Sequence[int], top: float) -> Iterable[str]:
    x0, x1, y0 = LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM
    step = max(1, round(top / 6))
    for value in range(0, int(top) + 1, step):
        y = scale.y(value)
        yield f'<line x1="{x0}" x2="{x1}" y1="{y}" y2="{y}" stroke="#e5e7eb"/>'
        yield f'<text x="{x0 - 6}" y="{y + 4}" text-anchor="end">{value}</text>'
    for n in rows:
        yield f'<text x="{scale.x(n)}" y="{y0 + 16}" text-anchor="middle">{n}</text>'
    yield f'<text x="{(x0 + x1) / 2}" y="{y0 + 36}" text-anchor="middle">rows on board</text>'
    yield f'<text x="14" y="{TOP - 6}">tokens/s</text>'


def _line(scale: _Scale, points: Points, name: str, dash: str = "") -> Iterable[str]:
    places = " ".join(f"{scale.x(x)},{scale.y(y)}" for x, y in points)
    style = f'stroke="{COLOURS[name]}" stroke-width="2" stroke-dasharray="{dash}"'
    yield f'<polyline points="{places}" fill="none" {style}/>'


def _spread(scale: _Scale, rows: int, values: Sequence[float]) -> str:
    x, low, high = scale.x(rows), scale.y(min(values)), scale.y(max(values))
    return f'<line x1="{x}" x2="{x}" y1="{low}" y2="{high}" stroke="{COLOURS["measured"]}"/>'


def _legend() -> Iterable[str]:
    for index, (name, colour) in enumerate(COLOURS.items()):
        y = HEIGHT - BOTTOM - 60 + 16 * index
        yield f'<rect x="{WIDTH - 220}" y="{y - 8}" width="16" height="4" fill="{colour}"/>'
        yield f'<text x="{WIDTH - 198}" y="{y}">{escape(name)}</text>'


if __name__ == "__main__":
    main(sys.argv[1:])
