"""Answers as data: how models write reasoning and tool calls, and the parser of it. Read `formats` first.

- formats: the table of formats, one row per form of calls; recognition of a model's row; special tokens of the rows.
- arguments: decoders of the bodies of calls that are not JSON, and the types of arguments that they need.
- response_template: the format that a tokenizer_config.json describes, as rows.
- parser: divides a streamed answer into text, reasoning, tool calls and arguments.

The grammars of the same formats are written by `structured_output.answer_grammar`.
"""
