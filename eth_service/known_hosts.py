"""Answering only requests that name this machine's loopback address.

A page on the web could call this machine by a host name of its own, and so read from a loopback service through the
user's browser.
"""

from __future__ import annotations

import ipaddress
from http import HTTPStatus
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from eth_service.errors import respond


class KnownHosts:
    """Middleware: 400 as a problem document where the Host header names another host."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        host = request.headers.get("host", "")
        if _is_loopback(host):
            await self._app(scope, receive, send)
            return
        detail = f"Host = {host!r} is no loopback address; call the service by localhost, 127.0.0.1 or [::1]"
        await respond(request, HTTPStatus.BAD_REQUEST, detail)(scope, receive, send)


def _is_loopback(host: str) -> bool:
    """Of `name:port`, or of `[address]:port`."""
    try:
        name = urlsplit(f"//{host}").hostname
        return name == "localhost" or ipaddress.ip_address(name or "").is_loopback
    except ValueError:
        return False
