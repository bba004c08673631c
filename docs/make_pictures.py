"""Draw the pictures of how-it-works.md and architecture.md, as SVG, for light and dark.

Each has a ground of its own.

python docs/make_pictures.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.tools.rooms import ROOMS

PLACE = Path(__file__).with_name("pictures")
WIDTH = 600

# A name of a colour: in light, in dark. Ground and ink change together, so each picture can be read
# on any page, whatever that thinks of the reader's preference.
COLOURS = {
    "ground": ("#fbfcfe", "#161b22"),
    "ink": ("#1b2430", "#e8edf4"),
    "soft": ("#536072", "#a4b0c0"),
    "line": ("#aeb8c6", "#4a5667"),
    "body": ("#b3c0d1", "#6b7c94"),
    "lock": ("#2f6fde", "#5b96f7"),
    "lock-soft": ("#d6e4fc", "#1d3a68"),
    "good": ("#17734a", "#57c791"),
    "good-soft": ("#d7f0e2", "#153d2b"),
    "bad": ("#b3261e", "#ff8a80"),
    "bad-soft": ("#fbdfdc", "#4d1f1c"),
    "wait": ("#875800", "#f0b95a"),
    "wait-soft": ("#faeccb", "#47350f"),
}


class Picture:
    """An SVG of a fixed width, written from top to bottom. Lengths are in its own units."""

    def __init__(self, name: str, height: int, title: str, description: str) -> None:
        self.name = name
        self.height = height
        self._title = title
        self._description = description
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, colour: str, edge: str) -> None:
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"'
            f' class="f-{colour} s-{edge}"/>'
        )

    def bar(self, x: float, y: float, end: float, colour: str, height: float = 14) -> None:
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{end - x:g}" height="{height:g}" rx="3"'
            f' class="f-{colour}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        look: str = "",
        *,
        colour: str = "ink",
        anchor: str = "start",
    ) -> None:
        """`look`: any of bold, mono, small."""
        looks = "".join(f" {word}" for word in look.split())
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" class="f-{colour}{looks}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )

    def line(self, points: str, colour: str = "soft", look: str = "") -> None:
        """`look`: any of arrow, dashed, thick."""
        words = look.split()
        end = ' marker-end="url(#arrow)"' if "arrow" in words else ""
        looks = "".join(f" {word}" for word in words if word != "arrow")
        self._parts.append(f'<polyline points="{points}" class="s-{colour} none{looks}"{end}/>')

    def diamond(self, x: float, y: float, colour: str) -> None:
        self._parts.append(
            f'<path d="M{x:g} {y - 6:g}l6 6l-6 6l-6 -6z" class="f-{colour} s-ground"/>'
        )

    def svg(self) -> str:
        """The whole file."""
        light = "".join(f"--{name}:{pair[0]};" for name, pair in COLOURS.items())
        dark = "".join(f"--{name}:{pair[1]};" for name, pair in COLOURS.items())
        fills = "".join(f".f-{name}{{fill:var(--{name})}}" for name in COLOURS)
        strokes = "".join(f".s-{name}{{stroke:var(--{name})}}" for name in COLOURS)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}"'
                f' width="{WIDTH}" height="{self.height}" role="img"'
                ' aria-labelledby="title description">',
                f'<title id="title">{escape(self._title)}</title>',
                f'<desc id="description">{escape(self._description)}</desc>',
                "<style>",
                f"svg{{{light}}}",
                f"@media (prefers-color-scheme:dark){{svg{{{dark}}}}}",
                "text{font:15px system-ui,'DejaVu Sans',sans-serif}",
                ".small{font-size:13px}.bold{font-weight:600}",
                ".mono{font-family:ui-monospace,'DejaVu Sans Mono',monospace;font-size:13px}",
                ".none{fill:none;stroke-width:1.5}.dashed{stroke-dasharray:4 4}",
                ".thick{stroke-width:2.5}",
                fills,
                strokes,
                "</style>",
                '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
                ' markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" class="f-soft"/>'
                "</marker></defs>",
                f'<rect width="{WIDTH}" height="{self.height}" rx="10" class="f-ground"/>',
                *self._parts,
                "</svg>\n",
            ]
        )


def flow() -> Picture:
    """Draw the way from a call of a task to its lock, and to its end."""
    picture = Picture(
        "flow",
        736,
        "From the call of a task to its lock",
        "A call becomes a key, the key a lock with a new token; all nodes are asked at once. If a"
        " quorum answers YES the body runs, its lease is extended, and its lock is freed at its"
        " end. If too many answer NO another holds it, and the conflict policy decides. Otherwise"
        " there is no quorum, and nothing runs. A waiter tries again, with a new token.",
    )
    steps = [
        ("task call", "charge.delay(7, 50)", "arrives in the process that will run the body"),
        ("key", "order:7", "from the task's name and arguments, or a template"),
        ("lock", "a new random token; the time is recorded: t0", "one attempt, one token"),
        (
            "quorum",
            "SET order:7 token NX GET PX ttl",
            "to all nodes at once, on one connection each",
        ),
    ]
    y = 18
    for name, what, why in steps:
        picture.box(20, y, 520, 56, "ground", "line")
        picture.text(36, y + 34, name, "bold")
        look = "" if name == "lock" else "mono"
        picture.text(132, y + 24, what, look, colour="lock")
        picture.text(132, y + 44, why, "small", colour="soft")
        picture.line(f"280,{y + 56} 280,{y + 74}", look="arrow")
        y += 76
    votes = [("YES", "good"), ("YES", "good"), ("YES", "good"), ("NO", "wait"), ("SILENT", "bad")]
    for index, (vote, colour) in enumerate(votes):
        x = 20 + index * 106
        picture.box(x, y, 96, 54, f"{colour}-soft", colour)
        picture.text(x + 48, y + 22, f"node {index + 1}", "small", colour="soft", anchor="middle")
        picture.text(x + 48, y + 42, vote, "bold small", colour=colour, anchor="middle")
    y += 54
    for x in (105, 280, 455):
        picture.line(f"280,{y} 280,{y + 12} {x},{y + 12} {x},{y + 30}", look="arrow")
    y += 32
    outcomes = [
        (20, "good", "granted", "a quorum of YES,", "and time is left"),
        (195, "wait", "held by another", "too many answered NO", "for a quorum of YES"),
        (370, "bad", "no quorum", "fewer than a quorum", "answered in time"),
    ]
    for x, colour, name, one, two in outcomes:
        picture.box(x, y, 170, 76, f"{colour}-soft", colour)
        picture.text(x + 85, y + 24, name, "bold", colour=colour, anchor="middle")
        picture.text(x + 85, y + 45, one, "small", anchor="middle")
        picture.text(x + 85, y + 63, two, "small", anchor="middle")
        picture.line(f"{x + 85},{y + 76} {x + 85},{y + 94}", look="arrow")
    y += 96
    picture.box(20, y, 170, 76, "ground", "line")
    picture.text(105, y + 24, "the body runs", "bold small", anchor="middle")
    picture.text(105, y + 45, "extended every ttl / 3", "small", colour="soft", anchor="middle")
    picture.box(195, y, 345, 76, "ground", "line")
    picture.text(367, y + 24, "nothing stays behind", "bold small", anchor="middle")
    undone = ("the token is deleted on nodes that answered", "YES, or did not answer (SILENT)")
    picture.text(367, y + 45, undone[0], "small", colour="soft", anchor="middle")
    picture.text(367, y + 63, undone[1], "small", colour="soft", anchor="middle")
    for x in (105, 280, 455):
        picture.line(f"{x},{y + 76} {x},{y + 94}", look="arrow")
    picture.bar(44, y + 56, 166, "lock", 8)
    y += 96
    last = [
        (20, "the body has ended", "deleted on all nodes;", "next waiter is woken"),
        (195, "lock_on_conflict", "waits its turn, or is", "skipped, fails, ..."),
        (370, "lock_on_unavailable", "waits, or fails; or runs", "unlocked, if you chose"),
    ]
    for x, name, one, two in last:
        picture.box(x, y, 170, 76, "ground", "line")
        look = "mono" if name.startswith("lock") else "bold small"
        picture.text(x + 85, y + 24, name, look, anchor="middle")
        picture.text(x + 85, y + 45, one, "small", colour="soft", anchor="middle")
        picture.text(x + 85, y + 63, two, "small", colour="soft", anchor="middle")
    # A waiter begins again at the new token: a token lives for one attempt.
    again = 18 + 2 * 76 + 28
    picture.line(
        f"280,{y + 76} 280,{y + 90} 566,{y + 90} 566,{again} 544,{again}", "wait", "arrow dashed"
    )
    picture.line(f"455,{y + 76} 455,{y + 90}", "wait", "dashed")
    picture.text(300, y + 108, "later: again, with a new token", "small", colour="wait")
    return picture


def lease() -> Picture:
    """Draw how the deadline of a lease results from the answers of five nodes."""
    picture = Picture(
        "lease",
        490,
        "The time line of a lease on five nodes",
        "At t0 four of five nodes grant; node 5 is down. Each counts for its send time plus ttl;"
        " the deadline is the third largest of these, less the drift. At t1, a third of the ttl"
        " later, an extension is confirmed by two nodes only: the deadline stays. At t2, a tenth of"
        " the ttl later, three confirm: the deadline moves to t2 plus ttl, less the drift. Every"
        " node keeps the key for a little longer than the holder believes.",
    )
    t0, second = 96.0, 10.6
    t1, t2 = t0 + 10 * second, t0 + 13 * second
    ttl, drift, trip = 30 * second, 1.6 * second, 0.5 * second
    old, new = t0 + ttl - drift, t2 + ttl - drift

    top, row = 62, 44
    bottom = top + 6 * row - 12
    moments = [(t0, "t0", "acquire"), (t1, "t1", ""), (t2, "t2", "extend")]
    for x, name, what in moments:
        picture.line(f"{x:g},{top - 14} {x:g},{bottom}", "line")
        picture.text(x, top - 20, name, "bold small", anchor="middle")
        if what:
            anchor = "middle" if name == "t0" else "start"
            picture.text(
                x - (24 if anchor == "start" else 0),
                top - 38,
                what,
                "small",
                colour="soft",
                anchor=anchor,
            )
    for x, name in ((old, "old deadline"), (new, "deadline")):
        colour = "bad" if name == "deadline" else "wait"
        picture.line(f"{x:g},{top - 14} {x:g},{bottom}", colour, "dashed")
        picture.text(x, top - 20, name, "bold small", colour=colour, anchor="middle")

    picture.text(16, top + 16, "holder", "bold small")
    picture.bar(t0 + 2 * trip, top, new, "lock", 22)
    picture.text(t0 + 2 * trip + 8, top + 16, "holds it", "small", colour="ground")

    ends = [t2, t2, t2, t0, None]
    notes = ["", "", "", "did not answer t1, t2", "is down: SILENT"]
    for index, (sent, note) in enumerate(zip(ends, notes, strict=True)):
        y = top + (index + 1) * row
        picture.text(16, y + 15, f"node {index + 1}", "small")
        if sent is None:
            picture.line(f"{t0 + trip:g},{y + 10} {t2 + ttl + trip:g},{y + 10}", "line", "dashed")
            picture.text(t2 + 14, y + 4, note, "small", colour="soft")
            continue
        picture.bar(t0 + trip, y, sent + ttl + trip, "lock-soft", 20)
        marks = [t0] if sent == t0 else ([t0, t2] if index == 2 else [t0, t1, t2])
        for x in marks:
            picture.line(f"{x + trip:g},{y} {x + trip:g},{y + 20}", "lock", "thick")
        picture.diamond(sent + ttl, y + 10, "lock")
        if note:
            picture.text(t2 + 14, y + 15, note, "small", colour="soft")

    for x, name in ((t0 + ttl, "t0 + ttl"), (t2 + ttl, "t2 + ttl")):
        picture.text(x, bottom + 15, name, "small", colour="soft", anchor="middle")

    y = bottom + 48
    picture.bar(16, y - 11, 40, "lock-soft", 14)
    picture.line(f"16,{y - 11} 16,{y + 3}", "lock", "thick")
    picture.text(52, y, "the node keeps the key; the strokes are its YES to a request", "small")
    picture.diamond(28, y + 22, "lock")
    picture.text(52, y + 26, "the time that counts: before the request was sent, + ttl", "small")
    picture.line(f"28,{y + 39} 28,{y + 55}", "bad", "dashed")
    picture.text(
        52, y + 52, "the third largest of these, less the drift: the lease ends here", "small"
    )
    picture.text(
        52,
        y + 78,
        "t1: two confirm, no quorum, so the old deadline stands.",
        "small",
        colour="soft",
    )
    picture.text(
        52,
        y + 98,
        "t2, soon after: three confirm, and it moves. (Drift not to scale.)",
        "small",
        colour="soft",
    )
    return picture


def endings() -> Picture:
    """Draw each way in which a body ends, with the process that frees its lock, and the time."""
    rows = [
        (
            "It returns, raises, retries, is ignored, hits its soft time limit",
            "the body's process",
            "at once, after the result is stored",
            "good",
        ),
        (
            "Its process dies: kill -9, out of memory, hard time limit, terminated",
            "the worker's main process",
            "within a second of the death, not before",
            "good",
        ),
        (
            "Its worker is asked to stop (SIGTERM), and the body goes on",
            "the body's process",
            "at the end of the body; kept until then",
            "good",
        ),
        (
            "Its whole worker dies, or the machine",
            "no process: the ttl ends it",
            "within the ttl; with a helper, a second",
            "wait",
        ),
        (
            "Its message is delivered again while it runs",
            "the first body's process",
            "kept out; runs only if the first failed",
            "good",
        ),
        (
            "It loses its lease: no quorum confirms an extension in time",
            "the ttl, before the body is over",
            "LeaseLost is raised; another may start",
            "bad",
        ),
        (
            "It is revoked, or its message expires, before it starts",
            "nothing to free: never taken",
            "a reservation: by the main process",
            "soft",
        ),
    ]
    step = 106
    picture = Picture(
        "endings",
        40 + step * len(rows),
        "How a body ends, who frees its lock, and when",
        " ".join(f"{what}: {who}, {when}." for what, who, when, _ in rows),
    )
    picture.bar(20, 14, 44, "body", 12)
    picture.text(52, 25, "the body", "small", colour="soft")
    picture.bar(132, 14, 156, "lock", 12)
    picture.text(164, 25, "its lock on the nodes", "small", colour="soft")
    picture.text(330, 25, "x", "bold", colour="bad")
    picture.text(344, 25, "a death", "small", colour="soft")
    for index, (what, who, when, colour) in enumerate(rows):
        y = 44 + index * step
        picture.line(f"20,{y} 580,{y}", "line")
        picture.text(20, y + 24, what, "bold small")
        _bars(picture, index, y + 40)
        picture.text(300, y + 51, who, "bold small", colour=colour)
        picture.text(300, y + 71, when, "small", colour="soft")
    return picture


def _bars(picture: Picture, row: int, y: float) -> None:
    body, lock = y, y + 18
    ends = {
        0: (200, 204),
        1: (150, 158),
        2: (250, 254),
        3: (130, 262),
        4: (140, 144),
        5: (250, 170),
    }
    if row == 6:
        picture.line(f"20,{body + 7} 262,{body + 7}", "line", "dashed")
        return
    end, free = ends[row]
    picture.bar(20, body, end, "body")
    picture.bar(20, lock, free, "lock")
    if row in (1, 3):
        picture.text(end + 4, body + 12, "x", "bold", colour="bad")
    if row == 2:
        picture.line(f"110,{body - 6} 110,{lock + 18}", "soft", "dashed")
        picture.text(116, body + 45, "SIGTERM", "small", colour="soft")
    if row == 3:
        picture.line(f"{end},{body + 7} {end},{lock + 20}", "soft", "dashed")
        picture.text(end + 6, lock + 30, "ttl", "small", colour="soft")
    if row == 4:
        picture.line(f"70,{lock + 22} 150,{lock + 22}", "wait", "dashed")
        picture.text(20, lock + 27, "copy", "small", colour="wait")
        picture.bar(154, lock + 15, 240, "body")
    if row == 5:
        picture.bar(free, body, end, "bad-soft")
        picture.line(f"{free},{body - 6} {free},{lock + 20}", "bad", "dashed")
        picture.bar(free + 24, lock + 18, 262, "lock-soft")
        picture.text(20, lock + 30, "another's lock", "small", colour="soft")


def rooms() -> Picture:
    """Draw the rooms of the package, from the table of the architecture test."""

    def level(name: str) -> int:
        return 1 + max((level(below) for below in ROOMS[name][0]), default=-1)

    rows: dict[int, list[str]] = {}
    for name in ROOMS:
        rows.setdefault(level(name), []).append(name)
    step = 58
    picture = Picture(
        "rooms",
        len(rows) * step + 66,
        "The rooms of the package, and which stand on which",
        "Rows of rooms. At the bottom protocol, which is pure; above it the clock and threads, then"
        " the connections to the stores, the extenders, the lock itself, the messages of tasks,"
        " the worker and the beat; at the top the users' tools. Each imports only from rows below.",
    )
    for row, names in enumerate(rows[number] for number in sorted(rows, reverse=True)):
        y, width = 18 + row * step, (520 - 8 * (len(names) - 1)) / len(names)
        for number, name in enumerate(names):
            x = 20 + number * (width + 8)
            pure = not ROOMS[name][1] and "stores" not in ROOMS[name][0]
            picture.box(x, y, width, 42, "good-soft" if pure else "ground", "line")
            picture.text(x + width / 2, y + 26, name, "bold small", anchor="middle")
    picture.line(f"566,18 566,{18 + len(rows) * step - 16}", look="arrow")
    words = "Imports point down only. Green: nothing but the standard library."
    picture.text(20, len(rows) * step + 40, words, "small", colour="soft")
    return picture


PICTURES = (flow, lease, endings, rooms)


def main() -> None:
    PLACE.mkdir(exist_ok=True)
    for draw in PICTURES:
        picture = draw()
        (PLACE / f"{picture.name}.svg").write_text(picture.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
