"""Compare many concurrent sessions with a single one."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from weir_bench.figure import Row
from weir_bench.serving.load import Heard, together
from weir_bench.serving.part import Plan, compare_pace, part, ratio, take_turns
from weir_bench.serving.server import weir_serves
from weir_bench.serving.talk import Talk


@part("pace")
def pace(plan: Plan) -> Iterator[Row | Heard]:
    """Compare tokens per second through HTTP, and processor time per token."""
    many = plan.sessions
    with weir_serves(plan.folder, *plan.options, "--rows", many) as server:
        plan.say(f"{many} sessions compared with one")
        contenders = {
            name: (server, [Talk(server.port, server.model) for _ in range(number)])
            for name, number in (("all", many), ("one session", 1))
        }
        alls, ones = take_turns(plan, contenders).values()
        yield together("one session, closed loop", ones)
        every = together(f"{many} sessions, closed loop", alls)
        yield every
        what = f"tokens per second of {many} sessions ÷ of one, through HTTP"
        yield compare_pace(what, alls, ones, 8.0 if many == 16 else None, least=True)
        if all(each.worked and each.replies for each in (*ones, *alls)):
            ours, peer = ([each.worked_a_token for each in rounds] for rounds in (alls, ones))
            what = f"processor time a token of one session ÷ of {many}, prompts and HTTP included"
            note = "all threads of the server; other load on the machine affects this less"
            own, other = median(ours) * 1e3, median(peer) * 1e3
            yield Row(what, own, other, "ms", ratio(peer, ours), note=note)
