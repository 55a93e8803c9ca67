"""`GET /`: a page to talk to the model and to see what its cache remembers.

The page is plain files in `weir/serve/page`, read once. It loads nothing from anywhere else, and a
browser is told to see to that. It needs no key itself; all that it asks for is behind the key.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import Response

from weir.serve.api.errors import not_found

public = APIRouter()
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"
PLACE = "{files}"
"""What stands in the page for the address of its files."""
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
    """A hash of all files of the page, and what each is by its name."""
    found = {
        each.name: each.read_bytes()
        for each in sorted(files("weir.serve").joinpath("page").iterdir(), key=lambda it: it.name)
        if "." + each.name.rpartition(".")[2] in KINDS
    }
    digest = hashlib.sha256()
    for name, data in found.items():
        digest.update(f"{name} {len(data)} ".encode() + data)
    number = digest.hexdigest()[:16]
    found[INDEX] = found[INDEX].replace(PLACE.encode(), f"page/{number}".encode())
    return number, found


@public.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def index(request: Request) -> Response:
    """The page. Browsers ask each time whether theirs is still the same."""
    number, found = contents()
    tag = f'"{number}"'
    headers = {**HEADERS, "ETag": tag, "Cache-Control": "no-cache"}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(found[INDEX], media_type=KINDS[".html"], headers=headers)


@public.get("/page/{number}/{name}", include_in_schema=False)
async def file(number: str, name: str) -> Response:
    """A file of the page. Its address has a hash of all, so that browsers may keep it for ever."""
    known, found = contents()
    if number != known or name not in found or name == INDEX:
        raise not_found("file")
    headers = {**HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}
    kind = KINDS["." + name.rpartition(".")[2]]
    return Response(found[name], media_type=kind, headers=headers)
