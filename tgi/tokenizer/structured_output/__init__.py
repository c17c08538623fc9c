"""Structured output: checks the grammars that clients request, and writes them as llguidance grammars for the worker.

Read `grammar` first.

- grammar: GrammarValidator, for JSON schemas, regular expressions, Lark and GBNF.
- json_schema: checks a JSON schema, and rewrites it so that the library enforces all of it, or what it can of a tool's.
- json_schema_lark: writes a JSON schema as Lark rules, with a limit on the digits of numbers.
- patterns: regular expressions of strings within JSON, and formats.
- repetition: how often a grammar repeats a part.
- compile_process: child processes that compile grammars within limits on time and memory.
- argument_grammar: arguments of calls that are not one JSON object.
- answer_grammar: the grammar of a chat's answer, with reasoning, tool calls and the client's grammar.
"""
