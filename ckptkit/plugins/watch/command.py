"""Run `ckptkit watch`, which runs commands on each new checkpoint."""

from __future__ import annotations

import shlex
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptkit.cli.output import Json, pick, print_json, print_note, print_text_line, reserve_stdout
from ckptkit.errors import Usage
from ckptkit.io.path import to_uncached_path

if TYPE_CHECKING:
    from ckptkit.plugins.watch.watch import Event


def watch(
    run: Annotated[
        Path,
        typer.Argument(parser=to_uncached_path, metavar="RUN", help="The run: a directory, or s3://bucket/prefix."),
    ],
    do: Annotated[
        list[str] | None,
        typer.Option(metavar="'COMMAND ...'", help="A command of ckptkit, such as 'consolidate {ckpt} {out}'."),
    ] = None,
    execute: Annotated[
        list[str] | None,
        typer.Option(
            "--exec", metavar="'PROGRAM ...'", help="Another program. Runs after all --do commands, in the given order."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=to_uncached_path, metavar="DIR", help="Directory for {out}; by default `exported` in the run."
        ),
    ] = None,
    every: Annotated[float, typer.Option(metavar="SECONDS", help="Seconds between two checks of the run.")] = 30.0,
    tries: Annotated[int, typer.Option(min=1, metavar="N", help="How many times to try a command that fails.")] = 3,
    timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="The longest time that a command may run; by default a day."),
    ] = 86400.0,
    once: Annotated[
        bool, typer.Option("--once", help="Handle the checkpoints that are complete now, then exit; for cron.")
    ] = False,
    json: Json = False,
) -> None:
    """Run commands on each checkpoint as soon as it is complete.

    In your commands, {ckpt} is the path of the checkpoint, {name} its name, {step} its step, {out} a path for the
    output, and {prev} the checkpoint that was handled before it. The commands run one after the other, each in a
    process of its own and without a shell. They also get these values as environment variables: CKPTKIT_CKPT, _NAME,
    _STEP, _OUT and _PREV.

    watch handles a checkpoint when it is complete and has not changed for --every seconds; prune does not delete it
    meanwhile. watch tries a failed command again, with exponential backoff. If a command runs longer than --timeout,
    watch stops it and its child processes, and then tries it again too. `.ckptkit-watch` in the run lists handled
    checkpoints, so a restart does not repeat them. For a run on s3:// that list is in the cache of this machine, and
    {out} is on s3:// too, unless --out is a local directory.

    Example: ckptkit watch run --do 'consolidate {ckpt} {out} --dtype bf16' --exec 'python evaluate.py {out}'

    Exit codes: 0 all checkpoints were handled (only with --once); 1 some failed; 2 usage; 3 RUN is not a run; 4 an I/O
    failure; 5 a watch with the same commands is running; 130 interrupted; 143 terminated.
    """
    from ckptkit.cli.commands import COMMANDS, SYNONYMS
    from ckptkit.plugins.watch.watch import watch as run_it

    if json and not once:
        raise Usage("--json prints one object at the end, but a watch does not end", hint="add --once")
    for line in do or ():
        words: list[str] = []
        with suppress(ValueError):  # WatchCommand.parse reports it
            words = shlex.split(line)
        if words and words[0] not in {*COMMANDS, *SYNONYMS}:
            near = get_close_matches(words[0], COMMANDS, n=1)
            hint = f"there is `{near[0]}`" if near else "use --exec to run another program"
            raise Usage(f"unknown command `{words[0]}`", hint=hint)
    reserve_stdout()
    done = run_it(
        run,
        do=do or (),
        exec=execute or (),
        out=out,
        every=every,
        tries=tries,
        timeout=timeout,
        once=once,
        tell=None if json else print_event,
    )
    if json:
        result = {"ok": done.is_ok, **pick(done, "root", "handled", "failed", "missed", "before")}
        print_json({**result, "reasons": {str(path): reason for path, reason in done.reasons.items()}})
    else:
        for line in done.summary():
            print_text_line(line)
    if not done.is_ok:
        raise typer.Exit(1)


def print_event(event: Event) -> None:
    """Print an outcome as a line on stdout, and progress as a note."""
    line = f"{event.checkpoint.name}: {event.message}"
    if event.outcome is None:
        print_note(line)
    else:
        print_text_line(line)
