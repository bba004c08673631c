"""The timeline: every body by order, nodes, ticks and faults. An SVG for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import escape

from celery_redlock.demo.checker import Story, Verdict

__all__ = ["draw"]

WIDTH, LEFT, RIGHT, TOP = 1280, 84, 24, 108
LANE, BAR = 28, 18
NODE = 15
GAP = 10
LABEL = 17

# Told apart on white and on black, and by most eyes; red is kept for what went wrong.
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#3ba7a0", "#c9a227", "#9c755f", "#8f8f9d")

STYLE = """
text { font-family: system-ui, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif }
text { font-size: 12px; fill: #24292f }
.title { font-size: 16px; font-weight: 600 }
.small { font-size: 11px; fill: #57606a }
.in { font-size: 10px; fill: #fff }
.page { fill: #fff }
.lane { fill: #f3f5f7 }
.grid { stroke: #d0d7de; stroke-width: 1 }
.dark { fill: #cf222e; fill-opacity: .10 }
.fault { stroke: #cf222e; stroke-width: 1.2; stroke-dasharray: 4 3 }
.mend { stroke: #1a7f37; stroke-width: 1.2; stroke-dasharray: 4 3 }
.bad { fill: #cf222e }
.good { fill: #1a7f37 }
.killed { stroke: #cf222e; stroke-width: 2 }
.cross { stroke: #cf222e; stroke-width: 2.4; stroke-linecap: round }
.held { stroke: #bf8700; stroke-width: 1.6 }
.noquorum { stroke: #cf222e; stroke-width: 1.6 }
.up { fill: #2da44e; fill-opacity: .75 }
.beat { fill: #8f8f9d; fill-opacity: .3 }
.tick { stroke: #0969da; stroke-width: 2 }
.wrong { stroke: #cf222e; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 } .in { fill: #fff }
  .page { fill: #0d1117 } .lane { fill: #161b22 } .grid { stroke: #30363d }
  .bad { fill: #ff7b72 } .good { fill: #56d364 }
  .fault, .killed, .cross, .noquorum, .wrong { stroke: #ff7b72 } .mend { stroke: #56d364 }
  .tick { stroke: #58a6ff }
  .held { stroke: #e3b341 } .dark { fill: #ff7b72; fill-opacity: .14 }
}
"""


def draw(story: Story, verdict: Verdict, path: Path) -> None:
    """Write the timeline of `story` to `path`."""
    path.write_text(_Timeline(story, verdict).svg(), encoding="utf-8")


class _Timeline:
    def __init__(self, story: Story, verdict: Verdict) -> None:
        self.story, self.verdict = story, verdict
        self.orders = sorted(set(story.sent.values()) | {body.order for body in story.bodies})
        times = [body.begin for body in story.bodies]
        times += [body.end for body in story.bodies if body.end < math.inf]
        times += [at for at, _node, _up in story.nodes if times and at > min(times)]
        times += [tick.sent for tick in story.ticks.values()]
        self.begin, self.end = (min(times), max(times)) if times else (0.0, 1.0)
        self.end = max(self.end, self.begin + 1.0)
        self.pids = list(dict.fromkeys(body.pid for body in story.bodies))
        self.scripts = {body.pid for body in story.bodies if body.task not in story.sent}
        self.nodes_top = TOP + LANE * len(self.orders) + GAP
        self.beats_top = self.nodes_top + NODE * len({node for _at, node, _up in story.nodes})
        beats = {beat for _at, beat, _up in story.beats}
        self.bottom = self.beats_top + (GAP + NODE * len(beats) if beats else 0)
        self.height = self.bottom + 66

    def svg(self) -> str:
        """The whole picture."""
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}"'
            f' width="{WIDTH}" height="{self.height}" role="img"'
            ' aria-label="Timeline of all bodies by order">',
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{self.height}"/>',
            *self._title(),
            *self._ground(),
            *self._bodies(),
            *self._away(),
            *self._rows("node", self.story.nodes, self.nodes_top, "up"),
            *self._rows("beat", self.story.beats, self.beats_top + GAP, "beat"),
            *self._ticks(),
            *self._faults(),
            *self._legend(),
            "</svg>",
        ]
        return "\n".join(parts) + "\n"

    def x(self, at: float) -> float:
        """Where a time is."""
        at = min(max(at, self.begin), self.end)
        return LEFT + (at - self.begin) / (self.end - self.begin) * (WIDTH - LEFT - RIGHT)

    def y(self, order: int) -> int:
        """Where an order's lane begins."""
        return TOP + LANE * self.orders.index(order)

    def _colour(self, pid: int) -> str:
        if pid in self.scripts:
            return COLOURS[-1]
        children = [known for known in self.pids if known not in self.scripts]
        return COLOURS[children.index(pid) % (len(COLOURS) - 1)]

    def _title(self) -> Iterable[str]:
        verdict = self.verdict
        yield _text(LEFT, 26, "Every charge, by order: one at a time", "title")
        good = "good" if verdict.ok else "bad"
        facts = (
            f"{len(verdict.overlaps)} overlaps · {len(verdict.unlocked)} started without a quorum"
            f" · {len(verdict.lost)} of {verdict.sent} lost · {len(self.story.bodies)} bodies"
            f" in {verdict.seconds:.1f} s"
        )
        if self.story.beats:
            ticks = verdict.ticks
            facts += f" · {ticks.sent} ticks, {len(ticks.twice)} sent twice,"
            facts += f" {len(ticks.unclaimed)} without a quorum"
        yield _text(LEFT, 44, facts, good)

    def _ground(self) -> Iterable[str]:
        right = WIDTH - RIGHT
        for order in self.orders:
            y = self.y(order)
            yield _rect(LEFT, y + 2, right - LEFT, LANE - 4, "lane")
            yield _text(LEFT - 8, y + LANE / 2 + 4, f"order {order}", anchor="end")
        length = self.end - self.begin
        step = next(step for step in (1, 2, 5, 10, 20, 60) if length / step <= 16 or step == 60)
        for second in range(0, int(length) + 1, step):
            x = self.x(self.begin + second)
            yield _upright(x, TOP, self.bottom, "grid")
            yield _text(x, self.bottom + 16, f"{second} s", "small", "middle")
        for since, until in self.story.dark():
            x, end = self.x(since), self.x(until)
            yield _rect(x, TOP, end - x, self.bottom - TOP, "dark")
            yield _text((x + end) / 2, TOP + 14, "no quorum", "bad", "middle")

    def _bodies(self) -> Iterable[str]:
        late = {id(second) for _first, second in self.verdict.overlaps}
        late |= {id(body) for body in self.verdict.unlocked}
        for body in self.story.bodies:
            x, y = self.x(body.begin), self.y(body.order) + (LANE - BAR) / 2
            width = max(1.5, self.x(body.end) - x)
            wrong = body.ending in ("killed", "failed") or id(body) in late
            killed = ' class="killed"' if wrong else ""
            told = f"{body.task}, pid {body.pid}, {body.begin - self.begin:.3f} s to "
            told += f"{body.end - self.begin:.3f} s, {body.ending}"
            yield (
                f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{BAR}" rx="2"'
                f' fill="{self._colour(body.pid)}"{killed}>'
                f"<title>{escape(told)}</title></rect>"
            )
            if width > 90:
                yield _text(x + 6, y + 13, f"{body.task}: longer than its ttl, extended", "in")
            if body.ending == "killed":
                end, middle = x + width, y + BAR / 2
                for slope in (5, -5):
                    yield (
                        f'<line class="cross" x1="{end - 5:.1f}" x2="{end + 5:.1f}"'
                        f' y1="{middle - slope:.1f}" y2="{middle + slope:.1f}"/>'
                    )

    def _away(self) -> Iterable[str]:
        for event in self.story.away:
            x, y = self.x(event["at"]), self.y(event["order"]) + LANE - 2
            kind = "held" if event["why"] == "held" else "noquorum"
            yield _upright(x, y - 5, y, kind)

    def _rows(
        self, name: str, changes: list[tuple[float, int, bool]], top: int, kind: str
    ) -> Iterable[str]:
        """A row for each server, with a bar while it is up."""
        for row, one in enumerate(sorted({number for _at, number, _up in changes})):
            y = top + NODE * row
            number = one + 1 if name == "node" else one
            yield _text(LEFT - 8, y + NODE - 4, f"{name} {number}", "small", "end")
            since = None
            mine = [(at, up) for at, number, up in changes if number == one]
            for at, up in [*mine, (self.end, False)]:
                if since is not None and not up:
                    yield _rect(self.x(since), y + 3, self.x(at) - self.x(since), NODE - 6, kind)
                    since = None
                elif up:
                    since = at

    def _ticks(self) -> Iterable[str]:
        """In the row of the beat that sent it; the second of a pair and one in the dark are red."""
        beats = sorted({beat for _at, beat, _up in self.story.beats})
        verdict = self.verdict.ticks
        wrong = {*verdict.unclaimed, *(second for _first, second in verdict.twice)}
        for tick in self.story.ticks.values():
            if tick.beat in beats:
                y = self.beats_top + GAP + NODE * beats.index(tick.beat)
                kind = "wrong" if tick in wrong else "tick"
                yield _upright(self.x(tick.sent), y + 1, y + NODE - 1, kind)

    def _faults(self) -> Iterable[str]:
        """Marks from top to bottom; each label in the first row that is free there."""
        marks = [(at, f"child {pid} killed", "fault") for pid, at in self.story.kills.items()]
        for at, node, up in self.story.nodes:
            if at > self.begin:
                what = f"node {node + 1} {'back' if up else 'killed'}"
                marks.append((at, what, "mend" if up else "fault"))
        marks += [(at, f"beat {beat} killed", "fault") for beat, at in self.verdict.ticks.deaths]
        rows = [0.0, 0.0]
        for at, what, kind in sorted(marks):
            x = self.x(at)
            half = 3.4 * len(what)
            row = min(range(len(rows)), key=lambda row: (x - half < rows[row], rows[row]))
            rows[row] = x + half + 6
            y = TOP - 12 - LABEL * row
            yield _upright(x, y + 4, self.bottom, kind)
            yield _text(x, y, what, "good" if kind == "mend" else "bad", "middle")

    def _legend(self) -> Iterable[str]:
        x, y = float(LEFT), self.bottom + 44
        for pid in sorted(self.pids, key=lambda pid: pid in self.scripts):
            name = "plain script" if pid in self.scripts else f"child {pid}"
            yield _swatch(x, y, f'fill="{self._colour(pid)}"')
            yield _text(x + 17, y, name, "small")
            x += 32 + 6.2 * len(name)
        yield _swatch(x, y, 'fill="none" class="killed"')
        yield _text(x + 17, y, "killed in the middle", "small")
        x += 140
        for kind, name in (("held", "put off: held"), ("noquorum", "put off: no quorum")):
            yield _upright(x, y - 9, y, kind)
            yield _text(x + 8, y, name, "small")
            x += 24 + 6.2 * len(name)


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{escape(text)}</text>'


def _upright(x: float, top: float, bottom: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{bottom:.1f}"/>'


def _swatch(x: float, y: float, how: str) -> str:
    return f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="12" height="12" rx="2" {how}/>'


def _rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return (
        f'<rect class="{kind}" x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"/>'
    )
