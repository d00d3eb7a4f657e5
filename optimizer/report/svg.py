"""Marks and scales of the report's plots, as SVG text. Colours are names of the page's style."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from optimizer.report.document import shown

# name → colour on light, on dark. Words are set in ink only; a1 … a3 also differ in shape; p0 … p7 lie behind words.
COLOURS = {
    "surface": ("#ffffff", "#15181c"),
    "ink": ("#1b1f24", "#e8eaed"),
    "muted": ("#5a626c", "#a3abb5"),
    "line": ("#d9dde3", "#333a43"),
    "a1": ("#b45309", "#fbbf6b"),
    "a2": ("#7c3aed", "#c4b5fd"),
    "a3": ("#1d5fd0", "#7db2ff"),
    "good": ("#0b7a4b", "#4fd39a"),
    "p0": ("#b5d0ee", "#2c4f7c"),
    "p1": ("#f9d3a8", "#7a4a17"),
    "p2": ("#b9e0b2", "#2f6330"),
    "p3": ("#dccae8", "#5f3f6b"),
    "p4": ("#f5bdbb", "#7c3231"),
    "p5": ("#aee0db", "#24635f"),
    "p6": ("#dccbbd", "#5e4636"),
    "p7": ("#f0e3a6", "#675a16"),
}
FONT = 'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,"DejaVu Sans",sans-serif'
PARTS = 8
_LINES = ("best", "bound", "equal")
_CHARACTER = 7.0  # estimated width of a character of the 12 px font, px


def part_colour(index: int) -> str:
    """Return the colour of a stage."""
    return f"var(--p{index % PARTS})"


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear scale from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        span = self.high - self.low
        return self.start + (self.end - self.start) * ((value - self.low) / span if span else 0.5)

    def ticks(self, most: int = 6) -> list[float]:
        """Return round values within the scale, at most about ``most``."""
        span = self.high - self.low
        if not span > 0 or not math.isfinite(span):
            return [self.low]
        rough = span / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [round(i * step, 12) for i in range(first, last + 1)]


def around(values: Iterable[float], start: float, end: float, *, zero: bool = False, margin: float = 0.04) -> Scale:
    """Return a scale with room around the values, from 0 where ``zero``."""
    finite = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    low, high = (0.0 if zero else min(finite)), max(finite)
    equal = high - low <= 1e-6 * abs(high)  # but for rounding
    room = margin * (abs(high) if equal else high - low) or 1.0
    return Scale(low if zero else low - room, high + room, start, end)


@dataclass(slots=True)
class Plot:
    """A picture that is being drawn.

    Attributes:
        name: unique on the page.
        title: what it is, for screen readers.
        description: what it shows, for screen readers.
    """

    name: str
    title: str
    description: str
    width: float
    height: float
    marks: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", style: str = "") -> None:
        """Write a text with its baseline at ``y``."""
        css = f' class="{style}"' if style else ""
        end = f' text-anchor="{anchor}"' if anchor != "start" else ""
        self.marks.append(f'<text x="{x:.1f}" y="{y:.1f}"{end}{css}>{escape(text)}</text>')

    def line(self, points: Sequence[tuple[float, float]], style: str, tip: str = "") -> None:
        """Draw a line through points."""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.marks.append(f'<path class="{style}" d="M{path}">{_tip(tip)}</path>')

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, tip: str = "", style: str = "bar"
    ) -> None:
        """Draw a bar; ``bar guess`` is that of a prediction."""
        self.marks.append(
            f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.75):.1f}" height="{height:.1f}" '
            f'style="fill:{fill}">{_tip(tip)}</rect>'
        )

    def mark(self, x: float, y: float, family: str, tip: str = "", size: float = 3.5) -> None:
        """Draw a point: a square for ``baseline``, a diamond for ``model``, a triangle for ``above``, else a disc."""
        r, q = size, size * 1.35
        paths = {
            "baseline": ("k1", f"M{x - r:.1f} {y - r:.1f}h{2 * r}v{2 * r}h{-2 * r}z"),
            "model": ("k2", f"M{x:.1f} {y - q:.1f}l{q} {q}l{-q} {q}l{-q} {-q}z"),
            "above": ("k4", f"M{x - r:.1f} {y + r:.1f}l{r} {-1.8 * r}l{r} {1.8 * r}z"),
        }
        style, path = paths.get(family, ("k3", ""))
        if path:
            self.marks.append(f'<path class="{style}" d="{path}">{_tip(tip)}</path>')
        else:
            self.marks.append(f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="{r}">{_tip(tip)}</circle>')

    def axis_x(self, scale: Scale, y: float, top: float, label: str) -> None:
        """Draw the ticks of a horizontal scale below ``y``, with lines up to ``top``."""
        for tick in scale.ticks(min(6, max(2, int(abs(scale.end - scale.start) / 70)))):
            x = scale(tick)
            self.line([(x, top), (x, y)], "grid")
            self.text(x, y + 16, number(tick), anchor="middle", style="m")
        self.text((scale.start + scale.end) / 2, y + 34, label, anchor="middle", style="m")

    def axis_y(self, scale: Scale, x: float, right: float, label: str) -> None:
        """Draw the ticks of a vertical scale left of ``x``, with lines to ``right``."""
        for tick in scale.ticks():
            y = scale(tick)
            self.line([(x, y), (right, y)], "grid")
            self.text(x - 8, y + 4, number(tick), anchor="end", style="m")
        self.text(x - 48, min(scale.start, scale.end) - 10, label, style="m")

    def legend(self, x: float, y: float, families: Sequence[tuple[str, str]]) -> None:
        """Draw marks, or lines (``best``, ``bound``, ``equal``), with their names in rows from the left."""
        left = x
        for family, name in families:
            wide = 24.0 if (line := family in _LINES) else 8.0
            if x > left and x + wide + 6 + text_width(name) > self.width:
                x, y = left, y + 18
            if line:
                self.line([(x, y - 4), (x + wide, y - 4)], family)
            else:
                self.mark(x + 4, y - 4, family, size=4)
            self.text(x + wide + 6, y, name, style="m")
            x += wide + 26 + text_width(name)

    def svg(self) -> str:
        """Return the picture as an ``<svg>`` element."""
        title, description = (f"{self.name}-{self.width:.0f}-{end}" for end in "td")  # a page has several widths
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" width="{self.width:.0f}" '
            f'height="{self.height:.0f}" viewBox="0 0 {self.width:.0f} {self.height:.0f}" role="img" '
            f'aria-labelledby="{title} {description}"><title id="{title}">{escape(self.title)}</title>'
            f'<desc id="{description}">{escape(self.description)}</desc>'
            f"{''.join(self.marks)}</svg>"
        )


PLOT_STYLE = (
    f".plot{{font:12px {FONT}}}.plot text{{fill:var(--ink)}}.plot .m{{fill:var(--muted)}}.plot .s{{font-weight:600}}"
    ".plot .n{paint-order:stroke;stroke:var(--surface);stroke-width:4px}"
    ".plot .grid{stroke:var(--line);fill:none}.plot .axis{stroke:var(--muted);fill:none}"
    ".plot .best{stroke:var(--good);stroke-width:2;fill:none}.plot .bound{stroke:var(--a2);stroke-width:1.5;"
    "stroke-dasharray:6 4;fill:none}.plot .equal{stroke:var(--muted);stroke-dasharray:2 4;fill:none}"
    ".plot .ci{stroke:var(--ink);stroke-width:1.5;fill:none}.plot .bar{stroke:var(--muted);stroke-width:.75}"
    ".plot .guess{fill-opacity:.45;stroke-dasharray:4 3}"
    ".plot .k1{fill:var(--a1)}.plot .k2{fill:var(--a2)}.plot .k3{fill:var(--a3);fill-opacity:.75}"
    ".plot .series{fill:none;stroke-width:2}.plot .c0{stroke:var(--a1)}.plot .c1{stroke:var(--a2);stroke-dasharray:9 3}"
    ".plot .c2{stroke:var(--a3);stroke-dasharray:2 3}.plot .c3{stroke:var(--good);stroke-dasharray:14 3 3 3}"
    ".plot .c4{stroke:var(--ink);stroke-dasharray:5 4}.plot .k4{fill:none;stroke:var(--muted)}"
)


def standalone(svg: str) -> str:
    """Return an element of the page as a file of its own, on light."""
    style = PLOT_STYLE
    for name, (light, _) in COLOURS.items():
        style, svg = style.replace(f"var(--{name})", light), svg.replace(f"var(--{name})", light)
    head, body = svg.split("</desc>", 1)
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n{head}</desc><style>{style}</style>'
        f'<rect width="100%" height="100%" fill="{COLOURS["surface"][0]}"/>{body}\n'
    )


def number(value: float) -> str:
    """Return a tick's number."""
    return (f"{value:g}" if abs(value) < 1e6 else f"{value:.3g}").replace("-", "−")


def figure(value: float) -> str:
    """Return a number with as many digits as tables have."""
    return shown(value, ".4g")


def text_width(text: str) -> float:
    """Return about how many pixels a text takes."""
    return len(text) * _CHARACTER


def _tip(text: str) -> str:
    return f"<title>{escape(text)}</title>" if text else ""
