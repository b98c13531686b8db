"""Mutants of a source file: small changes on its syntax tree, each of which a test should notice.

Strings, annotations, decorators, assertions and messages of exceptions stay as they are, and so do
arguments that decide nothing on a right machine, such as ``encoding``.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
}
IDLE = {"strict", "encoding", "errors", "check", "flush", "stacklevel", "category", "file"}
"""Keyword arguments that stay: on a right machine, and for rows that fit, they decide nothing."""
ALIKE = {"max", "min", "print", "isinstance", "super"}
"""Functions for which the order of arguments decides nothing, or whose removal only silences."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str
    """Path below the root of the repository."""
    line: int
    """First line of what is changed, from 1."""
    end: int
    """Its last line."""
    operator: str
    """Kind of change, such as ``comparison``."""
    before: str
    """What stands there."""
    after: str
    """What stands there in the mutant."""
    start: int
    """Offset of ``before`` in the file, in characters."""
    number: int = 0
    """How many changes in the file before this one are the same on a line of the same text."""
    text: str = ""
    """The line."""

    @property
    def name(self) -> str:
        """A name that stays when the line moves, but not when it changes."""
        change = f"{self.text} {self.before} {self.after} {self.number}"
        return f"{self.file}:{self.operator}:{hashlib.sha256(change.encode()).hexdigest()[:8]}"

    def applied_to(self, text: str) -> str:
        """Return the file ``text`` with this change."""
        return text[: self.start] + self.after + text[self.start + len(self.before) :]


def mutants_of(file: str, text: str) -> list[Mutant]:
    """Return all changes of the file ``text``, in the order of its lines;
    ``changes_the_program`` says which count.
    """
    made: dict[tuple[int, str, str], Mutant] = {}
    lines, starts = text.splitlines(keepends=True), [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    encoded = text.encode()
    for node, operator, after in _changes(ast.parse(text)):
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        before, start = encoded[first:last].decode(), len(encoded[:first].decode())
        line = lines[node.lineno - 1].strip()
        mutant = Mutant(
            file,
            node.lineno,
            node.end_lineno or node.lineno,
            operator,
            before,
            after,
            start,
            text=line,
        )
        made.setdefault((start, before, after), mutant)
    ordered = sorted(
        made.values(), key=lambda mutant: (mutant.start, mutant.operator, mutant.after)
    )
    seen: Counter[str] = Counter()
    return [replace(mutant, number=_next(seen, mutant.name)) for mutant in ordered]


def _next(seen: Counter[str], name: str) -> int:
    seen[name] += 1
    return seen[name] - 1


def changes_the_program(mutant: Mutant, text: str) -> bool:
    """Return True if the mutant of the file ``text`` is Python, and
    another program than ``text``.
    """
    try:
        return ast.dump(ast.parse(mutant.applied_to(text))) != ast.dump(ast.parse(text))
    except SyntaxError:
        return False


Change = tuple[ast.expr | ast.stmt, str, str]
"""The node to replace, the kind of change, and the text to put there."""


def _changes(node: ast.AST) -> Iterator[Change]:
    """Yield the changes of ``node`` and of all below it that count."""
    if isinstance(node, ast.stmt):
        yield from _of_statement(node)
    elif isinstance(node, ast.expr):
        yield from _of_expression(node)
    for child in _below(node):
        yield from _changes(child)


def _below(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Assert() | ast.Raise() | ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.FunctionDef(args=arguments, body=body):
            yield from [*arguments.defaults, *filter(None, arguments.kw_defaults), *body]
        case ast.ClassDef(body=body):
            yield from body
        case ast.AnnAssign(value=value):
            yield from [value] if value else []
        case ast.keyword(arg=name, value=value):
            yield from [] if name in IDLE else [value]
        case ast.Call(func=ast.Name(id="cast" | "TypeVar" | "print")):
            return
        case _:
            yield from ast.iter_child_nodes(node)


def _of_statement(node: ast.stmt) -> Iterator[Change]:
    match node:
        case ast.Expr(value=ast.Call(func=function)) if not _is_idle(function):
            yield node, "removed call", "pass"
        case ast.AugAssign() | ast.Delete():
            yield node, "removed statement", "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "removed statement", "pass"
        case ast.Raise():
            yield node, "removed raise", "pass"
        case ast.Break():
            yield node, "loop", "continue"
        case ast.Continue():
            yield node, "loop", "break"
        case ast.If(test=test) | ast.While(test=test) if not (
            isinstance(test, ast.Name) and "CHECKING" in test.id
        ):
            yield from _negated(test)
        case _:
            return


def _of_expression(node: ast.expr) -> Iterator[Change]:
    match node:
        case ast.Compare(left=left, ops=[operator, *others], comparators=values) if (
            type(operator) in COMPARISONS
        ):
            flipped = ast.Compare(left, [COMPARISONS[type(operator)](), *others], values)
            yield node, "comparison", f"({ast.unparse(flipped)})"
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in ARITHMETIC:
            if not (_is_text(left) or _is_text(right)):
                swapped = ast.BinOp(left, ARITHMETIC[type(operation)](), right)
                yield node, "arithmetic", f"({ast.unparse(swapped)})"
        case ast.BoolOp(op=either, values=terms):
            other = ast.BoolOp(ast.Or() if isinstance(either, ast.And) else ast.And(), terms)
            yield node, "logic", f"({ast.unparse(other)})"
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield node, "sign", f"({ast.unparse(operand)})"
        case ast.IfExp(test=test):
            yield from _negated(test)
        case (
            ast.ListComp(generators=loops)
            | ast.SetComp(generators=loops)
            | ast.GeneratorExp(generators=loops)
        ):
            yield from (change for loop in loops for test in loop.ifs for change in _negated(test))
        case ast.DictComp(generators=loops):
            yield from (change for loop in loops for test in loop.ifs for change in _negated(test))
        case ast.Constant(value=bool(value)):
            yield node, "constant", str(not value)
        case ast.Constant(value=int(number) | float(number)):
            yield from (
                (node, "constant", repr(near)) for near in (number + 1, number - 1) if near >= 0
            )
        case ast.Call(func=function, args=arguments, keywords=keywords):
            yield from _of_call(node, function, arguments, keywords)
        case _:
            return


def _of_call(
    node: ast.Call, function: ast.expr, arguments: list[ast.expr], keywords: list[ast.keyword]
) -> Iterator[Change]:
    plain = [argument for argument in arguments[:2] if not isinstance(argument, ast.Starred)]
    if len(plain) == 2 and not _is_idle(function) and ast.dump(plain[0]) != ast.dump(plain[1]):
        swapped = ast.Call(function, [plain[1], plain[0], *arguments[2:]], keywords)
        yield node, "swapped arguments", ast.unparse(swapped)
    for index, keyword in enumerate(keywords):
        if keyword.arg and keyword.arg not in IDLE:
            fewer = ast.Call(function, arguments, keywords[:index] + keywords[index + 1 :])
            yield node, "removed argument", ast.unparse(fewer)


def _negated(test: ast.expr) -> Iterator[Change]:
    match test:
        case ast.Compare(ops=[_]) | ast.UnaryOp(op=ast.Not()):
            return  # the flipped comparison, or the sign, is this one
        case _:
            yield test, "condition", f"(not ({ast.unparse(test)}))"


def _is_idle(function: ast.expr) -> bool:
    return isinstance(function, ast.Name) and function.id in ALIKE


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
