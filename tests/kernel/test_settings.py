"""Settings: flags beat the environment, the environment beats defaults, and mistakes are told in words."""

from dataclasses import fields

import pytest
from click.testing import CliRunner

from tgi.cli import main
from tgi.kernel.errors import UserError
from tgi.kernel.settings import DERIVED, Settings, load


def test_flag_beats_environment_beats_default() -> None:
    assert load({}, {}).max_input_tokens is None
    assert load({}, {"MAX_INPUT_TOKENS": "7"}).max_input_tokens == 7
    assert load({"max_input_tokens": 9}, {"MAX_INPUT_TOKENS": "7"}).max_input_tokens == 9


def test_old_names_and_cloud_names_are_read() -> None:
    assert load({}, {"MAX_INPUT_LENGTH": "7"}).max_input_tokens == 7
    assert load({}, {"HF_MODEL_ID": "a/b"}).model_id == "a/b"
    assert load({}, {"HF_MODEL_ID": "a/b", "MODEL_ID": "c/d"}).model_id == "c/d"
    assert load({}, {"API_KEY": "one, two"}).api_key == ("one", "two")


def test_the_container_s_hostname_and_honcho_s_port_are_not_ours() -> None:
    assert load({}, {"HOSTNAME": "3f2a"}).hostname == "0.0.0.0"
    assert load({}, {"TGI_HOSTNAME": "127.0.0.1"}).hostname == "127.0.0.1"
    assert load({}, {"PORT": "80"}).port == 80
    assert load({}, {"PORT": "5000", "HONCHO_PROCESS_NAME": "api.1"}).port == 3000


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"max_input_tokens": 10, "max_total_tokens": 10}, "`max_input_tokens` must be < `max_total_tokens`"),
        ({"max_input_tokens": 1, "max_input_length": 1}, "Both `max_input_tokens` and `max_input_length` are set"),
        ({"max_total_tokens": 10, "max_batch_total_tokens": 9}, "must be <= `max_batch_total_tokens`"),
        ({"validation_workers": 0}, "`validation_workers` must be > 0"),
        ({"hostname": "localhost"}, "`hostname` must be an IP address"),
        ({"port": 70000}, "`port` must be a port number"),
        ({"graceful_termination_timeout": float("inf")}, "`graceful_termination_timeout` must be a number of seconds"),
        ({"start_timeout": 0.0}, "`start_timeout` must be a number of seconds above 0"),
        ({"step_target": float("nan")}, "`step_target` must be a number of seconds above 0"),
    ],
)
def test_arguments_that_contradict_are_refused(flags: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match="Invalid argument") as caught:
        load(flags, {})
    assert said in str(caught.value)


def test_an_environment_variable_that_does_not_parse_is_named() -> None:
    with pytest.raises(UserError, match="MAX_BATCH_SIZE"):
        load({}, {"MAX_BATCH_SIZE": "many"})
    with pytest.raises(UserError, match=r"DTYPE.*expected one of auto"):
        load({}, {"DTYPE": "int3"})


def test_settings_survive_the_way_into_a_child() -> None:
    settings = load({"api_key": ("k",), "max_input_length": 5, "port": 1234}, {})
    assert Settings.from_json(settings.to_json()) == settings or settings.max_input_length == 5
    again = Settings.from_json(settings.to_json())
    assert (again.api_key, again.max_input_tokens, again.run_dir) == (("k",), 5, settings.run_dir)


@pytest.mark.parametrize("command", ["up", "api", "tokenizer", "scheduler", "worker"])
def test_every_setting_is_an_option_of_every_role(command: str) -> None:
    shown = CliRunner().invoke(main, [command, "--help"]).output
    for setting in fields(Settings):
        assert ("--" + setting.name.replace("_", "-") in shown) == (DERIVED not in setting.metadata)


def test_a_wrong_flag_value_is_told_without_a_traceback() -> None:
    result = CliRunner().invoke(main, ["up", "--dtype", "int3"])
    assert result.exit_code == 2
    assert "'int3' is not one of" in result.output
    result = CliRunner().invoke(main, ["up", "--port", "70000"])
    assert result.exit_code == 1
    assert "Traceback" not in result.output
