"""Draws pushes beside vLLM's fastest way, as an SVG with a ground of its own.

So the picture is legible on light and on dark pages.
"""

from __future__ import annotations

from collections.abc import Sequence

from instep.bench.beside import Beside
from instep.bench.report import size, time

WIDTH, LEFT, BARS = 760, 24, 560
TOP, PAIR, BAR, LINE = 76, 78, 18, 16
STYLE = """\
  <style>
    text { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 14px }
    text { fill: #1f2328 }
    .title { font-size: 17px; font-weight: 600 }
    .small { font-size: 12px; fill: #59636e }
    .ground { fill: #ffffff; stroke: #d1d9e0 }
    .ours { fill: #0a7d5a }
    .theirs { fill: #a9b1ba }
    .limit { stroke: #1f2328; stroke-width: 2 }
    @media (prefers-color-scheme: dark) {
      text { fill: #f0f6fc }
      .small { fill: #9198a1 }
      .ground { fill: #0d1117; stroke: #3d444d }
      .ours { fill: #2fbf8f }
      .theirs { fill: #59636e }
      .limit { stroke: #f0f6fc }
    }
  </style>"""


def picture(rows: Sequence[Beside], captions: Sequence[str]) -> str:
    """An SVG. rows: in order from the top, at least one. captions: the lines at the bottom.

    A bar is as long as its way takes for a gigabyte of weights, so that models of several sizes
    share one scale.
    """
    scale = BARS / max(row.theirs / row.nbytes for row in rows)
    foot = TOP + PAIR * len(rows) + 14
    height = foot + LINE * len(captions)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" role="img">',
        "  <title>A push of instep beside vLLM's fastest own way, in the same run</title>",
        STYLE,
        f'  <rect class="ground" width="{WIDTH}" height="{height}" rx="8"/>',
        _text(LEFT, 32, "A push beside vLLM's fastest own way", "title"),
        _text(
            LEFT,
            53,
            "Bars: time for a gigabyte of weights. Line: a plain copy of the same bytes.",
            "small",
        ),
    ]
    for number, row in enumerate(rows):
        lines += _pair(row, TOP + PAIR * number, scale)
    lines += [_text(LEFT, foot + LINE * number, caption, "small") for number, caption in enumerate(captions)]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _pair(row: Beside, top: float, scale: float) -> list[str]:
    def bar(name: str, y: float, seconds: float, label: str) -> list[str]:
        width = scale * seconds / row.nbytes
        return [
            f'  <rect class="{name}" x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}"/>',
            _text(LEFT + width + 8, y + 14, label),
        ]

    where = "the trainer's GPU" if row.engine == "GPU 0" else "another GPU"
    lines = [_text(LEFT, top + 12, f"{row.shapes}, {size(row.nbytes)}, engine on {where}", "small")]
    lines += bar("ours", top + 20, row.push, f"{time(row.push)}  {row.way}")
    lines += bar("theirs", top + 20 + BAR + 3, row.theirs, f"{time(row.theirs)}  {row.rival}")
    if row.limit is not None:
        x = f"{LEFT + scale * row.limit / row.nbytes:.1f}"
        lines.append(f'  <line class="limit" x1="{x}" x2="{x}" y1="{top + 18}" y2="{top + 22 + BAR}"/>')
    return lines


def _text(x: float, y: float, text: str, name: str = "") -> str:
    named = f' class="{name}"' if name else ""
    return f'  <text{named} x="{x:.1f}" y="{y}">{text}</text>'
