"""`weir policies`: what there is, with parameters and papers."""

from __future__ import annotations

from dataclasses import asdict

from weir.cli.app import command
from weir.cli.catalogue import Entry, has_plugins, others, read_policies, read_pools
from weir.cli.common import AsJson, output, print_json


@command()
def policies(as_json: AsJson = False) -> None:
    """List the named policies and the pools a pipe can be made of."""
    named, pools = read_policies(), read_pools()
    if has_plugins():
        from weir.policies import NAMED, load_plugins
        from weir.pools import POOLS

        load_plugins()
        named += others(named, {name: it.make for name, it in NAMED.items()}, "imported")
        pools += others(pools, POOLS, "imported")
    if as_json:
        of_pool = ("name", "parameters", "about")
        print_json(
            {
                "policies": [asdict(entry) for entry in named],
                "pools": [{key: getattr(entry, key) for key in of_pool} for entry in pools],
            }
        )
        return
    from rich.text import Text

    output().print(Text("Policies", style="bold"))
    for entry in named:
        it_is = [f"= {entry.pipe}"] if entry.pipe else []
        _print(entry, *it_is, entry.about, f"({entry.paper})")
    output().print(Text("\nPools", style="bold"))
    for entry in pools:
        _print(entry, entry.about)
    output().print("\nA pipe is pools with | between them: sink(4) | recent(252)", markup=False)


def _print(entry: Entry, *lines: str) -> None:
    from rich.padding import Padding
    from rich.text import Text

    output().print(Text(f"  {entry.name}({entry.parameters})", "cyan"), soft_wrap=True)
    for line in lines:
        output().print(Padding(Text(line), (0, 0, 0, 6), expand=False))
