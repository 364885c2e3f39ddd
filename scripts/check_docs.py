"""Check that the documents are true: code blocks type-check, marked ones run, tables equal the code.

    python scripts/check_docs.py [--write] [--no-run]

Rule 1: every Python block of README.md and docs/ passes mypy --strict, with the files that its page names; so does
        examples/atlas.
Rule 2: a page in `RUN` is executed from top to bottom in an empty directory: files by their title, `$` lines in
        order; what the page shows as output must come out.
Rule 3: what stands between `<!-- generated: NAME -->` and `<!-- end -->` is written by `--write`, and compared without.
"""

from __future__ import annotations

import argparse
import inspect
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.main import get_command

from lockgate import config
from lockgate.cli.app import app
from lockgate.contract import errors, rungs
from lockgate.contract.bounds import TABLE, Bounds
from lockgate.contract.reasons import SENTENCES
from lockgate.contract.rungs import BOUNDARIES
from lockgate.policy import egress_reasons, egress_spec
from lockgate.policy.choose import CANNOT, CODE, LEVELS, LIVES, ORDER, REACHES, STRENGTH

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = {"docs/tutorial.md", "docs/how-to/egress-run.md"}
FENCE = re.compile(
    r"(?P<mark><!-- run -->\n)?^```(?P<lang>\w+)(?P<rest>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
GENERATED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
SECONDS = 60


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its file name if it has one, its text, whether it is marked to run."""

    page: str
    line: int
    language: str
    title: str | None
    body: str
    run: bool


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page."""
    text = page.read_text()
    for found in FENCE.finditer(text):
        title = re.search(r'title="([^"]+)"', found["rest"])
        line = text.count("\n", 0, found.start()) + 1
        name = str(page.relative_to(ROOT))
        yield Block(name, line, found["lang"], title[1] if title else None, found["body"], found["mark"] is not None)


def group_of(page: str) -> str:
    """Pages that share files: those of one folder, except pages that are run, which stand alone."""
    return page if page in RUN or "/" not in page else str(Path(page).parent)


# ---- types -------------------------------------------------------------------------------------------------------
def type_check(found: list[Block]) -> list[str]:
    """Return what mypy says about the Python blocks."""
    problems: list[str] = []
    groups: dict[str, list[Block]] = {}
    for block in found:
        if block.language == "python":
            groups.setdefault(group_of(block.page), []).append(block)
    for group in groups.values():
        with tempfile.TemporaryDirectory() as folder:
            names: dict[str, str] = {}
            for number, block in enumerate(group):
                name = block.title or f"block_{number}.py"
                names[name] = f"{block.page}:{block.line}"
                (Path(folder) / name).write_text(block.body)
            options = ["--strict", "--no-error-summary", "--cache-dir", str(ROOT / ".cache" / "mypy-docs")]
            done = subprocess.run(
                [sys.executable, "-m", "mypy", *options, *sorted(names)],
                cwd=folder,
                env={"MYPYPATH": str(ROOT / "src"), "PATH": os.defpath},
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            for line in (done.stdout + done.stderr).splitlines():
                name, colon, rest = line.partition(":")
                problems.append(f"{names.get(name, name)}{colon}{rest}")
            if done.returncode and not done.stdout and not done.stderr:
                problems.append(f"mypy ended with {done.returncode}")
    return problems


def examples() -> list[str]:
    """Return what mypy says about the worked example, which README.md sends readers to."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--no-error-summary",
            "--cache-dir",
            ROOT / ".cache" / "mypy-docs",
            ".",
        ],
        cwd=ROOT / "examples" / "atlas",
        env={"MYPYPATH": str(ROOT / "src"), "PATH": os.defpath},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return [f"examples/atlas/{line}" for line in (done.stdout + done.stderr).splitlines()]


# ---- runs --------------------------------------------------------------------------------------------------------
def run_pages(found: list[Block]) -> list[str]:
    """Return what did not come out as the pages say."""
    problems: list[str] = []
    marked = [block for block in found if block.run and block.language == "python"]
    for page in sorted(RUN):
        problems += run_page([block for block in found if block.page == page])
    for block in marked:
        with tempfile.TemporaryDirectory() as folder:
            write_files(Path(folder), [one for one in found if group_of(one.page) == group_of(block.page)])
            problems += execute(block, [sys.executable, "-c", block.body], Path(folder), [])
    return problems


def write_files(folder: Path, found: list[Block]) -> None:
    """Write the blocks that have a file name."""
    for block in found:
        if block.title is not None:
            (folder / block.title).write_text(block.body)


def run_page(found: list[Block]) -> list[str]:
    """Run the `$` lines of one page."""
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for block in found:
            write_files(folder, [block])
            if block.language != "console":
                continue
            parts = re.split(r"^\$ (.*)\n", block.body, flags=re.MULTILINE)[1:]
            for command, output in zip(parts[::2], parts[1::2], strict=True):
                problems += execute(block, shlex.split(command), folder, output.splitlines())
    return problems


def execute(block: Block, argv: list[str], folder: Path, expected: list[str]) -> list[str]:
    """Run one command; return what was wrong with it."""
    binaries = Path(sys.executable).parent
    program = binaries / argv[0]
    argv = [str(program if program.exists() else argv[0]), *argv[1:]]
    where, what = f"{block.page}:{block.line}", shlex.join([program.name, *argv[1:3]])
    try:
        done = subprocess.run(
            argv,
            cwd=folder,
            env={"PATH": f"{binaries}:{os.defpath}", "HOME": str(folder), "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [f"{where}: {what} took over {SECONDS} s"]
    if done.returncode:
        return [f"{where}: {what} exited {done.returncode}: {(done.stderr or done.stdout)[-1500:]}"]
    printed = {" ".join(line.split()) for line in done.stdout.splitlines()}
    return [f"{where}: did not print {line!r}" for line in expected if line and " ".join(line.split()) not in printed]


# ---- tables ------------------------------------------------------------------------------------------------------
def table(head: list[str], rows: list[list[Any]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |\n" for row in lines)


def bounds_table() -> str:
    """The bounds of a run, from the contract."""
    words = dict(re.findall(r"^ {8}(\w+): (.+?)\.?$", inspect.getdoc(Bounds) or "", re.MULTILINE))
    words = words or dict(re.findall(r"^\s*(\w+): (.+?)\.?$", inspect.getdoc(Bounds) or "", re.MULTILINE))
    default = Bounds()
    rows = [
        [
            f"`{one.name}`",
            words[one.name],
            f"{getattr(default, one.name):,}".removesuffix(".0"),
            f"{one.ceiling:,.0f}",
            one.owner,
            one.at_limit,
        ]
        for one in TABLE
    ]
    return table(["bound", "what it counts", "default", "ceiling", "who holds it", "at the limit"], rows)


def errors_table() -> str:
    """The typed errors, from the contract."""
    kinds = [
        kind
        for kind in vars(errors).values()
        if inspect.isclass(kind) and issubclass(kind, errors.LockgateError) and kind is not errors.LockgateError
    ]
    rows = [
        [
            f"`{kind.__name__}`",
            f"`{kind.code}`",
            kind.fault,
            kind.exit_code,
            (inspect.getdoc(kind) or "").split("\n")[0],
        ]
        for kind in kinds
    ]
    return table(["type", "code", "whose fault", "exit", "when"], rows)


def reasons_table() -> str:
    """The reasons that code may see, from the contract."""
    return table(["reason", "what it says", "next step"], [[f"`{key}`", *value] for key, value in SENTENCES.items()])


def egress_reasons_table() -> str:
    """The closed list of the egress half."""
    rows = [[f"`{key}`", *value] for key, value in egress_reasons.SENTENCES.items()]
    return table(["reason", "what it says", "next step"], rows)


# What a table cannot be without, to learn the defaults of the rest.
NEEDED: dict[Any, dict[str, str]] = {config.Secret: {"ref": ""}, config.AlertSink: {"kind": "file"}}


TABLES_OF_THEIR_OWN = ("base", "bounds", "limits", "sinks", "gvisor", "microvm", "wasm")


def config_table() -> str:
    """The keys of the file, from its types."""
    parts: list[str] = []
    for name, kind in (
        ("(top)", config.Config),
        ("[audit]", config.Audit),
        ("[execution]", config.Execution),
        ("[execution.gvisor]", rungs.GvisorChoices),
        ("[execution.microvm]", rungs.MicrovmChoices),
        ("[execution.wasm]", rungs.WasmChoices),
        ("[broker]", config.Broker),
        ("[secrets.NAME]", config.Secret),
        ("[backends.NAME]", config.Backend),
        ("[render]", config.Render),
        ("[alerts]", config.Alerts),
        ("[alerts.sinks.NAME]", config.AlertSink),
        ("[egress]", egress_spec.EgressSpec),
        ("[egress.limits]", egress_spec.Limits),
    ):
        text = " ".join((inspect.getdoc(kind) or "").split())
        for field in kind.__struct_fields__:
            if field in TABLES_OF_THEIR_OWN or (name == "(top)" and field != "operations"):
                continue
            found = re.search(rf"\b{field}`?: (.+?)(?=(?: `?\w+`?: )|$)", text)
            default = getattr(kind(**NEEDED.get(kind, {})), field)
            shown = (
                "" if default in (None, "", ()) else f"`{default}`".replace("True", "true").replace("False", "false")
            )
            parts.append(f"{name}\0{field}\0{shown}\0{found[1].strip().rstrip('.') if found else ''}")
    rows = [[f"`{a}`", f"`{b}`", c, d] for a, b, c, d in (part.split("\0") for part in parts)]
    return table(["table", "key", "default", "meaning"], rows)


def choose_table() -> str:
    """The chooser's tables, from its code."""
    levels = table(
        ["code \\ an escape reaches", *(f"`{one}`" for one in REACHES)],
        [[f"`{code}`", *(LEVELS[code][one] for one in REACHES)] for code in CODE],
    )
    kinds = table(
        ["rung", "boundary", "good for level", "cannot give"],
        [
            [
                f"`{rung}`",
                BOUNDARIES[rung],
                strength,
                "; ".join(f"`{need}`: {why}" for need, why in CANNOT[rung].items()),
            ]
            for rung, strength in STRENGTH.items()
        ],
    )
    order = table(["lives", "tried in this order"], [[f"`{lives}`", ", ".join(ORDER[lives])] for lives in LIVES])
    return f"{levels}\n{kinds}\n{order}"


def adr_table() -> str:
    """The list of decisions, from their files."""
    rows: list[list[Any]] = []
    for page in sorted((ROOT / "docs" / "adr").glob("[0-9]*.md")):
        title = page.read_text().split("\n", 1)[0].lstrip("# ").strip()
        title = re.sub(r"^(ADR\s*)?\d{4}\s*[:.-]?\s*", "", title)
        rows.append([page.name[:4], f"[{title}]({page.name})"])
    return table(["no.", "decision"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "bounds": bounds_table,
    "errors": errors_table,
    "reasons": reasons_table,
    "egress_reasons": egress_reasons_table,
    "config": config_table,
    "choose": choose_table,
    "adr": adr_table,
}


def cli_text() -> str:
    """The commands with their help, as the program prints it."""
    parts: list[str] = []

    def walk(command: Any, path: str) -> None:
        children = getattr(command, "commands", {})
        if not children:
            params = [one for one in command.params if one.name != "help"]
            rows: list[list[Any]] = []
            for one in params:
                names = [*one.opts, *one.secondary_opts]  # --this and --no-this
                name = ", ".join(names) if one.param_type_name == "option" else one.metavar or one.name
                rows.append([f"`{name}`", " ".join((getattr(one, "help", "") or "").split())])
            text = inspect.cleandoc(command.help or "").split("\f")[0].strip()
            parts.append(f"### `{path}`\n\n{text}\n\n" + (table(["option", "meaning"], rows) if rows else ""))
        for name, child in children.items():
            if not child.hidden:
                walk(child, f"{path} {name}")

    walk(get_command(app), "lockgate")
    return "\n".join(parts)


TABLES["cli"] = cli_text


def generated(*, write: bool) -> list[str]:
    """Return the pages whose tables are not those of the code; write them instead with `write`."""
    problems: list[str] = []
    for page in PAGES:
        text = page.read_text()
        fresh = GENERATED.sub(lambda found: found[1] + "\n" + TABLES[found[2]]() + "\n" + found[3], text)
        if fresh != text and write:
            page.write_text(fresh)
        elif fresh != text:
            problems.append(f"{page.relative_to(ROOT)}: a table is stale. Next step: scripts/check_docs.py --write")
    return problems


def main() -> int:
    """Return 1 when a document is not true."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the generated tables")
    parser.add_argument("--no-run", action="store_true", help="do not run the pages, only type-check them")
    options = parser.parse_args()
    problems = generated(write=options.write)
    found = [block for page in PAGES for block in blocks(page)]
    problems += type_check(found) + examples()
    if not options.no_run:
        problems += run_pages(found)
    for problem in problems:
        print(problem, file=sys.stderr)
    python = sum(1 for block in found if block.language == "python")
    print(f"{len(PAGES)} pages, {python} Python blocks type-checked, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
