"""The lines as bars in an SVG: how far each is from its goal, and what everybody's save takes. No library."""

from __future__ import annotations

from html import escape
from typing import Final

from lines import Outcome
from samples import Samples, Spread

_LEFT, _WIDTH, _ROW, _RIGHT = 330, 420, 20, 110
_MOST: Final = 2.0  # bars end at twice the goal, with an arrow
_MET, _SHORT, _PLAIN = "#3a7d44", "#c0392b", "#4a6fa5"


def draw(lines: list[Outcome], samples: Samples) -> str:
    """The whole picture."""
    rows = [*_goals(lines), "", *_times(samples)]
    body, at = [], 10
    for row in rows:
        body.append(f'<g transform="translate(0,{at})">{row}</g>')
        at += _ROW
    size = f'width="{_LEFT + _WIDTH + _RIGHT}" height="{at + 10}"'
    style = (
        "<style>text{font:12px sans-serif;fill:#222}</style><rect width='100%' height='100%' fill='#fff'/>"
    )
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{style}{"".join(body)}</svg>\n'


def _goals(lines: list[Outcome]) -> list[str]:
    scale = _WIDTH / _MOST
    found = [_text("measured ÷ goal, with its spread; the line is the goal")]
    for line in lines:
        if line.value is None or line.low is None or line.high is None:
            continue
        value, low, high = (min(one / line.limit, _MOST) * scale for one in (line.value, line.low, line.high))
        goal = f'<line x1="{_LEFT + scale}" x2="{_LEFT + scale}" y1="0" y2="{_ROW}" stroke="#222"/>'
        beyond = " ▸" if line.value / line.limit > _MOST else ""
        said = f"{line.value:.2f} of {line.limit:g} {line.unit}{beyond}"
        found.append(_bar(line.what, value, low, high, _MET if line.met else _SHORT, said) + goal)
    return found


def _times(samples: Samples) -> list[str]:
    names = [name for name in samples.contestants("save") if samples.get("save", name, "done")]
    spreads = {name: Spread.of(samples.get("save", name, "done")) for name in names}
    if not spreads:
        return []
    scale = _WIDTH / max(spread.high for spread in spreads.values())
    found = [_text("save: until it is done (dark: the trainer's stall)")]
    for name, spread in sorted(spreads.items(), key=lambda item: item[1].median):
        row = _bar(
            name,
            spread.median * scale,
            spread.low * scale,
            spread.high * scale,
            _PLAIN,
            f"{spread.median * 1e3:.0f} ms",
        )
        if stalls := samples.get("save", name, "stall"):
            row += f'<rect x="{_LEFT}" y="3" width="{Spread.of(stalls).median * scale:.1f}" height="14" fill="#1f2d45"/>'
        found.append(row)
    return found


def _text(said: str) -> str:
    return f'<text x="{_LEFT}" y="14" font-weight="bold">{escape(said)}</text>'


def _bar(name: str, value: float, low: float, high: float, colour: str, said: str) -> str:
    return (
        f'<text x="{_LEFT - 8}" y="14" text-anchor="end">{escape(name)}</text>'
        f'<rect x="{_LEFT}" y="3" width="{value:.1f}" height="14" fill="{colour}"/>'
        f'<line x1="{_LEFT + low:.1f}" x2="{_LEFT + high:.1f}" y1="10" y2="10" stroke="#999" stroke-width="2"/>'
        f'<text x="{_LEFT + max(value, high) + 6:.1f}" y="14">{escape(said)}</text>'
    )
