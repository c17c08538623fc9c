"""`tgi chat`: a chat in the terminal with a server that speaks OpenAI's API: this one or another."""

import http.client
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TextIO

from tgi.microkernel.errors import UserError
from tgi.server_address import ServerAddress

HELP = """/system TEXT  sets the system prompt, and begins anew; without TEXT there is none
/retry        asks the last question again
/clear        begins anew
/help, /quit; Ctrl-C ends an answer, Ctrl-D the chat"""
# Written around reasoning on a terminal: dim, and back.
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
REFUSED_SECONDS = 30.0  # to connect; an answer may take any time


class Piece(NamedTuple):
    """A piece of an answer."""

    text: str
    reasoning: bool = False


class Server:
    """A server, asked by its chat route."""

    def __init__(self, url: str, key: str | None, model: str | None, parameters: dict[str, Any]) -> None:
        """Raises UserError for what is not the URL of a server."""
        self._address = ServerAddress.parse(url)
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._parameters = parameters
        self.model = model or self._first_model()

    def answer(self, messages: list[dict[str, str]]) -> Iterator[Piece]:
        """The answer, piece by piece; closing the iterator ends it at the server. Raises UserError."""
        body = self._parameters | {"model": self.model, "messages": messages, "stream": True}
        connection, response = self._send("POST", "/v1/chat/completions", json.dumps(body).encode())
        try:
            for line in response:
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    yield from _pieces(data)
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f"The connection to {self._address.url} was lost: {error}") from error
        finally:
            connection.close()

    def _first_model(self) -> str:
        connection, response = self._send("GET", "/v1/models", None)
        try:
            return str(json.loads(response.read())["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f"{self._address.url} lists no model at /v1/models. Name one by --model.") from error
        finally:
            connection.close()

    def _send(
        self, method: str, path: str, body: bytes | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._address.connection(REFUSED_SECONDS)
        try:
            connection.connect()
            connection.sock.settimeout(None)
            connection.request(method, self._address.prefix + path, body, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise UserError(f"No server answers at {self._address.url}: {error}. `tgi up` starts one.") from error
        if response.status != 200:
            text = response.read(2000).decode(errors="replace")
            connection.close()
            advice = " Give --api-key, or OPENAI_API_KEY." if response.status == 401 else ""
            raise UserError(f"{self._address.url}{path} answers {response.status}: {_message(text)}{advice}")
        return connection, response


def _message(text: str) -> str:
    """The message of an error in OpenAI's or TGI's form, or the text itself."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, LookupError, TypeError):
        return text.strip()


def _pieces(data: bytes) -> Iterator[Piece]:
    """The pieces of one event. Raises UserError for an error of the server."""
    try:
        event = json.loads(data)
        if "error" in event:
            raise UserError(f"The server has ended the answer: {_message(data.decode())}")
        for choice in event["choices"]:
            delta = choice["delta"]
            if text := delta.get("reasoning_content") or delta.get("reasoning"):
                yield Piece(text, reasoning=True)
            if text := delta.get("content"):
                yield Piece(text)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"The server has sent an event that a chat does not have: {data[:200]!r}") from error


class Chat:
    """The conversation of a terminal, and its commands."""

    def __init__(self, server: Server, system: str, out: TextIO) -> None:
        self._server, self._out = server, out
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._shows_reasoning = out.isatty()

    def run(self, read: Callable[[str], str]) -> None:
        """Reads lines until the end or /quit."""
        while True:
            try:
                line = read("> ").strip()
            except EOFError:
                print(file=self._out)
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D ends the chat)", file=self._out)
                continue
            if line in ("/quit", "/exit", "/bye"):
                return
            try:
                self.handle(line)
            except UserError as error:
                print(error, file=sys.stderr)

    def handle(self, line: str) -> None:
        """A command or a question. Raises UserError; the question is then not part of the conversation."""
        command, _, rest = line.partition(" ")
        match command:
            case "":
                return
            case "/help" | "/?":
                print(HELP, file=self._out)
            case "/clear":
                self._messages.clear()
            case "/system":
                self._system, self._messages = rest.strip(), []
            case "/retry":
                if self._messages:
                    self._messages.pop()
                    self._ask(self._messages.pop()["content"])
            case _ if command.startswith("/") and "/" not in command[1:]:
                raise UserError(f"There is no command {command}.\n{HELP}")
            case _:
                self._ask(line)

    def _ask(self, question: str) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        asked = {"role": "user", "content": question}
        pieces = self._server.answer([*system, *self._messages, asked])
        text, dim = "", False
        try:
            for piece in pieces:
                if piece.reasoning != dim and self._shows_reasoning:
                    self._out.write(_DIM if piece.reasoning else _PLAIN + "\n\n" * (not text))
                    dim = piece.reasoning
                if not piece.reasoning:
                    text += piece.text
                if not piece.reasoning or self._shows_reasoning:
                    self._out.write(_printable(piece.text))
                    self._out.flush()
        except KeyboardInterrupt:
            self._out.write(" (stopped)")
        finally:
            pieces.close()  # type: ignore[attr-defined]
            self._out.write((_PLAIN if dim else "") + "\n")
            self._out.flush()
        self._messages += [asked, {"role": "assistant", "content": text}]


def _printable(text: str) -> str:
    """The text without characters that control the terminal."""
    return "".join(one for one in text if one in "\n\t" or one.isprintable() or ord(one) > 0x9F)


def chat(url: str, key: str | None, model: str | None, system: str, parameters: dict[str, Any]) -> None:
    """Chats with the server at `url`: with the person at the terminal, or with the lines of standard input. Raises
    UserError."""
    server = Server(url, key, model, parameters)
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  # input() then edits lines and remembers them

        print(f"{server.model} on {url}. /help shows the commands.")
    talk = Chat(server, system, sys.stdout)
    if interactive:
        talk.run(input)
        return
    for line in sys.stdin:
        talk.handle(line.strip())
