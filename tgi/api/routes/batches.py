"""/v1/files and /v1/batches: OpenAI's Batch API. All is the client's own. batches.py answers the batches."""

import contextlib
import re
import time
from operator import attrgetter
from typing import Any

from falcon.asgi import Request, Response
from falcon.asgi.multipart import MultipartForm
from falcon.media.multipart import MultipartFormHandler, MultipartParseOptions

from tgi.api import errors
from tgi.api.asgi import RECEIVE_KEY, DisconnectWatcher
from tgi.api.batch_store import BatchStore, StoredFile, new_id
from tgi.api.batches import ENDPOINTS
from tgi.api.clients import Client
from tgi.api.errors import ApiError, Rejection
from tgi.api.json_body import JsonBody
from tgi.api.routes.stored_responses import newest_first, query_number
from tgi.api.service import Resource, Service, answer_json
from tgi.api.shapes import batches as shapes
from tgi.api.shapes.types import Page
from tgi.api.sqlite_store import StoreUnavailable

# Of one file: OpenAI's limits.
MAX_FILE_BYTES, MAX_LINES = 200_000_000, 50_000
# A line has a body of at most --payload-limit, and this much besides.
LINE_OVERHEAD = 64 << 10
# Kept at once, so that the lines of an upload do not fill the memory.
PIECE_BYTES = 1 << 20
# Uploads that one client, and all, may send at once to a front end.
MAX_UPLOADS_OF_CLIENT, MAX_UPLOADS = 2, 8
MAX_NAME = 255  # characters of a file's name
MAX_FILES, DEFAULT_BATCHES, MAX_BATCHES = 10_000, 20, 100
_WINDOW = re.compile(r"(\d{1,3})h")
MAX_HOURS = 720

_OPTIONS = MultipartParseOptions()
_OPTIONS.max_body_part_buffer_size = 1024  # of all parts but the file
_OPTIONS.max_body_part_count = 16
_HANDLER = MultipartFormHandler(_OPTIONS)


class BatchResource(Resource):
    """What all such routes share."""

    private = True

    @property
    def _store(self) -> BatchStore:
        """Raises ApiError, a 404, if nothing is kept."""
        if not self._service.batches.ttl:
            raise ApiError(404, "not_found", "This server keeps no files and batches: it runs with --batch-ttl 0")
        return self._service.batches

    async def _file(self, req: Request, file_id: str) -> StoredFile:
        found = await self._store.file(req.context.client.name, file_id)
        if found is None:
            raise not_kept("file", file_id)
        return found

    async def _batch(self, req: Request, batch_id: str) -> shapes.BatchObject:
        found = await self._store.batch(req.context.client.name, batch_id)
        if found is None:
            raise not_kept("batch", batch_id)
        return found


class FilesResource(BatchResource):
    """POST and GET /v1/files."""

    form = shapes.FileUpload

    async def on_post(self, req: Request, resp: Response) -> None:
        name: str = req.context.client.name
        uploads = self._service.uploads
        if uploads[name] >= MAX_UPLOADS_OF_CLIENT or uploads.total() >= MAX_UPLOADS:
            raise errors.overloaded(text="Too many uploads at once")
        uploads[name] += 1
        try:
            file = await read_upload(self._service, self._store, req)
        finally:
            uploads[name] -= 1
            if not uploads[name]:
                del uploads[name]
        answer_json(resp, file.shown)

    async def on_get(self, req: Request, resp: Response) -> None:
        """Lists the files, the last one first unless `order=asc`."""
        limit = query_number(req, "limit", MAX_FILES, MAX_FILES, least=1)
        client, purpose, after = req.context.client.name, req.get_param("purpose"), req.get_param("after")
        found = await self._store.files(client, purpose, after, limit + 1, newest_first(req))
        answer_json(resp, Page.first([file.shown for file in found], limit, attrgetter("id")))

    on_head = on_get  # falcon omits the body


class FileResource(BatchResource):
    """GET and DELETE /v1/files/{file_id}."""

    async def on_get(self, req: Request, resp: Response, file_id: str) -> None:
        answer_json(resp, (await self._file(req, file_id)).shown)

    on_head = on_get  # falcon omits the body

    async def on_delete(self, req: Request, resp: Response, file_id: str) -> None:
        if not await self._store.delete_file(req.context.client.name, file_id):
            raise not_kept("file", file_id)
        answer_json(resp, shapes.FileDeleted(file_id))


