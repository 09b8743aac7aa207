"""Flags, file and defaults: who wins, what is refused, and what --print-config says about it."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pensieve.cli.gateway import gateway
from pensieve.config import DoorSettings, EngineOptions, batch_limits
from pensieve.options.serve import ServeOptions, resolve
from pensieve.options.table import GROUPS, HIDDEN_OPTIONS, OFF_SWITCHES, OPTIONS
from pensieve.options.values import duration, is_loopback, split_address
from pensieve.server.settings import TurnSettings
from support.sources import tree


def write(folder: Path, text: str) -> Path:
    path = folder / "server.toml"
    path.write_text(text)
    return path


def refusal(flags: dict[str, object], config: Path | None = None) -> str:
    with pytest.raises(click.UsageError) as caught:
        resolve(flags, config)
    assert caught.value.exit_code == 2
    assert "\n" not in caught.value.message
    return caught.value.message


def test_table_and_struct_agree() -> None:
    assert sorted(option.field for option in OPTIONS) == sorted(ServeOptions.__struct_fields__)
    assert len({option.name for option in OPTIONS}) == len(OPTIONS)
    assert all(option.help.endswith(".") and option.why for option in OPTIONS)


def test_each_default_is_written_once() -> None:
    """Where a field has its default from another class or from a constant, it cannot drift from it."""
    written: dict[str, list[str]] = {}
    for module in ("config", "options/serve", "server/settings", "engine/worker/sizing"):
        for owner in ast.walk(tree(Path(f"pensieve/{module}.py"))):
            for line in owner.body if isinstance(owner, ast.ClassDef) else ():
                # "" stands for nothing, which no other place can get wrong.
                if (
                    isinstance(line, ast.AnnAssign)
                    and isinstance(line.value, ast.Constant)
                    and line.value.value != ""
                ):
                    assert isinstance(owner, ast.ClassDef)
                    written.setdefault(ast.unparse(line.target), []).append(f"{module}: {owner.name}")
    assert {"chunk_tokens", "max_queued", "drain_grace_s"} <= set(written)
    assert {name: places for name, places in written.items() if len(places) > 1} == {}


def test_the_service_has_the_defaults_of_the_options() -> None:
    options, settings = ServeOptions(), TurnSettings(replica="r")
    shared = "lease_s", "heartbeat_s", "disconnect_grace_s", "max_wait_s", "max_queued", "max_queued_tokens"
    for name in shared:
        assert getattr(settings, name) == getattr(options, name), name


def test_defaults_pass_their_own_parser() -> None:
    defaults = ServeOptions()
    for option in OPTIONS:
        value = getattr(defaults, option.field)
        if value is not None:
            assert option.parse(value) == value, option.name


def test_flag_beats_file_beats_default(tmp_path: Path) -> None:
    config = write(tmp_path, 'max-running = 7\nmax-queued = 9\nlease = "4s"\nstateless = true\n')
    resolved = resolve({"max-running": "3", "stateless": False}, config)
    assert resolved.options.max_running == 3
    assert resolved.options.max_queued == 9
    assert resolved.options.lease_s == 4.0
    assert resolved.options.stateless is False
    assert resolved.options.chunk_tokens == ServeOptions().chunk_tokens
    assert {resolved.sources[name] for name in ("max-running", "stateless")} == {"flag"}
    assert {resolved.sources[name] for name in ("max-queued", "lease")} == {"file"}
    assert resolved.sources["chunk-tokens"] == "default"


def test_a_variable_is_between_flag_and_file(tmp_path: Path) -> None:
    config = write(tmp_path, "max-running = 7\nmax-queued = 9\n")
    variables = {"max-running": "PENSIEVE_SERVE_MAX_RUNNING"}
    resolved = resolve({"max-running": "3", "chunk-tokens": "16"}, config, variables)
    assert (resolved.options.max_running, resolved.options.max_queued) == (3, 9)
    assert {name: resolved.sources[name] for name in ("max-running", "max-queued", "chunk-tokens")} == {
        "max-running": "environment",
        "max-queued": "file",
        "chunk-tokens": "flag",
    }
    assert "max-running = 3  # environment PENSIEVE_SERVE_MAX_RUNNING" in resolved.render()
    with pytest.raises(click.UsageError, match=r"^PENSIEVE_SERVE_MAX_RUNNING: expected a whole number"):
        resolve({"max-running": "x"}, None, variables)


def test_every_option_has_its_heading() -> None:
    named = [name for names in GROUPS.values() for name in names]
    assert len(named) == len(set(named))
    assert set(named) == {option.name for option in OPTIONS} - HIDDEN_OPTIONS | {
        "config",
        "print-config",
        "help",
        "off",
    }


@pytest.mark.parametrize("idea", OFF_SWITCHES)
def test_off_is_the_switch_of_an_idea(tmp_path: Path, idea: str) -> None:
    """By flag, variable and file it sets what the idea's own switch sets, and nothing else."""
    option, value = OFF_SWITCHES[idea]
    alone = resolve({option: value}).options
    assert alone != ServeOptions()
    assert resolve({"off": (idea,)}).options == alone
    assert resolve({}, write(tmp_path, f'off = "{idea}"')).options == alone
    assert resolve({}, write(tmp_path, f'off = ["{idea}"]')).options == alone
    variable = resolve({"off": (idea,)}, None, {"off": "PENSIEVE_SERVE_OFF"})
    assert variable.options == alone and "environment PENSIEVE_SERVE_OFF" in variable.render()


