"""How --lora-adapters names adapters: what each item of the list says."""

import re
from typing import NamedTuple

_ITEM = re.compile(r"(?P<name>[^=@]+)(?:=(?P<path>[^=@]+))?(?:@(?P<revision>[^=@]+))?")


class Named(NamedTuple):
    """An adapter as the user names it: from the directory `path`, or from the Hub if there is none."""

    name: str  # what requests call it
    path: str | None
    revision: str | None


def named_adapters(text: str | None) -> list[Named]:
    """The items of a comma list: `id`, `id@revision`, `id=path` or `id=path@revision`. Raises ValueError in words."""
    found: dict[str, Named] = {}
    for item in text.split(",") if text is not None else ():
        matched = _ITEM.fullmatch(item)
        if matched is None or not all(part is None or part.strip() for part in matched.groups()):
            forms = "ID, ID@REVISION, NAME=PATH or NAME=PATH@REVISION, with commas between them"
            raise ValueError(f"Invalid LoRA adapter format: {item.strip() or 'an empty name'}. Give {forms}")
        name, path, revision = (part and part.strip() for part in matched.group("name", "path", "revision"))
        if name == "tgi":
            raise ValueError("No LoRA adapter can be called tgi: as a model's name that means the base model")
        if name in found:
            raise ValueError(f"Two LoRA adapters are called {name}. Give them different names: NAME=PATH")
        found[name] = Named(name, path, revision)
    return [*found.values()]
