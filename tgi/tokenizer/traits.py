"""What a chat template expects of a chat, read from its syntax tree and not by trying it out."""

from collections.abc import Iterator
from typing import NamedTuple

from jinja2 import nodes


class Traits(NamedTuple):
    """`tools`: it names the tools that it is given. `calls`: it tells which of them a message has called. `parts`: it
    looks at the parts of a message's content one by one. `strings`: it looks whether a content is a string, so it takes
    both kinds if `parts` is set.
    """

    tools: bool
    calls: bool
    parts: bool
    strings: bool


def traits(tree: nodes.Template) -> Traits:
    """The traits of a parsed template."""
    contents = _names_of_content(tree)
    return Traits(
        any(name.name == "tools" for name in tree.find_all(nodes.Name)),
        any(field.attr == "tool_calls" for field in tree.find_all(nodes.Getattr))
        or any(const.value == "tool_calls" for const in tree.find_all(nodes.Const)),
        any(_is_content(loop.iter, contents) for loop in tree.find_all(nodes.For))
        or any(_is_part(field.node, contents) for field in tree.find_all(nodes.Getattr))
        or any(_is_part(field.node, contents) for field in tree.find_all(nodes.Getitem)),
        any(test.name == "string" for test in tree.find_all(nodes.Test)),
    )


def _names_of_content(tree: nodes.Template) -> set[str]:
    """The variables and macro parameters that somewhere stand for a message's content."""
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    found: set[str] = set()
    while True:
        known = len(found)
        for name, value in _bindings(tree, macros):
            if _is_content(value, found):
                found.add(name)
        if len(found) == known:
            return found


def _bindings(tree: nodes.Template, macros: dict[str, nodes.Macro]) -> Iterator[tuple[str, nodes.Node]]:
    """Which name is bound to which expression: by `set`, and by calls of macros."""
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name):
            yield assign.target.name, assign.node
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            parameters = [parameter.name for parameter in macros[call.node.name].args]
            yield from zip(parameters, call.args, strict=False)
            yield from ((keyword.key, keyword.value) for keyword in call.kwargs)


def _is_part(node: nodes.Node, names: set[str]) -> bool:
    """Whether an expression whose fields are read is a part of a content by its number."""
    if not (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const)):
        return False
    return isinstance(node.arg.value, int) and _is_content(node.node, names)


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    """Whether an expression is a message's content, or what a filter or a slice leaves of it."""
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Filter):
        return _is_content(node.node, names)
    if isinstance(node, nodes.CondExpr):
        return _is_content(node.expr1, names) or _is_content(node.expr2, names)
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node, names)
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return False
