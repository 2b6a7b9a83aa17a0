"""Run `ckptkit push`: upload a checkpoint to the Hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptkit.cli.consent import Yes
from ckptkit.cli.conversion import Jobs
from ckptkit.cli.output import Json, Quiet, note_used, pick, print_json, print_table, progress_bar, say
from ckptkit.cli.sources import Also, with_others
from ckptkit.io.path import to_path
from ckptkit.words import count, format_bytes

if TYPE_CHECKING:
    from ckptkit.hub.push import Pushed


def push(
    src: Annotated[
        Path,
        typer.Argument(
            parser=to_path, metavar="SRC", help="A model or checkpoint, or a run (its latest complete checkpoint)."
        ),
    ],
    repository: Annotated[
        str, typer.Argument(metavar="ORG/NAME", help="The repository on the Hub; ckptkit creates it if needed.")
    ],
    also: Also = None,
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository public; by default it is private.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="The branch; by default main. ckptkit creates it if needed.")
    ] = None,
    message: Annotated[str | None, typer.Option(metavar="TEXT", help="The commit message.")] = None,
    yes: Yes = False,
    jobs: Jobs = None,
    quiet: Quiet = False,  # noqa: ARG001 - its callback has done the work
    json: Json = False,
) -> None:
    """Push a model or checkpoint to the Hugging Face Hub.

    ckptkit verifies the checkpoint, sends it, and compares the copy on the Hub with it.

    The checkpoint appears on the Hub as a whole, in one commit. After an interruption, run the same command again: it
    does not send large files twice. ckptkit writes a model card if there is none. Log in with `hf auth login` first.

    Example: ckptkit push out org/model --yes

    Exit codes: 0 done, or (without --yes) only shown what would happen; 2 usage; 3 the checkpoint is damaged, here or
    on the Hub; 4 the Hub cannot be reached or refuses; 5 somebody else changed the repository meanwhile; 130
    interrupted.
    """
    from ckptkit.hub.push import push as run

    src = with_others(src, also)
    done = run(
        src, repository, public=public, revision=revision, message=message, yes=yes, jobs=jobs, bars=progress_bar
    )
    if json:
        print_json(to_json(done))
    else:
        report(src, done)


def to_json(done: Pushed) -> dict[str, Any]:
    """Return the result under the keys that scripts rely on."""
    return {
        **pick(
            done, "source", "revision", "url", "format", "removed", "left_out", "nbytes", "commit", "seconds", "notes"
        ),
        "repository": done.repo_id,
        "new": done.is_new,
        "private": done.is_private,
        "files": [{"name": name, "nbytes": nbytes} for name, nbytes in done.files.items()],
        "card_made": done.has_card,
        "pushed": done.is_done,
        "unchanged": sorted(done.unchanged),
    }


def report(src: Path, done: Pushed) -> None:
    """Print the result for a reader."""
    note_used(src, done.source)
    access = "private" if done.is_private else "public"
    destination = f"{done.url}{'' if done.revision == 'main' else f', branch {done.revision}'}"
    kind = f"{'new, ' if done.is_new else ''}{access}"
    say(f"{'pushed' if done.is_done else 'would push'} {done.source}")
    say(f"to {destination} ({kind})")
    print_table(list(rows(done)), ("  file", "size", "verdict"))
    for text in done.notes:
        say(f"note: {text}")
    amount = f"{count(len(done.files), 'file')}, {format_bytes(done.nbytes)}"
    if not done.is_done:
        say(f"would send {amount}; nothing was sent yet: pass --yes to send it")
        return
    is_same = len(done.unchanged) == len(done.files) and not done.removed
    say(f"{amount} in {done.seconds:.2f} s{'; nothing had changed, nothing was sent' if is_same else ''}")
    say(f"every size and checksum on the Hub matches the file here; commit {(done.commit or '')[:8]}")
    at = "" if done.revision == "main" else f"@{done.revision}"
    say(f"to get a copy elsewhere: ckptkit pull {done.repo_id}{at} {done.repo_id.partition('/')[2]}")


def rows(done: Pushed) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of the table; of more than 20 files, the first and last 9."""
    files = [(f"  {name}", format_bytes(nbytes), verdict(done, name)) for name, nbytes in done.files.items()]
    yield from files if len(files) <= 20 else [*files[:9], (f"  ... {len(files) - 18} more", "", ""), *files[-9:]]
    for name in done.removed:
        yield f"  {name}", "", f"{'removed' if done.is_done else 'remove'}: of an earlier checkpoint"
    for name, reason in done.left_out.items():
        yield f"  {name}", "", f"left out: {reason}"


def verdict(done: Pushed, name: str) -> str:
    """Return the cell that says what push does with a file."""
    if name in done.unchanged:
        return "unchanged"
    is_made = done.has_card and name == "README.md"
    return f"{'pushed' if done.is_done else 'push'}{': a model card that ckptkit made' if is_made else ''}"