class FileContentResource(BatchResource):
    """GET /v1/files/{file_id}/content."""

    async def on_get(self, req: Request, resp: Response, file_id: str) -> None:
        file = await self._file(req, file_id)
        resp.content_type = "application/octet-stream"
        resp.content_length = file.size
        if req.method != "HEAD":
            watcher = DisconnectWatcher(req.scope[RECEIVE_KEY], lambda: None)
            resp.stream = FileContent(self._store, file, watcher)  # as falcon takes it: with __anext__ and close

    on_head = on_get


class FileContent:
    """The bytes of a file. A file that is dropped meanwhile ends the connection: what was sent is too short."""

    def __init__(self, store: BatchStore, file: StoredFile, watcher: DisconnectWatcher) -> None:
        self._store = store
        self._file = file
        self._watcher = watcher
        self._number = -1  # of the last line that was sent

    def __aiter__(self) -> "FileContent":
        return self

    async def __anext__(self) -> bytes:
        page = [] if self._watcher.disconnected else await self._store.content(self._file, self._number, PIECE_BYTES)
        if not page:
            raise StopAsyncIteration
        self._number = page[-1][0]
        return b"".join(line for _, line in page)

    async def close(self) -> None:
        """Called by falcon at the end of the iteration, also after an exception."""
        self._watcher.close()


class BatchesResource(BatchResource):
    """POST and GET /v1/batches."""

    body = JsonBody(shapes.BatchRequest)

    async def on_post(self, req: Request, resp: Response) -> None:
        request = await self._service.read_body(req, self.body)
        store, client = self._store, req.context.client
        if (task := ENDPOINTS.get(request.endpoint)) is None:
            known = ", ".join(ENDPOINTS)
            raise errors.validation_error(f"`endpoint` must be one of {known}", param="endpoint")
        self._service.require_task(task)
        found = _WINDOW.fullmatch(request.completion_window)
        if found is None or not 0 < int(found[1]) <= MAX_HOURS:
            text = f"`completion_window` must be hours from 1h to {MAX_HOURS}h, such as 24h"
            raise errors.validation_error(text, param="completion_window")
        now = int(time.time())
        batch = shapes.BatchObject(
            id=new_id("batch_"),
            endpoint=request.endpoint,
            input_file_id=request.input_file_id,
            completion_window=request.completion_window,
            created_at=now,
            expires_at=now + 3600 * int(found[1]),
            metadata=request.metadata,
        )
        expiry = request.output_expires_after
        output_ttl = store.ttl if expiry is None else min(expiry.seconds, store.ttl)
        if not await store.create_batch(client.name, batch, output_ttl):
            raise not_kept("file", request.input_file_id, "input_file_id")
        store.changed.set()
        answer_json(resp, batch)

    async def on_get(self, req: Request, resp: Response) -> None:
        """Lists the batches, the last one first."""
        limit = query_number(req, "limit", DEFAULT_BATCHES, MAX_BATCHES, least=1)
        found = await self._store.batches(req.context.client.name, req.get_param("after"), limit + 1)
        answer_json(resp, Page.first(found, limit, attrgetter("id")))

    on_head = on_get  # falcon omits the body


class OneBatchResource(BatchResource):
    """GET /v1/batches/{batch_id}."""

    async def on_get(self, req: Request, resp: Response, batch_id: str) -> None:
        answer_json(resp, await self._batch(req, batch_id))

    on_head = on_get  # falcon omits the body


class CancelBatchResource(BatchResource):
    """POST /v1/batches/{batch_id}/cancel."""

    async def on_post(self, req: Request, resp: Response, batch_id: str) -> None:
        """Ends a batch early. One that has ended, or is about to, stays as it is."""
        await self._batch(req, batch_id)
        await self._store.move(batch_id, ("validating", "in_progress"), "cancelling")
        self._store.changed.set()
        answer_json(resp, await self._batch(req, batch_id))


