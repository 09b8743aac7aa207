"""The name that an operator gives to the model: in every list, call and answer, and behind a gateway."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from openai import NotFoundError, OpenAI

from pensieve.client import Client
from pensieve.errors import InvalidArgument
from pensieve.options.serve import resolve
from support.engine.fake_engine import Script
from support.http.gateway import gateway
from support.service.server_process import launched

NAME = "team/chat v1"


@pytest.mark.timeout(120)
def test_clients_read_and_send_the_given_name(tmp_path: Path) -> None:
    with (
        launched(tmp_path, Script(), http="127.0.0.1:0", served_model_name=NAME) as server,
        gateway(server.grpc) as url,
    ):
        for base in (f"http://{server.http}", url):
            with OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client:
                assert [model.id for model in client.models.list()] == [NAME]
                assert client.models.retrieve(NAME).id == NAME
                said = [{"role": "user", "content": "hello"}]
                chat = client.chat.completions.create(model=NAME, messages=said, max_tokens=3)  # type: ignore[call-overload]
                assert chat.model == NAME
                assert client.completions.create(model=NAME, prompt="hello", max_tokens=3).model == NAME
                response = client.responses.create(model=NAME, input="hello", max_output_tokens=3)
                assert response.model == client.responses.retrieve(response.id).model == NAME
                for other in ("model", "team/chat", NAME.upper()):
                    with pytest.raises(NotFoundError, match="is not served here"):
                        client.responses.create(model=other, input="hello", max_output_tokens=3)
        with Client(server.grpc) as client:
            assert client.server_info().model == NAME
            assert client.create_session(model=NAME)
            with pytest.raises(InvalidArgument, match="is not served here"):
                client.create_session(model="model")


@pytest.mark.parametrize("name", ["", " ", "a\nb", "a\tb", " a", "a ", "a\x7f", "x" * 257, "\ud800"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(click.UsageError, match="served-model-name: expected a ") as refused:
        resolve({"served-model-name": name})
    assert "\n" not in refused.value.message


def test_flag_environment_and_file(tmp_path: Path) -> None:
    variable = "PENSIEVE_SERVE_SERVED_MODEL_NAME"
    config = tmp_path / "server.toml"
    config.write_text(f'served-model-name = "{NAME}"\n')
    by_file = resolve({}, config)
    assert by_file.options.served_model_name == NAME
    assert f'served-model-name = "{NAME}"  # file {config}' in by_file.render()
    assert "# served-model-name is unset" in resolve({}).render()
    by_variable = resolve({"served-model-name": "by variable"}, config, {"served-model-name": variable})
    assert f'served-model-name = "by variable"  # environment {variable}' in by_variable.render()