def test_off_and_the_switch_of_the_idea(tmp_path: Path) -> None:
    """They may say the same, or one of them is nearer to the user: a flag wins, then the environment, then the file."""
    assert not resolve({"off": ("sharing",), "sharing": False}).options.prefix_sharing
    assert refusal({"off": ("sharing",), "sharing": True}) == "--off: sharing contradicts --sharing"
    assert "--no-stateless" in refusal({"off": ("state",), "stateless": False})
    by_variable = {"off": "PENSIEVE_SERVE_OFF"}
    assert resolve({"off": ("sharing",), "sharing": True}, None, by_variable).options.prefix_sharing
    assert not resolve(
        {"off": ("sharing",), "sharing": True}, None, {"sharing": "PENSIEVE_SERVE_SHARING"}
    ).options.prefix_sharing
    config = write(tmp_path, 'off = ["sharing", "state"]')
    options = resolve({"stateless": False}, config).options
    assert (options.prefix_sharing, options.stateless) == (False, False)
    assert "contradicts sharing" in refusal({}, write(tmp_path, 'off = "sharing"\nsharing = true'))
    assert "expected names of state, sharing" in refusal({}, write(tmp_path, 'off = ["sharig"]'))
    assert "expected names of" in refusal({}, write(tmp_path, "off = true"))


