"""The timeline: every body by order, nodes, ticks and faults. An SVG for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import escape

from celery_redlock.demo.checker import Verdict
from celery_redlock.demo.journal import Story

__all__ = ["draw"]

# All in pixels: the page and its margins; an order's lane and the bodies in it; the row of a
# node or a beat.
WIDTH, LEFT, RIGHT, TOP = 1280, 84, 24, 108
LANE, BAR, ROW = 28, 18, 15
EXTENDED = 90
"""Width in pixels from which a body gets the label "longer than its ttl": only one is."""

# Distinguishable on white and on black, and by most eyes; red is reserved for faults.
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#3ba7a0", "#c9a227", "#9c755f")
SCRIPT = "#8f8f9d"

STYLE = """
text { font: 12px system-ui, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif }
text { fill: #24292f }
.title { font-size: 16px; font-weight: 600 }
.small { font-size: 11px; fill: #57606a }
.body { rx: 2px }
.in { font-size: 10px; fill: #fff }
.page { fill: #fff }
.lane { fill: #f3f5f7 }
.grid { stroke: #d0d7de; stroke-width: 1 }
.dark { fill: #cf222e; fill-opacity: .10 }
.fault { stroke: #cf222e; stroke-width: 1.2; stroke-dasharray: 4 3 }
.mend { stroke: #1a7f37; stroke-width: 1.2; stroke-dasharray: 4 3 }
.bad { fill: #cf222e }
.good { fill: #1a7f37 }
.killed, .wrong, .noquorum { stroke: #cf222e; stroke-width: 2 }
.held { stroke: #bf8700; stroke-width: 1.6 }
.node { fill: #2da44e; fill-opacity: .75 }
.beat { fill: #8f8f9d; fill-opacity: .3 }
.tick { stroke: #0969da; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 } .in { fill: #fff }
  .page { fill: #0d1117 } .lane { fill: #161b22 } .grid { stroke: #30363d }
  .bad { fill: #ff7b72 } .good { fill: #56d364 } .mend { stroke: #56d364 }
  .fault, .killed, .noquorum, .wrong { stroke: #ff7b72 } .tick { stroke: #58a6ff }
  .held { stroke: #e3b341 } .dark { fill: #ff7b72; fill-opacity: .14 }
}
"""
LEGEND = (
    "a colour: a pool child; grey: a plain script; framed in red: killed, or wrong; small marks:"
    " put off, because another held it (yellow) or for lack of a quorum (red)"
)


def draw(story: Story, verdict: Verdict, path: Path) -> None:
    """Write the timeline of `story` to `path`."""
    picture = _Timeline(story, verdict)
    height = picture.bottom + 66
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' height="{height}" role="img" aria-label="Timeline of all bodies by order">',
        f"<style>{STYLE}</style>",
        _rect(0, 0, WIDTH, height, "page"),
        *picture.ground(),
        *picture.bodies(),
        *picture.uptimes(),
        *picture.faults(),
        "</svg>",
    ]
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


class _Timeline:
    def __init__(self, story: Story, verdict: Verdict) -> None:
        self.story, self.verdict = story, verdict
        self.orders = sorted(set(story.sent.values()) | {body.order for body in story.bodies})
        self.begin = min((body.begin for body in story.bodies), default=0.0)
        self.end = max(story.last, self.begin + 1.0)
        children = [body.pid for body in story.bodies if body.task in story.sent]
        self.colours = {
            pid: COLOURS[index % len(COLOURS)] for index, pid in enumerate(dict.fromkeys(children))
        }
        self.rows_top = TOP + LANE * len(self.orders) + 10
        # The row of each node and beat: its name, and when it came up and went down.
        self.rows = {
            f"{kind} {number + first}": [(at, up) for at, one, up in changes if one == number]
            for kind, changes, first in (("node", story.nodes, 1), ("beat", story.beats, 0))
            for number in sorted({number for _at, number, _up in changes})
        }
        self.bottom = self.rows_top + ROW * len(self.rows)

    def x(self, at: float) -> float:
        """Return the x coordinate of a time."""
        at = min(max(at, self.begin), self.end)
        return LEFT + (at - self.begin) / (self.end - self.begin) * (WIDTH - LEFT - RIGHT)

    def ground(self) -> Iterable[str]:
        """Draw title, lanes, seconds, and the time without a quorum."""
        verdict, ticks = self.verdict, self.verdict.ticks
        yield _text(LEFT, 26, "Every charge, by order: one at a time", "title")
        facts = (
            f"{len(verdict.overlaps)} overlaps · {len(verdict.unlocked)} started without a quorum"
            f" · {len(verdict.lost)} of {verdict.sent} lost · {len(self.story.bodies)} bodies"
            f" in {verdict.seconds:.1f} s · {len(self.story.ticks)} ticks,"
            f" {len(ticks.twice)} sent twice, {len(ticks.unclaimed)} without a quorum"
        )
        yield _text(LEFT, 44, facts, "good" if verdict.ok else "bad")
        for lane, order in enumerate(self.orders):
            y = TOP + LANE * lane
            yield _rect(LEFT, y + 2, WIDTH - RIGHT - LEFT, LANE - 4, "lane")
            yield _text(LEFT - 8, y + LANE / 2 + 4, f"order {order}", anchor="end")
        step = 2 if self.end - self.begin < 32 else 5
        for second in range(0, int(self.end - self.begin) + 1, step):
            x = self.x(self.begin + second)
            yield _upright(x, TOP, self.bottom, "grid")
            yield _text(x, self.bottom + 16, f"{second} s", "small", "middle")
        for since, until in self.story.dark():
            x, end = self.x(since), self.x(until)
            yield _rect(x, TOP, end - x, self.bottom - TOP, "dark")
            yield _text((x + end) / 2, TOP + 14, "no quorum", "bad", "middle")
        yield _text(LEFT, self.bottom + 44, LEGEND, "small")

    def bodies(self) -> Iterable[str]:
        """Draw a bar for each body, and small marks below it for charges that were put off."""
        wrong = {id(second) for _first, second in self.verdict.overlaps}
        wrong |= {id(body) for body in self.verdict.unlocked}
        for body in self.story.bodies:
            x, end = self.x(body.begin), self.x(body.end)
            y = TOP + LANE * self.orders.index(body.order) + (LANE - BAR) / 2
            framed = body.ending in ("killed", "failed") or id(body) in wrong
            title = f"{body.task}, pid {body.pid}, {body.begin - self.begin:.3f} s to "
            title += f"{body.end - self.begin:.3f} s, {body.ending}"
            bar = _rect(x, y, max(1.5, end - x), BAR, "body killed" if framed else "body")
            colour = self.colours.get(body.pid, SCRIPT)
            yield f'<g fill="{colour}">{bar}<title>{escape(title)}</title></g>'
            if end - x > EXTENDED:
                yield _text(x + 6, y + 13, f"{body.task}: longer than its ttl, extended", "in")
        for event in self.story.away:
            y = TOP + LANE * (self.orders.index(event["order"]) + 1) - 2
            yield _upright(self.x(event["at"]), y - 5, y, event["why"].replace(" ", ""))

    def uptimes(self) -> Iterable[str]:
        """Draw a bar for each server and beat while it is up; ticks in the row of their beat."""
        tops = {name: self.rows_top + ROW * row for row, name in enumerate(self.rows)}
        for name, changes in self.rows.items():
            yield _text(LEFT - 8, tops[name] + ROW - 4, name, "small", "end")
            since = math.inf
            for at, up in [*changes, (self.end, False)]:
                if not up and since < at:
                    width = self.x(at) - self.x(since)
                    yield _rect(self.x(since), tops[name] + 3, width, ROW - 6, name[:4])
                since = at if up else math.inf
        ticks = self.verdict.ticks
        wrong = {*ticks.unclaimed, *(second for _first, second in ticks.twice)}
        for tick in self.story.ticks.values():
            x, y = self.x(tick.sent), tops[f"beat {tick.beat}"]
            yield _upright(x, y + 1, y + ROW - 1, "wrong" if tick in wrong else "tick")

    def faults(self) -> Iterable[str]:
        """Draw marks from top to bottom, with their labels in two rows in turn."""
        marks = [(at, f"child {pid} killed", False) for pid, at in self.story.kills.items()]
        marks += [
            (at, f"{name} {'back' if up else 'killed'}", up)
            for name, changes in self.rows.items()
            for at, up in changes[1:]
        ]
        for row, (at, what, mends) in enumerate(sorted(marks)):
            x, y = self.x(at), TOP - 12 - 17 * (row % 2)
            yield _upright(x, y + 4, self.bottom, "mend" if mends else "fault")
            yield _text(x, y, what, "good" if mends else "bad", "middle")


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{escape(text)}</text>'


def _upright(x: float, top: float, bottom: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>'


def _rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return (
        f'<rect class="{kind}" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"/>'
    )
