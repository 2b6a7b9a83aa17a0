"""Push a checkpoint to the Hub in one commit, and verify it before and after.

Large files are uploaded before the commit. After an interruption, the next push does not upload them again.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete

from ckptkit.checkpoints.checkpoint import Checkpoint, Source, path_of_source
from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checkpoints.manifest import read_manifest
from ckptkit.checks.checkpoint_files import OwnFiles
from ckptkit.checks.inspect import inspect
from ckptkit.checks.verify import bytes_at_path as size_of_part
from ckptkit.checks.verify import require_no_problems, verify_component
from ckptkit.errors import Corrupt, Unsupported, Usage
from ckptkit.formats import FormatReader, get_format
from ckptkit.io.file import list_children
from ckptkit.io.local_file import is_link_outside_cache
from ckptkit.io.path import is_remote, to_uncached_path
from ckptkit.io.progress import make_progress_reporter
from ckptkit.io.stores.hub import make_hub_client, parse_kind_id_and_revision
from ckptkit.io.stores.hub_calls import (
    HubRepository,
    create_branch,
    create_repository,
    find_repository,
    require_repository,
    require_token,
    silenced_hub_client,
)
from ckptkit.io.stores.hub_errors import MAIN, repository_url, translate_hub_errors
from ckptkit.layout import Layout
from ckptkit.models.adapter_config_differences import ADAPTER_CONFIG
from ckptkit.models.companions import find_companions_in, sentence_transformers_modules_in
from ckptkit.plugins.hub.model_card import NAME as CARD
from ckptkit.plugins.hub.model_card import make_card
from ckptkit.plugins.hub.transfers import (
    Bars,
    Content,
    Follow,
    FollowedReader,
    content_nbytes,
    differences_from_hub,
    no_progress,
    sha256_by_name,
    transfer_each_file,
)
from ckptkit.summary import Summarized
from ckptkit.trainers.ckptkit import TRAINING
from ckptkit.version import __version__
from ckptkit.words import command_line, count, format_bytes

_ID = re.compile(r"(?!(datasets|spaces|buckets)/)\w[\w.-]*/\w[\w.-]*", re.ASCII)  # of a model
_DAMAGED = "push it again; if that does not help, remove the file on the Hub first"
_OF_TRAINING = (
    *("optimizer*", "optim.*", "scheduler.*", "scheduler_*.bin", "scaler.*", "sampler*.bin", "dl_state_dict*"),
    *("rng_state*", "random_states*", "trainer_state.json", "training_args.bin", "custom_checkpoint_*"),
)
# what `save_pretrained` of common libraries writes
_LOADED = re.compile(
    r"(shard-\d+-)?(diffusion_pytorch_|adapter_)?model(\.\w+)?(-\d+-of-\d+)?\.safetensors(\.index\.json)?"
)
_DIRECTORY = "a directory"
_TEMPORARY = ("*.tmp", "*.lock", "*.part", "*.incomplete", "*~", "*.swp")


def parse_repository_address(address: str, revision: str | None = None) -> tuple[str, str]:
    """Return repository and revision of `org/model`, `org/model@revision` or `hf://org/model`.

    Raises `Usage` for any other address, also for a path in a repository.
    """
    typed = address.removeprefix("hf://")
    if not _ID.fullmatch(typed.partition("@")[0]):
        is_path = "://" in typed or typed.startswith(("/", "."))
        hint = (
            "copy to a directory or store with `ckptkit cp`"
            if is_path
            else "write it like org/model, or org/model@revision"
        )
        raise Usage(f"expected a model repository like org/model, found `{address}`", hint=hint)
    _, *parts = to_uncached_path(f"hf://{typed}").parts
    _, repo_id, named = parse_kind_id_and_revision("/".join(parts[:2]))
    if parts[2:]:
        hint = f"drop /{'/'.join(parts[2:])}, or pass a revision that contains a slash with --revision"
        raise Usage(f"expected a repository, found the path {'/'.join(parts[2:])} in one: `{address}`", hint=hint)
    if named and revision not in (None, named):
        raise Usage(f"`{address}` names one revision and --revision another")
    return repo_id, named or revision or MAIN


@dataclass(frozen=True, slots=True)
class Pushed(Summarized):
    """A push of the checkpoint at `source` to `revision` of a repository; unless `is_done`, only its plan.

    `files` has the size of each file in bytes, by name. `unchanged` files are already on the Hub. `removed` files on
    the Hub belong to an earlier checkpoint. `left_out` has the local files that are not pushed, with reasons.
    `has_card` means that ckptkit writes the model card.
    """

    source: Path
    repo_id: str
    revision: str
    url: str
    format: str
    is_new: bool
    is_private: bool
    files: Mapping[str, int]
    removed: tuple[str, ...]
    left_out: Mapping[str, str]
    has_card: bool
    notes: tuple[str, ...] = ()
    is_done: bool = False
    commit: str | None = None
    unchanged: frozenset[str] = frozenset()
    seconds: float = 0.0

    def summary(self) -> Iterator[str]:
        yield f"{'pushed' if self.is_done else 'would push'} {self.source} to {self.url}"
        yield f"{count(len(self.files), 'file')}, {format_bytes(self.nbytes)}"

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())


class Addition(CommitOperationAdd):
    """A file to upload with a known SHA-256, which reports the position that the upload has reached."""

    def __init__(self, name: str, content: Content, sha256: str, follow: Follow) -> None:
        super().__init__(name, content if isinstance(content, bytes) else str(content.absolute()))
        self.upload_info.sha256 = bytes.fromhex(sha256)
        self._follow = follow

    @contextmanager
    def as_file(self, with_tqdm: bool = False) -> Iterator[Any]:
        """Open the content for the Hub's client."""
        if not isinstance(self.path_or_fileobj, str):
            with super().as_file(with_tqdm) as file:
                yield file
            return
        with FollowedReader(Path(self.path_or_fileobj), self._follow) as file:
            yield file


