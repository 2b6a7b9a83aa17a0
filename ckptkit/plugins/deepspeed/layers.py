"""Read the files of a pipeline's layers: copies of trained parameters, and untrained entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ckptkit.errors import CkptError, Corrupt
from ckptkit.formats.archives.flatten import Flattening
from ckptkit.formats.archives.state_files import read_state_file
from ckptkit.formats.pickles.tensor_calls import is_tensor
from ckptkit.layout import StoredTensor
from ckptkit.plugins.deepspeed.gathering import MODEL, Gathering
from ckptkit.plugins.deepspeed.model_states import tensor_parallel
from ckptkit.plugins.deepspeed.names import DeepSpeedFiles
from ckptkit.plugins.deepspeed.values import as_dict

_SHARED = "tied_modules."  # and a key, and the name in the layer


def layers_of(files: DeepSpeedFiles) -> Iterator[tuple[int, str]]:
    """Yield the files of a pipeline's layers, with their numbers."""
    for (number, cut), name in files.layers.items():
        if cut:
            raise tensor_parallel()
        yield number, name


def put_layer(gathering: Gathering, root: Path, name: str, number: int, masters: Mapping[str, StoredTensor]) -> None:
    """Put what a layer of a pipeline has besides trained parameters, and their rounded copies.

    A layer has a copy of what it shares with others too, under a name of its own.
    """
    file = read_state_file(root, name)
    flattening = Flattening(file.entries, name)
    try:
        for key, value in as_dict(file.value, name).items():
            full = f"{number}.{key}"
            copy = flattening.stored(value) if is_tensor(value) else None
            names = [full] if full in masters else find_shared(str(key), copy, masters)
            if not names or copy is None:
                gathering.flatten(flattening, value, (MODEL, full))
            elif len(names) == 1:
                if copy.spec.shape != masters[names[0]].spec.shape:
                    shapes = (
                        f"expected {list(masters[full].spec.shape)} as in its master, found {list(copy.spec.shape)}"
                    )
                    raise Corrupt(shapes, tensor=full)
                gathering.put_twin((MODEL, names[0]), copy)
    except CkptError as error:
        raise error.blame(path=root / name) from None


def find_shared(key: str, copy: StoredTensor | None, masters: Mapping[str, StoredTensor]) -> list[str]:
    """Return the parameters that layers share and of which an entry of one may be the copy, by name and shape."""
    if copy is None:
        return []
    shared = (name for name in masters if name.startswith(_SHARED) and name.split(".", 2)[-1] == key)
    return [name for name in shared if masters[name].spec.shape == copy.spec.shape]
