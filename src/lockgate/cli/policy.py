"""`lockgate policy`: ask what would happen, and test that it does. Nothing is executed.

Cases for `policy test` are JSON Lines, one object a line (blank lines and lines that begin with # are skipped), or TOML
with one [[case]] each, and have these keys:

    scope   the scope: an object, or the path of a TOML or JSON file relative to the file of cases. A case without one
            takes that of the case before.
    call    name of the operation.
    args    its arguments, an object; default {}.
    expect  "allow", "deny" or "needs_approval".
    rule    optional: the rule that must have decided.
    reason  optional: what code and model must be told, a member of the closed list.
    name    optional: shown when the case fails.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer
from rich.text import Text

from lockgate import config as configuration
from lockgate.cli.common import ConfigPath, arguments, gate_of, load_config, load_scope, read_text
from lockgate.cli.output import Json, fields, note, print_json, table
from lockgate.contract.errors import ConfigError
from lockgate.policy import Scope

app = typer.Typer(help="Ask the policy, and test it.", no_args_is_help=True)


@app.command("explain")
def explain(
    operation: Annotated[str, typer.Argument(help="Name of the operation.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="Arguments.")] = None,
    *,
    scope: Annotated[Path, typer.Option(help="Scope, TOML or JSON.")] = Path("scope.toml"),
    raw: Annotated[str | None, typer.Option("--args", help="Arguments as a JSON object.")] = None,
    config: ConfigPath = None,
    as_json: Json = False,
) -> None:
    """Say what would happen to a call, by which rule, and what code would be told."""
    data = load_scope(scope)
    values = arguments(args or [], raw)
    with gate_of(load_config(config, required=True), pool=0, accept=False, quiet=as_json) as gate:
        verdict = gate.explain(data, operation, values)
    line = _line(scope, verdict.get("rule"))
    if as_json:
        print_json({"operation": operation, "arguments": values, **verdict, "line": line})
        return
    fields(
        [
            ("call", f"{operation} {msgspec.json.encode(values).decode()}"),
            ("verdict", verdict.get("effect")),
            ("rule", verdict.get("rule") or "(nothing allows it)"),
            ("argument", verdict.get("path")),
            ("reason", verdict.get("reason")),
            ("code is told", verdict.get("visible")),
            ("file", f"{scope}:{line}" if line else str(scope)),
        ]
    )


def _line(scope: Path, rule: str | None) -> int | None:
    """Return the line of the scope's file that a rule stands in, if that can be told."""
    if rule is None or scope.suffix == ".json":
        return None
    text = read_text(scope, "the scope")
    operation, _, rest = rule.partition(".")
    for path in (
        f"allow.{operation}.args.{rest}",
        f"allow.{operation}.{rest}",
        f"deny.{operation}",
        f"allow.{operation}",
    ):
        if (line := configuration.line_of(text, path)) is not None:
            return line
    return None


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One expectation."""

    call: str
    expect: Literal["allow", "deny", "needs_approval"]
    scope: dict[str, Any] | str | None = None
    args: dict[str, Any] = {}
    rule: str | None = None
    reason: str | None = None
    name: str | None = None


@app.command("test")
def run_cases(
    file: Annotated[Path, typer.Argument(help="Cases: JSON Lines, or TOML with \\[\\[case]].")],
    config: ConfigPath = None,
    as_json: Json = False,
) -> None:
    """Run a file of expectations. Exits 1 when one is not met."""
    cases = load_cases(file)
    results: list[dict[str, Any]] = []
    with gate_of(load_config(config, required=True), pool=0, accept=False, quiet=as_json) as gate:
        for place, case, scope in cases:
            verdict = gate.explain(scope, case.call, case.args)
            got = (verdict.get("effect"), verdict.get("rule"), verdict.get("visible"))
            wrong = [
                f"{what} is {is_!r}, expected {want!r}"
                for what, is_, want in (
                    ("verdict", got[0], case.expect),
                    ("rule", got[1], case.rule),
                    ("reason", got[2], case.reason),
                )
                if want is not None and is_ != want
            ]
            name = case.name or f"{case.call} {msgspec.json.encode(case.args).decode()}"
            results.append(
                {"case": place, "name": name, "ok": not wrong, "wrong": wrong, "verdict": got[0], "rule": got[1]}
            )
    failed = [one for one in results if not one["ok"]]
    if as_json:
        print_json({"cases": len(results), "failed": len(failed), "results": results})
    else:
        if failed:
            table(
                f"{len(failed)} of {len(results)} cases failed",
                ("case", "name", "what is wrong"),
                [(one["case"], one["name"], Text("; ".join(one["wrong"]), style="red")) for one in failed],
            )
        note(f"{len(results) - len(failed)} of {len(results)} cases hold", style="red" if failed else "green")
    if failed:
        raise typer.Exit(1)


def load_cases(file: Path) -> list[tuple[int, Case, Scope]]:
    """Read a file of cases: place (line, or number of the [[case]]), case and its scope.

    Raises:
        ConfigError: it is malformed, or has no case. ScopeError: a scope is.

    """
    found: list[tuple[int, Case, Scope]] = []
    scope: Scope | None = None
    for place, data in _raw_cases(file):
        try:
            case = msgspec.convert(data, Case)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"{file}, case {place}: {error}", next_step="see the form of a case: lockgate policy test --help"
            ) from None
        if isinstance(case.scope, str):
            scope = load_scope(file.parent / case.scope)
        elif case.scope is not None:
            scope = Scope.from_data(case.scope)
        if scope is None:
            raise ConfigError(f"{file}, case {place}: there is no scope", next_step="give the first case a scope")
        found.append((place, case, scope))
    if not found:
        raise ConfigError(f"{file} has no case", next_step="write at least one; a policy is tested by a denial too")
    return found


def _raw_cases(file: Path) -> list[tuple[int, Any]]:
    text = read_text(file, "the file of cases")
    if file.suffix == ".toml":
        try:
            data = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ConfigError(f"{file} is not valid TOML: {error}", next_step="correct that place") from None
        cases: Any = data.get("case")
        if set(data) != {"case"} or not isinstance(cases, list):
            raise ConfigError(f"{file} has other tables than [[case]]", next_step="write one [[case]] for each case")
        return list(enumerate(cases, 1))  # pyright: ignore[reportUnknownArgumentType]
    found: list[tuple[int, Any]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            found.append((number, json.loads(line)))
        except (ValueError, RecursionError):
            raise ConfigError(f"{file} line {number} is not JSON", next_step="write one JSON object a line") from None
    return found