@dataclass(frozen=True, slots=True)
class Selection:
    """The files of the checkpoint at `root` to push, by name on the Hub, and the reasons why others are `left_out`.

    `has_card` means that ckptkit wrote the model card.
    """

    root: Path
    reader: FormatReader
    layout: Layout
    contents: Mapping[str, Content]
    left_out: Mapping[str, str]
    has_card: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        return {name: content_nbytes(content) for name, content in self.contents.items()}

    def without_card(self) -> Selection:
        """Return the selection without a model card, for a repository that already has one."""
        contents = {name: content for name, content in self.contents.items() if name != CARD}
        kept = {} if self.has_card else {CARD: "the Hub keeps its model card"}
        return replace(self, contents=contents, left_out={**self.left_out, **kept})


def select_files(source: Source, repo_id: str) -> Selection:
    """Return the files to push of the checkpoint at `source`, or of a run's latest: those of its model component.

    Directories inside are left out, unless the checkpoint needs files in them, or they are modules after a transformer.
    Raises `Usage` if the model is a single file.
    """
    checkpoint = Checkpoint.open(source)
    root, reader = checkpoint.model_component.path, checkpoint.model_component.reader
    if not root.is_dir():
        hint = "pass the directory that the file is in, or an output of `ckptkit consolidate`"
        raise Usage("only directories are pushed", path=root, hint=hint)
    layout, manifest = reader.read(root), read_manifest(root)
    needed = OwnFiles(reader, root, layout, manifest).needed_files
    contents: dict[str, Content] = {}
    beside = [] if root == checkpoint.path else [child for child in list_children(checkpoint.path) if child != root]
    left_out = {child.name: find_reason_not_pushed(child) or "not the model's" for child in beside}
    whole = {name.partition("/")[0] for name in needed if "/" in name} | set(sentence_transformers_modules_in(root))
    for path, reason in files_with_exclusion_reasons(root, needed, whole):
        name = str(path.relative_to(root))
        if reason is None:
            contents[name] = path
        else:
            left_out[name] = reason
    if lost := sorted(needed - contents.keys()):
        hint = "push a copy of the checkpoint: `ckptkit cp SRC COPY`"
        message = "the checkpoint needs this file, but it is hidden or behind a link"
        raise Unsupported(message, path=root / lost[0], hint=hint)
    if manifest is not None:
        origin = manifest.source  # published without the directory on this machine
        named = {**origin, "path": Path(origin["path"]).name} if origin and "path" in origin else origin
        contents[MANIFEST] = replace(manifest, source=named).to_bytes()
    has_card = CARD not in contents
    if has_card:
        companions = find_companions_in(root)
        config = companions.config if companions else None
        contents[CARD] = make_card(repo_id, inspect(root), names=contents, config=config, manifest=manifest)
    return Selection(root, reader, layout, contents, left_out, has_card)


