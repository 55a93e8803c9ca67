"""Keys of clients: only their hashes are known, and they are compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from weir.errors import WeirError


class Keys:
    """The keys that a server takes.

    Args:
        hashes: SHA-256 of each key, in hexadecimal; none where no key is needed.
    """

    def __init__(self, hashes: list[str] | None = None) -> None:
        self._hashes = [digest.lower() for digest in hashes or []]

    def __bool__(self) -> bool:
        return bool(self._hashes)

    @property
    def hashes(self) -> tuple[str, ...]:
        """SHA-256 of each key, in hexadecimal."""
        return tuple(self._hashes)

    def __len__(self) -> int:
        return len(self._hashes)

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
        for known in self._hashes:
            if hmac.compare_digest(known, digest):
                found = known
        return found
