"""`verify --fast` of a checkpoint in a store compares the store's checksums, and reads no data."""

from __future__ import annotations

import json
import subprocess
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit.io.crc32 import crc32
from tests.command import ckptkit as cli
from tests.io.contract import PART
from tests.io.stores.test_s3_destination import place, simple, small_parts, source
from tests.s3 import Place, forget

__all__ = ["place", "simple", "small_parts", "source"]  # fixtures

HEADER = 1 << 16  # bytes of a file that are not its data


def upload(place: Place, root: Path, **how: Any) -> None:
    """Send files in two parts, as other tools do, with checksums of a kind."""
    for path in sorted(root.iterdir()):
        key, content = f"run/ckpt-5/{path.name}", path.read_bytes()
        made = place.files.call_s3("create_multipart_upload", Bucket=place.name, Key=key, **how)
        parts = []
        for number, start in enumerate(range(0, max(len(content), 1), PART), 1):
            more = {"ChecksumAlgorithm": how["ChecksumAlgorithm"]} if how else {}
            asked = {"Bucket": place.name, "Key": key, "UploadId": made["UploadId"], "PartNumber": number, **more}
            sent = place.files.call_s3("upload_part", Body=content[start : start + (PART)], **asked)
            sums = {name: sent[name] for name in sent if name.startswith("ChecksumCRC32")}
            parts.append({"PartNumber": number, "ETag": sent["ETag"], **sums})
        asked = {"Bucket": place.name, "Key": key, "UploadId": made["UploadId"], "MultipartUpload": {"Parts": parts}}
        place.files.call_s3("complete_multipart_upload", **asked)
    place.server.requests.clear()
    forget()


def check(place: Place) -> Any:
    forget()
    (found,) = ckptkit.verify(place.url, fast=True)
    return found


@pytest.mark.slow
def test_one_request_a_file_proves_a_checkpoint(place: Place, source: Path) -> None:
    ckptkit.cp(source, place.url)
    place.server.requests.clear()
    found = check(place)
    assert found.is_ok
    assert found.proved_files == 2
    assert found.checked_bytes > PART
    assert found.unchecked_bytes == 0
    assert any("by the store's CRC-32" in note for note in found.notes)
    assert sum(".distcp" in one.what for one in place.server.requests) == 1
    assert place.server.nbytes < HEADER
    assert not [one for one in place.server.requests if one.start is not None and ".distcp" in one.what]


def test_another_object_of_the_same_size_is_found(place: Place, source: Path) -> None:
    ckptkit.cp(source, place.url)
    content = bytearray(place.content("__0_0.distcp"))
    content[len(content) // 2] ^= 1
    other = {"Bucket": place.name, "Key": "run/ckpt-5/__0_0.distcp", "ChecksumAlgorithm": "CRC32"}
    place.files.call_s3("put_object", Body=bytes(content), **other)
    found = check(place)
    (problem,) = found.problems
    assert str(problem.path) == f"{place.url}/__0_0.distcp"
    assert "expected CRC-32" in problem.message
    assert problem.message in next(finding.message for finding in ckptkit.doctor(place.url).findings)


def parts_of(content: bytes) -> str:
    """What S3 answers to GetObjectAttributes for an object that was sent in parts with a CRC-32 each."""
    parts = []
    for number, start in enumerate(range(0, len(content), PART), 1):
        part = content[start : start + (PART)]
        crc = b64encode(crc32(part).to_bytes(4)).decode()
        parts.append(
            f"<Part><PartNumber>{number}</PartNumber><Size>{len(part)}</Size><ChecksumCRC32>{crc}</ChecksumCRC32></Part>"
        )
    listed = f"<ObjectParts><IsTruncated>false</IsTruncated>{''.join(parts)}</ObjectParts>"
    return f'<GetObjectAttributesResponse xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{listed}</GetObjectAttributesResponse>'


def test_checksums_of_parts_prove_the_whole(place: Place, source: Path) -> None:
    upload(place, source, ChecksumAlgorithm="CRC32")
    content = {path.name: path.read_bytes() for path in source.iterdir()}
    for name in ("__0_0.distcp", ".metadata"):
        place.server.fail(f"{name}.attributes", status=200, body=parts_of(content[name]))
    found = check(place)
    assert found.is_ok
    assert found.proved_files == 2
    for name in ("__0_0.distcp", ".metadata"):
        other = content[name][:-1] + b"?"
        place.server.fail(f"{name}.attributes", status=200, body=parts_of(other))
    assert len(check(place).problems) == 2


@pytest.mark.parametrize("kind", ["CRC32", "SHA256", ""])
def test_objects_of_others_say_what_they_have(kind: str, place: Place, source: Path) -> None:
    upload(place, source, **({"ChecksumAlgorithm": kind} if kind else {}))
    found = check(place)
    (problem,) = found.problems
    what = f"{kind} of parts of 2 files" if kind else "no checksum of 2 files"
    assert f"cannot verify 2 of 2 files, 1.18 MB: the store has {what}" in problem.message
    assert "without --fast" in (problem.hint or "")
    assert found.proved_files == 0
    assert found.unchecked_bytes > PART
    assert ckptkit.doctor(place.url).findings == ()


@pytest.mark.slow
def test_a_store_that_keeps_no_checksums_proves_nothing(simple: Place, source: Path) -> None:
    ckptkit.cp(source, simple.url)
    found = check(simple)
    assert not found.is_ok
    assert "no checksum of 2 files" in found.problems[0].message
    forget()
    assert ckptkit.verify(simple.url)[0].is_ok


def test_without_a_manifest_nothing_is_proved(place: Place, tmp_path: Path) -> None:
    save_file({"w": torch.ones(1000)}, tmp_path / "model.safetensors")
    ckptkit.cp(tmp_path, place.url)
    found = check(place)
    assert found.is_ok
    assert found.proved_files == found.checked_bytes == 0
    assert "--fast cannot verify the files without a manifest; the store has CRC-32 of 1 file" in found.notes


@pytest.mark.slow
def test_the_command_line(place: Place, simple: Place, source: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return cli("verify", simple.url, "--fast", *words)

    simple.server.is_simple = False
    ckptkit.cp(source, simple.url)
    whole = run("--json")
    assert whole.returncode == 0
    assert json.loads(whole.stdout)["checkpoints"][0]["proved_files"] == 2
    simple.server.is_simple = True
    lacking = run()
    assert lacking.returncode == 1
    assert lacking.stdout.splitlines()[1].startswith("1 problem")
    assert "problem: " in lacking.stdout
    assert "hint: run `ckptkit verify` without --fast" in lacking.stdout
