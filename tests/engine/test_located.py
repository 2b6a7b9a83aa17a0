"""A layout whose bytes are still in their envelopes is refused by whatever reads or writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ckptkit.checkpoints.finalize_files import create_files
from ckptkit.checks.stats import count_values_by_tensor
from ckptkit.engine.compare import compare_layouts, row_major_checksums
from ckptkit.engine.read import read_box
from ckptkit.errors import Usage
from ckptkit.formats import get_writer, locate_all_chunks, require_known_format
from ckptkit.layout import Blob, Layout, Wrapped, WriterOptions
from ckptkit.layout.plan import make_plan
from tests.conftest import Produce
from tests.engine.test_mean import means
from tests.execute import execute
from tests.producers import fsdp2

Way = Callable[[Layout, Layout], object]  # into the engine, of a layout that has been located and one that has not

WAYS: dict[str, Way] = {
    "copied from": lambda there, here: execute(make_plan(here, there)),
    "copied to": lambda there, here: execute(make_plan(there, here)),
    "averaged": lambda there, here: execute(make_plan(there, there, [here], means(there.specs, [0.5, 0.5]))),
    "compared": lambda there, here: compare_layouts(here, there),
    "compared with": compare_layouts,
    "fingerprints": lambda _, here: row_major_checksums(here),
    "survey": lambda _, here: count_values_by_tensor(here),
    "read": lambda _, here: [read_box(here, name, tensor.chunks[0].box) for name, tensor in here.tensors.items()],
}


@pytest.mark.parametrize("way", WAYS)
def test_envelopes_are_no_elements(way: str, produce: Produce) -> None:
    root = produce(fsdp2).root
    before = {file.name: file.read_bytes() for file in root.iterdir()}
    here = require_known_format(root).read(root)
    there = locate_all_chunks(here)
    with pytest.raises(Usage) as raised:
        WAYS[way](there, here)
    error = raised.value
    assert error.tensor is not None
    assert error.path in {root / chunk.path for chunk in here.tensors[error.tensor].chunks}
    assert "formats.locate" in (error.hint or "")
    assert {file.name: file.read_bytes() for file in root.iterdir()} == before


def test_nothing_is_written_of_what_is_in_an_envelope(produce: Produce, tmp_path: Path) -> None:
    """As a conversion would: into files of another format that have been made."""
    root = produce(fsdp2).root
    here = require_known_format(root).read(root)
    here = replace(here, blobs={})
    writer = get_writer("hf")
    create_files(tmp_path, writer.lay_out_files(here, WriterOptions(1 << 30)), must_be_new=True)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(Usage):
        execute(make_plan(here, locate_all_chunks(writer.read(tmp_path))))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    execute(make_plan(locate_all_chunks(here), locate_all_chunks(writer.read(tmp_path))))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} != before


def test_a_transformed_entry_is_not_copied_as_it_is() -> None:
    plain = Layout(Path("dst"), "any", {}, {"step": Blob("f", 0, 4)})
    transformed = Layout(Path("src"), "any", {}, {"step": Blob("f", 8, 4, where=Wrapped("inverted"))})
    with pytest.raises(Usage) as raised:
        make_plan(transformed, plain)
    assert (raised.value.tensor, raised.value.path) == ("step", Path("src/f"))
