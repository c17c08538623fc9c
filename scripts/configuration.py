#!/usr/bin/env python3
"""Prints docs/configuration.md, made from tgi/kernel/settings.py (redirect it into that file)."""

import sys

from tgi.kernel.option import Option, boolean, flag
from tgi.kernel.settings import DEFAULTS, GROUPS, OPTIONS

HEAD = """# Configuration

<!-- Made by scripts/configuration.py from tgi/kernel/settings.py; a test holds them together. Do not edit. -->

`tgi up` takes every setting of this page, and so does `text-generation-launcher`, the same command under the name that
start scripts for TGI call. The commands of single roles (`tgi api`, `tgi tokenizer`, `tgi scheduler`, `tgi worker`)
take all of them too, so that one set of flags or variables fits wherever a role runs.

- A setting is a flag or an environment variable. The flag wins; of several variables the first that is set counts.
  `AIP_HTTP_PORT` alone beats its flag, as in TGI.
- A variable that is empty counts as not set. `API_KEY` may not be empty: that would open a server meant to be closed.
- A flag without a value switches something on; its variable is `true` or `false`. Flags that are on by default have a
  `--no-` form.
- TGI's names and defaults are used where TGI has the setting. What is accepted without effect says so here, and in one
  line of the log at start. What this server cannot do is refused at start, never ignored.
- The settings that are not the defaults are logged at start at debug level, secrets hidden.
- `--help` leaves out what has no effect and what few need; `--help-all` shows every setting with all its variables.

"""

TAIL = """## API keys

Clients send a key as `Authorization: Bearer KEY`. There may be several: those of the file count besides those of the
flag or the variable.

1. `--api-key-file FILE` or `TGI_API_KEY_FILE`: one key per line. Only who may read the file knows them.
2. `API_KEY`: one key per line. A process's environment can be read by its own user (and root) alone.
3. `--api-key KEY`: every user of the host can read the arguments of a process that has just started, and the shell's
   history, a unit file or a container's configuration keep them. The server hides the key in its list of arguments
   within its first milliseconds, so that `ps` shows `--api-key (hidden)`, but not before it runs.

Child processes get the settings in their environment and remove them from it when they begin.

## Further environment variables

| variable | meaning |
|---|---|
| `TGI_RUN` | the run directory ([processes.md](processes.md)); default: one per user and port |
| `TGI_CACHE` | where imported models are kept; default `$XDG_CACHE_HOME/tgi` |
| `XDG_CACHE_HOME` | where compiled kernels are kept, in `tgi`; default `~/.cache` |
| `CXX` | what compiles them; default `c++`, `g++` or `clang++`, whichever is there |
| `HF_TOKEN`, `HUGGING_FACE_HUB_TOKEN`, `HF_API_TOKEN` | token for gated and private models of the Hub |
| `HF_HOME`, `HF_HUB_CACHE` | where Hub models are kept |
| `HF_HUB_OFFLINE` | `1`: nothing is fetched |
| `HF_ENDPOINT`, `HF_HUB_USER_AGENT_ORIGIN`, `HF_HUB_ENABLE_HF_TRANSFER` | read by the Hub's own library |
| `CUDA_VISIBLE_DEVICES`, `NVIDIA_VISIBLE_DEVICES`, `ZE_AFFINITY_MASK` | the devices that there are; one is used |
| `OMP_NUM_THREADS` | the worker's threads on CPU; default: all cores, with torch's kernels the quickest of a trial |
| `PORT` under honcho | ignored: honcho sets one for each process |
| `HOSTNAME` | ignored: containers set it. `TGI_HOSTNAME` is read |

## Fetching a model beforehand

`tgi download-weights MODEL_ID` fetches a model into the Hub's cache, as far as it is not there, and prints its
directory. Options: `--revision`, `--trust-remote-code`, `--logger-level`, `--json-output`. `--extension` takes
`.safetensors` alone; `--auto-convert` and `--no-auto-convert` change nothing, since pickled weights are refused with
the way to convert them; `--merge-lora` is refused.
"""


def main() -> None:
    """Prints the page."""
    sys.stdout.write(page())


def page() -> str:
    """The whole page as Markdown."""
    parts = [HEAD]
    for group in GROUPS:
        parts.append(f"## {group}\n\n| flag | variables | default | meaning |\n|---|---|---|---|\n")
        parts += [_row(name, option) for name, option in OPTIONS.items() if option.group == group]
        parts.append("\n")
    return "".join(parts) + TAIL


def _row(name: str, option: Option) -> str:
    switch = f"`{flag(name)}`" + (f", `{option.short}`" if option.short else "")
    if option.read is boolean:
        kind = "" if getattr(DEFAULTS, name) is False else f", `--no-{flag(name)[2:]}`"
    else:
        kind = " " + (" \\| ".join(f"`{choice}`" for choice in option.choices) or option.read.__name__.upper())
    variables = ", ".join(f"`{variable}`" for variable in option.over + option.variables(name))
    value = getattr(DEFAULTS, name)
    default = option.default(value)
    if value is not None and value != () and not isinstance(value, bool):
        default = f"`{default}`"
    return f"| {switch}{kind} | {variables} | {default} | {option.meaning} |\n"


if __name__ == "__main__":
    main()