async def read_upload(service: Service, store: BatchStore, req: Request) -> StoredFile:
    """Reads a form with a file, and keeps its lines as they come.

    Raises Rejection: 415 for another body, 400 for a damaged form, 408, and 413 for a file that is too large; ApiError:
    422 for other parts than a file has; StoreFull; StoreUnavailable.
    """
    if (req.content_type or "").partition(";")[0].strip().lower() != "multipart/form-data":
        raise Rejection(415, "Expected request with `Content-Type: multipart/form-data`")
    if (req.content_length or 0) > MAX_FILE_BYTES + LINE_OVERHEAD:
        raise _too_large()
    client: Client = req.context.client
    now = time.time()
    file_id = new_id("file-")
    file = StoredFile(file_id, client.name, "batch", "", file_id, 0, 0, 0, int(now), now + store.ttl)
    stream: Any = service.bodies.pieces(req.stream)
    form: MultipartForm = await _HANDLER.deserialize_async(stream, req.content_type, req.content_length)
    fields: dict[str, str] = {}
    name = None
    await store.begin_upload(file)
    try:
        async for part in form:
            if part.name != "file":
                fields[part.name or ""] = (await part.get_data()).decode(errors="replace")
            elif name is not None:
                raise errors.validation_error("a form has one `file`", param="file")
            else:
                name = part.filename or "file"
                await _keep_lines(store, file, part.stream, service.settings.payload_limit + LINE_OVERHEAD)
        if name is None:
            raise errors.validation_error("the form has no `file`", param="file")
        if fields.get("purpose") != "batch":
            raise errors.validation_error("`purpose` must be `batch`: no other files are kept here", param="purpose")
        if (seconds := fields.get("expires_after[seconds]")) is not None:
            least, most = shapes.MIN_EXPIRY, shapes.MAX_EXPIRY
            if not (seconds.isascii() and seconds.isdigit() and len(seconds) < 9 and least <= int(seconds) <= most):
                text = f"`expires_after[seconds]` must be an integer from {least} to {most}"
                raise errors.validation_error(text, param="expires_after[seconds]")
            file = file._replace(expires=min(file.expires, now + int(seconds)))
        return await store.finish_upload(file._replace(name=name[:MAX_NAME]))
    except BaseException:
        await _drop(store, file)
        raise


async def _keep_lines(store: BatchStore, file: StoredFile, stream: Any, max_line: int) -> None:
    """Keeps the lines of a file. Raises Rejection: 413."""
    rest = bytearray()  # of the last piece: a line without its end
    lines: list[bytes] = []
    kept = size = waiting = 0

    async def keep() -> None:
        nonlocal lines, kept, waiting
        if kept + len(lines) > MAX_LINES:
            raise Rejection(413, f"A file may have at most {MAX_LINES} lines")
        await store.append_lines(file, kept, lines)
        kept += len(lines)
        lines, waiting = [], 0

    async for piece in stream:
        size += len(piece)
        if size > MAX_FILE_BYTES:
            raise _too_large()
        rest += piece
        if b"\n" in piece:
            *whole, last = rest.split(b"\n")
            lines += [bytes(line) + b"\n" for line in whole]
            waiting += len(rest) - len(last)
            rest = last
        if len(rest) > max_line:
            raise _line_too_long(kept + len(lines), max_line)
        if waiting > PIECE_BYTES or len(lines) > MAX_LINES:
            await keep()
    if rest:
        lines.append(bytes(rest))
    await keep()


async def _drop(store: BatchStore, file: StoredFile) -> None:
    with contextlib.suppress(StoreUnavailable):  # it is dropped later, as one whose front end has ended
        await store.drop_upload(file)


def _too_large() -> Rejection:
    return Rejection(413, f"A file may have at most {MAX_FILE_BYTES} bytes")


def _line_too_long(number: int, limit: int) -> Rejection:
    return Rejection(413, f"Line {number + 1} is longer than {limit} bytes (--payload-limit, and {LINE_OVERHEAD})")


def not_kept(kind: str, name: str, param: str | None = None) -> ApiError:
    """404: this client has no such file or batch, or not any more."""
    text = f"The {kind} {name[:128]} is not kept by this server, or not any more (--batch-ttl)"
    return ApiError(404, "not_found", text, param=param)
