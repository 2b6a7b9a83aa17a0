"""Write a drafted conversion to an object store in pieces (`FilePiece`). The output is never complete on a local disk.

create (sparse, in a temporary directory) -> plan -> claim -> copy -> seal -> complete -> mark -> commit

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

from ckptkit.checkpoints.manifest import NAME as MANIFEST
from ckptkit.checkpoints.replaceable import marks_in
from ckptkit.checkpoints.seal import PlacedFiles, files_to_end_with
from ckptkit.engine.blocks import blocks
from ckptkit.engine.check_sources import Sources, bytes_at
from ckptkit.engine.copy import check_complete, copy, copy_unit
from ckptkit.engine.ledger import Ledger
from ckptkit.engine.scan import JOBS
from ckptkit.engine.shares import WHOLE, Share
from ckptkit.errors import Unsupported
from ckptkit.io.allocation import create_file, make_folder
from ckptkit.io.assembly import Assembly, PendingBytes, PieceKey
from ckptkit.io.crc32 import combine, crc32
from ckptkit.io.destination import Destination, keeping, open_destination
from ckptkit.io.file import file_size, opening, read_at
from ckptkit.io.path import refresh
from ckptkit.io.pieces import FilePiece, cut_file, is_large, new_piece
from ckptkit.io.progress import report_progress
from ckptkit.layout import FileOffset
from ckptkit.layout.plan import Plan
from ckptkit.state.draft import Conversion
from ckptkit.state.made_files import create, require_all_done, seal, write_made
from ckptkit.state.report import Written

KEY = "key.json"  # the note with the key of the conversion


def write_alone(conversion: Conversion) -> Written:
    """Write the whole output in this process. Continues an interrupted call with the same arguments."""
    with uploading(conversion, WHOLE.count) as upload:
        assembly = upload.assemble()
        ledgers = upload.copy(assembly, WHOLE)
        return upload.finish(assembly, ledgers)


def write_share(conversion: Conversion, share: Share) -> Written:
    """Write one share, and leave the rest to other processes."""
    with uploading(conversion, share.count) as upload:
        noted = upload.there.notes()
        if share_name(share.number) in noted:
            return Written(read_share(noted[share_name(share.number)])[0])
        upload.there.note(KEY, conversion.key(share.count))
        assembly = upload.assemble(only={key for key in upload.pieces if not upload.is_small_mark(key[0])})
        ledgers = upload.copy(assembly, share)
        state = {"ledgers": [ledger.to_json() for ledger in ledgers], "sent": sorted(assembly.sent)}
        upload.there.note(share_name(share.number), json.dumps(state).encode())
    return Written(ledgers, kept_bytes=upload.there.kept_bytes)


def finish_shares(conversion: Conversion, count: int) -> Written:
    """Check that all `count` shares are done and consistent, then commit the output."""
    with uploading(conversion, count) as upload:
        notes = upload.there.notes()
        require_all_done(conversion, [number for number in range(count) if share_name(number) in notes], count)
        shares = [read_share(notes[share_name(number)]) for number in range(count)]
        ledgers = [Ledger() for _ in upload.plans]
        for share_ledgers, _ in shares:
            for ledger, share_ledger in zip(ledgers, share_ledgers, strict=True):
                ledger.add(share_ledger)
        sent = {key for _, keys in shares for key in keys}
        assembly = upload.assemble(only=upload.pieces - sent)
        upload.copy_rest(assembly, ledgers)
        return upload.finish(assembly, ledgers)


def share_name(number: int) -> str:
    return f"share-{number}.json"


def read_share(text: bytes) -> tuple[list[Ledger], list[PieceKey]]:
    """Return the ledgers of a share, one for each draft, and the keys of the pieces that it sent."""
    state = json.loads(text)
    return [Ledger.from_json(one) for one in state["ledgers"]], [(name, number) for name, number in state["sent"]]


@contextmanager
def uploading(conversion: Conversion, count: int) -> Iterator[OutputUpload]:
    """Prepare the files in a temporary directory, and claim the destination for the output of `count` processes."""
    for draft in conversion.drafts:
        if draft.writer.repeats:
            message = f"`{draft.writer.name}` repeats data in several files, which needs a local disk"
            hint = "write to a local directory first, then copy it with `ckptkit cp`"
            raise Unsupported(message, path=conversion.output, hint=hint)
    with TemporaryDirectory(prefix="ckptkit-") as room:
        plans = [without_copies(plan) for plan in create(conversion, Path(room), is_sparse=True)]
        sizes, marks = conversion.file_sizes, marks_of(conversion, plans)
        sizes = {name: size for name, size in sizes.items() if name not in conversion.made}
        plan = blake2b(conversion.key(count), digest_size=16).hexdigest()
        destination = open_destination(conversion.output, sizes, marks, plan=plan, is_file=conversion.is_file)
        if count > 1:
            destination.notes()  # raises for a store without notes before anything is claimed
        by_training = conversion.replaces_training
        check = partial(marks_in, conversion.output, conversion.file_sizes, by_training=by_training)
        destination.claim(overwrite=conversion.options.overwrite, check=check)
        with keeping(destination):
            yield OutputUpload(conversion, Path(room), plans, destination, marks)
    refresh(conversion.output)


def without_copies(plan: Plan) -> Plan:
    """Return the plan with one target for bytes that several tied tensors share."""
    places = {(target.chunk.path, target.chunk.offset): target for target in reversed(plan.targets)}
    return replace(plan, targets=tuple(reversed(places.values())))


def marks_of(conversion: Conversion, plans: Sequence[Plan]) -> tuple[str, ...]:
    """Return the files that must be written last, in order: they make the output visible."""
    drafts = conversion.drafts
    parts = [
        PlacedFiles(draft.place, [file.name for file in draft.files], plan.dst.descriptions)
        for draft, plan in zip(drafts, plans, strict=True)
    ]
    manifests = [] if conversion.is_file else [str(Path(draft.place, MANIFEST)) for draft in drafts]
    names = {*conversion.file_sizes, *manifests}
    return files_to_end_with(parts, names, is_for_loaders=conversion.options.writer.is_model_only)


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
        return {piece.key for name, size in self.sizes.items() for piece in cut_file(name, size)}

    @property
    def jobs(self) -> int:
        return self.conversion.options.jobs or JOBS

    def is_small_mark(self, name: str) -> bool:
        return name in self.marks and not is_large(self.sizes.get(name, 0))

    def assemble(self, only: Iterable[PieceKey] | None = None) -> Assembly:
        """Return the assembly of the pieces of all files, or of `only` some of them."""
        gaps: dict[FileOffset, PendingBytes] = {}
        for draft, plan in zip(self.conversion.drafts, self.plans, strict=True):
            own: dict[FileOffset, PendingBytes] = {}
            for target in plan.targets:
                own[bytes_at(target.chunk)] = PendingBytes(target.chunk.bytes[1])
            for place, at in draft.writer.checksum_places(plan.dst):
                if place in own:
                    own[place].crc_at.append(at)
            gaps |= {(str(Path(draft.place, name)), offset): gap for (name, offset), gap in own.items()}
        return Assembly(self.room, self.sizes, gaps, self, only)

    def put(self, piece: FilePiece, data: memoryview, crc: int) -> None:
        """Send a piece; keep it in memory if it is a complete mark."""
        if self.is_small_mark(piece.name):
            self.held[piece.name] = data
        else:
            self.there.put(piece, data, crc)

    def stop(self, error: BaseException) -> None:
        self.there.stop(error)

    def copy(self, assembly: Assembly, share: Share) -> list[Ledger]:
        """Copy a share of each plan into the pieces."""
        options = self.conversion.options
        total = sum(plan.whole_nbytes for plan in self.plans) // share.count
        progress = report_progress(options.progress, total)
        return [
            copy(plan, share, jobs=self.jobs, progress=progress, output=assembly.at(draft.place))
            for draft, plan in zip(self.conversion.drafts, self.plans, strict=True)
        ]

    def copy_rest(self, assembly: Assembly, ledgers: Sequence[Ledger]) -> None:
        """Copy the data of pieces that no single share could fill. The ledgers contain the CRC-32 of all data."""
        for draft, plan, ledger in zip(self.conversion.drafts, self.plans, ledgers, strict=True):
            output = assembly.at(draft.place)
            for target in plan.targets:
                offset, nbytes = target.chunk.bytes
                crc = ledger.written.whole(bytes_at(target.chunk), nbytes)
                if crc is not None:
                    output.note(target.chunk.path, offset, 0, nbytes, crc)
            pairs = ((block, block.target.chunk) for block in blocks(plan))
            wanted = (
                block for block, chunk in pairs if output.wants(chunk.path, chunk.offset + block.start, block.nbytes)
            )
            copy_unit(plan, wanted, Sources(plan, Ledger()), self.jobs, lambda _: None, output)

    def finish(self, assembly: Assembly, ledgers: Sequence[Ledger]) -> Written:
        """Check that all data is sent, then send the remaining files and marks, and commit the output."""
        conversion = self.conversion
        assembly.send_rest()
        assembly.require_all()
        pairs = zip(self.plans, ledgers, strict=True)
        copied = [check_complete(plan, ledger, jobs=self.jobs) for plan, ledger in pairs]
        sums = {name: self.send_file(name, path) for name, path in conversion.copied_files.items()}
        write_made(conversion, self.room)
        files = seal(conversion, self.plans, copied, sums)
        for origin in (*conversion.origins, *conversion.also_read):
            origin.check()
        for name in (*self.sizes, *sums):
            if name not in self.marks:
                self.there.complete(name, files[name].crc32)
        for name, made in conversion.made.items():
            if name not in self.marks:
                self.there.put_small(name, made, crc32(made))
        # marks last: a reader that sees one may assume that everything else is there
        for name in self.marks:
            if is_large(self.sizes.get(name, 0)):
                self.there.complete(name, files[name].crc32)
            else:
                content = self.held.get(name) or self.read(name)
                self.there.mark(name, content, crc32(content))
        self.there.commit()
        return Written(ledgers, copied, self.there.remarks(), self.there.kept_bytes)

    def send_file(self, name: str, path: Path) -> int:
        """Send a file that does not change, and return its CRC-32."""
        total_crc = 0
        with opening(path) as file:
            size = file.size
            make_folder((self.room / name).parent)
            create_file(self.room / name, size, (), is_sparse=True)
            for piece in cut_file(name, size):
                data = new_piece(piece.length)
                file.read_into(data, piece.start)
                crc = crc32(data)
                self.put(piece, data, crc)
                total_crc = combine(total_crc, crc, piece.length)
        return total_crc

    def read(self, name: str) -> bytes:
        """Return the content of a file without tensor data."""
        with opening(self.room / name) as file:
            return bytes(read_at(file, file_size(self.room / name), 0))
