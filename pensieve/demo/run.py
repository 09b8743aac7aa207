"""``pensieve demo``: shows what a server's memory is worth, and that no data is lost when the server is killed.

Three acts (``long_talk``, ``crowd``, ``killed``) start their own servers and check every answer and receipt.
Their facts and questions need the demo model; a real model plays one act, like the first.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.text import Text

from pensieve import extras
from pensieve.demo import crowd, killed, long_talk
from pensieve.demo.conversations import conversations
from pensieve.demo.exchange import ServerRun
from pensieve.errors import PensieveError
from pensieve.model.arch import ModelError
from pensieve.model.smollm2 import SMOLLM2, smollm2
from pensieve.own_server import explain_failure
from pensieve.spawn import SpawnError

SHOWN_PROBLEMS = 10
CONTEXT_TOKENS = 5000
SECOND_ACT_OPTIONS = ("sessions", "turns", "device_cache", "host_cache", "chunk_tokens")


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option(
    "--model",
    default="demo",
    type=click.Choice(["demo", SMOLLM2]),
    help="`smollm2`: a real model of 135 M parameters, fetched once (93 MB); one act.",
)
@click.option(
    "--context",
    type=click.IntRange(300, 7000),
    metavar="TOKENS",
    help=f"First act: how long the conversation grows.  "
    f"[default: {CONTEXT_TOKENS}; smollm2: {long_talk.REAL_CONTEXT_TOKENS}]",
)
@click.option(
    "--sessions", default=16, type=click.IntRange(1, 200), help="Second act: conversations at once."
)
@click.option("--turns", default=8, type=click.IntRange(2, 60), help="Second act: turns of each of them.")
@click.option(
    "--device-cache", default="768tokens", metavar="SIZE", help="Second act: size of the first tier."
)
@click.option(
    "--host-cache", default="1920tokens", metavar="SIZE", help="Second act: size of the second tier."
)
@click.option("--chunk-tokens", default=8, metavar="N", help="Second act: tokens per chunk.")
@click.option("--seed", default=1, metavar="N", help="Which conversations.")
@click.option("--verbose", is_flag=True, help="Print every line that was said, with its receipt.")
@click.option("--quiet", is_flag=True, help="Print only how each act ended.")
def demo(
    model: str,
    context: int | None,
    seed: int,
    verbose: bool,
    quiet: bool,
    **crowded: Any,
) -> None:
    """Watch a small model remember: no GPU, no download, about a minute.

    With --model smollm2 a real model is fetched once, and there is one act: a long message, then short turns, on a
    server that keeps its state, beside one that starts every turn from nothing. It takes longer.

    First act: one long conversation on a server that keeps its state, beside the same conversation on a server that
    starts every turn from nothing; the time to the first token of every turn, and how many times sooner it comes.

    Second act: many conversations on memory far too small for them. Their state is swapped out and in, dropped,
    recomputed; running answers are suspended; every answer still has to be right.

    Third act: a server is killed in the middle of an answer and started again; the answer goes on, and the next
    question is answered from memory.

    Exits with 1 if an answer is wrong, a receipt does not add up, or a path of the cache was not taken.
    """
    if verbose and quiet:
        raise click.UsageError("--verbose and --quiet do not go together")
    if model == SMOLLM2:
        _refuse_second_act()
    extras.require("server")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without bars gets "?"
    started = time.perf_counter()
    console = Console(highlight=False)
    show = Show(console, Console(highlight=False, quiet=quiet), verbose)
    try:
        with _terminated_like_interrupted():
            if model == SMOLLM2:
                problems = only_act(context or long_talk.REAL_CONTEXT_TOKENS, seed, show)
            else:
                problems = first_act(context or CONTEXT_TOKENS, seed, show)
                problems += second_act(seed, show, **crowded)
                problems += third_act(seed, show)
    except ModelError as error:
        raise click.UsageError(str(error)) from error
    except SpawnError as error:
        raise click.ClickException(explain_failure(error)) from error
    except PensieveError as error:
        raise click.ClickException(str(error)) from error
    for problem in problems[:SHOWN_PROBLEMS]:
        console.print(Text(problem, "red"))
    if problems:
        console.print(Text(f"FAILED: {len(problems)} of the checks, see above", "bold red"))
        sys.exit(1)
    well = "Both servers give the same answers" if model == SMOLLM2 else "Every answer is right"
    console.print(f"[bold green]{well} and every receipt adds up.[/] ({time.perf_counter() - started:.0f} s)")
    show.stage.print(Text(what_next(sys.argv[0], model)))


@dataclass(frozen=True, slots=True)
class Show:
    """The command's output: results on ``console``, the rest on ``stage``, which ``--quiet`` silences."""

    console: Console
    stage: Console
    verbose: bool

    def after_act(self, *runs: ServerRun) -> None:
        """Print the transcript if requested, and how often a server was killed from outside."""
        if self.verbose:
            print_transcript(runs[0], self.stage)
        for run in runs:
            if run.interruptions:
                self.console.print(Text(run.interruptions, "yellow"))


def _refuse_second_act() -> None:
    context = click.get_current_context()
    for name in SECOND_ACT_OPTIONS:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} is for the demo model; it does not go with --model {SMOLLM2}")


