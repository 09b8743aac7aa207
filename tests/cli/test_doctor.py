"""``pensieve doctor`` tells what blocks a server and how to fix it, and exits accordingly."""

from __future__ import annotations

import json
import socket
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from click.testing import CliRunner

from pensieve import doctor_checks as checks
from pensieve.doctor import doctor
from pensieve.doctor_checks import Check


def by_name(findings: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in findings}


def test_this_machine_can_run_it() -> None:
    findings = [*checks.system(), *checks.packages(), *checks.accelerator()]
    assert [check for check in findings if check.state == "fail"] == []
    assert {"python", "cores", "memory", "grpcio", "torch", "msgspec", "kernels"} <= set(by_name(findings))


def test_a_missing_package_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ["no-such-package>=1", "x; extra == 'dev'"])
    found = by_name(list(checks.packages()))["no-such-package"]
    assert (found.state, found.fix) == ("fail", "pip install no-such-package")
    assert "x" not in by_name(list(checks.packages()))


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
    assert "not there yet" in fresh["file"].found
    assert not (tmp_path / "deep").exists()
    unreachable = by_name(list(checks.store("redis://user:s3cret@127.0.0.1:1/0")))["redis"]
    assert unreachable.state == "fail"
    assert "s3cret" not in repr(unreachable)


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
    assert (found.state, found.found) == ("fail", "missing: b.safetensors")


def test_unsupported_architecture(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    (found,) = checks.model(str(tmp_path))
    assert (found.name, found.state) == ("architecture", "fail")


def test_port_in_use_blocks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert checks.port("listen", f"127.0.0.1:{taken.getsockname()[1]}").state == "fail"
    assert checks.port("listen", "127.0.0.1:0").state == "ok"
    assert checks.port("listen", "192.0.2.1:0").state == "fail"  # no address of this machine


def test_json_and_exit_code(tmp_path: Path) -> None:
    model = str(tmp_path / "empty")
    (tmp_path / "empty").mkdir()
    arguments = ["--json", "--model", model, "--store", "memory:", "--listen", "127.0.0.1:0"]
    result = CliRunner().invoke(doctor, arguments)
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["ok"] is False
    assert {check["area"] for check in report["checks"] if check["state"] == "fail"} == {"model"}


def test_table_names_problem_and_fix(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        doctor, ["--model", str(tmp_path), "--store", "memory:", "--listen", "127.0.0.1:0"]
    )
    assert result.exit_code == 1
    assert "fail" in result.stdout
    assert "1 blocking problem" in result.stdout
