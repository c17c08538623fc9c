#!/usr/bin/env python3
"""Runs `uv pip install` with the given arguments for this Python, with the package indexes that pip is configured to
use and that of TORCH_INDEX (scripts/install.py). uv comes from pip.

uv unpacks packages in parallel, and links files that its cache has: the environment of the tests, for which pip
computes 45 s, takes it 4 s, or 13 s with an empty cache.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

# The options of uv for those of pip, which may have several values.
OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
# Sections of pip's configuration; each overrides those before it.
SECTIONS = ("global", "install", ":env:")


def configuration(listed: str) -> dict[str, str]:
    """Parses the output of `pip config list`, lines such as "global.index-url='https://...'"."""
    chosen: dict[str, tuple[int, str]] = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, option = name.rpartition(".")
        if section in SECTIONS:
            chosen[option] = max(chosen.get(option, (-1, "")), (SECTIONS.index(section), ast.literal_eval(value)))
    return {option: value for option, (_, value) in chosen.items()}


def main(arguments: list[str]) -> int:
    """Returns uv's exit code, or that of pip if it cannot install uv."""
    pip = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check"]
    constraints = Path(__file__).parent.parent / "constraints.txt"
    install = subprocess.run([*pip, "install", "--quiet", "--constraint", str(constraints), "uv"], check=False)
    if install.returncode:
        return install.returncode
    from uv import find_uv_bin

    listed = subprocess.run([*pip, "config", "list"], check=True, capture_output=True, text=True).stdout
    configured = configuration(listed)
    options = [
        word for name in OPTIONS for value in configured.get(name, "").split() for word in (OPTIONS[name], value)
    ]
    if index := os.environ.get("TORCH_INDEX", "").strip():
        options += ["--index", index]
    certificates = {"SSL_CERT_FILE": configured["cert"]} if "cert" in configured else {}
    # As pip, uv takes the best version of all indexes: a build of torch for the CPU (2.13.0+cpu) is better than 2.13.0.
    command = [find_uv_bin(), "pip", "install", "--python", sys.executable, "--index-strategy", "unsafe-best-match"]
    return subprocess.run([*command, *options, *arguments], env=os.environ | certificates, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