def files_with_exclusion_reasons(
    folder: Path, needed: Collection[str], full_directories: Collection[str] | None, prefix: str = ""
) -> Iterator[tuple[Path, str | None]]:
    """Yield the entries of a directory, each with the reason why it is not pushed, None for a file that is pushed.

    The files of the directories `full_directories` are also yielded; None means all directories.
    """
    for child in list_children(folder):
        name = prefix + child.name
        reason = None if name in needed else find_reason_not_pushed(child)
        if reason == _DIRECTORY and (full_directories is None or child.name in full_directories):
            yield from files_with_exclusion_reasons(child, needed, None, f"{name}/")
        else:
            yield child, reason


def find_reason_not_pushed(path: Path) -> str | None:
    """Return the reason why a file that the checkpoint does not need is not pushed, None if it is pushed."""
    if is_link_outside_cache(path):
        return "a link"
    if path.name == TRAINING or any(fnmatchcase(path.name, pattern) for pattern in _OF_TRAINING):
        return "state of training"
    if path.name.startswith("."):
        return "hidden"
    if any(fnmatchcase(path.name, pattern) for pattern in _TEMPORARY):
        return "temporary"
    return None if path.is_file() else _DIRECTORY


def push(
    path: Source,
    repo_id: str,
    *,
    public: bool = False,
    revision: str | None = None,
    message: str | None = None,
    yes: bool = False,
    jobs: int | None = None,
    bars: Bars = no_progress,
) -> Pushed:
    """With `yes`, push the checkpoint at `path`, or the latest of the run at `path`, to `org/model` on the Hub.

    Without `yes` only returns the plan. A new repository is private unless `public`. An existing repository stays
    private or public, and keeps its model card. Raises `Corrupt` if the checkpoint is damaged locally or on the Hub,
    and `IOFailure` if the Hub cannot be reached or refuses.
    """
    began = time.perf_counter()
    name, at = parse_repository_address(repo_id, revision)
    source = path_of_source(path)
    if is_remote(source):
        raise Usage("only local checkpoints are pushed", path=source, hint="copy it here with `ckptkit consolidate`")
    selection = select_files(source, name)
    with silenced_hub_client():
        require_token()
        head = find_repository(name, at)
        basis = find_repository(name, MAIN) if head is None and at != MAIN else head
        if basis and CARD in basis.files:
            selection = selection.without_card()
        plan = plan_push(selection, name, at, basis, public=public)
        if not yes:
            return plan
        with bars("verifying") as progress:
            advance = make_progress_reporter(progress, size_of_part(selection.root) + plan.nbytes)
            hint = f"{command_line('verify', selection.root)} lists all problems; nothing was pushed"
            require_no_problems(verify_component(selection.root, jobs=jobs, progress=advance), hint)
            sums = sha256_by_name(selection.contents, jobs, advance)
        if basis is None:
            basis = create_repository(name, private=not public)
            head = basis if at == MAIN else None
        done = upload_and_commit(
            selection, plan, sums, basis, has_branch=head is not None, message=message, jobs=jobs, bars=bars
        )
    return replace(done, seconds=time.perf_counter() - began)


