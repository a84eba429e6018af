"""The page's plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ntx_batch.report.lengths import Lengths
from ntx_batch.report.scale import time_unit
from ntx_batch.report.svg import BASE, LEFT, NAME_Y, RIGHT, TOP, WIDTH, Frame, bar, steps
from ntx_batch.report.timeline import Span
from ntx_batch.report.words import count, duration, number

_STRIP_HEIGHT = 14.0


def over_time(
    spans: Sequence[Span],
    value: Callable[[Span], float],
    *,
    label: str,
    unit: str,
    kind: str,
    expected: float | None = None,
) -> str:
    """A value over the seconds of work, with a mark where the job stood still.

    label, unit: of the value
    expected: a value to compare with, drawn as a dashed line
    """
    name, seconds = time_unit(spans[-1].end_s)
    highest = max([*(value(span) for span in spans), expected or 0.0])
    frame = Frame(
        f"{label} over time",
        x_max=spans[-1].end_s / seconds,
        y_max=highest,
        x_name=f"{name} of work",
        y_name=unit,
    )
    drawn = [(span.begin_s / seconds, span.end_s / seconds, value(span)) for span in spans]
    steps(frame, drawn, lambda found: f"{number(found)} {unit}")
    for span in spans:
        if span.pause_s:
            x = frame.x(span.begin_s / seconds)
            frame.line(x, TOP, x, BASE, "pause", f"stood still for {duration(span.pause_s)}")
    if expected is not None:
        y = frame.y(expected)
        frame.line(LEFT, y, WIDTH - RIGHT, y, "expected")
        words = f"dashed: predicted {number(expected)}"
        frame.text(WIDTH - RIGHT, NAME_Y, words, anchor="end")
    return frame.done(kind)


def histogram(lengths: Lengths, *, label: str, kind: str) -> str:
    """Rows by number of tokens; a bar for all that are longer, where a few are by far."""
    bars = lengths.bars()
    width = bars[0].end or 1
    tail = f"; last bar: {count(bars[-1].begin)} and more" if bars[-1].end is None else ""
    frame = Frame(
        f"rows by {label}",
        x_max=len(bars) * width,
        y_max=max(each.num_rows for each in bars),
        x_name=label + tail,
        y_name="rows",
    )
    for each in bars:
        if each.end is None:
            what = f"{count(each.begin)} and more"
        elif each.end - each.begin == 1:
            what = count(each.begin)
        else:
            what = f"{count(each.begin)} to {count(each.end - 1)}"
        title = f"{what} tokens: {count(each.num_rows)} rows"
        bar(frame, each.begin, each.begin + width, each.num_rows, title)
    return frame.done(kind)


def strip(parts: Sequence[tuple[str, float]], label: str) -> str:
    """Parts of a whole side by side. parts: class and amount of each"""
    whole = sum(amount for _, amount in parts) or 1.0
    left, pieces = 0.0, []
    for kind, amount in parts:
        width = WIDTH * amount / whole
        if amount:
            # What is there is seen, however little it is.
            shown = max(width - 1, 1.5)
            pieces.append(
                f'<rect class="{kind}" x="{min(left, WIDTH - shown):.2f}" y="0" '
                f'width="{shown:.2f}" height="{_STRIP_HEIGHT}"/>'
            )
        left += width
    return (
        f'<svg class="strip" viewBox="0 0 {WIDTH:.0f} {_STRIP_HEIGHT:.0f}" role="img" '
        f'aria-label="{label}" preserveAspectRatio="none">{"".join(pieces)}</svg>'
    )
