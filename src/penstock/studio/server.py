"""The studio's server: answers the page's requests, on this machine only.

No request changes anything; only the results of recent searches are kept.
"""

import asyncio
import json
import re
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import PurePath
from string import Template
from typing import Any, TypeVar

from anyio import to_thread
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.draw.web_page import page_script, page_style
from penstock.errors import FieldError
from penstock.schedules import REGISTRY
from penstock.solver import SearchResult
from penstock.solver.comparison import SEARCHED
from penstock.studio import answers
from penstock.studio.search_process import run_apart
from penstock.studio.typed_inputs import CHOICES, DEFAULTS, LARGEST, Inputs, read_inputs

T = TypeVar("T")

_NUM_KEPT, _NUM_AT_ONCE = 16, 2  # Searches whose results are kept, and that run at the same time.
_FILE_NAME = re.compile(f"[a-z0-9_-]+({'|'.join(map(re.escape, answers.FILES.values()))})")
_GONE = 499  # As in other servers: the client closed the request.
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
    # The page may send requests to this server only.
    "content-security-policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def make_app() -> ASGIApp:
    """Return the studio as an ASGI application."""
    searches = _Searches()
    drawing = asyncio.Lock()  # matplotlib's settings apply to the whole process.

    async def picture(request: Request) -> Response:
        inputs = read_inputs(request.query_params)
        shown = await _unless_gone(request, searches.show(inputs))
        query = request.url.query
        return _json(await _in_thread(answers.picture, inputs, shown, query))

    async def table(request: Request) -> Response:
        inputs = read_inputs(request.query_params)
        await _in_thread(answers.check_memory, inputs)
        return StreamingResponse(_lines(inputs), media_type="application/x-ndjson")

    async def search(request: Request) -> Response:
        inputs = read_inputs(request.query_params)
        found = await _unless_gone(request, searches.find(inputs))
        return _json(await _in_thread(answers.searched_row, inputs, found))

    async def advice(request: Request) -> Response:
        inputs = read_inputs(request.query_params)
        return _json(await _unless_gone(request, searches.advise(inputs)))

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if not _FILE_NAME.fullmatch(name):
            raise HTTPException(404, "There is no such file.")
        try:
            inputs = read_inputs(request.query_params)
            shown = await _unless_gone(request, searches.show(inputs))
        except FieldError as error:  # The request is not from the page.
            raise HTTPException(422, str(error)) from error
        async with drawing:
            content = await _in_thread(answers.file, inputs.question, shown, name)
        return Response(
            content,
            media_type=_TYPES[PurePath(name).suffix],
            headers={"content-disposition": f'attachment; filename="{name}"'},
        )

    app = Starlette(
        routes=[
            *_parts(),
            Route("/picture", picture),
            Route("/table", table),
            Route("/search", search),
            Route("/advice", advice),
            Route("/files/{name}", file),
        ],
        middleware=[
            # A page from another site must not reach the studio by a host name that resolves to it.
            Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"]),
            Middleware(_OnlyOurPage),
        ],
        exception_handlers={FieldError: _say_problems, Exception: _say_failure},
    )
    return _WithHeaders(app)


class _Searches:
    """The results of recent searches."""

    def __init__(self) -> None:
        self._found: dict[Inputs, SearchResult] = {}
        self._at_once = asyncio.Semaphore(_NUM_AT_ONCE)

    async def find(self, inputs: Inputs) -> SearchResult:
        """Return the searched schedule, which does not depend on what is drawn."""
        await _in_thread(answers.check_memory, inputs)
        key = replace(inputs, schedule=SEARCHED, beside="")
        async with self._at_once:
            found = self._found.pop(key, None)
            if found is None:
                found = await run_apart(answers.search, inputs)
        self._found[key] = found  # As the latest.
        while len(self._found) > _NUM_KEPT:
            del self._found[next(iter(self._found))]
        return found

    async def advise(self, inputs: Inputs) -> answers.AdviceData:
        """Return what limits the searched schedule, and what would help."""
        found = await self.find(inputs)
        async with self._at_once:
            return await run_apart(answers.advise, inputs, found)

    async def show(self, inputs: Inputs) -> list[answers.Shown]:
        """Return the schedules to draw."""
        await _in_thread(answers.check_memory, inputs)
        names = {"schedule": inputs.schedule, "beside": inputs.beside}
        found = await self.find(inputs) if SEARCHED in names.values() else None
        return [
            await _in_thread(answers.make, inputs, field, name, found)
            for field, name in names.items()
            if name
        ]


def _lines(inputs: Inputs) -> Iterator[str]:
    """Yield the lines of the table; if the studio fails, the last line is the error."""
    try:
        for row in answers.table(inputs):
            yield json.dumps(row, allow_nan=False) + "\n"
    except Exception as error:
        yield json.dumps({"problems": _failure(error)}) + "\n"


async def _in_thread(function: Callable[..., T], *args: object) -> T:
    """Call the function in a thread; the server does not wait for it when it stops."""
    return await to_thread.run_sync(lambda: function(*args), abandon_on_cancel=True)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, or stop it when the browser closes the request."""
    tasks = working, _ = asyncio.create_task(work), asyncio.create_task(_until_gone(request))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(_GONE, "The browser closed the request.")
        return working.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _parts() -> list[Route]:
    """Return the routes of the page and its parts, which are read once."""
    start = {
        "fields": DEFAULTS,
        "schedules": [
            {"name": generator.name, "source": generator.source} for generator in REGISTRY
        ],
        "choices": CHOICES,
        "largest": LARGEST,
    }
    folder = files("penstock.studio") / "parts"
    parts = {part.name: part.read_text(encoding="utf-8") for part in folder.iterdir()}
    # In a script element, only "<" can end the text or change how it is read.
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
    """Return the problems with status 200: a browser logs any other status as an error."""
    assert isinstance(error, FieldError)
    return _problems(error.problems, 200)


async def _say_failure(request: Request, error: Exception) -> Response:
    return _problems(_failure(error), 500)


def _failure(error: Exception) -> dict[str, str]:
    """Return the message about an error in the studio itself, and print its traceback."""
    traceback.print_exception(error)
    return {"": f"The studio failed: {error!r}"}


def _problems(problems: Mapping[str, str], status: int) -> Response:
    text = json.dumps({"problems": problems})
    return Response(text, status, media_type="application/problem+json")


class _OnlyOurPage:
    """Middleware that refuses requests from pages of other sites, except links to the page itself.

    Such pages could not read the answers, but they could keep this machine busy.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/" and _is_foreign(Headers(scope=scope)):
            await Response("Only the studio's own page may send requests.", 403)(
                scope, receive, send
            )
        else:
            await self._app(scope, receive, send)


def _is_foreign(headers: Headers) -> bool:
    """Return whether a page of another site sends a request; browsers say so in one way or two."""
    own = ("", f"http://{headers.get('host')}")
    is_of_other_site = headers.get("sec-fetch-site") in ("cross-site", "same-site")
    return is_of_other_site or headers.get("origin", "") not in own


class _WithHeaders:
    """Middleware that adds the headers that all answers have."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await self._app(scope, receive, send_with_headers)
