"""s3fs's options and the AWS environment, read to one configuration; sizes of parts."""

from __future__ import annotations

import pytest

from ray_goodput.errors import ConfigError
from ray_goodput.storage.cloud import CloudStore
from ray_goodput.storage.cloud_options import S3Options
from ray_goodput.storage.cloud_transfer import MIB, part_bytes_of

ENV = {
    "AWS_ACCESS_KEY_ID": "env-key",
    "AWS_SECRET_ACCESS_KEY": "env-secret",
    "AWS_SESSION_TOKEN": "env-token",
    "AWS_REGION": "env-region",
    "AWS_ENDPOINT_URL": "http://general:1",
}


def test_every_spelling_of_s3fs_is_understood() -> None:
    short = S3Options.parse({"key": "k", "secret": "s", "token": "t", "endpoint_url": "http://e:1"}, {})
    kwargs = {
        "aws_access_key_id": "k",
        "aws_secret_access_key": "s",
        "aws_session_token": "t",
        "endpoint_url": "http://e:1",
    }
    assert S3Options.parse({"client_kwargs": kwargs}, {}) == short
    assert S3Options.parse({"username": "k", "password": "s", "token": "t", "endpoint_url": "http://e:1"}, {}) == short
    rich = S3Options.parse(
        {
            "anon": True,
            "client_kwargs": {"region_name": "r", "verify": False},
            "config_kwargs": {"s3": {"addressing_style": "virtual"}},
            "s3_additional_kwargs": {"ServerSideEncryption": "AES256"},
            "default_block_size": 5,
            "use_listings_cache": False,
        },
        {},
    )
    assert (rich.anon, rich.region, rich.verify, rich.virtual_host) == (True, "r", False, True)
    assert rich.upload == {"aws_server_side_encryption": "AES256"}


def test_an_unknown_option_is_named_and_its_value_is_not_shown() -> None:
    bad = {"keyy": "hush", "client_kwargs": {"region": "hush"}, "config_kwargs": {"proxies": "hush"}}
    with pytest.raises(ConfigError, match=r"client_kwargs\.region, config_kwargs\.proxies, keyy") as caught:
        S3Options.parse(bad, {})
    assert "hush" not in str(caught.value)


def test_arguments_come_before_the_environment_and_never_mix_with_its_credentials() -> None:
    assert (env := S3Options.parse({}, ENV)).key == "env-key"
    assert (env.secret, env.token, env.region, env.endpoint) == (
        "env-secret",
        "env-token",
        "env-region",
        "http://general:1",
    )
    given = S3Options.parse({"key": "k", "secret": "s", "client_kwargs": {"region_name": "r"}}, ENV)
    assert (given.key, given.secret, given.token, given.region) == ("k", "s", None, "r")
    assert S3Options.parse({"anon": True}, ENV).key is None
    assert S3Options.parse({"profile": "p"}, ENV).key is None
    assert S3Options.parse({}, {**ENV, "AWS_ENDPOINT_URL_S3": "http://s3:1"}).endpoint == "http://s3:1"
    assert S3Options.parse({"endpoint_url": None}, ENV).endpoint == "http://general:1"


def test_half_a_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="only one"):
        S3Options.parse({"key": "k"}, {})
    with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY"):
        S3Options.parse({}, {"AWS_ACCESS_KEY_ID": "k"})


def test_an_endpoint_without_a_scheme_follows_use_ssl() -> None:
    assert S3Options.parse({"endpoint_url": "host:9000"}, {}).endpoint == "https://host:9000"
    assert S3Options.parse({"endpoint_url": "host:9000", "use_ssl": False}, {}).endpoint == "http://host:9000"
    assert S3Options.parse({}, {}).endpoint is None


def test_secrets_show_in_no_repr() -> None:
    options = {"key": "hush-k", "secret": "hush-s", "token": "hush-t", "endpoint_url": "http://e:1"}
    assert "hush" not in repr(S3Options.parse(options, {}))
    store = CloudStore("s3://bucket/prefix", options)
    assert "hush" not in repr(store) + store.uri


@pytest.mark.parametrize("uri", ["s3://", "s3:///prefix", "s3://key:hush@bucket/x", "s3://host:9000/bucket"])
def test_a_uri_without_a_plain_bucket_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CloudStore(uri, {"key": "k", "secret": "s"})
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("size_bytes", [1, 16 * MIB, 160_000 * MIB, 160_000 * MIB + 1, 5 << 40])
def test_parts_grow_with_the_object_so_that_ten_thousand_are_enough(size_bytes: int) -> None:
    part = part_bytes_of(size_bytes, 16 * MIB)
    assert -(-size_bytes // part) <= 10_000
    assert part >= 16 * MIB
    assert part == 16 * MIB or (part - MIB) * 10_000 < size_bytes