def only_act(context: int, seed: int, show: Show) -> list[str]:
    """Hold a long message and short turns with a real model on two servers. Return the problems, one per line."""
    smollm2()  # fetched here, with a progress bar: the servers' output is hidden
    servers = long_talk.real_servers(SMOLLM2)
    show.stage.print("[bold]A real model reads a long message; short turns follow[/]")
    show.stage.print(serve_line(servers[long_talk.STATEFUL], "Pensieve:  "), style="dim")
    show.stage.print("   stateless: the same with --stateless", style="dim")
    stateful, stateless = long_talk.serve_and_hold(long_talk.real_script(context, seed), show.stage, servers)
    show.after_act(stateful, stateless)
    show.console.print(Text(long_talk.result(stateful, stateless, long_talk.REAL_LAST_TURNS), "bold"))
    return long_talk.problems(stateful, stateless)


def first_act(context: int, seed: int, show: Show) -> list[str]:
    show.stage.print(
        "[bold]1. One conversation that grows, with its state kept and with its state forgotten[/]"
    )
    show.stage.print(serve_line(long_talk.SERVERS[long_talk.STATEFUL], "Pensieve:  "), style="dim")
    show.stage.print("   stateless: the same with --stateless", style="dim")
    stateful, stateless = long_talk.serve_and_hold(long_talk.script(context, seed), show.stage)
    show.after_act(stateful, stateless)
    show.console.print(Text(long_talk.result(stateful, stateless), "bold"))
    problems = long_talk.problems(stateful, stateless)
    if not problems:
        show.console.print(
            f"All {len(stateful.exchanges)} answers are the same on both,"
            f" {stateful.asked} of {stateful.asked} recalled facts right;\n"
            f"{2 * len(stateful.exchanges)} receipts add up.\n"
        )
    return problems


def second_act(seed: int, show: Show, sessions: int, turns: int, **sizes: Any) -> list[str]:
    """Hold many conversations at once. ``sizes``: options of the server, by name."""
    scripts = conversations(sessions, turns, seed)
    tiers = [word for name, size in sizes.items() for word in (f"--{name.replace('_', '-')}", str(size))]
    # No reserve, so that answers get suspended.
    options = ["--model", "demo", "--max-wait", "0", *tiers, "--decode-reserve", "0"]
    show.stage.print(f"[bold]2. {len(scripts)} conversations at once, on memory far too small for them[/]")
    show.stage.print(serve_line(options), style="dim")
    act = crowd.serve_and_hold(options, scripts, show.stage)
    show.after_act(act.run)
    show.console.print(crowd.result(act))
    if act.suspensions == 0:
        show.stage.print(
            "no answer had to be suspended this time; a smaller --device-cache shows it", style="dim"
        )
    return crowd.problems(act)


def third_act(seed: int, show: Show) -> list[str]:
    show.stage.print("\n[bold]3. A server that is killed in the middle of an answer[/]")
    show.stage.print(serve_line(["--model", "demo", "--store", "sqlite:///FILE"]), style="dim")
    run = killed.serve_and_hold(killed.script(seed), show.stage)
    show.stage.print()
    show.console.print(Text(killed.result(run), "bold"))
    show.stage.print()
    return killed.problems(run)


def serve_line(options: Sequence[str], label: str = "") -> str:
    """Return the command that starts such a server, wrapped for a narrow terminal; an option stays beside its
    value."""
    bound = " ".join(options).replace(" ", "\xa0").replace("\xa0--", " --")
    lines = textwrap.wrap(
        f"{label}pensieve\xa0serve {bound}",
        78,
        initial_indent="   ",
        subsequent_indent="     ",
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace("\xa0", " ")


def print_transcript(run: ServerRun, console: Console) -> None:
    for number, conversation in enumerate(run.conversations, 1):
        console.rule(f"conversation {number}", align="left")
        for exchange in conversation:
            usage = exchange.turn.usage
            mark = Text()
            if exchange.said.expected is not None:
                mark = Text(" ✓", "green") if exchange.is_right else Text(" ✗ WRONG", "red")
            console.print(Text.assemble(("you    ", "bold"), exchange.said.text))
            console.print(Text.assemble(("model  ", "bold"), exchange.turn.text.strip(), mark))
            console.print(
                f"       {usage.context_tokens} context = {usage.gpu_cached_tokens} device"
                f" + {usage.swapped_in_tokens} host + {usage.recomputed_tokens} recomputed + {usage.new_tokens} new"
                f" → {usage.output_tokens} output",
                style="dim",
            )


def what_next(program: str, model: str = "demo") -> str:
    """Return what to try next, with a path to the command that works in the caller's directory."""
    command = program_name(program)
    rest = "" if model == "demo" else f" --model {model}"
    lines = {
        f"chat{rest}": "talk to it yourself",
        f"serve{rest}": "a server for your programs",
        f"demo{rest} --verbose": "with every line",
    }
    width = max(map(len, lines))
    return "\nNow try:\n" + "\n".join(f"  {command} {call:<{width}}  {what}" for call, what in lines.items())


def program_name(program: str) -> str:
    """Return how the caller's shell finds ``program``: its bare name, a relative path, or Python with ``-m``."""
    path = Path(program)
    if path.name != "pensieve":
        return f"{shlex.quote(sys.executable)} -m pensieve"
    found = shutil.which("pensieve")
    if found is not None and Path(found).samefile(path):
        return "pensieve"
    with contextlib.suppress(ValueError):
        path = path.absolute().relative_to(Path.cwd())
    return shlex.quote(str(path) if len(path.parts) > 1 else f"./{path}")


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """End the demo on SIGTERM and SIGHUP as on Ctrl-C: together with its servers."""
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
