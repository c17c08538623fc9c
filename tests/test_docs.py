"""Generated pages of docs/ are up to date."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("script", "page"),
    [
        ("wire_protocol.py", "wire-protocol.md"),
        ("parameters.py", "parameters.md"),
        ("metrics_page.py", "metrics.md"),
        ("configuration.py", "configuration.md"),
    ],
)
def test_generated_page_is_up_to_date(script: str, page: str) -> None:
    spec = importlib.util.spec_from_file_location(script.removesuffix(".py"), ROOT / "scripts" / script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / page).read_text() == module.page(), f"run scripts/{script} > docs/{page}"
