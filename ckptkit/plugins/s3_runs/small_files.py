"""Write and delete single small objects on S3."""

from __future__ import annotations

from ckptkit.errors import IOFailure, Occupied
from ckptkit.io.path import RemotePath, drop_cached_listing
from ckptkit.io.stores.s3 import S3Bucket
from ckptkit.io.stores.s3_errors import TAKEN, Tolerating, error_code_of

_ABSENT = ("404", "NoSuchKey")


class S3SmallFiles:
    """Implements `SmallFiles` for the bucket of `root`."""

    def __init__(self, root: RemotePath) -> None:
        self._bucket = S3Bucket(root.store_root)

    def find_content_tag(self, path: RemotePath) -> str:
        with Tolerating(_ABSENT):
            return str(self._bucket.call_operation("head_object", path.key)["ETag"])
        return ""

    def put(self, path: RemotePath, content: bytes, *, replaces: str | None = None) -> str:
        condition = {} if replaces is None else {"IfMatch": replaces} if replaces else {"IfNoneMatch": "*"}
        try:
            response = self._bucket.call_operation("put_object", path.key, Body=content, **condition)
        except IOFailure as error:
            if error_code_of(error) not in (*TAKEN, *_ABSENT):
                raise
            tag = self.find_content_tag(path)
            # same content: our own object, if the response was lost and the library retried
            if not tag or self._bucket.read_object(path.key) != content:
                hint = "stop the other process, then run the same command again"
                raise Occupied("another process has written or deleted this object", path=path, hint=hint) from error
            return tag
        finally:
            drop_cached_listing(path)
        return str(response["ETag"])

    def delete(self, path: RemotePath) -> None:
        self._bucket.call_operation("delete_object", path.key)
        drop_cached_listing(path)
