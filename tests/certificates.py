"""Self-signed certificates for 127.0.0.1, made by the openssl program."""

import subprocess
from pathlib import Path
from typing import NamedTuple


class Certificate(NamedTuple):
    """Paths of PEM files."""

    certfile: Path
    keyfile: Path


def make_certificate(folder: Path, name: str, passphrase: str = "") -> Certificate:
    """A new certificate; `name` is its common name and the name of its files."""
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2",
            "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-out", made.certfile,
            "-keyout", made.keyfile, *(["-passout", f"pass:{passphrase}"] if passphrase else ["-nodes"]),
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return made
