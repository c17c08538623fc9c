"""The page in a real browser: a chat with a key, an answer that survives its worker, the live view, accessibility."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.answering.sitecustomize import SCRIPT, THOUGHT_END
from tests.clients.environments import BROWSER, node_environment
from tests.clients.test_clients import ANSWERING, KEY
from tests.live.server import TIMEOUT_SECONDS, Server, python_path

pytestmark = pytest.mark.live

ANSWER = f"""<think>
A thought.{THOUGHT_END}| fruit | colour |
|---|---|
| lime | **green** |

```python
print("<b>")
```

[a link](https://example.org/) [none](javascript:alert(1)) <img src=x onerror=alert(1)><script>alert(1)</script>
"""


def test_the_page_in_a_browser(demo_model: Path, tmp_path: Path) -> None:
    node, modules = node_environment(BROWSER)
    shutil.copy(BROWSER / "page.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(modules)
    model = ("--model-id", str(demo_model), "--tokenizer-config-path", str(ANSWERING / "hermes.jinja"))
    scripted = ("--worker", "scripted", "--scripted-step-us", "15000", "--api-key", KEY)
    with Server(tmp_path / "run", *model, *scripted, env=python_path(ANSWERING)).start() as server:
        server.wait_until_ready()
        arguments = (f"{server.url}/", KEY, f"{SCRIPT} {json.dumps([ANSWER])}", str(tmp_path))
        environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        with subprocess.Popen(
            [str(node), str(tmp_path / "page.mjs"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        ) as browser:
            assert browser.stdout is not None
            if browser.stdout.readline() == "kill\n":
                server.kill("worker-0")
            told, faults = browser.communicate(timeout=3 * TIMEOUT_SECONDS)
    assert browser.returncode == 0, faults
    seen = json.loads(told)
    assert seen.pop("problems") == []
    violations = seen.pop("violations")
    assert len(violations) == 6
    assert not any(violations.values()), violations
    assert (seen["cells"], seen["code"]) == (["lime", "green"], ['print("<b>")'])
    assert (seen["reasoning"], seen["folded"]) == (["A thought."], True)
    assert (seen["links"], seen["foreign"]) == (["https://example.org/"], 0)
    assert seen["programs"] == ["curl", "Python", "JavaScript"]
    assert seen["stopped"].endswith("stopped")
    assert seen["aborted"] == 2
    assert seen["waits"] == ["decode"]
    assert "a new process has taken its place" in " ".join(seen["events"])
    assert seen["gone_on"]
    assert seen["edited"] == "Hello"
    assert len(seen["tokens"]) == 8
    assert min(seen["tokens"]) >= 5, "each token with its alternatives"
    assert {"prefill", "decode"} <= set(seen["phases"])
    assert len(seen["numbers"]) == 6
    assert not seen["wide"]
