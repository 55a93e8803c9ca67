"""Many sessions beside one."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from weir_bench.figure import Row
from weir_bench.serving.load import Heard, together
from weir_bench.serving.part import Plan, compare_pace, loop, part, ratio
from weir_bench.serving.server import Server, weir_serves
from weir_bench.serving.talk import Talk


@part("pace", "--sessions at once beside one, in turns")
def pace(plan: Plan) -> Iterator[Row | Heard]:
    """Tokens per second through HTTP, and processor time a token."""
    many = plan.sessions
    with weir_serves(plan.folder, *plan.options, "--rows", many) as server:
        alone, crowd = _talks(server, 1), _talks(server, many)
        rounds: list[tuple[Heard, Heard]] = []
        plan.say(f"{many} sessions beside one")
        loop(plan, server, crowd, "warming up")
        for _ in range(plan.rounds):
            one = loop(plan, server, alone, "one session")
            rounds.append((one, loop(plan, server, crowd, "all")))
        ones, alls = ([each[at] for each in rounds] for at in (0, 1))
        yield together("one session, closed loop", ones)
        every = together(f"{many} sessions, closed loop", alls)
        yield every
        what = f"tokens per second of {many} sessions ÷ of one, through HTTP"
        yield compare_pace(what, alls, ones, 8.0 if many == 16 else None, least=True)
        if all(each.worked and each.replies for each in (*ones, *alls)):
            ours, peer = ([each.worked_a_token for each in rounds] for rounds in (alls, ones))
            what = f"processor time a token of one session ÷ of {many}, prompts and HTTP included"
            note = "all threads of the server; what else the machine does counts less in it"
            own, other = median(ours) * 1e3, median(peer) * 1e3
            yield Row(what, own, other, "ms", ratio(peer, ours), note=note)


def _talks(server: Server, number: int) -> list[Talk]:
    return [Talk(server.port, server.model) for _ in range(number)]
