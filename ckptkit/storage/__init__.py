"""Bridge to torch.distributed.checkpoint: load any checkpoint with `dcp.load`, and save any format with `dcp.save`.

    dcp.load({"model": state}, storage_reader=ckptkit.storage.Reader("hf-model", under="model", cast="allow"))
    dcp.save(state, storage_writer=ckptkit.storage.Writer("hf-model", files={"config.json": config}))
    dcp.save({"model": model, "optim": optimizer, "step": 5}, storage_writer=ckptkit.storage.Writer("ckpt-5", "dcp"))
    dcp.async_save(state, storage_writer=ckptkit.storage.Writer("s3://bucket/run/ckpt-5"))

An error on any rank ends the call on every rank with torch's `CheckpointException`, which is not an `Exception`. Its
`failures` contain the `CkptError` of each rank, and `find_cause` returns the most relevant one.
"""

from ckptkit.errors import with_torch_hint

try:
    from ckptkit.storage.local_writer import RoomWriter
    from ckptkit.storage.ranks import find_cause
    from ckptkit.storage.reader import LayoutReader, Reader
    from ckptkit.storage.terms import PartialLoad
    from ckptkit.storage.weights import load_weights
    from ckptkit.storage.writer import Writer
except ModuleNotFoundError as error:
    raise with_torch_hint(error) from None

__all__ = ["LayoutReader", "PartialLoad", "Reader", "RoomWriter", "Writer", "find_cause", "load_weights"]
