"""What routes depend on: the owner of a request, by its key, and the client of the engine.

Of keys only hashes are known, and they are compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from fastapi import Depends, Request

from weir.errors import WeirError
from weir.serve.api.errors import APIError
from weir.serve.client import EngineClient


class Keys:
    """The keys that a server takes.

    Args:
        hashes: SHA-256 of each key, in hexadecimal; none where no key is needed.
    """

    def __init__(self, hashes: Iterable[str] = ()) -> None:
        self.hashes = tuple(digest.lower() for digest in hashes)

    def __len__(self) -> int:
        return len(self.hashes)

    @classmethod
    def read(cls, path: str | Path) -> Keys:
        """Read keys from a file: a hash at the start of each line; `#` starts a comment.

        Raises:
            WeirError: the file cannot be read, has no key, or a line that is no hash.
        """
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise WeirError(f"cannot read the keys in {path}: {error}") from None
        hashes = []
        for number, line in enumerate(text.splitlines(), 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            digest = words[0].removeprefix("sha256:").lower()
            if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
                raise WeirError(
                    f"line {number} of {path} is no SHA-256 of a key; keys themselves do not "
                    "belong there"
                )
            hashes.append(digest)
        if not hashes:
            raise WeirError(f"{path} has no keys; leave --keys out to serve without any")
        return cls(hashes)

    def owner_of(self, key: str) -> str | None:
        """The owner with a key, which is the key's hash; None if the key is wrong.

        Compares with all hashes, each in constant time.
        """
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
        found = None
        for known in self.hashes:
            if hmac.compare_digest(known, digest):
                found = known
        return found


async def authorize(request: Request) -> str:
    """The owner of a request.

    Raises:
        APIError: the key is missing or wrong.
    """
    keys: Keys = request.app.state.keys
    if not keys:
        return ""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    owner = keys.owner_of(key.strip()) if scheme.lower() == "bearer" else None
    if owner is None:
        raise APIError(
            401,
            "a key is needed that this server knows: Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return owner


async def find_client(request: Request) -> EngineClient:
    """The client of the engine that the application serves."""
    client: EngineClient = request.app.state.client
    return client


Owner = Annotated[str, Depends(authorize)]
Client = Annotated[EngineClient, Depends(find_client)]
