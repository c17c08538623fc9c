"""Client libraries that send pictures to a model that names what is in them: `scripts/check-pictures`, and with fewer
pictures in the test run."""