def test_the_admin_port_is_one_that_nothing_else_takes() -> None:
    host, _, port = ServeOptions().admin.rpartition(":")
    assert host == "127.0.0.1"
    assert 1024 <= int(port) < 32768, "from there on the system gives ports to outgoing connections"
    assert not 9090 <= int(port) < 11000, "where Prometheus and its exporters are"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("chunk-tokens", "33", "power of two"),
        ("chunk-tokens", "0", "from 1 to 256"),
        ("max-running", "many", "whole number"),
        ("max-running", "1.5", "whole number"),
        ("max-running", "99999999999999999999", "to 2147483647"),
        ("max-connections", "2147483648", "to 2147483647"),
        ("threads", "100000", "from 0 to 1024"),
        ("device-cache", "4GB", "40GiB"),
        ("device-cache", "0", "must be at least 1"),
        ("host-cache", "-1GiB", "40GiB"),
        ("device-cache", "8GiB..4GB", "a range such as 8GiB..60GiB"),
        ("device-cache", "8GiB..", "a range such as 8GiB..60GiB"),
        ("device-cache", "..8GiB", "a range such as 8GiB..60GiB"),
        ("device-cache", "1GiB..2GiB..3GiB", "a range such as 8GiB..60GiB"),
        ("device-cache", "1GiB...3GiB", "a range such as 8GiB..60GiB"),
        ("device-cache", "1GiB..auto", "a range such as 8GiB..60GiB"),
        ("device-cache", "0..1GiB", "the floor must be at least 1"),
        ("device-cache", "2GiB..2047MiB", "the floor 2GiB is above the ceiling 2047MiB"),
        ("device-cache", "20tokens..10tokens", "the floor 20tokens is above the ceiling 10tokens"),
        ("host-cache", "1GiB..2GiB", "40GiB"),
        ("device-slack", "2tokens", "a size such as 2GiB"),
        ("device-slack", "1GiB..2GiB", "a size such as 2GiB"),
        ("device-slack", "-1", "a size such as 2GiB"),
        ("idle-release", "-1s", "duration"),
        ("idle-release", "8d", "duration"),
        ("policy", "fifo", "retention, lru"),
        ("device", "tpu", "auto, cpu, cuda"),
        ("swap-watermark", "1.0", "below 1"),
        ("swap-watermark", "nan", "below 1"),
        ("decode-reserve", "-0.1", "below 1"),
        ("listen", "localhost", "HOST:PORT"),
        ("listen", "127.0.0.1:70000", "65535"),
        ("listen", "::1:50051", "brackets"),
        ("listen", "http://127.0.0.1:50051", "without a scheme"),
        ("store", "postgres://x", "sqlite:///PATH"),
        ("store", "sqlite:history.db", "sqlite:///PATH"),
        ("store", "redis://:abc/0", "redis://HOST:PORT/DB"),
        ("store", "redis://host:port/0", "redis://HOST:PORT/DB"),
        ("store", "redis+sentinel://a,:1/history", "redis://HOST:PORT/DB"),
        ("store", "redis+other://a/0", "redis://HOST:PORT/DB"),
        ("lease", "soon", "15s"),
        ("lease", "10ms", "1s to 3600s"),
        ("tensor-parallel", "0", "from 1 to 64"),
        ("cost-profile", "/no/such/file.json", "cannot read"),
        ("model", "", "non-empty"),
        ("log-level", "loud", "warning"),
    ],
)
def test_bad_value(name: str, value: str, said: str) -> None:
    message = refusal({name: value})
    assert message.startswith(f"--{name}: ")
    assert said in message


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("max_running = 3", "did you mean 'max-running'?"),
        ("polcy = 'lru'", "did you mean 'policy'?"),
        ("zzzzzz = 1", "known keys: admin"),
        ("[serve]\nmodel = 'demo'", "unknown key 'serve'"),
        ("max-running = true", "whole number"),
        ("max-running = 2.0", "whole number"),
        ("stateless = 'yes'", "true or false"),
        ("swap-watermark = true", "share"),
        ("lease = true", "duration"),
        ("model = 3", "non-empty string"),
        ("model = ", "is not TOML"),
    ],
)
def test_bad_file(tmp_path: Path, line: str, said: str) -> None:
    message = refusal({}, write(tmp_path, line))
    assert said in message
    assert "server.toml" in message


def test_missing_file(tmp_path: Path) -> None:
    assert "cannot read" in refusal({}, tmp_path / "absent.toml")


def test_files_named_in_a_file_lie_beside_it(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text("{}")
    resolved = resolve({}, write(tmp_path, 'cost-profile = "profile.json"'))
    assert resolved.options.cost_profile == str(tmp_path.resolve() / "profile.json")
    assert resolved.options.engine_options("/m").cost_profile == str(tmp_path.resolve() / "profile.json")


@pytest.mark.parametrize("word", ["auto", "estimate"])
def test_a_word_in_place_of_a_file_is_no_file_name(tmp_path: Path, word: str) -> None:
    assert resolve({"cost-profile": word}).options.cost_profile == word
    resolved = resolve({}, write(tmp_path, f'cost-profile = "{word}"'))
    assert resolved.options.engine_options("/m").cost_profile == word


def test_sizes_of_their_own_accord(tmp_path: Path) -> None:
    options = resolve(
        {"device-cache": "auto"}, write(tmp_path, 'host-cache = "auto"\nmax-running = 0')
    ).options
    assert (options.device_cache, options.host_cache) == ("auto", "auto")
    assert batch_limits(options, "cpu") == (512, 64)
    assert batch_limits(options, "cuda") == (2048, 256)
    assert batch_limits(resolve({"max-running": "3", "max-batch-tokens": "9"}).options, "cuda") == (9, 3)
    assert "max-batch-tokens = 0  # default: auto: 512 on a CPU" in resolve({}).render()


def test_off_loopback_needs_protection(tmp_path: Path) -> None:
    pem = tmp_path / "file.pem"
    pem.write_text("x")
    tls = {"tls-cert": str(pem), "tls-key": str(pem)}
    assert "--tls-cert and --tls-key" in refusal({"listen": "0.0.0.0:1"})
    assert "--tls-cert" in refusal({"listen": "[::]:1", "api-keys": str(pem)})
    assert "--api-keys" in refusal({"listen": "0.0.0.0:1", **tls})
    assert "--admin" in refusal({"admin": "0.0.0.0:1"})
    assert "--tls-key" in refusal({"tls-cert": str(pem)})
    assert "--tls-cert" in refusal({"tls-key": str(pem)})
    resolve({"listen": "0.0.0.0:1", "api-keys": str(pem), **tls})
    resolve({"listen": "0.0.0.0:1", "admin": "0.0.0.0:2", "insecure-i-know": True})


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("example.org:1", False),
        ("localhost.example.org:1", False),
    ],
)
def test_is_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


