"""Write a drafted conversion to an object store in pieces (`FilePiece`). The output is never complete on a local disk.

create (sparse, in a temporary directory) -> plan -> claim -> copy -> finalize -> complete -> mark -> commit

Several processes can share the work. Each sends the pieces that its share fills, and leaves a note with its ledgers.
One of them sends the pieces that cross borders between shares, and does the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory

from ckptkit.checkpoints.finalize_files import PlacedFiles, files_to_write_last
from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checkpoints.replaceable import check_replaceable_and_find_markers
from ckptkit.engine.blocks import blocks_of_plan
from ckptkit.engine.check_sources import Sources, range_start_of
from ckptkit.engine.copy import copy_blocks, copy_by_plan, verify_copy
from ckptkit.engine.ledger import Ledger
from ckptkit.engine.scan import JOBS
from ckptkit.engine.shares import Share
from ckptkit.errors import Unsupported
from ckptkit.io.allocation import create_file, make_directory
from ckptkit.io.assembly import Assembly, PendingBytes, PieceKey
from ckptkit.io.crc32 import combine_crc32, crc32
from ckptkit.io.destination import Destination, errors_with_resume_hint, open_destination
from ckptkit.io.file import file_size, opening, read_at
from ckptkit.io.path import drop_cached_listing
from ckptkit.io.pieces import FilePiece, cut_into_pieces, is_sent_in_pieces, new_piece_buffer
from ckptkit.io.progress import make_progress_reporter
from ckptkit.layout import FileOffset
from ckptkit.layout.plan import Plan
from ckptkit.state.draft import Conversion
from ckptkit.state.output_files import (
    create_output_files,
    finalize_output_files,
    require_all_shares_done,
    write_generated_files,
)
from ckptkit.state.report import Written

KEY = "key.json"  # the note with the key of the conversion


def write_share_to_store(conversion: Conversion, share: Share) -> Written:
    """Write one share. The only share commits the output; else the rest is left to other processes.

    Continues an interrupted call with the same arguments.
    """
    with opened_upload(conversion, share.count) as upload:
        if share.count == 1:
            assembly = upload.make_assembly()
            return upload.send_rest_and_commit(assembly, upload.copy_share(assembly, share))
        noted = upload.there.read_notes()
        if share_note_name(share.number) in noted:
            return Written(parse_share_note(noted[share_note_name(share.number)])[0])
        upload.there.put_note(KEY, conversion.shared_options_key(share.count))
        assembly = upload.make_assembly(sent_here={key for key in upload.pieces if not upload.is_small_marker(key[0])})
        ledgers = upload.copy_share(assembly, share)
        state = {"ledgers": [ledger.to_json() for ledger in ledgers], "sent": sorted(assembly.sent)}
        upload.there.put_note(share_note_name(share.number), json.dumps(state).encode())
    return Written(ledgers, kept_bytes=upload.there.kept_bytes)


def finish_shares_in_store(conversion: Conversion, share_count: int) -> Written:
    """Check that all `share_count` shares are done and consistent, then commit the output."""
    with opened_upload(conversion, share_count) as upload:
        notes = upload.there.read_notes()
        require_all_shares_done(
            conversion, [number for number in range(share_count) if share_note_name(number) in notes], share_count
        )
        shares = [parse_share_note(notes[share_note_name(number)]) for number in range(share_count)]
        ledgers = [Ledger() for _ in upload.plans]
        for share_ledgers, _ in shares:
            for ledger, share_ledger in zip(ledgers, share_ledgers, strict=True):
                ledger.add_ledger(share_ledger)
        sent = {key for _, keys in shares for key in keys}
        assembly = upload.make_assembly(sent_here=upload.pieces - sent)
        upload.copy_remaining(assembly, ledgers)
        return upload.send_rest_and_commit(assembly, ledgers)


def share_note_name(share_index: int) -> str:
    return f"share-{share_index}.json"


def parse_share_note(text: bytes) -> tuple[list[Ledger], list[PieceKey]]:
    """Return the ledgers of a share, one for each draft, and the keys of the pieces that it sent."""
    state = json.loads(text)
    return [Ledger.from_json(one) for one in state["ledgers"]], [(name, number) for name, number in state["sent"]]


@contextmanager
def opened_upload(conversion: Conversion, share_count: int) -> Iterator[OutputUpload]:
    """Prepare the files in a temporary directory, and claim the destination for `share_count` processes."""
    for draft in conversion.drafts:
        if draft.writer.repeats:
            message = f"`{draft.writer.name}` repeats data in several files, which needs a local disk"
            hint = "write to a local directory first, then copy it with `ckptkit cp`"
            raise Unsupported(message, path=conversion.output, hint=hint)
    with TemporaryDirectory(prefix="ckptkit-") as room:
        plans = []
        for plan in create_output_files(conversion, Path(room), is_sparse=True):
            # one target for bytes that several tied tensors share
            places = {(target.chunk.path, target.chunk.offset): target for target in reversed(plan.targets)}
            plans.append(replace(plan, targets=tuple(reversed(places.values()))))
        sizes, marks = conversion.file_sizes, markers_to_send_last(conversion, plans)
        sizes = {name: size for name, size in sizes.items() if name not in conversion.made}
        key = blake2b(conversion.shared_options_key(share_count), digest_size=16).hexdigest()
        destination = open_destination(
            conversion.output, sizes, marks, plan=key, is_file=conversion.is_file, more_files=conversion.made
        )
        if share_count > 1:
            destination.read_notes()  # raises for a store without notes before anything is claimed
        by_training = conversion.is_training_file
        check = partial(
            check_replaceable_and_find_markers, conversion.output, conversion.file_sizes, output_is_training=by_training
        )
        destination.claim(overwrite=conversion.options.overwrite, check=check)
        with errors_with_resume_hint(destination):
            yield OutputUpload(conversion, Path(room), plans, destination, marks)
    drop_cached_listing(conversion.output)


def markers_to_send_last(conversion: Conversion, plans: Sequence[Plan]) -> tuple[str, ...]:
    """Return the files that must be written last, in order: they make the output visible."""
    drafts = conversion.drafts
    parts = [
        PlacedFiles(draft.place, [file.name for file in draft.files], plan.dst.descriptions)
        for draft, plan in zip(drafts, plans, strict=True)
    ]
    manifests = [] if conversion.is_file else [str(Path(draft.place, MANIFEST)) for draft in drafts]
    names = {*conversion.file_sizes, *manifests}
    return files_to_write_last(parts, names, is_for_loaders=conversion.options.writer.is_model_only)


@dataclass(slots=True)
class OutputUpload:
    """An output during its upload to a store. Directory `room` has everything but the tensor data.

    `held` are marks with their complete content, which are sent last.
    """

    conversion: Conversion
    room: Path
    plans: Sequence[Plan]
    there: Destination
    marks: Sequence[str]
    held: dict[str, memoryview] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes in bytes of the files that may contain tensor data."""
        drafts = self.conversion.drafts
        return {str(Path(draft.place, file.name)): file.nbytes for draft in drafts for file in draft.files}

    @property
    def pieces(self) -> set[PieceKey]:
        return {piece.key for name, size in self.sizes.items() for piece in cut_into_pieces(name, size)}

    @property
    def jobs(self) -> int:
        return self.conversion.options.jobs or JOBS

    def is_small_marker(self, name: str) -> bool:
        return name in self.marks and not is_sent_in_pieces(self.sizes.get(name, 0))

    def make_assembly(self, sent_here: Iterable[PieceKey] | None = None) -> Assembly:
        """Return the assembly of the pieces of all files, or of `sent_here` some of them."""
        gaps: dict[FileOffset, PendingBytes] = {}
        for draft, plan in zip(self.conversion.drafts, self.plans, strict=True):
            own: dict[FileOffset, PendingBytes] = {}
            for target in plan.targets:
                own[range_start_of(target.chunk)] = PendingBytes(target.chunk.checksummed_range[1])
            for place, at in draft.writer.checksum_offsets(plan.dst):
                if place in own:
                    own[place].crc_offsets.append(at)
            gaps |= {(str(Path(draft.place, name)), offset): gap for (name, offset), gap in own.items()}
        return Assembly(self.room, self.sizes, gaps, self, sent_here)

    def put(self, piece: FilePiece, data: memoryview, crc: int) -> None:
        """Send a piece; keep it in memory if it is a complete mark."""
        if self.is_small_marker(piece.name):
            self.held[piece.name] = data
        else:
            self.there.put(piece, data, crc)

    def stop(self, error: BaseException) -> None:
        self.there.stop(error)

    def copy_share(self, assembly: Assembly, share: Share) -> list[Ledger]:
        """Copy a share of each plan into the pieces."""
        options = self.conversion.options
        total = sum(plan.destination_nbytes for plan in self.plans) // share.count
        progress = make_progress_reporter(options.progress, total)
        return [
            copy_by_plan(plan, share, jobs=self.jobs, progress=progress, output=assembly.directory_writer(draft.place))
            for draft, plan in zip(self.conversion.drafts, self.plans, strict=True)
        ]

    def copy_remaining(self, assembly: Assembly, ledgers: Sequence[Ledger]) -> None:
        """Copy the data of pieces that no single share could fill. The ledgers contain the CRC-32 of all data."""
        for draft, plan, ledger in zip(self.conversion.drafts, self.plans, ledgers, strict=True):
            output = assembly.directory_writer(draft.place)
            for target in plan.targets:
                offset, nbytes = target.chunk.checksummed_range
                crc = ledger.written.find_complete_crc(range_start_of(target.chunk), nbytes)
                if crc is not None:
                    output.record_written(target.chunk.path, offset, 0, nbytes, crc)
            pairs = ((block, block.target.chunk) for block in blocks_of_plan(plan))
            wanted = (
                block
                for block, chunk in pairs
                if output.should_send_any_byte(chunk.path, chunk.offset + block.start, block.nbytes)
            )
            copy_blocks(plan, wanted, Sources(plan), self.jobs, lambda _: Ledger(), output=output)

    def send_rest_and_commit(self, assembly: Assembly, ledgers: Sequence[Ledger]) -> Written:
        """Check that all data is sent, then send the remaining files and marks, and commit the output."""
        conversion = self.conversion
        assembly.send_remaining()
        pairs = zip(self.plans, ledgers, strict=True)
        copied = [verify_copy(plan, ledger, jobs=self.jobs) for plan, ledger in pairs]
        sums = {name: self.send_file(name, path) for name, path in conversion.copied_files.items()}
        write_generated_files(conversion, self.room)
        files = finalize_output_files(conversion, self.plans, copied, sums)
        for origin in (*conversion.origins, *conversion.also_read):
            origin.require_unchanged()
        for name in (*self.sizes, *sums):
            if name not in self.marks:
                self.there.finish_file(name, files[name].crc32)
        for name, made in conversion.made.items():
            if name not in self.marks:
                self.there.put_small_file(name, made, crc32(made))
        # marks last: a reader that sees one may assume that everything else is there
        for name in self.marks:
            if is_sent_in_pieces(self.sizes.get(name, 0)):
                self.there.finish_file(name, files[name].crc32)
            else:
                content = self.held.get(name) or self.read_small_file(name)
                self.there.put_marker(name, content, crc32(content))
        self.there.commit()
        return Written(ledgers, copied, self.there.missing_feature_remarks(), self.there.kept_bytes)

    def send_file(self, name: str, path: Path) -> int:
        """Send a file that does not change, and return its CRC-32."""
        total_crc = 0
        with opening(path) as file:
            size = file.size
            make_directory((self.room / name).parent)
            create_file(self.room / name, size, (), is_sparse=True)
            for piece in cut_into_pieces(name, size):
                data = new_piece_buffer(piece.length)
                file.read_into(data, piece.start)
                crc = crc32(data)
                self.put(piece, data, crc)
                total_crc = combine_crc32(total_crc, crc, piece.length)
        return total_crc

    def read_small_file(self, name: str) -> bytes:
        with opening(self.room / name) as file:
            return bytes(read_at(file, file_size(self.room / name), 0))
