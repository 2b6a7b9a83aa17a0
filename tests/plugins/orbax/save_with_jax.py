"""Run by a Python that has jax and orbax: save one tree in all ways that orbax has, sharded over four devices.

`save_with_jax.py OUT` writes OUT/{ocdbt,files}{2,3}, a run OUT/run, and
in OUT/truth.npz the arrays, bfloat16 as float32.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"


def save(out: str) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("rows", "columns"))

    def sharded(value: Any, *axes: str) -> Any:
        return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*axes)))

    arrays = {
        "params": {
            "square": sharded(jax.random.normal(jax.random.key(0), (64, 64)), "rows", "columns"),
            "half": sharded(jnp.arange(24, dtype=jnp.bfloat16).reshape(4, 6), "rows"),
            "zeros": sharded(jnp.zeros((4, 4)), "rows"),
        },
        "step": jnp.int32(7),
        "flags": jnp.array([True, False]),
        "opt": [{"mu": jnp.ones((3,), jnp.bfloat16)}, None, ()],
    }
    for files, is_ocdbt in (("ocdbt", True), ("files", False)):
        for version in (2, 3):
            handler = ocp.PyTreeCheckpointHandler(use_ocdbt=is_ocdbt, use_zarr3=version == 3)
            ocp.Checkpointer(handler).save(f"{out}/{files}{version}", {**arrays, "said": "hello"})
    with ocp.CheckpointManager(f"{out}/run", item_names=("items",)) as manager:
        manager.save(3, args=ocp.args.Composite(items=ocp.args.StandardSave(arrays)))
        manager.wait_until_finished()
    leaves = jax.tree_util.tree_flatten_with_path(arrays)[0]
    truth = {".".join(str(getattr(step, "key", getattr(step, "idx", ""))) for step in way): a for way, a in leaves}
    plain = {name: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for name, a in truth.items()}
    np.savez(f"{out}/truth.npz", allow_pickle=False, **{name: np.asarray(a) for name, a in plain.items()})


if __name__ == "__main__":
    save(sys.argv[1])
