"""`python -m weir.serve.simulate`: a million sessions over some replicas, before there are any.

How many turns find their session's row where it rests, how many have it read back, and what that
moves, by how requests find a replica. Nothing here is measured but the model below: people come in
bursts of turns and think between them, a turn has its row as long as it takes, and rows that rest
go as in `RowAllocator`, the one used longest ago first. Knows nothing about models, disks or Ray.
"""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weir.errors import WeirError

ROUTINGS = ("leases", "hash", "random")
PLACES = 100
"""Places that each replica has on the ring of consistent hashing, as Ray's router has them."""


@dataclass(frozen=True)
class Fleet:
    """What is simulated.

    Attributes:
        sessions: of all people.
        replicas: how many.
        rows: of each replica.
        row: bytes of a row, and of the end of a turn (`weir size`).
        routing: "leases", to where the session was last; "hash", by consistent hashing; "random".
        bursts: of each session in a day.
        turns: of a burst, on average; their number is geometric.
        think: seconds between the end of a turn and the next of its burst, on average.
        turn: seconds that a turn has its row.
        hours: that are simulated; the first half is not counted.
        fails: one replica is lost in the middle of what is counted, and another, empty and with
            another name, stands in its place after `back` seconds.
        back: seconds until then.
        seed: of all draws.

    Raises:
        WeirError: one of them makes no sense.
    """

    sessions: int = 1_000_000
    replicas: int = 64
    rows: int = 128
    row: int = 1_359_872
    routing: str = "leases"
    bursts: float = 4.0
    turns: float = 5.0
    think: float = 60.0
    turn: float = 10.0
    hours: float = 1.0
    fails: bool = False
    back: float = 30.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.routing not in ROUTINGS:
            raise WeirError(f"routing is one of {', '.join(ROUTINGS)}, not {self.routing!r}")
        for name in ("sessions", "replicas", "rows", "row"):
            if getattr(self, name) < 1:
                raise WeirError(f"{name} must be 1 or more, not {getattr(self, name)}")
        for name in ("bursts", "think", "turn", "hours", "back"):
            if not 0 < getattr(self, name) < 1e9:
                raise WeirError(f"{name} must be over 0, not {getattr(self, name)}")
        if not 1 <= self.turns < 1e6:
            raise WeirError(f"a burst has one turn or more, not {self.turns}")
        if self.fails and self.replicas < 2:
            raise WeirError("where one replica fails there must be two")

    @property
    def seconds(self) -> float:
        """That are simulated."""
        return self.hours * 3600


@dataclass(frozen=True)
class Outcome:
    """What came of it, of the turns that are counted.

    Attributes:
        turns: how many.
        hits: those whose session's row rested where they came.
        waited: those that found all rows of their replica busy.
        seconds: in which they came.
        busiest: the share of turns of the replica that had most, times the replicas.
        worst: restores in the minute that had most.
    """

    turns: int
    hits: int
    waited: int
    seconds: float
    busiest: float
    worst: int

    @property
    def rate(self) -> float:
        """The share of turns that found their row."""
        return self.hits / max(1, self.turns)

    @property
    def restores(self) -> int:
        """Turns whose row was read back: sessions are old, and none is at its first turn."""
        return self.turns - self.hits


def arrivals(fleet: Fleet) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """When turns come, in order, in seconds, and whose they are."""
    rng = np.random.default_rng(fleet.seed)
    count = rng.poisson(fleet.bursts / 86400 * fleet.seconds, fleet.sessions)
    session = np.repeat(np.arange(fleet.sessions), count)
    turns = rng.geometric(1 / fleet.turns, len(session))
    first = np.cumsum(turns) - turns
    gaps = fleet.turn + rng.exponential(fleet.think, int(turns.sum()))
    gaps[first] = 0.0
    since = np.cumsum(gaps)
    begin = rng.uniform(0, fleet.seconds, len(session))
    at = np.repeat(begin, turns) + since - np.repeat(since[first], turns)
    whose = np.repeat(session, turns)
    order = np.argsort(at, kind="stable")
    order = order[: np.searchsorted(at[order], fleet.seconds)]
    return at[order], whose[order]


def ring(fleet: Fleet, names: Sequence[int]) -> NDArray[np.int64]:
    """The replica of each session by consistent hashing, of those that are there.

    A replica's places and a session's depend on their names only.
    """
    places = np.concatenate(
        [np.random.default_rng([fleet.seed, 1, name]).random(PLACES) for name in names]
    )
    order = np.argsort(places)
    key = np.random.default_rng([fleet.seed, 2]).random(fleet.sessions)
    found = order[np.searchsorted(places[order], key) % len(order)] // PLACES
    return np.asarray(names, dtype=np.int64)[found]


