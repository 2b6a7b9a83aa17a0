"""What S3 refuses is said in our words, by what reads and by what writes alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit.checks.inspect import inspect
from ckptkit.errors import CkptError, IOFailure, NoRoom
from tests import command
from tests.s3 import Bucket

pytestmark = pytest.mark.slow

REGION = (("x-amz-bucket-region", "eu-west-3"),)
ANSWERS = [  # status, code, headers: our message and hint
    (404, "NoSuchBucket", (), "the bucket does not exist", "create the bucket"),
    (403, "AccessDenied", (), "access denied", "s3:GetObject"),
    (403, "", (), "access denied", "s3:GetObject"),
    (403, "InvalidAccessKeyId", (), "does not know this access key", "AWS_ACCESS_KEY_ID"),
    (403, "SignatureDoesNotMatch", (), "does not accept the secret key", "AWS_SECRET_ACCESS_KEY"),
    (400, "ExpiredToken", (), "the credentials have expired", "log in again"),
    (400, "InvalidToken", (), "does not accept the session token", "AWS_SESSION_TOKEN"),
    (403, "RequestTimeTooSkewed", (), "the clock of this machine differs", "set the clock"),
    (301, "PermanentRedirect", REGION, "the bucket is in eu-west-3", "set AWS_DEFAULT_REGION to eu-west-3"),
    (400, "AuthorizationHeaderMalformed", (), "the bucket is in another region", "the region of the bucket"),
    (503, "SlowDown", (), "the store is too busy", "--jobs"),
    (503, "", (), "the store is too busy", "--jobs"),
    (500, "InternalError", (), "the store failed", "run the same command again"),
    (507, "XMinioStorageFull", (), "the store has no room", "free some space"),
    (403, "QuotaExceeded", (), "the store has no room", "quota"),
    (400, "Whatever", (), "the store refuses: so it is", ""),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    save_file({"w": torch.ones(4)}, tmp_path / "model/model.safetensors")
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch, bucket: Bucket) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")


def both(bucket: Bucket, model: Path) -> list[Callable[[], object]]:
    """A command that reads from a bucket, and one that writes to it."""
    url = f"{bucket.url}/run/ckpt-5"
    return [lambda: inspect(url), lambda: ckptkit.cp(model, url)]


@pytest.mark.parametrize(("status", "code", "headers", "message", "hint"), ANSWERS)
def test_an_answer_becomes_our_words(
    status: int, code: str, headers: tuple[tuple[str, str], ...], message: str, hint: str, bucket: Bucket, model: Path
) -> None:
    bucket.server.fail(".", status=status, code=code, headers=headers, times=99)
    for call in both(bucket, model):
        with pytest.raises(IOFailure, match=message) as raised:
            call()
        assert str(raised.value.path).startswith(bucket.url)
        assert hint in (raised.value.hint or "")
        assert raised.value.exit_code == 4
        assert isinstance(raised.value, NoRoom) == ("room" in message)


@pytest.mark.parametrize(
    ("settings", "message", "hint"),
    [
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "the store cannot be reached", "AWS_ENDPOINT_URL"),
        ({"AWS_ENDPOINT_URL": "http://no-such-host.invalid"}, "the store cannot be reached", "AWS_ENDPOINT_URL"),
        ({"AWS_ENDPOINT_URL": "127.0.0.1:9"}, "AWS_ENDPOINT_URL is not a URL", "https://host:port"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "there are no credentials", "AWS_PROFILE"),
        ({"AWS_PROFILE": "nobody"}, "AWS_PROFILE names no profile", "AWS_PROFILE"),
    ],
)
def test_a_store_that_is_not_asked(
    settings: dict[str, str], message: str, hint: str, bucket: Bucket, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    for call in both(bucket, model):
        with pytest.raises(IOFailure, match=message) as raised:
            call()
        assert hint in (raised.value.hint or "")


def test_a_bucket_cannot_be_called_so(bucket: Bucket, model: Path) -> None:
    for call in (lambda: inspect("s3://a_b!/x"), lambda: ckptkit.cp(model, "s3://a_b!/x")):
        with pytest.raises(CkptError, match="cannot be the name of a bucket"):
            call()


def test_an_answer_that_says_no_reason_is_asked_for_it(bucket: Bucket) -> None:
    bucket.server.fail("HEAD", status=403)
    bucket.server.fail("GET .*max-keys=1", status=403, code="RequestTimeTooSkewed")
    with pytest.raises(IOFailure, match="clock"):
        inspect(f"{bucket.url}/run")


def test_the_command_line_says_it_in_two_lines(bucket: Bucket) -> None:
    bucket.server.fail(".", status=403, code="InvalidAccessKeyId", times=99)
    ran = command.ckptkit("inspect", f"{bucket.url}/run")
    assert ran.returncode == 4
    error, hint = ran.stderr.splitlines()
    assert error == f"error: {bucket.url}/run: the store does not know this access key: so it is"
    assert hint.startswith("hint: ")
