"""``pensieve doctor`` tells what blocks a server and how to fix it, and exits accordingly."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from pensieve.cli import doctor as checks
from pensieve.cli import output
from pensieve.cli.doctor import Check, doctor, port, run_checks, show
from pensieve.errors import Unauthenticated
from pensieve.options.serve import ServeOptions
from support.page.feeds import FeedStub
from support.service.fake_server import FakeServerThread


def by_name(findings: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in findings}


def test_this_machine_can_run_it() -> None:
    findings = [*checks.system(), *checks.packages(), *checks.accelerator()]
    assert [check for check in findings if check.state == "fail"] == []
    assert {"python", "cores", "memory", "grpcio", "torch", "msgspec", "kernels"} <= set(by_name(findings))


def test_a_missing_package_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    required = [
        "no-such-package>=1",
        "x; extra == 'dev'",
        'no-such-engine>=2; os_name == "y" and extra == "server"',
    ]
    monkeypatch.setattr("importlib.metadata.requires", lambda _: required)
    found = by_name(list(checks.packages()))
    assert (found["no-such-package"].state, found["no-such-package"].fix) == (
        "fail",
        "pip install 'pensieve'",
    )
    assert found["no-such-engine"].fix == "pip install 'pensieve[server]'"
    assert "x" not in found


def test_a_client_is_told_in_one_line_what_a_server_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else find(name))
    required = ["click>=8", "no-such-engine>=2; extra == 'server'"]
    monkeypatch.setattr("importlib.metadata.requires", lambda _: required)
    findings = run_checks(ServeOptions(store="memory:", listen="127.0.0.1:0"))
    blocking = [(check.name, check.fix) for check in findings if check.state == "fail"]
    assert blocking == [("server", "pip install 'pensieve[server]'")]


@pytest.mark.parametrize("width", [40, 80])
def test_it_fits_the_terminal(width: int) -> None:
    """What can be copied is not cut apart, all else is wrapped below itself."""
    long = Check(
        "file", "fail", "/some/where/that/is.sqlite3 is not writable", "a fix of many words " * 5, "store"
    )
    out = io.StringIO()
    show([long], Console(file=out, width=width, force_terminal=True, color_system=None))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "/some/where/that/is.sqlite3" in out.getvalue()
    assert lines[-1] == "1 blocking problem" and len(lines) > 3
    plain = io.StringIO()
    show([long], Console(file=plain, width=output.UNBOUNDED_WIDTH))
    assert len(plain.getvalue().splitlines()) == 4, "a line stays a line where it is read by a program"


def test_torch_that_does_not_load_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    (found,) = checks.accelerator()
    assert found.state == "fail"
    assert found.fix.startswith("pip install torch==")


@pytest.mark.parametrize(("origin", "state"), [(None, "note"), ("/somewhere/kernels/__init__.py", "fail")])
def test_a_top_level_kernels_is_noticed(
    monkeypatch: pytest.MonkeyPatch, origin: str | None, state: str
) -> None:
    spec = ModuleSpec("kernels", None, origin=origin, is_package=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: spec)
    assert by_name(list(checks.packages()))["kernels"].state == state


def test_stores(tmp_path: Path) -> None:
    assert by_name(list(checks.store("memory:")))["memory"].state == "note"
    fresh = by_name(list(checks.store(f"sqlite:///{tmp_path}/deep/er/history.db")))
    assert (fresh["sqlite"].state, fresh["file"].state) == ("ok", "ok")
    assert "does not exist yet" in fresh["file"].found
    assert not (tmp_path / "deep").exists()
    unreachable = by_name(list(checks.store("redis://user:s3cret@127.0.0.1:1/0")))["redis"]
    assert unreachable.state == "fail"
    assert "s3cret" not in repr(unreachable)
    one = by_name(list(checks.store("redis://127.0.0.1:1/0?replicas=1&socket_timeout=1")))["redis"]
    assert one.state == "fail" and "connecting to 127.0.0.1:1" in one.found
    several = by_name(list(checks.store("redis+cluster://:s3cret@a,b:7000")))["redis"]
    assert several.state == "note" and several.found.startswith("a,b:7000")


def test_a_file_in_the_way_of_the_store_blocks(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("")
    assert by_name(list(checks.store(f"sqlite:///{tmp_path}/plain/history.db")))["file"].state == "fail"


def test_redis_without_append_only_file_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    import redis

    def client(aof: int) -> types.SimpleNamespace:
        info = {"redis_version": "7.0.15", "aof_enabled": aof}
        return types.SimpleNamespace(info=lambda: info, close=lambda: None)

    for aof, state in ((0, "note"), (1, "ok")):
        monkeypatch.setattr(redis.Redis, "from_url", lambda *_, aof=aof, **__: client(aof))
        assert by_name(list(checks.store("redis://127.0.0.1:6379/0")))["redis"].state == state


def test_a_folder_that_is_not_there_blocks_and_a_hub_id_does_not(tmp_path: Path) -> None:
    (found,) = checks.model(str(tmp_path / "nowhere"))
    assert found.state == "fail" and found.found.endswith("no such folder")
    (found,) = checks.model("somebody/some-model")
    assert found.state == "note"


def test_model_folder_without_weights(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8,
              "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 64}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = by_name(list(checks.model(str(tmp_path))))
    assert found["architecture"].state == "ok"
    assert found["weights"].state == "fail"
    assert found["tokenizer"].state == "fail"


def test_missing_shard(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = checks._weights(tmp_path)
    assert found.state == "fail"
    assert found.found.endswith("weight_map names b.safetensors, which is missing (1 of 2 files are)")


def test_unsupported_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    (found,) = checks.model(str(tmp_path))
    assert (found.name, found.state) == ("architecture", "fail")


def test_port_in_use_blocks() -> None:
    with FeedStub() as other:  # something that speaks HTTP, and is none of ours
        assert port("admin", other.address).state == "fail"
        assert port("listen", other.address).state == "fail"
    assert port("listen", "127.0.0.1:0").state == "ok"
    assert port("listen", "192.0.2.1:0").state == "fail"  # no address of this machine


def test_a_server_of_ours_in_the_port_is_no_problem() -> None:
    """Who runs doctor beside the server that they have just started is not told that nothing works."""
    with FakeServerThread() as server:
        found = port("listen", server.target)
        assert (found.state, found.found) == ("note", f"{server.target}: a Pensieve server is running there")
        server.fake.unary_script.append(Unauthenticated("who are you?", reason="CREDENTIAL_MISSING"))
        assert port("listen", server.target).state == "note"
    with FeedStub() as admin:
        admin.body = b'# TYPE pensieve_build_info gauge\npensieve_build_info{version="9"} 1.0\n'
        assert port("admin", admin.address).state == "note"


def test_json_and_exit_code(tmp_path: Path) -> None:
    model = str(tmp_path / "empty")
    (tmp_path / "empty").mkdir()
    arguments = [
        "--json",
        "--model",
        model,
        "--store",
        "memory:",
        "--listen",
        "127.0.0.1:0",
        "--admin",
        "127.0.0.1:0",
    ]
    result = CliRunner().invoke(doctor, arguments)
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["ok"] is False
    assert {check["area"] for check in report["checks"] if check["state"] == "fail"} == {"model"}


def test_table_names_problem_and_fix(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        doctor,
        ["--model", str(tmp_path), "--store", "memory:", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"],
    )
    assert result.exit_code == 1
    assert "fail" in result.stdout
    assert "1 blocking problem" in result.stdout


class FakeCuda:
    """A torch with one GPU."""

    __version__ = "2.99"

    def __init__(self, free: int = 130, capability: tuple[int, int] = (9, 0)) -> None:
        self.version = types.SimpleNamespace(cuda="13.0")
        self.get_num_threads = lambda: 4
        self.cuda = types.SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: 1,
            get_device_name=lambda index: "NVIDIA H200",
            get_device_capability=lambda index: capability,
            mem_get_info=lambda index: (free << 30, 140 << 30),
        )


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch", FakeCuda())
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.6.0"))
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
    )
    monkeypatch.setattr(checks.driver_version, "__defaults__", (tmp_path / "version",))


def test_a_gpu_and_all_that_it_needs(nvidia: None) -> None:
    found = by_name(list(checks.accelerator()))
    assert found["gpu 0"].found == "NVIDIA H200, compute capability 9.0, 140 GiB, 130 GiB free"
    assert (found["driver"].found, found["triton"].found) == ("580.65.06", "3.6.0")
    assert "CUDA 13.0" in found["torch"].found
    assert {check.state for name, check in found.items() if name != "pinned memory"} == {"ok"}


@pytest.mark.parametrize(
    ("free", "capability", "state", "said"),
    [(10, (9, 0), "note", "nvidia-smi"), (130, (7, 5), "fail", "8.0")],
)
def test_a_gpu_that_is_in_use_or_too_old(
    monkeypatch: pytest.MonkeyPatch,
    nvidia: None,
    free: int,
    capability: tuple[int, int],
    state: str,
    said: str,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", FakeCuda(free, capability))
    found = by_name(list(checks.accelerator()))["gpu 0"]
    assert found.state == state
    assert said in found.fix


def test_a_gpu_without_what_its_kernels_need(monkeypatch: pytest.MonkeyPatch, nvidia: None) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.1.0"))
    found = by_name(list(checks.accelerator()))
    assert (found["triton"].state, found["triton"].fix) == ("fail", "needs 3.4")
    assert found["C compiler"].state == "note"
    monkeypatch.setitem(sys.modules, "triton", None)
    assert by_name(list(checks.accelerator()))["triton"].state == "fail"


@pytest.mark.parametrize(("limit", "state"), [(8 << 20, "note"), (-1, "ok")])
def test_the_limit_of_locked_memory(
    monkeypatch: pytest.MonkeyPatch, nvidia: None, limit: int, state: str
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (limit, limit))
    assert by_name(list(checks.accelerator()))["pinned memory"].state == state


@pytest.mark.parametrize(
    ("driver", "nodes", "cuda", "said"),
    [
        (None, [], None, "no NVIDIA driver"),
        ("580.1", [], "13.0", "no device in this container"),
        ("580.1", ["nvidia0"], None, "built without CUDA"),
        ("580.1", ["nvidia0"], "13.0", "torch for CUDA 13.0 sees no device"),
    ],
)
def test_why_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, driver: str | None, nodes: list[str], cuda: str | None, said: str
) -> None:
    monkeypatch.setattr(checks, "driver_version", lambda: driver)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(nodes))
    found = checks._no_gpu(types.SimpleNamespace(version=types.SimpleNamespace(cuda=cuda)))
    assert (found.state, found.name) == ("note", "gpu")
    assert said in found.found
    assert found.fix
