"""Bytes in and out, on a disk or in a store.

A path of the user is a `Path`: a local one, a `RemotePath` behind a URL, or a `JoinedPath` of several directories.
These functions take any of them. Other rooms ask `is_remote` where a store lacks a feature, or a read is a request:

    path.py         `to_path` to read, `to_live_path` to change, `to_local`; `is_remote`, `known_store`, `refresh`
    file.py         `open_file`, `read_small`, `names_in`, `is_there`, `file_size`, `stored_sum`; local.py, ranges.py
    small_files.py  `read_file`, `replace_file`, `open_lines`, `require_writable`
    destination.py  `to_destination` to write, `require_shared`, `check_absent`; the protocol `Destination`
    claims.py       `read_claim`: is an upload or a deletion under way?

An output appears complete or not at all: on a disk by a `Stage` (staging.py, disk.py), in a store by the `Destination`
of that store. `stores/` has the table of stores, and each store's reader and destination. The package `ckptkit.storage`
is something else: the writer and reader that torch.distributed.checkpoint calls.
"""
