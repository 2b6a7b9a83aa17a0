"""Remote paths: what a text means, and that a path behind a URL is a path, but never one of this machine."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path

import fsspec
import pytest

from ckptkit.errors import CkptError, Unsafe, Unsupported, Usage, translate_os_errors
from ckptkit.io.destination import to_destination
from ckptkit.io.file import is_existing_path, list_children, list_directories, names_in
from ckptkit.io.path import RemotePath, prefetch_listings, to_local_path, to_model_path, to_path
from ckptkit.io.stores import open_store
from ckptkit.storage import RoomWriter
from ckptkit.training.saving.run import Run


@pytest.fixture
def files() -> fsspec.AbstractFileSystem:
    """What `memory://` is, empty."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    open_store.cache_clear()
    return memory


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3://bucket/run/ckpt-5", "s3://bucket/run/ckpt-5"),
        ("s3://bucket/run/", "s3://bucket/run"),
        ("S3://bucket", "s3://bucket"),
        ("hf://org/name", "hf://org/name"),
        ("hf://org/name@v1.0/a/b", "hf://org/name@v1.0/a/b"),
        ("hf://org/name@refs/pr/1/a", "hf://org/name@refs%2Fpr%2F1/a"),
        ("hf://datasets/org/name", "hf://datasets/org/name"),
        ("memory://a/b", "memory://a/b"),
        ("memory:///a", "memory://a"),
        ("simplecache::s3://bucket/a", "simplecache::s3://bucket/a"),
        ("s3://bucket/a b/%20#?+ü", "s3://bucket/a b/%20#?+ü"),
    ],
)
def test_a_url_is_a_remote_path(text: str, url: str) -> None:
    path = to_path(text)
    assert isinstance(path, RemotePath)
    assert str(path) == url
    assert to_path(path) is path


@pytest.mark.parametrize(
    "text", ["run", "./org/name", "/org/name", "a/b/c", "../name", "here/name", ".a/b", "a b/c", "no-such-org/name"]
)
def test_all_else_is_a_local_path(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    path = to_path(text)
    assert path == Path(text)
    assert not isinstance(path, RemotePath)


def test_the_id_of_a_model_is_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless its first part is a name here: a typo in a local path stays on this machine."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for text in ("org/name", "org/name@v1"):
        assert str(to_model_path(text)) == f"hf://{text}"
        assert not isinstance(to_path(text), RemotePath)
    for text in ("run/ckpt-30", "./org/name", "org/config.json", "a/b/c", "name"):
        assert to_model_path(text) == Path(text)


def test_files_of_this_machine_are_local_however_they_are_called() -> None:
    assert to_path("file:///tmp/a%20b") == Path("/tmp/a b")
    assert not isinstance(to_path("file:///tmp"), RemotePath)


@pytest.mark.parametrize(
    "text", ["s3://", "s3:///key", "s3://b/../a", "s3://b//a", "s3://b/./a", "hf://org", "zip://a::s3://b"]
)
def test_a_url_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(Usage):
        to_path(text)


def test_a_file_url_of_a_host_is_refused() -> None:
    with pytest.raises(Usage, match="`file://work/x` names the host `work`") as refused:
        to_path("file://work/x")
    assert refused.value.hint == "write file:///work/x"


def test_a_backslash_in_a_url_of_azure_is_refused() -> None:
    with pytest.raises(Usage, match="contains a backslash") as refused:
        to_path(r"az://box/run\ckpt-5")
    assert refused.value.hint == "write az://box/run/ckpt-5"
    assert to_path(r"s3://box/run\ckpt-5").name == r"run\ckpt-5"


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "hf", "S3"])
@pytest.mark.parametrize("rest", ["/bucket/run", "bucket/run"])
def test_a_url_without_its_slashes_is_no_local_path(scheme: str, rest: str) -> None:
    for read in (to_path, to_local_path, to_destination):
        with pytest.raises(Usage, match="is not a URL") as refused:
            read(f"{scheme}:{rest}")
        assert refused.value.hint == f"write {scheme.lower()}://bucket/run"
    assert to_path(f"./{scheme}x:/run") == Path(f"{scheme}x:/run")
    local = to_path(f"./{scheme}:{rest}")
    assert to_path(local) == local == Path(f"{scheme}:{rest}").absolute()


def test_a_url_in_a_plain_path_is_refused() -> None:
    with pytest.raises(Usage, match="is not a URL") as refused:
        to_path(Path("s3://bucket/run"))
    assert refused.value.hint == "pass the text s3://bucket/run, not a Path"


def test_an_empty_path_is_not_the_current_directory() -> None:
    for read in (to_path, to_model_path, to_local_path, to_destination):
        with pytest.raises(Usage, match="the path is empty") as refused:
            read("")
        assert refused.value.hint == "pass . for the current directory"


def test_an_unknown_scheme_or_a_missing_package_is_said() -> None:
    with pytest.raises(Usage, match="nonsense") as raised:
        to_path("nonsense://a/b").exists()
    assert str(raised.value.path) == "nonsense://a/b"


