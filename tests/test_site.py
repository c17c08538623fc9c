"""The pages in docs/ as a site: it builds without a warning, so no link leads nowhere, and has each page once."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.clients.environments import python_environment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def pages(nav: list[str | dict[str, list[str]]]) -> list[str]:
    """The pages of mkdocs.yml in their order."""
    return [page for one in nav for page in ([one] if isinstance(one, str) else next(iter(one.values())))]


def test_every_page_is_in_the_navigation_once() -> None:
    configured = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert sorted(pages(configured["nav"])) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_the_site_builds_without_a_warning_and_needs_no_other_host(tmp_path: Path) -> None:
    mkdocs = python_environment("site", ROOT / "requirements" / "site.txt").parent / "mkdocs"
    command = [str(mkdocs), "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|link)[^>]+(?:src|href)=\"?(https?://[^\"> ]+)", page.read_text())
        assert not loaded, page
