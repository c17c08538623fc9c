"""A client of a chaos run that loads an adapter, uses it, and unloads it, again and again."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.reliability.client import Answer, Client, Outcome
from scripts.reliability.features import Asked

# After the answer to a change all front ends know it within this time, also those that start meanwhile.
KNOWN_SECONDS = 10.0


class AdapterChanges:
    """Changes one adapter at run time. `judge` is told each answer to a request with it that should be exact; `faults`
    holds what else was wrong."""

    def __init__(
        self,
        client: Client,
        name: str,
        directory: Path,
        asked: list[Asked],
        judge: Callable[[Asked, Answer], None],
    ) -> None:
        self.count = 0  # of completed changes
        self.faults: list[str] = []
        self._client = client
        self._name = name
        self._directory = directory
        self._asked = asked
        self._judge = judge

    async def run(self, end: float) -> None:
        """Goes on until `end`, by time.monotonic. The adapter is unloaded then."""
        number = 0
        while time.monotonic() < end:
            await self.load()
            await self._ask_until_known(found=True)
            for _ in range(3):
                number += 1
                asked = self._asked[number % len(self._asked)]
                self._judge(asked, await self._client.ask(asked.path, asked.body))
            await self.unload()
            await self._ask_until_known(found=False)

    async def load(self) -> None:
        """Loads the adapter."""
        await self._change("load", {"lora_name": self._name, "lora_path": str(self._directory)})

    async def unload(self) -> None:
        """Unloads the adapter."""
        await self._change("unload", {"lora_name": self._name})

    async def _change(self, verb: str, body: dict[str, Any]) -> None:
        answer = await self._client.ask(f"/v1/{verb}_lora_adapter", json.dumps(body).encode())
        # An answer may be lost after the change; then it was unloaded already.
        unloaded_before = verb == "unload" and answer.status == 404 and answer.connections > 1
        if answer.outcome is not Outcome.COMPLETE or not (answer.status == 200 or unloaded_before):
            self.faults.append(f"{verb} the adapter: {answer.status} {answer.problem} {answer.body[:300]!r}")
        self.count += 1

    async def _ask_until_known(self, found: bool) -> None:
        """Asks until a front end knows the latest change."""
        asked, begin = self._asked[0], time.monotonic()
        while True:
            answer = await self._client.ask(asked.path, asked.body)
            missing = is_missing_adapter(answer)
            if missing is not found:
                if found:
                    self._judge(asked, answer)
                return
            if time.monotonic() - begin > KNOWN_SECONDS:
                state = "not found" if found else "served"
                self.faults.append(
                    f"the adapter is {state} {KNOWN_SECONDS:g} s after its change: {answer.body[:300]!r}"
                )
                return


def is_missing_adapter(answer: Answer) -> bool:
    """Whether a request was refused because there is no such adapter."""
    return answer.status == 422 and b"not found" in answer.body
