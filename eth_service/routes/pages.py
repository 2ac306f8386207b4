"""The page that shows jobs in a browser."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.responses import FileResponse

FILES = Path(__file__).parents[1] / "dashboard"

router = APIRouter(include_in_schema=False)

# Everything the page needs comes from here, and nothing of it may run as script unless it is a file of ours.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@router.get("/")
def page() -> Response:
    return FileResponse(FILES / "index.html", headers=_HEADERS)


@router.get("/favicon.ico")
def icon() -> Response:
    return Response(status_code=204)
