"""Keys with options."""

from pathlib import Path

import pytest

from tgi.microkernel.admission.api_keys import ApiKey, parse_api_key, read_api_key_file
from tgi.microkernel.errors import UserError


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("secret", ApiKey("secret")),
        ("a key with spaces", ApiKey("a key with spaces")),
        ("c2VjcmV0==", ApiKey("c2VjcmV0==")),
        ("secret weight=2.5", ApiKey("secret", weight=2.5)),
        ("two words  weight=2 priority=-1", ApiKey("two words", weight=2.0, priority=-1)),
        ("k requests=16 tokens-per-minute=60000", ApiKey("k", requests=16, tokens_per_minute=60000)),
    ],
)
def test_lines(line: str, key: ApiKey) -> None:
    assert parse_api_key(line) == key


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("wieght=2", "'wieght' is no option of a key. Choose from weight, priority, requests, tokens-per-minute"),
        ("weight=0", "weight=0 must be a number from 0.001 to 1000"),
        ("weight=nan", "weight=nan must be a number"),
        ("requests=0", "requests=0 must be an integer from 1 to 1000000000000"),
        ("priority=high", "priority=high must be an integer from -1000000 to 1000000"),
        ("priority=99999999999999999999", "must be an integer from -1000000 to 1000000"),
        (f"tokens-per-minute={10**400}", "must be an integer from 1 to 1000000000000"),
        ("weight=1 weight=2", "the option weight is given twice"),
    ],
)
def test_a_wrong_option_is_named_without_the_key(tmp_path: Path, options: str, message: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"good\nsesame {options}\n")
    with pytest.raises(UserError, match="line 2") as error:
        read_api_key_file(str(file))
    assert message in str(error.value)
    assert "sesame" not in str(error.value)
