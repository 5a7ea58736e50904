"""The studio's server: answers what the page asks, on this machine alone.

Every request is a question that changes nothing, so there is nothing to keep but what was searched.
"""

import asyncio
import json
import traceback
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import PurePath
from string import Template
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.draw.page import page_script, page_style
from penstock.planner import SearchResult
from penstock.schedules import REGISTRY
from penstock.studio import answers
from penstock.studio.inputs import DEFAULTS, SEARCHED, InputError, Inputs, read_inputs
from penstock.studio.searching import search_apart

T = TypeVar("T")

_NUM_KEPT = 16  # Searches whose results are kept.
_GONE = 499  # As other servers have it: the client closed the request.
_TYPES = {
    ".css": "text/css",
    ".csv": "text/csv",
    ".html": "text/html",
    ".js": "text/javascript",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # The page may ask this server and nobody else.
    "content-security-policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def make_app() -> Starlette:
    """The studio as an ASGI application."""
    searches = _Searches()

    async def picture(request: Request) -> Response:
        inputs = read_inputs(request.query_params)
        shown = await _unless_gone(request, searches.show(inputs))
        query = request.url.query
        return _json(await run_in_threadpool(answers.picture, inputs, shown, query))

    async def table(request: Request) -> Response:
        inputs = read_inputs(request.query_params)
        answers.check_memory(inputs)
        lines = (json.dumps(row, allow_nan=False) + "\n" for row in answers.table(inputs))
        return StreamingResponse(lines, media_type="application/x-ndjson")

    async def search(request: Request) -> Response:
        inputs = read_inputs(request.query_params)
        found = await _unless_gone(request, searches.find(inputs))
        return _json(await run_in_threadpool(answers.searched_row, inputs, found))

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if not name.endswith(tuple(answers.FILES.values())):
            raise HTTPException(404, f"There is no file {name}.")
        try:
            inputs = read_inputs(request.query_params)
            shown = await _unless_gone(request, searches.show(inputs))
        except InputError as error:  # It is not the page that asks.
            raise HTTPException(422, str(error)) from error
        content = await run_in_threadpool(answers.file, inputs.question, shown, name)
        return Response(
            content,
            media_type=_TYPES[PurePath(name).suffix],
            headers={"content-disposition": f'attachment; filename="{name}"'},
        )

    return Starlette(
        routes=[
            *_parts(),
            Route("/picture", picture),
            Route("/table", table),
            Route("/search", search),
            Route("/files/{name}", file),
        ],
        middleware=[
            Middleware(_WithHeaders),
            # A page of elsewhere must not reach us under a name that leads here.
            Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"]),
        ],
        exception_handlers={InputError: _say_problems, Exception: _say_failure},
    )


class _Searches:
    """What was searched lately."""

    def __init__(self) -> None:
        self._found: dict[Inputs, SearchResult] = {}

    async def find(self, inputs: Inputs) -> SearchResult:
        """The searched schedule, which is the same whatever is drawn."""
        answers.check_memory(inputs)
        key = replace(inputs, schedule=SEARCHED, beside="")
        if key not in self._found:
            self._found[key] = await search_apart(inputs)
            while len(self._found) > _NUM_KEPT:
                del self._found[next(iter(self._found))]
        return self._found[key]

    async def show(self, inputs: Inputs) -> list[answers.Shown]:
        """The schedules that are drawn."""
        answers.check_memory(inputs)
        names = {"schedule": inputs.schedule, "beside": inputs.beside}
        found = await self.find(inputs) if SEARCHED in names.values() else None
        return [
            await run_in_threadpool(answers.make, inputs, field, name, found)
            for field, name in names.items()
            if name
        ]


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives; when the browser does not wait for it any more, it is stopped."""
    tasks = working, _ = asyncio.create_task(work), asyncio.create_task(_until_gone(request))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(_GONE, "The browser has gone.")
        return working.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _parts() -> list[Route]:
    """The page and what belongs to it, read once."""
    start = {
        "fields": DEFAULTS,
        "schedules": [
            {
                "name": generator.name,
                "source": generator.source,
                "takes_any_stages_per_rank": generator.takes_any_stages_per_rank,
            }
            for generator in REGISTRY
        ],
    }
    folder = files("penstock.studio") / "parts"
    parts = {part.name: part.read_text(encoding="utf-8") for part in folder.iterdir()}
    # In a script element only "<" can end or change what is read as text.
    data = json.dumps(start).replace("<", "\\u003c")
    parts[""] = Template(parts.pop("studio.html")).substitute(start=data)
    parts |= {"page.css": page_style(), "page.js": page_script()}
    return [_part(name, content) for name, content in parts.items()]


def _part(name: str, content: str) -> Route:
    media_type = _TYPES[PurePath(name or "studio.html").suffix]
    return Route(f"/{name}", lambda request: Response(content, media_type=media_type))


def _json(value: object) -> Response:
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Response(text, media_type="application/json")


async def _say_problems(request: Request, error: Exception) -> Response:
    """An answer like others: a browser would note any other status as an error of the page."""
    assert isinstance(error, InputError)
    return _problems(error.problems, 200)


async def _say_failure(request: Request, error: Exception) -> Response:
    """A mistake of ours: the page says so, and where it comes from is printed."""
    traceback.print_exception(error)
    return _problems({"": f"The studio failed: {error!r}"}, 500)


def _problems(problems: Mapping[str, str], status: int) -> Response:
    text = json.dumps({"problems": problems})
    return Response(text, status, media_type="application/problem+json")


class _WithHeaders:
    """Adds the headers that all answers have."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)