def test_paths_are_put_together_and_taken_apart() -> None:
    path = to_path("s3://bucket/run/ckpt-5")
    assert str(path / "a.b") == "s3://bucket/run/ckpt-5/a.b"
    assert (path.name, (path / "a.b").suffix, (path / "a.b").stem) == ("ckpt-5", ".b", "a")
    assert str(path.parent) == "s3://bucket/run"
    assert str(path.with_name("x")) == "s3://bucket/run/x"
    assert str((path / "a/b").relative_to(path)) == "a/b"
    assert path.absolute() == path.resolve() == path
    assert sorted([path / "b", path / "a"]) == [path / "a", path / "b"]
    assert {path: 1}[RemotePath("s3://bucket/run/ckpt-5")] == 1
    assert str(pickle.loads(pickle.dumps(path))) == str(path)
    assert all(isinstance(found, RemotePath) for found in (path / "a", path.parent, path.with_name("x")))


@pytest.mark.parametrize("root", ["s3://bucket", "hf://org/name@main", "hf://datasets/org/name", "memory://"])
def test_nothing_is_above_a_store(root: str) -> None:
    path = to_path(root)
    assert path.parent == path
    assert str((path / "a").parent) == root


@pytest.mark.parametrize(
    "use",
    [
        open,
        os.listdir,
        os.stat,
        os.fspath,
        Path.read_bytes,
        Path.mkdir,
        Path.unlink,
        lambda path: path.touch(),
        lambda path: path.rename("a"),
    ],
)
def test_what_needs_a_local_file_refuses_it(use: Callable[[Path], object], tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="remote"):
        use(to_path("s3://bucket/a"))


def test_it_does_not_lead_out_of_its_store() -> None:
    with pytest.raises(Unsafe):
        (to_path("s3://bucket/a") / "/etc/passwd").exists()


def test_it_answers_as_a_local_one_does(files: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    for name in ("run/ckpt-5/a", "run/ckpt-5/b.c", "run/x"):
        files.pipe_file(f"/{name}", name.encode())
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    remote = to_path("memory://")
    for name in ("run", "run/ckpt-5", "run/ckpt-5/a", "run/x", "run/none", "none/none", "run/x/none"):
        here, there = tmp_path / name, remote / name
        for ask in map(methodcaller, ("exists", "is_dir", "is_file", "is_symlink")):
            assert ask(there) == ask(here), (name, ask)
        assert is_existing_path(there) == is_existing_path(here)
        if here.is_file():
            assert there.stat().st_size == there.lstat().st_size == here.stat().st_size
        if not here.exists():
            with pytest.raises(FileNotFoundError):
                there.stat()
        if here.is_dir():
            assert sorted(names_in(there)) == sorted(names_in(here))
            assert [path.name for path in list_children(there)] == [path.name for path in list_children(here)]
            assert [path.name for path in list_directories(there)] == [path.name for path in list_directories(here)]
        else:
            with pytest.raises(CkptError) as raised:
                list_children(there)
            assert str(raised.value.path) == str(there)


def test_a_listing_is_asked_for_once(files: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    files.pipe_file("/run/ckpt-1/a", b"1")
    files.pipe_file("/run/ckpt-2/a", b"1")
    asked: list[str] = []
    ask = type(files).ls

    def note(self: fsspec.AbstractFileSystem, path: str, **how: bool) -> object:
        asked.append(path)
        return ask(self, path, **how)

    monkeypatch.setattr(type(files), "ls", note)
    run = to_path("memory://run")
    prefetch_listings(list_directories(run))
    listed = len(asked)
    for step in (1, 2):
        assert (run / f"ckpt-{step}/a").is_file()
        assert not (run / f"ckpt-{step}/b/c").exists()
        assert names_in(run / f"ckpt-{step}") == ["a"]
    assert len(asked) == listed


def test_a_change_is_found_by_asking_anew(files: fsspec.AbstractFileSystem) -> None:
    for name in ("a", "b/c"):
        files.pipe_file(f"/run/{name}", b"1")
    run = to_path("memory://run")
    prefetch_listings([run])
    assert isinstance(run, RemotePath)
    assert run.find_change() is None
    files.pipe_file("/run/b/c", b"22")
    assert str(run.find_change()) == "memory://run/b/c"
    open_store.cache_clear()
    prefetch_listings([run])
    files.rm("/run/a")
    assert str(run.find_change()) == "memory://run/a"


def test_errors_keep_the_url() -> None:
    path = to_path("s3://bucket/a")
    assert str(CkptError("", path=path).path) == str(CkptError("").blame(path=path).path) == "s3://bucket/a"
    with pytest.raises(CkptError) as raised, translate_os_errors(path):
        raise FileNotFoundError(2, "no such file")
    assert raised.value.to_json()["path"] == "s3://bucket/a"


@pytest.mark.parametrize("place", ["s3://bucket/a", "memory://", RemotePath("hf://org/name")])
def test_a_destination_is_local(place: str | Path) -> None:
    with pytest.raises(Usage, match="expected a local path"):
        to_local_path(place)


def test_a_file_url_is_a_local_destination() -> None:
    assert to_local_path("file:///tmp/a%20b") == to_path("file://localhost/tmp/a%20b") == Path("/tmp/a b")
    assert RoomWriter("file:///tmp/out").room == Run("file:///tmp/out").root == Path("/tmp/out")
    assert RoomWriter.validate_checkpoint_id("file:///tmp/out")


def test_a_local_destination_is_taken_as_it_is() -> None:
    assert to_local_path("org/name") == to_local_path(Path("org/name")) == Path("org/name")
