"""Run `ckptkit push` and `ckptkit pull`: send a checkpoint to the Hub, or fetch one."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptkit.cli.conversion import Yes, shared_options
from ckptkit.cli.options import Also, given_settings, join_also_directories, with_options
from ckptkit.cli.output import (
    Json,
    pick,
    print_files,
    print_json,
    print_table,
    print_text_line,
    print_used_checkpoint,
    progress_bar,
    without_middle,
)
from ckptkit.io.path import to_local_path, to_path
from ckptkit.settings import Setting
from ckptkit.words import count, format_bytes

if TYPE_CHECKING:
    from ckptkit.plugins.hub.push import Pushed


_PUSH_OPTIONS = {
    "public": Setting(bool, False, "Make a new repository public; by default it is private."),
    "revision": Setting(str, None, "The branch; by default main. ckptkit creates it if needed.", "BRANCH"),
    "message": Setting(str, None, "The commit message.", "TEXT"),
    **shared_options("jobs"),
}
_PULL_OPTIONS = {
    "revision": Setting(str, None, "A branch, a tag or a commit.", "REVISION"),
    "include": Setting(tuple[str, ...], (), "Pull only matching files; repeatable.", "GLOB"),
    "exclude": Setting(tuple[str, ...], (), "Skip matching files; repeatable.", "GLOB"),
    **shared_options("overwrite", "jobs", "sync"),
}


@with_options(_PUSH_OPTIONS, insert_before="yes")
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
    yes: Yes = False,
    json: Json = False,
    **options: Any,
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
    from ckptkit.plugins.hub.push import push as run

    src = join_also_directories(src, also)
    done = run(src, repository, yes=yes, **given_settings(options), bars=progress_bar)
    if not json:
        report_push(src, done)
        return
    names = ("source", "revision", "url", "format", "removed", "left_out", "nbytes", "commit", "seconds", "notes")
    result = {
        **pick(done, *names),
        "repository": done.repo_id,
        "new": done.is_new,
        "private": done.is_private,
        "files": [{"name": name, "nbytes": nbytes} for name, nbytes in done.files.items()],
        "card_made": done.has_card,
        "pushed": done.is_done,
        "unchanged": sorted(done.unchanged),
    }
    print_json(result)


def report_push(src: Path, done: Pushed) -> None:
    """Print the result for a reader."""
    print_used_checkpoint(src, done.source)
    access = "private" if done.is_private else "public"
    destination = f"{done.url}{'' if done.revision == 'main' else f', branch {done.revision}'}"
    kind = f"{'new, ' if done.is_new else ''}{access}"
    print_text_line(f"{'pushed' if done.is_done else 'would push'} {done.source}")
    print_text_line(f"to {destination} ({kind})")
    pushed = []
    for name, nbytes in done.files.items():
        is_made = done.has_card and name == "README.md"
        verdict = f"{'pushed' if done.is_done else 'push'}{': a model card that ckptkit made' if is_made else ''}"
        pushed.append((f"  {name}", format_bytes(nbytes), "unchanged" if name in done.unchanged else verdict))
    removed = f"{'removed' if done.is_done else 'remove'}: of an earlier checkpoint"
    others = [(f"  {name}", "", removed) for name in done.removed]
    others += [(f"  {name}", "", f"left out: {reason}") for name, reason in done.left_out.items()]
    print_table([*without_middle(pushed), *others], ("  file", "size", "verdict"))
    for text in done.notes:
        print_text_line(f"note: {text}")
    amount = f"{count(len(done.files), 'file')}, {format_bytes(done.nbytes)}"
    if not done.is_done:
        print_text_line(f"would send {amount}; nothing was sent yet: pass --yes to send it")
        return
    is_same = len(done.unchanged) == len(done.files) and not done.removed
    print_text_line(f"{amount} in {done.seconds:.2f} s{'; nothing had changed, nothing was sent' if is_same else ''}")
    print_text_line(f"every size and checksum on the Hub matches the file here; commit {(done.commit or '')[:8]}")
    at = "" if done.revision == "main" else f"@{done.revision}"
    print_text_line(f"to get a copy elsewhere: ckptkit pull {done.repo_id}{at} {done.repo_id.partition('/')[2]}")


@with_options(_PULL_OPTIONS)
def pull(
    repository: Annotated[
        str,
        typer.Argument(metavar="ORG/NAME[@REVISION]", help="The repository on the Hub; by default its main branch."),
    ],
    out: Annotated[Path, typer.Argument(parser=to_local_path, metavar="OUT", help="The local directory to write.")],
    json: Json = False,
    **options: Any,
) -> None:
    """Pull a model or checkpoint from the Hugging Face Hub.

    ckptkit compares every file with the checksum on the Hub.

    OUT appears when all files have arrived. After an interruption, run the same command again to continue.

    Example: ckptkit pull org/model out

    Exit codes: 0 done; 2 usage; 3 no such repository, or a file arrived damaged; 4 the Hub cannot be reached or
    refuses, or an I/O failure; 5 OUT exists, or a name in the repository is unsafe; 130 interrupted.
    """
    from ckptkit.plugins.hub.pull import pull as run

    done = run(repository, out, **given_settings(options), bars=progress_bar)
    if json:
        names = ("revision", "commit", "output", "format", "nbytes", "fetched_bytes", "seconds")
        files = [{"name": name, "nbytes": nbytes} for name, nbytes in done.files.items()]
        print_json({"repository": done.repo_id, "files": files, **pick(done, *names)})
        return
    print_text_line(f"pulled {done.repo_id}, {done.revision} at {done.commit[:8]}, into {done.output}")
    print_files(done.files)
    before = done.nbytes - done.fetched_bytes
    here = f"; {format_bytes(before)} were there already" if before else ""
    print_text_line(f"{count(len(done.files), 'file')}, {format_bytes(done.nbytes)} in {done.seconds:.2f} s{here}")
    print_text_line("every file matches its checksum on the Hub")
    unknown = "note: it contains no checkpoint in a known format"
    print_text_line(f"next: ckptkit inspect {quote(str(done.output))}" if done.format else unknown)
