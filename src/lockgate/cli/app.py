"""The app, and what becomes of an error.

Rule 1: an error is two lines, `error:` and `next step:`, or one JSON document with `--json`; never a traceback, which
        could hold values.
Rule 2: a reader that went away (`| head`) is no error.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

import typer

from lockgate.cli import (
    alerts,
    attack,
    audit,
    choose,
    corpus,
    demo,
    doctor,
    egress,
    env,
    gvisor,
    microvm,
    ops,
    policy,
    render,
    run,
    wasm,
)
from lockgate.cli.output import show_error
from lockgate.contract.errors import HostFault, LockgateError

app = typer.Typer(
    name="lockgate",
    help="Run generated code in a sandbox, and let it act through one authorize().",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.run)
app.command("demo", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("choose")(choose.choose_rung)
app.command("attack")(attack.attack)
app.command("ops")(ops.ops)
app.command("render")(render.render)
app.command("corpus")(corpus.corpus)
app.add_typer(policy.app, name="policy")
app.add_typer(env.app, name="env")
app.add_typer(wasm.app, name="wasm")
app.add_typer(gvisor.app, name="gvisor")
app.add_typer(microvm.app, name="microvm")
app.add_typer(audit.app, name="audit")
app.add_typer(alerts.app, name="alerts")
app.add_typer(egress.app, name="egress")


def run_app() -> NoReturn:
    """Run the verb in argv and exit."""
    sys.exit(guarded(sys.argv[1:]))


def guarded(argv: list[str]) -> int:
    """Run the verb in `argv`; returns the exit code."""
    try:
        code = _verb(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more at exit (docs.python.org, signal, "Note on SIGPIPE").
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


def _verb(argv: list[str]) -> int:
    as_json = "--json" in argv or "--jsonl" in argv
    try:
        done: Any = app(argv, standalone_mode=False)
    except LockgateError as error:
        return show_error(error, as_json=as_json)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - the last net: a kind and a place, no values
        return _other(error, as_json=as_json)
    return done if isinstance(done, int) else 0


def _other(error: Exception, *, as_json: bool) -> int:
    # typer carries its own copy of click in some versions, so usage errors are known by what they can do.
    message = getattr(error, "format_message", None)
    if callable(message) and isinstance(code := getattr(error, "exit_code", None), int):
        text = str(message())
        if not text and not as_json:  # nothing was asked for, and the help that was shown says what can be
            return code
        usage = UsageError(text or "no verb was named", next_step="see: lockgate --help, or --help behind the verb")
        show_error(usage, as_json=as_json)
        return code
    if type(error).__name__ == "Abort":
        return 130
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" at {os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}" if trace else ""  # noqa: PTH119
    fault = HostFault(f"lockgate failed ({type(error).__name__}{place})", next_step="report this")
    return show_error(fault, as_json=as_json)


class UsageError(LockgateError):
    """The command line itself is wrong."""

    code = "usage"
    fault = "caller"
    exit_code = 2
