"""The command `text-generation-launcher`: `tgi up` under the name that start scripts for TGI call."""

from typing import Any

import click

from tgi import __version__
from tgi.cli import CONTEXT, SettingsCommand, settings_options, user_errors_reported
from tgi.microkernel.settings.loading import load_settings


@click.command("text-generation-launcher", cls=SettingsCommand, context_settings=CONTEXT)
@click.version_option(__version__, prog_name="text-generation-launcher", message="%(prog)s %(version)s")
@settings_options
def main(**flags: Any) -> None:
    """Run the whole server, with the flags and environment variables of TGI's launcher."""
    with user_errors_reported():
        from tgi.microkernel.messages.protocol import ROLES
        from tgi.server import run_server

        run_server(load_settings(flags), ROLES)


if __name__ == "__main__":
    from tgi.__main__ import launcher

    launcher()
