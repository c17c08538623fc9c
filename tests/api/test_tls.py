"""The certificate of the HTTP port: its files, and when they change."""

import os
import shutil
from pathlib import Path

import pytest

from tests.certificates import make_certificate
from tgi.api.tls import ServerCertificate
from tgi.microkernel.errors import UserError


def test_one_file_may_hold_certificate_and_key(tmp_path: Path) -> None:
    made = make_certificate(tmp_path, "one")
    both = tmp_path / "both.pem"
    both.write_bytes(made.certfile.read_bytes() + made.keyfile.read_bytes())
    ServerCertificate(str(both), None)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    one, two = make_certificate(tmp_path, "one"), make_certificate(tmp_path, "two")
    locked = make_certificate(tmp_path, "locked", "secret")
    absent, text = tmp_path / "absent.pem", tmp_path / "text.pem"
    text.write_text("hello")
    for certfile, keyfile, message in (
        (absent, one.keyfile, f"--ssl-certfile: {absent} cannot be read (No such file or directory). Name a PEM file."),
        (one.certfile, absent, f"--ssl-keyfile: {absent} cannot be read (No such file or directory). Name a PEM file."),
        (one.certfile, two.keyfile, f"The key {two.keyfile} does not belong to the certificate {one.certfile}."),
        (locked.certfile, locked.keyfile, f"The key {locked.keyfile} needs a passphrase. Give a key without one."),
        (text, one.keyfile, f"The certificate {text} with the key {one.keyfile} cannot be used"),
        (one.certfile, text, f"The certificate {one.certfile} with the key {text} cannot be used"),
        (one.certfile, None, f"The certificate {one.certfile} with the key {one.certfile} cannot be used"),
    ):
        with pytest.raises(UserError) as raised:
            ServerCertificate(str(certfile), keyfile and str(keyfile))
        assert str(raised.value).startswith(message)


def test_changed_files_are_loaded_once_they_can_be_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    used, other = make_certificate(tmp_path, "used"), make_certificate(tmp_path, "other")
    certificate = ServerCertificate(str(used.certfile), str(used.keyfile))
    first = certificate.context
    certificate.reload_if_changed()
    assert certificate.context is first
    shutil.copy(other.certfile, used.certfile)  # the key follows later
    certificate.reload_if_changed()
    certificate.reload_if_changed()
    assert certificate.context is first
    assert caplog.text.count("The previous certificate stays in use") == 1
    os.replace(other.keyfile, used.keyfile)
    certificate.reload_if_changed()
    assert certificate.context is not first
