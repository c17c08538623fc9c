"""Documentation that is made from the code is up to date."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_wire_protocol_page_is_the_one_that_the_code_makes() -> None:
    spec = importlib.util.spec_from_file_location("wire_protocol", ROOT / "scripts/wire_protocol.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs/wire-protocol.md").read_text() == module.page(), (
        "run scripts/wire_protocol.py > docs/wire-protocol.md"
    )
