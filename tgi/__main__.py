"""Where the commands begin, and `python -m tgi`: Ctrl-C ends them without a traceback while they are imported, too."""

from importlib import import_module


def tgi() -> None:
    """The command `tgi`."""
    _begin("tgi.cli")


def launcher() -> None:
    """The command `text-generation-launcher`."""
    _begin("tgi.launcher")


def _begin(module: str) -> None:
    try:
        import_module(module).main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None  # as a shell counts an end by SIGINT


if __name__ == "__main__":
    tgi()