@given(st.text(max_size=30))
def test_split_address_never_breaks_otherwise(text: str) -> None:
    try:
        host, port = split_address(text)
    except ValueError:
        return
    assert host
    assert 0 <= port <= 65535


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("15s", 15.0), ("500ms", 0.5), ("2m", 120.0), ("1h", 3600.0), (3, 3.0), ("0.5", 0.5)],
)
def test_duration(written: object, seconds: float) -> None:
    assert duration(0, 3600)(written) == seconds


def test_print_config_is_a_config(tmp_path: Path) -> None:
    first = resolve({"lease": "1500ms", "model": 'odd "name"', "swap-watermark": "0", "stateless": True})
    text = first.render()
    assert "flag --lease" in text
    assert "default: " in text
    again = resolve({}, write(tmp_path, text))
    assert again.options == first.options
    assert set(tomllib.loads(text)) | {
        option.name for option in OPTIONS if f"# {option.name} is unset" in text
    } == {option.name for option in OPTIONS}


def test_print_config_shows_no_password() -> None:
    text = resolve({"store": "redis://user:s3cret@127.0.0.1:6379/0"}).render()
    assert "s3cret" not in text
    assert "redis://user:***@127.0.0.1:6379/0" in text
    assert "s3cret" not in resolve({"traces": "http://u:s3cret@127.0.0.1:4318/v1/traces?key=s3cret"}).render()
    several = "redis+sentinel://u:s3cret@a:1,[::1],c/history?sentinel_password=s3cret&replicas=1"
    text = resolve({"store": several}).render()
    assert "s3cret" not in text
    assert "redis+sentinel://u:***@a:1,[::1],c/history?sentinel_password=***&replicas=1" in text


