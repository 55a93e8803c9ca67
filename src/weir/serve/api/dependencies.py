"""Dependencies of routes: the owner of a request, the engine's client, work in a thread, and pages
of lists.

Only hashes of keys are stored, and they are compared in constant time.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from fastapi import Depends, Query, Request

from weir.errors import WeirError
from weir.serve.api.errors import APIError, not_found, rate_limited, server_error, storage_full
from weir.serve.client import EngineClient
from weir.serve.engine.scheduler import Busy
from weir.serve.sessions.database import DamagedDatabase
from weir.serve.sessions.items import Item
from weir.serve.sessions.manager import HeldByConversation, UnknownSession
from weir.serve.sessions.records import NameTaken, StorageFull
from weir.stream import PromptTooLong

LOG = logging.getLogger("weir.serve")
Result = TypeVar("Result")


class Keys:
    """The API keys that a server accepts, as SHA-256 hashes in hexadecimal. Empty if no key is
    needed.
    """

    def __init__(self, hashes: Iterable[str] = ()) -> None:
        self.hashes = tuple(digest.lower() for digest in hashes)

    def __len__(self) -> int:
        return len(self.hashes)

    @classmethod
    def read(cls, path: str | Path) -> Keys:
        """Read keys from a file with a hash at the start of each line. `#` starts a comment."""
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise WeirError(
                f"cannot read the key file {path}: {reason}. Use --keys with a text file that has "
                "the SHA-256 hash of a key in each line."
            ) from None
        hashes = []
        for number, line in enumerate(text.splitlines(), 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            digest = words[0].removeprefix("sha256:").lower()
            if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
                raise WeirError(
                    f"line {number} of {path} is not the SHA-256 hash of a key (64 hexadecimal "
                    "digits). Write hashes in this file, not the keys themselves."
                )
            hashes.append(digest)
        if not hashes:
            raise WeirError(
                f"{path} contains no keys. Add the SHA-256 hash of a key, or leave out --keys to "
                "serve without keys."
            )
        return cls(hashes)

    def owner_of(self, key: str) -> str | None:
        """Return the owner with a key, named by the key's hash. None if the key is wrong."""
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
        # The hash is compared with all hashes, each in constant time.
        same = [known for known in self.hashes if hmac.compare_digest(known, digest)]
        return same[0] if same else None


def find_key(authorization: str, x_api_key: str) -> str:
    """Return the API key that a request has in one of these headers. Empty if it has none."""
    scheme, _, key = authorization.partition(" ")
    return (key if scheme.lower() == "bearer" else x_api_key).strip()


async def authorize(request: Request) -> str:
    """Return the owner of a request, which is empty if the server has no keys.

    Raises APIError if the key is missing or wrong.
    """
    keys: Keys = request.app.state.keys
    if not keys:
        return ""
    headers = request.headers
    key = find_key(headers.get("authorization", ""), headers.get("x-api-key", ""))
    owner = keys.owner_of(key) if key else None
    if owner is None:
        problem = "unknown key" if key else "missing key"
        raise APIError(
            401,
            f"{problem}. Send Authorization: Bearer KEY or x-api-key: KEY, with a key whose "
            "SHA-256 hash is in the file that weir serve was given with --keys.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return owner


async def find_client(request: Request) -> EngineClient:
    """Return the client of the engine that the application serves."""
    client: EngineClient = request.app.state.client
    return client


Owner = Annotated[str, Depends(authorize)]
Client = Annotated[EngineClient, Depends(find_client)]


async def look_up(what: str, find: Callable[..., Result | None], *given: Any) -> Result:
    """Look something up in a thread. Raises APIError if it is not found."""
    found = await run_in_thread(find, *given)
    if found is None:
        raise not_found(what)
    return found


async def run_in_thread(
    work: Callable[..., Result], *given: Any, param: str | None = None
) -> Result:
    """Run work in a thread. A WeirError is reported as an error of the request, or of its field
    `param`.
    """
    try:
        return await asyncio.to_thread(work, *given)
    except UnknownSession as error:
        raise not_found(error.what) from None
    except Busy as error:
        raise rate_limited(str(error)) from None
    except NameTaken as error:
        raise APIError(409, str(error), code="already_exists", param="id") from None
    except HeldByConversation as error:
        raise APIError(409, str(error), code="is_conversation") from None
    except StorageFull as error:
        raise storage_full(str(error)) from None
    except DamagedDatabase as error:
        LOG.error("%s", error)
        raise server_error() from None
    except PromptTooLong as error:
        raise APIError(400, str(error), param=param, code="prompt_too_long") from None
    except WeirError as error:
        raise APIError(400, str(error), param=param) from None


@dataclass(frozen=True)
class PageQuery:
    """The page of a list that a client asks for: at most `limit` items after the item `after`.

    Routes use it as a dependency. `include` may name further fields of items, but none exist.
    """

    after: Annotated[str | None, Query()] = None
    limit: Annotated[int, Query(ge=1, le=100)] = 20
    order: Annotated[Literal["asc", "desc"], Query()] = "desc"
    include: Annotated[list[str] | None, Query(alias="include[]")] = None

    what: ClassVar[str] = "item"

    def cut(self, items: Sequence[Item]) -> list[Item]:
        """Return the page, plus the item after it if there is one. `items` are oldest first.

        Raises APIError if no item has the id `after`.
        """
        wanted = list(items) if self.order == "asc" else list(reversed(items))
        if self.after is not None:
            at = next((n for n, item in enumerate(wanted) if item["id"] == self.after), None)
            if at is None:
                raise not_found(self.what)
            wanted = wanted[at + 1 :]
        return wanted[: self.limit + 1]

    def to_json(self, found: Sequence[Item]) -> dict[str, Any]:
        """Return the page as JSON, from its items plus the item after it if there is one."""
        return list_object(found[: self.limit], more=len(found) > self.limit)


def list_object(items: Sequence[Item], *, more: bool = False) -> dict[str, Any]:
    """Return items as a JSON list object. `more` says whether further items follow."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": more,
    }
