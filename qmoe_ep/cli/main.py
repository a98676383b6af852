"""Where the command line enters: finds the command, and turns every failure into one line and an exit code."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click

import qmoe_ep
from qmoe_ep.cli.lazy import LazyGroup

__all__ = ["Settings", "debug_option", "json_option", "layout_option", "main", "model_argument"]

Command = TypeVar("Command", bound=Callable[..., Any])

BAD_INPUT, INTERNAL_ERROR, INTERRUPTED = 2, 1, 130

_COMMANDS = {
    "run": "Run a model on arrays of an .npz file.",
    "inspect": "List the QMoE nodes of a model.",
    "quantize": "Turn float MoE nodes into QMoE nodes.",
    "convert": "Change the order of packed weights between raw and SM80.",
    "compile": "Compile a model's GPU kernels ahead of time, without a GPU.",
    "telemetry": "Read what route telemetry recorded: which experts a service really uses.",
    "bench": "Time layers on a GPU beside the time that reading their bytes takes.",
    "doctor": "Say what of this machine can be used, and how to get the rest.",
}


@dataclass(slots=True)
class Settings:
    """What every command knows: ``debug`` shows tracebacks."""

    debug: bool = False


def _set_debug(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        context.ensure_object(Settings).debug = True


def debug_option(command: Command) -> Command:
    """Give a command the option ``--debug``."""
    return click.option(
        "--debug", is_flag=True, expose_value=False, callback=_set_debug, help="Show the traceback of an error."
    )(command)


def json_option(command: Command) -> Command:
    """Give a command the option ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")(command)


def layout_option(command: Command) -> Command:
    """Give a command the option ``--weights-layout``."""
    return click.option(
        "--weights-layout",
        type=click.Choice(["raw", "sm80"]),
        default=None,
        help="How packed weights are ordered, whatever the model says in weights_prepacked.",
    )(command)


def model_argument(command: Command) -> Command:
    """Give a command the argument MODEL."""
    return click.argument("model", type=click.Path(exists=True, dir_okay=False), metavar="MODEL.onnx")(command)


@click.group(cls=LazyGroup, package="qmoe_ep.cli", summaries=_COMMANDS, no_args_is_help=False)
@click.version_option(qmoe_ep.__version__, prog_name="qmoe-ep")
@debug_option
def cli() -> None:
    """Execute the ONNX operator com.microsoft::QMoE (quantized mixture of experts)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : without the program's name; those of the process by default

    Returns
    -------
    0 on success, 2 on bad usage or input, 1 on a fault of the package, 130 when interrupted. Whatever isn't
    success has said so in one line on standard error.
    """
    settings = Settings()
    arguments = None if arguments is None else list(arguments)
    try:
        with _warnings_on_success():
            result = cli.main(arguments, prog_name="qmoe-ep", standalone_mode=False, obj=settings)
        return result if isinstance(result, int) else 0
    except click.Abort:
        return _fail(INTERRUPTED, "interrupted")
    except click.UsageError as error:
        program = error.ctx.command_path if error.ctx else "qmoe-ep"
        return _fail(BAD_INPUT, f"{error.format_message()} (see {program} --help)")
    except click.ClickException as error:
        return _fail(BAD_INPUT, error.format_message())
    except Exception as error:
        if settings.debug:
            raise
        return _explain(error)


class _Held(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextlib.contextmanager
def _warnings_on_success() -> Iterator[None]:
    """Print the package's warnings at the end; a command that fails says only why."""
    log, handler = logging.getLogger("qmoe_ep"), _Held()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
    for record in handler.records:
        click.echo(f"qmoe-ep: {record.levelname.lower()}: {record.getMessage()}", err=True)


def _explain(error: Exception) -> int:
    from qmoe_ep.errors import CaptureError, CudaError, NvrtcError, QMoEError

    if isinstance(error, MemoryError):
        return _fail(BAD_INPUT, f"not enough memory: {error}")
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return _fail(BAD_INPUT, place + (error.strerror or str(error)))
    if isinstance(error, (QMoEError, CudaError, CaptureError)):
        return _fail(BAD_INPUT, str(error))
    if isinstance(error, NvrtcError):
        # Options and log follow on further lines; --debug shows them.
        return _fail(BAD_INPUT, str(error).partition("\n")[0])
    return _fail(INTERNAL_ERROR, f"{type(error).__name__}: {error} (unexpected; --debug shows where)")


def _fail(code: int, message: str) -> int:
    click.echo("qmoe-ep: " + " ".join(message.split()), err=True)
    return code
