"""Flags and environment variables. Read table first.

table          the table of settings
options        what a setting consists of, and the parsers of values
loading        settings from flags and environment, checked
served_models  the models of a server with several
lora_adapters  the list of --lora-adapters
"""
