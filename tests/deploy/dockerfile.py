"""Reads a Dockerfile: its stages with their instructions."""

import json
from pathlib import Path
from typing import NamedTuple


class Instruction(NamedTuple):
    """One instruction, its continued lines joined."""

    name: str
    arguments: str

    @property
    def words(self) -> list[str]:
        """The arguments in JSON form (`["tgi"]`), or separated by white space."""
        return json.loads(self.arguments) if self.arguments.startswith("[") else self.arguments.split()

    @property
    def variables(self) -> dict[str, str]:
        """Of ENV and ARG: the names with their values."""
        pairs = (word.partition("=") for word in self.words)
        return {name: value.strip('"') for name, _, value in pairs}


class Stage(NamedTuple):
    """What follows a FROM."""

    name: str
    base: str
    instructions: list[Instruction]

    def all(self, name: str) -> list[Instruction]:
        return [one for one in self.instructions if one.name == name]


def read_stages(path: Path) -> dict[str, Stage]:
    """The stages by name. The ARGs before the first FROM are left out."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    stages: dict[str, Stage] = {}
    current: list[Instruction] | None = None
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, arguments = line.strip().partition(" ")
        assert name.isupper(), line
        if name == "FROM":
            base, keyword, stage = arguments.split()
            assert keyword == "AS", line
            assert stage not in stages, line
            current = []
            stages[stage] = Stage(stage, base, current)
        elif current is not None:
            current.append(Instruction(name, " ".join(arguments.split()) if name != "RUN" else arguments))
    return stages


def lineage(stages: dict[str, Stage], name: str) -> list[Stage]:
    """A stage and those that it is based on, itself last."""
    stage = stages[name]
    return [*(lineage(stages, stage.base) if stage.base in stages else []), stage]
