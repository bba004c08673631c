"""Passwords: no means of looking at nodes shows one, whether the nodes answer or not."""

from __future__ import annotations

import logging
import re
from contextlib import closing
from itertools import product
from urllib.parse import quote

import pytest
from click.testing import CliRunner
from werkzeug.test import Client

from celery_redlock import QuorumUnavailable, Redlock
from celery_redlock.cli import main
from celery_redlock.survey.exporter import exposition, make_registry
from celery_redlock.web import make_app
from tests.support.names import Log


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:{}@127.0.0.1:1/0",
        "unix://u:{}@/nowhere/at/all.sock",
        "sentinel://u:{}@127.0.0.1:1/m?sentinel_password={}",
        "postgresql://u:{}@127.0.0.1:1/d",
        "etcd://u:{}@127.0.0.1:1",
    ],
)
def test_looking_command_shows_no_password_of_unreachable_nodes(url: str, caplog: Log) -> None:
    caplog.set_level(logging.DEBUG)
    word = "7531/1@qxzqxz"
    node = url.replace("{}", quote(word, safe=""))
    unquoted = url.replace("{}", word)
    texts = []
    commands = [["ls"], ["show", "r"], ["stats"], ["doctor", "--timeout", "1"]]
    for nodes, command in product((node, unquoted), commands):
        for more in ([], ["--json"]):
            result = CliRunner().invoke(main, ["--nodes", nodes, *command, *more])
            assert result.exit_code
            texts.append(result.output + repr(result.exception))
    with closing(Redlock([node])) as redlock:
        with pytest.raises(QuorumUnavailable) as raised:
            redlock.acquire("r")
        texts += [f"{raised.value!r} {raised.value} {vars(raised.value)}"]
        texts += redlock.check(timeout=0.1)
        texts += [exposition(make_registry(redlock))]
        with closing(make_app(redlock=redlock, idle=None)) as page:
            for path in ("/", "/nodes", "/nodes.json", "/locks.json"):
                texts.append(Client(page).get(path).text)
    texts += map(logging.Formatter().format, caplog.records)
    for text in texts:
        assert "qxzqxz" not in text and not re.search("(?<![0-9a-f])7531(?![0-9a-f])", text), text
