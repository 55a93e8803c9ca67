"""`GET /`: a page to talk to the model and watch what its cache remembers.

The page consists of the files in `weir/serve/page`, read once. It loads nothing from other servers;
its Content-Security-Policy enforces this. The page itself needs no key, but its requests do.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import Response

from weir.serve.api.errors import not_found

public = APIRouter()
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"
PLACEHOLDER = "{files}"
"""Placeholder in the page for the URL of its files."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@cache
def contents() -> tuple[str, dict[str, bytes]]:
    """Return a hash of all files of the page, and the files by name."""
    found = {
        file.name: file.read_bytes()
        for file in sorted(files("weir.serve").joinpath("page").iterdir(), key=lambda f: f.name)
        if "." + file.name.rpartition(".")[2] in MEDIA_TYPES
    }
    digest = hashlib.sha256()
    for name, data in found.items():
        digest.update(f"{name} {len(data)} ".encode() + data)
    number = digest.hexdigest()[:16]
    found[INDEX] = found[INDEX].replace(PLACEHOLDER.encode(), f"page/{number}".encode())
    return number, found


@public.get("/", include_in_schema=False)
async def index(request: Request) -> Response:
    """Return the page, which browsers validate each time."""
    number, found = contents()
    tag = f'"{number}"'
    headers = {**HEADERS, "ETag": tag, "Cache-Control": "no-cache"}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(found[INDEX], media_type=MEDIA_TYPES[".html"], headers=headers)


@public.get("/page/{number}/{name}", include_in_schema=False)
async def file(number: str, name: str) -> Response:
    """Return a file of the page, which browsers may keep for a year without asking again: its URL
    contains a hash of all files.
    """
    known, found = contents()
    if number != known or name not in found or name == INDEX:
        raise not_found("file")
    headers = {**HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}
    kind = MEDIA_TYPES["." + name.rpartition(".")[2]]
    return Response(found[name], media_type=kind, headers=headers)
