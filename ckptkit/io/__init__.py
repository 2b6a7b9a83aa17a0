"""Read and write bytes, on a disk or in a store.

A user's path is a `Path`: a local path, a `RemotePath` for a URL, or a `JoinedPath` of several directories.
These functions accept all three. Other packages ask `is_remote` if a store lacks a feature, or if each read costs a
request:

    path.py         `to_path` to read, `to_uncached_path` to change, `to_local_path`;
                    `is_remote`, `capabilities_at`, `drop_cached_listing`
    file.py         `open_file`, `read_small`, `names_in`, `is_existing_path`, `file_size`, `find_stored_checksums`;
                    local_file.py, remote_file.py
    small_files.py  `read_current_content`, `replace_file`, `open_line_writer`, `require_writable_store`
    destination.py  `to_destination` to write, `require_multi_process_store`, `require_absent`;
                    the protocol `Destination`
    claims.py       `find_claim`: is an upload or a deletion in progress?

Outputs are atomic: a `Stage` writes them on a disk (staging.py, disk.py), the store's `Destination` in a store.
`stores/` has the table of stores, and each store's reader and destination. The package `ckptkit.storage` is something
else: the writer and reader that torch.distributed.checkpoint calls.
"""
