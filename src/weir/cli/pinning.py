"""The options `--pin` and `--pin-slots` of `weir serve` and `weir size`."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from weir.errors import WeirError, quote

AUTO = "auto"
"""Value of --pin for as many tokens as the free memory allows."""
MOST = 999_999_999
"""The most tokens that --pin can name."""

PinSlots = Annotated[
    str | None,
    Option(
        help="Format of the slots of --pin: exact, same (as the policy's quantized slots, or "
        "int8 if it has none), int8, int4, k8v4 or fp8 [default: exact; with --pin auto, same]"
    ),
]


def read_pin(pin: str | None) -> int | None:
    """Read a value of --pin other than `AUTO`: a number of tokens, or None if it is not given."""
    if pin is None:
        return None
    if not (pin.isascii() and pin.isdecimal() and len(pin) <= len(str(MOST))):
        raise WeirError(
            f"--pin must be {AUTO} or a whole number of tokens from 0 to {MOST:,}, got "
            f"{quote(pin)}. Use --pin auto or --pin 8192."
        )
    return int(pin)


def pin_format(pin: str | None, given: str | None) -> str:
    """Return the format of the slots of --pin."""
    from weir.policies import EXACT, SAME

    return given or (SAME if pin == AUTO else EXACT)
