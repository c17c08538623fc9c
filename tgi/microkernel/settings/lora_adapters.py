"""The adapters that --lora-adapters names."""

import re
from typing import NamedTuple

_ITEM = re.compile(r"(?P<name>[^=@]+)(?:=(?P<path>[^=@]+))?(?:@(?P<revision>[^=@]+))?")


class NamedAdapter(NamedTuple):
    """One item of --lora-adapters: an adapter in the directory `path`, or, without it, on the Hub."""

    name: str  # its name in requests
    path: str | None
    revision: str | None


def named_adapters(text: str | None) -> list[NamedAdapter]:
    """Parses a comma-separated list of `id`, `id@revision`, `name=path` or `name=path@revision`.

    Raises ValueError with a message for the user.
    """
    found: dict[str, NamedAdapter] = {}
    for item in text.split(",") if text is not None else ():
        matched = _ITEM.fullmatch(item)
        if matched is None or not all(part is None or part.strip() for part in matched.groups()):
            forms = "ID, ID@REVISION, NAME=PATH or NAME=PATH@REVISION, with commas between them"
            raise ValueError(f"Invalid LoRA adapter format: {item.strip() or 'an empty name'}. Give {forms}")
        name, path, revision = (part and part.strip() for part in matched.group("name", "path", "revision"))
        if name == "tgi":
            raise ValueError("A LoRA adapter cannot be called tgi: this model name means the base model")
        if name in found:
            raise ValueError(f"Two LoRA adapters are called {name}. Give them different names: NAME=PATH")
        found[name] = NamedAdapter(name, path, revision)
    return [*found.values()]
