"""A further port that serves /metrics, for --prometheus-port: a thread of the supervisor."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tgi.kernel import metrics
from tgi.kernel.errors import UserError


class Exposition:
    """Answers GET /metrics on its port until closed. Raises UserError if the port cannot be had."""

    def __init__(self, hostname: str, port: int, directory: Path) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = 10  # seconds that a silent client may hold a thread

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    return self.send_error(404)
                body = metrics.render(directory).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *values: object) -> None:
                """A scrape every few seconds is no news."""

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
            daemon_threads = True

        try:
            self._server = Server((hostname, port), Handler)
        except OSError as error:
            raise UserError(
                f"Cannot listen on {hostname}:{port} for --prometheus-port: {error.strerror}. Choose another port; "
                "/metrics is on the server's own port too."
            ) from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="exposition", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Frees the port."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
