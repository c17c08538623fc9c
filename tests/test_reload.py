"""Which servers `tgi reload` rejects before it resolves a model."""

import pytest

from tgi.microkernel.errors import UserError
from tgi.microkernel.settings.table import Settings
from tgi.server import reloaded_settings

LISTENS = "A server with --listen or --tokenizer-listen cannot be reloaded"


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        # What `tgi up --ray` adds, the user has not given.
        (Settings(ray="auto", listen="tcp://127.0.0.1:3100", keys="keys"), "A server with --ray cannot be reloaded"),
        (Settings(listen="tcp://127.0.0.1:3100", keys="keys"), LISTENS),
        (Settings(tokenizer_listen="tcp://127.0.0.1:3200", keys="keys"), LISTENS),
    ],
)
def test_a_server_with_other_hosts(settings: Settings, error: str) -> None:
    with pytest.raises(UserError, match=error):
        reloaded_settings(settings, {"model_id": "/no/such/model"}, drain_first=False)