@pytest.mark.parametrize(
    ("option", "url"),
    [
        *(("store", "redis://user:s3cret@127.0.0.1:none/0"), ("store", "redis://:s3c/s3cret@127.0.0.1/0")),
        *(
            ("store", "rediz://:s3cret@a/0?password=s3cret"),
            ("traces", "ftp://u:s3cret@a/v1/traces?key=s3cret"),
        ),
    ],
)
def test_an_error_shows_no_password(option: str, url: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        resolve({option: url})
    assert ":***@" in caught.value.message and "s3cret" not in caught.value.message


def test_engine_options_carry_every_shared_value() -> None:
    changed = ServeOptions(
        device="cpu", dtype="float32", device_cache="7tokens", host_cache="8tokens", chunk_tokens=16, policy="lru",
        swap_watermark=0.5, decode_reserve=0.2, max_batch_tokens=5, max_running=6, max_queued=7, stateless=True,
        unified_batch=False, swap_in_first=False, pipelined_swap_in=False,
        context_limit=99, threads=3, cost_profile="/p.json", load_format="dummy", overlapped=False,
        cuda_graphs=False, shared_prefix_attention=False, swap_mechanism="kernel", verify_swap=True,
        prefix_sharing=False, tensor_parallel=2, all_reduce="nccl", device_slack="1GiB", idle_release_s=60.0,
        invariant=True, weights="fp8", kv_dtype="int8", speculation=True,
    )  # fmt: skip
    engine, default = changed.engine_options("/model", eos_token_ids=(1,)), EngineOptions(model="")
    names = set(EngineOptions.__struct_fields__) - {"seed"}
    assert {name for name in names if getattr(engine, name) == getattr(default, name)} == set()


@pytest.mark.parametrize(
    "written", ["1GiB..1GiB", " 512MiB .. 1GiB ", "64tokens..4096tokens", "2GiB..10tokens"]
)
def test_a_range_is_kept_as_written(tmp_path: Path, written: str) -> None:
    """Sides in different units are compared by the engine, which knows the model."""
    given = {"device-cache": written, "device-slack": "2GiB", "idle-release": "10m"}
    lines = "\n".join(f'{name} = "{value}"' for name, value in given.items())
    for resolved in (resolve(given), resolve({}, write(tmp_path, lines))):
        engine = resolved.options.engine_options("/m")
        assert (engine.device_cache, engine.device_slack, engine.idle_release_s) == (written, "2GiB", 600.0)
        assert resolve({}, write(tmp_path, resolved.render())).options == resolved.options


@given(st.sampled_from(["KiB", "MiB", "tokens"]), st.integers(0, 9), st.integers(0, 9))
def test_a_range_has_its_floor_below_its_ceiling(unit: str, floor: int, ceiling: int) -> None:
    written = f"{floor}{unit}..{ceiling}{unit}"
    try:
        assert resolve({"device-cache": written}).options.device_cache == written
        followed = True
    except click.UsageError:
        followed = False
    assert followed == (1 <= floor <= ceiling)


def test_slack_and_idle_release_require_a_range() -> None:
    for name, value in (("device-slack", "1GiB"), ("idle-release", "1s")):
        for size in ("auto", "8GiB", "64tokens"):
            assert refusal({name: value, "device-cache": size}).startswith(f"--{name}: requires a range")
        resolve({name: value, "device-cache": "8GiB..9GiB"})
    resolve({"device-slack": "0", "idle-release": "0"})
    resolve({"device-slack": "0GiB"})


def test_defaults_are_those_of_the_engine() -> None:
    assert ServeOptions().engine_options("/m") == EngineOptions(model="/m")


def test_default_store_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert ServeOptions().store == f"sqlite:///{tmp_path}/pensieve/pensieve.sqlite3"
    monkeypatch.setenv("XDG_STATE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ServeOptions().store == f"sqlite:///{tmp_path}/.local/state/pensieve/pensieve.sqlite3"


def test_options_are_frozen() -> None:
    with pytest.raises(AttributeError):
        ServeOptions().model = "other"  # type: ignore[misc]


def test_a_misspelt_flag_name_is_a_bug() -> None:
    with pytest.raises(KeyError, match="max_running"):
        resolve({"max_running": 3})


def test_options_of_the_door(tmp_path: Path) -> None:
    config = write(
        tmp_path,
        'http-cors-origin = ["https://a.example", "https://b.example:8443"]\n'
        'http-trusted-proxy = "10.0.0.0/8 ::1"\n',
    )
    options = resolve({"http-patience": "3s"}, config).options
    assert options.http_cors_origin == "https://a.example https://b.example:8443"
    assert (options.http_trusted_proxy, options.http_patience_s) == ("10.0.0.0/8 ::1", 3.0)
    assert "got 'a.example'" in refusal({"http-cors-origin": "https://b.example a.example"})
    assert "got 'https://a.example/'" in refusal({"http-cors-origin": "https://a.example/"})
    assert resolve({"http-host": "Chat.lan box"}).options.http_host == "chat.lan box"
    assert "got 'chat.lan:80'" in refusal({"http-host": "chat.lan:80"})
    assert "got 'proxy.local'" in refusal({"http-trusted-proxy": "proxy.local"})


def test_a_door_of_its_own_has_the_limits_of_the_servers() -> None:
    options, settings = ServeOptions(), DoorSettings("target")
    assert settings.max_body_bytes == options.http_max_body << 20
    assert settings.patience_s == options.http_patience_s
    said = CliRunner().invoke(
        gateway, ["--target", "x:1", "--cors-origin", "https://a.example", "--cors-origin", "b"]
    )
    assert said.exit_code == 2 and "got 'b'" in said.output
    said = CliRunner().invoke(gateway, ["--target", "x:1", "--max-body", "65"])
    assert said.exit_code == 2 and "from 1 to 64" in said.output
