"""Converts errors of libraries to errors of weir, with the reason in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weir.errors import WeirError


@contextmanager
def report_as(what: str, remedy: str = "") -> Iterator[None]:
    """Convert any exception of a library to a WeirError, with the exception's first line as the
    reason. A WeirError stays as it is.

    Args:
        what: beginning of the error, before the library's reason.
        remedy: end of the error, after the reason.
    """
    try:
        yield
    except WeirError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise WeirError(
                f"{what}: it contains Python code, which runs only with trust_remote_code=True, "
                "or --trust-remote-code. Read the code first."
            ) from None
        reason, *rest = str(error).strip().splitlines() or [type(error).__name__]
        if reason.rstrip().endswith(":") and len(rest) == 1:  # like huggingface_hub's validation
            reason = f"{reason.rstrip()} {rest[0].strip()}"
        reason = reason.rstrip()
        # A reason that ends with a colon introduces a list, and is useless without it.
        more = "" if reason.endswith(":") else f" ({reason.rstrip('.')})"
        raise WeirError(what + more + remedy) from None
