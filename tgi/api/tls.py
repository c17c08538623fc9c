"""TLS of the HTTP port: the server's certificate, loaded again when its files change."""

import logging
import os
import ssl

from tgi.microkernel.errors import UserError

log = logging.getLogger(__name__)


class ServerCertificate:
    """The certificate chain and the private key of the server. New connections use `context`."""

    def __init__(self, certfile: str, keyfile: str | None) -> None:
        """`keyfile` defaults to `certfile`. Raises UserError if the files cannot be used."""
        self._certfile = os.path.expanduser(certfile)
        self._keyfile = os.path.expanduser(keyfile or certfile)
        self._versions = self._file_versions()
        self.context = self._load()

    def reload_if_changed(self) -> None:
        """Loads the files again if they have changed. While they cannot be used, the previous certificate stays."""
        versions = self._file_versions()
        if versions == self._versions:
            return
        self._versions = versions
        try:
            self.context = self._load()
        except UserError as error:
            log.error("%s The previous certificate stays in use.", error)
        else:
            log.info("Loaded the changed certificate %s", self._certfile)

    def _file_versions(self) -> list[tuple[int, int, int] | None]:
        return [_file_version(path) for path in (self._certfile, self._keyfile)]

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # TLS 1.2 and 1.3
        context.set_alpn_protocols(["http/1.1"])
        for path, flag in ((self._certfile, "--ssl-certfile"), (self._keyfile, "--ssl-keyfile")):
            try:
                with open(path, "rb"):
                    pass
            except OSError as error:
                raise UserError(f"{flag}: {path} cannot be read ({error.strerror}). Name a PEM file.") from error
        try:
            context.load_cert_chain(self._certfile, self._keyfile, password=self._reject_passphrase)
        except OSError as error:  # ssl.SSLError, or a file that has just been removed
            raise UserError(self._problem(error)) from error
        return context

    def _problem(self, error: OSError) -> str:
        reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        if self._keyfile == self._certfile and "PRIVATE KEY" not in _content(self._certfile):
            return f"{self._certfile} has no private key. Give --ssl-keyfile the file of the key."
        if reason == "KEY_VALUES_MISMATCH":
            return (
                f"The key {self._keyfile} does not belong to the certificate {self._certfile}. Give the pair that was "
                "issued together, the server's own certificate first in its file."
            )
        return (
            f"The certificate {self._certfile} with the key {self._keyfile} cannot be used ({reason or error}). "
            "Both must be PEM: the chain of certificates, the server's own first, and its private key."
        )

    def _reject_passphrase(self) -> str:
        raise UserError(f"The key {self._keyfile} needs a passphrase. Give a key without one.")


def _content(path: str) -> str:
    """The text of a file, or "" if it has just been removed."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _file_version(path: str) -> tuple[int, int, int] | None:
    """Changes when the file is replaced or written, also through symbolic links; None while there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