def plan_push(
    selection: Selection, repo_id: str, revision: str, basis: HubRepository | None, *, public: bool
) -> Pushed:
    """Return the plan of a push. `basis` is the state of the repository, None for a new repository."""
    remote_files = basis.files if basis else {}
    notes = []
    if basis and public and basis.is_private:
        notes.append("the repository exists and stays private")
    if selection.layout.format != "hf":
        notes.append("not a model that transformers loads: `ckptkit consolidate` makes one")
    return Pushed(
        selection.root,
        repo_id,
        revision,
        repository_url(repo_id),
        selection.layout.format,
        basis is None,
        basis.is_private if basis else not public,
        selection.sizes,
        tuple(sorted(names_to_remove(selection, remote_files.keys()))),
        selection.left_out,
        selection.has_card and CARD in selection.contents,
        tuple(notes),
    )


def names_to_remove(selection: Selection, remote_names: Collection[str]) -> set[str]:
    """Return the files on the Hub that belong to an earlier checkpoint at the same place and not to the pushed one.

    These are files of the same format, and those that loaders find in the root by their names. A `*.safetensors` with
    another name may be a model of its own.
    """
    others = set(remote_names) - selection.contents.keys()
    reader = selection.reader
    dcp, in_root = get_format("dcp"), {name for name in others if "/" not in name}
    removed = {name for name in in_root if name == MANIFEST or _LOADED.fullmatch(name) or dcp.owns_file(name)}
    if not reader.is_model_only:
        removed |= {name for name in others if reader.owns_file(name.partition("/")[0])}
    adapters = others - removed | selection.contents.keys()
    if not any(name.startswith("adapter_model.") for name in adapters):
        removed |= others & {ADAPTER_CONFIG}  # without the adapter, loaders fail on its config
    return removed


def upload_and_commit(
    selection: Selection,
    plan: Pushed,
    sums: Mapping[str, str],
    basis: HubRepository,
    *,
    has_branch: bool,
    message: str | None,
    jobs: int | None,
    bars: Bars,
) -> Pushed:
    """Upload the files that the Hub does not have, commit them, and compare the Hub with the local files.

    `basis` is the state of the repository before the push. Raises `Corrupt` if a file on the Hub differs afterwards.
    """
    changed = differences_from_hub(selection.contents, sums, basis.files)
    commit = basis.commit
    additions: dict[str, Addition] = {}

    def send_one(name: str, follow: Follow) -> None:  # a large file; the commit itself contains the small ones
        additions[name] = Addition(name, selection.contents[name], sums[name], follow)
        revision = plan.revision if has_branch else None
        with translate_hub_errors(plan.repo_id):
            make_hub_client().preupload_lfs_files(plan.repo_id, [additions[name]], revision=revision, free_memory=False)

    sizes = {name: plan.files[name] for name in changed}
    with bars("uploading") as progress:
        transfer_each_file(sizes, send_one, jobs, make_progress_reporter(progress, sum(sizes.values())))
        if not has_branch:
            create_branch(plan.repo_id, plan.revision, basis.commit)
        with translate_hub_errors(plan.repo_id, plan.revision):
            if changed or plan.removed:
                new_commit = make_hub_client().create_commit(
                    plan.repo_id,
                    [*(additions[name] for name in changed), *map(CommitOperationDelete, plan.removed)],
                    commit_message=message or f"Upload {selection.root.resolve().name} with ckptkit {__version__}",
                    revision=plan.revision,
                    parent_commit=basis.commit,  # the Hub refuses if somebody else has pushed meanwhile
                )
                commit = new_commit.oid
    for name, words in differences_from_hub(
        selection.contents, sums, require_repository(plan.repo_id, commit).files
    ).items():
        content = selection.contents[name]
        raise Corrupt(words, path=name if isinstance(content, bytes) else content, hint=_DAMAGED)
    return replace(plan, is_done=True, commit=commit, unchanged=frozenset(plan.files.keys() - changed))
