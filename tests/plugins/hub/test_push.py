"""Pushes over real HTTP, by `huggingface_hub` as it is: what appears on the Hub and when, and what errors say."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptkit import consolidate, convert, push
from ckptkit.errors import NotACheckpoint, Usage
from ckptkit.io.stores.hub_errors import as_line_without_token
from ckptkit.plugins.hub.push import parse_repository_address
from tests import producers
from tests.conftest import Produce
from tests.hub_server import Hub, ckptkit, start, sum_file

SECRET = "hf_" + "s3cret" * 6


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def model(produce: Produce, tmp_path: Path) -> Path:
    """Weights made by ckptkit, with a manifest that says of what, and a config."""
    source = tmp_path / "home" / "alice" / "ckpt-70"
    shutil.copytree(produce(producers.fsdp2).root, source)
    out = tmp_path / "model"
    consolidate(source, out)
    (out / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    made = json.loads((out / "ckptkit.json").read_text())
    assert "alice" in made["source"]["path"]
    return out


@pytest.fixture
def sharded(produce: Produce, tmp_path: Path) -> Path:
    """A checkpoint with a file of data for each of three ranks."""
    return Path(shutil.copytree(produce(producers.fsdp2).root, tmp_path / "ckpt-5"))


def test_without_yes_nothing_is_sent(hub: Hub, model: Path) -> None:
    ran = ckptkit(hub, "push", model, "org/tiny")
    assert ran.returncode == 0
    assert "new, private" in ran.stdout
    assert "model.safetensors" in ran.stdout
    assert "nothing was sent" in ran.stdout
    assert not hub.repositories
    assert {request.split()[0] for request in hub.requests} == {"GET"}


def test_a_model_appears_in_one_commit(hub: Hub, model: Path) -> None:
    ran = ckptkit(hub, "push", model, "org/tiny", "--yes", "--message", "the first", "--json")
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    there = hub.files("org/tiny")
    names = {"config.json", "model.safetensors"}
    assert {name: there[name] for name in names} == {name: (model / name).read_bytes() for name in names}
    assert there.keys() == names | {"ckptkit.json", "README.md", ".gitattributes"}
    repository = hub.repositories["org/tiny"]
    assert repository.private
    assert [commit.title for commit in repository.commits.values()] == ["initial commit", "the first"]
    assert told["commit"] == hub.head("org/tiny").oid
    assert told["pushed"]
    assert told["private"]
    assert told["new"]
    assert {file["name"] for file in told["files"]} == names | {"ckptkit.json", "README.md"}
    assert not (model / "README.md").exists()


@pytest.mark.slow
def test_what_is_shown_names_no_place_and_no_person(hub: Hub, model: Path) -> None:
    assert ckptkit(hub, "push", model, "org/tiny", "--yes").returncode == 0
    there = hub.files("org/tiny")
    card = there["README.md"].decode()
    for text in (card, there["ckptkit.json"].decode(), hub.head("org/tiny").title):
        assert "alice" not in text
        assert "/tmp" not in text
        assert str(model.parent) not in text
    for words in ("library_name: transformers", "`ckpt-70`", "| step | 70 |", "float32", "AutoModelForCausalLM"):
        assert words in card
    assert json.loads(there["ckptkit.json"])["source"] == {"path": "ckpt-70", "format": "dcp"}


@pytest.mark.slow
def test_the_manifest_still_fits_what_was_pushed(hub: Hub, model: Path, tmp_path: Path) -> None:
    assert ckptkit(hub, "push", model, "org/tiny", "--yes").returncode == 0
    assert ckptkit(hub, "pull", "org/tiny", tmp_path / "got").returncode == 0
    verified = json.loads(ckptkit(hub, "verify", tmp_path / "got", "--json").stdout)
    assert verified["ok"]
    assert verified["checked_bytes"] > 0


@pytest.mark.slow
def test_cards_that_are_there_are_kept(hub: Hub, model: Path) -> None:
    hub.put("org/theirs", {"README.md": b"written with care"})
    assert ckptkit(hub, "push", model, "org/theirs", "--yes").returncode == 0
    assert hub.files("org/theirs")["README.md"] == b"written with care"
    (model / "README.md").write_bytes(b"# my own\n")
    told = ckptkit(hub, "push", model, "org/theirs", "--yes")
    assert "README.md" in told.stdout
    assert "the Hub keeps its model card" in told.stdout
    assert hub.files("org/theirs")["README.md"] == b"written with care"
    assert ckptkit(hub, "push", model, "org/mine", "--yes").returncode == 0
    assert hub.files("org/mine")["README.md"] == b"# my own\n"


def test_killed_and_gone_on_with(hub: Hub, sharded: Path) -> None:
    first, second, last = (sum_file(sharded / f"__{rank}_0.distcp") for rank in range(3))
    sizes = {sum_file(path): path.stat().st_size for path in sharded.iterdir()}
    fault = hub.fail(f"PUT /upload/{last}", "stall", after=100)
    process = start(hub, "push", sharded, "org/tiny", "--yes", "--jobs", "1")
    assert fault.reached.wait(60)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert hub.head("org/tiny").files.keys() == {".gitattributes"}
    assert hub.received[first] == sizes[first]
    fault.go.set()
    assert ckptkit(hub, "push", sharded, "org/tiny", "--yes", "--jobs", "1").returncode == 0
    assert hub.received[first] == sizes[first]
    assert hub.received[second] == sizes[second]
    assert hub.head("org/tiny").files.keys() >= {path.name for path in sharded.iterdir()}
    assert len(hub.repositories["org/tiny"].commits) == 2


@pytest.mark.slow
def test_interrupted(hub: Hub, sharded: Path) -> None:
    fault = hub.fail("PUT /upload", "stall", after=100)
    process = start(hub, "push", sharded, "org/tiny", "--yes")
    assert fault.reached.wait(60)
    process.send_signal(signal.SIGINT)
    fault.go.set()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
    assert hub.head("org/tiny").files.keys() == {".gitattributes"}


@pytest.mark.slow
@pytest.mark.parametrize("part_size", [1 << 30, 1000], ids=["whole", "parts"])
def test_a_bit_that_flips_on_the_way_is_found(hub: Hub, sharded: Path, part_size: int) -> None:
    hub.part_size = part_size
    hub.fail(f"PUT /upload/{sum_file(sharded / '__1_0.distcp')}", "flip", after=50)
    ran = ckptkit(hub, "push", sharded, "org/tiny", "--yes")
    assert ran.returncode == 3
    assert "__1_0.distcp" in ran.stderr
    assert "SHA-256" in ran.stderr
    error = json.loads(ckptkit(hub, "push", sharded, "org/tiny", "--yes", "--json").stdout)["error"]
    assert error["code"] == "corrupt"
    assert error["path"].endswith("__1_0.distcp")


def test_what_is_damaged_here_is_not_sent(hub: Hub, sharded: Path) -> None:
    damage = sharded / "__1_0.distcp"
    content = bytearray(damage.read_bytes())
    content[len(content) // 2] ^= 1
    damage.write_bytes(content)
    ran = ckptkit(hub, "push", sharded, "org/tiny", "--yes")
    assert ran.returncode == 3
    assert "__1_0.distcp" in ran.stderr
    assert not hub.repositories


def test_pushed_again_only_changes_are_sent(hub: Hub, model: Path) -> None:
    assert ckptkit(hub, "push", model, "org/tiny", "--yes").returncode == 0
    before, received = hub.head("org/tiny"), dict(hub.received)
    again = ckptkit(hub, "push", model, "org/tiny", "--yes")
    assert again.stdout.count("unchanged") == 3
    assert "nothing was sent" in again.stdout
    assert hub.head("org/tiny") == before
    assert dict(hub.received) == received
    (model / "config.json").write_text('{"model_type": "llama"}')
    assert ckptkit(hub, "push", model, "org/tiny", "--yes").returncode == 0
    assert hub.files("org/tiny")["config.json"] == b'{"model_type": "llama"}'
    assert dict(hub.received) == received


@pytest.mark.slow
def test_shards_of_an_earlier_checkpoint_go(hub: Hub, model: Path) -> None:
    old = {"model-00001-of-00002.safetensors", "model.safetensors.index.json", "LICENSE"}
    old |= {"adapter_model.safetensors", "adapter_config.json"}  # transformers would follow the config to its base
    old |= {".metadata", "__0_0.distcp", "ckptkit.json"}
    (model / "ckptkit.json").unlink()
    kept = {
        "unet/model.safetensors",
        "step-1/__0_0.distcp",
        "lora-v1.safetensors",
        "consolidated.safetensors.index.json",
    }  # other models
    hub.put("org/tiny", dict.fromkeys(old | kept, b"old"))
    plan = ckptkit(hub, "push", model, "org/tiny")
    assert "remove: of an earlier checkpoint" in plan.stdout
    assert ckptkit(hub, "push", model, "org/tiny", "--yes").returncode == 0
    there = hub.head("org/tiny").files.keys()
    assert there >= {"LICENSE", *kept}
    assert not there & (old - {"LICENSE"})
    assert len(hub.repositories["org/tiny"].commits) == 3


def test_files_in_directories_that_the_checkpoint_is_made_of(hub: Hub, model: Path, tmp_path: Path) -> None:
    state = {"state": {"w": {"exp_avg": torch.ones(2, 2)}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
    torch.save({"model": {"w": torch.ones(2, 2)}, "optimizer": state}, tmp_path / "all.pt")
    convert(tmp_path / "all.pt", tmp_path / "universal", to="universal")
    assert ckptkit(hub, "push", tmp_path / "universal", "org/universal", "--yes").returncode == 0
    names = {str(path.relative_to(tmp_path / "universal")) for path in (tmp_path / "universal").rglob("*.pt")}
    assert names
    assert hub.files("org/universal").keys() >= names

    (model / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]')
    for module in ("1_Pooling", "2_Dense", "runs"):
        (model / module).mkdir()
        (model / module / "config.json").write_text("{}")
    save_file({"linear.weight": torch.ones(2, 2)}, model / "2_Dense/model.safetensors")
    plan = ckptkit(hub, "push", model, "org/sentences", "--yes")
    there = hub.files("org/sentences").keys()
    assert there >= {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "modules.json"}, plan
    assert "runs/config.json" not in there

    (model / "1_Pooling" / "optimizer.pt").write_bytes(b"state")
    (model / "1_Pooling" / ".cache").mkdir()
    (model / "1_Pooling" / ".cache" / "token").write_bytes(b"secret")
    shutil.rmtree(model / "2_Dense")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "id_rsa").write_bytes(b"secret")
    (model / "2_Dense").symlink_to(tmp_path / "elsewhere")
    plan = json.loads(ckptkit(hub, "push", model, "org/another", "--json").stdout)
    assert not {file["name"] for file in plan["files"]} & {"1_Pooling/.cache/token", "2_Dense/id_rsa"}
    assert plan["left_out"].items() >= {"1_Pooling/optimizer.pt": "state of training", "2_Dense": "a link"}.items()


@pytest.mark.slow
def test_what_is_no_part_of_the_model_stays(hub: Hub, model: Path) -> None:
    (model / "ckptkit.json").unlink()
    for name in ("optimizer.pt", "rng_state_0.pth", "trainer_state.json", ".env", "x.tmp", "model.lock"):
        (model / name).write_bytes(b"secret")
    (model / "training").mkdir()
    (model / "runs").mkdir()
    (model / "notes.txt").symlink_to("/etc/hostname")
    left = {path.name for path in model.iterdir()} - {"model.safetensors", "config.json"}
    told = json.loads(ckptkit(hub, "push", model, "org/tiny", "--yes", "--json").stdout)
    assert told["left_out"].keys() == left
    assert told["left_out"]["notes.txt"] == "a link"
    assert hub.files("org/tiny").keys() == {"model.safetensors", "config.json", "README.md", ".gitattributes"}


def test_of_several_parts_the_models_is_pushed(hub: Hub, produce: Produce) -> None:
    root = produce(producers.accelerate).root
    told = json.loads(ckptkit(hub, "push", root, "org/tiny", "--json").stdout)
    assert Path(told["source"]).parent == root
    assert ".metadata" in {file["name"] for file in told["files"]}
    assert "state of training" in told["left_out"].values()


@pytest.mark.slow
def test_the_latest_of_a_run(hub: Hub, sharded: Path) -> None:
    ran = ckptkit(hub, "push", sharded.parent, "org/tiny")
    assert "ckpt-5" in ran.stderr
    assert "the latest complete checkpoint of" in ran.stderr


@pytest.mark.slow
def test_what_lies_on_two_disks(hub: Hub, sharded: Path, tmp_path: Path) -> None:
    whole = {path.name: path.read_bytes() for path in sharded.iterdir()}
    other = tmp_path / "other"
    other.mkdir()
    (sharded / "__1_0.distcp").rename(other / "__1_0.distcp")
    ran = ckptkit(hub, "push", sharded, "org/tiny", "--yes", "--also", other)
    assert ran.returncode == 0, ran.stderr
    there = hub.files("org/tiny")
    assert {name: there[name] for name in whole} == whole


@pytest.mark.slow
def test_visibility_is_asked_for_once(hub: Hub, model: Path) -> None:
    assert ckptkit(hub, "push", model, "org/open", "--yes", "--public").returncode == 0
    assert not hub.repositories["org/open"].private
    hub.put("org/closed", {"LICENSE": b"mine"}, private=True)
    ran = ckptkit(hub, "push", model, "org/closed", "--yes", "--public")
    assert "stays private" in ran.stdout
    assert hub.repositories["org/closed"].private
    assert "(public)" in ckptkit(hub, "push", model, "org/open").stdout


@pytest.mark.slow
def test_a_branch_is_made(hub: Hub, model: Path) -> None:
    hub.put("org/tiny", {"LICENSE": b"mine"})
    before = hub.head("org/tiny")
    assert ckptkit(hub, "push", model, "org/tiny", "--yes", "--revision", "bf16").returncode == 0
    assert hub.head("org/tiny") == before
    assert hub.head("org/tiny", "bf16").files.keys() >= {"LICENSE", "model.safetensors"}
    again = ckptkit(hub, "push", model, "org/tiny@bf16", "--yes")
    assert again.stdout.count("unchanged") == 3
    assert ckptkit(hub, "push", model, "org/new", "--yes", "--revision", "bf16").returncode == 0
    assert hub.head("org/new").files.keys() == {".gitattributes"}


@pytest.mark.slow
def test_somebody_else_commits_meanwhile(hub: Hub, model: Path) -> None:
    hub.put("org/tiny", {"LICENSE": b"mine"})
    fault = hub.fail("PUT /upload", "stall")
    process = start(hub, "push", model, "org/tiny", "--yes")
    assert fault.reached.wait(60)
    hub.put("org/tiny", {"model.safetensors": b"theirs"})
    fault.go.set()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 5
    assert "somebody else" in err
    assert hub.files("org/tiny")["model.safetensors"] == b"theirs"


@pytest.mark.slow
def test_a_hub_that_stumbles_is_asked_again(hub: Hub, model: Path) -> None:
    hub.fail("/preupload/", status=503)
    hub.fail("PUT /upload", "drop", after=30)
    ran = ckptkit(hub, "push", model, "org/tiny", "--yes")
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize(
    ("environment", "status", "words"),
    [
        ({"HF_TOKEN": SECRET}, 4, "401"),
        ({"HF_TOKEN": ""}, 4, "hf auth login"),
        ({"HF_TOKEN": SECRET + "ключ"}, 4, ""),
        ({"HF_HUB_OFFLINE": "1"}, 4, "HF_HUB_OFFLINE"),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, 4, "no answer"),
        ({"HF_ENDPOINT": "http://nowhere.invalid"}, 4, "no answer"),
    ],
    ids=["wrong token", "no token", "no ASCII", "offline", "refused", "no such host"],
)
def test_errors_of_the_way(hub: Hub, model: Path, environment: dict[str, str], status: int, words: str) -> None:
    ran = ckptkit(hub, "push", model, "org/tiny", "--yes", **environment)
    assert ran.returncode == status
    assert words in ran.stderr
    assert ran.stderr.startswith("error: ")
    assert "Traceback" not in ran.stderr
    assert "hint: " in ran.stderr
    assert SECRET not in ran.stdout + ran.stderr
    assert not hub.repositories


@pytest.mark.parametrize(
    "place", ["tiny", "../../x", "org/../x", "https://huggingface.co/org/tiny", "org/tiny/x", "spaces/x", ""]
)
def test_what_is_no_repository(model: Path, place: str) -> None:
    with pytest.raises(Usage, match="expected a model repository like org/model, found"):
        push(model, place)


@pytest.mark.parametrize("scheme", ["", "hf://"])
def test_an_address_means_what_it_means_to_other_commands(scheme: str) -> None:
    assert parse_repository_address(f"{scheme}org/tiny") == ("org/tiny", "main")
    assert parse_repository_address(f"{scheme}org/tiny@v1") == ("org/tiny", "v1")
    assert parse_repository_address(f"{scheme}org/tiny@refs/pr/1") == ("org/tiny", "refs/pr/1")
    assert parse_repository_address(f"{scheme}org/tiny@a%2Fb") == ("org/tiny", "a/b")
    with pytest.raises(Usage, match="found the path b in one") as refused:
        parse_repository_address(f"{scheme}org/tiny@a/b")
    assert "--revision" in (refused.value.hint or "")
    assert parse_repository_address(f"{scheme}org/tiny", "a/b") == ("org/tiny", "a/b")


def test_what_is_no_checkpoint(model: Path) -> None:
    with pytest.raises(Usage, match="directories"):
        push(model / "model.safetensors", "org/tiny")
    with pytest.raises(NotACheckpoint):
        push(model / "absent", "org/tiny")
    with pytest.raises(Usage, match="revision"):
        push(model, "org/tiny@a", revision="b")


def test_where_we_may_not_write(hub: Hub, model: Path) -> None:
    ran = ckptkit(hub, "push", model, "stranger/tiny", "--yes", "--json")
    assert ran.returncode == 4
    assert "403" in json.loads(ran.stdout)["error"]["message"]
    assert not hub.repositories


def test_what_others_say_is_repeated_without_tokens() -> None:
    assert as_line_without_token(f"bad header\n 'Bearer {SECRET}'") == "bad header 'Bearer hf_...'"


@pytest.mark.slow
def test_many_files(hub: Hub, tmp_path: Path) -> None:
    root = tmp_path / "many"
    root.mkdir()
    for i in range(1, 31):
        save_file({f"w{i}": torch.full((50,), float(i))}, root / f"model-{i:05d}-of-00030.safetensors")
    index = {f"w{i}": f"model-{i:05d}-of-00030.safetensors" for i in range(1, 31)}
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    ran = ckptkit(hub, "push", root, "org/many", "--yes", "--jobs", "4")
    assert ran.returncode == 0, ran.stderr
    assert "... 14 more" in ran.stdout
    assert len(hub.files("org/many")) == 30 + 3