def simulate(fleet: Fleet) -> Outcome:
    """Let the turns come."""
    at, whose = arrivals(fleet)
    everybody = list(range(fleet.replicas))
    names = [everybody] * 3
    begin, end = fleet.seconds / 2, fleet.seconds
    lost, back = (begin + end) / 2, (begin + end) / 2 + fleet.back
    if fleet.fails:
        names = [everybody, everybody[1:], [*everybody[1:], fleet.replicas]]
    hashed = [ring(fleet, present).tolist() for present in (names if fleet.fails else names[:1])]
    chance = np.random.default_rng([fleet.seed, 3]).random(len(at)).tolist()
    rows: list[OrderedDict[int, float]] = [OrderedDict() for _ in range(fleet.replicas + 1)]
    last = [-1] * fleet.sessions
    load = [0] * (fleet.replicas + 1)
    minutes: dict[int, int] = {}
    turns = hits = waited = 0
    for now, session, drawn in zip(at.tolist(), whose.tolist(), chance, strict=True):
        when = (now >= lost) + (now >= back) if fleet.fails else 0
        if fleet.routing == "random":
            to = names[when][int(drawn * len(names[when]))]
        else:
            to = hashed[when][session]
            if fleet.routing == "leases" and last[session] >= (when > 0):  # replica 0 is lost
                to = last[session]
        here = rows[to]
        hit = here.pop(session, None) is not None
        late = False
        if not hit and len(here) >= fleet.rows:
            resting = next((who for who, until in here.items() if until <= now), None)
            late = resting is None
            # Who waits has the row that is free first.
            del here[min(here, key=here.__getitem__) if resting is None else resting]
        here[session] = now + fleet.turn
        last[session] = to
        if now < begin:
            continue
        turns += 1
        load[to] += 1
        waited += late
        hits += hit
        if not hit:
            minutes[int(now // 60)] = minutes.get(int(now // 60), 0) + 1
    busiest = max(load) * fleet.replicas / max(1, turns)
    worst = max(minutes.values(), default=0)
    return Outcome(turns, hits, waited, end - begin, busiest, worst)


HEAD = (
    "routing",
    "replicas",
    "rows of each",
    "turns/s",
    "rows found",
    "restores/s",
    "worst minute",
    "MB/s read",
    "MB/s written",
    "busiest",
    "waited",
)


def line(fleet: Fleet, found: Outcome) -> tuple[str, ...]:
    """What came of a fleet, a cell for each of `HEAD`."""
    per = 1 / found.seconds
    return (
        f"{fleet.routing}{', one fails' if fleet.fails else ''}",
        str(fleet.replicas),
        str(fleet.rows),
        f"{found.turns * per:.0f}",
        f"{found.rate:.1%}",
        f"{found.restores * per:.1f}",
        f"{found.worst / 60:.1f}",
        f"{found.restores * per * fleet.row / 1e6:.0f}",
        f"{found.turns * per * fleet.row / 1e6:.0f}",
        f"{found.busiest:.2f}",
        f"{found.waited / max(1, found.turns):.2%}",
    )


def main(given: Sequence[str] | None = None) -> None:
    """Read a command line, and write a table."""
    parser = argparse.ArgumentParser(
        prog="python -m weir.serve.simulate", description=simulate.__doc__
    )
    usual = Fleet()
    for name, what in (
        ("sessions", "of all people"),
        ("row", "bytes of a row, as weir size says"),
        ("bursts", "of each session in a day"),
        ("turns", "of a burst, on average"),
        ("think", "seconds between turns of a burst, on average"),
        ("turn", "seconds that a turn has its row"),
        ("hours", "that are simulated; the first half is not counted"),
        ("seed", "of all draws"),
    ):
        kind = type(getattr(usual, name))
        parser.add_argument(f"--{name}", type=kind, default=getattr(usual, name), help=what)
    parser.add_argument("--replicas", type=int, nargs="+", default=[usual.replicas])
    parser.add_argument("--rows", type=int, nargs="+", default=[usual.rows], help="of each replica")
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS, default=list(ROUTINGS))
    parser.add_argument("--fails", action="store_true", help="one replica is lost and replaced")
    asked = vars(parser.parse_args(given))
    several = {name: asked.pop(name) for name in ("routing", "replicas", "rows")}
    try:
        whole = Fleet(**asked)
        fleets = [
            replace(whole, routing=routing, replicas=replicas, rows=rows)
            for replicas in several["replicas"]
            for rows in several["rows"]
            for routing in several["routing"]
        ]
        lines = [HEAD, ("---",) * len(HEAD), *(line(each, simulate(each)) for each in fleets)]
    except WeirError as error:
        parser.error(str(error))
    sys.stdout.writelines(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    main()
